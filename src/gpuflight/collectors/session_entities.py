"""Entities and edges of GPU sessions: what their sums look like in the graph.

``Process ─Own→ Session ─Own→ Scope``, ``Process ─Launch→ Kernel ─RunOn→ Stream ─RunOn→ GPU``,
``Stream ─Belong→ Session``. Where no process is known the session launches its kernels itself. Kernels and streams are
one per process, whichever of its sessions tells of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from gpuflight.collectors.base import Batch
from gpuflight.collectors.rates import FIRST_READING
from gpuflight.collectors.session_communication import communication_attributes
from gpuflight.collectors.session_kernels import add_launch_shape, most_launched
from gpuflight.collectors.session_metrics import Values, session_metrics
from gpuflight.collectors.session_names import shown_name
from gpuflight.collectors.session_rates import Pace
from gpuflight.collectors.session_work import top_stall
from gpuflight.events.activity.summary import KernelSum, ScopeSum, Summary
from gpuflight.graph import Entity, edges, nodes

NO_GPU = "the log does not say on which of its GPUs it is"
_SEVERAL = "it was launched in several sessions of the process"


@dataclass
class Shown:
    """One session of one round, joined to the topology. ``owner``: id of its process, live or not, else its own.

    ``process``: the id of the live one. ``gpus``: by the session's device numbers. ``unplaced``: the GPU of what names
    none. ``detailed``: with its kernels, streams and scopes.
    """

    summary: Summary
    pace: Pace
    owner: str
    process: str | None
    why_no_process: str
    state: str
    gpus: dict[int, Entity] = field(default_factory=dict)
    unplaced: Entity | None = None
    detailed: bool = True
    foreign: bool = False
    """Of another host, as far as can be told."""

    @property
    def name(self) -> str:
        """The session's id as it may be shown."""
        return shown_name(self.summary.session_id)

    @property
    def id(self) -> str:
        return f"Session({self.name})"

    @property
    def holder(self) -> str:
        """Who launches and copies: the live process, else the session."""
        return self.process or self.id

    def gpu(self, device_id: int | None) -> Entity | None:
        """The GPU of a device number, or of what has none."""
        return self.unplaced if device_id is None else self.gpus.get(device_id)


def add_sessions(batch: Batch, shown: list[Shown], host: nodes.Host) -> None:
    """Add the sessions of one owner."""
    for one in shown:
        _add_session(batch, one, host)
    detailed = [one for one in shown if one.detailed]
    _add_kernels(batch, detailed)
    _add_streams(batch, detailed)
    _add_copies(batch, detailed)
    _add_memory(batch, detailed)
    for one in detailed:
        _add_scopes(batch, one)


def time_text(time_ns: int) -> str:
    """UTC, to the ms; the number where that is no time."""
    try:
        moment = datetime.fromtimestamp(time_ns / 1e9, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{time_ns} ns"
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _add_session(batch: Batch, one: Shown, host: nodes.Host) -> None:
    summary = one.summary
    values = session_metrics(summary, one.pace)
    attributes: dict[str, Any] = {"name": shown_name(summary.app or summary.session_id), "state": one.state}
    for name, value in (
        ("app", shown_name(summary.app)),
        ("hostname", shown_name(summary.hostname)),
        ("pid", summary.pid),
        ("session_kind", shown_name(summary.kind)),
        ("engine", shown_name(summary.engine)),
        ("run_id", shown_name(summary.run_id)),
        ("segment", summary.segment_index),
        ("folder", shown_name(summary.folder)),
        ("gpus", [shown_name(device.uuid) for device in summary.devices if device.uuid]),
        ("step_scope", shown_name(summary.work.steps.name) if summary.work and summary.work.steps else ""),
        ("top_kernel", shown_name(summary.kernels[0].name or "") if summary.kernels else ""),
        ("stall_top", top_stall(summary.work)),
    ):
        if value not in ("", None, []):
            attributes[name] = value
    for name, time_ns in (
        ("started", summary.start_ns),
        ("ended", summary.end_ns),
        ("last_event", summary.last_event_ns),
    ):
        if time_ns:
            attributes[name] = time_text(time_ns)
    if summary.synthetic is not None:
        attributes["kernel_times"] = "synthetic: of launches, not of the GPU" if summary.synthetic else "of the GPU"
    attributes.update(communication_attributes(summary, values))
    attributes.update(summary.job)
    if summary.partial:
        attributes["partial"] = True
    if one.process is None:
        values.unknown["process"] = one.why_no_process
    entity = nodes.Session(
        session_id=one.name, attributes=attributes, metrics=values.metrics, unknown=values.unknown or None
    )
    batch.nodes.append(entity)
    if one.process is not None:
        batch.edges.append(edges.Own(one.process, entity.id))
    elif not one.foreign:
        batch.nodes.append(host)
        batch.edges.append(edges.Host(host.id, entity.id))
    if summary.app:
        application = nodes.Application(name=shown_name(summary.app))
        batch.nodes.append(application)
        batch.edges.append(edges.HasAttribute(entity.id, application.id))


def _add_kernels(batch: Batch, shown: list[Shown]) -> None:
    """One entity per kernel of the owner; what several sessions tell of it is added up."""
    told: dict[str, list[tuple[Shown, KernelSum]]] = {}
    for one in shown:
        for kernel in one.summary.kernels:
            if kernel.count <= 0:
                continue
            name = shown_name(kernel.name) if kernel.name else f"kernel {kernel.kernel_id} (its name was lost)"
            told.setdefault(name, []).append((one, kernel))
    for name, parts in told.items():
        entity = nodes.Kernel(process=parts[0][0].owner, name=name)
        values = _kernel_metrics(parts)
        shape = most_launched(kernel for _, kernel in parts)
        add_launch_shape(values, [(one.summary, kernel) for one, kernel in parts], shape)
        attributes: dict[str, Any] = {}
        synthetic = {one.summary.synthetic for one, _ in parts} - {None}
        if synthetic:
            attributes["synthetic"] = True in synthetic
        if shape is not None and shape.limiter:
            attributes["occupancy_limiter"] = shape.limiter
        entity.attributes, entity.metrics, entity.unknown = attributes, values.metrics, values.unknown or None
        batch.nodes.append(entity)
        rate = values.metrics.get("launches_per_s")
        for holder in {one.holder: None for one, _ in parts}:
            batch.edges.append(edges.Launch(holder, entity.id, {}, {} if rate is None else {"launches_per_s": rate}))
        lanes: dict[int, tuple[int, int]] = {}
        for one, kernel in parts:
            told_streams = {stream.stream_id for stream in one.summary.streams}
            for stream, count, total_ns in kernel.lanes:
                if stream in told_streams:
                    before = lanes.get(stream, (0, 0))
                    lanes[stream] = (before[0] + count, before[1] + total_ns)
        for stream, (count, total_ns) in lanes.items():
            sums = {"launches_count": count, "gpu_time_ms": round(total_ns / 1e6, 6)}
            batch.edges.append(edges.RunOn(entity.id, f"Stream({parts[0][0].owner},{stream})", {}, sums))


def _kernel_metrics(parts: list[tuple[Shown, KernelSum]]) -> Values:
    values = Values()
    count = sum(kernel.count for _, kernel in parts)
    total_ns = sum(kernel.total_ns for _, kernel in parts)
    values.add("launches_count", count)
    values.add("gpu_time_ms", round(total_ns / 1e6, 6))
    values.add("mean_us", round(total_ns / count / 1e3, 3))
    values.add("min_us", min(kernel.min_ns for _, kernel in parts) / 1e3)
    values.add("max_us", max(kernel.max_ns for _, kernel in parts) / 1e3)
    only = parts[0][1] if len(parts) == 1 else None
    values.add("p50_us", None if only is None else only.p50_ns / 1e3, _SEVERAL)
    values.add("p99_us", None if only is None else only.p99_ns / 1e3, _SEVERAL)
    details = sum(kernel.details for _, kernel in parts)
    weighted = [(kernel.occupancy, kernel.details) for _, kernel in parts if kernel.occupancy is not None]
    values.add(
        "occupancy_pct",
        round(100 * sum(o * n for o, n in weighted) / sum(n for _, n in weighted), 2) if weighted else None,
        "the log has no launch details of it",
    )
    if weighted:
        values.add("occupancy_samples_count", details)
    launches_per_s, share, why = 0.0, 0.0, ""
    for one, kernel in parts:
        before, known = _before(one, kernel)
        rate, why_not = one.pace.device(kernel.count, before.count if before else None)
        busy, _ = one.pace.device(kernel.total_ns, before.total_ns if before else None)
        if not known or rate is None or busy is None:
            why = why or (why_not if rate is None else FIRST_READING)
            continue
        launches_per_s += rate
        share += busy / 1e7
    values.add("launches_per_s", None if why else round(launches_per_s, 3), why)
    values.add("gpu_time_pct", None if why else round(share, 3), why)
    return values


def _before(one: Shown, kernel: KernelSum) -> tuple[KernelSum | None, bool]:
    """The kernel in the round before; whether it is known that there was none."""
    before = one.pace.before
    if before is None:
        return None, False
    for known in before.kernels:
        if known.kernel_id == kernel.kernel_id:
            return known, True
    return None, before.kernels_count <= len(before.kernels)


def _add_streams(batch: Batch, shown: list[Shown]) -> None:
    """One entity per stream of the owner."""
    known: dict[int, nodes.Stream] = {}
    for one in shown:
        for stream in one.summary.streams:
            entity = known.get(stream.stream_id)
            if entity is None:
                entity = known[stream.stream_id] = nodes.Stream(
                    process=one.owner, stream=stream.stream_id, attributes={"name": f"stream {stream.stream_id}"}
                )
                entity.metrics = {}
                batch.nodes.append(entity)
            sums = entity.metrics
            if one.summary.launches is not None:
                sums["launches_count"] = sums.get("launches_count", 0) + stream.launches
                sums["gpu_time_ms"] = round(sums.get("gpu_time_ms", 0) + stream.kernel_ns / 1e6, 6)
            if one.summary.copies is not None:
                sums["copies_count"] = sums.get("copies_count", 0) + stream.copies
                sums["copied_bytes"] = sums.get("copied_bytes", 0) + stream.copied_bytes
            batch.edges.append(edges.Belong(entity.id, one.id))
            gpu = one.gpu(stream.device_id)
            if gpu is None:
                entity.unknown = {"gpu": NO_GPU}
            else:
                batch.nodes.append(gpu)
                batch.edges.append(edges.RunOn(entity.id, gpu.id))


def _add_scopes(batch: Batch, one: Shown) -> None:
    ids: dict[str, str] = {}
    for scope in one.summary.scopes or ():
        path = "|".join(shown_name(part) for part in scope.path.split("|"))
        entity = nodes.Scope(
            session_id=one.name,
            path=path,
            attributes={"name": shown_name(scope.name), "depth": scope.depth},
        )
        entity.metrics = _scope_metrics(scope)
        ids[scope.path] = entity.id
        batch.nodes.append(entity)
        outer = ids.get(scope.path.rpartition("|")[0], one.id)
        batch.edges.append(edges.Own(outer, entity.id))


def _scope_metrics(scope: ScopeSum) -> dict[str, int | float]:
    found: dict[str, int | float] = {"runs_count": scope.count, "open_count": scope.open}
    if scope.count:
        found["time_ms"] = round(scope.total_ns / 1e6, 6)
        found["mean_ms"] = round(scope.total_ns / scope.count / 1e6, 6)
        found["max_ms"] = round(scope.max_ns / 1e6, 6)
    return found


def _add_copies(batch: Batch, shown: list[Shown]) -> None:
    """Copies between a program and a GPU; what goes on within a GPU, or between two, is told by the session."""
    found: dict[tuple[str, str], edges.Transfer] = {}
    times: dict[tuple[str, str], int] = {}
    for one in shown:
        last = one.pace.before.copies if one.pace.before is not None else None
        before = {(copy.kind, copy.device_id): copy for copy in last or ()}
        for copy in one.summary.copies or ():
            gpu = one.gpu(copy.device_id)
            if gpu is None or copy.kind not in ("HtoD", "DtoH"):
                continue
            ends = (one.holder, gpu.id) if copy.kind == "HtoD" else (gpu.id, one.holder)
            edge = found.get(ends)
            if edge is None:
                edge = found[ends] = edges.Transfer(*ends, {}, {"copies_count": 0, "copied_bytes": 0}, {})
                edge.metrics["copy_bytes_per_s"] = 0.0
                batch.nodes.append(gpu)
            sums, unknown = edge.metrics, edge.unknown
            sums["copies_count"] += copy.count
            sums["copied_bytes"] += copy.bytes
            times[ends] = times.get(ends, 0) + copy.total_ns
            earlier = before.get((copy.kind, copy.device_id))
            rate, why = one.pace.device(copy.bytes, earlier.bytes if earlier else None)
            if rate is None:
                unknown["copy_bytes_per_s"] = why  # type: ignore[index]
            else:
                sums["copy_bytes_per_s"] = round(sums["copy_bytes_per_s"] + rate, 1)
    for ends, edge in found.items():
        if edge.unknown:
            del edge.metrics["copy_bytes_per_s"]
        else:
            edge.unknown = None
        if times[ends]:
            edge.metrics["copy_time_ms"] = round(times[ends] / 1e6, 6)
        batch.edges.append(edge)


def _add_memory(batch: Batch, shown: list[Shown]) -> None:
    """Memory taken on each GPU, at the edge that says that the program uses it."""
    found: dict[tuple[str, str], edges.Access] = {}
    for one in shown:
        for place in one.summary.memory or ():
            gpu = None if place.pinned else one.gpu(place.device_id)
            if gpu is None:
                continue
            ends = (one.holder, gpu.id)
            edge = found.get(ends)
            if edge is None:
                edge = found[ends] = edges.Access(*ends, {}, {"held_bytes": 0, "alloc_peak_bytes": 0})
                batch.nodes.append(gpu)
                batch.edges.append(edge)
            edge.metrics["held_bytes"] += place.held_bytes
            edge.metrics["alloc_peak_bytes"] = max(edge.metrics["alloc_peak_bytes"], place.peak_bytes)
