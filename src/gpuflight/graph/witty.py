"""Reading the JSON of witty-profiler: nodes with an ``entity_type``, edges with their endpoints embedded.

What its kinds become here stands in ``witty_kinds.py``. Nothing is lost: every scalar that is not part of an
identity becomes a metric, where its unit is known, or else an attribute, nested ones with dots in their names; a type
that is in no table stays as a Device or HasAttribute with its name in ``reference_type``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Struct, field

from gpuflight.errors import InputError
from gpuflight.graph import nodes
from gpuflight.graph.codec import edge_kinds, node_kinds
from gpuflight.graph.edges import Belong, HasAttribute, Own
from gpuflight.graph.element import Edge, EdgeKey, Entity
from gpuflight.graph.graph import Graph
from gpuflight.graph.witty_kinds import EDGES, NODES, OURS, PRIMARY, RENAMED, Fields, Malformed, clean, metric_of

_LOCAL = "local"


class WittyReport(Struct):
    """A graph as read, what its envelope said of the host, and what needed a decision: types in no table, elements
    too damaged to have an identity (kept as Device) or ends (left out), values that contradict an earlier mention of
    the same element (the first stands). ``derived_edges_count`` edges (attribute ``derived``) stand for what the file
    says by nesting: a thread's process, a socket's thread or process."""

    graph: Graph
    env: dict[str, Any] = field(default_factory=dict)
    unknown_types: dict[str, int] = field(default_factory=dict)
    damaged_nodes_count: int = 0
    damaged_edges_count: int = 0
    contradictions_count: int = 0
    derived_edges_count: int = 0


def looks_like_witty(obj: object) -> bool:
    """Whether a parsed JSON value is a graph of witty-profiler, with or without an envelope."""
    graph = _unwrapped(obj)
    if graph is None or "schema" in graph:
        return False
    for key, mark in (("nodes", "entity_type"), ("edges", "edge_type")):
        items = graph.get(key)
        if isinstance(items, list) and any(isinstance(item, dict) and mark in item for item in items[:50]):
            return True
    return graph.get("nodes") == [] and graph.get("edges") == []


def load_witty(obj: object) -> Graph:
    """The graph of witty-profiler's JSON. Raises InputError if it is not one at all; see ``read_witty``."""
    return read_witty(obj).graph


def read_witty(obj: object) -> WittyReport:
    """The graph of witty-profiler's JSON (``{nodes, edges}``, or that under ``content`` or ``data``), with a report.

    Raises InputError if there is no list of nodes or of edges. A single damaged element costs that element only.
    """
    source = _unwrapped(obj)
    if source is None:
        raise InputError("not a graph of witty-profiler: no object with nodes and edges")
    for key in ("nodes", "edges"):
        if not isinstance(source.get(key), list):
            raise InputError(f"not a graph of witty-profiler: {key!r} is not a list")
    env = obj.get("env") if isinstance(obj, dict) else None
    reader = _Reader()
    try:
        reader.learn_devices(source["nodes"])
        for item in source["nodes"]:
            reader.node(item)
        for item in source["edges"]:
            reader.edge(item)
        report = reader.report()
        report.env = dict(_flat(env)) if isinstance(env, dict) else {}
    except RecursionError:
        raise InputError("not a graph of witty-profiler: nested too deeply") from None
    return report


def _unwrapped(obj: object) -> Fields | None:
    for _ in range(4):
        if not isinstance(obj, dict):
            return None
        if "nodes" in obj or "edges" in obj:
            return obj
        obj = obj.get("content", obj.get("data"))
    return None


class _Reader:
    """Elements under construction, by id and key, with the raw form and the type they were read from."""

    def __init__(self) -> None:
        self.nodes: dict[str, Entity] = {}
        self.edges: dict[EdgeKey, Edge] = {}
        self.raw: dict[str, Fields] = {}
        self.types: dict[str | EdgeKey, str] = {}
        self.devices: dict[tuple[Any, Any], Any] = {}
        self.unknown_types: dict[str, int] = {}
        self.damaged_nodes_count = 0
        self.damaged_edges_count = 0
        self.contradictions_count = 0

    def report(self) -> WittyReport:
        return WittyReport(
            graph=Graph.of(self.nodes, self.edges),
            unknown_types=self.unknown_types,
            damaged_nodes_count=self.damaged_nodes_count,
            damaged_edges_count=self.damaged_edges_count,
            contradictions_count=self.contradictions_count,
            derived_edges_count=sum(edge.attributes.get("derived") is True for edge in self.edges.values()),
        )

    def learn_devices(self, items: list[Any]) -> None:
        """A memory region names its protection domain but not its device; the domain does."""
        for item in items:
            if isinstance(item, dict) and item.get("entity_type") == "RdmaProtectionDomain":
                pid, pdn = item.get("pid"), item.get("pdn")
                if isinstance(pid, int) and isinstance(pdn, int):
                    self.devices.setdefault((pid, pdn), item.get("dev"))

    def node(self, item: Any) -> str | None:
        """Take an entity, from the list or from within an edge; its id, or None if it is no entity at all."""
        if not isinstance(item, dict):
            self.damaged_nodes_count += 1
            return None
        own = _ours(item, node_kinds())
        if own is not None:
            own.attributes, own.metrics = dict(own.attributes), dict(own.metrics)
            self.nodes[own.id] = self._merged(self.nodes.get(own.id), own, own.kind, own.id)
            node_id: str = own.id
            return node_id
        kind = item.get("entity_type")
        kind = clean(kind) if isinstance(kind, str) and kind else "untyped"
        fields = {name: value for name, value in item.items() if name not in ("entity_type", "entity_namespace")}
        ns = item.get("entity_namespace")
        ns = "" if ns in (None, "", _LOCAL) or not isinstance(ns, str) else clean(ns)
        if kind == "RdmaMemoryRegion" and isinstance(item.get("pid"), int) and isinstance(item.get("pdn"), int):
            fields.setdefault("dev", self.devices.get((item["pid"], item["pdn"])))
        make = NODES.get(kind)
        damaged = False
        try:
            entity = make(fields, ns) if make is not None else _stranger(kind, fields, ns)
        except Malformed:
            damaged = True
            fields = {name: value for name, value in item.items() if name not in ("entity_type", "entity_namespace")}
            entity = _stranger(kind, fields, ns)
        first = entity.id not in self.nodes
        if not first and self.raw.get(entity.id) == item:
            return entity.id
        if first and damaged:
            self.damaged_nodes_count += 1
        elif first and make is None:
            self.unknown_types[kind] = self.unknown_types.get(kind, 0) + 1
        self.raw.setdefault(entity.id, item)
        parts = [(name, fields.pop(name, None)) for name in ("process", "socket_thread", "socket_process")]
        self._fill(entity, fields, kind)
        self.nodes[entity.id] = self._merged(self.nodes.get(entity.id), entity, kind, entity.id)
        for name, part in parts:
            self._part(entity.id, name, part)
        return entity.id

    def _part(self, node_id: str, name: str, part: Any) -> None:
        """A thread holds its process, a socket who opened it: facts that otherwise need an edge."""
        if part is None:
            return
        other = self.node(part)
        if other is None or other == node_id:
            return
        edge: Edge = Own(other, node_id, {}, {}) if name == "process" else Belong(node_id, other, {}, {})
        if self.edges.setdefault(edge.key, edge) is edge:
            edge.attributes["derived"] = True

    def edge(self, item: Any) -> None:
        """Take an edge with its endpoints."""
        if not isinstance(item, dict):
            self.damaged_edges_count += 1
            return
        kind = item.get("edge_type")
        kind = clean(kind) if isinstance(kind, str) and kind else "untyped"
        ends = [item.get("source_node"), item.get("target_node")]
        if ends == [None, None] and isinstance(item.get("nodes"), list):
            ends = item["nodes"]
        ids = [self.node(end) for end in ends if isinstance(end, dict)]
        known = [node_id for node_id in ids if node_id is not None]
        if len(known) != len(ends) or len(known) < 2:
            self.damaged_edges_count += 1
            return
        own = _ours(item, edge_kinds(), source=known[0], target=known[1])
        if own is not None:
            own.attributes, own.metrics = dict(own.attributes), dict(own.metrics)
            self.edges[own.key] = self._merged(self.edges.get(own.key), own, own.kind, own.key)
            return
        cls = EDGES.get(kind)
        if cls is None:
            self.unknown_types[kind] = self.unknown_types.get(kind, 0) + 1
        fields = {
            name: value
            for name, value in item.items()
            if name not in ("edge_type", "source_node", "target_node", "nodes")
        }
        for source, target in pairwise(known):
            edge = (cls or HasAttribute)(source, target, {}, {})
            if PRIMARY.get(type(edge)) != kind:
                edge.attributes["reference_type"] = kind
            self._fill(edge, fields, kind)
            self.edges[edge.key] = self._merged(self.edges.get(edge.key), edge, kind, edge.key)

    def _fill(self, element: Entity | Edge, fields: Fields, kind: str) -> None:
        """Every remaining scalar becomes a metric or an attribute of the element."""
        attributes = dict(element.attributes)
        metrics = dict(element.metrics)
        renamed = RENAMED.get(kind, {})
        for name, value in _flat(fields):
            metric = metric_of(name, value, kind)
            if metric is not None and metric[0] not in metrics:
                metrics[metric[0]] = metric[1]
                continue
            name = renamed.get(name, name)
            if name == "pci_address" and isinstance(value, str):
                value = value.lower()
            attributes[name if name not in attributes else f"{kind}.{name}"] = value
        element.attributes = attributes
        element.metrics = metrics

    def _merged(self, known: Any, new: Any, kind: str, key: str | EdgeKey) -> Any:
        """``known`` with what ``new`` adds. A contradiction of another type of element is kept under its name; one of
        the same type (a later copy of the same thing) is counted and the first stands."""
        said_before = key in self.types
        known_type = self.types.setdefault(key, kind)
        if known is None:
            return new
        if not said_before:
            known.attributes.pop("derived", None)  # the file says it itself after all
        for group in ("attributes", "metrics"):
            old, added = getattr(known, group), getattr(new, group)
            for name, value in added.items():
                if name not in old:
                    old[name] = value
                elif old[name] != value and name != "reference_type":
                    if kind != known_type:
                        known.attributes.setdefault(f"{kind}.{name}", value)
                    else:
                        self.contradictions_count += 1
        if new.unknown:
            known.unknown = {**new.unknown, **(known.unknown or {})}
        return known


def _ours(item: Fields, kinds: Mapping[str, type[Any]], **more: str) -> Any:
    """The element itself, where gpuflight wrote it (``witty_write``); None where it did not, or is of a later one."""
    details = item.get("details")
    own = details.get(OURS) if isinstance(details, dict) else None
    if not isinstance(own, dict) or not isinstance(own.get("kind"), str):
        return None
    kind = kinds.get(own["kind"])
    if kind is None:
        return None
    try:
        # Its id is what its identity gives, whatever the file says.
        return msgspec.convert({**{name: value for name, value in own.items() if name != "id"}, **more}, kind)
    except msgspec.ValidationError:
        return None


def _stranger(kind: str, fields: Fields, ns: str) -> Entity:
    """An entity of a type in no table, or without the identity its type has: known by what looks like an id, else by
    a digest of all it says."""
    parts = [
        f"{name}={value}"
        for name, value in sorted(_flat(fields))
        if name in ("id", "name") or name.endswith(("_id", "_name", "id_str", "inode", "key"))
        if value != ""
    ]
    if not parts:
        whole = repr(sorted(_flat(fields), key=repr)).encode(errors="replace")
        parts = [hashlib.blake2b(whole, digest_size=6).hexdigest()]
    return nodes.Device(name=f"{kind}({','.join(parts)})", ns=ns, attributes={"reference_type": kind})


def _flat(fields: Fields) -> Iterator[tuple[str, Any]]:
    """Every scalar, and every list of scalars, with the names of what it is nested in; null says nothing."""
    pending: list[tuple[str, Any]] = [(clean(str(name)), value) for name, value in fields.items()][::-1]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending.extend([(f"{name}.{clean(str(key))}", inner) for key, inner in value.items()][::-1])
        elif isinstance(value, list):
            if any(isinstance(inner, dict | list) for inner in value):
                pending.extend([(f"{name}.{number}", inner) for number, inner in enumerate(value)][::-1])
            elif value:
                yield name, [_scalar(inner) for inner in value]
        elif value is not None:
            yield name, _scalar(value)


def _scalar(value: Any) -> Any:
    """A value that JSON and every reader of it can hold; what cannot becomes text."""
    if isinstance(value, str):
        return clean(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**64:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _big(value) if isinstance(value, int) else clean(str(value))


def _big(value: int) -> str:
    # str() refuses integers of more than 4,300 digits.
    return str(value) if value.bit_length() < 10_000 else hex(value)
