"""What the kernel counts for the whole host: TCP, packets, kills for want of memory, open files, the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.rates import Rates
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import nodes
from gpuflight.sources.clock_sync import clock_sync

if TYPE_CHECKING:
    from gpuflight.sources.world import World

_TCP = {
    ("netstat", "TcpExt", "ListenOverflows"): "tcp_listen_overflows_per_s",
    ("netstat", "TcpExt", "ListenDrops"): "tcp_listen_drops_per_s",
    ("snmp", "Tcp", "AttemptFails"): "tcp_connect_failures_per_s",
    ("snmp", "Tcp", "EstabResets"): "tcp_resets_per_s",
    ("snmp", "Tcp", "RetransSegs"): "tcp_retransmits_per_s",
    ("snmp", "Tcp", "OutSegs"): "tcp_segments_sent_per_s",
}
"""Fields of /proc/net/netstat and /proc/net/snmp (net/ipv4/proc.c)."""
_SOFTNET = {1: "softnet_drops_per_s", 2: "softnet_squeezed_per_s"}
"""Columns of /proc/net/softnet_stat, summed over the CPUs (net/core/net-procfs.c): dropped, time_squeeze."""
_CLOCK = ("clock_offset_ms", "clock_max_error_ms")


class HostCounters(Collector):
    """The host's own counters: TCP failures and resets, dropped packets, OOM kills, open files, clock offset."""

    seeds = True

    def __init__(self, settings: None = None) -> None:
        super().__init__(settings)
        self._rates = Rates()

    def observe(self, world: World) -> None:
        self._hostname = world.procfs.hostname
        self._metrics: dict[str, int | float] = {}
        self._attributes: dict[str, str] = {}
        self._unknown: dict[str, str] = {}
        self._rates.begin(world.clock.monotonic_s())
        for read, names in (
            (self._tcp, tuple(_TCP.values())),
            (self._softnet, tuple(_SOFTNET.values())),
            (self._memory, ("oom_kills_count",)),
            (self._files, ("files_open_count", "files_limit_count")),
            (self._clock, _CLOCK),
            (self._gpudirect, ("gpudirect",)),
        ):
            self._guarded(read, world, names)
        if not self._metrics and not self._attributes:
            raise SourceUnavailable("none of the host's counters can be read", "is /proc mounted?")

    def seed(self) -> Batch:
        host = nodes.Host(
            hostname=self._hostname,
            attributes=dict(self._attributes),
            metrics=dict(self._metrics),
            unknown=self._unknown or None,
        )
        return Batch([host])

    def _guarded(self, read: Callable[[World], None], world: World, names: tuple[str, ...]) -> None:
        try:
            read(world)
        except OSError as error:
            why = error.strerror or "cannot be read"
        except SourceUnavailable as error:
            why = error.reason
        except (ValueError, IndexError, KeyError):
            why = "the kernel's figures have an unknown form"
        else:
            return
        for name in names:
            if name not in self._metrics:
                self._unknown.setdefault(name, why)

    def _rate(self, name: str, value: int) -> None:
        rate = self._rates.per_s(name, value)
        if rate is None:
            self._unknown[name] = self._rates.why
        else:
            self._metrics[name] = rate

    def _tcp(self, world: World) -> None:
        """Pairs of lines: names, then values. Of the network namespace that gpuflight is in."""
        tables: dict[tuple[str, str], dict[str, int]] = {}
        for file in ("netstat", "snmp"):
            lines = world.procfs.text(f"net/{file}").split("\n")
            for head, values in zip(lines[::2], lines[1::2], strict=False):
                group, _, names = head.partition(":")
                row = values.partition(":")[2].split()
                tables[file, group] = dict(zip(names.split(), map(int, row), strict=False))
        for (file, group, field), metric in _TCP.items():
            self._rate(metric, tables[file, group][field])

    def _softnet(self, world: World) -> None:
        rows = [line.split() for line in world.procfs.text("net/softnet_stat").split("\n") if line]
        for column, metric in _SOFTNET.items():
            self._rate(metric, sum(int(row[column], 16) for row in rows))

    def _memory(self, world: World) -> None:
        for line in world.procfs.text("vmstat").split("\n"):
            if line.startswith("oom_kill "):
                self._metrics["oom_kills_count"] = int(line[9:])
                return
        self._unknown["oom_kills_count"] = "this kernel does not count them"

    def _files(self, world: World) -> None:
        opened, free, limit = (int(word) for word in world.procfs.text("sys/fs/file-nr").split())
        self._metrics["files_open_count"] = opened - free
        self._metrics["files_limit_count"] = limit

    def _gpudirect(self, world: World) -> None:
        """What lets network cards reach the memory of GPUs; an open driver hands out DMA buffers without a module."""
        if world.sysfs.exists("module/nvidia_peermem"):
            self._attributes["gpudirect"] = "nvidia_peermem"
        elif world.sysfs.exists("module/nvidia"):
            self._attributes["gpudirect"] = "no module"

    def _clock(self, world: World) -> None:
        found = clock_sync(world.tape)
        self._attributes["clock_synchronised"] = "yes" if found.synchronised else "no"
        if not found.synchronised:
            self._unknown.update(dict.fromkeys(_CLOCK, "the kernel says that nothing keeps the clock in step"))
            return
        self._metrics["clock_offset_ms"] = round(found.offset_s * 1e3, 6)
        self._metrics["clock_max_error_ms"] = round(found.max_error_s * 1e3, 3)
