"""Which files may have something new: told by the kernel, or looked at, the less often the longer they are idle."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Callable, Sequence

from gpuflight.events.tail.notify import Notifier
from gpuflight.events.tail.shared import Shared
from gpuflight.events.tail.stream import Stream
from gpuflight.events.tail.tree import DEPTH, Folder, has_changed, list_folder
from gpuflight.events.tail.window import Window

log = logging.getLogger(__name__)

_FRESH_S = 2.0
"""What changed so shortly ago is looked at in every interval, notification or not."""

_PATIENCE = 8
"""Idle files are looked at when they have been idle for an eighth longer."""

Key = tuple[str, str, str]


class Watching:
    """Folders, the streams in them, and when each is to be looked at next.

    ``make(key, trusted)`` makes the stream of a (folder, base, channel) that is seen for the first time,
    ``note(stream)`` is called for each that may have something to read now.
    """

    def __init__(
        self,
        shared: Shared,
        folders: Sequence[str],
        make: Callable[[Key, bool], Stream],
        note: Callable[[Stream], None],
    ) -> None:
        self.streams: dict[Key, Stream] = {}
        self.tree: dict[str, Folder] = {}
        self.first = True
        """Nothing was looked at yet."""
        self._shared = shared
        self._settings = shared.settings
        self._disk = shared.disk
        self._folders = folders
        self._make = make
        self._note = note
        self._by_folder: dict[str, list[Key]] = {}
        self._by_path: dict[str, Window] = {}
        self._most_paths = 1000
        self._heap: list[tuple[float, int, Folder | Window | Stream, Window | None]] = []
        self._count = itertools.count()
        self.notifier = self._start_notifier()

    @property
    def notified(self) -> bool:
        """Whether the kernel tells of changes."""
        return self.notifier is not None and not self.notifier.reason

    def look(self, now_s: float) -> None:
        """At what has changed, or is due."""
        if self.first:
            for folder in self._folders:
                self._look_into(self._folder(folder, DEPTH), now_s)
            self.first = False
        self._take_news(now_s)
        self._take_due(now_s)
        if len(self._by_path) > self._most_paths:  # names that files had once
            self._by_path = {p: w for p, w in self._by_path.items() if w.raw is not None and w.raw.path == p}
            self._most_paths = 2 * len(self._by_path) + 1000

    def wake_later(self, stream: Stream) -> None:
        """Take over what a stream wants to be woken for."""
        for due_s, window in stream.wakes:
            heapq.heappush(self._heap, (due_s, next(self._count), stream, window))
        stream.wakes.clear()

    def after_reading(self, stream: Stream, now_s: float) -> None:
        """Its folder may have to be looked at again; its files may belong to other windows than thought."""
        if stream.stale:
            stream.stale = False
            self._look_into_path(stream.folder, now_s)
        if stream.regrouped:
            stream.regrouped = False
            self._know_paths(stream, now_s)

    def pause_s(self, timeout_s: float) -> float:
        """Until the next thing that is due."""
        if not self._heap:
            return timeout_s
        left_s = self._heap[0][0] - self._shared.monotonic_s()
        return min(timeout_s, max(left_s, self._settings.poll_interval_s))

    def remove(self, key: Key) -> None:
        """Forget a stream."""
        stream = self.streams.pop(key)
        self._by_folder[key[0]].remove(key)
        self._by_path = {path: window for path, window in self._by_path.items() if window.stream is not stream}

    def close(self) -> None:
        """Ends the notification."""
        if self.notifier is not None:
            self.notifier.close()

    # --- what has changed --------------------------------------------------------------------------------------------

    def _take_news(self, now_s: float) -> None:
        notifier = self.notifier
        if notifier is None:
            return
        if notifier.reason:
            notifier.close()
            self.notifier = None
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
                if path in self.tree:
                    folders.add(path)
        for path in sorted(folders):
            folder = self.tree.get(path)
            if folder is not None:
                self._look_into(folder, now_s)

    def _look_at_all(self, now_s: float) -> None:
        for folder in list(self.tree.values()):
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
        settings = self._settings
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
        folder = self.tree.get(path)
        if folder is None:
            network = self._settings.network
            trusted = not (self._disk.is_network(path) if network is None and depth == DEPTH else network)
            if depth < DEPTH and network is None:  # as the folder above it
                above = self.tree.get(path.rpartition("/")[0])
                trusted = above.trusted if above is not None else True
            folder = self.tree[path] = Folder(path, depth, trusted)
        return folder

    def _look_into_path(self, path: str, now_s: float) -> None:
        folder = self.tree.get(path)
        if folder is not None:
            self._look_into(folder, now_s)

    def _look_into(self, folder: Folder, now_s: float) -> None:
        stamps = folder.stamps
        try:
            listing = list_folder(self._disk, folder, int(self._shared.wall_s() * 1e9))
        except (FileNotFoundError, NotADirectoryError):
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
            if channel in self._settings.channels:
                self._stream(folder, base, channel).update(found, listing.descending[base])
        for (_, base, channel), stream in self._streams_of(folder):
            if (base, channel) not in listing.files:
                stream.update([], stream.descending)
            self._know_paths(stream, now_s)
            self._note(stream)
        # One that was gone for a moment is new, although it never was missing in a look at this folder.
        new, gone = {path for path in listing.below if path not in self.tree}, folder.below - listing.below
        folder.below = listing.below
        self._put_off(folder, now_s, folder.changed_s, folder.trusted)
        for path in sorted(gone):
            if path in self.tree:
                self._is_gone(self.tree[path], now_s)
        for path in sorted(new):
            self._look_into(self._folder(path, folder.depth - 1), now_s)

    def _is_gone(self, folder: Folder, now_s: float) -> None:
        for path in folder.below:
            if path in self.tree:
                self._is_gone(self.tree[path], now_s)
        for _, stream in self._streams_of(folder):
            stream.update([], stream.descending)
            self._know_paths(stream, now_s)
            self._note(stream)
        folder.below = set()
        if folder.depth == DEPTH:  # one that was asked for: it may come back
            folder.stamps, folder.settled = (-1, -1), False
            self._put_off(folder, now_s, folder.changed_s, trusted=False)
        else:
            self.tree.pop(folder.path, None)
            folder.due_s = -1.0

    def _streams_of(self, folder: Folder) -> list[tuple[Key, Stream]]:
        keys = self._by_folder.get(folder.path, ())
        return [(key, self.streams[key]) for key in keys]

    def _stream(self, folder: Folder, base: str, channel: str) -> Stream:
        key = (folder.path, base, channel)
        stream = self.streams.get(key)
        if stream is None:
            stream = self.streams[key] = self._make(key, folder.trusted)
            self._by_folder.setdefault(folder.path, []).append(key)
        return stream

    def _know_paths(self, stream: Stream, now_s: float) -> None:
        """Plain files of a stream are found by their path, and looked at when their time comes."""
        for window in stream.windows:
            raw = window.raw
            if raw is not None and self._by_path.get(raw.path) is not window:
                self._by_path[raw.path] = window
                if window.changed_s == 0.0 or self.first:
                    window.changed_s = self._since(raw.stamp.modified_ns, now_s)
                self._put_off(window, now_s, window.changed_s, stream.trusted)

    def _since(self, modified_ns: int, now_s: float) -> float:
        """When, by our clock, a file changed."""
        return now_s - max(self._shared.wall_s() - modified_ns / 1e9, 0.0)

    def _start_notifier(self) -> Notifier | None:
        network = self._settings.network
        local = [f for f in self._folders if not (self._disk.is_network(f) if network is None else network)]
        if not self._settings.notify or not local:
            return None
        notifier = Notifier(local)
        if notifier.reason:
            log.info("files are looked at, the kernel does not tell of changes: %s", notifier.reason)
            return None
        return notifier
