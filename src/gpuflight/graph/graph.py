"""Graph: entities by id and edges by (source, target, kind), deduplicated as it is built.

Everything here is O(nodes + edges). Two graphs merge with the *left* operand taking precedence: its attributes and
metrics stay, the right one fills what it lacks. That makes merging idempotent and associative, and commutative wherever
the two do not contradict each other; put the newer or the more trusted graph on the left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from gpuflight.graph.element import Edge, EdgeKey, Entity

if TYPE_CHECKING:
    import networkx


class Graph:
    """A deduplicated set of entities and edges.

    ``nodes`` maps id → Entity and ``edges`` maps (source, target, kind) → Edge, both in order of first sight. The
    dictionaries are public for reading; change them only through ``try_add_node`` and ``try_add_edge``. A graph that a
    round carries is shared between threads and must not be changed at all.
    """

    __slots__ = ("__weakref__", "edges", "nodes")

    def __init__(self, nodes: Iterable[Entity] = (), edges: Iterable[Edge] = ()) -> None:
        self.nodes: dict[str, Entity] = {}
        self.edges: dict[EdgeKey, Edge] = {}
        for entity in nodes:
            self.try_add_node(entity)
        for edge in edges:
            self.try_add_edge(edge)

    @classmethod
    def of(cls, nodes: dict[str, Entity], edges: dict[EdgeKey, Edge]) -> Graph:
        """A graph around dictionaries that are already deduplicated and keyed; they are not copied."""
        graph = cls.__new__(cls)
        graph.nodes = nodes
        graph.edges = edges
        return graph

    def try_add_node(self, entity: Entity) -> bool:
        """Add an entity, or let it fill what the known one of that id lacks. True if the id is new."""
        known = self.nodes.setdefault(entity.id, entity)
        if known is entity:
            return True
        self.nodes[entity.id] = merge_entities(known, entity)
        return False

    def try_add_edge(self, edge: Edge) -> bool:
        """Add an edge, or let it fill what the known one of that key lacks. True if the key is new."""
        key = edge.key
        known = self.edges.setdefault(key, edge)
        if known is edge:
            return True
        self.edges[key] = merge_edges(known, edge)
        return False

    def merge(self, other: Graph) -> Graph:
        """A new graph of both; where they contradict each other, this one stands."""
        nodes = {**self.nodes, **other.nodes}
        edges = {**self.edges, **other.edges}
        if len(nodes) < len(self.nodes) + len(other.nodes):
            for node_id in self.nodes.keys() & other.nodes.keys():
                nodes[node_id] = merge_entities(self.nodes[node_id], other.nodes[node_id])
        if len(edges) < len(self.edges) + len(other.edges):
            for key in self.edges.keys() & other.edges.keys():
                edges[key] = merge_edges(self.edges[key], other.edges[key])
        return Graph.of(nodes, edges)

    __add__ = merge

    def dangling(self) -> list[Edge]:
        """Edges of which an end is not a node of this graph."""
        nodes = self.nodes
        return [edge for edge in self.edges.values() if edge.source not in nodes or edge.target not in nodes]

    def __len__(self) -> int:
        return len(self.nodes) + len(self.edges)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Entity]:
        return iter(self.nodes.values())

    def __contains__(self, item: object) -> bool:
        """``"id" in graph``, ``(source, target, kind) in graph``, or an equal Entity or Edge."""
        if isinstance(item, str):
            return item in self.nodes
        if isinstance(item, Entity):
            return self.nodes.get(item.id) == item
        if isinstance(item, Edge):
            return self.edges.get(item.key) == item
        return item in self.edges

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Graph):
            return NotImplemented
        return self.nodes == other.nodes and self.edges == other.edges

    __hash__ = None  # type: ignore[assignment]

    def __le__(self, other: Graph) -> bool:
        """Every element of this graph is in the other, equal."""
        return _contained(self.nodes, other.nodes) and _contained(self.edges, other.edges)

    def __ge__(self, other: Graph) -> bool:
        return other <= self

    def __repr__(self) -> str:
        return f"Graph({len(self.nodes)} nodes, {len(self.edges)} edges)"

    def of_kind(self, kind: type[Entity]) -> list[Any]:
        """Every entity of a kind, in order."""
        return [entity for entity in self.nodes.values() if type(entity) is kind]

    def edges_of_kind(self, kind: type[Edge]) -> list[Any]:
        """Every edge of a kind, in order."""
        return [edge for edge in self.edges.values() if type(edge) is kind]

    def model_dump(self) -> dict[str, Any]:
        """The graph as plain dictionaries, in the shape of the JSON form."""
        from gpuflight.graph.codec import to_builtins

        return to_builtins(self)

    def model_dump_json(self) -> bytes:
        """The graph as JSON (UTF-8)."""
        from gpuflight.graph.codec import encode_graph

        return encode_graph(self)

    def describe(self) -> str:
        """Compact text for people and language models: one line per entity, its edges under it."""
        from gpuflight.graph.describe import describe

        return describe(self)

    def to_networkx(self) -> networkx.MultiDiGraph[str]:
        """A networkx MultiDiGraph: node and edge data are flat dictionaries, edge keys are kind names."""
        from gpuflight.graph.interop import to_networkx

        return to_networkx(self)


def merge_entities(first: Entity, second: Entity) -> Entity:
    """``first`` with what it lacks taken from ``second``; the very object ``first`` if it lacks nothing."""
    merged: Entity = _merge(first, second)
    return merged


def merge_edges(first: Edge, second: Edge) -> Edge:
    """As merge_entities, for two edges of one key."""
    merged: Edge = _merge(first, second)
    return merged


def _merge(first: Any, second: Any) -> Any:
    if first is second or first == second:
        return first
    attributes = first.attributes
    if not attributes.keys() >= second.attributes.keys():
        attributes = {**second.attributes, **attributes}
    metrics = first.metrics
    if not metrics.keys() >= second.metrics.keys():
        metrics = {**second.metrics, **metrics}
    unknown = first.unknown
    if unknown or second.unknown:
        both = {**(second.unknown or {}), **(unknown or {})}
        both = {name: why for name, why in both.items() if name not in metrics and name not in attributes}
        unknown = unknown if both == unknown else (both or None)
    if attributes is first.attributes and metrics is first.metrics and unknown is first.unknown:
        return first
    return replace(first, attributes=attributes, metrics=metrics, unknown=unknown)


def _contained(small: dict[Any, Any], large: dict[Any, Any]) -> bool:
    return len(small) <= len(large) and all(large.get(key) == value for key, value in small.items())
