"""The threads that write: one namespace is always one thread's, so that its rounds keep their order."""

from __future__ import annotations

import logging
import queue
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable

from msgspec import Struct

from gpuflight.errors import DeliveryError
from gpuflight.server.consume.intake import Job
from gpuflight.server.consume.merge import Merger, Outcome, Writer
from gpuflight.subscribers.retry import Backoff

log = logging.getLogger(__name__)

DEFECTS_MAX = 5
"""Tries of a round over which neither the store nor the round is said to be at fault; then it is refused."""


class Done(Struct, frozen=True):
    """A job that is finished; ``outcome`` is None if it was given up since its partition is another's now."""

    job: Job
    outcome: Outcome | None


class _Lane:
    """One thread and its queue."""

    def __init__(self, name: str, work: Callable[[_Lane], None]) -> None:
        self.jobs: deque[Job] = deque()
        self.busy_with: Job | None = None
        self.thread = threading.Thread(target=work, args=(self,), name=name, daemon=True)


class Writers:
    """``put`` jobs, take what became of them from ``finished``. A store that does not answer is tried again for ever,
    with growing pauses: nothing that was read is passed over because of it."""

    def __init__(
        self,
        make_writer: Callable[[], Writer],
        is_current: Callable[[Job], bool],
        *,
        count: int = 2,
        max_elements: int = 1_000_000,
        retry_first_s: float = 0.5,
        retry_max_s: float = 30.0,
    ) -> None:
        self.finished: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self.retries_count = 0
        self.last_error = ""
        """Of the store, empty while it answers."""
        self._make_writer = make_writer
        self._max_elements = max(1, max_elements // count)
        self._is_current = is_current
        self._retry_first_s = retry_first_s
        self._retry_max_s = retry_max_s
        self._queued_items = 0
        self._queued_bytes = 0
        self._stopping = False
        self._turn = threading.Condition()
        self._lanes = [_Lane(f"gpuflight-consume-{index}", self._work) for index in range(count)]
        for lane in self._lanes:
            lane.thread.start()

    @property
    def queued_items(self) -> int:
        """Jobs that wait or are under way."""
        return self._queued_items

    @property
    def queued_bytes(self) -> int:
        """Their size."""
        return self._queued_bytes

    def put(self, job: Job) -> None:
        """Have a round written after those of its namespace that were put before."""
        lane = self._lanes[zlib.crc32(job.message.namespace.encode()) % len(self._lanes)]
        with self._turn:
            self._queued_items += 1
            self._queued_bytes += job.size_bytes
            lane.jobs.append(job)
            self._turn.notify_all()

    def recheck(self) -> None:
        """Give up what is another's now, without waiting for the next try."""
        with self._turn:
            self._turn.notify_all()

    def settle(self, partitions: set[int], deadline_s: float) -> bool:
        """Wait until no write to these partitions is under way, until ``deadline_s`` of ``time.monotonic``."""

        def quiet() -> bool:
            return not any(lane.busy_with and lane.busy_with.partition in partitions for lane in self._lanes)

        with self._turn:
            return self._turn.wait_for(quiet, max(0.0, deadline_s - time.monotonic()))

    def stop(self, deadline_s: float) -> bool:
        """Write no further round; False if a write did not end until ``deadline_s`` of ``time.monotonic``."""
        with self._turn:
            self._stopping = True
            self._turn.notify_all()
        for lane in self._lanes:
            lane.thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(lane.thread.is_alive() for lane in self._lanes)

    def _work(self, lane: _Lane) -> None:
        merger = Merger(self._make_writer(), max_elements=self._max_elements)
        try:
            self._take_jobs(lane, merger)
        finally:
            merger.close()

    def _take_jobs(self, lane: _Lane, merger: Merger) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: bool(lane.jobs) or self._stopping)
                if self._stopping:
                    return
                job = lane.busy_with = lane.jobs.popleft()
            outcome = self._written(merger, job)
            with self._turn:
                lane.busy_with = None
                self._queued_items -= 1
                self._queued_bytes -= job.size_bytes
                self.finished.put(Done(job, outcome))
                self._turn.notify_all()

    def _written(self, merger: Merger, job: Job) -> Outcome | None:
        backoff = Backoff(self._retry_first_s, self._retry_max_s)
        defects = 0
        while self._is_current(job) and not self._stopping:
            try:
                outcome = merger.take(job.message, job.term)
            except DeliveryError as error:
                self._failed(job, str(error), backoff.pause_s(error.retry_after_s))
            except Exception as error:  # a defect of ours, which one round must not turn into a partition that stands
                defects += 1
                log.exception("round %d of %s was not written", job.message.number, job.message.namespace)
                if defects >= DEFECTS_MAX:
                    return "refused"
                self._failed(job, f"{type(error).__name__}: {error}", backoff.pause_s())
            else:
                self.last_error = ""
                return outcome
        return None

    def _failed(self, job: Job, error: str, pause_s: float) -> None:
        with self._turn:
            self.retries_count += 1
            self.last_error = error
            self._turn.wait_for(lambda: self._stopping or not self._is_current(job), pause_s)
