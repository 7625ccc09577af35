"""The log of a fleet's store: what counts as stored is what a commit says, and nothing else.

Every opening of the store is a *writer* with a folder of its own in ``_gpuflight/writers`` (Spark, Trino and Hive leave
out names that begin with ``_``). A write makes its Parquet files in ``tmp`` there, fsynced, then one commit
``000000000042.json`` that names them, by rename; only then are they moved to their partitions. So

* a writer that dies before the commit leaves files in ``tmp`` that nobody ever looks at; they go with its folder;
* one that dies after it leaves a commit, and whoever reads that moves what is not moved yet;
* other programs only ever see whole files of commits.

Commits name those that their writer had seen (``seen``), so everybody applies them in an order in which a thing comes
after what it depends on. When there are many, a *snapshot* of everything replaces them; the folders of writers that
are gone (nobody has their lock) go with them.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import msgspec
import zstandard

from gpuflight.errors import InputError
from gpuflight.events.store.partitions import Locks, new_writer

VERSION = 1
FOLDER = "_gpuflight"
_TRIES = 1000


class FileEntry(msgspec.Struct, array_like=True, frozen=True):
    """A Parquet file. ``path`` is relative to the root, its last part unique in the whole store. ``layout`` stands for
    its columns: other versions of gpuflight may know more of a table, or fewer."""

    path: str
    session_id: str
    table: str
    rows: int
    size_bytes: int
    layout: int = 0


class Commit(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one write did. ``sessions``: (id, when it was received, what was learnt). ``sources``: position and session
    by name. ``batches``: (wire type, number, digest) by session. ``losses``: session, reason, about, count, bytes,
    place. ``homes``: where the records of a session go from now on. ``gone``: sessions that are deleted. ``order``: the
    greatest ``written_order`` of its rows."""

    version: int = VERSION
    writer: str = ""
    seq: int = 0
    time_ns: int = 0
    seen: dict[str, int] = {}
    sessions: list[tuple[str, int, dict[str, Any]]] = []
    sources: dict[str, tuple[int, str]] = {}
    batches: dict[str, list[tuple[str, int, int]]] = {}
    losses: list[tuple[str, str, str, int, int, str]] = []
    homes: dict[str, str] = {}
    added: list[FileEntry] = []
    removed: list[FileEntry] = []
    gone: list[str] = []
    order: int = 0


class Snapshot(msgspec.Struct, kw_only=True):
    """Everything that the commits up to ``seen`` say. ``sessions``: created, received, what is known, by id.
    ``batches``: by session and wire type, packed (``state.pack``)."""

    version: int
    seen: dict[str, int]
    sessions: dict[str, tuple[int, int, dict[str, Any]]]
    sources: dict[str, tuple[int, str]]
    batches: dict[str, dict[str, bytes]]
    losses: list[tuple[str, str, str, int, int, str]]
    homes: dict[str, str]
    files: list[FileEntry]
    order: int


class News(msgspec.Struct):
    """What is to be applied: first ``snapshot``, in place of all that was, then the commits."""

    snapshot: Snapshot | None
    commits: list[Commit]


class CommitLog:
    """The commits of everybody, and the writer that this process is. One thread at a time.

    Raises InputError where the folder cannot be used.
    """

    def __init__(self, root: str) -> None:
        self.folder = os.path.join(root, FOLDER)
        self._writers = os.path.join(self.folder, "writers")
        self.writer = new_writer()
        self.tmp = os.path.join(self._writers, self.writer, "tmp")
        self.seq = 0
        self.broken = False
        """Whether it is not known if the last commit counts; then nothing more can be written here."""
        self._snapshot = 0
        try:
            os.makedirs(self._writers, exist_ok=True)
            self.locks = Locks(os.path.join(self.folder, "lock"))
            with self.locks.held([0]):
                os.makedirs(self.tmp)
                self._alive = Locks(self._alive_path(self.writer))
                self._alive.take()
                self.store_id = self._id()
        except OSError as error:
            raise InputError(f"{root}: cannot be opened as an event store: {error.strerror}") from error

    def _id(self) -> str:
        """A name for the store, the same for everybody; made by the first."""
        path = os.path.join(self.folder, "id")
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().strip()
        except FileNotFoundError:
            made = os.urandom(16).hex()
            write_synced(path, made.encode())
            return made

    def append(self, commit: Commit, seen: dict[str, int]) -> Commit:
        """Write a commit so that it survives; it counts when this returns. Raises OSError: it does not count, unless
        the log is ``broken``."""
        if self.broken:
            raise InputError(f"{self.folder}: a write failed in the middle; open the store anew")
        commit.writer, commit.seq, commit.seen = self.writer, self.seq + 1, dict(seen)
        path = self._path(self.writer, commit.seq)
        try:
            write_synced(path, msgspec.json.encode(commit))
        except OSError:
            self.broken = os.path.exists(path)
            raise
        self.seq += 1
        return commit

    def news(self, seen: dict[str, int]) -> News:
        """What there is beyond ``seen`` (the last commit applied, by writer), in an order that may be applied."""
        snapshot: Snapshot | None = None
        for _ in range(_TRIES):
            number = self._latest_snapshot()
            if number > self._snapshot:
                try:
                    found = self._read_snapshot(number)
                except FileNotFoundError:
                    continue  # a newer one has replaced it
                # One that was missed may have told of a writer that is gone and forgotten by now.
                missed, self._snapshot = number > self._snapshot + 1, number
                if missed or any(seq > seen.get(writer, 0) for writer, seq in found.seen.items()):
                    snapshot, seen = found, dict(found.seen)
            commits = self._read_commits(seen)
            if self._latest_snapshot() != number:
                continue  # it may have taken away what was to be read
            ordered = self._ordered(commits, seen)
            if ordered is not None:
                return News(snapshot, ordered)
        raise InputError(f"{self.folder}: what commits refer to cannot be found; is the folder the same on every host?")

    def _read_commits(self, seen: dict[str, int]) -> list[Commit]:
        commits = []
        for writer in os.listdir(self._writers):
            seq = seen.get(writer, 0) + 1
            while (commit := self._read_commit(writer, seq)) is not None:
                commits.append(commit)
                seq += 1
        return commits

    def _read_commit(self, writer: str, seq: int) -> Commit | None:
        path = self._path(writer, seq)
        try:
            with open(path, "rb") as file:
                commit = msgspec.json.decode(file.read(), type=Commit)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise InputError(f"{path}: no commit of an event store: {error}") from error
        _check_version(path, commit.version)
        return commit

    def _ordered(self, commits: list[Commit], seen: dict[str, int]) -> list[Commit] | None:
        """Causes first; None if one of them is not here."""
        known, waiting, ordered = dict(seen), commits, list[Commit]()
        there = {commit.writer for commit in commits} | seen.keys() | set(os.listdir(self._writers))
        while waiting:
            left = []
            for commit in waiting:
                # A writer whose folder is gone was told by a snapshot that is applied.
                if all(known.get(writer, 0) >= seq or writer not in there for writer, seq in commit.seen.items()):
                    ordered.append(commit)
                    known[commit.writer] = commit.seq
                else:
                    left.append(commit)
            if len(left) == len(waiting):
                return None
            waiting = left
        return ordered

    # --- snapshots -------------------------------------------------------------------------------------------------

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Replace the commits that ``snapshot.seen`` covers. Only with ``locks.held([UPKEEP])``, after everything of
        this log was applied to it and all files it names are safe where they are. Raises OSError."""
        number = max(self._snapshot, self._latest_snapshot()) + 1
        data = zstandard.ZstdCompressor().compress(msgspec.json.encode(snapshot))
        write_synced(os.path.join(self.folder, f"snapshot-{number:012d}.json.zst"), data)
        self._snapshot = number
        for name in os.listdir(self.folder):
            if name.startswith("snapshot-") and _snapshot_number(name) < number:
                os.unlink(os.path.join(self.folder, name))
        for writer in os.listdir(self._writers):
            covered = snapshot.seen.get(writer, 0)
            folder = os.path.join(self._writers, writer)
            if writer != self.writer and self._is_dead(writer) and self._read_commit(writer, covered + 1) is None:
                shutil.rmtree(folder, ignore_errors=True)
                continue
            for name in os.listdir(folder):
                if name.endswith(".json") and int(name[:-5]) <= covered:
                    os.unlink(os.path.join(folder, name))

    def writers(self) -> set[str]:
        """Those that have a folder."""
        return set(os.listdir(self._writers))

    def dead_writers(self) -> int:
        """How many writers there are whose process is gone."""
        return sum(1 for writer in os.listdir(self._writers) if writer != self.writer and self._is_dead(writer))

    def _is_dead(self, writer: str) -> bool:
        try:
            lock = Locks(self._alive_path(writer))
        except FileNotFoundError:
            return False  # another one tidies up
        try:
            return lock.take()
        finally:
            lock.close()

    def _latest_snapshot(self) -> int:
        return max((_snapshot_number(name) for name in os.listdir(self.folder)), default=0)

    def _read_snapshot(self, number: int) -> Snapshot:
        path = os.path.join(self.folder, f"snapshot-{number:012d}.json.zst")
        with open(path, "rb") as file:
            data = file.read()
        try:
            snapshot = msgspec.json.decode(zstandard.ZstdDecompressor().decompress(data), type=Snapshot)
        except (zstandard.ZstdError, msgspec.MsgspecError) as error:
            raise InputError(f"{path}: no snapshot of an event store: {error}") from error
        _check_version(path, snapshot.version)
        return snapshot

    def tmp_path(self, writer: str, entry_path: str) -> str:
        """Where a writer made a file before it was moved to ``entry_path``."""
        return os.path.join(self._writers, writer, "tmp", os.path.basename(entry_path))

    def close(self) -> None:
        """Let go of the locks. What there is of this writer is told by the next snapshot."""
        self._alive.close()
        self.locks.close()

    def _alive_path(self, writer: str) -> str:
        return os.path.join(self._writers, writer, "alive")

    def _path(self, writer: str, seq: int) -> str:
        return os.path.join(self._writers, writer, f"{seq:012d}.json")


def write_synced(path: str, data: bytes) -> None:
    """Write a new file by way of a temporary one, so that it is whole or not there, and survives a crash."""
    temporary = path + ".new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(temporary, path)
    sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    """Make sure that what was made or renamed in a folder survives."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_version(path: str, version: int) -> None:
    if version > VERSION:
        raise InputError(f"{path}: written by a newer gpuflight (format {version}, this one knows {VERSION})")


def _snapshot_number(name: str) -> int:
    number = name[9:21]
    return int(number) if name.startswith("snapshot-") and name.endswith(".json.zst") and number.isdigit() else 0
