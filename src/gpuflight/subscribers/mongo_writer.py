"""Writing rounds into MongoDB (schema: docs/mongodb.md): as often as one likes, by as many writers as one likes.

A namespace has one head in ``namespaces``. Writing a round takes the head's next ``seq`` (only one writer gets it),
writes what changed with that ``seq`` as a stamp, and says at last in the head that the round is whole. An element is
written only over one with a lower stamp, so what a slower writer still sends changes nothing, and every filter has the
namespace and the ``_id``, so each goes to one shard. There are no transactions.

What changed is known by the difference that came with the round, or by the graph that this writer wrote before; else
the digests of all elements are read and compared, which also repairs whatever a writer that died left half done.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from gpuflight.errors import DeliveryError, InputError, MissingExtra
from gpuflight.graph import Graph
from gpuflight.graph.diff import diff
from gpuflight.round_documents import (
    Document,
    Head,
    StoredRound,
    document_id,
    edge_document,
    edge_document_id,
    entity_document,
    graph_from,
    head_fields,
    head_from,
    moment,
    parts_from,
)
from gpuflight.sources.mongo_client import Connection, MongoOptions, connect, driver_errors, split_uri, trouble
from gpuflight.subscribers.mongo_batches import Changes, RoundWriting

if TYPE_CHECKING:
    from pymongo.database import Database

DAY_NS = 86_400 * 1_000_000_000
INDEXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "entities": (("namespace", "kind"), ("namespace", "seq")),
    "edges": (("namespace", "source"), ("namespace", "target"), ("namespace", "seq")),
    "findings": (("namespace", "gone"),),
    "rounds": (("namespace", "time"),),
    "parts": (("namespace", "owner"),),
}
"""Indexes of each collection; all have one on ``expire_at`` too, at which a document is deleted."""


class Written(Struct, frozen=True):
    """What became of a round: *written*, or there was the same or a newer one already. ``compared``: the digests of
    the database had to be read. The counts are documents."""

    outcome: Literal["written", "repeated", "older"]
    compared: bool = False
    entities_count: int = 0
    edges_count: int = 0
    gone_count: int = 0


class _Last(Struct):
    """What this writer knows to be in the database."""

    seq: int
    instance: str
    number: int
    graph: Graph


class MongoWriter:
    """Writes rounds of any number of namespaces into one database. ``open`` and ``close`` are for one thread; the
    others for several, as long as no two have the same namespace.

    ``retention_days``: how long what has gone, the findings that ended and the rounds are kept; 0: for ever.
    Every method raises DeliveryError, and has ``options.timeout_s`` for all that it does.
    """

    def __init__(self, options: MongoOptions, database: str = "gpuflight", retention_days: float = 7.0) -> None:
        self._options = options
        self._address = split_uri(options.uri)
        self._name = database
        self._retention_ns = int(retention_days * DAY_NS)
        self._connection: Connection | None = None
        self._last: dict[str, _Last] = {}

    def open(self) -> None:
        """Connect and make the indexes; again: no effect."""
        if self._connection is not None:
            return
        with self._calling():
            connection = connect(self._options, "mongodb")
            try:
                self._make_indexes(connection.client[self._name])
            except BaseException:
                connection.connected()
                connection.close()
                raise
            connection.connected()
            self._connection = connection

    def close(self) -> None:
        """Give back the connections. May be called twice, and before ``open``."""
        connection, self._connection = self._connection, None
        self._last.clear()
        if connection is not None:
            connection.close()

    def forget(self, namespace: str) -> None:
        """Hold no graph of a namespace any more: another writer has it now."""
        self._last.pop(namespace, None)

    def write(self, stored: StoredRound) -> Written:
        """Write a round unless it, or a newer one, is there. A retryable error also tells that another writer was at
        the same namespace."""
        with self._calling():
            try:
                return self._write(stored)
            except BaseException:
                self._last.pop(stored.namespace, None)
                raise

    def head(self, namespace: str) -> Head | None:
        """What the database has of a namespace; None without any round that was written whole."""
        with self._calling():
            found = self._database()["namespaces"].find_one({"_id": namespace})
            head = head_from(found) if found is not None else None
            return head if head is not None and head.complete_seq else None

    def graph(self, namespace: str) -> Graph:
        """The elements that the database has of a namespace now, of whichever rounds they are."""
        with self._calling():
            database, wanted = self._database(), {"namespace": namespace}
            there = {**wanted, "gone": False}
            entities, edges = list(database["entities"].find(there)), list(database["edges"].find(there))
            in_parts = any(document["parts"] for found in (entities, edges) for document in found)
            parts = parts_from(database["parts"].find(wanted)) if in_parts else None
            return graph_from(entities, edges, parts)

    def trial(self) -> None:
        """Show that the database can be written and read: one document goes in and out again."""
        with self._calling():
            table = self._database()["trials"]
            made = table.insert_one({"expire_at": moment(time.time_ns() + DAY_NS)})
            table.delete_one({"_id": made.inserted_id})

    # --- one round ---------------------------------------------------------------------------------------------------

    def _write(self, stored: StoredRound) -> Written:
        namespace = stored.namespace
        now_ns = time.time_ns()
        found = self._database()["namespaces"].find_one({"_id": namespace})
        head = head_from(found) if found is not None else Head(namespace=namespace)
        why = head.refuses(stored, now_ns)
        if why:
            return Written("repeated" if why == "repeated" else "older")
        # A head that somebody deleted leaves elements behind, with stamps that must not be higher than the next.
        floor = head.seq if found is not None else self._highest(namespace)
        seq = self._claim(head, floor + 1, found is None, now_ns)
        writing = RoundWriting(self._database(), stored, seq, self._expire_at(now_ns))
        known = self._known(stored, head, now_ns)
        entities, edges = known if known is not None else self._compared(stored)
        writing.elements("entities", entities)
        writing.elements("edges", edges)
        writing.findings(always=known is None or head.findings_count > 0)
        writing.round()
        parts_count = writing.sweep(always=known is None or head.parts_count > 0)
        self._complete(head, stored, seq, parts_count)
        self._last[namespace] = _Last(seq, stored.instance, stored.number, stored.graph)
        return Written(
            "written",
            known is None,
            len(entities.new) + len(entities.changed),
            len(edges.new) + len(edges.changed),
            len(entities.gone) + len(edges.gone),
        )

    def _highest(self, namespace: str) -> int:
        stamps = [0]
        for collection in ("entities", "edges", "findings"):
            found = self._database()[collection].find({"namespace": namespace}, {"seq": 1}).sort("seq", -1).limit(1)
            stamps += [int(document.get("seq", 0)) for document in found]
        return max(stamps)

    def _expire_at(self, now_ns: int) -> Any:
        return moment(now_ns + self._retention_ns) if self._retention_ns else None

    def _claim(self, head: Head, seq: int, is_new: bool, now_ns: int) -> int:
        fields: dict[str, Any] = {"seq": seq, "namespace": head.namespace, "claimed": moment(now_ns)}
        if not head.complete:  # somebody died, or is slow: what was sent may still arrive for as long as a call takes
            fields["unsettled_until_ns"] = now_ns + int(2e9 * self._options.timeout_s)
        import pymongo.errors

        table = self._database()["namespaces"]
        wanted: dict[str, Any] = {"_id": head.namespace, "seq": head.seq}
        try:
            done = table.update_one(wanted, {"$set": fields}, upsert=is_new)
        except pymongo.errors.DuplicateKeyError:
            raise self._crossed(head.namespace) from None
        if not done.matched_count and done.upserted_id is None:
            raise self._crossed(head.namespace)
        return seq

    def _complete(self, head: Head, stored: StoredRound, seq: int, parts_count: int) -> None:
        fields = head_fields(stored, head, seq, time.time_ns())
        fields["parts_count"] = parts_count
        done = self._database()["namespaces"].update_one({"_id": head.namespace, "seq": seq}, {"$set": fields})
        if not done.matched_count:
            raise self._crossed(head.namespace)

    def _crossed(self, namespace: str) -> DeliveryError:
        text = f"{self._address.where}: another writer is writing {namespace} at the same time"
        return DeliveryError(text, retryable=True)

    def _known(self, stored: StoredRound, head: Head, now_ns: int) -> tuple[Changes, Changes] | None:
        """What changed, if that can be told without asking."""
        if not head.complete or not head.complete_seq or now_ns < head.unsettled_until_ns:
            return None
        last = self._last.get(stored.namespace)
        change = None
        if stored.instance == head.instance and stored.base == head.round:
            change = stored.diff
        if change is None and last is not None:
            # All of it: a database that was set back counts the same numbers again.
            there = (head.complete_seq, head.instance, head.round)
            if (last.seq, last.instance, last.number) == there:
                change = diff(last.graph, stored.graph)
        if change is None:
            return None
        name = stored.namespace
        nodes = [*change.nodes_added, *(step.after for step in change.nodes_changed)]
        edges = [*change.edges_added, *(step.after for step in change.edges_changed)]
        return (
            Changes(
                [], [entity_document(name, e) for e in nodes], [document_id(name, id_) for id_ in change.nodes_removed]
            ),
            Changes(
                [],
                [edge_document(name, e) for e in edges],
                [edge_document_id(name, *key) for key in change.edges_removed],
            ),
        )

    def _compared(self, stored: StoredRound) -> tuple[Changes, Changes]:
        name = stored.namespace
        return (
            self._differing("entities", name, (entity_document(name, e) for e in stored.graph.nodes.values())),
            self._differing("edges", name, (edge_document(name, e) for e in stored.graph.edges.values())),
        )

    def _differing(self, collection: str, namespace: str, documents: Iterable[Document]) -> Changes:
        there = {
            found["_id"]: None if found.get("gone") else found.get("hash")
            for found in self._database()[collection].find({"namespace": namespace}, {"hash": 1, "gone": 1})
        }
        changes = Changes([], [], [])
        for document in documents:
            if document.id not in there:
                changes.new.append(document)
            elif there.pop(document.id) != document.digest:
                changes.changed.append(document)
        changes.gone = [id_ for id_, digest in there.items() if digest is not None]
        return changes

    # --- the driver --------------------------------------------------------------------------------------------------

    def _database(self) -> Database[dict[str, Any]]:
        if self._connection is None:
            raise DeliveryError("not started", retryable=False)
        return self._connection.client[self._name]

    def _make_indexes(self, database: Database[dict[str, Any]]) -> None:
        from pymongo import ASCENDING, IndexModel

        for collection, indexes in INDEXES.items():
            models = [IndexModel([(name, ASCENDING) for name in names]) for names in indexes]
            models.append(IndexModel([("expire_at", ASCENDING)], expireAfterSeconds=0))
            database[collection].create_indexes(models)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """One deadline over all that is done within, and every error of the driver as ours."""
        try:
            import pymongo
        except ImportError as error:
            missing = MissingExtra(error.name or "pymongo", "mongodb", "mongodb")
            raise DeliveryError(str(missing), retryable=False) from error
        try:
            with pymongo.timeout(self._options.timeout_s):
                yield
        except (MissingExtra, InputError) as error:  # no driver; what is in the database is none of ours
            raise DeliveryError(f"{self._address.where}: {error}", retryable=False) from error
        except driver_errors() as error:
            meaning = trouble(error, self._address)
            # The cause may hold the connection string.
            raise DeliveryError(meaning.text, retryable=meaning.retryable) from None


__all__ = ["INDEXES", "MongoWriter", "Written"]
