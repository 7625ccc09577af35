"""The recent past of one metric of one element, in bounded memory.

A series is a step function: a value holds until the next one. So it takes a sample only where the value changed, and
what did not change costs nothing. Times are monotonic seconds.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import compress
from math import inf

_SLOTS = 120
"""Samples kept per series at most: beyond, samples closer together than ``horizon_s / _SLOTS`` are put together."""


class Series:
    """Values of the last ``horizon_s`` seconds, oldest first."""

    __slots__ = ("_fell_s", "_spacing_s", "horizon_s", "rounds_count", "times_s", "values")

    def __init__(self, horizon_s: float) -> None:
        self.horizon_s = horizon_s
        self._spacing_s = horizon_s / _SLOTS
        self._fell_s = -inf
        """When a value was last below the one before it: a counter was reset, if it is one."""
        self.times_s: list[float] = []
        self.values: list[float] = []
        self.rounds_count = 0

    def append(self, time_s: float, value: float) -> None:
        """The value from ``time_s`` on. A sample that follows within the spacing takes the place of the last one."""
        times, values = self.times_s, self.values
        self.rounds_count += 1
        if values:
            if values[-1] == value:
                return
            if len(times) > 1 and time_s - times[-2] < self._spacing_s:
                del times[-1], values[-1]
            if value < values[-1]:
                self._fell_s = time_s
        times.append(time_s)
        values.append(value)
        if len(times) > 1 and (len(times) > _SLOTS or times[1] < time_s - self.horizon_s * 1.5):
            self._forget(time_s - self.horizon_s)

    def _forget(self, before_s: float) -> None:
        """Drop what ended before; the value that held at that moment stays."""
        times = self.times_s
        first = 0
        while first + 1 < len(times) and times[first + 1] <= before_s:
            first += 1
        if first:
            del times[:first], self.values[:first]

    def restart(self) -> None:
        """Forget everything: the clock jumped, or rounds were missed."""
        self.times_s.clear()
        self.values.clear()
        self.rounds_count = 0
        self._fell_s = -inf

    def covered_s(self, now_s: float) -> float:
        """For how long the past is known."""
        return now_s - self.times_s[0] if self.times_s else 0.0

    def spans(self, now_s: float, window_s: float) -> list[tuple[float, float]]:
        """(seconds it held, value) within the last ``window_s``, oldest first."""
        return [span for span in zip(*self._held(now_s, window_s), strict=True) if span[0] > 0]

    def _held(self, now_s: float, window_s: float) -> tuple[list[float], list[float]]:
        """For how long each value held, and the values, in columns: means of long windows are asked for each round."""
        times, begin_s = self.times_s, now_s - window_s
        if not times or times[0] >= now_s:
            return [], []
        first = max(bisect_right(times, begin_s) - 1, 0)
        from_s = [max(times[first], begin_s), *times[first + 1 :]]
        return list(map(operator.sub, [*from_s[1:], now_s], from_s)), self.values[first:]

    def mean(self, now_s: float, window_s: float) -> float | None:
        """Mean over time; None where nothing is known of the window."""
        held_s, values = self._held(now_s, window_s)
        total_s = sum(held_s)
        return sum(map(operator.mul, held_s, values)) / total_s if total_s > 0 else None

    def share(self, now_s: float, window_s: float, holds: Callable[[float], bool]) -> float | None:
        """Share of the time (0 to 1) in which ``holds(value)``; None where nothing is known of the window."""
        held_s, values = self._held(now_s, window_s)
        total_s = sum(held_s)
        return sum(compress(held_s, map(holds, values))) / total_s if total_s > 0 else None

    def slope_per_s(self, now_s: float, window_s: float) -> float | None:
        """Theil–Sen slope (median of the slopes of all pairs of samples): one outlier does not tilt it.

        Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 63 (1968). None below 4 samples.
        """
        begin_s = now_s - window_s
        points = [(t, v) for t, v in zip(self.times_s, self.values, strict=True) if t >= begin_s]
        if points and points[-1][0] < now_s:
            points.append((now_s, points[-1][1]))
        if len(points) < 4:
            return None
        step = max(1, len(points) // 40)  # 780 pairs say as much as 7,000
        points = points[::step]
        slopes = sorted(
            (later - earlier) / (end_s - start_s)
            for n, (start_s, earlier) in enumerate(points)
            for end_s, later in points[n + 1 :]
            if end_s > start_s
        )
        middle = len(slopes) // 2
        return slopes[middle] if len(slopes) % 2 else (slopes[middle - 1] + slopes[middle]) / 2

    def increase(self, now_s: float, window_s: float) -> float | None:
        """By how much a counter rose within the window, resets taken into account: a value below the one before it is
        what was counted since the reset. None with fewer than two samples: the first sight of a counter is no event."""
        times, values = self.times_s, self.values
        if len(values) < 2:
            return None
        begin_s = now_s - window_s
        first = max(bisect_right(times, begin_s), 1)
        if self._fell_s <= begin_s:
            return float(values[-1] - values[first - 1])
        total = 0.0
        for n in range(first, len(values)):
            step = values[n] - values[n - 1]
            total += step if step >= 0 else values[n]
        return total

    def rose(self, now_s: float, window_s: float) -> float | None:
        """The increase; 0 for a counter that was seen before and has not moved, None at its first sight."""
        rose = self.increase(now_s, window_s)
        return 0.0 if rose is None and self.covered_s(now_s) > 0 else rose

    @property
    def size_bytes(self) -> int:
        """Memory of the samples, about: a float and a pointer for each time and value."""
        return 64 * len(self.times_s)


class Table:
    """The recent past of many counters of one element, which rules look at together and only now and then: a row a
    round costs a fraction of a series each."""

    __slots__ = ("_at", "_rows", "_spacing_s", "_times_s", "horizon_s")

    def __init__(self, at: Mapping[str, int], horizon_s: float) -> None:
        self._at = at
        self.horizon_s = horizon_s
        self._spacing_s = horizon_s / _SLOTS
        self._times_s: list[float] = []
        self._rows: list[tuple[float | None, ...]] = []

    def __contains__(self, metric: str) -> bool:
        return metric in self._at

    def append(self, time_s: float, metrics: Mapping[str, float]) -> None:
        """The values from ``time_s`` on; None for what is missing."""
        times, rows = self._times_s, self._rows
        if len(times) > 1 and time_s - times[-2] < self._spacing_s:
            del times[-1], rows[-1]
        times.append(time_s)
        rows.append(tuple(map(metrics.get, self._at)))
        if len(times) > 1 and times[1] < time_s - self.horizon_s * 1.5:
            first = max(bisect_right(times, time_s - self.horizon_s) - 1, 0)
            del times[:first], rows[:first]

    def restart(self) -> None:
        """Forget everything."""
        self._times_s.clear()
        self._rows.clear()

    def series(self, metric: str) -> Series:
        """The past of one metric since it was last missing."""
        series, at = Series(self.horizon_s), self._at[metric]
        for time_s, row in zip(self._times_s, self._rows, strict=True):
            if (value := row[at]) is None:
                series.restart()
            else:
                series.append(time_s, value)
        return series

    def covered_s(self, metric: str, now_s: float) -> float:
        """For how long the past of one metric is known."""
        at, known_s = self._at[metric], 0.0
        for time_s, row in zip(reversed(self._times_s), reversed(self._rows), strict=True):
            if row[at] is None:
                break
            known_s = now_s - time_s
        return known_s

    def increase(self, metric: str, now_s: float, window_s: float) -> float | None:
        """As that of the series of the metric; 0 if it was seen before and has not moved."""
        at, first = self._at[metric], max(bisect_right(self._times_s, now_s - window_s), 1)
        values = [value for row in self._rows[first - 1 :] if (value := row[at]) is not None]
        if len(values) > 1 and len(values) > len(self._rows) - first and all(map(operator.le, values, values[1:])):
            return float(values[-1] - values[0])
        return self.series(metric).rose(now_s, window_s)

    @property
    def size_bytes(self) -> int:
        """Memory of the rows, about."""
        return len(self._rows) * (32 * len(self._at) + 96)
