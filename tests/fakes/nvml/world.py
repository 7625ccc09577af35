"""A World whose NVML is the fake and whose /proc and /sys are a tree of files that the test writes."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from gpuflight.sources.clock import ManualClock
from gpuflight.sources.fs import HostFs
from gpuflight.sources.nvml import Nvml
from gpuflight.sources.procfs import ProcFs
from gpuflight.sources.sysfs import SysFs
from gpuflight.sources.world import World

INITIAL_PIDNS = 4026531836


class Tree:
    """Files of a made-up machine: processes, PCI functions, what the nvidia kernel module lists."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self/ns").mkdir(parents=True)
        self.pid_namespace(INITIAL_PIDNS)

    def pid_namespace(self, inode: int) -> None:
        """The pid namespace that gpuflight itself is in."""
        link = self.root / "proc/self/ns/pid"
        link.unlink(missing_ok=True)
        link.symlink_to(f"pid:[{inode}]")

    def process(self, pid: int, *, comm: str = "python3", start: int = 1000, nspids: str = "", opens: str = "") -> None:
        """A process, with the devices that it has open separated by blanks."""
        folder = self.root / f"proc/{pid}"
        (folder / "fd").mkdir(parents=True)
        fields = ["S", "1", str(pid), str(pid), *["0"] * 15, str(start), "1000000", "500", *["0"] * 28]
        (folder / "stat").write_text(f"{pid} ({comm}) {' '.join(fields)}\n")
        (folder / "status").write_text(f"Name:\t{comm}\nPid:\t{pid}\nUid:\t0\t0\t0\t0\nNSpid:\t{nspids or pid}\n")
        for number, target in enumerate(opens.split(), 3):
            (folder / f"fd/{number}").symlink_to(target)

    def pci(
        self, address: str, *, vendor: str = "0x10de", class_code: str = "0x030200", driver: str = "nvidia"
    ) -> None:
        """A PCI function right below its host bridge."""
        domain_bus = address.rsplit(":", 1)[0]
        real = self.root / f"sys/devices/pci{domain_bus}/{address}"
        real.mkdir(parents=True)
        for name, text in (("vendor", vendor), ("device", "0x2330"), ("class", class_code), ("numa_node", "-1")):
            (real / name).write_text(text + "\n")
        if driver:
            module = self.root / f"sys/bus/pci/drivers/{driver}"
            module.mkdir(parents=True, exist_ok=True)
            (real / "driver").symlink_to(module)
        devices = self.root / "sys/bus/pci/devices"
        devices.mkdir(parents=True, exist_ok=True)
        (devices / address).symlink_to(f"../../../devices/pci{domain_bus}/{address}")

    def kernel_module_lists(self, address: str, uuid: str, model: str) -> None:
        """What /proc/driver/nvidia says of a GPU."""
        folder = self.root / f"proc/driver/nvidia/gpus/{address}"
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t {model}\nIRQ:   \t\t 104\nGPU UUID: \t {uuid}\nBus Location: \t {address}\n"
        )

    def world(self, nvml: Nvml, clock: ManualClock) -> World:
        """The sources that the nvml collector asks; it has no business with the others."""
        fs = HostFs(str(self.root))
        return World(
            fs=fs,
            procfs=ProcFs(fs, clock),
            sysfs=SysFs(fs),
            cgroups=cast("object", None),  # type: ignore[arg-type]
            netlink=cast("object", None),  # type: ignore[arg-type]
            ipc=cast("object", None),  # type: ignore[arg-type]
            nvml=nvml,
            tools=cast("object", None),  # type: ignore[arg-type]
            clock=clock,
        )
