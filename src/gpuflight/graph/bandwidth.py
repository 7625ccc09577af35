"""How much a hop should be able to carry in one direction, computed from what the graph knows about it.

Every figure is a line rate after line coding and before protocol overhead, in bytes/s: what cannot be exceeded, not
what will be reached. What is not known stays unknown, with the reason.
"""

from __future__ import annotations

from msgspec import Struct

from gpuflight.graph.edges import (
    Access,
    Affinity,
    AttachedTo,
    Belong,
    ConnectTo,
    Host,
    NumaAccess,
    NumaDistance,
    NumaSetContain,
    NvLink,
    Own,
    PcieLink,
    RunOn,
)
from gpuflight.graph.element import Edge, Entity
from gpuflight.graph.graph import Graph
from gpuflight.graph.nodes import GPU, CpuPackage, MigInstance, NvSwitch, PciDevice, RdmaPort, Socket

PCIE_CODING = {
    2.5: 8 / 10,
    5.0: 8 / 10,
    8.0: 128 / 130,
    16.0: 128 / 130,
    32.0: 128 / 130,
    64.0: 242 / 256,
}
"""Share of the raw rate left by the line code, by GT/s per lane. PCI Express Base Specification: 8b/10b in 1.0 and 2.0,
128b/130b in 3.0 to 5.0; 6.0 sends flits of 256 bytes of which 14 are CRC and FEC."""

PCIE_GT_PER_S = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
"""Transfer rate of a lane by PCIe generation."""

NVLINK_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""One NVLink, one direction, by NVLink generation. NVIDIA data sheets: P100 4 links 160 GB/s, V100 6 links 300 GB/s,
A100 12 links 600 GB/s, H100 18 links 900 GB/s, B200 18 links 1,800 GB/s, each the sum of both directions."""

MEMORY_UNKNOWN = "the bandwidth of memory is not reported by the system"


class Bandwidth(Struct, frozen=True):
    """What a hop can carry. Either ``bytes_per_s`` is known, with its ``basis``; or the hop is no link at all
    (``unlimited``: the two ends are the same thing or one contains the other); or ``reason`` says why it is unknown.

    ``at_least_bytes_per_s`` orders unknown hops of which a lower bound is known."""

    bytes_per_s: float | None = None
    basis: str = ""
    reason: str = ""
    unlimited: bool = False
    at_least_bytes_per_s: float = 0.0


SAME = Bandwidth(unlimited=True, basis="not a link")


def pcie_bytes_per_s(gt_per_s: float, width: float) -> float | None:
    """Bytes/s in one direction of a PCIe link of ``width`` lanes at ``gt_per_s``; None if no such link exists."""
    coding = PCIE_CODING.get(gt_per_s)
    if coding is None or width <= 0:
        return None
    return gt_per_s * 1e9 / 8 * coding * width


class Bandwidths:
    """Answers for the edges of one graph; indexes of devices by PCI and network address are made when first needed."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes
        self._edges = graph.edges.values()
        self._nvswitch_shares: dict[str, list[float | None]] | None = None  # by GPU: its links to each NVSwitch
        self._by_pci: dict[str, PciDevice] | None = None
        self._rate_by_address: dict[str, tuple[str, float]] | None = None

    def of(self, edge: Edge) -> Bandwidth:
        """What an edge can carry, from its own metrics or from what its ends say."""
        if isinstance(edge, NvLink) and (striped := self._striped(edge)) is not None:
            return striped
        given = edge.metrics.get("expected_bytes_per_s")
        if given is not None and given > 0:
            return Bandwidth(bytes_per_s=float(given), basis="expected_bytes_per_s of the edge")
        answer = self._computed(edge)
        why = (edge.unknown or {}).get("expected_bytes_per_s")
        if why is not None and not answer.unlimited:
            return Bandwidth(reason=why, at_least_bytes_per_s=answer.at_least_bytes_per_s)
        return answer

    def _computed(self, edge: Edge) -> Bandwidth:
        source = self.nodes.get(edge.source)
        target = self.nodes.get(edge.target)
        match edge:
            case AttachedTo() | Belong() | RunOn() | Own() | Host():
                return SAME
            case PcieLink():
                answer = self._pcie_link(edge, target)
            case NvLink():
                answer = _nvlink(edge, source, target)
            case Affinity():
                answer = Bandwidth(reason=MEMORY_UNKNOWN) if isinstance(source, CpuPackage) else self._device(source)
            case Access():
                answer = self._device(target)
            case ConnectTo():
                answer = self._connection(source, target)
            case NumaAccess() | NumaSetContain():
                answer = Bandwidth(reason=MEMORY_UNKNOWN)
            case NumaDistance():
                answer = Bandwidth(reason="the bandwidth between NUMA nodes is not reported by the system")
            case _:
                answer = self._device(source)
                if answer.bytes_per_s is None:
                    answer = self._device(target)
                if answer.bytes_per_s is None:
                    answer = Bandwidth(reason=f"nothing says what a {edge.kind} edge can carry")
        return answer

    def _striped(self, edge: Edge) -> Bandwidth | None:
        """A GPU's link to an NVSwitch counts as all its links to switches: transfers are spread over all of them."""
        if self._nvswitch_shares is None:
            self._nvswitch_shares = {}
            for link in self._edges:
                if isinstance(link, NvLink) and (gpu := self._gpu_of_switch_link(link)) is not None:
                    share = (
                        link.metrics.get("expected_bytes_per_s")
                        or _nvlink(link, self.nodes.get(link.source), self.nodes.get(link.target)).bytes_per_s
                    )
                    self._nvswitch_shares.setdefault(gpu, []).append(share)
        gpu = self._gpu_of_switch_link(edge)
        shares = self._nvswitch_shares.get(gpu, []) if gpu is not None else []
        known = [share for share in shares if share]
        if len(shares) < 2 or len(known) < len(shares):
            return None
        return Bandwidth(bytes_per_s=float(sum(known)), basis=f"NVLinks to {len(known)} switches together")

    def _gpu_of_switch_link(self, link: Edge) -> str | None:
        if link.metrics.get("links_active_count") == 0:
            return None
        ends = {type(self.nodes.get(end)): end for end in (link.source, link.target)}
        return ends.get(GPU) if NvSwitch in ends else None

    def _pcie_link(self, edge: Edge, downstream: Entity | None) -> Bandwidth:
        for metrics in (edge.metrics, downstream.metrics if downstream is not None else {}):
            answer = _pcie(metrics.get("link_speed_gt_per_s"), metrics.get("link_width"))
            if answer is not None:
                return answer
        return Bandwidth(reason="speed and width of the PCIe link are not known")

    def _device(self, device: Entity | None) -> Bandwidth:
        """What a device's own link to the machine or the network carries."""
        if device is None:
            return Bandwidth(reason="the device is not in this graph")
        metrics = device.metrics
        generation = metrics.get("pcie_gen")
        answer = _pcie(PCIE_GT_PER_S.get(int(generation)) if generation else None, metrics.get("pcie_width"))
        answer = answer or _pcie(metrics.get("link_speed_gt_per_s"), metrics.get("link_width"))
        if answer is None and not isinstance(device, PciDevice):
            function = self._function_of(device)
            if function is not None:
                answer = _pcie(function.metrics.get("link_speed_gt_per_s"), function.metrics.get("link_width"))
        if answer is not None:
            return answer
        rate = metrics.get("speed_bits_per_s")
        if rate is not None and rate > 0:
            return Bandwidth(bytes_per_s=rate / 8, basis=f"line rate of {device.label}")
        if isinstance(device, GPU | MigInstance | PciDevice):
            return Bandwidth(reason=f"the PCIe link of {device.label} is not known")
        return Bandwidth(reason=f"nothing says what {device.label} can carry")

    def _function_of(self, device: Entity) -> PciDevice | None:
        address = device.attributes.get("pci_address")
        if not isinstance(address, str):
            return None
        if self._by_pci is None:
            self._by_pci = {node.address: node for node in self.nodes.values() if isinstance(node, PciDevice)}
        return self._by_pci.get(address.lower())

    def _connection(self, source: Entity | None, target: Entity | None) -> Bandwidth:
        """A connection carries what the slower of the interfaces with its two addresses does; on loopback, unknown."""
        rates = []
        for end in (source, target):
            if isinstance(end, Socket):
                host = _host_part(end.address)
                if host.startswith("127.") or host == "::1":
                    return Bandwidth(reason="loopback is bounded by CPU and memory, not by a link")
                known = self._rates().get(host)
                if known is not None and not end.attributes.get("remote"):
                    rates.append(known)
            elif end is not None and not isinstance(end, RdmaPort):
                answer = self._rdma(end)
                if answer is not None:
                    rates.append(answer)
        if rates:
            name, rate = min(rates, key=lambda known: known[1])
            return Bandwidth(bytes_per_s=rate, basis=f"line rate of {name}")
        return Bandwidth(reason="the interface of the connection, or its rate, is not known")

    def _rdma(self, end: Entity) -> tuple[str, float] | None:
        device = getattr(end, "device", None)
        return self._rates().get(f"rdma {device}") if device else None

    def _rates(self) -> dict[str, tuple[str, float]]:
        """Line rate by local IP address, and by RDMA device (its fastest port)."""
        if self._rate_by_address is None:
            rates: dict[str, tuple[str, float]] = {}
            for node in self.nodes.values():
                bits = node.metrics.get("speed_bits_per_s")
                if bits is None or bits <= 0:
                    continue
                if isinstance(node, RdmaPort):
                    key = f"rdma {node.device}"
                    if key not in rates or rates[key][1] < bits / 8:
                        rates[key] = (node.label, bits / 8)
                    continue
                addresses = node.attributes.get("addresses") or ()
                for address in (addresses,) if isinstance(addresses, str) else addresses:
                    rates[str(address).partition("/")[0]] = (node.label, bits / 8)
            self._rate_by_address = rates
        return self._rate_by_address


def _pcie(gt_per_s: float | None, width: float | None) -> Bandwidth | None:
    if not gt_per_s or not width:
        return None
    rate = pcie_bytes_per_s(float(gt_per_s), width)
    if rate is None:
        return None
    generation = next((number for number, speed in PCIE_GT_PER_S.items() if speed == gt_per_s), None)
    return Bandwidth(bytes_per_s=rate, basis=f"PCIe {generation}.0 x{int(width)}")


def _nvlink(edge: Edge, source: Entity | None, target: Entity | None) -> Bandwidth:
    links = edge.metrics.get("links_active_count", edge.metrics.get("links_count"))
    if links == 0:
        return Bandwidth(reason="no NVLink is active between the two")
    version: object = None
    for holder in (edge, source, target):
        if holder is not None:
            version = holder.attributes.get("nvlink_version") or holder.metrics.get("nvlink_version") or version
        if version:
            break
    rate = NVLINK_BYTES_PER_S.get(_major(version))
    if rate is not None and links:
        return Bandwidth(bytes_per_s=rate * links, basis=f"NVLink {version}, {int(links)} links")
    missing = "number of active links" if not links else "version of the NVLinks"
    return Bandwidth(
        reason=f"the {missing} is not known", at_least_bytes_per_s=min(NVLINK_BYTES_PER_S.values()) * (links or 1)
    )


def _major(version: object) -> int:
    """4 of ``4``, ``4.0`` or ``"4.0"``; 0 of anything else."""
    head = str(version).partition(".")[0]
    return int(head) if head.isascii() and head.isdigit() else 0


def _host_part(address: str) -> str:
    """The IP address of ``10.0.0.5:80`` or ``[::1]:80``."""
    host = address.rpartition(":")[0] or address
    return host.removeprefix("[").removesuffix("]").partition("%")[0]
