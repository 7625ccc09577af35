"""One timeline per session: UNIX nanoseconds as they were at its start, continued by the monotonic clock.

A wall clock that is set while a program runs would tear its timeline apart. CUPTI's own clock is related to this one
again and again, so that neither drifts away from the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

_TRIES = 5
_JITTER_NS = 20_000


class Clock:
    """UNIX ns of one session."""

    def __init__(
        self, wall_ns: Callable[[], int] = time.time_ns, mono_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._mono_ns = mono_ns
        before = mono_ns()
        wall = wall_ns()
        self._offset = wall - (before + mono_ns()) // 2

    def now_ns(self) -> int:
        return self._mono_ns() + self._offset


class Anchor(NamedTuple):
    """``offset_ns``: CUPTI's time + this = UNIX ns; ``spread_ns``: how far off it can be."""

    offset_ns: int
    spread_ns: int


def anchor(clock: Clock, cupti_ns: Callable[[], int], before: Anchor | None = None) -> Anchor:
    """The relation of the two clocks now, the tightest of some tries. A known one is kept where the new one differs by
    less than could be measured: records of one buffer and the next do not jump."""
    best: Anchor | None = None
    for _ in range(_TRIES):
        first = clock.now_ns()
        told = cupti_ns()
        last = clock.now_ns()
        found = Anchor((first + last) // 2 - told, (last - first + 1) // 2)
        if best is None or found.spread_ns < best.spread_ns:
            best = found
    assert best is not None  # noqa: S101 (there were tries)
    if before is not None and abs(best.offset_ns - before.offset_ns) <= best.spread_ns + before.spread_ns + _JITTER_NS:
        return before
    return best
