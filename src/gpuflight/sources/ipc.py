"""Ipc: System V objects, POSIX message queues, and shared memory with all who use it.

/proc/sysvipc and semctl(2) answer for the IPC namespace of the gpuflight process and nothing else; there is no file
through which another namespace's System V tables can be read. Segments that are mapped and queues that are open in
other namespaces are found all the same, through their users.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from typing import NamedTuple

import msgspec

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.fs import FileSystem
from gpuflight.sources.maps import SharedMaps
from gpuflight.sources.mqueues import MessageQueueFiles, PosixQueue
from gpuflight.sources.procfs import ProcFs
from gpuflight.sources.recording import Tape
from gpuflight.sources.segments import (
    Segment,
    SegmentKey,
    SemaphoreState,
    ShmFile,
    ShmMount,
    join,
    list_files,
    mount,
    semaphore_state,
    size_bytes,
)

SEMAPHORES_PER_ROUND = 4096
"""Most semaphores asked for their last user in one round (about 1 µs each)."""

_GETPID = 11  # <linux/sem.h>

# (syscall number, by architecture) → what a process blocked in it waits for; the first argument is the object's id.
_WAITS = {
    "x86_64": {65: ("sem", "operate"), 220: ("sem", "operate"), 69: ("msg", "send"), 70: ("msg", "receive")},
    "aarch64": {193: ("sem", "operate"), 192: ("sem", "operate"), 189: ("msg", "send"), 188: ("msg", "receive")},
}


class SysvSharedMemory(NamedTuple):
    """A line of /proc/sysvipc/shm. Times are s since the epoch, 0 for never."""

    shmid: int
    key: int
    permissions: int
    size_bytes: int
    creator_pid: int
    last_pid: int
    attached: int
    uid: int
    attached_at_s: int
    changed_at_s: int
    resident_bytes: int | None
    swapped_bytes: int | None


class SysvQueue(NamedTuple):
    """A line of /proc/sysvipc/msg; pids as this process's pid namespace has them, 0 for none or one outside of it."""

    msqid: int
    key: int
    permissions: int
    queued_bytes: int
    messages: int
    last_sender: int
    last_receiver: int
    uid: int
    sent_at_s: int
    received_at_s: int


class SysvSemaphores(NamedTuple):
    """A line of /proc/sysvipc/sem."""

    semid: int
    key: int
    permissions: int
    semaphores: int
    uid: int
    operated_at_s: int


class Wait(NamedTuple):
    """A process whose main thread is blocked on a System V object: ``what`` is operate, send or receive."""

    pid: int
    what: str


class Ipc:
    """Inter-process communication of one machine. Each table is read at most once per round."""

    def __init__(self, fs: FileSystem, procfs: ProcFs, tape: Tape | None = None) -> None:
        self._fs = fs
        self._procfs = procfs
        self._tape = tape if tape is not None else Tape()
        self.maps = SharedMaps(procfs)
        self._tables: dict[str, list[dict[str, int]]] = {}
        self._queues: dict[tuple[int, int], PosixQueue] | None = None
        self._mqueues = MessageQueueFiles(fs, procfs, self.ipc_namespace)
        self._waits: dict[tuple[str, int], list[Wait]] | None = None
        self._semctl_left = SEMAPHORES_PER_ROUND
        self._own_namespace = 0
        self._foreign: dict[int, int] | None = None
        self._segments: dict[SegmentKey, Segment] | None = None
        self._files: tuple[dict[tuple[int, int], ShmFile], int] | None = None

    def begin_round(self, number: int) -> None:
        """Forget what was read for the last round."""
        self.maps.begin_round(number)
        self._tables = {}
        self._queues = None
        self._waits = None
        self._foreign = None
        self._segments = None
        self._files = None
        self._semctl_left = SEMAPHORES_PER_ROUND

    # --- System V ----------------------------------------------------------------------------------------------------

    def sysv_shared_memory(self) -> dict[int, SysvSharedMemory]:
        """Segments by shmid. Raises OSError (FileNotFoundError: a kernel without System V IPC)."""
        return {
            row["shmid"]: SysvSharedMemory(
                row["shmid"],
                row["key"],
                row["perms"],
                row["size"],
                row["cpid"],
                row["lpid"],
                row["nattch"],
                row["uid"],
                row["atime"],
                row["ctime"],
                row.get("rss"),
                row.get("swap"),
            )
            for row in self._table("shm")
        }

    def sysv_queues(self) -> dict[int, SysvQueue]:
        """Message queues by msqid. Raises OSError."""
        return {
            row["msqid"]: SysvQueue(
                row["msqid"],
                row["key"],
                row["perms"],
                row["cbytes"],
                row["qnum"],
                row["lspid"],
                row["lrpid"],
                row["uid"],
                row["stime"],
                row["rtime"],
            )
            for row in self._table("msg")
        }

    def sysv_queue_limit_bytes(self) -> int | None:
        """How many bytes a System V queue may hold, unless whoever made it chose otherwise (msgmnb); None: not told."""
        try:
            return int(self._fs.read_record("/proc/sys/kernel/msgmnb"))
        except (OSError, ValueError):
            return None

    def sysv_semaphores(self) -> dict[int, SysvSemaphores]:
        """Semaphore sets by semid. Raises OSError."""
        return {
            row["semid"]: SysvSemaphores(row["semid"], row["key"], row["perms"], row["nsems"], row["uid"], row["otime"])
            for row in self._table("sem")
        }

    def semaphore_pids(self, semid: int, count: int) -> list[int]:
        """For each semaphore of a set the pid that operated on it last, 0 for none; semctl(2) GETPID.

        Shorter than ``count`` if that would pass the round's bound. Raises OSError (PermissionError: another user's
        set), SourceUnavailable (not in the recording, or the bound is used up).
        """
        count = min(count, self._semctl_left)
        if count <= 0:
            raise SourceUnavailable(f"there are more than {SEMAPHORES_PER_ROUND} System V semaphores")
        self._semctl_left -= count
        raw = self._tape.ask("ipc", f"sem_pids {semid}", lambda: msgspec.msgpack.encode(_semaphore_pids(semid, count)))
        return msgspec.msgpack.decode(raw, type=list[int])

    def waits(self) -> dict[tuple[str, int], list[Wait]]:
        """Who is blocked on which System V object of our namespace: (``sem`` | ``msg``, id) → processes.

        From /proc/PID/syscall, which needs the right to trace the process; of the main thread only. Processes that may
        not be asked are left out.
        """
        if self._waits is None:
            self._waits = {}
            calls = _WAITS.get(self._architecture(), {})
            exists = bool(self._rows("msg") or self._rows("sem"))
            for pid, stat in self._procfs.processes().items() if exists and calls else ():
                if stat.state != "S" or stat.kernel_thread:
                    continue
                try:
                    fields = self._fs.read_record(f"/proc/{pid}/syscall").split()
                    call = calls.get(int(fields[0])) if len(fields) > 2 else None
                    if call is not None and self.ipc_namespace(pid) == 0:
                        self._waits.setdefault((call[0], int(fields[1], 16)), []).append(Wait(pid, call[1]))
                except (OSError, ValueError):
                    continue
        return self._waits

    def _architecture(self) -> str:
        try:
            return self._procfs.text("sys/kernel/arch")  # Linux 6.1
        except OSError:
            return platform.machine()

    def _rows(self, name: str) -> list[dict[str, int]]:
        try:
            return self._table(name)
        except OSError:
            return []

    def _table(self, name: str) -> list[dict[str, int]]:
        rows = self._tables.get(name)
        if rows is None:
            rows = self._tables[name] = parse_sysvipc(self._fs.read(f"/proc/sysvipc/{name}"))
        return rows

    # --- shared memory ------------------------------------------------------------------------------------------------

    def segments(self) -> dict[SegmentKey, Segment]:
        """Every shared memory object that a process maps or has open. Raises SourceUnavailable."""
        if self._segments is None:
            self._segments = join(self.maps.scan(), self._procfs.fds(), self.ipc_namespace)
        return self._segments

    def size_of(self, segment: Segment) -> int | None:
        """Size of a segment of ``segments``, bytes; None if nothing here answers for it."""
        return size_bytes(self._fs, segment)

    def semaphore_state(self, segment: Segment) -> SemaphoreState | None:
        """Value and waiters of a POSIX named semaphore among ``segments``; None if its memory may not be read."""
        return semaphore_state(self._fs, segment)

    def shm_files(self) -> dict[tuple[int, int], ShmFile]:
        """The files in our own /dev/shm by (device, inode); ``shm_files_left`` more were not looked at."""
        if self._files is None:
            self._files = list_files(self._fs)
        return self._files[0]

    @property
    def shm_files_left(self) -> int:
        """Files of /dev/shm beyond the bound of one round."""
        return self._files[1] if self._files else 0

    def shm_mount(self, pid: int | None = None) -> ShmMount | None:
        """Space of the /dev/shm that ``pid`` sees (None: gpuflight itself); None without one. Raises OSError."""
        return mount(self._fs, pid)

    # --- namespaces --------------------------------------------------------------------------------------------------

    def ipc_namespace(self, pid: int) -> int:
        """Inode of a process's IPC namespace; 0 if it is our own. Raises OSError without the right to trace it."""
        if not self._own_namespace:
            self._own_namespace = self._procfs.own_namespace("ipc")
        namespace = self._procfs.namespace(pid, "ipc")
        return 0 if namespace == self._own_namespace else namespace

    def foreign_namespaces(self) -> dict[int, int]:
        """Other IPC namespaces → how many processes live in each, of those that may be asked."""
        if self._foreign is not None:
            return self._foreign
        found: dict[int, int] = {}
        for pid, stat in self._procfs.processes().items():
            if stat.kernel_thread:
                continue
            try:
                namespace = self.ipc_namespace(pid)
            except OSError:
                continue
            if namespace:
                found[namespace] = found.get(namespace, 0) + 1
        self._foreign = found
        return found

    # --- POSIX message queues ----------------------------------------------------------------------------------------

    def posix_queues(self) -> dict[tuple[int, int], PosixQueue]:
        """POSIX message queues by (device, inode): those that a process has open, and those in /dev/mqueue."""
        if self._queues is None:
            self._queues = self._mqueues.queues()
        return self._queues


def parse_sysvipc(raw: bytes) -> list[dict[str, int]]:
    """A table of /proc/sysvipc by column name; ``perms`` is octal. A line that is cut short or no row is left out."""
    header, *lines = raw.decode("ascii", "replace").split("\n")
    names = header.split()
    rows = []
    for line in lines if names[:1] == ["key"] else ():
        values = line.split()
        if len(values) != len(names):
            continue
        try:
            row = {name: int(value, 8 if name == "perms" else 10) for name, value in zip(names, values, strict=True)}
        except ValueError:
            continue
        rows.append(row)
    return rows


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _semaphore_pids(semid: int, count: int) -> list[int]:
    semctl = _libc().semctl
    pids = []
    for number in range(count):
        pid = semctl(semid, number, _GETPID)
        if pid < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        pids.append(pid)
    return pids
