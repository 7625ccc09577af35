"""Which processes did nothing since the last round, told by the kernel's own list of tasks.

Reading one file of /proc per process is what a round costs most on a host with many. Most processes sleep. A BPF
iterator walks all tasks in one go and writes for each a mark of everything that /proc/PID/stat tells of it; where no
mark of a process changed, its record is what it was, and need not be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuflight.errors import SourceUnavailable

if TYPE_CHECKING:
    from gpuflight.sources.bpf.base import Link, ProbeObject
    from gpuflight.sources.bpf.probes import Probes

LEAST_PROCESSES = 256
"""With fewer, reading them all is as fast as loading the iterator would ever pay back."""

_FIRST_PID_NAMESPACE = 4026531836  # PROC_PID_INIT_INO of include/linux/proc_ns.h
_ROW_BYTES = 16


class TaskMarks:
    """The marks of the round before. Switches itself off for good where the iterator is not to be had."""

    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._object: ProbeObject | None = None
        self._link: Link | None = None
        self._rows: set[bytes] = set()
        self.why_not = ""
        """Why marks are not to be had; empty if they are, or were not asked for yet."""

    def quiet(self, processes_count: int, pid_namespace: int) -> frozenset[int]:
        """Pids of processes that did nothing since this was asked in the round before; empty where that cannot be told.

        Ask before reading /proc, so that what changes meanwhile is seen next time. ``processes_count``: how many there
        were. ``pid_namespace``: inode of ours.
        """
        if self.why_not or processes_count < LEAST_PROCESSES:
            self._rows = set()
            return frozenset()
        try:
            raw = self._iterate(pid_namespace)
        except (SourceUnavailable, OSError) as error:
            self.why_not = str(error)
            self.close()
            return frozenset()
        rows = {raw[at : at + _ROW_BYTES] for at in range(0, len(raw) - _ROW_BYTES + 1, _ROW_BYTES)}
        before, self._rows = self._rows, rows
        if not before:
            return frozenset()
        # A thread that ended changes its process as well.
        moved = {row[8:12] for row in rows ^ before}
        from_bytes = int.from_bytes
        return frozenset(from_bytes(pid, "little") for pid in {row[8:12] for row in rows} - moved)

    def close(self) -> None:
        """Unload the iterator. May be called twice."""
        if self._object is not None:
            self._object.close()
        self._object = self._link = None
        self._rows = set()

    def _iterate(self, pid_namespace: int) -> bytes:
        if self._object is None:
            number = 0 if pid_namespace == _FIRST_PID_NAMESPACE else pid_namespace
            self._object = self._probes.open("tasks", programs=["each_mark"], constants={"pid_namespace": number})
            self._link = self._object.attach("each_mark")
        assert self._link is not None  # noqa: S101 - attached with the object
        return self._object.run_iter(self._link)
