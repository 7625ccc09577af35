"""How far another host's clock is from ours, told from ordinary HTTP answers."""

from __future__ import annotations

import datetime as dt
import math
from email.utils import parsedate_to_datetime

DATE_RENEWAL_S = 1.5
"""By how much a Date header may be late beside its resolution of 1 s: servers such as uvicorn make it anew once a
second."""

DRIFT = 1e-4
"""How fast two clocks may part (s per s): more than any quartz that NTP would still discipline (max. 500 ppm are
slewed only while an offset is being removed)."""


class ClockOffset:
    """The offset (their clock less ours, s) as an interval that every exchange narrows.

    The answer was stamped between sending and receiving. A Date header ``d`` (s) bounds their clock then by ``[d, d + 1
    + DATE_RENEWAL_S)``; a round that had ended at ``e`` on their clock when it was sent bounds it from below. The
    intervals of successive answers are cut with each other (Marzullo's idea, as in NTP), each widened by ``DRIFT`` with
    its age. If nothing is left a clock was set: the newest answer stands alone.
    """

    def __init__(self) -> None:
        self._low_s = -math.inf
        self._high_s = math.inf
        self._at_s = 0.0

    @property
    def known(self) -> bool:
        """Whether both bounds are known."""
        return math.isfinite(self._low_s) and math.isfinite(self._high_s)

    @property
    def offset_s(self) -> float:
        """Middle of the interval; ask ``known`` first."""
        return (self._low_s + self._high_s) / 2

    @property
    def error_s(self) -> float:
        """Half the width of the interval: the true offset is at most this far from ``offset_s``."""
        return (self._high_s - self._low_s) / 2

    def learn(self, sent_ns: int, received_ns: int, date: str = "", ended_ns: int = 0) -> None:
        """Take in one exchange: our wall clock around it, the Date header, the end of a round in it on their clock."""
        now_s, low, high = received_ns / 1e9, -math.inf, math.inf
        stamp = date_s(date)
        if stamp is not None:
            low, high = stamp - now_s, stamp + 1.0 + DATE_RENEWAL_S - sent_ns / 1e9
        alone = (low, high)
        if ended_ns and ended_ns / 1e9 - now_s <= high:  # else it is another clock's: the header is the host's own
            low = max(low, ended_ns / 1e9 - now_s)
        widening = DRIFT * max(0.0, now_s - self._at_s)
        low, high = max(low, self._low_s - widening), min(high, self._high_s + widening)
        self._low_s, self._high_s = (low, high) if low <= high else alone
        self._at_s = now_s


def date_s(text: str) -> float | None:
    """A Date header (RFC 9110, IMF-fixdate) in s since the epoch; None for what is none."""
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError):
        return None
    return moment.timestamp() if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC).timestamp()
