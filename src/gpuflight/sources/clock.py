"""Time, handed in, so that tests and replays have their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where time comes from."""

    def wall_ns(self) -> int:
        """Wall clock, ns since the epoch; may step."""

    def monotonic_s(self) -> float:
        """Monotonic clock, s; for durations and rates."""


class SystemClock:
    """The machine's clocks."""

    def wall_ns(self) -> int:
        return time.time_ns()

    def monotonic_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to; for tests."""

    def __init__(self, wall_ns: int = 1_700_000_000_000_000_000, monotonic_s: float = 1000.0) -> None:
        self._wall_ns = wall_ns
        self._monotonic_s = monotonic_s

    def wall_ns(self) -> int:
        return self._wall_ns

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def advance(self, seconds: float) -> None:
        """Move both clocks on."""
        self._wall_ns += int(seconds * 1e9)
        self._monotonic_s += seconds
