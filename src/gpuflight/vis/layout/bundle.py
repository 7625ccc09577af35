"""Edges lifted to what is shown: socket to socket becomes process to process, and parallel ones become one line."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Protocol

from gpuflight.vis.layout.hardware import HARDWARE_KINDS
from gpuflight.vis.layout.item import Item, common_ancestor
from gpuflight.vis.layout.pack import is_chip
from gpuflight.vis.layout.wires import SHORT, Sort, Wires
from gpuflight.vis.model import Link
from gpuflight.vis.text import finite, human
from gpuflight.vis.visual import QUIET_KINDS

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


CROWDED_KINDS = frozenset(("NumaAccess", "NumaDistance", "Proximity"))
"""Kinds that join nearly all of one kind with all of another: never lines, always in the details."""


class Wired(Protocol):
    """What lines are drawn from: the edges, and the numbers of those that nesting shows."""

    wires: Wires
    used: set[int]


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
        self.things: dict[str, set[Item]] = {}  # kind → the endpoints and segments that the line passes
        self.inner = _between(first, second)  # box around both, its child around each
        self.points: list[tuple[float, float]] = []
        self.weight = 0.0
        self.amount: tuple[str, float] | None = None  # what flows, with its unit; set by weighing

    def pass_by(self, *things: Item) -> None:
        """The line passes these; its words count those that have a word."""
        for thing in things:
            if thing.kind in SHORT:
                self.things.setdefault(thing.kind, set()).add(thing)

    def find_inner(self) -> None:
        """Set ``inner`` anew, after boxes have moved into others; depths must be set."""
        self.inner = _between(self.first, self.second)


class Bundles:
    """All links of the graph and the bundles that draw some of them.

    Where boxes are not ``nested`` nothing is said by place, so every edge is drawn but those between all and all. With
    ``kinds`` only edges of these are lines.
    """

    def __init__(self, forest: Wired, *, nested: bool = True, kinds: frozenset[str] | None = None) -> None:
        self.links = forest.wires.links
        self.bundles: dict[tuple[str, str, str], Bundle] = {}
        self.inside = 0
        self._anchors: dict[Item, Item] = {}
        self._known: dict[tuple[Item, Item, str], tuple[Bundle, bool] | None] = {}
        pipes: dict[Item, tuple[list[tuple[Item, int]], list[tuple[Item, int]]]] = defaultdict(lambda: ([], []))
        used = forest.used
        lines = {
            sort: (_is_line(sort) if nested else sort.kind not in CROWDED_KINDS)
            and (kinds is None or sort.kind in kinds)
            for sort in set(forest.wires.sorts)
        }
        for number, (sort, source, target) in enumerate(forest.wires):
            if not lines[sort] or number in used:
                continue
            if nested and sort.kind == "SendTo" and "Pipe" in (sort.source_kind, sort.target_kind):
                if sort.target_kind == "Pipe":
                    pipes[target][0].append((source, number))
                else:
                    pipes[source][1].append((target, number))
                continue
            bundle = self._add(source, target, sort.medium, number, sort.directed)
            if bundle is not None and sort.passes:
                bundle.pass_by(source, target)
        for pipe, (writers, readers) in pipes.items():
            self._add_pipe(pipe, writers, readers)
        for bundle in self.bundles.values():
            bundle.inner[0].child_links += 1

    def _add_pipe(self, pipe: Item, writers: list[tuple[Item, int]], readers: list[tuple[Item, int]]) -> None:
        """A pipe is a line from each writer to each reader, unless these are very many or one side is not known."""
        if writers and readers and len(writers) * len(readers) <= PIPE_PAIRS_MAX:
            ways = [
                (writer, reader, number)
                for writer, first in writers
                for reader, second in readers
                for number in (first, second)
            ]
        else:
            ways = [(writer, pipe, number) for writer, number in writers]
            ways += [(pipe, reader, number) for reader, number in readers]
        for source, target, number in ways:
            bundle = self._add(source, target, "ipc", number, True)
            if bundle is not None:
                bundle.pass_by(source, target, pipe)

    def _anchor(self, item: Item) -> Item:
        """The box at which lines of an item end."""
        group = item.group
        found = group or item
        if (item.kind in PORTS and group is None) or (
            group is not None and is_chip(group) and group.children[0].kind in PORTS
        ):
            home = found.parent
            while home is not None and home.kind in PORTS:
                home = home.parent
            if home is not None and home.kind in _HOMES and home.entity is not None:
                found = home
        self._anchors[item] = found
        return found

    def _add(self, source: Item, target: Item, medium: str, index: int, directed: bool) -> Bundle | None:
        """The line between the boxes of the ends of edge ``index``, which now tells that edge; None if their places
        do."""
        anchors, known = self._anchors, self._known
        first, second = anchors.get(source) or self._anchor(source), anchors.get(target) or self._anchor(target)
        if first is second:
            self.inside += 1
            return None
        way = first, second, medium
        try:
            found = known[way]
        except KeyError:
            known[way] = found = self._line(first, second, medium)
        if found is None:
            return None
        bundle, swapped = found
        if directed:
            if swapped:
                bundle.backward = True
            else:
                bundle.forward = True
        links = bundle.links
        if not links or links[-1] != index:
            links.append(index)
        return bundle

    def _line(self, first: Item, second: Item, medium: str) -> tuple[Bundle, bool] | None:
        """The line from one box to another and whether it runs the other way; None if their places say it all."""
        if _says_nesting(first, second, medium) or _says_nesting(second, first, medium):
            return None
        swapped = second.id < first.id
        if swapped:
            first, second = second, first
        key = (first.id, second.id, medium)
        bundle = self.bundles.get(key)
        if bundle is None:
            self.bundles[key] = bundle = Bundle(first, second, medium)
        return bundle, swapped

    def weigh(self) -> None:
        """Set the weights: what flows, or how many there are, against the most of the medium; three decades wide."""
        links = self.links
        amounts: dict[tuple[str, bool], list[tuple[Bundle, float]]] = defaultdict(list)
        for bundle in self.bundles.values():
            amount = bundle.amount = _amount([known for index in bundle.links if (known := links[index].metrics)])
            amounts[bundle.medium, amount is None].append((bundle, amount[1] if amount else len(bundle.links)))
        for found in amounts.values():
            most = max(size for _, size in found)
            for bundle, size in found:
                share = size / most if most > 0 else 0.0
                bundle.weight = round(max(0.0, 1 + math.log10(share) / 3), 3) if share > 0 else 0.0


def _is_line(sort: Sort) -> bool:
    """Whether edges between boxes in boxes may be lines. An endpoint stands in the box around all that hold it; where a
    file lies is in its details."""
    if sort.kind in QUIET_KINDS or sort.kind == "Belong":
        return False
    return sort.medium != "deploy" or sort.target_kind not in HARDWARE_KINDS


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
    if not metrics:
        return None
    names = sorted({name for values in metrics for name in values if "queue" not in name})
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
    for kind, short in SHORT.items() if bundle.medium == "ipc" else ():
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
