"""The bounded queue of one subscriber: what waits, what is due, and the count of everything. No threads, no clock.

At every moment ``received = sent + dropped + queued``; the item that is being delivered counts as queued until it is
settled. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

Item = TypeVar("Item")

BACKOFF_FIRST_S = 1.0
BACKOFF_FACTOR = 2.0
BACKOFF_MAX_S = 60.0


class DeliveryStatistics(Struct, kw_only=True):
    """What became of everything a subscriber was offered. ``dropped_by`` says why: *replaced* by a newer round while it
    waited, *failed*, or *closed* before its turn."""

    received: int = 0
    sent: int = 0
    queued: int = 0
    dropped_by: dict[str, int] = field(default_factory=dict)
    retries: int = 0
    errors: int = 0
    last_error: str = ""

    @property
    def dropped(self) -> int:
        """All that was given up, whatever the reason."""
        return sum(self.dropped_by.values())


class LatestQueue(Generic[Item]):
    """Policy ``latest``: one item in delivery, one waiting; a newer one takes the place of the one that waits.

    ``interval_s`` is the least time between the starts of two deliveries.
    """

    def __init__(self, interval_s: float = 0.0) -> None:
        self.interval_s = interval_s
        self.closed = False
        self._waiting: Item | None = None
        self._in_delivery: Item | None = None
        self._not_before_s = -math.inf
        self._retry_at_s = -math.inf
        self._backoff_s = BACKOFF_FIRST_S
        self._statistics = DeliveryStatistics()

    def offer(self, item: Item) -> None:
        """Take one more item."""
        self._statistics.received += 1
        if self.closed:
            self._drop("closed")
            return
        if self._waiting is not None:
            self._drop("replaced")
        self._waiting = item

    def due_in_s(self, now_s: float, *, hurry: bool = False) -> float:
        """Seconds until ``take`` gives something; infinite while nothing waits or something is in delivery.

        ``hurry`` does not wait for the interval, only for the pause before a retry.
        """
        if self._waiting is None or self._in_delivery is not None:
            return math.inf
        return max(0.0, (self._retry_at_s if hurry else max(self._not_before_s, self._retry_at_s)) - now_s)

    def take(self, now_s: float, *, hurry: bool = False) -> Item | None:
        """The next item to deliver, if one is due; it must be settled."""
        if self.due_in_s(now_s, hurry=hurry) > 0:
            return None
        item, self._waiting = self._waiting, None
        self._in_delivery = item
        self._not_before_s = now_s + self.interval_s
        return item

    def delivered(self) -> None:
        """The item taken has arrived."""
        self._in_delivery = None
        self._statistics.sent += 1
        self._backoff_s = BACKOFF_FIRST_S
        self._retry_at_s = -math.inf

    def failed(self, error: str, now_s: float, *, retryable: bool) -> None:
        """The item taken did not arrive. If it may later, it waits again, unless a newer one does already."""
        item, self._in_delivery = self._in_delivery, None
        self.note_error(error)
        if not retryable:
            self._drop("failed")
            return
        self._retry_at_s = now_s + self._backoff_s
        self._backoff_s = min(self._backoff_s * BACKOFF_FACTOR, BACKOFF_MAX_S)
        if self._waiting is not None:
            self._drop("replaced")
        elif self.closed:
            self._drop("closed")
        else:
            self._waiting = item
            self._statistics.retries += 1

    def note_error(self, error: str) -> None:
        """Count an error, of a delivery or of anything around it."""
        self._statistics.errors += 1
        self._statistics.last_error = error

    @property
    def last_error(self) -> str:
        """Text of the last error; empty before the first."""
        return self._statistics.last_error

    def close(self) -> None:
        """Take no more, and give up what waits; an item in delivery may still be settled."""
        self.closed = True
        if self._waiting is not None:
            self._waiting = None
            self._drop("closed")

    def abandon(self) -> None:
        """Give up the item in delivery as well: whoever had it does not answer."""
        self.close()
        if self._in_delivery is not None:
            self._in_delivery = None
            self._drop("closed")

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is in delivery."""
        return self._waiting is None and self._in_delivery is None

    def statistics(self) -> DeliveryStatistics:
        """A copy of the counts as they stand."""
        queued = (self._waiting is not None) + (self._in_delivery is not None)
        return replace(self._statistics, queued=queued, dropped_by=dict(self._statistics.dropped_by))

    def _drop(self, reason: str) -> None:
        dropped = self._statistics.dropped_by
        dropped[reason] = dropped.get(reason, 0) + 1
