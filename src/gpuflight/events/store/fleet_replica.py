"""What a process knows of a fleet's store: everybody's commits, taken in, and their files put in place."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpuflight.events.store.commits import VERSION, Commit, CommitLog, FileEntry, Snapshot, sync_folder
from gpuflight.events.store.fleet_catalogue import FleetCatalogue
from gpuflight.events.store.fleet_state import FleetState
from gpuflight.events.store.parquet_files import EXTRA, File, ParquetFiles, layout_of
from gpuflight.events.store.partitions import MERGING, UPKEEP, date_of, home
from gpuflight.events.tables import TABLES

LOOK_S = 1.0
"""What others have stored is seen so long after it, at the latest."""

_KNOWN_SESSIONS = 256


class FleetReplica:
    """The state of the store under ``root``. ``lock`` is held while it changes, and by who is about to write.

    Raises InputError where the folder cannot be used, MissingExtra without DuckDB.
    """

    def __init__(self, root: str, changed: Callable[[], None], wall_ns: Callable[[], int], threads: int | None) -> None:
        self.root = os.path.realpath(root)
        self.lock = threading.RLock()
        self.state = FleetState()
        self.catalogue = FleetCatalogue(self.root, self.look, changed)
        self.changes_count = 0
        """Goes up with everything that is stored, by whomever."""
        self.unsettled: set[str] = set()
        """Sessions whose files may have to be put together."""
        self.order = 0
        """The greatest ``written_order`` so far."""
        self._wall_ns = wall_ns
        self._moving: dict[str, str] = {}
        self._unsynced: set[str] = set()
        self._since_snapshot = 0
        self._looked_s = 0.0
        self.log = CommitLog(self.root)
        try:
            self.files = ParquetFiles(self.root, self.log.tmp, threads)
            self.refresh()
        except BaseException:
            self.log.close()
            raise

    def append(self, commit: Commit) -> None:
        """Store a commit and take it in. Raises OSError, and then nothing is stored; InputError of a broken log."""
        self.log.append(commit, self.state.seen)
        self.take_in(commit)

    def look(self) -> None:
        """Take in what others have stored, unless that was done just now or something is being written."""
        if time.monotonic() - self._looked_s < LOOK_S or not self.lock.acquire(blocking=False):
            return
        try:
            self.refresh()
        finally:
            self.lock.release()

    def refresh(self) -> None:
        """Take in what others have stored."""
        with self.lock:
            news = self.log.news(self.state.seen)
            if news.snapshot is not None:
                self._load(news.snapshot)
            for commit in news.commits:
                self.take_in(commit)
            self._looked_s = time.monotonic()

    def take_in(self, commit: Commit) -> None:
        """A commit counts: remember what it says, put its files in their places, delete those that are gone by it.
        Done by everybody who reads it, since its writer may have died before it had."""
        for session_id, time_ns, facts in commit.sessions:
            self.catalogue.number(session_id, time_ns or commit.time_ns)
            self.catalogue.apply(session_id, time_ns, facts)
        for entry in commit.added:
            self._move(commit.writer, entry)
            self.catalogue.number(entry.session_id, commit.time_ns)
            self.unsettled.add(entry.session_id)
        self.state.apply(commit)
        for entry in commit.removed:
            self._delete(entry)
        self._since_snapshot += 1
        self.changes_count += 1
        self.order = max(self.order, commit.order)
        for session_id in commit.gone:
            self.unsettled.discard(session_id)
            number = self.catalogue.number(session_id, commit.time_ns)
            self.files.drop_losses(number)
            self.catalogue.remove([number])
        self.files.add_losses([(self._loss_number(loss[0], commit.time_ns), *loss[1:]) for loss in commit.losses])

    def _loss_number(self, session_id: str, time_ns: int) -> int:
        return self.catalogue.number(session_id, time_ns) if session_id else 0

    def _load(self, snapshot: Snapshot) -> None:
        state = FleetState()
        state.seen = dict(snapshot.seen)
        state.sources, state.homes = snapshot.sources, snapshot.homes
        state.losses = {tuple(loss[:3]): tuple(loss[3:]) for loss in snapshot.losses}  # type: ignore[misc]
        state.load(snapshot.files, snapshot.batches)
        self.catalogue.replace(snapshot.sessions)
        self.files.drop_losses()
        self.files.add_losses([(self._loss_number(loss[0], 0), *loss[1:]) for loss in snapshot.losses])
        self.state = state
        self.unsettled = {entry.session_id for entry in snapshot.files}
        self.order = max(self.order, snapshot.order)
        self._since_snapshot = 0
        self.changes_count += 1

    def _move(self, writer: str, entry: FileEntry) -> None:
        """Put a file of a commit in its place, unless it is there, or gone again."""
        source, target = self.log.tmp_path(writer, entry.path), os.path.join(self.root, entry.path)
        self._unsynced.add(os.path.dirname(target))
        try:
            try:
                os.rename(source, target)
            except FileNotFoundError:
                if not os.path.exists(source):
                    return  # moved already
                os.makedirs(os.path.dirname(target), exist_ok=True)  # it was empty, and tidied away
                os.rename(source, target)
        except OSError:  # a full disk: it is stored all the same, and is read where it is
            self._moving[entry.path] = source

    def _delete(self, entry: FileEntry) -> None:
        path = os.path.join(self.root, entry.path)
        self._moving.pop(entry.path, None)
        unlink_quietly(path)
        folder = os.path.dirname(path)
        self._unsynced.add(folder)
        for _ in range(4):  # type, session, host, date
            try:
                os.rmdir(folder)
            except OSError:
                break
            self._unsynced.discard(folder)
            folder = os.path.dirname(folder)

    def best_home(self, session_id: str) -> str:
        """Where the records of a session belong by what is known now."""
        session = self.catalogue.known(session_id)
        if session is None:
            return home(date_of(self._wall_ns()), None, session_id)
        date = date_of(session.start_ns, session.first_event_ns, session.created_ns)
        return home(date, session.hostname, session_id)

    def path(self, entry: FileEntry) -> str:
        """Where a file is."""
        return self._moving.get(entry.path) or os.path.join(self.root, entry.path)

    def file(self, entry: FileEntry) -> File:
        """A file as it is read."""
        known = entry.table in TABLES or entry.table == EXTRA
        return File(self.path(entry), known and entry.layout == layout_of(entry.table))

    def files_of(self, table: str, session_no: int) -> list[File]:
        """The files of a session's table; none, if there is no such session any more."""
        try:
            session_id = self.catalogue.id_of(session_no)
        except KeyError:
            return []
        return [self.file(entry) for entry in self.state.files_of(session_id, table)]

    @contextmanager
    def keeping_up(self) -> Iterator[bool]:
        """True if nobody else puts files together now."""
        with self.log.locks.if_free(MERGING) as free:
            yield free

    def snapshot(self, after: int = 0) -> bool:
        """Replace the commits by a snapshot, if there are more than ``after``, or writers that are gone."""
        with self.lock, self.log.locks.held([UPKEEP]):
            self.refresh()
            if self._since_snapshot <= after and not self.log.dead_writers():
                return False
            for path, source in list(self._moving.items()):
                os.rename(source, os.path.join(self.root, path))
                del self._moving[path]
            for folder in list(self._unsynced):
                if os.path.isdir(folder):
                    sync_folder(folder)
                self._unsynced.discard(folder)
            writers = self.log.writers()
            self.state.seen = {writer: seq for writer, seq in self.state.seen.items() if writer in writers}
            self.state.let_go(_KNOWN_SESSIONS)
            self.log.write_snapshot(
                Snapshot(
                    version=VERSION,
                    seen=dict(self.state.seen),
                    sessions=self.catalogue.everything(),
                    sources=self.state.sources,
                    batches=self.state.packed_batches(),
                    losses=[(*key, *value) for key, value in self.state.losses.items()],
                    homes=self.state.homes,
                    files=self.state.files(),
                    order=self.order,
                )
            )
            self._since_snapshot = 0
            return True

    def close(self) -> None:
        """Give everything back."""
        self.files.connection.close()
        self.catalogue.close()
        self.log.close()


def unlink_quietly(path: str) -> None:
    """Delete a file, if that can be done: it is of no use to anybody."""
    try:
        os.unlink(path)
    except OSError:
        pass
