"""Entities and edges of one process that the CUDA probe watches.

``Process ─Launch→ Kernel ─RunOn→ Stream ─RunOn→ GPU``, ``Process ─Transfer→ GPU`` and back, ``Process ─Access→ GPU``:
the kinds and ids that sessions use, so that a program that is watched both ways is one in the picture. Streams go by
their handle here, which recorders do not know: they number them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from msgspec import Struct, field

from gpuflight.collectors.base import Batch
from gpuflight.collectors.cuda_kernels import GRAPH, KernelLaunches, Kernels, Picture
from gpuflight.collectors.cuda_metrics import (
    PINNED,
    collective_texts,
    communicator_texts,
    error_texts,
    histogram,
    process_values,
    rate,
)
from gpuflight.collectors.cuda_places import Place
from gpuflight.collectors.cuda_rows import Counters, Rows
from gpuflight.collectors.cuda_statistics import StreamWork, Use, active_pct, cores_used
from gpuflight.collectors.rates import FIRST_READING
from gpuflight.graph import Edge, Entity, edges, nodes
from gpuflight.sources.cuda_probe.rows import LEGACY_STREAM, StreamRow, per_thread_stream

NOT_ALL_THE_TIME = "it launches more than the budget, so it is watched in some rounds only, and spans of work are cut"
NO_CORES = "how many cores the GPU has is not known"
_TRANSFERS = {"HtoD": True, "DtoH": False}  # whether it goes to the GPU


class Shown(Struct):
    """One process as it is shown. ``places``: by device number; ``cores``: of each GPU, by entity id."""

    pid: int
    start: int
    id: str
    rows: Rows
    places: dict[int, Place] = field(default_factory=dict)
    cores: dict[str, int | None] = field(default_factory=dict)
    layers: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    container: str = ""
    late: bool = False
    exit_code: int | None = None
    share: float = 1.0
    """Of the time in which its launches are watched."""
    watched: bool = True
    """Whether they were since the last reading."""
    allocations: list[str] = field(default_factory=list)
    """The largest groups of memory that it holds."""


class Bounds(Struct, frozen=True):
    """How many of each are shown of one process; the rest is told in sum."""

    kernels: int
    streams: int


class Left(Struct):
    """What was left out for these bounds."""

    kernels: int = 0
    streams: int = 0
    unnamed: int = 0
    """Launches whose kernel has no name."""


class Added(Struct):
    """One process in the picture: kernels apart, as they may stand for longer; ``uses`` for ``add_uses``."""

    process: Entity
    nodes: list[Entity] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    kernels: list[Entity] = field(default_factory=list)
    kernel_edges: list[Edge] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)


def add_process(shown: Shown, counters: Counters, known: Kernels, bounds: Bounds, left: Left) -> Added:
    """Everything of one process. What it uses of each GPU becomes edges once that of all processes is known."""
    kernels = known.of(shown.pid, shown.rows.launches, counters)
    added = Added(_process(shown, kernels, counters, bounds))
    added.nodes += {place.gpu.id: place.gpu for place in shown.places.values() if place.gpu is not None}.values()
    streams = _add_streams(added, shown, counters, bounds, left)
    _add_kernels(added, shown, kernels[: bounds.kernels], streams, counters, known)
    left.kernels += max(0, len(kernels) - bounds.kernels)
    left.unnamed += sum(kernel.launches for kernel in kernels if not kernel.named)
    _add_copies(added, shown, counters)
    if shown.container:
        container = nodes.Container(container_id=shown.container)
        added.nodes.append(container)
        added.edges.append(edges.Host(container.id, shown.id))
    added.uses = _uses(shown, counters)
    return added


def _process(shown: Shown, kernels: list[KernelLaunches], counters: Counters, bounds: Bounds) -> Entity:
    values = process_values(shown.pid, shown.rows, counters)
    named = [kernel for kernel in kernels if kernel.name != GRAPH]
    values.add("cuda_kernels_count", len(named))
    if len(kernels) > bounds.kernels:
        rest = kernels[bounds.kernels :]
        values.add("cuda_other_kernels_count", len(rest))
        values.add("cuda_other_launches_count", sum(kernel.launches for kernel in rest))
    attributes: dict[str, Any] = {"cuda_layers": list(shown.layers), "cuda_libraries": list(shown.libraries)}
    for name, texts in (
        ("cuda_errors", error_texts(shown.rows)),
        ("cuda_wait_ns_log2", histogram(call for call in shown.rows.calls if call.waits)),
        ("nccl_operations", collective_texts(shown.rows)),
        ("nccl_communicators", communicator_texts(shown.rows)),
        ("cuda_allocations", shown.allocations),
    ):
        if texts:
            attributes[name] = texts
    if shown.late:
        attributes["cuda_watched_late"] = True
    if shown.share < 1:
        attributes["cuda_estimated"] = True
        values.add("cuda_watched_pct", round(100 * shown.share, 2))
    if shown.exit_code is not None:
        attributes["cuda_exit_code"] = shown.exit_code
        values.add("cuda_leaked_bytes", sum(row.size_bytes for row in shown.rows.allocations))
        values.add("cuda_leaks_count", len(shown.rows.allocations))
    reasons = sorted({place.reason for place in shown.places.values() if place.gpu is None})
    if reasons:
        values.add("cuda_gpu", None, "; ".join(reasons))
    return nodes.Process(
        pid=shown.pid,
        start=shown.start,
        id=shown.id,
        attributes=attributes,
        metrics=values.metrics,
        unknown=values.unknown or None,
    )


# --- streams and kernels ----------------------------------------------------------------------------------------------


def _add_streams(added: Added, shown: Shown, counters: Counters, bounds: Bounds, left: Left) -> dict[int, nodes.Stream]:
    """The streams in use, by their handle. The default stream of several devices is one in the picture."""
    ordered = sorted((row for row in shown.rows.streams if not row.destroyed), key=lambda row: -row.busy_ns)
    found: dict[int, nodes.Stream] = {}
    launches: dict[int, int] = {}
    for launch in shown.rows.launches:
        launches[launch.stream] = launches.get(launch.stream, 0) + launch.launches
    for row in ordered:
        entity = found.get(row.stream)
        if entity is None:
            if len(found) >= bounds.streams:
                left.streams += 1
                continue
            entity = found[row.stream] = nodes.Stream(
                process=shown.id, stream=row.stream, attributes={"name": stream_name(row.stream)}
            )
            entity.metrics = {"launches_count": launches.get(row.stream, 0)}
            added.nodes.append(entity)
        _add_stream_facts(entity, row, shown, counters)
        place = shown.places.get(row.device)
        if place is not None and place.gpu is not None:
            added.edges.append(edges.RunOn(entity.id, place.gpu.id))
        elif place is not None:
            entity.unknown = {**(entity.unknown or {}), "gpu": place.reason}
    return found


def _add_stream_facts(entity: nodes.Stream, row: StreamRow, shown: Shown, counters: Counters) -> None:
    if row.blocking is not None:
        entity.attributes["blocking"] = row.blocking
    new = counters.increase(("stream", shown.pid, row.device, row.stream), row.busy_ns)
    if shown.share < 1:
        entity.unknown = {"work_pct": NOT_ALL_THE_TIME}
        return
    sums = entity.metrics
    sums["work_ms"] = round(sums.get("work_ms", 0) + row.busy_ns / 1e6, 6)
    if new is None or not counters.window_ns:
        entity.unknown = {**(entity.unknown or {}), "work_pct": FIRST_READING}
    else:
        sums["work_pct"] = round(min(100.0, sums.get("work_pct", 0) + active_pct(new, counters.window_ns)), 2)


def stream_name(stream: int) -> str:
    """What people call a stream."""
    if stream in (0, LEGACY_STREAM):
        return "default stream"
    thread = per_thread_stream(stream)
    return f"stream 0x{stream:x}" if thread is None else f"default stream of thread {thread}"


def _add_kernels(
    added: Added,
    shown: Shown,
    kernels: list[KernelLaunches],
    streams: dict[int, nodes.Stream],
    counters: Counters,
    known: Kernels,
) -> None:
    """Kernels that were not launched in this round, nor in the last one, are the very objects of the last one."""
    last, now = known.pictures.get(shown.pid, {}), dict[str, Picture]()
    for kernel in kernels:
        lanes = [stream for stream in kernel.lanes if stream in streams]
        state = (kernel.new, kernel.launches, kernel.captured, lanes)
        picture = last.get(kernel.name)
        if picture is None or picture.state != state or kernel.new != 0:
            picture = Picture(state, *_kernel(shown, kernel, [streams[stream].id for stream in lanes], lanes, counters))
        now[kernel.name] = picture
        added.kernels.append(picture.kernel)
        added.kernel_edges += picture.edges
    known.pictures[shown.pid] = now


@lru_cache(maxsize=4096)
def _shape(dimensions: tuple[int, int, int]) -> str:
    return "x".join(map(str, dimensions))


def _kernel(
    shown: Shown, kernel: KernelLaunches, ids: list[str], lanes: list[int], counters: Counters
) -> tuple[Entity, list[Edge]]:
    seconds = counters.seconds
    metrics: dict[str, int | float] = {"launches_count": kernel.launches}
    unknown = edge_metrics = None
    if kernel.new is None or not seconds:
        unknown = {"launches_per_s": FIRST_READING}
    else:
        metrics["launches_per_s"] = per_s = round(kernel.new / seconds, 3)
        edge_metrics = {"launches_per_s": per_s}
    attributes: dict[str, Any] = {}
    if kernel.name != GRAPH:
        attributes = {"grid": _shape(kernel.grid), "block": _shape(kernel.block)}
        metrics["threads_mean_count"] = round(kernel.threads / max(kernel.counted, 1), 1)
        metrics["threads_max_count"] = kernel.threads_max
        metrics["block_threads_max_count"] = kernel.block_threads_max
        metrics["shared_max_bytes"] = kernel.shared_bytes_max
    if kernel.captured:
        metrics["captured_count"] = kernel.captured
    # The id is written out: a machine has thousands of these each round.
    entity = nodes.Kernel(
        id=f"Kernel({shown.id},{kernel.name})",
        process=shown.id,
        name=kernel.name,
        attributes=attributes,
        metrics=metrics,
        unknown=unknown,
    )
    made: list[Edge] = [edges.Launch(shown.id, entity.id, {}, edge_metrics or {})]
    for stream, stream_id in zip(lanes, ids, strict=True):
        lane = kernel.lanes[stream]
        sums: dict[str, int | float] = {"launches_count": lane.launches}
        if lane.new is not None and seconds:
            sums["launches_per_s"] = round(lane.new / seconds, 3)
        made.append(edges.RunOn(entity.id, stream_id, {}, sums))
    return entity, made


# --- copies
# -------------------------------------------------------------------------------------------------------------


def _add_copies(added: Added, shown: Shown, counters: Counters) -> None:
    """Copies between the program and a GPU; those within a GPU, or between two, are told at the process."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for copy in shown.rows.copies:
        place = shown.places.get(copy.device)
        if place is None or place.gpu is None or copy.direction not in _TRANSFERS:
            continue
        ends = (shown.id, place.gpu.id) if _TRANSFERS[copy.direction] else (place.gpu.id, shown.id)
        count, size = sums.get(ends, (0, 0))
        sums[ends] = (count + copy.copies, size + copy.bytes)
    for ends, (count, size) in sums.items():
        metrics: dict[str, int | float] = {"copies_count": count, "copied_bytes": size}
        per_s, why = rate(counters, ("transfer", *ends), size, 1)
        if per_s is not None:
            metrics["copy_bytes_per_s"] = per_s
        added.edges.append(edges.Transfer(*ends, {}, metrics, {"copy_bytes_per_s": why} if why else None))


# --- what it uses of each GPU
# ------------------------------------------------------------------------------------------


def _uses(shown: Shown, counters: Counters) -> list[Use]:
    """One per GPU that the process is known to use."""
    found: dict[str, Use] = {}
    numbers: dict[str, list[int]] = {}
    for number in sorted(shown.rows.numbers()):
        place = shown.places.get(number)
        if place is not None and place.gpu is not None:
            numbers.setdefault(place.gpu.id, []).append(number)
    for gpu, members in numbers.items():
        use = found[gpu] = Use(process=shown.id, gpu=gpu, container=shown.container)
        memory = [row for row in shown.rows.memory if row.device in members and row.kind not in PINNED]
        use.held_bytes = sum(row.current_bytes for row in memory)
        use.peak_bytes = sum(row.peak_bytes for row in memory)
        _add_work(use, shown, set(members), counters)
    return list(found.values())


def _add_work(use: Use, shown: Shown, numbers: set[int], counters: Counters) -> None:
    window_ns = counters.window_ns
    new = [
        counters.increase(("device", shown.pid, row.device), row.busy_ns)
        for row in shown.rows.devices
        if row.device in numbers
    ]
    spans = {
        (row.device, row.stream): counters.increase(("span", shown.pid, row.device, row.stream), row.busy_ns)
        for row in shown.rows.streams
        if row.device in numbers
    }
    threads: dict[tuple[int, int], tuple[int, int]] = {}
    for launch in shown.rows.launches:
        place = (launch.device, launch.stream)
        count, total = threads.get(place, (0, 0))
        threads[place] = (count + launch.launches, total + launch.threads)
    if window_ns is None or shown.share < 1:
        return
    use.active_pct = active_pct(min(sum(one or 0 for one in new), window_ns), window_ns)
    cores = shown.cores.get(use.gpu)
    if cores is not None:
        work = [
            StreamWork(min(span or 0, window_ns), threads[place][1] / threads[place][0])
            for place, span in spans.items()
            if place in threads and threads[place][0]
        ]
        use.cores = cores_used(work, cores, window_ns)


def add_uses(
    batch: Batch, uses: list[Use], memory_bytes: dict[str, int | None], measured: set[tuple[str, str]]
) -> None:
    """Edges Process → GPU, after all uses of a GPU were made to fit. ``measured``: (process, GPU) whose use of the
    multiprocessors NVML tells: that stands."""
    for use in uses:
        metrics: dict[str, int | float] = {}
        unknown: dict[str, str] = {}
        attributes: dict[str, Any] = {"container": use.container} if use.container else {}
        if use.held_bytes is not None:
            metrics["held_bytes"] = round(use.held_bytes)
        if use.peak_bytes is not None:
            metrics["alloc_peak_bytes"] = round(use.peak_bytes)
        total = memory_bytes.get(use.gpu)
        if total and use.held_bytes is not None and use.peak_bytes is not None:
            metrics["held_pct"] = round(100 * use.held_bytes / total, 3)
            metrics["alloc_peak_pct"] = round(100 * use.peak_bytes / total, 3)
        if use.active_pct is None:
            unknown["used_cores"] = FIRST_READING
        else:
            if use.cores is None:
                unknown["used_cores"] = NO_CORES
            else:
                metrics["used_cores"] = round(use.cores, 2)
            if (use.process, use.gpu) not in measured:
                metrics["sm_util_pct"] = round(use.active_pct, 2)
                attributes["estimated"] = ["sm_util_pct"]
        for name, factor in (("cores_scaled_by", use.cores_scaled_by), ("memory_scaled_by", use.memory_scaled_by)):
            if factor < 1:
                attributes[name] = round(factor, 4)
        batch.edges.append(edges.Access(use.process, use.gpu, attributes, metrics, unknown or None))


def container_sums(uses: list[Use]) -> list[Entity]:
    """What all processes of each container use of the GPUs."""
    found: dict[str, dict[str, float]] = {}
    for use in uses:
        if not use.container:
            continue
        sums = found.setdefault(use.container, {})
        for name, value in (("gpu_used_cores", use.cores), ("gpu_held_bytes", use.held_bytes)):
            if value is not None:
                sums[name] = sums.get(name, 0) + value
    return [
        nodes.Container(
            container_id=container,
            metrics={name: round(value) if name.endswith("bytes") else round(value, 2) for name, value in sums.items()},
        )
        for container, sums in found.items()
    ]
