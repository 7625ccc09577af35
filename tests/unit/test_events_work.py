"""What sessions tell for rules: gaps, launches, copies, steps, samples; against the simplest code and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.event_rows import batches, names

from gpuflight.events.activity.session import Activity
from gpuflight.events.activity.steps import Steps, kind_of, spread
from gpuflight.events.activity.summary import Summary
from gpuflight.events.activity.timeline import DELAY_NS, LONG_GAP_NS, Timeline
from gpuflight.events.activity.work import stall_of, thread_efficiency_pct

BASE = 1_790_000_000_000_000_000
US = 1_000

work = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40), st.integers(0, 300)), max_size=50)


def summed(**tables: list[dict[str, Any]]) -> Summary:
    activity = Activity("s")
    for table, rows in tables.items():
        for batch in batches(table, rows, "s"):
            activity.add(batch)
    return activity.summary(most_kernels=20, most_scopes=20, most_streams=20)


# --- gaps ------------------------------------------------------------------------------------------------------------


@given(work, st.integers(1, 9))
def test_gaps_are_what_no_interval_covers(rows: list[tuple[int, int, int]], step: int) -> None:
    timeline = Timeline()
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        starts, lasted, calls = (np.array(column, np.int64) for column in zip(*part, strict=True))
        timeline.add(starts, lasted, calls, kernels=True)
        timeline.result()
    active_ns, gaps = timeline.result()
    covered = {t for start, took, _ in rows for t in range(start, start + took)}
    idle = [t for t in range(min(covered, default=0), max(covered, default=-1) + 1) if t not in covered]
    runs = [t for t in idle if t - 1 not in idle]
    assert active_ns == len(covered)
    assert (gaps.count, gaps.total_ns) == (len(runs), len(idle))
    assert gaps.max_ns == max((next(n for n in range(1, 400) if t + n not in idle) for t in runs), default=0)


def test_a_gap_is_the_hosts_if_the_next_work_was_called_after_the_last_one_ended() -> None:
    timeline = Timeline()
    starts = np.array([BASE, BASE + 1_000, BASE + 5_000, BASE + 9_000], np.int64)
    calls = np.array([BASE - 50, BASE - 40, BASE + 4_000, 0], np.int64)
    timeline.add(starts, np.full(4, 500, np.int64), calls, kernels=True)
    _, gaps = timeline.result()
    assert gaps.total_ns == 500 + 3_500 + 3_500
    assert gaps.known_ns == 500 + 3_500
    assert gaps.host_wait_ns == 3_500
    assert (gaps.launches, gaps.delayed) == (1, 0)


def test_launches_onto_an_idle_gpu_that_begin_late_and_copies_that_do_not_count() -> None:
    timeline = Timeline()
    starts = BASE + np.arange(4, dtype=np.int64) * 1_000_000
    calls = starts - np.array([0, DELAY_NS + 1, DELAY_NS, 500_000])
    timeline.add(starts[:3], np.full(3, 1_000, np.int64), calls[:3], kernels=True)
    timeline.add(starts[3:], np.full(1, 1_000, np.int64), calls[3:], kernels=False)
    _, gaps = timeline.result()
    assert (gaps.launches, gaps.delayed) == (2, 1)


def test_long_gaps_are_told_with_their_place_though_there_are_more_than_are_kept_open() -> None:
    timeline = Timeline()
    for part in np.array_split(np.arange(1, 200_001, dtype=np.int64) * 1_000, 7):
        late = np.where(part > 50_000_000, part + LONG_GAP_NS + 7, part)
        timeline.add(late, np.full(len(part), 400, np.int64), None, kernels=True)
    active_ns, gaps = timeline.result()
    assert active_ns == 200_000 * 400
    assert (gaps.count, gaps.long, gaps.long_ns) == (199_999, 1, LONG_GAP_NS + 607)
    assert (gaps.max_ns, gaps.max_at_ns) == (LONG_GAP_NS + 607, 50_000_400)
    assert gaps.known_ns == gaps.host_wait_ns == 0
    assert timeline.latest_ns - timeline.first_ns == active_ns + gaps.total_ns


def test_a_timeline_of_nothing_and_of_nonsense() -> None:
    timeline = Timeline()
    assert timeline.result()[0] == 0
    timeline.add(np.array([0, -5, 1 << 62], np.int64), np.array([7, 7, 7], np.int64), None, kernels=True)
    active_ns, gaps = timeline.result()
    assert (active_ns, gaps.count, timeline.latest_ns) == (0, 0, 0)


def test_gpus_are_told_apart_where_kernels_name_them() -> None:
    both = [(0, 10, 0), (100, 10, 1), (20, 10, 0), (50, 10, 1), (90, 10, 0)]
    kernel = [{"start_ns": BASE + at, "duration_ns": took, "device_id": gpu} for at, took, gpu in both]
    copy = [{"start_ns": BASE + 10, "duration_ns": 10, "device_id": 0, "copy_kind": 1}]
    apart = summed(memcpy=copy, kernel=kernel).work
    assert apart is not None and apart.gaps is not None
    assert (apart.gpus, apart.timeline_ns, apart.active_ns) == (2, 100 + 60, 40 + 20)
    assert (apart.gaps.count, apart.gaps.total_ns, apart.first_ns) == (2, 60 + 40, BASE)
    unnamed = [{name: row[name] for name in ("start_ns", "duration_ns")} for row in kernel]
    together = summed(memcpy=copy, kernel=unnamed).work
    assert together is not None and together.gaps is not None
    assert (together.gpus, together.timeline_ns, together.active_ns) == (1, 110, 60)


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ProfilerStep#12", ("step", "ProfilerStep")), ("train_step", ("step", "train_step")),
        ("step 7", ("step", "step")), ("iteration_3", ("step", "iteration")), ("Training Step [4]",
        ("step", "Training Step")), ("batch", ("step", "batch")),
        ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", ("loader", "loader")),
        ("load_batch", ("loader", "loader")), ("data wait", ("loader", "loader")), ("gc", ("gc", "gc")),
        ("python gc.collect", ("gc", "gc")), ("garbage collection", ("gc", "gc")),
        ("epoch", ("", "")), ("forward", ("", "")), ("stepwise_scheduler", ("", "")), ("logcat", ("", "")),
        ("aten::batch_norm", ("", "")), ("main_loop", ("", "")), ("", ("", "")),
    ],
)  # fmt: skip
def test_names_of_steps_and_pauses(name: str, kind: tuple[str, str]) -> None:
    assert kind_of(name) == kind


def test_the_series_with_the_most_time_is_the_steps() -> None:
    steps = Steps()
    for n in range(200):
        steps.take(f"ProfilerStep#{n}", BASE + n * 100, 90 if n % 20 else 900)
        steps.take("train_step", BASE + n * 100, 60)
    found = steps.result()
    assert found is not None
    assert (found.name, found.count, found.max_ns, found.judged) == ("ProfilerStep", 200, 900, 200)
    assert (found.p50_ns, found.outliers, found.first_end_ns) == (90, 10, BASE + 900)


def test_equal_steps_have_no_outliers() -> None:
    assert spread([5] * 300) == (300, 5, 0)
    assert spread([]) == (0, 0, 0)


def _scope(time: int, instance: int, name: int, event: int, depth: int) -> dict[str, Any]:
    return {
        "time_ns": BASE + time, "scope_instance_id": instance, "name_id": name, "event_type": event, "depth": depth
    }  # fmt: skip


def test_scopes_and_ranges_make_steps_and_an_inner_loader_counts_once() -> None:
    found = summed(
        name=[*names("scope", {1: "train_step", 2: "load_data", 3: "dataloader"}), *names("marker", {9: "gc pause"})],
        scope=[
            _scope(0, 1, 1, 0, 0), _scope(10, 2, 2, 0, 1), _scope(20, 3, 3, 0, 2), _scope(60, 3, 3, 1, 2),
            _scope(80, 2, 2, 1, 1), _scope(100, 1, 1, 1, 0),
        ],
        nvtx=[
            {"start_ns": BASE, "duration_ns": 2_000_000, "name_id": 9},
            {"start_ns": BASE, "duration_ns": 900, "name_id": 9},
            {"start_ns": BASE, "duration_ns": 900, "name_id": 4},
        ],
    ).work  # fmt: skip
    assert found is not None and found.steps is not None and found.loader is not None and found.gc is not None
    assert (found.steps.count, found.steps.total_ns) == (1, 100)
    assert (found.loader.count, found.loader.total_ns) == (1, 70)
    assert (found.gc.count, found.gc.long, found.gc.max_ns) == (2, 1, 2_000_000)


# --- launches, copies, samples ---------------------------------------------------------------------------------------


def _kernel(at: int, took: int, corr: int, call: int | None = None, **more: Any) -> dict[str, Any]:
    times = (
        {}
        if call is None
        else {"api_start_ns": BASE + at - call, "api_exit_ns": BASE + at - call + more.pop("in_call", 5 * US)}
    )
    return {
        "start_ns": BASE + at,
        "duration_ns": took,
        "kernel_id": 1,
        "corr_id": corr,
        "stream_id": 7,
        **times,
        **more,
    }


def test_launches_are_counted_by_what_is_odd_about_them() -> None:
    found = summed(
        kernel=[
            _kernel(100_000, 5 * US, 1, 9_000), _kernel(200_000, 50 * US, 2, 9_000, in_call=60 * US),
            _kernel(300_000, 50 * US, 3, 9_000), _kernel(400_000, 50 * US, 3, 9_000), _kernel(500_000, 0, 5, 9_000),
            _kernel(600_000, -4, 6, 9_000),
        ]
    ).work  # fmt: skip
    assert found is not None and found.launch_calls is not None
    assert (found.short, found.graph_kernels, found.invalid) == (2, 1, 2)
    assert (found.launch_calls.count, found.launch_calls.odd, found.launch_calls.odd_ns) == (6, 1, 60 * US)


def test_calls_on_another_clock_are_not_believed() -> None:
    row = {**_kernel(100_000, 5 * US, 1), "api_start_ns": 123_456, "api_exit_ns": 130_000}
    found = summed(kernel=[row, {**row, "start_ns": BASE + 900_000}]).work
    assert found is not None and found.launch_calls is None
    assert found.gaps is not None and found.gaps.known_ns == 0


def _copy(at: int, took: int, size: int, source: str | None, **more: Any) -> dict[str, Any]:
    kinds = {} if source is None else {"src_kind": source, "dst_kind": "Device"}
    return {"start_ns": BASE + at, "duration_ns": took, "bytes": size, "copy_kind": 1, "stream_id": 7, **kinds, **more}


def test_copies_by_memory_size_and_whether_they_block() -> None:
    blocked = {"api_start_ns": BASE + 990_000, "api_exit_ns": BASE + 1_100_000}
    quick = {"api_start_ns": BASE + 1_990_000, "api_exit_ns": BASE + 1_995_000}
    found = summed(
        memcpy=[
            _copy(1_000_000, 90_000, 2 << 20, "Pageable", **blocked),
            _copy(2_000_000, 90_000, 2 << 20, "Pinned", **quick), _copy(3_000_000, 1_000, 100, "pageable"),
            _copy(4_000_000, 1_000, 100, None), _copy(5_000_000, 1_000, 100, ""),
        ]
    ).work  # fmt: skip
    assert found is not None and found.pageable is not None and found.copy_calls is not None
    assert (found.pageable.count, found.pageable.odd, found.pageable.odd_ns) == (4, 2, 91_000)
    assert (found.pageable_bytes, found.pageable_big) == ((2 << 20) + 100, 1)
    assert (found.htod_copies, found.htod_small, found.copy_ns) == (5, 3, 183_000)
    assert (found.copy_calls.count, found.copy_calls.odd, found.copy_calls.odd_ns) == (2, 1, 110_000)


@pytest.mark.parametrize(
    ("metric", "stall"),
    [
        ("smsp__pcsamp_warps_issue_stalled_long_scoreboard", "long_scoreboard"),
        ("smsp__pcsamp_warps_issue_stalled_wait_not_issued", "wait"), ("Long Scoreboard", "long_scoreboard"),
        ("smsp__sass_sectors_mem_global", ""), ("smsp__pcsamp_sample_data_count", ""),
    ],
)  # fmt: skip
def test_names_of_stalls(metric: str, stall: str) -> None:
    assert stall_of(metric) == stall


def test_samples_by_stall_and_the_threads_of_instructions() -> None:
    stalls = "smsp__pcsamp_warps_issue_stalled_"
    texts = {1: f"{stalls}long_scoreboard", 2: f"{stalls}long_scoreboard_not_issued", 3: f"{stalls}selected",
             4: "smsp__sass_inst_executed", 5: "smsp__sass_thread_inst_executed"}  # fmt: skip
    rows = [
        {"time_ns": BASE, "metric_id": metric, "metric_value": value, "sample_kind": kind}
        for metric, value, kind in ((1, 30, 0), (2, 20, 0), (3, 50, 0), (4, 1_000, 1), (5, 24_000, 1))
    ]
    found = summed(name=names("metric", texts), profile_sample=rows).work
    assert found is not None
    assert (found.stall_samples, found.stalls) == (100, {"long_scoreboard": 50})
    assert thread_efficiency_pct(found) == 75.0
    found.thread_instructions = 900  # fewer threads than instructions: they were not counted together
    assert thread_efficiency_pct(found) is None


def test_means_of_hardware_counters() -> None:
    found = summed(
        name=names("metric", {1: "dram__throughput.avg.pct_of_peak_sustained_elapsed"}),
        pm_sample=[{"time_ns": BASE, "metric_id": 1, "value": value} for value in (80.0, 90.0, float("nan"))],
        perf_metric=[{"start_ns": BASE, "tensor_active_pct": value} for value in (10.0, float("nan"), 20.0)],
    ).work
    assert found is not None
    assert found.counters["dram__throughput.avg.pct_of_peak_sustained_elapsed"] == (170.0, 2)
    assert found.counters["tensor_active_pct"] == (30.0, 2)


def test_a_kernel_has_its_registers_and_the_configuration_of_most_launches() -> None:
    shape = {"grid_x": 10, "grid_y": 2, "grid_z": 1, "block_x": 128, "block_y": 1, "block_z": 1, "occupancy": 0.5,
             "reg_occupancy": 0.75, "limiting_resource": "shared", "max_active_blocks": 4,
             "local_mem_per_thread_bytes": 16}  # fmt: skip
    found = summed(
        kernel=[_kernel(100_000 * n, 9 * US, n, num_regs=40 if n else 64) for n in range(4)],
        kernel_shape=[{"shape_id": 5, **shape}, {"shape_id": 6, **shape, "grid_x": 99}],
        kernel_detail=[{"corr_id": 1, "shape_id": 5}, {"corr_id": 2, "shape_id": 5}, {"corr_id": 3, "shape_id": 6}],
    ).kernels[0]
    assert found.shape is not None
    assert (found.registers, found.details) == (64, 3)
    assert (found.shape.grid, found.shape.block, found.shape.blocks_per_sm, found.shape.local_bytes) == (20, 128, 4, 16)
    assert (found.shape.occupancy, found.shape.reg_occupancy, found.shape.limiter) == (0.5, 0.75, "shared")
