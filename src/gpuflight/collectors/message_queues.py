"""Message queues, POSIX and System V, with the processes that use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.ipc_users import (
    ObjectGraph,
    SysvUsers,
    Usage,
    ends_of,
    note_foreign_namespaces,
    note_no_sysv,
    note_unreadable_descriptors,
)
from gpuflight.graph import Entity, nodes

if TYPE_CHECKING:
    from gpuflight.sources.mqueues import PosixQueue
    from gpuflight.sources.world import World


class MessageQueuesCollector(Collector):
    """Message queues: POSIX by who has them open, System V by who sent, received or waits on them.

    Of a System V queue the kernel knows only the last sender and receiver; the collector remembers those it saw. The
    attribute ``how`` of an Access edge says what it rests on. Queues without a known user hang on the host.
    """

    expands = (nodes.Process, nodes.MessageQueue, nodes.Host)

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._users = SysvUsers()
        self._graph = ObjectGraph()

    def observe(self, world: World) -> None:
        self._graph = ObjectGraph(nodes.Host(hostname=world.procfs.hostname).id)
        note_unreadable_descriptors(self, world, "POSIX message queues")
        for queue in world.ipc.posix_queues().values():
            self._add_posix(world, queue)
        try:
            self._add_sysv(world)
        except OSError as error:
            note_no_sysv(self, error, "message queues")
        else:
            note_foreign_namespaces(self, world, "message queues")

    def expand(self, entities: Sequence[Entity]) -> Batch:
        return self._graph.expand(entities)

    def _add_posix(self, world: World, queue: PosixQueue) -> None:
        processes = world.procfs.processes()
        attributes: dict[str, Any] = {"name": queue.name}
        if queue.deleted:
            attributes["deleted"] = True
        metrics: dict[str, int | float] = {}
        unknown = {
            "messages_count": "of a POSIX queue the kernel tells only the bytes",
            "limit_bytes": "of a POSIX queue the kernel tells it only to those who open it",
        }
        if queue.queued_bytes is None:
            unknown["queued_bytes"] = "the queue may not be opened"
        else:
            metrics["queued_bytes"] = queue.queued_bytes
        users: dict[tuple[int, int], Usage] = {}
        for pid, ends in ends_of(queue.users).items():
            stat = processes.get(pid)
            if stat is not None:
                users[pid, stat.start] = Usage({"how": "open", "ends": ends})
                if pid == queue.notify_pid:
                    users[pid, stat.start].attributes["notified"] = True
        self._graph.add(
            nodes.MessageQueue(
                mechanism="posix", key=queue.key, attributes=attributes, metrics=metrics, unknown=unknown
            ),
            users,
        )

    def _add_sysv(self, world: World) -> None:
        queues = world.ipc.sysv_queues()
        self._users.begin(world, queues)
        waits = world.ipc.waits()
        limit_bytes = world.ipc.sysv_queue_limit_bytes() if queues else None
        for msqid, queue in queues.items():
            for pid, at_s, how in (
                (queue.last_sender, queue.sent_at_s, "sent"),
                (queue.last_receiver, queue.received_at_s, "received"),
            ):
                if pid and not self._users.saw(world, msqid, pid, how, at_s):
                    self.lose("last users of System V queues, ended since")
            waiting = waits.get(("msg", msqid), [])
            for wait in waiting:
                self._users.saw(world, msqid, wait.pid, f"waited to {wait.what}")
            limit: dict[str, int | float] = {"limit_bytes": limit_bytes} if limit_bytes else {}
            node = nodes.MessageQueue(
                mechanism="sysv",
                key=str(msqid),
                attributes={"sysv_key": f"0x{queue.key & 0xFFFFFFFF:08x}", "owner_uid": queue.uid},
                metrics={
                    "queued_bytes": queue.queued_bytes,
                    "messages_count": queue.messages,
                    "waiting_count": len(waiting),
                    **limit,
                },
                unknown=None if limit else {"limit_bytes": "kernel.msgmnb cannot be read"},
            )
            self._graph.add(node, self._users.of(msqid, {wait.pid for wait in waiting}))
