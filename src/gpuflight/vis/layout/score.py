"""How much each box is worth showing: what it is wired to, how busy it is, whether a finding names it."""

from __future__ import annotations

from gpuflight.vis.layout.item import by_level, nearest
from gpuflight.vis.layout.tree import Forest
from gpuflight.vis.text import finite
from gpuflight.vis.visual import medium_of

ALWAYS = 1000.0
"""Score of what is never folded: it uses a GPU, or a finding names it."""

CONNECTED = 3.0
"""From here on a process is wired to another one by more than a pipe or a unix socket."""

_WORKLOAD = frozenset(("Process", "Container", "Pod", "Unit"))
_GROUND = frozenset(("GPU", "NPU", "MigInstance", "RdmaDevice", "RdmaPort"))


def score(forest: Forest) -> None:
    """Set ``score`` and ``ground`` of every item; a box is worth at least what it holds."""
    items = forest.items
    ends = {source for source, _, _ in forest.flows} | {target for _, target, _ in forest.flows}
    homes = {end: nearest(items[end], _WORKLOAD) for end in ends}
    worths: dict[tuple[str, str, str], float] = {}
    for source, target, kind in forest.flows:
        first, second = homes[source], homes[target]
        kinds = items[source].kind, items[target].kind
        if kinds[0] in _GROUND or kinds[1] in _GROUND:
            for item in (first, second):
                if item is not None:
                    item.score += ALWAYS
                    item.ground = True
        elif first is not second:
            worth = worths.get((kind, *kinds), 0.0)
            if not worth:
                told = medium_of(kind, "data_stream", *kinds) in ("network", "data") or "SharedMemory" in kinds
                worths[kind, *kinds] = worth = CONNECTED if told else 1.0
            for item in (first, second):
                if item is not None:
                    item.score += worth
    for finding in forest.options.findings:
        for name in finding.entities:
            if name in items:
                items[name].score += ALWAYS
    order = by_level(forest.root)
    for item in order:
        entity = item.entity
        if entity is not None:
            if entity.metrics and (cpu := finite(entity.metrics, "cpu_pct") or 0.0) >= 1.0:
                item.score += min(cpu, 100.0)
            if entity.attributes.get("top_cpu"):
                item.score += CONNECTED
    for item in reversed(order):
        parent = item.parent
        if parent is not None and item.kind in _WORKLOAD:
            if item.score > parent.score:
                parent.score = item.score
            parent.ground = parent.ground or item.ground
