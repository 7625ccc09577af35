"""The second thread of a subscriber with the policy ``spool``: packs each round and stores it, while the worker sends.

So a receiver that hangs does not keep rounds in memory, and what was stored survives whatever happens to the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

from gpuflight.errors import DeliveryError
from gpuflight.rounds import Round
from gpuflight.subscribers.base import PackedSubscriber, Parcel
from gpuflight.subscribers.queue import DeliveryQueue
from gpuflight.subscribers.retry import Backoff
from gpuflight.subscribers.spool import Spool, spool_path

log = logging.getLogger(__name__)

UNSTORED_MAX = 16
"""Rounds that may wait in memory for a slow disk; beyond, the oldest is dropped."""


class Intake:
    """Owned by a worker, whose lock it shares: methods are called with ``changed`` held, unless they say
    otherwise."""

    def __init__(self, subscriber: PackedSubscriber, queue: DeliveryQueue[Any], changed: threading.Condition) -> None:
        self.subscriber = subscriber
        self.spool = Spool(spool_path(subscriber.settings.spool_folder, subscriber.label))
        self.ready = False
        """Whether the spool is open and what it held is in the queue."""
        self.closing = False
        self._queue = queue
        self._changed = changed
        self._rounds: deque[Round] = deque()
        self._settled: deque[tuple[Any, str]] = deque()
        """What is settled and still stored, with the reason for which it is kept aside."""
        self._after: int | None = None
        self._gaps = 0
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=f"gpuflight-{subscriber.label}-spool", daemon=True)
        self._thread.start()

    def receive(self, completed: Round, now_s: float) -> None:
        """Take one more round to be stored."""
        if not self._queue.receive(now_s):
            return
        if len(self._rounds) >= UNSTORED_MAX:
            self._queue.lost("spool")
            self._rounds.popleft()
        self._rounds.append(completed)

    def end(self, deadline_s: float) -> None:
        """Store what waits until ``deadline_s`` of ``time.monotonic``, then close the spool. Without the lock."""
        with self._changed:
            self.closing = True
            self._stop = deadline_s <= time.monotonic()
            self._changed.notify_all()
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if not self._thread.is_alive() or self._stop:
            self.forget_released()
            self.spool.close()

    def discard(self) -> None:
        """Delete the spool with all that it holds; after ``end``."""
        self.spool.delete()

    def forget_released(self) -> None:
        """Remove from the spool what the queue has settled. Without the lock."""
        with self._changed:
            for item, why in self._queue.released:
                if why != "sent":  # a difference to a round that never arrives says nothing
                    self._after = None
                    self._gaps += 1
                self._settled.append((item, why if why in ("failed", "poison", "attempts") else ""))
            self._queue.released.clear()
            settled = list(self._settled)
            self._settled.clear()
        if not settled:
            return
        try:
            self.spool.remove_all(settled)
        except DeliveryError as error:
            # Tried again with the next one. At the end it stays stored, and a later process sends it again.
            with self._changed:
                self._settled.extendleft(reversed(settled))
            self._note(error)

    def _run(self) -> None:
        if not self._open():
            with self._changed:
                while self._rounds:
                    self._rounds.popleft()
                    self._queue.lost("spool")
                self.ready = True  # there is nothing to wait for any more
                self._changed.notify_all()
            return
        while True:
            with self._changed:
                while not self._rounds and not self.closing and not self._stop:
                    self._changed.wait()
                if self._stop or not self._rounds:
                    return
                completed = self._rounds.popleft()
            self._store(completed)

    def _open(self) -> bool:
        backoff = Backoff()
        while True:
            try:
                self.spool.open()
                found = self.spool.inventory()
            except DeliveryError as error:
                self._note(error)
            except BaseException as error:  # noqa: BLE001 - whatever it is, this thread is the only one to say so
                self._note(DeliveryError(f"{type(error).__name__}: {error}", retryable=True))
            else:
                break
            with self._changed:
                if not self.closing:
                    self._changed.wait(backoff.pause_s())
                if self.closing or self._stop:
                    return False
        now_s, now_ns = time.monotonic(), time.time_ns()
        with self._changed:
            if self.spool.damaged_path is not None:
                self._queue.note_error(f"spool was damaged; moved to {self.spool.damaged_path}")
            for line in found:
                self._queue.recover(line.id, line.size_bytes, now_s - max(0, now_ns - line.time_ns) / 1e9)
            self.ready = True
            self._changed.notify_all()
        return True

    def _store(self, completed: Round) -> None:
        with self._changed:
            after, gaps = self._after, self._gaps
        try:
            packed = self.subscriber.pack(completed, after)
            item = self._append(packed)
        except BaseException as error:  # noqa: BLE001 - a round that cannot be packed costs that round
            self._after = None
            problem = str(error) if isinstance(error, DeliveryError) else f"{type(error).__name__}: {error}"
            with self._changed:
                self._queue.lost("spool")
                self._changed.notify_all()
            self._note(DeliveryError(problem, retryable=True))
            return
        with self._changed:
            self._after = completed.number if gaps == self._gaps else None
            self._queue.stored(item, len(packed.data))
            self._changed.notify_all()
        self.forget_released()

    def _append(self, packed: Parcel) -> int:
        try:
            return self.spool.append(packed)
        except DeliveryError:
            self.forget_released()  # what has arrived meanwhile leaves room on a full disk
            return self.spool.append(packed)

    def _note(self, error: DeliveryError) -> None:
        text = str(error)
        with self._changed:
            level = logging.DEBUG if text == self._queue.last_error else logging.WARNING
            self._queue.note_error(text)
        log.log(level, "subscriber %s: %s", self.subscriber.label, text)
