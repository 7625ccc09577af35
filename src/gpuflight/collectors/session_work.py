"""Metrics of one session that rules judge: how busy its GPUs are, and what its launches, copies and steps are like.

All are sums since the session's beginning (``events.activity.work``), so that a rule can look at any span of time by
their increase, and at a whole session by their value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuflight.events.activity.work import thread_efficiency_pct

if TYPE_CHECKING:
    from gpuflight.collectors.session_metrics import Values
    from gpuflight.events.activity.steps import StepSum
    from gpuflight.events.activity.summary import Summary
    from gpuflight.events.activity.work import WorkSum

_SYNTHETIC = "kernel times are those of launches, not of the GPU"
_NO_TIMES = "the log has no kernels or copies with their times so far"
_NO_CALLS = "the log does not say when the host called"
_NO_STEPS = "no scope of the log is named like a step"
_NO_KINDS = "the log does not say which kinds of memory its copies are from and to"
_GROUPS = {
    "timeline": ("gpu_timeline_ms", "gpu_active_ms", "gpu_gaps_long_count", "gpu_gaps_long_ms", "gpu_gap_max_ms"),
    "calls": ("host_wait_ms", "gpu_gaps_known_ms", "idle_launches_count", "delayed_launches_count"),
    "steps": ("steps_count", "steps_ms", "steps_judged_count", "step_outliers_count", "first_step_s"),
}
"""Which are unknown together."""


def add_work(values: Values, now: Summary) -> None:
    """What ``now.work`` says, and why the rest is unknown."""
    work = now.work
    if work is None:
        return
    if now.launches is not None:
        values.add("invalid_records_count", work.invalid)
        values.add("short_launches_count", work.short)
        values.add("graph_kernels_count", work.graph_kernels)
    _timeline(values, now, work)
    _calls(values, work)
    _copies(values, now, work)
    _steps(values, now, work)
    _samples(values, work)
    if now.kernels and now.kernel_ns:
        values.add("top_kernel_pct", round(100 * now.kernels[0].total_ns / now.kernel_ns, 2))
    if now.waits is not None:
        waits = [wait for wait in now.waits if wait.kind != "stream_wait_event"]  # it is a GPU that waits there
        values.add("host_syncs_count", sum(wait.count for wait in waits))
        values.add("host_sync_wait_ms", _ms(sum(wait.total_ns for wait in waits)))
    else:
        for name in ("host_syncs_count", "host_sync_wait_ms"):
            values.add(name, None, "the log has no waits so far")


def _timeline(values: Values, now: Summary, work: WorkSum) -> None:
    gaps = work.gaps
    why = _SYNTHETIC if now.synthetic else _NO_TIMES if gaps is None or work.timeline_ns <= 0 else ""
    if why or gaps is None:
        for name in (*_GROUPS["timeline"], *_GROUPS["calls"]):
            values.add(name, None, why)
        return
    values.add("gpu_timeline_ms", _ms(work.timeline_ns))
    values.add("gpus_worked_count", work.gpus)
    values.add("gpu_active_ms", _ms(work.active_ns))
    values.add("gpu_gaps_count", gaps.count)
    values.add("gpu_gaps_long_count", gaps.long)
    values.add("gpu_gaps_long_ms", _ms(gaps.long_ns))
    values.add("gpu_gap_max_ms", _ms(gaps.max_ns))
    if now.busy_ns is not None:
        values.add("kernels_active_ms", _ms(now.busy_ns))
    if work.launch_calls is None and work.copy_calls is None:
        for name in _GROUPS["calls"]:
            values.add(name, None, _NO_CALLS)
        return
    values.add("gpu_gaps_known_ms", _ms(gaps.known_ns))
    values.add("host_wait_ms", _ms(gaps.host_wait_ns))
    values.add("idle_launches_count", gaps.launches)
    values.add("delayed_launches_count", gaps.delayed)


def _calls(values: Values, work: WorkSum) -> None:
    calls = work.launch_calls
    if calls is None:
        values.add("launch_calls_count", None, _NO_CALLS)
        values.add("slow_launch_calls_count", None, _NO_CALLS)
        return
    values.add("launch_calls_count", calls.count)
    values.add("slow_launch_calls_count", calls.odd)
    values.add("slow_launch_calls_ms", _ms(calls.odd_ns))


def _copies(values: Values, now: Summary, work: WorkSum) -> None:
    if now.copies is not None:
        values.add("copy_time_ms", _ms(work.copy_ns))
        values.add("htod_copies_count", work.htod_copies)
        values.add("htod_small_copies_count", work.htod_small)
    else:
        for name in ("copy_time_ms", "htod_copies_count", "htod_small_copies_count"):
            values.add(name, None, "the log has no copies so far")
    if now.memsets is not None:
        values.add("memset_time_ms", _ms(work.memset_ns))
    if now.memory is not None:
        values.add("allocation_time_ms", _ms(work.allocation_ns))
    blocking = work.copy_calls
    if blocking is None:
        values.add("blocking_copies_count", None, _NO_CALLS)
    else:
        values.add("copy_calls_count", blocking.count)
        values.add("blocking_copies_count", blocking.odd)
        values.add("blocking_copies_ms", _ms(blocking.odd_ns))
    pageable = work.pageable
    if pageable is None or not pageable.count:
        values.add("pageable_copies_count", None, _NO_KINDS)
        return
    values.add("pageable_copies_count", pageable.odd)
    values.add("pageable_copies_ms", _ms(pageable.odd_ns))
    values.add("pageable_copied_bytes", work.pageable_bytes)
    values.add("pageable_big_copies_count", work.pageable_big)


def _steps(values: Values, now: Summary, work: WorkSum) -> None:
    steps: StepSum | None = work.steps
    if steps is None:
        for name in _GROUPS["steps"]:
            values.add(name, None, _NO_STEPS)
    else:
        values.add("steps_count", steps.count)
        values.add("steps_ms", _ms(steps.total_ns))
        values.add("step_p50_ms", _ms(steps.p50_ns))
        values.add("step_max_ms", _ms(steps.max_ns))
        values.add("steps_judged_count", steps.judged)
        values.add("step_outliers_count", steps.outliers)
        if now.start_ns is not None:
            values.add("first_step_s", round(max(steps.first_end_ns - now.start_ns, 0) / 1e9, 3))
    if now.start_ns is not None and work.first_ns:
        values.add("first_work_s", round(max(work.first_ns - now.start_ns, 0) / 1e9, 3))
    if work.loader is not None:
        values.add("loader_ms", _ms(work.loader.total_ns))
    if work.gc is None:
        values.add("gc_pauses_count", None, "the log has no ranges of garbage collection")
    else:
        values.add("gc_pauses_count", work.gc.count)
        values.add("gc_long_pauses_count", work.gc.long)
        values.add("gc_pauses_ms", _ms(work.gc.total_ns))
        values.add("gc_pause_max_ms", _ms(work.gc.max_ns))


def _samples(values: Values, work: WorkSum) -> None:
    if work.stall_samples:
        values.add("stall_samples_count", work.stall_samples)
        if work.stalls:
            values.add("stall_top_pct", round(100 * max(work.stalls.values()) / work.stall_samples, 2))
    else:
        values.add("stall_samples_count", None, "the log has no PC samples")
    efficiency = thread_efficiency_pct(work)
    if efficiency is None:
        values.add("thread_efficiency_pct", None, "the log does not count the instructions of threads and warps")
    else:
        values.add("thread_efficiency_pct", round(efficiency, 2))
        values.add("instructions_count", work.instructions)
    found = _means(work.counters)
    for name in ("sm_active_pct", "dram_active_pct", "tensor_active_pct"):
        values.add(name, found.get(name), "the log has no such hardware counter")


def _means(counters: dict[str, tuple[float, int]]) -> dict[str, float]:
    """Means of the counters that rules know, under our names; the first of several that say the same."""
    found: dict[str, float] = {}
    for counter, (total, count) in sorted(counters.items()):
        name = _our_name(counter)
        if name and count and name not in found:
            found[name] = round(min(max(total / count, 0.0), 100.0), 2)
    return found


def _our_name(counter: str) -> str:
    """Of a counter that is a share of what the hardware can, in %."""
    word = counter.lower()
    if not word.endswith(("pct", "_pct_of_peak_sustained_elapsed", "pct_of_peak_sustained_active")):
        return ""
    if "tensor" in word:
        return "tensor_active_pct"
    if "dram" in word and ("throughput" in word or "active" in word):
        return "dram_active_pct"
    if word.startswith("sm__") and ("cycles_active" in word or "throughput" in word):
        return "sm_active_pct"
    return "sm_active_pct" if word in ("sm_throughput_pct", "sm_active_pct") else ""


def top_stall(work: WorkSum | None) -> str:
    """What most stalled instructions wait for; empty without samples."""
    if work is None or not work.stalls:
        return ""
    return max(sorted(work.stalls), key=work.stalls.__getitem__)


def _ms(value_ns: int) -> float:
    return round(value_ns / 1e6, 6)
