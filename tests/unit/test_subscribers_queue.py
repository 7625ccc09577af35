"""The queue of one subscriber: conservation, intervals, retries; no threads and no clock."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpuflight.subscribers.queue import POISON_TRIES, DeliveryQueue
from gpuflight.subscribers.retry import BACKOFF_FIRST_S, BACKOFF_MAX_S, RETRY_AFTER_MAX_S, Backoff


def steady() -> Backoff:
    """Pauses without jitter."""
    return Backoff(jitter=lambda: 1.0)


def test_a_newer_item_takes_the_place_of_the_one_that_waits() -> None:
    queue: DeliveryQueue[str] = DeliveryQueue(backoff=steady())
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
    queue: DeliveryQueue[str] = DeliveryQueue(10.0, backoff=steady())
    queue.offer("a")
    assert queue.take(100.0) == "a"
    queue.delivered()
    queue.offer("b")
    assert queue.due_in_s(104.0) == 6.0
    assert queue.take(109.9) is None
    queue.offer("c")
    assert queue.take(110.0) == "c"


def test_hurry_ignores_the_interval_but_not_the_pause_before_a_retry() -> None:
    queue: DeliveryQueue[str] = DeliveryQueue(10.0, backoff=steady())
    queue.offer("a")
    assert queue.take(0.0) == "a"
    queue.failed("full", 0.0, retryable=True)
    assert queue.take(BACKOFF_FIRST_S / 2, hurry=True) is None
    assert queue.take(BACKOFF_FIRST_S, hurry=True) == "a"
    queue.delivered()
    queue.offer("b")
    assert queue.take(BACKOFF_FIRST_S, hurry=True) == "b"


def test_retries_pause_longer_each_time_and_start_over_after_success() -> None:
    queue: DeliveryQueue[str] = DeliveryQueue(backoff=steady())
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
    queue: DeliveryQueue[str] = DeliveryQueue(backoff=steady())
    queue.offer("a")
    queue.take(0.0)
    queue.failed("refused", 0.0, retryable=False)
    statistics = queue.statistics()
    assert queue.idle
    assert statistics.dropped_by == {"failed": 1}
    assert (statistics.errors, statistics.last_error) == (1, "refused")


def test_abandoned_delivery_is_counted_as_dropped() -> None:
    queue: DeliveryQueue[str] = DeliveryQueue(backoff=steady())
    queue.offer("a")
    queue.take(0.0)
    queue.offer("b")
    queue.abandon()
    queue.offer("c")
    assert queue.statistics().dropped_by == {"closed": 3}
    assert queue.due_in_s(0.0) == math.inf


def test_jitter_cuts_at_most_half_and_the_receiver_is_obeyed() -> None:
    for share in (0.0, 0.3, 1.0):
        backoff = Backoff(2.0, 8.0, jitter=lambda share=share: share)  # type: ignore[misc]
        assert [backoff.pause_s() for _ in range(4)] == [
            pytest.approx(full * (0.5 + 0.5 * share)) for full in (2.0, 4.0, 8.0, 8.0)
        ]
    backoff.reset()
    assert backoff.pause_s(retry_after_s=100.0) == 100.0
    assert backoff.pause_s(retry_after_s=1e9) == RETRY_AFTER_MAX_S
    assert backoff.pause_s(retry_after_s=0.0) == 8.0


def test_retry_after_is_waited_for_also_in_a_hurry() -> None:
    queue: DeliveryQueue[str] = DeliveryQueue(backoff=steady())
    queue.offer("a")
    queue.take(0.0)
    queue.failed("429", 0.0, retryable=True, retry_after_s=30.0)
    assert queue.due_in_s(0.0, hurry=True) == 30.0


def test_block_has_room_by_items_and_bytes_and_counts_what_it_refuses() -> None:
    queue: DeliveryQueue[str] = DeliveryQueue(policy="block", max_items=3, max_bytes=100)
    assert queue.has_room(1000), "one that is larger than the queue may have it alone"
    queue.offer("a", 60)
    assert not queue.has_room(41)
    queue.offer("b", 41)
    queue.offer("c", 20)
    queue.offer("d", 20)
    assert not queue.has_room(0)
    queue.offer("e", 0)
    assert [queue.take(0.0) and _settle(queue) for _ in range(3)] == [None, None, None]
    assert queue.statistics().dropped_by == {"full": 2}
    assert queue.statistics().sent == 3


def _settle(queue: DeliveryQueue[Any]) -> None:
    queue.delivered()


def test_spool_drops_the_oldest_beyond_its_bounds_and_says_which() -> None:
    queue: DeliveryQueue[int] = DeliveryQueue(policy="spool", max_items=3, max_bytes=100)
    for item in range(1, 6):
        assert queue.receive(float(item))
        queue.stored(item, 30)
    assert queue.released == [(1, "overflow"), (2, "overflow")]
    assert queue.take(5.0) == 3
    assert queue.receive(6.0)
    queue.stored(6, 90)
    assert queue.released[2:] == [(4, "overflow"), (5, "overflow"), (6, "overflow")], "3 is being delivered"
    queue.delivered()
    assert queue.released[-1] == (3, "sent")
    statistics = queue.statistics()
    assert (statistics.received, statistics.sent, statistics.queued, statistics.queued_bytes) == (6, 1, 0, 0)


def test_spool_keeps_what_is_stored_when_it_closes() -> None:
    queue: DeliveryQueue[int] = DeliveryQueue(policy="spool")
    for item in (1, 2):
        queue.receive(0.0)
        queue.stored(item, 1)
    queue.receive(0.0)
    assert queue.take(0.0) == 1
    queue.abandon()
    assert queue.statistics().queued == 2
    assert queue.statistics().dropped_by == {"closed": 1}, "the one that was not stored"
    queue.delivered()
    queue.stored(3, 1)
    assert queue.released == [(3, "closed")]
    assert queue.statistics().sent == 0


def test_first_in_first_out_skips_what_comes_before_the_interval() -> None:
    queue: DeliveryQueue[int] = DeliveryQueue(10.0, policy="block")
    for item, now_s in enumerate((0.0, 4.9, 9.8, 12.0, 20.0)):
        queue.offer(item, 0, now_s)
    assert queue.statistics().dropped_by == {"interval": 2}
    assert queue.take(20.0) == 0
    queue.delivered()
    assert queue.take(20.0) == 2, "what is late is not held back"


def test_lag_is_the_age_of_the_oldest() -> None:
    queue: DeliveryQueue[int] = DeliveryQueue(policy="block")
    queue.offer(1, 0, 5.0)
    queue.offer(2, 0, 8.0)
    assert queue.statistics(9.0).lag_s == 4.0
    queue.take(9.0)
    assert queue.statistics(9.0).lag_s == 4.0
    queue.delivered()
    assert queue.statistics(9.0).lag_s == 1.0


def test_paused_takes_nothing_and_receives_on() -> None:
    queue: DeliveryQueue[int] = DeliveryQueue(policy="block")
    queue.paused = True
    queue.offer(1)
    assert queue.take(0.0) is None
    assert queue.due_in_s(0.0) == math.inf
    queue.paused = False
    assert queue.take(0.0) == 1


def _blame(queue: DeliveryQueue[int], now_s: float) -> float:
    while queue.due_in_s(now_s) > 0:
        now_s += queue.due_in_s(now_s)
    assert queue.take(now_s) == 1
    queue.failed("500", now_s, retryable=True, blames_item=True)
    return now_s


def test_a_poison_item_is_set_aside_once_the_next_one_passes() -> None:
    queue: DeliveryQueue[int] = DeliveryQueue(policy="spool", backoff=steady())
    for item in (1, 2, 3):
        queue.receive(0.0)
        queue.stored(item, 1)
    now_s = 0.0
    for _ in range(POISON_TRIES):
        now_s = _blame(queue, now_s)
    assert queue.take(now_s) == 2, "at once"
    queue.delivered()
    assert queue.statistics().dropped_by == {"poison": 1}
    assert queue.released == [(2, "sent"), (1, "poison")]
    assert queue.take(now_s) == 3


def test_a_receiver_that_is_ill_costs_no_item() -> None:
    queue: DeliveryQueue[int] = DeliveryQueue(policy="spool", backoff=steady())
    for item in (1, 2):
        queue.receive(0.0)
        queue.stored(item, 1)
    now_s = 0.0
    for _ in range(3):
        for _ in range(POISON_TRIES):
            now_s = _blame(queue, now_s)
        assert queue.take(now_s) == 2
        queue.failed("500", now_s, retryable=True, blames_item=True)
    now_s += BACKOFF_MAX_S
    assert queue.take(now_s) == 1
    queue.delivered()
    assert queue.take(now_s) == 2
    queue.delivered()
    assert queue.statistics().dropped == 0


def test_tries_may_be_limited() -> None:
    queue: DeliveryQueue[int] = DeliveryQueue(policy="block", max_attempts=2, backoff=steady())
    queue.offer(1)
    for now_s in (0.0, 10.0):
        assert queue.take(now_s) == 1
        queue.failed("no network", now_s, retryable=True)
    assert queue.statistics().dropped_by == {"attempts": 1}


def filled(count: int, **more: Any) -> DeliveryQueue[int]:
    queue: DeliveryQueue[int] = DeliveryQueue(policy="spool", backoff=steady(), **more)
    for item in range(1, count + 1):
        queue.receive(0.0)
        queue.stored(item, 1)
    return queue


def test_the_next_may_be_taken_while_those_before_are_under_way() -> None:
    queue = filled(30, max_items=40)
    assert queue.take_more(5, 100) == [], "only after a first one"
    assert queue.take(0.0) == 1
    assert queue.take(0.0) is None
    assert queue.take_more(4, 100) == [2, 3, 4]
    assert queue.take_more(4, 100) == []
    queue.delivered(3)
    assert queue.statistics().queued == 27
    assert queue.take_more(100, 4) == [5, 6, 7], "the bounds are of all under way"
    assert queue.take_more(100, 100) == list(range(8, 24)), "at most half of the queue"
    queue.delivered()
    queue.failed("no", 0.0, retryable=False)
    assert queue.take(0.0) == 6, "those after it wait again"
    assert queue.take_more(3, 100) == [7, 8]
    queue.failed("no", 0.0, retryable=True)
    assert queue.take(0.0) is None
    assert queue.take(BACKOFF_FIRST_S) == 6
    queue.delivered()
    assert queue.statistics().sent == 5 and queue.statistics().dropped_by == {"failed": 1}


def test_what_is_taken_back_is_next_as_if_it_had_not_been_taken() -> None:
    queue = filled(5)
    assert queue.take(0.0) == 1
    assert queue.take_more(3, 100) == [2, 3]
    queue.delivered()
    queue.take_back()
    statistics = queue.statistics()
    assert (statistics.sent, statistics.queued, statistics.retries, statistics.errors) == (1, 4, 0, 0)
    assert queue.take(0.0) == 2
    queue.take_back()
    queue.paused = True
    assert queue.take(0.0) is None
    queue.paused = False
    assert queue.take(0.0) == 2
    queue.paused = True
    assert queue.take_more(10, 100) == [], "who pauses wants no more of them"


def test_one_that_is_tried_in_place_of_a_suspect_goes_alone_and_behind_it_again() -> None:
    queue = filled(4)
    now_s = 0.0
    for _ in range(POISON_TRIES):
        now_s = _blame(queue, now_s)
    assert queue.take(now_s) == 2
    assert queue.take_more(10, 100) == []
    queue.take_back()
    assert queue.take(now_s) == 2, "the suspect is still one"
    queue.delivered()
    assert queue.statistics().dropped_by == {"poison": 1}
    assert [queue.take(now_s), *queue.take_more(10, 100)] == [3, 4]


class Conservation(RuleBasedStateMachine):
    """received = sent + dropped + queued, whatever happens; nothing is delivered out of order, nothing that was settled
    is ever delivered again, and of what is stored exactly the released has to be forgotten."""

    @initialize(
        policy=st.sampled_from(["latest", "block", "spool"]),
        interval_s=st.sampled_from([0.0, 3.0]),
        max_attempts=st.sampled_from([0, 2]),
        recovered=st.integers(0, 3),
        scale=st.sampled_from([1, 5]),
    )
    def begin(self, policy: Any, interval_s: float, max_attempts: int, recovered: int, scale: int) -> None:
        self.max_items, self.max_bytes = 4 * scale, 100 * scale
        self.queue: DeliveryQueue[int] = DeliveryQueue(
            interval_s, policy=policy, max_items=self.max_items, max_bytes=self.max_bytes, max_attempts=max_attempts
        )
        self.policy = policy
        self.now_s = 0.0
        self.offered = self.recovered = recovered if policy == "spool" else 0
        self.unstored = 0
        self.on_disk: set[int] = set()
        self.last_id = 0
        self.settled: list[int] = []
        self.taken: list[int] = []
        for _ in range(self.recovered):
            self.last_id += 1
            self.queue.recover(self.last_id, 10, 0.0)
            self.on_disk.add(self.last_id)

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(size_bytes=st.integers(0, 120))
    def offer(self, size_bytes: int) -> None:
        self.offered += 1
        if self.policy == "spool":
            self.unstored += self.queue.receive(self.now_s)
        else:
            self.last_id += 1
            self.queue.offer(self.last_id, size_bytes, self.now_s)

    @precondition(lambda self: self.unstored)
    @rule(size_bytes=st.integers(0, 120), works=st.booleans())
    def store(self, size_bytes: int, works: bool) -> None:
        self.unstored -= 1
        if works:
            self.last_id += 1
            self.on_disk.add(self.last_id)
            self.queue.stored(self.last_id, size_bytes)
        else:
            self.queue.lost("spool")

    @rule(hurry=st.booleans())
    def take(self, hurry: bool) -> None:
        due = self.queue.due_in_s(self.now_s, hurry=hurry) == 0.0
        item = self.queue.take(self.now_s, hurry=hurry)
        assert (item is not None) == due
        if item is not None:
            assert not self.taken
            assert item not in self.settled
            self.taken = [item]

    @precondition(lambda self: self.taken)
    @rule(more=st.integers(0, 12), more_bytes=st.integers(0, 500))
    def take_more(self, more: int, more_bytes: int) -> None:
        found = self.queue.take_more(more, more_bytes)
        assert not found or len(self.taken) + len(found) <= min(more, self.max_items // 2)
        assert not found or not self.queue.paused
        self.taken += found
        assert self.taken == sorted(self.taken)
        assert not set(self.taken) & set(self.settled)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def delivered(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.taken)))
        before = self.queue.statistics().sent
        self.queue.delivered(count)
        assert self.queue.statistics().sent == before + count
        assert not self.settled or self.taken[0] > max(self.settled), "out of order"
        self.settled += self.taken[:count]
        self.taken = self.taken[count:]

    @precondition(lambda self: self.taken and self.policy != "latest")
    @rule()
    def take_back(self) -> None:
        before = self.queue.statistics()
        self.queue.take_back()
        after = self.queue.statistics()
        assert (after.sent, after.errors, after.retries) == (before.sent, before.errors, before.retries)
        assert self.queue.closed or after.dropped == before.dropped
        self.taken = []

    @precondition(lambda self: self.taken)
    @rule(retryable=st.booleans(), blames=st.booleans(), retry_after_s=st.none() | st.floats(0, 1e6))
    def failed(self, retryable: bool, blames: bool, retry_after_s: float | None) -> None:
        self.queue.failed("no", self.now_s, retryable=retryable, blames_item=blames, retry_after_s=retry_after_s)
        self.taken = []

    @precondition(lambda self: not self.taken)
    @rule(times=st.integers(1, 8))
    def receiver_blames(self, times: int) -> None:
        """Enough in a row to make an item a suspect."""
        for _ in range(times):
            self.now_s += BACKOFF_MAX_S
            self.take(hurry=True)
            if self.taken:
                self.queue.failed("500", self.now_s, retryable=True, blames_item=True)
                self.taken = []

    @rule()
    def pause(self) -> None:
        self.queue.paused = not self.queue.paused

    @rule()
    def forget(self) -> None:
        while self.queue.released:
            item, _ = self.queue.released.pop()
            self.on_disk.remove(item)

    @rule()
    def close(self) -> None:
        self.queue.close()

    @rule()
    def abandon(self) -> None:
        self.queue.abandon()
        if self.taken:
            sent = self.queue.statistics().sent
            self.queue.delivered(len(self.taken))  # it comes back after all
            assert self.queue.statistics().sent == sent
            self.taken = []

    @invariant()
    def conserved(self) -> None:
        statistics = self.queue.statistics(self.now_s)
        assert statistics.received == self.offered
        assert statistics.received == statistics.sent + statistics.dropped + statistics.queued
        assert statistics.recovered == self.recovered
        assert statistics.queued >= 0 and statistics.queued_bytes >= 0 and statistics.lag_s >= 0
        assert self.queue.idle == (statistics.queued == 0)
        if self.policy == "latest":
            assert statistics.queued <= 2
        elif self.policy == "block":
            assert statistics.queued <= self.max_items
            assert statistics.queued_bytes <= self.max_bytes or statistics.queued == 1
        if self.policy == "spool" and not self.queue.closed:
            stored = statistics.queued - self.unstored
            assert stored == len(self.on_disk) - len(self.queue.released)


def test_conservation() -> None:
    run_state_machine_as_test(Conservation)
