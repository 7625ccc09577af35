"""Network interfaces of the host: speed, traffic, errors, and the PCI device and NUMA node they sit on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.rates import Rates
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import edges, nodes
from gpuflight.sources.netdev import NetCounters, local_addresses, parse_net_dev
from gpuflight.sources.pci import DEVICES
from gpuflight.sources.sysfs import Facts, SysFs, pci_address_in, reason

if TYPE_CHECKING:
    from gpuflight.sources.world import World

_CLASS = "class/net"
_RECHECK_ROUNDS = 12  # after which speed, addresses and stacking are read again even if nothing seems to have changed
_RATES = {name: f"{name}_per_s" for name in NetCounters.__struct_fields__}


class NicSettings(BaseModel):
    """Which interfaces are drawn."""

    model_config = ConfigDict(extra="forbid")

    veth: bool = Field(False, description="Draw the host's ends of container links (veth) too.")


class _Interface(Struct):
    """Facts of one interface that hold until its link changes."""

    attributes: dict[str, Any]
    unknown: dict[str, str]
    speed_bits_per_s: int | None
    lower: list[str]
    veth: bool
    stamp: tuple[str, str]
    round: int


class Nics(Collector):
    """Network interfaces with speed, traffic and errors, on their PCI devices and NUMA nodes."""

    seeds = True
    settings_class = NicSettings
    settings: NicSettings

    def __init__(self, settings: NicSettings | None = None) -> None:
        super().__init__(settings)
        self._rates = Rates()
        self._known: dict[str, _Interface] = {}
        self._addresses: dict[str, list[str]] = {}
        self._counters: dict[str, NetCounters] = {}
        self._counters_why = ""
        self._round = 0

    def observe(self, world: World) -> None:
        self._round += 1
        self._sysfs: SysFs = world.sysfs
        try:
            names = self._sysfs.list_dir(_CLASS)
        except OSError as error:
            raise SourceUnavailable(f"no network interfaces in sysfs: {reason(error)}", "mount /sys") from error
        self._rates.begin(world.clock.monotonic_s())
        self._counters_why = "not an interface of this network namespace"
        try:
            # One file for all of them; statistics/ would be eight files each.
            self._counters = parse_net_dev(world.procfs.net("self", "dev"))
        except OSError as error:
            self._counters, self._counters_why = {}, reason(error)
        before, self._known = self._known, {}
        changed = False
        for name in names:
            interface = self._look(name, before.get(name))
            if interface is not None:
                self._known[name] = interface
                changed = changed or interface is not before.get(name)
        for gone in before.keys() - self._known.keys():
            self._sysfs.forget(f"{_CLASS}/{gone}")
            changed = True
        if changed or self._round % _RECHECK_ROUNDS == 1:
            self._addresses = self._read_addresses(world)

    def _look(self, name: str, known: _Interface | None) -> _Interface | None:
        sysfs, base = self._sysfs, f"{_CLASS}/{name}"
        try:
            state = sysfs.text(f"{base}/operstate")
        except OSError as error:
            if sysfs.exists(base):  # "bonding_masters" is a file among the interfaces
                if not sysfs.exists(f"{base}/ifindex"):
                    return None
                state = "unknown: " + reason(error)
            else:
                self.lose("interfaces that vanished during the scan")
                return None
        try:
            stamp = (state, sysfs.text(f"{base}/carrier_changes"))
        except OSError:
            stamp = (state, "")
        # Asking for the speed takes the kernel's rtnl lock and, on some cards, a round trip to their firmware.
        due = (self._round + len(name)) % _RECHECK_ROUNDS == 0
        if known is not None and known.stamp == stamp and not (due and known.round != self._round):
            return known
        return self._read(name, stamp)

    def _read(self, name: str, stamp: tuple[str, str]) -> _Interface:
        sysfs, base = self._sysfs, f"{_CLASS}/{name}"
        facts = Facts(sysfs)
        real = sysfs.real(base)
        virtual = "/virtual/" in f"/{real}"
        facts.attributes["operstate"] = stamp[0]
        if facts.text("mac", f"{base}/address", static=False, optional=True) == "00:00:00:00:00:00":
            del facts.attributes["mac"]
        facts.number("mtu", f"{base}/mtu")
        if (mtu := facts.metrics.pop("mtu", None)) is not None:
            facts.attributes["mtu"] = mtu
        speed: int | None = None
        try:
            megabits = sysfs.number(f"{base}/speed")
            if megabits > 0:
                speed = megabits * 1_000_000
            else:  # -1 as the driver's way of saying that it does not know; 0 of some virtual ones
                facts.unknown["speed_bits_per_s"] = f"the driver does not know ({megabits})"
        except OSError as error:
            down = " (the link is down)" if stamp[0] == "down" else ""
            facts.unknown["speed_bits_per_s"] = reason(error) + down
        lower, veth = self._stacking(base, virtual)
        if virtual:
            facts.attributes["virtual"] = True
        else:
            address = pci_address_in(real)
            if address:
                facts.attributes["pci_address"] = address
                facts.numa_node(f"{DEVICES}/{address}/numa_node")
            driver = f"{base}/device/driver"
            if sysfs.exists(driver, static=True):
                facts.attributes["driver"] = sysfs.real(driver).rpartition("/")[2]
        kind = self._kind(base)
        if kind:
            facts.attributes["type"] = kind
        return _Interface(facts.attributes, facts.unknown, speed, lower, veth, stamp, self._round)

    def _stacking(self, base: str, virtual: bool) -> tuple[list[str], bool]:
        """Interfaces right below this one (bond members, a VLAN's carrier, bridge ports), and whether it is a veth."""
        sysfs = self._sysfs
        try:
            lower = [name[6:] for name in sysfs.list_dir(base) if name.startswith("lower_")]
        except OSError:
            return [], False
        if not virtual or lower:
            return lower, False
        try:
            other = sysfs.number(f"{base}/iflink")
            return lower, other > 0 and other != sysfs.number(f"{base}/ifindex")
        except OSError:
            return lower, False

    def _kind(self, base: str) -> str:
        try:
            for line in self._sysfs.text(f"{base}/uevent", static=True).splitlines():
                if line.startswith("DEVTYPE="):
                    return line[8:]
        except OSError:
            pass
        return ""

    def _read_addresses(self, world: World) -> dict[str, list[str]]:
        tables = []
        for name in ("fib_trie", "route", "if_inet6"):
            try:
                tables.append(world.procfs.net("self", name))
            except OSError:
                tables.append(b"")  # no IPv6, or no access: addresses are a convenience
        return local_addresses(*tables)

    def seed(self) -> Batch:
        batch = Batch()
        hidden = 0
        shown = {name for name, known in self._known.items() if not known.veth or self.settings.veth}
        for name, known in self._known.items():
            if name not in shown:
                hidden += 1
                continue
            nic = self._nic(name, known)
            batch.nodes.append(nic)
            for below in known.lower:
                if below in shown:
                    batch.edges.append(edges.HasAttribute(nic.id, f"Nic({below})", {"relation": "lower"}))
            address = known.attributes.get("pci_address")
            if address:
                batch.nodes.append(nodes.PciDevice(address=address))
                batch.edges.append(edges.AttachedTo(nic.id, f"PciDevice({address})"))
            node = known.attributes.get("numa_node")
            if node is not None:
                batch.nodes.append(nodes.Numa(index=node))
                batch.edges.append(edges.Affinity(nic.id, f"Numa({node})"))
        if hidden:
            self.note("the host's ends of container links (veth) are not drawn", "set nics.veth", hidden)
        return batch

    def _nic(self, name: str, known: _Interface) -> nodes.Nic:
        attributes = known.attributes
        addresses = self._addresses.get(name)
        if addresses:
            attributes = {**attributes, "addresses": addresses}
        metrics: dict[str, int | float] = {}
        unknown = dict(known.unknown)
        if known.speed_bits_per_s is not None:
            metrics["speed_bits_per_s"] = known.speed_bits_per_s
        counters = self._counters.get(name)
        for field, metric in _RATES.items():
            if counters is None:
                unknown[metric] = self._counters_why
                continue
            rate = self._rates.per_s((name, field), getattr(counters, field))
            if rate is None:
                unknown[metric] = self._rates.why
            else:
                metrics[metric] = rate
        return nodes.Nic(name=name, attributes=attributes, metrics=metrics, unknown=unknown or None)
