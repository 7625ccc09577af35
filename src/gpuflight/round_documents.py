"""A round as documents of a document database, and documents as a graph again (schema: docs/mongodb.md).

Pure: dictionaries in, dictionaries out; what writes them is ``subscribers.mongo_writer``, what reads them
``collectors.fleet``. Everything survives the way there and back exactly, but that a tuple becomes a list:

* Names and values that a database does not take are written otherwise (``document_values``).
* A document has at most 16 MB: what one element says beyond ``INLINE_BYTES`` lies in parts, documents of their own.
* An ``_id`` is ``NAMESPACE/ID``; one that is too long for an index key, is no valid Unicode, or could be read in two
  ways, is ``NAMESPACE#`` and a hash. Namespaces hold neither ``/`` nor ``#``.
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from gpuflight.document_values import pack, unpack
from gpuflight.errors import InputError
from gpuflight.graph import Edge, Entity, Graph
from gpuflight.graph.codec import DiffLine, edge_kinds, edge_of, entity_of, node_kinds, time_from_text
from gpuflight.graph.codec import Document as GraphDocument
from gpuflight.graph.diff import Diff
from gpuflight.graph.element import edge_id
from gpuflight.graph.namespaces import valid_name
from gpuflight.rounds import Round

INLINE_BYTES = 512 * 1024
"""Of one element in MessagePack. In BSON a list of small numbers is twenty times as large: still below 16 MB."""

PAST_INSTANCES = 64
FUTURE_NS = 300 * 1_000_000_000
PART_BYTES = 4 * 1024 * 1024
_ID_BYTES = 512  # index keys of MongoDB before 4.2: 1024 bytes, with all fields of an index
_BASE = frozenset(Entity.__struct_fields__)
_kinds_met: dict[tuple[str, Any], type[Any]] = {}
T = TypeVar("T")


class StoredRound(Struct, kw_only=True):
    """A round of one namespace on its way into a database: ``instance`` names the run of gpuflight that made it, whose
    rounds are numbered from 1. ``diff`` is what changed since round ``base`` of the same instance, where it is known;
    ``graph`` is always whole. The rest is as in a graph file."""

    namespace: str
    instance: str
    number: int
    time_ns: int
    graph: Graph
    diff: Diff | None = None
    base: int | None = None
    env: dict[str, Any] = field(default_factory=dict)
    coverage: list[Any] = field(default_factory=list)
    findings: list[Any] = field(default_factory=list)
    own_cost: dict[str, Any] | None = None
    duration_s: float | None = None
    truncated_by: str = ""

    def __post_init__(self) -> None:
        if not valid_name(self.namespace):
            raise ValueError(f"not a name of a namespace: {self.namespace!r}")


class Document(Struct):
    """One document: its ``_id``, its fields without the stamp of the round, the digest of what it says, its parts if
    that is too much for one, and about how large it is (bytes)."""

    id: str
    fields: dict[str, Any]
    digest: bytes
    size_bytes: int
    parts: list[bytes] = field(default_factory=list)


def stored_round(namespace: str, instance: str, done: Round) -> StoredRound:
    """A round of this process."""
    return StoredRound(
        namespace=namespace,
        instance=instance,
        number=done.number,
        time_ns=done.time_ns,
        graph=done.graph,
        diff=done.diff,
        base=done.number - 1,
        env=msgspec.to_builtins(done.env),
        coverage=msgspec.to_builtins(done.coverage),
        findings=msgspec.to_builtins(done.findings),
        own_cost=msgspec.to_builtins(done.own_cost),
        duration_s=done.duration_s,
        truncated_by=done.truncated_by,
    )


def stored_document(
    namespace: str, instance: str, parsed: GraphDocument, graph: Graph, time_ns: int = 0
) -> StoredRound:
    """A round that came as a graph file; ``time_ns`` is more exact than the file's time, where it is known."""
    return StoredRound(
        namespace=namespace,
        instance=instance,
        number=parsed.round,
        time_ns=time_ns or time_from_text(parsed.time),
        graph=graph,
        env=parsed.env,
        coverage=parsed.coverage,
        findings=parsed.findings,
        own_cost=parsed.own_cost,
        duration_s=parsed.duration_s,
        truncated_by=parsed.truncated_by,
    )


def stored_difference(before: StoredRound, graph: Graph, change: Diff, line: DiffLine, time_ns: int = 0) -> StoredRound:
    """A round that came as what changed since ``before``; ``graph`` is that of ``before`` after the change."""
    return StoredRound(
        namespace=before.namespace,
        instance=before.instance,
        number=line.round,
        time_ns=time_ns or time_from_text(line.time),
        graph=graph,
        diff=change,
        base=before.number,
        env=before.env,
        coverage=line.coverage,
        findings=line.findings,
        own_cost=line.own_cost,
        duration_s=line.duration_s,
        truncated_by=line.truncated_by,
    )


class Head(Struct, kw_only=True):
    """What the document of a namespace in ``namespaces`` says: which round its elements are of.

    ``seq`` counts the rounds that were begun to be written, ``complete_seq`` is that of the last one that was written
    whole: if they differ, a round is half written. Until ``unsettled_until_ns`` (the writer's clock) what another
    writer left behind may still arrive. ``parts_count`` are documents in ``parts``; ``past`` the instances before.
    """

    namespace: str
    seq: int = 0
    complete_seq: int = 0
    instance: str = ""
    round: int = 0
    time_ns: int = 0
    written_ns: int = 0
    unsettled_until_ns: int = 0
    parts_count: int = 0
    past: list[str] = field(default_factory=list)
    env: dict[str, Any] = field(default_factory=dict)
    nodes_count: int = 0
    edges_count: int = 0
    findings_count: int = 0
    truncated_by: str = ""

    @property
    def complete(self) -> bool:
        """Whether its elements are all of one round."""
        return self.seq == self.complete_seq

    def refuses(self, stored: StoredRound, now_ns: int) -> str:
        """Why a round is not to be written: ``repeated``, ``older``, or empty if it is newer than what is there.

        Rounds of one instance go by their numbers. Another instance is newer if its clock says so, unless it is one
        that was replaced; a head that claims to be of the future is not believed: its clock was wrong."""
        if not self.complete_seq:
            return ""
        if stored.instance == self.instance:
            if stored.number > self.round:
                return ""
            return "repeated" if stored.number == self.round else "older"
        if stored.instance in self.past:
            return "older"
        believed = self.time_ns <= now_ns + FUTURE_NS
        return "older" if believed and stored.time_ns <= self.time_ns else ""


def head_from(document: Mapping[str, Any]) -> Head:
    """The head in a document of ``namespaces``. Raises InputError."""
    try:
        return msgspec.convert({**unpack(document), "namespace": document["_id"]}, Head)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"not the head of a namespace: {error}") from None


def head_fields(stored: StoredRound, before: Head, seq: int, now_ns: int) -> dict[str, Any]:
    """What the document of a namespace says after a round was written whole as number ``seq``."""
    past = before.past
    if before.instance and before.instance != stored.instance:
        past = [*(name for name in past if name != before.instance), before.instance][-PAST_INSTANCES:]
    return {
        "complete_seq": seq,
        "instance": pack(stored.instance),
        "round": pack(stored.number),
        "time": moment(stored.time_ns),
        "time_ns": pack(stored.time_ns),
        "written": moment(now_ns),
        "written_ns": now_ns,
        "past": pack(past),
        "env": pack(stored.env),
        "nodes_count": len(stored.graph.nodes),
        "edges_count": len(stored.graph.edges),
        "findings_count": len(stored.findings),
        "truncated_by": pack(stored.truncated_by),
    }


# --- ids -------------------------------------------------------------------------------------------------------------


def document_id(namespace: str, id_: str) -> str:
    """The ``_id`` of an entity, a finding or a round."""
    text = f"{namespace}/{id_}"
    if _fits(text):
        return text
    return f"{namespace}#{_digest(id_.encode('utf-8', 'surrogatepass')).hex()}"


def edge_document_id(namespace: str, source: str, target: str, kind: str) -> str:
    """The ``_id`` of an edge: its id, unless an end looks like two."""
    if "->" not in source and "->" not in target:
        text = f"{namespace}/{edge_id((source, target, kind))}"
        if _fits(text):
            return text
    ends = [part.encode("utf-8", "surrogatepass") for part in (kind, source, target)]
    return f"{namespace}#{_digest(msgspec.msgpack.encode(ends)).hex()}"


def _fits(text: str) -> bool:
    if text.isascii():
        return len(text) <= _ID_BYTES
    try:
        return len(text.encode()) <= _ID_BYTES
    except UnicodeEncodeError:
        return False


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


# --- there -----------------------------------------------------------------------------------------------------------


def entity_document(namespace: str, entity: Entity) -> Document:
    """An entity: ``id``, ``kind``, ``ns`` (of foreign ones), ``identity``, ``attributes``, ``metrics``, ``unknown``."""
    fields = {
        "id": pack(entity.id),
        "kind": entity.kind,
        "ns": pack(entity.ns),
        "identity": {name: pack(getattr(entity, name)) for name in _identity_names(type(entity))},
        "attributes": pack(entity.attributes),
        "metrics": pack(entity.metrics),
        "unknown": pack(entity.unknown),
    }
    return _document(namespace, document_id(namespace, entity.id), fields, {"id": None, "identity": None, "ns": None})


def edge_document(namespace: str, edge: Edge) -> Document:
    """An edge: ``kind``, ``source`` and ``target`` (each the ``_id`` of an entity's document), ``attributes``,
    ``metrics``, ``unknown``. ``ends`` are the ids of its ends where the ``_id`` does not tell them."""
    source, target = document_id(namespace, edge.source), document_id(namespace, edge.target)
    start = f"{namespace}/"
    hidden = not (source.startswith(start) and target.startswith(start))
    fields = {
        "kind": edge.kind,
        "source": source,
        "target": target,
        "ends": [pack(edge.source), pack(edge.target)] if hidden else None,
        "attributes": pack(edge.attributes),
        "metrics": pack(edge.metrics),
        "unknown": pack(edge.unknown),
    }
    return _document(
        namespace, edge_document_id(namespace, edge.source, edge.target, edge.kind), fields, {"ends": None}
    )


def finding_document(namespace: str, finding: Mapping[str, Any]) -> Document:
    """A finding: its fields as in a graph file."""
    finding_id = str(finding.get("id", ""))
    fields = {
        "finding": pack(dict(finding)),
        "severity": pack(finding.get("severity")),
        "rule": pack(finding.get("rule")),
    }
    return _document(namespace, document_id(namespace, finding_id), fields, {"finding": None})


def round_document(stored: StoredRound) -> Document:
    """What a round says beside its graph: ``coverage``, ``own_cost``, ``env``, how long it took, how much it holds."""
    fields = {
        "instance": pack(stored.instance),
        "round": pack(stored.number),
        "time": moment(stored.time_ns),
        "time_ns": pack(stored.time_ns),
        "duration_s": stored.duration_s,
        "truncated_by": pack(stored.truncated_by),
        "nodes_count": len(stored.graph.nodes),
        "edges_count": len(stored.graph.edges),
        "findings_count": len(stored.findings),
        "own_cost": pack(stored.own_cost),
        "env": pack(stored.env),
        "coverage": pack(stored.coverage),
    }
    id_ = document_id(stored.namespace, f"{stored.instance}/{stored.number}")
    return _document(stored.namespace, id_, fields, {"coverage": None, "env": None, "own_cost": None})


def _document(namespace: str, id_: str, fields: dict[str, Any], left_out: dict[str, Any]) -> Document:
    raw = msgspec.msgpack.encode(fields)
    digest = _digest(raw)
    parts: list[bytes] = []
    if len(raw) > INLINE_BYTES:
        parts = [raw[start : start + PART_BYTES] for start in range(0, len(raw), PART_BYTES)]
        empty: dict[str, Any] = {name: {} for name in ("attributes", "metrics") if name in fields}
        fields = {**fields, **empty, **left_out, **({"unknown": None} if "unknown" in fields else {})}
    fields["namespace"] = namespace
    fields["hash"] = digest
    fields["parts"] = len(parts)
    return Document(id_, fields, digest, INLINE_BYTES if parts else len(raw), parts)


@lru_cache(maxsize=1024)
def _identity_names(cls: type[Entity]) -> tuple[str, ...]:
    return tuple(name for name in cls.__struct_fields__ if name not in _BASE)


def moment(time_ns: int) -> dt.datetime:
    """A time as databases keep it (UTC, to the millisecond); the nearest one they can keep."""
    milliseconds = min(max(time_ns // 1_000_000, -62_135_596_800_000), 253_402_300_799_999)
    return dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(milliseconds=milliseconds)


# --- and back --------------------------------------------------------------------------------------------------------


Parts = Mapping[tuple[str, str, bytes], bytes]
"""What lies in parts, by collection, ``_id`` and digest of the document that it belongs to; see ``parts_from``."""


def _body(document: Mapping[str, Any], collection: str, parts: Parts | None) -> Mapping[str, Any]:
    """What a document says: its own fields, or those in its parts."""
    if not document.get("parts"):
        return document
    digest = bytes(document["hash"])
    raw = (parts or {}).get((collection, document["_id"], digest))
    if raw is None or _digest(raw) != digest:
        raise InputError(f"{document['_id'][:200]}: its parts are not there, or were just written anew")
    body: Mapping[str, Any] = msgspec.msgpack.decode(raw)
    return body


def _typed(plain: dict[str, Any], kinds: Callable[[], dict[str, type[T]]], slowly: Callable[[dict[str, Any]], T]) -> T:
    kind = (plain["kind"], kinds)
    cls = _kinds_met.get(kind)
    if cls is None and (cls := kinds().get(kind[0])) is not None:
        _kinds_met[kind] = cls
    if cls is not None:
        try:
            element: T = msgspec.convert(plain, cls)
            return element
        except msgspec.ValidationError:
            pass
    return slowly(plain)  # a kind that nobody here declares, or what is wrong with it


def entity_from(document: Mapping[str, Any], parts: Parts | None = None) -> Entity:
    """The entity of a document. Raises InputError."""
    try:
        body = _body(document, "entities", parts)
        plain = {
            **{name: unpack(value) for name, value in body["identity"].items()},
            "kind": body["kind"],
            "id": unpack(body["id"]),
            "ns": unpack(body["ns"]),
            "attributes": unpack(body["attributes"]),
            "metrics": unpack(body["metrics"]),
            "unknown": unpack(body["unknown"]),
        }
        return _typed(plain, node_kinds, entity_of)
    except (KeyError, TypeError, AttributeError, ValueError, msgspec.DecodeError) as error:
        raise InputError(f"not an entity of gpuflight: {type(error).__name__}: {error}") from None


def edge_from(document: Mapping[str, Any], parts: Parts | None = None) -> Edge:
    """The edge of a document. Raises InputError."""
    try:
        body = _body(document, "edges", parts)
        if body["ends"] is not None:
            source, target = unpack(body["ends"])
        else:
            skip = len(document["namespace"]) + 1
            source, target = body["source"][skip:], body["target"][skip:]
        plain = {
            "kind": body["kind"],
            "source": source,
            "target": target,
            "attributes": unpack(body["attributes"]),
            "metrics": unpack(body["metrics"]),
            "unknown": unpack(body["unknown"]),
        }
        return _typed(plain, edge_kinds, edge_of)
    except (KeyError, TypeError, AttributeError, ValueError, msgspec.DecodeError) as error:
        raise InputError(f"not an edge of gpuflight: {type(error).__name__}: {error}") from None


def finding_from(document: Mapping[str, Any], parts: Parts | None = None) -> dict[str, Any]:
    """The finding of a document, as a dictionary. Raises InputError."""
    try:
        found: dict[str, Any] = unpack(_body(document, "findings", parts)["finding"])
    except (KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
        raise InputError(f"not a finding of gpuflight: {type(error).__name__}: {error}") from None
    return found


def parts_from(parts: Iterable[Mapping[str, Any]]) -> Parts:
    """The documents of ``parts`` put together; of several versions of an element each by itself."""
    pieces: dict[tuple[str, str, bytes], dict[int, bytes]] = {}
    for part in parts:
        key = (part["collection"], part["owner"], bytes(part["hash"]))
        pieces.setdefault(key, {})[int(part["index"])] = bytes(part["data"])
    return {key: b"".join(data for _, data in sorted(found.items())) for key, found in pieces.items()}


def graph_from(
    entities: Iterable[Mapping[str, Any]], edges: Iterable[Mapping[str, Any]], parts: Parts | None = None
) -> Graph:
    """The graph of documents, without those that are marked as gone. Raises InputError."""
    return Graph(
        [entity_from(document, parts) for document in entities if not document.get("gone")],
        [edge_from(document, parts) for document in edges if not document.get("gone")],
    )
