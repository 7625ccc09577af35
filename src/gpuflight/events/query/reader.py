"""What every question needs: the tables of the sessions asked about, as SQL, and their texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from gpuflight.errors import InputError
from gpuflight.events.store.catalogue import Session

MAX_ROWS = 10_000
"""Most rows of one page."""


class _Relation(Protocol):
    @property
    def sql(self) -> str: ...


class Store(Protocol):
    """What a store has to offer to be asked."""

    def relation(self, table: str, sessions: Iterable[Session]) -> _Relation:
        """A table's rows of some sessions, as SQL to select from."""
        ...

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The answer to a query as dicts."""
        ...

    def columns(self, sql: str, values: Sequence[Any] = ()) -> dict[str, Any]:
        """The answer to a query as numpy arrays by column."""
        ...


class Reader:
    """A store and the sessions that a question is about."""

    def __init__(self, store: Store, sessions: Sequence[Session]) -> None:
        self.store = store
        self.sessions = list(sessions)

    def table(self, name: str) -> str:
        """SQL of a table's rows of these sessions."""
        return self.store.relation(name, self.sessions).sql

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The answer to a query."""
        return self.store.rows(sql, values)

    def texts(self, dictionary: str, ids: Iterable[int]) -> dict[tuple[int, int], str]:
        """Texts by (session number, id), of those that came."""
        wanted = sorted({int(identifier) for identifier in ids if identifier})
        if not wanted:
            return {}
        listed = ", ".join(map(str, wanted))
        rows = self.rows(
            f"SELECT session_no, id, text FROM {self.table('name')} WHERE dictionary = ? AND id IN ({listed})",  # noqa: S608
            (dictionary,),
        )
        return {(row["session_no"], row["id"]): row["text"] for row in rows}


def page(limit: int, offset: int = 0) -> str:
    """LIMIT and OFFSET. Raises InputError out of bounds."""
    if not 0 < limit <= MAX_ROWS:
        raise InputError(f"limit is {limit}; it must be from 1 to {MAX_ROWS}")
    if not 0 <= offset < 2**63:
        raise InputError(f"offset is {offset}; it must be 0 or more")
    return f"LIMIT {int(limit)} OFFSET {int(offset)}"


class Where:
    """Conditions and their values."""

    def __init__(self) -> None:
        self._terms: list[str] = []
        self.values: list[Any] = []

    def add(self, term: str, *values: Any) -> Where:
        """One more condition; not if a value is None."""
        if all(value is not None for value in values):
            self._terms.append(term)
            self.values.extend(values)
        return self

    @property
    def sql(self) -> str:
        """With the word WHERE; empty if there is no condition."""
        return "WHERE " + " AND ".join(self._terms) if self._terms else ""
