"""Half connections that another edge tells already.

A connection of two hosts is seen by each as a half: its own endpoint, and a stand-in for the far end. Where both hosts
are known, one edge joins the two real endpoints, and each stand-in names in ``joined_to`` the endpoint that it stands
for (docs/remote.md). The halves stay in the graph, since each is what its host saw; whoever adds up traffic, or looks
for a way, must take the connection once.
"""

from __future__ import annotations

from gpuflight.graph.edges import ConnectTo
from gpuflight.graph.element import Edge
from gpuflight.graph.graph import Graph

JOINED_TO = "joined_to"


def is_joined_half(edge: Edge, graph: Graph) -> bool:
    """Whether an edge is a half of a connection whose joined edge is in the graph too, and lives."""
    if not isinstance(edge, ConnectTo):
        return False
    nodes, edges = graph.nodes, graph.edges
    for stand_in, own in ((edge.target, edge.source), (edge.source, edge.target)):
        entity = nodes.get(stand_in)
        real = entity.attributes.get(JOINED_TO) if entity is not None else None
        if not isinstance(real, str) or real not in nodes:
            continue
        for key in ((own, real, edge.kind), (real, own, edge.kind)):
            joined = edges.get(key)
            if joined is not None and "ended_round" not in joined.attributes:
                return True
    return False


def connected_once(graph: Graph) -> Graph:
    """A graph in which every connection of two known hosts is one edge: without the halves that it makes superfluous,
    and without the stand-ins that nothing else touches then. The very graph if there are none. O(nodes + edges)."""
    stand_ins = {id_ for id_, entity in graph.nodes.items() if JOINED_TO in entity.attributes}
    if not stand_ins:
        return graph
    left = {
        key: edge
        for key, edge in graph.edges.items()
        if (key[0] not in stand_ins and key[1] not in stand_ins) or not is_joined_half(edge, graph)
    }
    if len(left) == len(graph.edges):
        return graph
    touched = {end for key in left for end in key[:2]}
    kept = {id_: entity for id_, entity in graph.nodes.items() if id_ not in stand_ins or id_ in touched}
    return Graph.of(kept, left)
