"""What was delivered, on disk: one SQLite file, synced before anything is counted as done.

``kill -9`` loses nothing of it. One process at a time; a damaged file is moved aside and a new one begun, and then
windows without an acknowledgement beside them are sent again.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from typing import Any

from msgspec import Struct

from gpuflight.errors import InputError
from gpuflight.events.tail.cursors import Cursor

_SCHEMA = """
CREATE TABLE IF NOT EXISTS session (folder TEXT PRIMARY KEY, state TEXT NOT NULL, reason TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sent (
    folder TEXT NOT NULL, key TEXT NOT NULL, state TEXT NOT NULL, offset INTEGER NOT NULL DEFAULT 0,
    crc32 INTEGER NOT NULL DEFAULT 0, note TEXT NOT NULL DEFAULT '', archived INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (folder, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cursor (
    session_id TEXT NOT NULL, channel TEXT NOT NULL, file_index INTEGER NOT NULL, offset INTEGER NOT NULL,
    head_sig INTEGER NOT NULL, folder TEXT, PRIMARY KEY (session_id, channel)) WITHOUT ROWID;
"""


class Sent(Struct):
    """How far a window is. ``state``: part (``offset`` bytes of its lines have arrived), sent, or dead (given up). lost
    is not of a window: what of the session will not arrive.

    ``offset`` and ``crc32`` are of its uncompressed content where its lines were sent.
    """

    state: str
    offset: int = 0
    crc32: int = 0
    note: str = ""
    archived: bool = False


class Progress:
    """Thread-safe. Raises InputError if the file cannot be used, OSError if it cannot be written."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "agent.sqlite")
        self.damaged_path: str | None = None
        self._lock = threading.Lock()
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: {error.strerror}") from error
        try:
            self._db = self._connect()
        except sqlite3.OperationalError as error:
            raise self._unusable(error) from error
        except sqlite3.DatabaseError:
            self.damaged_path = f"{self.path}.damaged-{time.time_ns()}"
            os.replace(self.path, self.damaged_path)
            for suffix in ("-wal", "-shm"):
                if os.path.exists(self.path + suffix):
                    os.replace(self.path + suffix, self.damaged_path + suffix)
            try:
                self._db = self._connect()
            except sqlite3.Error as error:
                raise self._unusable(error) from error

    def _unusable(self, error: sqlite3.Error) -> InputError:
        text = "another agent uses it" if "locked" in str(error) else str(error)
        return InputError(f"{self.path}: {text}")

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=1.0, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                db.execute(f"PRAGMA {pragma}")
            db.executescript(_SCHEMA)
            db.execute("BEGIN IMMEDIATE")
            db.execute("COMMIT")
            (sound,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if sound != "ok":
                raise sqlite3.DatabaseError(sound)
        except BaseException:
            db.close()
            raise
        return db

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # --- windows ---

    def windows(self, folder: str) -> dict[str, Sent]:
        """All that is known of a session's windows, by key."""
        rows = self._all("SELECT key, state, offset, crc32, note, archived FROM sent WHERE folder = ?", folder)
        return {row[0]: Sent(row[1], row[2], row[3], row[4], bool(row[5])) for row in rows}

    def note(self, folder: str, key: str, sent: Sent) -> None:
        """Remember how far a window is."""
        self._do(
            "INSERT OR REPLACE INTO sent VALUES (?, ?, ?, ?, ?, ?, ?)",
            folder, key, sent.state, sent.offset, sent.crc32, sent.note, int(sent.archived),
        )  # fmt: skip

    def forget_dead(self, folder: str) -> None:
        """Windows that were given up are tried again."""
        self._do("DELETE FROM sent WHERE folder = ? AND state = 'dead'", folder)

    def lost(self, folder: str, text: str) -> None:
        """Something of a session will not arrive."""
        self.note(folder, f"lost: {text}", Sent("lost", note=text))

    # --- sessions ---

    def session(self, folder: str) -> tuple[str, str]:
        """(uploaded | failed | empty if not closed by us, reason)."""
        rows = self._all("SELECT state, reason FROM session WHERE folder = ?", folder)
        return (rows[0][0], rows[0][1]) if rows else ("", "")

    def close_session(self, folder: str, state: str, reason: str = "") -> None:
        self._do("INSERT OR REPLACE INTO session VALUES (?, ?, ?)", folder, state, reason)

    def reopen_session(self, folder: str) -> None:
        self._do("DELETE FROM session WHERE folder = ?", folder)

    def forget_gone(self) -> int:
        """Drop what is known of folders that are gone; how many."""
        folders = {row[0] for row in self._all("SELECT folder FROM session UNION SELECT folder FROM sent")}
        gone = [folder for folder in folders if not os.path.isdir(folder)]
        for folder in gone:
            for table in ("session", "sent"):
                self._do(f"DELETE FROM {table} WHERE folder = ?", folder)  # noqa: S608 - names of ours
        return len(gone)

    # --- gpufl-agent's cursors ---

    def import_cursors(self, cursors: dict[tuple[str, str], Cursor]) -> int:
        """Take over where gpufl-agent stood; what was taken over before stays as it is. How many are new."""
        before = self._all("SELECT count(*) FROM cursor")[0][0]
        for (session_id, channel), cursor in cursors.items():
            self._do(
                "INSERT OR IGNORE INTO cursor VALUES (?, ?, ?, ?, ?, NULL)",
                session_id, channel, cursor.file_index, cursor.offset, cursor.head_sig,
            )  # fmt: skip
        return int(self._all("SELECT count(*) FROM cursor")[0][0] - before)

    def cursors(self, session_id: str, folder: str) -> dict[str, Cursor]:
        """Where gpufl-agent stood in a session, by channel. Belongs to the first folder that asks: a cursor names no
        folder, and one of two sessions of one name has not been sent."""
        rows = self._all(
            "SELECT channel, file_index, offset, head_sig, folder FROM cursor WHERE session_id = ?", session_id
        )
        if any(row[4] is None for row in rows):
            self._do("UPDATE cursor SET folder = ? WHERE session_id = ? AND folder IS NULL", folder, session_id)
        return {
            row[0]: Cursor(file_index=row[1], offset=row[2], head_sig=row[3])
            for row in rows
            if row[4] in (None, folder)
        }

    def _all(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(sql, tuple(map(_plain, values))).fetchall()

    def _do(self, sql: str, *values: Any) -> None:
        with self._lock:
            try:
                self._db.execute(sql, tuple(map(_plain, values)))
            except sqlite3.Error as error:
                raise OSError(5, str(error), self.path) from error


def _plain(value: Any) -> Any:
    """SQLite takes UTF-8 only; a folder's name may be anything."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
