"""Tables and answers as CSV, NDJSON and Parquet (``arrow`` has Arrow).

A table has its columns as in ``events.tables`` (units in their names), before them ``session_id`` and, where rows have
a time, ``clock`` (wall, steady, unplaced); beside every id of a dictionary its text. An unknown cell is empty (CSV),
absent (NDJSON) or null (Parquet).
"""

from __future__ import annotations

import csv
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import msgspec

from gpuflight.errors import InputError, MissingExtra
from gpuflight.events.export.windows import in_order, parts
from gpuflight.events.query.allocations import held, memory_use
from gpuflight.events.query.copies import copies, fills
from gpuflight.events.query.kernels import launches, top_kernels
from gpuflight.events.query.profile import profile
from gpuflight.events.query.reader import MAX_ROWS, Reader, Store
from gpuflight.events.query.scopes import scope_tree
from gpuflight.events.query.waits import waits
from gpuflight.events.store.catalogue import Session
from gpuflight.events.store.layout import CLOCKS, SQL_TYPES
from gpuflight.events.tables import TABLES

Form = Literal["csv", "ndjson"]

_PARQUET_ROWS_AT_ONCE = 100_000
"""Rows that go through Python's memory at a time; row groups of the file are DuckDB's."""

QUERIES: dict[str, Callable[[Reader], Sequence[msgspec.Struct]]] = {
    "top-kernels": lambda reader: top_kernels(reader, quantiles=True, limit=MAX_ROWS).lines,
    "longest-launches": lambda reader: launches(reader, longest_first=True, limit=MAX_ROWS),
    "copies": lambda reader: copies(reader, by_size=True),
    "fills": fills,
    "waits": lambda reader: waits(reader, limit=MAX_ROWS),
    "memory": memory_use,
    "held-memory": lambda reader: held(reader, limit=MAX_ROWS),
    "scopes": lambda reader: scope_tree(reader).nodes,
    "stalls": lambda reader: profile(reader, kind="pc_sampling", per="line", limit=MAX_ROWS),
    "sass": lambda reader: profile(reader, kind="sass_metric", per="line", limit=MAX_ROWS),
}
"""Answers that can be exported, each at most 10,000 lines."""


class Columnar(Store, Protocol):
    """A store that also answers by column."""

    def columns(self, sql: str, values: Sequence[Any] = ()) -> dict[str, Any]:
        """The answer to a query as numpy arrays by column (masked where something is unknown)."""
        ...


def columns_of(what: str) -> list[tuple[str, str]]:
    """(name, SQL type) of what a table is exported with. Raises InputError for one that there is not."""
    table = TABLES.get(what)
    if table is None:
        raise InputError(f"there is no table {what}; there are {', '.join(TABLES)}")
    found = [("session_id", "VARCHAR")]
    if table.time:
        found.append(("clock", "VARCHAR"))
    for column in table.columns:
        found.append((column.name, SQL_TYPES[column.kind]))
        if column.dictionary:
            found.append((_text_name(column.name), "VARCHAR"))
    return found


def table_sql(reader: Reader, what: str) -> str:
    """SQL of a table as it is exported, in brackets."""
    table = TABLES[what]
    chosen = [_choice("t.session_no", {s.session_no: s.session_id for s in reader.sessions}) + " AS session_id"]
    joins: list[str] = []
    if table.time:
        chosen.append(_choice("t.clock", {number: word for word, number in CLOCKS.items()}) + " AS clock")
    for column in table.columns:
        chosen.append(f't."{column.name}"')
        if column.dictionary:
            alias = f"d{len(joins)}"
            chosen.append(f'{alias}.text AS "{_text_name(column.name)}"')
            joins.append(
                f"LEFT JOIN (SELECT session_no, id, text FROM {reader.table('name')}"  # noqa: S608
                f" WHERE dictionary = '{column.dictionary}') AS {alias}"
                f' ON {alias}.session_no = t.session_no AND {alias}.id = t."{column.name}"'
            )
    return f"(SELECT {', '.join(chosen)} FROM {reader.table(what)} AS t {' '.join(joins)})"  # noqa: S608


def table_rows(reader: Reader, what: str) -> Iterator[list[dict[str, Any]]]:
    """Rows of a table in order of time, some thousands at a time; those that have no time come last."""
    columns_of(what)
    sql, time = table_sql(reader, what), TABLES[what].time
    if not time:
        rows = reader.rows(f"SELECT * FROM {sql} ORDER BY ALL")  # noqa: S608 - tables without a time are small ones
        if rows:
            yield rows
        return
    yield from in_order(reader, sql, f'"{time}"')
    rest = reader.rows(f'SELECT * FROM {sql} WHERE "{time}" IS NULL')  # noqa: S608
    if rest:
        yield rest


def answer_rows(reader: Reader, what: str) -> list[dict[str, Any]]:
    """Lines of an answer as plain dicts; lists and dicts inside become JSON. Raises InputError for one there is not."""
    query = QUERIES.get(what)
    if query is None:
        raise InputError(f"there is no answer {what}; there are {', '.join(QUERIES)}")
    rows = [msgspec.to_builtins(line) for line in query(reader)]
    for row in rows:
        for name, value in row.items():
            if isinstance(value, (dict, list)):
                row[name] = msgspec.json.encode(value).decode()
    return rows


def text_of(reader: Reader, what: str, form: Form) -> Iterator[bytes]:
    """A table or an answer as CSV (with a head) or NDJSON, a piece at a time."""
    if what in QUERIES:
        rows = answer_rows(reader, what)
        names = list(dict.fromkeys(name for row in rows for name in row))
        pages: Iterator[list[dict[str, Any]]] = iter([rows])
    else:
        names = [name for name, _ in columns_of(what)]
        pages = table_rows(reader, what)
    if form == "ndjson":
        for page in pages:
            yield b"".join(msgspec.json.encode({k: v for k, v in row.items() if v is not None}) + b"\n" for row in page)
        return
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\r\n")
    writer.writerow(names)
    for page in pages:
        writer.writerows([row.get(name) for name in names] for row in page)
        yield _taken(buffer)
    if buffer.tell():
        yield _taken(buffer)


def _taken(buffer: io.StringIO) -> bytes:
    data = buffer.getvalue().encode("utf-8", "replace")
    buffer.seek(0)
    buffer.truncate()
    return data


def write_parquet(store: Columnar, sessions: Sequence[Session], what: str, path: str) -> int:
    """A table or an answer as a Parquet file (zstd); how many rows. An existing file is replaced, when all is written.

    The store's own connection may touch no files, so rows go through a database of their own beside ``path``.
    """
    try:
        import duckdb
    except ImportError:
        raise MissingExtra("duckdb", "events", "writing Parquet") from None
    reader = Reader(store, sessions)
    with tempfile.TemporaryDirectory(prefix=".gpuflight-", dir=os.path.dirname(os.path.abspath(path))) as folder:
        scratch = duckdb.connect(os.path.join(folder, "scratch.duckdb"), config={"memory_limit": "256MB"})
        try:
            if what in QUERIES:
                count = _fill_answer(scratch, answer_rows(reader, what))
            else:
                count = _fill_table(scratch, store, reader, what)
            partial = os.path.join(folder, "made.parquet")
            scratch.execute(f"COPY made TO '{_quoted(partial)}' (FORMAT parquet, COMPRESSION zstd)")
        except duckdb.Error as error:
            raise InputError(f"{path}: {str(error).splitlines()[0]}") from error
        finally:
            scratch.close()
        os.replace(partial, path)
    return count


def _fill_table(scratch: Any, store: Columnar, reader: Reader, what: str) -> int:
    columns = columns_of(what)
    scratch.execute("CREATE TABLE made ({})".format(", ".join(f'"{name}" {kind}' for name, kind in columns)))
    sql, time = table_sql(reader, what), TABLES[what].time
    count = 0
    for condition in parts_of(reader, what, _PARQUET_ROWS_AT_ONCE):
        order = f'ORDER BY "{time}"' if time else "ORDER BY ALL"
        found = store.columns(f"SELECT * FROM {sql} WHERE {condition} {order}")  # noqa: S608
        scratch.register("incoming", found)
        scratch.execute("INSERT INTO made SELECT * FROM incoming")
        scratch.unregister("incoming")
        count += len(next(iter(found.values())))
    return count


def parts_of(reader: Reader, what: str, rows_at_once: int) -> Iterator[str]:
    """Conditions that part a table by its time, into at most so many rows each; what has no time comes last."""
    time = TABLES[what].time
    if not time:
        yield "TRUE"
        return
    yield from parts(reader, reader.table(what), f'"{time}"', rows_at_once)
    yield f'"{time}" IS NULL'


def answer_columns(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(name, SQL type) of what the lines of an answer have."""
    kinds = {bool: "BOOLEAN", int: "HUGEINT", float: "DOUBLE", str: "VARCHAR"}
    columns = []
    for name in list(dict.fromkeys(name for row in rows for name in row)) or ["empty"]:
        found = {kinds[type(row[name])] for row in rows if row.get(name) is not None}
        kind = next(iter(found)) if len(found) == 1 else "DOUBLE" if found == {"HUGEINT", "DOUBLE"} else "VARCHAR"
        if kind == "HUGEINT" and all(abs(row.get(name) or 0) < 2**63 for row in rows):
            kind = "BIGINT"
        columns.append((name, kind))
    return columns


def _fill_answer(scratch: Any, rows: list[dict[str, Any]]) -> int:
    columns = answer_columns(rows)
    scratch.execute("CREATE TABLE made ({})".format(", ".join(f'"{name}" {kind}' for name, kind in columns)))
    if rows:
        places = ", ".join("?" * len(columns))
        scratch.executemany(
            f"INSERT INTO made VALUES ({places})",  # noqa: S608
            [[row.get(name) for name, _ in columns] for row in rows],
        )
    return len(rows)


def _choice(column: str, words: dict[int, str]) -> str:
    if not words:
        return "NULL::VARCHAR"
    cases = " ".join(f"WHEN {number} THEN '{_quoted(word)}'" for number, word in words.items())
    return f"CASE {column} {cases} END"


def _text_name(column: str) -> str:
    """``kernel_name`` beside ``kernel_id``, ``name`` beside ``name_id``."""
    return column.removesuffix("_id") + ("" if column.endswith("name_id") else "_name")


def _quoted(text: str) -> str:
    return text.replace("'", "''")
