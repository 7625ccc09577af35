"""The live store: what a host looked like in the last round, and how one round becomes the next.

The reports of all collectors are deduplicated, merged, compared with the round before, and the difference falls out of
the same pass. Most elements of a round are the very objects of the round before: those are recognised
by identity alone, in C loops over whole columns, and only the rest is looked up by key (benchmarks/bench_graph.py).
Elements that did not change keep their object, so that rounds share them; the dictionaries of a published graph are
never touched again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter, not_
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gpuflight.graph.diff import Change, Diff
from gpuflight.graph.element import EMPTY, Edge, EdgeKey, Entity
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
        self._tombstone_rounds = tombstone_rounds
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.graph = Graph()
        self._nodes = _Table(attrgetter("id"), merge_entities, self._tombstone_rounds)
        self._edges = _Table(attrgetter("key"), merge_edges, self._tombstone_rounds)

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
        node_step = self._nodes.step(number, nodes)
        present = node_step.elements
        edge_step = self._edges.step(number, edges)
        dangling = [e.key for e in edge_step.added if e.source not in present or e.target not in present]
        if dangling:
            self._edges.withdraw(edge_step, dangling)
        if node_step.removed:
            gone = set(node_step.removed)
            self._edges.withdraw(edge_step, [k for k in edge_step.elements if k[0] in gone or k[1] in gone])
        self.graph = Graph.of(present, edge_step.elements)
        return Advance(
            graph=self.graph,
            diff=Diff(
                nodes_added=node_step.added,
                nodes_removed=node_step.removed,
                nodes_changed=node_step.changed,
                edges_added=edge_step.added,
                edges_removed=edge_step.removed,
                edges_changed=edge_step.changed,
            ),
            dangling_count=len(dangling),
        )


class _Step(Struct):
    """How one table became the next: ``elements`` is the new dictionary by key, ``before`` that of the last round."""

    before: dict[Any, Any]
    elements: dict[Any, Any]
    added: list[Any]
    changed: list[Change]
    removed: list[Any]


class _Table:
    """The nodes, or the edges, of the last round by key."""

    def __init__(self, key: Callable[[Any], Any], merge: Callable[[Any, Any], Any], tombstone_rounds: int) -> None:
        self._key = key
        self._merge = merge
        self._tombstone_rounds = tombstone_rounds
        self._elements: dict[Any, Any] = {}
        # id() of exactly the objects in _elements, less the tombstones: alive, so that no other object has their id.
        self._identities: set[int] = set()
        self._ended: dict[Any, int] = {}

    def step(self, number: int, batches: Sequence[Sequence[Any]]) -> _Step:
        """Take the reports of one round; earlier batches take precedence."""
        reported, again, made = self._fold(batches)
        before = self._elements
        elements = before.copy()
        identities = self._identities
        added, changed = [], []
        kept_count = len(again)
        for key, new in reported.items():
            old = before.get(key)
            if old is None:
                added.append(new)
            else:
                kept_count += id(old) not in again
                if old == new:
                    if key in made:
                        continue
                    # The collector's own object takes the place of its equal: it may well come again.
                else:
                    changed.append(Change(old, new))
                identities.discard(id(old))
            elements[key] = new
            identities.add(id(new))
        removed: list[Any] = []
        if kept_count != len(before):
            removed = self._bury(number, elements, reported, again, changed)
        elif self._ended:
            self._ended.clear()
        self._elements = elements
        return _Step(before, elements, added, changed, removed)

    def withdraw(self, step: _Step, keys: list[Any]) -> None:
        """Take elements out of a step again, as if they had not been reported (or had been removed)."""
        out = set(keys)
        for key in keys:
            self._identities.discard(id(step.elements.pop(key)))
            self._ended.pop(key, None)
        step.added = [element for element in step.added if self._key(element) not in out]
        step.changed = [change for change in step.changed if self._key(change.after) not in out]
        step.removed.extend(key for key in keys if key in step.before)

    def _fold(self, batches: Sequence[Sequence[Any]]) -> tuple[dict[Any, Any], set[int], set[Any]]:
        """The reports that are not objects of the last round, merged by key; the identities of those that are; and the
        keys whose element was made here, of several."""
        identities, elements, key_of, merge = self._identities, self._elements, self._key, self._merge
        reported: dict[Any, Any] = {}
        again: set[int] = set()
        merged_with_old: set[Any] = set()
        made: set[Any] = set()
        for batch in batches:
            numbers = list(map(id, batch))
            if identities.issuperset(numbers):  # all as it was
                again.update(numbers)
                continue
            known = list(map(identities.__contains__, numbers))
            fresh = list(compress(batch, map(not_, known)))
            same_batch = set(compress(numbers, known))
            positions: dict[int, int] = {}
            for key, new in zip(map(key_of, fresh), fresh, strict=True):
                if (
                    new.attributes is EMPTY
                    and new.metrics is EMPTY
                    and new.unknown is None
                    and (key in reported or ((old := elements.get(key)) is not None and id(old) in again))
                ):
                    continue  # an anchor of what a batch before this one reported: it has nothing to add
                first = reported.setdefault(key, new)
                if first is new and (old := elements.get(key)) is not None and key not in merged_with_old:
                    # Reported unchanged as well? By a batch before this one, or by this one before this element?
                    if id(old) in same_batch and id(old) not in again:
                        positions = positions or dict(zip(reversed(numbers), range(len(numbers), 0, -1), strict=True))
                        if positions[id(new)] < positions[id(old)]:
                            continue
                    elif id(old) not in again:
                        continue
                    first = old
                    merged_with_old.add(key)
                if first is not new:
                    reported[key] = merge(first, new)
                    made.add(key)
            again |= same_batch
        if again and reported:  # reported unchanged after something else had been reported
            for key, new in reported.items():
                if key not in merged_with_old and (old := elements.get(key)) is not None and id(old) in again:
                    reported[key] = merge(new, old)
                    made.add(key)
        return reported, again, made

    def _bury(
        self, number: int, elements: dict[Any, Any], reported: dict[Any, Any], again: set[int], changed: list[Change]
    ) -> list[Any]:
        """Mark what is no longer reported, remove what has been marked long enough; returns the removed keys."""
        missing = [k for k, e in self._elements.items() if id(e) not in again and k not in reported]
        ended, self._ended = self._ended, {}
        removed = []
        for key in missing:
            since = ended.get(key, number)
            before = elements[key]
            if number - since >= self._tombstone_rounds:
                del elements[key]
                self._identities.discard(id(before))
                removed.append(key)
                continue
            self._ended[key] = since
            if since == number:
                after = replace(before, attributes={**before.attributes, ENDED: number}, metrics=EMPTY, unknown=None)
                elements[key] = after
                self._identities.discard(id(before))
                changed.append(Change(before, after))
        return removed


__all__ = ["ENDED", "Advance", "EdgeKey", "LiveStore"]
