"""Rates of a session from its sums: the difference to the round before, over the time that it covers.

What a log tells comes in pieces, since writers buffer. So the difference is taken over the round, or over the time
that the new lines tell of where that is longer; a long pause is a rate of 0, a short one may be the buffer: unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuflight.collectors.rates import FIRST_READING, WENT_BACK

if TYPE_CHECKING:
    from gpuflight.events.activity.summary import Summary

QUIET_S = 10.0
"""A writer of batches fills its buffer of 8 KiB, a batch each 250 ms, in less."""

CATCHING_UP = "the log is being caught up with"
NOTHING_NEW = "nothing new came in the log this round; its writer may hold lines back"


class Pace:
    """Of one session in one round: ``device_s`` and ``host_s`` are the times that what is new of kernels and copies,
    and of waits and allocations, is spread over; None if there is no telling, with ``device_why`` and ``host_why``."""

    def __init__(self, now: Summary, before: Summary | None, elapsed_s: float, quiet: bool) -> None:
        self.before = before
        self.device_s, self.device_why = self._spread(
            now, elapsed_s, quiet, now.device_latest_ns, before.device_latest_ns if before is not None else 0
        )
        self.host_s, self.host_why = self._spread(
            now, elapsed_s, quiet, now.host_latest_ns, before.host_latest_ns if before is not None else 0
        )

    def _spread(
        self, now: Summary, elapsed_s: float, quiet: bool, latest_ns: int, before_ns: int
    ) -> tuple[float | None, str]:
        before = self.before
        if before is None or elapsed_s <= 0:
            return None, FIRST_READING
        if now.lag_bytes or before.lag_bytes:
            return None, CATCHING_UP
        if latest_ns <= before_ns:
            if quiet or now.end:
                return elapsed_s, ""
            return (None, NOTHING_NEW) if now.events == before.events or not latest_ns else (elapsed_s, "")
        return max(elapsed_s, (latest_ns - before_ns) / 1e9) if before_ns else elapsed_s, ""

    def device(self, now: float, before: float | None) -> tuple[float | None, str]:
        """Rate per s of a sum of kernels or copies; None and why."""
        return _rate(now, before, self.device_s, self.device_why)

    def host(self, now: float, before: float | None) -> tuple[float | None, str]:
        """Rate per s of a sum of waits or allocations; None and why."""
        return _rate(now, before, self.host_s, self.host_why)


def _rate(now: float, before: float | None, seconds: float | None, why: str) -> tuple[float | None, str]:
    if seconds is None:
        return None, why
    if before is None:
        before = 0  # it came since the round before
    if now < before:
        return None, WENT_BACK
    return (now - before) / seconds, ""
