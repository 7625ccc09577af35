"""Block devices: size, model, traffic and load, and the controller they hang on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.rates import Rates
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import edges, nodes
from gpuflight.sources.devices import disk_pci_address
from gpuflight.sources.pci import DEVICES
from gpuflight.sources.sysfs import Facts, SysFs, disk_of_name, reason

if TYPE_CHECKING:
    from gpuflight.sources.world import World

_SECTOR_BYTES = 512  # unit of size and stat whatever the device's own block size (Documentation/block/stat.rst)
_RAM_BACKED = re.compile(r"(loop|ram|zram|nbd)\d+")
_RECHECK_ROUNDS = 60


class DiskSettings(BaseModel):
    """Which block devices are drawn."""

    model_config = ConfigDict(extra="forbid")

    loop_devices: bool = Field(False, description="Draw loop, ram, zram and nbd devices that are in use too.")


class _Disk(Struct):
    """Facts of a disk that hold for many rounds."""

    attributes: dict[str, Any]
    unknown: dict[str, str]
    members: list[str]
    round: int


class Disks(Collector):
    """Disks and volumes with their traffic and load; partitions count to their disk."""

    seeds = True
    settings_class = DiskSettings
    settings: DiskSettings

    def __init__(self, settings: DiskSettings | None = None) -> None:
        super().__init__(settings)
        self._rates = Rates()
        self._known: dict[str, _Disk] = {}
        self._stats: dict[str, list[int]] = {}
        self._sizes: dict[str, int] = {}
        self._round = 0

    def observe(self, world: World) -> None:
        self._round += 1
        sysfs = self._sysfs = world.sysfs
        try:
            names = sysfs.list_dir("block")
        except OSError as error:
            raise SourceUnavailable(f"no block devices in sysfs: {reason(error)}", "mount /sys") from error
        self._rates.begin(world.clock.monotonic_s())
        before, self._known = self._known, {}
        self._stats, self._sizes = {}, {}
        for name in names:
            if not self.settings.loop_devices and _RAM_BACKED.fullmatch(name):
                continue
            try:
                size = sysfs.number(f"block/{name}/size")
                known = before.get(name)
                if known is None or self._round - known.round >= _RECHECK_ROUNDS:
                    known = self._read(sysfs, name)
                if known is None:
                    continue
                if not size and _RAM_BACKED.fullmatch(name):
                    continue  # not set up
            except OSError:
                sysfs.forget(f"block/{name}")
                self.lose("disks that vanished during the scan")
                continue
            self._known[name] = known
            self._sizes[name] = size * _SECTOR_BYTES
            try:
                self._stats[name] = [int(field) for field in sysfs.text(f"block/{name}/stat").split()]
            except (OSError, ValueError):
                self.lose("disks without statistics")
        for gone in before.keys() - set(names):
            sysfs.forget(f"block/{gone}")

    def _read(self, sysfs: SysFs, name: str) -> _Disk | None:
        base = f"block/{name}"
        try:
            if sysfs.number(f"{base}/hidden", static=True):
                return None  # one path of a multipath NVMe namespace
        except OSError:
            pass  # before Linux 4.15
        facts = Facts(sysfs)
        facts.text("model", f"{base}/device/model", optional=True)
        facts.text("name", f"{base}/dm/name", optional=True)
        facts.text("raid_level", f"{base}/md/level", optional=True)
        try:
            facts.attributes["rotational"] = bool(sysfs.number(f"{base}/queue/rotational", static=True))
        except OSError as error:
            facts.unknown["rotational"] = reason(error)
        address = disk_pci_address(sysfs, name)
        if address:
            facts.attributes["pci_address"] = address
            facts.numa_node(f"{DEVICES}/{address}/numa_node")
        members = []
        try:
            for member in sysfs.list_dir(f"{base}/slaves"):
                members.append(disk_of_name(sysfs, member))
        except OSError:
            pass  # a plain disk on old kernels has no such directory
        return _Disk(facts.attributes, facts.unknown, sorted(set(members)), self._round)

    def seed(self) -> Batch:
        batch = Batch()
        for name, known in self._known.items():
            disk = self._disk(name, known)
            batch.nodes.append(disk)
            for member in known.members:
                batch.nodes.append(nodes.Disk(name=member))
                batch.edges.append(edges.HasAttribute(disk.id, f"Disk({member})", {"relation": "member"}))
            address = known.attributes.get("pci_address")
            if address:
                batch.nodes.append(nodes.PciDevice(address=address))
                batch.edges.append(edges.AttachedTo(disk.id, f"PciDevice({address})"))
            node = known.attributes.get("numa_node")
            if node is not None:
                batch.nodes.append(nodes.Numa(index=node))
                batch.edges.append(edges.Affinity(disk.id, f"Numa({node})"))
        return batch

    def _disk(self, name: str, known: _Disk) -> nodes.Disk:
        metrics: dict[str, int | float] = {"size_bytes": self._sizes[name]}
        unknown = dict(known.unknown)
        stat = self._stats.get(name)
        if stat is None or len(stat) < 11:
            unknown |= dict.fromkeys(("read_bytes_per_s", "write_bytes_per_s", "io_time_pct"), "no statistics")
            return nodes.Disk(name=name, attributes=known.attributes, metrics=metrics, unknown=unknown)
        metrics["in_flight_count"] = stat[8]
        # Fields of Documentation/block/stat.rst: reads, merged, sectors, ms; writes, merged, sectors, ms; in flight,
        # ms with anything in flight, weighted ms.
        steps = {index: self._rates.increase((name, index), stat[index]) for index in (0, 2, 3, 4, 6, 7, 9)}
        why = self._rates.why
        for metric, index, scale in (
            ("reads_per_s", 0, 1),
            ("read_bytes_per_s", 2, _SECTOR_BYTES),
            ("writes_per_s", 4, 1),
            ("write_bytes_per_s", 6, _SECTOR_BYTES),
            ("io_time_pct", 9, 0.1),  # ms per s, in percent
        ):
            step = steps[index]
            if step is None:
                unknown[metric] = why
            else:
                value = step[0] * scale / step[1]
                metrics[metric] = min(100.0, value) if metric == "io_time_pct" else value
        for metric, count, spent in (("read_wait_ms", 0, 3), ("write_wait_ms", 4, 7)):
            requests, time_ms = steps[count], steps[spent]
            if requests is not None and time_ms is not None and requests[0] > 0:
                metrics[metric] = time_ms[0] / requests[0]
        return nodes.Disk(name=name, attributes=known.attributes, metrics=metrics, unknown=unknown or None)
