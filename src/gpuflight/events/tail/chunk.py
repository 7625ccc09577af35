"""What a tailer hands out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuflight.events.ledger import Place

if TYPE_CHECKING:
    from gpuflight.events.tail.window import Window


class Chunk:
    """Whole lines of one window, byte by byte as they lie there; only the last may lack its newline.

    ``source``, ``start`` and ``end`` are a position for ``events.store.Source``: the same lines have the same position
    whichever file they lie in (renamed, compressed) and whoever reads them again (killed, checkpoint lost), so the
    store takes each once. Offsets are of the uncompressed content. ``session_id``: the session's folder; empty in flat
    folders, where the lines name their sessions themselves. ``window``: its number, -1 for the one being written.
    """

    __slots__ = ("channel", "data", "end", "folder", "origin", "path", "session_id", "source", "start", "window")

    def __init__(self, origin: Window, path: str, start: int, end: int, data: bytes) -> None:
        stream = origin.stream
        self.origin = origin
        self.folder = stream.folder
        self.session_id = stream.session_id
        self.channel = stream.channel
        self.window = -1 if origin.number is None else origin.number
        self.path = path
        self.source = origin.source
        self.start = start
        self.end = end
        self.data = data

    @property
    def place(self) -> Place:
        """For the decoder."""
        return Place(self.path, self.channel, self.window, self.start)

    def after(self, position: int) -> bytes:
        """The lines from a position on: what is left to store where the store has a part (``Overlap``)."""
        return self.data[max(position - self.start, 0) :]

    def lines(self) -> list[bytes]:
        """The lines without their newlines; blank ones are left out."""
        return [line for line in self.data.split(b"\n") if line.strip()]

    def __repr__(self) -> str:
        return f"Chunk({self.path}, {self.start}..{self.end})"
