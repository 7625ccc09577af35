"""CPUs, CPU packages and NUMA nodes as the kernel lays them out."""

from __future__ import annotations

import re

from msgspec import Struct

from gpuflight.sources.fs import FileSystem
from gpuflight.sources.sysfs import SysFs, parse_list

_NODES = "devices/system/node"
_CPUS = "devices/system/cpu"


class NumaNode(Struct, frozen=True, gc=False):
    """A NUMA node: its CPUs (none on a memory-only node) and the distance to every online node, by node."""

    index: int
    cpus: list[int]
    has_memory: bool
    distances: dict[int, int]


class Package(Struct, frozen=True, gc=False):
    """A CPU socket: its model, CPUs and number of cores."""

    index: int
    model: str
    cpus: list[int]
    cores_count: int


class CpuTopology:
    """What does not change while nobody plugs CPUs or memory; rebuilt whenever SysFs rechecks its static facts."""

    def __init__(self, sysfs: SysFs, fs: FileSystem, proc: str = "/proc") -> None:
        self._sysfs = sysfs
        self._fs = fs
        self._proc = proc
        self._generation = -1
        self.nodes: dict[int, NumaNode] = {}
        self.packages: dict[int, Package] = {}
        self.node_of_cpu: dict[int, int] = {}
        self.nodes_reason = ""
        """Why there are no nodes; empty if there are."""

    def refresh(self) -> None:
        """Read the topology if it was not read yet or may have changed."""
        if self._generation == self._sysfs.generation:
            return
        self._generation = self._sysfs.generation
        self.nodes = self._read_nodes()
        self.node_of_cpu = {cpu: node.index for node in self.nodes.values() for cpu in node.cpus}
        self.packages = self._read_packages()

    def nodes_of(self, cpus: list[int]) -> list[int]:
        """The nodes that these CPUs belong to, sorted."""
        of_cpu = self.node_of_cpu
        return sorted({of_cpu[cpu] for cpu in cpus if cpu in of_cpu})

    def _read_nodes(self) -> dict[int, NumaNode]:
        sysfs = self._sysfs
        self.nodes_reason = ""
        try:
            online = parse_list(sysfs.text(f"{_NODES}/online", static=True))
        except (OSError, ValueError):
            self.nodes_reason = "the kernel has no NUMA support (no devices/system/node in sysfs)"
            return {}
        try:
            with_memory = set(parse_list(sysfs.text(f"{_NODES}/has_memory", static=True)))
        except (OSError, ValueError):
            with_memory = set(online)
        nodes = {}
        for index in online:
            try:
                cpus = parse_list(sysfs.text(f"{_NODES}/node{index}/cpulist", static=True))
            except (OSError, ValueError):
                cpus = []
            try:
                # One number per online node, in order of their indices (drivers/base/node.c, node_read_distance).
                row = [int(word) for word in sysfs.text(f"{_NODES}/node{index}/distance", static=True).split()]
            except (OSError, ValueError):
                row = []
            distances = dict(zip(online, row, strict=True)) if len(row) == len(online) else {}
            nodes[index] = NumaNode(index, cpus, index in with_memory, distances)
        return nodes

    def _read_packages(self) -> dict[int, Package]:
        sysfs = self._sysfs
        try:
            online = parse_list(sysfs.text(f"{_CPUS}/online", static=True))
        except (OSError, ValueError):
            return {}
        cpus: dict[int, list[int]] = {}
        cores: dict[int, set[str]] = {}
        for cpu in online:
            try:
                package = sysfs.number(f"{_CPUS}/cpu{cpu}/topology/physical_package_id", static=True)
                siblings = sysfs.text(f"{_CPUS}/cpu{cpu}/topology/thread_siblings_list", static=True)
            except OSError:
                continue
            if package < 0:  # arm64 guests without firmware tables
                continue
            cpus.setdefault(package, []).append(cpu)
            cores.setdefault(package, set()).add(siblings)
        models = self._models()
        return {
            index: Package(index, models.get(index) or models.get(None, ""), members, len(cores[index]))
            for index, members in sorted(cpus.items())
        }

    def _models(self) -> dict[int | None, str]:
        """Model names by package; under None the first one (arm64 and single-package guests have no physical id)."""
        try:
            text = self._fs.read(f"{self._proc}/cpuinfo").decode("utf-8", "replace")
        except OSError:
            return {}
        models: dict[int | None, str] = {}
        for block in text.split("\n\n"):
            name = re.search(r"^model name[ \t]*:[ \t]*(\S.*)$", block, re.MULTILINE)
            if name is None:
                continue
            models.setdefault(None, name[1].strip())
            package = re.search(r"^physical id\s*:\s*(\d+)$", block, re.MULTILINE)
            if package is not None:
                models.setdefault(int(package[1]), name[1].strip())
        return models
