"""Pipes and fifos: which process can write what which other one can read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpuflight.collectors.base import Batch, Collector
from gpuflight.graph import Edge, Entity, edges, nodes
from gpuflight.sources.procfs import FdIndex, FdRef, ProcStat

if TYPE_CHECKING:
    from gpuflight.sources.world import World


MAX_HOLDERS = 256
"""Most holders drawn of one pipe. More is a descriptor leaked to every child of a server: it says nothing more."""


class _Drawn:
    """One pipe that connects processes: its entity, and its edges by process."""

    __slots__ = ("edges", "holders", "node")

    def __init__(self, node: nodes.Pipe) -> None:
        self.node = node
        self.edges: dict[tuple[int, int], list[Edge]] = {}
        self.holders: list[nodes.Process] = []


class PipesCollector(Collector):
    """Pipes and fifos between processes: SendTo from every holder of a write end, to every holder of a read end.

    Ends that children inherited count: each holder may use them. The attribute ``ends`` of an edge says which its
    process holds (r, w, rw). A pipe whose ends are all in one process is not drawn. Of more than 256 holders the oldest
    are drawn and the others counted.
    """

    expands = (nodes.Process, nodes.Pipe)

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._index: FdIndex | None = None
        self._drawn: dict[str, _Drawn] = {}
        self._of_process: dict[tuple[int, int], list[_Drawn]] = {}
        self._left_out = 0

    def observe(self, world: World) -> None:
        index = world.procfs.fds()
        if index.unreadable_pids:
            self.note(
                "the open descriptors of some processes may not be read, so pipes can lack an end",
                "run as root or grant CAP_SYS_PTRACE",
                index.unreadable_pids,
            )
        if index is not self._index:  # otherwise nothing was opened, closed or ended anywhere
            self._index = index
            self._build(index, world.procfs.processes())
        if self._left_out:
            self.lose("holders of pipes with very many holders", self._left_out)

    def _build(self, index: FdIndex, processes: dict[int, ProcStat]) -> None:
        self._drawn, self._of_process, self._left_out = {}, {}, 0
        for inode, refs in index.pipes.items():
            if len(refs) > 1:
                self._draw(nodes.Pipe(inode=inode), refs, processes)
        for (device, inode), refs in index.fifos.items():
            if len(refs) > 1:
                path = index.fifo_paths[device, inode].removesuffix(" (deleted)")
                attributes = {"name": path.rpartition("/")[2], "path": path}
                self._draw(nodes.Pipe(inode=inode, device=device, attributes=attributes), refs, processes)

    def expand(self, entities: Sequence[Entity]) -> Batch:
        batch = Batch()
        for entity in entities:
            if isinstance(entity, nodes.Process):
                key = (entity.pid, entity.start)
                for drawn in self._of_process.get(key, ()):
                    batch.nodes.append(drawn.node)
                    batch.edges.extend(drawn.edges[key])
            elif (found := self._drawn.get(entity.id)) is not None:
                batch.nodes.extend(found.holders)
                for own in found.edges.values():
                    batch.edges.extend(own)
        return batch

    def _draw(self, node: nodes.Pipe, refs: list[FdRef], processes: dict[int, ProcStat]) -> None:
        ends: dict[int, list[bool]] = {}
        for ref in refs:
            held = ends.setdefault(ref.pid, [False, False])
            held[0] |= ref.readable
            held[1] |= ref.writable
        ends = {pid: held for pid, held in ends.items() if pid in processes}
        if len(ends) < 2:
            return
        if len(ends) > MAX_HOLDERS:
            self._left_out += len(ends) - MAX_HOLDERS
            ends = {pid: ends[pid] for pid in sorted(ends, key=lambda pid: processes[pid].start)[:MAX_HOLDERS]}
        drawn = self._drawn[node.id] = _Drawn(node)
        for pid, (reads, writes) in ends.items():
            stat = processes[pid]
            attributes = {"ends": "r" * reads + "w" * writes}
            own: list[Edge] = []
            if writes:
                own.append(edges.SendTo(stat.id, node.id, attributes))
            if reads:
                own.append(edges.SendTo(node.id, stat.id, attributes))
            drawn.edges[pid, stat.start] = own
            drawn.holders.append(nodes.Process(pid=pid, start=stat.start))
            self._of_process.setdefault((pid, stat.start), []).append(drawn)
