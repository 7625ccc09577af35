"""Edges between GPUs, and between GPUs and NVSwitches: NVLinks and proximity."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from gpuflight.collectors.base import Batch
from gpuflight.graph import edges, nodes
from gpuflight.sources.nvml import LINK_BYTES_PER_S, Gpu, Link, NvmlSnapshot

UNNAMED_SWITCH = "fabric"
"""Address of the NVSwitches that NVML does not name, as on machines whose switches stand in another chassis."""


class _Bundle(Struct):
    """The links that lead from one GPU to one other end, counted at one side."""

    links: int = 0
    active: int = 0
    silent: int = 0  # whose state NVML did not give
    errors: int | None = None
    versions: set[str] = set()

    def add(self, link: Link) -> None:
        self.links += 1
        self.active += link.active is True
        self.silent += link.active is None
        if link.errors_count is not None:
            self.errors = (self.errors or 0) + link.errors_count
        if link.version:
            self.versions = self.versions | {link.version}

    def joined(self, other: _Bundle) -> _Bundle:
        """With the same links as the GPU at the other end sees them: a link is up only if both say so."""
        errors = [side for side in (self.errors, other.errors) if side is not None]
        return _Bundle(
            max(self.links, other.links),
            min(self.active, other.active),
            max(self.silent, other.silent),
            sum(errors) if errors else None,
            self.versions | other.versions,
        )


class LinkEdges:
    """NVLink and Proximity edges of one snapshot. ``unplaced`` counts, by GPU, links whose other end nobody names."""

    def __init__(self, snapshot: NvmlSnapshot) -> None:
        self._by_address = {gpu.address: f"GPU(uuid={gpu.uuid})" for gpu in snapshot.gpus if gpu.address}
        self.unplaced: dict[str, int] = {}
        self.switches: set[str] = set()
        self._bundles: dict[tuple[str, str], _Bundle] = {}
        self._to_switches: dict[str, int] = {}
        for gpu in snapshot.gpus:
            self._place(gpu)

    def _place(self, gpu: Gpu) -> None:
        source = f"GPU(uuid={gpu.uuid})"
        mine: dict[str, _Bundle] = {}
        for link in gpu.links:
            target = self._target(link)
            if not target:
                self.unplaced[gpu.uuid] = self.unplaced.get(gpu.uuid, 0) + 1
                continue
            mine.setdefault(target, _Bundle()).add(link)
            if target.startswith("NvSwitch(") and link.active:
                self._to_switches[source] = self._to_switches.get(source, 0) + 1
        for target, bundle in mine.items():
            # Undirected: between two GPUs the lesser id is the source, towards a switch the GPU is.
            key = (target, source) if target.startswith("GPU(") and target < source else (source, target)
            known = self._bundles.get(key)
            self._bundles[key] = bundle if known is None else known.joined(bundle)

    def _target(self, link: Link) -> str:
        known = self._by_address.get(link.remote_address)
        if known is not None:
            return known
        if link.remote == "switch":
            address = link.remote_address or UNNAMED_SWITCH
            self.switches.add(address)
            return f"NvSwitch({address})"
        return f"PciDevice({link.remote_address})" if link.remote_address else ""

    def add_to(self, batch: Batch, snapshot: NvmlSnapshot) -> None:
        """Append the switches and all edges."""
        for address in sorted(self.switches):
            switch = nodes.NvSwitch(address=address)
            batch.nodes.append(switch)
            if address == UNNAMED_SWITCH:
                switch.attributes = {"name": "NVSwitch fabric"}
                switch.unknown = {"pci_address": "NVML does not name the switches"}
            else:
                switch.attributes = {"pci_address": address}
                batch.nodes.append(nodes.PciDevice(address=address))
                batch.edges.append(edges.AttachedTo(switch.id, f"PciDevice({address})"))
        for (source, target), bundle in self._bundles.items():
            if target.startswith("PciDevice("):
                batch.nodes.append(nodes.PciDevice(address=target[10:-1]))
            batch.edges.append(_nvlink(source, target, bundle))
        self._add_proximity(batch, snapshot)

    def _add_proximity(self, batch: Batch, snapshot: NvmlSnapshot) -> None:
        for pair in snapshot.pairs:
            source, target = sorted((f"GPU(uuid={pair.a})", f"GPU(uuid={pair.b})"))
            direct = self._bundles.get((source, target))
            links = direct.active if direct is not None else 0
            # Through switches every GPU reaches every other over all its links, as nvidia-smi topo -m counts them.
            links = links or min(self._to_switches.get(source, 0), self._to_switches.get(target, 0))
            attributes: dict[str, object] = {f"p2p_{name}": status for name, status in pair.p2p.items()}
            unknown = dict(pair.unknown)
            if pair.distance:
                attributes["pci_distance"] = pair.distance
            elif "distance" in unknown:
                unknown["pci_distance"] = unknown["distance"]
            distance = f"NV{links}" if links else pair.distance
            if distance:
                attributes["distance"] = distance
                unknown.pop("distance", None)
            batch.edges.append(edges.Proximity(source, target, attributes, {}, unknown or None))


def _nvlink(source: str, target: str, bundle: _Bundle) -> edges.NvLink:
    metrics: dict[str, int | float] = {"links_count": bundle.links}
    unknown: dict[str, str] = {}
    if bundle.silent:
        unknown["links_active_count"] = f"NVML did not give the state of {bundle.silent} of the links"
    else:
        metrics["links_active_count"] = bundle.active
    attributes: dict[str, object] = {}
    rates = [LINK_BYTES_PER_S.get(version) for version in bundle.versions]
    if bundle.versions:
        attributes["nvlink_version"] = max(bundle.versions)
    known = _all_known(rates)
    if bundle.silent:
        unknown["expected_bytes_per_s"] = unknown["links_active_count"]
    elif known:
        metrics["expected_bytes_per_s"] = min(known) * bundle.active
    else:
        unknown["expected_bytes_per_s"] = "the bandwidth of this NVLink version is not known"
    if bundle.errors is None:
        unknown["errors_count"] = "NVML gives no error counters for these links"
    else:
        metrics["errors_count"] = bundle.errors
    return edges.NvLink(source, target, attributes, metrics, unknown or None)


def _all_known(rates: Iterable[float | None]) -> list[float]:
    """The rates, or nothing if one of them is not known."""
    found = list(rates)
    return [rate for rate in found if rate is not None] if None not in found else []
