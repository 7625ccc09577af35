"""Requests to one S3 bucket: botocore signs and parses, our own HTTP client sends.

So what holds for every receiver holds here: one deadline over the whole call, the addresses checked as they are
connected to, one host and no other, no redirects, no proxies. Retries are the delivery engine's.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import ssl
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from msgspec import Struct

from gpuflight.errors import DeliveryError
from gpuflight.subscribers.http_client import Answer, Client
from gpuflight.subscribers.netguard import Refused, Rules, Target, split_url

if TYPE_CHECKING:
    from botocore.awsrequest import AWSPreparedRequest, AWSResponse

Checksum = Literal["md5", "sha256"]

_RETRYABLE_CODES = frozenset(
    (
        "BadDigest", "BandwidthLimitExceeded", "IncompleteBody", "InternalError", "OperationAborted", "QuotaExceeded",
        "RequestLimitExceeded", "RequestTimeTooSkewed", "RequestTimeout", "ServiceUnavailable", "SlowDown",
        "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException", "TooManyRequests",
        "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch", "XMinioAdminBucketQuotaExceeded",
    )
)  # fmt: skip
"""Of S3 and of servers that speak it: what may pass by itself or with someone's help, whatever its status."""
_HINTS = {
    "NoSuchBucket": "make the bucket; gpuflight never does",
    "RequestTimeTooSkewed": "set the clock of this host",
    "ExpiredToken": "the credentials have expired",
}
# What asks the host's own metadata service for credentials of the machine.
_INSTANCE_PROVIDERS = ("container-role", "iam-role")


class Access(Struct, frozen=True, kw_only=True):
    """Where a bucket is, and as whom to go there. Without ``access_key`` the credentials are those that botocore
    finds (environment, ``~/.aws``), those of the machine only with ``instance_credentials``."""

    endpoint_url: str
    region: str
    bucket: str
    path_style: bool
    access_key: str | None = None
    secret_key: str | None = None
    session_token: str | None = None
    instance_credentials: bool = False
    timeout_s: float = 30.0


class S3Client:
    """One bucket, used by one thread at a time. Raises ImportError without botocore or httpcore, DeliveryError
    without credentials."""

    def __init__(self, access: Access, target: Target, rules: Rules, context: ssl.SSLContext | None = None) -> None:
        import botocore.exceptions
        import botocore.session
        from botocore.config import Config

        _be_quiet()
        self._access = access
        self._transport = _Transport(target, rules, context)
        try:
            session = botocore.session.Session()
            if access.access_key is None and not access.instance_credentials:
                chain = session.get_component("credential_provider")
                for provider in _INSTANCE_PROVIDERS:
                    chain.remove(provider)
            if access.access_key is None and session.get_credentials() is None:
                text = "no credentials: set access_key and secret_key, or what the AWS tools read"
                raise DeliveryError(f"{access.bucket}: {text}", retryable=False)
            # Checksums of botocore's own choice are sent in a coding that older servers do not know.
            config = Config(
                signature_version="s3v4",
                s3={"addressing_style": "path" if access.path_style else "virtual", "use_accelerate_endpoint": False},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                retries={"total_max_attempts": 1, "mode": "standard"},
                connect_timeout=access.timeout_s,
                read_timeout=access.timeout_s,
                defaults_mode="legacy",
                use_dualstack_endpoint=False,
                use_fips_endpoint=False,
                ignore_configured_endpoint_urls=True,
                user_agent_extra="gpuflight",
            )
            self._s3 = session.create_client(
                "s3",
                region_name=access.region,
                endpoint_url=access.endpoint_url,
                aws_access_key_id=access.access_key,
                aws_secret_access_key=access.secret_key,
                aws_session_token=access.session_token,
                config=config,
            )
        except (botocore.exceptions.BotoCoreError, ValueError) as error:
            self._transport.close()
            raise DeliveryError(self._text(error), retryable=_may_pass(error)) from None
        except BaseException:
            self._transport.close()
            raise
        self._s3.meta.events.register("before-send.s3", self._transport)

    def put(self, key: str, body: bytes, checksum: Checksum, **more: Any) -> str | None:
        """Store an object and make sure that it has arrived as it is; gives the version that it is, None if the bucket
        keeps none. Raises DeliveryError."""
        digest = base64.b64encode(hashlib.new(checksum, body, usedforsecurity=False).digest()).decode()
        field = "ContentMD5" if checksum == "md5" else "ChecksumSHA256"
        more[field] = digest
        done = self._call(self._s3.put_object, Key=key, Body=body, **more)
        where = f"{self._access.endpoint_url}: bucket {self._access.bucket}"
        if not done.get("ETag"):
            raise DeliveryError(f"{where}: the answer has no ETag, so it is not of an S3 server", retryable=True)
        if checksum == "sha256" and done.get("ChecksumSHA256", digest) != digest:
            raise DeliveryError(f"{where}: {key} has arrived damaged (SHA-256)", retryable=True)
        version = done.get("VersionId")
        return None if version in (None, "null") else str(version)

    def delete(self, key: str, version: str | None) -> None:
        """Delete one version of an object. Raises DeliveryError."""
        self._call(self._s3.delete_object, Key=key, **({"VersionId": version} if version else {}))

    def close(self) -> None:
        """Close the connection."""
        self._transport.close()
        self._s3.close()

    def _call(self, operation: Callable[..., dict[str, Any]], **arguments: Any) -> dict[str, Any]:
        import httpcore

        self._transport.begin(self._access.timeout_s)
        where = f"{self._access.endpoint_url}: bucket {self._access.bucket}"
        try:
            return operation(Bucket=self._access.bucket, **arguments)
        except Refused as error:
            hint = self._region_hint()
            raise DeliveryError(f"{where}: {hint}" if hint else str(error), retryable=False) from None
        except (httpcore.TimeoutException, TimeoutError):
            raise DeliveryError(f"{where}: no answer within {self._access.timeout_s:g} s", retryable=True) from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.ProxyError, OSError) as error:
            # A certificate may be renewed, a name resolve again: all of it may pass.
            raise DeliveryError(f"{where}: {self._text(error)}", retryable=True) from None
        except Exception as error:  # noqa: BLE001 - botocore raises whatever the answer makes its parsers raise
            self._judge(where, error)

    def _judge(self, where: str, error: Exception) -> NoReturn:
        """What an answer that is no success, or none of S3, means."""
        from botocore.exceptions import BotoCoreError, ClientError

        answer = self._transport.answer
        if isinstance(error, ClientError):
            known = error.response.get("Error", {})
            code, message = str(known.get("Code") or ""), str(known.get("Message") or "")
            hint = self._region_hint() or _HINTS.get(code, "")
            text = ": ".join(part for part in (code, message) if part) + (f" ({hint})" if hint else "")
        elif isinstance(error, BotoCoreError) or answer is not None:
            code, text = "", self._text(error)
        else:
            raise error  # of our own making
        status = answer.status if answer is not None else 0
        retryable = (
            code in _RETRYABLE_CODES
            or status in (408, 429)
            or (status >= 500 and status != 501)
            or (code == "ExpiredToken" and self._access.access_key is None)  # botocore gets new ones
            or _may_pass(error)
        )
        raise DeliveryError(
            f"{where}: status {status}: {self._masked(text)}" if status else f"{where}: {self._masked(text)}",
            retryable=retryable,
            retry_after_s=_retry_after_s(answer) if retryable else None,
            blames_item=status == 500,
        ) from None

    def _region_hint(self) -> str:
        region = self._transport.region
        return f"the bucket is in the region {region}" if region and region != self._access.region else ""

    def _text(self, error: BaseException) -> str:
        return self._masked(str(error) or type(error).__name__)

    def _masked(self, text: str) -> str:
        """On one line, and without secrets: who answers can say anything."""
        for secret in (self._access.secret_key, self._access.session_token, self._access.access_key):
            if secret:
                text = text.replace(secret, "***")
        return " ".join("".join(char if char.isprintable() else " " for char in text).split())[:400]


class _Transport:
    """Answers botocore's requests in place of its own HTTP client (event ``before-send``)."""

    def __init__(self, target: Target, rules: Rules, context: ssl.SSLContext | None) -> None:
        self._target = target
        self._client = Client(target, rules, context)
        self._until_s = 0.0
        self.answer: Answer | None = None
        self.region = ""

    def begin(self, timeout_s: float) -> None:
        """A call begins, which may be several requests."""
        self._until_s = time.monotonic() + timeout_s
        self.answer = None
        self.region = ""

    def __call__(self, request: AWSPreparedRequest, **_: Any) -> AWSResponse:
        from botocore.awsrequest import AWSResponse

        target, ours = split_url(request.url), self._target
        if (target.scheme, target.host, target.port) != (ours.scheme, ours.host, ours.port):
            raise Refused(f"{ours.host}: led on to {target.host}; redirects are not followed")
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        default_port = 443 if target.scheme == "https" else 80
        host = f"[{target.host}]" if ":" in target.host else target.host
        headers = [(b"Host", (host if target.port == default_port else f"{host}:{target.port}").encode())]
        for name, value in request.headers.items():
            if name.lower() not in ("host", "expect"):  # the body is sent at once
                headers.append((name.encode(), value if isinstance(value, bytes) else str(value).encode()))
        body = request.body
        data = b"" if body is None else body.encode() if isinstance(body, str) else body
        if hasattr(data, "read"):
            data = data.read()
        answer = self._client.request(request.method, target.path, headers, bytes(data), left_s)
        self.answer = answer
        self.region = answer.headers.get("x-amz-bucket-region", "") or self.region
        return AWSResponse(request.url, answer.status, answer.headers, _Body(answer.body))

    def close(self) -> None:
        self._client.close()


class _Body:
    """The body of an answer as urllib3 would give it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def stream(self, *_: Any, **__: Any) -> Iterator[bytes]:
        yield self._data


def _may_pass(error: Exception) -> bool:
    """Whether credentials could not be fetched since who gives them does not answer; the bucket itself is not asked
    by botocore's own client."""
    from botocore.exceptions import CredentialRetrievalError, HTTPClientError, MetadataRetrievalError

    return isinstance(error, HTTPClientError | CredentialRetrievalError | MetadataRetrievalError)


def _retry_after_s(answer: Answer | None) -> float | None:
    from gpuflight.subscribers.http_post import retry_after_s

    return retry_after_s(answer.headers.get("retry-after", "")) if answer is not None else None


def _be_quiet() -> None:
    """botocore writes headers, a session token among them, into its debug log."""
    log = logging.getLogger("botocore")
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
