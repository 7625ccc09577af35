"""Which network interface, RDMA device and disk belongs to which PCI function."""

from __future__ import annotations

import re
from collections.abc import Container
from typing import NamedTuple

from gpuflight.sources.sysfs import SysFs, pci_address_in


class Attached(NamedTuple):
    """A device behind a PCI function. ``kind`` is the kind of its entity: Nic, RdmaDevice or Disk."""

    kind: str
    name: str
    address: str


def attached_devices(sysfs: SysFs, addresses: Container[str]) -> list[Attached]:
    """Every network interface, RDMA device (where it has no interface of its own) and disk behind one of ``addresses``.

    A missing class directory means that there are none of that class.
    """
    found: list[Attached] = []
    with_nic: set[str] = set()
    for name in _names(sysfs, "class/net"):
        address = pci_address_in(sysfs.real(f"class/net/{name}"))
        if address in addresses:
            found.append(Attached("Nic", name, address))
            with_nic.add(address)
    for name in _names(sysfs, "class/infiniband"):
        address = pci_address_in(sysfs.real(f"class/infiniband/{name}"))
        if address in addresses and address not in with_nic:
            found.append(Attached("RdmaDevice", name, address))
    for name in _names(sysfs, "block"):
        address = disk_pci_address(sysfs, name)
        if address in addresses:
            found.append(Attached("Disk", name, address))
    return found


def disk_pci_address(sysfs: SysFs, name: str) -> str:
    """PCI address of the controller that a disk hangs on; empty for virtual ones.

    A multipath NVMe namespace sits under a virtual subsystem; its first controller on PCI stands for it.
    """
    path = sysfs.real(f"block/{name}")
    address = pci_address_in(path)
    if address or "/nvme-subsystem/" not in path:
        return address
    subsystem = path.rpartition("/")[0]
    for controller in _names(sysfs, subsystem):
        if re.fullmatch(r"nvme\d+", controller):
            address = pci_address_in(sysfs.real(f"{subsystem}/{controller}"))
            if address:
                return address
    return ""


def _names(sysfs: SysFs, path: str) -> list[str]:
    try:
        return sysfs.list_dir(path)
    except OSError:
        return []
