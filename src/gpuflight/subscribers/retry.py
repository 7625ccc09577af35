"""When to try again: pauses that grow, jitter, and what the receiver asked for."""

from __future__ import annotations

import random
from collections.abc import Callable

BACKOFF_FIRST_S = 1.0
BACKOFF_FACTOR = 2.0
BACKOFF_MAX_S = 60.0
RETRY_AFTER_MAX_S = 3600.0
"""Longest pause a receiver can ask for; one that says a year is asked again in an hour."""


class Backoff:
    """Pauses between tries, s: each twice the one before, up to ``max_s``, of which a random half is cut so that many
    senders do not come back in step ("equal jitter", M. Brooker, AWS Architecture Blog, 2015)."""

    def __init__(
        self,
        first_s: float = BACKOFF_FIRST_S,
        max_s: float = BACKOFF_MAX_S,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.first_s = first_s
        self.max_s = max_s
        self._jitter = jitter
        self._next_s = first_s

    def pause_s(self, retry_after_s: float | None = None) -> float:
        """The pause before the next try, s; at least what the receiver asked for."""
        backoff_s = min(self._next_s, self.max_s)
        self._next_s = min(self._next_s * BACKOFF_FACTOR, self.max_s)
        pause_s = backoff_s * (0.5 + 0.5 * self._jitter())
        return max(pause_s, min(retry_after_s or 0.0, RETRY_AFTER_MAX_S))

    def reset(self) -> None:
        """Start over: a try succeeded."""
        self._next_s = self.first_s
