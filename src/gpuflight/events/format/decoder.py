"""Lines of GPU Flight logs, of any generation, to batches. It never raises for what a file holds.

``Decoder.feed`` takes whole lines as bytes, as many as there are, and answers with the batches they make. What does
not become a record is in ``Decoder.ledger``. Lines are told apart by a cheap look at their type; the frequent kinds
have their own way: columnar batches in ``rows``, single events in ``singles`` and ``runs``, kernel_detail in
``details``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gpuflight.events.arrays import numpy
from gpuflight.events.batch import Batch
from gpuflight.events.format.cells import cell
from gpuflight.events.format.details import Details, head_of
from gpuflight.events.format.emit import Output
from gpuflight.events.format.lines import Lines
from gpuflight.events.format.plans import BATCHES, EVERY_CHANNEL, SINGLES
from gpuflight.events.format.repair import BYTE_ORDER_MARK, load
from gpuflight.events.format.rows import Problems, parse_rows
from gpuflight.events.format.runs import Run
from gpuflight.events.format.session import Session
from gpuflight.events.format.session_lines import capability_rows, dictionary_entries
from gpuflight.events.format.sheets import Block
from gpuflight.events.format.singles import Row, add_duration, row_of
from gpuflight.events.format.telemetry import telemetry_of
from gpuflight.events.ledger import Ledger, Place
from gpuflight.events.tables import TABLES

__all__ = ["Decoder", "Lines"]

_TYPE = b'"type":"'
_SHUTDOWN = b"shutdown"
_BLOCK = 1 << 15
"""Less than this is not worth to be looked at as a whole."""

_ROWS = b'"rows":[['
_ROWS_END = b"]]}"
_NO_ROWS = b"[]}"
_I62 = 1 << 62
_HEADS = 16


class _Columnar(msgspec.Struct):
    type: str
    columns: list[str]
    rows: msgspec.Raw
    session_id: str = ""
    batch_id: int | None = None
    base_time_ns: int | None = None


_columnar = msgspec.json.Decoder(_Columnar)
_COLUMNAR_TYPES = frozenset(name.encode() for name in BATCHES)


class Decoder:
    """Decoder of one folder or stream. Keep it between calls: it knows which texts it has told and what it has seen.

    ``session_id``: session of lines that name none (the name of the session's folder).
    """

    def __init__(self, session_id: str = "", ledger: Ledger | None = None) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self.sessions: dict[str, Session] = {}
        self.lines = 0
        """Lines seen, blank ones not counted."""
        self._session_id = session_id
        self._output = Output(self.ledger)
        self._runs: dict[str, Run] = {}
        self._cut_runs: dict[bytes, Run] = {}
        self._details: Details | None = None
        self._heads: dict[bytes, Details] = {}
        self._active: Details | None = None

    def feed(self, data: bytes, place: Place = Place()) -> list[Batch]:  # noqa: B008 (immutable)
        """Batches of whole lines (the last one may lack its newline). ``place.offset``: where ``data`` starts."""
        offset = max(place.offset, 0)
        for start, end in (
            self._known(data, place._replace(offset=offset)) if len(data) >= _BLOCK else ((0, len(data)),)
        ):
            self._read(data[start:end], place, offset + start)
        self._flush(place)
        return self._output.finish()

    def _known(self, data: bytes, place: Place) -> list[tuple[int, int]]:
        """Takes the lines that are like known ones; where the others are."""
        np = numpy()
        runs: list[Run | Details] = [*self._cut_runs.values(), *self._heads.values()]
        runs = [run for run in runs if run.repeats.rows]
        if not runs:
            return [(0, len(data))]
        block = Block(data)
        found = [(run, result) for run in runs if (result := run.find(block)) is not None]
        left = np.ones(len(block.starts), dtype=bool)
        for _, result in found:
            left[result.lines] = False
        edges = np.flatnonzero(np.diff(left, prepend=False, append=False))
        starts, ends = block.starts[edges[::2]], np.minimum(block.ends[edges[1::2] - 1] + 1, len(data))
        others = list(zip(starts.tolist(), ends.tolist(), strict=True))
        if any(data.find(_SHUTDOWN, start, end) >= 0 for start, end in others):
            return [(0, len(data))]  # what comes after it is told apart
        for run, result in found:
            run.put(result, self._output, place._replace(offset=place.offset + int(result.offsets[0])))
            self.lines += len(result.lines)
        return others

    def _read(self, data: bytes, place: Place, offset: int) -> None:
        """All lines, one after the other."""
        if self._details is None:
            read = self._lines(data, place, offset, until_head=True)
            data, offset = data[read:], offset + read
        if data and self._details is not None:
            self._block(self._details, data, place, offset)

    def session(self, identifier: str) -> Session:
        """The state of a session, made at its first line."""
        session = self.sessions.get(identifier)
        if session is None:
            session = self.sessions[identifier] = Session(identifier)
        return session

    def _block(self, details: Details, data: bytes, place: Place, offset: int) -> None:
        """Lines of a block, kernel_detail lines of the known head by splitting at it."""
        self._active = details
        first, *parts = data.split(details.head)
        size = len(details.head)
        if first.startswith(details.head[1:]):  # the block begins with such a line; no newline before it
            parts.insert(0, first[size - 1 :])
            offset -= 1
        else:
            self._lines(first, place, offset)
            offset += len(first)
        numbers, corr_ids, get = details.numbers, details.corr_ids, details.repeats.index.get
        if parts and not numbers:
            details.place = place._replace(offset=offset + 1)
        for part in parts:
            corr_id, _, rest = part.partition(b",")
            number = get(rest)
            if number is not None:
                numbers.append(number)
                corr_ids.append(corr_id)
            else:
                line, ended, others = part.partition(b"\n")
                number = get(line[len(corr_id) + 1 :])
                if number is None:
                    self._line(details.head[1:] + line, b"kernel_detail", place._replace(offset=offset + 1), details)
                else:
                    numbers.append(number)
                    corr_ids.append(corr_id)
                if ended:
                    self._lines(others, place, offset + size + len(line) + 1)
                get = details.repeats.index.get
            offset += size + len(part)

    def _lines(self, data: bytes, place: Place, offset: int, *, until_head: bool = False) -> int:
        """Line by line; the bytes read: all, or up to the line that told the head of kernel_detail lines."""
        cut_runs = self._cut_runs
        start = offset
        prefix, run = b"{", None
        wire = b""
        ended = 0
        while ended < len(data):  # one at a time: memory of long lines is used again
            begun = ended
            ended = data.find(b"\n", begun) + 1 or len(data) + 1
            line = data[begun : ended - 1]
            at = offset
            offset += len(line) + 1
            if not line:
                continue
            if run is None or not line.startswith(prefix):
                i = line.find(_TYPE, 0, 48)
                end = line.find(b'"', i + 8, i + 72)
                wire = line[i + 8 : end] if i > 0 else b""
                run = cut_runs.get(wire)
                prefix = line[: end + 1]
            if run is not None and run.cut is not None:
                repeats, changes = run.cut.parts(line)
                number = run.repeats.index.get(repeats)
                if number is not None:
                    if not run.numbers:
                        run.place = place._replace(offset=at)
                    run.numbers.append(number)
                    run.changes.append(changes)
                    run.lines.append(line)
                    continue
            self._line(line, wire, place._replace(offset=at))
            if until_head and self._details is not None:
                # the newline stays: it is the first byte of the head
                return min(offset - start - 1, len(data))
        return len(data)

    def _line(self, line: bytes, wire: bytes, place: Place, details: Details | None = None) -> None:
        """One line, the whole way. ``details``: whose head it has."""
        if line.isspace():
            return
        self.lines += 1
        if wire in _COLUMNAR_TYPES and self._columnar(line, wire, place):
            return
        if line.startswith(BYTE_ORDER_MARK):
            self.ledger.add("byte_order_mark", place)
            line = line.removeprefix(BYTE_ORDER_MARK)
        fields = load(line, self.ledger, place)
        if not isinstance(fields, dict):
            if fields is not None or line.strip() == b"null":
                self.ledger.add("not_object", place, size_bytes=len(line))
            return
        wire_type = fields.get("type")
        if not isinstance(wire_type, str):
            self.ledger.add("no_type", place, size_bytes=len(line))
            return
        session = self._session_of(fields.get("session_id"), place, line)
        if session is not None:
            self._event(session, wire_type, fields, line, place, details)

    def _columnar(self, line: bytes, wire: bytes, place: Place) -> bool:
        """A columnar batch as it is usually laid out. False if it is not."""
        at = line.find(_ROWS)
        if at > 0 and line.endswith(_ROWS_END):  # with plain rows, what is before them needs to be JSON only
            try:
                batch = _columnar.decode(line[: at + len(_ROWS) - 2] + _NO_ROWS)
            except (ValueError, RecursionError):
                pass
            else:
                if self._columns(batch, line, wire, place, line[at + len(_ROWS) - 2 : -1]):
                    return True
        try:
            batch = _columnar.decode(line)
        except (ValueError, RecursionError):
            return False
        return self._columns(batch, line, wire, place)

    def _columns(
        self, batch: _Columnar, line: bytes, wire: bytes, place: Place, unchecked: bytes | None = None
    ) -> bool:
        """``unchecked``: the rows, taken only if they are the text of plain integers."""
        if batch.type.encode() != wire or (unchecked is not None and bytes(batch.rows) != b"[]"):
            return False
        rows = bytes(batch.rows) if unchecked is None else unchecked
        identifier = batch.session_id or self._session_id
        if unchecked is not None and not identifier:
            return False
        session = self._session_of(identifier, place, line)
        return session is None or self._batch(
            session,
            batch.type,
            batch.columns,
            rows,
            batch.batch_id,
            batch.base_time_ns,
            place,
            plain=unchecked is not None,
        )

    def _session_of(self, identifier: Any, place: Place, line: bytes) -> Session | None:
        if not isinstance(identifier, str) or not identifier:
            identifier = self._session_id
        if not identifier:
            self.ledger.add("no_session", place, size_bytes=len(line))
            return None
        return self.session(identifier)

    def _event(
        self,
        session: Session,
        wire_type: str,
        fields: dict[str, Any],
        line: bytes,
        place: Place,
        details: Details | None,
    ) -> None:
        if wire_type in EVERY_CHANNEL and session.is_copy(line.strip(), place.channel):
            self.ledger.add("channel_copy", place, subject=wire_type)
        elif wire_type == "dictionary_update":
            dictionary_entries(session, fields, self.ledger, place)
            self._output.touch(session)
        elif wire_type == "capture_capabilities":
            rows = capability_rows(session, fields, self.ledger, place)
            self._output.rows(session, "capability", wire_type, rows, place)
        elif wire_type in BATCHES:
            batch_id = cell(fields.get("batch_id"), "i64")
            base_ns = cell(fields.get("base_time_ns"), "i64")
            if not self._batch(
                session,
                wire_type,
                fields.get("columns"),
                fields.get("rows"),
                batch_id if isinstance(batch_id, int) else None,
                base_ns if isinstance(base_ns, int) else None,
                place,
            ):
                self.ledger.add("bad_batch", place, subject=wire_type)
        elif wire_type in SINGLES:
            self._single(session, wire_type, fields, line, place, details)
        else:
            self.ledger.add("unknown_type", place, size_bytes=len(line), subject=wire_type[:80])
            row = {"type": wire_type, "line": line.strip().decode("utf-8", "replace")}
            self._output.rows(session, "unknown", wire_type, [row], place)
        if wire_type == "shutdown":
            self._flush(place)
            session.ended.add(place.channel)

    def _batch(
        self,
        session: Session,
        wire_type: str,
        names: Any,
        rows: Any,
        batch_id: int | None,
        base_ns: int | None,
        place: Place,
        *,
        plain: bool = False,
    ) -> bool:
        """A columnar batch: told once, its times made absolute. False if its columns or rows are no such thing.

        ``plain``: the rows may not be JSON; False if they are not plain integers either.
        """
        plan = BATCHES[wire_type]
        problems = Problems()
        if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
            return False
        if not isinstance(rows, (bytes, list)):
            return False
        try:
            parsed = parse_rows(plan, wire_type, names, rows, problems, plain=plain)
        except (ValueError, RecursionError):
            return False
        if batch_id is not None:
            text = rows if isinstance(rows, bytes) else repr(rows).encode("utf-8", "replace")
            signature = hash((base_ns, len(text), text[:96], text[-96:]))
            seen = session.batch(wire_type, batch_id, signature, place.channel)
            if seen in ("copy", "again"):
                self.ledger.add("channel_copy" if seen == "copy" else "repeated_batch", place, subject=wire_type)
                return True
            if seen == "conflict":
                self.ledger.add("batch_conflict", place, subject=wire_type)
                batch_id = None
        for (reason, subject), count in problems.counts.items():
            self.ledger.add(reason, place, count=count, subject=subject)
        self._output.begin_line()
        time = plan.table.time
        for part in parsed:
            relative = part.columns.get(time)
            if relative is not None and part.count:
                known = base_ns is not None and abs(base_ns) < _I62
                if known and int(relative.min()) > -_I62 and int(relative.max()) < _I62:
                    part.columns[time] = relative + base_ns
                else:
                    self.ledger.add("bad_cell", place, count=part.count, subject=f"{wire_type}.base_time_ns")
                    del part.columns[time]
            if part.count:
                self._output.columns(
                    session,
                    plan.table,
                    wire_type,
                    part.columns,
                    part.count,
                    place,
                    batch_id=batch_id,
                    extra=part.extra,
                )
        return True

    def _single(
        self,
        session: Session,
        wire_type: str,
        fields: dict[str, Any],
        line: bytes,
        place: Place,
        details: Details | None,
    ) -> None:
        """A line of one event: a row, and what of it repeats is remembered for the lines to come."""
        plan = SINGLES[wire_type]
        row = row_of(plan, wire_type, fields, session, self.ledger, place)
        add_duration(plan, row.values, fields)
        if plan.telemetry:
            self._telemetry(session, wire_type, fields, row, place)
        if wire_type in ("job_start", "init"):
            self._output.rows(session, plan.table.name, wire_type, [row.values], place, [row.extra])
            return
        run = self._run(wire_type)
        if wire_type == "kernel_detail":
            if self._learn_detail(session, fields, line, row, details):
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

    def _run(self, wire_type: str) -> Run:
        run = self._runs.get(wire_type)
        if run is None:
            run = self._runs[wire_type] = Run(wire_type, SINGLES[wire_type], self.sessions)
            if run.plan.volatile and wire_type != "kernel_detail":
                self._cut_runs[wire_type.encode()] = run
        return run

    def _learn_detail(
        self, session: Session, fields: dict[str, Any], line: bytes, row: Row, details: Details | None
    ) -> bool:
        """Remember the rest of a kernel_detail line, or its head; whether the line is now among the details."""
        if details is None:
            head = head_of(line)
            if head:
                known = self._heads.get(head)
                if known is None:
                    if len(self._heads) >= _HEADS:
                        idle = next(h for h, d in self._heads.items() if d is not self._active)
                        del self._heads[idle]
                    known = self._heads[head] = Details(head, session)
                self._details = known
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
            self.ledger.add("unknown_column", place, subject=f"{wire_type}.{subject}")
        for table, rows in tables.items():
            if rows:
                self._output.rows(session, table, wire_type, rows, place)

    def _flush(self, place: Place) -> None:
        for run in self._runs.values():
            self._flush_run(run, place)
        for details in self._heads.values():
            self.lines += len(details.numbers)
            for line in details.flush(self._output):
                self._alone(line, "kernel_detail", place)
        self._run("kernel_detail").flush(self._output)

    def _flush_run(self, run: Run, place: Place) -> None:
        self.lines += len(run.numbers)
        for line in run.flush(self._output):
            self._alone(line, run.wire_type, place)
        run.flush(self._output)

    def _alone(self, line: bytes, wire_type: str, place: Place) -> None:
        """A line that was taken for one like others and is not: read on its own (it was counted already)."""
        fields = load(line, self.ledger, place)
        if not isinstance(fields, dict):
            return
        session = self._session_of(fields.get("session_id"), place, line)
        if session is None:
            return
        plan = SINGLES[wire_type]
        row = row_of(plan, wire_type, fields, session, self.ledger, place)
        add_duration(plan, row.values, fields)
        self._run(wire_type).rows.append((session, row, place))


assert set(SINGLES) & set(BATCHES) == set() and all(p.table.name in TABLES for p in SINGLES.values())  # noqa: S101
