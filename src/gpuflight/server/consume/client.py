"""What the loop needs of a Kafka client: one topic, one group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from msgspec import Struct

from gpuflight.errors import GpuflightError
from gpuflight.subscribers.kafka_wire import Headers


class ClientError(GpuflightError):
    """The topic cannot be read right now. ``fatal``: not by this client ever; another has to be made."""

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


class Record(Struct, frozen=True):
    """One message as it was read."""

    partition: int
    offset: int
    key: bytes | None
    headers: Headers | None
    value: bytes | None


class Listener(Protocol):
    """Told by the client from within ``poll`` and ``close``, in the thread that called it."""

    def on_assign(self, partitions: list[int]) -> None:
        """These are ours too from now on."""

    def on_revoke(self, partitions: list[int]) -> None:
        """These go to another once this returns; what is done can still be committed."""

    def on_lost(self, partitions: list[int]) -> None:
        """These are another's already."""

    def on_commit(self, offsets: dict[int, int], error: str) -> None:
        """What came of a ``commit``; ``error`` is empty if it holds."""


class Client(Protocol):
    """Of one thread."""

    def start(self, listener: Listener) -> None:
        """Join the group. Raises ClientError."""

    def poll(self, timeout_s: float) -> Record | None:
        """The next message. Has to be called often, also while nothing can be taken. Raises ClientError."""

    def pause(self, partitions: Iterable[int]) -> None:
        """Give no messages of these until ``resume``; ``poll`` goes on."""

    def resume(self, partitions: Iterable[int]) -> None:
        """End ``pause``."""

    def commit(self, offsets: Mapping[int, int], wait: bool) -> None:
        """Have the group go on from these offsets; the listener is told what came of it, at once with ``wait``."""

    def high(self, partition: int, fresh: bool) -> int | None:
        """The offset after the last message in the topic, as last seen, or ``fresh`` from the broker, which may wait;
        None if unknown. Raises ClientError."""

    def beginning(self, partition: int) -> int | None:
        """Where the group goes on in a partition: at what it committed, else at the first message. Asks the broker.
        Raises ClientError."""

    def close(self) -> None:
        """Leave the group. May be called twice."""
