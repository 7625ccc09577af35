"""The sessions: one row each, in SQLite, beside the records.

A row is written before the records that it tells of. Every write only widens what is known (the earliest start, the
latest event), so the same records may be handed in again, and a crash in between leaves nothing untrue.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gpuflight.errors import InputError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS session (
    session_no INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL UNIQUE, app TEXT, hostname TEXT,
    ip_addr TEXT, pid INTEGER, session_kind TEXT, profiling_engine TEXT, run_id TEXT, segment_index INTEGER,
    analysis_id TEXT, pass_index INTEGER, log_path TEXT,
    start_ns INTEGER, end_ns INTEGER, end_synthetic INTEGER, first_event_ns INTEGER, last_event_ns INTEGER,
    created_ns INTEGER NOT NULL, received_ns INTEGER NOT NULL, completed_ns INTEGER, retention_days REAL);
CREATE INDEX IF NOT EXISTS session_received ON session (received_ns);
CREATE INDEX IF NOT EXISTS session_start ON session (start_ns);
"""

_LEARNT = {
    **dict.fromkeys(("app", "hostname", "ip_addr", "pid", "session_kind", "profiling_engine", "log_path"), ""),
    **dict.fromkeys(("run_id", "segment_index", "analysis_id", "pass_index", "end_synthetic"), ""),
    **dict.fromkeys(("completed_ns", "retention_days"), ""),
    **dict.fromkeys(("start_ns", "first_event_ns"), "min"),
    **dict.fromkeys(("end_ns", "last_event_ns"), "max"),
}
"""What can be learnt of a session, and which of two values counts: the least, the greatest, or ("") the later one."""


class Session(msgspec.Struct, kw_only=True):
    """What is known about one session without looking at its records; None is unknown. Times are UNIX ns.

    ``end_ns``: its writer said that it ended (``end_synthetic``: the launcher said so, after the program died).
    ``completed_ns``: its sender said that everything was sent. ``received_ns``: when something of it last arrived.
    ``retention_days``: how long it is kept after that, None for the store's rule, 0 for ever.
    """

    session_no: int
    session_id: str
    app: str | None = None
    hostname: str | None = None
    ip_addr: str | None = None
    pid: int | None = None
    session_kind: str | None = None
    profiling_engine: str | None = None
    run_id: str | None = None
    segment_index: int | None = None
    analysis_id: str | None = None
    pass_index: int | None = None
    log_path: str | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    end_synthetic: bool | None = None
    first_event_ns: int | None = None
    last_event_ns: int | None = None
    created_ns: int
    received_ns: int
    completed_ns: int | None = None
    retention_days: float | None = None


_COLUMNS = tuple(field.name for field in msgspec.structs.fields(Session))
_SELECT = f"SELECT {', '.join(_COLUMNS)} FROM session"  # noqa: S608 - names are ours


class Catalogue:
    """The table of sessions. Thread-safe. Raises InputError if the file is no such table or cannot be written."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=5.0)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"{path}: cannot be opened as a catalogue of sessions: {error}") from error
        self._numbers: dict[str, int] = {}

    def number(self, session_id: str, now_ns: int) -> int:
        """The number of a session in this store, which it gets if it has none."""
        known = self._numbers.get(session_id)
        if known is not None:
            return known
        with self._lock:
            self._connection.execute(
                "INSERT INTO session (session_id, created_ns, received_ns) VALUES (?, ?, ?) ON CONFLICT DO NOTHING",
                (session_id, now_ns, now_ns),
            )
            found = self._connection.execute(
                "SELECT session_no FROM session WHERE session_id = ?", (session_id,)
            ).fetchone()[0]
            if len(self._numbers) > 100_000:
                self._numbers.clear()
            self._numbers[session_id] = found
        return int(found)

    def learn(self, session_no: int, now_ns: int, facts: dict[str, Any]) -> None:
        """Take in what was learnt of a session: names of ``Session``. ``start_ns`` and ``first_event_ns`` only go back,
        ``end_ns`` and ``last_event_ns`` only forward; of the others what is new counts."""
        sets, values = ["received_ns = max(received_ns, :now)"], {"now": now_ns, "no": session_no}
        for name, value in facts.items():
            if name not in _LEARNT:
                raise KeyError(name)
            if value is None:
                continue
            widen = _LEARNT[name]
            sets.append(f"{name} = {widen}(coalesce({name}, :{name}), :{name})" if widen else f"{name} = :{name}")
            values[name] = value
        with self._lock:
            self._connection.execute(
                f"UPDATE session SET {', '.join(sets)} WHERE session_no = :no",  # noqa: S608 - names are ours
                values,
            )

    def set_retention(self, session_no: int, days: float | None) -> None:
        """How long a session is kept after its last event (days); 0 for ever, None: as the store says."""
        with self._lock:
            self._connection.execute("UPDATE session SET retention_days = ? WHERE session_no = ?", (days, session_no))

    def get(self, session_id: str) -> Session | None:
        """A session by the id its writer gave it."""
        found = self._select("WHERE session_id = ?", (session_id,))
        return found[0] if found else None

    def of_numbers(self, numbers: Iterable[int]) -> list[Session]:
        """Sessions by number, in no order; those that are not there are left out."""
        wanted = list(numbers)
        return self._select(f"WHERE session_no IN ({', '.join('?' * len(wanted))})", wanted)

    def find(
        self,
        *,
        hostname: str | None = None,
        app: str | None = None,
        run_id: str | None = None,
        from_ns: int | None = None,
        to_ns: int | None = None,
        active_since_ns: int | None = None,
        over_at_ns: int | None = None,
        ended: bool | None = None,
        limit: int = 1000,
        offset: int = 0,
    ) -> tuple[list[Session], int]:
        """Sessions, the latest start first, and how many there are in all. ``from_ns`` and ``to_ns``: those that ran at
        some time in between, as far as known. ``active_since_ns``: those that something arrived of since.
        ``over_at_ns``: those that have ended, or that nothing arrived of since."""
        terms, values = ["1"], list[Any]()
        for name, value in (("hostname", hostname), ("app", app), ("run_id", run_id)):
            if value is not None:
                terms.append(f"{name} = ?")
                values.append(value)
        if from_ns is not None:
            terms.append("coalesce(end_ns, last_event_ns, received_ns) >= ?")
            values.append(from_ns)
        if to_ns is not None:
            terms.append("coalesce(start_ns, first_event_ns, created_ns) <= ?")
            values.append(to_ns)
        if active_since_ns is not None:
            terms.append("received_ns >= ?")
            values.append(active_since_ns)
        if over_at_ns is not None:
            terms.append("(end_ns IS NOT NULL OR received_ns < ?)")
            values.append(over_at_ns)
        if ended is not None:
            terms.append("end_ns IS NOT NULL" if ended else "end_ns IS NULL")
        where = "WHERE " + " AND ".join(terms)
        with self._lock:
            count = self._connection.execute(f"SELECT count(*) FROM session {where}", values).fetchone()[0]  # noqa: S608
        order = "ORDER BY coalesce(start_ns, first_event_ns, created_ns) DESC, session_no DESC LIMIT ? OFFSET ?"
        return self._select(f"{where} {order}", [*values, limit, offset]), int(count)

    def idle_since(self, before_ns: int) -> list[Session]:
        """Sessions of which nothing arrived since, the longest idle first."""
        return self._select("WHERE received_ns < ? ORDER BY received_ns, session_no", (before_ns,))

    def count(self) -> int:
        """How many sessions there are."""
        with self._lock:
            return int(self._connection.execute("SELECT count(*) FROM session").fetchone()[0])

    def remove(self, numbers: Iterable[int]) -> None:
        """Forget sessions."""
        with self._lock:
            self._connection.executemany("DELETE FROM session WHERE session_no = ?", [(number,) for number in numbers])
            self._numbers.clear()

    def close(self) -> None:
        """Give the file back."""
        with self._lock:
            self._connection.close()

    def _select(self, rest: str, values: Sequence[Any]) -> list[Session]:
        with self._lock:
            rows = self._connection.execute(f"{_SELECT} {rest}", values).fetchall()
        return [msgspec.convert(dict(zip(_COLUMNS, row, strict=True)), Session, strict=False) for row in rows]
