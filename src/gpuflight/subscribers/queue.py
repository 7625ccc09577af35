"""The bounded queue of one subscriber: what waits, what is due, and the count of everything. No threads, no clock.

At every moment ``received = sent + dropped + queued``; items that are being delivered count as queued until they are
settled. They are settled in order: the oldest arrived (``delivered``) or did not (``failed``). Times are seconds of one
monotonic clock. Three policies:

* ``latest``: one item in delivery, one waiting; a newer one takes the place of the one that waits.
* ``block``: first in, first out; when full, there is no room and who offers has to wait or to let it be dropped.
* ``spool``: first in, first out; items are first *received*, then *stored* (by somebody else, on disk); beyond the
  bounds the oldest go. What waits at the end stays, for it is stored.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from typing import Generic, Literal, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from gpuflight.subscribers.retry import Backoff

Item = TypeVar("Item")
Policy = Literal["latest", "spool", "block"]

POISON_TRIES = 5
"""After so many failures in a row that the receiver blames on one item, the item behind it is tried: if that one
passes, the first is poison and is set aside; if it does not, the receiver is ill, and both wait."""

INTERVAL_SLACK = 0.05
"""Rounds come with some jitter; one that is early by less than this share of the interval is not skipped."""


class DeliveryStatistics(Struct, kw_only=True):
    """What became of everything a subscriber was offered. ``dropped_by`` says why: *replaced* by a newer round while it
    waited, *failed*, *attempts* used up, *poison*, *full* (nobody waited any longer), *overflow* of the spool, *spool*
    could not store it, *interval* not yet over, *closed* before its turn.

    ``recovered`` of ``received`` were found in the spool at the start. ``lag_s`` is the age of the oldest item queued.
    """

    received: int = 0
    sent: int = 0
    queued: int = 0
    dropped_by: dict[str, int] = field(default_factory=dict)
    retries: int = 0
    errors: int = 0
    last_error: str = ""
    recovered: int = 0
    queued_bytes: int = 0
    lag_s: float = 0.0

    @property
    def dropped(self) -> int:
        """All that was given up, whatever the reason."""
        return sum(self.dropped_by.values())


class _Entry(Generic[Item]):
    __slots__ = ("attempts", "blamed", "item", "offered_s", "size_bytes")

    def __init__(self, item: Item, size_bytes: int, offered_s: float) -> None:
        self.item = item
        self.size_bytes = size_bytes
        self.offered_s = offered_s
        self.attempts = 0
        self.blamed = 0


class DeliveryQueue(Generic[Item]):
    """See the module. ``interval_s`` is the least time between two deliveries: ``latest`` holds items back for it, the
    others skip items that come too early. ``max_attempts`` 0 is no limit."""

    def __init__(
        self,
        interval_s: float = 0.0,
        *,
        policy: Policy = "latest",
        max_items: int = 1000,
        max_bytes: int = 1 << 28,
        max_attempts: int = 0,
        backoff: Backoff | None = None,
    ) -> None:
        self.interval_s = interval_s
        self.policy = policy
        self.max_items = max_items
        self.max_bytes = max_bytes
        self.max_attempts = max_attempts
        self.closed = False
        self.paused = False
        self.released: list[tuple[Item, str]] = []
        """Policy ``spool``: what was settled and is still stored, with ``sent`` or why it was dropped."""
        self._backoff = backoff or Backoff()
        self._waiting: deque[_Entry[Item]] = deque()
        self._in_delivery: list[_Entry[Item]] = []  # in order; several where the receiver takes the next meanwhile
        self._suspect: _Entry[Item] | None = None
        self._probing = False
        self._unstored: deque[float] = deque()  # when each item that is not stored yet was received
        self._bytes = 0
        self._taken_bytes = 0  # of what is in delivery; of no meaning while nothing is
        self._not_before_s = -math.inf
        self._accepted_s = -math.inf
        self._retry_at_s = -math.inf
        self._statistics = DeliveryStatistics()

    # --- in ---

    def has_room(self, size_bytes: int = 0) -> bool:
        """Whether ``offer`` would take one more; an item larger than the whole queue may have it alone."""
        if self.policy != "block" or self.closed:
            return True
        count = self._count()
        return not count or (count < self.max_items and self._bytes + size_bytes <= self.max_bytes)

    def too_early(self, now_s: float) -> bool:
        """Whether an item that comes now is skipped because of the interval."""
        return self.policy != "latest" and now_s < self._accepted_s + self.interval_s * (1 - INTERVAL_SLACK)

    def offer(self, item: Item, size_bytes: int = 0, now_s: float = 0.0) -> None:
        """Take one more item (policies ``latest`` and ``block``)."""
        self._statistics.received += 1
        if self.closed:
            self._drop("closed")
        elif self.too_early(now_s):
            self._drop("interval")
        elif not self.has_room(size_bytes):
            self._drop("full")
        else:
            if self.policy == "latest":
                while self._waiting:
                    self._give_up(self._waiting.popleft(), "replaced")
            self._accepted_s = now_s
            self._append(_Entry(item, size_bytes, now_s))

    def receive(self, now_s: float) -> bool:
        """Count one more item that is to be stored (policy ``spool``); False if it was dropped instead."""
        self._statistics.received += 1
        if self.closed:
            self._drop("closed")
        elif self.too_early(now_s):
            self._drop("interval")
        else:
            self._accepted_s = now_s
            self._unstored.append(now_s)
            return True
        return False

    def stored(self, item: Item, size_bytes: int) -> None:
        """The oldest item received is stored now, under the name ``item``. Beyond the bounds the oldest are dropped."""
        if not self._unstored:  # given up meanwhile
            self.released.append((item, "closed"))
            return
        self._append(_Entry(item, size_bytes, self._unstored.popleft()))
        while self._waiting and (self._bytes > self.max_bytes or self._count() > self.max_items):
            self._give_up(self._waiting.popleft(), "overflow")

    def lost(self, reason: str) -> None:
        """The oldest item received could not be stored."""
        if self._unstored:
            self._unstored.popleft()
            self._drop(reason)

    def recover(self, item: Item, size_bytes: int, offered_s: float) -> None:
        """An item that an earlier process stored and did not deliver."""
        self._statistics.received += 1
        self._statistics.recovered += 1
        self._append(_Entry(item, size_bytes, offered_s))

    # --- out ---

    def due_in_s(self, now_s: float, *, hurry: bool = False) -> float:
        """Seconds until ``take`` gives something; infinite while nothing waits, something is in delivery, or paused.

        ``hurry`` does not wait for the interval, only for the pause before a retry.
        """
        if not self._waiting or self._in_delivery or self.paused:
            return math.inf
        held_s = self._not_before_s if self.policy == "latest" and not hurry else -math.inf
        return max(0.0, max(held_s, self._retry_at_s) - now_s)

    def take(self, now_s: float, *, hurry: bool = False) -> Item | None:
        """The next item to deliver, if one is due; it must be settled."""
        if self.due_in_s(now_s, hurry=hurry) > 0:
            return None
        self._probing = len(self._waiting) > 1 and self._suspect is self._waiting[0]
        self._suspect = self._suspect if self._probing else None
        if self._probing:
            entry = self._waiting[1]
            del self._waiting[1]
        else:
            entry = self._waiting.popleft()
        self._in_delivery, self._taken_bytes = [entry], entry.size_bytes
        self._not_before_s = now_s + self.interval_s
        return entry.item

    def take_more(self, max_items: int, max_bytes: int) -> list[Item]:
        """Further items to deliver while those taken are under way, in order. The bounds are of all that are in
        delivery; they are at most half of what the queue may hold, so that what it drops for want of room is still
        among the older ones."""
        if self.policy == "latest" or self.paused or self._probing or self._suspect is not None:
            return []
        if not self._in_delivery:
            return []
        waiting, taken = self._waiting, self._in_delivery
        left = min(max_items, self.max_items // 2) - len(taken)
        left_bytes = min(max_bytes, self.max_bytes // 2) - self._taken_bytes
        more: list[Item] = []
        for entry in islice(waiting, max(0, left)):
            left_bytes -= entry.size_bytes
            if left_bytes < 0:
                break
            self._taken_bytes += entry.size_bytes
            taken.append(entry)
            more.append(entry.item)
        for _ in more:
            waiting.popleft()
        return more

    def delivered(self, count: int = 1) -> None:
        """The oldest ``count`` (at least one) of the items in delivery have arrived."""
        arrived, self._in_delivery = self._in_delivery[:count], self._in_delivery[count:]
        if not arrived:  # given up meanwhile
            return
        self._statistics.sent += len(arrived)
        arrived_bytes = sum([entry.size_bytes for entry in arrived])
        self._bytes -= arrived_bytes
        self._taken_bytes -= arrived_bytes
        if self.policy == "spool":
            self.released += [(entry.item, "sent") for entry in arrived]
        if self._probing and self._waiting and self._waiting[0] is self._suspect:
            self._give_up(self._waiting.popleft(), "poison")
        self._suspect, self._probing = None, False
        self._backoff.reset()
        self._retry_at_s = -math.inf

    def take_back(self) -> None:
        """What is in delivery waits again, as if it had not been taken: nothing of it is under way any more."""
        taken, self._in_delivery = self._in_delivery, []
        if self._probing and taken and self._waiting and self._waiting[0] is self._suspect:
            self._waiting.insert(1, taken.pop())
        self._probing = False
        self._put_back(taken)

    def failed(
        self,
        error: str,
        now_s: float,
        *,
        retryable: bool,
        retry_after_s: float | None = None,
        blames_item: bool = False,
    ) -> None:
        """The oldest item in delivery did not arrive. If it may later, it waits again, unless a newer one does already.
        Those taken after it wait again in any case: nothing may be under way any more."""
        taken, self._in_delivery = self._in_delivery, []
        self.note_error(error)
        if not taken:
            return
        entry = taken[0]
        self._put_back(taken[1:])
        probing, self._probing = self._probing, False
        suspect, self._suspect = self._suspect, None
        if suspect is not None:
            suspect.blamed = 0
        if not retryable:
            self._give_up(entry, "failed")
            return
        entry.attempts += 1
        self._retry_at_s = now_s + self._backoff.pause_s(retry_after_s)
        if self.policy == "latest" and self._waiting:
            self._give_up(entry, "replaced")
        elif self.closed and self.policy != "spool":
            self._give_up(entry, "closed")
        elif self.max_attempts and entry.attempts >= self.max_attempts:
            self._give_up(entry, "attempts")
        else:
            self._statistics.retries += 1
            if probing and self._waiting and self._waiting[0] is suspect:
                self._waiting.insert(1, entry)
                return
            self._waiting.appendleft(entry)
            entry.blamed = entry.blamed + 1 if blames_item else 0
            if entry.blamed >= POISON_TRIES and len(self._waiting) > 1 and self.policy != "latest":
                # At once, so that an illness of the receiver has no time to pass between the two.
                self._suspect, self._retry_at_s = entry, now_s

    def note_error(self, error: str) -> None:
        """Count an error, of a delivery or of anything around it."""
        self._statistics.errors += 1
        self._statistics.last_error = error

    # --- the end, and what is known ---

    def close(self) -> None:
        """Take no more, and give up what waits (what is stored stays); an item in delivery may still be settled."""
        self.closed = True
        while self._unstored:
            self.lost("closed")
        while self._waiting and self.policy != "spool":
            self._give_up(self._waiting.popleft(), "closed")

    def abandon(self) -> None:
        """Give up what is in delivery as well: whoever has it does not answer. What is stored waits again, on disk."""
        self.close()
        self.take_back()

    @property
    def last_error(self) -> str:
        """Text of the last error; empty before the first."""
        return self._statistics.last_error

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing is in delivery, nothing is to be stored."""
        return not self._waiting and not self._in_delivery and not self._unstored

    def statistics(self, now_s: float | None = None) -> DeliveryStatistics:
        """A copy of the counts as they stand; with the lag if the time is given."""
        oldest = [entry.offered_s for entry in (*self._in_delivery[:1], *list(self._waiting)[:1])]
        oldest += list(self._unstored)[:1]
        return replace(
            self._statistics,
            queued=self._count() + len(self._unstored),
            queued_bytes=self._bytes,
            dropped_by=dict(self._statistics.dropped_by),
            lag_s=max(0.0, now_s - min(oldest)) if oldest and now_s is not None else 0.0,
        )

    def _count(self) -> int:
        return len(self._waiting) + len(self._in_delivery)

    def _append(self, entry: _Entry[Item]) -> None:
        self._waiting.append(entry)
        self._bytes += entry.size_bytes

    def _put_back(self, entries: list[_Entry[Item]]) -> None:
        if self.closed and self.policy != "spool":
            for entry in entries:
                self._give_up(entry, "closed")
        else:
            self._waiting.extendleft(reversed(entries))

    def _give_up(self, entry: _Entry[Item], reason: str) -> None:
        self._drop(reason)
        self._release(entry, reason)

    def _release(self, entry: _Entry[Item], why: str) -> None:
        self._bytes -= entry.size_bytes
        if self.policy == "spool":
            self.released.append((entry.item, why))

    def _drop(self, reason: str) -> None:
        dropped = self._statistics.dropped_by
        dropped[reason] = dropped.get(reason, 0) + 1
