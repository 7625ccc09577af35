"""Sessions of a fleet and the aggregates of their kernels in MongoDB: what many servers have, in one place.

Collections (schema: docs/events.md): ``event_sessions``, a document each, and ``event_kernels``, one for each session,
kernel, stream and device. A summary is written with a stamp, when something of the session last arrived; it is written
only over one with a lower stamp, so any number of servers may write the same one, in any order, as often as they
like. Its kernels go first: a session's document says that those with its stamp are all there.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from gpuflight.errors import DeliveryError, MissingExtra
from gpuflight.round_documents import moment
from gpuflight.sources.mongo_client import Connection, MongoOptions, connect, driver_errors, split_uri, trouble

if TYPE_CHECKING:
    from pymongo.database import Database

    from gpuflight.events.query.sessions import SessionLine
    from gpuflight.events.store import EventStore, Session

    Document = dict[str, Any]

SESSIONS, KERNELS = "event_sessions", "event_kernels"
KERNELS_AT_MOST = 10_000
"""Lines of one session, those with the most time first."""

_BATCH_COUNT = 1000
_DUPLICATE_KEY = 11000
_INT64 = 2**63 - 1
_NOT_KEPT = ("session_no", "session_id", "log_path")


def store_name(store: EventStore) -> str:
    """What tells one store from another, whichever server has it open."""
    from gpuflight.events.store.parquet import ParquetStore

    return store.store_id if isinstance(store, ParquetStore) else f"{socket.gethostname()}:{store.folder}"


class Summaries:
    """The two collections of one database, for one thread at a time. Every method raises DeliveryError, and has
    ``options.timeout_s`` for each call."""

    def __init__(self, options: MongoOptions, database: str) -> None:
        self._options = options
        self._name = database
        self._address = split_uri(options.uri)
        self._connection: Connection | None = None

    def publish(self, store: EventStore, now_ns: int | None = None) -> int:
        """Write what has changed in a store since it was written last, by whomever, and delete what is gone from it;
        how many sessions were written."""
        name = store_name(store)
        with self._database() as database:
            found = database[SESSIONS].find({"store": name}, {"received_ns": 1, "retention_days": 1, "completed_ns": 1})
            there = {document["_id"]: document for document in found}
        here: set[str] = set()
        written = 0
        offset = 0
        while True:
            sessions, _ = store.catalogue.find(limit=_BATCH_COUNT, offset=offset)
            for session in sessions:
                id_ = _text(session.session_id)
                here.add(id_)
                old = there.get(id_)
                if old is None or any(old.get(key) != getattr(session, key) for key in old if key != "_id"):
                    self._write(store, name, session, now_ns or time.time_ns())
                    written += 1
            offset += len(sessions)
            if not sessions:
                break
        gone = [id_ for id_ in there if id_ not in here]
        for start in range(0, len(gone), _BATCH_COUNT):
            some = gone[start : start + _BATCH_COUNT]
            with self._database() as database:
                database[SESSIONS].delete_many({"store": name, "_id": {"$in": some}})
                database[KERNELS].delete_many({"session_id": {"$in": some}})
        return written

    def _write(self, store: EventStore, name: str, session: Session, now_ns: int) -> None:
        from pymongo import UpdateOne

        from gpuflight.events.query.sessions import describe

        stamp = session.received_ns
        kernels = kernel_documents(store, session)
        line = describe(store, [session], now_ns)[0]
        document = session_document(line, name, len(kernels))
        id_ = document.pop("_id")
        for start in range(0, len(kernels), _BATCH_COUNT):
            operations = []
            for kernel in kernels[start : start + _BATCH_COUNT]:
                wanted = {"_id": kernel.pop("_id"), "session_id": id_, "stamp": {"$lte": stamp}}
                operations.append(UpdateOne(wanted, {"$set": {**kernel, "stamp": stamp}}, upsert=True))
            with self._database() as database:
                _bulk(database[KERNELS], operations)
        with self._database() as database:
            wanted = {"_id": id_, "received_ns": {"$lte": stamp}}
            _bulk(database[SESSIONS], [UpdateOne(wanted, {"$set": document}, upsert=True)])
            # Of a session that was deleted and came again.
            database[KERNELS].delete_many({"session_id": id_, "stamp": {"$lt": stamp}})

    def sessions(
        self, *, hostname: str | None = None, app: str | None = None, limit: int = 100, offset: int = 0
    ) -> tuple[list[Document], int]:
        """Sessions of the whole fleet, the latest start first, and how many there are."""
        wanted = {key: value for key, value in (("hostname", hostname), ("app", app)) if value is not None}
        with self._database() as database:
            found = database[SESSIONS].find(wanted).sort([("start_ns", -1), ("_id", 1)]).skip(offset).limit(limit)
            return list(found), database[SESSIONS].count_documents(wanted)

    def kernels(self, *, session_id: str | None = None, name: str | None = None, limit: int = 100) -> list[Document]:
        """Lines of a session, or of a kernel over all sessions; those with the most time first."""
        wanted = {key: value for key, value in (("session_id", session_id), ("name", name)) if value is not None}
        with self._database() as database:
            return list(database[KERNELS].find(wanted).sort([("total_ns", -1), ("_id", 1)]).limit(limit))

    def close(self) -> None:
        """Give back the connection. May be called twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextmanager
    def _database(self) -> Iterator[Database[Document]]:
        try:
            import pymongo

            first = self._connection is None
            connection = self._connection = self._connection or connect(self._options, "summaries of GPU sessions")
            database: Database[Document] = connection.client[self._name]
            with pymongo.timeout(self._options.timeout_s):
                if first:
                    _make_indexes(database)
                    connection.connected()
                yield database
        except ImportError as error:
            missing = MissingExtra(error.name or "pymongo", "mongodb", "summaries of GPU sessions")
            raise DeliveryError(str(missing), retryable=False) from error
        except MissingExtra as error:
            raise DeliveryError(str(error), retryable=False) from error
        except driver_errors() as error:
            self.close()
            meaning = trouble(error, self._address)
            # The cause may hold the connection string.
            raise DeliveryError(meaning.text, retryable=meaning.retryable) from None


def session_document(line: SessionLine, store: str, kernel_lines: int) -> Document:
    """A session as a document. What is not known is null."""
    session = line.session
    fields = {name: _value(value) for name, value in msgspec.structs.asdict(session).items() if name not in _NOT_KEPT}
    start_ns = session.start_ns or session.first_event_ns
    return {
        "_id": _text(session.session_id),
        **fields,
        "start": moment(start_ns) if start_ns is not None else None,
        "store": store,
        "complete": line.complete,
        "lost_count": line.lost_count,
        "records": line.records,
        "kernel_lines_count": kernel_lines,
    }


def kernel_documents(store: EventStore, session: Session) -> list[Document]:
    """The kernels of a session by stream and device. ``count``: launches; ``durations_count``: those whose duration is
    known, of which the others tell; ``p50_ns`` and ``p99_ns`` are durations that occurred (nearest rank)."""
    from gpuflight.events.query.reader import Reader

    reader = Reader(store, [session])
    rows = reader.rows(
        f"""
        SELECT kernel_id, stream_id, device_id, count(*) AS count, count(duration_ns) AS durations_count,
            sum(duration_ns) AS total_ns, min(duration_ns) AS min_ns, max(duration_ns) AS max_ns,
            quantile_disc(duration_ns, [0.5, 0.99]) AS quantiles
        FROM {reader.table("kernel")} GROUP BY kernel_id, stream_id, device_id
        ORDER BY total_ns DESC NULLS LAST, kernel_id, stream_id, device_id LIMIT {KERNELS_AT_MOST}
        """  # noqa: S608 - names are ours
    )
    texts = reader.texts("kernel", (row["kernel_id"] or 0 for row in rows))
    id_ = _text(session.session_id)
    documents = []
    for row in rows:
        quantiles = row.pop("quantiles") or (None, None)
        key = "/".join("" if row[name] is None else str(row[name]) for name in ("kernel_id", "stream_id", "device_id"))
        documents.append(
            {
                "_id": f"{id_}/{key}",
                **{name: _value(value) for name, value in row.items()},
                "p50_ns": quantiles[0],
                "p99_ns": quantiles[1],
                "name": _value(texts.get((session.session_no, row["kernel_id"] or 0))),
                "hostname": _value(session.hostname),
                "app": _value(session.app),
            }
        )
    return documents


def _value(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int) and not isinstance(value, bool) and not -_INT64 <= value <= _INT64:
        return float(value)  # BSON has no more
    return value


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _bulk(table: Any, operations: list[Any]) -> None:
    """Write; what is there with a higher stamp stays."""
    from pymongo.errors import BulkWriteError, DuplicateKeyError

    try:
        table.bulk_write(operations, ordered=False)
    except DuplicateKeyError:
        pass
    except BulkWriteError as error:
        details = error.details or {}
        problems = [*details.get("writeErrors", ()), *details.get("writeConcernErrors", ())]
        if not problems or any(problem.get("code") != _DUPLICATE_KEY for problem in problems):
            raise


def _make_indexes(database: Database[Document]) -> None:
    from pymongo import ASCENDING, DESCENDING, IndexModel

    database[SESSIONS].create_indexes(
        [
            IndexModel([("start_ns", DESCENDING)]),
            IndexModel([("hostname", ASCENDING), ("start_ns", DESCENDING)]),
            IndexModel([("store", ASCENDING)]),
        ]
    )
    database[KERNELS].create_indexes(
        [
            IndexModel([("session_id", ASCENDING), ("total_ns", DESCENDING)]),
            IndexModel([("name", ASCENDING), ("total_ns", DESCENDING)]),
        ]
    )
