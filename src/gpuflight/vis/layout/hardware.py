"""The ground: devices in their PCIe switch, switches in their NUMA node, NUMA nodes in the host's hardware band."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from gpuflight.graph import Entity, Graph
from gpuflight.vis.layout.item import Item

HARDWARE_KINDS = frozenset(
    (
        "CpuPackage", "Numa", "NumaSet", "GPU", "MigInstance", "NvSwitch", "NPU", "PciDevice", "Nic", "Disk", "Mount",
        "RdmaDevice", "RdmaPort", "Device",
    )
)  # fmt: skip
DEVICE_KINDS = (
    "GPU",
    "NPU",
    "Nic",
    "RdmaDevice",
    "Disk",
    "Device",
)  # in the order in which one PCI function serves them
_ACCELERATORS = frozenset(("GPU", "NPU"))


class _Wiring:
    """What the placement edges and attributes say about where devices are."""

    def __init__(self, graph: Graph, items: Mapping[str, Item]) -> None:
        self.items = items
        self.upstream: dict[str, str] = {}
        self.function: dict[str, str] = {}  # device → its PCI function
        self.numa: dict[str, str] = {}
        self.links: dict[str, list[str]] = defaultdict(list)  # mount ↔ disk and the like
        for source, target, kind in graph.edges:
            if source == target:
                continue
            if kind == "PcieLink":
                if items[source].kind == "PciDevice" and items[target].kind == "PciDevice":
                    self.upstream.setdefault(target, source)
            elif kind == "AttachedTo":
                self.function.setdefault(source, target)
            elif kind == "Affinity":
                node = self._numa_node(target)
                if node:
                    self.numa.setdefault(source, node)
            elif items[source].kind in ("Mount", "Disk") and items[target].kind == "Disk":
                self.links[source].append(target)

    def _numa_node(self, node_id: str) -> str | None:
        """A NUMA node by its own id, or the only member of a set of one."""
        item = self.items[node_id]
        if item.kind == "Numa":
            return node_id
        if item.kind == "NumaSet" and item.entity is not None:
            members = str(getattr(item.entity, "nodes", ""))
            if members.isdigit():
                return self._numa_id(item.entity, int(members))
        return None

    def _numa_id(self, entity: Entity, index: int) -> str | None:
        ns = f"ns={entity.ns}," if entity.ns else ""
        node_id = f"Numa({ns}{index})"
        return node_id if node_id in self.items and self.items[node_id].entity is not None else None

    def function_of(self, item: Item) -> str | None:
        """The PCI function of a device, by edge or by its pci_address attribute."""
        known = self.function.get(item.id)
        if known is not None:
            return known
        address = item.entity.attributes.get("pci_address") if item.entity is not None else None
        if isinstance(address, str) and item.entity is not None:
            ns = f"ns={item.entity.ns}," if item.entity.ns else ""
            node_id = f"PciDevice({ns}{address.lower()})"
            if node_id in self.items and self.items[node_id].entity is not None:
                return node_id
        return None

    def numa_of(self, node_id: str) -> str | None:
        """NUMA node of a device or PCI function: its own, its function's, or that of a bridge above it."""
        seen: set[str] = set()
        at: str | None = node_id
        while at is not None and at not in seen and at in self.items:
            seen.add(at)
            if at in self.numa:
                return self.numa[at]
            entity = self.items[at].entity
            if entity is not None:
                index = entity.attributes.get("numa_node")
                if isinstance(index, int) and not isinstance(index, bool) and index >= 0:
                    return self._numa_id(entity, index)
            at = self.function.get(at) or self.upstream.get(at)
        return None

    def bridges(self, function: str) -> list[str]:
        """The bridges above a PCI function, nearest first."""
        above: list[str] = []
        at = self.upstream.get(function)
        while at is not None and at not in above and len(above) < 32:
            above.append(at)
            at = self.upstream.get(at)
        return above


def nest_hardware(
    graph: Graph,
    items: Mapping[str, Item],
    hardware: Sequence[Item],
    parents: dict[Item, Item],
    holders: Mapping[Item, list[Item]],
) -> None:
    """Fill ``parents`` for every one of ``hardware`` that stands in another one; the rest goes to the hardware band."""
    if not hardware:
        return
    wiring = _Wiring(graph, items)
    devices = [item for item in hardware if item.kind in DEVICE_KINDS]
    devices.sort(key=lambda item: (DEVICE_KINDS.index(item.kind), item.id))
    functions: dict[str, str] = {}  # function → the device that shows it
    below: dict[str, int] = defaultdict(int)
    accelerated: set[str] = set()
    for item in devices:
        function = wiring.function_of(item)
        if function is None:
            continue
        functions.setdefault(function, item.id)
        for bridge in wiring.bridges(function):
            below[bridge] += 1
            if item.kind in _ACCELERATORS:
                accelerated.add(bridge)
    frames = _switch_frames(wiring, below, accelerated)
    for item in hardware:
        parent = _parent(item, wiring, functions, frames, holders)
        if parent is not None and parent != item.id and items[parent].entity is not None:
            parents[item] = items[parent]


def _switch_frames(wiring: _Wiring, below: dict[str, int], accelerated: set[str]) -> set[str]:
    """Bridges worth a box: several devices meet there, a GPU among them, and no nearer bridge holds the same ones."""
    frames: set[str] = set()
    for bridge in sorted(accelerated):
        if below[bridge] < 2:
            continue
        nearer = [child for child, up in wiring.upstream.items() if up == bridge and below.get(child) == below[bridge]]
        if not nearer:
            frames.add(bridge)
    return frames


def _parent(
    item: Item, wiring: _Wiring, functions: dict[str, str], frames: set[str], holders: Mapping[Item, list[Item]]
) -> str | None:
    kind = item.kind
    items = wiring.items
    held = [
        holder.id for holder in holders.get(item, ()) if holder.entity is not None and holder.kind in HARDWARE_KINDS
    ]
    if held and kind != "PciDevice":
        return min(held)
    if kind == "PciDevice":
        if item.id in functions and item.id not in frames:
            return functions[item.id]
        above = next((bridge for bridge in wiring.bridges(item.id) if bridge in frames), None)
        return above or wiring.numa_of(item.id)
    if kind in DEVICE_KINDS:
        parent = _named(item, "parent", "Disk", items) if kind == "Disk" else None
        if parent is not None:
            return parent
        function = wiring.function_of(item)
        if function is not None:
            above = next((bridge for bridge in wiring.bridges(function) if bridge in frames), None)
            if above is not None:
                return above
            return wiring.numa_of(item.id) or wiring.numa_of(function)
        return wiring.numa_of(item.id)
    if kind == "CpuPackage":
        return wiring.numa_of(item.id)
    if kind == "RdmaPort" and item.entity is not None:
        ns = f"ns={item.entity.ns}," if item.entity.ns else ""
        device = f"RdmaDevice({ns}{getattr(item.entity, 'device', '')})"
        return device if device in items else None
    if kind in ("Mount", "MigInstance"):
        linked = wiring.links.get(item.id)
        return min(linked) if linked else None
    return None


def _named(item: Item, attribute: str, kind: str, items: Mapping[str, Item]) -> str | None:
    name = item.entity.attributes.get(attribute) if item.entity is not None else None
    if not isinstance(name, str) or not name or item.entity is None:
        return None
    ns = f"ns={item.entity.ns}," if item.entity.ns else ""
    node_id = f"{kind}({ns}{name})"
    return node_id if node_id in items and node_id != item.id else None
