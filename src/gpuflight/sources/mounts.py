"""Mount tables, the space on file systems asked without hanging on a dead server, and NFS statistics."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable

from msgspec import Struct

from gpuflight.sources.clock import Clock
from gpuflight.sources.fs import FileSystem, StatVfs
from gpuflight.sources.procfs.mounts import LOCAL_TYPES, unescape

REMOTE_TYPES = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "wekafs", "9p", "virtiofs", "afs", "orangefs")
)
"""Types served by another machine (or by the hypervisor). Every fuse type counts too: its server may be dead."""


class MountEntry(Struct, gc=False, frozen=True):
    """One line of mountinfo (proc_pid_mountinfo(5)). ``device`` is ``major:minor``, ``root`` the part of the file
    system that is mounted here, ``options`` those of this mount and then those of the file system."""

    device: str
    root: str
    path: str
    options: str
    fstype: str
    source: str

    @property
    def remote(self) -> bool:
        """Whether another machine, or a process, must answer for it."""
        return self.fstype in REMOTE_TYPES or self.fstype.startswith("fuse")

    @property
    def local(self) -> bool:
        """Whether its kernel driver alone answers."""
        return self.fstype in LOCAL_TYPES


class NfsStats(Struct, gc=False):
    """Totals of one NFS mount since it was mounted: per operation (requests, transmissions, timeouts, ms queued, ms
    round trip, ms until done), and bytes read from and written to the server."""

    operations: dict[str, tuple[int, int, int, int, int, int]]
    read_bytes: int
    written_bytes: int


def parse_mountinfo(data: bytes) -> list[MountEntry]:
    """Every mount, in order; of several on one path only the last, which covers the others.

    Paths are as os functions take them (surrogateescape).
    """
    found: dict[str, MountEntry] = {}
    for line in data.decode("utf-8", "surrogateescape").split("\n"):
        fields, dash, rest = line.partition(" - ")
        columns = fields.split(" ")
        tail = rest.split(" ")
        if not dash or len(columns) < 6 or len(tail) < 2:
            continue
        path = unescape(columns[4])
        options = columns[5] + ("," + tail[2] if len(tail) > 2 else "")
        found.pop(path, None)
        found[path] = MountEntry(columns[2], unescape(columns[3]), path, options, tail[0], unescape(tail[1]))
    return list(found.values())


def parse_mountstats(data: bytes) -> dict[str, NfsStats]:
    """/proc/self/mountstats by mount path, NFS mounts only (net/sunrpc/stats.c, fs/nfs/super.c)."""
    found: dict[str, NfsStats] = {}
    current: NfsStats | None = None
    in_operations = False
    for line in data.decode("utf-8", "surrogateescape").split("\n"):
        if line.startswith("device "):
            before, _, after = line.partition(" mounted on ")
            path, _, kind = after.partition(" with fstype ")
            current = None
            in_operations = False
            if before and kind.split(" ")[0] in ("nfs", "nfs4"):
                current = found[unescape(path)] = NfsStats({}, 0, 0)
            continue
        if current is None:
            continue
        name, colon, rest = line.strip().partition(":")
        if not colon:
            in_operations = in_operations or line.strip() == "per-op statistics"
            continue
        try:
            if in_operations:
                # requests, transmissions, timeouts, bytes sent and received, then ms: queued, round trip, until done
                value = [int(word) for word in rest.split()]
                if len(value) >= 8:
                    current.operations[name] = (value[0], value[1], value[2], value[5], value[6], value[7])
            elif name == "bytes":
                # normal read, normal written, direct read, direct written, server read, server written, pages …
                value = [int(word) for word in rest.split()]
                current.read_bytes, current.written_bytes = value[4], value[5]
        except (ValueError, IndexError):
            continue
    return found


class Mounts:
    """The mount table of a process, and what /proc says about files that processes have on mounts."""

    def __init__(self, fs: FileSystem, root: str = "/proc") -> None:
        self._fs = fs
        self._root = root

    def table(self, pid: int | str = "self") -> list[MountEntry]:
        """Mounts as a process sees them. Raises OSError."""
        return parse_mountinfo(self._fs.read(f"{self._root}/{pid}/mountinfo"))

    def nfs_stats(self) -> dict[str, NfsStats]:
        """Statistics of our own namespace's NFS mounts by path; empty where the kernel has none."""
        try:
            return parse_mountstats(self._fs.read(f"{self._root}/self/mountstats"))
        except OSError:
            return {}

    def working_directory(self, pid: int) -> str:
        """Where a process works; asks no file server. Raises OSError."""
        return self._fs.readlink(f"{self._root}/{pid}/cwd")

    def open_paths(self, pid: int, limit: int) -> tuple[list[str], int]:
        """Link targets of at most ``limit`` descriptors, and how many were left out. Raises OSError."""
        base = f"{self._root}/{pid}/fd"
        names = self._fs.listdir(base)
        paths = []
        for name in names[:limit]:
            try:
                target = self._fs.readlink(f"{base}/{name}")
            except OSError:
                continue  # closed meanwhile
            if target.startswith("/"):
                paths.append(target)
        return paths, max(0, len(names) - limit)

    def is_directory(self, path: str) -> bool:
        """Whether a path on a local file system is a directory."""
        try:
            return self._fs.stat(path).mode & 0o170000 == 0o040000
        except OSError:
            return False


class _Question:
    """One statvfs under way or answered."""

    __slots__ = ("answer", "began_s", "thread")

    def __init__(self, thread: threading.Thread | None, began_s: float) -> None:
        self.thread = thread
        self.began_s = began_s
        self.answer: StatVfs | OSError | None = None


class SpaceWatch:
    """Asks file systems for their space, and gives up on those that do not answer.

    A local file system is asked directly. Any other in a thread of its own; the threads of one round share one
    deadline. While a question hangs, no second one is asked about that mount: a dead server holds one thread, however
    long it is dead (it sits in the kernel and cannot be ended).
    """

    def __init__(self, fs: FileSystem, clock: Clock, deadline_s: float) -> None:
        self._fs = fs
        self._clock = clock
        self._deadline_s = deadline_s
        self._questions: dict[str, _Question] = {}
        self._answered = threading.Condition()

    def ask(self, mounts: Iterable[MountEntry]) -> dict[str, StatVfs | OSError | float]:
        """By path: the space, the error, or for how many s there has been no answer."""
        now_s = self._clock.monotonic_s()
        found: dict[str, StatVfs | OSError | float] = {}
        asked: dict[str, _Question] = {}
        fresh = []
        for mount in mounts:
            if mount.local:
                try:
                    found[mount.path] = self._fs.statvfs(mount.path)
                except OSError as error:
                    found[mount.path] = error
                continue
            question = self._questions.pop(mount.path, None)
            if question is None:
                question = self._start(mount.path, now_s)
                fresh.append(question)
            asked[mount.path] = question
        # A mount that went away while its question hangs keeps its thread on the books until that ends.
        hanging = {path: question for path, question in self._questions.items() if question.answer is None}
        self._questions = {**hanging, **asked}
        with self._answered:
            self._answered.wait_for(
                lambda: all(question.answer is not None for question in fresh), timeout=self._deadline_s
            )
            for path, question in asked.items():
                if question.answer is None:
                    found[path] = now_s - question.began_s if question not in fresh else self._deadline_s
                else:
                    found[path] = question.answer
                    del self._questions[path]
        return found

    @property
    def hanging_count(self) -> int:
        """Threads that wait for an answer."""
        with self._answered:
            return sum(question.answer is None for question in self._questions.values())

    def _start(self, path: str, now_s: float) -> _Question:
        question = _Question(None, now_s)

        def work() -> None:
            answer: StatVfs | OSError
            try:
                answer = self._fs.statvfs(path)
            except OSError as error:
                answer = error
            except Exception as error:  # noqa: BLE001 - a thread that ends without an answer would pass for a dead server
                answer = OSError(errno.EIO, f"{type(error).__name__}: {error}")
            with self._answered:
                question.answer = answer
                self._answered.notify_all()

        question.thread = threading.Thread(target=work, name=f"statvfs {path}", daemon=True)
        question.thread.start()
        return question
