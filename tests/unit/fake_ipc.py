"""A World whose IPC tables the test writes down; stands in for ``Ipc`` under the collectors."""

from __future__ import annotations

from typing import Any

from gpuflight.sources.ipc import SysvQueue, SysvSemaphores, SysvSharedMemory, Wait
from gpuflight.sources.mqueues import PosixQueue
from gpuflight.sources.segments import Segment, SegmentKey, SemaphoreState, ShmFile, ShmMount

BOOT_S = 1_700_000_000


class FakeStat:
    def __init__(self, pid: int, start: int) -> None:
        self.pid, self.start, self.kernel_thread = pid, start, False


class FakeProcFs:
    """Processes and nothing else. ``start`` counts hundredths of a second since boot."""

    hostname = "box"
    boot_time_s = float(BOOT_S)
    ticks_per_second = 100

    def __init__(self) -> None:
        self.stats: dict[int, FakeStat] = {}
        self.unreadable_pids = 0

    def processes(self) -> dict[int, FakeStat]:
        return self.stats

    def fds(self) -> FakeProcFs:
        return self


class FakeMaps:
    unreadable = 0
    pending = 0


class FakeCgroup:
    container_id = "c" * 64


class FakeIpc:
    """What ``Ipc`` answers, as attributes."""

    def __init__(self) -> None:
        self.shm: dict[int, SysvSharedMemory] = {}
        self.msg: dict[int, SysvQueue] = {}
        self.msgmnb: int | None = None
        self.sem: dict[int, SysvSemaphores] = {}
        self.pids: dict[int, list[int] | Exception] = {}
        self.waiting: dict[tuple[str, int], list[Wait]] = {}
        self.queues: list[PosixQueue] = []
        self.found: dict[SegmentKey, Segment] = {}
        self.sizes: dict[int, int] = {}
        self.files: dict[tuple[int, int], ShmFile] = {}
        self.mounts: dict[int | None, ShmMount] = {}
        self.states: dict[int, SemaphoreState] = {}
        self.namespaces: dict[int, int | OSError] = {}
        self.foreign: dict[int, int] = {}
        self.missing = False
        self.maps = FakeMaps()
        self.shm_files_left = 0

    def _table(self, table: Any) -> Any:
        if self.missing:
            raise FileNotFoundError(2, "no such file")
        return table

    def sysv_shared_memory(self) -> dict[int, SysvSharedMemory]:
        return self._table(self.shm)  # type: ignore[no-any-return]

    def sysv_queue_limit_bytes(self) -> int | None:
        return self.msgmnb

    def sysv_queues(self) -> dict[int, SysvQueue]:
        return self._table(self.msg)  # type: ignore[no-any-return]

    def sysv_semaphores(self) -> dict[int, SysvSemaphores]:
        return self._table(self.sem)  # type: ignore[no-any-return]

    def semaphore_pids(self, semid: int, count: int) -> list[int]:
        answer = self.pids.get(semid, [0] * count)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def waits(self) -> dict[tuple[str, int], list[Wait]]:
        return self.waiting

    def posix_queues(self) -> dict[tuple[int, int], PosixQueue]:
        return {(queue.device, queue.inode): queue for queue in self.queues}

    def segments(self) -> dict[SegmentKey, Segment]:
        return self.found

    def size_of(self, segment: Segment) -> int | None:
        return self.sizes.get(segment.inode)

    def semaphore_state(self, segment: Segment) -> SemaphoreState | None:
        return self.states.get(segment.inode)

    def shm_files(self) -> dict[tuple[int, int], ShmFile]:
        return self.files

    def shm_mount(self, pid: int | None = None) -> ShmMount | None:
        if pid not in self.mounts and pid is not None:
            raise PermissionError(13, "denied")
        return self.mounts.get(pid)

    def ipc_namespace(self, pid: int) -> int:
        answer = self.namespaces.get(pid, 0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    def foreign_namespaces(self) -> dict[int, int]:
        return self.foreign

    def segment(self, segment: Segment) -> None:
        self.found[segment.mechanism, segment.device, segment.inode, segment.ipc_namespace] = segment


class FakeWorld:
    def __init__(self) -> None:
        self.procfs = FakeProcFs()
        self.ipc = FakeIpc()
        self.cgroups = self

    def of(self, pid: int) -> FakeCgroup:
        return FakeCgroup()

    def process(self, pid: int, start: int = 1000) -> str:
        """One live process; its entity id."""
        self.procfs.stats[pid] = FakeStat(pid, start)
        return f"Process(pid={pid},start={start})"


class Look:
    """A collector's answer of one round: expanded from all processes, from what that brought, and from the host."""

    def __init__(self, world: Any, collector: Any) -> None:
        from gpuflight.graph import Graph, nodes

        collector.losses.clear()
        collector.notes.clear()
        collector.observe(world)
        frontier = [nodes.Process(pid=stat.pid, start=stat.start) for stat in world.procfs.stats.values()]
        first = collector.expand(frontier)
        objects = [node for node in first.nodes if isinstance(node, collector.expands[1])]
        second = collector.expand(objects)
        host = collector.expand([nodes.Host(hostname="box")])
        foreign = collector.expand([nodes.Host(hostname="elsewhere")])
        assert (foreign.nodes, foreign.edges) == ([], [])
        self.graph = Graph([*first.nodes, *second.nodes], [*first.edges, *second.edges])
        self.on_host = {node.id: node for node in host.nodes}
        self.host_edges = {edge.key for edge in host.edges}

    def how(self, object_id: str) -> dict[str, Any]:
        """Of each process with an Access edge to an object: the attributes of the edge."""
        return {
            edge.source: dict(edge.attributes)
            for edge in self.graph.edges.values()
            if edge.kind == "Access" and edge.target == object_id
        }
