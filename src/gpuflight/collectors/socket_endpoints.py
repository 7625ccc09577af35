"""Endpoints: the kernel's sockets grouped by protocol, local address and network namespace, as Socket entities."""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple

from msgspec import Struct

from gpuflight.collectors.socket_joins import SocketJoins, is_closed
from gpuflight.collectors.socket_owners import SocketOwners
from gpuflight.graph import Metric, edges, nodes
from gpuflight.sources.netlink import InetKey, InetSocket

_NO_LIMITS = dict.fromkeys(
    ("backlog_max_count", "drops_count"), "the kernel was not asked over netlink, and /proc/net does not say"
)
"""Of a listener that was read from /proc/net; only there a socket has no cookie."""


class Peer(NamedTuple):
    """An end of a connection that is no socket of this host: ``remote``, or an address of ours whose socket is gone or
    not made yet. ``reached``: whoever listens there is, or just was, the other end; else it only has the address."""

    id: str
    netns: int
    protocol: str
    local: str
    address: str
    port: int
    remote: bool
    reached: bool


class Endpoint(Struct, gc=False):
    """One endpoint with the sockets that share it, as entity and edges; kept while it stays the same."""

    id: str
    sockets: list[InetSocket]
    owners: tuple[str, ...]
    accepted: int
    entity: nodes.Socket
    belongs: list[edges.Belong]

    @property
    def bound(self) -> bool:
        """Whether somebody listens here, or receives from anyone."""
        return any(not socket.remote for socket in self.sockets)


class Endpoints:
    """The endpoints of one round. ``begin`` with the sockets, ``add_…`` what connections bring, then ``finish``."""

    def __init__(self, owners: SocketOwners) -> None:
        self.all: dict[str, Endpoint] = {}
        self._owners = owners
        self._joins: SocketJoins | None = None
        self._groups: dict[str, list[InetSocket]] = {}
        self._peers: dict[str, Peer] = {}
        self._bound: dict[InetKey, InetSocket] = {}
        self._listening: dict[InetKey, int] = {}
        self.same_listeners = False
        """Whether the same sockets listen as in the round before."""

    def begin(self, sockets: list[InetSocket], joins: SocketJoins) -> None:
        """Group the sockets of this round; the closed ones belong nowhere yet."""
        self._joins = joins
        self._peers = {}
        groups: dict[str, list[InetSocket]] = {}
        bound: dict[InetKey, InetSocket] = {}
        for socket in sockets:
            if not socket.inode and is_closed(socket):
                continue
            group = groups.get(socket.id)
            if group is None:
                groups[socket.id] = [socket]
            else:
                group.append(socket)
            if not socket.remote:
                bound[socket.key] = socket
        listening = {key: socket.inode for key, socket in bound.items()}
        self.same_listeners = listening == self._listening
        self._groups, self._bound, self._listening = groups, bound, listening

    def update(self, changed: list[tuple[InetSocket, InetSocket]]) -> None:
        """Instead of ``begin`` and ``finish``, if nothing is other than it was but what these sockets (before, now)
        measure."""
        now = {id(before): after for before, after in changed}
        for id_ in {after.id for _, after in changed}:
            known = self.all[id_]
            group = self._groups[id_] = [now.get(id(socket), socket) for socket in known.sockets]
            self.all[id_] = self._endpoint(id_, group, known.accepted, known)

    def add_closed(self, socket: InetSocket) -> None:
        """Show the endpoint of a closed socket."""
        self._groups.setdefault(socket.id, []).append(socket)

    def add_peer(self, peer: Peer) -> None:
        """Show an end that is no socket here, unless it turns out to be an endpoint."""
        self._peers[peer.id] = peer

    def finish(self) -> None:
        """Make ``all``."""
        before, self.all = self.all, {}
        accepted = self._accepted()
        owners = self._owners.by_inode
        for id_, group in self._groups.items():
            known = before.get(id_)
            if (  # most are as they were
                known is not None
                and len(group) == 1
                and known.sockets
                and known.sockets[0] is group[0]
                and known.owners == owners.get(group[0].inode)
                and self.same_listeners
                and id_ not in accepted
            ):
                self.all[id_] = known
            else:
                self.all[id_] = self._endpoint(id_, group, accepted.get(id_, 0), known)
        for id_, peer in self._peers.items():
            if id_ not in self.all:
                self.all[id_] = self._absent(peer, before.get(id_))

    # --- one endpoint ----------------------------------------------------------------------------------------------

    def _accepted(self) -> dict[str, int]:
        """How many connections each bound endpoint serves, those on concrete addresses of a wildcard too."""
        counts: dict[str, int] = {socket.id: 0 for socket in self._bound.values()}
        ports = {socket.local_port for socket in self._bound.values()}
        for group in self._groups.values():
            first = group[0]
            if first.local_port not in ports:
                continue
            connected = sum(1 for socket in group if socket.remote and (socket.inode or not is_closed(socket)))
            listener = self._listener(first) if connected else None
            if listener is not None:
                counts[listener.id] += connected
        return counts

    def _listener(self, socket: InetSocket) -> InetSocket | None:
        assert self._joins is not None  # noqa: S101 - begin set it
        return self._joins.listener(socket.netns, socket.protocol, socket.local_address, socket.local_port)

    def _endpoint(self, id_: str, group: list[InetSocket], accepted: int, known: Endpoint | None) -> Endpoint:
        owners = self._owners_of(group, known)
        if (
            known is not None
            and self.same_listeners
            and known.owners == owners
            and known.accepted == accepted
            and len(known.sockets) == len(group)
            and all(map(is_, known.sockets, group))
        ):
            return known
        first = next((socket for socket in group if not socket.remote), group[0])
        attributes: dict[str, Any] = {"state": first.state, "uid": first.uid}
        if first.inode and (len(group) == 1 or not first.remote):
            attributes["inode"] = first.inode
        listener = self._listener(first) if first.remote else None
        if listener is not None:
            attributes["listener"] = listener.id
        entity = nodes.Socket(
            id=id_,
            protocol=first.protocol,
            address=first.local,
            netns=first.netns,
            attributes=attributes,
            metrics=_metrics(group, first, accepted),
            unknown=_NO_LIMITS if first.state == "LISTEN" and not all(socket.cookie for socket in group) else None,
        )
        if known is not None and known.entity == entity:
            entity = known.entity
        belongs = known.belongs if known is not None else []
        if known is None or known.owners != owners:
            belongs = self._owners.belongs(id_, owners, belongs)
        return Endpoint(id_, group, owners, accepted, entity, belongs)

    def _owners_of(self, group: list[InetSocket], known: Endpoint | None) -> tuple[str, ...]:
        if len(group) == 1:
            return self._owners_of_one(group[0], known)
        by_inode = self._owners.by_inode
        found = {by_inode.get(socket.inode, ()) for socket in group if socket.inode}
        found |= {self._owners_of_one(socket, known) for socket in group if not socket.inode}
        if len(found) == 1:
            return next(iter(found))
        return tuple(sorted({owner for owners in found for owner in owners}, key=_pid))

    def _owners_of_one(self, socket: InetSocket, known: Endpoint | None) -> tuple[str, ...]:
        if socket.inode:
            return self._owners.of(socket.inode)
        # No descriptor refers to it. Not accepted yet: whoever listens will get it. Closed: whoever was seen with it;
        # one in TIME_WAIT that is shown though it was not seen alive just ended at this listener.
        closed = is_closed(socket)
        if closed and known is not None:
            return tuple(owner for owner in known.owners if self._owners.alive(owner))
        listener = self._listener(socket) if not closed or socket.state == "TIME_WAIT" else None
        return self._owners.of(listener.inode) if listener is not None and listener.inode else ()

    def _absent(self, peer: Peer, known: Endpoint | None) -> Endpoint:
        assert self._joins is not None  # noqa: S101 - begin set it
        listener = None
        if peer.reached:
            listener = self._joins.listener(peer.netns, peer.protocol, peer.address, peer.port)
        owners = self._owners.of(listener.inode) if listener is not None and listener.inode else ()
        same = known is not None and known.entity.attributes.get("remote", False) == peer.remote
        if same and known is not None and not known.sockets and known.owners == owners and self.same_listeners:
            return known
        attributes: dict[str, Any] = {"remote": True} if peer.remote else {}
        if listener is not None:
            attributes["listener"] = listener.id
        entity = nodes.Socket(
            id=peer.id, protocol=peer.protocol, address=peer.local, netns=peer.netns, attributes=attributes
        )
        return Endpoint(peer.id, [], owners, 0, entity, self._owners.belongs(peer.id, owners, []))


def _pid(process: str) -> int:
    return int(process[len("Process(pid=") :].partition(",")[0])


def _metrics(group: list[InetSocket], first: InetSocket, accepted: int) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    listening = first.state == "LISTEN"
    if listening:
        # One queue per listening socket: with SO_REUSEPORT there are several, and each can overflow.
        listeners = [socket for socket in group if socket.state == "LISTEN"]
        metrics["backlog_count"] = sum(socket.recv_queue for socket in listeners)
        if all(socket.cookie for socket in listeners):  # /proc/net shows 0 for whatever the limit is
            metrics["backlog_max_count"] = sum(socket.send_queue for socket in listeners)
    queues = [socket for socket in group if socket.state not in ("LISTEN", "TIME_WAIT")]
    if queues:
        metrics["recv_queue_bytes"] = sum(socket.recv_queue for socket in queues)
        metrics["send_queue_bytes"] = sum(socket.send_queue for socket in queues)
    if not first.remote:
        metrics["connections_count"] = accepted
    elif len(group) > 1:
        metrics["connections_count"] = len(group)
    if listening or first.protocol != "tcp":
        drops = [socket.drops for socket in group if socket.drops is not None]
        if drops:
            metrics["drops_count"] = sum(drops)
    return metrics
