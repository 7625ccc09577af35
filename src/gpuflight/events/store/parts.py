"""What is handed in to be stored, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from gpuflight.events.batch import Batch
from gpuflight.events.ledger import Ledger


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


def count(batches: list[tuple[int, Batch]], written: Written) -> None:
    """Adds what is stored of a part to its answer."""
    for _, batch in batches:
        written.rows += batch.count
        written.rows_by_table[batch.table] = written.rows_by_table.get(batch.table, 0) + batch.count


def by_table(batches: list[tuple[int, Batch]]) -> dict[str, list[tuple[int, Batch]]]:
    """Batches with the numbers of their sessions, by table."""
    found: dict[str, list[tuple[int, Batch]]] = {}
    for session_no, batch in batches:
        found.setdefault(batch.table, []).append((session_no, batch))
    return found
