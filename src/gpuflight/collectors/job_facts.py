"""Which rank of which job each process is: its environment, read once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuflight.collectors.process_facts import NO_RIGHT
from gpuflight.sources.job_environment import NOTHING, JobFacts, job_facts

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcFs, ProcStat


class JobReader:
    """Reads the environment of each process once, as it cannot change while it runs the same program."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[int, str, int, int], JobFacts]] = {}

    def read(self, procfs: ProcFs, stat: ProcStat) -> JobFacts:
        """The facts of a live process; of one that may not be looked into, why they are unknown."""
        known = self._known.get(stat.pid)
        image = (stat.start, *stat.image)
        if known is not None and known[0] == image:
            return known[1]
        try:
            facts = job_facts(procfs.environ(stat.pid), procfs.hostname)
        except PermissionError:
            facts = JobFacts({}, {"rank": NO_RIGHT})
        except (OSError, ValueError):  # it ends
            return NOTHING
        self._known[stat.pid] = (image, facts)
        return facts

    def keep(self, pids: set[int]) -> None:
        """Forget all processes but these."""
        if not pids.issuperset(self._known):
            self._known = {pid: known for pid, known in self._known.items() if pid in pids}
