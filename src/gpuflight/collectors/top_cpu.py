"""The processes that used most CPU in the last round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.graph import nodes

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcStat
    from gpuflight.sources.world import World


class TopCpuSettings(BaseModel):
    """How many, and from which use on."""

    model_config = ConfigDict(extra="forbid")

    count: int = Field(10, ge=1, description="How many processes are marked.")
    min_pct: float = Field(1.0, ge=0, description="Least CPU use of a marked process, of one core.")
    seed: bool = Field(False, description="Start the picture from them (of use with process_tree.seed_all = false).")


class TopCpu(Collector):
    """Marks the processes that used most CPU over the round (not since they started): attribute ``top_cpu`` = rank."""

    seeds = True
    expands = (nodes.Process,)
    settings_class = TopCpuSettings
    settings: TopCpuSettings

    def __init__(self, settings: TopCpuSettings | None = None) -> None:
        super().__init__(settings)
        self._now: dict[int, ProcStat] = {}
        self._now_s = 0.0

    def observe(self, world: World) -> None:
        procfs = world.procfs
        before, before_s = self._now, self._now_s
        self._now = procfs.processes()
        self._now_s = procfs.scanned_at_s
        self._top: dict[str, nodes.Process] = {}
        elapsed_s = self._now_s - before_s
        if not before or elapsed_s <= 0:
            return  # one reading gives no rate
        least_ticks = max(1.0, self.settings.min_pct / 100 * procfs.ticks_per_second * elapsed_s)
        used = []
        for pid, stat in self._now.items():
            last = before.get(pid)
            if last is stat:
                continue
            ticks = stat.cpu_ticks - (last.cpu_ticks if last is not None and last.start == stat.start else 0)
            if ticks >= least_ticks:
                used.append((-ticks, pid, stat))
        used.sort(key=lambda entry: entry[:2])
        for rank, (_, pid, stat) in enumerate(used[: self.settings.count], 1):
            self._top[stat.id] = nodes.Process(pid=pid, start=stat.start, attributes={"top_cpu": rank}, id=stat.id)

    def seed(self) -> Batch:
        return Batch(list(self._top.values())) if self.settings.seed else Batch()

    def expand(self, entities: Sequence[nodes.Process]) -> Batch:
        top = self._top
        return Batch([top[entity.id] for entity in entities if entity.id in top])
