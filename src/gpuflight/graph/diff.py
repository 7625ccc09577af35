"""The difference of two graphs, and its application.

``apply(diff(a, b), a) == b`` holds exactly when no noise filter is given, and ``apply(merge_diffs(x, y), g)`` is
``apply(y, apply(x, g))`` for differences that lead on from each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct, field

from gpuflight.graph.element import Edge, EdgeKey, Entity, Metric
from gpuflight.graph.graph import Graph


class Change(Struct, gc=False):
    """One element before and after; ``before`` and ``after`` have the same id or key."""

    before: Any
    after: Any

    def fields(self) -> Iterator[tuple[str, str, Any, Any]]:
        """Each difference as (``attributes`` | ``metrics`` | ``unknown``, name, before, after); absent is None."""
        for group in ("attributes", "metrics", "unknown"):
            old: dict[str, Any] = getattr(self.before, group) or {}
            new: dict[str, Any] = getattr(self.after, group) or {}
            if old == new:
                continue
            for name in {**old, **new}:
                if old.get(name) != new.get(name) or (name in old) != (name in new):
                    yield group, name, old.get(name), new.get(name)


class Diff(Struct, kw_only=True):
    """Added and removed elements whole, changed ones before and after. Removed goes first: in a merged difference, an
    element that went and came again is both removed and added."""

    nodes_added: list[Entity] = field(default_factory=list)
    nodes_removed: list[str] = field(default_factory=list)
    nodes_changed: list[Change] = field(default_factory=list)
    edges_added: list[Edge] = field(default_factory=list)
    edges_removed: list[EdgeKey] = field(default_factory=list)
    edges_changed: list[Change] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(
            self.nodes_added
            or self.nodes_removed
            or self.nodes_changed
            or self.edges_added
            or self.edges_removed
            or self.edges_changed
        )

    def counts(self) -> dict[str, int]:
        """Sizes by name, for progress lines and statistics."""
        return {name: len(getattr(self, name)) for name in self.__struct_fields__}


class Noise(Struct, frozen=True):
    """Which metric changes are too small to report: at most ``relative`` of the old value or ``absolute``."""

    relative: float = 0.0
    absolute: float = 0.0

    def covers(self, old: Metric | None, new: Metric | None) -> bool:
        """True if the step from old to new is noise. Appearing and disappearing never is."""
        if old is None or new is None:
            return False
        return abs(new - old) <= max(self.absolute, self.relative * abs(old))


def diff(a: Graph, b: Graph, noise: Noise | None = None) -> Diff:
    """What turns ``a`` into ``b``. With ``noise``, elements of which only metrics moved within it are left out."""
    nodes_added, nodes_removed, nodes_changed = _compare(a.nodes, b.nodes, noise)
    edges_added, edges_removed, edges_changed = _compare(a.edges, b.edges, noise)
    return Diff(
        nodes_added=nodes_added,
        nodes_removed=nodes_removed,
        nodes_changed=nodes_changed,
        edges_added=edges_added,
        edges_removed=edges_removed,
        edges_changed=edges_changed,
    )


def apply(change: Diff, graph: Graph) -> Graph:
    """A new graph: ``graph`` after the difference. Elements that are not there are removed without complaint."""
    return apply_all((change,), graph)


def apply_all(changes: Iterable[Diff], graph: Graph) -> Graph:
    """A new graph: ``graph`` after one difference after the other. O(graph + differences)."""
    nodes = dict(graph.nodes)
    edges = dict(graph.edges)
    for change in changes:
        for node_id in change.nodes_removed:
            nodes.pop(node_id, None)
        for key in change.edges_removed:
            edges.pop(key, None)
        nodes.update((step.after.id, step.after) for step in change.nodes_changed)
        nodes.update((entity.id, entity) for entity in change.nodes_added)
        edges.update((step.after.key, step.after) for step in change.edges_changed)
        edges.update((edge.key, edge) for edge in change.edges_added)
    return Graph.of(nodes, edges)


def merge_diffs(*changes: Diff) -> Diff:
    """One difference for several that lead on from each other, in this order. O(changes).

    What came and went in between is not in it, nor what changed and changed back.
    """
    nodes = _Merge()
    edges = _Merge()
    for change in changes:
        nodes.add(change.nodes_removed, ((step.after.id, step) for step in change.nodes_changed))
        nodes.add_new((entity.id, entity) for entity in change.nodes_added)
        edges.add(change.edges_removed, ((step.after.key, step) for step in change.edges_changed))
        edges.add_new((edge.key, edge) for edge in change.edges_added)
    nodes_added, nodes_removed, nodes_changed = nodes.result()
    edges_added, edges_removed, edges_changed = edges.result()
    return Diff(
        nodes_added=nodes_added,
        nodes_removed=nodes_removed,
        nodes_changed=nodes_changed,
        edges_added=edges_added,
        edges_removed=edges_removed,
        edges_changed=edges_changed,
    )


_ABSENT = object()
_REMOVED = object()
"""Before: it was there, but the difference that removed it does not say what it was. After: it is gone."""


class _Merge:
    """What became of the elements of one kind over several differences: (before the first, after the last) by key."""

    def __init__(self) -> None:
        self.states: dict[Any, tuple[Any, Any]] = {}

    def add(self, removed: Iterable[Any], changed: Iterable[tuple[Any, Change]]) -> None:
        states = self.states
        for key in removed:
            before = states[key][0] if key in states else _REMOVED
            if before is _ABSENT:
                del states[key]
            else:
                states[key] = (before, _REMOVED)
        for key, step in changed:
            states[key] = (states[key][0] if key in states else step.before, step.after)

    def add_new(self, added: Iterable[tuple[Any, Any]]) -> None:
        states = self.states
        for key, element in added:
            states[key] = (states[key][0] if key in states else _ABSENT, element)

    def result(self) -> tuple[list[Any], list[Any], list[Any]]:
        added, removed, changed = [], [], []
        for key, (before, after) in self.states.items():
            if before is _REMOVED or after is _REMOVED:
                removed.append(key)
            if after is _REMOVED:
                continue
            if before is _ABSENT or before is _REMOVED:
                added.append(after)
            elif before is not after and before != after:
                changed.append(Change(before, after))
        return added, removed, changed


def _compare(old: dict[Any, Any], new: dict[Any, Any], noise: Noise | None) -> tuple[list[Any], list[Any], list[Any]]:
    added = []
    changed = []
    for key, element in new.items():
        before = old.get(key)
        if before is None:
            added.append(element)
        elif before is not element and before != element:
            step = Change(before, element)
            if noise is None or not _is_noise(step, noise):
                changed.append(step)
    removed = [key for key in old if key not in new] if len(old) + len(added) != len(new) else []
    return added, removed, changed


def _is_noise(step: Change, noise: Noise) -> bool:
    return all(group == "metrics" and noise.covers(old, new) for group, _, old, new in step.fields())
