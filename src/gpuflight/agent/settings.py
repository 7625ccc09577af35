"""What the agent is told: the keys of gpufl-agent's JSON file, and those that only this one has."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from gpuflight.subscribers.kafka_settings import Mechanism, Protocol, broker_target
from gpuflight.subscribers.netguard import Refused, split_url

Channel = Literal["device", "scope", "system", "sass"]
_PREFIX = re.compile(r"[A-Za-z0-9._-]{1,240}")
_API = re.compile(r"/api/[^/]+/events$")


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Source(_Block):
    """A folder of sessions."""

    folder: str = Field(default=".", min_length=1, description="folder with the logs or with session folders")
    logTypes: list[Channel] = Field(
        default=["device", "scope", "system", "sass"], min_length=1, description="channels that are sent"
    )


class Publisher(_Block):
    """Where to. Fields of http: hostUrl to streamMaxBytes; of kafka: bootstrapServers on."""

    type: Literal["http", "kafka"] = Field(description="http or kafka")
    hostUrl: str | None = Field(default=None, description="receiver, https://host; or its whole …/api/v1/events")
    apiVersion: str = Field(default="v1", pattern="^[A-Za-z0-9._-]{1,16}$", description="in the path: /api/v1/")
    authToken: SecretStr | None = Field(default=None, description="bearer token or API key (gpfl_…)")
    authTokenFile: str | None = Field(default=None, description="file with it; read again for every request")
    timeoutSeconds: float = Field(default=10.0, gt=0, le=3600, description="time to connect (s)")
    deadlineSeconds: float = Field(default=60.0, gt=0, le=3600, description="time for a whole request (s)")
    uploadMode: Literal["stream", "legacy"] = Field(default="stream", description="windows, or a request per line")
    live: bool = Field(default=False, description="stream: send lines as they are written, not finished windows")
    streamMaxLines: int = Field(default=5000, ge=1, description="lines in one request, where lines are sent")
    streamMaxBytes: int = Field(default=1_000_000, ge=1, description="their size, uncompressed (bytes)")
    maxBodyBytes: int = Field(
        default=32 << 20, ge=1, description="larger windows are sent as lines, as are those that are answered 413"
    )
    tlsCaFile: str | None = Field(default=None, description="PEM certificates to trust in place of the system's")
    bootstrapServers: str | None = Field(default=None, description="Kafka brokers, host:port separated by commas")
    topicPrefix: str = Field(default="gpu-trace", description="topics are PREFIX-device, PREFIX-scope, …; X-Topic")
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = Field(default="snappy", description="of Kafka")
    lingerMs: int = Field(default=100, ge=0, le=60_000, description="Kafka: wait for more lines (ms)")
    maxMessageBytes: int | None = Field(default=None, ge=1000, description="Kafka: longest line; null asks the broker")
    securityProtocol: Protocol = Field(default="plaintext", description="Kafka: TLS (ssl), SASL, both or neither")
    saslMechanism: Mechanism | None = Field(default=None, description="Kafka: how to log in")
    saslUsername: str | None = Field(default=None, min_length=1, description="Kafka: user")
    saslPassword: SecretStr | None = Field(default=None, description="Kafka: password")
    saslPasswordFile: str | None = Field(default=None, description="Kafka: file with the password")

    @field_validator("hostUrl")
    @classmethod
    def _is_a_receiver(cls, value: str | None) -> str | None:
        if value is None:
            return None
        value = value.strip().rstrip("/").removesuffix("/stream")
        if "://" not in value:
            value = f"https://{value}"
        try:
            target = split_url(value)
        except Refused as error:
            raise ValueError(str(error)) from None
        if "?" in target.path or "#" in value or ("/events" in target.path and not _API.search(target.path)):
            raise ValueError("must be https://host, or its address of events, https://host/api/v1/events")
        return value

    @field_validator("topicPrefix")
    @classmethod
    def _is_a_prefix(cls, value: str) -> str:
        if not _PREFIX.fullmatch(value):
            raise ValueError("must be the beginning of a topic's name: letters, digits, dots, hyphens, underscores")
        return value

    @field_validator("bootstrapServers")
    @classmethod
    def _are_brokers(cls, value: str | None) -> str | None:
        for broker in brokers_of(value):
            broker_target(broker)
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Publisher:
        if self.type == "http" and not self.hostUrl:
            raise ValueError("http needs hostUrl (--host or --url)")
        if self.type == "kafka" and not brokers_of(self.bootstrapServers):
            raise ValueError("kafka needs bootstrapServers (--brokers)")
        if self.live and (self.type != "http" or self.uploadMode != "stream"):
            raise ValueError("live is for http with uploadMode stream; the others always send lines as they come")
        return self

    @property
    def events_path(self) -> str:
        """Path below which events are posted, without a slash at its end."""
        path = split_url(self.hostUrl or "http://localhost").path.rstrip("/")
        return path if _API.search(path) else f"{path}/api/{self.apiVersion}/events"

    @property
    def sends_windows(self) -> bool:
        """Whether finished windows go as files."""
        return self.type == "http" and self.uploadMode == "stream" and not self.live


class Archiver(_Block):
    """Where windows are kept that were delivered."""

    endpoint: str | None = Field(default=None, description="server that speaks S3; null: AWS in the region")
    bucket: str = Field(min_length=3, max_length=255, description="bucket, which has to exist")
    region: str = Field(default="nyc3", min_length=1, description="region")
    accessKey: SecretStr | None = Field(default=None, description="access key; null: as the AWS tools find it")
    accessKeyFile: str | None = Field(default=None, description="file with it")
    secretKey: SecretStr | None = Field(default=None, description="secret key")
    secretKeyFile: str | None = Field(default=None, description="file with it")
    prefix: str = Field(default="raw-events/", max_length=512, description="what every key begins with")
    checksum: Literal["md5", "sha256"] = Field(default="md5", description="what the server checks by")
    deleteAfterUpload: bool = Field(default=False, description="delete a window once delivered and archived")
    timeoutSeconds: float = Field(default=60.0, gt=0, le=3600, description="time for one upload (s)")

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is not None:
            value = value.rstrip("/") if "://" in value else f"https://{value.rstrip('/')}"
            try:
                split_url(value)
            except Refused as error:
                raise ValueError(str(error)) from None
        return value


class AgentFile(_Block):
    """A configuration file of gpufl-agent: ``source`` or ``sources``, ``publisher``, ``archiver``."""

    source: Source | None = None
    sources: list[Source] | None = None
    publisher: Publisher | None = None
    archiver: Archiver | None = None


class AgentSettings(_Block):
    """All of it."""

    sources: list[Source] = Field(min_length=1)
    publisher: Publisher
    archiver: Archiver | None = None
    cursorFile: str | None = None
    stateFolder: str
    exitWhenDrained: bool = False
    exitIfEmpty: bool = False
    ignorePreexisting: bool = False
    pruneFailed: bool = False
    deleteAckedPayloads: bool = False
    senders: int = Field(default=4, ge=1, le=64)
    pollIntervalSeconds: float = Field(default=2.0, gt=0)
    settleSeconds: float = Field(default=4.5, ge=0)
    orphanWaitSeconds: float = Field(default=30.0, ge=0)
    giveUpAfterSeconds: float = Field(default=300.0, ge=0)

    @property
    def drains(self) -> bool:
        """Whether it ends by itself."""
        return self.exitWhenDrained or self.exitIfEmpty


def brokers_of(text: str | None) -> list[str]:
    """A list of brokers taken apart."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]
