"""Edges lifted to what is shown: socket to socket becomes process to process, and parallel ones become one line."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Protocol

from gpuflight.graph import Graph
from gpuflight.graph.element import EMPTY
from gpuflight.vis.layout.hardware import HARDWARE_KINDS
from gpuflight.vis.layout.item import Item, common_ancestor
from gpuflight.vis.layout.pack import is_chip
from gpuflight.vis.model import Link
from gpuflight.vis.text import finite, human
from gpuflight.vis.visual import QUIET_KINDS, medium_of

PORTS = frozenset(
    ("Socket", "UnixSocket", "Thread", "Pipe", "PciDevice", "RdmaPort", "RdmaQueuePair", "RdmaProtectionDomain",
     "RdmaMemoryRegion", "Stream", "Kernel")
)  # fmt: skip
"""What a line does not end at but at the box around it, once it stands in one."""

_HOMES = frozenset(
    ("Process", "Container", "Pod", "Unit", "GPU", "NPU", "Nic", "Disk", "RdmaDevice", "Session", "Host")
)
_WORKLOAD = frozenset(("Process", "Container", "Pod", "Unit"))
PIPE_PAIRS_MAX = 16
_SHORT = {"UnixSocket": "unix", "SharedMemory": "shm", "Pipe": "pipe", "MessageQueue": "queue", "Semaphore": "sem"}


CROWDED_KINDS = frozenset(("NumaAccess", "NumaDistance", "Proximity"))
"""Kinds that join nearly all of one kind with all of another: never lines, always in the details."""


class Wired(Protocol):
    """What lines are drawn from: items by id in their tree, the graph, and the deploy edges that nesting shows."""

    graph: Graph
    items: dict[str, Item]
    used: set[tuple[str, str, str]]


class Bundle:
    """One line to be drawn, and the links it stands for."""

    __slots__ = (
        "amount",
        "backward",
        "first",
        "forward",
        "inner",
        "links",
        "medium",
        "points",
        "second",
        "things",
        "weight",
    )

    def __init__(self, first: Item, second: Item, medium: str) -> None:
        self.first = first
        self.second = second
        self.medium = medium
        self.forward = self.backward = False
        self.links: list[int] = []
        self.things: dict[str, set[str]] = {}  # kind → ids of the endpoints and segments that the line passes
        self.inner = _between(first, second)  # box around both, its child around each
        self.points: list[tuple[float, float]] = []
        self.weight = 0.0
        self.amount: tuple[str, float] | None = None  # what flows, with its unit; set by weighing

    def find_inner(self) -> None:
        """Set ``inner`` anew, after boxes have moved into others; depths must be set."""
        self.inner = _between(self.first, self.second)


class Bundles:
    """All links of the graph and the bundles that draw some of them.

    Where boxes are not ``nested`` nothing is said by place, so every edge is drawn but those between all and all. With
    ``kinds`` only edges of these are lines.
    """

    def __init__(self, forest: Wired, *, nested: bool = True, kinds: frozenset[str] | None = None) -> None:
        self.forest = forest
        self.links: list[Link] = []
        self.bundles: dict[tuple[str, str, str], Bundle] = {}
        self.inside = 0
        self._anchors: dict[str, Item] = {}
        pipes: dict[str, tuple[list[tuple[str, int]], list[tuple[str, int]]]] = defaultdict(lambda: ([], []))
        items, used = forest.items, forest.used
        told: dict[tuple[str, str, str], tuple[str, str, bool, bool]] = {}  # what the kinds of an edge and its ends say
        add_link = self.links.append
        for index, (key, edge) in enumerate(forest.graph.edges.items()):
            source, target, kind = key
            ends = kind, items[source].kind, items[target].kind
            known = told.get(ends)
            if known is None:
                medium = medium_of(kind, edge.category, *ends[1:])
                shown = _is_line(*ends, medium) if nested else kind not in CROWDED_KINDS
                shown = shown and (kinds is None or kind in kinds)
                told[ends] = known = medium, edge.category, edge.directed, shown
            medium, category, directed, shown = known
            add_link(
                Link(
                    source=source,
                    target=target,
                    kind=kind,
                    category=category,
                    medium=medium,
                    directed=directed,
                    attributes=edge.attributes or EMPTY,
                    metrics=edge.metrics or EMPTY,
                    unknown=edge.unknown or EMPTY,
                )
            )
            if not shown or key in used:
                continue
            if nested and kind == "SendTo" and "Pipe" in ends:
                if ends[2] == "Pipe":
                    pipes[target][0].append((source, index))
                else:
                    pipes[source][1].append((target, index))
                continue
            self._add(source, target, medium, index, directed)
        for pipe, (writers, readers) in pipes.items():
            self._add_pipe(pipe, writers, readers)
        for bundle in self.bundles.values():
            bundle.inner[0].child_links += 1

    def _add_pipe(self, pipe: str, writers: list[tuple[str, int]], readers: list[tuple[str, int]]) -> None:
        """A pipe is a line from each writer to each reader, unless these are very many or one side is not known."""
        if writers and readers and len(writers) * len(readers) <= PIPE_PAIRS_MAX:
            for writer, first in writers:
                for reader, second in readers:
                    self._add(writer, reader, "ipc", first, True, passing=pipe)
                    self._add(writer, reader, "ipc", second, True, passing=pipe)
            return
        for writer, index in writers:
            self._add(writer, pipe, "ipc", index, True)
        for reader, index in readers:
            self._add(pipe, reader, "ipc", index, True)

    def anchor(self, node_id: str) -> Item:
        """The box at which lines of an entity end."""
        item = self.forest.items[node_id]
        group: Item | None = None
        above = item.parent
        while above is not None:
            if above.folds:
                group = above
            above = above.parent
        found = group or item
        if (item.kind in PORTS and group is None) or (
            group is not None and is_chip(group) and group.children[0].kind in PORTS
        ):
            home = found.parent
            while home is not None and home.kind in PORTS:
                home = home.parent
            if home is not None and home.kind in _HOMES and home.entity is not None:
                found = home
        self._anchors[node_id] = found
        return found

    def _add(self, source: str, target: str, medium: str, index: int, directed: bool, passing: str = "") -> None:
        anchors = self._anchors
        first, second = anchors.get(source) or self.anchor(source), anchors.get(target) or self.anchor(target)
        if first is second:
            self.inside += 1
            return
        if _says_nesting(first, second, medium) or _says_nesting(second, first, medium):
            return
        swapped = second.id < first.id
        if swapped:
            first, second = second, first
        key = (first.id, second.id, medium)
        bundle = self.bundles.get(key)
        if bundle is None:
            self.bundles[key] = bundle = Bundle(first, second, medium)
        if directed:
            if swapped:
                bundle.backward = True
            else:
                bundle.forward = True
        if not bundle.links or bundle.links[-1] != index:
            bundle.links.append(index)
        items = self.forest.items
        for thing in (source, target, passing):
            if thing:
                kind = items[thing].kind
                if kind in _SHORT:
                    bundle.things.setdefault(kind, set()).add(thing)

    def weigh(self) -> None:
        """Set the weights: what flows, or how many there are, against the most of the medium; three decades wide."""
        amounts: dict[tuple[str, bool], list[tuple[Bundle, float]]] = defaultdict(list)
        for bundle in self.bundles.values():
            amount = bundle.amount = _amount([self.links[index].metrics for index in bundle.links])
            amounts[bundle.medium, amount is None].append((bundle, amount[1] if amount else len(bundle.links)))
        for found in amounts.values():
            most = max(size for _, size in found)
            for bundle, size in found:
                share = size / most if most > 0 else 0.0
                bundle.weight = round(max(0.0, 1 + math.log10(share) / 3), 3) if share > 0 else 0.0


def _is_line(kind: str, source_kind: str, target_kind: str, medium: str) -> bool:
    """Whether an edge between boxes in boxes may be a line. An endpoint stands in the box around all that hold it;
    where a file lies is in its details."""
    return kind not in QUIET_KINDS and kind != "Belong" and (medium != "deploy" or target_kind not in HARDWARE_KINDS)


def _between(first: Item, second: Item) -> tuple[Item, Item, Item]:
    """The smallest box around two items and its child around each (or the item itself, where it is that box)."""
    box = common_ancestor(first, second)
    return box, _child_around(box, first), _child_around(box, second)


def _child_around(box: Item, item: Item) -> Item:
    while item is not box and item.parent is not None and item.parent is not box:
        item = item.parent
    return item


def _says_nesting(outer: Item, inner: Item, medium: str) -> bool:
    """Whether the place of ``inner`` in ``outer`` says already that they are joined; work in work still talks."""
    if inner.depth <= outer.depth or (medium != "fabric" and inner.kind in _WORKLOAD):
        return False
    if medium != "fabric" and inner.role == "group" and inner.children[0].kind in _WORKLOAD:
        return False
    above = inner.parent
    while above is not None and above is not outer:
        above = above.parent
    return above is outer


def _amount(metrics: list[dict[str, Any]]) -> tuple[str, float] | None:
    """What flows on some links together, with the unit it is counted in: rates (both ways) if any link knows one, else
    what a link should carry, else volumes sent and received, else how much memory is used or mapped."""
    names = sorted({name for values in metrics for name in values if "queue" not in name})
    if not names:
        return None
    rates = [name for name in names if name.endswith("per_s") and "bytes" in name and not name.startswith("expected")]
    volumes = [name for name in names if name in ("bytes_sent_count", "bytes_received_count")]
    sizes = [name for name in names if name.endswith("_bytes")]
    for chosen, unit in (
        (rates, "bytes_per_s"),
        (["expected_bytes_per_s"], "bytes_per_s"),
        (volumes, "total_bytes"),
        (sizes[:1], "total_bytes"),
    ):
        found = [value for values in metrics for name in chosen if (value := finite(values, name)) is not None]
        if found:
            return unit, sum(found)
    return None


def route_label(bundle: Bundle, links: list[Link]) -> str:
    """The words at a line: what and how many, then how much."""
    words: list[str] = []
    for kind, short in _SHORT.items() if bundle.medium == "ipc" else ():
        if things := bundle.things.get(kind):
            count = (len(things) + 1) // 2 if kind == "UnixSocket" else len(things)  # a pair is one connection
            words.append(short if count == 1 else f"{short} ×{count}")
    if bundle.medium == "network":
        connections = [links[index].kind for index in bundle.links].count("ConnectTo") or len(bundle.links)
        words.append(f"{connections} conn." if connections > 1 else "")
    elif bundle.medium == "fabric":
        count_links = sum(finite(links[index].metrics, "links_count") or 0 for index in bundle.links)
        words.append(
            f"NVLink ×{count_links:.0f}" if count_links else f"×{len(bundle.links)}" if len(bundle.links) > 1 else ""
        )
    elif not words and len(bundle.links) > 1:
        words.append(f"×{len(bundle.links)}")
    amount = bundle.amount
    if amount and amount[1] > 0:
        words.append(human(*amount))
    elif bundle.medium == "network" and len(bundle.links) == 1:
        rtt = finite(links[bundle.links[0]].metrics, "rtt_ms")
        if rtt is not None:
            words.append(f"rtt {human('rtt_ms', rtt)}")
    return " · ".join(filter(None, words))
