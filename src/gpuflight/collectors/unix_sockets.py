"""Unix-domain sockets: both ends of each connection, and the processes that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.socket_owners import SocketOwners
from gpuflight.graph import Edge, EdgeKey, Entity, Metric, edges, nodes
from gpuflight.sources.netlink import UnixSocketRecord

if TYPE_CHECKING:
    from gpuflight.sources.world import World

_NO_PEER = "/proc/net/unix does not name peers"


class UnixSocketsSettings(BaseModel):
    """How much of the unix sockets is shown."""

    model_config = ConfigDict(extra="forbid")

    seed_all: bool = Field(True, description="Show every socket, not only those of processes already in the picture.")
    limit: int = Field(20_000, ge=1, description="Most sockets in the picture; owned and connected ones come first.")


class _Shown(Struct, gc=False):
    """A socket as last shown."""

    record: UnixSocketRecord
    owners: tuple[str, ...]
    entity: nodes.UnixSocket
    belongs: list[edges.Belong]


class UnixSockets(Collector):
    """Unix-domain sockets of every network namespace, their processes, and each connection once.

    An edge goes from the end that connected to the end that accepted it: the one with a name, or of a listener with
    that name. Between two ends that cannot be told apart (``socketpair``) it goes from the lower inode, with direction
    ``none``. A datagram socket's edge goes to the socket it is connected to, several to one where there are several. A
    connection that waits to be accepted goes to the listener, in state ``pending``.
    """

    name = "unix_sockets"
    seeds = True
    expands = (nodes.Process,)
    settings_class = UnixSocketsSettings

    def __init__(self, settings: UnixSocketsSettings | None = None) -> None:
        super().__init__(settings)
        self._owners = SocketOwners()
        self._records: dict[int, UnixSocketRecord] = {}
        self._shown: dict[int, _Shown] = {}
        self._edges: dict[EdgeKey, edges.ConnectTo] = {}
        self._ends: list[tuple[int, int, edges.ConnectTo]] = []
        self._seeded = False
        self._by_process: dict[str, list[int]] | None = None
        self._by_inode: dict[int, list[tuple[int, int, edges.ConnectTo]]] = {}

    def observe(self, world: World) -> None:
        table = world.netlink.unix_sockets()
        for what, count in table.losses.items():
            self.lose(what, count)
        for limit in table.limits:
            self.note(limit.reason, limit.hint, limit.count)
        # Without an inode: an end that nobody has accepted yet; its listener names who waits (``pending``).
        self._records = {record.inode: record for record in table.sockets if record.inode}
        self._owners.begin(world.procfs, set(self._records))
        self._owners.report_unowned(self)
        self._seeded = False
        self._by_process = None
        self._shown = {inode: one for inode, one in self._shown.items() if inode in self._records}
        self._connect()

    def seed(self) -> Batch:
        if not self.settings.seed_all:
            return Batch()
        self._seeded = True
        inodes = list(self._records)
        limit = self.settings.limit
        if len(inodes) > limit:
            joined = {inode for first, second, _ in self._ends for inode in (first, second)}
            inodes.sort(key=lambda inode: -bool(self._owners.of(inode)) - (inode in joined))
            self.lose("unix sockets over the limit", len(inodes) - limit)
            self.note(f"more than {limit} unix sockets", "raise the limit of the collector unix_sockets")
            del inodes[limit:]
        batch = Batch()
        shown = set(inodes)
        processes: set[str] = set()
        self._shown = {inode: self._show(inode) for inode in inodes}
        for one in self._shown.values():
            batch.nodes.append(one.entity)
            batch.edges += one.belongs
            processes.update(one.owners)
        batch.nodes += [self._owners.anchor(process) for process in sorted(processes)]
        batch.edges += [edge for source, target, edge in self._ends if source in shown and target in shown]
        return batch

    def expand(self, entities: Sequence[nodes.Process]) -> Batch:
        if self._seeded:
            return Batch()  # all of it was shown
        if self._by_process is None:
            self._index()
        assert self._by_process is not None  # noqa: S101 - _index made it
        shown: dict[str, Entity] = {}
        drawn: dict[EdgeKey, Edge] = {}
        for process in entities:
            for inode in self._by_process.get(process.id, ()):
                self._add(inode, shown, drawn)
                for source, target, edge in self._by_inode.get(inode, ()):
                    drawn[edge.key] = edge
                    self._add(target if source == inode else source, shown, drawn)
        return Batch(list(shown.values()), list(drawn.values()))

    # --- inside ----------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        records = self._records
        listening = {(record.netns, record.path) for record in records.values() if record.state == "LISTEN"}
        before, self._edges, self._ends = self._edges, {}, []

        def join(source: int, target: int, attributes: dict[str, Any]) -> None:
            edge = edges.ConnectTo(_id(source), _id(target), attributes)
            known = before.get(edge.key)
            edge = known if known is not None and known.attributes == attributes else edge
            if edge.key not in self._edges:
                self._edges[edge.key] = edge
                self._ends.append((source, target, edge))

        for record in records.values():
            for waiting in record.pending:
                if waiting in records:
                    join(waiting, record.inode, {"type": record.type, "state": "pending"})
            other = records.get(record.peer or 0)
            if other is None:
                continue
            if other.peer != record.inode:  # a datagram socket that sends there; the other answers nobody, or another
                join(record.inode, other.inode, {"type": record.type, "state": record.state})
                continue
            if record.inode > other.inode:
                continue  # the other one's turn
            source, target, sure = direction_of(record, other, listening)
            attributes = {"type": record.type, "state": record.state}
            if not sure:
                attributes["direction"] = "none"
            join(source.inode, target.inode, attributes)

    def _index(self) -> None:
        self._by_process, self._by_inode = {}, {}
        for inode in self._records:
            for process in self._owners.of(inode):
                self._by_process.setdefault(process, []).append(inode)
        for end in self._ends:
            self._by_inode.setdefault(end[0], []).append(end)
            if end[1] != end[0]:
                self._by_inode.setdefault(end[1], []).append(end)

    def _add(self, inode: int, shown: dict[str, Entity], drawn: dict[EdgeKey, Edge]) -> None:
        if _id(inode) in shown:
            return
        one = self._shown[inode] = self._show(inode)
        shown[one.entity.id] = one.entity
        for edge in one.belongs:
            drawn[edge.key] = edge
        for process in one.owners:
            shown[process] = self._owners.anchor(process)

    def _show(self, inode: int) -> _Shown:
        """A socket as entity and edges; those of last time again if it is the same."""
        record, owners, known = self._records[inode], self._owners.of(inode), self._shown.get(inode)
        if known is not None and known.record is record and known.owners == owners:
            return known
        entity = known.entity if known is not None and known.record is record else _entity(record)
        belongs = self._owners.belongs(entity.id, owners, known.belongs if known is not None else [])
        return _Shown(record, owners, entity, belongs)


def _id(inode: int) -> str:
    return f"UnixSocket(ino={inode})"


def direction_of(
    one: UnixSocketRecord, other: UnixSocketRecord, listening: set[tuple[int, str]]
) -> tuple[UnixSocketRecord, UnixSocketRecord, bool]:
    """(client, server, whether that is known). An accepted socket carries the name of its listener."""
    first, second = ((record.netns, record.path) in listening and bool(record.path) for record in (one, other))
    if first == second:
        first, second = bool(one.path), bool(other.path)
    if first == second:
        return one, other, False
    return (other, one, True) if first else (one, other, True)


def _entity(record: UnixSocketRecord) -> nodes.UnixSocket:
    attributes: dict[str, Any] = {"type": record.type, "state": record.state}
    if record.path:
        attributes["path"] = record.path
    if record.uid is not None:
        attributes["uid"] = record.uid
    if record.netns:
        attributes["netns"] = record.netns
    metrics: dict[str, Metric] = {}
    if record.recv_queue is not None and record.send_queue is not None:
        listening = record.state == "LISTEN"
        metrics["backlog_count" if listening else "recv_queue_bytes"] = record.recv_queue
        metrics["backlog_max_count" if listening else "send_queue_bytes"] = record.send_queue
    unknown = {"peer": _NO_PEER} if record.peer is None and record.state != "LISTEN" else None
    return nodes.UnixSocket(inode=record.inode, attributes=attributes, metrics=metrics, unknown=unknown)
