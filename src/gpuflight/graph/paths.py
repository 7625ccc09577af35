"""The way data takes between two entities, and its narrowest hop.

Among the ways there are, in this order: the one with the fewest hops of unknown bandwidth, of these the one whose
narrowest hop is widest (the maximum bottleneck path), of these the shortest. Widest-then-shortest cannot be found by
one Dijkstra with a combined key, since a prefix that is needlessly wide may be longer; so the bottleneck is found first
(a binary search over the rates that occur), then the shortest way over the hops that are at least that wide.
O(edges x log(rates) x log(nodes)).
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Sequence

from msgspec import Struct, field

from gpuflight.errors import InputError
from gpuflight.graph.adjacency import Adjacency, adjacency
from gpuflight.graph.bandwidth import Bandwidth, Bandwidths
from gpuflight.graph.edges import (
    Access,
    Affinity,
    AttachedTo,
    Belong,
    NumaAccess,
    NumaSetContain,
    NvLink,
    Own,
    Proximity,
    RunOn,
)
from gpuflight.graph.element import Edge, EdgeKey, Entity
from gpuflight.graph.graph import Graph
from gpuflight.graph.joins import is_joined_half
from gpuflight.graph.nodes import (
    GPU,
    NPU,
    CpuPackage,
    Device,
    Disk,
    MessageQueue,
    MigInstance,
    Nic,
    Numa,
    NumaSet,
    NvSwitch,
    PciDevice,
    Pipe,
    RdmaDevice,
    RdmaPort,
    Semaphore,
    SharedMemory,
    Socket,
    Thread,
    UnixSocket,
)
from gpuflight.graph.units import human

HARDWARE: frozenset[type[Entity]] = frozenset(
    {GPU, NPU, CpuPackage, Device, Disk, MigInstance, Nic, Numa, NumaSet, NvSwitch, PciDevice, RdmaDevice, RdmaPort}
)
"""Between two of these only placement edges are considered, if there is a way over them: a process that uses two GPUs
is no link between them."""

MEETING_POINTS: frozenset[type[Entity]] = frozenset({SharedMemory, MessageQueue, Semaphore, Pipe})
"""Where two users of the same thing do exchange data."""

ENDPOINTS: frozenset[type[Entity]] = frozenset({Socket, UnixSocket})

SHORTHAND_LENGTH = 16
"""An edge to a NUMA node, or a set of them, stands for the way through the machine that it leaves out, so it counts as
this many hops when lengths are compared; deeper PCIe trees are not built."""


class Hop(Struct, kw_only=True):
    """One edge of a path, in the direction of travel: ``reverse`` if that is against the edge's own.

    ``expected_bytes_per_s`` is None if the hop is unknown (``reason``) or no link at all (``unlimited``)."""

    source: str
    target: str
    kind: str
    edge: EdgeKey
    reverse: bool = False
    expected_bytes_per_s: float | None = None
    unlimited: bool = False
    basis: str = ""
    reason: str = ""

    def text(self) -> str:
        """``PcieLink 63 GB/s (PCIe 5.0 x16)``, or why its bandwidth is not known."""
        if self.expected_bytes_per_s is not None:
            return f"{self.kind} {human('expected_bytes_per_s', self.expected_bytes_per_s)} ({self.basis})"
        return self.kind if self.unlimited else f"{self.kind}, unknown: {self.reason}"


class Path(Struct, kw_only=True):
    """A way from ``source`` to ``target``. ``narrowest`` is the hop of least known bandwidth (the first such), None if
    no hop's bandwidth is known; ``unknown_count`` says how many hops might be narrower still."""

    source: str
    target: str
    hops: list[Hop] = field(default_factory=list)
    narrowest: Hop | None = None
    unknown_count: int = 0


def path(graph: Graph, a: str | Entity, b: str | Entity) -> Path | None:
    """The widest way between two entities of the graph, or None if they are not connected.

    Edges are passable both ways. Between two pieces of hardware the way goes over placement edges, otherwise also over
    data streams and what holds their ends; where that gives nothing, over containment too. ``HasAttribute`` and
    ``Proximity`` (a summary of the way, not a way) are never used. Raises InputError if an end is not in the graph.
    """
    source = a if isinstance(a, str) else a.id
    target = b if isinstance(b, str) else b.id
    for end in (source, target):
        if end not in graph.nodes:
            raise InputError(f"there is no entity {end!r} in this graph")
    if source == target:
        return Path(source=source, target=target)
    around = adjacency(graph)
    search = _Search(graph, around)
    start, goal = around.index[source], around.index[target]
    hardware = type(graph.nodes[source]) in HARDWARE and type(graph.nodes[target]) in HARDWARE
    for tier in (1, 2, 3) if hardware else (2, 3):
        links = search.widest(start, goal, tier)
        if links is not None:
            return search.as_path(source, target, links)
    return None


class _Search:
    """Widths, lengths and tiers of all edges of one graph, by edge number."""

    def __init__(self, graph: Graph, around: Adjacency) -> None:
        self.around = around
        bandwidths = Bandwidths(graph)
        self.answers: list[Bandwidth] = [bandwidths.of(edge) for edge in around.edges]
        self.tiers = [_tier(edge, graph) for edge in around.edges]
        self.widths = array("d", [_width(answer) for answer in self.answers])
        self.lengths = array(
            "q",
            [
                SHORTHAND_LENGTH if isinstance(edge, Affinity | NumaAccess | NumaSetContain) else 1
                for edge in around.edges
            ],
        )
        self.unknown = [width == 0.0 for width in self.widths]
        self.used_at = [_used_at(edge, graph) for edge in around.edges]

    def widest(self, start: int, goal: int, tier: int) -> list[int] | None:
        """The links (edge number times two, plus one if against the edge) of the best way over edges of the tier."""
        links = self._shortest(start, goal, tier, 0.0)
        if links is None:
            return None
        fewest = self._unknowns(links)
        # A hop that is no link has infinite width and bounds nothing, so only finite widths are candidates.
        rates = sorted({w for w, t in zip(self.widths, self.tiers, strict=True) if t <= tier and math.isfinite(w)})
        low, high = 0, len(rates)
        while low < high:
            middle = (low + high) // 2
            wider = self._shortest(start, goal, tier, rates[middle])
            if wider is not None and self._unknowns(wider) == fewest:
                links = wider
                low = middle + 1
            else:
                high = middle
        unbounded = self._shortest(start, goal, tier, math.inf)
        return unbounded if unbounded is not None and self._unknowns(unbounded) == fewest else links

    def _unknowns(self, links: Sequence[int]) -> int:
        return sum(self.unknown[link >> 1] for link in links)

    def _shortest(self, start: int, goal: int, tier: int, at_least: float) -> list[int] | None:
        """Dijkstra by (unknown hops, length) over edges at least so wide; unknown ones always pass.

        Two users of one GPU, disk, NUMA node or listening socket are not linked by it. So each node has two states:
        reached as a thing in use (1), which must not be left towards another user, or in any other way (0).
        """
        around, widths, unknown, lengths, tiers = self.around, self.widths, self.unknown, self.lengths, self.tiers
        used_at = self.used_at
        best: dict[int, tuple[int, int]] = {start << 1: (0, 0)}
        came: dict[int, tuple[int, int]] = {}
        heap = [(0, 0, start << 1)]
        while heap:
            unknowns, length, state = heapq.heappop(heap)
            node, in_use = state >> 1, state & 1
            if node == goal:
                return _trace(state, came)
            if (unknowns, length) > best[state]:
                continue
            for other, number, backwards in around.around(node):
                if tiers[number] > tier or (widths[number] < at_least and not unknown[number]):
                    continue
                user_here, user_there = (_TARGET, _SOURCE) if backwards else (_SOURCE, _TARGET)
                if in_use and used_at[number] == user_here:
                    continue
                reached = other << 1 | (used_at[number] == user_there)
                cost = (unknowns + unknown[number], length + lengths[number])
                known = best.get(reached)
                if known is None or cost < known:
                    best[reached] = cost
                    came[reached] = (number << 1 | backwards, state)
                    heapq.heappush(heap, (*cost, reached))
        return None

    def as_path(self, source: str, target: str, links: Sequence[int]) -> Path:
        hops = []
        for link in links:
            edge, answer, reverse = self.around.edges[link >> 1], self.answers[link >> 1], bool(link & 1)
            hops.append(
                Hop(
                    source=edge.target if reverse else edge.source,
                    target=edge.source if reverse else edge.target,
                    kind=edge.kind,
                    edge=edge.key,
                    reverse=reverse,
                    expected_bytes_per_s=answer.bytes_per_s,
                    unlimited=answer.unlimited,
                    basis=answer.basis,
                    reason=answer.reason,
                )
            )
        known = [hop for hop in hops if hop.expected_bytes_per_s is not None]
        return Path(
            source=source,
            target=target,
            hops=hops,
            narrowest=min(known, key=lambda hop: hop.expected_bytes_per_s or 0.0) if known else None,
            unknown_count=sum(hop.expected_bytes_per_s is None and not hop.unlimited for hop in hops),
        )


def _width(answer: Bandwidth) -> float:
    if answer.unlimited:
        return math.inf
    return answer.bytes_per_s if answer.bytes_per_s is not None else answer.at_least_bytes_per_s


_SOURCE, _TARGET = 1, 2


def _used_at(edge: Edge, graph: Graph) -> int:
    """Which end of an edge is a thing that the other end uses; 0 if neither."""
    if isinstance(edge, Access | NumaAccess):
        return 0 if type(graph.nodes[edge.target]) in MEETING_POINTS else _TARGET
    return _SOURCE if isinstance(edge, Belong) and type(graph.nodes[edge.source]) in ENDPOINTS else 0


def _trace(state: int, came: dict[int, tuple[int, int]]) -> list[int]:
    links = []
    while state in came:
        link, state = came[state]
        links.append(link)
    return links[::-1]


def _tier(edge: Edge, graph: Graph) -> int:
    """1: part of the machine's wiring. 2: flow between programs, and what holds its ends. 3: containment. 9: no way."""
    if isinstance(edge, Proximity) or "ended_round" in edge.attributes or edge.attributes.get("ended") is True:
        return 9
    if isinstance(edge, AttachedTo) and type(graph.nodes[edge.source]) is NvSwitch:
        return 9  # the PCIe function of an NVSwitch is for its management, no data of a GPU passes it
    if isinstance(edge, NvLink) and edge.metrics.get("links_active_count") == 0:
        return 9
    if is_joined_half(edge, graph):
        return 9  # the connection is a way once, by the edge that joins its real ends
    if edge.category == "placement":
        return 2 if isinstance(edge, NumaAccess) else 1
    if edge.category == "data_stream" or isinstance(edge, Belong | RunOn):
        return 2
    if edge.category == "deploy":
        return 2 if isinstance(edge, Own) and type(graph.nodes[edge.target]) is Thread else 3
    return 9
