"""Delivery, once for all subscribers: one queue and one worker thread each, and the set of them.

Publishing takes a lock for the time of a pointer swap; it never waits for a subscriber. A subscriber that hangs keeps
its own thread and nothing else; when it is removed, or the set closed, it is left behind after the deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Literal

from msgspec import Struct

from gpuflight.errors import ConfigError, DeliveryError, InputError
from gpuflight.rounds import Round
from gpuflight.subscribers.base import Subscriber
from gpuflight.subscribers.queue import (
    BACKOFF_FACTOR,
    BACKOFF_FIRST_S,
    BACKOFF_MAX_S,
    DeliveryStatistics,
    LatestQueue,
)

log = logging.getLogger(__name__)

State = Literal["starting", "ok", "recoverable_error", "permanent_error", "stopping", "stopped"]

CLOSE_DEADLINE_S = 5.0


class SubscriberStatus(Struct, kw_only=True):
    """How one subscriber does."""

    name: str
    type: str
    state: State
    statistics: DeliveryStatistics


class Worker:
    """The queue and the thread of one subscriber."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self._queue: LatestQueue[Round] = LatestQueue(subscriber.expected_update_interval_s)
        self._changed = threading.Condition()
        self._state: State = "starting"
        self._hurry_until_s = 0.0
        self._flush_wanted = self._flush_done = 0
        self._closing_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"gpuflight-{subscriber.label}", daemon=True)
        self._thread.start()

    def offer(self, completed: Round) -> None:
        """Put a round in the queue. Never waits for the subscriber."""
        with self._changed:
            self._queue.offer(completed)
            self._changed.notify_all()

    def ask_to_flush(self, deadline_s: float) -> None:
        """Deliver what waits without regard to the interval, then flush. Does not wait; see ``wait_flushed``."""
        with self._changed:
            self._flush_wanted += 1
            self._hurry_until_s = max(self._hurry_until_s, deadline_s)
            self._changed.notify_all()

    def wait_flushed(self, deadline_s: float) -> bool:
        """True when all that was offered is delivered or given up, and flushed, before the deadline (of
        ``time.monotonic``)."""
        with self._changed:
            return self._wait(self._flushed, deadline_s)

    def ask_to_close(self, deadline_s: float) -> None:
        """Deliver what waits, flush, close, end the thread. Does not wait; see ``wait_closed``."""
        with self._changed:
            self._closing_s = deadline_s
            self._flush_wanted += 1
            self._hurry_until_s = max(self._hurry_until_s, deadline_s)
            self._state = "stopping"
            self._changed.notify_all()

    def wait_closed(self, deadline_s: float) -> bool:
        """True when the thread has ended before the deadline; else it is left behind, its round given up."""
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if not self._thread.is_alive():
            return True
        with self._changed:
            self._queue.abandon()
        log.warning("subscriber %s does not answer and is left behind", self.subscriber.label)
        return False

    def status(self) -> SubscriberStatus:
        """State and counts, of one moment."""
        with self._changed:
            return SubscriberStatus(
                name=self.subscriber.label,
                type=self.subscriber.name,
                state=self._state,
                statistics=self._queue.statistics(),
            )

    def _flushed(self) -> bool:
        if self._state == "permanent_error":
            return True
        return self._flush_done >= self._flush_wanted and self._queue.idle

    def _wait(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        while not condition():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._changed.wait(left_s)
        return True

    # --- the worker thread ---

    def _run(self) -> None:
        try:
            if self._start():
                self._deliver_until_closed()
        finally:
            self._call("close", self.subscriber.close)
            with self._changed:
                self._queue.close()
                if self._state != "permanent_error":
                    self._state = "stopped"
                self._flush_done = self._flush_wanted
                self._changed.notify_all()

    def _start(self) -> bool:
        pause_s = BACKOFF_FIRST_S
        while True:
            error = self._call("start", self.subscriber.start)
            with self._changed:
                if error is None:
                    if self._state == "starting" or self._state == "recoverable_error":
                        self._state = "ok"
                    return True
                if not error.retryable:
                    self._state = "permanent_error"
                    return False
                if self._closing_s is None:
                    self._state = "recoverable_error"
                self._wait(lambda: self._closing_s is not None, time.monotonic() + pause_s)
                if self._closing_s is not None:
                    return False
            pause_s = min(pause_s * BACKOFF_FACTOR, BACKOFF_MAX_S)

    def _deliver_until_closed(self) -> None:
        while True:
            with self._changed:
                completed = self._next()
                flush_wanted, closing = self._flush_wanted, self._closing_s is not None
            if completed is not None:
                self._deliver(completed)
                continue
            self._call("flush", self._flush)
            with self._changed:
                self._flush_done = flush_wanted
                self._changed.notify_all()
            if closing:
                return

    def _next(self) -> Round | None:
        """The next round that is due; None when it is time to flush (all delivered, or no time left) or to end."""
        while True:
            now_s = time.monotonic()
            asked = self._flush_wanted > self._flush_done
            hurry = asked and now_s < self._hurry_until_s
            completed = self._queue.take(now_s, hurry=hurry)
            if completed is not None:
                return completed
            if asked and (self._queue.idle or not hurry):
                return None
            wait_s = self._queue.due_in_s(now_s, hurry=hurry)
            if hurry:
                wait_s = min(wait_s, self._hurry_until_s - now_s)
            self._changed.wait(None if wait_s > threading.TIMEOUT_MAX else wait_s)

    def _flush(self) -> None:
        self.subscriber.flush(self._hurry_until_s)

    def _deliver(self, completed: Round) -> None:
        error = self._call("deliver", lambda: self.subscriber.deliver(completed))
        with self._changed:
            if error is None:
                self._queue.delivered()
            else:
                self._queue.failed(str(error), time.monotonic(), retryable=error.retryable)
            if self._state != "stopping":
                self._state = "ok" if error is None else "recoverable_error"
            self._changed.notify_all()

    def _call(self, what: str, function: Callable[[], None]) -> DeliveryError | None:
        """Call into the subscriber; whatever it raises comes back as a DeliveryError and is logged once per text."""
        try:
            function()
        except DeliveryError as error:
            problem = error
        except BaseException as error:  # noqa: BLE001 - the edge of a sink: even SystemExit must not end its worker
            problem = DeliveryError(f"{type(error).__name__}: {error}", retryable=False)
        else:
            return None
        text = str(problem)
        with self._changed:
            level = logging.DEBUG if text == self._queue.last_error else logging.WARNING
            if what != "deliver":  # that one is counted when the round is settled
                self._queue.note_error(text)
        log.log(level, "subscriber %s: %s: %s", self.subscriber.label, what, text)
        return problem


class SubscriberSet:
    """All subscribers of one core. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[str, Worker] = {}
        self._closed = False

    def add(self, subscriber: Subscriber) -> None:
        """Start delivering to a subscriber. Returns at once; ``status`` tells whether it could start. Raises
        ConfigError if its label is taken."""
        with self._lock:
            if self._closed:
                raise ConfigError("no subscriber can be added: the set is closed")
            if subscriber.label in self._workers:
                raise ConfigError(f"there is already a subscriber named {subscriber.label}; names must be unique")
            self._workers[subscriber.label] = Worker(subscriber)

    def remove(self, name: str, timeout_s: float = CLOSE_DEADLINE_S) -> bool:
        """Deliver what waits for a subscriber, then close it; True if that was done in time. Raises InputError if there
        is none of that name."""
        with self._lock:
            worker = self._workers.pop(name, None)
            known = ", ".join(self._workers)
        if worker is None:
            raise InputError(f"there is no subscriber {name!r}; there are: {known or 'none'}")
        deadline_s = time.monotonic() + timeout_s
        worker.ask_to_close(deadline_s)
        return worker.wait_closed(deadline_s)

    def publish(self, completed: Round) -> None:
        """Offer a round to every subscriber; never waits for any of them."""
        for worker in self._members():
            worker.offer(completed)

    def flush(self, timeout_s: float = CLOSE_DEADLINE_S) -> bool:
        """Deliver all that waits, now; True if within ``timeout_s`` every subscriber has it or gave it up (``status``
        tells which)."""
        deadline_s = time.monotonic() + timeout_s
        workers = self._members()
        for worker in workers:
            worker.ask_to_flush(deadline_s)
        done = [worker.wait_flushed(deadline_s) for worker in workers]  # every one, not only up to the first late one
        return all(done)

    def close(self, timeout_s: float = CLOSE_DEADLINE_S) -> bool:
        """Flush and close every subscriber; True if all were done within ``timeout_s``. May be called twice. ``status``
        still answers; a round published later is counted as dropped."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            workers = list(self._workers.values())
        for worker in workers:
            worker.ask_to_close(deadline_s)
        done = [worker.wait_closed(deadline_s) for worker in workers]  # every one, not only up to the first late one
        return all(done)

    def status(self) -> list[SubscriberStatus]:
        """How each subscriber does, in the order they were added."""
        return [worker.status() for worker in self._members()]

    def names(self) -> list[str]:
        """Names of the subscribers, in the order they were added."""
        return [worker.subscriber.label for worker in self._members()]

    def __len__(self) -> int:
        return len(self._members())

    @property
    def expected_update_interval_s(self) -> float | None:
        """The shortest interval that any member asked for, s; 0 if one takes every round, None without members."""
        return min((worker.subscriber.expected_update_interval_s for worker in self._members()), default=None)

    def _members(self) -> list[Worker]:
        with self._lock:
            return list(self._workers.values())
