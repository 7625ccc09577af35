"""Several rounds under way at a time: whatever fails, in whatever order, nothing is lost, mixed up or counted twice."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.examples import examples
from tests.unit.test_subscribers_spool import make_round, spooling, status, wait_for

from gpuflight.errors import DeliveryError
from gpuflight.rounds import Round
from gpuflight.subscribers.base import PackedSettings, PackedSubscriber, Parcel, parcel
from gpuflight.subscribers.delivery import SubscriberSet
from gpuflight.subscribers.queue import DeliveryQueue
from gpuflight.subscribers.spool import Spool, spool_path
from gpuflight.subscribers.stream import READ_ITEMS, Stream

LONG_S = 60.0


class Window(PackedSubscriber):
    """Keeps the rules of whoever takes several at a time, and insists on those of whoever gives them. ``troubles`` are
    what a round meets when it is the oldest, one after the other; ``refused`` when it is to be begun. ``reached`` is
    what the receiver has got, which the sender is not always told."""

    abstract = True
    window_items = 20

    def __init__(self, settings: PackedSettings) -> None:
        super().__init__(settings)
        self.under_way: list[int] = []
        self.reached: list[int] = []
        self.most = 0
        self.recalls = 0
        self.broken = False
        self.troubles: dict[int, list[BaseException]] = {}
        self.refused: dict[int, list[BaseException]] = {}
        self.heard: Callable[[int], int] = lambda under_way: under_way
        """Of so many, how many answers come at once."""
        self.unheard: Callable[[int], int] = lambda under_way: 0
        """Of so many that are taken back, how many had arrived."""

    def pack(self, completed: Round, after: int | None) -> Parcel:
        return parcel(completed, b"x" * 100, after if after == completed.number - 1 else None)

    def send(self, packed: Parcel) -> None:
        raise AssertionError("not one at a time")

    def begin(self, batch: list[Parcel]) -> int:
        assert not self.broken, "an error is followed by a recall"
        numbers = [packed.number for packed in batch]
        assert numbers == sorted(numbers)
        assert not self.under_way or numbers[0] > self.under_way[-1]
        begun = 0
        for number in numbers:
            if self.refused.get(number):
                if not begun:
                    raise self.refused[number].pop(0)
                break
            self.under_way.append(number)
            begun += 1
        assert len(self.under_way) <= self.window_items
        self.most = max(self.most, len(self.under_way))
        return begun

    def settle(self, wait_s: float) -> int:
        assert self.under_way and not self.broken
        arrived = 0
        for _ in range(self.heard(len(self.under_way))):
            troubles = self.troubles.get(self.under_way[0])
            if troubles and not arrived:
                self.broken = True
                raise troubles.pop(0)
            if troubles:
                break
            self._arrive()
            arrived += 1
        return arrived

    def recall(self) -> None:
        self.recalls += 1
        self.broken = False
        for _ in range(self.unheard(len(self.under_way))):
            if self.troubles.get(self.under_way[0]):
                break
            self._arrive()
        self.under_way.clear()

    def _arrive(self) -> None:
        self.reached.append(self.under_way.pop(0))


class Disk(Spool):
    """Without a disk. What ``unreadable`` names is gone."""

    def __init__(self) -> None:
        super().__init__("nowhere")
        self.unreadable: set[int] = set()

    def read_all(self, parcel_ids: Sequence[int]) -> list[Parcel]:
        assert list(parcel_ids) == sorted(parcel_ids)
        found = []
        for number in parcel_ids:
            if number in self.unreadable:
                break
            found.append(Parcel(number=number, time_ns=number, key=f"run-{number}", data=b"x"))
        return found


class Driver:
    """What the worker is to a stream, on a clock of its own. At every call what came in is sent, dropped or queued."""

    def __init__(self, sink: Window, queue: DeliveryQueue[int], disk: Disk, between: Callable[[], None]) -> None:
        self.queue = queue
        self.now_s = 0.0
        self._sink = sink
        self._between = between
        self._stream = Stream(sink, disk, self)
        self.stop = False

    def check(self) -> None:
        counts = self.queue.statistics()
        assert counts.received == counts.sent + counts.dropped + counts.queued
        assert counts.sent <= len(self._sink.reached)

    def more(self, max_items: int, max_bytes: int) -> list[int]:
        self._between()
        self.check()
        if self.stop:
            return []
        return self.queue.take_more(max_items, max_bytes)

    def settled(self, arrived: int, error: DeliveryError | None) -> None:
        if arrived:
            self.queue.delivered(arrived)
        if error is not None:
            assert not self._sink.under_way, "nothing is under way after an error"
            self.queue.failed(
                str(error), self.now_s, retryable=error.retryable, retry_after_s=None, blames_item=error.blames_item
            )
        self.check()

    def ended(self) -> bool:
        return self.stop

    def call(self, what: str, function: Callable[[], None]) -> DeliveryError | None:
        try:
            function()
        except DeliveryError as error:
            return error
        except KeyError as error:
            return DeliveryError(repr(error), retryable=False)
        return None

    def run(self) -> None:
        """Until nothing is left, or it is stopped."""
        while not self.stop and not self.queue.idle:
            self.now_s += min(self.queue.due_in_s(self.now_s), 1000.0)
            first = self.queue.take(self.now_s)
            if first is None:
                self._between()
                continue
            self._stream.run(first)
            assert not self._sink.under_way, "at its end nothing is under way"
            self.queue.take_back()
            self.check()


TROUBLES = {
    "passes": DeliveryError("no network", retryable=True),
    "blames": DeliveryError("500", retryable=True, blames_item=True),
    "never": DeliveryError("refused", retryable=False),
    "bug": KeyError("x"),
}


def some(chance: random.Random, numbers: Sequence[int], kinds: Sequence[str], most: int) -> dict[int, list[Any]]:
    return {
        number: [TROUBLES[chance.choice(kinds)] for _ in range(chance.randint(1, most))]
        for number in numbers
        if chance.random() < 0.15
    }


@settings(max_examples=examples(400))
@given(seed=st.integers(0, 2**32), count=st.integers(1, 60), max_items=st.sampled_from([8, 30, 1000]))
def test_whatever_fails_everything_is_settled_once_and_in_order(seed: int, count: int, max_items: int) -> None:
    chance = random.Random(seed)
    sink = Window(PackedSettings())
    sink.window_items = chance.randint(1, 20)
    sink.heard = lambda under_way: chance.randint(0, under_way)
    sink.unheard = lambda under_way: chance.randint(0, under_way)
    numbers = range(1, count + 1)
    sink.troubles = some(chance, numbers, tuple(TROUBLES), 12)
    sink.refused = some(chance, numbers, ("passes", "never", "bug"), 2)
    disk = Disk()
    disk.unreadable = {number for number in numbers if chance.random() < 0.03}
    queue: DeliveryQueue[int] = DeliveryQueue(policy="spool", max_items=max_items)
    come = iter(numbers)
    paused_for = 0

    def between() -> None:
        """Rounds come, and somebody pauses, while others are under way."""
        nonlocal paused_for
        paused_for = max(0, paused_for - 1) or (chance.random() < 0.05 and 5)
        queue.paused = paused_for > 0
        for _ in range(chance.randint(0, 5)):
            number = next(come, None)
            if number is not None:
                queue.receive(0.0)
                queue.stored(number, 1)

    driver = Driver(sink, queue, disk, between)
    between()
    while True:
        driver.run()
        left = list(come)
        if not left:
            break
        come = iter(left)
        between()
    counts = queue.statistics()
    assert (counts.received, counts.queued) == (count, 0)
    settled = dict(queue.released)
    assert len(queue.released) == count == len(settled), "each once"
    sent = [number for number in numbers if settled[number] == "sent"]
    assert set(sent) <= set(sink.reached)
    firsts = list(dict.fromkeys(sink.reached))
    assert firsts == sorted(firsts), "the first arrivals are in order"
    for number in numbers:
        if settled[number] == "poison":
            assert number in sink.troubles
        if settled[number] == "failed":
            assert number in sink.troubles or number in sink.refused or number in disk.unreadable, "an innocent"


@given(seed=st.integers(0, 2**32), after=st.integers(0, 30))
def test_stopped_in_the_middle_all_that_is_not_settled_waits_again(seed: int, after: int) -> None:
    chance = random.Random(seed)
    sink = Window(PackedSettings())
    sink.heard = lambda under_way: chance.randint(0, min(3, under_way))
    sink.unheard = lambda under_way: chance.randint(0, under_way)
    sink.troubles = some(chance, range(1, 51), ("passes",), 2)
    queue: DeliveryQueue[int] = DeliveryQueue(policy="spool")
    for number in range(1, 51):
        queue.receive(0.0)
        queue.stored(number, 1)
    asked = 0

    def between() -> None:
        nonlocal asked
        asked += 1
        driver.stop = driver.stop or asked > after

    driver = Driver(sink, queue, Disk(), between)
    driver.run()
    settled = [number for number, _ in queue.released]
    assert settled == list(range(1, len(settled) + 1))
    assert queue.statistics().queued == 50 - len(settled)
    assert not sink.under_way and set(settled) <= set(sink.reached)


@pytest.mark.parametrize("answer", [-1, 21])
def test_a_sink_that_says_nonsense_costs_a_retry_only(answer: int) -> None:
    sink = Window(PackedSettings())
    queue: DeliveryQueue[int] = DeliveryQueue(policy="spool")
    for number in range(1, 11):
        queue.receive(0.0)
        queue.stored(number, 1)
    driver = Driver(sink, queue, Disk(), lambda: None)
    real_begin, real_settle, said = sink.begin, sink.settle, 0

    def nonsense(real: Callable[[Any], int]) -> Callable[[Any], int]:
        def answered(value: Any) -> int:
            nonlocal said
            said += 1
            return answer if said in (1, 3) else real(value)

        return answered

    sink.begin, sink.settle = nonsense(real_begin), nonsense(real_settle)  # type: ignore[method-assign]
    driver.run()
    counts = queue.statistics()
    assert (counts.sent, counts.dropped, counts.errors) == (10, 0, 2)


# --- with the worker, its threads and a real spool ---


@pytest.fixture
def members() -> Iterator[SubscriberSet]:
    members = SubscriberSet()
    yield members
    members.close(0.0)


def test_rounds_that_wait_arrive_in_order_several_under_way(members: SubscriberSet, tmp_path: Path) -> None:
    sink = Window(spooling(tmp_path))
    members.add(sink)
    members.pause("sink")
    for number in range(1, 301):
        members.publish(make_round(number))
        wait_for(members, lambda line, number=number: line.statistics.queued_bytes == 100 * number)
    sink.heard = lambda under_way: min(3, under_way)
    sink.troubles = {7: [TROUBLES["passes"]] * 2, 9: [TROUBLES["never"]], 100: [TROUBLES["blames"]] * 50}
    members.resume("sink")
    assert members.flush(LONG_S)
    assert sink.reached == [number for number in range(1, 301) if number not in (9, 100)]
    assert sink.most == 20
    line = status(members)
    assert line.statistics.dropped_by == {"failed": 1, "poison": 1}
    assert members.close(LONG_S)
    spool = Spool(spool_path(str(tmp_path), "sink"))
    spool.open()
    assert spool.inventory() == [] and [number for number, _ in spool.poison()] == [9, 100]
    spool.close()


def test_the_end_is_bounded_while_nothing_is_acknowledged(members: SubscriberSet, tmp_path: Path) -> None:
    sink = Window(spooling(tmp_path))
    sink.heard = lambda under_way: 0
    members.add(sink)
    for number in range(1, 6):
        members.publish(make_round(number))
    wait_for(members, lambda line: sink.most and line.statistics.queued_bytes == 500)
    assert not members.flush(0.05)
    assert members.close(2.0), "it has not to be left behind"
    assert sink.recalls and not sink.under_way
    assert status(members).statistics.queued == 5
    again, second = SubscriberSet(), Window(spooling(tmp_path))
    again.add(second)
    assert again.close(LONG_S)
    assert second.reached == [1, 2, 3, 4, 5]


def test_no_acknowledgement_in_time_is_an_error_whatever_the_sink_says(
    members: SubscriberSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuflight.subscribers.stream.SETTLE_S", 0.0)
    sink = Window(spooling(tmp_path, deliver_deadline_s=0.01))
    sink.heard = lambda under_way: 0
    members.add(sink)
    members.publish(make_round(1))
    line = wait_for(members, lambda line: line.statistics.retries)
    assert "no answer within 0.01 s" in line.statistics.last_error
    sink.heard = lambda under_way: under_way
    assert members.flush(LONG_S)
    assert sink.reached == [1]


def test_who_pauses_waits_only_for_what_is_under_way(members: SubscriberSet, tmp_path: Path) -> None:
    sink = Window(spooling(tmp_path))
    asked, gate = threading.Event(), threading.Event()

    def heard(under_way: int) -> int:
        asked.set()
        assert gate.wait(LONG_S)
        return under_way

    sink.heard = heard
    members.add(sink)
    members.publish(make_round(1))
    assert asked.wait(LONG_S)
    for number in range(2, 6):
        members.publish(make_round(number))
    wait_for(members, lambda line: line.statistics.queued_bytes == 500)
    members.pause("sink")
    gate.set()
    wait_for(members, lambda line: line.statistics.sent == 1)
    assert not members.flush(LONG_S)
    assert sink.reached == [1]
    members.resume("sink")
    assert members.flush(LONG_S)
    assert sink.reached == [1, 2, 3, 4, 5]


SENDER = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.unit.test_subscribers_stream import *

class ToFile(Window):
    abstract = True
    left = int(sys.argv[4])

    def _arrive(self):
        os.write(receiver, b"%d " % self.under_way.pop(0))
        self.left -= 1
        if not self.left:
            print("kill me", flush=True)
            time.sleep(LONG_S)

receiver = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
members = SubscriberSet()
sink = ToFile(spooling(Path(sys.argv[1])))
sink.heard = lambda under_way: min(2, under_way)
members.add(sink)
members.flush(LONG_S)
members.close(LONG_S)
"""


def test_kill_9_while_several_are_under_way_loses_none(tmp_path: Path) -> None:
    spool = Spool(spool_path(str(tmp_path), "sink"))
    spool.open()
    spool._open().execute("PRAGMA synchronous = OFF")
    for number in range(1, 1001):
        spool.append(parcel(make_round(number), b"x" * 100))
    spool.close()
    receiver = tmp_path / "receiver"
    command = [sys.executable, "-c", SENDER, str(tmp_path), str(Path(__file__).parents[2]), str(receiver)]
    for stops_after in (101, 402, 10_000):
        with subprocess.Popen([*command, str(stops_after)], stdout=subprocess.PIPE) as sender:
            assert sender.stdout is not None
            if sender.stdout.readline():
                sender.send_signal(signal.SIGKILL)
        assert sender.returncode == (0 if stops_after == 10_000 else -signal.SIGKILL)
    reached = [int(number) for number in receiver.read_text().split()]
    assert list(dict.fromkeys(reached)) == list(range(1, 1001)), "all, the first arrivals in order"
    assert len(reached) <= 1000 + 2 * (READ_ITEMS + 3), "what was not heard of, or not forgotten, comes again"
    spool.open()
    assert spool.inventory() == []
    spool.close()
