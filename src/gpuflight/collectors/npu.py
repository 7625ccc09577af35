"""Ascend NPUs through ``npu-smi``: inventory, load, memory, links, and the processes on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import edges, nodes
from gpuflight.sources.npu_smi import NpuChip, NpuInfo, NpuTopology, parse_info, parse_topology

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcFs
    from gpuflight.sources.world import World

_TOOL = "npu-smi"
_RETRY_FACTOR = 4  # a tool that failed or hung is left alone for so many intervals
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC  # PROC_PID_INIT_INO of include/linux/proc_ns.h
_NO_FIGURE = "npu-smi prints no figure for it"


class NpuSettings(BaseModel):
    """How the tool is run."""

    model_config = ConfigDict(extra="forbid")

    interval_s: float = Field(15.0, ge=0, description="Least time between two runs; the last answer stands meanwhile.")
    timeout_s: float = Field(4.0, gt=0, description="How long one run may take.")


class Npu(Collector):
    """Ascend NPUs as npu-smi shows them: load, memory, health, HCCS links, processes."""

    seeds = True
    settings_class = NpuSettings
    settings: NpuSettings
    deadline_s: ClassVar[float] = 10.0

    def __init__(self, settings: NpuSettings | None = None) -> None:
        super().__init__(settings)
        self._info: NpuInfo | None = None
        self._topology: NpuTopology | None = None
        self._topology_why = ""
        self._asked_s: float | None = None
        self._due_s = 0.0
        self._failure: SourceUnavailable | None = None

    def observe(self, world: World) -> None:
        tool = world.tools.which(_TOOL)
        if not tool:
            raise SourceUnavailable("npu-smi is not installed", "NPUs are seen through the tool of the Ascend driver")
        self._procfs: ProcFs = world.procfs
        now_s = self._now_s = world.clock.monotonic_s()
        if self._asked_s is None or now_s >= self._due_s:
            self._asked_s = now_s
            self._due_s = now_s + self.settings.interval_s
            try:
                output = world.tools.run([tool, "info"], self.settings.timeout_s)
            except SourceUnavailable as error:
                self._info, self._failure = None, error
                self._due_s = now_s + max(1.0, self.settings.interval_s) * _RETRY_FACTOR
            else:
                self._info, self._failure = parse_info(output.decode("utf-8", "replace")), None
                if self._topology is None:
                    self._topology = self._read_topology(world, tool)
        if self._failure is not None:
            raise SourceUnavailable(self._failure.reason, self._failure.hint or "see what `npu-smi info` says by hand")
        if self._info is None or not self._info.chips:
            raise SourceUnavailable(
                "npu-smi shows no NPUs", "see dmesg for the Ascend driver; in a container, pass /dev/davinci*"
            )
        if self._info.unparsed:
            self.lose("rows of npu-smi that were not understood", self._info.unparsed)
        if self._topology_why:
            self.note(f"links between NPUs are not known: {self._topology_why}")

    def _read_topology(self, world: World, tool: str) -> NpuTopology:
        self._topology_why = ""
        try:
            output = world.tools.run([tool, "info", "-t", "topo"], self.settings.timeout_s)
        except SourceUnavailable as error:  # products without links between cards have no such table
            self._topology_why = error.reason
            return NpuTopology({}, {})
        return parse_topology(output.decode("utf-8", "replace"))

    def seed(self) -> Batch:
        batch = Batch()
        info, topology = self._info, self._topology
        if info is None or topology is None:
            return batch
        by_place: dict[tuple[int, int], str] = {}
        for chip in info.chips:
            entity = self._npu(chip, info, topology)
            batch.nodes.append(entity)
            by_place[chip.card, chip.chip] = entity.id
            if chip.pci_address:
                batch.nodes.append(nodes.PciDevice(address=chip.pci_address))
                batch.edges.append(edges.AttachedTo(entity.id, f"PciDevice({chip.pci_address})"))
        known = {chip.index for chip in info.chips}
        for (one, other), link in topology.links.items():
            if one in known and other in known:
                batch.edges.append(edges.Proximity(f"NPU({one})", f"NPU({other})", {"distance": link}))
        self._put_processes(info, by_place, batch)
        return batch

    def _npu(self, chip: NpuChip, info: NpuInfo, topology: NpuTopology) -> nodes.NPU:
        attributes: dict[str, Any] = {
            "name": chip.name,
            "index": chip.index,
            "card": chip.card,
            "chip": chip.chip,
            "health": chip.health,
        }
        for name, text in (
            ("pci_address", chip.pci_address),
            ("memory_kind", chip.memory_kind),
            ("tool_version", info.version),
            ("cpus", topology.cpus.get(chip.index, "")),
        ):
            if text:
                attributes[name] = text
        metrics: dict[str, int | float] = {}
        unknown: dict[str, str] = {}
        for name, value in (
            ("util_pct", chip.util_pct),
            ("power_watts", chip.power_watts),
            ("temperature_celsius", chip.temperature_celsius),
            ("memory_used_bytes", chip.memory_used_bytes),
            ("memory_total_bytes", chip.memory_total_bytes),
        ):
            if value is None:
                unknown[name] = _NO_FIGURE
            else:
                metrics[name] = value
        age_s = self._now_s - (self._asked_s or self._now_s)
        if age_s > 0:
            metrics["reading_age_s"] = age_s
        return nodes.NPU(index=chip.index, attributes=attributes, metrics=metrics, unknown=unknown or None)

    def _put_processes(self, info: NpuInfo, by_place: dict[tuple[int, int], str], batch: Batch) -> None:
        if not info.processes:
            return
        try:
            foreign = self._procfs.own_namespace("pid") != _INITIAL_PID_NAMESPACE
        except (OSError, ValueError):
            foreign = False  # a kernel without pid namespaces has only one
        if foreign:
            # The tool shows the host's pids everywhere. Here they mean nothing, or somebody else.
            self.note(
                "processes on NPUs are not known: npu-smi gives pids of the host",
                "run in the host's pid namespace",
                len(info.processes),
            )
            return
        processes = self._procfs.processes()
        used: dict[tuple[int, str], int] = {}
        for process in info.processes:
            target = by_place.get((process.card, process.chip))
            if target is None:
                self.lose("processes on NPUs that are not listed")
                continue
            if process.pid not in processes:
                self.lose("vanished processes")
                continue
            key = (process.pid, target)
            used[key] = used.get(key, 0) + process.memory_bytes
        for (pid, target), memory_bytes in used.items():
            entity = nodes.Process(pid=pid, start=processes[pid].start)
            batch.nodes.append(entity)
            batch.edges.append(edges.Access(entity.id, target, {}, {"memory_used_bytes": memory_bytes}))
