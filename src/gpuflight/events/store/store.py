"""The event store of one folder: sessions and records together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpuflight.events.batch import Batch
from gpuflight.events.ledger import Ledger
from gpuflight.events.store.catalogue import Catalogue, Session
from gpuflight.events.store.parts import Part, Relation, Source, Written
from gpuflight.events.store.records import Records
from gpuflight.events.store.retention import RetentionSettings, expired
from gpuflight.events.tables import TABLES

_SESSION_FACTS = (
    *("app", "hostname", "ip_addr", "pid", "session_kind", "profiling_engine", "log_path"),
    *("run_id", "segment_index", "analysis_id", "pass_index"),
)


class EventStore:
    """Sessions and records under ``folder``, which is made if it is not there. Any thread may call it.

    Raises InputError where the files cannot be opened, or another process has them.
    """

    def __init__(
        self,
        folder: str,
        *,
        retention: RetentionSettings | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
        threads: int | None = None,
    ) -> None:
        self.folder = folder
        self.retention = retention or RetentionSettings()
        self._wall_ns = wall_ns
        self.catalogue = Catalogue(os.path.join(folder, "sessions.sqlite"))
        try:
            self.records = Records(os.path.join(folder, "records.duckdb"), self._number, threads=threads)
        except BaseException:
            self.catalogue.close()
            raise

    def write(self, batches: Sequence[Batch], source: Source | None = None, ledger: Ledger | None = None) -> Written:
        """Store batches (of any sessions), all or nothing; safe when it returns. See ``Records.write``."""
        for session_id, facts in _facts(batches).items():
            self.catalogue.learn(self._number(session_id), self._wall_ns(), facts)
        return self.records.write(batches, source, ledger)

    def write_parts(self, parts: Sequence[Part]) -> list[Written]:
        """Store what several senders handed in, all or nothing. See ``Records.write_parts``."""
        batches = [batch for part in parts for batch in part.batches]
        for session_id, facts in _facts(batches).items():
            self.catalogue.learn(self._number(session_id), self._wall_ns(), facts)
        return self.records.write_parts(parts)

    def complete(self, session_id: str) -> None:
        """The sender says that everything of a session was sent."""
        now_ns = self._wall_ns()
        self.catalogue.learn(self.catalogue.number(session_id, now_ns), now_ns, {"completed_ns": now_ns})

    def session(self, session_id: str) -> Session | None:
        """A session by its id."""
        return self.catalogue.get(session_id)

    def relation(self, table: str, sessions: Iterable[Session]) -> Relation:
        """A table's rows of some sessions, as SQL to select from."""
        return self.records.relation(table, (session.session_no for session in sessions))

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The answer to a query as dicts; for answers of a few thousand rows."""
        return self.records.rows(sql, values)

    def columns(self, sql: str, values: Sequence[Any] = ()) -> dict[str, Any]:
        """The answer to a query as numpy arrays by column (masked where something is unknown)."""
        return self.records.columns(sql, values)

    def losses(self, session: Session) -> list[dict[str, Any]]:
        """The session's ledger: reason, what about, times, bytes, a place."""
        relation = self.records.relation("loss", (session.session_no,))
        return self.records.rows(
            "SELECT reason, about, sum(count)::BIGINT AS count, sum(size_bytes)::BIGINT AS size_bytes,"  # noqa: S608
            f" any_value(place) AS place FROM {relation.sql} GROUP BY reason, about ORDER BY count DESC, reason, about"
        )

    def outside_changes(self) -> int:
        """A number that differs after another process stored something; here there is no other."""
        return 0

    def remove(self, sessions: Iterable[Session]) -> None:
        """Delete sessions with all their records."""
        self._remove([session.session_no for session in sessions])

    def enforce_retention(self) -> int:
        """Delete what is past its age or over the size; how many sessions went."""
        now_ns = self._wall_ns()
        gone = expired(self.catalogue.idle_since(now_ns), now_ns, self.retention.max_age_days)
        self._remove(gone)
        count = len(gone)
        limit = self.retention.max_bytes
        while limit and (used := self.records.used_bytes()) > limit:
            idle = [session for session in self.catalogue.idle_since(now_ns) if session.retention_days != 0]
            if not idle:
                break
            # Sizes of single sessions are not known: take the share that is too much, then look again.
            take = max(1, int(len(idle) * (1 - limit / used)))
            self._remove([session.session_no for session in idle[:take]])
            count += take
        return count

    def close(self) -> None:
        """Give the files back."""
        self.records.close()
        self.catalogue.close()

    def _number(self, session_id: str) -> int:
        return self.catalogue.number(session_id, self._wall_ns())

    def _remove(self, numbers: list[int]) -> None:
        if numbers:
            self.records.remove(numbers)  # first: a session without records is less than records without a session
            self.catalogue.remove(numbers)


def _facts(batches: Sequence[Batch]) -> dict[str, dict[str, Any]]:
    """What the batches say of their sessions."""
    found: dict[str, dict[str, Any]] = {}
    for batch in batches:
        facts = found.setdefault(batch.session_id, {})
        table = TABLES[batch.table]
        if table.time and batch.clock == "wall" and batch.count and table.time in batch.columns:
            times = batch.columns[table.time]
            first, last = int(times.min()), int(times.max())
            facts["first_event_ns"] = min(facts.get("first_event_ns", first), first)
            facts["last_event_ns"] = max(facts.get("last_event_ns", last), last)
        if batch.table == "session_start":
            row = batch.rows()[-1]
            facts.update({name: row[name] for name in _SESSION_FACTS if row.get(name) not in (None, "")})
            if batch.clock == "wall" and "time_ns" in row:
                facts["start_ns"] = min(facts.get("start_ns", row["time_ns"]), row["time_ns"])
        elif batch.table == "session_end" and batch.clock == "wall":
            row = batch.rows()[-1]
            if "time_ns" in row:
                facts["end_ns"] = max(facts.get("end_ns", row["time_ns"]), row["time_ns"])
            facts["end_synthetic"] = int(row.get("synthetic") or 0)
    return found
