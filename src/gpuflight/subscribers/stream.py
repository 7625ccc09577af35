"""Delivers rounds that wait on disk, the next ones while those before are under way. No queue and no lock in here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from gpuflight.errors import DeliveryError
from gpuflight.subscribers.base import PackedSubscriber
from gpuflight.subscribers.spool import Spool

WINDOW_BYTES = 4 * 1024 * 1024
"""What is under way at a time at most, but for one round that is larger. What a slow receiver takes much longer for
than its deadline would be sent over and over."""

READ_ITEMS = 100
"""Rounds read from a spool at once, fewer than may be under way, so that some are while the next are read."""

SETTLE_S = 0.5
"""How soon whoever waits for a receiver looks up: for rounds that have come, and whether it is to end."""


class Source(Protocol):
    """Where the items of a stream come from, and who is told what becomes of them; in order, both."""

    def more(self, max_items: int, max_bytes: int) -> list[Any]:
        """Items to begin now, so that no more than that are under way in all; none if there are none, or none is to be
        begun."""

    def settled(self, arrived: int, error: DeliveryError | None) -> None:
        """The oldest so many have arrived. With an error the one after them has not, and all others wait again."""

    def ended(self) -> bool:
        """Whether nothing more is to be waited for."""

    def call(self, what: str, function: Callable[[], None]) -> DeliveryError | None:
        """Call into the sink: nothing is raised, what was comes back."""


class Stream:
    """One sink with its spool."""

    def __init__(self, sink: PackedSubscriber, spool: Spool, source: Source) -> None:
        self._sink = sink
        self._spool = spool
        self._source = source
        self._window = max(1, min(sink.window_items, sink.settings.max_items // 2))
        self._deadline_s = float(sink.settings.deliver_deadline_s)

    def run(self, first: Any) -> None:
        """Deliver one item and all that the source has meanwhile; at the end nothing is under way. What was not settled
        then waits again: so the source has to see to it."""
        items = [first, *self._more(1)]
        under_way = 0
        refused: DeliveryError | None = None  # of the first item that could not be begun
        draining = False  # an item was not begun: none after it may be
        heard_s = time.monotonic()
        while items or under_way:
            if items:
                heard_s = heard_s if under_way else time.monotonic()
                begun, refused = self._begin(items)
                under_way += begun
                draining = begun < len(items)
                items = [] if draining else self._more(under_way)
            if not under_way:
                break
            arrived, error = self._settle(under_way, 0.0 if items else SETTLE_S)
            if arrived:
                heard_s = time.monotonic()
                under_way -= arrived
            elif error is None and time.monotonic() > heard_s + self._deadline_s + 2 * SETTLE_S:
                error = DeliveryError(f"no answer within {self._deadline_s:g} s", retryable=True)
            if error is not None or self._source.ended():
                self._source.call("recall", self._sink.recall)
                self._source.settled(arrived, error)
                return
            if arrived:
                self._source.settled(arrived, None)
            if not draining and not items:
                items = self._more(under_way)
        if refused is not None:
            self._source.call("recall", self._sink.recall)
            self._source.settled(0, refused)

    def _more(self, under_way: int) -> list[Any]:
        # Not one for each that arrives: reading, sending and forgetting cost less by the round, the more there are.
        if 2 * (self._window - under_way) < min(READ_ITEMS, self._window):
            return []
        return self._source.more(min(self._window, under_way + READ_ITEMS), WINDOW_BYTES)

    def _begin(self, items: list[Any]) -> tuple[int, DeliveryError | None]:
        """How many of the first are under way, and why the one after them is not, if that is known."""
        begun: list[int] = []

        def begin() -> None:
            parcels = self._spool.read_all(items)
            if not parcels:
                raise DeliveryError(f"spool {self._spool.path}: round {items[0]} is gone", retryable=False)
            begun.append(self._sink.begin(parcels))
            if not 0 < begun[0] <= len(parcels):
                raise DeliveryError(f"{begun.pop()} of {len(parcels)} rounds are under way, it says", retryable=True)

        error = self._source.call("deliver", begin)
        return sum(begun), error

    def _settle(self, under_way: int, wait_s: float) -> tuple[int, DeliveryError | None]:
        arrived: list[int] = []

        def settle() -> None:
            arrived.append(self._sink.settle(wait_s))
            if not 0 <= arrived[0] <= under_way:
                raise DeliveryError(f"{arrived.pop()} of {under_way} rounds arrived, it says", retryable=True)

        error = self._source.call("deliver", settle)
        return sum(arrived), error
