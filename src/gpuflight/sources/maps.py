"""Who has which shared memory mapped: the shared mappings in /proc/PID/maps, read as rarely as can be.

A ``maps`` file costs from 0.1 ms (a shell) to several ms (a training process with thousands of mappings), so per round

* a process that is new, or ran since the last round, and has resident shared memory, huge pages or mapped segments is
  read at once, new ones first, up to ``HOLDER_BYTES`` of text per round;
* every other process is read once soon after it is first seen, children of holders first, and again every
  ``ROTATION`` rounds, up to ``OTHERS_BYTES`` of text per round.

So a mapping that was touched shows in the first round; one that nobody ever touched (no page of it is resident) shows
within the rotation. ``pending`` says how many processes were not read yet.
"""

from __future__ import annotations

import os
import threading
from typing import Literal, NamedTuple

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.procfs import ProcFs, ProcStat
from gpuflight.sources.procfs.stat import decode

HOLDER_BYTES = 32 << 20
"""Most text of ``maps`` files read per round of processes known or likely to share memory."""

OTHERS_BYTES = 8 << 20
"""The same of all other processes: about 300 ordinary ones."""

ROTATION = 60
"""Rounds after which a process that seems to share nothing is looked at again."""

LOCK_TIMEOUT_S = 3.0

Mechanism = Literal["posix", "sysv", "memfd", "anonymous", "file"]


class SharedMapping(NamedTuple):
    """All shared mappings of one object by one process.

    ``inode`` is the shmid for ``sysv``. ``anonymous`` is memory that only children of the process which made it can
    share. ``extent_bytes`` is the end of the highest mapped part: the object is at least that large. ``address_range``
    is the first mapping's, as in the names of /proc/PID/map_files.
    """

    mechanism: Mechanism
    device: int
    inode: int
    name: str
    deleted: bool
    readable: bool
    writable: bool
    mapped_bytes: int
    extent_bytes: int
    address_range: str


_DELETED = b" (deleted)"
_NOT_FILES = (b"/drm mm object", b"/i915", b"/dmabuf:")


def mechanism_of(path: bytes) -> Mechanism | None:
    """What kind of shared memory a mapped path is; None for devices and kernel objects, which are no exchange."""
    if not path.startswith(b"/"):
        return None
    if path.startswith((b"/dev/shm/", b"/run/shm/")):
        return "posix"
    if path.startswith(b"/memfd:"):
        return "memfd"
    if path.startswith(b"/SYSV"):
        return "sysv"
    if path == b"/dev/zero (deleted)" or path.startswith(b"/anon_hugepage"):
        return "anonymous"
    if path.startswith(b"/dev/hugepages/"):
        return "file"
    if path.startswith(b"/dev/") or path.startswith(_NOT_FILES):
        return None
    return "file"


def parse_shared(raw: bytes) -> tuple[SharedMapping, ...]:
    """The shared mappings of one ``maps`` file, one entry per object. Searches instead of splitting all lines."""
    found: dict[tuple[str, int, int], SharedMapping] = {}
    for token in (b"-s ", b"xs "):
        at = raw.find(token)
        while at >= 0:
            begin = raw.rfind(b"\n", 0, at) + 1
            end = raw.find(b"\n", at)
            if end < 0:
                end = len(raw)
            if at == raw.find(b" ", begin) + 3:  # in the permissions, not in a name
                fields = raw[begin:end].split(None, 5)
                mechanism = mechanism_of(fields[5]) if len(fields) == 6 else None
                if mechanism is not None:
                    _add(found, mechanism, fields)
            at = raw.find(token, end)
    return tuple(found.values())


def _add(found: dict[tuple[str, int, int], SharedMapping], mechanism: Mechanism, fields: list[bytes]) -> None:
    low, _, high = fields[0].partition(b"-")
    major, _, minor = fields[3].partition(b":")
    length = int(high, 16) - int(low, 16)
    deleted = fields[5].endswith(_DELETED)
    mapping = SharedMapping(
        mechanism=mechanism,
        device=os.makedev(int(major, 16), int(minor, 16)),
        inode=int(fields[4]),
        name=decode(fields[5].removesuffix(_DELETED)),
        deleted=deleted,
        readable=fields[1][:1] == b"r",
        writable=fields[1][1:2] == b"w",
        mapped_bytes=length,
        extent_bytes=int(fields[2], 16) + length,
        address_range=fields[0].decode("ascii"),
    )
    key = (mechanism, mapping.device, mapping.inode)
    known = found.get(key)
    if known is not None:
        mapping = known._replace(
            readable=known.readable or mapping.readable,
            writable=known.writable or mapping.writable,
            mapped_bytes=known.mapped_bytes + length,
            extent_bytes=max(known.extent_bytes, mapping.extent_bytes),
        )
    found[key] = mapping


class _Kept:
    """What is known about one process from round to round."""

    __slots__ = ("mappings", "scanned", "start", "stat", "unreadable")

    def __init__(self, start: int) -> None:
        self.start = start
        self.stat: ProcStat | None = None  # as of the last look at its use of shared memory
        self.scanned = -1  # round of the last reading of its maps
        self.mappings: tuple[SharedMapping, ...] = ()
        self.unreadable = False


class SharedMaps:
    """The shared mappings of all processes; ``scan`` once per round. See the module for what is read when."""

    def __init__(self, procfs: ProcFs) -> None:
        self._procfs = procfs
        self._kept: dict[int, _Kept] = {}
        self._round = 0
        self._found: dict[int, tuple[SharedMapping, ...]] | None = None
        self._lock = threading.Lock()
        self.unreadable = 0
        """Processes whose maps may not be read."""
        self.pending = 0
        """Processes that were not read yet, or ran since, because the round's bound was reached."""

    def begin_round(self, number: int) -> None:
        """Forget the last answer."""
        self._round = number
        self._found = None

    def scan(self) -> dict[int, tuple[SharedMapping, ...]]:
        """Shared mappings by pid, of processes with any. Raises SourceUnavailable while another thread hangs in it."""
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise SourceUnavailable(
                "the memory maps are still being read by another thread", "raise the interval between rounds"
            )
        try:
            if self._found is None:
                self._found = self._scan()
            return self._found
        finally:
            self._lock.release()

    def _scan(self) -> dict[int, tuple[SharedMapping, ...]]:
        kept_before = self._kept
        kept: dict[int, _Kept] = {}
        holders: list[int] = []
        others: list[int] = []
        processes = self._procfs.processes()
        with_segment_open = self._with_segment_open()
        for pid, stat in processes.items():
            if stat.kernel_thread or stat.state in "ZX":
                continue
            entry = kept_before.get(pid)
            if entry is None or entry.start != stat.start:
                entry = _Kept(stat.start)
            kept[pid] = entry
            if entry.stat is not stat and not entry.unreadable:
                if entry.mappings or pid in with_segment_open or self._has_shared_pages(pid):
                    holders.append(pid)
                    continue
                entry.stat = stat
            if entry.scanned < 0 or self._round - entry.scanned >= ROTATION:
                others.append(pid)
        self._kept = kept
        holders.sort(key=lambda pid: kept[pid].scanned)
        holders_left = self._read(holders, HOLDER_BYTES, processes)
        others.sort(key=lambda pid: (kept[pid].scanned, not self._parent_shares(processes[pid])))
        others_left = self._read(others, OTHERS_BYTES, processes)
        self.pending = len(holders_left) + sum(kept[pid].scanned < 0 for pid in others_left)
        self.unreadable = sum(entry.unreadable for entry in kept.values())
        return {pid: entry.mappings for pid, entry in kept.items() if entry.mappings}

    def _read(self, pids: list[int], budget: int, processes: dict[int, ProcStat]) -> list[int]:
        """Read the maps of ``pids`` while the budget lasts; those that were left."""
        for index, pid in enumerate(pids):
            if budget <= 0:
                return pids[index:]
            budget -= self._look(pid, processes[pid])
        return []

    def _look(self, pid: int, stat: ProcStat) -> int:
        """Read one process's maps; the bytes that it took."""
        entry = self._kept[pid]
        entry.stat, entry.scanned, entry.unreadable = stat, self._round, False
        try:
            raw = self._procfs.maps(pid)
        except PermissionError:
            entry.unreadable, entry.mappings = True, ()
            return 0
        except OSError:  # it ended
            entry.mappings = ()
            return 0
        entry.mappings = parse_shared(raw)
        return len(raw)

    def _has_shared_pages(self, pid: int) -> bool:
        try:
            status = self._procfs.status(pid)
        except OSError:
            return False
        shared = status.get("RssShmem", "unknown")  # Linux 4.5; before that, all count as holders
        return not (shared.startswith("0 ") and status.get("HugetlbPages", "0 ").startswith("0 "))

    def _parent_shares(self, stat: ProcStat) -> bool:
        parent = self._kept.get(stat.ppid)
        return parent is not None and bool(parent.mappings)

    def _with_segment_open(self) -> set[int]:
        paths = self._procfs.fds().paths
        return {
            ref.pid
            for path, refs in paths.items()
            if path.startswith(("/dev/shm/", "/memfd:"))  # noqa: S108 - compared, never written
            for ref in refs
        }
