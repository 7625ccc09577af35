"""The PCIe fabric: bridges and devices, their links, and how near GPUs, network cards and NVMe disks are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Entity, edges, nodes
from gpuflight.graph.bandwidth import pcie_bytes_per_s
from gpuflight.sources.cpus import CpuTopology
from gpuflight.sources.devices import Attached, attached_devices
from gpuflight.sources.pci import DISTANCES, PciFunction, PciLink, PciTree, distance
from gpuflight.sources.sysfs import parse_list, pci_address, reason

if TYPE_CHECKING:
    from gpuflight.sources.world import World

# Base class and subclass codes of the PCI Code and ID Assignment Specification.
_CLASS_NAMES = {
    0x0100: "SCSI controller",
    0x0101: "IDE controller",
    0x0104: "RAID controller",
    0x0106: "SATA controller",
    0x0107: "SAS controller",
    0x0108: "NVMe controller",
    0x0180: "storage controller",
    0x0200: "Ethernet controller",
    0x0207: "InfiniBand controller",
    0x0280: "network controller",
    0x0300: "VGA controller",
    0x0302: "3D controller",
    0x0380: "display controller",
    0x0600: "host bridge",
    0x0604: "PCI bridge",
    0x0680: "bridge",
    0x0B40: "co-processor",
    0x0C06: "InfiniBand controller",
    0x1200: "processing accelerator",
}
_WORTH_DRAWING = {0x01, 0x02, 0x03, 0x12}  # mass storage, network, display, processing accelerators
_ALSO_WORTH = {0x0B40, 0x0C06}
_PORTS = ("root_port", "switch_downstream")
_NVIDIA, _NVSWITCH_CLASS = 0x10DE, 0x0680


class PciSettings(BaseModel):
    """What of the PCI tree is drawn."""

    model_config = ConfigDict(extra="forbid")

    all_devices: bool = Field(
        False, description="Draw every PCI function, not only GPUs, network, storage and bridges."
    )
    virtual_functions: bool = Field(False, description="Draw SR-IOV virtual functions too.")
    max_proximity: int = Field(64, ge=0, description="Most network cards and disks that one GPU is related to.")


class Pci(Collector):
    """The PCIe tree with its links, and distance classes between GPUs, network cards and NVMe disks."""

    seeds = True
    expands = (nodes.GPU, nodes.NPU)
    precedence = -10  # a driver knows its device's place better than sysfs does
    settings_class = PciSettings
    settings: PciSettings

    def __init__(self, settings: PciSettings | None = None) -> None:
        super().__init__(settings)
        self._tree: PciTree | None = None
        self._cpus: CpuTopology | None = None
        self._gpus: dict[str, tuple[str, int | None]] = {}

    def observe(self, world: World) -> None:
        if self._tree is None or self._cpus is None:
            self._tree = PciTree(world.sysfs)
            self._cpus = CpuTopology(world.sysfs, world.fs)
        try:
            self._tree.refresh()
        except OSError as error:
            raise SourceUnavailable(f"no PCI bus in sysfs: {reason(error)}", "mount /sys") from error
        if not self._tree.functions:
            raise SourceUnavailable(
                "the PCI bus has no devices", "nothing to do, unless this machine has one: see dmesg"
            )
        if self._tree.vanished:
            self.lose("PCI devices unplugged during the scan", self._tree.vanished)
        self._cpus.refresh()
        self._gpus.clear()  # of the last round; expand may come in several waves
        attached = attached_devices(world.sysfs, self._tree.functions)
        self._attached: list[Attached] = attached
        self._shown = self._choose(attached)

    def _choose(self, attached: list[Attached]) -> dict[str, PciFunction]:
        """The functions to draw, with every bridge above them."""
        assert self._tree is not None  # noqa: S101 - observe sets it
        functions = self._tree.functions
        used = {device.address for device in attached}
        chosen: dict[str, PciFunction] = {}
        hidden = 0
        for function in functions.values():
            if not (self.settings.all_devices or function.address in used or _worth_drawing(function)):
                continue
            if function.virtual_function and not self.settings.virtual_functions:
                hidden += 1
                continue
            for bridge in function.bridges:
                if bridge in functions:
                    chosen[bridge] = functions[bridge]
            chosen[function.address] = function
        if hidden:
            self.note("SR-IOV virtual functions are not drawn", "set pci.virtual_functions", hidden)
        return chosen

    # -- the tree ------------------------------------------------------------------------------------------------

    def seed(self) -> Batch:
        batch = Batch()
        roots: set[str] = set()
        links = self._read_links()
        for function in self._shown.values():
            batch.nodes.append(self._device(function, links))
        for function in self._shown.values():
            source = f"PciDevice({function.parent})"
            target = f"PciDevice({function.address})"
            if function.parent in self._shown:
                batch.edges.append(self._link_edge(function, source, target, links))
                continue
            # On a root bus: the way to other root buses and to memory leads over the host bridge and its NUMA node.
            if function.host_bridge:
                bridge = f"Device({function.host_bridge})"
                batch.edges.append(edges.AttachedTo(target, bridge))
                if function.host_bridge not in roots:
                    roots.add(function.host_bridge)
                    batch.nodes.append(
                        nodes.Device(name=function.host_bridge, attributes={"class_name": "PCI host bridge"})
                    )
                    if function.numa_node is not None:
                        batch.edges.append(edges.Affinity(bridge, f"Numa({function.numa_node})"))
            if function.numa_node is not None:
                batch.edges.append(edges.Affinity(target, f"Numa({function.numa_node})"))
        batch.nodes.extend(_numa_anchors(batch))
        return batch

    def _read_links(self) -> dict[str, PciLink]:
        """The link above each device and upstream port; for a root or downstream port that is the one below it."""
        assert self._tree is not None  # noqa: S101
        links: dict[str, PciLink] = {}
        for function in self._shown.values():
            if function.port_type in _PORTS or not self._tree.has_link(function):
                continue
            links[function.address] = link = self._tree.link(function)
            parent = self._shown.get(function.parent)
            if parent is not None and parent.port_type in _PORTS:
                links.setdefault(parent.address, link)
        return links

    def _device(self, function: PciFunction, links: dict[str, PciLink]) -> Entity:
        assert self._tree is not None  # noqa: S101
        attributes: dict[str, Any] = {
            "class_code": f"{function.class_code:06x}",
            "port_type": function.port_type,
        }
        class_name = _CLASS_NAMES.get(function.class_code >> 8)
        if class_name:
            attributes["class_name"] = class_name
        if function.vendor_id >= 0:
            attributes["vendor_id"] = f"{function.vendor_id:04x}"
            attributes["device_id"] = f"{function.device_id:04x}"
        if function.driver:
            attributes["driver"] = function.driver
        if function.cpus:
            attributes["cpus"] = function.cpus
        unknown: dict[str, str] = {}
        if function.numa_node is not None:
            attributes["numa_node"] = function.numa_node
        else:
            unknown["numa_node"] = function.numa_reason
        metrics: dict[str, int | float] = {}
        if self._tree.has_link(function):
            most = self._tree.capability(function)
            _put(metrics, unknown, "link_speed_max_gt_per_s", most.speed_gt_per_s, most.why)
            _put(metrics, unknown, "link_width_max", most.width, most.why)
            link = links.get(function.address)
            if link is not None:
                _put(metrics, unknown, "link_speed_gt_per_s", link.speed_gt_per_s, link.why)
                _put(metrics, unknown, "link_width", link.width, link.why)
        return nodes.PciDevice(
            address=function.address, attributes=attributes, metrics=metrics, unknown=unknown or None
        )

    def _link_edge(self, function: PciFunction, source: str, target: str, links: dict[str, PciLink]) -> edges.PcieLink:
        """The link above a function. ``expected_bytes_per_s`` is what it carries as it runs now, ``max_bytes_per_s``
        what both ends could agree on: GT/s x lanes x line coding / 8 (graph.bandwidth has codes and their source).
        """
        assert self._tree is not None  # noqa: S101
        metrics: dict[str, int | float] = {}
        unknown: dict[str, str] = {}
        link = links.get(function.address)
        if link is None:
            why = "not a PCI Express device" if not self._tree.has_link(function) else "no device below it is drawn"
            return edges.PcieLink(source, target, {}, {}, {"expected_bytes_per_s": why})
        rate = pcie_bytes_per_s(link.speed_gt_per_s or 0.0, link.width or 0)
        if function.port_type == "switch_downstream":
            # Upstream to downstream port is the inside of a switch: no link, but no more than the port's own passes it.
            _put(metrics, unknown, "expected_bytes_per_s", rate, link.why or "no such PCIe speed is known")
            return edges.PcieLink(source, target, {"internal": True}, metrics, unknown or None)
        _put(metrics, unknown, "link_speed_gt_per_s", link.speed_gt_per_s, link.why)
        _put(metrics, unknown, "link_width", link.width, link.why)
        _put(metrics, unknown, "expected_bytes_per_s", rate, link.why or "no such PCIe speed is known")
        mine = self._tree.capability(function)
        parent = self._tree.functions.get(function.parent)
        theirs = self._tree.capability(parent) if parent is not None else mine
        speed = _least(mine.speed_gt_per_s, theirs.speed_gt_per_s)
        width = _least(mine.width, theirs.width)
        if speed is not None and width is not None:
            metrics["link_speed_max_gt_per_s"] = speed
            metrics["link_width_max"] = width
            most = pcie_bytes_per_s(speed, width)
            if most is not None:
                metrics["max_bytes_per_s"] = most
        else:
            unknown["max_bytes_per_s"] = mine.why or theirs.why
        return edges.PcieLink(source, target, {}, metrics, unknown or None)

    # -- GPUs and NPUs -------------------------------------------------------------------------------------------

    def expand(self, entities: Sequence[nodes.GPU | nodes.NPU]) -> Batch:
        assert self._tree is not None  # noqa: S101
        batch = Batch()
        for entity in entities:
            given = entity.attributes.get("pci_address")
            address = pci_address(given) if isinstance(given, str) else ""
            function = self._tree.functions.get(address)
            node = self._node_of(entity, function)
            if node is not None:
                batch.edges.append(edges.Affinity(entity.id, f"Numa({node})"))
            if function is None:
                self.lose("GPUs that are not on a PCI bus seen here")
                continue
            batch.edges.append(edges.AttachedTo(entity.id, f"PciDevice({address})"))
            if address not in self._shown:
                batch.nodes.append(nodes.PciDevice(address=address))
            self._relate(entity, function, node, batch)
            for other_id, (other_address, other_node) in self._gpus.items():
                other = self._tree.functions[other_address]
                near, why = distance(function, other, node, other_node)
                first, second = sorted((entity.id, other_id))
                batch.edges.append(_proximity(first, second, near, why))
            self._gpus[entity.id] = (address, node)
        batch.nodes.extend(_numa_anchors(batch))
        return batch

    def _node_of(self, entity: Entity, function: PciFunction | None) -> int | None:
        """NUMA node of a GPU: what its driver says, else the node of the CPUs its driver names, else what PCI says.

        On coherent links (Grace) sysfs gives the node of the PCIe side, which is not where the GPU's traffic goes.
        """
        assert self._cpus is not None  # noqa: S101
        given = entity.attributes.get("numa_node")
        if isinstance(given, int) and given >= 0:
            return given
        several = entity.attributes.get("numa_nodes")
        if isinstance(several, list | tuple) and several:
            # The driver names more than one; PCI may say which of them, but not add another.
            return function.numa_node if function is not None and function.numa_node in several else None
        cpus = entity.attributes.get("cpus")
        if isinstance(cpus, str) and cpus:
            try:
                near = self._cpus.nodes_of(parse_list(cpus))
            except ValueError:
                near = []
            if len(near) == 1:
                return near[0]
        return function.numa_node if function is not None else None

    def _relate(self, entity: Entity, function: PciFunction, node: int | None, batch: Batch) -> None:
        """Proximity to network cards, RDMA devices and NVMe disks, nearest first."""
        assert self._tree is not None  # noqa: S101
        found: list[tuple[int, Attached, str, str]] = []
        for device in self._attached:
            other = self._tree.functions[device.address]
            if other.virtual_function and not self.settings.virtual_functions:
                continue
            near, why = distance(function, other, node)
            found.append((DISTANCES.index(near) if near else len(DISTANCES), device, near, why))
        found.sort(key=lambda entry: entry[0])
        best: dict[str, int] = {}
        for rank, device, near, why in found[: self.settings.max_proximity]:
            best.setdefault(device.kind, rank)
            edge = _proximity(entity.id, f"{device.kind}({device.name})", near, why)
            if near and rank == best[device.kind]:
                edge.attributes["nearest"] = True
            batch.edges.append(edge)
            batch.nodes.append(nodes.NODE_KINDS[device.kind](name=device.name))  # type: ignore[call-arg]
        if len(found) > self.settings.max_proximity:
            self.note(
                "only the nearest network cards and disks are related to each GPU",
                "raise pci.max_proximity",
                len(found) - self.settings.max_proximity,
            )


def _worth_drawing(function: PciFunction) -> bool:
    base, subclass = function.class_code >> 16, function.class_code >> 8
    if base in _WORTH_DRAWING or subclass in _ALSO_WORTH:
        return True
    return subclass == _NVSWITCH_CLASS and function.vendor_id == _NVIDIA


def _proximity(source: str, target: str, near: str, why: str) -> edges.Proximity:
    if near:
        return edges.Proximity(source, target, {"distance": near, "pci_distance": near})
    return edges.Proximity(source, target, {}, {}, {"distance": why})


def _numa_anchors(batch: Batch) -> list[Entity]:
    indices = {edge.target[5:-1] for edge in batch.edges if edge.target.startswith("Numa(")}
    return [nodes.Numa(index=int(index)) for index in sorted(indices)]


def _put(
    metrics: dict[str, int | float], unknown: dict[str, str], name: str, value: int | float | None, why: str
) -> None:
    if value is None:
        unknown[name] = why or "not readable"
    else:
        metrics[name] = value


def _least(first: float | None, second: float | None) -> Any:
    return None if first is None or second is None else min(first, second)
