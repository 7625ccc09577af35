"""Entities, edges and the graph of both. Imports nothing else of gpuflight."""

from gpuflight.graph import edges, nodes
from gpuflight.graph.element import LOCAL, Category, Edge, EdgeKey, Entity, Metric, edge_id, entity_id
from gpuflight.graph.graph import Graph, merge_edges, merge_entities

__all__ = [
    "LOCAL",
    "Category",
    "Edge",
    "EdgeKey",
    "Entity",
    "Graph",
    "Metric",
    "edge_id",
    "edges",
    "entity_id",
    "merge_edges",
    "merge_entities",
    "nodes",
]
