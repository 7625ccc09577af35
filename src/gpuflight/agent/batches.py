"""Lines of a window, some at a time, ready to be posted."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from msgspec import Struct

from gpuflight.events.files.inflate import Damaged, chunks
from gpuflight.events.format.repair import is_whole

MAX_LINE_BYTES = 64 << 20
"""Longer lines are left out; no receiver takes them."""


class Lines(Struct):
    """Whole lines; ``start`` and ``end`` are offsets in the uncompressed content. ``count``: blank ones left out."""

    start: int
    end: int
    data: bytes
    count: int


class LineReader:
    """Iterate over it once. Afterwards ``crc32`` is of the whole content, and ``lost`` says what could not be had."""

    def __init__(self, path: str, compressed: bool, *, max_lines: int, max_bytes: int, start: int = 0) -> None:
        self._path = path
        self._compressed = compressed
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._start = start
        self.crc32 = 0
        self.size_bytes = 0
        self.lost = ""

    def __iter__(self) -> Iterator[Lines]:
        held = b""
        position = 0
        skipping = False
        try:
            for piece in chunks(self._path, self._compressed):
                self.crc32 = zlib.crc32(piece, self.crc32)
                self.size_bytes += len(piece)
                skip = min(max(self._start - position, 0), len(piece)) if not held else 0
                position += skip
                held = held + piece[skip:] if held else piece[skip:]
                if len(held) > MAX_LINE_BYTES and b"\n" not in held:
                    self.lost = "line_too_long"
                    position += len(held)
                    held, skipping = b"", True
                    continue
                if skipping:
                    rest = held.find(b"\n") + 1
                    position += rest or len(held)
                    held, skipping = held[rest:] if rest else b"", not rest
                end = held.rfind(b"\n") + 1
                if end:
                    yield from self._cut(position, held[:end])
                    position += end
                    held = held[end:]
        except Damaged as damage:
            self.lost = damage.reason
        if held.strip():
            if is_whole(held):
                yield Lines(position, position + len(held), held, 1)
            else:
                self.lost = self.lost or "cut_line"

    def _cut(self, start: int, lines: bytes) -> Iterator[Lines]:
        """Within the limits; a line that is larger alone goes alone."""
        here = 0
        while here < len(lines):
            end = here
            count = 0
            while count < self._max_lines and end < len(lines):
                after = lines.index(b"\n", end) + 1
                if count and after - here > self._max_bytes:
                    break
                end = after
                count += 1
            data = lines[here:end]
            kept = sum(1 for line in data.split(b"\n") if line.strip())
            if kept:
                yield Lines(start + here, start + end, data, kept)
            here = end


def content_crc32(path: str, compressed: bool) -> tuple[int, int]:
    """CRC-32 and size of a window's uncompressed content. Raises OSError; damage ends it early."""
    crc32 = size_bytes = 0
    try:
        for piece in chunks(path, compressed):
            crc32 = zlib.crc32(piece, crc32)
            size_bytes += len(piece)
    except Damaged:
        pass
    return crc32, size_bytes


def is_damaged(path: str) -> bool:
    """Whether a compressed window cannot be read to its end. Raises OSError."""
    try:
        for _ in chunks(path, True):
            pass
    except Damaged:
        return True
    return False
