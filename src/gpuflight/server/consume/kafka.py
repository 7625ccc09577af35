"""The Kafka client: confluent-kafka behind ``client.Client``; nothing of it is imported before one is made."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gpuflight.errors import MissingExtra
from gpuflight.server.consume.client import ClientError, Listener, Record
from gpuflight.subscribers.kafka_errors import Reasons
from gpuflight.subscribers.kafka_settings import KafkaConnection, librdkafka_config, secrets_of

if TYPE_CHECKING:
    from confluent_kafka import Consumer, TopicPartition

log = logging.getLogger(__name__)

OURS = frozenset(
    (
        "enable.auto.offset.store", "partition.assignment.strategy", "group.protocol", "enable.partition.eof",
        "topic.blacklist", "on_commit", "plugin.library.paths",
    )
)  # fmt: skip
"""Properties of the client that are not for settings, beside those of ``KafkaConnection``: that nothing is lost depends
on them, or they would run code of others."""

_DEFAULTS: dict[str, Any] = {
    # What the client may hold beside what we count ourselves, of all partitions together.
    "queued.max.messages.kbytes": 16 * 1024,
    "fetch.max.bytes": 16 * 1024 * 1024,
    "fetch.wait.max.ms": 500,
    "socket.keepalive.enable": True,
    "reconnect.backoff.max.ms": 5_000,
    "allow.auto.create.topics": False,
    "log_level": 0,  # what goes wrong is told by ``poll``, once
}
_ASK_TIMEOUT_S = 1.0
_COMMIT_TIMEOUT_S = 5.0


def require() -> None:
    """Raise MissingExtra if there is no Kafka client."""
    if find_spec("confluent_kafka") is None:
        raise MissingExtra("confluent-kafka", "kafka", "reading rounds from Kafka")


class KafkaClient:
    """One member of a consumer group over one topic."""

    def __init__(self, connection: KafkaConnection, group: str) -> None:
        require()
        self.topic = connection.topic
        self._reasons = Reasons(secrets_of(connection))
        self._config = {
            **_DEFAULTS,
            **librdkafka_config(connection),
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "earliest",
            # Only what moves stops; the rest is read on during a rebalance.
            "partition.assignment.strategy": "cooperative-sticky",
            "error_cb": self._on_error,
            "on_commit": self._on_commit,
            "logger": log,
        }
        self._consumer: Consumer | None = None
        self._closing: Consumer | None = None
        self._listener: Listener | None = None
        self._error: ClientError | None = None

    def start(self, listener: Listener) -> None:
        """Join the group; the brokers are looked for in the background."""
        from confluent_kafka import Consumer, KafkaException

        self._listener = listener
        try:
            self._consumer = consumer = Consumer(self._config)
            consumer.subscribe(
                [self.topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
            )
        except KafkaException as error:
            raise ClientError(self._text(error), fatal=True) from None

    def poll(self, timeout_s: float) -> Record | None:
        """The next message."""
        message = self._made().poll(timeout_s)
        error, self._error = self._error, None
        if message is None:
            if error is not None:
                raise error
            return None
        problem, partition, offset = message.error(), message.partition(), message.offset()
        if problem is not None:
            raise ClientError(self._text(problem), fatal=problem.fatal())
        if partition is None or offset is None:
            return None
        self._reasons.clear()
        return Record(partition, offset, _bytes(message.key()), _headers(message), _bytes(message.value()))

    def pause(self, partitions: Iterable[int]) -> None:
        """Give none of these for now."""
        self._made().pause(self._parts(partitions))

    def resume(self, partitions: Iterable[int]) -> None:
        """Give them again."""
        self._made().resume(self._parts(partitions))

    def commit(self, offsets: Mapping[int, int], wait: bool) -> None:
        """Commit; with ``wait`` until it is answered."""
        from confluent_kafka import KafkaException

        parts = [self._part(partition, offset) for partition, offset in offsets.items()]
        try:
            if not wait:
                self._made().commit(offsets=parts, asynchronous=True)
                return
            done = self._made().commit(offsets=parts, asynchronous=False)
        except KafkaException as error:
            self._told().on_commit(dict(offsets), self._text(error))
            return
        self._on_commit(None, done or [])

    def high(self, partition: int, fresh: bool) -> int | None:
        """The offset after the last message."""
        found = self._watermarks(partition, fresh)
        return found[1] if found is not None and found[1] >= 0 else None

    def beginning(self, partition: int) -> int | None:
        """Where the group goes on."""
        from confluent_kafka import KafkaException

        try:
            [committed] = self._made().committed(self._parts([partition]), timeout=_ASK_TIMEOUT_S)
        except KafkaException as error:
            raise ClientError(self._text(error)) from None
        if committed.error is None and committed.offset >= 0:
            offset: int = committed.offset
            return offset
        found = self._watermarks(partition, fresh=True)
        return found[0] if found is not None and found[0] >= 0 else None

    def close(self) -> None:
        """Leave the group: what is ours is revoked first."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            self._closing = consumer  # the listener commits meanwhile
            try:
                consumer.close()
            finally:
                self._closing = None

    def _watermarks(self, partition: int, fresh: bool) -> tuple[int, int] | None:
        from confluent_kafka import KafkaException

        part, consumer = self._part(partition), self._made()
        try:
            found: tuple[int, int] | None = None if fresh else consumer.get_watermark_offsets(part, cached=True)
            if found is None or found[1] < 0:  # nothing was fetched yet
                found = consumer.get_watermark_offsets(part, timeout=_ASK_TIMEOUT_S)
        except KafkaException as error:
            raise ClientError(self._text(error)) from None
        return found

    def _on_assign(self, consumer: Consumer, parts: list[TopicPartition]) -> None:
        consumer.incremental_assign(parts)  # first, so that the listener can pause them
        self._told().on_assign([part.partition for part in parts])

    def _on_revoke(self, consumer: Consumer, parts: list[TopicPartition]) -> None:
        self._told().on_revoke([part.partition for part in parts])
        consumer.incremental_unassign(parts)

    def _on_lost(self, consumer: Consumer, parts: list[TopicPartition]) -> None:
        self._told().on_lost([part.partition for part in parts])
        consumer.incremental_unassign(parts)

    def _on_commit(self, error: Any, parts: list[TopicPartition]) -> None:
        if error is not None:
            self._told().on_commit({part.partition: part.offset for part in parts}, self._text(error))
            return
        good = {part.partition: part.offset for part in parts if part.error is None}
        if good:
            self._reasons.clear()
            self._told().on_commit(good, "")
        for part in parts:
            if part.error is not None:
                self._told().on_commit({part.partition: part.offset}, self._text(part.error))

    def _text(self, error: Any) -> str:
        """What a KafkaError says, in one line that is the same for the same error, without secrets."""
        inner = error.args[0] if isinstance(error, BaseException) and error.args else error
        text = inner.str() if hasattr(inner, "str") else str(inner)
        return self._reasons.clean(text) or repr(inner)

    def _on_error(self, error: Any) -> None:
        self._reasons.note(error)
        self._error = ClientError(self._reasons.text, fatal=error.fatal())

    def _made(self) -> Consumer:
        consumer = self._consumer or self._closing
        if consumer is None:
            raise ClientError("not connected", fatal=True)
        return consumer

    def _told(self) -> Listener:
        assert self._listener is not None  # noqa: S101 - callbacks come after ``start``
        return self._listener

    def _parts(self, partitions: Iterable[int]) -> list[TopicPartition]:
        return [self._part(partition) for partition in partitions]

    def _part(self, partition: int, offset: int | None = None) -> TopicPartition:
        from confluent_kafka import TopicPartition

        return (
            TopicPartition(self.topic, partition) if offset is None else TopicPartition(self.topic, partition, offset)
        )


def _headers(message: Any) -> Any:
    try:
        return message.headers()
    except UnicodeDecodeError:  # a name that is no text: not of ours
        return None


def _bytes(value: Any) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
