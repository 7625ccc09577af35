"""How much each box is worth showing: what it is wired to, how busy it is, whether a finding names it."""

from __future__ import annotations

from operator import attrgetter

from gpuflight.vis.layout.item import Item, nearest
from gpuflight.vis.layout.tree import Forest
from gpuflight.vis.layout.wires import Sort
from gpuflight.vis.text import finite

ALWAYS = 1000.0
"""Score of what is never folded: it uses a GPU, or a finding names it."""

CONNECTED = 3.0
"""From here on a process is wired to another one by more than a pipe or a unix socket."""

_WORKLOAD = frozenset(("Process", "Container", "Pod", "Unit"))
_DEPTH = attrgetter("depth")
_GROUND = frozenset(("GPU", "NPU", "MigInstance", "RdmaDevice", "RdmaPort"))


def score(forest: Forest) -> None:
    """Set ``score`` and ``ground`` of every item; a box is worth at least what it holds."""
    homes: dict[Item, Item | None] = {}
    worths = {sort: _worth(sort) for sort in set(forest.wires.sorts)}
    for sort, source, target in forest.wires:
        if not sort.flows:
            continue
        worth = worths[sort]
        try:
            first = homes[source]
        except KeyError:
            homes[source] = first = nearest(source, _WORKLOAD)
        try:
            second = homes[target]
        except KeyError:
            homes[target] = second = nearest(target, _WORKLOAD)
        if first is second and worth < ALWAYS:
            continue
        for item in (first, second):
            if item is not None:
                item.score += worth
                if worth >= ALWAYS:
                    item.ground = True
    items = forest.items
    for finding in forest.options.findings:
        for name in finding.entities:
            if name in items:
                items[name].score += ALWAYS
    for item in items.values():
        entity = item.entity
        if entity is not None:
            if entity.metrics and (cpu := finite(entity.metrics, "cpu_pct") or 0.0) >= 1.0:
                item.score += min(cpu, 100.0)
            if entity.attributes.get("top_cpu"):
                item.score += CONNECTED
    work = [item for item in items.values() if item.kind in _WORKLOAD]
    work.sort(key=_DEPTH, reverse=True)
    for item in work:
        parent = item.parent
        if parent is not None:
            if item.score > parent.score:
                parent.score = item.score
            parent.ground = parent.ground or item.ground


def _worth(sort: Sort) -> float:
    """What an edge of a sort adds to each of its ends."""
    if sort.source_kind in _GROUND or sort.target_kind in _GROUND:
        return ALWAYS
    shared = "SharedMemory" in (sort.source_kind, sort.target_kind)
    return CONNECTED if shared or sort.medium in ("network", "data") else 1.0
