"""Lines of GPU Flight logs, of any generation, to batches. It never raises for what a file holds.

``Decoder.feed`` takes whole lines as bytes, as many as there are, and answers with the batches they make. What does
not become a record is in ``Decoder.ledger``. Lines are told apart by a cheap look at their type; the frequent kinds
have their own way: columnar batches in ``columnar``, lines of single events in ``held``.
"""

from __future__ import annotations

from typing import Any

from gpuflight.events.batch import Batch
from gpuflight.events.format.cells import cell
from gpuflight.events.format.columnar import TYPES as COLUMNAR
from gpuflight.events.format.columnar import Columnar
from gpuflight.events.format.details import Details
from gpuflight.events.format.emit import Output
from gpuflight.events.format.held import Held
from gpuflight.events.format.lines import Lines
from gpuflight.events.format.plans import BATCHES, EVERY_CHANNEL, SINGLES
from gpuflight.events.format.repair import BYTE_ORDER_MARK, load
from gpuflight.events.format.session import Session, Sessions
from gpuflight.events.format.session_lines import capability_rows, dictionary_entries
from gpuflight.events.ledger import Ledger, Place
from gpuflight.events.tables import TABLES

__all__ = ["Decoder", "Lines"]

_TYPE = b'"type":"'
_BLOCK = 1 << 15
"""Less than this is not worth to be looked at as a whole."""


class Decoder:
    """Decoder of one folder or stream. Keep it between calls: it knows which texts it has told and what it has seen.

    ``session_id``: session of lines that name none (the name of the session's folder). ``sessions``: met so far.
    """

    def __init__(self, session_id: str = "", ledger: Ledger | None = None) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self._sessions = Sessions(session_id, self.ledger)
        self.sessions = self._sessions.known
        self._output = Output(self.ledger)
        self._held = Held(self._sessions, self._output, self.ledger)
        self._columnar = Columnar(self._sessions, self._output, self.ledger)
        self._read_lines = 0

    @property
    def lines(self) -> int:
        """Lines seen, blank ones not counted."""
        return self._read_lines + self._held.lines

    def feed(self, data: bytes, place: Place = Place()) -> list[Batch]:  # noqa: B008 (immutable)
        """Batches of whole lines (the last one may lack its newline). ``place.offset``: where ``data`` starts."""
        place = place._replace(offset=max(place.offset, 0))
        others = self._held.take_known(data, place) if len(data) >= _BLOCK else [(0, len(data))]
        for start, end in others:
            self._read(data[start:end], place, place.offset + start)
        self._held.flush(place)
        return self._output.finish()

    def session(self, identifier: str) -> Session:
        """The state of a session, made at its first line."""
        return self._sessions.get(identifier)

    def _read(self, data: bytes, place: Place, offset: int) -> None:
        """All lines, one after the other."""
        if self._held.details is None:
            read = self._lines(data, place, offset, until_head=True)
            data, offset = data[read:], offset + read
        if data and self._held.details is not None:
            self._block(self._held.details, data, place, offset)

    def _block(self, details: Details, data: bytes, place: Place, offset: int) -> None:
        """Lines of a block, kernel_detail lines of the known head by splitting at it."""
        self._held.active = details
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
            if number is not None and corr_id.isdigit():
                numbers.append(number)
                corr_ids.append(corr_id)
            else:
                line, ended, others = part.partition(b"\n")
                corr_id, _, rest = line.partition(b",")
                number = get(rest)
                if number is None or not corr_id.isdigit():
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
        cut_runs = self._held.cut_runs
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
            if until_head and self._held.details is not None:
                # the newline stays: it is the first byte of the head
                return min(offset - start - 1, len(data))
        return len(data)

    def _line(self, line: bytes, wire: bytes, place: Place, details: Details | None = None) -> None:
        """One line, the whole way. ``details``: whose head it has."""
        if line.isspace():
            return
        self._read_lines += 1
        if wire in COLUMNAR and self._columnar.line(line, wire, place):
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
        session = self._sessions.of(fields.get("session_id"), place, len(line))
        if session is not None:
            self._event(session, wire_type, fields, line, place, details)

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
            if not self._columnar.batch(
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
            self._held.add(session, wire_type, fields, line, place, details)
        else:
            self.ledger.add("unknown_type", place, size_bytes=len(line), subject=wire_type[:80])
            row = {"type": wire_type, "line": line.strip().decode("utf-8", "replace")}
            self._output.rows(session, "unknown", wire_type, [row], place)
        if wire_type == "shutdown":
            self._held.flush(place, before=place.offset)
            session.ended.add(place.channel)


assert set(SINGLES) & set(BATCHES) == set() and all(p.table.name in TABLES for p in SINGLES.values())  # noqa: S101
