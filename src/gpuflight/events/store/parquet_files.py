"""Batches to Parquet files, Parquet files to bigger ones, and the SQL that reads them: DuckDB, and nothing outside the
store's root.

A file has the columns of ``layout.stored_columns`` with the session's id in place of its number, all of them whatever
is known, so that the files of a table are alike. Tables whose rows may come again (they have a key) also have
``written_order``: of the rows of one key, the known value with the greatest one holds, column by column.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from gpuflight.errors import InputError, MissingExtra
from gpuflight.events.arrays import numpy
from gpuflight.events.batch import Batch
from gpuflight.events.store.layout import CLOCKS, key_of, stored_columns
from gpuflight.events.tables import TABLES, Table

if TYPE_CHECKING:
    import duckdb

EXTRA = "extra"
"""Columns that this version does not know: a table of the store's own."""

_EXTRA_COLUMNS = [("wire_type", "VARCHAR"), ("batch_id", "BIGINT"), ("columns", "VARCHAR")]
_LOSS_TABLE = (
    "CREATE TABLE loss (session_no UINTEGER, reason VARCHAR, about VARCHAR, count BIGINT, size_bytes BIGINT,"
    " place VARCHAR)"
)
_ROW_GROUP_ROWS = 122_880
_MEMORY_LIMIT_BYTES = 1 << 30
_GLOB = frozenset("*?[")


def columns_of(table: str) -> list[tuple[str, str]]:
    """(name, SQL type) of what a file of a table holds, without the session and the order."""
    if table == EXTRA:
        return _EXTRA_COLUMNS
    return [column for column in stored_columns(TABLES[table]) if column[0] != "session_no"]


class File(NamedTuple):
    """A file to be read. ``current``: it has the columns that this version knows, and no others."""

    path: str
    current: bool


@cache
def layout_of(table: str) -> int:
    """A number for the columns of a table."""
    return crc32(",".join(f"{name} {kind}" for name, kind in columns_of(table)).encode())


def keyed(table: str) -> Table | None:
    """The table, if its rows may come again."""
    found = TABLES.get(table)
    return found if found is not None and found.key else None


class ParquetFiles:
    """A DuckDB connection that may touch nothing but ``root``. Raises MissingExtra without DuckDB, InputError for a
    root that cannot be had."""

    def __init__(self, root: str, tmp: str, threads: int | None = None) -> None:
        try:
            import duckdb
        except ImportError:
            raise MissingExtra("duckdb", "events", "the event store") from None
        if _GLOB & set(root):
            raise InputError(f"{root}: a name with *, ? or [ in it means something else to those who read Parquet")
        self.root = root
        self._np = numpy()
        config: dict[str, Any] = {
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "memory_limit": f"{_MEMORY_LIMIT_BYTES}B",
            "preserve_insertion_order": "false",
            "temp_directory": tmp,
        }
        if threads:
            config["threads"] = str(threads)
        self.connection: duckdb.DuckDBPyConnection = duckdb.connect(":memory:", config=config)
        self.connection.execute(f"SET allowed_directories = [{quoted(root)}]")
        self.connection.execute("SET enable_external_access = false")
        self.connection.execute("SET parquet_metadata_cache = true")
        self.connection.execute("SET lock_configuration = true")
        self.connection.execute(_LOSS_TABLE)

    # --- writing ---------------------------------------------------------------------------------------------------

    def write(self, path: str, session_id: str, table: str, batches: Sequence[Batch], order: int) -> tuple[int, int]:
        """Write batches of one session and table; rows (of a key one) and bytes. ``order`` is that of the first row."""
        known = dict(columns_of(table))
        alike: dict[tuple[str, ...], list[tuple[int, Batch]]] = {}
        for batch in batches:
            for name in batch.columns:
                if name not in known:
                    raise KeyError(f"{table}.{name}")
            alike.setdefault(tuple(batch.columns), []).append((order, batch))
            order += batch.count
        cursor = self.connection.cursor()
        try:
            selects = []
            for number, (names, members) in enumerate(alike.items()):
                cursor.register(f"incoming_{number}", self._joined(table, names, members))
                given = {*names, "clock"}
                listed = [
                    f'"{name}"::{kind} AS "{name}"' if name in given else f'NULL::{kind} AS "{name}"'
                    for name, kind in known.items()
                ]
                if keyed(table):
                    listed.append("written_order")
                selects.append(f"SELECT {', '.join(listed)} FROM incoming_{number}")  # noqa: S608 - names are ours
            return self._copy(cursor, path, session_id, table, " UNION ALL ".join(selects))
        finally:
            cursor.close()

    def write_extra(self, path: str, session_id: str, rows: list[tuple[str, int | None, str]]) -> tuple[int, int]:
        """Write (wire type, batch number, JSON) of columns that are not known."""
        cursor = self.connection.cursor()
        try:
            cursor.execute("CREATE TEMP TABLE unknown_columns (wire_type VARCHAR, batch_id BIGINT, columns VARCHAR)")
            cursor.executemany("INSERT INTO unknown_columns VALUES (?, ?, ?)", rows)
            return self._copy(cursor, path, session_id, EXTRA, "SELECT * FROM unknown_columns")
        finally:
            cursor.close()

    def merge(self, path: str, session_id: str, table: str, files: Sequence[File]) -> tuple[int, int]:
        """Write the rows of several files as one, in order of time; rows and bytes."""
        time = TABLES[table].time if table in TABLES else ""
        source = f"SELECT * EXCLUDE (session_no) FROM {_all_rows(table, [(0, file) for file in files])}"  # noqa: S608
        cursor = self.connection.cursor()
        try:
            return self._copy(cursor, path, session_id, table, source, f'ORDER BY "{time}"' if time else "")
        finally:
            cursor.close()

    def _joined(self, table: str, names: tuple[str, ...], members: list[tuple[int, Batch]]) -> dict[str, Any]:
        np = self._np
        counts = [batch.count for _, batch in members]
        columns: dict[str, Any] = {}
        for name in names:
            parts = [batch.columns[name] for _, batch in members]
            if isinstance(parts[0], list):
                columns[name] = np.array([text for part in parts for text in part], dtype=object)
            else:
                columns[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if TABLES[table].time:
            columns["clock"] = np.repeat(np.array([CLOCKS[b.clock] for _, b in members], dtype="uint8"), counts)
        if keyed(table):
            columns["written_order"] = np.concatenate([np.arange(at, at + b.count, dtype="int64") for at, b in members])
        return columns

    def _copy(
        self, cursor: Any, path: str, session_id: str, table: str, source: str, order: str = ""
    ) -> tuple[int, int]:
        # Encodings of version 2 take a fifth less room and half the time; Spark reads those of integers and texts since
        # 3.3, those of floating point not in all versions.
        version = "V1" if any(kind == "DOUBLE" for _, kind in columns_of(table)) else "V2"
        if keyed(table):
            source = f"{_one_of_each_key(table, f'({source})', order=True)}"
        row = cursor.execute(
            f"COPY (SELECT {quoted(session_id)} AS session_id, * FROM ({source}) {order}) TO {quoted(path)}"  # noqa: S608
            f" (FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {_ROW_GROUP_ROWS}, PARQUET_VERSION {version})"
        ).fetchone()
        return int(row[0]), os.path.getsize(path)

    # --- losses ----------------------------------------------------------------------------------------------------

    def add_losses(self, rows: list[tuple[int, str, str, int, int, str]]) -> None:
        """Session number, reason, what about, count, bytes, place."""
        if rows:
            self.connection.cursor().executemany("INSERT INTO loss VALUES (?, ?, ?, ?, ?, ?)", rows)

    def drop_losses(self, session_no: int | None = None) -> None:
        """Of a session, or all."""
        cursor = self.connection.cursor()
        if session_no is None:
            cursor.execute("DELETE FROM loss")
        else:
            cursor.execute("DELETE FROM loss WHERE session_no = ?", (session_no,))


# --- reading -------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(r'"gpuflight:(\w+):([\d ]*)"')


def token(table: str, session_nos: Sequence[int]) -> str:
    """Stands in a query for the rows of some sessions, until it is asked and the files are looked up."""
    return f'"gpuflight:{table}:{" ".join(map(str, session_nos))}"'


def expand(sql: str, files_of: Any) -> str:
    """A query with the relations in place of their tokens. ``files_of(table, session number)`` gives them."""

    def relation(match: re.Match[str]) -> str:
        table, numbers = match[1], [int(number) for number in match[2].split()]
        if table == "loss":
            return f"(SELECT * FROM loss WHERE session_no IN ({', '.join(map(str, numbers)) or 'NULL'}))"  # noqa: S608
        found = [(number, file) for number in numbers for file in files_of(table, number)]
        return _relation(table, found)

    return _TOKEN.sub(relation, sql)


def _relation(table: str, files: list[tuple[int, File]]) -> str:
    if not files:
        return f"({_nothing(table)})"
    rows = _all_rows(table, files)
    if keyed(table) and len(files) > len({number for number, _ in files}):
        return f"({_one_of_each_key(table, rows, order=False)})"
    listed = ", ".join(f'"{name}"' for name, _ in columns_of(table))
    return f"(SELECT session_no, {listed} FROM {rows})"  # noqa: S608


def _nothing(table: str) -> str:
    """SQL of no row of a table."""
    columns = [("session_no", "UINTEGER"), *columns_of(table)]
    if keyed(table):
        columns.append(("written_order", "BIGINT"))
    return "SELECT " + ", ".join(f'NULL::{kind} AS "{name}"' for name, kind in columns) + " WHERE false"


def _all_rows(table: str, files: list[tuple[int, File]]) -> str:
    """SQL of the rows of files of a table, with the numbers of their sessions."""
    listed = [name for name, _ in columns_of(table)] + (["written_order"] if keyed(table) else [])
    columns = ", ".join(f'"{name}"' for name in listed)
    if not all(file.current for _, file in files):  # what a file lacks is unknown, what is not known here is left out
        reads = "".join(
            f" UNION ALL BY NAME SELECT {number}::UINTEGER AS session_no, * FROM {_read([file.path])}"  # noqa: S608
            for number, file in files
        )
        return f"(SELECT session_no, {columns} FROM ({_nothing(table)}{reads}))"  # noqa: S608
    numbers = [number for number, _ in files]
    if len(set(numbers)) == 1:
        number_sql = f"{numbers[0]}::UINTEGER"
    else:
        number_sql = f"([{', '.join(map(str, numbers))}]::UINTEGER[])[file_index::BIGINT + 1]"
    return f"(SELECT {number_sql} AS session_no, {columns} FROM {_read([file.path for _, file in files])})"  # noqa: S608


def _read(paths: Sequence[str]) -> str:
    return f"read_parquet([{', '.join(map(quoted, paths))}], hive_partitioning = false)"


def _one_of_each_key(table: str, rows: str, *, order: bool) -> str:
    """SQL of rows of a table with a key, those of one key put together. ``order``: rows of one session, to be stored;
    else of several, to be read."""
    key = [name for name in key_of(TABLES[table]) if not (order and name == "session_no")]
    listed = [] if order else ['"session_no"']
    for name, _ in columns_of(table):
        listed.append(f'"{name}"' if name in key else f'arg_max("{name}", written_order) AS "{name}"')
    if order:
        listed.append("max(written_order) AS written_order")
    grouped = ", ".join(f'"{name}"' for name in key)
    return f"SELECT {', '.join(listed)} FROM {rows} GROUP BY {grouped}"  # noqa: S608


def quoted(text: str) -> str:
    """A text as SQL has it."""
    return "'" + text.replace("'", "''") + "'"
