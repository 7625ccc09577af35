"""Endpoints: the kernel's sockets grouped by protocol, local address and network namespace, as Socket entities."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec import Struct

from gpuflight.collectors.socket_joins import SocketJoins, is_closed
from gpuflight.collectors.socket_owners import SocketOwners
from gpuflight.graph import Metric, edges, nodes
from gpuflight.sources.netlink import InetKey, InetSocket


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


def socket_id(protocol: str, local: str, netns: int) -> str:
    """The id of the Socket entity of an endpoint."""
    return f"Socket({protocol},{local},netns={netns})" if netns else f"Socket({protocol},{local})"


class Endpoints:
    """The endpoints of one round. ``begin`` with the sockets, ``add_…`` what connections bring, then ``finish``."""

    def __init__(self, owners: SocketOwners) -> None:
        self.all: dict[str, Endpoint] = {}
        self._owners = owners
        self._joins: SocketJoins | None = None
        self._ids: dict[InetKey, str] = {}
        self._groups: dict[str, list[InetSocket]] = {}
        self._peers: dict[str, Peer] = {}
        self._bound: dict[InetKey, InetSocket] = {}
        self._same_listeners = False

    def begin(self, sockets: list[InetSocket], joins: SocketJoins) -> None:
        """Group the sockets of this round; the closed ones belong nowhere yet."""
        self._joins = joins
        self._peers = {}
        known = self._ids
        ids: dict[InetKey, str] = {}
        groups: dict[str, list[InetSocket]] = {}
        bound: dict[InetKey, InetSocket] = {}
        for socket in sockets:
            if is_closed(socket):
                continue
            key = socket.key
            id_ = known.get(key)
            if id_ is None:
                id_ = socket_id(socket.protocol, socket.local, socket.netns)
            ids[key] = id_
            group = groups.get(id_)
            if group is None:
                groups[id_] = [socket]
            else:
                group.append(socket)
            if not socket.remote:
                bound[key] = socket
        self._same_listeners = bound.keys() == self._bound.keys()
        self._ids, self._groups, self._bound = ids, groups, bound

    def id_of(self, socket: InetSocket) -> str:
        """The id of the endpoint that a socket is at."""
        return self._ids.get(socket.key) or socket_id(socket.protocol, socket.local, socket.netns)

    def add_closed(self, socket: InetSocket) -> None:
        """Show the endpoint of a closed socket."""
        self._groups.setdefault(self.id_of(socket), []).append(socket)

    def add_peer(self, peer: Peer) -> None:
        """Show an end that is no socket here, unless it turns out to be an endpoint."""
        self._peers[peer.id] = peer

    def finish(self) -> None:
        """Make ``all``."""
        before, self.all = self.all, {}
        accepted = self._accepted()
        for id_, group in self._groups.items():
            self.all[id_] = self._endpoint(id_, group, accepted.get(id_, 0), before.get(id_))
        for id_, peer in self._peers.items():
            if id_ not in self.all:
                self.all[id_] = self._absent(peer, before.get(id_))

    # --- one endpoint ----------------------------------------------------------------------------------------------

    def _accepted(self) -> dict[str, int]:
        """How many connections each bound endpoint serves, those on concrete addresses of a wildcard too."""
        counts: dict[str, int] = dict.fromkeys(map(self.id_of, self._bound.values()), 0)
        ports = {socket.local_port for socket in self._bound.values()}
        for group in self._groups.values():
            first = group[0]
            if first.local_port not in ports:
                continue
            connected = sum(1 for socket in group if socket.remote and not is_closed(socket))
            listener = self._listener(first) if connected else None
            if listener is not None:
                counts[self.id_of(listener)] += connected
        return counts

    def _listener(self, socket: InetSocket) -> InetSocket | None:
        assert self._joins is not None  # noqa: S101 - begin set it
        return self._joins.listener(socket.netns, socket.protocol, socket.local_address, socket.local_port)

    def _endpoint(self, id_: str, group: list[InetSocket], accepted: int, known: Endpoint | None) -> Endpoint:
        owners = self._owners_of(group, known)
        if (
            known is not None
            and known.owners == owners
            and known.accepted == accepted
            and self._same_listeners
            and len(known.sockets) == len(group)
            and all(map(_is, known.sockets, group))
        ):
            for owner in owners:  # keeps the edges remembered
                self._owners.belong(id_, owner)
            return known
        first = next((socket for socket in group if not socket.remote), group[0])
        attributes: dict[str, Any] = {"state": first.state, "uid": first.uid}
        if first.inode and (len(group) == 1 or not first.remote):
            attributes["inode"] = first.inode
        listener = self._listener(first) if first.remote else None
        if listener is not None:
            attributes["listener"] = self.id_of(listener)
        entity = nodes.Socket(
            id=id_,
            protocol=first.protocol,
            address=first.local,
            netns=first.netns,
            attributes=attributes,
            metrics=_metrics(group, first, accepted),
        )
        if known is not None and known.entity == entity:
            entity = known.entity
        belongs = [self._owners.belong(id_, owner) for owner in owners]
        return Endpoint(id_, group, owners, accepted, entity, belongs)

    def _owners_of(self, group: list[InetSocket], known: Endpoint | None) -> tuple[str, ...]:
        if len(group) == 1:
            return self._owners_of_one(group[0], known)
        found: dict[str, None] = {}
        for socket in group:
            for owner in self._owners_of_one(socket, known):
                found[owner] = None
        return tuple(found)

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
        if known is not None and not known.sockets and known.owners == owners and self._same_listeners:
            for owner in owners:
                self._owners.belong(peer.id, owner)
            return known
        attributes: dict[str, Any] = {"remote": True} if peer.remote else {}
        if listener is not None:
            attributes["listener"] = self.id_of(listener)
        entity = nodes.Socket(
            id=peer.id, protocol=peer.protocol, address=peer.local, netns=peer.netns, attributes=attributes
        )
        return Endpoint(peer.id, [], owners, 0, entity, [self._owners.belong(peer.id, owner) for owner in owners])


def _is(one: object, other: object) -> bool:
    return one is other


def _metrics(group: list[InetSocket], first: InetSocket, accepted: int) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    listening = first.state == "LISTEN"
    if listening:
        # One queue per listening socket: with SO_REUSEPORT there are several, and each can overflow.
        listeners = [socket for socket in group if socket.state == "LISTEN"]
        metrics["backlog_count"] = sum(socket.recv_queue for socket in listeners)
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
