"""Putting a foreign host's graph into a namespace of its own, so that nothing of it is ever taken for ours.

The namespace of an entity is part of its id: ``Process(ns=node-7,pid=42,start=1)``. What a peer itself had from another
host keeps the way it came: ``node-7/node-9`` is the host that node-7 calls node-9. Names of peers therefore hold no
slash, and nothing that has a meaning in an id (``valid_name``).
"""

from __future__ import annotations

import copy
import re
from typing import Any

from gpuflight.graph.element import LOCAL, Edge, EdgeKey, Entity
from gpuflight.graph.graph import Graph

SEPARATOR = "/"
NAME_PATTERN = r"[A-Za-z0-9_.:@\-]{1,128}"
"""Of the name of a peer, as one part of a namespace."""

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

    Ids change in nodes, in edges, and in attributes that refer to an entity of the graph (``listener`` of a socket).
    Linear. Raises ValueError if ``ns`` is no valid name.
    """
    if not valid_name(ns):
        raise ValueError(f"not a name of a namespace: {ns!r}")
    ids: dict[str, str] = {}
    spaces: dict[str, str] = {LOCAL: ns}
    for id_, entity in graph.nodes.items():
        inner = entity.ns
        space = spaces.get(inner)
        if space is None:
            space = spaces[inner] = f"{ns}{SEPARATOR}{inner}"
        kind, bracket, rest = id_.partition("(")
        if inner or not bracket:
            ids[id_] = namespaced_id(id_, ns, inner)
        else:
            ids[id_] = f"{kind}(ns={ns},{rest}"
    nodes: dict[str, Entity] = {}
    for id_, entity in graph.nodes.items():
        moved = copy.copy(entity)
        moved.id = ids[id_]
        moved.ns = spaces[entity.ns]
        if moved.attributes:
            moved.attributes = _referring(moved.attributes, ids)
        nodes[moved.id] = moved
    edges: dict[EdgeKey, Edge] = {}
    for (source, target, kind), edge in graph.edges.items():
        joined = copy.copy(edge)
        joined.source = ids.get(source) or _loose(source, ns)
        joined.target = ids.get(target) or _loose(target, ns)
        if joined.attributes:
            joined.attributes = _referring(joined.attributes, ids)
        edges[joined.source, joined.target, kind] = joined
    return Graph.of(nodes, edges)


def without_namespaces(graph: Graph, gone: set[str]) -> Graph:
    """A new graph less the namespaces ``gone`` with all beneath them, and less the edges that touch these."""
    if not gone:
        return graph
    doomed = {ns for ns in {entity.ns for entity in graph.nodes.values()} if any(within(ns, outer) for outer in gone)}
    nodes = {id_: entity for id_, entity in graph.nodes.items() if entity.ns not in doomed}
    lost = graph.nodes.keys() - nodes.keys()
    edges = {key: edge for key, edge in graph.edges.items() if key[0] not in lost and key[1] not in lost}
    return Graph.of(nodes, edges)


def _loose(id_: str, ns: str) -> str:
    """An end that is no node of the graph: what its id says of a namespace is all there is."""
    _, _, rest = id_.partition("(")
    inner = rest[3:].partition(",")[0] if rest.startswith("ns=") else LOCAL
    return namespaced_id(id_, ns, inner)


def _referring(attributes: dict[str, Any], ids: dict[str, str]) -> dict[str, Any]:
    """The attributes with ids of the graph's entities as they are now; the same dictionary if there are none."""
    changed: dict[str, Any] | None = None
    for name, value in attributes.items():
        kind = type(value)
        new: Any = None
        if kind is str:
            if value[-1:] == ")":
                new = ids.get(value)
        elif kind is list and value and type(value[0]) is str and value[0][-1:] == ")":
            new = [ids.get(item, item) if type(item) is str else item for item in value]
        if new is not None:
            if changed is None:
                changed = dict(attributes)
            changed[name] = new
    return attributes if changed is None else changed
