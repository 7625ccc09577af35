"""The records of a fleet's store: Parquet files that commits name, written whole or not at all.

The same promises as ``records``, over any number of processes and hosts: what repeats is recognised by source and by
batch, under a lock of those sessions, after everybody else's commits were taken in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import msgspec

from gpuflight.errors import InputError
from gpuflight.events.batch import Batch
from gpuflight.events.ledger import Ledger
from gpuflight.events.store.commits import Commit, FileEntry, sync_folder
from gpuflight.events.store.fleet_replica import FleetReplica, unlink_quietly
from gpuflight.events.store.parquet_files import EXTRA, expand, layout_of, token
from gpuflight.events.store.partitions import bucket_of
from gpuflight.events.store.parts import Part, Relation, Written, by_table, count
from gpuflight.events.store.records import Records
from gpuflight.events.tables import TABLES

_READ_TRIES = 20


class _Job(NamedTuple):
    """A file to be made: ``write(path)`` gives its rows and bytes."""

    session_id: str
    table: str
    write: Callable[[str], tuple[int, int]]


class ParquetRecords(Records):
    """Records under ``root``, a folder that hosts may share. ``wall_ns``: the time of commits.

    Raises InputError where the folder cannot be used, MissingExtra without DuckDB.
    """

    def __init__(self, root: str, *, threads: int | None = None, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.fleet = FleetReplica(root, self.tell, wall_ns, threads)
        self.path = self.fleet.root
        self.catalogue = self.fleet.catalogue
        self._wall_ns = wall_ns
        self._number_of = lambda session_id: self.catalogue.number(session_id, self._wall_ns())
        self._log = self.fleet.log
        self._merges = 0
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="gpuflight-events-sync")

    # --- writing ---------------------------------------------------------------------------------------------------

    def write_parts(self, parts: Sequence[Part]) -> list[Written]:
        """Store what several senders handed in, all or nothing; see ``Records.write_parts``. What was learnt
        of sessions before goes with it."""
        results = [Written() for _ in parts]
        with self.fleet.lock, self._log.locks.held(_buckets(parts)):
            self.fleet.refresh()
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
                    count(found, written)
                    fresh += found
                commit = Commit(time_ns=self._wall_ns(), sessions=pending)
                self._write_files(fresh, commit, made)
                for number, wire_type, batch_id, digest in noted:
                    commit.batches.setdefault(self.catalogue.id_of(number), []).append((wire_type, batch_id, digest))
                for part, written in new:
                    self._end(part, written, commit)
                self._log.append(commit, self.fleet.state.seen)
            except BaseException as error:
                self._undo(noted, pending, made)
                if _of_duckdb(error) or isinstance(error, OSError):
                    raise InputError(f"{self.path}: {str(error).splitlines()[0]}") from error
                raise
            self.fleet.take_in(commit)
        return results

    def tell(self) -> None:
        """Store what was learnt of sessions and goes with no write. Raises InputError."""
        with self.fleet.lock:
            pending = self.catalogue.take_pending()
            if not pending:
                return
            try:
                with self._log.locks.held({bucket_of(session_id) for session_id, _, _ in pending}):
                    self.fleet.refresh()
                    sessions = [told for told in pending if self.catalogue.is_there(told[0])]
                    self.fleet.append(Commit(time_ns=self._wall_ns(), sessions=sessions))
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
        self._drop(made)

    def _write_files(self, fresh: list[tuple[int, Batch]], commit: Commit, made: list[FileEntry]) -> None:
        """A file for each session and table, safe on disk but not in its place yet."""
        order = max(self.fleet.order + 1, self._wall_ns())
        jobs: list[_Job] = []
        for table, group in by_table(fresh).items():
            by_session: dict[int, list[Batch]] = {}
            for number, batch in group:
                if batch.count:
                    by_session.setdefault(number, []).append(batch)
            for number, batches in by_session.items():
                session_id = self.catalogue.id_of(number)
                write = partial(
                    self.fleet.files.write, session_id=session_id, table=table, batches=batches, order=order
                )
                jobs.append(_Job(session_id, table, write))
                order += sum(batch.count for batch in batches)
        extras: dict[int, list[tuple[str, int | None, str]]] = {}
        for number, batch in fresh:
            if batch.extra:
                text = msgspec.json.encode(batch.extra).decode()
                extras.setdefault(number, []).append((batch.wire_type, batch.batch_id, text))
        for number, rows in extras.items():
            session_id = self.catalogue.id_of(number)
            write = partial(self.fleet.files.write_extra, session_id=session_id, rows=rows)
            jobs.append(_Job(session_id, EXTRA, write))
        commit.order = order
        homes = {job.session_id: self._home(job.session_id, commit) for job in jobs}
        self._do(jobs, homes, f"{self._log.seq + 1:08d}", made)
        commit.added = made

    def _do(self, jobs: Sequence[_Job], homes: dict[str, str], name: str, made: list[FileEntry]) -> None:
        """Write files, make them safe where they are, and make the folders that they go to. ``made`` gets them, also
        those of which only half may be there, if this raises."""
        for number, job in enumerate(jobs):
            path = f"{homes[job.session_id]}/type={job.table}/part-{self._log.writer}-{name}-{number:04d}.parquet"
            made.append(FileEntry(path, job.session_id, job.table, 0, 0))
        paths = [self._log.tmp_path(self._log.writer, entry.path) for entry in made]
        futures = [self._pool.submit(_write_synced, job, path) for job, path in zip(jobs, paths, strict=True)]
        wait(futures)  # all of them, whatever became of one
        for number, future in enumerate(futures):
            rows, size_bytes = future.result()
            path, session_id, table = made[number].path, made[number].session_id, made[number].table
            made[number] = FileEntry(path, session_id, table, rows, size_bytes, layout_of(table))
        if made:
            sync_folder(self._log.tmp)
        for folder in {os.path.dirname(entry.path) for entry in made}:
            os.makedirs(os.path.join(self.path, folder), exist_ok=True)

    def _home(self, session_id: str, commit: Commit) -> str:
        """The folder of a session; it is chosen by what is known when the first of its records comes."""
        known = self.fleet.state.homes.get(session_id) or commit.homes.get(session_id)
        if known is None:
            known = commit.homes[session_id] = self.fleet.best_home(session_id)
        return known

    def _end(self, part: Part, written: Written, commit: Commit) -> None:
        source, batches = part.source, part.batches
        session_id = (source.session_id if source is not None else "") or (batches[0].session_id if batches else "")
        for ledger in (part.ledger, written.ledger):
            for entry in ledger or Ledger():
                place = str(entry.places[0]) if entry.places else ""
                commit.losses.append((session_id, entry.reason, entry.detail, entry.count, entry.size_bytes, place))
        if source is not None:
            commit.sources[source.name] = (source.end, session_id)

    def position(self, source: str) -> int | None:
        """How far a source is stored; None: nothing of it."""
        self.fleet.look()
        return self._position(source)

    def _position(self, source: str) -> int | None:
        found = self.fleet.state.sources.get(source)
        return found[0] if found is not None else None

    def _known(self, session_no: int) -> dict[tuple[str, int], int]:
        return self.fleet.state.batches(self.catalogue.id_of(session_no))

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
            with self.fleet.files.connection.cursor() as cursor:
                try:
                    cursor.execute(expand(sql, self.fleet.files_of), values)
                    return fetch(cursor)
                except duckdb.IOException as error:
                    # Files are merged into bigger ones, by whoever it is, at any time.
                    if attempt == _READ_TRIES - 1:
                        raise InputError(f"{self.path}: {str(error).splitlines()[0]}") from error
            if attempt:
                time.sleep(0.01 * attempt)
            self.fleet.refresh()
        raise AssertionError

    def used_bytes(self) -> int:
        """Size of all files, bytes."""
        return self.fleet.state.size_bytes

    # --- upkeep ----------------------------------------------------------------------------------------------------

    def remove(self, sessions: Iterable[int]) -> None:
        """Delete everything of some sessions, all or nothing."""
        ids = [session.session_id for session in self.catalogue.of_numbers(sessions)]
        if not ids:
            return
        with self.fleet.lock, self._log.locks.held(map(bucket_of, ids)):
            self.fleet.refresh()
            removed = [entry for session_id in ids for entry in self.fleet.state.files_of(session_id)]
            try:
                self.fleet.append(Commit(time_ns=self._wall_ns(), gone=ids, removed=removed))
            except OSError as error:
                raise InputError(f"{self.path}: {error}") from error

    def merge(self, session_id: str, groups: Sequence[Sequence[FileEntry]]) -> int:
        """Make one file of each of some groups of a session's files, each of one table; how many were made: none, if
        one of them is gone meanwhile."""
        with self.fleet.lock:
            self._merges += 1
            name = f"m{self._merges:08d}"
        home = self.fleet.best_home(session_id)
        made: list[FileEntry] = []
        old = [entry for group in groups for entry in group]
        sources = [self.fleet.path(entry) for entry in old]
        jobs = []
        for group in groups:
            table, files = group[0].table, [self.fleet.file(entry) for entry in group]
            merge = partial(self.fleet.files.merge, session_id=session_id, table=table, files=files)
            jobs.append(_Job(session_id, table, merge))
        try:
            self._do(jobs, {session_id: home}, name, made)
            with self.fleet.lock, self._log.locks.held([bucket_of(session_id)]):
                self.fleet.refresh()
                there = {entry.path for entry in self.fleet.state.files_of(session_id)}
                if not there.issuperset(entry.path for entry in old):
                    self._drop(made)
                    return 0
                homes = {session_id: home}
                self.fleet.append(Commit(time_ns=self._wall_ns(), homes=homes, added=made, removed=old))
        except BaseException as error:
            self._drop(made)
            if _of_duckdb(error):
                if not all(map(os.path.exists, sources)):
                    return 0
                raise InputError(f"{self.path}: {str(error).splitlines()[0]}") from error
            raise
        return len(made)

    def _drop(self, made: list[FileEntry]) -> None:
        """Delete files that no commit names."""
        if not self._log.broken:
            for entry in made:
                unlink_quietly(self._log.tmp_path(self._log.writer, entry.path))

    def close(self) -> None:
        """Give everything back."""
        with self.fleet.lock:
            self._pool.shutdown()
            self.fleet.close()


def _buckets(parts: Sequence[Part]) -> set[int]:
    found: set[int] = set()
    for part in parts:
        found.update(bucket_of(session_id) for session_id in {batch.session_id for batch in part.batches})
        if part.source is not None:
            found.add(bucket_of("source " + part.source.name))
            if part.source.session_id:
                found.add(bucket_of(part.source.session_id))
    return found


def _write_synced(job: _Job, path: str) -> tuple[int, int]:
    """Rows and bytes of a file that is made, and safe."""
    done = job.write(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return done


def _of_duckdb(error: BaseException) -> bool:
    import duckdb

    return isinstance(error, duckdb.Error)
