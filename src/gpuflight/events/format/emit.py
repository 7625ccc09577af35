"""From columns to batches: clocks told apart, launch details split off, names and shapes first."""

from __future__ import annotations

from typing import Any

from gpuflight.events.arrays import numpy
from gpuflight.events.batch import Batch, Clock
from gpuflight.events.format.plans import ZERO_IS_UNKNOWN
from gpuflight.events.format.rows import array, gather
from gpuflight.events.format.session import EPOCH_FROM_NS, Session
from gpuflight.events.ledger import Ledger, Place
from gpuflight.events.tables import TABLES, Table

_DETAIL = ("corr_id", "shape_id", "scope_id", "stack_id")
_SHAPE_KINDS = {c.name: c.kind for c in TABLES["kernel_shape"].columns}


class Output:
    """Batches of one ``feed``, in the order in which they were met, texts and shapes before all others."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._batches: list[Batch] = []
        self._parts = 0
        self._sessions: dict[str, Session] = {}

    def rows(
        self,
        session: Session,
        table: str,
        wire_type: str,
        rows: list[dict[str, Any]],
        place: Place,
        extras: list[dict[str, Any]] | None = None,
    ) -> None:
        """Rows as dicts; those with the same columns go together."""
        kinds: dict[str, str] = {c.name: c.kind for c in TABLES[table].columns}
        kinds["shape_id"] = "i64"
        for chosen, columns, extra in gather(rows, extras or [{}] * len(rows), kinds):
            self.columns(session, TABLES[table], wire_type, columns, len(chosen), place, extra=extra)

    def columns(
        self,
        session: Session,
        table: Table,
        wire_type: str,
        columns: dict[str, Any],
        count: int,
        place: Place,
        *,
        batch_id: int | None = None,
        extra: dict[str, list[Any]] | None = None,
    ) -> None:
        """Rows by column; what of them cannot be on the timeline goes apart.

        ``batch_id``: its parts are counted from ``begin_line`` on.
        """
        self._sessions[session.id] = session
        if place.channel in session.ended and table.frequent:
            self._ledger.add("after_shutdown", place, count=count, subject=wire_type)
        if table.name == "device_metric":
            columns = {k: v for k, v in columns.items() if k not in ZERO_IS_UNKNOWN or v.any()}
        details: dict[str, Any] = {}
        if "shape_id" in columns and table.name not in ("kernel_detail", "kernel_start"):
            if "corr_id" in columns:
                details = {name: columns[name] for name in _DETAIL if name in columns}
            del columns["shape_id"]
        for clock, chosen in self._clocks(session, table, wire_type, columns, count, place):
            part = columns if chosen is None else {k: select(v, chosen) for k, v in columns.items()}
            part_extra = extra if chosen is None or not extra else {k: select(v, chosen) for k, v in extra.items()}
            size = count if chosen is None else len(chosen)
            self._batches.append(
                Batch(
                    table.name,
                    session.id,
                    size,
                    part,
                    wire_type,
                    batch_id,
                    self._parts,
                    place,
                    clock,
                    part_extra or None,
                )
            )
            self._parts += 1
        if details:
            self._batches.append(Batch("kernel_detail", session.id, count, details, wire_type, None, 0, place))

    def begin_line(self) -> None:
        """A line of many rows begins: its parts are counted from 0."""
        self._parts = 0

    def _clocks(
        self, session: Session, table: Table, wire_type: str, columns: dict[str, Any], count: int, place: Place
    ) -> list[tuple[Clock, Any]]:
        """(clock, positions; None for all) for the rows."""
        times = columns.get(table.time)
        if times is None or not count:
            return [("wall", None)]
        np = numpy()
        unplaced = times < EPOCH_FROM_NS if session.has_epoch and times.min() < EPOCH_FROM_NS else None
        steady = columns["sample_kind"] == 2 if "sample_kind" in columns else None
        if steady is not None and not steady.any():
            steady = None
        if unplaced is None and steady is None:
            return [("wall", None)]
        none = np.zeros(count, dtype=bool)
        steady = none if steady is None else steady
        unplaced = (none if unplaced is None else unplaced) & ~steady
        result: list[tuple[Clock, Any]] = []
        clocks: tuple[tuple[Clock, str, Any], ...] = (
            ("wall", "", ~(steady | unplaced)),
            ("steady", "steady_clock", steady),
            ("unplaced", "implausible_time", unplaced),
        )
        for clock, reason, mask in clocks:
            found = int(np.count_nonzero(mask))
            if found and reason:
                self._ledger.add(reason, place, count=found, subject=wire_type)
            if found:
                result.append((clock, None if found == count else np.flatnonzero(mask)))
        return result

    def finish(self) -> list[Batch]:
        """All batches; texts and shapes that they use come first."""
        first: list[Batch] = []
        for session in self._sessions.values():
            first.extend(self._told(session))
        batches, self._batches, self._sessions = self._batches, [], {}
        return first + batches if first else batches

    def touch(self, session: Session) -> None:
        """The session has something to tell even if no rows of it come."""
        self._sessions[session.id] = session

    def _told(self, session: Session) -> list[Batch]:
        told: list[Batch] = []
        if session.names:
            dictionaries, ids, texts = (list(column) for column in zip(*session.names, strict=True))
            columns = {"dictionary": dictionaries, "id": array(ids, "i64"), "text": texts}
            told.append(Batch("name", session.id, len(texts), columns, "dictionary_update"))
            session.names = []
        if session.shapes:
            for chosen, shape_columns, _ in gather(session.shapes, [{}] * len(session.shapes), dict(_SHAPE_KINDS)):
                told.append(Batch("kernel_shape", session.id, len(chosen), shape_columns, "kernel_detail"))
            session.shapes = []
        return told


def select(column: Any, positions: Any) -> Any:
    """Some rows of a column."""
    return [column[i] for i in positions.tolist()] if isinstance(column, list) else column[positions]
