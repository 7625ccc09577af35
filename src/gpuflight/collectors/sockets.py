"""Internet sockets: endpoints, the processes that hold them, and who is connected with whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.socket_edges import Counters, connect_to, read_counters
from gpuflight.collectors.socket_endpoints import Endpoint, Endpoints, Peer
from gpuflight.collectors.socket_joins import Asked, Connection, SocketJoins, is_closed
from gpuflight.collectors.socket_owners import SocketOwners
from gpuflight.graph import Edge, EdgeKey, Entity, edges, nodes
from gpuflight.sources.netlink import InetKey, InetSocket, socket_id

if TYPE_CHECKING:
    from gpuflight.sources.world import World


class SocketsSettings(BaseModel):
    """How much of the sockets is shown."""

    model_config = ConfigDict(extra="forbid")

    seed_all: bool = Field(True, description="Show every socket, not only those of processes already in the picture.")
    limit: int = Field(20_000, ge=1, description="Most endpoints in the picture; owned and joined ones come first.")
    ended_limit: int = Field(
        256, ge=0, description="Most connections in the picture that ended unseen between two rounds (TIME_WAIT)."
    )
    time_wait_limit: int = Field(
        4096, ge=0, description="Most connections in TIME_WAIT, per namespace and family, that are looked at; 0: none."
    )


_ALL: tuple[list[str] | None, list[str] | None] = (None, None)
"""Every process of an endpoint holds the connection."""


class _Link(Struct, gc=False):
    """A connection as last shown. ``still``: its edge shows rates of 0, so it stands until a socket changes."""

    connection: Connection
    source: str
    target: str
    peer: Peer | None
    counters: Counters | None = None
    processes: tuple[list[str] | None, list[str] | None] = _ALL
    edge: edges.ConnectTo | None = None
    still: bool = False


class Sockets(Collector):
    """TCP and UDP endpoints of every network namespace, their processes, and each connection once.

    An endpoint (protocol, address, namespace) is one entity, however many kernel sockets share it: a listener and the
    connections it accepted on that address. A connection is one edge from the end that opened it to the end that
    accepted it, joined as ``SocketJoins`` says; if the other end is not on this host it is shown too (``remote``) and
    the edge is ``half``. A connection that is over but still in TIME_WAIT is ``ended``; it is shown if it was seen
    alive, or ended since the last round at a listener of this host, so that a short one between two rounds is not
    missed; its client has no owner then, since no descriptor refers to it.

    With ``seed`` everything is shown up to ``limit``; without, ``expand`` shows the sockets of the processes asked for,
    and what they are connected with.
    """

    name = "sockets"
    seeds = True
    expands = (nodes.Process,)
    settings_class = SocketsSettings

    def __init__(self, settings: SocketsSettings | None = None) -> None:
        super().__init__(settings)
        self._owners = SocketOwners()
        self._endpoints = Endpoints(self._owners)
        self._links: dict[InetKey, _Link] = {}
        self._known: dict[InetKey, Connection] = {}
        self._addresses: dict[int, frozenset[str]] = {}
        self._sockets: list[InetSocket] = []
        self._listening: set[int] = set()
        self._passed: set[InetKey] = set()
        self._asked: Asked = frozenset()
        self._seeded = False
        self._by_process: dict[str, list[Endpoint]] | None = None
        self._by_endpoint: dict[str, list[_Link]] = {}

    def observe(self, world: World) -> None:
        now_s = world.clock.monotonic_s()
        table = world.netlink.inet_sockets(self.settings.time_wait_limit)
        for what, count in table.losses.items():
            self.lose(what, count)
        for limit in table.limits:
            self.note(limit.reason, limit.hint, limit.count)
        if table.time_wait_count and self.settings.time_wait_limit:
            self.lose("connections in TIME_WAIT over the limit", table.time_wait_count)
        self._owners.begin(world.procfs, {socket.inode for socket in table.sockets})
        self._owners.report_unowned(self)
        self._seeded = False
        self._by_process = None
        moved = table.addresses != self._addresses
        sockets = self._without_passed(table.sockets)
        changed = self._changed(sockets) if self._owners.same and not moved else None
        self._sockets, self._addresses = sockets, table.addresses
        if changed is None:
            asked: Asked = self._asked if not moved else frozenset()
            joins = SocketJoins(sockets, table.addresses, self._known, world.netlink.translations, asked)
            self._rebuild(sockets, joins, moved=moved)
        else:
            self._update(changed)
        if self._passed:
            self.lose("ended connections that are not shown", len(self._passed))
        self._show(now_s)
        table.joined = self._ends_of

    def seed(self) -> Batch:
        if not self.settings.seed_all:
            return Batch()
        self._seeded = True
        endpoints, links = list(self._endpoints.all.values()), list(self._links.values())
        if len(endpoints) > self.settings.limit:
            endpoints, links = self._limited(endpoints, links)
        batch = Batch()
        processes: set[str] = set()
        for endpoint in endpoints:
            batch.nodes.append(endpoint.entity)
            batch.edges += endpoint.belongs
            processes.update(endpoint.owners)
        batch.nodes += [self._owners.anchor(process) for process in sorted(processes)]
        batch.edges += [link.edge for link in links if link.edge is not None]
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
            for endpoint in self._by_process.get(process.id, ()):
                self._add(endpoint, shown, drawn)
                for link in self._by_endpoint.get(endpoint.id, ()):
                    side = 0 if link.source == endpoint.id else 1
                    only = link.processes[side]
                    if link.edge is None or (only is not None and process.id not in only):
                        continue
                    drawn[link.edge.key] = link.edge
                    self._add(self._endpoints.all[link.target if side == 0 else link.source], shown, drawn)
        return Batch(list(shown.values()), list(drawn.values()))

    def _ends_of(self, key: InetKey) -> tuple[str, str, bool] | None:
        """For ``InetTable.joined``."""
        connection = self._known.get(key)
        if connection is None:
            return None
        link = self._links[_key(connection)]
        return link.source, link.target, connection.sure

    def _without_passed(self, sockets: list[InetSocket]) -> list[InetSocket]:
        """All but the closed sockets that were passed over in an earlier round. A busy client has thousands of them."""
        passed, self._passed = self._passed, set()
        if not passed:
            return sockets
        kept: list[InetSocket] = []
        for socket in sockets:
            if not socket.inode and socket.key in passed and is_closed(socket):
                self._passed.add(socket.key)
            else:
                kept.append(socket)
        return kept

    # --- from round to round ---------------------------------------------------------------------------------------

    def _changed(self, sockets: list[InetSocket]) -> list[tuple[InetSocket, InetSocket]] | None:
        """(before, now) of the sockets of which only the measurements changed; None if anything else did, that bears on
        what is joined with what, or which way round."""
        if len(sockets) != len(self._sockets):
            return None
        changed = [(old, new) for old, new in zip(self._sockets, sockets, strict=True) if old is not new]
        for old, new in changed:
            if old.key != new.key or old.inode != new.inode or old.state != new.state or old.cookie != new.cookie:
                return None
            if new.remote:
                connection = self._known.get(new.key)
                if connection is None or (connection.client is not old and connection.server is not old):
                    return None
                if not connection.sure and new.protocol == "tcp":
                    return None  # now it may be known who opened it
            elif new.protocol != "tcp":
                return None  # the other end of many
        return changed

    def _update(self, changed: list[tuple[InetSocket, InetSocket]]) -> None:
        """The joins stand; take over what changed."""
        for old, new in changed:
            connection = self._known.get(new.key) if new.remote else None
            if connection is None:
                continue
            if connection.client is old:
                connection.client = new
            if connection.server is old:
                connection.server = new
            self._links[_key(connection)].still = False
        self._endpoints.update(changed)

    def _rebuild(self, sockets: list[InetSocket], joins: SocketJoins, *, moved: bool) -> None:
        """Join everything anew."""
        self._endpoints.begin(sockets, joins)
        self._links = self._link(joins.connections(), joins, moved=moved)
        self._asked = joins.alone
        self._endpoints.finish()
        self._known = {}
        for link in self._links.values():
            for end in (link.connection.client, link.connection.server):
                if end is not None and end.remote:
                    self._known[end.key] = link.connection
        self._listening = {socket.inode for socket in sockets if not socket.remote}
        if self._passed:  # so that the next round need not look at them
            self._sockets = [socket for socket in sockets if socket.key not in self._passed or not is_closed(socket)]

    # --- the index of a round --------------------------------------------------------------------------------------

    def _link(self, connections: list[Connection], joins: SocketJoins, *, moved: bool) -> dict[InetKey, _Link]:
        """Which endpoints each connection is between; one that is as it was keeps its link."""
        links: dict[InetKey, _Link] = {}
        before, endpoints = self._links, self._endpoints
        ended = sum(1 for link in before.values() if link.edge is not None and "ended" in link.edge.attributes)
        for connection in connections:
            client, server = connection.client, connection.server
            key = _key(connection)
            link = before.get(key)
            if link is not None and link.connection is connection and not moved:  # joined for certain, and unchanged
                links[key] = link
                for end in (client, server):
                    if end is not None and not end.inode and is_closed(end):
                        endpoints.add_closed(end)
                continue
            if (
                link is None
                or moved
                or link.connection.client is not client
                or link.connection.server is not server
                or link.connection.sure is not connection.sure
            ):
                link = self._new_link(connection, joins, link)
            closed = [end for end in (client, server) if end is not None and is_closed(end)]
            if closed:
                if key not in before and _over(connection):
                    if ended >= self.settings.ended_limit or not self._just_ended(connection, link, joins):
                        self._passed.update(end.key for end in closed)
                        continue
                    ended += 1
                for end in closed:
                    endpoints.add_closed(end)
            if link.peer is not None:
                endpoints.add_peer(link.peer)
            links[key] = link
        return links

    def _new_link(self, connection: Connection, joins: SocketJoins, known: _Link | None) -> _Link:
        client, server = connection.client, connection.server
        peer = None
        if client is None or server is None:
            here = client if client is not None else server
            assert here is not None  # noqa: S101 - a connection has an end
            home = joins.home(here.netns, here.remote_address)
            netns = home if home is not None else 0
            id_ = socket_id(here.protocol, here.remote, netns)
            reached = home is not None and here.state in ("SYN_SENT", "TIME_WAIT")
            peer = Peer(
                id_, netns, here.protocol, here.remote, here.remote_address, here.remote_port, home is None, reached
            )
        source = client.id if client is not None else peer.id  # type: ignore[union-attr]
        target = server.id if server is not None else peer.id  # type: ignore[union-attr]
        return _Link(connection, source, target, peer, known.counters if known is not None else None)

    def _just_ended(self, connection: Connection, link: _Link, joins: SocketJoins) -> bool:
        """Whether a closed connection that was not seen alive may be shown: it ended since the last round, and
        its listener was there then already. A listener made later did not serve it, it only has the same address."""
        server, peer = connection.server, link.peer
        if server is not None:
            listener = joins.listener(server.netns, server.protocol, server.local_address, server.local_port)
        elif peer is not None and not peer.remote:
            listener = joins.listener(peer.netns, peer.protocol, peer.address, peer.port)
        else:
            return False
        return listener is not None and listener.inode in self._listening

    def _show(self, now_s: float) -> None:
        """Make the edges; one whose sockets are as they were, and whose rates are 0 already, stands."""
        shared = {endpoint.id for endpoint in self._endpoints.all.values() if len(endpoint.owners) > 1}
        for link in self._links.values():
            processes = self._only(link) if link.source in shared or link.target in shared else _ALL
            if link.still and link.processes == processes:
                if link.counters is not None:
                    link.counters.time_s = now_s
                continue
            before = link.counters
            now = read_counters(link.connection, now_s)
            same = link.edge is not None and now is not None and before is not None and _rests(now, before)
            link.still = now is None or same
            link.counters, link.processes = now, processes
            link.edge = connect_to(link.source, link.target, link.connection, now, before, processes)

    def _only(self, link: _Link) -> tuple[list[str] | None, list[str] | None]:
        """Of endpoints that several processes share, those that hold this very connection."""
        ends = ((link.source, link.connection.client), (link.target, link.connection.server))
        answer: list[list[str] | None] = [None, None]
        for side, (id_, socket) in enumerate(ends):
            shared = self._endpoints.all[id_].owners
            if len(shared) > 1 and socket is not None and socket.inode:
                owners = self._owners.of(socket.inode)
                if owners and owners != shared:
                    answer[side] = list(owners)
        return answer[0], answer[1]

    # --- what is shown ---------------------------------------------------------------------------------------------

    def _index(self) -> None:
        self._by_process, self._by_endpoint = {}, {}
        for endpoint in self._endpoints.all.values():
            for process in endpoint.owners:
                self._by_process.setdefault(process, []).append(endpoint)
        for link in self._links.values():
            self._by_endpoint.setdefault(link.source, []).append(link)
            if link.target != link.source:
                self._by_endpoint.setdefault(link.target, []).append(link)

    def _add(self, endpoint: Endpoint, shown: dict[str, Entity], drawn: dict[EdgeKey, Edge]) -> None:
        if endpoint.id in shown:
            return
        shown[endpoint.id] = endpoint.entity
        for edge in endpoint.belongs:
            drawn[edge.key] = edge
        for process in endpoint.owners:
            shown[process] = self._owners.anchor(process)

    def _limited(self, endpoints: list[Endpoint], links: list[_Link]) -> tuple[list[Endpoint], list[_Link]]:
        """As many as the limit allows: first who listens, then connections with both ends owned, then all others."""
        every = self._endpoints.all
        order: dict[str, Endpoint] = {endpoint.id: endpoint for endpoint in endpoints if endpoint.bound}
        for link in sorted(links, key=lambda link: -bool(every[link.source].owners) - bool(every[link.target].owners)):
            order.setdefault(link.source, every[link.source])
            order.setdefault(link.target, every[link.target])
        order.update((endpoint.id, endpoint) for endpoint in endpoints)
        kept = dict(list(order.items())[: self.settings.limit])
        self.lose("sockets over the limit", len(endpoints) - len(kept))
        self.note(f"more than {self.settings.limit} sockets", "raise the limit of the collector sockets")
        return list(kept.values()), [link for link in links if link.source in kept and link.target in kept]


def _key(connection: Connection) -> InetKey:
    """The client's key, whether it is here or not."""
    if connection.client is not None:
        return connection.client.key
    assert connection.server is not None  # noqa: S101 - a connection has an end
    return connection.server.mirror


def _over(connection: Connection) -> bool:
    """Whether no process holds either end any more."""
    return all(is_closed(end) for end in (connection.client, connection.server) if end is not None)


def _rests(now: Counters, before: Counters) -> bool:
    return (
        now.bytes_sent == before.bytes_sent
        and now.bytes_received == before.bytes_received
        and now.retransmits == before.retransmits
        and now.receiver_limited_us == before.receiver_limited_us
        and now.buffer_limited_us == before.buffer_limited_us
    )
