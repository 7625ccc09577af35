"""Sessions while they run: logs followed, decoded and summed up, as much per round as a budget allows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import msgspec

from gpuflight.events.activity.session import Activity
from gpuflight.events.activity.summary import Summary
from gpuflight.events.arrays import numpy
from gpuflight.events.batch import Batch
from gpuflight.events.files.sidecars import owner
from gpuflight.events.format.decoder import Decoder
from gpuflight.events.reading import LiveSettings, Reading, folders_of
from gpuflight.events.tail import Chunk, Tailer, TailSettings
from gpuflight.events.tail.recent import RecentDisk

_LONGEST_READ_S = 2.0
_LONGEST_SUM_S = 1.0
_FOLDERS_LOOKED_FOR_ROUNDS = 12
_OWNERS_ASKED_ROUNDS = 6
_FORGOTTEN = 10_000


class _Session(msgspec.Struct):
    activity: Activity
    summary: Summary
    changed: bool = True
    told: bool = False


class LiveSessions:
    """``read`` once per round. ``patterns``: folders, with ``*`` and ``~``; those that are not there are waited for.

    Raises MissingExtra without numpy.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        settings: LiveSettings | None = None,
        *,
        root: str = "",
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
        make_disk: Callable[[], RecentDisk] | None = None,
    ) -> None:
        numpy()
        self.settings = settings or LiveSettings()
        self._patterns, self._root = patterns, root
        self._monotonic_s, self._wall_s = monotonic_s, wall_s
        self._make_disk = make_disk or (lambda: RecentDisk(self.settings.recent_s, wall_s, monotonic_s))
        self._tailers: dict[str, tuple[Tailer, RecentDisk]] = {}
        self._decoders: dict[tuple[str, str], Decoder] = {}
        self._sessions: dict[str, _Session] = {}  # the longest quiet first
        self._forgotten: dict[str, None] = {}
        self._lost: dict[str, int] = {}
        self._behind: set[str] = set()
        self._round = 0

    def read(self) -> Reading:
        """Take in what was written since the last time. Never raises for what the disk does."""
        self._look_for_folders()
        self._round += 1
        reading = Reading(folders=sorted(self._tailers))
        left = self.settings.bytes_per_round
        until_s = self._monotonic_s() + _LONGEST_READ_S
        drained = True
        for tailer, disk in self._in_turn():
            disk.look_again()
            while True:
                if 2 * left < tailer.settings.poll_bytes or self._monotonic_s() >= until_s:
                    drained = False
                    break
                chunks = tailer.poll()
                if not chunks:
                    break
                for chunk in chunks:
                    self._take(chunk)
                    tailer.commit(chunk)
                    left -= chunk.end - chunk.start
            reading.hidden += disk.hidden_count
            reading.closed += disk.closed_count
        reading.lost = self._newly_lost()
        reading.dropped = self._drop_the_quiet()
        reading.lag_bytes = self._say_what_is_behind(drained)
        self._ask_for_owners()
        self._sum_up(reading)
        return reading

    def forget(self, session_id: str) -> None:
        """A session is over and need not be told any more."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        self._behind.discard(session_id)
        self._decoders.pop((session.summary.folder, ""), None)
        self._forgotten[session_id] = None
        if len(self._forgotten) > _FORGOTTEN:
            self._forgotten.pop(next(iter(self._forgotten)))

    def close(self) -> None:
        """Give descriptors and threads back. May be called twice."""
        tailers, self._tailers = self._tailers, {}
        for tailer, _ in tailers.values():
            tailer.close(save=False)

    # --- folders -----------------------------------------------------------------------------------------------------

    def _look_for_folders(self) -> None:
        if self._round % _FOLDERS_LOOKED_FOR_ROUNDS:
            return
        for folder in folders_of(self._patterns, self._root):
            if folder not in self._tailers:
                settings = TailSettings(
                    notify=self.settings.notify,
                    poll_bytes=min(8 << 20, self.settings.bytes_per_round),
                    chunk_bytes=min(1 << 20, self.settings.bytes_per_round // 4),
                )
                disk = self._make_disk()
                tailer = Tailer(folder, None, settings, disk=disk, monotonic_s=self._monotonic_s, wall_s=self._wall_s)
                self._tailers[folder] = (tailer, disk)

    def _in_turn(self) -> list[tuple[Tailer, RecentDisk]]:
        """Each folder is the first one in turn, so that a busy one does not take the others' budget."""
        tailers = list(self._tailers.values())
        turn = self._round % len(tailers) if tailers else 0
        return tailers[turn:] + tailers[:turn]

    # --- lines -------------------------------------------------------------------------------------------------------

    def _take(self, chunk: Chunk) -> None:
        key = (chunk.folder, chunk.origin.stream.base)
        decoder = self._decoders.get(key)
        if decoder is None:
            decoder = self._decoders[key] = Decoder(chunk.session_id)
        lost = decoder.ledger.lost
        batches = decoder.feed(chunk.data, chunk.place)
        for batch in batches:
            self._session(batch, chunk).activity.add(batch)
        if lost := decoder.ledger.lost - lost:
            last = batches[-1].session_id if batches else chunk.session_id
            session = self._sessions.get(last)
            if session is None:
                self._lost[""] = self._lost.get("", 0) + lost
            else:
                session.activity.lose(lost)

    def _session(self, batch: Batch, chunk: Chunk) -> _Session:
        session = self._sessions.pop(batch.session_id, None)
        if session is None:
            activity = Activity(batch.session_id, chunk.folder, _uid(chunk.path))
            if batch.session_id in self._forgotten:
                del self._forgotten[batch.session_id]
                activity.forget_beginning()
            session = _Session(activity, Summary(session_id=batch.session_id, folder=chunk.folder))
        session.changed = True
        self._sessions[batch.session_id] = session
        return session

    def _sum_up(self, reading: Reading) -> None:
        """The summaries: the very objects of the last round where nothing came. Where the time runs out those who wrote
        last wait, and are among the first in the next round."""
        settings = self.settings
        until_s, now_ns = self._monotonic_s() + _LONGEST_SUM_S, int(self._wall_s() * 1e9)
        for session in self._sessions.values():
            before = session.summary
            if session.changed and self._monotonic_s() < until_s:
                session.changed, session.told = False, True
                session.summary = session.activity.summary(
                    most_kernels=settings.kernels_per_session,
                    most_scopes=settings.scopes_per_session,
                    most_streams=settings.streams_per_session,
                )
                session.summary.lag_bytes, session.summary.writer = before.lag_bytes, before.writer
                session.summary.read_ns = now_ns
            elif session.changed:
                reading.waiting += 1
                session.summary = msgspec.structs.replace(before, read_ns=now_ns)
            if session.told:
                reading.sessions.append(session.summary)

    def _newly_lost(self) -> int:
        """What the tailers, and lines without a session, lost since the last time."""
        now = {folder: tailer.ledger.lost for folder, (tailer, _) in self._tailers.items()}
        new = self._lost.pop("", 0) + sum(count - self._lost.get(folder, 0) for folder, count in now.items())
        self._lost = now
        return new

    def _drop_the_quiet(self) -> int:
        dropped = 0
        while len(self._sessions) > self.settings.max_sessions:
            self.forget(next(iter(self._sessions)))
            dropped += 1
        return dropped

    # --- how far it is -----------------------------------------------------------------------------------------------

    def _say_what_is_behind(self, drained: bool) -> int:
        """What lies there unread. Asked of the tailers only where something may, for it costs a look at every file."""
        if drained and not self._behind:
            return 0
        behind: dict[str, int] = {}
        total = 0
        by_folder: dict[str, int] = {}
        for tailer, _ in self._tailers.values():
            for progress in tailer.sessions():
                total += progress.unread_bytes
                if progress.unread_bytes:
                    by_folder[progress.path] = by_folder.get(progress.path, 0) + progress.unread_bytes
        for session_id, session in self._sessions.items():
            lag = by_folder.get(session.activity.folder, 0)
            if lag:
                behind[session_id] = lag
        for session_id in self._behind | behind.keys():
            session = self._sessions.get(session_id)  # type: ignore[assignment]
            if session is not None:
                session.summary = msgspec.structs.replace(session.summary, lag_bytes=behind.get(session_id, 0))
        self._behind = set(behind)
        return total

    def _ask_for_owners(self) -> None:
        """Whether the writer lives, of some in turn: a lock is a system call or three."""
        for number, session in enumerate(self._sessions.values()):
            if session.changed or (number + self._round) % _OWNERS_ASKED_ROUNDS == 0:
                writer = owner(session.activity.folder)
                if writer != session.summary.writer:
                    session.summary = msgspec.structs.replace(session.summary, writer=writer)


def _uid(path: str) -> int | None:
    """Whose file it is; None if it is gone already."""
    try:
        return os.stat(path).st_uid
    except OSError:
        return None
