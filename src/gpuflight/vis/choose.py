"""What part of a graph goes into a picture: around some entities, some kinds, above a value. Nothing goes silently."""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import Struct, field

from gpuflight.errors import InputError
from gpuflight.graph import Graph
from gpuflight.graph.adjacency import adjacency
from gpuflight.graph.codec import node_kinds
from gpuflight.graph.element import Edge, Entity
from gpuflight.graph.queries import find_one
from gpuflight.vis.text import plural

ENDPOINTS = frozenset(
    ("Socket", "UnixSocket", "Pipe", "SharedMemory", "MessageQueue", "Semaphore", "Thread", "RdmaPort",
     "RdmaQueuePair", "RdmaQueuePairEndpoint", "RdmaProtectionDomain", "RdmaMemoryRegion", "Stream")
)  # fmt: skip
"""What a line of a picture passes through: a step onto one of these is not counted."""

HUBS = frozenset(("Host", "Container", "Pod", "Unit", "Numa", "NumaSet", "CpuPackage", "NvSwitch", "Mount"))
"""What nearly everything touches: shown when reached, but the way does not go on through it."""

_TEST = re.compile(r"\s*([A-Za-z0-9_.]+)\s*(>=|<=|>|<|=)\s*(\S+)\s*")
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "=": operator.eq,
}  # fmt: skip


class Choice(Struct, frozen=True):
    """Which entities a picture shows; without any of these, all. Several conditions must all hold.

    ``focus``: ids, or what ``graph.find`` understands (``pid:42``, ``gpu:0``), with all at most ``depth`` lines from
    any of them: endpoints, such as sockets, are not counted. ``kinds``: names of kinds, in any case. ``metrics``: tests
    such as ``cpu_pct>50``, of entities and edges; several are alternatives.
    """

    focus: Sequence[str] = ()
    depth: int = 1
    kinds: Sequence[str] = ()
    metrics: Sequence[str] = field(default_factory=tuple)

    def __bool__(self) -> bool:
        return bool(self.focus or self.kinds or self.metrics)


def choose(graph: Graph, choice: Choice) -> tuple[Graph, list[str]]:
    """The part of a graph that is chosen, with what it stands in, and notes that say what was left out.

    Raises InputError for an entity, kind or test that cannot be used, and for a choice that leaves nothing.
    O(nodes + edges).
    """
    if not choice:
        return graph, []
    kept: set[str] = set(graph.nodes)
    words = []
    if choice.focus:
        if not 0 <= choice.depth <= 64:
            raise InputError(f"a depth of {choice.depth} is not possible: it counts lines, from 0 to 64")
        starts = [find_one(graph, text).id for text in choice.focus]
        kept &= around(graph, starts, choice.depth)
        words.append(f"at most {plural(choice.depth, 'line')} from {', '.join(graph.nodes[at].label for at in starts)}")
    if choice.metrics:
        kept &= _above(graph, [_parsed(test) for test in choice.metrics])
        words.append(" or ".join(choice.metrics))
    if choice.kinds:
        names = _kinds(choice.kinds)
        kept = {node_id for node_id in kept if graph.nodes[node_id].kind in names}
        words.append(f"of the kinds {', '.join(sorted(names))}")
    if not kept:
        raise InputError(f"nothing in this graph is {' and '.join(words)}")
    # Without its host or container a chosen entity would stand nowhere.
    shown = kept | _holders(graph, kept)
    part = Graph.of(
        {node_id: entity for node_id, entity in graph.nodes.items() if node_id in shown},
        {key: edge for key, edge in graph.edges.items() if key[0] in shown and key[1] in shown},
    )
    note = f"Only what is {' and '.join(words)}: {len(part.nodes)} of {plural(len(graph.nodes), 'entity')}"
    if context := len(shown) - len(kept):
        note += f", {context} of them for what the others stand in"
    return part, [f"{note}, and {len(part.edges)} of {plural(len(graph.edges), 'edge')}"]


def around(graph: Graph, starts: Iterable[str], depth: int) -> set[str]:
    """Ids of all at most ``depth`` lines away; a step onto an endpoint is free, and hubs are not passed."""
    near = adjacency(graph)
    first = [near.index[node_id] for node_id in starts if node_id in near.index]
    cost = dict.fromkeys(first, 0)
    queue = deque(first)
    while queue:
        node = queue.popleft()
        kind = graph.nodes[near.ids[node]].kind
        # What the last entities of the picture are wired to by endpoints of their own leads out of it.
        if cost[node] and (kind in HUBS or (cost[node] == depth and kind not in ENDPOINTS)):
            continue
        for other, _, _ in near.around(node):
            endpoint = graph.nodes[near.ids[other]].kind in ENDPOINTS
            total = cost[node] + (0 if endpoint else 1)
            if total < cost.get(other, depth + 1):
                cost[other] = total
                if endpoint:
                    queue.appendleft(other)
                else:
                    queue.append(other)
    return {near.ids[node] for node in cost}


def _holders(graph: Graph, kept: Collection[str]) -> set[str]:
    """Hosts, containers, pods and units around what is kept, to the outermost."""
    above: dict[str, list[str]] = {}
    for source, target, kind in graph.edges:
        if kind == "Host":
            above.setdefault(target, []).append(source)
    found: set[str] = set()
    stack = list(kept)
    while stack:
        for holder in above.get(stack.pop(), ()):
            if holder not in found and holder not in kept and holder in graph.nodes:
                found.add(holder)
                stack.append(holder)
    return found


class _Test(Struct):
    name: str
    sign: str
    bound: float

    def holds(self, element: Entity | Edge) -> bool:
        value = element.metrics.get(self.name)
        return isinstance(value, (int, float)) and _COMPARISONS[self.sign](value, self.bound)


def _parsed(text: str) -> _Test:
    parsed = _TEST.fullmatch(text)
    try:
        if parsed is not None:
            return _Test(parsed[1], parsed[2], float(parsed[3]))
    except ValueError:
        pass
    raise InputError(f"{text!r} is no test of a metric: give NAME>VALUE, such as cpu_pct>50 (also >= < <= =)")


def _above(graph: Graph, tests: list[_Test]) -> set[str]:
    found = {node_id for node_id, entity in graph.nodes.items() if any(test.holds(entity) for test in tests)}
    for edge in graph.edges.values():
        if any(test.holds(edge) for test in tests):
            found.update((edge.source, edge.target))
    if not found:
        names = {name for entity in graph.nodes.values() for name in entity.metrics}
        known = sorted(names.union(name for edge in graph.edges.values() for name in edge.metrics))
        for test in tests:
            if test.name not in known:
                raise InputError(f"nothing in this graph has the metric {test.name!r}; it has {_some(known)}")
    return found & set(graph.nodes)


def _some(names: list[str]) -> str:
    return (", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")) or "none"


def _kinds(texts: Sequence[str]) -> set[str]:
    known = {kind.lower(): kind for kind in node_kinds()}
    found = set()
    for text in texts:
        for name in text.split(","):
            if not name.strip():
                continue
            if name.strip().lower() not in known:
                raise InputError(f"there is no kind {name.strip()!r}; there are {', '.join(sorted(known.values()))}")
            found.add(known[name.strip().lower()])
    return found
