"""A /proc in memory: processes are added, run, execute, end; every question asked of it is counted."""

from __future__ import annotations

import errno
import os
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

from gpuflight.sources.clock import ManualClock
from gpuflight.sources.fs import Stat, StatVfs
from gpuflight.sources.procfs import ProcFs

KERNEL_THREAD = 0x00200000
FIFO = 0o010600
REGULAR = 0o100600


class FakeFs:
    """A FileSystem of dictionaries; ``on_read`` is called with each path just before it is read."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.links: dict[str, str] = {}
        self.modes: dict[str, int] = {}  # of links, for lstat
        self.targets: dict[str, Stat] = {}  # of links, for stat
        self.sizes: dict[str, int] = {}  # of directories
        self.denied: set[str] = set()
        self.asked: Counter[tuple[str, str]] = Counter()
        self.on_read: Callable[[str], None] = lambda path: None

    def _ask(self, what: str, path: str) -> None:
        self.asked[what, path] += 1
        if any(path == denied or path.startswith(denied + "/") for denied in self.denied):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    def read(self, path: str) -> bytes:
        self._ask("read", path)
        self.on_read(path)
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.files[path]

    read_record = read

    def listdir(self, path: str) -> list[str]:
        self._ask("list", path)
        prefix = path.rstrip("/") + "/"
        names = dict.fromkeys(
            name[len(prefix) :].split("/", 1)[0]
            for name in [*self.files, *self.links, *self.sizes]
            if name.startswith(prefix)
        )
        if not names and path not in self.sizes:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return list(names)

    def readlink(self, path: str) -> str:
        self._ask("link", path)
        if path not in self.links:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return self.links[path]

    def realpath(self, path: str) -> str:
        return path

    def stat(self, path: str) -> Stat:
        self._ask("stat", path)
        if path in self.targets:
            return self.targets[path]
        if path in self.sizes:
            return Stat(0o040500, 1, 1, 0, 0, self.sizes[path])
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def lstat(self, path: str) -> Stat:
        self._ask("lstat", path)
        if path not in self.links:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return Stat(0o120000 | self.modes.get(path, 0o700), 1, 1, 0, 0, 64)

    def statvfs(self, path: str) -> StatVfs:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def count(self, what: str, ending: str = "", beginning: str = "") -> int:
        """How often something was asked of the paths that begin and end like that."""
        return sum(
            number
            for (asked, path), number in self.asked.items()
            if asked == what and path.endswith(ending) and path.startswith(beginning)
        )


class FakeProc:
    """Writes the files of processes into a ``FakeFs``. ``procfs`` reads them; ``next_round`` lets 1 s pass."""

    def __init__(self) -> None:
        self.fs = FakeFs()
        self.clock = ManualClock()
        self.procfs = ProcFs(self.fs, self.clock)
        self.round = 0
        self.processes: dict[int, dict[str, Any]] = {}
        self.kernel_counts_fds = True  # Linux 6.2
        self.fs.files["/proc/self/auxv"] = struct.pack("=QQQQQQ", 6, 4096, 17, 100, 0, 0)
        self.fs.files["/proc/self/mountinfo"] = (
            b"1 0 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / /proc rw - proc proc rw\n"
        )
        self.fs.files["/proc/sys/kernel/hostname"] = b"node1\n"
        self.fs.files["/etc/passwd"] = b"root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000:Ann:/home/ann:/bin/sh\n"
        for kind in ("net", "mnt", "pid", "ipc"):
            self.fs.links[f"/proc/self/ns/{kind}"] = f"{kind}:[1]"

    def next_round(self, seconds: float = 1.0) -> ProcFs:
        """Begin another round, ``seconds`` after the last."""
        self.round += 1
        if self.round > 1:
            self.clock.advance(seconds)
        self.procfs.begin_round(self.round)
        return self.procfs

    def add(
        self,
        pid: int,
        comm: str | bytes = "app",
        ppid: int = 1,
        start: int = 0,
        argv: list[str] | None = None,
        uid: int = 0,
        netns: int = 1,
        threads: int = 1,
        **fields: int | str,
    ) -> None:
        """A new process; ``fields``: flags, utime, stime, minflt, majflt, rss, state, start_stack, processor."""
        self.processes[pid] = {
            "comm": comm.encode() if isinstance(comm, str) else comm,
            "ppid": ppid,
            "start": start or pid * 10,
            "threads": threads,
            "uid": uid,
            **fields,
        }
        root = f"/proc/{pid}"
        name = comm if isinstance(comm, str) else comm.decode("utf-8", "replace")
        argv = argv if argv is not None else [name]
        if fields.get("flags") == KERNEL_THREAD:
            argv = []
        self.fs.files[f"{root}/cmdline"] = "".join(argument + "\0" for argument in argv).encode()
        self.fs.files[f"{root}/cgroup"] = f"0::/system.slice/{pid}.service\n".encode()
        self.fs.files[f"{root}/mountinfo"] = self.fs.files["/proc/self/mountinfo"]
        self.fs.files[f"{root}/io"] = b"rchar: 1\nread_bytes: 0\nwrite_bytes: 0\n"
        self.fs.links[f"{root}/exe"] = f"/usr/bin/{name}"
        self.fs.links[f"{root}/ns/net"] = f"net:[{netns}]"
        self.fs.links[f"{root}/ns/mnt"] = "mnt:[1]"
        self.fs.sizes[f"{root}/fd"] = 0
        self._write(pid)
        self.fs.files[f"{root}/status"] = (
            f"Name:\t{name}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nNSpid:\t{pid}\nCpus_allowed_list:\t0-3\n"
            "voluntary_ctxt_switches:\t0\nnonvoluntary_ctxt_switches:\t0\n"
        ).encode()

    def change(self, pid: int, **fields: Any) -> None:
        """Set fields of a process's ``stat`` record."""
        self.processes[pid].update(fields)
        self._write(pid)

    def end(self, pid: int) -> None:
        """The process is gone with all its files."""
        del self.processes[pid]
        root = f"/proc/{pid}/"
        for files in (self.fs.files, self.fs.links, self.fs.sizes, self.fs.modes, self.fs.targets):
            for path in [path for path in files if path.startswith(root)]:
                del files[path]  # type: ignore[attr-defined]

    def open(self, pid: int, fd: int, target: str, mode: int = 0o700, inode: int = 0, kind: int = REGULAR) -> None:
        """A descriptor. ``mode``: 0o500 for reading, 0o300 for writing; ``inode`` and ``kind`` of a file."""
        path = f"/proc/{pid}/fd/{fd}"
        new = path not in self.fs.links
        self.fs.links[path] = target
        self.fs.modes[path] = mode
        if inode:
            self.fs.targets[path] = Stat(kind, inode, 5, 0, 0, 0)
        if new and self.kernel_counts_fds:
            self.fs.sizes[f"/proc/{pid}/fd"] += 1

    def close(self, pid: int, fd: int) -> None:
        """Close a descriptor."""
        del self.fs.links[f"/proc/{pid}/fd/{fd}"]
        if self.kernel_counts_fds:
            self.fs.sizes[f"/proc/{pid}/fd"] -= 1

    def thread(self, pid: int, tid: int, comm: str = "worker", delay_ns: int = 0, **fields: Any) -> None:
        """A thread of a process, or what changed of it."""
        record = {"comm": comm.encode(), "ppid": 1, "start": tid * 10, "threads": 1, **fields}
        self.fs.files[f"/proc/{pid}/task/{tid}/stat"] = stat_record(tid, record)
        self.fs.files[f"/proc/{pid}/task/{tid}/schedstat"] = f"1 {delay_ns} 1\n".encode()

    def switches(self, pid: int, tid: int, voluntary: int, involuntary: int) -> None:
        """Context switches of a thread since its start."""
        self.fs.files[f"/proc/{pid}/task/{tid}/status"] = (
            f"Name:\tx\nvoluntary_ctxt_switches:\t{voluntary}\nnonvoluntary_ctxt_switches:\t{involuntary}\n".encode()
        )

    def _write(self, pid: int) -> None:
        self.fs.files[f"/proc/{pid}/stat"] = stat_record(pid, self.processes[pid])


def stat_record(pid: int, fields: dict[str, Any]) -> bytes:
    """A record as the kernel writes it, of 52 fields."""
    values: list[Any] = [0] * 50
    values[0] = fields.get("state", "S")
    values[1] = fields["ppid"]
    values[2] = values[3] = pid
    values[6] = fields.get("flags", 0x400000)
    values[7] = fields.get("minflt", 0)
    values[9] = fields.get("majflt", 0)
    values[11] = fields.get("utime", 0)
    values[12] = fields.get("stime", 0)
    values[17] = fields["threads"]
    values[19] = fields["start"]
    values[21] = fields.get("rss", 100)
    values[25] = fields.get("start_stack", 140_000)
    values[36] = fields.get("processor", 0)
    return b"%d (%s) %s\n" % (pid, fields["comm"], " ".join(map(str, values)).encode())
