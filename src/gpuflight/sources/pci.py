"""The PCI tree of /sys/bus/pci: functions, the bridges above them, their links, and how far two of them are apart."""

from __future__ import annotations

import re

from msgspec import Struct

from gpuflight.sources.sysfs import SysFs, reason

DEVICES = "bus/pci/devices"
_FUNCTION = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")

PIX, PXB, PHB, NODE, SYS = "PIX", "PXB", "PHB", "NODE", "SYS"
DISTANCES = (PIX, PXB, PHB, NODE, SYS)
"""Nearest first. As ``nvidia-smi topo -m`` defines them: PIX at most a single PCIe bridge (one switch); PXB several
bridges, but not the host bridge; PHB a PCIe host bridge (typically the CPU); NODE the interconnect between host bridges
within a NUMA node; SYS the interconnect between NUMA nodes."""


class PciFunction(Struct, gc=False):
    """One PCI function: what it is and where it hangs.

    ``bridges`` are the addresses of the bridges above it, from the root port down; ``host_bridge`` names the root bus
    (``pci0000:00``). ``numa_node`` is None where the firmware does not say, with ``numa_reason``. ``port_type``:
    root_port, switch_upstream, switch_downstream, bridge, endpoint; told from its place in the tree, since the
    capability that names it is readable by root only.
    """

    address: str
    path: str
    class_code: int
    vendor_id: int
    device_id: int
    bridges: list[str]
    host_bridge: str
    numa_node: int | None
    numa_reason: str
    cpus: str
    driver: str
    virtual_function: bool
    port_type: str = "endpoint"

    @property
    def parent(self) -> str:
        """Address of the bridge right above; empty on the root bus."""
        return self.bridges[-1] if self.bridges else ""

    @property
    def is_bridge(self) -> bool:
        """PCI-to-PCI bridge (class 0604): root ports and switch ports."""
        return self.class_code >> 8 == 0x0604


class PciLink(Struct, gc=False):
    """A link as it runs now: GT/s per lane and lanes; None with the reason where that cannot be read."""

    speed_gt_per_s: float | None
    width: int | None
    why: str


class PciTree:
    """Every PCI function by address. The list is read each round, the facts of a function once."""

    def __init__(self, sysfs: SysFs) -> None:
        self._sysfs = sysfs
        self._generation = -1
        self.functions: dict[str, PciFunction] = {}
        self.vanished = 0
        """Functions that were listed but gone when read, in the last refresh."""

    def refresh(self) -> None:
        """Bring the tree up to date. Raises OSError if there is no PCI bus."""
        sysfs = self._sysfs
        addresses = [name for name in sysfs.list_dir(DEVICES) if _FUNCTION.fullmatch(name)]
        if self._generation != sysfs.generation:
            self._generation = sysfs.generation
            self.functions = {}
        self.vanished = 0
        known = self.functions
        if known.keys() == set(addresses):
            return
        for gone in known.keys() - set(addresses):
            sysfs.forget(known[gone].path)
            sysfs.forget(f"{DEVICES}/{gone}")
        fresh = {}
        for address in addresses:
            function = known.get(address)
            if function is None:
                try:
                    function = self._read(address)
                except OSError:
                    # Pulled between the listing and the reading: what was learnt of it is wrong when it comes back.
                    sysfs.forget(f"{DEVICES}/{address}")
                    self.vanished += 1
                    continue
            fresh[address] = function
        self.functions = fresh
        self._name_ports()

    def _read(self, address: str) -> PciFunction:
        sysfs = self._sysfs
        path = sysfs.real(f"{DEVICES}/{address}")
        parts = path.split("/")
        class_code = sysfs.number(f"{path}/class", static=True)
        numa_node: int | None = None
        numa_reason = ""
        try:
            numa_node = sysfs.number(f"{path}/numa_node", static=True)
            if numa_node < 0:
                numa_node, numa_reason = None, "the firmware does not say (-1)"
        except OSError as error:
            numa_reason = reason(error)
        try:
            cpus = sysfs.text(f"{path}/local_cpulist", static=True)
        except OSError:
            cpus = ""
        driver = sysfs.real(f"{path}/driver").rpartition("/")[2] if sysfs.exists(f"{path}/driver", static=True) else ""
        return PciFunction(
            address=address,
            path=path,
            class_code=class_code,
            vendor_id=self._id(f"{path}/vendor"),
            device_id=self._id(f"{path}/device"),
            bridges=[part for part in parts[:-1] if _FUNCTION.fullmatch(part)],
            # A device behind VMD or a Thunderbolt domain has several; the outermost is where it meets the CPU.
            host_bridge=next((part for part in parts if _HOST_BRIDGE.fullmatch(part)), ""),
            numa_node=numa_node,
            numa_reason=numa_reason,
            cpus=cpus,
            driver=driver,
            virtual_function=sysfs.exists(f"{path}/physfn", static=True),
        )

    def _id(self, path: str) -> int:
        try:
            return self._sysfs.number(path, static=True)
        except OSError:
            return -1

    def _name_ports(self) -> None:
        """Below a root port, levels alternate between upstream and downstream ports of switches."""
        with_bridge_below = {function.parent for function in self.functions.values() if function.is_bridge}
        for function in self.functions.values():
            if not function.is_bridge:
                continue
            depth = len(function.bridges)
            if depth == 0:
                function.port_type = "root_port"
            elif depth % 2 == 0:
                function.port_type = "switch_downstream"
            else:
                function.port_type = "switch_upstream" if function.address in with_bridge_below else "bridge"

    def link(self, function: PciFunction) -> PciLink:
        """The link above a function as it runs now. A device asleep in D3cold is not woken to be asked."""
        sysfs = self._sysfs
        try:
            if sysfs.text(f"{function.path}/power_state") == "D3cold":
                return PciLink(None, None, "the device sleeps (D3cold)")
        except OSError:
            pass  # before Linux 5.11
        return self._link(function, "current", static=False)

    def capability(self, function: PciFunction) -> PciLink:
        """What the function's end of the link could do at most."""
        return self._link(function, "max", static=True)

    def has_link(self, function: PciFunction) -> bool:
        """Whether the function is PCI Express at all (conventional and paravirtual devices have no link files)."""
        return self._sysfs.exists(f"{function.path}/current_link_speed", static=True)

    def _link(self, function: PciFunction, which: str, *, static: bool) -> PciLink:
        speed: float | None = None
        width: int | None = None
        why = ""
        try:
            speed = parse_speed(self._sysfs.text(f"{function.path}/{which}_link_speed", static=static))
            if speed is None:
                why = "the link speed reads Unknown"
        except OSError as error:
            why = reason(error)
        try:
            width = self._sysfs.number(f"{function.path}/{which}_link_width", static=static)
            if not 0 < width <= 32:  # 0: no link; 63 or 255: what a device that fell off the bus answers
                width, why = None, why or f"the link width reads {width}"
        except OSError as error:
            why = why or reason(error)
        return PciLink(speed, width, why)


def parse_speed(text: str) -> float | None:
    """``"16.0 GT/s PCIe"`` → 16.0; None for ``Unknown``."""
    try:
        return float(text.split()[0])
    except (ValueError, IndexError):
        return None


def distance(
    one: PciFunction, other: PciFunction, one_node: int | None = None, other_node: int | None = None
) -> tuple[str, str]:
    """(one of DISTANCES, "") for two functions, or ("", why it is not known).

    ``one_node`` and ``other_node`` replace the NUMA nodes that PCI gives, where a driver knows better.
    """
    if one.host_bridge != other.host_bridge or not one.host_bridge:
        first = one.numa_node if one_node is None else one_node
        second = other.numa_node if other_node is None else other_node
        if first is None or second is None:
            return "", "under different host bridges, and the NUMA node of one is not known"
        return (NODE if first == second else SYS), ""
    pairs = zip(one.bridges, other.bridges, strict=False)
    shared = next(
        (index for index, (left, right) in enumerate(pairs) if left != right), min(len(one.bridges), len(other.bridges))
    )
    if not shared and one.address[:-2] != other.address[:-2]:
        return PHB, ""  # different root ports, or different devices on the root bus
    # Bridges are root port, upstream, downstream, upstream, downstream … Two that last share an upstream port meet
    # inside that switch, which both cross; below, each further switch costs an upstream and a downstream port.
    at_switch = 1 if shared and shared % 2 == 0 else 0
    switches = at_switch
    for function in (one, other):
        below = len(function.bridges) - shared
        switches += max(0, below - at_switch + 1) // 2
    return (PIX if switches <= 1 else PXB), ""
