"""The JSON form of a graph and of the difference of two graphs.

``{"schema": 1, "round": 12, "time": "…Z", "env": {…}, "edge_kinds": {kind: {category, directed}}, "nodes": [{"kind",
"id", …identity, "attributes", "metrics", "unknown", "ns"}], "edges": [{"kind", "source", "target", "attributes",
"metrics", "unknown"}], "coverage": […], "findings": […], "truncated_by": ""}``

Empty parts are left out. ``source`` and ``target`` are ids of nodes. What is the same for every edge of a kind stands
once in ``edge_kinds``, and an edge's id (``Kind(source->target)``) is not written at all: both can be told from the
rest, would double the size of the file, and take a quarter of the writing speed (docs/architecture.md).

Reading is typed, several times faster than reading into dictionaries. Kinds that nobody here declares are kept: nodes
as Device, edges as HasAttribute, with the original kind in the attribute ``original_kind``.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Union

import msgspec
from msgspec import Struct, field

from gpuflight.errors import InputError
from gpuflight.graph.diff import Change, Diff
from gpuflight.graph.edges import HasAttribute
from gpuflight.graph.element import Edge, EdgeKey, Entity
from gpuflight.graph.graph import Graph
from gpuflight.graph.nodes import Device

SCHEMA = 1
"""Number of the JSON form. A reader refuses a higher one."""


class Document(Struct, omit_defaults=True):
    """Everything a graph file holds. ``coverage`` and ``findings`` are kept as plain dictionaries."""

    schema: int
    round: int = 0
    time: str = ""
    monotonic_s: float | None = None
    duration_s: float | None = None
    env: dict[str, Any] = field(default_factory=dict)
    truncated_by: str = ""
    own_cost: dict[str, Any] | None = None
    edge_kinds: dict[str, dict[str, Any]] = field(default_factory=dict)
    nodes: list[Any] = field(default_factory=list)
    edges: list[Any] = field(default_factory=list)
    coverage: list[Any] = field(default_factory=list)
    findings: list[Any] = field(default_factory=list)
    cleared: list[Any] = field(default_factory=list)


class DiffLine(Struct, omit_defaults=True):
    """One line of a stream of rounds after the first: what changed since the round before, or since round ``base``.

    A changed element is written as the names and values that are new or different, and the names that are gone.
    ``nodes_count`` and ``edges_count`` are of the graph afterwards, for who keeps a copy of it.
    """

    type: str
    schema: int
    round: int
    base: int = 0
    nodes_count: int = 0
    edges_count: int = 0
    time: str = ""
    monotonic_s: float | None = None
    duration_s: float | None = None
    truncated_by: str = ""
    own_cost: dict[str, Any] | None = None
    nodes_added: list[Any] = field(default_factory=list)
    nodes_removed: list[str] = field(default_factory=list)
    nodes_changed: list[dict[str, Any]] = field(default_factory=list)
    edges_added: list[Any] = field(default_factory=list)
    edges_removed: list[EdgeKey] = field(default_factory=list)
    edges_changed: list[dict[str, Any]] = field(default_factory=list)
    coverage: list[Any] = field(default_factory=list)
    findings: list[Any] = field(default_factory=list)
    cleared: list[Any] = field(default_factory=list)


_encoder = msgspec.json.Encoder()
_GROUPS = ("attributes", "metrics", "unknown")


def time_text(time_ns: int) -> str:
    """ISO 8601 in UTC with microseconds and ``Z``."""
    seconds, rest = divmod(time_ns, 1_000_000_000)
    moment = dt.datetime.fromtimestamp(seconds, dt.UTC).replace(microsecond=rest // 1000)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def time_from_text(text: str) -> int:
    """Inverse of ``time_text``, ns since the epoch; 0 for what is not a time."""
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        return 0
    whole = moment.replace(microsecond=0)
    return int(whole.timestamp()) * 1_000_000_000 + moment.microsecond * 1000


def document(graph: Graph, **fields: Any) -> Document:
    """The file form of a graph; ``fields`` are those of Document."""
    return Document(
        schema=SCHEMA,
        edge_kinds=edge_kind_table(),
        nodes=list(graph.nodes.values()),
        edges=list(graph.edges.values()),
        **fields,
    )


def encode_graph(graph: Graph, **fields: Any) -> bytes:
    """A graph as JSON. ``fields`` are those of Document (round, time, env, coverage …)."""
    return encode(document(graph, **fields))


def encode(value: Any) -> bytes:
    """Any of the structs above as JSON; text that is not valid Unicode (lone surrogates) is escaped, not refused."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return _encoder.encode(_printable(msgspec.to_builtins(value)))


def to_builtins(graph: Graph) -> dict[str, Any]:
    """The JSON form as dictionaries and lists."""
    plain: dict[str, Any] = msgspec.to_builtins(document(graph))
    return plain


def decode_graph(data: bytes | str) -> Graph:
    """The graph of a JSON file of ours. Raises InputError."""
    return graph_of(decode_document(data))


def graph_of(parsed: Document) -> Graph:
    """The graph of a document; duplicates (of files made by others) merge."""
    nodes = {entity.id: entity for entity in parsed.nodes}
    kinds = {cls: cls.__struct_config__.tag for cls in set(map(type, parsed.edges))}  # type: ignore[attr-defined]
    edges = {(edge.source, edge.target, kinds[type(edge)]): edge for edge in parsed.edges}
    if len(nodes) != len(parsed.nodes) or len(edges) != len(parsed.edges):
        return Graph(parsed.nodes, parsed.edges)
    return Graph.of(nodes, edges)


def decode_document(data: bytes | str) -> Document:
    """A whole graph file. Raises InputError with what is wrong and where."""
    try:
        parsed: Document = _document_decoder(*_kinds_known()).decode(data)
    except msgspec.ValidationError:
        parsed = _decode_tolerantly(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"not a graph: {error}") from None
    except RecursionError:
        raise InputError("not a graph: nested too deeply") from None
    check_schema(parsed.schema)
    return parsed


def encode_diff(change: Diff, number: int, **fields: Any) -> bytes:
    """A difference as one line of JSON (no newline). ``fields`` are those of DiffLine."""
    return encode(
        DiffLine(
            type="diff",
            schema=SCHEMA,
            round=number,
            nodes_added=change.nodes_added,
            nodes_removed=change.nodes_removed,
            nodes_changed=[{"id": step.after.id, **_delta(step)} for step in change.nodes_changed],
            edges_added=change.edges_added,
            edges_removed=change.edges_removed,
            edges_changed=[{"key": step.after.key, **_delta(step)} for step in change.edges_changed],
            **fields,
        )
    )


def decode_diff(data: bytes | str, before: Graph) -> tuple[Diff, DiffLine]:
    """One line of ``encode_diff``, against the graph it was made from. Raises InputError."""
    try:
        line = msgspec.json.decode(data, type=DiffLine)
        check_schema(line.schema)
        nodes = before.nodes
        edges = before.edges
        change = Diff(
            nodes_added=[_node(item) for item in line.nodes_added],
            nodes_removed=line.nodes_removed,
            nodes_changed=[_step(nodes[item["id"]], item) for item in line.nodes_changed],
            edges_added=[_edge(item) for item in line.edges_added],
            edges_removed=line.edges_removed,
            edges_changed=[_step(edges[_key(item["key"])], item) for item in line.edges_changed],
        )
    except msgspec.DecodeError as error:
        raise InputError(f"not a round: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"this difference does not fit the graph before it: {error}") from None
    return change, line


def entity_of(plain: dict[str, Any]) -> Entity:
    """One node of the JSON form. Raises InputError."""
    return _node(plain)


def edge_of(plain: dict[str, Any]) -> Edge:
    """One edge of the JSON form. Raises InputError."""
    return _edge(plain)


def edge_kind_table() -> dict[str, dict[str, Any]]:
    """What every edge of a kind has in common."""
    return {name: {"category": kind.category, "directed": kind.directed} for name, kind in edge_kinds().items()}


def node_kinds() -> dict[str, type[Entity]]:
    """Every declared kind of entity, plugins' included, by name."""
    return _leaves(Entity)


def edge_kinds() -> dict[str, type[Edge]]:
    """Every declared kind of edge, plugins' included, by name."""
    return _leaves(Edge)


def _leaves(base: type[Any]) -> dict[str, type[Any]]:
    found: dict[str, type[Any]] = {}
    queue = list(base.__subclasses__())
    while queue:
        cls = queue.pop(0)
        tag = cls.__struct_config__.tag
        if isinstance(tag, str) and not cls.__subclasses__():
            found.setdefault(tag, cls)
        queue.extend(cls.__subclasses__())
    return found


def _kinds_known() -> tuple[tuple[type[Any], ...], tuple[type[Any], ...]]:
    return tuple(node_kinds().values()), tuple(edge_kinds().values())


@lru_cache(maxsize=4)
def _document_decoder(nodes: tuple[type[Any], ...], edges: tuple[type[Any], ...]) -> msgspec.json.Decoder[Any]:
    typed = msgspec.defstruct(
        "TypedDocument",
        [
            ("nodes", list[Union[nodes]], field(default_factory=list)),  # type: ignore[valid-type]  # noqa: UP007
            ("edges", list[Union[edges]], field(default_factory=list)),  # type: ignore[valid-type]  # noqa: UP007
        ],
        bases=(Document,),
    )
    return msgspec.json.Decoder(typed)


def _decode_tolerantly(data: bytes | str) -> Document:
    """The slow way, element by element: for kinds unknown here, and to say which element is wrong."""
    try:
        parsed = msgspec.json.decode(data, type=Document)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        check_schema_of(data)
        raise InputError(f"not a graph of gpuflight: {error}") from None
    except RecursionError:
        raise InputError("not a graph of gpuflight: nested too deeply") from None
    check_schema(parsed.schema)
    parsed.nodes = [_node(item, f"nodes[{index}]") for index, item in enumerate(parsed.nodes)]
    parsed.edges = [_edge(item, f"edges[{index}]") for index, item in enumerate(parsed.edges)]
    return parsed


def _node(item: Any, where: str = "node") -> Entity:
    plain, kind = _element(item, where)
    known = node_kinds().get(kind)
    if known is not None:
        entity: Entity = _convert(plain, known, where)
        return entity
    rest = {key: value for key, value in plain.items() if key not in {"kind", "id", "ns", *_GROUPS}}
    return Device(
        id=str(plain.get("id") or f"{kind}({len(rest)})"),
        name=str(plain.get("id", kind)),
        ns=str(plain.get("ns", "")),
        attributes={"original_kind": kind, **rest, **(plain.get("attributes") or {})},
        metrics=_numbers(plain.get("metrics")),
        unknown=plain.get("unknown"),
    )


def _edge(item: Any, where: str = "edge") -> Edge:
    plain, kind = _element(item, where)
    known = edge_kinds().get(kind)
    if known is not None:
        edge: Edge = _convert(plain, known, where)
        return edge
    return HasAttribute(
        str(plain.get("source")),
        str(plain.get("target")),
        {"original_kind": kind, **(plain.get("attributes") or {})},
        _numbers(plain.get("metrics")),
    )


def _element(item: Any, where: str) -> tuple[dict[str, Any], str]:
    if not isinstance(item, dict) or not isinstance(item.get("kind"), str):
        raise InputError(f"{where}: expected an object with a kind")
    return item, item["kind"]


def _convert(plain: dict[str, Any], kind: type[Any], where: str) -> Any:
    metrics = plain.get("metrics")
    if isinstance(metrics, dict) and None in metrics.values():  # other writers put null for NaN
        lost = {name: "null in the file" for name, value in metrics.items() if value is None}
        plain = {**plain, "metrics": _numbers(metrics), "unknown": {**lost, **(plain.get("unknown") or {})}}
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {error}") from None


def _numbers(metrics: Any) -> dict[str, Any]:
    return {name: value for name, value in (metrics or {}).items() if isinstance(value, (int, float))}


def check_schema(schema: int) -> None:
    """Raises InputError if a document is of a schema that is newer than ours."""
    if schema > SCHEMA:
        raise InputError(f"schema {schema} is newer than this gpuflight reads ({SCHEMA}): update gpuflight")


class _Schema(Struct):
    schema: int = 0


def check_schema_of(data: bytes | str) -> None:
    """Raises InputError if a document that cannot be read says of itself that it is of a newer schema."""
    try:
        schema = msgspec.json.decode(data, type=_Schema).schema
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    check_schema(schema)


def _delta(step: Change) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    gone: dict[str, list[str]] = {}
    for group in _GROUPS:
        old = getattr(step.before, group) or {}
        new = getattr(step.after, group) or {}
        if old == new:
            continue
        moved = {name: value for name, value in new.items() if name not in old or old[name] != value}
        if moved:
            changed[group] = moved
        if lost := [name for name in old if name not in new]:
            gone[group] = lost
    if gone:
        changed["gone"] = gone
    return changed


def _step(before: Any, item: dict[str, Any]) -> Change:
    gone = item.get("gone") or {}
    groups: dict[str, Any] = {}
    for group in _GROUPS:
        old = getattr(before, group) or {}
        lost = set(gone.get(group, ()))
        groups[group] = {name: value for name, value in old.items() if name not in lost} | (item.get(group) or {})
    groups["unknown"] = groups["unknown"] or None
    return Change(before, msgspec.structs.replace(before, **groups))


def _key(parts: Iterable[str]) -> EdgeKey:
    source, target, kind = parts
    return source, target, kind


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_printable(item) for item in value]
    return value


__all__ = [
    "SCHEMA",
    "DiffLine",
    "Document",
    "check_schema",
    "check_schema_of",
    "decode_diff",
    "decode_document",
    "decode_graph",
    "document",
    "edge_kind_table",
    "edge_of",
    "encode",
    "encode_diff",
    "encode_graph",
    "entity_of",
    "graph_of",
    "time_from_text",
    "time_text",
    "to_builtins",
]
