"""The deploy edges of a graph as a forest: who is drawn inside whom. Shared by the text and the pictures.

Deploy edges do not form a tree: a process has a parent process and a container, a socket may have several holders, and
old graphs hold cycles. Here every node gets at most one parent, chosen by rule and not by order, every cycle is cut,
and no node is lost.
"""

from __future__ import annotations

import re
from collections import Counter

from gpuflight.graph.edges import Belong, Host, Own, RunOn
from gpuflight.graph.element import Entity
from gpuflight.graph.graph import Graph
from gpuflight.graph.nodes import Process, Thread

_NARROWEST_FIRST = ("Container", "Pod", "Unit", "Host")


class Tree:
    """``roots`` and ``children`` in a stable order; ``parent`` of all but the roots; ``other_parents`` not drawn."""

    def __init__(self, graph: Graph, refs: dict[str, str] | None = None) -> None:
        refs = references(graph) if refs is None else refs
        candidates = _candidates(graph)
        self.parent: dict[str, str] = {}
        self.other_parents: dict[str, list[str]] = {}
        for node in graph.nodes:
            above = candidates.get(node)
            if not above:
                continue
            best = _best(node, above, candidates, graph)
            self.parent[node] = best
            others = sorted({parent for kind, parent in above if kind in (BELONG, RUN_ON)} - {best})
            if others:
                self.other_parents[node] = others
        self._cut_cycles(graph)
        order = sorted(graph.nodes, key=lambda node: (graph.nodes[node].kind, natural_key(refs[node]), node))
        self.children: dict[str, list[str]] = {}
        self.roots: list[str] = []
        for node in order:
            parent = self.parent.get(node)
            if parent is None:
                self.roots.append(node)
            else:
                self.children.setdefault(parent, []).append(node)

    def _cut_cycles(self, graph: Graph) -> None:
        """Make a root of the least node (by id) of every cycle of parents."""
        done: set[str] = set()
        for start in graph.nodes:
            trail: dict[str, None] = {}
            node: str | None = start
            while node is not None and node not in done and node not in trail:
                trail[node] = None
                node = self.parent.get(node)
            if node is not None and node in trail:
                ring = list(trail)[list(trail).index(node) :]
                del self.parent[min(ring)]
            done.update(trail)


OWN, HOST, BELONG, RUN_ON = (str(kind.__struct_config__.tag) for kind in (Own, Host, Belong, RunOn))


def _candidates(graph: Graph) -> dict[str, list[tuple[str, str]]]:
    """Every possible parent of every node, as (kind of edge, parent)."""
    found: dict[str, list[tuple[str, str]]] = {}
    for (source, target, kind), edge in graph.edges.items():
        if edge.category != "deploy" or source == target or source not in graph.nodes or target not in graph.nodes:
            continue
        child, parent = (source, target) if kind in (BELONG, RUN_ON) else (target, source)
        found.setdefault(child, []).append((kind, parent))
    return found


def _best(node: str, above: list[tuple[str, str]], candidates: dict[str, list[tuple[str, str]]], graph: Graph) -> str:
    """The parent process if it is in the same containers, else the narrowest container, else who owns or holds it."""
    owners = sorted(parent for kind, parent in above if kind == OWN)
    hosts = {parent for kind, parent in above if kind == HOST or (kind == RUN_ON and _is_box(parent, graph))}
    if owners:
        owner = owners[0]
        around_owner = {
            parent
            for kind, parent in candidates.get(owner, ())
            if kind == HOST or (kind == RUN_ON and _is_box(parent, graph))
        }
        if type(graph.nodes[node]) is Thread or hosts <= around_owner:
            return owner
        hosts -= around_owner
    if hosts:
        return min(hosts, key=lambda parent: (_narrowness(graph.nodes[parent]), parent))
    held = sorted(parent for kind, parent in above if kind in (BELONG, RUN_ON))
    return owners[0] if owners else held[0] if held else min(parent for _, parent in above)


def _is_box(node: str, graph: Graph) -> bool:
    return graph.nodes[node].kind in _NARROWEST_FIRST


def _narrowness(entity: Entity) -> int:
    return _NARROWEST_FIRST.index(entity.kind) if entity.kind in _NARROWEST_FIRST else len(_NARROWEST_FIRST)


def references(graph: Graph) -> dict[str, str]:
    """A short name for every node, unique in the graph: ``Process 4242 python``, ``GPU 0``, ``tcp 10.0.0.5:80``; the id
    where a short one would fit two."""
    short = {node_id: _reference(entity) for node_id, entity in graph.nodes.items()}
    counts = Counter(short.values())
    return {node_id: ref if counts[ref] == 1 else node_id for node_id, ref in short.items()}


def _reference(entity: Entity) -> str:
    name = entity.attributes.get("name")
    where = f"{entity.ns}/" if entity.ns else ""
    if isinstance(entity, Process):
        return f"Process {where}{entity.pid}" + (f" {name}" if name else "")
    if isinstance(entity, Thread):
        return f"Thread {where}{entity.tid}"
    index = entity.attributes.get("index")
    if entity.kind == "GPU" and index is not None:
        return f"GPU {where}{index}"
    identity = re.sub(r"^(uuid|ino)=", "", entity._identity())
    return f"{entity.kind} {where}{identity}"


_DIGITS = re.compile("([0-9]{1,18})")


def natural_key(text: str) -> list[str | int]:
    """Sort key in which ``eth2`` comes before ``eth10``: text and numbers in turns, so that keys always compare."""
    parts: list[str | int] = list(_DIGITS.split(text))
    parts[1::2] = map(int, parts[1::2])
    return parts
