"""One namespace of a database of rounds: what was read of it, moved into its namespace, and kept up by differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from gpuflight.collectors.remote_join import Half, halves_of
from gpuflight.errors import InputError
from gpuflight.graph import Edge, Entity, nodes
from gpuflight.graph.codec import decode_graph, encode_graph
from gpuflight.graph.graph import Graph
from gpuflight.graph.namespaces import move_into
from gpuflight.round_documents import Head, edge_from, entity_from, head_from, parts_from
from gpuflight.sources.mongodb import MongoReader

_TRIES = 3
Documents = list[dict[str, Any]]


class View(Struct):
    """What is shown of a namespace; replaced as a whole, never changed. ``entities`` are all but ``host``; ``halves``
    are the half connections with other hosts and ``stand_ins`` the far ends of these."""

    head: Head
    host: nodes.Host | None = None
    entities: list[Entity] = field(default_factory=list)
    connections: list[Edge] = field(default_factory=list)
    halves: list[Half] = field(default_factory=list)
    stand_ins: dict[str, Entity] = field(default_factory=dict)
    unreadable_count: int = 0
    file: bytes = b""

    def encoded(self) -> bytes:
        """The elements as a graph file, made once."""
        if not self.file:
            there = [*self.entities, self.host] if self.host is not None else self.entities
            edges = {edge.key: edge for edge in self.connections}
            self.file = encode_graph(Graph.of({entity.id: entity for entity in there}, edges))
        return self.file


class Namespace:
    """Reads one namespace again and again; for one thread at a time, ``view`` may be read by any."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.view: View | None = None
        self.full_s = -math.inf
        """When all of it was last compared (monotonic, s)."""
        self._seq = 0
        self._entities = _Table("entities", entity_from)
        self._edges = _Table("edges", edge_from)
        self._ids: dict[str, str] = {}

    def update(self, reader: MongoReader, head: Head, *, full: bool) -> None:
        """Take in what changed up to ``head``, or with ``full`` compare everything. A round that is half written is
        waited for, once there is anything to show. Raises SourceUnavailable."""
        if self.view is not None and not full:
            if not head.complete:
                return
            before = self.view.head
            same = (head.instance, head.round) == (before.instance, before.round)
            if head.seq == self._seq and same:
                self.view = replace(self.view, head=head)
                return
            full = head.seq <= self._seq  # a database that was set back, or made anew, counts from lower again
        for _ in range(_TRIES):
            # Of a round that is being written more may come under the number that it has.
            self._read(reader, head.seq if head.complete else head.complete_seq, full or self.view is None)
            full = False
            found = reader.head(self.name)
            try:
                again = head if found is None else head_from(found)
            except InputError:
                break
            if again.seq == head.seq:
                break
            head = again  # somebody wrote meanwhile: what that was is little, and soon read too
        if head.complete or self.view is None:
            self._show(head)

    def take(self, head: Head, encoded: bytes) -> None:
        """Take in what was recorded. Raises InputError."""
        if self.view is not None and self.view.file == encoded:
            self.view = replace(self.view, head=head)
            return
        graph = decode_graph(encoded)
        self.view = _view(self.name, head, graph.nodes, list(graph.edges.values()), 0)
        self.view.file = encoded

    def _read(self, reader: MongoReader, seq: int, full: bool) -> None:
        tables = (self._entities, self._edges)
        found = [table.ask(reader, self.name, self._seq, full) for table in tables]
        owners = [document["_id"] for documents in found for document in documents if document.get("parts")]
        parts = parts_from(reader.parts(self.name, owners)) if owners else {}
        entities = self._entities.take(found[0], parts)
        edges = self._edges.take(found[1], parts)
        move_into(entities, edges, self.name, self._ids)
        self._seq = seq
        if len(self._ids) > 2 * len(self._entities.elements) + 1000:
            alive = {entity.id for entity in self._entities.elements.values()}
            self._ids = {old: new for old, new in self._ids.items() if new in alive}

    def _show(self, head: Head) -> None:
        entities = {entity.id: entity for entity in self._entities.elements.values()}
        all_edges = self._edges.elements.values()
        connections = [edge for edge in all_edges if edge.source in entities and edge.target in entities]
        lost = self._entities.unreadable_count + self._edges.unreadable_count
        self.view = _view(self.name, head, entities, connections, lost)


class _Table:
    """The entities, or the edges, of a namespace by the ``_id`` of their documents."""

    def __init__(self, collection: str, decode: Callable[[Mapping[str, Any], Any], Any]) -> None:
        self.collection = collection
        self.elements: dict[str, Any] = {}
        self._decode = decode
        self._digests: dict[str, bytes] = {}
        self._unreadable: set[str] = set()

    @property
    def unreadable_count(self) -> int:
        """Documents that are no elements of ours."""
        return len(self._unreadable)

    def ask(self, reader: MongoReader, namespace: str, since_seq: int, full: bool) -> Documents:
        """The documents that are new or other than what is here; those that are gone are taken out at once."""
        if not full:
            return reader.changed(self.collection, namespace, since_seq)
        if not self.elements and not self._unreadable:
            return [d for d in reader.changed(self.collection, namespace, 0) if not d.get("gone")]
        there = reader.digests(self.collection, namespace)
        for id_ in [*self.elements.keys() - there.keys(), *self._unreadable - there.keys()]:
            self._forget(id_)
        return reader.some(
            self.collection, namespace, [id_ for id_, digest in there.items() if self._digests.get(id_) != digest]
        )

    def take(self, documents: Iterable[dict[str, Any]], parts: Any) -> list[Any]:
        """Take documents in; gives the elements that are new, not yet moved anywhere."""
        fresh = []
        for document in documents:
            id_ = document["_id"]
            if document.get("gone"):
                self._forget(id_)
                continue
            try:
                element = sound(self._decode(document, parts))
            except InputError:
                self._forget(id_)
                self._unreadable.add(id_)
                continue
            self._unreadable.discard(id_)
            self.elements[id_] = element
            self._digests[id_] = bytes(document["hash"])
            fresh.append(element)
        return fresh

    def _forget(self, id_: str) -> None:
        self.elements.pop(id_, None)
        self._digests.pop(id_, None)
        self._unreadable.discard(id_)


def sound(element: Any) -> Any:
    """The element without numbers that are none: who wrote it may not have been one of our collectors."""
    odd = {name: value for name, value in element.metrics.items() if not math.isfinite(value)}
    wrong = [
        name for name, value in element.attributes.items() if isinstance(value, float) and not math.isfinite(value)
    ]
    if not odd and not wrong:
        return element
    why = dict.fromkeys((*odd, *wrong), "not a number in the database")
    return replace(
        element,
        metrics={name: value for name, value in element.metrics.items() if name not in why},
        attributes={name: value for name, value in element.attributes.items() if name not in why},
        unknown={**(element.unknown or {}), **why},
    )


def _view(
    name: str, head: Head, entities: Mapping[str, Entity], connections: list[Edge], unreadable_count: int
) -> View:
    host: nodes.Host | None = None
    stand_ins: dict[str, Entity] = {}
    for id_, entity in entities.items():
        if type(entity) is nodes.Host and entity.ns == name:
            host = host or entity
        elif type(entity) is nodes.Socket and entity.attributes.get("remote") is True:
            stand_ins[id_] = entity
    if host is None:  # its collector was off; what is said of a namespace is said of its host
        host = nodes.Host(hostname=str(head.env.get("hostname", "")) or name, ns=name)
    return View(
        head=head,
        host=host,
        entities=[entity for entity in entities.values() if entity is not host and entity.id != host.id],
        connections=connections,
        halves=halves_of(entities, connections) if stand_ins else [],
        stand_ins=stand_ins,
        unreadable_count=unreadable_count,
    )
