"""The records: batches of every session in one DuckDB file, written whole or not at all.

A write is one transaction: the rows, the numbers of the batches, the losses, and how far its source is stored now. So
what was acknowledged survives ``kill -9``, and what is handed in again, because an acknowledgement was lost or a reader
began anew, is recognised: by the position in its source, or by (session, wire type, batch number).

Rows go in by column, many batches at a time: row by row DuckDB is a hundred times slower (benchmarks/bench_store.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gpuflight.errors import InputError, MissingExtra
from gpuflight.events.batch import Batch
from gpuflight.events.ledger import Ledger
from gpuflight.events.store.inserts import Inserts
from gpuflight.events.store.layout import OWN_BY_SESSION, VERSION, create_statements
from gpuflight.events.store.parts import Overlap, Part, Relation, Source, Written, by_table, count
from gpuflight.events.store.repeats import Repeats
from gpuflight.events.tables import TABLES

if TYPE_CHECKING:
    import duckdb

_KNOWN_SESSIONS = 256
"""Sessions whose batch numbers are kept in memory (about 100 bytes per 2,048 rows)."""

_MEMORY_LIMIT_BYTES = 1 << 30

_ROW_GROUP_ROWS = 20_480
"""Rows that are compressed together. A write of at least so many goes to the file at once; what is less goes to the log
first and is compressed later, and with DuckDB's 122,880 that is every window of an agent: twice the work of ingest.
"""


class Records(Repeats):
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
        self._inserts = Inserts(self._connection)
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
                    count(found, written)
                    fresh += found
                self._inserts.noted(noted)
                for table, group in by_table(fresh).items():
                    self._inserts.table(TABLES[table], group)
                self._inserts.unknown_columns(fresh)
                ended: dict[str, tuple[int, int | None]] = {}
                for part, written in new:
                    self._insert_end(part, written, ended)
                self._inserts.sources(ended)
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

    def _insert_end(self, part: Part, written: Written, ended: dict[str, tuple[int, int | None]]) -> None:
        """What was lost; ``ended`` gets how far the source is stored now, and its session."""
        source, batches = part.source, part.batches
        session_id = (source.session_id if source is not None else "") or (batches[0].session_id if batches else "")
        session_no = self._number_of(session_id) if session_id else None
        self._inserts.losses(session_no or 0, part.ledger, written.ledger)
        if source is not None:
            before = ended.get(source.name, (0, None))[1]
            ended[source.name] = (source.end, before if session_no is None else session_no)

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
