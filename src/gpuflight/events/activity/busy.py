"""The time in which at least one of many intervals lasted: what overlaps counts once."""

from __future__ import annotations

from typing import Any

from gpuflight.events.arrays import numpy

_ROWS_AT_ONCE = 1 << 16
_OPEN = 1024
"""Merged intervals that may still grow. Rows come nearly in order, so what is older is closed; the part of a late row
that lies before that is not counted."""


class Busy:
    """Takes starts and durations (ns), in any order within reason."""

    def __init__(self) -> None:
        np = numpy()
        self.latest_ns = 0
        self._closed_ns = 0
        self._closed_until = 0
        self._starts: Any = np.empty(0, np.int64)
        self._ends: Any = np.empty(0, np.int64)
        self._waiting: list[tuple[Any, Any]] = []
        self._rows = 0

    def add(self, starts: Any, durations: Any) -> None:
        if len(starts):
            self._waiting.append((starts, durations))
            self._rows += len(starts)
            if self._rows >= _ROWS_AT_ONCE:
                self._merge()

    @property
    def busy_ns(self) -> int:
        self._merge()
        return self._closed_ns + int((self._ends - self._starts).sum())

    def _merge(self) -> None:
        if not self._waiting:
            return
        np = numpy()
        fresh = np.concatenate([starts for starts, _ in self._waiting])
        lasted = np.concatenate([durations for _, durations in self._waiting])
        self._waiting, self._rows = [], 0
        sane = (fresh > 0) & (lasted >= 0) & (lasted < 1 << 60) & (fresh < 1 << 62)
        fresh, lasted = fresh[sane], lasted[sane]
        if not len(fresh):
            return
        self.latest_ns = max(self.latest_ns, int((fresh + lasted).max()))
        starts = np.concatenate([self._starts, np.maximum(fresh, self._closed_until)])
        ends = np.concatenate([self._ends, fresh + lasted])
        kept = ends > starts
        order = np.argsort(starts[kept], kind="stable")
        starts, ends = starts[kept][order], ends[kept][order]
        if not len(starts):
            return
        reach = np.maximum.accumulate(ends)
        first = np.concatenate([[True], starts[1:] > reach[:-1]])
        begins = np.flatnonzero(first)
        starts, ends = starts[begins], reach[np.append(begins[1:], len(reach)) - 1]
        close = max(len(starts) - _OPEN, 0)
        if close:
            self._closed_ns += int((ends[:close] - starts[:close]).sum())
            self._closed_until = int(ends[close - 1])
        self._starts, self._ends = starts[close:], ends[close:]
