"""Storage as each process feels it: requests, bytes and how long each took, by process, disk and direction."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.kernel_histograms import LAYOUT, Histogram
from gpuflight.collectors.kernel_programs import KernelPrograms, Starts, alive_processes, per_s, process_entity
from gpuflight.graph import Edge, Entity, Metric, edges, nodes

if TYPE_CHECKING:
    from gpuflight.sources.world import World

_WHOLE = ("on_io_start", "on_io_sent", "on_io_done")
_DEVICE_ONLY = ("on_issue", "on_complete")
_LOSSES = {0: "requests that found no room", 1: "uses of a disk that found no room"}
_KEY = struct.Struct("=2I32s")
_ROW = struct.Struct("=2Q" + LAYOUT)
_OPERATIONS = ("read", "write", "flush", "discard")
_RATE_NAMES = {"read": "reads_per_s", "write": "writes_per_s", "flush": "flushes_per_s", "discard": "discards_per_s"}
_IDLE_ROUNDS = 24


class KernelBlockSettings(BaseModel):
    """What is shown of storage."""

    model_config = ConfigDict(extra="forbid")

    seed_all: bool = Field(True, description="Show every process that uses a disk, not only those in the picture.")
    max_uses: int = Field(
        8192, ge=64, le=262_144, description="Room in the kernel for uses of a disk by a process (400 B each)."
    )


class _Use(Struct, gc=False):
    """One process's requests of one kind to one disk."""

    raw: bytes
    process: str
    disk: str
    operation: str
    bytes_: int
    us: Histogram
    new_bytes: int
    new: Histogram
    idle_rounds: int = 0


class KernelBlock(Collector):
    """Block I/O of each process on each disk: rates, bytes, latency (eBPF).

    ``Access`` from the process to the disk carries them, with latencies as histograms; the disk has those of all
    processes together. A request is timed from when it is made until it is done, its wait in the I/O scheduler
    included (before Linux 6.5: from when the device gets it). What the page cache writes back counts to the kernel's
    own threads; ``discard`` stands for every request that neither reads, writes nor flushes.
    """

    name = "kernel_block"
    seeds = True
    expands = (nodes.Process, nodes.Disk)
    precedence = -5
    settings_class = KernelBlockSettings
    settings: KernelBlockSettings

    def __init__(self, settings: KernelBlockSettings | None = None) -> None:
        super().__init__(settings)
        self._probe = KernelPrograms("block", _LOSSES)
        self._uses: dict[bytes, _Use] = {}
        self._entities: dict[str, Entity] = {}
        self._edges: list[Edge] = []

    def observe(self, world: World) -> None:
        self._entities, self._edges = {}, []
        # Before Linux 6.5 there are no events of whole requests, only of the device's part.
        self._probe.open(world, _WHOLE, instead=_DEVICE_ONLY, map_entries={"io": self.settings.max_uses})
        elapsed_s = self._probe.elapsed_s(world.clock.monotonic_s())
        rows = self._probe.read("io", _KEY.size, _ROW.size)
        self._take(rows, Starts(world.procfs.ticks_per_second), alive_processes(world))
        self._probe.report(self)
        self._show(elapsed_s)

    def seed(self) -> Batch:
        return Batch(list(self._entities.values()), list(self._edges)) if self.settings.seed_all else Batch()

    def expand(self, entities: Sequence[Entity]) -> Batch:
        if self.settings.seed_all:
            return Batch()
        wanted = {entity.id for entity in entities}
        drawn = [edge for edge in self._edges if edge.source in wanted or edge.target in wanted]
        ids = {end for edge in drawn for end in (edge.source, edge.target)}
        return Batch([self._entities[id_] for id_ in ids], drawn)

    def close(self) -> None:
        self._probe.close()
        self._uses.clear()

    def _take(self, rows: list[tuple[bytes, bytes]], starts: Starts, alive: set[str]) -> None:
        before, self._uses = self._uses, {}
        idle = []
        for key, raw in rows:
            known = before.get(key)
            if known is not None and known.raw == raw:
                known.idle_rounds += 1
                known.new_bytes, known.new = 0, known.us.since(known.us)
                if known.idle_rounds >= _IDLE_ROUNDS or known.process not in alive:
                    idle.append(key)
                else:
                    self._uses[key] = known
                continue
            pid, operation, disk = _KEY.unpack(key)
            start_ns, bytes_, *fields = _ROW.unpack(raw)
            process = starts.process_id(pid, start_ns) if pid else ""
            us = Histogram.of(tuple(fields))
            new, new_bytes = us, bytes_
            if known is not None and known.process == process:
                new, new_bytes = us.since(known.us), max(0, bytes_ - known.bytes_)
            name = disk.partition(b"\0")[0].decode("utf-8", "backslashreplace")
            self._uses[key] = _Use(raw, process, name, _OPERATIONS[operation], bytes_, us, new_bytes, new)
        self._probe.forget("io", idle)

    def _show(self, elapsed_s: float | None) -> None:
        by_edge: dict[tuple[str, str], list[_Use]] = {}
        by_disk: dict[str, dict[str, Histogram]] = {}
        for use in self._uses.values():
            if use.disk and use.process:
                by_edge.setdefault((use.process, use.disk), []).append(use)
            if use.disk:
                whole = by_disk.setdefault(use.disk, {})
                known = whole.get(use.operation)
                whole[use.operation] = use.new if known is None else _sum(known, use.new)
        for name, operations in by_disk.items():
            metrics: dict[str, Metric] = {}
            attributes: dict[str, Any] = {}
            for operation, histogram in operations.items():
                histogram.add_to(metrics, attributes, f"{operation}_latency")
            disk = nodes.Disk(name=name, attributes=attributes, metrics=metrics)
            self._entities[disk.id] = disk
        for (process, name), uses in by_edge.items():
            grown: dict[str, float] = {}
            for use in uses:
                grown[_RATE_NAMES[use.operation]] = use.new.count
                if use.operation != "flush":
                    grown[f"{use.operation}_bytes_per_s"] = use.new_bytes
            metrics, unknown = per_s(grown, elapsed_s)
            attributes = {}
            for use in uses:
                use.new.add_to(metrics, attributes, f"{use.operation}_latency")
            self._entities.setdefault(process, process_entity(process))
            self._edges.append(edges.Access(process, f"Disk({name})", attributes, metrics, unknown))


def _sum(one: Histogram, other: Histogram) -> Histogram:
    slots = tuple(first + second for first, second in zip(one.slots, other.slots, strict=True))
    return Histogram(one.count + other.count, one.sum_us + other.sum_us, slots)
