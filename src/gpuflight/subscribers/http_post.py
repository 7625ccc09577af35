"""The subscriber that posts rounds to a URL."""

from __future__ import annotations

import email.utils
import hashlib
import hmac
import ssl
import time
from typing import Any, ClassVar

from msgspec.structs import replace
from pydantic import Field, SecretStr, field_validator

from gpuflight.errors import DeliveryError, MissingExtra
from gpuflight.rounds import Round
from gpuflight.subscribers.base import Outside, PackedSettings, PackedSubscriber, Parcel, parcel
from gpuflight.subscribers.encoding import Content, Encoding, compress, compressed
from gpuflight.subscribers.http_client import Answer, Client
from gpuflight.subscribers.netguard import ANYTHING, Refused, split_url

_TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_OURS = frozenset(
    (
        "host", "content-length", "transfer-encoding", "content-type", "content-encoding", "connection",
        "idempotency-key", "gpuflight-signature", "gpuflight-round", "gpuflight-base-round", "gpuflight-trial",
    )
)  # fmt: skip


class HttpPostSettings(PackedSettings):
    """Settings of the HTTP POST subscriber."""

    url: str = Field(min_length=1, max_length=2048, description="where to post, http:// or https://; never redirected")
    content: Content = Field(
        default="graph", description="the whole round, or what changed, with a whole round first and after a gap"
    )
    compression: Encoding = Field(default="gzip", description="content coding of the body")
    headers: dict[str, SecretStr] = Field(
        default_factory=dict, description="further headers, such as Authorization; shown masked"
    )
    secret: SecretStr | None = Field(
        default=None,
        description="key of the header Gpuflight-Signature: sha256= and the HMAC-SHA256 (hex) of the value of"
        " Idempotency-Key, a newline and the body as sent; not signed when null",
    )
    tls_ca_file: str | None = Field(
        default=None, min_length=1, description="path of PEM certificates to trust instead of the system's"
    )

    @field_validator("url")
    @classmethod
    def _is_a_url(cls, value: str) -> str:
        try:
            split_url(value)
        except Refused as error:
            raise ValueError(str(error)) from None
        return value

    @field_validator("headers")
    @classmethod
    def _are_headers(cls, value: dict[str, SecretStr]) -> dict[str, SecretStr]:
        for name, secret in value.items():
            if not name or not set(name) <= _TOKEN:
                raise ValueError(f"{name!r} is not the name of a header")
            if name.lower() in _OURS:
                raise ValueError(f"the header {name} is set by gpuflight")
            text = secret.get_secret_value()
            if not text.isascii() or any((ord(char) < 32 and char != "\t") or ord(char) == 127 for char in text):
                raise ValueError(f"the value of the header {name} is not printable ASCII")
        return value


class HttpPost(PackedSubscriber):
    """Posts rounds to a URL."""

    stability = "stable"
    settings_class: ClassVar[type[Any] | None] = HttpPostSettings
    content_type: ClassVar[str] = "application/json"

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._client: Client | None = None

    def outside(self) -> Outside:
        files = (self.settings.tls_ca_file, self.settings.spool_folder and f"{self.settings.spool_folder}/spool")
        return Outside(paths=tuple(path for path in files if path), urls=(self.settings.url,))

    def start(self) -> None:
        target = split_url(self.settings.url)
        context: ssl.SSLContext | None = None
        if target.scheme == "https":
            try:
                context = ssl.create_default_context(cafile=self.settings.tls_ca_file)
            except (OSError, ssl.SSLError) as error:
                raise DeliveryError(f"{self.settings.tls_ca_file}: {error}", retryable=False) from error
        try:
            self._client = Client(target, self.rules or ANYTHING, context)
        except ImportError as error:
            missing = MissingExtra(error.name or "httpcore", "server", "http_post")
            raise DeliveryError(str(missing), retryable=False) from error

    def pack(self, completed: Round, after: int | None) -> Parcel:
        base = after if self.settings.content == "diff" and after == completed.number - 1 else None
        content: Content = "graph" if base is None else "diff"
        return parcel(completed, compressed(completed, content, self.settings.compression), base)

    def send(self, packed: Parcel) -> None:
        self._post(packed)

    def send_body(self, packed: Parcel, body: bytes, part: str) -> None:
        """Post one part of a parcel that holds several, compressed as the settings say."""
        data = compress(body, self.settings.compression)
        self._post(replace(packed, data=data, key=f"{packed.key}-{part}"))

    def trial(self, completed: Round) -> None:
        """Posts the round with the header ``Gpuflight-Trial: true``."""
        self._post(self.pack(completed, None), (b"Gpuflight-Trial", b"true"))

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _post(self, packed: Parcel, *more: tuple[bytes, bytes]) -> None:
        import httpcore

        if self._client is None:
            raise DeliveryError("not started", retryable=False)
        url = self.settings.url
        try:
            answer = self._client.post(
                [*self._headers(packed), *more], packed.data, float(self.settings.deliver_deadline_s)
            )
        except Refused as error:
            raise DeliveryError(str(error), retryable=False) from error
        except (httpcore.TimeoutException, TimeoutError) as error:
            text = f"{url}: no answer within {self.settings.deliver_deadline_s:g} s"
            raise DeliveryError(text, retryable=True) from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.ProxyError, OSError) as error:
            # A certificate may be renewed, a name resolve again: all of it may pass.
            raise DeliveryError(f"{url}: {error or type(error).__name__}", retryable=True) from error
        judge(url, answer)

    def _headers(self, packed: Parcel) -> list[tuple[bytes, bytes]]:
        target = split_url(self.settings.url)
        default_port = 443 if target.scheme == "https" else 80
        host = f"[{target.host}]" if ":" in target.host else target.host
        headers = {
            "Host": host if target.port == default_port else f"{host}:{target.port}",
            "User-Agent": "gpuflight",
            "Content-Type": self.content_type,
            "Content-Length": str(len(packed.data)),
            "Idempotency-Key": packed.key,
            "Gpuflight-Round": str(packed.number),
        }
        if packed.base is not None:
            headers["Gpuflight-Base-Round"] = str(packed.base)
        if self.settings.compression != "none":
            headers["Content-Encoding"] = self.settings.compression
        if self.settings.secret is not None:
            headers["Gpuflight-Signature"] = signature(self.settings.secret.get_secret_value(), packed.key, packed.data)
        own = {name.lower() for name in self.settings.headers}
        lines = [(name, value) for name, value in headers.items() if name.lower() not in own]
        lines += [(name, value.get_secret_value()) for name, value in self.settings.headers.items()]
        return [(name.encode(), value.encode()) for name, value in lines]


def signature(secret: str, key: str, body: bytes) -> str:
    """``sha256=`` and the HMAC-SHA256 in hex of key, newline and body (RFC 2104)."""
    return "sha256=" + hmac.new(secret.encode(), key.encode() + b"\n" + body, hashlib.sha256).hexdigest()


def judge(url: str, answer: Answer) -> None:
    """Raises DeliveryError unless the status says that the round has arrived.

    Never again: 3xx (a redirect could lead anywhere) and 4xx, other than 408 (timeout) and 429 (too many), which
    pass as 5xx do. A 500 is blamed on the round; the other 5xx speak of the receiver.
    """
    status = answer.status
    if 200 <= status < 300:
        return
    body = answer.body if not answer.headers.get("content-encoding") else b""
    words = " ".join(
        "".join(char if char.isprintable() else " " for char in body[:200].decode(errors="replace")).split()
    )
    text = f"{url}: status {status}" + (f": {words}" if words else "")
    if 300 <= status < 400:
        text = f"{url}: status {status}: redirects are not followed"
    retryable = status in (408, 429) or status >= 500
    raise DeliveryError(
        text,
        retryable=retryable,
        retry_after_s=retry_after_s(answer.headers.get("retry-after", "")) if retryable else None,
        blames_item=status == 500,
    )


def retry_after_s(value: str) -> float | None:
    """The header Retry-After, seconds or a date (RFC 9110 §10.2.3), as seconds from now; None if it says nothing."""
    text = value.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        when = email.utils.parsedate_to_datetime(text)
        return max(0.0, when.timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
