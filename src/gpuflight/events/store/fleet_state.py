"""What the commits of a fleet's store add up to, kept in memory: files, positions of sources, numbers of batches."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable

from gpuflight.events.store.commits import Commit, FileEntry

Losses = dict[tuple[str, str, str], tuple[int, int, str]]
"""Count, bytes, place by session, reason and what it is about."""

_BATCH = struct.Struct("<qI")


def pack(batches: dict[int, int]) -> bytes:
    """Digests by number, 12 bytes each."""
    return b"".join(_BATCH.pack(number, digest) for number, digest in batches.items())


def unpack(packed: bytes) -> dict[int, int]:
    """The reverse of ``pack``."""
    return dict(_BATCH.iter_unpack(packed))


class FleetState:
    """What is stored. Changed by the one who applies commits; ``files_of`` and ``size_bytes`` are for any thread."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.sources: dict[str, tuple[int, str]] = {}
        self.losses: Losses = {}
        self.homes: dict[str, str] = {}
        self.size_bytes = 0
        self._lock = threading.Lock()
        self._files: dict[str, dict[str, dict[str, FileEntry]]] = {}  # session, table, path
        self._batches: dict[str, dict[tuple[str, int], int]] = {}
        self._packed: dict[str, dict[str, bytes]] = {}

    def apply(self, commit: Commit) -> None:
        """Take a commit in."""
        gone = set(commit.gone)
        with self._lock:
            for entry in commit.removed:
                self._drop(entry)
            for session_id in gone:
                self._files.pop(session_id, None)
                self._batches.pop(session_id, None)
                self._packed.pop(session_id, None)
                self.homes.pop(session_id, None)
            for entry in commit.added:
                self._add(entry)
        if gone:
            self.sources = {name: place for name, place in self.sources.items() if place[1] not in gone}
            self.losses = {key: value for key, value in self.losses.items() if key[0] not in gone}
        self.sources.update(commit.sources)
        self.homes.update(commit.homes)
        for session_id, batches in commit.batches.items():
            known = self.batches(session_id)
            for wire_type, number, digest in batches:
                known.setdefault((wire_type, number), digest)
        for session_id, reason, about, count, size_bytes, place in commit.losses:
            old = self.losses.get((session_id, reason, about), (0, 0, place))
            self.losses[session_id, reason, about] = (old[0] + count, old[1] + size_bytes, old[2])
        self.seen[commit.writer] = commit.seq

    def load(self, files: Iterable[FileEntry], packed: dict[str, dict[str, bytes]]) -> None:
        """Take in the files and batches of a snapshot; for a state that is empty."""
        with self._lock:
            for entry in files:
                self._add(entry)
        self._packed = packed

    def _add(self, entry: FileEntry) -> None:
        self._files.setdefault(entry.session_id, {}).setdefault(entry.table, {})[entry.path] = entry
        self.size_bytes += entry.size_bytes

    def _drop(self, entry: FileEntry) -> None:
        files = self._files.get(entry.session_id, {}).get(entry.table, {})
        if files.pop(entry.path, None) is not None:
            self.size_bytes -= entry.size_bytes

    def files_of(self, session_id: str, table: str | None = None) -> list[FileEntry]:
        """The files of a session, of one table or of all."""
        with self._lock:
            tables = self._files.get(session_id, {})
            if table is not None:
                return list(tables.get(table, {}).values())
            return [entry for files in tables.values() for entry in files.values()]

    def files(self) -> list[FileEntry]:
        """All of them."""
        with self._lock:
            return [e for tables in self._files.values() for files in tables.values() for e in files.values()]

    def batches(self, session_id: str) -> dict[tuple[str, int], int]:
        """Digests by wire type and number, of the batches of a session that are stored."""
        known = self._batches.get(session_id)
        if known is None:
            packed = self._packed.pop(session_id, {})
            known = self._batches[session_id] = {
                (wire_type, number): digest
                for wire_type, data in packed.items()
                for number, digest in unpack(data).items()
            }
        return known

    def packed_batches(self) -> dict[str, dict[str, bytes]]:
        """All of them, for a snapshot."""
        packed = dict(self._packed)
        for session_id, batches in self._batches.items():
            by_type: dict[str, dict[int, int]] = {}
            for (wire_type, number), digest in batches.items():
                by_type.setdefault(wire_type, {})[number] = digest
            if by_type:
                packed[session_id] = {wire_type: pack(found) for wire_type, found in by_type.items()}
        return packed

    def let_go(self, keep: int) -> None:
        """Pack the batches of all but the ``keep`` sessions that were last asked about first."""
        packed = self.packed_batches()
        kept = dict(list(self._batches.items())[-keep:] if keep else [])
        self._batches = kept
        self._packed = {session_id: data for session_id, data in packed.items() if session_id not in kept}
