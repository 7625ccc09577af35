"""Metrics of one session: its sums, and their rates over the round."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuflight.collectors.session_communication import add_communication
from gpuflight.collectors.session_rates import Pace
from gpuflight.collectors.session_work import add_work
from gpuflight.events.activity.summary import Summary

_COPY_NAMES = {"HtoD": "htod", "DtoH": "dtoh", "DtoD": "dtod", "PtoP": "ptop"}
_OTHER = "other"
_NONE_YET = "the log has no {} so far; not every kind of capture records them"


@dataclass
class Values:
    """Metrics, and what is unknown with the reason."""

    metrics: dict[str, int | float] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: int | float | None, why: str = "") -> None:
        if value is None:
            self.unknown[name] = why
        else:
            self.metrics[name] = value


def session_metrics(now: Summary, pace: Pace) -> Values:
    """Everything of a session in numbers; what its log does not record is unknown."""
    values = Values()
    values.add("events_count", now.events)
    values.add("losses_count", now.losses)
    values.add("lag_bytes", now.lag_bytes)
    if now.start_ns is not None and (until := now.end_ns or now.last_event_ns) is not None:
        values.add("duration_s", round(max(until - now.start_ns, 0) / 1e9, 3))
    _kernels(values, now, pace)
    _copies(values, now, pace)
    _waits(values, now, pace)
    _memory(values, now)
    for name, value in (("memsets_count", now.memsets), ("graph_launches_count", now.graph_launches)):
        if value is not None:
            values.add(name, value)
    if now.scopes is not None:
        values.add("scopes_count", now.scopes_count)
    add_communication(values, now)
    add_work(values, now)
    return values


def _kernels(values: Values, now: Summary, pace: Pace) -> None:
    before = pace.before
    if now.launches is None:
        why = _NONE_YET.format("kernels")
        for name in ("launches_count", "launches_per_s", "gpu_time_ms", "busy_pct"):
            values.add(name, None, why)
        return
    values.add("launches_count", now.launches)
    values.add("kernels_count", now.kernels_count)
    values.add("gpu_time_ms", round(now.kernel_ns / 1e6, 6))
    if now.unnamed_count:
        values.add("kernels_unnamed_count", now.unnamed_count)
    rate, why = pace.device(now.launches, before.launches if before else None)
    values.add("launches_per_s", None if rate is None else round(rate, 3), why)
    if now.synthetic:
        values.add("busy_pct", None, "kernel times are those of launches, not of the GPU")
    elif now.busy_ns is None:
        values.add("busy_pct", None, "the times of its kernels are not on the timeline")
    else:
        busy, why = pace.device(now.busy_ns, before.busy_ns if before else None)
        values.add("busy_pct", None if busy is None else round(min(busy / 1e7, 100.0), 2), why)
    others = now.kernels_count - len(now.kernels)
    if others > 0 and now.launches is not None:
        values.add("other_kernels_count", others)
        values.add("other_launches_count", max(now.launches - sum(kernel.count for kernel in now.kernels), 0))
        other_ns = now.kernel_ns - sum(kernel.total_ns for kernel in now.kernels)
        values.add("other_gpu_time_ms", round(max(other_ns, 0) / 1e6, 6))


def _by_direction(summary: Summary | None) -> dict[str, tuple[int, int]] | None:
    if summary is None or summary.copies is None:
        return None
    found: dict[str, tuple[int, int]] = {}
    for copy in summary.copies:
        name = _COPY_NAMES.get(copy.kind, _OTHER)
        count, size = found.get(name, (0, 0))
        found[name] = (count + copy.count, size + copy.bytes)
    return found


def _copies(values: Values, now: Summary, pace: Pace) -> None:
    directions = _by_direction(now)
    if directions is None:
        values.add("copies_count", None, _NONE_YET.format("copies"))
        return
    before = _by_direction(pace.before) or {}
    values.add("copies_count", sum(count for count, _ in directions.values()))
    for name, (_, size) in sorted(directions.items()):
        values.add(f"copied_{name}_bytes", size)
        rate, why = pace.device(size, before[name][1] if name in before else None)
        values.add(f"copy_{name}_bytes_per_s", None if rate is None else round(rate, 1), why)


def _waits(values: Values, now: Summary, pace: Pace) -> None:
    if now.waits is None:
        values.add("sync_wait_pct", None, _NONE_YET.format("waits"))
        return
    total_ns = sum(wait.total_ns for wait in now.waits)
    before = pace.before
    before_ns = sum(w.total_ns for w in before.waits) if before is not None and before.waits is not None else None
    values.add("syncs_count", sum(wait.count for wait in now.waits))
    values.add("sync_wait_ms", round(total_ns / 1e6, 6))
    rate, why = pace.host(total_ns, before_ns)
    values.add("sync_wait_pct", None if rate is None else round(rate / 1e7, 2), why)


def _memory(values: Values, now: Summary) -> None:
    if now.memory is None:
        values.add("held_bytes", None, _NONE_YET.format("allocations"))
        values.add("alloc_peak_bytes", None, _NONE_YET.format("allocations"))
        return
    gpus = [place for place in now.memory if not place.pinned]
    pinned = [place for place in now.memory if place.pinned]
    values.add("allocations_count", sum(place.allocations for place in gpus))
    values.add("frees_unmatched_count", sum(place.unmatched_frees for place in gpus))
    values.add("held_bytes", sum(place.held_bytes for place in gpus))
    if len(gpus) <= 1:
        values.add("alloc_peak_bytes", sum(place.peak_bytes for place in gpus))
    else:
        values.add("alloc_peak_bytes", None, "several GPUs: see the edges to each")
    for place in pinned:
        values.add("pinned_held_bytes", place.held_bytes)
        values.add("pinned_peak_bytes", place.peak_bytes)
