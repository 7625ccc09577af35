"""Who holds what open: /proc/PID/fd of every process, kept between rounds so that little of it is read again.

Reading one link costs 2–3 µs and a busy server holds thousands, so a table per (pid, start) is kept; each round reads

* every link of a process seen for the first time, and of one that visibly ran (its ``stat`` record changed) or holds
  more or fewer descriptors than before;
* of a process with more than ``LARGE`` descriptors that ran: the new numbers, and 1/``ROTATION`` of the known ones;
* nothing of a process that neither ran a clock tick nor faulted and holds as many descriptors as before (``st_size`` of
  the directory, Linux 6.2, looked at every other round), except every ``IDLE_ROTATION``-th round.

So a descriptor number that was closed and reused can be reported as what it was for at most ``ROTATION`` rounds in a
process with more than ``LARGE``, for ``IDLE_ROTATION`` in one that did all that within a tick, and in no other; a new
number in such an idle process is seen one round late. ``verify`` closes even that gap for sockets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gpuflight.sources.fs import FileSystem
from gpuflight.sources.procfs.mounts import LocalPaths
from gpuflight.sources.procfs.stat import ProcStat, printable

LARGE = 512
"""Descriptors above which a process's known links are read again in turns instead of every round."""

ROTATION = 8
"""Rounds in which every known link of a process that runs has been read again at least once."""

IDLE_ROTATION = 16
"""The same for a process that does not."""

VERIFY_LINKS = 20_000
"""Most links that ``verify`` reads in one round (about 60 ms); a tenth where some processes may not be looked into."""

_SOCKET, _PIPE, _PATH, _ANON, _OTHER = range(5)
_BORING = frozenset(("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx"))
_FILES_IN_DEV = ("/dev/shm/", "/dev/mqueue/", "/dev/hugepages/")  # noqa: S108 - compared, never written
_FILE_TYPE = 0o170000
_FIFO = 0o010000


class FdRef(NamedTuple):
    """One open descriptor. The access mode is read for pipes, fifos and the files of ``paths``."""

    pid: int
    fd: int
    readable: bool
    writable: bool


Inode = tuple[int, int]
"""(device, inode) of a file: what is the same file for two processes, whatever they call it."""


class _Entry(NamedTuple):
    """What one descriptor was found to be."""

    target: str
    kind: int
    key: int | str
    ref: FdRef
    inode: Inode | None = None
    fifo: bool = False


class FdIndex:
    """Every interesting descriptor of every process that may be looked at, in one round. Read only.

    ``sockets`` and ``pipes`` go by inode. ``paths`` goes by link target: devices (not ttys, /dev/null and the like),
    ``/memfd:…``, POSIX message queues (``/name``), /dev/shm, fifos, deleted files; ``inodes`` says which file a
    descriptor of ``paths`` really is (where that can be asked without touching a remote file system). ``fifos`` goes by
    that inode, with the names in ``fifo_paths``. ``anon`` counts the anonymous ones (``eventfd``, ``eventpoll`` …) per
    process. ``counts`` is the number of open descriptors by pid. ``unreadable_pids`` is how many processes could not
    be looked into.
    """

    __slots__ = ("anon", "counts", "fifo_paths", "fifos", "inodes", "paths", "pipes", "sockets", "unreadable_pids")

    def __init__(self) -> None:
        self.sockets: dict[int, tuple[FdRef, ...]] = {}
        self.pipes: dict[int, list[FdRef]] = {}
        self.paths: dict[str, list[FdRef]] = {}
        self.fifos: dict[Inode, list[FdRef]] = {}
        self.fifo_paths: dict[Inode, str] = {}
        self.inodes: dict[FdRef, Inode] = {}
        self.anon: dict[str, dict[int, int]] = {}
        self.counts: dict[int, int] = {}
        self.unreadable_pids = 0

    def holders(self, prefixes: tuple[str, ...]) -> set[int]:
        """The pids that hold a path open that begins with one of ``prefixes``, e.g. ``/dev/nvidia``."""
        return {ref.pid for path, refs in self.paths.items() if path.startswith(prefixes) for ref in refs}

    def add(self, own_sockets: dict[int, tuple[FdRef, ...]], others: Iterable[_Entry]) -> None:
        """Put one process's descriptors in."""
        sockets, pipes, paths = self.sockets, self.pipes, self.paths
        if sockets.keys().isdisjoint(own_sockets.keys()):
            sockets.update(own_sockets)
        else:  # inherited over a fork, or sent
            for inode_number, refs in own_sockets.items():
                sockets[inode_number] = sockets.get(inode_number, ()) + refs
        for _, kind, key, ref, inode, fifo in others:
            if kind == _PIPE:
                pipes.setdefault(key, []).append(ref)  # type: ignore[arg-type]
            elif kind == _PATH:
                paths.setdefault(key, []).append(ref)  # type: ignore[arg-type]
                if inode is not None:
                    self.inodes[ref] = inode
                    if fifo:
                        self.fifos.setdefault(inode, []).append(ref)
                        self.fifo_paths.setdefault(inode, str(key))
            elif kind == _ANON:
                per_pid = self.anon.setdefault(str(key), {})
                per_pid[ref.pid] = per_pid.get(ref.pid, 0) + 1


class _Table:
    """The descriptors of one process as last read."""

    __slots__ = (
        *("count", "directory", "entries", "kept", "others", "read_round", "size", "sockets", "start", "stat"),
        "unreadable",
    )

    def __init__(self, directory: str, start: int) -> None:
        self.directory = directory
        self.start = start
        self.stat: ProcStat | None = None
        self.size = -1
        self.count: int | None = None
        self.entries: dict[str, _Entry] = {}
        self.kept: list[_Entry] = []  # the entries that the index takes: its sockets, and the others
        self.sockets: dict[int, tuple[FdRef, ...]] = {}
        self.others: list[_Entry] = []
        self.read_round = -1  # round in which every link was read
        self.unreadable = False

    def keep(self, kept: list[_Entry]) -> bool:
        """Take over what was read; True if it is not what it was."""
        if kept == self.kept:
            return False
        self.kept = kept
        self.others = [entry for entry in kept if entry.kind != _SOCKET]
        sockets: dict[int, tuple[FdRef, ...]] = {}
        for entry in kept:
            if entry.kind == _SOCKET:
                inode = int(entry.key)
                sockets[inode] = (*sockets.get(inode, ()), entry.ref)
        self.sockets = sockets
        return True


class FdScanner:
    """Keeps the tables of one ``ProcFs``; used under its lock."""

    def __init__(self, fs: FileSystem, root: str, local: LocalPaths) -> None:
        self._fs = fs
        self._root = root
        self._local = local
        self._tables: dict[int, _Table] = {}
        self._index: FdIndex | None = None
        self._ownerless: dict[int, int] = {}  # inode → round in which somebody last asked for it

    def scan(self, processes: dict[int, ProcStat], round_number: int) -> FdIndex:
        """The index of this round. Reads the tables of ``processes`` and forgets those of all others."""
        tables: dict[int, _Table] = {}
        changed = self._index is None
        before = self._tables
        for pid, stat in processes.items():
            table = before.get(pid)
            if table is not None and table.stat is stat:
                turn = (pid + round_number) % IDLE_ROTATION
                if turn and not turn & 1:  # idle, and neither looked at nor read again in this round
                    tables[pid] = table
                    continue
            else:
                if stat.kernel_thread or stat.state in "ZX":
                    continue
                if table is None or table.start != stat.start:
                    table = _Table(f"{self._root}/{pid}/fd", stat.start)
                    changed = True
            tables[pid] = table
            if self._refresh(pid, table, stat, round_number):
                changed = True
        changed = changed or tables.keys() != before.keys()
        self._tables = tables
        if changed or self._index is None:
            self._index = self._build()
        return self._index

    def verify(self, sockets: set[int], round_number: int) -> FdIndex:
        """The index again, after looking for ``sockets`` (inodes) that nobody seemed to own.

        Reads every link that this round has not read yet until all are found, at most ``VERIFY_LINKS``. Inodes that
        are nobody's (in flight, of a process that may not be looked into) are remembered and not looked for again.
        """
        assert self._index is not None  # noqa: S101 - ProcFs scans first
        missing = sockets - self._index.sockets.keys()
        # Several ask in one round, each for sockets of its own kind: what one asks for is not forgotten for another.
        self._ownerless = {k: asked for k, asked in self._ownerless.items() if asked >= round_number - 1}
        wanted = missing - self._ownerless.keys()
        self._ownerless.update(dict.fromkeys(missing & self._ownerless.keys(), round_number))
        if not wanted:
            return self._index
        links = 0
        # With processes that may not be looked into, most ownerless sockets are theirs and reading finds nothing.
        most = VERIFY_LINKS // 10 if self._index.unreadable_pids else VERIFY_LINKS
        for pid, table in sorted(self._tables.items(), key=lambda item: -len(item[1].kept)):
            if table.read_round == round_number or table.unreadable:
                continue
            if links >= most or not wanted:
                break
            links += len(table.entries)
            self._read(pid, table, round_number, full=True)
            wanted.difference_update(table.sockets)
        if links < most:
            self._ownerless.update(dict.fromkeys(wanted, round_number))
        self._index = self._build()
        return self._index

    def _refresh(self, pid: int, table: _Table, stat: ProcStat, round_number: int) -> bool:
        """Bring one table up to date; True if what the index takes of it changed."""
        ran = table.stat is not stat  # ProcFs gives the same object for an unchanged record
        turn = not (pid + round_number) % (ROTATION if ran else IDLE_ROTATION)
        count, unreadable = table.count, table.unreadable
        try:
            size = self._fs.stat(table.directory).size  # the number of descriptors, Linux 6.2; 0 before
        except OSError:
            size = 0
        if table.stat is not None and not turn and (table.unreadable or (not ran and size == table.size > 0)):
            if table.unreadable and size:
                table.count = size
            return table.count != count
        moved = ran or turn or size != table.size  # a number may have been closed and opened again with the others
        table.stat, table.size = stat, size
        full = not table.entries or (moved and len(table.entries) <= LARGE)
        return self._read(pid, table, round_number, full=full) or (count, unreadable) != (table.count, table.unreadable)

    def _read(self, pid: int, table: _Table, round_number: int, *, full: bool) -> bool:
        directory = table.directory
        try:
            names = self._fs.listdir(directory)
        except PermissionError:
            return self._closed_to_us(table)
        except OSError:  # it ended
            table.entries, table.count = {}, None
            table.keep([])
            return True
        table.unreadable = False
        table.count = len(names)
        known = table.entries
        entries: dict[str, _Entry] = {}
        for name in names:
            entry = known.get(name)
            if entry is None or full or (int(name) + round_number) % ROTATION == 0:
                try:
                    target = self._fs.readlink(f"{directory}/{name}")
                    if entry is None or entry.target != target:
                        entry = self._classify(pid, name, target)
                except PermissionError:  # may be listed, not looked into: no right to trace it
                    return self._closed_to_us(table)
                except OSError:  # closed meanwhile
                    continue
            entries[name] = entry
        if full:
            table.read_round = round_number
        if entries == known:
            return False
        table.entries = entries
        return table.keep([entry for entry in entries.values() if entry.kind != _OTHER])

    @staticmethod
    def _closed_to_us(table: _Table) -> bool:
        changed = table.keep([])
        table.unreadable = True
        table.entries = {}
        table.count = table.size if table.size > 0 else None
        return changed

    def _classify(self, pid: int, name: str, target: str) -> _Entry:
        """Raises OSError if the descriptor was closed meanwhile."""
        fd = int(name)
        both = FdRef(pid, fd, True, True)
        if target.startswith("socket:["):
            return _Entry(target, _SOCKET, int(target[8:-1]), both)
        if target.startswith("pipe:["):
            return _Entry(target, _PIPE, int(target[6:-1]), self._mode(pid, fd))
        if target.startswith("anon_inode:"):
            return _Entry(target, _ANON, target[11:].strip("[]"), both)
        if not target.startswith("/"):
            return _Entry(target, _OTHER, target, both)
        if target in _BORING or target.startswith("/dev/pts/"):
            return _Entry(target, _OTHER, target, both)
        device = target.startswith("/dev/") and not target.startswith(_FILES_IN_DEV)
        inode, fifo = self._inode(pid, fd, target) if not device else (None, False)
        if device or fifo or interesting(target):
            return _Entry(target, _PATH, printable(target), self._mode(pid, fd), inode, fifo)
        return _Entry(target, _OTHER, target, both)

    def _mode(self, pid: int, fd: int) -> FdRef:
        mode = self._fs.lstat(f"{self._root}/{pid}/fd/{fd}").mode
        return FdRef(pid, fd, bool(mode & 0o400), bool(mode & 0o200))

    def _inode(self, pid: int, fd: int, target: str) -> tuple[Inode | None, bool]:
        """(device, inode) and whether it is a fifo; unknown where asking could hang (see ``mounts``)."""
        if not self._local.is_local(pid, target):
            return None, False
        try:
            stat = self._fs.stat(f"{self._root}/{pid}/fd/{fd}")
        except OSError:  # closed since its link was read, or a tree of fixtures
            return None, False
        return (stat.device, stat.inode), stat.mode & _FILE_TYPE == _FIFO

    def _build(self) -> FdIndex:
        index = FdIndex()
        for pid, table in self._tables.items():
            index.add(table.sockets, table.others)
            if table.count is not None:
                index.counts[pid] = table.count
            index.unreadable_pids += table.unreadable
        return index


def interesting(target: str) -> bool:
    """Whether a regular-looking link target may be a means of exchange: shared memory, a queue, a deleted file."""
    return (
        target.startswith(("/memfd:", "/dev/", "/dmabuf", "/SYSV"))
        or target.endswith(" (deleted)")
        or "mqueue" in target
        or (target.count("/") == 1 and len(target) > 1)  # a POSIX message queue shows as /name
    )
