"""Putting a foreign host's graph into a namespace of its own, so that nothing of it is ever taken for ours.

The namespace of an entity is part of its id: ``Process(ns=node-7,pid=42,start=1)``. What a peer itself had from another
host keeps the way it came: ``node-7/node-9`` is the host that node-7 calls node-9. Names of peers therefore hold no
slash, and nothing that has a meaning in an id (``valid_name``).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any

from gpuflight.graph.element import LOCAL, Edge, Entity
from gpuflight.graph.graph import Graph

SEPARATOR = "/"
NAME_PATTERN = r"[A-Za-z0-9_.:@\-]{1,128}"
"""Of the name of a peer, as one part of a namespace."""

REFERENCES = frozenset(("joined_to", "listener", "source_processes", "target_processes"))
"""Attributes whose value is the id of an entity, or a list of ids."""

_NAME = re.compile(NAME_PATTERN)
_OTHER = re.compile(r"[^A-Za-z0-9_.:@\-]+")


def valid_name(text: str) -> bool:
    """Whether a text can be one part of a namespace."""
    return _NAME.fullmatch(text) is not None


def name_from(text: str) -> str:
    """A text as a valid part of a namespace: what may not stand there becomes ``_``; ``peer`` for nothing."""
    return _OTHER.sub("_", text)[:128] or "peer"


def nested(outer: str, inner: str) -> str:
    """The namespace of what ``outer`` reports of ``inner`` (empty: of itself)."""
    return f"{outer}{SEPARATOR}{inner}" if inner else outer


def depth(ns: str) -> int:
    """Through how many hosts an entity came: 0 for our own, 1 for a peer's, 2 for what a peer has from its peer."""
    return ns.count(SEPARATOR) + 1 if ns else 0


def within(ns: str, outer: str) -> bool:
    """Whether ``ns`` is ``outer`` or beneath it."""
    return ns == outer or ns.startswith(outer + SEPARATOR)


def namespaced_id(id_: str, ns: str, inner: str = LOCAL) -> str:
    """The id of an entity of namespace ``inner`` after it went into ``ns``."""
    kind, bracket, rest = id_.partition("(")
    if not bracket:  # no id of ours; it stays recognisable
        return f"{id_}(ns={nested(ns, inner)},)"
    if inner:
        rest = rest.removeprefix(f"ns={inner},")
    return f"{kind}(ns={nested(ns, inner)},{rest}"


def with_namespace(graph: Graph, ns: str) -> Graph:
    """A new graph in which every entity belongs to the namespace ``ns``, or is nested in it if it had one already.

    Ids change in nodes, in edges, and in the attributes of ``REFERENCES``. Linear. Raises ValueError if ``ns`` is no
    valid name.
    """
    edges = [copy.copy(edge) for edge in graph.edges.values()]
    nodes = move_into([copy.copy(entity) for entity in graph.nodes.values()], edges, ns)
    return Graph.of(nodes, {edge.key: edge for edge in edges})


def move_into(
    entities: Iterable[Entity], connections: Iterable[Edge], ns: str, ids: dict[str, str] | None = None
) -> dict[str, Entity]:
    """As ``with_namespace``, but changes the very elements, which nobody else may have seen yet: for a graph that was
    decoded a moment ago. Gives the entities by their new ids. ``ids`` are the new ids by the old ones of what was moved
    before; those of ``entities`` are added to it."""
    if not valid_name(ns):
        raise ValueError(f"not a name of a namespace: {ns!r}")
    if ids is None:
        ids = {}
    nodes: dict[str, Entity] = {}
    prefixes: dict[type[Entity], tuple[str, int, str]] = {}
    referring: list[Entity | Edge] = []
    none_of = REFERENCES.isdisjoint
    for entity in entities:
        cls = type(entity)
        known = prefixes.get(cls)
        if known is None:
            known = prefixes[cls] = (f"{entity.kind}(", len(entity.kind) + 1, f"{entity.kind}(ns={ns},")
        old = entity.id
        if not entity.ns and old.startswith(known[0]):
            new = known[2] + old[known[1] :]
            entity.ns = ns
        else:
            new = namespaced_id(old, ns, entity.ns)
            entity.ns = nested(ns, entity.ns)
        ids[old] = entity.id = new
        nodes[new] = entity
        if not none_of(entity.attributes):
            referring.append(entity)
    for edge in connections:
        edge.source = ids.get(edge.source) or loose_id(edge.source, ns)
        edge.target = ids.get(edge.target) or loose_id(edge.target, ns)
        if not none_of(edge.attributes):
            referring.append(edge)
    for element in referring:
        element.attributes = moved_references(element.attributes, ns, ids)
    return nodes


def moved_references(attributes: dict[str, Any], ns: str, ids: dict[str, str]) -> dict[str, Any]:
    """Attributes with the ids in them as they are in ``ns``, also of what is not (or no longer) in the graph: an id
    that stayed as it was would name something of ours."""
    if REFERENCES.isdisjoint(attributes):
        return attributes
    return {name: _moved(value, ns, ids) if name in REFERENCES else value for name, value in attributes.items()}


def without_namespaces(graph: Graph, gone: set[str]) -> Graph:
    """A new graph less the namespaces ``gone`` with all beneath them, and less the edges that touch these."""
    if not gone:
        return graph
    doomed = {ns for ns in {entity.ns for entity in graph.nodes.values()} if any(within(ns, outer) for outer in gone)}
    nodes = {id_: entity for id_, entity in graph.nodes.items() if entity.ns not in doomed}
    lost = graph.nodes.keys() - nodes.keys()
    edges = {key: edge for key, edge in graph.edges.items() if key[0] not in lost and key[1] not in lost}
    return Graph.of(nodes, edges)


def loose_id(id_: str, ns: str) -> str:
    """The id in ``ns`` of something that is no node of the graph: what its id says of a namespace is all there is."""
    _, _, rest = id_.partition("(")
    inner = rest[3:].partition(",")[0] if rest.startswith("ns=") else LOCAL
    return namespaced_id(id_, ns, inner)


def _moved(value: Any, ns: str, ids: dict[str, str]) -> Any:
    if isinstance(value, str):
        return ids.get(value) or (loose_id(value, ns) if "(" in value else value)
    if isinstance(value, list | tuple):
        return [_moved(item, ns, ids) for item in value]
    return value
