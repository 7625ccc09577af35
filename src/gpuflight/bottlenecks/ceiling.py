"""What the wires between a rank's GPU and the other GPUs of its job carry at most."""

from __future__ import annotations

from msgspec import Struct, field

from gpuflight.bottlenecks.base import Unknown
from gpuflight.bottlenecks.jobs import Job, Rank
from gpuflight.bottlenecks.window import Window, name_of
from gpuflight.graph import Edge, Entity, Graph, edges, nodes
from gpuflight.graph.element import EdgeKey
from gpuflight.graph.paths import path

_WIRED: tuple[type[Entity], ...] = (nodes.GPU, nodes.NvSwitch, nodes.PciDevice, nodes.Numa, nodes.CpuPackage)
_WIRES: tuple[type[Edge], ...] = (edges.NvLink, edges.PcieLink, edges.AttachedTo, edges.Affinity, edges.NumaDistance)


class Ceiling(Struct):
    """``text``: which hop it is, for people; ``element``: whose number it is."""

    bytes_per_s: float
    text: str
    element: Entity
    entities: list[str] = field(default_factory=list)
    edges: list[str] = field(default_factory=list)


def ceiling_of(window: Window, job: Job, rank: Rank) -> Ceiling:
    """The ceiling of bus bandwidth at one rank of this host. Raises Unknown.

    A ring passes each GPU once, so the widest way to any other GPU of the job on the host bounds it; between hosts,
    what all cards of the host carry together."""
    if job.world_size is None:
        raise Unknown("how many ranks the job has is not told")
    here = [other for other in job if not other.ns]
    found: list[Ceiling] = []
    if len(here) > 1:
        found.append(_between_gpus(window, rank, here))
    if len(here) < job.world_size:
        if not any(other.ns for other in job):
            job.whole()  # those that are not seen may be on this host too
        found.append(_between_hosts(window, rank))
    if not found:
        raise Unknown("the job has one rank")
    return min(found, key=lambda each: each.bytes_per_s)


def _between_gpus(window: Window, rank: Rank, here: list[Rank]) -> Ceiling:
    mine = rank.gpus(window)
    others = {gpu.id: gpu for other in here if other is not rank for gpu in other.gpus(window)}
    if len(mine) != 1 or not others:
        raise Unknown("which GPU each rank uses is not known")
    graph = window.shared("wires", _wires)
    best: Ceiling | None = None
    for gpu in others.values():
        way = path(graph, mine[0].id, gpu.id) if gpu.id != mine[0].id else None
        hop = way.narrowest if way is not None and not way.unknown_count else None
        if hop is None or hop.expected_bytes_per_s is None:
            continue
        if best is None or hop.expected_bytes_per_s > best.bytes_per_s:
            source, target, kind = hop.edge
            text = f"the way from {name_of(window, mine[0].id)} to {name_of(window, gpu.id)} ({hop.kind}, {hop.basis})"
            best = Ceiling(
                hop.expected_bytes_per_s, text, mine[0], [mine[0].id, gpu.id], [f"{kind}({source}->{target})"]
            )
    if best is None:
        raise Unknown("what the ways between its GPUs carry is not known")
    return best


def _between_hosts(window: Window, rank: Rank) -> Ceiling:
    ports = [port for port in window.all(nodes.RdmaPort) if not port.ns]
    speeds = {port.id: port.metrics["speed_bits_per_s"] / 8 for port in ports if port.metrics.get("speed_bits_per_s")}
    active = {port.id for port in ports if "active" in str(port.attributes.get("state", "active")).lower()}
    rate = sum(speed for port, speed in speeds.items() if port in active)
    if not rate:
        raise Unknown("the job spans hosts, and which cards it uses between them is not known: no RDMA port is up")
    text = f"the {len(active & speeds.keys())} RDMA ports of the host together"
    return Ceiling(rate, text, rank.element, sorted(active & speeds.keys())[:8])


def _wires(window: Window) -> Graph:
    """The machine's wiring alone: of a large host a small part of the picture."""
    wired = {entity.id: entity for kind in _WIRED for entity in window.all(kind) if not entity.ns}
    wires: dict[EdgeKey, Edge] = {
        edge.key: edge
        for kind in _WIRES
        for edge in window.all_edges(kind)
        if edge.source in wired and edge.target in wired
    }
    return Graph.of(wired, wires)
