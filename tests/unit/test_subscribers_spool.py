"""Policies spool and block, pause, and the ends of a worker: with real threads and files."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gpuflight.errors import DeliveryError
from gpuflight.graph import Graph
from gpuflight.graph.diff import Diff
from gpuflight.rounds import Environment, Round
from gpuflight.subscribers.base import PackedSettings, PackedSubscriber, Parcel, SubscriberSettings, parcel
from gpuflight.subscribers.delivery import SubscriberSet, SubscriberStatus
from gpuflight.subscribers.memory import MemorySettings
from gpuflight.subscribers.queue import POISON_TRIES
from gpuflight.subscribers.spool import POISON_KEPT_COUNT, Spool, spool_path

LONG_S = 60.0


def make_round(number: int) -> Round:
    return Round(
        number=number,
        time_ns=time.time_ns(),
        duration_s=0.1,
        graph=Graph(),
        diff=Diff(),
        coverage=[],
        env=Environment(hostname="h"),
    )


class Sink(PackedSubscriber):
    """Remembers what arrived; does to each round what ``fails`` says."""

    abstract = True

    def __init__(self, settings: PackedSettings, *, open_gate: bool = True) -> None:
        super().__init__(settings)
        self.arrived: list[int] = []
        self.bases: list[int | None] = []
        self.fails: dict[int, DeliveryError | BaseException] = {}
        self.gate = threading.Event()
        self.entered = threading.Event()
        if open_gate:
            self.gate.set()

    def pack(self, completed: Round, after: int | None) -> Parcel:
        return parcel(completed, b"x" * 100, after if after == completed.number - 1 else None)

    def send(self, packed: Parcel) -> None:
        self.entered.set()
        assert self.gate.wait(LONG_S)
        error = self.fails.get(packed.number)
        if error is not None:
            raise error
        self.arrived.append(packed.number)
        self.bases.append(packed.base)


@pytest.fixture
def members() -> Iterator[SubscriberSet]:
    members = SubscriberSet()
    yield members
    members.close(0.0)


def spooling(folder: Path, **more: Any) -> PackedSettings:
    fast = {"retry_first_s": 0.001, "retry_max_s": 0.001}
    return PackedSettings(policy="spool", spool_folder=str(folder), **({"name": "sink"} | fast | more))


def status(members: SubscriberSet) -> SubscriberStatus:
    line = members.status()[0]
    statistics = line.statistics
    assert statistics.received == statistics.sent + statistics.dropped + statistics.queued
    return line


def wait_for(members: SubscriberSet, condition: Any) -> SubscriberStatus:
    deadline_s = time.monotonic() + LONG_S
    while not condition(line := status(members)):
        assert time.monotonic() < deadline_s, line
        time.sleep(0.002)
    return line


def test_every_round_arrives_in_order(members: SubscriberSet, tmp_path: Path) -> None:
    sink = Sink(spooling(tmp_path))
    members.add(sink)
    for number in range(1, 101):
        members.publish(make_round(number))
        wait_for(members, lambda line: line.statistics.received - line.statistics.sent < 10)
    assert members.flush(LONG_S)
    assert sink.arrived == list(range(1, 101))
    assert sink.bases == [None, *range(1, 100)]
    assert members.close(LONG_S)
    assert os.listdir(tmp_path) == ["sink.sqlite"]
    assert (tmp_path / "sink.sqlite").stat().st_mode & 0o777 == 0o600


def test_what_was_not_delivered_is_delivered_by_the_next_process(members: SubscriberSet, tmp_path: Path) -> None:
    """Row F11 too: the end is bounded and loses nothing that was stored."""
    first = Sink(spooling(tmp_path), open_gate=False)
    members.add(first)
    for number in range(1, 101):
        members.publish(make_round(number))
        wait_for(members, lambda line: line.statistics.queued_bytes >= 100 * line.statistics.received)
    began_s = time.monotonic()
    assert not members.close(0.2)
    assert time.monotonic() - began_s < 10
    line = status(members)
    assert line.statistics.queued == 100
    first.fails = {number: DeliveryError("too late", retryable=True) for number in range(101)}
    first.gate.set()
    [thread.join(LONG_S) for thread in threading.enumerate() if thread.name == "gpuflight-sink"]
    second, again = Sink(spooling(tmp_path)), SubscriberSet()
    again.add(second)
    again.publish(make_round(1001))
    assert again.flush(LONG_S)
    assert second.arrived == [*range(1, 101), 1001]
    line = status(again)
    assert (line.statistics.recovered, line.statistics.sent) == (100, 101)
    assert again.close(LONG_S)


WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.unit.test_subscribers_spool import *
members = SubscriberSet()
sink = Sink(spooling(Path(sys.argv[1])), open_gate=False)
members.add(sink)
for number in range(1, 10_000):
    members.publish(make_round(number))
    wait_for(members, lambda line: line.statistics.queued_bytes >= 100 * line.statistics.received)
    print(number, flush=True)
"""


def test_a_spool_survives_kill_9(members: SubscriberSet, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), str(root)], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    stored = 0
    for line in writer.stdout:
        stored = int(line)
        if stored == 50:
            break
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    stored = max([stored, *(int(line) for line in writer.stdout)])
    writer.stdout.close()
    sink = Sink(spooling(tmp_path))
    members.add(sink)
    assert members.flush(LONG_S)
    assert sink.arrived[:stored] == list(range(1, stored + 1))
    assert len(sink.arrived) <= stored + 1, "at most the one that was being stored"


def test_a_spool_is_capped_and_the_oldest_go(members: SubscriberSet, tmp_path: Path) -> None:
    sink = Sink(spooling(tmp_path, max_bytes=1000), open_gate=False)
    members.add(sink)
    for number in range(1, 31):
        members.publish(make_round(number))
        wait_for(
            members,
            lambda line, number=number: line.statistics.queued_bytes + 100 * line.statistics.dropped == 100 * number,
        )
        if number == 1:
            assert sink.entered.wait(LONG_S)
    line = wait_for(members, lambda line: line.statistics.dropped == 20)
    assert line.statistics.dropped_by == {"overflow": 20}
    assert line.statistics.queued_bytes == 1000
    sink.gate.set()
    assert members.flush(LONG_S)
    assert sink.arrived == [1, *range(22, 31)]


def test_after_rounds_were_lost_a_whole_one_follows(members: SubscriberSet, tmp_path: Path) -> None:
    sink = Sink(spooling(tmp_path))
    sink.fails[2] = DeliveryError("refused", retryable=False)
    members.add(sink)
    for number in range(1, 4):
        members.publish(make_round(number))
        assert members.flush(LONG_S)
    assert sink.arrived == [1, 3]
    assert sink.bases == [None, None]


@pytest.mark.parametrize(
    "error", [DeliveryError("refused", retryable=False), KeyError("x"), RecursionError("deep")], ids=repr
)
def test_a_round_that_cannot_be_delivered_is_kept_aside(
    members: SubscriberSet, tmp_path: Path, error: BaseException
) -> None:
    sink = Sink(spooling(tmp_path))
    sink.fails[2] = error
    members.add(sink)
    for number in range(1, 6):
        members.publish(make_round(number))
    assert members.flush(LONG_S)
    assert sink.arrived == [1, 3, 4, 5]
    assert status(members).statistics.dropped_by == {"failed": 1}
    assert members.close(LONG_S)
    spool = Spool(spool_path(str(tmp_path), "sink"))
    spool.open()
    assert spool.poison() == [(2, "failed")]
    spool.close()


def test_a_poison_round_does_not_hold_up_the_others(members: SubscriberSet, tmp_path: Path) -> None:
    sink = Sink(spooling(tmp_path))
    sink.fails[2] = DeliveryError("500", retryable=True, blames_item=True)
    members.add(sink)
    for number in range(1, 6):
        members.publish(make_round(number))
    line = wait_for(members, lambda line: line.statistics.sent == 4)
    assert sink.arrived == [1, 3, 4, 5]
    assert line.statistics.dropped_by == {"poison": 1}
    assert line.statistics.retries >= POISON_TRIES


def test_an_outage_holds_up_everything_and_loses_nothing(members: SubscriberSet, tmp_path: Path) -> None:
    sink = Sink(spooling(tmp_path))
    sink.fails = {number: DeliveryError("no network", retryable=True) for number in range(10)}
    members.add(sink)
    for number in range(1, 6):
        members.publish(make_round(number))
    line = wait_for(members, lambda line: line.statistics.retries > 3 * POISON_TRIES)
    assert line.state == "recoverable_error"
    assert line.statistics.queued == 5
    sink.fails = {}
    assert members.flush(LONG_S)
    assert sink.arrived == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("damage", [b"this is no database at all, is it?" * 100, b"SQLite format 3\0" + b"\xff" * 9000])
def test_a_damaged_spool_is_moved_aside(members: SubscriberSet, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "sink.sqlite").write_bytes(damage)
    sink = Sink(spooling(tmp_path))
    members.add(sink)
    members.publish(make_round(1))
    assert members.flush(LONG_S)
    assert sink.arrived == [1]
    (aside,) = tmp_path.glob("*.damaged-*")
    assert aside.read_bytes() == damage
    assert str(aside) in status(members).statistics.last_error


def test_a_folder_that_cannot_be_made_delays_no_round(members: SubscriberSet, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    members.add(Sink(spooling(tmp_path / "file")))
    for number in range(100):
        members.publish(make_round(number))
    line = wait_for(members, lambda line: line.statistics.errors > 0)
    assert line.statistics.queued <= 17
    assert line.statistics.dropped_by["spool"] >= 83
    assert "file" in line.statistics.last_error
    assert members.close(LONG_S)
    assert status(members).statistics.queued == 0


def test_two_processes_do_not_share_a_spool(tmp_path: Path) -> None:
    path = spool_path(str(tmp_path), "sink")
    first, second = Spool(path), Spool(path)
    first.open()
    with pytest.raises(DeliveryError, match="another process has it") as caught:
        second.open()
    assert caught.value.retryable
    first.close()
    second.open()
    second.close()


def test_names_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    for label in ("../x", "/etc/passwd", "..", "a/b", "\0", "ü" * 300):
        path = spool_path(str(tmp_path), label)
        assert os.path.dirname(path) == str(tmp_path)
        Spool(path).open()


def test_poison_is_bounded_and_ids_are_never_reused(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "s" / "x.sqlite"))
    spool.open()
    for number in range(POISON_KEPT_COUNT + 5):
        spool.remove(spool.append(parcel(make_round(number), b"x")), poison="failed")
    assert [number for number, _ in spool.poison()] == list(range(5, POISON_KEPT_COUNT + 5))
    assert spool.inventory() == []
    assert spool.append(parcel(make_round(1), b"x")) == POISON_KEPT_COUNT + 6
    spool.close()
    spool.close()
    with pytest.raises(DeliveryError, match="closed"):
        spool.read(1)


def test_a_full_disk_costs_the_round_and_is_told(
    members: SubscriberSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Spool.append

    def full(self: Spool, packed: Parcel) -> int:
        if packed.number == 2:
            raise self._problem(sqlite3.OperationalError("database or disk is full"))
        return real(self, packed)

    monkeypatch.setattr(Spool, "append", full)
    sink = Sink(spooling(tmp_path))
    members.add(sink)
    for number in range(1, 4):
        members.publish(make_round(number))
        assert members.flush(LONG_S)
    assert sink.arrived == [1, 3]
    assert sink.bases == [None, None]
    line = status(members)
    assert line.statistics.dropped_by == {"spool": 1}
    assert "disk is full" in line.statistics.last_error


def test_what_has_arrived_makes_room_on_a_full_disk(
    members: SubscriberSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent is not forgotten one by one; so it must not cost a round that it is still there."""
    real_append, real_remove = Spool.append, Spool.remove_all
    held = 0

    def append(self: Spool, packed: Parcel) -> int:
        nonlocal held
        if held >= 1:
            raise self._problem(sqlite3.OperationalError("database or disk is full"))
        held += 1
        return real_append(self, packed)

    def remove_all(self: Spool, settled: Sequence[tuple[int, str]]) -> None:
        nonlocal held
        real_remove(self, settled)
        held -= len(settled)

    monkeypatch.setattr(Spool, "append", append)
    monkeypatch.setattr(Spool, "remove_all", remove_all)
    sink = Sink(spooling(tmp_path))
    members.add(sink)
    monkeypatch.setattr(members._workers["sink"], "settled", _settled_only(members._workers["sink"]))
    for number in range(1, 7):
        members.publish(make_round(number))
        assert members.flush(LONG_S)
    assert sink.arrived == [1, 2, 3, 4, 5, 6]
    assert status(members).statistics.dropped == 0


def _settled_only(worker: Any) -> Any:
    """As a stream does while more rounds are under way: nothing is forgotten yet."""

    def settled(arrived: int, error: DeliveryError | None) -> None:
        with worker._changed:
            worker._queue.delivered(arrived)
            worker._changed.notify_all()

    return settled


def test_what_could_not_be_forgotten_is_forgotten_later(
    members: SubscriberSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would take room for ever, and arrive once more after the next start."""
    real = Spool.remove_all
    full = True

    def remove_all(self: Spool, settled: Sequence[tuple[int, str]]) -> None:
        if full:
            raise self._problem(sqlite3.OperationalError("database or disk is full"))
        real(self, settled)

    monkeypatch.setattr(Spool, "remove_all", remove_all)
    sink = Sink(spooling(tmp_path))
    members.add(sink)
    for number in range(1, 4):
        members.publish(make_round(number))
        assert members.flush(LONG_S)
    assert "disk is full" in status(members).statistics.last_error
    full = False
    members.publish(make_round(4))
    assert members.flush(LONG_S) and members.close(LONG_S)
    assert sink.arrived == [1, 2, 3, 4]
    spool = Spool(spool_path(str(tmp_path), "sink"))
    spool.open()
    assert spool.inventory() == []
    spool.close()


def test_removing_may_discard_the_spool(members: SubscriberSet, tmp_path: Path) -> None:
    sink = Sink(spooling(tmp_path))
    sink.fails[1] = DeliveryError("no network", retryable=True)
    members.add(sink)
    members.publish(make_round(1))
    wait_for(members, lambda line: line.statistics.retries > 0)
    members.pause("sink")  # else it tries on until the deadline
    assert members.remove("sink", LONG_S, discard_spool=True)
    assert os.listdir(tmp_path) == []


def test_paused(members: SubscriberSet, tmp_path: Path) -> None:
    sink = Sink(spooling(tmp_path))
    members.add(sink)
    members.pause("sink")
    assert wait_for(members, lambda line: line.state == "paused")
    for number in range(1, 4):
        members.publish(make_round(number))
    wait_for(members, lambda line: line.statistics.queued_bytes == 300)
    assert not members.flush(LONG_S), "at once: who pauses does not want to wait"
    assert sink.arrived == []
    members.resume("sink")
    assert members.flush(LONG_S)
    assert sink.arrived == [1, 2, 3]


def test_a_call_past_its_deadline_shows(members: SubscriberSet, tmp_path: Path) -> None:
    sink = Sink(spooling(tmp_path, deliver_deadline_s=0.01), open_gate=False)
    members.add(sink)
    members.publish(make_round(1))
    assert wait_for(members, lambda line: line.state == "stuck").statistics.lag_s > 0
    sink.gate.set()
    assert wait_for(members, lambda line: line.state == "ok")


def blocking(**more: Any) -> PackedSettings:
    return PackedSettings(name="sink", policy="block", **more)


def test_block_waits_for_room_and_no_longer_than_allowed(members: SubscriberSet) -> None:
    """Row F03: what is dropped is counted, and the wait is bounded."""
    sink = Sink(blocking(max_items=2, block_timeout_s=0.05), open_gate=False)
    members.add(sink)
    members.publish(make_round(1))
    members.publish(make_round(2))
    began_s = time.monotonic()
    members.publish(make_round(3))
    assert 0.05 <= time.monotonic() - began_s < 10
    assert status(members).statistics.dropped_by == {"full": 1}
    sink.gate.set()
    assert members.flush(LONG_S)
    assert sink.arrived == [1, 2]


def test_block_goes_on_as_soon_as_there_is_room(members: SubscriberSet) -> None:
    sink = Sink(blocking(max_items=1, block_timeout_s=LONG_S), open_gate=False)
    members.add(sink)
    members.publish(make_round(1))
    publisher = threading.Thread(target=members.publish, args=(make_round(2),))
    publisher.start()
    sink.gate.set()
    publisher.join(LONG_S)
    assert not publisher.is_alive()
    assert members.flush(LONG_S)
    assert sink.arrived == [1, 2]
    assert status(members).statistics.dropped == 0


def test_a_paused_blocking_sink_blocks_nobody(members: SubscriberSet) -> None:
    members.add(Sink(blocking(max_items=1, block_timeout_s=LONG_S)))
    members.pause("sink")
    began_s = time.monotonic()
    for number in range(3):
        members.publish(make_round(number))
    assert time.monotonic() - began_s < LONG_S / 2
    assert status(members).statistics.dropped_by == {"full": 2}


def test_synchronous_returns_when_the_round_has_arrived(members: SubscriberSet) -> None:
    sink = Sink(blocking(synchronous=True, block_timeout_s=LONG_S))
    members.add(sink)
    for number in range(1, 6):
        members.publish(make_round(number))
        assert sink.arrived[-1] == number


def test_the_others_have_the_round_before_anyone_blocks(members: SubscriberSet) -> None:
    """Rows F01, F07: a sink that hangs does not keep a round from another one."""
    hanging = Sink(blocking(max_items=1, block_timeout_s=LONG_S), open_gate=False)
    healthy = Sink(PackedSettings(name="healthy"))
    members.add(hanging)
    members.add(healthy)
    members.publish(make_round(1))
    publisher = threading.Thread(target=members.publish, args=(make_round(2),))
    publisher.start()
    deadline_s = time.monotonic() + LONG_S
    while healthy.arrived[-1:] != [2]:
        assert time.monotonic() < deadline_s
        time.sleep(0.002)
    assert publisher.is_alive()
    hanging.gate.set()
    publisher.join(LONG_S)


@pytest.mark.parametrize("policy", ["latest", "spool"])
def test_publishing_to_a_hung_sink_takes_no_time(members: SubscriberSet, tmp_path: Path, policy: Any) -> None:
    """Row F07."""
    sink = Sink(PackedSettings(name="sink", policy=policy, spool_folder=str(tmp_path)), open_gate=False)
    members.add(sink)
    members.publish(make_round(0))
    assert sink.entered.wait(LONG_S)
    slowest_s = 0.0
    for number in range(1, 201):
        completed = make_round(number)
        began_s = time.thread_time()  # waiting for a busy machine is not waiting for the sink
        members.publish(completed)
        slowest_s = max(slowest_s, time.thread_time() - began_s)
    assert slowest_s < 0.02
    sink.gate.set()


def test_thread_count_is_constant(members: SubscriberSet, tmp_path: Path) -> None:
    """Row F21: two threads for a spool, one for any other, however many rounds."""
    members.add(Sink(spooling(tmp_path, name="counted")))
    counts = set()
    for number in range(1000):
        members.publish(make_round(number))
        counts.add(sum(thread.name.startswith("gpuflight-counted") for thread in threading.enumerate()))
    assert counts == {2}
    assert members.close(LONG_S)
    assert not any(thread.name.startswith("gpuflight-counted") for thread in threading.enumerate())


def test_only_bytes_can_be_spooled() -> None:
    for settings in (SubscriberSettings, MemorySettings):
        with pytest.raises(ValidationError, match="latest or block"):
            settings(policy="spool")
    PackedSettings(policy="spool")
