"""Ranks of distributed jobs: which rank of which job each process with a GPU is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.job_facts import JobReader
from gpuflight.collectors.process_tree import ACCELERATORS
from gpuflight.graph import nodes
from gpuflight.sources.job_environment import JobFacts

if TYPE_CHECKING:
    from gpuflight.sources.world import World


class Ranks(Collector):
    """Rank, world size, local rank and job of the processes that have a GPU open (torchrun, Slurm, MPI, Kubernetes)."""

    expands = (nodes.Process,)
    describes = (nodes.Process,)

    def __init__(self, settings: None = None) -> None:
        super().__init__(settings)
        self._reader = JobReader()
        self._now: dict[tuple[int, int], JobFacts] = {}

    def observe(self, world: World) -> None:
        procfs = world.procfs
        processes = procfs.processes()
        holders = procfs.fds().holders(ACCELERATORS)
        self._now = {}
        closed = 0
        for pid in holders:
            stat = processes.get(pid)
            if stat is None:
                continue
            facts = self._reader.read(procfs, stat)
            if facts.attributes or facts.unknown:
                self._now[(pid, stat.start)] = facts
                closed += not facts.attributes
        self._reader.keep(holders)
        if closed:
            self.note(
                "the environment of processes with a GPU cannot be read, or says nonsense: their rank is not known",
                "run as root or grant CAP_SYS_PTRACE",
                closed,
            )

    def expand(self, entities: Sequence[nodes.Process]) -> Batch:
        batch = Batch()
        if not self._now:
            return batch
        for entity in entities:
            facts = self._now.get((entity.pid, entity.start))
            if facts is not None:
                batch.nodes.append(
                    nodes.Process(
                        pid=entity.pid,
                        start=entity.start,
                        id=entity.id,
                        attributes={**facts.attributes},
                        unknown={**facts.unknown} or None,
                    )
                )
        return batch
