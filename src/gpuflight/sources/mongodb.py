"""Reading a database of rounds (schema: docs/mongodb.md) beside the rounds of this host.

Documents come back as the driver gives them; who reads them decides what they mean. Reads go to the primary: who asks
for what changed since a stamp must not be told by a secondary that lags behind. What was read enters a recording
through ``Mongo.taped``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpuflight.errors import MissingExtra, SourceUnavailable
from gpuflight.sources.mongo_client import (
    Connection,
    MongoOptions,
    connect,
    driver_errors,
    source_unavailable,
    split_uri,
)
from gpuflight.sources.recording import Tape

if TYPE_CHECKING:
    from pymongo.database import Database

Document = dict[str, Any]
IDS_AT_ONCE = 1000


class Mongo:
    """The databases that may be read; there is one, live, recorded or replayed, in each World."""

    def __init__(self, tape: Tape | None = None) -> None:
        self._tape = tape

    @property
    def replaying(self) -> bool:
        """Whether nothing may be asked, and answers come from a recording."""
        return self._tape is not None and self._tape.mode == "replay"

    @property
    def recording(self) -> bool:
        """Whether what is used of a database must go through ``taped``."""
        return self._tape is not None and self._tape.mode == "record"

    def taped(self, key: str, live: Callable[[], bytes]) -> bytes:
        """What stood for ``key`` this round: what ``live`` gives, or what was recorded of it. Raises SourceUnavailable
        for what a recording does not hold."""
        return live() if self._tape is None else self._tape.ask("mongodb", key, live)


class MongoReader:
    """One database, for one thread at a time. Each method raises SourceUnavailable, and has ``options.timeout_s``."""

    def __init__(self, options: MongoOptions, database: str) -> None:
        self._options = options
        self._name = database
        self._address = split_uri(options.uri)
        self._connection: Connection | None = None

    @property
    def where(self) -> str:
        """For people: host and database."""
        return f"{self._address.where}/{self._name}"

    def heads(self, namespaces: Sequence[str] | None) -> list[Document]:
        """The documents of the namespaces, of all if None."""
        with self._database() as database:
            wanted = {} if namespaces is None else {"_id": {"$in": list(namespaces)}}
            return list(database["namespaces"].find(wanted))

    def head(self, namespace: str) -> Document | None:
        """The document of one namespace; None if it is gone."""
        with self._database() as database:
            return database["namespaces"].find_one({"_id": namespace})

    def changed(self, collection: str, namespace: str, since_seq: int) -> list[Document]:
        """What was written, or marked as gone, with a stamp above ``since_seq``."""
        with self._database() as database:
            return list(database[collection].find({"namespace": namespace, "seq": {"$gt": since_seq}}))

    def digests(self, collection: str, namespace: str) -> dict[str, bytes]:
        """The digest of everything that is there now, by ``_id``."""
        with self._database() as database:
            found = database[collection].find({"namespace": namespace, "gone": False}, {"hash": 1})
            return {document["_id"]: bytes(document["hash"]) for document in found}

    def some(self, collection: str, namespace: str, ids: Sequence[str]) -> list[Document]:
        """The documents of these ``_id``, as far as they are there."""
        found: list[Document] = []
        for start in range(0, len(ids), IDS_AT_ONCE):
            with self._database() as database:
                wanted = {"namespace": namespace, "_id": {"$in": list(ids[start : start + IDS_AT_ONCE])}}
                found += database[collection].find(wanted)
        return found

    def parts(self, namespace: str, owners: Sequence[str]) -> list[Document]:
        """The parts of these documents."""
        with self._database() as database:
            return list(database["parts"].find({"namespace": namespace, "owner": {"$in": list(owners)}}))

    def close(self) -> None:
        """Give back the connection. May be called twice."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextmanager
    def _database(self) -> Iterator[Database[Document]]:
        try:
            connection = self._connection or connect(self._options, "fleet")
        except MissingExtra as error:
            raise SourceUnavailable(str(error)) from error
        except driver_errors() as error:
            raise source_unavailable(error, self._address) from None
        first, self._connection = self._connection is None, connection
        try:
            import pymongo

            with pymongo.timeout(self._options.timeout_s):
                yield connection.client[self._name]
        except driver_errors() as error:
            # The cause may hold the connection string.
            raise source_unavailable(error, self._address) from None
        finally:
            if first:
                connection.connected()
