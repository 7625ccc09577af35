"""Who is next to whom, as index arrays built on demand.

No node of a graph holds a container of its own (docs/architecture.md: the garbage collector is the hidden cost of
Python graphs), so a query first numbers the nodes and sorts the edges by their ends, once per graph, in
O(nodes + edges).
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterator

from gpuflight.graph.element import Edge
from gpuflight.graph.graph import Graph


class Adjacency:
    """The incidences of a graph's edges in compressed rows. Edges with an end that is not a node are left out.

    Node *n* has the incidences ``offsets[n]`` to ``offsets[n + 1]``; incidence *i* is edge ``edges[links[i] >> 1]``,
    seen from its source if ``links[i] & 1`` is 0 and from its target if it is 1, and leads to node ``others[i]``.
    """

    __slots__ = ("edges", "ids", "index", "links", "offsets", "others", "size")

    def __init__(self, graph: Graph) -> None:
        self.size = (len(graph.nodes), len(graph.edges))
        self.ids: list[str] = list(graph.nodes)
        self.index: dict[str, int] = {node_id: number for number, node_id in enumerate(self.ids)}
        known = self.index
        self.edges: list[Edge] = [
            edge for edge in graph.edges.values() if edge.source in known and edge.target in known
        ]
        sources = array("q", [known[edge.source] for edge in self.edges])
        targets = array("q", [known[edge.target] for edge in self.edges])
        offsets = array("q", bytes(8 * (len(self.ids) + 1)))
        for ends in (sources, targets):
            for node in ends:
                offsets[node + 1] += 1
        for node in range(len(self.ids)):
            offsets[node + 1] += offsets[node]
        free = offsets[:]
        self.links = array("q", bytes(16 * len(self.edges)))
        self.others = array("q", bytes(16 * len(self.edges)))
        for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
            place = free[source]
            free[source] = place + 1
            self.links[place] = number << 1
            self.others[place] = target
            place = free[target]
            free[target] = place + 1
            self.links[place] = number << 1 | 1
            self.others[place] = source
        self.offsets = offsets

    def around(self, node: int) -> Iterator[tuple[int, int, bool]]:
        """The incidences of a node as (other node, edge number, seen from the target)."""
        links = self.links
        others = self.others
        for place in range(self.offsets[node], self.offsets[node + 1]):
            link = links[place]
            yield others[place], link >> 1, bool(link & 1)


_cache: dict[int, tuple[weakref.ref[Graph], Adjacency]] = {}


def adjacency(graph: Graph) -> Adjacency:
    """The adjacency of a graph, kept as long as the graph lives and built anew when it has grown.

    A graph only ever gains elements or has them replaced by others with the same ends, so its size tells.
    """
    known = _cache.get(id(graph))
    if known is not None and known[0]() is graph and known[1].size == (len(graph.nodes), len(graph.edges)):
        return known[1]
    built = Adjacency(graph)
    number = id(graph)

    def forget(reference: weakref.ref[Graph]) -> None:
        entry = _cache.get(number)
        if entry is not None and entry[0] is reference:
            _cache.pop(number, None)

    _cache[number] = (weakref.ref(graph, forget), built)
    return built
