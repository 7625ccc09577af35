"""The subscriber that publishes rounds to a Kafka topic. What the messages look like: ``kafka_wire``."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
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
from gpuflight.subscribers.kafka_wire import Envelope, Message, cut, envelope
from gpuflight.subscribers.netguard import ANYTHING, Refused

_ZSTD, _GZIP = b"\x28\xb5\x2f\xfd", b"\x1f\x8b"
"""How bytes of either coding begin."""


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
    window_items = 1000

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._client: KafkaClient | None = None
        self._namespace: str = self.settings.namespace or os.uname().nodename or "host"
        self._under_way: deque[Parcel] = deque()
        self._kind = ("", b"", True, 0, False)
        self._around = self._envelope(*self._kind)

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
        self._send(packed)

    def begin(self, batch: list[Parcel]) -> int:
        client = self._started()
        begun = len(batch)
        if client.under_way == len(self._under_way):  # else those before them have to be begun again first
            begun = client.begin(self._cut_all(batch, client.limit_bytes), self._deadline_s)
        self._under_way.extend(batch[:begun])
        return begun

    def settle(self, wait_s: float) -> int:
        client = self._started()
        if self._under_way and not client.under_way:
            client.begin(self._cut_all(list(self._under_way), client.limit_bytes), self._deadline_s)
        try:
            arrived = client.settle(wait_s)
        except MessageTooLarge:
            # The topic takes less than it did, or than anyone told: smaller parts may pass.
            client.recall()
            if not client.shrink():
                raise
            return 0
        for _ in range(arrived):
            self._under_way.popleft()
        return arrived

    def recall(self) -> None:
        self._under_way.clear()
        if self._client is not None:
            self._client.recall()

    def trial(self, completed: Round) -> None:
        """Sends the round with the header ``gpuflight-trial``, which readers pass over."""
        self._send(self.pack(completed, None), trial=True)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    @property
    def _deadline_s(self) -> float:
        return float(self.settings.deliver_deadline_s)

    def _started(self) -> KafkaClient:
        if self._client is None:
            raise DeliveryError("not started", retryable=False)
        return self._client

    def _send(self, packed: Parcel, *, trial: bool = False) -> None:
        client = self._started()
        deadline_s = time.monotonic() + self._deadline_s
        while True:
            try:
                client.deliver([self._cut(packed, client.limit_bytes, trial=trial)], deadline_s - time.monotonic())
            except MessageTooLarge:
                # As in settle.
                if not client.shrink() or time.monotonic() >= deadline_s:
                    raise
            else:
                return

    def _cut_all(self, batch: list[Parcel], limit_bytes: int) -> Iterable[list[Message]]:
        try:
            return [self._cut(packed, limit_bytes) for packed in batch]
        except DeliveryError:
            return self._cut_some(batch, limit_bytes)

    def _cut_some(self, batch: list[Parcel], limit_bytes: int) -> Iterator[list[Message]]:
        """Up to the first that cannot be cut, which is told when it is the first."""
        yield self._cut(batch[0], limit_bytes)
        for packed in batch[1:]:
            try:
                messages = self._cut(packed, limit_bytes)
            except DeliveryError:
                return
            yield messages

    def _cut(self, packed: Parcel, limit_bytes: int, *, trial: bool = False) -> list[Message]:
        key, data, base = packed.key, packed.data, packed.base
        kind = (key[: key.rfind("-")], data[:4], base is None, limit_bytes, trial)
        if kind != self._kind:  # rarely: the rounds of one run look alike
            self._kind, self._around = kind, self._envelope(*kind)
        try:
            return cut(data, self._around, packed.number, packed.time_ns, base)
        except ValueError as error:
            raise DeliveryError(f"kafka: {error}", retryable=False) from error

    def _envelope(self, instance: str, start: bytes, whole: bool, limit_bytes: int, trial: bool) -> Envelope:
        # What waited on disk may be of other settings: the bytes tell their coding themselves, JSON begins with {.
        encoding: Encoding = "zstd" if start == _ZSTD else "gzip" if start.startswith(_GZIP) else "none"
        content: Content = "graph" if whole else "diff"
        return envelope(self._namespace, instance, content, encoding, limit_bytes, trial=trial)
