"""The event store of a fleet: sessions and records as files in a folder that any number of hosts share.

What a server writes here every other one reads, and so do Spark, Trino, Polars and DuckDB: the records are Parquet
files in Hive partitions. See ``commits`` for what makes a write whole, docs/adr/0006 for why.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from gpuflight.errors import GpuflightError
from gpuflight.events.store.commits import FileEntry
from gpuflight.events.store.fleet_catalogue import FleetCatalogue
from gpuflight.events.store.fleet_replica import LOOK_S
from gpuflight.events.store.parquet_records import ParquetRecords
from gpuflight.events.store.retention import RetentionSettings
from gpuflight.events.store.store import EventStore

log = logging.getLogger(__name__)

MERGE_AT = 8
"""So many files of about one size are made one."""

_BIG_ROWS = 1_000_000
"""A file with so many rows stays as it is."""

_MERGED_ROWS = 4_000_000
_IDLE_NS = 300 * 10**9
_GROUPS_AT_ONCE = 64
_SNAPSHOT_AFTER = 256


class ParquetStore(EventStore):
    """The same as ``EventStore``, in the folder ``root``, which others may have open too.

    ``upkeep_interval_s``: how often small files are put together and the log is shortened, by a thread of its own (s);
    0: only when ``maintain`` is called. Raises InputError where the folder cannot be used.
    """

    def __init__(
        self,
        root: str,
        *,
        retention: RetentionSettings | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
        threads: int | None = None,
        upkeep_interval_s: float = 30.0,
    ) -> None:
        self.folder = root
        self.retention = retention or RetentionSettings()
        self._wall_ns = wall_ns
        self.records: ParquetRecords = ParquetRecords(root, threads=threads, wall_ns=wall_ns)
        self.catalogue: FleetCatalogue = self.records.catalogue
        self._stopping = threading.Event()
        self._interval_s = upkeep_interval_s
        self._thread: threading.Thread | None = None
        if upkeep_interval_s > 0:
            self._thread = threading.Thread(target=self._run, name="gpuflight-events-merge", daemon=True)
            self._thread.start()

    def complete(self, session_id: str) -> None:
        """The sender says that everything of a session was sent."""
        super().complete(session_id)
        self.records.tell()

    def maintain(self) -> int:
        """Put small files together, and the commits into a snapshot; how many files were made of several."""
        self.records.tell()
        self.records.fleet.refresh()
        merged = 0
        with self.records.fleet.keeping_up() as free:
            for session_id in list(self.records.fleet.unsettled) if free else ():
                merged += self._settle(session_id)
        self.records.fleet.snapshot(_SNAPSHOT_AFTER)
        return merged

    def _settle(self, session_id: str) -> int:
        session = self.catalogue.known(session_id)
        over = session is None or session.received_ns < self._wall_ns() - _IDLE_NS
        home = self.records.fleet.best_home(session_id) + "/"
        tables: dict[str, list[FileEntry]] = {}
        for entry in self.records.fleet.state.files_of(session_id):
            if not self.records.fleet.file(entry).current:
                continue  # another version may know more of it than this one would keep
            tables.setdefault(entry.table, []).append(entry)
        groups = [group for files in tables.values() for group in to_merge(files, over=over, home=home)]
        merged = 0
        for start in range(0, len(groups), _GROUPS_AT_ONCE):
            if self._stopping.is_set():
                return merged
            some = groups[start : start + _GROUPS_AT_ONCE]
            done = self.records.merge(session_id, some)
            merged += done
            over = over and done == len(some)
        if over:
            self.records.fleet.unsettled.discard(session_id)
        return merged

    @property
    def store_id(self) -> str:
        """The same for everybody who has this store open, and for no other store."""
        return self.records.fleet.log.store_id

    def outside_changes(self) -> int:
        """A number that differs after something was stored here, by this process or another."""
        return self.records.fleet.changes_count

    def _run(self) -> None:
        next_s = time.monotonic() + self._interval_s
        while not self._stopping.wait(min(LOOK_S, self._interval_s)):
            try:
                self.records.fleet.look()
                if time.monotonic() >= next_s:
                    self.maintain()
                    next_s = time.monotonic() + self._interval_s
            except (GpuflightError, OSError) as error:
                log.warning("upkeep of the event store: %s", error)
            except Exception:
                log.exception("upkeep of the event store failed")

    def close(self) -> None:
        """Tell what was learnt, and give the files back. May be called twice."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        try:
            self.records.tell()
        finally:
            self.records.close()


def to_merge(files: list[FileEntry], *, over: bool, home: str) -> list[list[FileEntry]]:
    """Which files of one session and table to make one of. While it runs, those of about one size (a factor of 8), so
    that a row is copied a few times in all; when it is ``over``, all small ones, and those that lie elsewhere than
    ``home``, since who and when became known only later."""
    small = sorted((entry for entry in files if entry.rows < _BIG_ROWS), key=lambda entry: entry.rows)
    if over:
        groups = _of_at_most(small, _MERGED_ROWS)
        groups += [[entry] for entry in files if entry.rows >= _BIG_ROWS]
        return [group for group in groups if len(group) > 1 or not group[0].path.startswith(home)]
    sizes: dict[int, list[FileEntry]] = {}
    for entry in small:
        sizes.setdefault(entry.rows.bit_length() // 3, []).append(entry)
    return [
        chosen
        for group in sizes.values()
        if len(group) >= MERGE_AT
        for chosen in _of_at_most(group, _MERGED_ROWS)
        if len(chosen) > 1
    ]


def _of_at_most(files: list[FileEntry], rows: int) -> list[list[FileEntry]]:
    """Groups with at most ``rows`` rows each, as long as a file alone has not more."""
    groups: list[list[FileEntry]] = []
    room = 0
    for entry in files:
        if not groups or entry.rows > room:
            groups.append([])
            room = rows
        groups[-1].append(entry)
        room -= entry.rows
    return groups
