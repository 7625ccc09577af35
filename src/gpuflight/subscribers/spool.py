"""Rounds that wait on disk: one SQLite file per subscriber, in order, until they were delivered.

Write-ahead log and a full sync per append: what ``append`` returned from survives ``kill -9`` and a power cut. What is
forgotten stays forgotten over ``kill -9``; a power cut may bring the last of it back, which is then sent twice. The
file is locked while it is open, so that two processes never deliver from one spool. A file that is damaged is moved
aside and a new one begun; starting never fails over what an earlier process left.

Forgetting a round takes room on the disk too, until the log is written back. So ``append`` never takes the last of it:
a disk that this spool has filled is one that delivering empties again.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from msgspec import Struct

from gpuflight.errors import DeliveryError
from gpuflight.subscribers.base import Parcel

POISON_KEPT_COUNT = 16
"""Rounds that could not be delivered are kept for inspection, the last so many of them."""

RESERVE_BYTES = 64 * 1024
"""Room on the disk that is left for forgetting."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS parcel (
    id INTEGER PRIMARY KEY AUTOINCREMENT, number INTEGER NOT NULL, time_ns INTEGER NOT NULL, base INTEGER,
    key TEXT NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS poison (
    id INTEGER PRIMARY KEY, reason TEXT NOT NULL, number INTEGER NOT NULL, time_ns INTEGER NOT NULL, base INTEGER,
    key TEXT NOT NULL, data BLOB NOT NULL);
"""


class Spooled(Struct, frozen=True):
    """One line of the inventory of a spool."""

    id: int
    size_bytes: int
    time_ns: int


class Spool:
    """The spool of one subscriber. Thread-safe. Every method raises DeliveryError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.damaged_path: str | None = None
        """Where a damaged file was moved to, None if it was sound."""
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open or make the file. May be called again after an error."""
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
        except OSError as error:
            raise DeliveryError(f"spool {self.path}: {error.strerror}", retryable=True) from error
        try:
            self._connection = self._connect()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # locked, no right, full; the file itself may be sound
                raise self._problem(error) from error
            self._move_aside()
            try:
                self._connection = self._connect()
            except sqlite3.Error as again:
                raise self._problem(again) from again

    def append(self, parcel: Parcel) -> int:
        """Store a parcel; returns its id, which is larger than every one before. Raises DeliveryError also if the disk
        would be left without room to forget what it holds."""
        sql = "INSERT INTO parcel (number, time_ns, base, key, data) VALUES (?, ?, ?, ?, ?)"
        values = (parcel.number, parcel.time_ns, parcel.base, parcel.key, parcel.data)
        with self._lock:
            try:
                connection = self._open()
                self._keep_room(connection, len(parcel.data))
                return int(connection.execute(sql, values).lastrowid or 0)
            except sqlite3.Error as error:
                raise self._problem(error) from error

    def read(self, parcel_id: int) -> Parcel:
        """The parcel of an id."""
        found = self.read_all((parcel_id,))
        if not found:
            raise DeliveryError(f"spool {self.path}: round {parcel_id} is gone", retryable=False)
        return found[0]

    def read_all(self, parcel_ids: Sequence[int]) -> list[Parcel]:
        """The parcels of rising ids, up to the first that is gone."""
        sql = "SELECT id, number, time_ns, base, key, data FROM parcel WHERE id BETWEEN ? AND ? ORDER BY id"
        found: list[Parcel] = []
        with self._lock:
            try:
                for row in self._open().execute(sql, (parcel_ids[0], parcel_ids[-1])):
                    parcel_id, number, time_ns, base, key, data = row
                    wanted = parcel_ids[len(found)]
                    if parcel_id > wanted:
                        break
                    if parcel_id == wanted:  # else one that is settled and still there
                        found.append(Parcel(number=number, time_ns=time_ns, key=key, data=data, base=base))
            except sqlite3.Error as error:
                if not found:  # else it is told when it is the first
                    raise self._problem(error) from error
        return found

    def remove(self, parcel_id: int, *, poison: str = "") -> None:
        """Forget a parcel; with a reason in ``poison`` it is kept aside, among the last ``POISON_KEPT_COUNT``."""
        self.remove_all([(parcel_id, poison)])

    def remove_all(self, settled: Sequence[tuple[int, str]]) -> None:
        """``remove`` for each of several; may be called again with the same after an error. Nothing waits for the disk:
        what a power cut brings back is sent twice."""
        groups = [([parcel_id], poison) for parcel_id, poison in settled if poison]
        groups.insert(0, ([parcel_id for parcel_id, poison in settled if not poison], ""))
        with self._lock:
            try:
                connection = self._open()
                for parcel_ids, poison in groups:
                    try:
                        _forget(connection, parcel_ids, poison)
                    except sqlite3.OperationalError:
                        _write_back(connection)  # a full log is a reason that this removes
                        for parcel_id in parcel_ids:  # little at a time, for there may be little room
                            _forget(connection, [parcel_id], poison)
            except sqlite3.Error as error:
                raise self._problem(error) from error

    def inventory(self) -> list[Spooled]:
        """All that waits, oldest first."""
        return [Spooled(*row) for row in self._rows("SELECT id, length(data), time_ns FROM parcel ORDER BY id")]

    def poison(self) -> list[tuple[int, str]]:
        """Number of each round set aside, and why; oldest first."""
        return [(row[0], row[1]) for row in self._rows("SELECT number, reason FROM poison ORDER BY id")]

    def close(self) -> None:
        """Give the file back. May be called twice."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    def delete(self) -> None:
        """Close the file and delete it."""
        self.close()
        for suffix in ("", "-wal", "-shm"):
            try:
                os.unlink(self.path + suffix)
            except FileNotFoundError:
                pass
            except OSError as error:
                raise DeliveryError(f"spool {self.path}: {error.strerror}", retryable=False) from error

    def _keep_room(self, connection: sqlite3.Connection, size_bytes: int) -> None:
        # What is added goes into the log first and into the file later: both have to find room beside each other.
        if self._free_bytes() >= self._log_bytes() + 2 * size_bytes + RESERVE_BYTES:
            return
        _write_back(connection)
        while True:
            (unused_pages,) = connection.execute("PRAGMA freelist_count").fetchone()
            (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
            growth_bytes = max(0, size_bytes - unused_pages * page_bytes)
            if self._free_bytes() >= size_bytes + growth_bytes + RESERVE_BYTES:
                return
            if not unused_pages:
                raise DeliveryError(f"spool {self.path}: disk is full", retryable=True)
            # The file keeps what was in use once; the disk has more need of it now.
            connection.execute(f"PRAGMA incremental_vacuum({RESERVE_BYTES // (4 * page_bytes)})").fetchall()
            _write_back(connection)
            if connection.execute("PRAGMA freelist_count").fetchone()[0] >= unused_pages:
                raise DeliveryError(f"spool {self.path}: disk is full", retryable=True)

    def _free_bytes(self) -> int:
        try:
            disk = os.statvfs(os.path.dirname(self.path))
        except OSError:
            return sys.maxsize  # unknown, so SQLite finds out
        return disk.f_frsize * (disk.f_bavail if os.geteuid() else disk.f_bfree)

    def _log_bytes(self) -> int:
        try:
            return os.stat(self.path + "-wal").st_size
        except OSError:
            return 0

    def _rows(self, sql: str) -> Iterator[tuple[Any, ...]]:
        with self._lock:
            try:
                return iter(self._open().execute(sql).fetchall())
            except sqlite3.Error as error:
                raise self._problem(error) from error

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise sqlite3.ProgrammingError("it is closed")
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=1.0, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before anything is in the file
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA journal_size_limit = 4194304")
            # Debian's SQLite overwrites what it deletes: as much again to write, and room that a full disk has not.
            connection.execute("PRAGMA secure_delete = OFF")
            connection.executescript(_SCHEMA)
            connection.execute("BEGIN IMMEDIATE")  # takes the lock that is then kept
            connection.execute("COMMIT")
            (sound,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if sound != "ok":
                raise sqlite3.DatabaseError(sound)
        except BaseException:
            connection.close()
            raise
        os.chmod(self.path, 0o600)
        return connection

    def _move_aside(self) -> None:
        self.damaged_path = f"{self.path}.damaged-{time.time_ns()}"
        try:
            os.replace(self.path, self.damaged_path)
            for suffix in ("-wal", "-shm"):
                if os.path.exists(self.path + suffix):
                    os.replace(self.path + suffix, self.damaged_path + suffix)
        except OSError as error:
            raise DeliveryError(f"spool {self.path}: damaged, and {error.strerror}", retryable=True) from error

    def _problem(self, error: sqlite3.Error) -> DeliveryError:
        text = "another process has it" if "locked" in str(error) else str(error)
        return DeliveryError(f"spool {self.path}: {text}", retryable=isinstance(error, sqlite3.OperationalError))


def _forget(connection: sqlite3.Connection, parcel_ids: Sequence[int], poison: str) -> None:
    if not parcel_ids:
        return
    connection.execute("PRAGMA synchronous = NORMAL")
    try:
        connection.execute("BEGIN IMMEDIATE")
        if poison:
            connection.executemany(
                "INSERT OR REPLACE INTO poison SELECT id, ?, number, time_ns, base, key, data FROM parcel WHERE id = ?",
                [(poison, parcel_id) for parcel_id in parcel_ids],
            )
            connection.execute(
                "DELETE FROM poison WHERE id NOT IN (SELECT id FROM poison ORDER BY id DESC LIMIT ?)",
                (POISON_KEPT_COUNT,),
            )
        connection.executemany("DELETE FROM parcel WHERE id = ?", [(parcel_id,) for parcel_id in parcel_ids])
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    finally:
        connection.execute("PRAGMA synchronous = FULL")  # for what is appended


def _write_back(connection: sqlite3.Connection) -> None:
    """The log into the file; then it takes no room any more."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def state_folder() -> str:
    """Where what outlives the process lies unless the settings say so: systemd's ``$STATE_DIRECTORY``, else
    /var/lib/gpuflight for root, else the user's ``$XDG_STATE_HOME``."""
    state = os.environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if not state:
        home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
        state = "/var/lib/gpuflight" if os.geteuid() == 0 else os.path.join(home, "gpuflight")
    return state


def spool_path(folder: str | None, label: str) -> str:
    """The file of the subscriber ``label``; whatever its name is, it stays within the folder."""
    return os.path.join(
        folder or os.path.join(state_folder(), "spool"), f"{quote(label, safe='').replace('.', '%2E')[:200]}.sqlite"
    )
