"""The records: batches of every session in one DuckDB file, written whole or not at all.

A write is one transaction: the rows, the numbers of the batches, the losses, and how far its source is stored now. So
what was acknowledged survives ``kill -9``, and what is handed in again, because an acknowledgement was lost or a reader
began anew, is recognised: by the position in its source, or by (session, wire type, batch number).

Rows go in by column, many batches at a time: row by row DuckDB is a hundred times slower (benchmarks/bench_store.py).
"""

from __future__ import annotations

import contextlib
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from gpuflight.errors import InputError, MissingExtra
from gpuflight.events.arrays import numpy
from gpuflight.events.batch import Batch
from gpuflight.events.ledger import Ledger
from gpuflight.events.store.layout import (
    CLOCKS,
    OWN_BY_SESSION,
    VERSION,
    create_statements,
    key_of,
    stored_columns,
    upsert_statement,
)
from gpuflight.events.tables import TABLES, Table

if TYPE_CHECKING:
    import duckdb

_KNOWN_SESSIONS = 256
"""Sessions whose batch numbers are kept in memory (about 100 bytes per 2,048 rows)."""

_MEMORY_LIMIT_BYTES = 1 << 30

_ROW_GROUP_ROWS = 20_480
"""Rows that are compressed together. A write of at least so many goes to the file at once; what is less goes to the log
first and is compressed later, and with DuckDB's 122,880 that is every window of an agent: twice the work of ingest.
"""


class Source(NamedTuple):
    """Where lines came from: a name for it (a file, a window, a partition), and which part of it they are, ``start`` to
    ``end`` in whatever it counts (bytes, offsets). ``session_id``: whose losses are its losses, if it has no records.
    ``renew``: the part begins where it says, whatever was stored."""

    name: str
    start: int
    end: int
    session_id: str = ""
    renew: bool = False


class Overlap(Exception):
    """A part of the source is stored already, up to ``position``: hand in what follows it."""

    def __init__(self, position: int) -> None:
        super().__init__(f"stored already up to {position}")
        self.position = position


class Part(NamedTuple):
    """What one sender handed in: batches, where they come from, what was lost on the way here."""

    batches: Sequence[Batch]
    source: Source | None = None
    ledger: Ledger | None = None


class Written(msgspec.Struct):
    """What a write did. ``repeated``: the source was stored already, nothing was done. ``stored_to``: only a part of it
    was, up to here, and nothing was done."""

    rows: int = 0
    repeated: bool = False
    stored_to: int | None = None
    ledger: Ledger = msgspec.field(default_factory=Ledger)
    rows_by_table: dict[str, int] = msgspec.field(default_factory=dict)


class Relation(NamedTuple):
    """A table of some sessions as SQL to select from."""

    sql: str


class Records:
    """The record database. Any number of threads may read; writes take turns.

    Raises InputError where the file cannot be opened, MissingExtra without DuckDB.
    """

    def __init__(self, path: str, number_of: Callable[[str], int], *, threads: int | None = None) -> None:
        try:
            import duckdb
        except ImportError:
            raise MissingExtra("duckdb", "events", "the event store") from None
        self.path = path
        self._number_of = number_of
        self._np = numpy()
        config: dict[str, Any] = {
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "memory_limit": f"{_MEMORY_LIMIT_BYTES}B",
            "checkpoint_threshold": "64MB",
            "preserve_insertion_order": "false",
        }
        if threads:
            config["threads"] = str(threads)
        try:
            self._connection: duckdb.DuckDBPyConnection = duckdb.connect(":memory:", config=config)
            quoted = path.replace("'", "''")
            self._connection.execute(f"ATTACH '{quoted}' AS events (ROW_GROUP_SIZE {_ROW_GROUP_ROWS})")
            self._connection.execute("USE events")
            self._connection.execute("SET enable_external_access = false")
            self._prepare()
        except duckdb.IOException as error:
            text = str(error).splitlines()[0]
            if "lock" in text.lower():
                text = "another process has it open; ask that one (gpuflight-server), or stop it"
            raise InputError(f"{path}: {text}") from error
        except duckdb.Error as error:
            raise InputError(f"{path}: cannot be opened as an event store: {str(error).splitlines()[0]}") from error
        self._lock = threading.Lock()
        self._closed = False
        self._batches: dict[int, dict[tuple[str, int], int]] = {}
        self._positions: dict[str, int] = {}

    def _prepare(self) -> None:
        for statement in create_statements():
            self._connection.execute(statement)
        row = self._connection.execute("SELECT max(version) FROM store").fetchone()
        found = row[0] if row is not None else None
        if found is None:
            self._connection.execute("INSERT INTO store VALUES (?)", (VERSION,))
        elif found > VERSION:
            raise InputError(f"{self.path}: written by a newer gpuflight (layout {found}, this one knows {VERSION})")

    # --- writing ---------------------------------------------------------------------------------------------------

    def write(self, batches: Sequence[Batch], source: Source | None = None, ledger: Ledger | None = None) -> Written:
        """Store batches, all or nothing. When it returns they are safe. ``ledger``: what was lost on the way here. All
        that came of one numbered batch of the wire has to come in one call.

        Raises Overlap if a part of the source is stored, InputError if the database refuses (a full disk).
        """
        written = self.write_parts([Part(batches, source, ledger)])[0]
        if written.stored_to is not None:
            raise Overlap(written.stored_to)
        return written

    def write_parts(self, parts: Sequence[Part]) -> list[Written]:
        """Store what several senders handed in, all or nothing, for the price of one write. A part of which something
        is stored already is left out, and its answer says so. Raises InputError if the database refuses."""
        import duckdb

        results = [Written() for _ in parts]
        with self._lock:
            new = self._new_parts(parts, results)
            if not new:
                return results
            cursor = self._connection
            try:
                cursor.execute("BEGIN")
                fresh: list[tuple[int, Batch]] = []
                noted: list[tuple[int, str, int, int]] = []
                for part, written in new:
                    found = self._new(part.batches, written, noted)
                    _count(found, written)
                    fresh += found
                self._insert_noted(noted)
                for table, group in _by_table(fresh).items():
                    self._insert(TABLES[table], group)
                self._insert_extra(fresh)
                ended: dict[str, tuple[int, int | None]] = {}
                for part, written in new:
                    self._insert_end(part, written, ended)
                self._insert_sources(ended)
                cursor.execute("COMMIT")
            except BaseException as error:
                self._forget()
                try:
                    cursor.execute("ROLLBACK")
                except duckdb.Error:  # the transaction is gone already
                    pass
                if isinstance(error, duckdb.Error):
                    raise InputError(f"{self.path}: {str(error).splitlines()[0]}") from error
                raise
            for part, _ in new:
                if part.source is not None:
                    self._positions[part.source.name] = part.source.end
            return results

    def _new_parts(self, parts: Sequence[Part], results: list[Written]) -> list[tuple[Part, Written]]:
        """The parts whose sources are not stored."""
        new: list[tuple[Part, Written]] = []
        reached: dict[str, int] = {}  # by parts of this very write
        for part, written in zip(parts, results, strict=True):
            source = part.source
            if source is not None and not source.renew:
                position = reached.get(source.name, self._position(source.name))
                if position is not None and position >= source.end:
                    written.repeated = True
                    continue
                if position is not None and position > source.start:
                    written.stored_to = position
                    continue
            if source is not None:
                reached[source.name] = source.end
            new.append((part, written))
        return new

    def _insert_end(self, part: Part, written: Written, ended: dict[str, tuple[int, int | None]]) -> None:
        """What was lost; ``ended`` gets how far the source is stored now, and its session."""
        source, batches = part.source, part.batches
        session_id = (source.session_id if source is not None else "") or (batches[0].session_id if batches else "")
        session_no = self._number_of(session_id) if session_id else None
        self._insert_losses(session_no or 0, part.ledger, written.ledger)
        if source is not None:
            before = ended.get(source.name, (0, None))[1]
            ended[source.name] = (source.end, before if session_no is None else session_no)

    def _insert_sources(self, ended: dict[str, tuple[int, int | None]]) -> None:
        """How far sources are stored now; all by one statement, or two, since a session may be unknown."""
        np, now_ns = self._np, time.time_ns()
        for known in (True, False):
            rows = [(name, end, no) for name, (end, no) in ended.items() if (no is not None) == known]
            if not rows:
                continue
            columns = {
                "name": np.array([row[0] for row in rows], dtype=object),
                "position": np.array([row[1] for row in rows], dtype="int64"),
                "written_ns": np.full(len(rows), now_ns, dtype="int64"),
            }
            if known:
                columns["session_no"] = np.array([row[2] for row in rows], dtype="uint32")
            names = ", ".join(columns)
            sets = ", ".join(f"{name} = excluded.{name}" for name in columns if name != "name")
            self._connection.register("incoming", columns)
            try:
                self._connection.execute(
                    f"INSERT INTO source ({names}) SELECT {names} FROM incoming ON CONFLICT DO UPDATE SET {sets}"  # noqa: S608
                )
            finally:
                self._connection.unregister("incoming")

    def position(self, source: str) -> int | None:
        """How far a source is stored; None: nothing of it. Does not wait for a write that is under way."""
        known = self._positions.get(source)
        if known is not None:
            return known
        with self._cursor() as cursor:
            row = cursor.execute("SELECT position FROM source WHERE name = ?", (source,)).fetchone()
        return int(row[0]) if row is not None else None

    def _position(self, source: str) -> int | None:
        known = self._positions.get(source)
        if known is None:
            row = self._connection.execute("SELECT position FROM source WHERE name = ?", (source,)).fetchone()
            if row is None:
                return None
            if len(self._positions) > 100_000:
                self._positions.clear()
            known = self._positions[source] = int(row[0])
        return known

    def _forget(self) -> None:
        """What is remembered of the database may not be so any more."""
        self._batches.clear()
        self._positions.clear()

    def _new(
        self, batches: Sequence[Batch], written: Written, noted: list[tuple[int, str, int, int]]
    ) -> list[tuple[int, Batch]]:
        """The batches that are not stored yet, with the numbers of their sessions; ``noted`` gets what is to be noted
        as stored."""
        fresh: list[tuple[int, Batch]] = []
        digests: dict[tuple[int, str, int], list[int]] = {}
        for batch in batches:
            session_no = self._number_of(batch.session_id)
            if batch.batch_id is not None and not TABLES[batch.table].key:
                digests.setdefault((session_no, batch.wire_type, batch.batch_id), []).append(self._digest(batch))
        repeated: set[tuple[int, str, int]] = set()
        for (session_no, wire_type, batch_id), parts in digests.items():
            # A batch on the wire may come as several: of more than one table, or of rows that lack different columns.
            digest = zlib.crc32(b"".join(part.to_bytes(8, "little") for part in sorted(set(parts))))
            known = self._known(session_no).get((wire_type, batch_id))
            if known is None:
                self._known(session_no)[wire_type, batch_id] = digest
                noted.append((session_no, wire_type, batch_id, digest))
            elif known == digest:
                repeated.add((session_no, wire_type, batch_id))
                written.ledger.add("repeated_batch", subject=wire_type)
            else:
                written.ledger.add("batch_conflict", subject=wire_type)
        for batch in batches:
            session_no = self._number_of(batch.session_id)
            if batch.batch_id is None or (session_no, batch.wire_type, batch.batch_id) not in repeated:
                fresh.append((session_no, batch))
        return fresh

    def _insert_noted(self, noted: list[tuple[int, str, int, int]]) -> None:
        if noted:
            self._insert_columns(
                "batch",
                {
                    "session_no": self._np.array([row[0] for row in noted], dtype="uint32"),
                    "wire_type": self._np.array([row[1] for row in noted], dtype=object),
                    "batch_id": self._np.array([row[2] for row in noted], dtype="int64"),
                    "digest": self._np.array([row[3] for row in noted], dtype="uint64"),
                },
            )

    def _known(self, session_no: int) -> dict[tuple[str, int], int]:
        known = self._batches.get(session_no)
        if known is None:
            rows = self._connection.execute(
                "SELECT wire_type, batch_id, digest FROM batch WHERE session_no = ?", (session_no,)
            ).fetchall()
            if len(self._batches) >= _KNOWN_SESSIONS:
                self._batches.pop(next(iter(self._batches)))
            known = self._batches[session_no] = {(row[0], row[1]): row[2] for row in rows}
        return known

    def _digest(self, batch: Batch) -> int:
        digest = zlib.crc32(f"{batch.table}{batch.count}".encode())
        for name in sorted(batch.columns):
            column = batch.columns[name]
            raw = "\0".join(column).encode("utf-8", "surrogatepass") if isinstance(column, list) else column.tobytes()
            digest = zlib.crc32(raw, zlib.crc32(name.encode(), digest))
        return digest

    def _insert(self, table: Table, group: list[tuple[int, Batch]]) -> None:
        """The batches of one table: those with the same columns at once."""
        np = self._np
        alike: dict[tuple[str, ...], list[tuple[int, Batch]]] = {}
        for session_no, batch in group:
            alike.setdefault(tuple(batch.columns), []).append((session_no, batch))
        known = {name for name, _ in stored_columns(table)}
        for names, members in alike.items():
            counts = [batch.count for _, batch in members]
            columns: dict[str, Any] = {
                "session_no": np.repeat(np.array([number for number, _ in members], dtype="uint32"), counts)
            }
            if table.time:
                clocks = np.array([CLOCKS[batch.clock] for _, batch in members], dtype="uint8")
                columns["clock"] = np.repeat(clocks, counts)
            for name in names:
                if name not in known:
                    raise KeyError(f"{table.name}.{name}")
                parts = [batch.columns[name] for _, batch in members]
                if isinstance(parts[0], list):
                    columns[name] = np.array([text for part in parts for text in part], dtype=object)
                else:
                    columns[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
            if table.key:
                columns = _last_of_each_key(np, key_of(table), columns)
            self._insert_columns(table.name, columns, table if table.key else None)

    def _insert_columns(self, table: str, columns: dict[str, Any], upsert: Table | None = None) -> None:
        self._connection.register("incoming", columns)
        try:
            names = list(columns)
            if upsert is not None:
                self._connection.execute(upsert_statement(upsert, names, "incoming"))
            else:
                listed = ", ".join(f'"{name}"' for name in names)
                self._connection.execute(f'INSERT INTO "{table}" ({listed}) SELECT {listed} FROM incoming')  # noqa: S608
        finally:
            self._connection.unregister("incoming")

    def _insert_extra(self, batches: list[tuple[int, Batch]]) -> None:
        for session_no, batch in batches:
            if batch.extra:
                self._connection.execute(
                    "INSERT INTO extra VALUES (?, ?, ?, ?)",
                    (session_no, batch.wire_type, batch.batch_id, msgspec.json.encode(batch.extra).decode()),
                )

    def _insert_losses(self, session_no: int, *ledgers: Ledger | None) -> None:
        for ledger in ledgers:
            for entry in ledger or ():
                place = str(entry.places[0]) if entry.places else ""
                self._connection.execute(
                    "INSERT INTO loss VALUES (?, ?, ?, ?, ?, ?)",
                    (session_no, entry.reason, entry.detail, entry.count, entry.size_bytes, place),
                )

    # --- reading ---------------------------------------------------------------------------------------------------

    def relation(self, table: str, sessions: Iterable[int]) -> Relation:
        """A table's rows of some sessions."""
        numbers = ", ".join(str(int(number)) for number in sessions) or "NULL"
        name = table if table in OWN_BY_SESSION else TABLES[table].name
        return Relation(f'(SELECT * FROM "{name}" WHERE session_no IN ({numbers}))')  # noqa: S608 - names are ours

    def columns(self, sql: str, values: Sequence[Any] = ()) -> dict[str, Any]:
        """The answer to a query as numpy arrays by column (masked where something is NULL)."""
        with self._cursor() as cursor:
            answer: dict[str, Any] = cursor.execute(sql, values).fetchnumpy()
            return answer

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The answer to a query as dicts; for answers of a few thousand rows."""
        with self._cursor() as cursor:
            cursor.execute(sql, values)
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def used_bytes(self) -> int:
        """Size of the file that is in use, bytes; what is free in it will be used again."""
        with self._cursor() as cursor:
            rows = cursor.execute("PRAGMA database_size").fetchall()
        return next(int(row[2]) * int(row[4]) for row in rows if row[0] == "events")

    def _cursor(self) -> duckdb.DuckDBPyConnection:
        """A connection of a reader's own."""
        cursor = self._connection.cursor()
        cursor.execute("USE events")
        return cursor

    # --- upkeep ----------------------------------------------------------------------------------------------------

    def remove(self, sessions: Iterable[int]) -> None:
        """Delete everything of some sessions, all or nothing, and give their room back to the file."""
        numbers = ", ".join(str(int(number)) for number in sessions)
        if not numbers:
            return
        with self._lock:
            self._forget()
            self._connection.execute("BEGIN")
            try:
                for table in (*TABLES, *OWN_BY_SESSION):
                    self._connection.execute(f'DELETE FROM "{table}" WHERE session_no IN ({numbers})')  # noqa: S608
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("CHECKPOINT")

    def close(self) -> None:
        """Write everything to the file proper and give it back. May be called twice."""
        import duckdb

        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(duckdb.Error):  # a full disk: the log beside the file has it
                self._connection.execute("CHECKPOINT")
            self._connection.close()


def _count(batches: list[tuple[int, Batch]], written: Written) -> None:
    for _, batch in batches:
        written.rows += batch.count
        written.rows_by_table[batch.table] = written.rows_by_table.get(batch.table, 0) + batch.count


def _by_table(batches: list[tuple[int, Batch]]) -> dict[str, list[tuple[int, Batch]]]:
    found: dict[str, list[tuple[int, Batch]]] = {}
    for session_no, batch in batches:
        found.setdefault(batch.table, []).append((session_no, batch))
    return found


def _last_of_each_key(np: Any, key: tuple[str, ...], columns: dict[str, Any]) -> dict[str, Any]:
    """One statement may touch a key once: of rows with the same key the last."""
    rows = list(zip(*(columns[name].tolist() for name in key), strict=True))
    last = {row: index for index, row in enumerate(rows)}
    if len(last) == len(rows):
        return columns
    chosen = np.array(sorted(last.values()))
    return {name: column[chosen] for name, column in columns.items()}
