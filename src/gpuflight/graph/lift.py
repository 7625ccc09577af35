"""Data streams lifted to who is behind them: which process talks to which, through what.

Endpoints (sockets, pipes, segments) hold the facts; people ask about processes. Each underlying object is told once per
pair: a connection, by its edge; a thing in which several meet (a pipe, a segment, a queue), by its entity.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from gpuflight.graph.edges import Access, Belong, Host, Own, RunOn
from gpuflight.graph.element import Edge, Entity, Metric
from gpuflight.graph.graph import Graph
from gpuflight.graph.joins import is_joined_half
from gpuflight.graph.nodes import MessageQueue, Pipe, Process, Semaphore, SharedMemory, Thread

HUBS: frozenset[type[Entity]] = frozenset({Pipe, SharedMemory, MessageQueue, Semaphore})
"""Kinds in which those who use them meet. Users of a GPU, a disk or a file system do not exchange data by it."""

FAN_LIMIT = 32
"""So many holders of one object are paired with each other; beyond, the object itself stands for them, so that the
work and the result stay linear (a jobserver pipe of a thousand processes would make half a million pairs)."""

_SUMMED = ("_count", "_bytes", "_per_s")


class LiftedEdge(Struct, kw_only=True):
    """What flows from ``source`` to ``target`` (both ids), or between them if not ``directed``.

    ``via`` holds the id of each underlying edge or meeting entity, ``kinds`` the kinds of these, sorted. ``metrics``
    adds up counts, bytes and rates of the underlying edges, and takes the largest of anything else (rtt_ms).
    """

    source: str
    target: str
    directed: bool
    via: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    metrics: dict[str, Metric] = field(default_factory=dict)


def lift(
    graph: Graph, level: Iterable[type[Entity]] = (Process,), *, fan_limit: int = FAN_LIMIT, loose: bool = False
) -> list[LiftedEdge]:
    """All data streams between entities of the kinds ``level``, each underlying object once per pair, none to itself.

    An end is lifted to whoever holds it (Belong, RunOn and Host upwards, Own from threads) up to the nearest entity of
    ``level``. A connection that says which processes hold an end (attributes ``source_processes`` and
    ``target_processes``: ids) is lifted to these only. Ends that nobody of the level holds are left out, or stand for
    themselves if ``loose``; an object with more than ``fan_limit`` holders stands for itself always. A connection of
    two hosts that are both known is told by the edge that joins them, not by its halves (``graph.joins``).
    O(nodes + edges) for a given limit.
    """
    lifter = _Lifter(graph, tuple(level), fan_limit, loose)
    for edge in graph.edges.values():
        if edge.category == "data_stream" and not is_joined_half(edge, graph):
            lifter.add(edge)
    lifter.meet()
    return lifter.result()


class _Hub:
    """Who writes to and who reads from one meeting entity, and what the edges of each said."""

    __slots__ = ("metrics", "readers", "writers")

    def __init__(self) -> None:
        self.writers: dict[str, None] = {}
        self.readers: dict[str, None] = {}
        self.metrics: dict[str, list[dict[str, Metric]]] = {}


class _Lifter:
    def __init__(self, graph: Graph, level: tuple[type[Entity], ...], fan_limit: int, loose: bool) -> None:
        self.nodes = graph.nodes
        self.level = level
        self.fan_limit = fan_limit
        self.loose = loose
        self.parents = _parents(graph)
        self.known: dict[str, tuple[str, ...]] = {}
        self.hubs: dict[str, _Hub] = {}
        self.lifted: dict[tuple[str, str, bool], LiftedEdge] = {}

    def holders(self, node_id: str) -> tuple[str, ...]:
        """Ids of the nearest entities of the level above a node, itself if it is of the level; breadth first."""
        known = self.known.get(node_id)
        if known is not None:
            return known
        found: dict[str, None] = {}
        seen = {node_id}
        wave = [node_id]
        while wave and not found:
            above = []
            for current in wave:
                entity = self.nodes.get(current)
                if entity is not None and isinstance(entity, self.level):
                    found[current] = None
                    continue
                for parent in self.parents.get(current, ()):
                    if parent not in seen:
                        seen.add(parent)
                        above.append(parent)
            wave = above
        result = tuple(found)
        self.known[node_id] = result
        return result

    def add(self, edge: Edge) -> None:
        """Take one data stream edge."""
        if "ended_round" in edge.attributes:
            return
        source, target = edge.source, edge.target
        if self._is_hub(target):
            self._use_hub(target, source, edge)
        elif self._is_hub(source):
            self._use_hub(source, target, edge)
        else:
            self._connect(edge)

    def _is_hub(self, node_id: str) -> bool:
        return type(self.nodes.get(node_id)) in HUBS

    def _use_hub(self, hub_id: str, user: str, edge: Edge) -> None:
        """``SendTo`` says a direction; for ``Access`` its attribute ``ends`` does (r, w, rw; absent: both)."""
        hub = self.hubs.setdefault(hub_id, _Hub())
        if isinstance(edge, Access):
            ends = str(edge.attributes.get("ends") or "rw")
            writes, reads = "w" in ends, "r" in ends
        else:
            writes, reads = edge.target == hub_id, edge.source == hub_id
        for holder in self._ends(user, ()):
            if writes:
                hub.writers[holder] = None
            if reads:
                hub.readers[holder] = None
            if edge.metrics:
                hub.metrics.setdefault(holder, []).append(edge.metrics)

    def meet(self) -> None:
        """Pair everyone who writes to a meeting entity with everyone who reads from it."""
        for hub_id, hub in self.hubs.items():
            users = {**hub.writers, **hub.readers}
            kind = self.nodes[hub_id].kind
            if len(users) > self.fan_limit:
                for user in users:
                    source, target, directed = _direction(user, hub_id, user in hub.writers, user in hub.readers)
                    self._record(source, target, directed, hub_id, kind, hub.metrics.get(user, ()))
                continue
            done = set()
            for writer in hub.writers:
                for reader in hub.readers:
                    if writer == reader or (reader, writer) in done:
                        continue
                    done.add((writer, reader))
                    back = reader in hub.writers and writer in hub.readers
                    source, target, directed = _direction(writer, reader, True, back)
                    metrics = [*hub.metrics.get(writer, ()), *hub.metrics.get(reader, ())]
                    self._record(source, target, directed, hub_id, kind, metrics)

    def _connect(self, edge: Edge) -> None:
        sources = self._ends(edge.source, edge.attributes.get("source_processes"))
        targets = self._ends(edge.target, edge.attributes.get("target_processes"))
        done = set()
        for source in sources:
            for target in targets:
                if source == target or (target, source) in done:
                    continue
                done.add((source, target))
                back = source in targets and target in sources
                first, second, directed = _direction(source, target, True, back or not edge.directed)
                self._record(first, second, directed, edge.id, edge.kind, (edge.metrics,) if edge.metrics else ())

    def _ends(self, node_id: str, processes: object) -> tuple[str, ...]:
        """Who stands for one end. ``processes``: the ids of those of its holders that really have this connection."""
        holders = self.holders(node_id)
        if isinstance(processes, list | tuple) and processes:
            named = [holder for process in processes if process in self.nodes for holder in self.holders(process)]
            holders = tuple(dict.fromkeys(named)) or holders
        if len(holders) > self.fan_limit or (not holders and self.loose):
            return (node_id,)
        return holders

    def _record(
        self, source: str, target: str, directed: bool, via: str, kind: str, metrics: Iterable[dict[str, Metric]]
    ) -> None:
        key = (source, target, directed)
        lifted = self.lifted.get(key)
        if lifted is None:
            lifted = self.lifted[key] = LiftedEdge(source=source, target=target, directed=directed)
        lifted.via.append(via)
        if kind not in lifted.kinds:
            lifted.kinds.append(kind)
            lifted.kinds.sort()
        for one in metrics:
            _aggregate(lifted.metrics, one)

    def result(self) -> list[LiftedEdge]:
        """In order of first sight."""
        return list(self.lifted.values())


def _direction(source: str, target: str, forth: bool, back: bool) -> tuple[str, str, bool]:
    """Both ways is undirected, its ends in the order of their ids, so that the same pair is met again."""
    if forth and back:
        return min(source, target), max(source, target), False
    return (source, target, True) if forth else (target, source, True)


def _aggregate(into: dict[str, Metric], metrics: dict[str, Metric]) -> None:
    for name, value in metrics.items():
        known = into.get(name)
        if known is None:
            into[name] = value
        else:
            into[name] = known + value if name.endswith(_SUMMED) else max(known, value)


def _parents(graph: Graph) -> dict[str, list[str]]:
    """Who holds whom: every deploy edge read upwards. A process climbs to its parent only by containment and threads,
    since what a child holds is not held by its parent."""
    parents: dict[str, list[str]] = {}
    nodes = graph.nodes
    for source, target, kind in graph.edges:
        if kind in (_BELONG, _RUN_ON):
            parents.setdefault(source, []).append(target)
        elif kind == _HOST or (kind == _OWN and type(nodes.get(target)) is Thread):
            parents.setdefault(target, []).append(source)
    return parents


_BELONG, _RUN_ON, _HOST, _OWN = (str(kind.__struct_config__.tag) for kind in (Belong, RunOn, Host, Own))
