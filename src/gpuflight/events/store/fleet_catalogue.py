"""The sessions of a fleet's store: a table in memory, made from the commits, whose changes go into the next one."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable
from typing import Any

from gpuflight.events.store.catalogue import _LEARNT, _SCHEMA, Catalogue, Session

FACTS = tuple(_LEARNT)
"""What can be learnt of a session."""


class FleetCatalogue(Catalogue):
    """``look``: called before a question is answered, to take in what others have stored. ``changed``: called when a
    rule was set that has to be stored now. Numbers of sessions hold for this opening of the store only."""

    def __init__(self, where: str, look: Callable[[], None], changed: Callable[[], None]) -> None:
        self.path = where
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._connection.executescript(_SCHEMA)
        self._numbers: dict[str, int] = {}
        self._look = look
        self._changed = changed
        self._ids: dict[int, str] = {}
        self._pending: list[tuple[str, int, dict[str, Any]]] = []

    def number(self, session_id: str, now_ns: int) -> int:
        """The number of a session in this store, which it gets if it has none."""
        found = super().number(session_id, now_ns)
        self._ids[found] = session_id
        return found

    def id_of(self, session_no: int) -> str:
        """The id of a session by its number. Raises KeyError."""
        return self._ids[session_no]

    def learn(self, session_no: int, now_ns: int, facts: dict[str, Any]) -> None:
        """Take in what was learnt of a session, and remember to tell the others."""
        super().learn(session_no, now_ns, facts)
        self._tell(session_no, now_ns, dict(facts))

    def apply(self, session_id: str, now_ns: int, facts: dict[str, Any]) -> None:
        """Take in what a commit says of a session."""
        session_no = self.number(session_id, now_ns)
        super().learn(session_no, now_ns, facts)
        if "retention_days" in facts and facts["retention_days"] is None:
            super().set_retention(session_no, None)

    def set_retention(self, session_no: int, days: float | None) -> None:
        """How long a session is kept after its last event (days); 0 for ever, None: as the store says."""
        super().set_retention(session_no, days)
        self._tell(session_no, 0, {"retention_days": days})  # 0: nothing arrived of the session
        self._changed()

    def _tell(self, session_no: int, now_ns: int, facts: dict[str, Any]) -> None:
        session_id = self._ids.get(session_no)
        if session_id is not None:  # None: it was deleted meanwhile
            with self._lock:
                self._pending.append((session_id, now_ns, facts))

    def take_pending(self) -> list[tuple[str, int, dict[str, Any]]]:
        """What the others have not been told yet."""
        with self._lock:
            pending, self._pending = self._pending, []
        return pending

    def give_back(self, pending: list[tuple[str, int, dict[str, Any]]]) -> None:
        """They could not be told."""
        with self._lock:
            self._pending = pending + self._pending

    def get(self, session_id: str) -> Session | None:
        """A session by the id its writer gave it."""
        self._look()
        return super().get(session_id)

    def find(self, **which: Any) -> tuple[list[Session], int]:
        """Sessions, the latest start first; see ``Catalogue.find``."""
        self._look()
        return super().find(**which)

    def idle_since(self, before_ns: int) -> list[Session]:
        """Sessions of which nothing arrived since, the longest idle first."""
        self._look()
        return super().idle_since(before_ns)

    def is_there(self, session_id: str) -> bool:
        """Whether a session has a number."""
        return super().get(session_id) is not None

    def known(self, session_id: str) -> Session | None:
        """What is known of a session here, without looking for more."""
        return super().get(session_id)

    def everything(self) -> dict[str, tuple[int, int, dict[str, Any]]]:
        """All sessions, for a snapshot: created, received, facts, by id."""
        return {
            session.session_id: (
                session.created_ns,
                session.received_ns,
                {name: value for name in FACTS if (value := getattr(session, name)) is not None},
            )
            for session in self._select("", ())
        }

    def remove(self, numbers: Iterable[int]) -> None:
        """Forget sessions."""
        wanted = list(numbers)
        super().remove(wanted)
        for number in wanted:
            self._ids.pop(number, None)

    def replace(self, sessions: dict[str, tuple[int, int, dict[str, Any]]]) -> None:
        """Take in a snapshot; sessions that it does not tell of are gone."""
        self.remove([number for number, session_id in self._ids.items() if session_id not in sessions])
        for session_id, (created_ns, received_ns, facts) in sessions.items():
            self.number(session_id, created_ns)
            self.apply(session_id, received_ns, facts)
