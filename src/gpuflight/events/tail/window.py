"""One window of lines, whatever files it lies in, and how far it was read and committed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from gpuflight.events.files import names
from gpuflight.events.tail.disk import Stamp
from gpuflight.events.tail.lines import Mark

if TYPE_CHECKING:
    from gpuflight.events.tail.packed import PackedReader
    from gpuflight.events.tail.stream import Stream


class File(msgspec.Struct):
    """A file that a window lies in. ``checked``: its content was seen to be this window's."""

    path: str
    number: int | None
    packed: bool
    stamp: Stamp
    checked: bool = False
    finished: bool = False
    sibling: bool = False
    """Plain and compressed file of one number, or one file renamed."""
    cut_since_s: float = -1.0

    @property
    def key(self) -> tuple[int, int, bool]:
        return (self.stamp.device, self.stamp.inode, self.packed)


class WindowState(msgspec.Struct, omit_defaults=True):
    """A window in the checkpoint. ``gone_s``: wall clock when it was first missed, 0 while it is there."""

    head: str
    ordinal: int = 0
    committed: int = 0
    mark_size: int = 0
    mark_crc32: int = 0
    path: str = ""
    packed: bool = False
    number: int | None = None
    device: int = 0
    inode: int = 0
    size_bytes: int = 0
    modified_ns: int = 0
    done: bool = False
    trailer: int = 0
    gone_s: float = 0.0


class Found(msgspec.Struct):
    """A log file as a look into its folder shows it."""

    window: names.Window
    stamp: Stamp


class StreamState(msgspec.Struct, omit_defaults=True):
    """A stream in the checkpoint. ``accounted``: windows up to this number were read, or are known to be missing."""

    folder: str
    base: str
    channel: str
    accounted: int = 0
    windows: list[WindowState] = msgspec.field(default_factory=list)


class _Handed:
    """A chunk that was handed out."""

    __slots__ = ("done", "end", "mark", "start")

    def __init__(self, start: int, end: int, mark: Mark) -> None:
        self.start = start
        self.end = end
        self.mark = mark
        self.done = False


class Window:
    """Content that is written once, from its first byte on. Its identity is its first line, not its file.

    ``read``: offset of the next byte to hand out. ``committed``: everything before it was committed. ``head`` is empty
    until the first line has ended; until then nothing was handed out. ``ordinal`` tells windows apart whose first lines
    are the same.
    """

    def __init__(self, stream: Stream, order: int) -> None:
        self.stream = stream
        self.order = order
        """Of being found: later ones are newer."""
        self.head = ""
        self.ordinal = 0
        self.files: list[File] = []
        self.last: File | None = None
        """The file it was last seen in, when it is in none."""
        self.number: int | None = None
        self.read = 0
        self.mark = Mark()
        self.unended = False
        """The last line handed out had no newline yet."""
        self.resumed = False
        """Where reading begins comes from a checkpoint; whether a line begins there is to be seen."""
        self.to_end = False
        """What is there already is not wanted."""
        self.scanned = 0
        """Up to here the line that begins at ``read`` has no newline."""
        self.seen_bytes = 0
        """Size of the content, as far as known."""
        self.descriptor = -1
        self.reader: PackedReader | None = None
        self.dirty = False
        self.done = False
        """Nothing will follow."""
        self.refused = False
        """No log that can be read."""
        self.not_window: Window | None = None
        """One that it is not, whatever its first line says."""
        self.trailer = 0
        """CRC-32 and size at the end of its compressed file, once that was read; 0 unknown."""
        self.gone_since_s = -1.0
        self.gone_wall_s = 0.0
        self.changed_s = 0.0
        self.due_s = 0.0
        self.failures = 0
        self.handed: deque[_Handed] = deque()
        self.committed = 0
        self.committed_mark = Mark()

    @property
    def source(self) -> str:
        stream = self.stream
        base = f"{stream.base}." if stream.base else ""
        again = f"~{self.ordinal}" if self.ordinal else ""
        return f"{stream.folder}/{base}{stream.channel}#{self.head}{again}"

    @property
    def raw(self) -> File | None:
        """The plain file to read; of several (a copy is being made) the one that was first."""
        return next((file for file in self.files if not file.packed), None)

    @property
    def path(self) -> str:
        file = self.raw or (self.files[0] if self.files else self.last)
        return file.path if file is not None else ""

    def hand_out(self, start: int, end: int) -> None:
        self.handed.append(_Handed(start, end, self.mark))
        self.stream.uncommitted_bytes += end - start

    def commit(self, start: int, end: int) -> bool:
        """Note a chunk as done; whether it was not yet. The position moves when all before it are done."""
        for handed in self.handed:
            if handed.start == start and handed.end == end and not handed.done:
                handed.done = True
                self.stream.uncommitted_bytes -= end - start
                break
        else:
            return False
        while self.handed and self.handed[0].done:
            first = self.handed.popleft()
            self.committed, self.committed_mark = first.end, first.mark
        return True

    def state(self) -> WindowState:
        file = self.raw or (self.files[0] if self.files else self.last)
        stamp = file.stamp if file is not None else Stamp(0, 0, 0, 0)
        whole = self.done and not self.handed
        return WindowState(
            self.head,
            self.ordinal,
            self.read if whole else self.committed,
            *(self.mark if whole else self.committed_mark),
            file.path if file is not None else "",
            file.packed if file is not None else False,
            self.number,
            *stamp,
            whole,
            self.trailer if whole else 0,
            self.gone_wall_s,
        )

    def restore(self, state: WindowState) -> None:
        self.head, self.ordinal, self.number = state.head, state.ordinal, state.number
        self.read = self.committed = self.scanned = state.committed
        self.mark = self.committed_mark = Mark(state.mark_size, state.mark_crc32)
        self.done, self.trailer, self.gone_wall_s = state.done, state.trailer, state.gone_s
        self.resumed = state.committed > 0
        stamp = Stamp(state.device, state.inode, state.size_bytes, state.modified_ns)
        self.last = File(state.path, state.number, state.packed, stamp, finished=state.done and state.packed)
