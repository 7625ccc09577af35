"""Traffic of pipes, message queues and semaphores: who wrote and read how much, counted where the calls return."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.kernel_programs import KernelPrograms, Starts, alive_processes, per_s, process_entity
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Edge, Entity, edges, nodes

if TYPE_CHECKING:
    from gpuflight.sources.procfs import FdIndex, FdRef
    from gpuflight.sources.world import World

_PIPE, _POSIX_QUEUE, _SYSV_QUEUE, _SYSV_SEMAPHORE = 1, 2, 3, 4
_KEY = struct.Struct("=Q4I")
_ROW = struct.Struct("=5Q2I")
_LOSSES = {0: "uses of pipes, queues and semaphores that found no room"}
_MINOR_BITS = 20  # of a device number inside the kernel (include/linux/kdev_t.h)
_IDLE_ROUNDS = 24


class KernelIpcSettings(BaseModel):
    """Whether this is watched at all."""

    model_config = ConfigDict(extra="forbid")

    system_calls: bool = Field(
        False,
        description="Watch. The kernel has no events for pipes and queues, so a program looks at every system call of "
        "the machine as it returns (docs/kernel-probes.md has the cost).",
    )
    max_uses: int = Field(
        16_384, ge=64, le=1_048_576, description="Room in the kernel for uses of an object by a process (100 B each)."
    )


class _Use(Struct, gc=False):
    """One process's traffic with one object; the last four are what it grew by."""

    raw: bytes
    process: str
    counts: tuple[int, int, int, int]
    read_bytes: int
    reads: int
    written_bytes: int
    writes: int
    idle_rounds: int = 0


class KernelIpc(Collector):
    """Bytes and calls on pipes and message queues, operations on System V semaphores (eBPF, on request).

    The edges are those that the snapshot collectors draw: ``SendTo`` between process and pipe, ``Access`` from a
    process to a queue or a semaphore; here they get rates, and users that no snapshot met. What io_uring does is not
    seen, nor what crosses shared memory: that takes no call.
    """

    name = "kernel_ipc"
    seeds = True
    precedence = -5
    settings_class = KernelIpcSettings
    settings: KernelIpcSettings

    def __init__(self, settings: KernelIpcSettings | None = None) -> None:
        super().__init__(settings)
        self._probe = KernelPrograms("ipc", _LOSSES)
        self._uses: dict[bytes, _Use] = {}
        self._entities: dict[str, Entity] = {}
        self._edges: list[Edge] = []

    def observe(self, world: World) -> None:
        self._entities, self._edges = {}, []
        if not self.settings.system_calls:
            raise SourceUnavailable(
                "the kernel has no events for pipes and queues, and watching every system call was not asked for",
                "set collectors.kernel_ipc.system_calls (docs/kernel-probes.md has the cost)",
            )
        self._probe.open(world, ["on_return"], map_entries={"ipc": self.settings.max_uses})
        elapsed_s = self._probe.elapsed_s(world.clock.monotonic_s())
        rows = self._probe.read("ipc", _KEY.size, _ROW.size)
        self._take(rows, Starts(world.procfs.ticks_per_second), alive_processes(world))
        self._probe.report(self)
        self._show(world, elapsed_s)

    def seed(self) -> Batch:
        return Batch(list(self._entities.values()), list(self._edges))

    def close(self) -> None:
        self._probe.close()
        self._uses.clear()

    def _take(self, rows: list[tuple[bytes, bytes]], starts: Starts, alive: set[str]) -> None:
        before, self._uses = self._uses, {}
        idle = []
        for key, raw in rows:
            known = before.get(key)
            if known is not None and known.raw == raw:
                known.idle_rounds += 1
                known.read_bytes = known.reads = known.written_bytes = known.writes = 0
                if known.idle_rounds >= _IDLE_ROUNDS or known.process not in alive:
                    idle.append(key)
                else:
                    self._uses[key] = known
                continue
            start_ns, *fields, pid, _ = _ROW.unpack(raw)
            process = starts.process_id(pid, start_ns) if pid else ""
            counts = (fields[0], fields[1], fields[2], fields[3])
            last = known.counts if known is not None and known.process == process else (0, 0, 0, 0)
            grown = [max(0, now - then) for now, then in zip(counts, last, strict=True)]
            self._uses[key] = _Use(raw, process, counts, *grown)
        self._probe.forget("ipc", idle)

    def _show(self, world: World, elapsed_s: float | None) -> None:
        objects: dict[tuple[int, int, int], list[_Use]] = {}
        for key, use in self._uses.items():
            inode, scope, kind, _, _ = _KEY.unpack(key)
            if use.process:
                objects.setdefault((kind, scope, inode), []).append(use)
        pipes = {key[1:]: uses for key, uses in objects.items() if key[0] == _PIPE}
        if pipes:
            self._show_pipes(pipes, _fds(world), elapsed_s)
        queues = {key[1:]: uses for key, uses in objects.items() if key[0] == _POSIX_QUEUE}
        if queues:
            self._show_posix_queues(world, queues, elapsed_s)
        sysv = {key: uses for key, uses in objects.items() if key[0] in (_SYSV_QUEUE, _SYSV_SEMAPHORE)}
        if sysv:
            self._show_sysv(world, sysv, elapsed_s)

    def _show_pipes(
        self, pipes: dict[tuple[int, int], list[_Use]], index: FdIndex | None, elapsed_s: float | None
    ) -> None:
        for (scope, inode), uses in pipes.items():
            device = _device(scope)
            refs: Sequence[FdRef] = ()
            if index is not None:
                refs = index.fifos.get((device, inode), ()) if device else index.pipes.get(inode, ())
            if len({use.process for use in uses}) < 2 and len({ref.pid for ref in refs}) < 2:
                continue  # all of it within one process: the collector of pipes leaves it out too
            pipe = nodes.Pipe(inode=inode, device=device)
            self._entities[pipe.id] = pipe
            for use in uses:
                self._entities.setdefault(use.process, process_entity(use.process))
                if use.counts[3]:
                    rates = per_s({"bytes_per_s": use.written_bytes, "writes_per_s": use.writes}, elapsed_s)
                    self._edges.append(edges.SendTo(use.process, pipe.id, {}, *rates))
                if use.counts[1]:
                    rates = per_s({"bytes_per_s": use.read_bytes, "reads_per_s": use.reads}, elapsed_s)
                    self._edges.append(edges.SendTo(pipe.id, use.process, {}, *rates))

    def _show_posix_queues(
        self, world: World, queues: dict[tuple[int, int], list[_Use]], elapsed_s: float | None
    ) -> None:
        try:
            known = world.ipc.posix_queues()
        except (OSError, SourceUnavailable):
            known = {}
        for (scope, inode), uses in queues.items():
            queue = known.get((_device(scope), inode))
            if queue is None:
                self.lose("POSIX message queues that were gone, or not open to us, when their traffic was read")
                continue
            self._access(nodes.MessageQueue(mechanism="posix", key=queue.key), uses, elapsed_s)

    def _show_sysv(
        self, world: World, objects: dict[tuple[int, int, int], list[_Use]], elapsed_s: float | None
    ) -> None:
        try:
            own = world.procfs.own_namespace("ipc")
        except (OSError, ValueError):
            own = 0
        for (kind, scope, number), uses in objects.items():
            if scope != own:
                self.lose("System V objects of other ipc namespaces")
            elif kind == _SYSV_QUEUE:
                self._access(nodes.MessageQueue(mechanism="sysv", key=str(number)), uses, elapsed_s)
            else:
                self._access(nodes.Semaphore(mechanism="sysv", key=str(number)), uses, elapsed_s)

    def _access(self, node: Entity, uses: list[_Use], elapsed_s: float | None) -> None:
        self._entities[node.id] = node
        for use in uses:
            self._entities.setdefault(use.process, process_entity(use.process))
            grown: dict[str, float]
            if isinstance(node, nodes.Semaphore):
                grown, attributes = {"operations_per_s": use.writes}, {"how": "operated"}
            else:
                grown = {
                    "read_bytes_per_s": use.read_bytes,
                    "reads_per_s": use.reads,
                    "written_bytes_per_s": use.written_bytes,
                    "writes_per_s": use.writes,
                }
                attributes = {"how": "used", "ends": "r" * bool(use.counts[1]) + "w" * bool(use.counts[3])}
            self._edges.append(edges.Access(use.process, node.id, attributes, *per_s(grown, elapsed_s)))


def _device(scope: int) -> int:
    """The kernel's own device number as stat(2) gives it; 0 stays 0."""
    return os.makedev(scope >> _MINOR_BITS, scope & ((1 << _MINOR_BITS) - 1)) if scope else 0


def _fds(world: World) -> FdIndex | None:
    try:
        return world.procfs.fds()
    except SourceUnavailable:
        return None
