"""A thread of its own for each collector, so that one that hangs is left behind instead of taking the round with it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class DeadlineExceeded(Exception):
    """A call did not return in time; it goes on in its thread, and its result will be thrown away."""


class Busy(Exception):
    """The worker is still inside a call that passed its deadline in an earlier round."""


class _Call(Generic[T]):
    __slots__ = ("cpu_s", "done", "error", "result", "work")

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        # A bare lock, released when the call is done: a tenth of what an Event costs, and there are 50 calls a round.
        self.done = threading.Lock()
        self.done.acquire()
        self.result: T | None = None
        self.error: BaseException | None = None
        self.cpu_s = 0.0


class Worker:
    """Runs calls one at a time in one thread, made at the first call and kept: hung calls never pile up threads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.cpu_s = 0.0
        self._calls: queue.SimpleQueue[_Call[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pending: _Call[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether an earlier call has not returned yet."""
        return self._pending is not None and self._pending.done.locked()

    def call(self, work: Callable[[], T], timeout_s: float) -> T:
        """The result of ``work()``, or what it raised. Raises DeadlineExceeded, Busy. ``cpu_s`` is what it used."""
        self.cpu_s = 0.0
        if self.busy:
            raise Busy(self.name)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name=f"gpuflight-{self.name}", daemon=True)
            self._thread.start()
        call: _Call[T] = _Call(work)
        self._pending = call
        self._calls.put(call)
        if not call.done.acquire(timeout=max(0.0, timeout_s)):
            raise DeadlineExceeded(f"{self.name} did not answer within {timeout_s:g} s")
        self._pending = None
        self.cpu_s = call.cpu_s
        if call.error is not None:
            raise call.error
        return call.result  # type: ignore[return-value]

    def close(self) -> None:
        """Let the thread end when it is idle; one that hangs stays behind as a daemon."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread = None

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            started = time.thread_time()
            try:
                call.result = call.work()
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                call.error = error
            call.cpu_s = time.thread_time() - started
            call.done.release()
            del call
