"""ProcFs: /proc of one machine, each thing read at most once per round.

What cannot change while a process runs one program (command line, executable, owner, namespaces, cgroup) is kept by
(pid, start), read again when it executes another, and in turns every ``FACTS_ROUNDS`` rounds, since a process can also
change its owner, cgroup or title without that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.clock import Clock
from gpuflight.sources.fs import FileSystem
from gpuflight.sources.procfs.fds import FdIndex, FdScanner
from gpuflight.sources.procfs.machine import Machine
from gpuflight.sources.procfs.marks import TaskMarks
from gpuflight.sources.procfs.mounts import LocalPaths
from gpuflight.sources.procfs.stat import (
    Owner,
    ProcStat,
    parse_cgroup,
    parse_cmdline,
    parse_environ,
    parse_namespace,
    parse_owner,
    parse_stat,
    parse_status,
    parse_switches,
    printable,
)
from gpuflight.sources.procfs.users import Users

FACTS_ROUNDS = 12
"""Rounds after which what is kept about a process is read again, if it ran since."""

IDLE_FACTS_ROUNDS = 48
"""The same for a process that did not run: others may still move it to another cgroup or other CPUs."""

THREADS_ROUNDS = 4
"""Rounds for which the threads of a process that did not run are taken as unchanged."""

LOCK_TIMEOUT_S = 3.0
"""How long a caller waits for another thread's scan before it gives up its round."""


class _Known:
    """What is kept about one process from round to round."""

    __slots__ = (
        "facts",
        "facts_stat",
        "image",
        "raw",
        "stat",
        "stat_path",
        "thread_records",
        "threads",
        "threads_round",
        "threads_stat",
    )

    def __init__(self, stat_path: str, raw: bytes, stat: ProcStat) -> None:
        self.stat_path = stat_path
        self.raw = raw
        self.stat = stat
        self.image = stat.image
        self.facts: dict[str, Any] = {}
        self.facts_stat = stat  # the record when the facts were last dropped
        self.threads: list[ProcStat] = []
        self.thread_records: dict[str, tuple[bytes, ProcStat]] = {}
        self.threads_stat: ProcStat | None = None
        self.threads_round = -1  # the round in which they were last read


class ProcFs(Machine):
    """/proc through a ``FileSystem``. Methods about one pid raise OSError if it ended or may not be looked into."""

    def __init__(self, fs: FileSystem, clock: Clock, root: str = "/proc") -> None:
        super().__init__(fs, root)
        self.clock = clock
        self.vanished = 0
        """Processes that ended between being listed and being read, this round."""
        self.unreadable = 0
        """Processes whose ``stat`` could not be read or understood, this round."""
        self.refreshed: set[int] = set()
        """Pids of which what is kept was dropped this round, to be read again."""
        self.scanned_at_s = 0.0
        """When ``processes`` was read, by the monotonic clock, s: what rates are computed over."""
        self.marks: TaskMarks | None = None
        """Tells whose record need not be read again, where the kernel can tell; None: all are read."""
        self._round = 0
        self._generation = 0
        self._lock = threading.Lock()
        self._fd_lock = threading.Lock()
        self._known: dict[int, _Known] = {}
        self._processes: dict[int, ProcStat] | None = None
        self._index: FdIndex | None = None
        self._status: dict[int, dict[str, str]] = {}
        self._environ: dict[int, dict[str, str]] = {}
        self._own_namespaces: dict[str, int] = {}
        self._mounts = LocalPaths(self.mountinfo, lambda pid: self.namespace(pid, "mnt"))
        self._users = Users(fs)
        self._fds = FdScanner(fs, root, self._mounts)

    def begin_round(self, number: int) -> None:
        """Forget what was read for the last round. Never waits: a scan still under way then serves nobody else."""
        self._round = number
        self._generation += 1
        self._processes = None
        self._index = None
        self._status = {}
        self._environ = {}
        self._hostname = None
        self._cpu_info = None
        self._own_namespaces = {}
        if number % FACTS_ROUNDS == 0:
            self._mounts.forget()
            self._users.forget()

    def close(self) -> None:
        """Unload what tells who did nothing. May be called twice."""
        if self.marks is not None:
            self.marks.close()

    # --- all processes ---------------------------------------------------------------------------------------------

    def processes(self) -> dict[int, ProcStat]:
        """Every process by pid, in one pass per round. Do not change it.

        A process that ends meanwhile is skipped and counted. The value of a process whose record is byte for byte what
        it was in the round before is the very same object, so that ``is`` tells cheaply whether it did anything.
        """
        found = self._processes
        if found is not None:
            return found
        with _held(self._lock, "the processes of /proc"):
            if self._processes is not None:
                return self._processes
            generation = self._generation
            found = self._scan()
            if generation == self._generation:
                self._processes = found
            return found

    def _scan(self) -> dict[int, ProcStat]:
        root, read, before, turn = self.root, self.fs.read_record, self._known, self._round
        self.scanned_at_s = self.clock.monotonic_s()
        try:
            names = self.fs.listdir(root)
        except OSError as error:
            raise SourceUnavailable(f"{root} cannot be listed: {error.strerror}", "mount procfs there") from error
        quiet = self._quiet(len(before))
        known: dict[int, _Known] = {}
        processes: dict[int, ProcStat] = {}
        dropped: set[int] = set()
        vanished = unreadable = 0
        for name in names:
            if not name.isdecimal():
                continue
            pid = int(name)
            entry = before.get(pid)
            stat_path = entry.stat_path if entry is not None else f"{root}/{name}/stat"
            try:
                raw = entry.raw if entry is not None and pid in quiet else read(stat_path)
                if entry is None:
                    entry = _Known(stat_path, raw, parse_stat(raw))
                elif raw != entry.raw:
                    stat = parse_stat(raw)
                    if stat.start != entry.stat.start:  # the pid was given to another process
                        entry = _Known(stat_path, raw, stat)
                    else:
                        entry.raw, entry.stat = raw, stat
                        if (image := stat.image) != entry.image:
                            entry.image, entry.facts = image, {}
            except (FileNotFoundError, ProcessLookupError):
                vanished += 1
                continue
            except (OSError, ValueError):
                unreadable += 1
                continue
            if not (pid + turn) % FACTS_ROUNDS and (
                entry.facts_stat is not entry.stat or not (pid + turn) % IDLE_FACTS_ROUNDS
            ):
                entry.facts, entry.facts_stat = {}, entry.stat
                dropped.add(pid)
            known[pid] = entry
            processes[pid] = entry.stat
        self._known, self.vanished, self.unreadable, self.refreshed = known, vanished, unreadable, dropped
        return processes

    def _quiet(self, known_count: int) -> frozenset[int]:
        """Pids whose record is what it was when it was read last."""
        if self.marks is None:
            return frozenset()
        try:
            return self.marks.quiet(known_count, self.own_namespace("pid"))
        except (OSError, ValueError):
            return frozenset()

    def id_of(self, pid: int) -> str | None:
        """Id of the entity of a process that is alive in this round."""
        stat = self.processes().get(pid)
        return None if stat is None else stat.id

    def fds(self, verify_sockets: set[int] | None = None) -> FdIndex:
        """Who holds what open, scanned once per round (``FdIndex`` tells what is in it, ``fds.py`` how fresh it is).

        ``verify_sockets``: socket inodes that exist but that nobody owned in the index; they are looked for again.
        """
        index = self._index
        if index is not None and not verify_sockets:
            return index
        processes = self.processes()
        with _held(self._fd_lock, "the open descriptors of /proc"):
            generation = self._generation
            index = self._index
            if index is None:
                index = self._fds.scan(processes, self._round)
            if verify_sockets:
                index = self._fds.verify(verify_sockets, self._round)
            if generation == self._generation:
                self._index = index
            return index

    # --- one process -----------------------------------------------------------------------------------------------

    def cmdline(self, pid: int) -> list[str]:
        """Arguments as the process shows them, secrets and all: redact before reporting. Empty for kernel threads."""
        value: list[str] = self._fact(pid, "cmdline", lambda: parse_cmdline(self.fs.read(f"{self.root}/{pid}/cmdline")))
        return value

    def exe(self, pid: int) -> str:
        """Path of the executable, `` (deleted)`` appended if it was replaced."""
        value: str = self._fact(pid, "exe", lambda: printable(self.fs.readlink(f"{self.root}/{pid}/exe")))
        return value

    def uid(self, pid: int) -> int:
        """Effective user id."""
        return self._owner(pid).uid

    def nspids(self, pid: int) -> list[int]:
        """Its pid in each pid namespace it is in, from ours inwards; one entry for a process of ours (``NSpid``)."""
        return self._owner(pid).nspids or [pid]

    def cpus_allowed(self, pid: int) -> str:
        """CPUs its main thread may run on, in list format (``0-3,8``)."""
        return self._owner(pid).cpus_allowed

    def namespace(self, pid: int, kind: str) -> int:
        """Inode of a namespace of the process: ``net``, ``mnt``, ``pid``, ``ipc``, ``uts``, ``user``, ``cgroup``."""
        name = "ns " + kind
        known = self._known.get(pid)
        if known is not None and name in known.facts:  # asked several times per process and round
            found: int = known.facts[name]
            return found
        value: int = self._fact(pid, name, lambda: parse_namespace(self.fs.readlink(f"{self.root}/{pid}/ns/{kind}")))
        return value

    def user(self, uid: int) -> str | None:
        """Name of a user of this host by /etc/passwd; None for one of a directory service or of a container."""
        return self._users.name(uid)

    def own_namespace(self, kind: str) -> int:
        """The same of the gpuflight process, read once per round."""
        found = self._own_namespaces.get(kind)
        if found is None:
            found = self._own_namespaces[kind] = parse_namespace(self.fs.readlink(f"{self.root}/self/ns/{kind}"))
        return found

    def cgroup(self, pid: int) -> list[tuple[str, str]]:
        """(controllers, path) of each hierarchy; cgroup v2 has empty controllers."""
        value: list[tuple[str, str]] = self._fact(
            pid, "cgroup", lambda: parse_cgroup(self.fs.read(f"{self.root}/{pid}/cgroup"))
        )
        return value

    def status(self, pid: int) -> dict[str, str]:
        """The fields of /proc/PID/status, read once per round."""
        fields = self._status.get(pid)
        if fields is None:
            fields = parse_status(self.fs.read_record(f"{self.root}/{pid}/status"))
            if not fields:
                raise ProcessLookupError(f"process {pid} ended")
            self._status[pid] = fields
        return fields

    def environ(self, pid: int) -> dict[str, str]:
        """Environment the program was started with, read once per round; needs the right to trace it. Holds secrets:
        never report whole."""
        found = self._environ.get(pid)
        if found is None:
            found = self._environ[pid] = parse_environ(self.fs.read(f"{self.root}/{pid}/environ"))
        return found

    def threads(self, pid: int) -> list[ProcStat]:
        """The threads of a process (``pid`` of each is its tid), the main one included.

        Not read again while the process uses no CPU, except every ``THREADS_ROUNDS`` rounds; the very same list then.
        A thread whose record did not change is the very same object, as with ``processes``.
        """
        known = self._known.get(pid)
        if (
            known is not None
            and known.threads_stat is known.stat
            and ((pid + self._round) % THREADS_ROUNDS or known.threads_round == self._round)
        ):
            return known.threads
        directory = f"{self.root}/{pid}/task"
        before = known.thread_records if known is not None else {}
        records: dict[str, tuple[bytes, ProcStat]] = {}
        for name in self.fs.listdir(directory):
            try:
                raw = self.fs.read_record(f"{directory}/{name}/stat")
                record = before.get(name)
                records[name] = record if record is not None and record[0] == raw else (raw, parse_stat(raw))
            except (OSError, ValueError):  # that thread ended
                continue
        threads = [stat for _, stat in records.values()]
        if known is not None:
            if records == before and known.threads_stat is not None:
                threads = known.threads
            known.threads, known.thread_records, known.threads_stat = threads, records, known.stat
            known.threads_round = self._round
        return threads

    def switches(self, pid: int) -> dict[int, tuple[int, int]]:
        """(voluntary, involuntary) context switches of each thread by tid since it started. One file per thread."""
        counts = {}
        directory = f"{self.root}/{pid}/task"
        for name in self.fs.listdir(directory):
            try:
                counts[int(name)] = parse_switches(self.fs.read_record(f"{directory}/{name}/status"))
            except (OSError, ValueError):  # that thread ended
                continue
        return counts

    def run_delay_ns(self, pid: int, tid: int) -> int:
        """Time a thread has waited for a CPU while it could run, ns since it started (/proc/…/schedstat, 2nd field)."""
        return int(self.fs.read_record(f"{self.root}/{pid}/task/{tid}/schedstat").split()[1])

    # --- raw files -------------------------------------------------------------------------------------------------

    def maps(self, pid: int) -> bytes:
        """/proc/PID/maps."""
        return self.fs.read(f"{self.root}/{pid}/maps")

    def numa_maps(self, pid: int) -> bytes:
        """/proc/PID/numa_maps; walks the page tables of the process: expensive for large ones."""
        return self.fs.read(f"{self.root}/{pid}/numa_maps")

    def mountinfo(self, pid: int | str = "self") -> bytes:
        """/proc/PID/mountinfo."""
        return self.fs.read(f"{self.root}/{pid}/mountinfo")

    def net(self, pid: int | str, name: str) -> bytes:
        """/proc/PID/net/name: of the network namespace of that process."""
        return self.fs.read(f"{self.root}/{pid}/net/{name}")

    def io(self, pid: int) -> dict[str, int]:
        """/proc/PID/io: bytes and calls since the process started; needs the right to trace it."""
        return {key: int(value) for key, value in parse_status(self.fs.read_record(f"{self.root}/{pid}/io")).items()}

    def descriptor_limit(self, pid: int) -> int:
        """How many descriptors a process may have open (soft limit), -1 for any number. Raises OSError, ValueError."""
        for line in self.fs.read_record(f"{self.root}/{pid}/limits").decode("ascii", "replace").split("\n"):
            if line.startswith("Max open files"):
                soft = line.split()[3]
                return -1 if soft == "unlimited" else int(soft)
        raise ValueError("no limit of open files among the limits")

    def hides_processes(self) -> bool:
        """Whether /proc is mounted so that one sees only one's own processes (``hidepid``)."""
        try:
            mounts = self.mountinfo().decode("utf-8", "replace").split("\n")
        except OSError:
            return False
        mount = [line for line in mounts if line.split(" ")[4:5] == [self.root]][-1:]
        return any("hidepid=" in line and not any(f"hidepid={off}" in line for off in ("0", "off")) for line in mount)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _fact(self, pid: int, name: str, read: Callable[[], Any]) -> Any:
        known = self._known.get(pid)
        if known is None:
            return read()
        facts = known.facts
        if name not in facts:
            facts[name] = read()
        return facts[name]

    def _owner(self, pid: int) -> Owner:
        value: Owner = self._fact(pid, "owner", lambda: parse_owner(self.fs.read_record(f"{self.root}/{pid}/status")))
        return value


@contextmanager
def _held(lock: threading.Lock, what: str) -> Iterator[None]:
    if not lock.acquire(timeout=LOCK_TIMEOUT_S):
        raise SourceUnavailable(f"{what} are still being read by another thread", "raise the interval between rounds")
    try:
        yield
    finally:
        lock.release()
