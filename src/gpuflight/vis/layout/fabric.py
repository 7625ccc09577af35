"""The layout ``fabric``: the hardware alone, as it is wired. Sockets hold NUMA nodes, these the PCIe switches and what
hangs on them; NVSwitches are a rail under the GPUs. All else is folded into one box, with its count."""

from __future__ import annotations

from gpuflight.graph import Graph
from gpuflight.vis.base import Layout, LayoutOptions
from gpuflight.vis.layout.bundle import Bundles
from gpuflight.vis.layout.default import folded
from gpuflight.vis.layout.hardware import HARDWARE_KINDS
from gpuflight.vis.layout.item import Item, set_depths, walk
from gpuflight.vis.layout.order import order
from gpuflight.vis.layout.pack import pack
from gpuflight.vis.layout.picture import MARGIN, finish
from gpuflight.vis.layout.place import place
from gpuflight.vis.layout.route import route
from gpuflight.vis.layout.tree import Forest
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.text import plural

_FOLDS_END = "; each says how many, and why"
_WORK_RULE = "the picture of the hardware leaves work, memory and connections aside"


class FabricLayout(Layout):
    """The hardware alone: sockets, NUMA nodes, PCIe switches, GPUs, network devices, NVLink."""

    name = "fabric"
    stability = "beta"

    def layout(self, graph: Graph, options: LayoutOptions) -> LayoutGraph:
        """See Layout.layout."""
        forest = folded(graph, options)
        _fold_work(forest)
        _nest_sockets(forest)
        _say_folds(forest)
        boxes = set_depths(forest.root)
        bundles = Bundles(forest, kinds=_FABRIC)
        drawn = list(bundles.bundles.values())
        order(boxes, drawn)
        pack(boxes)
        place(boxes, MARGIN)
        route(drawn)
        bundles.weigh()
        return finish(self.name, forest, bundles, drawn)


_FABRIC = frozenset(("PcieLink", "NvLink", "HccsBandwidth", "PaBandwidth"))


def _fold_work(forest: Forest) -> None:
    """All that is no hardware: out of its boxes, flat, into one group for each host."""
    hosts: list[Item] = []
    for item in walk(forest.root):
        if item.kind == "Host" and not item.folds and not _in_group(item):
            hosts.append(item)
    for box in (*hosts, forest.root):
        work: list[Item] = []
        kept: list[Item] = []
        for child in box.children:
            if (child in hosts and box is forest.root) or child.kind == "Hardware" or _is_hardware(child):
                kept.append(child)
            else:
                work.append(child)
        if not work:
            continue
        flat = [item for child in work for item in walk(child) if item.entity is not None or item.missing]
        for item in flat:
            item.children = []
            item.role = "chip" if item.role == "chip" else "card"
            item.folds = False
        group = Item(
            forest.fresh_id(f"work:{box.id}"), "Group", label=f"{plural(len(flat), 'entity')} that are no hardware"
        )
        if len(flat) == 1:
            group.label = "1 entity that is no hardware"
        group.rule = _WORK_RULE
        group.count = 0
        group.folds = True
        group.role = "group"
        group.ns = box.ns
        box.children = []
        for item in kept:
            box.adopt(item)
        for item in flat:
            group.adopt(item)
        box.adopt(group)


def _say_folds(forest: Forest) -> None:
    """How much is folded, now that work is in one box and not in groups of its own."""
    groups = [item for item in walk(forest.root) if item.folds]
    inside = sum(1 for group in groups for item in walk(group) if item.entity is not None)
    forest.notes = [note for note in forest.notes if not note.endswith(_FOLDS_END)]
    if groups:
        forest.notes.append(f"{plural(inside, 'entity')} folded into {plural(len(groups), 'group')}{_FOLDS_END}")


def _in_group(item: Item) -> bool:
    above = item.parent
    while above is not None:
        if above.folds:
            return True
        above = above.parent
    return False


def _is_hardware(item: Item) -> bool:
    if item.folds:
        return all(map(_is_hardware, item.children))
    return item.kind in HARDWARE_KINDS and (item.entity is not None or item.missing)


def _nest_sockets(forest: Forest) -> None:
    """A CPU package that stands in a NUMA node becomes the box around all nodes it has CPUs in."""
    nodes_of: dict[str, list[Item]] = {}
    for source, target, kind in forest.graph.edges:
        if kind != "Affinity":
            continue
        package, node = forest.items[source], forest.items[target]
        if (
            package.kind == "CpuPackage"
            and node.kind == "Numa"
            and package.entity is not None
            and node.entity is not None
        ):
            nodes_of.setdefault(source, []).append(node)
    for package_id, nodes in nodes_of.items():
        package = forest.items[package_id]
        frame, home = nodes[0].parent, package.parent
        if frame is None or home is None or home not in nodes or frame.folds or frame.kind != "Hardware":
            continue
        if any(node.parent is not frame for node in nodes) or package.children:
            continue  # the node is another package's already
        home.children.remove(package)
        at = frame.children.index(nodes[0])
        frame.children = [child for child in frame.children if child not in nodes]
        frame.children.insert(min(at, len(frame.children)), package)
        package.parent = frame
        package.role = "frame"
        for node in nodes:
            package.adopt(node)
