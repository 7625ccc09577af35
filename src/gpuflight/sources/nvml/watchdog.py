"""A thread for calls that may never return: into a driver whose GPU is hung, for one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class StillBusy(Exception):
    """The thread is still in a job: the one given now, past its deadline, or one of an earlier round."""


class _Job:
    __slots__ = ("done", "error", "function", "result")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None


class Watchdog:
    """Runs one job at a time in one thread of its own. While one hangs none is begun, so threads never pile up."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._current: _Job | None = None

    @property
    def busy(self) -> bool:
        """Whether a job has not returned yet."""
        return self._current is not None and not self._current.done.is_set()

    def run(self, function: Callable[[], Any], deadline_s: float) -> Any:
        """What ``function`` returns or raises. Raises StillBusy past ``deadline_s``, and at once if a job hangs."""
        if self.busy:
            raise StillBusy
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        job = self._current = _Job(function)
        self._jobs.put(job)
        if not job.done.wait(deadline_s):
            raise StillBusy
        if job.error is not None:
            raise job.error
        return job.result

    def close(self) -> None:
        """End the thread, or leave it behind (it is a daemon) if its call never returns."""
        if self._thread is not None:
            self._jobs.put(None)
            if not self.busy:
                self._thread.join(1.0)
            self._thread = None

    def _work(self) -> None:
        jobs = self._jobs
        while (job := jobs.get()) is not None:
            try:
                job.result = job.function()
            except BaseException as error:  # noqa: BLE001 - handed over to the caller
                job.error = error
            job.done.set()
