"""The live store: what a host looked like in the last round, and how one round becomes the next.

The reports of all collectors are deduplicated, compared with the round before, and the difference falls out of the same
pass. Elements that did not change keep their very object, so that rounds share them; the dictionaries of a published
graph are never touched again. The loops are written as ``map`` over whole columns because that keeps the per-element
work inside the interpreter's C code (benchmarks/bench_graph.py has the figures).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import compress
from operator import is_not, ne
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpuflight.graph.diff import Change, Diff
from gpuflight.graph.element import Edge, EdgeKey, Entity
from gpuflight.graph.graph import Graph, merge_edges, merge_entities

ENDED = "ended_round"
"""Attribute of a tombstone: the round in which the element was first missing."""


class Advance(Struct):
    """The result of one step: the graph, what changed, and how many edges were dropped for want of an end."""

    graph: Graph
    diff: Diff
    dangling_count: int


class LiveStore:
    """The graph of one host from round to round. Not thread-safe: the core calls it from one thread.

    ``tombstone_rounds``: for how many rounds an element that is no longer reported stays, marked with the attribute
    ``ended_round`` and without metrics; 0 removes it at once.
    """

    def __init__(self, tombstone_rounds: int = 3) -> None:
        self.graph = Graph()
        self._tombstone_rounds = tombstone_rounds
        self._ended_nodes: dict[str, int] = {}
        self._ended_edges: dict[EdgeKey, int] = {}

    def clear(self) -> None:
        """Forget everything."""
        self.graph = Graph()
        self._ended_nodes.clear()
        self._ended_edges.clear()

    def advance(self, number: int, nodes: Sequence[Sequence[Entity]], edges: Sequence[Sequence[Edge]]) -> Advance:
        """Make round ``number`` of the reports, each a sequence of batches, the most trusted collector's first."""
        # Nothing built here can be part of a cycle, while a collection in the middle would walk every element.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._advance(number, nodes, edges)
        finally:
            if collecting:
                gc.enable()

    def _advance(self, number: int, nodes: Sequence[Sequence[Entity]], edges: Sequence[Sequence[Edge]]) -> Advance:
        reported_nodes: dict[str, Entity] = {}
        for batch in nodes:
            _fold(reported_nodes, [entity.id for entity in batch], batch, merge_entities)
        reported_edges: dict[EdgeKey, Edge] = {}
        for edge_batch in edges:
            _fold(reported_edges, _edge_keys(edge_batch), edge_batch, merge_edges)

        new_nodes, nodes_added, nodes_changed = _compare(self.graph.nodes, reported_nodes)
        nodes_removed = self._bury(number, new_nodes, reported_nodes, self._ended_nodes, nodes_changed)

        new_edges, edges_added, edges_changed = _compare(self.graph.edges, reported_edges)
        dangling = [e for e in edges_added if e.source not in new_nodes or e.target not in new_nodes]
        if dangling:
            for edge in dangling:
                del new_edges[edge.key]
                del reported_edges[edge.key]
            edges_added = [edge for edge in edges_added if edge.key in new_edges]
        edges_removed = self._bury(number, new_edges, reported_edges, self._ended_edges, edges_changed)
        if nodes_removed:
            gone = set(nodes_removed)
            orphans = [key for key in new_edges if key[0] in gone or key[1] in gone]
            if orphans:
                known = self.graph.edges
                for key in orphans:
                    del new_edges[key]
                    self._ended_edges.pop(key, None)
                edges_added = [edge for edge in edges_added if edge.key in new_edges]
                edges_changed = [step for step in edges_changed if step.after.key in new_edges]
                edges_removed.extend(key for key in orphans if key in known)

        self.graph = Graph.of(new_nodes, new_edges)
        return Advance(
            graph=self.graph,
            diff=Diff(
                nodes_added=nodes_added,
                nodes_removed=nodes_removed,
                nodes_changed=nodes_changed,
                edges_added=edges_added,
                edges_removed=edges_removed,
                edges_changed=edges_changed,
            ),
            dangling_count=len(dangling),
        )

    def _bury(
        self,
        number: int,
        current: dict[Any, Any],
        reported: dict[Any, Any],
        ended: dict[Any, int],
        changed: list[Change],
    ) -> list[Any]:
        """Mark what is no longer reported, remove what has been marked long enough; returns the removed keys."""
        if len(current) == len(reported):
            ended.clear()
            return []
        removed = []
        missing = current.keys() - reported.keys()
        for key in [key for key in ended if key not in missing]:  # came back
            del ended[key]
        # In the order of the graph, not of the set, so that equal rounds give equal bytes.
        for key in sorted(missing):
            since = ended.setdefault(key, number)
            if number - since >= self._tombstone_rounds:
                del current[key]
                del ended[key]
                removed.append(key)
            elif since == number:
                before = current[key]
                after = replace(before, attributes={**before.attributes, ENDED: number}, metrics={}, unknown=None)
                current[key] = after
                changed.append(Change(before, after))
        return removed


def _edge_keys(batch: Sequence[Edge]) -> list[EdgeKey]:
    # The kind is read from the class, once per class rather than once per edge.
    kinds: dict[type[Edge], str] = {cls: cls.__struct_config__.tag for cls in set(map(type, batch))}  # type: ignore[attr-defined]
    if len(kinds) == 1:
        kind = next(iter(kinds.values()))
        return [(edge.source, edge.target, kind) for edge in batch]
    return [(edge.source, edge.target, kinds[type(edge)]) for edge in batch]


def _fold(into: dict[Any, Any], keys: list[Any], batch: Sequence[Any], merge: Callable[[Any, Any], Any]) -> None:
    """Add a batch; where a key is known already, the known element takes what it lacks."""
    firsts = list(map(into.setdefault, keys, batch))
    again = list(map(is_not, firsts, batch))
    for key, element in zip(compress(keys, again), compress(batch, again), strict=True):
        known = into[key]
        if known != element:
            into[key] = merge(known, element)


def _compare(before: dict[Any, Any], reported: dict[Any, Any]) -> tuple[dict[Any, Any], list[Any], list[Change]]:
    """The graph's new dictionary (the old one, changes written over it), what is new, and what changed."""
    news = list(reported.values())
    olds = list(map(before.get, reported))
    # Elements that a collector did not make anew are the same object: two passes, the first without looking inside.
    keys = reported.keys()
    for differ in (is_not, ne):
        flags = list(map(differ, olds, news))
        keys, olds, news = [list(compress(column, flags)) for column in (keys, olds, news)]  # type: ignore[assignment]
    current = before.copy()
    current.update(zip(keys, news, strict=True))
    added = [new for old, new in zip(olds, news, strict=True) if old is None]
    changed = [Change(old, new) for old, new in zip(olds, news, strict=True) if old is not None]
    return current, added, changed
