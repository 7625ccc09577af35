"""Single-event lines that were met since the last flush, by type, until they become batches together."""

from __future__ import annotations

from typing import Any

from gpuflight.events.arrays import numpy
from gpuflight.events.format.emit import Output, select
from gpuflight.events.format.found import Found, Waiting
from gpuflight.events.format.plans import Plan
from gpuflight.events.format.session import Session
from gpuflight.events.format.sheets import Block, Sheet
from gpuflight.events.format.singles import Cut, Repeats, Row, find_cut
from gpuflight.events.ledger import Place

_LAYOUTS_LEARNT = 64
"""A type whose lines keep changing their layout is read line by line."""


class Run:
    """Lines of one type. Those that fit the ``cut`` are three lists of the same length; the others are rows."""

    def __init__(self, wire_type: str, plan: Plan, sessions: dict[str, Session]) -> None:
        self.wire_type = wire_type
        self.plan = plan
        self._sessions = sessions
        self.cut: Cut | None = None
        self.repeats = Repeats()
        self.numbers: list[int] = []
        self.changes: list[tuple[bytes, ...]] = []
        self.lines: list[bytes] = []
        self.place = Place()
        self.rows: list[tuple[Session, Row, Place]] = []
        self.waiting = Waiting()
        self._sheet = Sheet([])
        self._learnt = 0
        self._kinds: dict[str, str] = {"shape_id": "i64"}
        self._kinds.update({c.name: c.kind for c in plan.table.columns})

    def find(self, block: Block) -> Found | None:
        """Lines of a block that are like known ones."""
        return None if self.cut is None or self.repeats.full else self._sheet.find(block)

    def put(self, output: Output, before: int | None = None) -> int:
        """Batches of what was found and waits, before an offset in the file; how many lines."""
        count = 0
        for found, place in self.waiting.take(before):
            columns = self._columns(found.values)
            assert columns is not None  # noqa: S101 (they were looked at)
            self._put(found.numbers, columns, output, place)
            count += len(found.lines)
        return count

    def learn(self, line: bytes, row: Row, session: Session) -> bool:
        """Remember what of this line repeats; whether the line is now in the run. Flush first if ``fits`` says no."""
        cut = self.cut
        if cut is None or row.extra:
            return False
        repeats, changes = cut.parts(line)
        left_out = self._from_numbers(cut)
        values = {k: v for k, v in row.values.items() if k not in left_out}
        number = self.repeats.add(repeats, len(line), Row(values, row.extra), session.id)
        self.numbers.append(number)
        self.changes.append(changes)
        self.lines.append(line)
        self._sheet.learn(cut.texts(repeats), number)
        return True

    def fits(self, line: bytes) -> bool | None:
        """Whether the line has the layout at hand; None if it has another that this run would have to take on."""
        if not self.plan.volatile or self._learnt > _LAYOUTS_LEARNT:
            return False
        cut = find_cut(self.plan, line)
        if cut is None or not self._spans(cut):
            return False
        if self.cut is not None and cut.marks == self.cut.marks:
            return True
        if self.numbers or self.waiting:
            return None
        self.cut = cut
        self.repeats = Repeats()
        self._sheet = Sheet(cut.groups)
        self._learnt += 1
        return True

    def _spans(self, cut: Cut) -> bool:
        """Duration comes of start and end: both are cut out or neither."""
        names = {n for group in cut.groups for n in group}
        derived = "end_ns" not in self.plan.fields and "start_ns" in self.plan.fields
        return not derived or ("start_ns" in names) == ("end_ns" in names)

    def _from_numbers(self, cut: Cut) -> set[str]:
        names = {n for group in cut.groups for n in group}
        columns = {self.plan.fields[n].column.name for n in names if n in self.plan.fields}
        return columns | {"duration_ns"} if "end_ns" in names and "end_ns" not in self.plan.fields else columns

    def flush(self, output: Output) -> list[bytes]:
        """Batches of all lines; answers lines that were cut but turn out to need reading one by one."""
        left: list[bytes] = []
        if self.numbers:
            assert self.cut is not None  # noqa: S101 (numbers come of a cut)
            columns = self._columns(self.cut.numbers(self.changes))
            if columns is None:
                left = list(self.lines)
            else:
                self._put(self.numbers, columns, output, self.place)
            self.numbers.clear()
            self.changes.clear()
            self.lines.clear()
            if self.repeats.full and not self.waiting:
                self.repeats = Repeats()
                self._sheet = Sheet(self.cut.groups)
        if self.rows:
            rows, self.rows = self.rows, []
            by_session: dict[str, list[tuple[Session, Row, Place]]] = {}
            for item in rows:
                by_session.setdefault(item[0].id, []).append(item)
            for items in by_session.values():
                output.rows(
                    items[0][0],
                    self.plan.table.name,
                    self.wire_type,
                    [row.values for _, row, _ in items],
                    items[0][2],
                    [row.extra for _, row, _ in items],
                )
        return left

    def _put(self, numbers: Any, columns: dict[str, Any], output: Output, place: Place) -> None:
        for taken in self.repeats.take(numbers, self._kinds):
            own = columns
            if taken.positions is not None:
                own = {k: select(v, taken.positions) for k, v in columns.items()}
            output.columns(
                self._sessions[taken.session_id],
                self.plan.table,
                self.wire_type,
                {**taken.columns, **own},
                taken.count,
                place,
                extra=taken.extra,
            )

    def _columns(self, parsed: dict[str, Any] | None) -> dict[str, Any] | None:
        """Columns of the numbers that were cut out; None if one is too large for its column."""
        if parsed is None:
            return None
        np = numpy()
        columns: dict[str, Any] = {}
        for wire, values in parsed.items():
            field = self.plan.fields.get(wire)
            if field is not None and field.column.kind == "u64":
                columns[field.column.name] = values.view(np.uint64)
                continue
            signed = values.view(np.int64)
            if signed.min() < 0:
                return None
            if field is not None:
                columns[field.column.name] = signed
        if "end_ns" in parsed and "end_ns" not in self.plan.fields and "duration_ns" not in columns:
            columns["duration_ns"] = parsed["end_ns"].view(np.int64) - columns["start_ns"]
        return columns
