"""A block of lines, as one request brings it, to batches, and which of its lines were of no use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct, field

from gpuflight.events.batch import Batch
from gpuflight.events.ledger import REASONS, Ledger, Place
from gpuflight.events.tables import TABLES
from gpuflight.server.events.body import Damaged

if TYPE_CHECKING:
    from gpuflight.events.format.decoder import Decoder

LINE_REASONS = frozenset(("not_json", "not_object", "no_type", "no_session", "bad_batch", "line_too_long", "cut_line"))
"""Losses of a whole line."""

_FIRST_LINES = frozenset(("job_start", "init"))

ERRORS_LISTED = 1000
"""Most lines of one block that are told one by one; all are counted."""


class LineError(Struct, frozen=True):
    """A line that was of no use, or only in part. ``line`` counts from 1; None where it is not known."""

    line: int | None
    type: str | None
    reason: str


class Decoded(Struct):
    """What became of a block. ``damaged``: why it could not be decompressed to its end; empty if it was."""

    batches: list[Batch] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    lines: int = 0
    rejected: int = 0
    errors: list[LineError] = field(default_factory=list)
    raw_bytes: int = 0
    damaged: str = ""

    @property
    def accepted(self) -> int:
        """Lines that became records, or told what was known already."""
        return max(0, self.lines - self.rejected)


class LineLedger(Ledger):
    """A ledger that also remembers where each loss was, until it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[tuple[int, str, str]] = []
        self.rejected = 0
        self.too_long = 0

    def add(
        self, reason: str, place: Place | None = None, *, count: int = 1, size_bytes: int = 0, subject: str = ""
    ) -> None:
        super().add(reason, place, count=count, size_bytes=size_bytes, subject=subject)
        if count and REASONS[reason][0] == "lost":
            if reason in LINE_REASONS:
                self.rejected += count
            if reason == "line_too_long":  # the decoder never sees those
                self.too_long += count
            if len(self.losses) < ERRORS_LISTED:
                self.losses.append((place.offset if place is not None else -1, reason, subject))

    def take(self) -> Ledger:
        """What was counted since the last time; from here on it counts from nothing."""
        taken = Ledger()
        taken._entries, self._entries = self._entries, {}
        self.losses, self.rejected, self.too_long = [], 0, 0
        return taken


def decode(
    decoder: Decoder, ledger: LineLedger, content: Iterator[bytes], place: Place, max_line_bytes: int
) -> Decoded:
    """Decode a block. What ``content`` raises besides Damaged is raised, and then the decoder is of no use any more:
    it believes that what it told was stored."""
    from gpuflight.events.format.lines import Lines

    ledger.take()
    result = Decoded()
    lines_before = decoder.lines
    lines = Lines(place._replace(offset=0), ledger, max_line_bytes)
    numbers = _LineNumbers()
    try:
        for piece in content:
            result.raw_bytes += len(piece)
            data, at = lines.push(piece)
            if data:
                result.batches += decoder.feed(data, at)
            numbers.passed(piece, ledger, result.errors)
    except Damaged as error:
        result.damaged = str(error)
    rest, at = lines.rest()
    if rest:
        result.batches += decoder.feed(rest, at)
    numbers.passed(b"", ledger, result.errors)
    if result.damaged:
        ledger.add("corrupt_file", at)
        result.errors.append(LineError(numbers.next_line, None, "corrupt_file"))
    _identify(result.batches)
    result.lines = decoder.lines - lines_before + ledger.too_long
    result.rejected = ledger.rejected
    result.ledger = ledger.take()
    result.errors.sort(key=lambda error: (error.line is None, error.line))
    return result


def _identify(batches: list[Batch]) -> None:
    """The first line of a session goes to every channel, with readings of host and devices in it. A decoder that saw
    one of them knows the others for copies; one that did not (of another topic, or after a restart) does not. So the
    readings get a number by which the store knows them: the time of the line."""
    for batch in batches:
        if batch.wire_type in _FIRST_LINES and batch.batch_id is None and not TABLES[batch.table].key:
            times = batch.columns.get(TABLES[batch.table].time)
            if times is not None and batch.count:
                batch.batch_id = int(times[0])


class _LineNumbers:
    """Numbers of lines from their offsets, while the content passes by."""

    def __init__(self) -> None:
        self._starts: list[tuple[int, int, bytes]] = []  # of the pieces of which a line may still be asked about
        self._offset = 0
        self.next_line = 1
        self._told = 0

    def passed(self, piece: bytes, ledger: LineLedger, errors: list[LineError]) -> None:
        """A piece that was fed; lines that are lost by now are added to ``errors``."""
        if piece:
            self._starts.append((self._offset, self.next_line, piece))
            self._offset += len(piece)
            self.next_line += piece.count(b"\n")
        for offset, reason, subject in ledger.losses[self._told :]:
            errors.append(LineError(self._line(offset), subject.partition(".")[0] or None, reason))
        self._told = len(ledger.losses)
        while len(self._starts) > 1 and b"\n" in self._starts[-1][2]:  # a line may have begun in the last but one
            if len(self._starts) == 2:
                break
            del self._starts[0]

    def _line(self, offset: int) -> int | None:
        for start, line, piece in reversed(self._starts):
            if 0 <= start <= offset:
                return line + piece.count(b"\n", 0, offset - start)
        return None
