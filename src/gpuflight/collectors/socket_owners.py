"""Which processes hold a socket open; shared by the collectors of internet and unix sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuflight.collectors.base import Collector
from gpuflight.graph import edges, nodes

if TYPE_CHECKING:
    from gpuflight.sources.procfs import FdRef, ProcFs, ProcStat


class SocketOwners:
    """Inode → ids of the processes that have it open, in the order of their pids; anchors and edges to go with it."""

    def __init__(self) -> None:
        self._processes: dict[int, ProcStat] = {}
        self._by_pid: dict[int, tuple[str, ...]] = {}
        self._last_by_pid: dict[int, tuple[str, ...]] = {}
        self._anchors: dict[str, nodes.Process] = {}
        self._last_anchors: dict[str, nodes.Process] = {}
        self.by_inode: dict[int, tuple[str, ...]] = {}
        """Ids of the processes that hold each socket; read only."""
        self.unreadable_pids = 0
        self.same = False
        """Whether every socket is held by the same processes as in the round before."""
        self._missing: set[int] = set()
        self._inodes: set[int] = set()
        self._references: list[tuple[FdRef, ...] | None] = []

    def begin(self, procfs: ProcFs, inodes: set[int]) -> None:
        """Look up this round's owners of the sockets that exist (``inodes``). Raises SourceUnavailable."""
        index = procfs.fds()
        inodes.discard(0)
        missing = inodes - index.sockets.keys()
        if missing:  # maybe opened since their process was last looked at closely
            index = procfs.fds(missing)
        self._missing = missing
        self.unreadable_pids = index.unreadable_pids
        self._last_anchors, self._anchors = self._anchors, {}
        self._processes = procfs.processes()
        self._last_by_pid, self._by_pid = self._by_pid, {}
        if inodes == self._inodes:
            inodes = self._inodes  # in the same order as before
        references_of = list(map(index.sockets.get, inodes))
        # Of most hosts all is as it was: seen by comparing the whole column, which holds the same objects.
        self.same = (
            inodes is self._inodes
            and references_of == self._references
            and all(self._of_pid(pid) == owner for pid, owner in self._last_by_pid.items())
        )
        self._inodes, self._references = inodes, references_of
        if self.same:
            return
        of_pid = self._of_pid
        by_inode: dict[int, tuple[str, ...]] = {}
        for inode, references in zip(inodes, references_of, strict=True):
            if references is None:
                continue
            if len(references) == 1:
                by_inode[inode] = of_pid(references[0].pid)
            else:
                pids = sorted({reference.pid for reference in references})
                by_inode[inode] = tuple(process for pid in pids for process in of_pid(pid))
        self.same = by_inode == self.by_inode
        self.by_inode = by_inode

    def of(self, inode: int) -> tuple[str, ...]:
        """Ids of the processes that hold the socket; several after a fork, none if nobody visible does."""
        return self.by_inode.get(inode, ())

    def alive(self, process: str) -> bool:
        """Whether a process id of an earlier round is a live process now."""
        pid = int(process[len("Process(pid=") :].partition(",")[0])
        return self._of_pid(pid) == (process,)

    def anchor(self, process: str) -> nodes.Process:
        """The process as a bare entity, for an edge to end in. ``process`` is an id that ``of`` gave this round."""
        found = self._anchors.get(process) or self._last_anchors.get(process)
        if found is None:
            pid, _, start = process[len("Process(pid=") : -1].partition(",start=")
            found = nodes.Process(pid=int(pid), start=int(start))
        self._anchors[process] = found
        return found

    def report_unowned(self, collector: Collector) -> None:
        """Say how many sockets show no owner because their process could not be looked into."""
        if self.unreadable_pids:
            unowned = len(self._missing - self.by_inode.keys())
            if unowned:
                collector.note(
                    "sockets whose process may not be looked into", "run as root or grant CAP_SYS_PTRACE", unowned
                )

    @staticmethod
    def belongs(endpoint: str, owners: tuple[str, ...], before: list[edges.Belong]) -> list[edges.Belong]:
        """The edges from an endpoint to its processes; those of ``before`` again where there is one."""
        known = {edge.target: edge for edge in before}
        return [known.get(owner) or edges.Belong(endpoint, owner) for owner in owners]

    def _of_pid(self, pid: int) -> tuple[str, ...]:
        found = self._by_pid.get(pid)
        if found is None:
            stat = self._processes.get(pid)
            found = () if stat is None else (stat.id,)
            last = self._last_by_pid.get(pid)
            found = self._by_pid[pid] = last if last == found else found  # the same object compares faster
        return found
