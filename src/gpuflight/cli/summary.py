"""What a capture found, on one screen: host, GPUs with their processes and NUMA nodes, who is busy, who talks to whom,
and what could not be seen. ``build`` makes the data, ``render`` shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from gpuflight.cli.coverage import CoverageSummary
from gpuflight.cli.output import clean, make_table, shorten
from gpuflight.graph import Entity, Graph
from gpuflight.graph.lift import LiftedEdge, lift
from gpuflight.graph.nodes import GPU, NPU, Host, MigInstance, Numa, Process
from gpuflight.graph.queries import is_ended
from gpuflight.graph.units import human, quantity, short_number

if TYPE_CHECKING:
    from rich.console import Console

ROWS = 8
"""Rows of a table before it says how many more there are."""

_NAME_COLUMNS = 28

_SHORT = {
    "ConnectTo": "conn",
    "SharedMemory": "shm",
    "Pipe": "pipe",
    "MessageQueue": "queue",
    "Semaphore": "sem",
    "SendTo": "sent",
    "Transfer": "copy",
}
"""What carries data, in the few columns there are."""


class Device(Struct, kw_only=True):
    """A GPU (or NPU) with who uses it and the NUMA nodes that are local to it; what is None is not known."""

    id: str
    name: str
    index: int | None = None
    state: str = ""
    util_pct: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    numa: list[int] = field(default_factory=list)
    processes: list[DeviceProcess] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)


class DeviceProcess(Struct, kw_only=True):
    """A process on a device: the memory it uses there, and the NUMA nodes that its own memory is on, most first."""

    id: str
    name: str
    pid: int
    memory_used_bytes: float | None = None
    numa: list[int] = field(default_factory=list)


class Busy(Struct, kw_only=True):
    """A process and what it needed of the CPUs (% of one core, over the last round)."""

    id: str
    name: str
    pid: int
    cpu_pct: float
    rss_bytes: float | None = None
    threads_count: float | None = None


class Talk(Struct, kw_only=True):
    """Two processes that exchange data: by what, and how much as far as it is known."""

    source: str
    target: str
    source_name: str
    target_name: str
    directed: bool
    kinds: list[str]
    objects_count: int
    metrics: dict[str, float] = field(default_factory=dict)


class Unseen(Struct, kw_only=True):
    """Something that could not be seen, why, and what to do about it."""

    collector: str
    status: str
    reason: str
    hint: str = ""
    count: int = 1


class Summary(Struct, kw_only=True):
    """Everything that the screen shows, in full."""

    host: dict[str, Any]
    counts: dict[str, int]
    devices: list[Device]
    no_devices_because: str = ""
    busy: list[Busy] = field(default_factory=list)
    talks: list[Talk] = field(default_factory=list)
    unseen: list[Unseen] = field(default_factory=list)
    losses: dict[str, dict[str, int]] = field(default_factory=dict)
    truncated_by: str = ""


def build(graph: Graph, coverage: Sequence[CoverageSummary], env: Any, truncated_by: str = "") -> Summary:
    """The summary of one graph and of how it came about."""
    devices = _devices(graph)
    gpu_line = next((line for line in coverage if line.collector == "nvml"), None)
    return Summary(
        host=_host(graph, env),
        counts=_counts(graph),
        devices=devices,
        no_devices_because=(gpu_line.reason if gpu_line is not None else "") if not devices else "",
        busy=_busy(graph),
        talks=_talks(graph),
        unseen=_unseen(coverage),
        losses={line.collector: line.losses for line in coverage if line.losses},
        truncated_by=truncated_by,
    )


def _host(graph: Graph, env: Any) -> dict[str, Any]:
    host = next((entity for entity in graph.of_kind(Host) if entity.ns == ""), None)
    result: dict[str, Any] = {"hostname": env.hostname, "kernel": env.kernel, "version": env.version}
    if host is not None:
        result |= {"hostname": host.hostname, **host.attributes, **host.metrics}
    return {name: value for name, value in result.items() if value not in ("", None)}


def _counts(graph: Graph) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entity in graph:
        counts[entity.kind] = counts.get(entity.kind, 0) + (not is_ended(entity))
    return dict(
        sorted(((kind, count) for kind, count in counts.items() if count), key=lambda item: (-item[1], item[0]))
    )


def _devices(graph: Graph) -> list[Device]:
    """All GPUs and NPUs by index; a process on a MIG instance is listed with the GPU that the instance is part of."""
    devices: dict[str, Device] = {}
    for entity in (*graph.of_kind(GPU), *graph.of_kind(NPU)):
        if not is_ended(entity):
            devices[entity.id] = _device(entity)
    part_of: dict[str, str] = {}
    for edge in graph.edges.values():
        if edge.kind in ("Belong", "Host"):
            for part, whole in ((edge.source, edge.target), (edge.target, edge.source)):
                if whole in devices and type(graph.nodes.get(part)) is MigInstance:
                    part_of[part] = whole
    numa_of = _numa_of_processes(graph)
    for edge in graph.edges.values():
        device = devices.get(part_of.get(edge.target, edge.target))
        source = graph.nodes.get(edge.source)
        if device is not None and edge.kind == "Access" and type(source) is Process and not is_ended(source):
            device.processes.append(
                DeviceProcess(
                    id=source.id,
                    name=source.label,
                    pid=source.pid,
                    memory_used_bytes=edge.metrics.get("memory_used_bytes"),
                    numa=numa_of.get(source.id, []),
                )
            )
        owner = devices.get(edge.source)
        if owner is not None and edge.kind == "Affinity":
            target = graph.nodes.get(edge.target)
            if type(target) is Numa and target.index not in owner.numa:
                owner.numa.append(target.index)
    for device in devices.values():
        device.processes.sort(key=lambda process: (-(process.memory_used_bytes or 0), process.pid))
    return sorted(devices.values(), key=lambda device: (device.index is None, device.index or 0, device.id))


def _device(entity: Entity) -> Device:
    attributes, metrics = entity.attributes, entity.metrics
    numa = attributes.get("numa_node")
    index = attributes.get("index", getattr(entity, "index", None))
    return Device(
        id=entity.id,
        name=str(attributes.get("name", entity.id)),
        index=index if isinstance(index, int) else None,
        state=str(attributes.get("state", "")),
        util_pct=metrics.get("sm_util_pct", metrics.get("util_pct")),
        memory_used_bytes=metrics.get("memory_used_bytes"),
        memory_total_bytes=metrics.get("memory_total_bytes"),
        power_watts=metrics.get("power_watts"),
        temperature_celsius=metrics.get("temperature_celsius"),
        numa=[numa] if isinstance(numa, int) and numa >= 0 else [],
        unknown=dict(entity.unknown or {}),
    )


def _numa_of_processes(graph: Graph) -> dict[str, list[int]]:
    found: dict[str, list[tuple[float, int]]] = {}
    for edge in graph.edges.values():
        target = graph.nodes.get(edge.target)
        if edge.kind == "NumaAccess" and type(target) is Numa:
            resident = edge.metrics.get("resident_bytes", 0)
            if resident > 0:
                found.setdefault(edge.source, []).append((-resident, target.index))
    return {source: [index for _, index in sorted(pairs)] for source, pairs in found.items()}


def _busy(graph: Graph) -> list[Busy]:
    found = [
        Busy(
            id=entity.id,
            name=entity.label,
            pid=entity.pid,
            cpu_pct=entity.metrics["cpu_pct"],
            rss_bytes=entity.metrics.get("rss_bytes"),
            threads_count=entity.metrics.get("threads_count"),
        )
        for entity in graph.of_kind(Process)
        if entity.metrics.get("cpu_pct", 0) > 0 and not is_ended(entity)
    ]
    return sorted(found, key=lambda process: (-process.cpu_pct, process.pid))


def _talks(graph: Graph) -> list[Talk]:
    """Who exchanges data with whom: those with the highest known rate first, then most bytes, then most objects."""
    talks = [
        Talk(
            source=edge.source,
            target=edge.target,
            source_name=_name(graph, edge.source),
            target_name=_name(graph, edge.target),
            directed=edge.directed,
            kinds=edge.kinds,
            objects_count=len(edge.via),
            metrics=dict(edge.metrics),
        )
        for edge in lift(graph)
        if _between_processes(graph, edge)
    ]
    return sorted(talks, key=lambda talk: (*_volume(talk), talk.source, talk.target))


def _between_processes(graph: Graph, edge: LiftedEdge) -> bool:
    """Not a copy to a GPU, a file system or a process's access to its disk."""
    return all(type(graph.nodes.get(end)) is Process for end in (edge.source, edge.target))


def _volume(talk: Talk) -> tuple[float, float, int]:
    rate = sum(value for name, value in talk.metrics.items() if name.endswith("_bytes_per_s"))
    total = sum(value for name, value in talk.metrics.items() if name.startswith("bytes_"))
    return (-rate, -total, -talk.objects_count)


def _name(graph: Graph, node_id: str) -> str:
    entity = graph.nodes.get(node_id)
    if type(entity) is Process:
        return f"{entity.label} ({entity.pid})"
    return entity.label if entity is not None else node_id


def _unseen(coverage: Sequence[CoverageSummary]) -> list[Unseen]:
    found = []
    for line in coverage:
        for status in ("failed", "stale", "skipped"):
            if line.rounds.get(status):
                found.append(
                    Unseen(
                        collector=line.collector,
                        status=status,
                        reason=line.reason,
                        hint=line.hint,
                        count=line.rounds[status],
                    )
                )
                break
        found += [
            Unseen(collector=line.collector, status="partial", reason=note.reason, hint=note.hint, count=note.count)
            for note in line.notes
        ]
    return found


def render(summary: Summary, console: Console) -> None:
    """Print the summary; readable in 80 columns."""
    _render_host(summary, console)
    _render_devices(summary, console)
    _render_busy(summary, console)
    _render_talks(summary, console)
    _render_unseen(summary, console)


def _render_host(summary: Summary, console: Console) -> None:
    host = summary.host
    facts = [clean(host.get("hostname", "this host"))]
    if "kernel" in host:
        facts.append(f"kernel {clean(host['kernel'])}")
    if "cpus_count" in host:
        busy = f", {short_number(host['cpu_busy_pct'])} % busy" if "cpu_busy_pct" in host else ""
        facts.append(f"{host['cpus_count']} CPUs{busy}")
    if "memory_total_bytes" in host:
        available = host.get("memory_available_bytes")
        free = f", {human('memory_available_bytes', available)} available" if available is not None else ""
        facts.append(f"memory {human('memory_total_bytes', host['memory_total_bytes'])}{free}")
    console.print(" · ".join(facts), style="bold")
    console.print(", ".join(f"{count} {kind}" for kind, count in summary.counts.items()) or "nothing seen")
    if summary.truncated_by:
        console.print(f"The picture is cut short: {summary.truncated_by}. Raise that limit, or look at less.")


def _title(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold")


def _render_devices(summary: Summary, console: Console) -> None:
    _title(console, "GPUs")
    if not summary.devices:
        because = f": {clean(summary.no_devices_because)}" if summary.no_devices_because else ""
        console.print(f"none seen{because}")
        return
    rows: list[list[Any]] = []
    for device in summary.devices:
        memory = (
            f"{human('x_bytes', device.memory_used_bytes)} of {human('x_bytes', device.memory_total_bytes)}"
            if device.memory_used_bytes is not None and device.memory_total_bytes is not None
            else None
        )
        lost = device.state if device.state not in ("", "ok") else None
        rows.append(
            [
                device.index,
                shorten(device.name, _NAME_COLUMNS),
                lost or _shown(device.util_pct, " %"),
                memory,
                _shown(device.power_watts, " W"),
                _shown(device.temperature_celsius, " °C"),
                ", ".join(map(str, device.numa)) or None,
            ]
        )
        for process in device.processes[:ROWS]:
            memory = human("x_bytes", process.memory_used_bytes) if process.memory_used_bytes is not None else None
            numa = ", ".join(map(str, process.numa)) or None
            rows.append(
                [None, "  " + shorten(f"{process.name} ({process.pid})", _NAME_COLUMNS - 2), "", memory, "", "", numa]
            )
            rows[-1][0] = ""
        if len(device.processes) > ROWS:
            rows.append(["", f"  … {len(device.processes) - ROWS} more", "", "", "", "", ""])
    console.print(
        make_table(
            [
                ("#", {"justify": "right"}),
                "GPU / process",
                ("busy", {"justify": "right"}),
                ("memory", {"justify": "right"}),
                ("power", {"justify": "right"}),
                ("temp", {"justify": "right"}),
                "NUMA",
            ],
            rows,
        )
    )


def _shown(value: float | None, unit: str) -> str | None:
    return None if value is None else short_number(value) + unit


def _render_busy(summary: Summary, console: Console) -> None:
    if not summary.busy:
        return
    _title(console, "Busiest processes")
    rows = [
        [
            process.pid,
            shorten(process.name, 40),
            f"{short_number(process.cpu_pct)} %",
            human("x_bytes", process.rss_bytes) if process.rss_bytes is not None else None,
            None if process.threads_count is None else int(process.threads_count),
        ]
        for process in summary.busy[:ROWS]
    ]
    right = {"justify": "right"}
    console.print(make_table([("pid", right), "process", ("CPU", right), ("memory", right), ("threads", right)], rows))
    _more(console, len(summary.busy) - ROWS, "that used the CPU")


def _render_talks(summary: Summary, console: Console) -> None:
    if not summary.talks:
        return
    _title(console, "Who talks to whom")
    rows = [
        [
            shorten(talk.source_name, 24),
            "→" if talk.directed else "↔",
            shorten(talk.target_name, 24),
            f"{talk.objects_count} {'+'.join(_SHORT.get(kind, kind) for kind in talk.kinds)}",
            _traffic(talk),
        ]
        for talk in summary.talks[:ROWS]
    ]
    console.print(make_table(["from", "", "to", "by", "traffic"], rows))
    _more(console, len(summary.talks) - ROWS, "pairs")


def _traffic(talk: Talk) -> str | None:
    """The rates, else the totals; None where nobody counts the bytes."""
    rates = [(name, value) for name, value in talk.metrics.items() if name.endswith("_bytes_per_s") and value]
    totals = [(name, value) for name, value in talk.metrics.items() if name.startswith("bytes_") and value]
    if rates:
        return human("x_bytes_per_s", sum(value for _, value in rates))
    if totals:
        return human("x_bytes", sum(value for _, value in totals))
    first = next(iter(talk.metrics.items()), None)
    return f"{quantity(first[0])} {human(*first)}" if first is not None else None


def _render_unseen(summary: Summary, console: Console) -> None:
    if not summary.unseen and not summary.losses:
        return
    _title(console, "What could not be seen, and how to see it")
    by_hint: dict[str, list[Unseen]] = {}
    for item in summary.unseen:
        by_hint.setdefault(item.hint, []).append(item)
    for hint, items in by_hint.items():
        for item in items:
            count = f" ({item.count}×)" if item.count > 1 and item.status == "partial" else ""
            console.print(f"{item.collector}, {item.status}: {clean(item.reason)}{count}")
        if hint:
            console.print(f"    → {clean(hint)}")
    for collector, losses in summary.losses.items():
        console.print(f"{collector} lost: " + ", ".join(f"{count} {clean(what)}" for what, count in losses.items()))


def _more(console: Console, count: int, what: str) -> None:
    if count > 0:
        console.print(f"… and {count} more {what}")
