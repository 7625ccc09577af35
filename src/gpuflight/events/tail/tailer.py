"""Follows folders of GPU Flight logs, byte by byte, of every generation, finished or being written."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from gpuflight.events.files.sidecars import owner
from gpuflight.events.ledger import Ledger
from gpuflight.events.tail.checkpoint import Checkpoint
from gpuflight.events.tail.chunk import Chunk
from gpuflight.events.tail.cursors import Cursor, read_cursors
from gpuflight.events.tail.disk import Disk
from gpuflight.events.tail.notify import Notifier
from gpuflight.events.tail.progress import SessionProgress
from gpuflight.events.tail.settings import TailSettings
from gpuflight.events.tail.shared import Shared
from gpuflight.events.tail.stream import Stream, StreamState
from gpuflight.events.tail.tree import DEPTH, Folder, has_changed, list_folder, path_of
from gpuflight.events.tail.window import Window

log = logging.getLogger(__name__)

_FRESH_S = 2.0
"""What changed so shortly ago is looked at in every interval, notification or not."""

_PATIENCE = 8
"""Idle files are looked at when they have been idle for an eighth longer."""

_SAVE_SHARE = 20
"""Saving takes at most a twentieth of the time."""

_Key = tuple[str, str, str]


class Tailer:
    """``poll`` hands out new lines, ``commit`` says that some are dealt with, ``wait`` sleeps until there may be more.

    What was committed is not handed out again after a restart with the same ``checkpoint``; everything else is. So each
    line comes at least once, and into a store that keeps ``(chunk.source, chunk.start, chunk.end)`` exactly once, also
    where the checkpoint is lost. Any thread may call it. Without ``checkpoint`` nothing is remembered.

    ``cursors``: a cursor file of gpufl-agent, for sessions without a checkpoint of ours. ``ledger`` counts what was
    lost or odd. Raises InputError for a checkpoint that cannot be used.
    """

    def __init__(
        self,
        folders: str | Sequence[str],
        checkpoint: str | None = None,
        settings: TailSettings | None = None,
        *,
        cursors: str | None = None,
        ledger: Ledger | None = None,
        disk: Disk | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings or TailSettings()
        self.ledger = Ledger() if ledger is None else ledger
        self.folders = [path_of(folder) for folder in ([folders] if isinstance(folders, str) else folders)]
        self._shared = Shared(disk or Disk(), self.settings, self.ledger, monotonic_s, wall_s)
        self._disk, self._monotonic_s, self._wall_s = self._shared.disk, monotonic_s, wall_s
        self._guard = threading.RLock()
        self._tree: dict[str, Folder] = {}
        self._streams: dict[_Key, Stream] = {}
        self._by_path: dict[str, Window] = {}
        self._ready: deque[Stream] = deque()
        self._in_ready: set[Stream] = set()
        self._by_folder: dict[str, list[_Key]] = {}
        self._heap: list[tuple[float, int, Folder | Window | Stream, Window | None]] = []
        self._count = itertools.count()
        self._uncommitted_bytes = 0
        self._states: dict[_Key, StreamState] = {}
        self._to_end = False
        self._first = True
        self._changed = False
        self._saved_s = monotonic_s()
        self._save_pause_s = self.settings.save_interval_s
        self._cursors: dict[tuple[str, str], Cursor] = read_cursors(cursors) if cursors is not None else {}
        self._checkpoint = Checkpoint(checkpoint) if checkpoint is not None else None
        try:
            self._load()
            self._closed = False
            self._notifier = self._watch()
        except BaseException:
            if self._checkpoint is not None:
                self._checkpoint.close()
            raise

    def __enter__(self) -> Tailer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def notified(self) -> bool:
        """Whether the kernel tells of changes."""
        return self._notifier is not None and not self._notifier.reason

    @property
    def uncommitted_bytes(self) -> int:
        """Handed out and not committed yet."""
        return self._uncommitted_bytes

    # --- use -------------------------------------------------------------------------------------------------------

    def poll(self) -> list[Chunk]:
        """New lines, from each file in turn; empty if there are none, or too much is uncommitted. Never waits."""
        with self._guard:
            if self._closed:
                raise ValueError("tailer is closed")
            now_s = self._monotonic_s()
            if self._first:
                for folder in self.folders:
                    self._look_into(self._folder(folder, DEPTH), now_s)
                self._first = False
            self._take_news(now_s)
            self._take_due(now_s)
            chunks = self._gather()
            self._save_if_due(now_s)
            return chunks

    def commit(self, chunk: Chunk) -> None:
        """A chunk is dealt with: stored, or delivered. Any order; twice does nothing."""
        with self._guard:
            stream = chunk.origin.stream
            if chunk.origin.commit(chunk.start, chunk.end):
                self._uncommitted_bytes -= chunk.end - chunk.start
                self._changed = True
                if stream.waits:
                    stream.waits = False
                    self._note(stream)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something has changed, at most ``timeout_s``. Whether a look is worth while now."""
        if self._in_ready and self._uncommitted_bytes < self.settings.max_uncommitted_bytes:
            return True
        notifier = self._notifier
        if notifier is not None and not notifier.reason:
            return notifier.changed.wait(self._pause_s(timeout_s))
        time.sleep(self._pause_s(timeout_s))
        return True

    def save(self) -> None:
        """Make durable what is committed. Raises OSError."""
        with self._guard:
            if self._checkpoint is None:
                return
            began_s = self._monotonic_s()
            self._forget()
            live = [stream.state() for stream in self._streams.values() if stream.windows or stream.accounted]
            self._checkpoint.save([*live, *self._states.values()])
            self._shared.urgent = self._changed = False
            self._saved_s = self._monotonic_s()
            self._save_pause_s = max(self.settings.save_interval_s, _SAVE_SHARE * (self._saved_s - began_s))

    def sessions(self) -> list[SessionProgress]:
        """How far each session folder, or flat base name, was read."""
        with self._guard:
            found: dict[tuple[str, str], SessionProgress] = {}
            for (path, base, _), stream in self._streams.items():
                progress = found.get((path, base))
                if progress is None:
                    progress = found[path, base] = SessionProgress(path, stream.session_id, base)
                progress.take(stream, self._monotonic_s())
            for progress in found.values():
                if not progress.base and progress.quiet_s < float("inf"):
                    progress.writer = owner(progress.path)
            return list(found.values())

    def close(self, *, save: bool = True) -> None:
        """Give everything back; ``save``: the checkpoint is written. Raises OSError if it could not be."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            try:
                if save:
                    self.save()
            finally:
                if self._notifier is not None:
                    self._notifier.close()
                self._shared.close_all()
                if self._checkpoint is not None:
                    self._checkpoint.close()

    # --- what has changed --------------------------------------------------------------------------------------------

    def _take_news(self, now_s: float) -> None:
        notifier = self._notifier
        if notifier is None:
            return
        if notifier.reason:
            notifier.close()
            self._notifier = None
            self._look_at_all(now_s)
            return
        paths = notifier.take()
        if paths is None:
            self._look_at_all(now_s)
            return
        folders = set()
        for path, came_or_went in paths.items():
            window = self._by_path.get(path)
            if window is not None and not came_or_went:
                self._look_at(window, now_s)
            else:
                folders.add(path.rpartition("/")[0].removesuffix("/.tmp"))
                if path in self._tree:
                    folders.add(path)
        for path in sorted(folders):
            folder = self._tree.get(path)
            if folder is not None:
                self._look_into(folder, now_s)

    def _look_at_all(self, now_s: float) -> None:
        for folder in list(self._tree.values()):
            self._look_into(folder, now_s)

    def _take_due(self, now_s: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= now_s:
            due_s, _, what, window = heapq.heappop(heap)
            if isinstance(what, Stream):
                what.wake(window)
                self._note(what)
            elif what.due_s != due_s:
                continue  # it was put off, or taken care of
            elif isinstance(what, Window):
                self._look_at(what, now_s)
            else:
                self._look_if_changed(what, now_s)

    def _look_at(self, window: Window, now_s: float) -> None:
        """At a plain file: whether it has grown."""
        raw = window.raw
        if raw is None:
            return
        try:
            stamp = self._disk.look(raw.path)
        except OSError:
            self._look_into_path(window.stream.folder, now_s)
            return
        if window.stream.trusted and stamp[:2] != raw.stamp[:2]:
            self._look_into_path(window.stream.folder, now_s)
            return
        if stamp != raw.stamp:
            window.stream.changed(window, stamp)
            self._note(window.stream)
        self._put_off(window, now_s, window.changed_s, window.stream.trusted)

    def _look_if_changed(self, folder: Folder, now_s: float) -> None:
        try:
            changed = has_changed(self._disk, folder)
        except OSError:
            changed = True
        if changed:
            self._look_into(folder, now_s)
        else:
            self._put_off(folder, now_s, folder.changed_s, folder.trusted)

    def _put_off(self, what: Folder | Window, now_s: float, changed_s: float, trusted: bool) -> None:
        """The next look: the longer nothing happened, the later."""
        settings = self.settings
        idle_s = now_s - changed_s
        if idle_s < _FRESH_S:
            pause_s = settings.poll_interval_s
        elif trusted and self.notified:
            pause_s = settings.sweep_s
        else:
            pause_s = min(settings.idle_poll_s, max(settings.poll_interval_s, idle_s / _PATIENCE))
        what.due_s = now_s + pause_s
        heapq.heappush(self._heap, (what.due_s, next(self._count), what, None))

    # --- folders -----------------------------------------------------------------------------------------------------

    def _folder(self, path: str, depth: int) -> Folder:
        folder = self._tree.get(path)
        if folder is None:
            network = self.settings.network
            trusted = not (self._disk.is_network(path) if network is None and depth == DEPTH else network)
            if depth < DEPTH and network is None:  # as the folder above it
                above = self._tree.get(path.rpartition("/")[0])
                trusted = above.trusted if above is not None else True
            folder = self._tree[path] = Folder(path, depth, trusted)
        return folder

    def _look_into_path(self, path: str, now_s: float) -> None:
        folder = self._tree.get(path)
        if folder is not None:
            self._look_into(folder, now_s)

    def _look_into(self, folder: Folder, now_s: float) -> None:
        stamps = folder.stamps
        try:
            listing = list_folder(self._disk, folder, int(self._wall_s() * 1e9))
        except FileNotFoundError:
            self._is_gone(folder, now_s)
            return
        except OSError as error:
            self._shared.warn(folder.path, "unreadable_folder", error.strerror or "")
            folder.settled = False
            self._put_off(folder, now_s, folder.changed_s, trusted=False)
            return
        if folder.stamps != stamps:
            folder.changed_s = now_s if stamps != (-1, -1) else self._since(max(folder.stamps), now_s)
        for (base, channel), found in listing.files.items():
            if channel in self.settings.channels:
                self._stream(folder, base, channel).update(found, listing.descending[base])
        for (_, base, channel), stream in self._streams_of(folder):
            if (base, channel) not in listing.files:
                stream.update([], stream.descending)
            self._know_paths(stream, now_s)
            self._note(stream)
        # One that was gone for a moment is new, although it never was missing in a look at this folder.
        new, gone = {path for path in listing.below if path not in self._tree}, folder.below - listing.below
        folder.below = listing.below
        self._put_off(folder, now_s, folder.changed_s, folder.trusted)
        for path in sorted(gone):
            if path in self._tree:
                self._is_gone(self._tree[path], now_s)
        for path in sorted(new):
            self._look_into(self._folder(path, folder.depth - 1), now_s)

    def _is_gone(self, folder: Folder, now_s: float) -> None:
        for path in folder.below:
            if path in self._tree:
                self._is_gone(self._tree[path], now_s)
        for _, stream in self._streams_of(folder):
            stream.update([], stream.descending)
            self._know_paths(stream, now_s)
            self._note(stream)
        folder.below = set()
        if folder.depth == DEPTH:  # one that was asked for: it may come back
            folder.stamps, folder.settled = (-1, -1), False
            self._put_off(folder, now_s, folder.changed_s, trusted=False)
        else:
            self._tree.pop(folder.path, None)
            folder.due_s = -1.0

    def _streams_of(self, folder: Folder) -> list[tuple[_Key, Stream]]:
        keys = self._by_folder.get(folder.path, ())
        return [(key, self._streams[key]) for key in keys]

    def _stream(self, folder: Folder, base: str, channel: str) -> Stream:
        key = (folder.path, base, channel)
        stream = self._streams.get(key)
        if stream is None:
            state = self._states.pop(key, None)
            stream = Stream(self._shared, *key, trusted=folder.trusted, state=state)
            self._streams[key] = stream
            self._by_folder.setdefault(folder.path, []).append(key)
            if state is None:
                stream.to_end = self._first and self._to_end
                stream.cursor = self._cursors.pop((stream.session_id, channel), None) if not base else None
        return stream

    def _know_paths(self, stream: Stream, now_s: float) -> None:
        """Plain files of a stream are found by their path, and looked at when their time comes."""
        for window in stream.windows:
            raw = window.raw
            if raw is not None and self._by_path.get(raw.path) is not window:
                self._by_path[raw.path] = window
                if window.changed_s == 0.0 or self._first:
                    window.changed_s = self._since(raw.stamp.modified_ns, now_s)
                self._put_off(window, now_s, window.changed_s, stream.trusted)

    def _since(self, modified_ns: int, now_s: float) -> float:
        """When, by our clock, a file changed."""
        return now_s - max(self._wall_s() - modified_ns / 1e9, 0.0)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _note(self, stream: Stream) -> None:
        """Queue a stream that can be read, and take over what it wants to be woken for."""
        for due_s, window in stream.wakes:
            heapq.heappush(self._heap, (due_s, next(self._count), stream, window))
        stream.wakes.clear()
        if stream not in self._in_ready and stream.readable:
            self._ready.append(stream)
            self._in_ready.add(stream)

    def _gather(self) -> list[Chunk]:
        settings = self.settings
        chunks: list[Chunk] = []
        left = settings.poll_bytes
        idle = 0
        while self._ready and left > 0 and idle <= len(self._ready):
            if self._uncommitted_bytes >= settings.max_uncommitted_bytes:
                break
            stream = self._ready.popleft()
            self._in_ready.discard(stream)
            if stream.uncommitted_bytes >= settings.max_uncommitted_bytes_per_channel:
                stream.waits = True
                continue
            self._shared.spent_bytes = 0
            chunk = stream.read(settings.chunk_bytes)
            left -= self._shared.spent_bytes
            if chunk is not None:
                chunks.append(chunk)
                size = chunk.end - chunk.start
                left -= size
                self._uncommitted_bytes += size
                idle = 0
            if stream.stale:
                stream.stale = False
                self._look_into_path(stream.folder, self._monotonic_s())
            self._know_paths_after(stream)
            self._note(stream)
            if chunk is None and not self._shared.spent_bytes and stream in self._in_ready:
                idle += 1  # it waits for others
        if self._shared.urgent:
            self._try_to_save()
        return chunks

    def _know_paths_after(self, stream: Stream) -> None:
        """Files may have turned out to belong to other windows."""
        if stream.regrouped:
            stream.regrouped = False
            self._know_paths(stream, self._monotonic_s())

    # --- the checkpoint ----------------------------------------------------------------------------------------------

    def _load(self) -> None:
        if self._checkpoint is None:
            self._to_end = self.settings.begin == "end"
            return
        loaded = self._checkpoint.load()
        self._states = {(state.folder, state.base, state.channel): state for state in loaded.streams}
        self._cursors = {**loaded.cursors, **self._cursors}
        if loaded.how == "none":
            self._to_end = self.settings.begin == "end"
        elif loaded.how == "damaged":
            self._to_end = self.settings.after_damage == "end"
            self.ledger.add("bad_checkpoint", subject=loaded.aside.rpartition("/")[2])
            log.warning(
                "%s: damaged, kept as %s; files that are there are read from their %s",
                self._checkpoint.path,
                loaded.aside,
                self.settings.after_damage,
            )

    def _save_if_due(self, now_s: float) -> None:
        if self._changed and now_s - self._saved_s >= self._save_pause_s:
            self._try_to_save()

    def _try_to_save(self) -> None:
        try:
            self.save()
        except OSError as error:
            self._saved_s = self._monotonic_s()
            path = self._checkpoint.path if self._checkpoint is not None else ""
            self._shared.warn(path, "checkpoint_not_written", error.strerror or "")

    def _forget(self) -> None:
        """Files that are gone, after a while, or the longest gone where there are too many."""
        wall_s = self._wall_s()
        before_s = wall_s - self.settings.forget_after_s
        gone: list[float] = []
        for key, state in list(self._states.items()):
            for window in state.windows:
                window.gone_s = window.gone_s or wall_s
            state.windows = [window for window in state.windows if window.gone_s > before_s]
            if not state.windows:
                del self._states[key]
            gone += [window.gone_s for window in state.windows]
        for stream in self._streams.values():
            gone += [window.gone_wall_s for window in stream.windows if window.gone_wall_s]
        if len(gone) > self.settings.max_gone:
            gone.sort()
            before_s = max(before_s, gone[len(gone) - self.settings.max_gone - 1])
        for key, stream in list(self._streams.items()):
            if stream.forget(before_s) and not stream.windows and key[0] not in self._tree:
                del self._streams[key]
                self._by_folder[key[0]].remove(key)
                self._by_path = {p: w for p, w in self._by_path.items() if w.stream is not stream}
        for key, state in list(self._states.items()):
            state.windows = [window for window in state.windows if window.gone_s > before_s]
            if not state.windows:
                del self._states[key]

    # --- notification ------------------------------------------------------------------------------------------------

    def _watch(self) -> Notifier | None:
        settings = self.settings
        if not settings.notify:
            return None
        network = settings.network
        local = [f for f in self.folders if not (self._disk.is_network(f) if network is None else network)]
        if not local:
            return None
        notifier = Notifier(local)
        if notifier.reason:
            log.info("files are looked at, the kernel does not tell of changes: %s", notifier.reason)
            return None
        return notifier

    def _pause_s(self, timeout_s: float) -> float:
        """Until the next thing that is due."""
        if not self._heap:
            return timeout_s
        return min(timeout_s, max(self._heap[0][0] - self._monotonic_s(), self.settings.poll_interval_s))
