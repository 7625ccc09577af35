"""The records of a fleet's store: Parquet files that commits name, written whole or not at all.

The same promises as ``records``, over any number of processes and hosts: what repeats is recognised by source and by
batch, under a lock of those sessions, after everybody else's commits were taken in.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec

from gpuflight.errors import InputError
from gpuflight.events.arrays import numpy
from gpuflight.events.batch import Batch
from gpuflight.events.ledger import Ledger
from gpuflight.events.store.commits import VERSION, Commit, CommitLog, FileEntry, Snapshot, sync_folder
from gpuflight.events.store.fleet_catalogue import FleetCatalogue
from gpuflight.events.store.fleet_state import FleetState
from gpuflight.events.store.parquet_files import EXTRA, ParquetFiles, expand, token
from gpuflight.events.store.partitions import MERGING, UPKEEP, bucket_of, date_of, home
from gpuflight.events.store.records import Part, Records, Relation, Written, _by_table, _count
from gpuflight.events.tables import TABLES

_LOOK_S = 1.0
"""What others have stored is seen so long after it, at the latest."""

_READ_TRIES = 20
_KNOWN_SESSIONS = 256


class ParquetRecords(Records):
    """Records under ``root``, a folder that hosts may share. ``wall_ns``: the time of commits.

    Raises InputError where the folder cannot be used, MissingExtra without DuckDB.
    """

    def __init__(self, root: str, *, threads: int | None = None, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.path = os.path.realpath(root)
        self._np = numpy()
        self._wall_ns = wall_ns
        self._lock = threading.RLock()  # type: ignore[assignment]
        self.catalogue = FleetCatalogue(self.path, self.look, self.tell)
        self._number_of = lambda session_id: self.catalogue.number(session_id, self._wall_ns())
        self.state = FleetState()
        self._log = CommitLog(self.path)
        try:
            self.files = ParquetFiles(self.path, self._log.tmp, threads)
            self._moving: dict[str, str] = {}
            self._unsynced: set[str] = set()
            self._since_snapshot = 0
            self._looked_s = 0.0
            self._order = 0
            self._merges = 0
            self.unsettled: set[str] = set()
            self._pool = ThreadPoolExecutor(8, thread_name_prefix="gpuflight-events-sync")
            self.refresh()
        except BaseException:
            self._log.close()
            raise

    # --- writing ---------------------------------------------------------------------------------------------------

    def write_parts(self, parts: Sequence[Part]) -> list[Written]:
        """Store what several senders handed in, all or nothing; see ``Records.write_parts``. What was learnt
        of sessions before goes with it."""
        results = [Written() for _ in parts]
        with self._lock, self._log.locks.held(_buckets(parts)):
            self.refresh()
            new = self._new_parts(parts, results)
            if not new:
                return results
            noted: list[tuple[int, str, int, int]] = []
            pending = self.catalogue.take_pending()
            made: list[FileEntry] = []
            try:
                fresh: list[tuple[int, Batch]] = []
                for part, written in new:
                    found = self._new(part.batches, written, noted)
                    _count(found, written)
                    fresh += found
                commit = Commit(time_ns=self._wall_ns(), sessions=pending)
                self._write_files(fresh, commit, made)
                for number, wire_type, batch_id, digest in noted:
                    commit.batches.setdefault(self.catalogue.id_of(number), []).append((wire_type, batch_id, digest))
                for part, written in new:
                    self._end(part, written, commit)
                self._log.append(commit, self.state.seen)
            except BaseException as error:
                self._undo(noted, pending, made)
                if error.__class__.__module__ == "_duckdb" or isinstance(error, OSError):
                    raise InputError(f"{self.path}: {str(error).splitlines()[0]}") from error
                raise
            self._take_in(commit)
        return results

    def tell(self) -> None:
        """Store what was learnt of sessions and goes with no write. Raises InputError."""
        with self._lock:
            pending = self.catalogue.take_pending()
            if not pending:
                return
            try:
                with self._log.locks.held({bucket_of(session_id) for session_id, _, _ in pending}):
                    self.refresh()
                    sessions = [told for told in pending if self.catalogue.is_there(told[0])]
                    self._append(Commit(time_ns=self._wall_ns(), sessions=sessions))
            except OSError as error:
                self.catalogue.give_back(pending)
                raise InputError(f"{self.path}: {error}") from error
            except BaseException:
                self.catalogue.give_back(pending)
                raise

    def _undo(self, noted: list[Any], pending: list[Any], made: list[FileEntry]) -> None:
        self.catalogue.give_back(pending)
        if self._log.broken:
            return
        for number, wire_type, batch_id, _ in noted:
            self._known(number).pop((wire_type, batch_id), None)
        for entry in made:
            _unlink(self._log.tmp_path(self._log.writer, entry.path))

    def _write_files(self, fresh: list[tuple[int, Batch]], commit: Commit, made: list[FileEntry]) -> None:
        """A file for each session and table, safe on disk but not in its place yet."""
        self._order = max(self._order + 1, self._wall_ns())
        for table, group in _by_table(fresh).items():
            by_session: dict[int, list[Batch]] = {}
            for number, batch in group:
                if batch.count:
                    by_session.setdefault(number, []).append(batch)
            for number, batches in by_session.items():
                self._make(
                    commit,
                    made,
                    self.catalogue.id_of(number),
                    table,
                    lambda path, sid, t=table, b=batches: self.files.write(path, sid, t, b, self._order),  # type: ignore[misc]
                )
                self._order += sum(batch.count for batch in batches)
        extras: dict[int, list[tuple[str, int | None, str]]] = {}
        for number, batch in fresh:
            if batch.extra:
                text = msgspec.json.encode(batch.extra).decode()
                extras.setdefault(number, []).append((batch.wire_type, batch.batch_id, text))
        for number, rows in extras.items():
            self._make(
                commit,
                made,
                self.catalogue.id_of(number),
                EXTRA,
                lambda path, sid, r=rows: self.files.write_extra(path, sid, r),  # type: ignore[misc]
            )
        commit.order = self._order
        self._sync(made)
        commit.added = made

    def _make(
        self,
        commit: Commit,
        made: list[FileEntry],
        session_id: str,
        table: str,
        write: Callable[[str, str], tuple[int, int]],
    ) -> None:
        name = f"part-{self._log.writer}-{self._log.seq + 1:08d}-{len(made):04d}.parquet"
        path = f"{self._home(session_id, commit)}/type={table}/{name}"
        made.append(FileEntry(path, session_id, table, 0, 0))  # in case that half of it is written
        rows, size_bytes = write(self._log.tmp_path(self._log.writer, path), session_id)
        made[-1] = FileEntry(path, session_id, table, rows, size_bytes)

    def _sync(self, made: list[FileEntry]) -> None:
        """Make the files safe where they are, and the folders that they go to."""
        list(self._pool.map(_sync_file, [self._log.tmp_path(self._log.writer, entry.path) for entry in made]))
        if made:
            sync_folder(self._log.tmp)
        for folder in {os.path.dirname(entry.path) for entry in made}:
            os.makedirs(os.path.join(self.path, folder), exist_ok=True)

    def _home(self, session_id: str, commit: Commit) -> str:
        """The folder of a session; it is chosen by what is known when the first of its records comes."""
        known = self.state.homes.get(session_id) or commit.homes.get(session_id)
        if known is None:
            known = commit.homes[session_id] = self.best_home(session_id)
        return known

    def best_home(self, session_id: str) -> str:
        """Where the records of a session belong by what is known now."""
        session = self.catalogue.known(session_id)
        if session is None:
            return home(date_of(self._wall_ns()), None, session_id)
        date = date_of(session.start_ns, session.first_event_ns, session.created_ns)
        return home(date, session.hostname, session_id)

    def _end(self, part: Part, written: Written, commit: Commit) -> None:
        source, batches = part.source, part.batches
        session_id = (source.session_id if source is not None else "") or (batches[0].session_id if batches else "")
        for ledger in (part.ledger, written.ledger):
            for entry in ledger or Ledger():
                place = str(entry.places[0]) if entry.places else ""
                commit.losses.append((session_id, entry.reason, entry.detail, entry.count, entry.size_bytes, place))
        if source is not None:
            commit.sources[source.name] = (source.end, session_id)

    def _append(self, commit: Commit) -> None:
        self._log.append(commit, self.state.seen)
        self._take_in(commit)

    # --- what is stored --------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in what others have stored, unless that was done just now or something is being written."""
        if time.monotonic() - self._looked_s < _LOOK_S or not self._lock.acquire(blocking=False):
            return
        try:
            self.refresh()
        finally:
            self._lock.release()

    def refresh(self) -> None:
        """Take in what others have stored."""
        with self._lock:
            news = self._log.news(self.state.seen)
            if news.snapshot is not None:
                self._load(news.snapshot)
            for commit in news.commits:
                self._take_in(commit)
            self._looked_s = time.monotonic()

    def _take_in(self, commit: Commit) -> None:
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
        self._order = max(self._order, commit.order)
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
        self._order = max(self._order, snapshot.order)
        self._since_snapshot = 0

    def _move(self, writer: str, entry: FileEntry) -> None:
        """Put a file of a commit in its place, unless it is there, or gone again."""
        source, target = self._log.tmp_path(writer, entry.path), os.path.join(self.path, entry.path)
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
        path = os.path.join(self.path, entry.path)
        self._moving.pop(entry.path, None)
        _unlink(path)
        folder = os.path.dirname(path)
        self._unsynced.add(folder)
        for _ in range(4):  # type, session, host, date
            try:
                os.rmdir(folder)
            except OSError:
                break
            self._unsynced.discard(folder)
            folder = os.path.dirname(folder)

    def position(self, source: str) -> int | None:
        """How far a source is stored; None: nothing of it."""
        self.look()
        return self._position(source)

    def _position(self, source: str) -> int | None:
        found = self.state.sources.get(source)
        return found[0] if found is not None else None

    def _known(self, session_no: int) -> dict[tuple[str, int], int]:
        return self.state.batches(self.catalogue.id_of(session_no))

    # --- reading ---------------------------------------------------------------------------------------------------

    def relation(self, table: str, sessions: Iterable[int]) -> Relation:
        """A table's rows of some sessions, to be given to ``rows`` or ``columns`` as part of a query."""
        name = table if table in ("loss", EXTRA) else TABLES[table].name
        return Relation(token(name, [int(number) for number in sessions]))

    def columns(self, sql: str, values: Sequence[Any] = ()) -> dict[str, Any]:
        """The answer to a query as numpy arrays by column (masked where something is NULL)."""
        answer: dict[str, Any] = self._ask(sql, values, lambda cursor: cursor.fetchnumpy())
        return answer

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The answer to a query as dicts; for answers of a few thousand rows."""

        def dicts(cursor: Any) -> list[dict[str, Any]]:
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

        found: list[dict[str, Any]] = self._ask(sql, values, dicts)
        return found

    def _ask(self, sql: str, values: Sequence[Any], fetch: Callable[[Any], Any]) -> Any:
        import duckdb

        for attempt in range(_READ_TRIES):
            with self.files.connection.cursor() as cursor:
                try:
                    cursor.execute(expand(sql, self._paths), values)
                    return fetch(cursor)
                except duckdb.IOException as error:
                    # Files are merged into bigger ones, by whoever it is, at any time.
                    if attempt == _READ_TRIES - 1:
                        raise InputError(f"{self.path}: {str(error).splitlines()[0]}") from error
            if attempt:
                time.sleep(0.01 * attempt)
            self.refresh()
        raise AssertionError

    def _paths(self, table: str, session_no: int) -> list[str]:
        try:
            session_id = self.catalogue.id_of(session_no)
        except KeyError:
            return []
        return [
            self._moving.get(entry.path) or os.path.join(self.path, entry.path)
            for entry in self.state.files_of(session_id, table)
        ]

    def used_bytes(self) -> int:
        """Size of all files, bytes."""
        return self.state.size_bytes

    # --- upkeep ----------------------------------------------------------------------------------------------------

    def remove(self, sessions: Iterable[int]) -> None:
        """Delete everything of some sessions, all or nothing."""
        ids = [session.session_id for session in self.catalogue.of_numbers(sessions)]
        if not ids:
            return
        with self._lock, self._log.locks.held(map(bucket_of, ids)):
            self.refresh()
            removed = [entry for session_id in ids for entry in self.state.files_of(session_id)]
            try:
                self._append(Commit(time_ns=self._wall_ns(), gone=ids, removed=removed))
            except OSError as error:
                raise InputError(f"{self.path}: {error}") from error

    def merge(self, entries: Sequence[FileEntry]) -> bool:
        """Make one file of several of a session and table; False if one of them is gone meanwhile."""
        session_id, table = entries[0].session_id, entries[0].table
        with self._lock:
            self._merges += 1
            name = f"part-{self._log.writer}-m{self._merges:08d}.parquet"
        path = f"{self.best_home(session_id)}/type={table}/{name}"
        merged = FileEntry(path, session_id, table, 0, 0)
        made = self._log.tmp_path(self._log.writer, path)
        try:
            paths = [self._moving.get(entry.path) or os.path.join(self.path, entry.path) for entry in entries]
            rows, size_bytes = self.files.merge(made, session_id, table, paths)
            merged = FileEntry(path, session_id, table, rows, size_bytes)
            self._sync([merged])
            with self._lock, self._log.locks.held([bucket_of(session_id)]):
                self.refresh()
                there = {entry.path for entry in self.state.files_of(session_id, table)}
                if not there.issuperset(entry.path for entry in entries):
                    _unlink(made)
                    return False
                homes = {session_id: self.best_home(session_id)}
                self._append(Commit(time_ns=self._wall_ns(), homes=homes, added=[merged], removed=list(entries)))
        except BaseException as error:
            _unlink(made)
            if error.__class__.__module__ == "_duckdb":
                if not all(map(os.path.exists, paths)):
                    return False
                raise InputError(f"{self.path}: {str(error).splitlines()[0]}") from error
            raise
        return True

    @contextmanager
    def keeping_up(self) -> Iterator[bool]:
        """True if nobody else puts files together now."""
        with self._log.locks.if_free(MERGING) as free:
            yield free

    def snapshot(self, after: int = 0) -> bool:
        """Replace the commits by a snapshot, if there are more than ``after``, or writers that are gone."""
        with self._lock, self._log.locks.held([UPKEEP]):
            self.refresh()
            if self._since_snapshot <= after and not self._log.dead_writers():
                return False
            for path, source in list(self._moving.items()):
                os.rename(source, os.path.join(self.path, path))
                del self._moving[path]
            for folder in list(self._unsynced):
                if os.path.isdir(folder):
                    sync_folder(folder)
                self._unsynced.discard(folder)
            self.state.let_go(_KNOWN_SESSIONS)
            self._log.write_snapshot(
                Snapshot(
                    version=VERSION,
                    seen=dict(self.state.seen),
                    sessions=self.catalogue.everything(),
                    sources=self.state.sources,
                    batches=self.state.packed_batches(),
                    losses=[(*key, *value) for key, value in self.state.losses.items()],
                    homes=self.state.homes,
                    files=self.state.files(),
                    order=self._order,
                )
            )
            self._since_snapshot = 0
            return True

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            self._pool.shutdown()
            self.files.connection.close()
            self.catalogue.close()
            self._log.close()


def _buckets(parts: Sequence[Part]) -> set[int]:
    found: set[int] = set()
    for part in parts:
        found.update(bucket_of(session_id) for session_id in {batch.session_id for batch in part.batches})
        if part.source is not None:
            found.add(bucket_of("source " + part.source.name))
            if part.source.session_id:
                found.add(bucket_of(part.source.session_id))
    return found


def _sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass
