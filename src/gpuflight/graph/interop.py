"""Graphs to and from networkx."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from gpuflight.errors import InputError
from gpuflight.graph.codec import edge_kinds, node_kinds
from gpuflight.graph.element import Edge, Entity
from gpuflight.graph.graph import Graph

if TYPE_CHECKING:
    import networkx

_BASE_FIELDS = frozenset(Entity.__struct_fields__)


def to_networkx(graph: Graph) -> networkx.MultiDiGraph[str]:
    """The graph as a MultiDiGraph: nodes by id, edge keys are the names of the kinds.

    Node data: ``kind``, ``ns``, the identity fields, ``attributes``, ``metrics`` and, if there are any, ``unknown``.
    Edge data: ``kind``, ``category``, ``directed``, ``attributes``, ``metrics``, ``unknown``. The dictionaries are
    copies. networkx has no mixed graphs, so an undirected edge is one directed edge that says so; an end that is not a
    node of the graph becomes a networkx node without data.
    """
    import networkx

    result: networkx.MultiDiGraph[str] = networkx.MultiDiGraph()
    result.add_nodes_from((entity.id, _node_data(entity)) for entity in graph.nodes.values())
    for edge in graph.edges.values():
        result.add_edge(edge.source, edge.target, edge.kind, **_edge_data(edge))
    return result


def from_networkx(source: networkx.MultiDiGraph[str]) -> Graph:
    """The graph that ``to_networkx`` was given. Nodes without a kind are ends outside the graph and stay so.

    Raises InputError if a kind is not known or an identity field is missing or of the wrong type.
    """
    graph = Graph()
    entity_kinds = node_kinds()
    for node_id, data in source.nodes(data=True):
        if "kind" in data:
            graph.try_add_node(_entity(node_id, data, entity_kinds))
    kinds = edge_kinds()
    for tail, head, key, data in source.edges(keys=True, data=True):
        name = str(data.get("kind", key))
        kind = kinds.get(name)
        if kind is None:
            raise InputError(f"edge {tail} -> {head}: there is no kind of edge called {name!r}")
        graph.try_add_edge(
            kind(
                tail,
                head,
                dict(data.get("attributes", {})),
                dict(data.get("metrics", {})),
                dict(data["unknown"]) if data.get("unknown") else None,
            )
        )
    return graph


def _node_data(entity: Entity) -> dict[str, Any]:
    data: dict[str, Any] = {"kind": entity.kind, "ns": entity.ns}
    for name in entity.__struct_fields__:
        if name not in _BASE_FIELDS:
            data[name] = getattr(entity, name)
    return data | _values(entity)


def _edge_data(edge: Edge) -> dict[str, Any]:
    return {"kind": edge.kind, "category": edge.category, "directed": edge.directed} | _values(edge)


def _values(element: Entity | Edge) -> dict[str, Any]:
    values: dict[str, Any] = {"attributes": dict(element.attributes), "metrics": dict(element.metrics)}
    if element.unknown:
        values["unknown"] = dict(element.unknown)
    return values


def _entity(node_id: str, data: dict[str, Any], kinds: dict[str, type[Entity]]) -> Entity:
    kind = kinds.get(data["kind"])
    if kind is None:
        raise InputError(f"node {node_id}: there is no kind of entity called {data['kind']!r}")
    try:
        return msgspec.convert({**data, "id": node_id}, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"node {node_id}: {error}") from error
