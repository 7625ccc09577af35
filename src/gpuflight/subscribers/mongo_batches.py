"""The documents of one round on their way into MongoDB, in batches, with the stamp of the round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from gpuflight.document_values import pack
from gpuflight.round_documents import Document, StoredRound, document_id, finding_document, moment, round_document

if TYPE_CHECKING:
    from pymongo import InsertOne, UpdateOne
    from pymongo.collection import Collection
    from pymongo.database import Database

    Operation = InsertOne[dict[str, Any]] | UpdateOne
    Table = Collection[dict[str, Any]]

BATCH_COUNT = 2000
BATCH_BYTES = 8 * 1024 * 1024
_DUPLICATE_KEY = 11000


class Changes(Struct):
    """What has to be written: documents that are new there, those that may be there, and what has gone, by ``_id``."""

    new: list[Document]
    changed: list[Document]
    gone: list[str]


class RoundWriting:
    """The documents of one round on their way, with its stamp."""

    def __init__(self, database: Database[dict[str, Any]], stored: StoredRound, seq: int, expire_at: Any) -> None:
        self._database = database
        self._stored = stored
        self._namespace = stored.namespace
        self._seq = seq
        self._stamp = {
            "seq": seq,
            "instance": pack(stored.instance),
            "round": stored.number,
            "time": moment(stored.time_ns),
        }
        self._expire_at = expire_at
        self._parts_written = 0

    def elements(self, collection: str, changes: Changes) -> None:
        """Write entities or edges."""
        from pymongo import InsertOne

        self._parts(collection, (*changes.new, *changes.changed), None)
        first = {"first_round": self._stamp["round"], "first_time": self._stamp["time"]}
        alive = {"gone": False, "expire_at": None, **self._stamp}
        crossed = self._send(
            collection,
            (
                (InsertOne({"_id": document.id, **document.fields, **alive, **first}), document.size_bytes)
                for document in changes.new
            ),
        )
        # Somebody else put one there meanwhile, in a round before this one, or in a newer one.
        again = [changes.new[index] for index in crossed]
        self._send(collection, ((self._upsert(d, alive, first), d.size_bytes) for d in (*again, *changes.changed)))
        self._send(collection, ((self._bury(id_), 200) for id_ in changes.gone))

    def findings(self, always: bool) -> None:
        """Write what the rules found, mark what they find no longer; nothing at all if there was and is nothing."""
        if not self._stored.findings and not always:
            return
        documents = [finding_document(self._namespace, finding) for finding in self._stored.findings]
        documents = list({document.id: document for document in documents}.values())
        self._parts("findings", documents, None)
        alive = {"gone": False, "expire_at": None, **self._stamp}
        first = {"first_round": self._stamp["round"], "first_time": self._stamp["time"]}
        self._send("findings", ((self._upsert(d, alive, first), d.size_bytes) for d in documents))
        ended = {"namespace": self._namespace, "gone": False, "seq": {"$lt": self._seq}}
        self._database["findings"].update_many(
            ended, {"$set": {"gone": True, "expire_at": self._expire_at, **self._stamp}}
        )

    def round(self) -> None:
        """Write what the round says beside its graph."""
        document = round_document(self._stored)
        self._parts("rounds", [document], self._expire_at)
        fields = {**document.fields, "seq": self._seq, "expire_at": self._expire_at}
        del fields["namespace"]
        wanted = {"_id": document.id, "namespace": self._namespace}
        self._database["rounds"].update_one(wanted, {"$set": fields}, upsert=True)

    def sweep(self, always: bool) -> int:
        """Delete parts that nothing refers to any more; how many are left. ``always``: also if none was written now."""
        if not self._parts_written and not always:
            return 0
        table = self._database["parts"]
        owners: dict[tuple[str, str], list[tuple[str, bytes]]] = {}
        for part in table.find({"namespace": self._namespace}, {"collection": 1, "owner": 1, "hash": 1}):
            owners.setdefault((part["collection"], part["owner"]), []).append((part["_id"], part["hash"]))
        doomed: list[str] = []
        kept_count = 0
        for (collection, owner), parts in owners.items():
            wanted = {"_id": owner, "namespace": self._namespace}
            found = self._database[collection].find_one(wanted, {"hash": 1, "parts": 1}) or {}
            current = found.get("hash") if found.get("parts") else None
            doomed += [id_ for id_, digest in parts if digest != current]
            kept_count += sum(1 for _, digest in parts if digest == current)
        for start in range(0, len(doomed), BATCH_COUNT):
            some = doomed[start : start + BATCH_COUNT]
            table.delete_many({"namespace": self._namespace, "_id": {"$in": some}})
        return kept_count

    def _parts(self, collection: str, documents: Iterable[Document], expire_at: Any) -> None:
        """What is too large for its document goes first: who sees the document finds them."""
        from pymongo import UpdateOne

        def operations() -> Iterator[tuple[Operation, int]]:
            for document in documents:
                for index, data in enumerate(document.parts):
                    id_ = document_id(self._namespace, f"{collection}:{document.digest.hex()}:{index}:{document.id}")
                    fields = {
                        "collection": collection, "owner": document.id, "hash": document.digest, "index": index,
                        "data": data, "expire_at": expire_at,
                    }  # fmt: skip
                    wanted = {"_id": id_, "namespace": self._namespace}
                    self._parts_written += 1
                    yield UpdateOne(wanted, {"$set": fields}, upsert=True), len(data)

        self._send("parts", operations())

    def _upsert(self, document: Document, alive: dict[str, Any], first: dict[str, Any]) -> UpdateOne:
        from pymongo import UpdateOne

        fields = {**document.fields, **alive}
        del fields["namespace"]  # of the filter; a shard key is not set
        return UpdateOne(self._older(document.id), {"$set": fields, "$setOnInsert": first}, upsert=True)

    def _bury(self, id_: str) -> UpdateOne:
        from pymongo import UpdateOne

        fields = {"gone": True, "expire_at": self._expire_at, **self._stamp}
        return UpdateOne(self._older(id_), {"$set": fields})

    def _older(self, id_: str) -> dict[str, Any]:
        return {"_id": id_, "namespace": self._namespace, "seq": {"$lt": self._seq}}

    def _send(self, collection: str, operations: Iterable[tuple[Operation, int]]) -> list[int]:
        """Send in batches. Gives the positions of those that met a document which is newer, or (inserts) there."""
        table = self._database[collection]
        crossed: list[int] = []
        batch: list[Operation] = []
        size_bytes = done_count = 0
        for operation, operation_bytes in operations:
            if batch and (len(batch) >= BATCH_COUNT or size_bytes + operation_bytes > BATCH_BYTES):
                crossed += [done_count + index for index in bulk(table, batch)]
                done_count += len(batch)
                batch, size_bytes = [], 0
            batch.append(operation)
            size_bytes += operation_bytes
        if batch:
            crossed += [done_count + index for index in bulk(table, batch)]
        return crossed


def bulk(table: Table, batch: list[Operation]) -> list[int]:
    """One batch, in any order. Gives the positions of the operations that met a document with their ``_id``."""
    import pymongo.errors

    try:
        table.bulk_write(batch, ordered=False)
    except pymongo.errors.BulkWriteError as error:
        problems = error.details.get("writeErrors", ())
        if error.details.get("writeConcernErrors") or any(p.get("code") != _DUPLICATE_KEY for p in problems):
            raise
        return [problem["index"] for problem in problems]
    return []
