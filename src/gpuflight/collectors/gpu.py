"""GPUs through NVML: what they are, what they do, who uses them, and how they are wired to each other."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.gpu_entities import gpu_entity, mig_entity, numa_nodes_of, silent_gpu_entity
from gpuflight.collectors.gpu_links import LinkEdges
from gpuflight.collectors.gpu_processes import PidMap, running_profilers
from gpuflight.collectors.rates import Rates
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import edges, nodes
from gpuflight.sources.nvml import IN_USE_REASON, Event, Gpu, GpuProcess, NvmlSnapshot
from gpuflight.sources.nvml.present import PresentGpu, identify, present_gpus
from gpuflight.sources.pci import PciTree

if TYPE_CHECKING:
    from gpuflight.sources.world import World

UNREACHABLE = "unreachable"
"""State of a GPU that is there but of which NVML, as a whole, says nothing; a ``lost`` one has failed by itself."""


class NvmlCollector(Collector):
    """NVIDIA GPUs, MIG devices and NVLinks through NVML, and the processes that use them."""

    name = "nvml"
    seeds = True
    precedence = 10

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._rates = Rates()
        self._tree: PciTree | None = None
        self._known: dict[str, nodes.GPU] = {}
        self._last_xid: dict[str, Event] = {}
        self._batch = Batch()

    def observe(self, world: World) -> None:
        self._batch = Batch()
        present = self._present(world)
        try:
            snapshot = world.nvml.snapshot()
        except SourceUnavailable as error:
            self._without_nvml(error, present, world)
            return
        if snapshot.stale_reason:
            self.note(f"NVML values are {snapshot.age_s:.0f} s old: {snapshot.stale_reason}")
        else:
            self._rates.begin(snapshot.monotonic_s)
        self._compare_with_pci(snapshot, present, world)
        if not snapshot.gpus and not snapshot.nameless and not self._batch.nodes:
            raise SourceUnavailable(
                f"the NVIDIA driver {snapshot.driver_version} sees no GPU",
                "see dmesg for messages of NVRM" if present else "in a container, run with --gpus all",
            )
        pids = PidMap(world.procfs)
        events = defaultdict(list)
        for event in snapshot.events:
            events[event.uuid].append(event)
        links = LinkEdges(snapshot)
        for gpu in snapshot.gpus:
            entity = gpu_entity(gpu, snapshot, self._rates)
            self._add_events(entity, events[gpu.uuid], snapshot)
            if unplaced := links.unplaced.get(gpu.uuid):
                entity.metrics["nvlink_unplaced_count"] = unplaced
            self._place(entity, gpu, present)
            self._add_processes(entity, gpu, pids)
            self._batch.nodes.append(entity)
            self._known[gpu.uuid] = entity
        if events.get(""):
            self.lose("GPU events of unknown GPUs", len(events[""]))
        links.add_to(self._batch, snapshot)
        self._note_limits(snapshot, world)

    def seed(self) -> Batch:
        return self._batch

    # -- GPUs that NVML does not show ----------------------------------------------------------------------------

    def _present(self, world: World) -> dict[str, PresentGpu]:
        if self._tree is None:
            self._tree = PciTree(world.sysfs)
        try:
            self._tree.refresh()
        except OSError:
            return {}  # no PCI bus in sight: nothing to compare with
        return present_gpus(self._tree.functions)

    def _without_nvml(self, error: SourceUnavailable, present: dict[str, PresentGpu], world: World) -> None:
        """Show the GPUs known from before or from the kernel driver, so that a picture without NVML is not one without
        GPUs. Raises SourceUnavailable if there is none to show."""
        shown = set()
        for known in self._known.values():
            self._batch.nodes.append(silent_gpu_entity(known, UNREACHABLE, error.reason))
            shown.add(known.attributes.get("pci_address"))
        nameless = []
        for gpu in present.values():
            if gpu.address not in shown and not self._show_present(gpu, UNREACHABLE, error.reason, world):
                nameless.append(gpu.address)
        if not self._batch.nodes:
            if not present:
                raise SourceUnavailable(f"{error.reason}, and no NVIDIA GPU is on the PCI bus", error.hint)
            addresses = ", ".join(sorted(present))
            raise SourceUnavailable(
                f"{error.reason}, although NVIDIA GPUs are on the PCI bus ({addresses})", error.hint
            )
        if nameless:
            self.lose("GPUs on the PCI bus whose UUID nobody tells", len(nameless))
        self.note(error.reason, error.hint, len(self._batch.nodes))

    def _show_present(self, gpu: PresentGpu, state: str, reason: str, world: World) -> bool:
        """Add a GPU that only the kernel knows; False if it has no UUID to go by."""
        if not gpu.uuid:
            identify(gpu, world.fs)
        if not gpu.uuid:
            return False
        known = nodes.GPU(uuid=gpu.uuid, attributes={"pci_address": gpu.address})
        if gpu.model:
            known.attributes["name"] = gpu.model
        entity = silent_gpu_entity(known, state, reason)
        self._batch.nodes += [entity, nodes.PciDevice(address=gpu.address)]
        self._batch.edges.append(edges.AttachedTo(entity.id, f"PciDevice({gpu.address})"))
        return True

    def _compare_with_pci(self, snapshot: NvmlSnapshot, present: dict[str, PresentGpu], world: World) -> None:
        """A GPU may fall off without NVML or an XID telling: the PCI bus is asked too."""
        listed = {gpu.address for gpu in snapshot.gpus}
        missing = []
        for address, gpu in present.items():
            if address in listed:
                continue
            if gpu.driver in ("", "nvidia"):
                missing.append(gpu)
            else:
                self.note(f"GPU {address} is bound to {gpu.driver}, not to the NVIDIA driver")
        nameless = snapshot.nameless
        # NVML does not say which of the missing ones a GPU without a handle is; if as many are missing, it is them.
        same = len(missing) == len(nameless)
        shown = 0
        for gpu, (_, why) in zip(missing, nameless, strict=False):
            shown += same and self._show_present(gpu, "lost", why, world)
        for gpu in missing:
            self.note(
                f"GPU {gpu.address} is on the PCI bus but NVML does not show it",
                "it is not given to this container, or it has failed: see dmesg for Xid messages",
            )
        for index, why in nameless:
            self.note(f"GPU {index} cannot be read: {why}", "see dmesg for Xid messages")
        if len(nameless) > shown:
            self.lose("GPUs that NVML counts but does not identify", len(nameless) - shown)

    # -- one GPU -------------------------------------------------------------------------------------------------

    def _place(self, entity: nodes.GPU, gpu: Gpu, present: dict[str, PresentGpu]) -> None:
        batch = self._batch
        for index in numa_nodes_of(entity):
            batch.nodes.append(nodes.Numa(index=index))
            batch.edges.append(edges.Affinity(entity.id, f"Numa({index})"))
        if gpu.address:
            batch.nodes.append(nodes.PciDevice(address=gpu.address))
            batch.edges.append(edges.AttachedTo(entity.id, f"PciDevice({gpu.address})"))
            if present and gpu.address not in present:
                entity.attributes["on_pci_bus"] = False
                self.note(f"GPU {gpu.address} is not on the PCI bus any more", "see dmesg for Xid 79")
        for mig in gpu.migs:
            instance = mig_entity(mig)
            batch.nodes.append(instance)
            batch.edges.append(edges.Belong(instance.id, entity.id))

    def _add_events(self, entity: nodes.GPU, events: list[Event], snapshot: NvmlSnapshot) -> None:
        """Events are told in the round that they were read in; of XIDs the last one is remembered, with its time."""
        if snapshot.stale_reason or snapshot.events_reason:
            why = snapshot.stale_reason or snapshot.events_reason
            entity.unknown = {**(entity.unknown or {}), "xid_events_count": why}
        elif entity.attributes["state"] == "ok" or events:
            entity.metrics["xid_events_count"] = sum(event.kind == "xid" for event in events)
        if events:
            entity.attributes["events"] = [f"{event.kind} {event.code}" for event in events]
            for event in events:
                if event.kind == "xid":
                    self._last_xid[event.uuid] = event
        last = self._last_xid.get(entity.uuid)
        if last is not None:
            entity.attributes["last_xid"] = last.code
            moment = datetime.fromtimestamp(last.wall_ns / 1e9, UTC)
            entity.attributes["last_xid_time"] = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def _add_processes(self, entity: nodes.GPU, gpu: Gpu, pids: PidMap) -> None:
        migs = {(mig.gpu_instance, mig.compute_instance): f"MigInstance(uuid={mig.uuid})" for mig in gpu.migs}
        accesses: dict[tuple[str, str], edges.Access] = {}
        unmatched = 0
        unmatched_bytes = 0
        for process in gpu.processes:
            stat = pids.process(process.pid)
            if stat is None:
                unmatched += 1
                unmatched_bytes += process.memory_used_bytes or 0
                continue
            target = migs.get((process.gpu_instance, process.compute_instance), entity.id)
            known = accesses.get((stat.id, target))
            if known is None:
                self._batch.nodes.append(nodes.Process(pid=stat.pid, start=stat.start))
                accesses[stat.id, target] = _access(stat.id, target, process)
            else:
                _add_memory(known, process)
        self._batch.edges.extend(accesses.values())
        if gpu.state != "ok" or gpu.processes_reason:
            return
        entity.metrics["processes_unmatched_count"] = unmatched
        entity.metrics["memory_unmatched_bytes"] = unmatched_bytes
        if unmatched and pids.foreign:
            entity.attributes["foreign_pidns"] = True
            self.note(
                "NVML names processes of another pid namespace",
                "run gpuflight in the host's pid namespace (docker --pid=host, hostPID: true)",
                unmatched,
            )
        elif unmatched:
            self.lose("processes on GPUs that /proc does not show", unmatched)
        if gpu.processes_garbled_count:
            self.lose("entries of NVML's process list that make no sense", gpu.processes_garbled_count)

    def _note_limits(self, snapshot: NvmlSnapshot, world: World) -> None:
        if snapshot.events_reason:
            self.note(f"XID events cannot be seen: {snapshot.events_reason}")
        for gpu in snapshot.gpus:
            if gpu.state == "lost":
                self.note(
                    f"GPU {gpu.index} ({gpu.address}) does not answer: {gpu.reason}", "see dmesg for Xid messages"
                )
            if gpu.processes_reason:
                self.note(f"processes on GPUs cannot be seen: {gpu.processes_reason}", "run as root")
        busy = sum(why == IN_USE_REASON for gpu in snapshot.gpus for why in gpu.unknown.values())
        if busy:
            holders = ", ".join(running_profilers(world.procfs))
            self.note(
                f"GPU readings are {IN_USE_REASON}" + (f": {holders}" if holders else ""),
                "stop it, or wait for it: gpuflight tries again every 30 s",
                busy,
            )


def _access(source: str, target: str, process: GpuProcess) -> edges.Access:
    metrics: dict[str, int | float] = {}
    unknown: dict[str, str] = {}
    for name, value, why in (
        ("memory_used_bytes", process.memory_used_bytes, "NVML does not give it for this process"),
        ("sm_util_pct", process.sm_util_pct, process.util_reason),
        ("memory_util_pct", process.memory_util_pct, process.util_reason),
    ):
        if value is None:
            unknown[name] = why
        else:
            metrics[name] = value
    return edges.Access(source, target, {"uses": list(process.kinds)}, metrics, unknown or None)


def _add_memory(access: edges.Access, process: GpuProcess) -> None:
    """A process that NVML lists twice on one device, as by two MIG instances that are not shown."""
    if process.memory_used_bytes is not None:
        access.metrics["memory_used_bytes"] = access.metrics.get("memory_used_bytes", 0) + process.memory_used_bytes
        if access.unknown:
            access.unknown.pop("memory_used_bytes", None)
