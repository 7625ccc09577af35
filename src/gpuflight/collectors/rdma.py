"""RDMA devices and ports with their counters, and the queue pairs and memory that processes hold on them."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.rates import Rates
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import edges, nodes
from gpuflight.sources.pci import DEVICES
from gpuflight.sources.rdma_netlink import Connection, MemoryRegion, QueuePair, RdmaNetlink
from gpuflight.sources.sysfs import Facts, SysFs, pci_address_in, reason

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcFs
    from gpuflight.sources.world import World

_CLASS = "class/infiniband"
# Read every round; on many cards each file is a query to the firmware, so the others take turns.
_KEY_COUNTERS = frozenset(
    (
        *("port_xmit_data", "port_rcv_data", "port_xmit_packets", "port_rcv_packets", "port_xmit_wait"),
        *("port_xmit_discards", "port_rcv_errors", "symbol_error", "link_downed", "link_error_recovery"),
        *("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "out_of_buffer"),
        *("np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets", "roce_adp_retrans"),
    )
)
# Both count units of four octets (InfiniBand Architecture Specification, PortCounters).
_DATA = {"port_xmit_data": "tx_bytes_per_s", "port_rcv_data": "rx_bytes_per_s"}
_RATE = re.compile(r"([\d.]+) Gb/sec")


class RdmaSettings(BaseModel):
    """What is read of RDMA devices."""

    model_config = ConfigDict(extra="forbid")

    counter_rounds: int = Field(6, ge=1, description="How often the less telling counters are read.")
    resource_rounds: int = Field(3, ge=1, description="How often queue pairs and memory regions are asked for.")
    max_queue_pairs: int = Field(128, ge=0, description="Most queue pairs drawn of one process.")
    memory_regions: bool = Field(False, description="Draw memory regions and protection domains one by one.")
    max_memory_regions: int = Field(256, ge=0, description="Most memory regions drawn of one process.")


class _Port(Struct):
    """A port's counters as last read: metrics and unknowns by name, and which files there are."""

    metrics: dict[str, int | float]
    unknown: dict[str, str]


class _Held(Struct):
    """What one process holds on one device."""

    queue_pairs: list[QueuePair]
    regions: list[MemoryRegion]


class Rdma(Collector):
    """RDMA devices, ports and counters; queue pairs and registered memory of processes."""

    seeds = True
    expands = (nodes.Process,)
    settings_class = RdmaSettings
    settings: RdmaSettings

    def __init__(self, settings: RdmaSettings | None = None) -> None:
        super().__init__(settings)
        self._rates = Rates()
        self._netlink: RdmaNetlink | None = None
        self._ports: dict[tuple[str, str], _Port] = {}
        self._held: dict[int, dict[str, _Held]] = {}
        self._peers: dict[tuple[str, int], Connection] = {}
        self._resources_why = ""
        self._round = 0

    def observe(self, world: World) -> None:
        sysfs: SysFs = world.sysfs
        self._sysfs, self._procfs = sysfs, world.procfs
        try:
            self._names = list(sysfs.list_dir(_CLASS))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise SourceUnavailable(f"RDMA devices cannot be listed: {reason(error)}", "mount /sys") from error
            self._names = []
        if not self._names:
            raise SourceUnavailable("no RDMA devices", "with an InfiniBand or RoCE card, load its driver (mlx5_ib …)")
        self._round += 1
        self._rates.begin(world.clock.monotonic_s(), forget=False)
        self._rates.drop(set(self._names))
        ports: dict[tuple[str, str], _Port] = {}
        for name in list(self._names):
            try:
                for port in sysfs.list_dir(f"{_CLASS}/{name}/ports"):
                    ports[name, port] = self._read_port(name, port, self._ports.get((name, port)))
            except OSError:
                self.lose("RDMA devices that vanished during the scan")
                self._names.remove(name)
                sysfs.forget(f"{_CLASS}/{name}")
        self._ports = ports
        if self._round % self.settings.resource_rounds == 1 or self.settings.resource_rounds == 1:
            self._read_resources(world)
        if self._resources_why:
            self.note(
                f"queue pairs and memory regions are not known: {self._resources_why}", "needs ib_core of Linux 4.17"
            )

    def close(self) -> None:
        if self._netlink is not None:
            self._netlink.close()

    # -- ports -----------------------------------------------------------------------------------------------------

    def _read_port(self, device: str, port: str, before: _Port | None) -> _Port:
        """Counters of a port. Which exist differs by vendor and link layer: a missing file is no fault."""
        sysfs, base = self._sysfs, f"{_CLASS}/{device}/ports/{port}"
        everything = before is None or (self._round + len(device)) % self.settings.counter_rounds == 0
        metrics = {} if before is None else dict(before.metrics)
        unknown = {} if before is None else dict(before.unknown)
        for directory in ("counters", "hw_counters"):
            try:
                names = sysfs.list_dir(f"{base}/{directory}", static=True)
            except OSError:
                continue
            for name in names:
                if name == "lifespan" or not (everything or name in _KEY_COUNTERS):
                    continue  # "lifespan" is how long the kernel caches the others, in ms
                try:
                    value = sysfs.number(f"{base}/{directory}/{name}")
                except OSError as error:
                    unknown[f"{name}_count"] = reason(error)
                    for metric in (f"{name}_count", f"{name}_per_s"):
                        metrics.pop(metric, None)
                    continue
                unknown.pop(f"{name}_count", None)
                metrics[f"{name}_count"] = value
                self._put_rate(metrics, unknown, f"{name}_per_s", (device, port, name), value)
                if name in _DATA:
                    self._put_rate(metrics, unknown, _DATA[name], (device, port, name, "bytes"), value * 4)
        return _Port(metrics, unknown)

    def _put_rate(
        self, metrics: dict[str, int | float], unknown: dict[str, str], name: str, key: object, value: int
    ) -> None:
        rate = self._rates.per_s(key, value)
        if rate is None:
            metrics.pop(name, None)
            unknown[name] = self._rates.why
        else:
            unknown.pop(name, None)
            metrics[name] = rate

    # -- resources -------------------------------------------------------------------------------------------------

    def _read_resources(self, world: World) -> None:
        if self._netlink is None:
            self._netlink = RdmaNetlink(world.tape)
        self._resources_why = ""
        self._held, self._peers = {}, {}
        try:
            indices = self._netlink.devices()
        except (OSError, SourceUnavailable) as error:
            self._resources_why = reason(error) if isinstance(error, OSError) else error.reason
            return
        for name, index in indices.items():
            try:
                for pair in self._netlink.queue_pairs(index):
                    if pair.pid:
                        self._hold(pair.pid, name).queue_pairs.append(pair)
                for connection in self._netlink.connections(index):
                    self._peers[name, connection.qpn] = connection
                for region in self._netlink.memory_regions(index):
                    if region.pid:
                        self._hold(region.pid, name).regions.append(region)
            except (OSError, SourceUnavailable) as error:
                self._resources_why = reason(error) if isinstance(error, OSError) else error.reason

    def _hold(self, pid: int, device: str) -> _Held:
        return self._held.setdefault(pid, {}).setdefault(device, _Held([], []))

    # -- entities --------------------------------------------------------------------------------------------------

    def seed(self) -> Batch:
        batch = Batch()
        for name in self._names:
            self._put_device(name, batch)
        for (device, port), counters in self._ports.items():
            entity = self._port(device, port, counters)
            batch.nodes.append(entity)
            batch.edges.append(edges.Belong(entity.id, f"RdmaDevice({device})"))
        return batch

    def _put_device(self, name: str, batch: Batch) -> None:
        sysfs, base = self._sysfs, f"{_CLASS}/{name}"
        facts = Facts(sysfs)
        facts.text("node_type", f"{base}/node_type")
        facts.text("firmware", f"{base}/fw_ver", optional=True)
        facts.text("node_guid", f"{base}/node_guid", optional=True)
        facts.text("board", f"{base}/board_id", optional=True)
        address = pci_address_in(sysfs.real(base))
        if address:
            facts.attributes["pci_address"] = address
            facts.numa_node(f"{DEVICES}/{address}/numa_node")
        netdevs = self._netdevs(base)
        if netdevs:
            facts.attributes["netdevs"] = netdevs
        device = nodes.RdmaDevice(name=name, attributes=facts.attributes, unknown=facts.unknown or None)
        batch.nodes.append(device)
        if address:
            batch.nodes.append(nodes.PciDevice(address=address))
            batch.edges.append(edges.AttachedTo(device.id, f"PciDevice({address})"))
        node = facts.attributes.get("numa_node")
        if node is not None:
            batch.nodes.append(nodes.Numa(index=node))
            batch.edges.append(edges.Affinity(device.id, f"Numa({node})"))
        for netdev in netdevs:
            batch.nodes.append(nodes.Nic(name=netdev))
            batch.edges.append(edges.HasAttribute(device.id, f"Nic({netdev})", {"relation": "interface"}))

    def _netdevs(self, base: str) -> list[str]:
        try:
            return self._sysfs.list_dir(f"{base}/device/net")
        except OSError:
            pass
        try:
            return [self._sysfs.text(f"{base}/parent", static=True)]  # soft RoCE names the interface it runs on
        except OSError:
            return []

    def _port(self, device: str, port: str, counters: _Port) -> nodes.RdmaPort:
        base = f"{_CLASS}/{device}/ports/{port}"
        facts = Facts(self._sysfs)
        for name, file in (("state", "state"), ("physical_state", "phys_state"), ("link_layer", "link_layer")):
            text = facts.text(name, f"{base}/{file}", static=name == "link_layer")
            if ": " in text:
                facts.attributes[name] = text.partition(": ")[2]  # "4: ACTIVE"
        facts.text("lid", f"{base}/lid", static=False, optional=True)
        rate = facts.text("rate", f"{base}/rate", static=False)
        match = _RATE.match(rate)
        if match:
            facts.metrics["speed_bits_per_s"] = float(match[1]) * 1e9
        else:
            facts.unknown["speed_bits_per_s"] = facts.unknown.get("rate", f"the rate reads {rate!r}")
        return nodes.RdmaPort(
            device=device,
            port=int(port),
            attributes=facts.attributes,
            metrics=facts.metrics | counters.metrics,
            unknown=(facts.unknown | counters.unknown) or None,
        )

    def expand(self, entities: Sequence[nodes.Process]) -> Batch:
        batch = Batch()
        if not self._held:
            return batch
        procfs: ProcFs = self._procfs
        for entity in entities:
            held = self._held.get(entity.pid)
            if held is None:
                continue
            if procfs.id_of(entity.pid) != entity.id:
                self.lose("vanished processes")
                continue
            for device, resources in held.items():
                self._put_held(entity.id, device, resources, batch)
        return batch

    def _put_held(self, process: str, device: str, held: _Held, batch: Batch) -> None:
        target = f"RdmaDevice({device})"
        batch.nodes.append(nodes.RdmaDevice(name=device))
        batch.edges.append(
            edges.Access(
                process,
                target,
                {},
                {
                    "queue_pairs_count": len(held.queue_pairs),
                    "memory_regions_count": len(held.regions),
                    "registered_bytes": sum(region.length_bytes for region in held.regions),
                },
            )
        )
        for pair in held.queue_pairs[: self.settings.max_queue_pairs]:
            self._put_queue_pair(process, device, pair, batch)
        hidden = len(held.queue_pairs) - self.settings.max_queue_pairs
        if hidden > 0:
            self.note("not every queue pair is drawn", "raise rdma.max_queue_pairs", hidden)
        if not self.settings.memory_regions:
            return
        for region in held.regions[: self.settings.max_memory_regions]:
            entity = nodes.RdmaMemoryRegion(
                device=device, mrn=region.mrn, metrics={"length_bytes": region.length_bytes}
            )
            batch.nodes.append(entity)
            batch.edges.append(edges.Access(process, entity.id))
            batch.edges.append(edges.Belong(entity.id, self._owner(device, region.pdn, target, batch)))
        hidden = len(held.regions) - self.settings.max_memory_regions
        if hidden > 0:
            self.note("not every memory region is drawn", "raise rdma.max_memory_regions", hidden)

    def _owner(self, device: str, pdn: int | None, target: str, batch: Batch) -> str:
        """The protection domain that something belongs to, else the device itself."""
        if pdn is None or not self.settings.memory_regions:
            return target
        domain = nodes.RdmaProtectionDomain(device=device, pdn=pdn)
        batch.nodes.append(domain)
        batch.edges.append(edges.Belong(domain.id, target))
        return domain.id

    def _put_queue_pair(self, process: str, device: str, pair: QueuePair, batch: Batch) -> None:
        attributes: dict[str, Any] = {"type": pair.type, "state": pair.state, "pid": pair.pid}
        if pair.path_mig_state:
            attributes["path_mig_state"] = pair.path_mig_state
        if pair.remote_qpn is not None:
            attributes["remote_qpn"] = pair.remote_qpn
        entity = nodes.RdmaQueuePair(device=device, qpn=pair.qpn, attributes=attributes)
        batch.nodes.append(entity)
        batch.edges.append(edges.Access(process, entity.id))
        batch.edges.append(edges.Belong(entity.id, self._owner(device, pair.pdn, f"RdmaDevice({device})", batch)))
        if pair.remote_qpn is None:
            return
        peer = self._peers.get((device, pair.qpn))
        if peer is not None:
            endpoint = nodes.RdmaQueuePairEndpoint(address=peer.destination, qpn=pair.remote_qpn)
        else:
            # Queue pairs connected by hand (NCCL does) have no address that the kernel would tell. Two peers may use
            # the same number, so that each such end stands for itself.
            endpoint = nodes.RdmaQueuePairEndpoint(
                address=f"peer of {device}/{pair.qpn}",
                qpn=pair.remote_qpn,
                attributes={"remote": True},
                unknown={"address": "not connected through the connection manager: the kernel does not tell it"},
            )
        batch.nodes.append(endpoint)
        batch.edges.append(edges.ConnectTo(entity.id, endpoint.id, {"state": pair.state, "half": True}))
