"""Counting processes' events: what is opened, tried, shared out, given back, recorded; over a made-up kernel."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from gpuflight.collectors.perf_events_choice import event_sets
from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.syscalls import PerfEventAttr
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.perf_events import (
    HARDWARE,
    HEAD_FIELDS,
    HW_CACHE,
    RETRY_ROUNDS,
    SOFTWARE,
    Answer,
    Event,
    EventSet,
    PerfEvents,
    Target,
)
from gpuflight.sources.recording import Tape

INHERIT, EXCLUDE_KERNEL, EXCLUDE_HV, INHERIT_THREAD = 1 << 1, 1 << 5, 1 << 6, 1 << 35
BEST = EventSet("best", (Event("a", HW_CACHE, 2), Event("b", HW_CACHE, 65538), Event("c", HARDWARE, 1)))
PLAIN = EventSet("plain", (Event("a", HARDWARE, 2), Event("b", HARDWARE, 3)))
SETS = [BEST, PLAIN]

Refusal = Callable[[PerfEventAttr, int], int]


class FakeKernel:
    """Descriptors and the groups behind them. ``refuse``: errno for an event of a thread, 0 to let it be opened."""

    def __init__(self, refuse: Refusal = lambda attr, tid: 0, limit: int = 100_000) -> None:
        self.refuse = refuse
        self.limit = limit
        self.opened: dict[int, tuple[int, int]] = {}  # descriptor → thread, flags
        self.group: dict[int, list[int]] = {}  # leader → ns enabled, ns running, values
        self.gone: set[int] = set()  # threads whose groups cannot be read
        self.calls = 0
        self._next = 100

    def open(self, attr: PerfEventAttr, tid: int, group_fd: int) -> int:
        self.calls += 1
        code = self.refuse(attr, tid)
        if code:
            raise OSError(code, os.strerror(code))
        self._next += 1
        self.opened[self._next] = tid, attr.flags
        if group_fd == -1:
            assert attr.read_format == 0b1011, "both times, and the whole group"
            self.group[self._next] = [0, 0]
        return self._next

    def run(self, tid: int, *values: int, enabled: int = 10, running: int = 10) -> None:
        """A thread's counters, as they shall be read."""
        for leader in self.group:
            if self.opened[leader][0] == tid:
                self.group[leader] = [enabled, running, *values]

    def read(self, fd: int, size: int) -> bytes:
        tid, _ = self.opened[fd]
        if tid in self.gone:
            return b""
        values, count = self.group[fd], size // 8
        return struct.pack(f"={count}Q", count - HEAD_FIELDS, *values, *[0] * (count - 1 - len(values)))

    def close(self, fd: int) -> None:
        del self.opened[fd]
        self.group.pop(fd, None)

    def descriptors_limit(self) -> int:
        return self.limit

    @property
    def threads(self) -> set[int]:
        return {tid for tid, _ in self.opened.values()}

    @property
    def flags(self) -> int:
        (flags,) = {flags for _, flags in self.opened.values()}
        return flags


def process(pid: int, threads: int = 1) -> Target:
    return Target(f"Process(pid={pid},start=1)", tuple(range(pid, pid + threads)))


class Rig:
    def __init__(self, refuse: Refusal = lambda attr, tid: 0, limit: int = 100_000) -> None:
        self.kernel = FakeKernel(refuse, limit)
        self.source = PerfEvents(kernel=self.kernel)
        self.number = 0

    def round(self, *targets: Target, descriptors: int = 1000, threads: int = 32) -> Answer:
        self.number += 1
        self.source.begin_round(self.number)
        found = self.source.count(SETS, targets, descriptors_at_most=descriptors, threads_at_most=threads)
        assert found.descriptors_count == len(self.kernel.opened)
        return found


def test_each_thread_has_a_group_and_later_looks_only_read() -> None:
    rig = Rig()
    first = rig.round(process(10, 3), process(20))
    assert (first.set, first.events, first.inherits, first.user_only) == ("best", ["a", "b", "c"], True, False)
    assert first.descriptors_count == 4 * 3 and rig.kernel.threads == {10, 11, 12, 20}
    assert rig.kernel.flags == INHERIT | INHERIT_THREAD
    calls = rig.kernel.calls
    rig.kernel.run(11, 7, 8, 9, enabled=50, running=25)
    second = rig.round(Target(process(10).id, ()), Target(process(20).id, ()))
    assert rig.kernel.calls == calls
    counted = second.processes[process(10).id]
    assert counted.tids == [10, 11, 12] and counted.left_out_count == 0
    assert struct.unpack("=6Q", counted.raw[48:96]) == (3, 50, 25, 7, 8, 9)
    assert counted.watch == first.processes[process(10).id].watch != second.processes[process(20).id].watch


def test_who_is_not_asked_for_any_more_is_let_go() -> None:
    rig = Rig()
    rig.round(process(10), process(20))
    assert rig.round(process(20)).processes.keys() == {process(20).id}
    assert rig.kernel.threads == {20}
    again = rig.round(process(20), process(10))
    assert again.processes[process(10).id].watch == 3, "another watch: what was read before says nothing"
    rig.source.close()
    rig.source.close()
    assert rig.kernel.opened == {}


def test_a_round_in_which_nobody_asks_closes_all() -> None:
    rig = Rig()
    rig.round(process(10))
    rig.source.begin_round(2)
    assert rig.kernel.opened, "that round may still ask"
    rig.source.begin_round(3)
    assert rig.kernel.opened == {}


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV])
def test_the_first_set_that_the_machine_counts_is_taken(code: int) -> None:
    rig = Rig(lambda attr, tid: code if attr.type == HW_CACHE else 0)
    assert rig.round(process(10)).set == "plain"
    assert rig.kernel.threads == {10} and len(rig.kernel.opened) == 2


def test_a_group_that_does_not_fit_the_counters_leaves_nothing_behind() -> None:
    rig = Rig(lambda attr, tid: errno.EINVAL if attr.config == 1 else 0)  # the third of the group
    assert rig.round(process(10)).set == "plain"
    assert len(rig.kernel.opened) == 2


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
def test_without_the_right_to_count_the_kernel_only_the_program_is_counted(code: int) -> None:
    rig = Rig(lambda attr, tid: 0 if attr.flags & EXCLUDE_KERNEL else code)
    found = rig.round(process(10))
    assert found.user_only and found.set == "best"
    assert rig.kernel.flags == INHERIT | INHERIT_THREAD | EXCLUDE_KERNEL | EXCLUDE_HV


def test_before_linux_5_13_each_thread_is_opened_as_it_comes_and_closed_when_it_went() -> None:
    rig = Rig(lambda attr, tid: errno.EINVAL if attr.flags >> 32 else 0)
    first = rig.round(process(10, 2))
    assert not first.inherits and first.set == "best" and rig.kernel.flags == 0
    second = rig.round(process(10, 3))
    assert second.processes[process(10).id].tids == [10, 11, 12]
    rig.kernel.run(11, 5)
    last = rig.round(Target(process(10).id, (10, 12)))
    assert last.processes[process(10).id].tids == [10, 11, 12], "its last word"
    assert rig.kernel.threads == {10, 12}
    assert rig.round(Target(process(10).id, (10, 12))).processes[process(10).id].tids == [10, 12]


def test_a_machine_without_counters_is_asked_once() -> None:
    rig = Rig(lambda attr, tid: errno.ENOENT)
    assert rig.round(process(10), process(20)).unsupported == errno.ENOENT
    calls = rig.kernel.calls
    found = rig.round(process(10), process(30))
    assert (found.unsupported, found.processes, found.refused) == (errno.ENOENT, {}, {})
    assert rig.kernel.calls == calls and rig.kernel.opened == {}


def test_a_process_that_may_not_be_counted_is_told_and_tried_again_much_later() -> None:
    rig = Rig(lambda attr, tid: errno.EACCES if tid == 10 else 0)
    for _ in range(3):
        found = rig.round(process(10), process(20))
        assert found.refused == {process(10).id: errno.EACCES} and found.processes.keys() == {process(20).id}
    calls = rig.kernel.calls
    rig.round(process(10), process(20))
    assert rig.kernel.calls == calls
    rig.kernel.refuse = lambda attr, tid: 0
    rig.number += RETRY_ROUNDS
    rig.source.begin_round(rig.number)
    rig.source._asked = True  # those rounds asked too
    assert rig.round(process(10), process(20)).processes.keys() == {process(10).id, process(20).id}


def test_what_ended_meanwhile_costs_only_itself() -> None:
    rig = Rig(lambda attr, tid: errno.ESRCH if tid in (11, 20) else 0)
    found = rig.round(process(20), process(10, 3))
    assert found.processes[process(10).id].tids == [10, 12]
    assert found.processes[process(10).id].left_out_count == 0
    assert process(20).id not in found.processes and found.refused == {}


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_out_of_descriptors_within_a_group(code: int) -> None:
    kernel = FakeKernel()
    kernel.refuse = lambda attr, tid: code if len(kernel.opened) >= 5 else 0
    rig = Rig()
    rig.kernel = kernel
    rig.source = PerfEvents(kernel=kernel)
    found = rig.round(process(10, 3), process(20))
    assert found.short == code and found.descriptors_count == 3, "half a group is no group"
    counted = found.processes[process(10).id]
    assert (counted.tids, counted.left_out_count) == ([10], 2)
    assert process(20).id not in found.processes and found.refused == {}


def test_descriptors_are_shared_out() -> None:
    rig = Rig()
    found = rig.round(process(100, 50), process(200, 2), descriptors=120)
    assert found.processes[process(100).id].tids == [100, 101, 102, 103, 104], "a share of eight"
    assert found.processes[process(100).id].left_out_count == 45
    assert found.processes[process(200).id].left_out_count == 0
    many = [process(1000 * n, 40) for n in range(1, 17)]
    found = Rig().round(*many, descriptors=16 * 3 * 4)
    assert all(len(each.tids) == 4 for each in found.processes.values()) and len(found.processes) == 16
    assert len(Rig().round(process(10, 50), threads=7).processes[process(10).id].tids) == 7


def test_never_more_than_half_of_what_may_be_opened() -> None:
    found = Rig(limit=100).round(*[process(100 * n, 9) for n in range(1, 30)], descriptors=10_000)
    assert found.descriptors_count <= 50 and found.short == errno.EMFILE
    assert len(found.processes) == 16, "one thread each, as far as it goes"


def test_where_not_one_group_has_room_nothing_is_opened() -> None:
    rig = Rig(limit=4)
    found = rig.round(process(10, 1))
    assert (found.descriptors_count, found.short) == (0, errno.EMFILE) and not rig.kernel.threads


def test_a_group_that_cannot_be_read_any_more_is_closed() -> None:
    rig = Rig()
    rig.round(process(10, 2))
    rig.kernel.gone.add(11)
    found = rig.round(process(10, 2)).processes[process(10).id]
    assert (found.tids, found.left_out_count) == ([10], 1)
    assert rig.kernel.threads == {10}


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_nothing_leaks_whatever_fails(data: st.DataObject) -> None:
    codes = [0, 0, 0, errno.ESRCH, errno.EACCES, errno.EMFILE, errno.EINVAL, errno.ENOENT, errno.EBUSY]
    rig = Rig(lambda attr, tid: data.draw(st.sampled_from(codes)), limit=data.draw(st.integers(2, 80)))
    for _ in range(data.draw(st.integers(1, 6))):
        targets = [process(100 * n, data.draw(st.integers(1, 5))) for n in data.draw(st.sets(st.integers(1, 4)))]
        found = rig.round(*targets, descriptors=data.draw(st.integers(3, 60)))
        ids = {target.id for target in targets}
        assert found.processes.keys() | found.refused.keys() <= ids
        assert not found.processes.keys() & found.refused.keys()
        assert found.descriptors_count <= rig.kernel.limit // 2
        for counted in found.processes.values():
            assert len(counted.raw) == 8 * (HEAD_FIELDS + len(found.events)) * len(counted.tids)
        rig.kernel.gone = set(data.draw(st.sets(st.integers(100, 404), max_size=2)))
    rig.source.close()
    assert rig.kernel.opened == {}


# --- recorded --------------------------------------------------------------------------------------------------------


def test_a_replay_answers_as_the_recording_did(tmp_path: Path) -> None:
    path, kernel = str(tmp_path / "tape"), FakeKernel()
    tape = Tape.record(path, ManualClock())
    source = PerfEvents(tape, kernel)
    told = []
    for number in range(1, 4):
        tape.begin_round(number)
        source.begin_round(number)
        kernel.run(10, number * 100)
        told.append(source.count(SETS, [process(10, 2)], descriptors_at_most=100, threads_at_most=8))
    source.close()
    tape.close()
    replay = Tape.replay(path)
    source = PerfEvents(replay, FakeKernel(lambda attr, tid: pytest.fail("a replay asks no kernel")))
    for number in range(1, 4):
        replay.begin_round(number)
        assert source.count(SETS, [process(10, 2)], descriptors_at_most=1, threads_at_most=1) == told[number - 1]
    assert told[0] != told[1]


@pytest.mark.parametrize("raw", [b"", b"\xff", msgspec.msgpack.encode({"read_ns": "soon"})])
def test_a_recording_that_makes_no_sense(raw: bytes) -> None:
    class Damaged(Tape):
        def ask(self, source: str, key: str, live: Callable[[], bytes]) -> bytes:
            return raw

    damaged = Damaged()
    damaged.mode = "replay"
    with pytest.raises(SourceUnavailable, match="no sense"):
        PerfEvents(damaged).count(SETS, [], descriptors_at_most=1, threads_at_most=1)
    with pytest.raises(SourceUnavailable, match="no answer"):
        PerfEvents(Tape.blank()).count(SETS, [], descriptors_at_most=1, threads_at_most=1)


# --- which events ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpu", "names"),
    [
        ({"vendor_id": "GenuineIntel"}, ["LLC-loads", "LLC-loads", "cache-references", "cache-references"]),
        ({"vendor_id": "AuthenticAMD", "cpu family": "25"}, ["data-cache-fills", "data-cache-fills"]),
        ({"vendor_id": "AuthenticAMD", "cpu family": "21"}, ["LLC-loads", "LLC-loads"]),
        ({"CPU architecture": "8"}, ["LLC-loads", "LLC-loads"]),
        ({}, ["LLC-loads", "LLC-loads"]),
    ],
)
def test_events_that_mean_the_last_level_on_this_cpu(cpu: dict[str, str], names: list[str]) -> None:
    found = event_sets(cpu, instructions=True)
    assert [each.name for each in found] == [*names, "instructions"]
    assert [len(each.events) for each in found] == [4, 2] * (len(names) // 2) + [2]
    alone = event_sets(cpu, instructions=False)
    assert [each.name for each in alone] == names[::2] and all(len(each.events) == 2 for each in alone)
    for each in found:
        assert all(event.kind != SOFTWARE for event in each.events)
