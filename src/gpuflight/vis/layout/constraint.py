"""The layout ``constraint``: layers from top to bottom, so that what is held stands under its holder and data flows
downwards, in an order in which lines cross little."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from gpuflight.graph import Graph
from gpuflight.vis.base import Layout, LayoutOptions
from gpuflight.vis.layout.bundle import Bundle, Bundles
from gpuflight.vis.layout.circles import circles
from gpuflight.vis.layout.default import folded
from gpuflight.vis.layout.item import Item, set_depths
from gpuflight.vis.layout.layers import Layers, place_layers
from gpuflight.vis.layout.pack import is_chip, pack_inside
from gpuflight.vis.layout.picture import MARGIN, finish
from gpuflight.vis.layout.place import place
from gpuflight.vis.layout.route import route
from gpuflight.vis.layout.tree import Forest
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.text import plural

ORDERING_LINES_MAX = 700  # the library needs 0.3 s for these, 6 s for three times as many
_LAST = ("Disk", "Mount", "GPU", "NPU", "NvSwitch")  # of two that are joined without a direction, the lower one


class ConstraintLayout(Layout):
    """Layers: holders above what they hold, data flowing downwards, lines that cross little (Sugiyama)."""

    name = "constraint"
    stability = "beta"

    def layout(self, graph: Graph, options: LayoutOptions) -> LayoutGraph:
        """See Layout.layout. Raises MissingExtra without the package fast-sugiyama."""
        Layers.require()
        forest = folded(graph, options)
        boxes = _Boxes(forest)
        bundles = Bundles(forest)
        _add_placement(boxes, bundles)
        drawn = list(bundles.bundles.values())
        layers = _layers(boxes, drawn)
        root = forest.root
        holders = set_depths(root)
        for bundle in drawn:
            bundle.find_inner()
        for item in root.children:
            pack_inside(item)
        place_layers(root, layers)
        place(holders, MARGIN)
        route(drawn)
        bundles.weigh()
        return finish(self.name, forest, bundles, drawn)


class _Boxes:
    """The folded forest taken apart: every box beside the one that held it. Small endpoints stay in their box."""

    def __init__(self, forest: Forest) -> None:
        self.forest = forest
        self.above: dict[Item, Item] = {}
        self.all: list[Item] = []
        self.of: dict[str, Item] = {}  # entity → the box that stands for it or holds it
        self._take_apart(forest.root)
        forest.root.children = []
        for item in self.all:
            forest.root.adopt(item)
        set_depths(forest.root)
        forest.used = self._said()

    def _take_apart(self, root: Item) -> None:
        pending: list[tuple[Item, Item | None]] = [(child, None) for child in reversed(root.children)]
        while pending:
            item, above = pending.pop()
            if item.kind == "Hardware" and item.entity is None and not item.folds:
                pending.extend((child, None) for child in reversed(item.children))  # above it is the work that uses it
                continue
            self.all.append(item)
            if above is not None:
                self.above[item] = above
            if item.folds or item.kind == "Elsewhere":
                self._hold(item, item)
                continue
            staying = [child for child in item.children if is_chip(child)]
            pending.extend((child, item) for child in reversed(item.children) if not is_chip(child))
            item.children = staying
            self._hold(item, item)

    def _hold(self, inner: Item, box: Item) -> None:
        pending = [inner]
        while pending:
            item = pending.pop()
            self.of[item.id] = box
            pending.extend(item.children)

    def _said(self) -> set[int]:
        """Deploy edges that need no line: within a box, or to one further up than the next holder."""
        said = set()
        for number, (sort, source, target) in enumerate(self.forest.wires):
            if sort.category != "deploy":
                continue
            inner, outer = (source, target) if sort.kind in ("Belong", "RunOn") else (target, source)
            box, holder = self.of[inner.id], self.of[outer.id]
            above = self.above.get(box)
            if box is holder:
                said.add(number)
            elif above is not holder:
                while above is not None and above is not holder:
                    above = self.above.get(above)
                if above is not None:
                    said.add(number)
        return said


def _add_placement(boxes: _Boxes, bundles: Bundles) -> None:
    """A device and the NUMA node or switch that held it: their placement edge as a line, since nesting no longer says
    it."""
    joined = {(bundle.first, bundle.second) for bundle in bundles.bundles.values()}
    wanted: dict[tuple[Item, Item], list[int]] = defaultdict(list)
    by_set: dict[Item, list[int]] = defaultdict(list)
    for index, link in enumerate(bundles.links):
        if link.medium in ("placement", "fabric", "deploy"):
            one, two = boxes.of[link.source], boxes.of[link.target]
            if boxes.above.get(one) is two:
                wanted[two, one].append(index)
            elif boxes.above.get(two) is one:
                wanted[one, two].append(index)
        if link.kind == "Affinity" and boxes.of[link.source] is boxes.forest.items[link.source]:
            by_set[boxes.of[link.source]].append(index)
    for item, links in by_set.items():  # to a set of one node, which stands for that node
        above = boxes.above.get(item)
        if above is not None and above.kind == "Numa" and (above, item) not in wanted:
            wanted[above, item] = links
    for (above, item), links in wanted.items():
        if (above, item) in joined or (item, above) in joined:
            continue
        first, second = (item, above) if (item.id < above.id) else (above, item)
        bundle = Bundle(first, second, "deploy")
        bundle.forward, bundle.backward = second is item, first is item
        bundle.links = links
        bundles.bundles[first.id, second.id, "deploy"] = bundle


def _layers(boxes: _Boxes, drawn: Iterable[Bundle]) -> Layers:
    """What must stand above what. Boxes that send data round in a circle become one box of the layers."""
    forest = boxes.forest
    number = {item: at for at, item in enumerate(boxes.all)}
    flows: dict[tuple[int, int], int] = {}
    loose: list[tuple[int, int]] = []
    for bundle in drawn:
        if bundle.medium == "deploy":
            continue
        one, two = number[boxes.of[bundle.first.id]], number[boxes.of[bundle.second.id]]
        if one == two:
            continue
        if bundle.forward:
            flows[one, two] = flows.get((one, two), 0) + len(bundle.links)
        if bundle.backward:
            flows[two, one] = flows.get((two, one), 0) + len(bundle.links)
        if not bundle.forward and not bundle.backward:
            loose.append((two, one) if _rank(boxes.all[one]) > _rank(boxes.all[two]) else (one, two))
    heads = _condense(boxes, circles(len(boxes.all), flows))
    order = sorted(flows, key=lambda pair: (-flows[pair], pair))
    held = [(number[above], number[item]) for item, above in boxes.above.items()]
    layers = Layers(forest.root.children)
    left = 0
    for one, two in (*held, *order, *loose):
        left += not layers.add(heads[one], heads[two], ORDERING_LINES_MAX)
    if left:
        forest.notes.append(f"{plural(left, 'line')} more than the order of the boxes could heed")
    return layers


def _rank(item: Item) -> int:
    kind = item.children[0].kind if item.folds else item.kind
    return _LAST.index(kind) if kind in _LAST else -1


def _condense(boxes: _Boxes, found: list[list[int]]) -> list[Item]:
    """For each box the one that stands for it in the layers: itself, or the frame around its circle."""
    forest, root = boxes.forest, boxes.forest.root
    heads = list(boxes.all)
    for members in found:
        items = [boxes.all[at] for at in sorted(members)]
        frame = Item(forest.fresh_id(f"circle:{items[0].id}"), "Group", ns=items[0].ns)
        frame.label = f"{len(items)} in a circle of data"
        frame.role = "frame"
        frame.count = 0
        frame.ground = any(item.ground for item in items)
        inside = set(items)
        root.children = [item for item in root.children if item not in inside]
        for item in items:
            frame.adopt(item)
        root.adopt(frame)
        for at in members:
            heads[at] = frame
    return heads
