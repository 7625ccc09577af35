"""The set of subscribers: nobody waits for anybody, threads stay constant, everything is counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from gpuflight.errors import ConfigError, DeliveryError, InputError
from gpuflight.graph import Graph, nodes
from gpuflight.graph.diff import Diff
from gpuflight.rounds import Environment, Round
from gpuflight.subscribers.base import Subscriber, SubscriberSettings
from gpuflight.subscribers.delivery import SubscriberSet, SubscriberStatus
from gpuflight.subscribers.memory import Memory, MemorySettings

LONG_S = 60.0
"""A deadline that only a broken test reaches."""


def make_round(number: int) -> Round:
    return Round(
        number=number,
        time_ns=1_700_000_000_000_000_000 + number,
        duration_s=0.1,
        graph=Graph([nodes.Process(pid=number, start=1)]),
        diff=Diff(),
        coverage=[],
        env=Environment(hostname="h"),
    )


class Probe(Subscriber):
    """Records what it is called for; ``gate`` holds deliveries back."""

    abstract = True

    def __init__(self, name: str = "probe", interval_s: float = 0.0) -> None:
        super().__init__(SubscriberSettings(name=name, expected_update_interval_s=interval_s))
        self.calls: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.raises: BaseException | None = None

    def start(self) -> None:
        self.calls.append("start")

    def deliver(self, completed: Round) -> None:
        self.entered.set()
        self.gate.wait(LONG_S)
        if self.raises is not None:
            raise self.raises
        self.calls.append(f"deliver {completed.number}")

    def flush(self, deadline_s: float) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def members() -> Iterator[SubscriberSet]:
    members = SubscriberSet()
    yield members
    members.close(0.0)


def status(members: SubscriberSet, name: str) -> SubscriberStatus:
    found = next(line for line in members.status() if line.name == name)
    statistics = found.statistics
    assert statistics.received == statistics.sent + statistics.dropped + statistics.queued
    return found


def test_lifecycle(members: SubscriberSet) -> None:
    probe = Probe()
    members.add(probe)
    members.publish(make_round(1))
    assert members.flush(LONG_S)
    members.publish(make_round(2))
    assert members.close(LONG_S)
    assert probe.calls == ["start", "deliver 1", "flush", "deliver 2", "flush", "close"]
    assert status(members, "probe").state == "stopped"
    assert members.close(LONG_S), "closing twice is fine"
    assert probe.calls.count("close") == 1


def test_a_hanging_subscriber_harms_nobody(members: SubscriberSet) -> None:
    hanging, healthy = Probe("hanging"), Memory()
    hanging.gate.clear()
    members.add(hanging)
    members.add(healthy)
    members.publish(make_round(1))
    assert hanging.entered.wait(LONG_S)
    for number in range(2, 101):
        members.publish(make_round(number))
    assert not members.flush(0.2), "the flush is bounded and tells the truth"
    assert healthy.latest is not None
    assert healthy.latest.number == 100
    assert status(members, "hanging").statistics.queued == 2
    assert not members.remove("hanging", 0.0)
    hanging.gate.set()


def test_a_subscriber_left_behind_is_counted_to_the_end(members: SubscriberSet) -> None:
    hanging = Probe("hanging")
    hanging.gate.clear()
    members.add(hanging)
    members.publish(make_round(1))
    assert hanging.entered.wait(LONG_S)
    members.publish(make_round(2))
    assert not members.close(0.0)
    assert status(members, "hanging").statistics.dropped_by == {"closed": 2}
    members.publish(make_round(3))
    assert status(members, "hanging").statistics.dropped_by == {"closed": 3}
    hanging.gate.set()


@pytest.mark.parametrize(
    "raised",
    [DeliveryError("refused", retryable=False), KeyError("x"), SystemExit(3), RecursionError()],
    ids=lambda error: type(error).__name__,
)
def test_a_raising_subscriber_costs_its_round_only(members: SubscriberSet, raised: BaseException) -> None:
    broken, healthy = Probe("broken"), Memory()
    broken.raises = raised
    members.add(broken)
    members.add(healthy)
    members.publish(make_round(1))
    assert members.flush(LONG_S)
    line = status(members, "broken")
    assert line.state == "recoverable_error"
    assert line.statistics.dropped_by == {"failed": 1}
    assert line.statistics.last_error
    broken.raises = None
    members.publish(make_round(2))
    assert members.flush(LONG_S)
    assert status(members, "broken").state == "ok"
    assert [completed.number for completed in healthy.rounds()] == [1, 2]


def test_a_retryable_failure_is_retried_with_the_next_round_taking_its_place(members: SubscriberSet) -> None:
    probe = Probe()
    probe.raises = DeliveryError("disk full", retryable=True)
    members.add(probe)
    members.publish(make_round(1))
    assert not members.flush(0.1)
    assert status(members, "probe").statistics.queued == 1
    assert status(members, "probe").statistics.retries == 1
    probe.raises = None
    members.publish(make_round(2))
    assert members.flush(LONG_S)
    assert "deliver 2" in probe.calls
    assert status(members, "probe").statistics.dropped_by in ({"replaced": 1}, {})


def test_a_start_that_can_never_succeed(members: SubscriberSet) -> None:
    class Refused(Probe):
        abstract = True

        def start(self) -> None:
            raise DeliveryError("no right", retryable=False)

    refused = Refused()
    members.add(refused)
    assert members.flush(LONG_S), "nobody waits for what will never come"
    members.publish(make_round(1))
    line = status(members, "probe")
    assert line.state == "permanent_error"
    assert line.statistics.last_error == "no right"
    assert line.statistics.dropped_by == {"closed": 1} or line.statistics.queued == 1
    assert members.close(LONG_S)
    assert refused.calls == ["close"]
    assert status(members, "probe").statistics.dropped_by == {"closed": 1}


def test_a_start_that_may_succeed_later_does_not_hold_up_the_end(members: SubscriberSet) -> None:
    class Waiting(Probe):
        abstract = True

        def start(self) -> None:
            super().start()
            raise DeliveryError("no network", retryable=True)

    waiting = Waiting()
    members.add(waiting)
    members.publish(make_round(1))
    assert members.close(LONG_S)
    assert waiting.calls == ["start", "close"]
    assert status(members, "probe").statistics.dropped_by == {"closed": 1}


def test_none_is_notified_more_often_than_it_asked(members: SubscriberSet) -> None:
    slow, fast = Probe("slow", interval_s=3600.0), Memory(MemorySettings(rounds_count=100))
    members.add(slow)
    members.add(fast)
    for number in range(1, 11):
        members.publish(make_round(number))
        assert slow.entered.wait(LONG_S)
    assert sum(call.startswith("deliver") for call in slow.calls) <= 1
    assert members.flush(LONG_S), "a flush does not wait an hour"
    assert slow.calls[-2:] == ["deliver 10", "flush"]


def test_interval_of_the_set_is_the_shortest_of_its_members(members: SubscriberSet) -> None:
    assert members.expected_update_interval_s is None
    members.add(Probe("a", interval_s=30.0))
    members.add(Probe("b", interval_s=10.0))
    assert members.expected_update_interval_s == 10.0
    members.add(Probe("c"))
    assert members.expected_update_interval_s == 0.0
    members.remove("c", LONG_S)
    members.remove("b", LONG_S)
    assert members.expected_update_interval_s == 30.0


def test_thread_count_is_constant_over_1000_rounds(members: SubscriberSet) -> None:
    names = ("constant-a", "constant-b", "constant-c")

    def ours() -> int:
        return sum(thread.name.startswith("gpuflight-constant") for thread in threading.enumerate())

    for name in names:
        members.add(Memory(MemorySettings(name=name)))
    counts = set()
    others = set(threading.enumerate())
    for number in range(1000):
        members.publish(make_round(number))
        counts.add(ours())
    assert counts == {3}
    assert set(threading.enumerate()) <= others, "no round started a thread"
    assert members.close(LONG_S)
    assert ours() == 0


def test_names_are_unique_and_unknown_names_are_told(members: SubscriberSet) -> None:
    members.add(Memory())
    with pytest.raises(ConfigError, match="already a subscriber named memory"):
        members.add(Memory())
    with pytest.raises(InputError, match="no subscriber 'mem'; there are: memory"):
        members.remove("mem")
    assert members.names() == ["memory"]
    assert len(members) == 1
    members.close(LONG_S)
    with pytest.raises(ConfigError, match="closed"):
        members.add(Memory(MemorySettings(name="other")))


def test_publishing_from_many_threads_loses_no_count(members: SubscriberSet) -> None:
    members.add(Memory())
    completed = make_round(1)
    threads = [threading.Thread(target=lambda: [members.publish(completed) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert members.flush(LONG_S)
    statistics = status(members, "memory").statistics
    assert statistics.received == 2000
    assert statistics.queued == 0
