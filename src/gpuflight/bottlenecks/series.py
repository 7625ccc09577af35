"""The recent past of one metric of one element, in bounded memory.

A series is a step function: a value holds until the next one. So it takes a sample only where the value changed, and
what did not change costs nothing. Times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Callable

_SLOTS = 120
"""Samples kept per series at most: beyond, samples closer together than ``horizon_s / _SLOTS`` are put together."""


class Series:
    """Values of the last ``horizon_s`` seconds, oldest first."""

    __slots__ = ("_spacing_s", "horizon_s", "rounds_count", "times_s", "values")

    def __init__(self, horizon_s: float) -> None:
        self.horizon_s = horizon_s
        self._spacing_s = horizon_s / _SLOTS
        self.times_s: list[float] = []
        self.values: list[float] = []
        self.rounds_count = 0

    def append(self, time_s: float, value: float) -> None:
        """The value from ``time_s`` on. A sample that follows within the spacing takes the place of the last one."""
        times, values = self.times_s, self.values
        self.rounds_count += 1
        if values and values[-1] == value:
            return
        if len(times) > 1 and time_s - times[-2] < self._spacing_s:
            times[-1], values[-1] = time_s, value
            return
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

    def covered_s(self, now_s: float) -> float:
        """For how long the past is known."""
        return now_s - self.times_s[0] if self.times_s else 0.0

    def spans(self, now_s: float, window_s: float) -> list[tuple[float, float]]:
        """(seconds it held, value) within the last ``window_s``, oldest first."""
        begin_s = now_s - window_s
        spans = []
        until_s = now_s
        for time_s, value in zip(reversed(self.times_s), reversed(self.values), strict=True):
            from_s = max(time_s, begin_s)
            if until_s > from_s:
                spans.append((until_s - from_s, value))
            until_s = min(until_s, time_s)
            if time_s <= begin_s:
                break
        spans.reverse()
        return spans

    def mean(self, now_s: float, window_s: float) -> float | None:
        """Mean over time; None where nothing is known of the window."""
        spans = self.spans(now_s, window_s)
        total_s = sum(held_s for held_s, _value in spans)
        return sum(held_s * value for held_s, value in spans) / total_s if total_s > 0 else None

    def share(self, now_s: float, window_s: float, holds: Callable[[float], bool]) -> float | None:
        """Share of the time (0 to 1) in which ``holds(value)``; None where nothing is known of the window."""
        spans = self.spans(now_s, window_s)
        total_s = sum(held_s for held_s, _value in spans)
        return sum(held_s for held_s, value in spans if holds(value)) / total_s if total_s > 0 else None

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
        if len(self.values) < 2:
            return None
        begin_s = now_s - window_s
        total = 0.0
        for n in range(1, len(self.values)):
            if self.times_s[n] > begin_s:
                step = self.values[n] - self.values[n - 1]
                total += step if step >= 0 else self.values[n]
        return total

    @property
    def size_bytes(self) -> int:
        """Memory of the samples, about: a float and a pointer for each time and value."""
        return 64 * len(self.times_s)
