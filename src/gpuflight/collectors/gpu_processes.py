"""Which process of ours a pid that NVML names is.

NVML names pids of the driver's view: the initial pid namespace, on most driver versions even for a caller in a
container. If we are in that namespace too they are ours. If not, a number may by chance be another process of ours; so
it counts only for one that has an NVIDIA device open, by its pid as we see it or as its own namespace does (NSpid).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuflight.errors import SourceUnavailable

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcFs, ProcStat

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the initial pid namespace (PROC_PID_INIT_INO in include/linux/proc_ns.h)."""

_DEVICES = "/dev/nvidia"

PROFILERS = ("nsys", "ncu", "nv-hostengine", "dcgm-exporter", "dcgmi", "nvprof", "nv-nsight", "dynolog")
"""Beginnings of the names of programs that take the GPU's counters for themselves."""


class PidMap:
    """Translates NVML's pids for one round."""

    def __init__(self, procfs: ProcFs) -> None:
        self._procfs = procfs
        self._holders: set[int] | None = None
        self._by_nspid: dict[int, list[int]] = {}
        try:
            self.foreign = procfs.own_namespace("pid") != INITIAL_PID_NAMESPACE
        except (OSError, ValueError, SourceUnavailable):
            self.foreign = False  # /proc without namespaces: there can be only one

    def process(self, pid: int) -> ProcStat | None:
        """The live process, or None: it ended, or belongs to another pid namespace (``foreign``)."""
        processes = self._procfs.processes()
        if not self.foreign:
            return processes.get(pid)
        holders = self._gpu_users()
        if pid in holders:
            return processes.get(pid)
        candidates = self._by_nspid.get(pid, [])
        return processes.get(candidates[0]) if len(candidates) == 1 else None

    def _gpu_users(self) -> set[int]:
        """Pids, as we see them, of processes with an NVIDIA device open."""
        if self._holders is None:
            self._holders = {
                ref.pid
                for path, refs in self._procfs.fds().paths.items()
                if path.startswith(_DEVICES)
                for ref in refs
            }  # fmt: skip
            for holder in sorted(self._holders):
                try:
                    for inner in self._procfs.nspids(holder)[1:]:
                        self._by_nspid.setdefault(inner, []).append(holder)
                except (OSError, ValueError):  # it ended, or its status has an unknown form
                    continue
        return self._holders


def running_profilers(procfs: ProcFs) -> list[str]:
    """``name (pid)`` of every program that is known to hold a GPU's counters."""
    return [
        f"{stat.comm} (pid {stat.pid})"
        for stat in procfs.processes().values()
        if stat.comm.startswith(PROFILERS)
    ]  # fmt: skip
