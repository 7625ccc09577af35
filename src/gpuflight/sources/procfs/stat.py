"""Parsers of the per-process files of /proc that the kernel writes as one record. Pure: bytes in, values out."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

_PF_KTHREAD = 0x00200000
_PF_FORKNOEXEC = 0x00000040


class ProcStat(Struct, gc=False):
    """What of /proc/PID/stat (or /proc/PID/task/TID/stat) is used; ``man 5 proc`` names the fields.

    ``start`` is field 22, clock ticks since boot, and with ``pid`` identifies the process. Times are clock ticks since
    its start (of all its threads, for a process), faults are counts since its start; ``rss_pages`` is the kernel's
    quick figure, which may lag by some dozen pages per thread. ``id`` is the entity's: ``Process(pid=…,start=…)``.
    """

    pid: int
    comm: str
    state: str
    ppid: int
    pgrp: int
    session: int
    flags: int
    minflt: int
    majflt: int
    utime_ticks: int
    stime_ticks: int
    threads: int
    start: int
    rss_pages: int
    processor: int
    start_stack: int
    id: str
    kernel_thread: bool
    """Whether this is a thread of the kernel: no memory, no descriptors, no executable of its own."""
    virtual_bytes: int = 0
    """Size of its address space: it changes with every library that is loaded, and with much else."""

    @property
    def cpu_ticks(self) -> int:
        """CPU time in user and kernel mode, clock ticks."""
        return self.utime_ticks + self.stime_ticks

    @property
    def image(self) -> tuple[str, int, int]:
        """Changes when the process executes another program (``start_stack`` is 0 without the right to trace it)."""
        return (self.comm, self.flags & _PF_FORKNOEXEC, self.start_stack)


def parse_stat(raw: bytes) -> ProcStat:
    """Parse one ``stat`` record. The comm may hold anything, brackets and newlines too: it ends at the *last* ``)``.

    Raises ValueError if it is cut short or is no such record.
    """
    left = raw.index(b"(")
    right = raw.rindex(b")")
    fields = raw[right + 2 :].split(None, 37)  # field 3 of the manual page is fields[0]
    if len(fields) < 37:
        raise ValueError(f"stat record of {len(fields) + 2} fields")
    pid = int(raw[:left])
    start = int(fields[19])
    flags = int(fields[6])
    return ProcStat(
        pid,
        decode(raw[left + 1 : right]),
        fields[0].decode("ascii"),
        int(fields[1]),
        int(fields[2]),
        int(fields[3]),
        flags,
        int(fields[7]),
        int(fields[9]),
        int(fields[11]),
        int(fields[12]),
        int(fields[17]),
        start,
        int(fields[21]),
        int(fields[36]),
        int(fields[25]),
        f"Process(pid={pid},start={start})",
        bool(flags & _PF_KTHREAD),
        int(fields[20]),
    )


def parse_status(raw: bytes) -> dict[str, str]:
    """``Key:\\tvalue`` lines as a dictionary; of a repeated key the last one."""
    fields = {}
    for line in decode(raw).split("\n"):
        key, colon, value = line.partition(":")
        if colon:
            fields[key] = value.strip()
    return fields


class Owner(NamedTuple):
    """The few fields of a status file that change rarely."""

    uid: int
    nspids: list[int]
    cpus_allowed: str


def parse_owner(raw: bytes) -> Owner:
    """Effective uid, pids by namespace (empty before Linux 4.1), allowed CPUs: a tenth of the cost of all fields.

    Raises ProcessLookupError for an empty record (the process ended), ValueError if there is no owner in it.
    """
    if not raw:
        raise ProcessLookupError("the process ended")
    uids = _field(raw, b"\nUid:").split()
    if len(uids) < 2:
        raise ValueError("no Uid line")
    nspids = [int(number) for number in _field(raw, b"\nNSpid:").split()]
    return Owner(int(uids[1]), nspids, _field(raw, b"\nCpus_allowed_list:").decode("ascii", "replace").strip())


def parse_switches(raw: bytes) -> tuple[int, int]:
    """(voluntary, involuntary) context switches of a thread's status file. Raises ValueError without them."""
    return int(_field(raw, b"\nvoluntary_ctxt_switches:")), int(_field(raw, b"\nnonvoluntary_ctxt_switches:"))


def _field(raw: bytes, name: bytes) -> bytes:
    """The comm in the first line cannot fake a field: the kernel escapes its newlines."""
    position = raw.find(name)
    if position < 0:
        return b""
    position += len(name)
    return raw[position : raw.find(b"\n", position)]


def parse_cgroup(raw: bytes) -> list[tuple[str, str]]:
    """``id:controllers:path`` lines as (controllers, path); no controllers for cgroup v2; the path may hold colons."""
    groups = []
    for line in decode(raw).split("\n"):
        parts = line.split(":", 2)
        if len(parts) == 3:
            groups.append((parts[1], parts[2]))
    return groups


def parse_cmdline(raw: bytes) -> list[str]:
    """Arguments separated by NUL. A process that wrote its own title there gives one argument; a zombie none."""
    return decode(raw.rstrip(b"\0")).split("\0") if raw.strip(b"\0") else []


def parse_environ(raw: bytes) -> dict[str, str]:
    """``KEY=VALUE`` strings separated by NUL; of a repeated key the first, as getenv(3) does."""
    values: dict[str, str] = {}
    for item in decode(raw).split("\0"):
        key, equals, value = item.partition("=")
        if equals and key:
            values.setdefault(key, value)
    return values


def parse_namespace(link: str) -> int:
    """``net:[4026531840]`` → 4026531840. Raises ValueError for anything else."""
    return int(link[link.index("[") + 1 : -1])


def decode(raw: bytes) -> str:
    """Text that JSON can carry: what is not UTF-8 as ``\\xNN``."""
    return raw.decode("utf-8", "backslashreplace")


def printable(path: str) -> str:
    """A path as Python's os functions give it, as text that JSON can carry."""
    return path if path.isascii() else decode(path.encode("utf-8", "surrogateescape"))
