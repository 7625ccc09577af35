"""The queue and the thread of one subscriber; with the policy ``spool`` a second thread that stores rounds.

Publishing takes a lock for the time of a pointer swap; only with the policy ``block`` does it wait, and not for ever. A
call into a subscriber that does not come back keeps its own thread and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

from gpuflight.errors import DeliveryError
from gpuflight.rounds import Round
from gpuflight.subscribers.base import PackedSubscriber, Subscriber, SubscriberSettings
from gpuflight.subscribers.intake import Intake
from gpuflight.subscribers.queue import DeliveryQueue, DeliveryStatistics
from gpuflight.subscribers.retry import Backoff
from gpuflight.subscribers.stream import READ_ITEMS, Stream

log = logging.getLogger(__name__)

State = Literal[
    "starting", "ok", "recoverable_error", "permanent_error", "paused", "stuck", "stopping", "stopped"
]  # fmt: skip


DELIVERING_SHARE = 0.8
"""Of the time to close, for delivering what waits; the rest is for flushing and closing."""


class SubscriberStatus(Struct, kw_only=True):
    """How one subscriber does. *stuck*: its call into the receiver has passed its deadline."""

    name: str
    type: str
    state: State
    statistics: DeliveryStatistics


def round_bytes(completed: Round) -> int:
    """About what a round holds in memory that its neighbours do not share (bytes): 100 for each element of the graph
    (docs/architecture.md), 500 for each that changed."""
    changed = sum(completed.diff.counts().values())
    return 1024 + 100 * (len(completed.graph.nodes) + len(completed.graph.edges)) + 500 * changed


class Worker:
    """The queue and the thread of one subscriber."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        settings: SubscriberSettings = subscriber.settings
        self._blocks = settings.policy == "block"
        self._queue: DeliveryQueue[Any] = DeliveryQueue(
            subscriber.expected_update_interval_s,
            policy=settings.policy,
            max_items=settings.max_items,
            max_bytes=settings.max_bytes,
            max_attempts=settings.retry_max_attempts,
            backoff=Backoff(settings.retry_first_s, settings.retry_max_s),
        )
        self._changed = threading.Condition()
        self._state: State = "starting"
        self._hurry_until_s = 0.0
        self._flush_wanted = self._flush_done = 0
        self._closing_s: float | None = None
        self._calling_since_s: float | None = None
        self._intake: Intake | None = None
        self._stream: Stream | None = None
        if settings.policy == "spool":
            assert isinstance(subscriber, PackedSubscriber)  # noqa: S101 - its settings class says so
            self._intake = Intake(subscriber, self._queue, self._changed)
            if subscriber.window_items:
                self._stream = Stream(subscriber, self._intake.spool, self)
        self._thread = threading.Thread(target=self._run, name=f"gpuflight-{subscriber.label}", daemon=True)
        self._thread.start()

    @property
    def blocks(self) -> bool:
        """Whether ``offer`` may wait."""
        return self._blocks

    def offer(self, completed: Round, since_s: float | None = None) -> None:
        """Put a round in the queue. Waits only with the policy ``block``, until ``block_timeout_s`` after ``since_s``
        (default: now)."""
        with self._changed:
            now_s = time.monotonic()
            if self._intake is not None:
                self._intake.receive(completed, now_s)
            elif self._blocks:
                self._offer_or_wait(completed, now_s, (now_s if since_s is None else since_s))
            else:
                self._queue.offer(completed)
            self._changed.notify_all()

    def _offer_or_wait(self, completed: Round, now_s: float, since_s: float) -> None:
        size_bytes = round_bytes(completed)
        deadline_s = since_s + self.subscriber.settings.block_timeout_s
        if not self._queue.too_early(now_s):
            # Who pauses a subscriber does not want rounds to wait for it.
            self._wait(lambda: self._queue.has_room(size_bytes) or self._queue.paused, deadline_s)
        self._queue.offer(completed, size_bytes, now_s)
        if self.subscriber.settings.synchronous:
            self._changed.notify_all()
            self._wait(lambda: self._queue.idle or self._queue.paused or self._queue.closed, deadline_s)

    def pause(self) -> None:
        """Deliver nothing until ``resume``; the queue goes on by its policy."""
        self._set_paused(True)

    def resume(self) -> None:
        """Deliver again."""
        self._set_paused(False)

    @property
    def paused(self) -> bool:
        """Whether it is paused."""
        return self._queue.paused

    def _set_paused(self, paused: bool) -> None:
        with self._changed:
            self._queue.paused = paused
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
            return self._wait(self._flushed, deadline_s) and (self._queue.idle or self._state == "permanent_error")

    def ask_to_close(self, deadline_s: float) -> None:
        """Deliver what waits, flush, close, end the thread. Does not wait; see ``wait_closed``."""
        with self._changed:
            self._closing_s = deadline_s
            self._flush_wanted += 1
            now_s = time.monotonic()
            hurry_until_s = now_s + DELIVERING_SHARE * max(0.0, deadline_s - now_s)
            self._hurry_until_s = max(self._hurry_until_s, hurry_until_s)
            if self._state != "permanent_error":
                self._state = "stopping"
            if self._intake is not None:
                self._intake.closing = True
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

    def discard_spool(self) -> None:
        """Delete what a spool still holds; after ``wait_closed``. Raises DeliveryError."""
        if self._intake is not None:
            self._intake.discard()

    def status(self) -> SubscriberStatus:
        """State and counts, of one moment."""
        with self._changed:
            now_s = time.monotonic()
            return SubscriberStatus(
                name=self.subscriber.label,
                type=self.subscriber.name,
                state=self._state_shown(now_s),
                statistics=self._queue.statistics(now_s),
            )

    def _state_shown(self, now_s: float) -> State:
        if self._state in ("permanent_error", "stopping", "stopped"):
            return self._state
        since_s = self._calling_since_s
        if since_s is not None and now_s - since_s > self.subscriber.settings.deliver_deadline_s:
            return "stuck"
        return "paused" if self._queue.paused else self._state

    def _flushed(self) -> bool:
        if self._state == "permanent_error":
            return True
        settled = self._queue.idle or self._queue.paused
        return self._flush_done >= self._flush_wanted and settled and self._intake_ready()

    def _intake_ready(self) -> bool:
        return self._intake is None or self._intake.ready

    def _wait(self, condition: Callable[[], bool], deadline_s: float) -> bool:
        while not condition():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
        return True

    # --- the worker thread ---

    def _run(self) -> None:
        try:
            if self._start():
                self._deliver_until_closed()
        finally:
            if self._intake is not None and self._state != "permanent_error":
                self._intake.end(self._closing_s or 0.0)
            self.call("close", self.subscriber.close)
            with self._changed:
                self._queue.close()
                if self._state != "permanent_error":
                    self._state = "stopped"
                self._flush_done = self._flush_wanted
                self._changed.notify_all()
            if self._intake is not None:
                self._intake.end(0.0)

    def _start(self) -> bool:
        settings = self.subscriber.settings
        backoff = Backoff(settings.retry_first_s, settings.retry_max_s)
        while True:
            error = self.call("start", self.subscriber.start)
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
                pause_s = backoff.pause_s(error.retry_after_s)
                self._wait(lambda: self._closing_s is not None, time.monotonic() + pause_s)
                if self._closing_s is not None:
                    return False

    def _deliver_until_closed(self) -> None:
        while True:
            with self._changed:
                item = self._next()
                flush_wanted, closing = self._flush_wanted, self._closing_s is not None
            if item is not None:
                self._deliver(item)
                continue
            self.call("flush", self._flush)
            with self._changed:
                self._flush_done = flush_wanted
                self._changed.notify_all()
            if closing:
                return

    def _next(self) -> Any:
        """The next item that is due; none when it is time to flush (all delivered, or no time left) or to end."""
        while True:
            now_s = time.monotonic()
            asked = self._flush_wanted > self._flush_done
            hurry = asked and now_s < self._hurry_until_s
            if asked and not hurry and self._closing_s is not None:
                return None
            item = self._queue.take(now_s, hurry=hurry)
            if item is not None:
                return item
            settled = (self._queue.idle and self._intake_ready()) or self._queue.paused
            if asked and (settled or not hurry):
                return None
            wait_s = self._queue.due_in_s(now_s, hurry=hurry)
            if hurry:
                wait_s = min(wait_s, self._hurry_until_s - now_s)
            self._changed.wait(None if wait_s > threading.TIMEOUT_MAX else wait_s)

    def _flush(self) -> None:
        self.subscriber.flush(self._hurry_until_s)

    def _deliver(self, item: Any) -> None:
        if self._stream is None:
            error = self.call("deliver", lambda: self._hand_over(item))
            self.settled(1 if error is None else 0, error)
            return
        try:
            self._stream.run(item)
        finally:
            with self._changed:
                self._queue.take_back()
                self._changed.notify_all()
            if self._intake is not None:
                self._intake.forget_released()

    def _hand_over(self, item: Any) -> None:
        if self._intake is None:
            self.subscriber.deliver(item)
        else:
            self._intake.subscriber.send(self._intake.spool.read(item))

    # What the stream asks for; by the worker thread only.

    def more(self, max_items: int, max_bytes: int) -> list[Any]:
        """Items that may be begun now, so that no more than that are under way in all."""
        with self._changed:
            return [] if self._late() else self._queue.take_more(max_items, max_bytes)

    def settled(self, arrived: int, error: DeliveryError | None) -> None:
        """The oldest so many in delivery have arrived; with an error the one after them has not, and nothing else is
        under way any more."""
        with self._changed:
            if arrived:
                self._queue.delivered(arrived)
            if error is not None:
                self._queue.failed(
                    str(error),
                    time.monotonic(),
                    retryable=error.retryable,
                    retry_after_s=error.retry_after_s,
                    blames_item=error.blames_item,
                )
            if self._state != "stopping" and (arrived or error is not None):
                self._state = "ok" if error is None else "recoverable_error"
            self._changed.notify_all()
            wait = self._stream is not None and error is None and len(self._queue.released) < READ_ITEMS
        if self._intake is not None and not wait:
            self._intake.forget_released()

    def ended(self) -> bool:
        """Whether the time to deliver before the end is over."""
        with self._changed:
            return self._closing_s is not None and self._late()

    def _late(self) -> bool:
        """Whether who asked to flush or to close does not want to wait any longer for what is not under way."""
        return self._flush_wanted > self._flush_done and time.monotonic() >= self._hurry_until_s

    def call(self, what: str, function: Callable[[], None]) -> DeliveryError | None:
        """Call into the subscriber, by the worker thread; whatever it raises comes back as a DeliveryError and is
        logged once per text."""
        self._calling_since_s = time.monotonic()
        try:
            function()
        except DeliveryError as error:
            problem = error
        except BaseException as error:  # noqa: BLE001 - the edge of a sink: even SystemExit must not end its worker
            problem = DeliveryError(f"{type(error).__name__}: {error}", retryable=False)
        else:
            return None
        finally:
            self._calling_since_s = None
        text = str(problem)
        with self._changed:
            level = logging.DEBUG if text == self._queue.last_error else logging.WARNING
            if what != "deliver":  # that one is counted when the round is settled
                self._queue.note_error(text)
        log.log(level, "subscriber %s: %s: %s", self.subscriber.label, what, text)
        return problem
