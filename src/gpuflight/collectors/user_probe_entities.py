"""Which entity a row of a user's map is about: process, thread, disk, network interface, NUMA node or the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuflight.graph import Entity, nodes
from gpuflight.sources.sysfs import disk_of_device

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcStat
    from gpuflight.sources.world import World

_MINOR_BITS = 20
"""Of a device number inside the kernel (include/linux/kdev_t.h)."""

_FIRST_PID_NAMESPACE = 4026531836  # PROC_PID_INIT_INO of include/linux/proc_ns.h


class Gone(Exception):
    """What a row is about is not there any more: the row may be deleted."""


class Subjects:
    """The entities of one round. An entity is (id, how to make it), so that rows about one thing are added up first."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._processes = world.procfs.processes()
        self._threads: dict[int, dict[int, ProcStat]] = {}
        self._disks: dict[int, str] = {}
        self._nics: dict[int, str] | None = None
        try:
            inode = world.procfs.own_namespace("pid")
        except (OSError, ValueError):
            inode = _FIRST_PID_NAMESPACE
        self.foreign_pids = inode != _FIRST_PID_NAMESPACE
        """Whether process numbers in the kernel mean nothing here: we run in a pid namespace of our own."""

    def of(self, kind: str, key: dict[str, int], wanted: str) -> Entity:
        """A bare entity. Raises Gone; OSError, ValueError if it cannot be told."""
        if kind == "Process":
            stat = self._process(key[wanted])
            return nodes.Process(pid=stat.pid, start=stat.start, id=stat.id)
        if kind == "Thread":
            thread = self._thread(key["pid"], key[wanted])
            return nodes.Thread(tid=thread.pid, start=thread.start)
        if kind == "Disk":
            return nodes.Disk(name=self._disk(key[wanted]))
        if kind == "Nic":
            return nodes.Nic(name=self._nic(key[wanted]))
        if kind == "Numa":
            return nodes.Numa(index=key[wanted])
        return nodes.Host(hostname=self._world.procfs.hostname)

    def process_of_thread(self, key: dict[str, int]) -> nodes.Process:
        """The process of a row about a thread. Raises Gone."""
        stat = self._process(key["pid"])
        return nodes.Process(pid=stat.pid, start=stat.start, id=stat.id)

    def _process(self, pid: int) -> ProcStat:
        stat = self._processes.get(pid)
        if stat is None:
            raise Gone
        return stat

    def _thread(self, pid: int, tid: int) -> ProcStat:
        known = self._threads.get(pid)
        if known is None:
            self._process(pid)
            try:
                known = {stat.pid: stat for stat in self._world.procfs.threads(pid)}
            except (FileNotFoundError, ProcessLookupError):
                known = {}
            self._threads[pid] = known
        if tid not in known:
            raise Gone
        return known[tid]

    def _disk(self, device: int) -> str:
        if device not in self._disks:
            place = f"{device >> _MINOR_BITS}:{device & (1 << _MINOR_BITS) - 1}"
            self._disks[device] = disk_of_device(self._world.sysfs, place)
        return self._disks[device]

    def _nic(self, index: int) -> str:
        if self._nics is None:
            sysfs = self._world.sysfs
            self._nics = {}
            for name in sysfs.list_dir("class/net"):
                if sysfs.exists(f"class/net/{name}/ifindex"):
                    self._nics[sysfs.number(f"class/net/{name}/ifindex")] = name
        if index not in self._nics:
            raise Gone
        return self._nics[index]
