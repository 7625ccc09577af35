"""Messages in, rounds out, and the offsets that may be committed: those before everything that is not in the store.

A consumer that dies loses nothing: whoever reads on from the committed offset sees every part of each round that was
not written.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from gpuflight.subscribers.kafka_wire import Assembler, Headers, RoundMessage


class Job(Struct, frozen=True, kw_only=True):
    """A round to be written. ``term`` numbers the time that its partition was ours without a break."""

    serial: int
    partition: int
    term: int
    message: RoundMessage

    @property
    def size_bytes(self) -> int:
        """What it holds in memory, about."""
        return len(self.message.data)


class _Partition(Struct):
    term: int
    closing: bool = False
    position: int | None = None  # the next offset to come
    pending: dict[int, int] = field(default_factory=dict)  # serial of a job → offset to read it again from


class Intake:
    """The partitions that are ours. Of one thread, except ``is_current``."""

    def __init__(self, assembler: Assembler) -> None:
        self.assembler = assembler
        self._partitions: dict[int, _Partition] = {}
        self._terms = 0
        self._serial = 0

    @property
    def partitions(self) -> list[int]:
        """Those that are ours, in order."""
        return sorted(self._partitions)

    def is_current(self, job: Job) -> bool:
        """Whether a job is still ours to write: its partition has been ours ever since it was read, and stays so."""
        held = self._partitions.get(job.partition)
        return held is not None and held.term == job.term and not held.closing

    def assign(self, partitions: Iterable[int]) -> None:
        """These are ours from now on."""
        for partition in partitions:
            self.forget(partition)
            self._terms += 1
            self._partitions[partition] = _Partition(self._terms)

    def close(self, partitions: Iterable[int]) -> None:
        """These are about to be another's: what is under way may still be ``done``, nothing more is begun."""
        for partition in partitions:
            if partition in self._partitions:
                self._partitions[partition].closing = True

    def position(self, partition: int) -> int | None:
        """The next offset to come; None before the first message."""
        held = self._partitions.get(partition)
        return None if held is None else held.position

    def forget(self, partition: int) -> None:
        """It is ours no longer: parts and pending rounds of it are another's."""
        self._partitions.pop(partition, None)
        self.assembler.forget(partition)

    def take(
        self, partition: int, offset: int, key: bytes | None, headers: Headers | None, value: bytes | None
    ) -> Job | None:
        """One message; the round that is complete with it. What cannot be read is counted by the assembler and passed
        over. Messages of partitions that are not ours are left to whom they belong."""
        held = self._partitions.get(partition)
        if held is None:
            return None
        held.position = offset + 1  # may lie before the last one, if the topic was made anew
        start = self.assembler.held_back(partition)
        message = self.assembler.add(key, headers, value, partition=partition, offset=offset)
        if message is None:
            return None
        # The round's own first part, or that of one before it: not before both are done may more be committed.
        start = offset if start is None else min(start, offset)
        self._serial += 1
        held.pending[self._serial] = start
        return Job(serial=self._serial, partition=partition, term=held.term, message=message)

    def skip(self, partition: int, offset: int) -> None:
        """Pass over a message without a look into it."""
        held = self._partitions.get(partition)
        if held is not None:
            held.position = offset + 1

    def done(self, job: Job) -> bool:
        """A round is in the store, or need not be. False if its partition is no longer ours."""
        held = self._partitions.get(job.partition)
        if held is None or held.term != job.term:
            return False
        held.pending.pop(job.serial, None)
        return True

    def committable(self, partition: int) -> int | None:
        """The offset from which the group may read on: all before it is done. None before the first message."""
        held = self._partitions.get(partition)
        if held is None or held.position is None:
            return None
        bounds = [held.position, *held.pending.values()]
        unfinished = self.assembler.held_back(partition)
        if unfinished is not None:
            bounds.append(unfinished)
        return min(bounds)
