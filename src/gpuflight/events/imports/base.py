"""What every import has, and rows on their way to batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from gpuflight.events.arrays import numpy
from gpuflight.events.batch import Batch, Clock
from gpuflight.events.format.cells import cell
from gpuflight.events.format.session import Session
from gpuflight.events.ledger import Ledger
from gpuflight.events.tables import TABLES

ROWS_AT_ONCE = 50_000
_DTYPES = {"i64": "int64", "u64": "uint64", "f64": "float64"}


class Import(Protocol):
    """A file of another profiler. Iterate over it once; ``done_bytes`` grows meanwhile. ``identity``: the same for the
    same content, and what its sessions' ids begin with."""

    path: str
    kind: str
    identity: str
    ledger: Ledger
    done_bytes: int

    def __iter__(self) -> Iterator[list[Batch]]: ...


class Rows:
    """Rows of one session until they are batches. Cells that are no value of their column's kind are unknown, and
    counted; None is unknown."""

    def __init__(self, session_id: str, ledger: Ledger, wire_type: str, key: int = 0) -> None:
        self.session = Session(session_id)
        self.key = key
        self.count = 0
        self._ledger = ledger
        self._wire_type = wire_type
        self._kinds = {name: {c.name: c.kind for c in table.columns} for name, table in TABLES.items()}
        self._held: dict[tuple[str, Clock, tuple[str, ...]], list[tuple[Any, ...]]] = {}

    def add(self, table: str, row: Mapping[str, Any], clock: Clock = "wall") -> None:
        """One row. Text of a dictionary goes through ``text`` before."""
        kinds = self._kinds[table]
        names, values = [], []
        for name, value in row.items():
            if value is None:
                continue
            read = cell(value, kinds[name])
            if read is None:
                self._ledger.add("bad_cell", subject=f"{table}.{name}")
                continue
            if isinstance(read, str):
                read = _whole(read)
            names.append(name)
            values.append(read)
        self._held.setdefault((table, clock, tuple(names)), []).append(tuple(values))
        self.count += 1

    def text(self, dictionary: str, text: str) -> int:
        """Id of a text."""
        return self.session.text(dictionary, _whole(text))

    def shape(self, fields: Mapping[str, Any]) -> int | None:
        """Id of a launch configuration; None if nothing of it is known."""
        known = {name: value for name, value in fields.items() if value is not None}
        return self.session.shape(known) if known else None

    def take(self) -> list[Batch]:
        """Batches of what was added since; names and shapes first."""
        np = numpy()
        made = []
        for dictionary, number, text in self.session.names:
            self.add("name", {"dictionary": dictionary, "id": number, "text": text})
        for shape in self.session.shapes:
            self.add("kernel_shape", shape)
        self.session.names, self.session.shapes = [], []
        first = {"name": 0, "kernel_shape": 1}
        for (table, clock, names), rows in sorted(self._held.items(), key=lambda item: first.get(item[0][0], 2)):
            columns: dict[str, Any] = {}
            for name, values in zip(names, zip(*rows, strict=True), strict=True):
                kind = self._kinds[table][name]
                columns[name] = np.array(values, dtype=_DTYPES[kind]) if kind in _DTYPES else list(values)
            made.append(Batch(table, self.session.id, len(rows), columns, self._wire_type, clock=clock))
        self._held.clear()
        self.count = 0
        return made


def _whole(text: str) -> str:
    """Text that has a UTF-8 form: half a surrogate pair becomes a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
