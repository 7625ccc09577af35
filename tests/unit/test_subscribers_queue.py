"""The queue of one subscriber: conservation, intervals, retries; no threads and no clock."""

from __future__ import annotations

import math

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gpuflight.subscribers.queue import BACKOFF_FIRST_S, BACKOFF_MAX_S, LatestQueue


def test_a_newer_item_takes_the_place_of_the_one_that_waits() -> None:
    queue: LatestQueue[str] = LatestQueue()
    for item in "abc":
        queue.offer(item)
    assert queue.take(0.0) == "c"
    assert queue.take(0.0) is None, "one at a time"
    queue.offer("d")
    queue.delivered()
    assert queue.take(0.0) == "d"
    statistics = queue.statistics()
    assert (statistics.received, statistics.sent, statistics.queued, statistics.dropped_by) == (
        4,
        1,
        1,
        {"replaced": 2},
    )


def test_no_item_before_the_interval_has_passed() -> None:
    queue: LatestQueue[str] = LatestQueue(interval_s=10.0)
    queue.offer("a")
    assert queue.take(100.0) == "a"
    queue.delivered()
    queue.offer("b")
    assert queue.due_in_s(104.0) == 6.0
    assert queue.take(109.9) is None
    queue.offer("c")
    assert queue.take(110.0) == "c"


def test_hurry_ignores_the_interval_but_not_the_pause_before_a_retry() -> None:
    queue: LatestQueue[str] = LatestQueue(interval_s=10.0)
    queue.offer("a")
    assert queue.take(0.0) == "a"
    queue.failed("full", 0.0, retryable=True)
    assert queue.take(BACKOFF_FIRST_S / 2, hurry=True) is None
    assert queue.take(BACKOFF_FIRST_S, hurry=True) == "a"
    queue.delivered()
    queue.offer("b")
    assert queue.take(BACKOFF_FIRST_S, hurry=True) == "b"


def test_retries_pause_longer_each_time_and_start_over_after_success() -> None:
    queue: LatestQueue[str] = LatestQueue()
    queue.offer("a")
    now_s, pauses = 0.0, []
    for _ in range(9):
        assert queue.take(now_s) == "a"
        queue.failed("no network", now_s, retryable=True)
        pauses.append(queue.due_in_s(now_s))
        now_s += pauses[-1]
    assert pauses[:3] == [BACKOFF_FIRST_S, 2 * BACKOFF_FIRST_S, 4 * BACKOFF_FIRST_S]
    assert pauses[-1] == BACKOFF_MAX_S
    assert queue.take(now_s) == "a"
    queue.delivered()
    assert queue.statistics().retries == 9
    queue.offer("b")
    assert queue.take(now_s) == "b"
    queue.failed("no network", now_s, retryable=True)
    assert queue.due_in_s(now_s) == BACKOFF_FIRST_S


def test_what_cannot_be_retried_is_dropped_and_counted() -> None:
    queue: LatestQueue[str] = LatestQueue()
    queue.offer("a")
    queue.take(0.0)
    queue.failed("refused", 0.0, retryable=False)
    statistics = queue.statistics()
    assert queue.idle
    assert statistics.dropped_by == {"failed": 1}
    assert (statistics.errors, statistics.last_error) == (1, "refused")


def test_abandoned_delivery_is_counted_as_dropped() -> None:
    queue: LatestQueue[str] = LatestQueue()
    queue.offer("a")
    queue.take(0.0)
    queue.offer("b")
    queue.abandon()
    queue.offer("c")
    assert queue.statistics().dropped_by == {"closed": 3}
    assert queue.due_in_s(0.0) == math.inf


class Conservation(RuleBasedStateMachine):
    """received = sent + dropped + queued, whatever happens, and nothing is delivered out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: LatestQueue[int] = LatestQueue(interval_s=3.0)
        self.now_s = 0.0
        self.offered = 0
        self.taken: list[int] = []
        self.in_delivery = False

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def offer(self) -> None:
        self.offered += 1
        self.queue.offer(self.offered)

    @rule(hurry=st.booleans())
    def take(self, hurry: bool) -> None:
        due = self.queue.due_in_s(self.now_s, hurry=hurry) == 0.0
        item = self.queue.take(self.now_s, hurry=hurry)
        assert (item is not None) == due
        if item is not None:
            assert not self.in_delivery
            assert not self.taken or item >= self.taken[-1]
            self.taken.append(item)
            self.in_delivery = True

    @precondition(lambda self: self.in_delivery)
    @rule()
    def delivered(self) -> None:
        self.queue.delivered()
        self.in_delivery = False

    @precondition(lambda self: self.in_delivery)
    @rule(retryable=st.booleans())
    def failed(self, retryable: bool) -> None:
        self.queue.failed("no", self.now_s, retryable=retryable)
        self.in_delivery = False

    @rule()
    def close(self) -> None:
        self.queue.close()

    @invariant()
    def conserved(self) -> None:
        statistics = self.queue.statistics()
        assert statistics.received == self.offered
        assert statistics.received == statistics.sent + statistics.dropped + statistics.queued
        assert 0 <= statistics.queued <= 2


TestConservation = Conservation.TestCase
