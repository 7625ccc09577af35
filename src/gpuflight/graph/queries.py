"""Questions about a graph: what is around an entity, which part matches, which entity a text means."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, get_args

from gpuflight.errors import InputError
from gpuflight.graph.adjacency import adjacency
from gpuflight.graph.codec import node_kinds
from gpuflight.graph.element import Category, Entity
from gpuflight.graph.graph import Graph
from gpuflight.graph.nodes import GPU, PciDevice, Process, Socket, Thread

Where = Mapping[str, Any] | Callable[[Entity], bool]

CANDIDATES_SHOWN = 10

CATEGORIES: tuple[Category, ...] = get_args(Category)


def neighbours(
    graph: Graph,
    node_id: str,
    depth: int = 1,
    categories: Collection[Category] | None = None,
    *,
    directed: bool = False,
) -> Graph:
    """Everything at most ``depth`` edges from an entity, with all edges (of ``categories``) between what was found.

    With ``directed``, directed edges are followed from source to target only. Raises InputError if there is no such
    entity or the depth is negative. O(result) once the graph's adjacency is built.
    """
    around = adjacency(graph)
    start = around.index.get(node_id)
    if start is None:
        raise InputError(f"there is no entity {node_id!r} in this graph")
    if depth < 0:
        raise InputError(f"a depth of {depth} is not possible: it counts edges, from 0")
    allowed = _checked(categories)
    found = {start: None}
    frontier = [start]
    for _ in range(depth):
        reached: list[int] = []
        for node in frontier:
            for other, number, backwards in around.around(node):
                edge = around.edges[number]
                if other in found or edge.category not in allowed or (directed and backwards and edge.directed):
                    continue
                found[other] = None
                reached.append(other)
        if not reached:
            break
        frontier = reached
    numbers = {
        number
        for node in found
        for other, number, backwards in around.around(node)
        if not backwards and other in found and around.edges[number].category in allowed
    }
    kept = [around.edges[number] for number in sorted(numbers)]
    ids = [around.ids[node] for node in found]
    return Graph.of({node: graph.nodes[node] for node in ids}, {edge.key: graph.edges[edge.key] for edge in kept})


def subgraph(
    graph: Graph,
    kinds: Iterable[type[Entity] | str] | None = None,
    namespaces: Collection[str] | None = None,
    where: Where | None = None,
) -> Graph:
    """The entities that pass every filter given, and the edges between them.

    ``kinds`` are classes or names of kinds (InputError on an unknown name); ``namespaces`` names ("" is this host);
    ``where`` is a function of the entity, or a mapping: each name is looked up in attributes, metrics and identity
    fields, and its value must be equal, or be a function that says yes.
    """
    names = None if kinds is None else {_kind_name(kind) for kind in kinds}
    test = _predicate(where)
    nodes = {
        node_id: entity
        for node_id, entity in graph.nodes.items()
        if (names is None or entity.kind in names)
        and (namespaces is None or entity.ns in namespaces)
        and (test is None or test(entity))
    }
    edges = {key: edge for key, edge in graph.edges.items() if key[0] in nodes and key[1] in nodes}
    return Graph.of(nodes, edges)


def value_of(entity: Entity, name: str) -> Any:
    """An attribute, else a metric, else an identity field of that name; None if there is none."""
    if name in entity.attributes:
        return entity.attributes[name]
    if name in entity.metrics:
        return entity.metrics[name]
    return getattr(entity, name) if name in entity.__struct_fields__ else None


def is_ended(entity: Entity) -> bool:
    """True for a tombstone: the entity vanished and is kept for some rounds (attribute ``ended_round``)."""
    return "ended_round" in entity.attributes


def find(graph: Graph, text: str) -> list[Entity]:
    """The entities that a user's text means, best reading only, in graph order; empty if none.

    In this order: an exact id; ``pid:123``, ``tid:123``, ``gpu:0`` (index or start of the UUID), ``port:8000``,
    ``pci:0000:3b:00.0``; ``kind:text`` for any kind in any case (``numa:0``, ``nic:eth0``, ``container:4f5e``), where
    text is the identity or its beginning; an exact name; the beginning of a name. Where live and ended entities answer
    alike, the live ones are meant.
    """
    text = text.strip()
    exact = graph.nodes.get(text)
    if exact is not None:
        return [exact]
    if not text:
        return []
    return _live(_by_prefix(graph, text) or _by_name(graph, text))


def find_one(graph: Graph, text: str) -> Entity:
    """The one entity that a user's text means. Raises InputError: none, or several, which it lists."""
    found = find(graph, text)
    if len(found) == 1:
        return found[0]
    if not found:
        raise InputError(
            f"nothing in this graph is called {text!r}; give an id, pid:123, gpu:0, a kind and identity such as"
            " numa:0 or nic:eth0, or the beginning of a name"
        )
    shown = [f"  {entity.id}  {entity.label}" for entity in found[:CANDIDATES_SHOWN]]
    if len(found) > len(shown):
        shown.append(f"  … and {len(found) - len(shown)} more")
    raise InputError("\n".join([f"{text!r} can mean {len(found)} entities; give one of these ids:", *shown]))


def _by_prefix(graph: Graph, text: str) -> list[Entity]:
    prefix, colon, rest = text.partition(":")
    prefix = prefix.strip().lower()
    rest = rest.strip()
    if not colon or not rest:
        return []
    nodes = graph.nodes.values()
    match prefix:
        case "pid":
            return [node for node in nodes if type(node) is Process and str(node.pid) == rest]
        case "tid":
            return [node for node in nodes if type(node) is Thread and str(node.tid) == rest]
        case "port":
            return [node for node in nodes if type(node) is Socket and node.address.rpartition(":")[2] == rest]
        case "pci":
            return _by_pci_address(graph, rest.lower())
        case "gpu":
            gpus: list[Entity] = [node for node in nodes if type(node) is GPU]
            by_index = [gpu for gpu in gpus if str(gpu.attributes.get("index")) == rest]
            if by_index:
                return by_index
    kind = {name.lower(): name for name in node_kinds()}.get(prefix)
    if kind is None:
        return []
    of_kind = [(node, _identity_texts(node)) for node in nodes if node.kind == kind]
    wanted = rest.lower()
    same = [node for node, texts in of_kind if wanted in texts]
    return same or [node for node, texts in of_kind if any(text.startswith(wanted) for text in texts)]


def _by_pci_address(graph: Graph, address: str) -> list[Entity]:
    """The PCI function itself if it is in the graph, else the devices that say they are it."""
    nodes = graph.nodes.values()
    functions: list[Entity] = [node for node in nodes if type(node) is PciDevice and node.address.lower() == address]
    return functions or [node for node in nodes if str(node.attributes.get("pci_address")).lower() == address]


def _by_name(graph: Graph, text: str) -> list[Entity]:
    wanted = text.lower()
    exact: list[Entity] = []
    beginning: list[Entity] = []
    for entity in graph.nodes.values():
        label = entity.label.lower()
        if label == wanted:
            exact.append(entity)
        elif label.startswith(wanted) or entity.id.lower().startswith(wanted):
            beginning.append(entity)
    return exact or beginning


def _live(found: list[Entity]) -> list[Entity]:
    live = [entity for entity in found if not is_ended(entity)]
    return live or found


def _identity_texts(entity: Entity) -> list[str]:
    """What may stand behind ``kind:``: the identity as in the id, each identity value alone, and the name."""
    own = entity._identity()
    values = [getattr(entity, name) for name in entity.__struct_fields__ if name not in _BASE_FIELDS]
    texts = [own, *(str(value) for value in values if value not in ("", 0) or len(values) == 1)]
    name = entity.attributes.get("name")
    if name:
        texts.append(str(name))
    return [text.lower() for text in texts]


def _predicate(where: Where | None) -> Callable[[Entity], bool] | None:
    if where is None or callable(where):
        return where
    wanted = dict(where)

    def matches(entity: Entity) -> bool:
        for name, want in wanted.items():
            value = value_of(entity, name)
            if not (want(value) if callable(want) else value == want):
                return False
        return True

    return matches


def _kind_name(kind: type[Entity] | str) -> str:
    if not isinstance(kind, str):
        return str(kind.__struct_config__.tag)
    kinds = node_kinds()
    known = kind if kind in kinds else {name.lower(): name for name in kinds}.get(kind.lower())
    if known is None:
        raise InputError(f"there is no kind of entity called {kind!r}; there are: {', '.join(sorted(kinds))}")
    return known


def _checked(categories: Collection[Category] | None) -> Collection[Category]:
    if categories is None:
        return CATEGORIES
    unknown = sorted(set(categories) - set(CATEGORIES))
    if unknown:
        raise InputError(f"there is no category of edges called {unknown[0]!r}; there are: {', '.join(CATEGORIES)}")
    return categories


_BASE_FIELDS = frozenset(Entity.__struct_fields__)
