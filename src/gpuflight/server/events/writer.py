"""The thread that stores what was decoded: all that waits by one write, in the order in which it came."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from gpuflight.errors import GpuflightError, InputError

if TYPE_CHECKING:
    from gpuflight.events.store import EventStore, Part, Written
    from gpuflight.server.events.decoders import UnderWay

log = logging.getLogger(__name__)

_PARTS_AT_ONCE = 128
_ROWS_AT_ONCE = 2_000_000
_ROWS_WAITING = 2_000_000
"""Rows that may wait before no more are decoded: about 200 MB, ten times what they took as they were sent."""


class NotStored(GpuflightError):
    """What was handed in is not stored; it can be handed in again."""


class Job:
    """A part that waits to be stored; ``done`` tells what became of it."""

    def __init__(self, part: Part, of: UnderWay) -> None:
        self.part = part
        self.of = of
        self.rows = sum(batch.count for batch in part.batches)
        self.done: Future[Written] = Future()
        self.done.set_running_or_notify_cancel()  # nobody who waits can take it back


class Call:
    """Something that is to be done between two writes."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work = work
        self.done: Future[Any] = Future()
        self.done.set_running_or_notify_cancel()


class StoreWriter:
    """Stores jobs and does calls, one after the other. ``forget``: told of decoders whose jobs could not be stored."""

    def __init__(self, store: EventStore, forget: Callable[[UnderWay], None]) -> None:
        self._store = store
        self._forget = forget
        self._queue: queue.SimpleQueue[Job | Call | None] = queue.SimpleQueue()
        self.writes_count = 0
        self._changes = 0
        self.failed_count = 0
        self._lock = threading.Lock()
        self._room = threading.Condition()
        self._rows_waiting = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gpuflight-events-write", daemon=True)
        self._thread.start()

    @property
    def changes_count(self) -> int:
        """Writes and calls that are done, here and elsewhere: while it stays the same, so does the store."""
        return self._changes + self._store.outside_changes()

    def put(self, job: Job) -> None:
        """Have a job stored. Raises NotStored after ``close``."""
        self._put(job)
        with self._room:
            self._rows_waiting += job.rows

    def wait_for_room(self) -> None:
        """Return once there is room for what is to be decoded; the store decides how fast that is."""
        with self._room:
            self._room.wait_for(lambda: self._rows_waiting < _ROWS_WAITING)

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Have something done after all that waits now. Raises NotStored after ``close``."""
        call = Call(work)
        self._put(call)
        return call.done

    def close(self, deadline_s: float) -> bool:
        """Store what waits, then end; False if that took too long."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _put(self, item: Job | Call) -> None:
        with self._lock:
            if self._closed:
                raise NotStored("the event store is closing")
            self._queue.put(item)

    def _run(self) -> None:
        item = self._queue.get()
        while item is not None:
            following: Any = _NOTHING
            if isinstance(item, Call):
                _do(item)
                self._changes += 1
            else:
                jobs, rows = [item], item.rows
                while len(jobs) < _PARTS_AT_ONCE and rows < _ROWS_AT_ONCE:
                    try:
                        following = self._queue.get_nowait()
                    except queue.Empty:
                        break
                    if not isinstance(following, Job):
                        break
                    jobs.append(following)
                    rows += following.rows
                    following = _NOTHING
                self._store_jobs(jobs)
                jobs.clear()  # they are large, and the next one may be long in coming
                with self._room:
                    self._rows_waiting -= rows
                    self._room.notify_all()
            item = self._queue.get() if following is _NOTHING else following

    def _store_jobs(self, jobs: list[Job]) -> None:
        valid = []
        for job in jobs:
            if job.of.forgotten:
                _fail(job, "what was sent before it could not be stored")
            else:
                valid.append(job)
        if not valid:
            return
        try:
            results = self._store.write_parts([job.part for job in valid])
        except Exception as error:
            if len(valid) > 1:  # one of them may be to blame
                for job in valid:
                    self._store_jobs([job])
                return
            self.failed_count += 1
            if not isinstance(error, InputError):
                log.exception("events cannot be stored")
            else:
                log.warning("%s", error)
            self._forget(valid[0].of)
            _fail(valid[0], str(error) if isinstance(error, InputError) else "a defect; the server's log says more")
            return
        self.writes_count += 1
        self._changes += 1
        for job, written in zip(valid, results, strict=True):
            _release(job)
            job.done.set_result(written)


_NOTHING = object()


def _do(call: Call) -> None:
    try:
        call.done.set_result(call.work())
    except Exception as error:  # noqa: BLE001 - handed to who asked for it
        call.done.set_exception(error)


def _fail(job: Job, why: str) -> None:
    _release(job)
    job.done.set_exception(NotStored(why))


def _release(job: Job) -> None:
    source = job.part.source
    if source is not None:
        job.of.waiting.pop(source.name, None)
