"""Rates from counters: the difference to the reading before, by the monotonic clock."""

from __future__ import annotations

FIRST_READING = "a rate needs two readings; this was the first"
WENT_BACK = "the counter went back: it was reset, or the device was replaced"


class Rates:
    """Remembers the last reading of every counter; a counter that is not read any more is forgotten.

    ``begin`` opens a round at a time in s; ``per_s`` gives the rate of one counter, or None with ``why``.
    """

    def __init__(self) -> None:
        self.why = FIRST_READING
        self._now_s = 0.0
        self._last: dict[object, tuple[float, int | float]] = {}
        self._seen: dict[object, tuple[float, int | float]] = {}

    def begin(self, now_s: float, *, forget: bool = True) -> None:
        """Open a round. With ``forget`` False, counters that the last round did not read are kept."""
        self._last = self._seen if forget else {**self._last, **self._seen}
        self._seen = {}
        self._now_s = now_s

    def drop(self, keep: set[object]) -> None:
        """Forget every counter whose key's first element is not in ``keep``; for rounds opened without ``forget``."""
        self._last = {key: value for key, value in self._last.items() if isinstance(key, tuple) and key[0] in keep}

    def per_s(self, key: object, value: int | float) -> float | None:
        """Increase per s of the counter ``key`` since its last reading; None (see ``why``) at first or at a reset."""
        difference = self.increase(key, value)
        return None if difference is None else difference[0] / difference[1]

    def increase(self, key: object, value: int | float) -> tuple[float, float] | None:
        """(increase, s that it took) since the last reading; None as ``per_s``."""
        self._seen[key] = (self._now_s, value)
        last = self._last.get(key)
        if last is None:
            self.why = FIRST_READING
            return None
        then_s, before = last
        if value < before:
            self.why = WENT_BACK
            return None
        if self._now_s <= then_s:
            self.why = FIRST_READING
            return None
        return value - before, self._now_s - then_s
