"""Single-event lines that were met since the last flush, by type, until they become batches together."""

from __future__ import annotations

from typing import Any

from gpuflight.events.arrays import numpy
from gpuflight.events.format.details import Details, head_of
from gpuflight.events.format.emit import Output
from gpuflight.events.format.plans import SINGLES
from gpuflight.events.format.repair import load
from gpuflight.events.format.runs import Run
from gpuflight.events.format.session import Session, Sessions
from gpuflight.events.format.sheets import Block
from gpuflight.events.format.singles import Row, add_duration, row_of
from gpuflight.events.format.telemetry import telemetry_of
from gpuflight.events.ledger import Ledger, Place

_HEADS = 16


class Held:
    """``details``: how kernel_detail lines are known at the moment, ``active``: what a block is split by; ``cut_runs``:
    by the type as it is written, runs whose lines are known by their parts. ``lines``: seen so far, without those that
    were read in full."""

    def __init__(self, sessions: Sessions, output: Output, ledger: Ledger) -> None:
        self.cut_runs: dict[bytes, Run] = {}
        self.details: Details | None = None
        self.active: Details | None = None
        self.lines = 0
        self._sessions = sessions
        self._output = output
        self._ledger = ledger
        self._runs: dict[str, Run] = {}
        self._heads: dict[bytes, Details] = {}

    def take_known(self, data: bytes, place: Place) -> list[tuple[int, int]]:
        """Takes the lines of a block that are like known ones; where the others are."""
        np = numpy()
        runs: list[Run | Details] = [*self.cut_runs.values(), *self._heads.values()]
        runs = [run for run in runs if run.repeats.rows]
        if not runs:
            return [(0, len(data))]
        block = Block(data)
        left = np.ones(len(block.starts), dtype=bool)
        for run in runs:
            found = run.find(block)
            if found is not None:
                left[found.lines] = False
                run.waiting.add(found, place)
        edges = np.flatnonzero(np.diff(left, prepend=False, append=False))
        starts, ends = block.starts[edges[::2]], np.minimum(block.ends[edges[1::2] - 1] + 1, len(data))
        return list(zip(starts.tolist(), ends.tolist(), strict=True))

    def add(
        self,
        session: Session,
        wire_type: str,
        fields: dict[str, Any],
        line: bytes,
        place: Place,
        details: Details | None,
    ) -> None:
        """A line that was read in full: a row, and what of it repeats is remembered for the lines to come.

        ``details``: whose head it has.
        """
        plan = SINGLES[wire_type]
        row = row_of(plan, wire_type, fields, session, self._ledger, place)
        add_duration(plan, row.values, fields)
        if plan.telemetry:
            self._telemetry(session, wire_type, fields, row, place)
        if wire_type in ("job_start", "init"):
            self._output.rows(session, plan.table.name, wire_type, [row.values], place, [row.extra])
            return
        run = self._run(wire_type)
        if wire_type == "kernel_detail":
            if self._learn_detail(session, fields, line, row, place, details):
                self.lines -= 1  # counted with the others at the flush
                return
        else:
            fits = run.fits(line)
            if fits is None:
                self._flush_run(run, place)
                fits = run.fits(line)
            if fits:
                if not run.numbers:
                    run.place = place
                if run.learn(line, row, session):
                    self.lines -= 1
                    return
        run.rows.append((session, row, place))

    def flush(self, place: Place, before: int | None = None) -> None:
        """Batches of what is held; of what the block was searched for, only lines before this offset in the file."""
        for run in self._runs.values():
            self._flush_run(run, place, before)
        for details in self._heads.values():
            self._flush_details(details, place, before)
        self._run("kernel_detail").flush(self._output)

    def _run(self, wire_type: str) -> Run:
        run = self._runs.get(wire_type)
        if run is None:
            run = self._runs[wire_type] = Run(wire_type, SINGLES[wire_type], self._sessions.known)
            if run.plan.volatile and wire_type != "kernel_detail":
                self.cut_runs[wire_type.encode()] = run
        return run

    def _learn_detail(
        self, session: Session, fields: dict[str, Any], line: bytes, row: Row, place: Place, details: Details | None
    ) -> bool:
        """Remember the rest of a kernel_detail line, or its head; whether the line is now among the details."""
        if details is None:
            head = head_of(line)
            if head:
                known = self._heads.get(head)
                if known is None:
                    if len(self._heads) >= _HEADS:
                        idle = next(h for h, d in self._heads.items() if d is not self.active)
                        self._flush_details(self._heads.pop(idle), place)
                    known = self._heads[head] = Details(head, session)
                self.details = known
            return False
        corr_id, _, rest = line[len(details.head) - 1 :].partition(b",")
        if not corr_id.isdigit() or str(fields.get("corr_id")).encode() != corr_id or session is not details.session:
            return False
        details.numbers.append(details.learn(rest, row))
        details.corr_ids.append(corr_id)
        return True

    def _telemetry(self, session: Session, wire_type: str, fields: dict[str, Any], row: Row, place: Place) -> None:
        """Readings of host and devices inside an event; the first job_start also dates the session."""
        time_ns = row.values.get("time_ns")
        time_ns = time_ns if isinstance(time_ns, int) else None
        if wire_type in ("job_start", "init") and session.start_ns is None:
            session.start_ns = time_ns
        tables, unknown = telemetry_of(fields, time_ns)
        for subject in unknown:
            self._ledger.add("unknown_column", place, subject=f"{wire_type}.{subject}")
        for table, rows in tables.items():
            if rows:
                self._output.rows(session, table, wire_type, rows, place)

    def _flush_run(self, run: Run, place: Place, before: int | None = None) -> None:
        self.lines += len(run.numbers) + run.put(self._output, before)
        for line in run.flush(self._output):
            self._alone(line, run.wire_type, place)
        run.flush(self._output)

    def _flush_details(self, details: Details, place: Place, before: int | None = None) -> None:
        self.lines += len(details.numbers) + details.put(self._output, before)
        for line in details.flush(self._output):
            self._alone(line, "kernel_detail", place)

    def _alone(self, line: bytes, wire_type: str, place: Place) -> None:
        """A line that was taken for one like others and is not: read on its own (it was counted already)."""
        fields = load(line, self._ledger, place)
        if not isinstance(fields, dict):
            return
        session = self._sessions.of(fields.get("session_id"), place, len(line))
        if session is None:
            return
        plan = SINGLES[wire_type]
        row = row_of(plan, wire_type, fields, session, self._ledger, place)
        add_duration(plan, row.values, fields)
        self._run(wire_type).rows.append((session, row, place))
