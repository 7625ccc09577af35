"""Follows folders of GPU Flight logs, byte by byte, of every generation, finished or being written."""

from __future__ import annotations

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
from gpuflight.events.tail.progress import SessionProgress
from gpuflight.events.tail.settings import TailSettings
from gpuflight.events.tail.shared import Shared
from gpuflight.events.tail.stream import Stream
from gpuflight.events.tail.tree import path_of
from gpuflight.events.tail.watching import Key, Watching
from gpuflight.events.tail.window import StreamState

log = logging.getLogger(__name__)

_SAVE_SHARE = 20
"""Saving takes at most a twentieth of the time."""


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
        self._monotonic_s, self._wall_s = monotonic_s, wall_s
        self._guard = threading.RLock()
        self._ready: deque[Stream] = deque()
        self._in_ready: set[Stream] = set()
        self._uncommitted_bytes = 0
        self._states: dict[Key, StreamState] = {}
        self._to_end = False
        self._changed = False
        self._saved_s = monotonic_s()
        self._save_pause_s = self.settings.save_interval_s
        self._cursors: dict[tuple[str, str], Cursor] = read_cursors(cursors) if cursors is not None else {}
        self._checkpoint = Checkpoint(checkpoint) if checkpoint is not None else None
        try:
            self._load()
            self._closed = False
            self._watching = Watching(self._shared, self.folders, self._make, self._note)
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
        return self._watching.notified

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
            self._watching.look(now_s)
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
        notifier, pause_s = self._watching.notifier, self._watching.pause_s(timeout_s)
        if notifier is not None and not notifier.reason:
            return notifier.changed.wait(pause_s)
        time.sleep(pause_s)
        return True

    def save(self) -> None:
        """Make durable what is committed. Raises OSError."""
        with self._guard:
            if self._checkpoint is None:
                return
            began_s = self._monotonic_s()
            self._forget()
            live = [
                stream.state() for stream in self._watching.streams.values() if stream.windows or stream.holes.accounted
            ]
            self._checkpoint.save([*live, *self._states.values()])
            self._shared.urgent = self._changed = False
            self._saved_s = self._monotonic_s()
            self._save_pause_s = max(self.settings.save_interval_s, _SAVE_SHARE * (self._saved_s - began_s))

    def sessions(self) -> list[SessionProgress]:
        """How far each session folder, or flat base name, was read."""
        with self._guard:
            found: dict[tuple[str, str], SessionProgress] = {}
            for (path, base, _), stream in self._watching.streams.items():
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
                self._watching.close()
                self._shared.close_all()
                if self._checkpoint is not None:
                    self._checkpoint.close()

    # --- reading -----------------------------------------------------------------------------------------------------

    def _note(self, stream: Stream) -> None:
        """Queue a stream that can be read, and take over what it wants to be woken for."""
        self._watching.wake_later(stream)
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
            self._watching.after_reading(stream, self._monotonic_s())
            self._note(stream)
            if chunk is None and not self._shared.spent_bytes and stream in self._in_ready:
                idle += 1  # it waits for others
        if self._shared.urgent:
            self._try_to_save()
        return chunks

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

    def _make(self, key: Key, trusted: bool) -> Stream:
        """A stream that is seen for the first time, with what is known of it."""
        state = self._states.pop(key, None)
        stream = Stream(self._shared, *key, trusted=trusted, state=state)
        if state is None:
            stream.to_end = self._watching.first and self._to_end
            if not stream.base:
                stream.cursor = self._cursors.pop((stream.session_id, stream.channel), None)
        return stream

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
        for stream in self._watching.streams.values():
            gone += [window.gone_wall_s for window in stream.windows if window.gone_wall_s]
        if len(gone) > self.settings.max_gone:
            gone.sort()
            before_s = max(before_s, gone[len(gone) - self.settings.max_gone - 1])
        for key, stream in list(self._watching.streams.items()):
            if stream.forget(before_s) and not stream.windows and key[0] not in self._watching.tree:
                self._watching.remove(key)
        for key, state in list(self._states.items()):
            state.windows = [window for window in state.windows if window.gone_s > before_s]
            if not state.windows:
                del self._states[key]
