"""Which GPU of the picture a process means by its device numbers, checked against what NVML sees it on.

CUDA_VISIBLE_DEVICES and the container say what a number means (``sources.cuda_devices``); NVML says where a process has
memory. Where both speak they must agree; where only one does, it does not guess: a number that may mean several GPUs is
unknown, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from gpuflight.collectors.cuda_statistics import Capacity
from gpuflight.collectors.gpu_processes import PidMap
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Entity, nodes
from gpuflight.sources.cuda_devices import CudaDevice
from gpuflight.sources.cuda_visibility import CudaVisibility, disorder_of, gpus_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from gpuflight.sources.nvml import Gpu, GpuProcess, NvmlSnapshot
    from gpuflight.sources.procfs import ProcStat
    from gpuflight.sources.world import World

UNCOUNTED = "without NVML nobody knows which GPUs there are, and in which order"
CHOSE_UNSEEN = "which device it chose before the probe was there is not known, and it has several"
DRIVER_CHOSE = "it uses the driver directly, whose contexts choose devices unseen, and it has several"
SET_UNSEEN = (
    "it ran before the probe was there, its memory cannot be asked for the CUDA_VISIBLE_DEVICES of now,"
    " and NVML does not list it on a GPU"
)
ENDED = "it ended before anybody asked where it runs"
CONTRADICTION = (
    "NVML sees it on other GPUs than CUDA_VISIBLE_DEVICES says: it set that itself before the probe was there"
)


class Place(Struct):
    """Where a device number leads: ``gpu`` the entity of a GPU or a MIG device, or None and ``reason``."""

    gpu: Entity | None = None
    reason: str = ""


class CudaPlaces:
    """``begin`` once per round. NVML is asked once; without it the order of GPUs, and so every number, is unknown."""

    def __init__(self, world: World) -> None:
        self.visibility = CudaVisibility(world.fs, world.procfs, world.cgroups, world.tape)
        self.capacities: dict[str, Capacity] = {}
        """What each GPU and MIG device has, by the id of its entity."""
        self._entities: dict[str, Entity] = {}
        self._used: dict[str, dict[str, GpuProcess]] = {}
        self._users: set[int] = set()
        self._found: dict[tuple[str, int], Place] = {}

    def begin(self, world: World) -> None:
        """A round begins."""
        self._entities, self._used, self.capacities, self._users = {}, {}, {}, set()
        try:
            snapshot = world.nvml.snapshot()
        except SourceUnavailable:
            self.visibility.begin(None, UNCOUNTED)
            return
        self.visibility.begin(gpus_of(snapshot), disorder=disorder_of(snapshot))
        self._take(snapshot, PidMap(world.procfs))

    def place(
        self,
        stat: ProcStat | None,
        process: str,
        number: int,
        *,
        assumed: bool,
        late: bool,
        driver_only: bool,
        numbers: Collection[int],
    ) -> Place:
        """Where ``number`` of a process leads. Of one that ended (``stat`` is None) what was found before holds.

        ``assumed``: the choice of the device was not seen. ``late``: the process ran before it was watched.
        ``driver_only``: its runtime was not seen at work. ``numbers``: all that it used.
        """
        if stat is None:
            return self._found.get((process, number), Place(None, ENDED))
        place = self._found[process, number] = self._place(stat, number, assumed, late, driver_only, numbers)
        return place

    def _place(
        self, stat: ProcStat, number: int, assumed: bool, late: bool, driver_only: bool, numbers: Collection[int]
    ) -> Place:
        visible = self.visibility.of(stat, late=late)
        used = self._used.get(stat.id, {})
        sole = next(iter(used)) if len(used) == 1 else None
        if visible.only is not None:
            found: CudaDevice | str = visible.only
        elif not visible.devices:
            found = visible.beyond
        elif assumed and late:
            found = CHOSE_UNSEEN
        elif assumed and driver_only:
            found = DRIVER_CHOSE
        else:
            found = visible.device(number)
            if not visible.sure and not used and isinstance(found, CudaDevice):
                found = SET_UNSEEN
        if isinstance(found, CudaDevice):
            if not used or found.uuid in used:
                return Place(self._entity(found.uuid))
            found = CONTRADICTION
        if sole is not None and len(numbers) <= 1:  # it has memory on one GPU only, and counts one only
            return Place(self._entity(sole))
        return Place(None, found)

    def measured(self) -> set[tuple[str, str]]:
        """(process, GPU or MIG device), by id, whose use of the multiprocessors NVML itself tells."""
        return {
            (process, self._entities[uuid].id)
            for process, on in self._used.items()
            for uuid, use in on.items()
            if use.sm_util_pct is not None
        }

    def users(self) -> set[int]:
        """Pids of the processes that NVML sees computing on a GPU."""
        return self._users

    def drop(self, keep: Collection[str]) -> None:
        """Forget all processes but these, by id."""
        self._found = {place: found for place, found in self._found.items() if place[0] in keep}

    # --- inside ----------------------------------------------------------------------------------------------------

    def _take(self, snapshot: NvmlSnapshot, pids: PidMap) -> None:
        for gpu in snapshot.gpus:
            attributes = {"name": gpu.facts["name"]} if "name" in gpu.facts else {}
            entity = self._entities[gpu.uuid] = nodes.GPU(uuid=gpu.uuid, attributes=attributes)
            self.capacities[entity.id] = Capacity(
                _whole(gpu.metrics.get("cores_count")), _whole(gpu.metrics.get("memory_total_bytes"))
            )
            for mig in gpu.migs:
                instance = self._entities[mig.uuid] = nodes.MigInstance(uuid=mig.uuid)
                self.capacities[instance.id] = Capacity(None, _whole(mig.metrics.get("memory_total_bytes")))
            self._take_processes(gpu, pids)

    def _take_processes(self, gpu: Gpu, pids: PidMap) -> None:
        migs = {(mig.gpu_instance, mig.compute_instance): mig.uuid for mig in gpu.migs}
        for process in gpu.processes:
            stat = pids.process(process.pid)
            if stat is not None:
                uuid = migs.get((process.gpu_instance, process.compute_instance), gpu.uuid)
                self._used.setdefault(stat.id, {})[uuid] = process
                if "compute" in process.kinds:
                    self._users.add(stat.pid)

    def _entity(self, uuid: str) -> Entity | None:
        return self._entities.get(uuid)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
