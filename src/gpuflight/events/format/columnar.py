"""Lines of many rows: told once, their times made absolute."""

from __future__ import annotations

from typing import Any

import msgspec

from gpuflight.events.format.emit import Output
from gpuflight.events.format.plans import BATCHES
from gpuflight.events.format.rows import Problems, parse_rows
from gpuflight.events.format.session import Session, Sessions
from gpuflight.events.ledger import Ledger, Place

TYPES = frozenset(name.encode() for name in BATCHES)
_ROWS = b'"rows":[['
_ROWS_END = b"]]}"
_NO_ROWS = b"[]}"
_I62 = 1 << 62


class _Head(msgspec.Struct):
    type: str
    columns: list[str]
    rows: msgspec.Raw
    session_id: str = ""
    batch_id: int | None = None
    base_time_ns: int | None = None


_head = msgspec.json.Decoder(_Head)


class Columnar:
    """Reads them, in any layout."""

    def __init__(self, sessions: Sessions, output: Output, ledger: Ledger) -> None:
        self._sessions = sessions
        self._output = output
        self._ledger = ledger

    def line(self, line: bytes, wire: bytes, place: Place) -> bool:
        """A batch as it is usually laid out. False if it is not."""
        at = line.find(_ROWS)
        if at > 0 and line.endswith(_ROWS_END):  # with plain rows, what is before them needs to be JSON only
            try:
                head = _head.decode(line[: at + len(_ROWS) - 2] + _NO_ROWS)
            except (ValueError, RecursionError):
                pass
            else:
                if self._read(head, line, wire, place, line[at + len(_ROWS) - 2 : -1]):
                    return True
        try:
            head = _head.decode(line)
        except (ValueError, RecursionError):
            return False
        return self._read(head, line, wire, place)

    def _read(self, head: _Head, line: bytes, wire: bytes, place: Place, unchecked: bytes | None = None) -> bool:
        """``unchecked``: the rows, taken only if they are the text of plain integers."""
        plain = unchecked is not None
        if head.type.encode() != wire or (plain and bytes(head.rows) != b"[]"):
            return False
        if plain and not (head.session_id or self._sessions.default):
            return False
        rows = bytes(head.rows) if unchecked is None else unchecked
        session = self._sessions.of(head.session_id, place, len(line))
        return session is None or self.batch(
            session, head.type, head.columns, rows, head.batch_id, head.base_time_ns, place, plain=plain
        )

    def batch(
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
                self._ledger.add("channel_copy" if seen == "copy" else "repeated_batch", place, subject=wire_type)
                return True
            if seen == "conflict":
                self._ledger.add("batch_conflict", place, subject=wire_type)
                batch_id = None
        for (reason, subject), count in problems.counts.items():
            self._ledger.add(reason, place, count=count, subject=subject)
        self._output.begin_line()
        time = plan.table.time
        for part in parsed:
            relative = part.columns.get(time)
            if relative is not None and part.count:
                known = base_ns is not None and abs(base_ns) < _I62
                if known and int(relative.min()) > -_I62 and int(relative.max()) < _I62:
                    part.columns[time] = relative + base_ns
                else:
                    self._ledger.add("bad_cell", place, count=part.count, subject=f"{wire_type}.base_time_ns")
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
