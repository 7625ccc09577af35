"""The section ``events`` of the settings: GPU sessions that agents send, how long they stay, how much is taken."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from gpuflight.server.consume.kafka import OURS
from gpuflight.sources.mongo_client import split_uri
from gpuflight.subscribers.kafka_settings import KafkaConnection, Value

MIB = 1024 * 1024


class EventRetention(BaseModel):
    """How long events are kept."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    max_age_days: float = Field(
        default=30.0,
        ge=0,
        le=36_500,
        description="sessions of which nothing arrived for so long are deleted (days); 0: never",
    )
    max_bytes: int = Field(
        default=0, ge=0, description="records of at most this size are kept (bytes), the longest idle go; 0: no limit"
    )


class EventSummaries(BaseModel):
    """Sessions and aggregates of their kernels in MongoDB, for a fleet (docs/events.md)."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    uri: SecretStr | None = Field(
        default=None, description="connection string of MongoDB for summaries of sessions, shown masked; null: none"
    )
    database: str = Field(default="gpuflight", pattern="^[A-Za-z0-9_-]{1,38}$", description="name of the database")
    interval_s: float = Field(default=60.0, gt=0, le=86_400, description="time between two looks at what changed (s)")
    timeout_s: float = Field(default=30.0, gt=0, le=3600, description="longest time for one call of the database (s)")
    tls_ca_file: str | None = Field(
        default=None, min_length=1, description="path of PEM certificates to trust; turns TLS on"
    )
    tls_certificate_key_file: str | None = Field(
        default=None, min_length=1, description="path of our own certificate with its key (PEM); turns TLS on"
    )

    @field_validator("uri")
    @classmethod
    def _is_a_connection_string(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            split_uri(value.get_secret_value())
        return value


class EventsKafka(KafkaConnection):
    """Topics that agents publish events to, one per channel."""

    topic: str = Field(default="gpu-trace", description="beginning of the topics' names: gpu-trace-device and so on")
    channels: list[Literal["device", "scope", "system", "sass"]] = Field(
        default=["device", "scope", "system", "sass"], description="channels whose topics are read"
    )
    plain: bool = Field(
        default=False, description="also read the topic of just that name, which the original's agent writes to"
    )
    group: str = Field(
        default="gpuflight-events",
        min_length=1,
        max_length=255,
        description="consumer group, which shares the partitions",
    )

    @field_validator("client")
    @classmethod
    def _are_not_ours(cls, value: dict[str, Value]) -> dict[str, Value]:
        for name in value:
            if name in OURS:
                raise ValueError(f"{name} is set by gpuflight")
        return value


class EventsSettings(BaseModel):
    """GPU sessions that agents send (docs/events.md). Needs the extra ``events``, else the server runs without."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    enabled: bool = Field(default=True, description="take in events of GPU sessions and answer questions about them")
    folder: str | None = Field(
        default=None, min_length=1, description="folder of the store; `events` in the folder for state when null"
    )
    store: Literal["duckdb", "parquet"] = Field(
        default="duckdb",
        description="`duckdb`: one database of this server; `parquet`: files in a folder that servers may share",
    )
    kafka: EventsKafka | None = Field(default=None, description="topics to take events from as well; none when null")
    retention: EventRetention = Field(default_factory=EventRetention, description="how long events are kept")
    mongodb: EventSummaries = Field(default_factory=EventSummaries, description="summaries of sessions in MongoDB")
    retention_interval_s: float = Field(
        default=600.0, gt=0, le=86_400, description="time between two looks at what is to be deleted (s)"
    )
    max_body_bytes: int = Field(default=32 * MIB, ge=1024, description="body of one request with events (bytes)")
    max_block_bytes: int = Field(
        default=128 * MIB, ge=1024, description="the same, decompressed (bytes); beyond, it is refused"
    )
    max_line_bytes: int = Field(
        default=64 * MIB, ge=MIB, description="longest line that is read (bytes); a longer one is left out and told"
    )
    max_waiting_bytes: int = Field(
        default=128 * MIB,
        ge=1024,
        description="bodies that are being taken in (bytes); beyond, senders are told to wait (429)",
    )
    max_waiting_requests: int = Field(default=256, ge=1, description="requests with events at a time; beyond, 429")
    workers_count: int = Field(default=2, ge=1, le=64, description="threads that decode events")
    queries_count: int = Field(default=4, ge=1, le=64, description="questions that are worked on at a time")
    max_sessions_under_way: int = Field(
        default=200, ge=1, description="sessions whose decoding state is kept in memory; the longest idle go"
    )
    session_idle_s: float = Field(
        default=600.0, gt=0, description="decoding state of a session is forgotten when nothing came for so long (s)"
    )
