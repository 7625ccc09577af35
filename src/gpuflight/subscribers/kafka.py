"""The subscriber that publishes rounds to a Kafka topic. What the messages look like: ``kafka_wire``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from gpuflight.errors import DeliveryError
from gpuflight.rounds import Round
from gpuflight.subscribers.base import Outside, PackedSettings, PackedSubscriber, Parcel, parcel
from gpuflight.subscribers.encoding import Content, Encoding, compressed
from gpuflight.subscribers.kafka_client import MESSAGE_BYTES_MIN, KafkaClient, MessageTooLarge
from gpuflight.subscribers.kafka_settings import (
    KafkaConnection,
    address_of,
    beyond_reach,
    broker_target,
    files_of,
)
from gpuflight.subscribers.kafka_wire import Message, cut
from gpuflight.subscribers.netguard import ANYTHING, Refused

_MAGIC: tuple[tuple[bytes, Encoding], ...] = ((b"\x28\xb5\x2f\xfd", "zstd"), (b"\x1f\x8b", "gzip"))


class KafkaSettings(KafkaConnection, PackedSettings):
    """Settings of the Kafka subscriber."""

    namespace: str | None = Field(
        default=None,
        min_length=1,
        max_length=253,
        description="key of the messages: all of one key are in order; null: the host name",
    )
    content: Content = Field(
        default="graph",
        description="the whole round, or what changed, with a whole round first, after a gap and every"
        " `full_every_rounds`",
    )
    full_every_rounds: int = Field(
        default=60, ge=1, description="diff: rounds from one whole round to the next, for readers that come later"
    )
    compression: Encoding = Field(default="zstd", description="content coding of a round, before it is cut into parts")
    message_compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = Field(
        default="none", description="compression of the messages by Kafka; of use with `compression` none"
    )
    max_message_bytes: int | None = Field(
        default=None,
        ge=MESSAGE_BYTES_MIN,
        le=1_000_000_000,
        description="largest message (bytes); null: what the topic takes if the brokers tell, at most 1000000",
    )


class Kafka(PackedSubscriber):
    """Publishes rounds to a Kafka topic."""

    settings_class = KafkaSettings
    batch_items = 1000

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._client: KafkaClient | None = None

    def outside(self) -> Outside:
        """Raises Refused for settings that reach further than can be checked."""
        unknown = beyond_reach(self.settings)
        if unknown:
            raise Refused(f"{', '.join(unknown)}: may be set in the configuration only")
        spool = (f"{self.settings.spool_folder}/spool",) if self.settings.spool_folder else ()
        urls = tuple(f"kafka://{address_of(broker_target(broker))}" for broker in self.settings.brokers)
        return Outside(paths=(*files_of(self.settings), *spool), urls=urls)

    def start(self) -> None:
        client = KafkaClient(
            self.settings,
            self.rules or ANYTHING,
            deadline_s=float(self.settings.deliver_deadline_s),
            compression=self.settings.message_compression,
            fixed_limit_bytes=self.settings.max_message_bytes,
        )
        client.open()
        self._client = client

    def pack(self, completed: Round, after: int | None) -> Parcel:
        follows = after is not None and after == completed.number - 1
        differs = (
            self.settings.content == "diff" and follows and completed.number % self.settings.full_every_rounds != 0
        )
        content: Content = "diff" if differs else "graph"
        data = compressed(completed, content, self.settings.compression)
        return parcel(completed, data, after if differs else None)

    def send(self, packed: Parcel) -> None:
        """Returns when the brokers have acknowledged every part of the round, so that there is nothing to flush."""
        self._send([packed])

    def send_batch(self, batch: list[Parcel]) -> int:
        return self._send(batch)

    def trial(self, completed: Round) -> None:
        """Sends the round with the header ``gpuflight-trial``, which readers pass over."""
        self._send([self.pack(completed, None)], trial=True)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _send(self, batch: list[Parcel], *, trial: bool = False) -> int:
        client = self._client
        if client is None:
            raise DeliveryError("not started", retryable=False)
        deadline_s = time.monotonic() + float(self.settings.deliver_deadline_s)
        while True:
            rounds = self._cut_all(batch, client.limit_bytes, trial)
            try:
                return client.deliver(rounds, deadline_s - time.monotonic())
            except MessageTooLarge:
                # The topic takes less than it did, or than anyone told: smaller parts may pass.
                if not client.shrink() or time.monotonic() >= deadline_s:
                    raise

    def _cut_all(self, batch: list[Parcel], limit_bytes: int, trial: bool) -> Iterator[list[Message]]:
        yield self._cut(batch[0], limit_bytes, trial)
        for packed in batch[1:]:
            try:
                messages = self._cut(packed, limit_bytes, trial)
            except DeliveryError:
                return  # told when it is the first
            yield messages

    def _cut(self, packed: Parcel, limit_bytes: int, trial: bool) -> list[Message]:
        # What waited on disk may be of other settings: the bytes tell their coding themselves, JSON begins with {.
        encoding: Encoding = next((name for magic, name in _MAGIC if packed.data.startswith(magic)), "none")
        try:
            return cut(
                packed.data,
                namespace=self.settings.namespace or os.uname().nodename or "host",
                instance=packed.key.rpartition("-")[0],
                number=packed.number,
                time_ns=packed.time_ns,
                base=packed.base,
                encoding=encoding,
                max_message_bytes=limit_bytes,
                trial=trial,
            )
        except ValueError as error:
            raise DeliveryError(f"kafka: {error}", retryable=False) from error
