"""Who started processes that belong together: the nearest common ancestor of those that use a GPU or were asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.process_tree import ACCELERATORS
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import edges, nodes

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcStat
    from gpuflight.sources.world import World


class CommonParentSettings(BaseModel):
    """How much is shown below a common parent."""

    model_config = ConfigDict(extra="forbid")

    max_siblings: int = Field(256, ge=0, description="Most children shown of one common parent.")


class CommonParent(Collector):
    """Nearest common ancestor of GPU-using or given processes (their launcher), with its other children.

    A process joins the lowest ancestor that has another such process below it, so two jobs side by side keep their own.
    The init process is nobody's launcher. The ancestor carries ``common_parent_of`` = how many it joins.
    """

    expands = (nodes.Process,)
    settings_class = CommonParentSettings
    settings: CommonParentSettings

    def observe(self, world: World) -> None:
        self._processes = world.procfs.processes()
        self._members: dict[int, ProcStat] = {}
        self._reported: dict[int, int] = {}
        self._children: dict[int, list[ProcStat]] | None = None
        try:
            self._accelerated = world.procfs.fds().holders(ACCELERATORS)
        except SourceUnavailable as error:
            self._accelerated = set()
            self.note(error.reason, error.hint)

    def expand(self, entities: Sequence[nodes.Process]) -> Batch:
        batch = Batch()
        known = len(self._members)
        for entity in entities:
            stat = self._processes.get(entity.pid)
            if stat is None or stat.start != entity.start or stat.kernel_thread:
                continue
            if stat.pid in self._accelerated or entity.attributes.get("seeded"):
                self._members[stat.pid] = stat
        if len(self._members) < 2 or len(self._members) == known:
            return batch
        for parent, joined in self._common_parents():
            if self._reported.get(parent.pid) != joined:
                self._reported[parent.pid] = joined
                self._report(parent, joined, batch)
        return batch

    def _ancestors(self, stat: ProcStat) -> Iterator[ProcStat]:
        """The process itself, its parent, and so on, without the init process and the kernel."""
        seen = set()
        current: ProcStat | None = stat
        while current is not None and current.pid > 1 and not current.kernel_thread and current.pid not in seen:
            seen.add(current.pid)
            yield current
            current = self._processes.get(current.ppid)

    def _common_parents(self) -> list[tuple[ProcStat, int]]:
        below: dict[int, int] = {}
        for member in self._members.values():
            for ancestor in self._ancestors(member):
                below[ancestor.pid] = below.get(ancestor.pid, 0) + 1
        parents: dict[int, ProcStat] = {}
        for member in self._members.values():
            for ancestor in self._ancestors(member):
                if below[ancestor.pid] > 1:
                    parents[ancestor.pid] = ancestor
                    break
        return [(parent, below[pid]) for pid, parent in parents.items()]

    def _report(self, parent: ProcStat, joined: int, batch: Batch) -> None:
        batch.nodes.append(_anchor(parent, {"common_parent_of": joined}))
        for member in self._members.values():
            chain = list(self._ancestors(member))
            if parent not in chain:
                continue
            chain = chain[: chain.index(parent) + 1]
            for child, owner in pairwise(chain):
                batch.nodes.append(_anchor(child))
                batch.edges.append(edges.Own(owner.id, child.id))
        siblings = self._children_of(parent.pid)
        if len(siblings) > self.settings.max_siblings:
            self.lose("siblings beyond max_siblings", len(siblings) - self.settings.max_siblings)
        for sibling in siblings[: self.settings.max_siblings]:
            batch.nodes.append(_anchor(sibling))
            batch.edges.append(edges.Own(parent.id, sibling.id))

    def _children_of(self, pid: int) -> list[ProcStat]:
        if self._children is None:
            self._children = {}
            for stat in self._processes.values():
                self._children.setdefault(stat.ppid, []).append(stat)
        return self._children.get(pid, [])


def _anchor(stat: ProcStat, attributes: dict[str, int] | None = None) -> nodes.Process:
    return nodes.Process(pid=stat.pid, start=stat.start, id=stat.id, attributes=attributes or {})
