"""Reading a plain file that may grow, be renamed, cut off, written anew or deleted meanwhile."""

from __future__ import annotations

from gpuflight.events.format.repair import is_whole
from gpuflight.events.tail.chunk import Chunk
from gpuflight.events.tail.lines import HEAD_BYTES, UTF16, Mark, cut, head_of, mark_of
from gpuflight.events.tail.shared import Shared
from gpuflight.events.tail.window import Window

_SCAN_BYTES = 1 << 20
_LOOK_BACK_BYTES = 64


def read_raw(shared: Shared, window: Window, limit: int) -> Chunk | None:
    """The next lines. None: there are none now (``dirty`` is off), or what the file is had to be settled first."""
    if window.descriptor < 0 and not _open(shared, window):
        return None
    shared.used(window)
    disk, descriptor = shared.disk, window.descriptor
    size = min(limit, shared.settings.max_line_bytes)
    body = disk.read(descriptor, size, window.read)
    # If the bytes before the position have changed, the file was written anew. They are read last: what replaces the
    # content in between shows.
    before = disk.read(descriptor, window.mark.size, window.read - window.mark.size)
    if not window.mark.fits(before) or (not body and disk.status(descriptor).size_bytes < window.read):
        _rewritten(shared, window)
        return None
    at_end = len(body) < size
    window.seen_bytes = max(window.seen_bytes, window.read + len(body))
    if not body:
        _at_end(window)
        return None
    if window.refused or (not window.head and not _identify(shared, window)):
        return None
    if window.to_end:
        _skip_to_end(shared, window)
        return None
    if window.resumed and not _settle(shared, window, body, at_end):
        return None
    found = cut(body, unended=window.unended, at_end=at_end)
    window.unended = found.unended
    if found.end > found.start:
        start = window.read + found.start
        _move(window, _last(before, body, found.end), window.read + found.end)
        if at_end:
            _at_end(window)
        return _hand_out(window, start, body[found.start : found.end])
    if found.start:
        _move(window, _last(before, body, found.start), window.read + found.start)
    if at_end:
        _at_end(window)
    elif not found.start:
        return _long_line(shared, window, len(body))
    return None


def same_raw(shared: Shared, window: Window, other: Window) -> bool:
    """Whether a file that was just opened goes on with what was read as ``other``, or is a copy of it."""
    disk = shared.disk
    size = disk.status(window.descriptor).size_bytes
    if size >= other.read:
        return other.mark.fits(disk.read(window.descriptor, other.mark.size, other.read - other.mark.size))
    raw = other.raw
    if other.descriptor < 0 and raw is None:
        return False
    descriptor = other.descriptor if other.descriptor >= 0 else disk.open(raw.path if raw is not None else "")
    try:
        start = max(size - _LOOK_BACK_BYTES, 0)
        return disk.read(window.descriptor, size - start, start) == disk.read(descriptor, size - start, start)
    finally:
        if descriptor != other.descriptor:
            disk.close(descriptor)


def _open(shared: Shared, window: Window) -> bool:
    """Whether the window's file is open now, and is the window's."""
    file = window.raw
    if file is None:
        window.dirty = False
        return False
    stream = window.stream
    descriptor = shared.open(window, file.path)
    found = shared.disk.status(descriptor)
    if stream.trusted and (found.device, found.inode) != (file.stamp.device, file.stamp.inode):
        shared.close(window)  # another file has this name by now
        window.dirty = False
        stream.stale = True
        return False
    if window.head and not (file.checked and stream.trusted):
        start = shared.disk.read(descriptor, 4096, 0)
        if b"\n" not in start.lstrip():
            start = shared.disk.read(descriptor, HEAD_BYTES, 0)
        if head_of(start) != window.head:
            if stream.trusted:  # else it was renamed, as a rule
                shared.tell("file_rewritten", window, offset=window.read)
            stream.split(window, file)
            return False
        file.checked = True
    return True


def _identify(shared: Shared, window: Window) -> bool:
    """Whether the window has a first line now, by which it is known, and is none that is known already."""
    start = shared.disk.read(window.descriptor, HEAD_BYTES, 0)
    if start[:2] in UTF16:
        window.refused, window.dirty = True, False
        shared.tell("utf16_file", window, size_bytes=window.seen_bytes)
        return False
    head = head_of(start)
    file = window.raw
    if not head:
        window.dirty = False
        if file is None:
            _at_end(window)
        return False
    return window.stream.identify(window, file, head, lambda other: same_raw(shared, window, other))


def _settle(shared: Shared, window: Window, body: bytes, at_end: bool) -> bool:
    """Whether a line begins where a checkpoint says; if not, what is left of that line is skipped and counted."""
    disk, descriptor = shared.disk, window.descriptor
    last = disk.read(descriptor, 1, window.read - 1)
    if last == b"\n":
        window.resumed = False
        return True
    if last in b"} \t\r":
        size = min(window.read, shared.settings.max_line_bytes)
        line = disk.read(descriptor, size, window.read - size).rpartition(b"\n")[2]
        if is_whole(line):
            window.resumed, window.unended = False, True
            return True
    end = body.find(b"\n") + 1 or len(body)
    if at_end and body[end - 1 : end] != b"\n":
        _at_end(window)
        return False
    shared.tell("resynchronised", window, size_bytes=end, offset=window.read)
    window.read += end
    _move(window, _before(shared, window, window.read), window.read)
    return False


def _long_line(shared: Shared, window: Window, known: int) -> Chunk | None:
    """A line that is longer than one read: its end is looked for without keeping it."""
    disk, descriptor = shared.disk, window.descriptor
    longest = shared.settings.max_line_bytes
    position = max(window.scanned, window.read + known)
    end, spent = 0, 0
    at_end = False
    while not end and not at_end and spent < 4 * _SCAN_BYTES:
        piece = disk.read(descriptor, _SCAN_BYTES, position)
        found = piece.find(b"\n")
        end = position + found + 1 if found >= 0 else 0
        at_end = found < 0 and len(piece) < _SCAN_BYTES
        position += len(piece) if found < 0 else 0
        spent += len(piece)
    window.scanned = position
    window.seen_bytes = max(window.seen_bytes, position)
    shared.spent_bytes += spent
    if end and end - window.read > longest + 1:
        shared.tell("line_too_long", window, size_bytes=end - window.read, offset=window.read)
        _move(window, _before(shared, window, end), end)
    elif end or at_end:
        line = b""
        if end or position - window.read <= longest:
            line = disk.read(descriptor, (end or position) - window.read, window.read)
        if line and (end or is_whole(line)):
            start = window.read
            _move(window, line[-_LOOK_BACK_BYTES:], start + len(line))
            window.unended = not end
            if at_end:
                _at_end(window)
            return _hand_out(window, start, line)
        if at_end:
            _at_end(window)
    return None


def _rewritten(shared: Shared, window: Window) -> None:
    """The file holds something else: what comes now is another window, from the beginning or from where it was cut.

    The old window may go on in a copy of the file (copytruncate).
    """
    disk, descriptor = shared.disk, window.descriptor
    size = disk.status(descriptor).size_bytes
    shared.tell("file_truncated" if size < window.read else "file_rewritten", window, offset=window.read)
    same = bool(window.head) and head_of(disk.read(descriptor, HEAD_BYTES, 0)) == window.head
    begin, unended = 0, False
    if same and 0 < size < window.read:
        length = min(size, shared.settings.max_line_bytes)
        before = disk.read(descriptor, length, size - length)
        line = before.rpartition(b"\n")[2]
        unended = is_whole(line)
        begin = size if unended else size - len(line)
    file = window.raw
    if file is None:  # deleted as well: nothing to go on with
        window.dirty = False
        shared.close(window)
        return
    new = window.stream.split(window, file, known_as_another=same)
    if begin:  # known by what is left; saved at once, since nothing in the file tells it from the old one
        window.stream.identify(new, file, window.head, lambda other: False)
        new.read = new.committed = new.scanned = begin
        new.mark = new.committed_mark = mark_of(_before(shared, new, begin))
        new.unended = unended


def _skip_to_end(shared: Shared, window: Window) -> None:
    end = shared.disk.status(window.descriptor).size_bytes
    window.to_end = False
    window.resumed = True
    _move(window, _before(shared, window, end), end)
    window.committed, window.committed_mark = window.read, window.mark
    window.dirty = False


def _at_end(window: Window) -> None:
    """Everything there is was looked at. A deleted file that goes on in a compressed one is read on there."""
    window.dirty = False
    if window.raw is None and window.files:
        window.dirty = not window.files[0].finished


def _before(shared: Shared, window: Window, position: int) -> bytes:
    start = max(position - _LOOK_BACK_BYTES, 0)
    return shared.disk.read(window.descriptor, position - start, start)


def _last(before: bytes, body: bytes, end: int) -> bytes:
    """The last bytes before ``end`` in a body, as far as needed of what lies before it."""
    return (before + body[max(end - _LOOK_BACK_BYTES, 0) : end])[-_LOOK_BACK_BYTES:]


def _move(window: Window, before: bytes, position: int) -> None:
    window.mark = mark_of(before) if before else Mark()
    window.read = window.scanned = position
    window.seen_bytes = max(window.seen_bytes, position)


def _hand_out(window: Window, start: int, data: bytes) -> Chunk:
    end = start + len(data)
    window.hand_out(start, end)
    return Chunk(window, window.path, start, end, data)
