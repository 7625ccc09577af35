"""The processes that a user asked for by pid (``--pid``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.graph import nodes

if TYPE_CHECKING:
    from gpuflight.sources.world import World


class StaticSettings(BaseModel):
    """Which processes to start from."""

    model_config = ConfigDict(extra="forbid")

    pids: list[Annotated[int, Field(ge=1)]] = Field(default_factory=list, description="Processes to start from.")


class Static(Collector):
    """Starts from given processes. A pid means the process that had it first: a later one with that pid is another."""

    seeds = True
    precedence = 20  # first, so that nobody else brings one of them to the frontier without its ``seeded``
    settings_class = StaticSettings
    settings: StaticSettings

    def __init__(self, settings: StaticSettings | None = None) -> None:
        super().__init__(settings)
        self._starts: dict[int, int] = {}

    def observe(self, world: World) -> None:
        self._found: list[nodes.Process] = []
        if not self.settings.pids:
            return
        processes = world.procfs.processes()
        for pid in dict.fromkeys(self.settings.pids):
            stat = processes.get(pid)
            if stat is not None and self._starts.setdefault(pid, stat.start) == stat.start:
                self._found.append(nodes.Process(pid=pid, start=stat.start, attributes={"seeded": True}))
            elif pid in self._starts:
                self.note(f"process {pid} has ended")
            else:
                self.note(f"there is no process {pid}", "pids are those of gpuflight's own pid namespace")

    def seed(self) -> Batch:
        return Batch(list(self._found))
