"""Semaphores, POSIX named and System V, with the processes that use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.ipc_users import (
    ObjectGraph,
    SysvUsers,
    Usage,
    device_text,
    note_foreign_namespaces,
    note_no_sysv,
    note_unseen_maps,
)
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Entity, nodes
from gpuflight.sources.segments import is_semaphore, semaphore_name

if TYPE_CHECKING:
    from gpuflight.sources.segments import Segment
    from gpuflight.sources.world import World


class SemaphoresCollector(Collector):
    """Semaphores: POSIX named ones by who has them mapped, System V sets by who operated or waits on them.

    Of a System V semaphore the kernel knows only the last process that operated on it; the collector remembers those
    it saw. A process blocked in an operation is seen at once (``waiting``). Sets without a known user hang on the host.
    """

    expands = (nodes.Process, nodes.Semaphore, nodes.Host)

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._users = SysvUsers()
        self._graph = ObjectGraph()

    def observe(self, world: World) -> None:
        self._graph = ObjectGraph(nodes.Host(hostname=world.procfs.hostname).id)
        for segment in world.ipc.segments().values():
            if is_semaphore(segment):
                self._add_posix(world, segment)
        note_unseen_maps(self, world)
        try:
            self._add_sysv(world)
        except OSError as error:
            note_no_sysv(self, error, "semaphores")
        else:
            note_foreign_namespaces(self, world, "semaphores")

    def expand(self, entities: Sequence[Entity]) -> Batch:
        return self._graph.expand(entities)

    def _add_posix(self, world: World, segment: Segment) -> None:
        name = semaphore_name(segment, world.ipc.shm_files())
        processes = world.procfs.processes()
        users = {(pid, processes[pid].start): Usage({"how": "mapped"}) for pid in segment.users if pid in processes}
        if len(users) < 2 and not name:
            return  # unlinked and in one process only: nobody else can ever reach it but its children
        state = world.ipc.semaphore_state(segment)
        attributes: dict[str, Any] = {"name": name} if name else {"deleted": True}
        metrics: dict[str, int | float] = {"semaphores_count": 1}
        unknown = None
        if state is None:
            unknown = dict.fromkeys(("value_count", "waiting_count"), "its memory may not be read")
        else:
            metrics |= {"value_count": state.value, "waiting_count": state.waiting}
        node = nodes.Semaphore(
            mechanism="posix",
            key=f"ino={segment.inode},dev={device_text(segment.device)}",
            attributes=attributes,
            metrics=metrics,
            unknown=unknown,
        )
        self._graph.add(node, users)

    def _add_sysv(self, world: World) -> None:
        sets = world.ipc.sysv_semaphores()
        self._users.begin(world, sets)
        waits = world.ipc.waits()
        for semid, semaphores in sets.items():
            try:
                pids = world.ipc.semaphore_pids(semid, semaphores.semaphores)
                if len(pids) < semaphores.semaphores:
                    self.lose("System V semaphores not asked for their users", semaphores.semaphores - len(pids))
                for pid in set(pids):
                    if pid and not self._users.saw(world, semid, pid, "operated", semaphores.operated_at_s):
                        self.lose("last users of System V semaphores, ended since")
            except PermissionError:
                self.note("the users of other people's System V semaphores may not be asked for", "run as root")
            except SourceUnavailable as error:
                self.note(error.reason, error.hint)
            except OSError:  # removed meanwhile
                continue
            waiting = waits.get(("sem", semid), [])
            for wait in waiting:
                self._users.saw(world, semid, wait.pid, "waited")
            node = nodes.Semaphore(
                mechanism="sysv",
                key=str(semid),
                attributes={"sysv_key": f"0x{semaphores.key & 0xFFFFFFFF:08x}", "owner_uid": semaphores.uid},
                metrics={"semaphores_count": semaphores.semaphores, "waiting_count": len(waiting)},
            )
            self._graph.add(node, self._users.of(semid, {wait.pid for wait in waiting}))
