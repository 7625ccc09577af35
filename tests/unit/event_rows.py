"""Sessions for tests of queries: rows as dicts into a store, and back as plain lists for oracles."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from gpuflight.events.batch import Batch, Clock
from gpuflight.events.query.reader import Reader
from gpuflight.events.store import EventStore
from gpuflight.events.tables import TABLES

Rows = list[dict[str, Any]]
_DTYPES = {"i64": "int64", "u64": "uint64", "f64": "float64"}
_numbers = itertools.count()


def batches(table: str, rows: Iterable[dict[str, Any]], session: str, clock: Clock = "wall") -> list[Batch]:
    """A batch per set of known columns; None is unknown."""
    alike: dict[tuple[str, ...], Rows] = {}
    for row in rows:
        known = {name: value for name, value in row.items() if value is not None}
        alike.setdefault(tuple(sorted(known)), []).append(known)
    made = []
    for names, group in alike.items():
        columns: dict[str, Any] = {}
        for name in names:
            kind = TABLES[table].column(name).kind
            values = [row[name] for row in group]
            columns[name] = np.array(values, dtype=_DTYPES[kind]) if kind in _DTYPES else values
        made.append(Batch(table, session, len(group), columns, clock=clock))
    return made


def names(dictionary: str, texts: dict[int, str]) -> Rows:
    return [{"dictionary": dictionary, "id": number, "text": text} for number, text in texts.items()]


def fill(store: EventStore, unplaced: dict[str, Rows] | None = None, /, **tables: Rows) -> Reader:
    """A new session with these rows; ``unplaced``: rows whose times are no wall-clock times."""
    session = f"session-{next(_numbers)}"
    made = [batch for table, rows in tables.items() for batch in batches(table, rows, session)]
    made += [batch for table, rows in (unplaced or {}).items() for batch in batches(table, rows, session, "unplaced")]
    store.write(made)
    found = store.session(session)
    if found is None:
        store.complete(session)
        found = store.session(session)
    assert found is not None
    return Reader(store, [found])


def both(*readers: Reader) -> Reader:
    """One reader of several sessions."""
    return Reader(readers[0].store, [session for reader in readers for session in reader.sessions])
