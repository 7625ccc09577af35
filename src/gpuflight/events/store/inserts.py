"""Rows into DuckDB, by column and many batches at a time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from gpuflight.events.arrays import numpy
from gpuflight.events.batch import Batch
from gpuflight.events.ledger import Ledger
from gpuflight.events.store.layout import CLOCKS, key_of, stored_columns, upsert_statement
from gpuflight.events.tables import Table

if TYPE_CHECKING:
    import duckdb


class Inserts:
    """Within a transaction of the connection. Raises duckdb.Error where the database refuses."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._np = numpy()

    def table(self, table: Table, group: list[tuple[int, Batch]]) -> None:
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
            self._columns(table.name, columns, table if table.key else None)

    def _columns(self, table: str, columns: dict[str, Any], upsert: Table | None = None) -> None:
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

    def unknown_columns(self, batches: list[tuple[int, Batch]]) -> None:
        """Columns of batches that this version does not know."""
        for session_no, batch in batches:
            if batch.extra:
                self._connection.execute(
                    "INSERT INTO extra VALUES (?, ?, ?, ?)",
                    (session_no, batch.wire_type, batch.batch_id, msgspec.json.encode(batch.extra).decode()),
                )

    def losses(self, session_no: int, *ledgers: Ledger | None) -> None:
        """What was lost of a session (0: of none)."""
        for ledger in ledgers:
            for entry in ledger or ():
                place = str(entry.places[0]) if entry.places else ""
                self._connection.execute(
                    "INSERT INTO loss VALUES (?, ?, ?, ?, ?, ?)",
                    (session_no, entry.reason, entry.detail, entry.count, entry.size_bytes, place),
                )

    def noted(self, noted: list[tuple[int, str, int, int]]) -> None:
        """Batches that are stored now: session, wire type, number, digest."""
        if noted:
            self._columns(
                "batch",
                {
                    "session_no": self._np.array([row[0] for row in noted], dtype="uint32"),
                    "wire_type": self._np.array([row[1] for row in noted], dtype=object),
                    "batch_id": self._np.array([row[2] for row in noted], dtype="int64"),
                    "digest": self._np.array([row[3] for row in noted], dtype="uint64"),
                },
            )

    def sources(self, ended: dict[str, tuple[int, int | None]]) -> None:
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


def _last_of_each_key(np: Any, key: tuple[str, ...], columns: dict[str, Any]) -> dict[str, Any]:
    """One statement may touch a key once: of rows with the same key the last."""
    rows = list(zip(*(columns[name].tolist() for name in key), strict=True))
    last = {row: index for index, row in enumerate(rows)}
    if len(last) == len(rows):
        return columns
    chosen = np.array(sorted(last.values()))
    return {name: column[chosen] for name, column in columns.items()}
