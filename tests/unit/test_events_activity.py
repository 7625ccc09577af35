"""Sums of running sessions against sums made by hand and by the simplest code."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gpufl_files import CLEAN, GEN, START_NS, decode, detail, kernels, line, naive, read, shutdown, start

from gpuflight.events.activity.busy import Busy
from gpuflight.events.activity.memory import Memory
from gpuflight.events.activity.scopes import Scopes
from gpuflight.events.activity.session import Activity
from gpuflight.events.activity.summary import MemorySum, Summary, WaitSum
from gpuflight.events.activity.sums import MOST_KEYS, OTHER, Sums
from gpuflight.events.aggregate import KernelTable
from gpuflight.events.batch import Batch
from gpuflight.events.names import Names


def summed(*lines: bytes, channel: str = "device") -> Summary:
    return summary_of(decode(b"".join(lines), channel)[0])


def summary_of(batches: list[Batch], kernels_count: int = 20, scopes: int = 20, streams: int = 32) -> Summary:
    activity = Activity(batches[0].session_id)
    for batch in batches:
        activity.add(batch)
    return activity.summary(most_kernels=kernels_count, most_scopes=scopes, most_streams=streams)


def columns(**values: list[int]) -> dict[str, Any]:
    return {name: np.array(numbers, dtype=np.int64) for name, numbers in values.items()}


# --- time in which something ran -------------------------------------------------------------------------------------

intervals = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 60)), max_size=60)


@given(intervals, st.integers(1, 7))
def test_busy_time_is_that_of_the_union(rows: list[tuple[int, int]], step: int) -> None:
    busy = Busy()
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        busy.add(np.array([s for s, _ in part], np.int64), np.array([d for _, d in part], np.int64))
        assert busy.busy_ns == len({t for s, d in rows[: first + len(part)] for t in range(s, s + d)})


def test_busy_time_of_more_intervals_than_are_kept_open() -> None:
    busy = Busy()
    for part in np.array_split(np.arange(1, 100_001, dtype=np.int64) * 10, 13):
        busy.add(part, np.full(len(part), 4, np.int64))
        busy.add(part + 2, np.full(len(part), 4, np.int64))
        assert busy.busy_ns
    assert busy.busy_ns == 600_000
    assert busy.latest_ns == 1_000_006


def test_busy_time_of_nonsense_is_none() -> None:
    busy = Busy()
    busy.add(np.array([0, -5, 1 << 62, 5], np.int64), np.array([7, 7, 7, -7], np.int64))
    assert busy.busy_ns == 0 and busy.latest_ns == 0


# --- sums by key -----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 2), st.integers(0, 9)), min_size=1, max_size=50))
def test_sums_by_key(rows: list[tuple[int, int, int]]) -> None:
    sums = Sums(("a", "b"), ("x",))
    expected: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    for a, b, x in rows:
        sums.add(columns(a=[a], b=[b], x=[x]), 1)
        here = expected[a, b]
        here[:] = [here[0] + 1, here[1] + x, max(here[2], x)]
    assert sums.result() == expected


def test_sums_of_ever_new_keys_are_bounded() -> None:
    sums = Sums(("a",), ("x",))
    sums.add(columns(a=list(range(MOST_KEYS + 500)), x=[1] * (MOST_KEYS + 500)), MOST_KEYS + 500)
    found = sums.result()
    assert len(found) == MOST_KEYS + 1
    assert found[(OTHER,)][:2] == [500, 500]


# --- kernels ---------------------------------------------------------------------------------------------------------


def test_groups_of_kernels_are_the_lines_of_the_table_added_up() -> None:
    batches, _ = read(CLEAN)
    table = KernelTable()
    for batch in batches:
        table.add(batch)
    lines: dict[int, list[Any]] = defaultdict(list)
    for stats in table.stats():
        lines[stats.kernel_id].append(stats)
    groups = table.groups(batches[0].session_id, 3)
    assert [group.total_ns for group in groups] == sorted((g.total_ns for g in groups), reverse=True)
    assert {group.kernel_id for group in groups} == lines.keys()
    for group in groups:
        parts = lines[group.kernel_id]
        assert (group.count, group.total_ns) == (sum(p.count for p in parts), sum(p.total_ns for p in parts))
        assert (group.min_ns, group.max_ns) == (min(p.min_ns for p in parts), max(p.max_ns for p in parts))
        assert len(group.lanes) == len(parts)
    assert groups[0].details == sum(p.details for p in lines[groups[0].kernel_id])
    assert groups[3].p50_ns == 0 and groups[0].p50_ns > 0


def test_quantiles_of_a_kernel_over_its_streams() -> None:
    durations = [1000 + 7 * n for n in range(500)]
    rows = [[n, 1, 7 + n % 3, duration, n] for n, duration in enumerate(durations)]
    found = summed(start(), kernels(rows)).kernels[0]
    assert found.p50_ns == pytest.approx(np.quantile(durations, 0.5), rel=0.01)
    assert found.p99_ns == pytest.approx(np.quantile(durations, 0.99), rel=0.01)
    assert [lane[0] for lane in found.lanes] == [7, 8, 9]


def test_a_session_of_kernels() -> None:
    found = summed(
        line("job_start", pid=7, app="train --token=abcdefgh12345", ts_ns=START_NS, hostname="n1",
             devices=[{"id": 0, "uuid": "GPU-a", "name": "H100"}], profiling_engine="nvidia.trace"),
        line("dictionary_update", kernel_dict={"1": "gemm"}),
        kernels([[0, 1, 7, 100, 1], [50, 1, 8, 100, 2], [1000, 2, 7, 10, 3]]),
        detail(1, occupancy=0.5),
    )  # fmt: skip
    assert (found.pid, found.hostname, found.engine, found.start_ns) == (7, "n1", "nvidia.trace", START_NS)
    assert "abcdefgh12345" not in found.app and found.app.startswith("train")
    assert (found.launches, found.kernel_ns, found.busy_ns) == (3, 210, 160)
    gemm, nameless = found.kernels
    assert (gemm.name, gemm.count, gemm.total_ns, gemm.details, gemm.occupancy) == ("gemm", 2, 200, 1, 0.5)
    assert (nameless.name, found.unnamed_count) == (None, 1)
    assert gemm.lanes == [(7, 1, 100), (8, 1, 100)]
    assert {(s.stream_id, s.device_id, s.launches) for s in found.streams} == {(7, 0, 2), (8, 0, 1)}
    assert found.device_latest_ns == START_NS + 1010


def test_what_did_not_come_is_unknown() -> None:
    found = summed(start())
    assert found.launches is found.busy_ns is found.copies is found.memsets is None
    assert found.waits is found.memory is found.scopes is found.graph_launches is None
    assert found.end == "" and found.synthetic is None


def test_the_end_and_who_wrote_it() -> None:
    assert summed(start(), shutdown()).end == "shutdown"
    killed = line("shutdown", ts_ns=START_NS + 5, synthetic=True, signal=9)
    assert (summed(start(), killed).end, summed(start(), killed).end_ns) == ("launcher", START_NS + 5)


def test_synthetic_kernels_are_marked() -> None:
    told = line("capture_capabilities", ts_ns=START_NS, capabilities=[
        {"feature": "kernel_events", "status": "fallback", "mode": "launch_callbacks_synthetic"}])  # fmt: skip
    assert summed(start(), kernels([[0, 1, 7, 5, 1]]), told).synthetic is True


def test_kernels_without_a_time_of_day_are_counted_and_make_no_busy_time() -> None:
    found = summed(start(), kernels([[0, 1, 7, 100, 1]], base=5_000))
    assert (found.launches, found.kernel_ns, found.busy_ns) == (1, 100, None)


def test_only_the_longest_kernels_are_told_and_all_are_counted() -> None:
    batches, _ = decode(start() + kernels([[n, n + 1, n % 40, n + 1, n] for n in range(60)]))
    found = summary_of(batches, kernels_count=5, streams=4)
    assert [kernel.total_ns for kernel in found.kernels] == [60, 59, 58, 57, 56]
    assert (found.kernels_count, found.launches, found.kernel_ns) == (60, 60, sum(range(61)))
    assert (len(found.streams), found.streams_count) == (4, 40)


def test_a_stream_is_on_the_gpu_that_other_rows_of_it_name() -> None:
    devices = [{"id": n, "uuid": f"GPU-{n}"} for n in range(2)]
    launch = line("graph_launch_event", start_ns=START_NS, end_ns=START_NS + 5, duration_ns=5, graph_id=1, device_id=1,
                  stream_id=8, corr_id=1)  # fmt: skip
    found = summed(
        line("job_start", pid=1, app="a", ts_ns=START_NS, devices=devices), launch,
        kernels([[0, 1, 7, 5, 1], [0, 1, 8, 5, 2]]),
    )  # fmt: skip
    assert {stream.stream_id: stream.device_id for stream in found.streams} == {7: None, 8: 1}
    assert found.graph_launches == 1


# --- copies, waits, memory, scopes -----------------------------------------------------------------------------------


def test_copies_and_waits() -> None:
    copies = line("memcpy_event_batch", batch_id=1, base_time_ns=START_NS,
                  columns=["dt_ns", "stream_id", "duration_ns", "bytes", "copy_kind", "corr_id"],
                  rows=[[0, 7, 10, 100, 1, 1], [5, 7, 20, 200, 1, 2], [9, 8, 5, 64, 8, 3]])  # fmt: skip
    waits = line("synchronization_event_batch", batch_id=1, base_time_ns=START_NS,
                 columns=["dt_ns", "duration_ns", "sync_type", "stream_id", "event_id", "context_id", "corr_id",
                          "function_id"],
                 rows=[[0, 500, 3, 7, 0, 1, 1, 0], [10, 300, 3, 7, 0, 1, 2, 0], [20, 5, 1, 7, 0, 1, 3, 0]])  # fmt: skip
    found = summed(start(), copies, waits)
    assert [(c.kind, c.device_id, c.count, c.bytes, c.total_ns) for c in found.copies or ()] == [
        ("DtoD", None, 1, 64, 5),
        ("HtoD", None, 2, 300, 30),
    ]
    assert found.waits == [WaitSum("event", 1, 5, 5), WaitSum("stream", 2, 800, 500)]
    assert {(s.stream_id, s.copies, s.copied_bytes) for s in found.streams} == {(7, 2, 300), (8, 1, 64)}
    assert found.host_latest_ns == START_NS + 20


def allocations(*rows: tuple[int, int, int, int, int]) -> dict[str, Any]:
    """(operation, kind, address, bytes, device), in order."""
    named = zip(("memory_op", "memory_kind", "address", "bytes", "device_id"), zip(*rows, strict=True), strict=True)
    return columns(start_ns=list(range(len(rows))), **{name: list(values) for name, values in named})


def test_memory_held_and_its_peak() -> None:
    memory = Memory()
    rows = [(1, 3, 10, 100, 0), (1, 3, 20, 50, 0), (2, 3, 10, 0, 0), (1, 3, 30, 60, 0), (1, 2, 90, 7, 0)]
    rows += [(2, 3, 99, 0, 0), (1, 3, 20, 10, 0), (1, 3, 40, 5, 1), (1, 1, 50, 1000, 0)]
    memory.add(allocations(*rows), len(rows))
    assert memory.result() == [
        MemorySum(0, False, allocations=4, frees=2, unmatched_frees=1, held_bytes=70, peak_bytes=150),
        MemorySum(1, False, allocations=1, frees=0, unmatched_frees=0, held_bytes=5, peak_bytes=5),
        MemorySum(None, True, allocations=1, frees=0, unmatched_frees=0, held_bytes=7, peak_bytes=7),
    ]


def test_memory_is_put_in_order_of_time() -> None:
    memory = Memory()
    shuffled = {name: values[::-1] for name, values in allocations((1, 3, 10, 100, 0), (2, 3, 10, 0, 0)).items()}
    memory.add(shuffled, 2)
    assert (memory.result()[0].held_bytes, memory.result()[0].unmatched_frees) == (0, 0)


def scoped(*rows: tuple[int, int, int, int, int]) -> Scopes:
    """(time, instance, name, event, depth)"""
    scopes = Scopes()
    for time_ns, instance, name, event, depth in rows:
        values = columns(time_ns=[time_ns], scope_instance_id=[instance], name_id=[name], event_type=[event])
        scopes.add({**values, **columns(depth=[depth])}, 1)
    return scopes


def test_scopes_by_their_place_in_the_tree() -> None:
    names = Names()
    for identifier, text in ((1, "epoch"), (2, "step")):
        names.add("scope", identifier, text)
    scopes = scoped((0, 1, 1, 0, 0), (10, 2, 2, 0, 1), (30, 2, 2, 1, 1), (40, 3, 2, 0, 1), (45, 3, 2, 1, 1),
                    (50, 1, 1, 1, 0), (60, 4, 2, 0, 0), (99, 77, 2, 1, 0))  # fmt: skip
    assert [(s.path, s.depth, s.count, s.open, s.total_ns, s.max_ns) for s in scopes.result(names, 9)] == [
        ("epoch", 0, 1, 0, 50, 50),
        ("epoch|step", 1, 2, 0, 25, 20),
        ("step", 0, 0, 1, 0, 0),
    ]
    assert scopes.beyond == 1  # an end without a begin
    assert [scope.path for scope in scopes.result(names, 1)] == ["epoch"]
    assert scopes.result(names, 0) == []


# --- real files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", sorted(path.name for path in GEN.iterdir()))
def test_fixtures_of_every_generation(folder: str) -> None:
    """Launches and copied bytes are those that a plain reader counts; no session tells of another's."""
    launches: dict[str, dict[tuple[Any, ...], int]] = defaultdict(dict)
    for event in naive(GEN / folder):
        if event["type"] == "kernel_event_batch":
            launches[event["session_id"]]["batch", event["batch_id"]] = len(event["rows"])
        elif event["type"] == "kernel_event":
            launches[event["session_id"]]["one", event["corr_id"], event["start_ns"]] = 1
    by_session: dict[str, list[Batch]] = defaultdict(list)
    for batch in read(GEN / folder)[0]:
        by_session[batch.session_id].append(batch)
    assert by_session
    for session, batches in by_session.items():
        found = summary_of(batches)
        assert (found.launches or 0) == sum(launches[session].values())
        assert sum(kernel.count for kernel in found.kernels) == (found.launches or 0)
        assert found.busy_ns is None or 0 < found.busy_ns <= found.kernel_ns
