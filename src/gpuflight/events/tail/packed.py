"""Reading a compressed window as a stream, from where its plain file was read to."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from gpuflight.events.files.inflate import Damaged
from gpuflight.events.format.repair import is_whole
from gpuflight.events.tail.chunk import Chunk
from gpuflight.events.tail.lines import HEAD_BYTES, UTF16, cut, head_of, mark_of
from gpuflight.events.tail.shared import Shared
from gpuflight.events.tail.window import File, Window

_SPEND_BYTES = 8 << 20
_LOOK_BACK_BYTES = 64
_TRAILER_BYTES = 8


class PackedReader:
    """A compressed file in the middle of being read. ``position``: offset of the first byte of ``left``."""

    def __init__(self, file: File, pieces: Iterator[bytes]) -> None:
        self.file = file
        self.position = 0
        self.left = b""
        self.known = False
        self.settled = False
        self.resync = False
        self.parts: list[bytes] = []
        """Pieces of a line that has not ended; they begin at the window's ``read``."""
        self.parts_bytes = 0
        self.before = b""
        """Last bytes before ``position``."""
        self.damage = ""
        self.ended = False
        self._pieces = pieces

    def more(self) -> bool:
        """Whether another piece came into ``left``."""
        if self.ended:
            return False
        try:
            self.left += next(self._pieces)
        except StopIteration:
            self.ended = True
        except Damaged as error:
            self.ended, self.damage = True, error.reason
        return not self.ended

    def take(self, size: int) -> bytes:
        """The first bytes of ``left``."""
        piece, self.left = self.left[:size], self.left[size:]
        self.position += len(piece)
        self.before = (self.before + piece[-_LOOK_BACK_BYTES:])[-_LOOK_BACK_BYTES:]
        return piece

    def close(self) -> None:
        close = getattr(self._pieces, "close", None)
        if close is not None:
            close()


def read_packed(shared: Shared, window: Window, file: File, limit: int) -> Chunk | None:
    """The next lines; None as with ``read_raw``. ``stream.waits_for_room``: too many are being read already."""
    reader = window.reader
    if reader is not None and reader.file is not file:
        shared.stop_inflating(window)
        reader = None
    if reader is None:
        if _is_read(shared, window, file):
            _finish(shared, window, file)
            return None
        if not shared.may_inflate(window):
            window.stream.waits_for_room = True
            return None
        window.stream.waits_for_room = False
        reader = window.reader = PackedReader(file, shared.disk.inflate(file.path))
    if not reader.known and not _know(shared, window, reader):
        return None
    if not reader.settled and not _go_to_position(shared, window, reader):
        return None
    size = min(limit, shared.settings.max_line_bytes)
    spent = 0
    while spent < _SPEND_BYTES:
        if not reader.left and not reader.more():
            return _end(shared, window, reader)
        piece = reader.take(size)
        spent += len(piece)
        if reader.resync:
            piece = _resynchronise(shared, window, reader, piece)
        chunk = _lines(shared, window, reader, piece)
        if chunk is not None:
            return chunk
    shared.spent_bytes += spent
    return None


def same_packed(shared: Shared, file: File, start: bytes, other: Window) -> bool:
    """Whether a compressed file may be what was read as ``other``, by its beginning and its end. Reading on tells."""
    if other.read <= len(start):
        return other.mark.fits(start[: other.read])
    if other.done:
        trailer = trailer_of(shared, file)
        if other.trailer:
            return other.trailer == trailer
        return trailer >> 32 >= other.read & 0xFFFFFFFF
    return True


def trailer_of(shared: Shared, file: File) -> int:
    """CRC-32 and size of the content as the end of the file says them, in one number."""
    descriptor = shared.disk.open(file.path)
    try:
        size = shared.disk.status(descriptor).size_bytes
        last = shared.disk.read(descriptor, _TRAILER_BYTES, max(size - _TRAILER_BYTES, 0))
    finally:
        shared.disk.close(descriptor)
    return int(struct.unpack("<Q", last)[0]) if len(last) == _TRAILER_BYTES else 0


def _is_read(shared: Shared, window: Window, file: File) -> bool:
    """Whether the plain file was read as far as the compressed one goes (so that it need not be inflated)."""
    if not (file.sibling and file.checked and window.read):
        return False
    return trailer_of(shared, file) >> 32 == window.read & 0xFFFFFFFF


def _know(shared: Shared, window: Window, reader: PackedReader) -> bool:
    """Whether the file is this window's, by its first line."""
    file, stream = reader.file, window.stream
    while len(reader.left) < HEAD_BYTES and not head_of(reader.left) and reader.more():
        pass
    start = reader.left
    if start[:2] in UTF16:
        window.refused = True
        shared.tell("utf16_file", window, size_bytes=file.stamp.size_bytes)
        _finish(shared, window, file)
        return False
    head = head_of(start, ended=reader.ended and not reader.damage)
    if not window.head:
        if not head:  # nothing whole in it
            _end(shared, window, reader)
            return False
        if not stream.identify(window, file, head, lambda other: same_packed(shared, file, start, other)):
            return False
    elif head != window.head:
        if not head and reader.damage:  # not all there yet, or never
            _end(shared, window, reader)
        else:
            stream.split(window, file)
        return False
    file.checked = reader.known = True
    if window.to_end:
        window.to_end = False
        _finish(shared, window, file)
        return False
    if _is_read(shared, window, file):
        _finish(shared, window, file)
        return False
    return True


def _go_to_position(shared: Shared, window: Window, reader: PackedReader) -> bool:
    """Whether the reader is where the window was read to."""
    spent = 0
    while reader.position < window.read:
        if spent >= _SPEND_BYTES:
            shared.spent_bytes += spent
            return False
        if not reader.left and not reader.more():
            if reader.damage:
                _end(shared, window, reader)
            else:  # shorter than what was read: another window
                window.stream.split(window, reader.file, known_as_another=True)
            return False
        spent += len(reader.take(window.read - reader.position))
    if not window.mark.fits(reader.before):
        window.stream.split(window, reader.file, known_as_another=True)
        return False
    reader.settled = True
    if window.resumed:
        window.resumed = False
        reader.resync = reader.before[-1:] != b"\n"
    return True


def _resynchronise(shared: Shared, window: Window, reader: PackedReader, piece: bytes) -> bytes:
    """What follows the line in whose middle, or before whose newline, reading was to begin."""
    end = piece.find(b"\n") + 1
    skipped = end or len(piece)
    if piece[:skipped].strip():
        shared.tell("resynchronised", window, size_bytes=skipped, offset=window.read)
    window.read += skipped
    window.mark = mark_of(piece[:skipped][-_LOOK_BACK_BYTES:])
    window.unended = False
    reader.resync = not end
    return piece[skipped:]


def _lines(shared: Shared, window: Window, reader: PackedReader, piece: bytes) -> Chunk | None:
    longest = shared.settings.max_line_bytes
    end = piece.rfind(b"\n") + 1
    if not end:
        _hold(reader, piece, longest)
        return None
    first = piece.find(b"\n") + 1
    if reader.parts_bytes + first > longest + 1:
        size = reader.parts_bytes + first
        shared.tell("line_too_long", window, size_bytes=size, offset=window.read)
        window.read += size
        window.mark = mark_of(piece[:first][-_LOOK_BACK_BYTES:])
        reader.parts, reader.parts_bytes = [], 0
        piece, end = piece[first:], end - first
        if not end:
            _hold(reader, piece, longest)
            return None
    rest = piece[end:]
    lines = b"".join([*reader.parts, piece[:end]])
    reader.parts, reader.parts_bytes = [], 0
    _hold(reader, rest, longest)
    found = cut(lines, unended=window.unended, at_end=False)
    window.unended = False
    start = window.read + found.start
    window.read += found.end
    if found.end == found.start:
        window.mark = mark_of(lines[: found.end][-_LOOK_BACK_BYTES:])
        return None
    return _hand_out(window, start, lines[found.start : found.end])


def _hold(reader: PackedReader, piece: bytes, longest: int) -> None:
    """Keep a part of a line; of one that is too long only its size."""
    if piece:
        reader.parts_bytes += len(piece)
        if reader.parts_bytes > longest:
            reader.parts = []
        else:
            reader.parts.append(piece)


def _end(shared: Shared, window: Window, reader: PackedReader) -> Chunk | None:
    """The file's end, or the end of what it still holds."""
    file = reader.file
    if reader.damage in ("truncated_file", "empty_file") and _may_grow(shared, window, file):
        return None
    rest = b"".join(reader.parts) if reader.known else reader.left
    size = reader.parts_bytes if reader.known else len(rest)
    if reader.damage:
        shared.tell(reader.damage, window, size_bytes=file.stamp.size_bytes)
    start = window.read
    chunk = None
    if window.head and rest and is_whole(rest):
        window.read += len(rest)
        chunk = _hand_out(window, start, rest)
    elif size > shared.settings.max_line_bytes:
        shared.tell("line_too_long", window, size_bytes=size, offset=start)
    elif rest.strip():
        shared.tell("cut_line", window, size_bytes=size, offset=start)
    _finish(shared, window, file)
    return chunk


def _may_grow(shared: Shared, window: Window, file: File) -> bool:
    """A file that ends early may still be in the making: it is looked at again until it has settled."""
    now_s = shared.monotonic_s()
    stamp = shared.disk.look(file.path)
    if file.cut_since_s < 0 or stamp != file.stamp:
        file.stamp = stamp
        file.cut_since_s = now_s
    if now_s - file.cut_since_s >= shared.settings.settle_s:
        return False
    shared.stop_inflating(window)
    window.dirty = False
    window.stream.look_again(window, min(file.cut_since_s + shared.settings.settle_s, now_s + 1.0))
    return True


def _finish(shared: Shared, window: Window, file: File) -> None:
    shared.stop_inflating(window)
    file.finished = True
    window.dirty = False
    window.done = True
    window.trailer = trailer_of(shared, file)
    window.seen_bytes = window.read


def _hand_out(window: Window, start: int, data: bytes) -> Chunk:
    window.mark = mark_of(data[-_LOOK_BACK_BYTES:])
    end = start + len(data)
    window.hand_out(start, end)
    return Chunk(window, window.path, start, end, data)
