"""When to send again: pauses of the whole receiver, so that one that is down is asked once and not by every window."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from gpuflight.subscribers.retry import Backoff

log = logging.getLogger(__name__)

FIRST_S = 0.5
LONGEST_S = 60.0


class Gate:
    """Open, or closed for a while. Thread-safe."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._backoff = Backoff(FIRST_S, LONGEST_S)
        self._lock = threading.Lock()
        self._until_s = 0.0
        self._reason = ""

    @property
    def reason(self) -> str:
        """Why the receiver takes nothing; empty if it does."""
        return self._reason

    def closed_for_s(self) -> float:
        """How long to wait, s; 0: it may be tried."""
        with self._lock:
            return max(0.0, self._until_s - self._monotonic_s())

    def close(self, reason: str, retry_after_s: float | None = None) -> None:
        """The receiver takes nothing now. Several senders that find out at once count as one."""
        with self._lock:
            now_s = self._monotonic_s()
            if now_s >= self._until_s:
                self._until_s = now_s + self._backoff.pause_s(retry_after_s)
            if reason != self._reason:
                self._reason = reason
                log.warning("not delivered, trying again: %s", reason)

    def open(self) -> None:
        """It has taken something."""
        with self._lock:
            if self._reason:
                log.info("delivering again")
            self._reason, self._until_s = "", 0.0
            self._backoff.reset()
