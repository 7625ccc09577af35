"""How the tables of ``events.tables`` lie in the database.

Each has its columns, all of which may be NULL (unknown), and before them ``session_no``; tables of frequent rows also
``clock`` (0 wall, 1 steady, 2 unplaced: ``events.batch``). Tables whose rows may come again have a primary key.
"""

from __future__ import annotations

from gpuflight.events.tables import TABLES, Kind, Table

VERSION = 1
"""Of the layout; a store of a newer one is not opened."""

CLOCKS = {"wall": 0, "steady": 1, "unplaced": 2}

SQL_TYPES: dict[Kind, str] = {"i64": "BIGINT", "u64": "UBIGINT", "f64": "DOUBLE", "text": "VARCHAR", "json": "VARCHAR"}

_OWN = """
CREATE TABLE IF NOT EXISTS store (version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS source (
    name VARCHAR PRIMARY KEY, position BIGINT NOT NULL, session_no UINTEGER, written_ns BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS batch (
    session_no UINTEGER NOT NULL, wire_type VARCHAR NOT NULL, batch_id BIGINT NOT NULL, digest UBIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS loss (
    session_no UINTEGER NOT NULL, reason VARCHAR NOT NULL, about VARCHAR NOT NULL, count BIGINT NOT NULL,
    size_bytes BIGINT NOT NULL, place VARCHAR NOT NULL);
CREATE TABLE IF NOT EXISTS extra (
    session_no UINTEGER NOT NULL, wire_type VARCHAR NOT NULL, batch_id BIGINT, columns VARCHAR NOT NULL);
"""
"""``source``: how far each source of lines has been stored. ``batch``: numbered batches that were stored, with a digest
of their content. ``loss``: the ledger. ``extra``: columns that this version does not know, a JSON object per batch."""

OWN_BY_SESSION = ("source", "batch", "loss", "extra")
"""Tables of the store itself whose rows belong to a session."""


def stored_columns(table: Table) -> list[tuple[str, str]]:
    """(name, SQL type) of every column of a table, in order."""
    first = [("session_no", "UINTEGER"), ("clock", "UTINYINT")] if table.time else [("session_no", "UINTEGER")]
    return first + [(column.name, SQL_TYPES[column.kind]) for column in table.columns]


def key_of(table: Table) -> tuple[str, ...]:
    """The primary key; empty if rows are only ever added."""
    return ("session_no", *table.key) if table.key else ()


def create_statements() -> list[str]:
    """SQL that makes whatever table is not there yet."""
    statements = [statement for statement in _OWN.split(";") if statement.strip()]
    for table in TABLES.values():
        columns = [f'"{name}" {kind}' for name, kind in stored_columns(table)]
        if key := key_of(table):
            columns.append("PRIMARY KEY (" + ", ".join(f'"{name}"' for name in key) + ")")
        statements.append(f'CREATE TABLE IF NOT EXISTS "{table.name}" ({", ".join(columns)})')
    return statements


def upsert_statement(table: Table, columns: list[str], rows: str) -> str:
    """Insert the relation ``rows`` that has ``columns``; of a key that is there, what is new replaces what was, and
    what is unknown now stays as it was."""
    key = key_of(table)
    given = [name for name in columns if name not in key]
    names = ", ".join(f'"{name}"' for name in columns)
    statement = f'INSERT INTO "{table.name}" ({names}) SELECT {names} FROM {rows}'  # noqa: S608 - names are ours
    if not key:
        return statement
    if not given:
        return statement + " ON CONFLICT DO NOTHING"
    sets = ", ".join(f'"{name}" = coalesce(excluded."{name}", "{name}")' for name in given)
    return f"{statement} ON CONFLICT DO UPDATE SET {sets}"
