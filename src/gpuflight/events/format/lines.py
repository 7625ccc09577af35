"""Bytes as they come from a file or socket, to whole lines."""

from __future__ import annotations

from gpuflight.events.ledger import Ledger, Place

MAX_LINE_BYTES = 256 << 20
"""Longest line that is kept. Whole source files and disassemblies come as one line of megabytes."""


class Lines:
    """Puts chunks together to whole lines; ``place`` is where the next call's data starts.

    A line above the limit costs itself only: its bytes are counted and skipped up to its newline.
    """

    def __init__(self, place: Place, ledger: Ledger, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self.offset = max(place.offset, 0)
        """Of the first byte that was not yet given out."""
        self._place = place
        self._ledger = ledger
        self._limit = max_line_bytes
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._skipping = False

    def push(self, chunk: bytes) -> tuple[bytes, Place]:
        """Whole lines, newlines included, and where they start; empty if none ended."""
        end = chunk.rfind(b"\n") + 1
        if self._skipping:
            first = chunk.find(b"\n") + 1
            skipped = first or len(chunk)
            self.offset += skipped
            self._ledger.add("line_too_long", None, count=0, size_bytes=skipped)
            if not first:
                return b"", self._here()
            self._skipping = False
            chunk = chunk[first:]
            end = max(end - first, 0)
        place = self._here()
        if not end:
            self._hold(chunk)
            return b"", place
        lines = b"".join([*self._held, memoryview(chunk)[:end]]) if self._held else chunk[:end]
        self._held, self._held_bytes = [], 0
        self.offset += len(lines)
        self._hold(chunk[end:])
        return lines, place

    def rest(self) -> tuple[bytes, Place]:
        """What is held of a line that has not ended, and where it starts. It stays held."""
        return b"".join(self._held), self._here()

    def _hold(self, data: bytes) -> None:
        if not data:
            return
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > self._limit:
            self._ledger.add("line_too_long", self._here(), size_bytes=self._held_bytes)
            self.offset += self._held_bytes
            self._held, self._held_bytes = [], 0
            self._skipping = True

    def _here(self) -> Place:
        return self._place._replace(offset=self.offset)
