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

_DIGITS_AT_MOST = 20


class ClockOffset:
    """The offset (their clock less ours, s) as an interval that every exchange narrows.

    gpuflight stamps when it had the request (T2) and when it began the answer (T3) to the ns, as NTP does (RFC 5905
    §8). With T1 and T4 of ours around them the offset is within ``[T3 - T4, T2 - T1]``: its middle is NTP's offset,
    half its width half the time on the way, whatever part of it each direction took. Others send a Date header ``d``
    (s) only: it bounds their clock by ``[d, d + 1 + DATE_RENEWAL_S)``, and a round that had ended at ``e`` on their
    clock when it was sent bounds it from below.

    The intervals of successive answers are cut with each other (Marzullo's idea, as in NTP), each widened by ``DRIFT``
    with its age, so that the best of the last exchanges counts. If nothing is left a clock was set: the newest answer
    stands alone.
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

    def learn(self, sent_ns: int, received_ns: int, date: str = "", ended_ns: int = 0, stamps: str = "") -> None:
        """Take in one exchange: our wall clock around it, the Date header, the end of a round in it on their clock, and
        the header ``gpuflight-time-ns``, which makes the others superfluous."""
        now_s, low, high = received_ns / 1e9, -math.inf, math.inf
        exact = stamps_ns(stamps)
        if exact is not None and exact[1] - exact[0] <= received_ns - sent_ns:  # else a clock was set meanwhile
            # As whole numbers: seconds since the epoch as a float are good to 0.2 µs only.
            alone = low, high = (exact[1] - received_ns) / 1e9, (exact[0] - sent_ns) / 1e9
        else:
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


def stamps_ns(text: str) -> tuple[int, int] | None:
    """The two times of a header ``gpuflight-time-ns``, ns since the epoch; None for what is none."""
    parts = text.split()
    if len(parts) != 2 or not all(p.isascii() and p.isdigit() and len(p) <= _DIGITS_AT_MOST for p in parts):
        return None
    received_ns, sent_ns = map(int, parts)
    return (received_ns, sent_ns) if received_ns <= sent_ns else None


def date_s(text: str) -> float | None:
    """A Date header (RFC 9110, IMF-fixdate) in s since the epoch; None for what is none."""
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError):
        return None
    return moment.timestamp() if moment.tzinfo is not None else moment.replace(tzinfo=dt.UTC).timestamp()
