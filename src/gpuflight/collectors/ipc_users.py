"""What the collectors of shared memory, queues and semaphores have in common: objects, and who uses them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Edge, Entity, Metric, edges, nodes

if TYPE_CHECKING:
    from gpuflight.sources.procfs import FdRef
    from gpuflight.sources.world import World

_SLACK_S = 2.0
"""The tables count whole seconds, and so does the boot time that start times are counted from."""

ProcessKey = tuple[int, int]
"""(pid, start)."""


class Usage(Struct):
    """How one process uses one object: what its Access edge carries."""

    attributes: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)


class _Object(Struct):
    node: Entity
    access: dict[ProcessKey, Edge]
    beside: list[Edge]
    beside_nodes: list[Entity]


class ObjectGraph:
    """The objects of one round: Access(Process → object), and Host(host → object) for those without a known user."""

    def __init__(self, host_id: str = "") -> None:
        self._host_id = host_id
        self._objects: dict[str, _Object] = {}
        self._of_process: dict[ProcessKey, list[_Object]] = {}
        self._orphans: list[_Object] = []

    def add(
        self,
        node: Entity,
        users: dict[ProcessKey, Usage],
        beside: Sequence[Edge] = (),
        beside_nodes: Sequence[Entity] = (),
    ) -> None:
        """One object with its users, and what else is to be drawn with it."""
        access: dict[ProcessKey, Edge] = {
            (pid, start): edges.Access(f"Process(pid={pid},start={start})", node.id, use.attributes, use.metrics)
            for (pid, start), use in users.items()
        }
        found = self._objects[node.id] = _Object(node, access, list(beside), list(beside_nodes))
        for process in access:
            self._of_process.setdefault(process, []).append(found)
        if not access:
            self._orphans.append(found)

    def expand(self, entities: Iterable[Entity]) -> Batch:
        """Of processes their objects, of objects their users, of the host the objects without a user."""
        batch = Batch()
        drawn: set[str] = set()
        for entity in entities:
            if isinstance(entity, nodes.Process):
                key = (entity.pid, entity.start)
                for found in self._of_process.get(key, ()):
                    self._draw(batch, found, drawn)
                    batch.edges.append(found.access[key])
            elif isinstance(entity, nodes.Host):
                if entity.id == self._host_id:
                    for found in self._orphans:
                        self._draw(batch, found, drawn)
                        batch.edges.append(edges.Host(self._host_id, found.node.id))
            elif (other := self._objects.get(entity.id)) is not None:
                batch.nodes.extend(nodes.Process(pid=pid, start=start) for pid, start in other.access)
                batch.edges.extend(other.access.values())
        return batch

    @staticmethod
    def _draw(batch: Batch, found: _Object, drawn: set[str]) -> None:
        if found.node.id in drawn:
            return
        drawn.add(found.node.id)
        batch.nodes.append(found.node)
        batch.nodes.extend(found.beside_nodes)
        batch.edges.extend(found.beside)


class SysvUsers:
    """Users of System V objects, gathered over the rounds.

    The kernel keeps only the *last* process of each kind (last sender, last to operate), so who was seen before is
    remembered for as long as both the process and the object live.
    """

    def __init__(self) -> None:
        self._by_object: dict[int, dict[ProcessKey, set[str]]] = {}

    def begin(self, world: World, objects: Iterable[int]) -> None:
        """Open a round: forget the objects that are not there any more, and the processes that ended."""
        live = world.procfs.processes()
        self._by_object = {
            identifier: {
                (pid, start): how
                for (pid, start), how in self._by_object.get(identifier, {}).items()
                if pid in live and live[pid].start == start
            }
            for identifier in objects
        }

    def saw(self, world: World, identifier: int, pid: int, how: str, at_s: int | None = None) -> bool:
        """Remember that ``pid`` used an object, at ``at_s`` (s since the epoch; None: right now).

        False, and nothing remembered, if the process that has this pid today cannot be the one: it started after that
        moment, or lives in another IPC namespace.
        """
        stat = world.procfs.processes().get(pid)
        if stat is None or stat.kernel_thread:
            return False
        if at_s is not None:
            try:
                started_s = world.procfs.boot_time_s + stat.start / world.procfs.ticks_per_second
            except SourceUnavailable:
                return False
            if started_s > at_s + _SLACK_S:
                return False
        try:
            if world.ipc.ipc_namespace(pid) != 0:
                return False
        except OSError:  # no right to ask: pid and start time have to do
            pass
        self._by_object.setdefault(identifier, {}).setdefault((pid, stat.start), set()).add(how)
        return True

    def of(self, identifier: int, waiting: set[int]) -> dict[ProcessKey, Usage]:
        """Who used an object, and how; ``waiting``: the pids that are blocked on it now."""
        found = {}
        for (pid, start), how in self._by_object.get(identifier, {}).items():
            attributes: dict[str, Any] = {"how": ", ".join(sorted(how))}
            if pid in waiting:
                attributes["waiting"] = True
            found[pid, start] = Usage(attributes)
        return found


def ends_of(refs: Iterable[FdRef]) -> dict[int, str]:
    """By pid what its descriptors allow: ``r``, ``w``, ``rw``, or nothing."""
    held: dict[int, list[bool]] = {}
    for ref in refs:
        ends = held.setdefault(ref.pid, [False, False])
        ends[0] |= ref.readable
        ends[1] |= ref.writable
    return {pid: "r" * reads + "w" * writes for pid, (reads, writes) in held.items()}


def note_unreadable_descriptors(collector: Collector, world: World, what: str) -> None:
    """Say that users of ``what`` can be missing, if some processes' descriptors may not be read."""
    unreadable = world.procfs.fds().unreadable_pids
    if unreadable:
        collector.note(
            f"the open descriptors of some processes may not be read, so users of {what} can be missing",
            "run as root or grant CAP_SYS_PTRACE",
            unreadable,
        )


def note_no_sysv(collector: Collector, error: OSError, what: str) -> None:
    """Say why there are no System V objects in the picture; the others are there all the same."""
    if isinstance(error, FileNotFoundError):
        collector.note(f"this kernel has no System V {what}")
    else:
        collector.note(f"the System V {what} cannot be read: {error.strerror or error}", "run as root")


def note_foreign_namespaces(collector: Collector, world: World, what: str) -> None:
    """Say that the System V objects of other IPC namespaces cannot be seen, if processes live in such."""
    foreign = world.ipc.foreign_namespaces()
    if foreign:
        collector.note(
            f"System V {what} of other IPC namespaces (containers) cannot be seen from this one",
            "run gpuflight inside that namespace as well",
            len(foreign),
        )


def device_text(device: int) -> str:
    """``major:minor`` in decimal."""
    return f"{os.major(device)}:{os.minor(device)}"


def note_unseen_maps(collector: Collector, world: World) -> None:
    """Say which processes' memory maps could not be, or were not yet, looked at."""
    maps = world.ipc.maps
    if maps.unreadable:
        collector.note(
            "the memory maps of some processes may not be read, so users of shared memory can be missing",
            "run as root or grant CAP_SYS_PTRACE",
            maps.unreadable,
        )
    if maps.pending:
        collector.lose("processes whose memory maps were not looked at yet", maps.pending)
