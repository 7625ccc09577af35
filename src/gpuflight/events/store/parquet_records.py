"""The records of a fleet's store: Parquet files that commits name, written whole or not at all.

The same promises as ``records``, over any number of processes and hosts: what repeats is recognised by source and by
batch, under a lock of those sessions, after everybody else's commits were taken in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from gpuflight.errors import InputError
from gpuflight.events.arrays import numpy
from gpuflight.events.batch import Batch
from gpuflight.events.ledger import Ledger
from gpuflight.events.store.commits import Commit, FileEntry, sync_folder
from gpuflight.events.store.fleet_replica import FleetReplica, unlink_quietly
from gpuflight.events.store.parquet_files import EXTRA, expand, token
from gpuflight.events.store.partitions import bucket_of
from gpuflight.events.store.records import Part, Records, Relation, Written, _by_table, _count
from gpuflight.events.tables import TABLES

_READ_TRIES = 20


class ParquetRecords(Records):
    """Records under ``root``, a folder that hosts may share. ``wall_ns``: the time of commits.

    Raises InputError where the folder cannot be used, MissingExtra without DuckDB.
    """

    def __init__(self, root: str, *, threads: int | None = None, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.fleet = FleetReplica(root, self.tell, wall_ns, threads)
        self.path = self.fleet.root
        self.catalogue = self.fleet.catalogue
        self._np = numpy()
        self._wall_ns = wall_ns
        self._number_of = lambda session_id: self.catalogue.number(session_id, self._wall_ns())
        self._log = self.fleet.log
        self._merges = 0
        self._pool = ThreadPoolExecutor(8, thread_name_prefix="gpuflight-events-sync")

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
                    _count(found, written)
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
                if error.__class__.__module__ == "_duckdb" or isinstance(error, OSError):
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
        for entry in made:
            unlink_quietly(self._log.tmp_path(self._log.writer, entry.path))

    def _write_files(self, fresh: list[tuple[int, Batch]], commit: Commit, made: list[FileEntry]) -> None:
        """A file for each session and table, safe on disk but not in its place yet."""
        self.fleet.order = max(self.fleet.order + 1, self._wall_ns())
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
                    lambda path, sid, t=table, b=batches: self.fleet.files.write(path, sid, t, b, self.fleet.order),  # type: ignore[misc]
                )
                self.fleet.order += sum(batch.count for batch in batches)
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
                lambda path, sid, r=rows: self.fleet.files.write_extra(path, sid, r),  # type: ignore[misc]
            )
        commit.order = self.fleet.order
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
                    cursor.execute(expand(sql, self.fleet.paths), values)
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

    def merge(self, entries: Sequence[FileEntry]) -> bool:
        """Make one file of several of a session and table; False if one of them is gone meanwhile."""
        session_id, table = entries[0].session_id, entries[0].table
        with self.fleet.lock:
            self._merges += 1
            name = f"part-{self._log.writer}-m{self._merges:08d}.parquet"
        path = f"{self.fleet.best_home(session_id)}/type={table}/{name}"
        merged = FileEntry(path, session_id, table, 0, 0)
        made = self._log.tmp_path(self._log.writer, path)
        try:
            paths = [self.fleet.path(entry) for entry in entries]
            rows, size_bytes = self.fleet.files.merge(made, session_id, table, paths)
            merged = FileEntry(path, session_id, table, rows, size_bytes)
            self._sync([merged])
            with self.fleet.lock, self._log.locks.held([bucket_of(session_id)]):
                self.fleet.refresh()
                there = {entry.path for entry in self.fleet.state.files_of(session_id, table)}
                if not there.issuperset(entry.path for entry in entries):
                    unlink_quietly(made)
                    return False
                homes = {session_id: self.fleet.best_home(session_id)}
                self.fleet.append(Commit(time_ns=self._wall_ns(), homes=homes, added=[merged], removed=list(entries)))
        except BaseException as error:
            if not self._log.broken:
                unlink_quietly(made)
            if error.__class__.__module__ == "_duckdb":
                if not all(map(os.path.exists, paths)):
                    return False
                raise InputError(f"{self.path}: {str(error).splitlines()[0]}") from error
            raise
        return True

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


def _sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
