"""The default layout: nested boxes standing on the hardware they use."""

from __future__ import annotations

import gc
from collections import defaultdict

from gpuflight.graph import Graph
from gpuflight.graph.joins import connected_once
from gpuflight.vis.base import Layout, LayoutOptions
from gpuflight.vis.layout.bundle import Bundles
from gpuflight.vis.layout.cards import tell_apart
from gpuflight.vis.layout.fold import fold
from gpuflight.vis.layout.item import Item
from gpuflight.vis.layout.order import order
from gpuflight.vis.layout.pack import pack
from gpuflight.vis.layout.picture import MARGIN, finish
from gpuflight.vis.layout.place import place
from gpuflight.vis.layout.route import route
from gpuflight.vis.layout.score import score
from gpuflight.vis.layout.tree import Forest
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.text import plural


class DefaultLayout(Layout):
    """Nested boxes: host, container, process, endpoints, on the GPUs and NUMA nodes they use."""

    name = "default"
    stability = "beta"

    def layout(self, graph: Graph, options: LayoutOptions) -> LayoutGraph:
        """See Layout.layout. O(nodes + edges · depth)."""
        collecting = gc.isenabled()
        gc.disable()  # all that is made lives until the picture is: a sixth of the time would go into looking at it
        try:
            return self._laid_out(graph, options)
        finally:
            if collecting:
                gc.enable()

    def _laid_out(self, graph: Graph, options: LayoutOptions) -> LayoutGraph:
        forest = folded(graph, options)
        bundles = Bundles(forest)
        drawn = list(bundles.bundles.values())
        order(forest.boxes, drawn)
        pack(forest.boxes)
        place(forest.boxes, MARGIN)
        route(drawn)
        bundles.weigh()
        return finish(self.name, forest, bundles, drawn)


def folded(graph: Graph, options: LayoutOptions) -> Forest:
    """The items of ``graph`` with their words, nested, and folded by rule; nothing has a place yet."""
    whole, graph = graph, connected_once(graph)
    forest = Forest(graph, options)
    if left_out := len(whole.nodes) - len(graph.nodes):
        forest.notes.append(
            f"{plural(left_out, 'stand-in')} for ends on other hosts left out: those connections are drawn once,"
            " between their real ends"
        )
    forest.build()
    score(forest)
    fold(forest)
    siblings: dict[Item, list[Item]] = defaultdict(list)
    for item in forest.items.values():
        if item.kind == "Process" and (box := item.parent) is not None and not box.folds:
            siblings[box].append(item)
    for processes in siblings.values():
        tell_apart(processes)
    return forest
