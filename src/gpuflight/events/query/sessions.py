"""The sessions: which there are, whether they still run, how much of them is here and what was lost."""

from __future__ import annotations

from typing import Protocol

import msgspec

from gpuflight.events.ledger import REASONS
from gpuflight.events.query.reader import Reader, Store
from gpuflight.events.store.catalogue import Catalogue, Session
from gpuflight.events.tables import TABLES

LIVE_FOR_S = 60.0
"""A session without an end counts as live while something of it arrived within this time (twelve of the format's
slowest telemetry intervals, 5 s)."""

_COUNTED = tuple(name for name, table in TABLES.items() if table.frequent)


class Sessions(Store, Protocol):
    """A store that has a catalogue."""

    @property
    def catalogue(self) -> Catalogue: ...


class SessionLine(msgspec.Struct, kw_only=True):
    """A session with what is here of it.

    ``state``: live, ended, died (its launcher wrote the end), or silent (no end, and nothing arrives any
    more). ``complete``: its sender said that everything was sent and nothing is noted as lost. ``records``: rows by
    table. ``lost_count``: lines, rows, names, files or windows that cannot be told any more.
    """

    session: Session
    state: str
    complete: bool
    lost_count: int
    records: dict[str, int]


class SessionPage(msgspec.Struct, kw_only=True):
    """A page of sessions, and how many match in all."""

    sessions: list[SessionLine]
    sessions_count: int


def list_sessions(
    store: Sessions,
    now_ns: int,
    *,
    hostname: str | None = None,
    app: str | None = None,
    run_id: str | None = None,
    from_ns: int | None = None,
    to_ns: int | None = None,
    live: bool | None = None,
    limit: int = 100,
    offset: int = 0,
) -> SessionPage:
    """Sessions, the latest first; with ``live`` only those that are (true) or are not (false) live now."""
    since_ns = now_ns - int(LIVE_FOR_S * 1e9)
    found, count = store.catalogue.find(
        ended=False if live else None,
        hostname=hostname,
        app=app,
        run_id=run_id,
        from_ns=from_ns,
        to_ns=to_ns,
        active_since_ns=since_ns if live else None,
        over_at_ns=since_ns if live is False else None,
        limit=limit,
        offset=offset,
    )
    return SessionPage(sessions=describe(store, found, now_ns), sessions_count=count)


def describe(store: Store, sessions: list[Session], now_ns: int) -> list[SessionLine]:
    """What is here of each of some sessions."""
    reader = Reader(store, sessions)
    records: dict[int, dict[str, int]] = {}
    lost: dict[int, int] = {}
    if sessions:
        union = " UNION ALL ".join(
            f"SELECT session_no, '{name}' AS name, count(*) AS count FROM {reader.table(name)} GROUP BY session_no"  # noqa: S608
            for name in _COUNTED
        )
        for row in reader.rows(union):
            records.setdefault(row["session_no"], {})[row["name"]] = row["count"]
        reasons = ", ".join(f"'{reason}'" for reason, (effect, _) in REASONS.items() if effect == "lost")
        for row in reader.rows(
            f"SELECT session_no, sum(count)::BIGINT AS count FROM {reader.table('loss')}"  # noqa: S608
            f" WHERE reason IN ({reasons}) GROUP BY session_no"
        ):
            lost[row["session_no"]] = row["count"]
    return [
        SessionLine(
            session=session,
            state=state(session, now_ns),
            complete=session.completed_ns is not None and not lost.get(session.session_no),
            lost_count=lost.get(session.session_no, 0),
            records=records.get(session.session_no, {}),
        )
        for session in sessions
    ]


def state(session: Session, now_ns: int) -> str:
    """``live``, ``ended``, ``died`` or ``silent``; see ``SessionLine``."""
    if session.end_ns is not None:
        return "died" if session.end_synthetic else "ended"
    return "live" if now_ns - session.received_ns <= LIVE_FOR_S * 1e9 else "silent"
