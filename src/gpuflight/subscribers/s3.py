"""The subscriber that keeps rounds as objects in an S3 bucket."""

from __future__ import annotations

import logging
import os
import re
import ssl
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from gpuflight.errors import DeliveryError, MissingExtra
from gpuflight.rounds import Round
from gpuflight.subscribers.base import Outside, PackedSettings, PackedSubscriber, Parcel, parcel
from gpuflight.subscribers.encoding import Content, Encoding, compress, compressed
from gpuflight.subscribers.netguard import ANYTHING, Refused, is_address, split_url
from gpuflight.subscribers.s3_client import Access, Checksum, S3Client

log = logging.getLogger(__name__)

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_IN_A_HOST = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_FORMS = {b"\x28\xb5\x2f\xfd": (".zst", "application/zstd"), b"\x1f\x8b": (".gz", "application/gzip")}


class S3Settings(PackedSettings):
    """Settings of the S3 subscriber."""

    bucket: str = Field(min_length=3, max_length=255, description="name of the bucket, which has to exist")
    prefix: str = Field(default="gpuflight", max_length=512, description="what every key begins with; may be empty")
    namespace: str | None = Field(
        default=None, min_length=1, max_length=253, description="second part of every key; null: the host name"
    )
    endpoint_url: str | None = Field(
        default=None,
        min_length=1,
        max_length=2048,
        description="a server that speaks S3, http:// or https://; null: AWS in `region`; never redirected",
    )
    region: str | None = Field(
        default=None, description="region; null: $AWS_REGION, else $AWS_DEFAULT_REGION, else us-east-1"
    )
    addressing: Literal["auto", "path", "virtual"] = Field(
        default="auto", description="the bucket in the path or in the host name; auto: in the host name on AWS only"
    )
    access_key: SecretStr | None = Field(
        default=None,
        description="access key; null: as the AWS tools find it, in the environment and ~/.aws (configuration only)",
    )
    secret_key: SecretStr | None = Field(default=None, description="secret key, with access_key")
    session_token: SecretStr | None = Field(default=None, description="session token of temporary keys")
    instance_credentials: bool = Field(
        default=False, description="without access_key: also ask the cloud for the credentials of this machine or task"
    )
    tls_ca_file: str | None = Field(
        default=None, min_length=1, description="path of PEM certificates to trust instead of the system's"
    )
    content: Content = Field(
        default="graph", description="the whole round, or what changed, with a whole round first and after a gap"
    )
    full_every_rounds: int = Field(
        default=720, ge=1, description="diff: every so many rounds a whole one, from where the archive can be read"
    )
    compression: Encoding = Field(default="zstd", description="compression of the objects")
    checksum: Checksum = Field(
        default="md5",
        description="what the server checks an object by: md5 (every server knows Content-MD5) or sha256",
    )
    storage_class: str | None = Field(
        default=None, pattern="^[A-Z0-9_]{1,64}$", description="storage class; null: the server's default"
    )
    server_side_encryption: Literal["AES256", "aws:kms"] | None = Field(
        default=None, description="encryption by the server; null: the bucket's default"
    )
    kms_key_id: str | None = Field(
        default=None, min_length=1, max_length=2048, description="key of aws:kms; null: the account's default"
    )

    @field_validator("bucket")
    @classmethod
    def _is_a_bucket(cls, value: str) -> str:
        if not _BUCKET.fullmatch(value):
            raise ValueError("must be the name of a bucket: letters, digits, dot, hyphen, underscore")
        return value

    @field_validator("prefix")
    @classmethod
    def _is_a_prefix(cls, value: str) -> str:
        value = value.strip("/")
        if not value.isprintable() or any(part in ("", ".", "..") for part in value.split("/") if value):
            raise ValueError("must be parts between slashes, none of them empty, . or ..")
        return _short(value, 512)

    @field_validator("namespace")
    @classmethod
    def _is_one_part(cls, value: str | None) -> str | None:
        if value is not None and (not value.isprintable() or "/" in value or value in (".", "..")):
            raise ValueError("must be printable, without a slash")
        return None if value is None else _short(value, 253)

    @field_validator("endpoint_url")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                target = split_url(value)
            except Refused as error:
                raise ValueError(str(error)) from None
            if "?" in target.path:
                raise ValueError("must have no query")
        return value

    @field_validator("region")
    @classmethod
    def _is_a_region(cls, value: str | None) -> str | None:
        if value is not None and not _REGION.fullmatch(value):
            raise ValueError("must be the name of a region, such as eu-central-1")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> S3Settings:
        if (self.access_key is None) != (self.secret_key is None):
            raise ValueError("access_key and secret_key go together")
        if self.session_token is not None and self.access_key is None:
            raise ValueError("session_token needs access_key and secret_key")
        if self.kms_key_id is not None and self.server_side_encryption != "aws:kms":
            raise ValueError("kms_key_id needs server_side_encryption aws:kms")
        if self.addressing == "virtual" and not self.fits_in_a_host:
            raise ValueError("addressing virtual needs a host name, and a bucket name that can be part of one")
        return self

    @property
    def fits_in_a_host(self) -> bool:
        """Whether the bucket can be part of the host name."""
        by_name = self.endpoint_url is None or not is_address(split_url(self.endpoint_url).host)
        return by_name and _IN_A_HOST.fullmatch(self.bucket) is not None and len(self.bucket) <= 63


class S3(PackedSubscriber):
    """Keeps rounds as objects in an S3 bucket."""

    settings_class = S3Settings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._client: S3Client | None = None

    def outside(self) -> Outside:
        files = (self.settings.tls_ca_file, self.settings.spool_folder and f"{self.settings.spool_folder}/spool")
        return Outside(paths=tuple(path for path in files if path), urls=(bucket_url(self.settings),))

    def start(self) -> None:
        settings = self.settings
        if self.rules is not None and settings.access_key is None:
            # Else whoever may create a subscriber would act as this host.
            text = "s3: one that is created over REST needs access_key and secret_key: those of this host are not lent"
            raise DeliveryError(text, retryable=False)
        target = split_url(bucket_url(settings))
        context: ssl.SSLContext | None = None
        if target.scheme == "https":
            try:
                context = ssl.create_default_context(cafile=settings.tls_ca_file)
            except (OSError, ssl.SSLError) as error:
                raise DeliveryError(f"{settings.tls_ca_file}: {error}", retryable=False) from error
        access = Access(
            endpoint_url=endpoint_url(settings),
            region=region(settings),
            bucket=settings.bucket,
            path_style=path_style(settings),
            access_key=_plain(settings.access_key),
            secret_key=_plain(settings.secret_key),
            session_token=_plain(settings.session_token),
            instance_credentials=settings.instance_credentials,
            timeout_s=float(settings.deliver_deadline_s),
        )
        try:
            self._client = S3Client(access, target, self.rules or ANYTHING, context)
        except ImportError as error:
            package = "boto3" if (error.name or "").startswith("boto") else error.name or "boto3"
            raise DeliveryError(str(MissingExtra(package, "s3", "s3")), retryable=False) from error

    def pack(self, completed: Round, after: int | None) -> Parcel:
        whole = self.settings.content == "graph" or completed.number % self.settings.full_every_rounds == 0
        base = None if whole or after != completed.number - 1 else after
        encoding = self.settings.compression
        data = compressed(completed, "graph" if base is None else "diff", encoding)
        # A line end of its own frame: objects put one after the other are a stream of rounds.
        return parcel(completed, data + compress(b"\n", encoding), base)

    def send(self, packed: Parcel) -> None:
        self._put(self.key(packed), packed)

    def trial(self, completed: Round) -> None:
        """Stores the round under a key that nobody else has, and deletes it. A delivery needs no right to delete, so
        that a refusal of it is a warning in the log only."""
        packed = self.pack(completed, None)
        key = "/".join(part for part in (*self._root(), f"trial-{os.urandom(12).hex()}{_form(packed.data)[0]}") if part)
        version = self._put(key, packed)
        try:
            self._started().delete(key, version)
        except DeliveryError as error:
            log.warning("%s: the object of the trial, %s, is left behind: %s", self.label, key, error)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def key(self, packed: Parcel) -> str:
        """``PREFIX/NAMESPACE/YYYY/MM/DD/HHMMSS-INSTANCE-ROUND.json.zst`` in UTC, so that keys sort by time; the same
        for every try. A difference is ``.diff.json.zst``."""
        when = datetime.fromtimestamp(packed.time_ns // 1_000_000_000, UTC)
        instance = packed.key.rpartition("-")[0][:12]
        kind = ".json" if packed.base is None else ".diff.json"
        name = f"{when:%H%M%S}-{instance}-{packed.number:010}{kind}{_form(packed.data)[0]}"
        return "/".join(part for part in (*self._root(), f"{when:%Y/%m/%d}", name) if part)

    def _root(self) -> tuple[str, str]:
        namespace = self.settings.namespace or re.sub(r"[^A-Za-z0-9._-]", "-", os.uname().nodename) or "host"
        return self.settings.prefix, namespace

    def _put(self, key: str, packed: Parcel) -> str | None:
        settings = self.settings
        about = {"gpuflight-round": str(packed.number), "gpuflight-instance": packed.key.rpartition("-")[0]}
        if packed.base is not None:
            about["gpuflight-base-round"] = str(packed.base)
        more = {
            "StorageClass": settings.storage_class,
            "ServerSideEncryption": settings.server_side_encryption,
            "SSEKMSKeyId": settings.kms_key_id,
        }
        return self._started().put(
            key,
            packed.data,
            settings.checksum,
            ContentType=_form(packed.data)[1],
            Metadata=about,
            **{name: value for name, value in more.items() if value is not None},
        )

    def _started(self) -> S3Client:
        if self._client is None:
            raise DeliveryError("not started", retryable=False)
        return self._client


def _short(text: str, max_bytes: int) -> str:
    """A whole key may have 1024 bytes of UTF-8. Raises ValueError."""
    if len(text.encode()) > max_bytes:
        raise ValueError(f"must have at most {max_bytes} bytes as UTF-8")
    return text


def region(settings: S3Settings) -> str:
    """The region in force."""
    named = settings.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ""
    return named if _REGION.fullmatch(named) else "us-east-1"


def endpoint_url(settings: S3Settings) -> str:
    """The server, without the bucket."""
    if settings.endpoint_url is not None:
        return settings.endpoint_url
    where = region(settings)
    return f"https://s3.{where}.amazonaws.com{'.cn' if where.startswith('cn-') else ''}"


def path_style(settings: S3Settings) -> bool:
    """Whether the bucket stands in the path. A dot in it does not go with the certificates of AWS."""
    if settings.addressing != "auto":
        return bool(settings.addressing == "path")
    return settings.endpoint_url is not None or not settings.fits_in_a_host or "." in settings.bucket


def bucket_url(settings: S3Settings) -> str:
    """What is called: the server, or the bucket's own host there."""
    endpoint = endpoint_url(settings)
    if path_style(settings):
        return endpoint
    scheme, _, rest = endpoint.partition("://")
    return f"{scheme}://{settings.bucket}.{rest}"


def _form(data: bytes) -> tuple[str, str]:
    """Suffix and media type, told by the bytes: what waited on disk may be of other settings."""
    return next((form for magic, form in _FORMS.items() if data.startswith(magic)), ("", "application/json"))


def _plain(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
