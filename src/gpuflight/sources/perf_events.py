"""What the CPU's counters count of chosen processes, by perf_event_open(2). Only counting, never sampling.

Each thread that a process has when it is first asked for gets one group of events, which costs a descriptor per event;
threads that these start later are counted with them and cost none (``inherit_thread``, Linux 5.13; before that each
thread gets a group of its own). Processes that a watched one starts are not counted with it. Nothing is pinned or
exclusive: where the counters are wanted by others too, the kernel gives everyone a share of the time, and each group
tells how long it was on a counter. Processes that are not asked for any more are let go, and all are once nobody asks
for a whole round.

By hand, through ctypes, because no package does this: of those on PyPI py-perf-event counts calls of its own process,
performance-features starts the program itself and needs libpfm4 and a compiler. Structures: linux/perf_event.h.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import Struct, field

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.syscalls import PERF_ATTR_BYTES, PerfEventAttr, perf_event_open
from gpuflight.sources.recording import Tape

HARDWARE, SOFTWARE, HW_CACHE, RAW = 0, 1, 3, 4
"""``enum perf_type_id``."""

UNSUPPORTED = frozenset(
    (errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.ENODEV, errno.ENXIO, errno.E2BIG, errno.ENOSYS)
)
"""What the kernel says of events that it does not count here, whoever asks."""

NO_DESCRIPTORS = frozenset((errno.EMFILE, errno.ENFILE))
_NO_RIGHT = frozenset((errno.EACCES, errno.EPERM))

HEAD_FIELDS = 3
"""Before the values of a group: how many there are, ns enabled, ns on a counter; each 8 bytes, as the values."""

RETRY_ROUNDS = 60
"""A process that may not be counted is tried again after so many."""

_READ_FORMAT = 1 | 2 | 8  # PERF_FORMAT_TOTAL_TIME_ENABLED, _TOTAL_TIME_RUNNING, _GROUP
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HV, _INHERIT_THREAD = 1 << 1, 1 << 5, 1 << 6, 1 << 35
_SHARE_OF_LIMIT = 2
"""Of the descriptors that this process may open, counters take at most one in so many."""

_SHARES = 8
"""Descriptors are shared out as if there were at least so many processes: who comes later shall find some."""


class Event(Struct, frozen=True):
    """One event: what its figure is called, and ``type`` and ``config`` of struct perf_event_attr."""

    name: str
    kind: int
    config: int


class EventSet(Struct, frozen=True):
    """Events that are counted together, as one group: all at a time, or none."""

    name: str
    events: tuple[Event, ...]


class Target(Struct, frozen=True):
    """A process to count: its entity's id, and its threads, the most important first (of one that is watched already
    and whose answer said ``inherits``, none are needed)."""

    id: str
    tids: tuple[int, ...]


class Watched(Struct, gc=False):
    """What a process's groups say: ``raw`` has one record of ``HEAD_FIELDS`` + events native 64-bit numbers for each of
    ``tids``, counted since ``watch`` began (a number that changes when it begins anew). ``left_out_count``: threads
    that it had and that are not counted."""

    watch: int
    tids: list[int]
    raw: bytes
    left_out_count: int = 0


class Answer(Struct):
    """One look at the counters, at ``read_ns`` of the monotonic clock. ``refused``: errno by id of the processes that
    may not be watched; ``short``: errno if there were too few descriptors; ``unsupported``: errno if this machine
    counts none of the sets."""

    read_ns: int
    set: str = ""
    events: list[str] = field(default_factory=list)
    user_only: bool = False
    inherits: bool = False
    processes: dict[str, Watched] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    descriptors_count: int = 0
    short: int = 0
    unsupported: int = 0


class Kernel(Protocol):
    """The system calls behind it; each raises OSError."""

    def open(self, attr: PerfEventAttr, tid: int, group_fd: int) -> int: ...
    def read(self, fd: int, size: int) -> bytes: ...
    def close(self, fd: int) -> None: ...
    def descriptors_limit(self) -> int: ...


class Linux:
    """This machine's."""

    def open(self, attr: PerfEventAttr, tid: int, group_fd: int) -> int:
        return perf_event_open(attr, tid, group_fd=group_fd)

    read = staticmethod(os.read)
    close = staticmethod(os.close)

    def descriptors_limit(self) -> int:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return soft if soft != resource.RLIM_INFINITY else 1 << 20


class _Process(Struct, gc=False):
    """A process that is watched: the descriptors of each thread's group, the leader first."""

    watch: int
    groups: dict[int, list[int]]
    left_out_count: int = 0


class PerfEvents:
    """``count`` tells what was counted of some processes. Answers are recorded and replayed as one per round."""

    def __init__(self, tape: Tape | None = None, kernel: Kernel | None = None) -> None:
        self._tape = tape if tape is not None else Tape()
        self._kernel: Kernel = kernel if kernel is not None else Linux()
        self._processes: dict[str, _Process] = {}
        self._refused: dict[str, tuple[int, int]] = {}  # id → errno, round
        self._attrs: list[PerfEventAttr] = []  # of the set that this machine counts, once that is known
        self._set = EventSet("", ())
        self._user_only = self._inherits = False
        self._unsupported = 0
        self._short = 0
        self._watches = 0
        self._descriptors_count = 0
        self._round = 0
        self._asked = False
        self._lock = threading.Lock()

    def begin_round(self, number: int) -> None:
        """Let go of everything if the last round did not ask: its collector was switched off."""
        self._round = number
        if not self._asked and not self._lock.locked():
            self.close()
        self._asked = False

    def close(self) -> None:
        """Close every descriptor. May be called twice; the next question begins anew."""
        with self._lock:
            for id_ in list(self._processes):
                self._let_go(id_)
            self._refused.clear()
            self._attrs = []
            self._unsupported = 0

    def count(
        self, sets: Sequence[EventSet], targets: Sequence[Target], *, descriptors_at_most: int, threads_at_most: int
    ) -> Answer:
        """What was counted of ``targets`` since each is watched, and watch those that are not yet.

        Of ``sets`` the first that this machine can count is counted, for all. ``threads_at_most`` is per process;
        ``descriptors_at_most`` in all, but never more than half of what this process may open. Raises SourceUnavailable
        if a recording holds no answer, or one that makes no sense.
        """
        self._asked = True

        def live() -> Answer:
            with self._lock:  # whoever closes meanwhile must not take away what is being read
                return self._count(sets, targets, descriptors_at_most, threads_at_most)

        if self._tape.mode == "live":
            return live()
        raw = self._tape.ask("perf", "counts", lambda: msgspec.msgpack.encode(live()))
        try:
            return msgspec.msgpack.decode(raw, type=Answer)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise SourceUnavailable("the recorded counts of the CPU's counters make no sense", "record again") from None

    # --- live ------------------------------------------------------------------------------------------------------

    def _count(
        self, sets: Sequence[EventSet], targets: Sequence[Target], descriptors_at_most: int, threads_at_most: int
    ) -> Answer:
        wanted = {target.id for target in targets}
        for id_ in self._processes.keys() - wanted:
            self._let_go(id_)
        self._refused = {id_: why for id_, why in self._refused.items() if id_ in wanted and not self._due(why)}
        self._short = 0
        room = min(descriptors_at_most, self._kernel.descriptors_limit() // _SHARE_OF_LIMIT)
        for target in targets:
            if self._unsupported:
                break
            if target.id not in self._refused and (not self._inherits or target.id not in self._processes):
                each = len(self._attrs) or len(sets[0].events)
                share = room // each // max(_SHARES, len(targets))
                self._watch(target, sets, room, max(1, min(threads_at_most, share)))
        answer = Answer(
            read_ns=time.monotonic_ns(),
            set=self._set.name,
            events=[event.name for event in self._set.events],
            user_only=self._user_only,
            inherits=self._inherits,
            refused={id_: code for id_, (code, _) in self._refused.items()},
            short=self._short,
            unsupported=self._unsupported,
        )
        for target in targets:
            process = self._processes.get(target.id)
            if process is not None:
                answer.processes[target.id] = self._read(process)
                if not self._inherits:
                    for tid in process.groups.keys() - set(target.tids):  # ended: this was its last word
                        self._close_group(process, tid)
        answer.descriptors_count = self._descriptors_count
        return answer

    def _due(self, refusal: tuple[int, int]) -> bool:
        return self._round - refusal[1] >= RETRY_ROUNDS

    def _watch(self, target: Target, sets: Sequence[EventSet], room: int, threads_at_most: int) -> None:
        """Open what is missing of the groups of a process."""
        process = self._processes.get(target.id)
        groups = process.groups if process is not None else {}
        missing = [tid for tid in target.tids if tid not in groups]
        seen = 0
        for tid in missing:
            if len(groups) >= threads_at_most:
                break
            if self._descriptors_count + (len(self._attrs) or len(sets[0].events)) > room:
                self._short = errno.EMFILE
                break
            try:
                groups[tid] = self._open_group(tid) if self._attrs else self._first_group(tid, sets)
                self._descriptors_count += len(self._attrs)
            except OSError as error:
                code = error.errno or errno.EIO
                if code in NO_DESCRIPTORS:
                    self._short = code
                    break
                if code != errno.ESRCH:  # else that thread ended
                    if not groups and not self._unsupported:
                        self._refused[target.id] = code, self._round
                    break
            seen += 1
        if process is None and groups:
            self._watches += 1
            process = self._processes[target.id] = _Process(self._watches, groups)
        if process is not None:
            process.left_out_count = len(missing) - seen

    def _first_group(self, tid: int, sets: Sequence[EventSet]) -> list[int]:
        """The group of the first thread ever: finds out what is counted here, and in which way. Raises OSError."""
        last = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        for inherits in (True, False):  # a kernel that does not know inherit_thread says EINVAL
            for each in sets:
                for user_only in (False, True):
                    self._attrs = _attributes(each, inherits=inherits, user_only=user_only)
                    try:
                        group = self._open_group(tid)
                    except OSError as error:
                        self._attrs = []
                        if error.errno in UNSUPPORTED:
                            last = error
                            break
                        if error.errno not in _NO_RIGHT or user_only:
                            raise
                    else:
                        self._set, self._inherits, self._user_only = each, inherits, user_only
                        return group
        self._unsupported = last.errno or errno.ENOENT
        raise last

    def _open_group(self, tid: int) -> list[int]:
        """All events of a thread, or none. Raises OSError."""
        group: list[int] = []
        try:
            for attr in self._attrs:
                group.append(self._kernel.open(attr, tid, group[0] if group else -1))
        except OSError:
            for fd in group:
                self._kernel.close(fd)
            raise
        return group

    def _read(self, process: _Process) -> Watched:
        """What its groups say; one that cannot be read any more is closed and left out."""
        read, size = self._kernel.read, 8 * (HEAD_FIELDS + len(self._attrs))
        tids: list[int] = []
        records: list[bytes] = []
        for tid, group in list(process.groups.items()):
            try:
                record = read(group[0], size)
            except OSError:
                record = b""
            if len(record) == size:
                tids.append(tid)
                records.append(record)
            else:
                self._close_group(process, tid)
                process.left_out_count += 1
        return Watched(process.watch, tids, b"".join(records), process.left_out_count)

    def _close_group(self, process: _Process, tid: int) -> None:
        for fd in process.groups.pop(tid, ()):
            self._kernel.close(fd)
            self._descriptors_count -= 1

    def _let_go(self, id_: str) -> None:
        process = self._processes.pop(id_)
        for tid in list(process.groups):
            self._close_group(process, tid)


def _attributes(events: EventSet, *, inherits: bool, user_only: bool) -> list[PerfEventAttr]:
    """struct perf_event_attr of each event of a group; the kernel wants the same flags in all."""
    flags = (_INHERIT | _INHERIT_THREAD) * inherits | (_EXCLUDE_KERNEL | _EXCLUDE_HV) * user_only
    return [
        PerfEventAttr(type=event.kind, size=PERF_ATTR_BYTES, config=event.config, read_format=_READ_FORMAT, flags=flags)
        for event in events.events
    ]
