"""kernel_detail lines by the block: nine lines out of ten of a detailed session.

Up to the corr_id such a line is the same all session long, after it the same for every launch of a kernel in one
shape from one place. So a block is split at that head, and what follows the number is looked up as it is.
"""

from __future__ import annotations

from typing import Any

from gpuflight.events.arrays import numpy
from gpuflight.events.format.emit import Output, select
from gpuflight.events.format.found import Found, Waiting
from gpuflight.events.format.session import Session
from gpuflight.events.format.sheets import Block, Sheet
from gpuflight.events.format.singles import Repeats, Row, numbers_between
from gpuflight.events.ledger import Place
from gpuflight.events.tables import TABLES

MARK = b',"corr_id":'
_KINDS: dict[str, str] = {c.name: c.kind for c in TABLES["kernel_detail"].columns}


def head_of(line: bytes) -> bytes:
    """What lines like this one begin with, newline included; empty if it is not laid out as expected."""
    end = line.find(MARK)
    return b"\n" + line[: end + len(MARK)] if end > 0 else b""


class Details:
    """Lines of one head since the last flush: a number of what repeats and the digits of the corr_id for each."""

    def __init__(self, head: bytes, session: Session) -> None:
        self.head = head
        self.session = session
        self.repeats = Repeats()
        self.numbers: list[int] = []
        self.corr_ids: list[bytes] = []
        self.place = Place()
        self.waiting = Waiting()
        self._sheet = Sheet([["corr_id"]])

    def learn(self, rest: bytes, row: Row) -> int:
        values = {k: v for k, v in row.values.items() if k != "corr_id"}
        number = self.repeats.add(rest, len(rest), Row(values, row.extra), self.session.id)
        self._sheet.learn((self.head[1:], b"," + rest), number)
        return number

    def find(self, block: Block) -> Found | None:
        """Lines of a block that are like known ones."""
        return None if self.repeats.full else self._sheet.find(block)

    def put(self, output: Output, before: int | None = None) -> int:
        """Batches of what was found and waits, before an offset in the file; how many lines."""
        count = 0
        for found, place in self.waiting.take(before):
            self._put(found.numbers, found.values["corr_id"].view(numpy().int64), output, place)
            count += len(found.lines)
        return count

    def flush(self, output: Output) -> list[bytes]:
        """A batch of all lines; answers lines whose number is none, to be read one by one."""
        if not self.numbers:
            return []
        left: list[bytes] = []
        parsed = numbers_between(self.corr_ids, ["corr_id"], b"")
        corr_ids: Any = None if parsed is None else parsed[0].view(numpy().int64)
        if corr_ids is None or corr_ids.min() < 0:
            parts = {number: rest for rest, number in self.repeats.index.items()}
            left = [
                self.head[1:] + corr_id + b"," + parts[number]
                for corr_id, number in zip(self.corr_ids, self.numbers, strict=True)
            ]
        else:
            self._put(self.numbers, corr_ids, output, self.place)
        self.numbers.clear()
        self.corr_ids.clear()
        if self.repeats.full and not self.waiting:
            self.repeats = Repeats()
            self._sheet = Sheet([["corr_id"]])
        return left

    def _put(self, numbers: Any, corr_ids: Any, output: Output, place: Place) -> None:
        for taken in self.repeats.take(numbers, _KINDS):
            own = corr_ids if taken.positions is None else select(corr_ids, taken.positions)
            columns = {"corr_id": own, **taken.columns}
            output.columns(
                self.session,
                TABLES["kernel_detail"],
                "kernel_detail",
                columns,
                taken.count,
                place,
                extra=taken.extra,
            )
