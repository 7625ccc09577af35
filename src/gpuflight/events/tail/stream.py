"""One channel of one session (or of one flat base name): its windows, in the order of writing."""

from __future__ import annotations

import errno
from collections.abc import Callable

import msgspec

from gpuflight.events.tail.chunk import Chunk
from gpuflight.events.tail.cursors import Cursor
from gpuflight.events.tail.disk import Stamp
from gpuflight.events.tail.holes import Holes
from gpuflight.events.tail.packed import read_packed
from gpuflight.events.tail.raw import read_raw
from gpuflight.events.tail.shared import Shared
from gpuflight.events.tail.window import File, Found, StreamState, Window

_GONE = (errno.ENOENT, errno.ENOTDIR)
_BACK_OFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_STEPS = 1000


class Stream:
    """``waits``: too much of it is not committed. ``stale``: its folder has to be looked at again."""

    def __init__(
        self, shared: Shared, folder: str, base: str, channel: str, *, trusted: bool, state: StreamState | None = None
    ) -> None:
        self.shared = shared
        self.folder = folder
        self.base = base
        self.channel = channel
        self.session_id = "" if base else folder.rsplit("/", 1)[-1]
        self.trusted = trusted
        """Whether device and inode numbers tell files apart here."""
        self.descending = False
        self.windows: list[Window] = []
        self.heads: dict[str, list[Window]] = {}
        self.todo: list[Window] = []
        self.wakes: list[tuple[float, Window | None]] = []
        """When what has to be looked at again: a window, or (None) all of it."""
        self._asked_s = float("inf")
        self.waits = False
        self.waits_for_room = False
        self.stale = False
        self.regrouped = False
        """Files were found to belong to other windows than thought."""
        self.to_end = False
        self.cursor: Cursor | None = None
        self.holes = Holes(shared, folder, base, channel)
        self.uncommitted_bytes = 0
        self._made = 0
        if state is not None:
            self.holes.accounted = state.accounted
            for kept in state.windows:
                window = self._new()
                window.restore(kept)
                if kept.head:
                    self.heads.setdefault(kept.head, []).append(window)

    def state(self) -> StreamState:
        kept = [window.state() for window in self.windows if window.head]
        return StreamState(self.folder, self.base, self.channel, self.holes.accounted, kept)

    # --- what lies there -------------------------------------------------------------------------------------------

    def update(self, found: list[Found], descending: bool) -> None:
        """Take in which files there are. ``found``: all of this stream."""
        now_s = self.shared.monotonic_s()
        self.stale = False
        self.descending = descending
        by_path: dict[str, tuple[Window, File]] = {}
        by_key: dict[tuple[int, int, bool], tuple[Window, File]] = {}
        for window in self.windows:  # those that are there last: they count more
            if not window.files and window.last is not None:
                by_path[window.last.path] = by_key[window.last.key] = (window, window.last)
        for window in self.windows:
            for file in window.files:
                by_path[file.path] = by_key[file.key] = (window, file)
        before = {window: window.files for window in self.windows}
        for window in self.windows:
            window.files = []
        for seen in found:
            if not seen.window.part:
                self._attach(seen, by_path, by_key, now_s)
        for window in list(self.windows):
            self._after_look(window, before.get(window, []), now_s)
        if self.cursor is not None:
            self._use_cursor(self.cursor)
            self.cursor = None
        self.to_end = False
        self._look_for_holes(now_s)
        self._sort()

    def _attach(
        self,
        seen: Found,
        by_path: dict[str, tuple[Window, File]],
        by_key: dict[tuple[int, int, bool], tuple[Window, File]],
        now_s: float,
    ) -> None:
        """Give a file to the window it belongs to, or to a new one. What is in it is looked at when it is read."""
        path, packed = seen.window.path, seen.window.compressed
        stamp = seen.stamp
        known = by_path.get(path)
        if known is not None and (known[1].packed != packed or (self.trusted and known[1].stamp[:2] != stamp[:2])):
            known = None
        if known is None and self.trusted:
            known = by_key.get((*stamp[:2], packed))
        if known is None:
            window = self._new()
            window.to_end = self.to_end
            file = File(path, seen.window.number, packed, stamp)
            window.files.append(file)
            window.changed_s = now_s
            window.dirty = packed or stamp.size_bytes > 0
            if self.holes.fills(seen.window.number):
                window.number = seen.window.number
                self.shared.tell("late_window", window)
            return
        window, file = known
        unchanged = file.stamp == stamp if self.trusted else file.stamp[2:] == stamp[2:] and file.path == path
        if any(file is mine for mine in window.files):  # a second name of the same file (it is being moved)
            file = msgspec.structs.replace(file)
        if packed:
            file.sibling = (unchanged and file.checked) or file.finished
        if not unchanged:
            file.finished = False
            file.cut_since_s = -1.0
            file.checked = file.checked and self.trusted and not packed
            window.refused = window.refused and stamp.size_bytes >= file.stamp.size_bytes
            window.changed_s = now_s
            window.dirty = True
            window.done = window.done and not packed
        file.path, file.number, file.stamp = path, seen.window.number, stamp
        window.files.append(file)

    def _after_look(self, window: Window, before: list[File], now_s: float) -> None:
        if window.files:
            window.last = None
            window.gone_since_s, window.gone_wall_s = -1.0, 0.0
            self._renumber(window)
            window.dirty = not window.refused and (window.dirty or self._unread(window))
        elif window.gone_since_s < 0:
            window.last = before[0] if before else window.last
            window.gone_since_s = now_s
            window.gone_wall_s = window.gone_wall_s or self.shared.wall_s()
            window.dirty = window.descriptor >= 0
            self.shared.stop_inflating(window)
            self._ask(now_s + self.shared.settings.gone_wait_s)

    def _unread(self, window: Window) -> bool:
        """Whether its files promise more than was read."""
        raw = window.raw
        if raw is not None:
            return raw.stamp.size_bytes != max(window.read, window.seen_bytes)
        return not window.files[0].finished

    def _renumber(self, window: Window) -> None:
        window.number = next((file.number for file in window.files if file.number is not None), None)

    def _sort(self) -> None:
        direction = -1 if self.descending else 1
        never = float("inf")
        self.todo = [window for window in self.windows if window.dirty]
        self.todo.sort(key=lambda w: (never if w.number is None else direction * w.number, w.order))

    def _new(self) -> Window:
        self._made += 1
        window = Window(self, self._made)
        self.windows.append(window)
        return window

    # --- which window is which ---------------------------------------------------------------------------------------

    def identify(self, window: Window, file: File | None, head: str, same: Callable[[Window], bool]) -> bool:
        """A window's first line is known now. False: it is one that is known already, and has given its file to it."""
        rivals = self.heads.setdefault(head, [])
        for other in rivals:
            if other is not window and other is not window.not_window and file is not None and same(other):
                self._merge(window, file, other)
                return False
        if rivals and window.not_window is None:
            self.shared.tell("ambiguous_file", window, text=f"first line as in {rivals[0].path}")
        window.head = head
        window.ordinal = 1 + max((other.ordinal for other in rivals), default=-1)
        rivals.append(window)
        if file is not None:
            file.checked = True
        if window.not_window is not None or window.read:
            self.shared.urgent = True
        return True

    def _merge(self, window: Window, file: File, other: Window) -> None:
        file.checked = True
        file.sibling = other.number is None or file.number is None or other.number == file.number
        if other.last is not None and other.last.path == file.path:
            file.sibling = True
        self._remove(window)
        other.files.append(file)
        other.last = None
        other.gone_since_s, other.gone_wall_s = -1.0, 0.0
        other.changed_s = self.shared.monotonic_s()
        self._renumber(other)
        other.done = other.done and file.packed
        other.dirty = other.dirty or self._unread(other)
        self.regrouped = True
        self._sort()

    def split(self, window: Window, file: File, *, known_as_another: bool = False) -> Window:
        """A file turned out to hold something else than the window: it becomes a window of its own.

        ``known_as_another``: although it begins like it.
        """
        self.shared.stop_inflating(window)
        window.files.remove(file)
        new = self._new()
        new.files.append(file)
        file.checked = file.sibling = file.finished = False
        new.number = file.number
        new.changed_s = window.changed_s
        new.not_window = window if known_as_another else None
        new.dirty = True
        self.shared.hand_over(window, new)
        window.dirty = bool(window.files) and self._unread(window)
        if not window.files:
            now_s = self.shared.monotonic_s()
            window.last = msgspec.structs.replace(file, stamp=Stamp(0, 0, 0, 0))
            window.gone_since_s, window.gone_wall_s = now_s, self.shared.wall_s()
            self._ask(now_s + self.shared.settings.gone_wait_s)
        self.regrouped = True
        self._sort()
        return new

    def _remove(self, window: Window) -> None:
        self.shared.close(window)
        window.dirty = False
        window.files = []
        self.windows.remove(window)
        if window.head:
            self.heads[window.head].remove(window)
            if not self.heads[window.head]:
                del self.heads[window.head]

    def _look_for_holes(self, now_s: float) -> None:
        if self.descending:
            return
        again_s = self.holes.look({window.number for window in self.windows if window.number is not None}, now_s)
        if again_s is not None:
            self._ask(again_s)

    def _use_cursor(self, cursor: Cursor) -> None:
        """What gpufl-agent has sent is read here as well."""
        if self.descending:
            self.shared.warn(self.folder, "cursor_not_used", "its window numbers count backwards here")
            return
        for window in self.windows:
            if window.number is None or window.head or not window.files:
                continue
            if window.number < cursor.file_index:
                window.to_end = True
            elif window.number == cursor.file_index and cursor.offset:
                if cursor.fits(self.shared.disk, window.files[0].path, window.files[0].packed):
                    window.read = window.scanned = window.committed = cursor.offset
                    window.resumed = True
                else:
                    self.shared.warn(window.path, "cursor_not_used", "the file is another one")
        self.holes.accounted = max(self.holes.accounted, cursor.file_index - 1)

    # --- reading ---------------------------------------------------------------------------------------------------

    def read(self, limit: int) -> Chunk | None:
        """The next lines, of the oldest window that has some. None: nothing now."""
        for _ in range(_STEPS):
            window = self._next()
            if window is None or self.shared.spent_bytes >= limit:
                return None
            try:
                chunk = self._step(window, limit)
            except OSError as error:
                self._failed(window, error)
                continue
            if not window.dirty and window in self.todo:
                self.todo.remove(window)
            if chunk is not None:
                window.failures = 0
                return chunk
            if self.waits_for_room:
                return None
        return None

    def _next(self) -> Window | None:
        if not self.todo:
            return None
        window = self.todo[0]
        if not self.descending and self.holes.holds_up(window.number):
            return None
        return window

    @property
    def readable(self) -> bool:
        return self._next() is not None

    def _step(self, window: Window, limit: int) -> Chunk | None:
        if window.descriptor >= 0 or window.raw is not None:
            was = window.descriptor
            chunk = read_raw(self.shared, window, limit)
            if window.raw is None and window.files and not window.dirty:
                window.dirty = not window.files[0].finished
            if window.descriptor >= 0 and window.raw is None and window.files and was >= 0 and chunk is None:
                self.shared.close(window)  # read to its end; what is left goes on in the compressed file
            elif not self.trusted:
                self.shared.close(window)
            return chunk
        file = next((file for file in window.files if not file.finished), None)
        if file is None:
            window.dirty = False
            return None
        return read_packed(self.shared, window, file, limit)

    def _failed(self, window: Window, error: OSError) -> None:
        """A file that cannot be read now is tried again, at growing intervals."""
        self.shared.close(window)
        window.dirty = False
        if window in self.todo:
            self.todo.remove(window)
        if error.errno in _GONE:
            self.stale = True
            return
        if error.errno != errno.ESTALE:  # a stale handle only asks for another look
            reason = "unreadable_file"
            if window.failures == 0:
                self.shared.tell(reason, window, text=error.strerror or str(error))
        pause_s = _BACK_OFF_S[min(window.failures, len(_BACK_OFF_S) - 1)]
        window.failures += 1
        self.look_again(window, self.shared.monotonic_s() + pause_s)

    def _ask(self, at_s: float) -> None:
        """To be woken, once for all that wait."""
        if at_s < self._asked_s:
            self._asked_s = at_s
            self.wakes.append((at_s, None))

    def look_again(self, window: Window, at_s: float) -> None:
        self.wakes.append((at_s, window))

    def wake(self, window: Window | None) -> None:
        """A time has come that ``wakes`` named."""
        now_s = self.shared.monotonic_s()
        if window is not None:
            window.dirty = window in self.windows and bool(window.files) and not window.refused
        else:
            self._asked_s = float("inf")
            self._look_for_holes(now_s)
            self._close_gone(now_s)
        self._sort()

    def changed(self, window: Window, stamp: Stamp) -> None:
        """A plain file was looked at and is not as it was."""
        raw = window.raw
        if raw is None:
            return
        if stamp.size_bytes < raw.stamp.size_bytes:
            window.refused = False  # something else may be in it now
        raw.stamp = stamp
        window.changed_s = self.shared.monotonic_s()
        if not window.refused and not window.dirty:
            window.dirty = True
            self._sort()

    # --- what is gone ------------------------------------------------------------------------------------------------

    def _close_gone(self, now_s: float) -> None:
        """Files that were deleted are given back when their end was read a while ago."""
        wait_s = self.shared.settings.gone_wait_s
        unknown = any(window.files and not window.head and not window.refused for window in self.todo)
        for window in list(self.windows):
            if window.files or window.gone_since_s < 0 or window.dirty or (window.done and window.descriptor < 0):
                continue
            held = window.descriptor >= 0
            if unknown or now_s - window.gone_since_s < wait_s:  # its content may be in a file not looked into yet
                self._ask(max(now_s, window.gone_since_s) + wait_s)
                continue
            if held and self.shared.disk.status(window.descriptor).size_bytes > window.seen_bytes:
                window.dirty = True
                self._ask(now_s + wait_s)
                continue
            self._let_go(window, held)

    def _let_go(self, window: Window, held: bool) -> None:
        self.shared.close(window)
        last = window.last
        size = last.stamp.size_bytes if last is not None else 0
        packed = last is not None and last.packed
        rest = max(window.seen_bytes, 0 if packed else size) - window.read
        if packed and last is not None and not last.finished:
            self.shared.tell("vanished_file", window, size_bytes=size)
        elif rest > (2 if window.unended else 0):  # else it is the newline of the last line
            self.shared.tell("cut_line" if held else "vanished_file", window, size_bytes=rest, offset=window.read)
        window.done = True
        if not window.head:
            self._remove(window)

    def forget(self, before_wall_s: float) -> int:
        """Drop windows that are gone since before a time and have nothing uncommitted; how many."""
        old = [
            window
            for window in self.windows
            if not window.files and 0 < window.gone_wall_s <= before_wall_s and not window.handed and not window.dirty
        ]
        for window in old:
            self._remove(window)
        return len(old)

    @property
    def caught_up(self) -> bool:
        """Everything that lies there was handed out and committed."""
        return not self.todo and self.holes.first is None and not any(window.handed for window in self.windows)
