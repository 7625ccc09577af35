"""Bytes to whole lines, and by what a window of lines is known again."""

from __future__ import annotations

import hashlib
import zlib
from typing import NamedTuple

from gpuflight.events.format.repair import is_whole

HEAD_BYTES = 1 << 16
_MARK_BYTES = 64
UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Mark(NamedTuple):
    """The last bytes before a position: by them it is seen that a file still is what was read."""

    size: int = 0
    crc32: int = 0

    def fits(self, before: bytes) -> bool:
        """``before``: what lies before the position now, at least ``size`` bytes."""
        return len(before) >= self.size and zlib.crc32(before[len(before) - self.size :]) == self.crc32


def mark_of(before: bytes) -> Mark:
    last = before[-_MARK_BYTES:]
    return Mark(len(last), zlib.crc32(last))


def head_of(start: bytes, *, ended: bool = False) -> str:
    """Signature of a window's content: of its first line that is not blank, or that line's first 64 KiB.

    ``start``: the content's first bytes. Empty as long as the line has not ended (``ended``: the content has). Empty
    files have none, so that they are never taken for one another.
    """
    start = start[:HEAD_BYTES]
    line, newline, _ = start.lstrip().partition(b"\n")
    if not newline and len(start) < HEAD_BYTES and not (line and (ended or is_whole(line))):
        return ""
    return hashlib.blake2b(line.rstrip(), digest_size=10).hexdigest()


class Cut(NamedTuple):
    """``[start:end]`` of a piece are whole lines. ``unended``: the last of them lacks its newline, which may follow."""

    start: int
    end: int
    unended: bool


def cut(piece: bytes, *, unended: bool, at_end: bool) -> Cut:
    """Whole lines of a piece that begins with a line, or (``unended``) behind one that had no newline yet.

    ``at_end``: nothing follows so far; then a last line without newline counts if it is a whole object, since writers
    flush lines without their newline.
    """
    start = 0
    if unended:
        rest = piece.lstrip(b" \t\r")
        if not rest:
            return Cut(0, 0, True)
        if rest[:1] == b"\n":
            start = len(piece) - len(rest) + 1
    end = max(piece.rfind(b"\n") + 1, start)
    if at_end and end < len(piece) and is_whole(piece[end:]):
        return Cut(start, len(piece), True)
    return Cut(start, end, False)
