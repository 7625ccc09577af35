"""Cache misses and instructions per cycle of processes: whom it counts, what it makes of the counts, what it says where
there are none; and rule S19 on what it gives."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.perf_answers import NAMES, answer, watched
from tests.fakes.proc import KERNEL_THREAD, FakeProc
from tests.rule_scenes import Player, Scene

from gpuflight.bottlenecks.engine import Engine
from gpuflight.bottlenecks.rules.process_cpu import CacheMisses
from gpuflight.collectors.perf_counters import PerfCounters, PerfCountersSettings
from gpuflight.collectors.perf_sums import growth, rows_of
from gpuflight.collectors.rates import FIRST_READING, WENT_BACK
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import nodes
from gpuflight.rounds import Finding
from gpuflight.sources.perf_events import Answer, EventSet, Target

S = 10**9
M = 10**6


class FakePerf:
    """The source: ``rows`` by pid and tid, each ns enabled, ns on a counter, reads, misses, instructions, cycles."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, list[int]]] = {}
        self.watch: dict[int, int] = {}
        self.left_out: dict[int, int] = {}
        self.fields: dict[str, Any] = {}
        self.now_ns = 0
        self.asked: list[Target] = []
        self.sets: list[EventSet] = []
        self.closed = 0

    def count(
        self, sets: list[EventSet], targets: list[Target], *, descriptors_at_most: int, threads_at_most: int
    ) -> Answer:
        self.asked, self.sets = targets, sets
        found = {}
        for target in targets:
            pid = pid_of(target.id)
            if pid in self.rows:
                rows = self.rows[pid]
                found[target.id] = watched(rows, self.watch.get(pid, 1), self.left_out.get(pid, 0))
        return answer(self.now_ns, found, **self.fields)

    def close(self) -> None:
        self.closed += 1


def pid_of(id_: str) -> int:
    return int(id_.partition("pid=")[2].partition(",")[0])


class Rig:
    """A trainer (42, of 3 threads) with a GPU; by default it ran 1 s and missed 300 of 1000 million reads each s."""

    def __init__(self, **changes: Any) -> None:
        self.proc = FakeProc()
        self.proc.fs.files["/proc/cpuinfo"] = b"processor\t: 0\nvendor_id\t: GenuineIntel\n\n"
        self.perf = FakePerf()
        self.collector = PerfCounters(PerfCountersSettings(**{"watch": True, **changes}))
        self.proc.add(1, "systemd", ppid=0)
        self.add(42, "trainer", threads=3, gpu=True)
        self.perf.rows[42] = {42: [S, S, 5 * M, M, 9 * M, 9 * M]}

    def add(self, pid: int, name: str = "app", threads: int = 1, *, gpu: bool = False, **fields: Any) -> None:
        self.proc.add(pid, name, threads=threads, **fields)
        for tid in range(pid, pid + threads):
            self.proc.thread(pid, tid, utime=100 - tid % 10)
        if gpu:
            self.proc.open(pid, 3, "/dev/nvidia0")

    def grow(self, tid: int, *by: int, pid: int = 42) -> None:
        row = self.perf.rows[pid][tid]
        self.perf.rows[pid][tid] = [value + more for value, more in zip(row, by, strict=True)]

    def round(self, seconds: float = 1.0) -> dict[int, nodes.Process]:
        self.collector.losses, self.collector.notes = {}, {}
        self.proc.next_round(seconds)
        self.perf.now_ns += int(seconds * S)
        self.collector.observe(SimpleNamespace(procfs=self.proc.procfs, perf_events=self.perf))  # type: ignore[arg-type]
        return self.shown()

    def shown(self) -> dict[int, nodes.Process]:
        every = [nodes.Process(pid=stat.pid, start=stat.start) for stat in self.proc.procfs.processes().values()]
        batch = self.collector.expand(every)
        assert not batch.edges
        return {node.pid: node for node in batch.nodes if isinstance(node, nodes.Process)}

    def asked(self) -> list[int]:
        return [pid_of(target.id) for target in self.perf.asked]


# --- figures ---------------------------------------------------------------------------------------------------------


def test_first_sight_gives_no_figure_and_the_second_does() -> None:
    rig = Rig()
    first = rig.round()[42]
    assert first.metrics == {"perf_threads_count": 1}
    assert first.unknown == dict.fromkeys(
        ("llc_miss_pct", "llc_misses_per_s", "perf_running_pct", "instructions_per_cycle"), FIRST_READING
    )
    assert first.attributes == {"perf_scope": "all", "perf_events": "LLC-loads"}
    rig.grow(42, S, S, 1000 * M, 300 * M, 900 * M, 600 * M)
    second = rig.round(2.0)[42]
    assert second.metrics == {
        "perf_threads_count": 1,
        "llc_miss_pct": 30.0,
        "llc_misses_per_s": 150.0 * M,
        "perf_running_pct": 100.0,
        "instructions_per_cycle": 1.5,
    }
    assert second.unknown is None


def test_counters_that_were_shared_are_scaled_thread_by_thread() -> None:
    rig = Rig()
    rig.perf.rows[42][43] = [0, 0, 0, 0, 0, 0]
    rig.round()
    rig.grow(42, S, S // 4, 100 * M, 10 * M, M, M)  # a quarter of the time: four times as much
    rig.grow(43, S, S, 100 * M, 90 * M, M, M)
    shown = rig.round()[42]
    assert shown.metrics["llc_miss_pct"] == pytest.approx(100 * (40 + 90) / (400 + 100))
    assert shown.metrics["llc_misses_per_s"] == pytest.approx(130 * M)
    assert shown.metrics["perf_running_pct"] == pytest.approx(62.5)
    assert shown.metrics["perf_threads_count"] == 2 and "perf_partial" not in shown.attributes


def test_a_process_that_slept_missed_nothing_and_has_no_ratio() -> None:
    rig = Rig()
    rig.round()
    shown = rig.round()[42]
    assert shown.metrics == {"perf_threads_count": 1, "llc_misses_per_s": 0.0}
    assert shown.unknown is not None and shown.unknown.keys() == {
        "llc_miss_pct", "instructions_per_cycle", "perf_running_pct"
    }  # fmt: skip
    assert all("did not run" in why for why in shown.unknown.values())


def test_a_process_that_ran_without_a_counter_is_unknown_not_zero() -> None:
    rig = Rig()
    rig.round()
    rig.grow(42, S, 0, 0, 0, 0, 0)
    shown = rig.round()[42]
    assert shown.metrics == {"perf_threads_count": 1, "perf_running_pct": 0.0}
    assert shown.unknown is not None and all("NMI watchdog" in why for why in shown.unknown.values())
    assert shown.unknown.keys() == {"llc_miss_pct", "llc_misses_per_s", "instructions_per_cycle"}


def test_one_thread_without_a_counter_makes_it_partial() -> None:
    rig = Rig()
    rig.perf.rows[42][43] = [0, 0, 0, 0, 0, 0]
    rig.round()
    rig.grow(42, S, S, 100 * M, 25 * M, M, M)
    rig.grow(43, S, 0, 0, 0, 0, 0)
    shown = rig.round()[42]
    assert shown.attributes["perf_partial"] is True
    assert (shown.metrics["llc_miss_pct"], shown.metrics["perf_running_pct"]) == (25.0, 50.0)


def test_threads_that_came_and_went() -> None:
    """Before Linux 5.13: a new thread counts from its beginning, a gone one to its end."""
    rig = Rig()
    rig.perf.fields["inherits"] = False
    rig.perf.rows[42][43] = [S, S, 100 * M, 0, M, M]
    rig.round()
    rig.perf.rows[42][44] = [S, S, 100 * M, 60 * M, M, M]
    rig.grow(43, S, S, 100 * M, 20 * M, M, M)
    assert rig.round()[42].metrics["llc_miss_pct"] == 40.0
    del rig.perf.rows[42][43], rig.perf.rows[42][44]
    rig.grow(42, S, S, 100 * M, 70 * M, M, M)
    assert rig.round()[42].metrics["llc_miss_pct"] == 70.0
    assert len(rig.perf.asked[0].tids) == 3, "each round they are named, busiest first"


def test_counters_that_went_back() -> None:
    rig = Rig()
    rig.round()
    rig.perf.rows[42][42] = [S // 2, S // 2, M, 0, M, M]
    shown = rig.round()[42]
    assert shown.unknown is not None and set(shown.unknown.values()) == {WENT_BACK}
    assert shown.attributes["perf_partial"] is True
    rig.grow(42, S, S, 100 * M, 50 * M, M, M)
    assert rig.round()[42].metrics["llc_miss_pct"] == 50.0


def test_a_watch_that_began_anew_is_a_first_sight() -> None:
    rig = Rig()
    rig.round()
    rig.perf.watch[42] = 2
    rig.perf.rows[42][42] = [9 * S, 9 * S, 900 * M, 900 * M, M, M]
    shown = rig.round()[42]
    assert shown.unknown is not None and shown.unknown["llc_miss_pct"] == FIRST_READING


def test_a_pid_that_another_process_got_is_a_first_sight() -> None:
    rig = Rig()
    rig.round()
    rig.proc.end(42)
    rig.add(42, "other", gpu=True, start=999)
    rig.grow(42, S, S, 100 * M, 90 * M, M, M)
    shown = rig.round()[42]
    assert shown.start == 999 and shown.unknown is not None and shown.unknown["llc_miss_pct"] == FIRST_READING


def test_without_its_events_a_cpu_gives_instructions_only() -> None:
    rig = Rig()
    rig.perf.fields = {"set": "instructions", "events": ["instructions", "cycles"], "user_only": True}
    rig.perf.rows[42] = {42: [0, 0, 0, 0]}
    first = rig.round()[42]
    assert first.unknown is not None and "last-level cache" in first.unknown["llc_miss_pct"]
    assert first.attributes == {"perf_scope": "user", "perf_events": "instructions"}
    rig.grow(42, S, S, 10 * M, 20 * M)
    shown = rig.round()[42]
    assert shown.metrics["instructions_per_cycle"] == 0.5
    assert shown.unknown is not None and shown.unknown.keys() == {"llc_miss_pct", "llc_misses_per_s"}
    assert [note.hint for note in rig.collector.notes.values()] == ["only instructions per cycle are given"]


def test_without_instructions() -> None:
    rig = Rig(instructions=False)
    rig.perf.fields = {"events": ["llc_reads", "llc_misses"]}
    rig.perf.rows[42] = {42: [0, 0, 0, 0]}
    first = rig.round()[42]
    assert first.unknown is not None and "instructions_per_cycle" not in first.unknown
    assert [len(each.events) for each in rig.perf.sets] == [2, 2]
    rig.grow(42, S, S, 10 * M, 4 * M)
    assert rig.round()[42].metrics["llc_miss_pct"] == 40.0


def test_the_same_round_once_more_changes_nothing() -> None:
    rig = Rig()
    rig.round()
    rig.grow(42, S, S, 1000 * M, 300 * M, M, M)
    before = rig.round()
    rig.perf.now_ns += 5
    rig.collector.observe(SimpleNamespace(procfs=rig.proc.procfs, perf_events=rig.perf))  # type: ignore[arg-type]
    assert rig.shown() == before


# --- whom ------------------------------------------------------------------------------------------------------------


def test_those_with_a_gpu_and_those_that_use_most_cpu() -> None:
    rig = Rig(top_count=2)
    for pid in range(100, 106):
        rig.add(pid)
    rig.add(7, "kworker", flags=KERNEL_THREAD)
    rig.round()
    assert rig.asked() == [42], "what was used since they started says nothing of now"
    for pid, ticks in ((7, 90), (101, 30), (104, 80), (102, 50), (100, 9)):
        rig.proc.change(pid, utime=ticks)
    rig.round()
    assert rig.asked() == [42, 104, 102]


def test_a_busy_process_stays_while_it_is_near_the_top_or_idle_with_room() -> None:
    rig = Rig(top_count=2, gpu_count=0)
    for pid in range(100, 106):
        rig.add(pid)
    used = dict.fromkeys(range(100, 106), 0)

    def run(**ticks: int) -> list[int]:
        for name, more in ticks.items():
            used[int(name[1:])] += more
            rig.proc.change(int(name[1:]), utime=used[int(name[1:])])
        rig.round()
        return rig.asked()

    rig.round()
    assert run(p100=90, p101=80) == [100, 101]
    assert run(p100=30, p101=20, p102=99) == [100, 101], "third of four: it stays"
    assert run() == [100, 101], "nobody else wants the room"
    assert run(p102=90, p103=80) == [102, 103]
    assert run(p100=99, p101=98, p104=97, p105=96, p102=11) == [100, 101], "out of the first four: it goes"


def test_of_many_with_a_gpu_those_with_most_cpu_are_counted_and_the_others_lost() -> None:
    rig = Rig(gpu_count=2)
    for pid in (50, 51, 52):
        rig.add(pid, gpu=True, utime=pid)
    rig.round()
    assert rig.asked() == [52, 51]
    assert rig.collector.losses == {"processes with a GPU beyond gpu_count": 2}


def test_threads_are_named_once_where_those_they_start_are_counted_with_them() -> None:
    rig = Rig()
    rig.round()
    assert rig.perf.asked == [Target("Process(pid=42,start=420)", (50 - 8, 43, 44))]
    rig.round()
    assert rig.perf.asked == [Target("Process(pid=42,start=420)", ())]


# --- what cannot be counted ------------------------------------------------------------------------------------------


def test_it_is_off_unless_asked_for() -> None:
    rig = Rig(watch=False)
    with pytest.raises(SourceUnavailable, match="unless asked for") as caught:
        rig.round()
    assert "collectors.perf_counters.watch" in caught.value.hint
    assert rig.perf.sets == [] and PerfCounters().settings.watch is False


@pytest.mark.parametrize(
    ("code", "reason", "hint"),
    [
        (errno.ENOENT, "ENOENT.*virtual machine without a PMU", "pmu=on"),
        (errno.EOPNOTSUPP, "EOPNOTSUPP", "virtual PMU"),
        (errno.ENOSYS, "no perf events", "CONFIG_PERF_EVENTS"),
    ],
)
def test_a_machine_without_counters_is_said_once_and_costs_nothing_more(code: int, reason: str, hint: str) -> None:
    rig = Rig()
    rig.perf.fields = {"unsupported": code, "set": "", "events": []}
    for number in range(3):
        with pytest.raises(SourceUnavailable, match=reason) as caught:
            rig.round()
        assert hint in caught.value.hint
        assert bool(rig.perf.asked) == (number == 0), "nobody is chosen any more"
        assert rig.shown() == {}
    rig.perf.fields, rig.perf.rows = {}, {42: {42: [0, 0, 0, 0, 0, 0]}}
    rig.round()
    rig.round()
    assert rig.asked() == [42], "a source that began anew finds them"


@pytest.mark.parametrize(
    ("code", "status", "reason", "hint"),
    [
        (errno.EACCES, b"Name:\tx\nSeccomp:\t0\n", "perf_event_paranoid is 3", "CAP_PERFMON"),
        (errno.EPERM, b"Name:\tx\nSeccomp:\t0\n", "perf_event_paranoid is 3", "CAP_PERFMON"),
        (errno.EPERM, b"Name:\tx\nSeccomp:\t2\nX:\t1\n", "seccomp", "--cap-add PERFMON"),
        (errno.EACCES, b"", "perf_event_paranoid is 3", "CAP_PERFMON"),
        (errno.EBUSY, b"", "busy", ""),
    ],
)
def test_no_right(code: int, status: bytes, reason: str, hint: str) -> None:
    rig = Rig()
    rig.proc.fs.files["/proc/sys/kernel/perf_event_paranoid"] = b"3\n"
    rig.proc.fs.files["/proc/self/status"] = status
    rig.perf.rows = {}
    rig.perf.fields["refused"] = {"Process(pid=42,start=420)": code}
    with pytest.raises(SourceUnavailable, match=f"(?i){reason}") as caught:
        rig.round()
    assert hint in caught.value.hint
    rig.add(50, gpu=True)  # one that may be counted: now it is a note, with how many
    rig.perf.rows[50] = {50: [0, 0, 0, 0, 0, 0]}
    shown = rig.round()
    (note,) = rig.collector.notes.values()
    assert note.reason == caught.value.reason and note.count == 1
    assert shown[42].unknown is not None and "may not be counted" in shown[42].unknown["llc_miss_pct"]
    assert shown[42].metrics == {} and shown[50].metrics == {"perf_threads_count": 1}


def test_too_few_descriptors() -> None:
    rig = Rig()
    rig.add(50, gpu=True)
    rig.perf.fields["short"] = errno.EMFILE
    rig.perf.left_out[42] = 2
    shown = rig.round()
    assert shown[42].attributes["perf_partial"] is True
    assert shown[50].unknown is not None and "descriptors" in shown[50].unknown["llc_miss_pct"]
    few, partial = rig.collector.notes.values()
    assert "ulimit" in few.hint and "max_threads" in partial.hint and partial.count == 1


def test_a_process_that_ended_while_it_was_looked_at() -> None:
    rig = Rig()
    rig.add(50, gpu=True)
    shown = rig.round()
    assert shown[50].unknown is not None and "ended" in shown[50].unknown["llc_miss_pct"]
    assert rig.collector.notes == {}


def test_rows_of_another_length() -> None:
    rig = Rig()
    rig.perf.rows[42] = {42: [1, 1, 1]}
    with pytest.raises(SourceUnavailable, match="layout"):
        rig.round()


def test_threads_that_cannot_be_listed() -> None:
    rig = Rig()
    rig.proc.fs.denied.add("/proc/42/task")
    rig.round()
    assert rig.perf.asked == [Target("Process(pid=42,start=420)", ())]


def test_close_gives_back_what_is_counted() -> None:
    rig = Rig()
    rig.collector.close()
    rig.round()
    rig.collector.close()
    rig.collector.close()
    assert rig.perf.closed == 1


# --- sums ------------------------------------------------------------------------------------------------------------

ns = st.integers(1, 10**12)
share = st.integers(1, 100)


@given(st.dictionaries(st.integers(1, 50), st.tuples(ns, share, st.integers(0, 1000)), min_size=1, max_size=8))
def test_a_steady_rate_is_found_whatever_share_of_the_time_was_counted(
    threads: dict[int, tuple[int, int, int]],
) -> None:
    """What a thread does per ns is what is told, of all the time that it ran."""
    before = dict.fromkeys(threads, (7, 7, 1, 1, 1, 1))
    now, expected, enabled_ns = {}, 0.0, 0
    for tid, (running, pct, rate) in threads.items():
        enabled = running * 100 // pct
        now[tid] = (7 + enabled, 7 + running, 1 + rate * running, 1, 1, 1)
        expected += rate * enabled
        enabled_ns += enabled
    found = growth(before, now, NAMES)
    assert found.events["llc_reads"] == pytest.approx(expected, rel=1e-9)
    assert found.enabled_ns == enabled_ns >= found.running_ns
    assert found.back_count == found.uncounted_ns == 0


rows = st.tuples(*[st.integers(0, 2**63)] * 6)


@given(st.dictionaries(st.integers(1, 9), rows), st.dictionaries(st.integers(1, 9), rows))
def test_sums_are_never_negative_and_threads_that_went_back_are_left_out(
    before: dict[int, tuple[int, ...]], now: dict[int, tuple[int, ...]]
) -> None:
    found = growth(before, now, NAMES)
    assert all(value >= 0 for value in found.events.values())
    back = [tid for tid, row in now.items() if any(a < b for a, b in zip(row, before.get(tid, row), strict=True))]
    assert found.back_count == len(back)
    forwards = {tid: row for tid, row in now.items() if tid not in back}
    assert growth(before, forwards, NAMES).events == found.events


@given(st.dictionaries(st.integers(1, 10**6), rows, max_size=5))
def test_records_are_read_as_they_were_written(table: dict[int, tuple[int, ...]]) -> None:
    assert rows_of(watched(table), 4) == table


# --- the rule --------------------------------------------------------------------------------------------------------


def test_s19_fires_and_ends_with_what_the_collector_gives() -> None:
    rig, player = Rig(), Player(Engine([CacheMisses()]))
    scene = Scene([[]])

    def judged(seconds: int, misses: int) -> list[Finding]:
        found: list[Finding] = []
        for _ in range(seconds // 5):
            rig.grow(42, 5 * S, 5 * S, 100 * M, misses * M, 500 * M, 1000 * M)
            found = player.round(list(rig.round(5.0).values()), scene).findings
        return found

    assert judged(5, 60) == [], "first sight"
    assert judged(5, 60) == [], "not long enough"
    (finding,) = judged(15, 60)
    assert finding.entities[0] == "Process(pid=42,start=420)" and "60 %" in finding.message
    assert [seen.metric for seen in finding.evidence] == ["llc_miss_pct", "llc_misses_per_s"]
    assert judged(15, 4) == []
    (again,) = judged(20, 60)
    assert again.id == finding.id
