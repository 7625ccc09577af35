"""The thread that reads the topic: hands rounds to the writers, commits what they have written, holds back when they
cannot keep up, and lets go of partitions without losing or doubling anything that counts."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from gpuflight.errors import GpuflightError
from gpuflight.graph.namespaces import valid_name
from gpuflight.server.consume.client import Client, ClientError, Record
from gpuflight.server.consume.figures import WAITING_SHOWN, Figures, PartitionFigures
from gpuflight.server.consume.intake import Intake
from gpuflight.server.consume.merge import Writer
from gpuflight.server.consume.writers import Done, Writers
from gpuflight.subscribers.kafka_wire import Assembler
from gpuflight.subscribers.retry import Backoff

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.2
COMMIT_INTERVAL_S = 1.0
FIGURES_INTERVAL_S = 0.5
HIGH_INTERVAL_S = 5.0
SETTLE_S = 5.0
"""How long a partition that is taken from us waits for a write that is under way."""
WAITING_MAX = 10_000


class Limits(Protocol):
    """What of the settings the loop uses."""

    max_queue_bytes: int
    max_queue_rounds: int
    max_unfinished_bytes: int
    unfinished_max_s: float
    max_message_bytes: int
    max_round_bytes: int
    max_held_elements: int
    writers_count: int
    retry_first_s: float
    retry_max_s: float


class Loop:
    """``start``, ``stop``, and ``figures`` at any time from any thread."""

    def __init__(self, make_client: Callable[[], Client], make_writer: Callable[[], Writer], limits: Limits) -> None:
        self._make_client = make_client
        self._limits = limits
        self._assembler = Assembler(
            max_bytes=limits.max_unfinished_bytes,
            max_round_bytes=limits.max_round_bytes,
            max_age_s=limits.unfinished_max_s,
            clock=lambda: self._reading_s,
        )
        self._intake = Intake(self._assembler)
        self._writers = Writers(
            make_writer,
            self._intake.is_current,
            count=limits.writers_count,
            max_elements=limits.max_held_elements,
            retry_first_s=limits.retry_first_s,
            retry_max_s=limits.retry_max_s,
        )
        self._client: Client | None = None
        self._reading_s = 0.0  # time in which parts could come: they do not age while nothing is read
        self._stepped_s = time.monotonic()
        self._figures = Figures()
        self._skipped = {"oversized": 0, "namespace": 0}
        self._waiting: dict[str, None] = {}
        self._committed: dict[int, int] = {}
        self._asked: dict[int, int] = {}
        self._highs: dict[int, int] = {}
        self._next_commit_s = self._next_figures_s = self._next_high_s = 0.0
        self._snapshot = Figures()
        self._snapshot_s = time.monotonic()
        self._stop_s: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpuflight-consume", daemon=True)

    def start(self) -> None:
        """Begin to read, in the background. A broker that is not there is tried for ever."""
        self._thread.start()

    def stop(self, deadline_s: float) -> bool:
        """Write what was read, commit, leave the group; False if that took more than so many seconds, and then what was
        not committed is read again by whoever goes on."""
        self._stop_s = time.monotonic() + deadline_s
        self._stopped.set()
        if self._thread.ident is None:
            return self._writers.stop(self._stop_s)
        self._thread.join(max(0.0, deadline_s))
        return not self._thread.is_alive()

    def figures(self) -> Figures:
        """What was done and is waiting, at most a second old while ``answers``."""
        return self._snapshot

    @property
    def silent_s(self) -> float:
        """How long the thread has not come round: more than seconds if the client hangs."""
        return time.monotonic() - self._snapshot_s

    # Told by the client, within poll and close.

    def on_assign(self, partitions: list[int]) -> None:
        """Partitions that are ours from now on."""
        self._figures.rebalances += 1
        self._figures.client_error = ""
        self._intake.assign(partitions)
        if self._figures.paused and self._client is not None:
            self._client.pause(partitions)

    def on_revoke(self, partitions: list[int]) -> None:
        """Partitions that another will read: what is under way is finished and committed, the rest is left to it."""
        self._figures.rebalances += 1
        self._intake.close(partitions)
        self._writers.recheck()
        until_s = time.monotonic() + SETTLE_S
        if not self._writers.settle(set(partitions), min(until_s, self._stop_s or until_s)):
            log.warning("a write is still under way for a partition that another consumer goes on with")
        self._drain()
        self._commit(partitions, wait=True)
        self._leave(partitions)

    def on_lost(self, partitions: list[int]) -> None:
        """Partitions that another reads already."""
        self._figures.rebalances += 1
        self._leave(partitions)
        self._writers.recheck()

    def on_commit(self, offsets: dict[int, int], error: str) -> None:
        """What came of a commit."""
        if error:
            self._figures.commit_failures += 1
            self._figures.client_error = f"offsets are not committed: {error}"
            for partition in offsets:
                self._asked.pop(partition, None)  # again next time
            return
        self._figures.commits += 1
        self._figures.client_error = ""
        self._committed.update({p: offset for p, offset in offsets.items() if p in self._asked})

    # The thread.

    def _run(self) -> None:
        backoff = Backoff(self._limits.retry_first_s, self._limits.retry_max_s)
        while not self._stopped.is_set():
            try:
                self._client = self._make_client()
                self._client.start(self)
                while not self._stopped.is_set():
                    if self.step():
                        backoff.reset()
            except GpuflightError as error:
                self._failed(str(error))
            except Exception as error:  # the thread must outlive a defect: nobody else reads these partitions
                log.exception("reading the topic failed")
                self._failed(f"{type(error).__name__}: {error}")
            if not self._stopped.is_set():
                self._part()
                self._stopped.wait(backoff.pause_s())
        self._finish()

    def step(self) -> bool:
        """Once round; True if there was a message. Raises ClientError that is fatal."""
        client = self._client
        assert client is not None  # noqa: S101 - set by the thread
        record = self._tried(lambda: client.poll(POLL_S))
        if record is not None:
            self._figures.client_error = ""
            self._take(record)
        self._drain()
        self._regulate(client)
        now_s = time.monotonic()
        if not self._figures.paused and not self._figures.client_error:
            self._reading_s += min(now_s - self._stepped_s, 1.0)
        self._stepped_s = now_s
        if now_s >= self._next_commit_s:
            self._next_commit_s = now_s + COMMIT_INTERVAL_S
            self._tried(lambda: self._commit(self._intake.partitions, wait=False))
        if now_s >= self._next_high_s:
            self._next_high_s = now_s + HIGH_INTERVAL_S
            self._tried(lambda: self._look_ahead(client))
        if now_s >= self._next_figures_s:
            self._next_figures_s = now_s + FIGURES_INTERVAL_S
            self._publish(client)
        return record is not None

    def _tried(self, ask: Callable[[], T]) -> T | None:
        """What the client answers; None if it cannot, which is said. Raises ClientError that is fatal."""
        try:
            return ask()
        except ClientError as error:
            self._failed(str(error))
            if error.fatal:
                raise
            return None

    def _take(self, record: Record) -> None:
        self._figures.messages += 1
        if len(record.value or b"") > self._limits.max_message_bytes:
            self._skipped["oversized"] += 1
            self._intake.skip(record.partition, record.offset)
            return
        job = self._intake.take(record.partition, record.offset, record.key, record.headers, record.value)
        if job is None:
            return
        self._figures.rounds += 1
        if valid_name(job.message.namespace):
            self._writers.put(job)
        else:
            self._skipped["namespace"] += 1
            self._intake.done(job)

    def _drain(self) -> None:
        while True:
            try:
                done = self._writers.finished.get_nowait()
            except queue.Empty:
                return
            self._count(done)

    def _count(self, done: Done) -> None:
        if done.outcome is None:
            self._figures.given_up += 1
            return
        self._intake.done(done.job)
        self._figures.outcomes[done.outcome] += 1
        namespace = done.job.message.namespace
        if done.outcome == "waiting":
            self._waiting[namespace] = None
            while len(self._waiting) > WAITING_MAX:
                del self._waiting[next(iter(self._waiting))]
        elif done.outcome == "written":
            self._waiting.pop(namespace, None)

    def _regulate(self, client: Client) -> None:
        queued_bytes, queued_items = self._writers.queued_bytes, self._writers.queued_items
        limits = self._limits
        if not self._figures.paused:
            if queued_bytes >= limits.max_queue_bytes or queued_items >= limits.max_queue_rounds:
                client.pause(self._intake.partitions)
                self._figures.paused = True
        elif queued_bytes <= limits.max_queue_bytes // 2 and queued_items <= limits.max_queue_rounds // 2:
            client.resume(self._intake.partitions)
            self._figures.paused = False

    def _commit(self, partitions: list[int], wait: bool) -> None:
        offsets: dict[int, int] = {}
        for partition in partitions:
            offset = self._intake.committable(partition)
            if offset is not None and offset != (self._committed if wait else self._asked).get(partition):
                offsets[partition] = offset
        if offsets and self._client is not None:
            self._asked.update(offsets)
            self._client.commit(offsets, wait)

    def _look_ahead(self, client: Client) -> None:
        # What a fetch brought along is old while nothing is fetched, and proves nothing of the broker after an error.
        fresh = self._figures.paused or bool(self._figures.client_error)
        for partition in self._intake.partitions:
            high = client.high(partition, fresh)
            if high is not None:
                self._highs[partition] = high
            if partition not in self._committed and self._intake.position(partition) is None:
                begin = client.beginning(partition)
                if begin is not None:
                    self._committed[partition] = begin
        if fresh and self._intake.partitions:
            self._figures.client_error = ""

    def _publish(self, client: Client) -> None:
        figures, counts, writers = self._figures, self._assembler.counts, self._writers
        figures.connected = self._client is not None and not figures.client_error
        figures.skipped = {
            "foreign": counts.foreign,
            "malformed": counts.malformed,
            "corrupt": counts.corrupt,
            "unfinished": counts.lost,
            **self._skipped,
        }
        figures.repeated, figures.trials = counts.repeats + counts.duplicates, counts.trials
        figures.retries, figures.store_error = writers.retries_count, writers.last_error
        figures.queued_rounds, figures.queued_bytes = writers.queued_items, writers.queued_bytes
        figures.unfinished_bytes = self._assembler.held_bytes
        figures.waiting_count = len(self._waiting)
        figures.waiting_namespaces = list(self._waiting)[:WAITING_SHOWN]
        figures.partitions = [self._partition(client, partition) for partition in self._intake.partitions]
        self._snapshot, self._snapshot_s = _copy(figures), time.monotonic()

    def _partition(self, client: Client, partition: int) -> PartitionFigures:
        done = self._intake.committable(partition)
        high, position = self._highs.get(partition), self._intake.position(partition)
        if done is None:
            done = self._committed.get(partition)
        if high is not None and position is not None:
            high = max(high, position)
        return PartitionFigures(
            partition=partition,
            position=position,
            committed=self._committed.get(partition),
            high=high,
            lag=None if high is None or done is None else max(0, high - done),
        )

    def _failed(self, error: str) -> None:
        if error != self._figures.client_error:
            log.warning("%s", error)
        self._figures.client_errors += 1
        self._figures.client_error = error
        self._next_figures_s = 0.0

    def _leave(self, partitions: list[int]) -> None:
        for partition in partitions:
            self._intake.forget(partition)
            for known in (self._committed, self._asked, self._highs):
                known.pop(partition, None)

    def _part(self) -> None:
        """Let go of a client that is of no use any more."""
        client = self._client
        if client is not None:
            try:
                client.close()
            except Exception as error:  # noqa: BLE001 - it is given up anyway
                log.warning("leaving the group: %s", error)
            self._client = None
        self._leave(self._intake.partitions)
        self._writers.recheck()
        self._figures.paused = False
        if client is not None:
            self._publish(client)

    def _finish(self) -> None:
        left_s = max(0.0, (self._stop_s or 0.0) - time.monotonic())
        until_s = time.monotonic() + left_s / 2
        while self._writers.queued_items and not self._writers.last_error and time.monotonic() < until_s:
            try:
                self._count(self._writers.finished.get(timeout=0.05))
            except queue.Empty:
                pass
        self._drain()
        self._part()
        self._writers.stop(self._stop_s or 0.0)


def _copy(figures: Figures) -> Figures:
    from msgspec.structs import replace

    return replace(figures, outcomes=dict(figures.outcomes))
