"""Builds machines as trees of /sys and /proc files: what the kernel shows on hardware that a test machine lacks."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gpuflight.sources.clock import ManualClock
from gpuflight.sources.fs import HostFs
from gpuflight.sources.procfs import ProcFs
from gpuflight.sources.sysfs import SysFs, format_list

GEN5 = ("32.0 GT/s PCIe", "16", "32.0 GT/s PCIe", "16")
GEN4X4 = ("16.0 GT/s PCIe", "4", "16.0 GT/s PCIe", "4")


class FaultyFs(HostFs):
    """A tree in which some paths answer with an error, and something may happen when a path is read.

    ``reads`` counts reads by path.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.errors: dict[str, int] = {}
        self.on_read: dict[str, Callable[[], None]] = {}
        self.reads: dict[str, int] = {}

    def _touch(self, path: str) -> None:
        self.reads[path] = self.reads.get(path, 0) + 1
        action = self.on_read.pop(path, None)
        if action is not None:
            action()
        if path in self.errors:
            raise OSError(self.errors[path], os.strerror(self.errors[path]), path)

    def read(self, path: str) -> bytes:
        self._touch(path)
        return super().read(path)

    def read_record(self, path: str) -> bytes:
        self._touch(path)
        return super().read_record(path)


class Tree:
    """A machine under a directory. Paths are as on the machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fs = FaultyFs(str(root))
        self.clock = ManualClock()
        self.sysfs = SysFs(self.fs)
        self.procfs = ProcFs(self.fs, self.clock)
        self.tools: Any = None
        self._round = 0
        (root / "proc").mkdir(exist_ok=True)
        (root / "sys").mkdir(exist_ok=True)

    # -- rounds ----------------------------------------------------------------------------------------------------

    def world(self) -> Any:
        return SimpleNamespace(
            fs=self.fs, sysfs=self.sysfs, procfs=self.procfs, clock=self.clock, tools=self.tools, tape=None
        )

    def round(self, collector: Any, seconds: float = 1.0) -> Any:
        """Begin a round and let the collector observe it."""
        self._round += 1
        self.clock.advance(seconds)
        self.sysfs.begin_round(self._round)
        self.procfs.begin_round(self._round)
        collector.losses.clear()
        collector.notes.clear()
        collector.observe(self.world())
        return collector

    # -- files -----------------------------------------------------------------------------------------------------

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def link(self, path: str, target: str) -> None:
        """A link at ``path`` to ``target`` (both absolute on the machine), relative as the kernel makes them."""
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(os.path.relpath(self.root / target.lstrip("/"), file.parent))

    def remove(self, path: str) -> None:
        file = self.root / path.lstrip("/")
        if file.is_symlink() or file.is_file():
            file.unlink()
        else:
            shutil.rmtree(file)

    def fail(self, path: str, code: int = errno.EIO) -> None:
        self.fs.errors[path] = code

    # -- CPUs and memory -------------------------------------------------------------------------------------------

    def cpus(self, packages: list[list[int]], model: str = "Test CPU") -> None:
        everything = sorted(cpu for package in packages for cpu in package)
        self.write("/sys/devices/system/cpu/online", format_list(everything) + "\n")
        blocks = []
        for index, members in enumerate(packages):
            for cpu in members:
                base = f"/sys/devices/system/cpu/cpu{cpu}/topology"
                self.write(f"{base}/physical_package_id", f"{index}\n")
                self.write(f"{base}/thread_siblings_list", f"{cpu}\n")
                blocks.append(f"processor\t: {cpu}\nmodel name\t: {model}\nphysical id\t: {index}\n")
        self.write("/proc/cpuinfo", "\n".join(blocks))

    def numa(self, nodes: dict[int, tuple[list[int], int]], distances: list[list[int]]) -> None:
        """``nodes``: index → (CPUs, memory in kB)."""
        base = "/sys/devices/system/node"
        self.write(f"{base}/online", format_list(nodes) + "\n")
        self.write(f"{base}/has_memory", format_list(i for i, (_, memory) in nodes.items() if memory) + "\n")
        for row, (index, (cpus, memory)) in zip(distances, nodes.items(), strict=True):
            self.write(f"{base}/node{index}/cpulist", format_list(cpus) + "\n")
            self.write(f"{base}/node{index}/distance", " ".join(map(str, row)) + "\n")
            free = memory // 4
            self.write(
                f"{base}/node{index}/meminfo",
                f"Node {index} MemTotal:  {memory} kB\nNode {index} MemFree:  {free} kB\n"
                f"Node {index} MemUsed:  {memory - free} kB\n",
            )
            self.numastat(index)

    def numastat(self, index: int, miss: int = 0, foreign: int = 0) -> None:
        self.write(
            f"/sys/devices/system/node/node{index}/numastat",
            f"numa_hit 100\nnuma_miss {miss}\nnuma_foreign {foreign}\ninterleave_hit 0\nlocal_node 100\nother_node 0\n",
        )

    # -- PCI -------------------------------------------------------------------------------------------------------

    def pci(
        self,
        path: str,
        class_code: int,
        numa_node: int = -1,
        *,
        link: tuple[str, str, str, str] | None = GEN5,
        vendor: int = 0x10DE,
        device: int = 0x2330,
        driver: str = "",
        cpus: str = "0-3",
    ) -> str:
        """A function at ``pci0000:00/0000:00:01.0/…``; ``link``: speed and width now, speed and width at most."""
        full = f"/sys/devices/{path}"
        address = path.rpartition("/")[2]
        self.write(f"{full}/class", f"0x{class_code:06x}\n")
        self.write(f"{full}/vendor", f"0x{vendor:04x}\n")
        self.write(f"{full}/device", f"0x{device:04x}\n")
        self.write(f"{full}/numa_node", f"{numa_node}\n")
        self.write(f"{full}/local_cpulist", cpus + "\n")
        self.write(f"{full}/power_state", "D0\n")
        if link is not None:
            names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
            for name, text in zip(names, link, strict=True):
                self.write(f"{full}/{name}", text + "\n")
        if driver:
            (self.root / f"sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
            self.link(f"{full}/driver", f"/sys/bus/pci/drivers/{driver}")
        self.link(f"/sys/bus/pci/devices/{address}", full)
        return full

    def switch(self, root: str, bus: int, ports: int, numa_node: int) -> list[str]:
        """A root port ``pciX/0000:XX:01.0`` with a switch under it; gives the paths of its downstream ports."""
        self.pci(root, 0x060400, numa_node, vendor=0x8086, driver="pcieport")
        upstream = f"{root}/0000:{bus:02x}:00.0"
        self.pci(upstream, 0x060400, numa_node, vendor=0x1000, driver="pcieport")
        downstream = []
        for port in range(ports):
            path = f"{upstream}/0000:{bus + 1:02x}:{port:02x}.0"
            self.pci(path, 0x060400, numa_node, vendor=0x1000, driver="pcieport")
            downstream.append(path)
        return downstream

    # -- devices ---------------------------------------------------------------------------------------------------

    def nic(self, name: str, device: str = "", *, speed: str = "400000", index: int = 2, **more: str) -> str:
        """A network interface below a PCI device's directory (``/sys/devices/…``), or a virtual one."""
        full = f"{device}/net/{name}" if device else f"/sys/devices/virtual/net/{name}"
        files = {"address": "02:00:00:00:00:01", "mtu": "1500", "operstate": "up", "type": "1", "carrier_changes": "1"}
        files |= {"speed": speed, "ifindex": str(index), "iflink": str(index), **more}
        for file, text in files.items():
            self.write(f"{full}/{file}", text + "\n")
        if device:
            self.link(f"{full}/device", device)
        self.link(f"/sys/class/net/{name}", full)
        return full

    def disk(self, name: str, device: str = "", *, sectors: int = 2048, below: str = "", stat: str = "") -> str:
        full = f"{device}/{below}{name}" if device else f"/sys/devices/virtual/block/{name}"
        self.write(f"{full}/size", f"{sectors}\n")
        self.write(f"{full}/stat", (stat or "0 0 0 0 0 0 0 0 0 0 0") + "\n")
        self.write(f"{full}/queue/rotational", "0\n")
        self.link(f"/sys/block/{name}", full)
        self.link(f"/sys/class/block/{name}", full)
        return full

    def partition(self, disk: str, name: str, device: str) -> None:
        """A partition of the disk at ``disk`` (its full path), with device number ``major:minor``."""
        self.write(f"{disk}/{name}/partition", "1\n")
        self.link(f"/sys/class/block/{name}", f"{disk}/{name}")
        self.link(f"/sys/dev/block/{device}", f"{disk}/{name}")

    def hca(self, name: str, device: str, *, rate: str = "400 Gb/sec (4X NDR)", layer: str = "InfiniBand") -> str:
        """An RDMA device with one port and a few counters."""
        full = f"{device}/infiniband/{name}"
        self.write(f"{full}/node_type", "1: CA\n")
        self.write(f"{full}/fw_ver", "28.39.1002\n")
        self.write(f"{full}/node_guid", "a088:c203:0012:3456\n")
        port = f"{full}/ports/1"
        self.write(f"{port}/state", "4: ACTIVE\n")
        self.write(f"{port}/phys_state", "5: LinkUp\n")
        self.write(f"{port}/rate", rate + "\n")
        self.write(f"{port}/link_layer", layer + "\n")
        self.write(f"{port}/lid", "0x1f\n")
        for counter in ("port_xmit_data", "port_rcv_data", "symbol_error", "link_downed"):
            self.write(f"{port}/counters/{counter}", "0\n")
        self.write(f"{port}/hw_counters/out_of_sequence", "0\n")
        self.link(f"{full}/device", device)
        self.link(f"/sys/class/infiniband/{name}", full)
        return full

    # -- processes -------------------------------------------------------------------------------------------------

    def process(
        self,
        pid: int,
        *,
        start: int = 1000,
        rss_pages: int = 100_000,
        ticks: int = 0,
        threads: int = 1,
        processor: int = 0,
        cpus: str = "0-3",
        mems: str = "0-1",
        numa_maps: str | None = None,
        flags: int = 0,
    ) -> None:
        base = f"/proc/{pid}"
        self.write(f"{base}/stat", stat_line(pid, start, rss_pages, ticks, threads, processor, flags))
        self.write(f"{base}/status", f"Name:\tt{pid}\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}\n")
        if numa_maps is not None:
            self.write(f"{base}/numa_maps", numa_maps)

    def thread(self, pid: int, tid: int, *, ticks: int, processor: int, start: int = 1000) -> None:
        self.write(f"/proc/{pid}/task/{tid}/stat", stat_line(tid, start, 0, ticks, 1, processor, 0))


def stat_line(pid: int, start: int, rss_pages: int, ticks: int, threads: int, processor: int, flags: int) -> str:
    """A /proc/PID/stat record of 52 fields."""
    fields = ["0"] * 53
    fields[1], fields[2], fields[3], fields[4] = str(pid), f"(t {pid})", "S", "1"
    fields[9], fields[14] = str(flags), str(ticks)
    fields[20], fields[22], fields[24], fields[39] = str(threads), str(start), str(rss_pages), str(processor)
    return " ".join(fields[1:]) + "\n"


def hgx_host(tree: Tree) -> dict[int, str]:
    """Two sockets, eight GPUs with NVSwitches, a NIC beside each pair of GPUs, two NVMe disks per socket.

    Each of four switches carries two GPUs, one HCA with its interface; gives PCI addresses of the GPUs by index.
    """
    tree.cpus([[0, 1], [2, 3]], "Intel(R) Xeon(R) Platinum 8480C")
    tree.numa({0: ([0, 1], 1 << 20), 1: ([2, 3], 1 << 20)}, [[10, 21], [21, 10]])
    gpus: dict[int, str] = {}
    for number in range(4):
        node = number // 2
        bus = 0x10 + number * 0x20
        root = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0"
        ports = tree.switch(root, bus + 1, 4, node)
        for port in range(2):
            path = f"{ports[port]}/0000:{bus + 3 + port:02x}:00.0"
            tree.pci(path, 0x030200, node, driver="nvidia")
            gpus[number * 2 + port] = path.rpartition("/")[2]
        hca = tree.pci(
            f"{ports[2]}/0000:{bus + 6:02x}:00.0", 0x020700, node, vendor=0x15B3, device=0x1021, driver="mlx5_core"
        )
        tree.hca(f"mlx5_{number}", hca)
        tree.nic(f"ib{number}", hca, index=10 + number, type="32")
        disk = tree.pci(
            f"{ports[3]}/0000:{bus + 8:02x}:00.0", 0x010802, node, link=GEN4X4, vendor=0x144D, driver="nvme"
        )
        tree.disk(f"nvme{number}n1", disk, below=f"nvme/nvme{number}/", sectors=1 << 30)
    # Two NVSwitches under one plain root port each, on the first socket.
    for bus in (0x90, 0xA0):
        root = f"pci0000:{bus:02x}/0000:{bus:02x}:01.0"
        tree.pci(root, 0x060400, 0, vendor=0x8086, driver="pcieport")
        tree.pci(f"{root}/0000:{bus + 1:02x}:00.0", 0x068000, 0, device=0x22A3, driver="nvidia-nvswitch")
    # Uncore functions that nobody wants to see.
    tree.pci("pci0000:fe/0000:fe:00.0", 0x088000, 0, link=None, vendor=0x8086)
    return gpus


def flat_vm(tree: Tree) -> str:
    """A guest whose devices all sit on the root bus, without links or NUMA nodes; gives the GPU's address."""
    tree.cpus([[0, 1]])
    tree.numa({0: ([0, 1], 1 << 20)}, [[10]])
    tree.pci("pci0000:00/0000:00:00.0", 0x060000, link=None, vendor=0x8086)
    tree.pci("pci0000:00/0000:00:05.0", 0x030200, link=None)
    nic = tree.pci("pci0000:00/0000:00:03.0", 0x020000, link=None, vendor=0x1AF4)
    tree.write(f"{nic}/virtio2/uevent", "DRIVER=virtio_net\n")
    tree.nic("eth0", f"{nic}/virtio2", speed="-1")
    disk = tree.pci("pci0000:00/0000:00:02.0", 0x018000, link=None, vendor=0x1AF4)
    tree.disk("vda", f"{disk}/virtio1", below="block/")
    return "0000:00:05.0"


def grace_host(tree: Tree) -> str:
    """Coherent links: PCI says node 0, the driver says node 1, a node with memory and no CPUs."""
    tree.cpus([[0, 1, 2, 3]], "")
    tree.numa({0: ([0, 1, 2, 3], 1 << 20), 1: ([], 1 << 19)}, [[10, 80], [80, 10]])
    root = "pci0009:00/0009:00:00.0"
    tree.pci(root, 0x060400, 0, driver="pcieport")
    tree.pci(f"{root}/0009:01:00.0", 0x030200, 0, driver="nvidia")
    return "0009:01:00.0"
