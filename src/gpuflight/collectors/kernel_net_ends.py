"""Between which endpoints a socket of the kernel probes is drawn: where the snapshot collectors draw it, if they do."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gpuflight.collectors.base import Collector
from gpuflight.collectors.kernel_net_flows import Flows, Used
from gpuflight.collectors.kernel_net_rows import SocketRow
from gpuflight.collectors.kernel_programs import Starts
from gpuflight.collectors.socket_joins import Connection, SocketJoins
from gpuflight.collectors.unix_sockets import direction_of
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import nodes
from gpuflight.sources.netlink import InetKey, InetSocket, InetTable, Joined, UnixSocketRecord, socket_id

if TYPE_CHECKING:
    from gpuflight.sources.world import World


class Place(NamedTuple):
    """Where one socket is drawn. ``own``: its endpoint. ``source`` and ``target``: of its connection, empty if it has
    none; ``sure``: which of them opened it is known. ``shown``: the snapshot shows the connection too."""

    own: nodes.Socket | nodes.UnixSocket
    source: str = ""
    target: str = ""
    sure: bool = True
    shown: bool = False
    other: nodes.Socket | nodes.UnixSocket | None = None

    @property
    def is_source(self) -> bool:
        """Whether the socket is the end that opened the connection."""
        return self.source == self.own.id


class Ends:
    """The places of one round's sockets.

    Who is connected with whom is asked of the collector of sockets (``InetTable.joined``), which has found out already;
    it is joined here, in the same way, where that collector is switched off and for connections that it never saw.
    Sockets that are no TCP have no last event: they are ``ended`` when two snapshots in a row lack them.
    """

    def __init__(self, world: World, flows: Flows, collector: Collector) -> None:
        self._own_netns = _own_netns(world)
        self._starts = Starts(world.procfs.ticks_per_second)
        every = list(flows.by_cookie.values())
        internet = [used for used in every if not used.row.unix]
        self._places: dict[bytes, Place] = {}
        try:
            self._place_internet(world, internet)
        except SourceUnavailable as error:
            collector.note(f"{error.reason}; connections are not told apart from their endpoints", error.hint)
        try:
            self._place_unix(world, [used for used in every if used.row.unix])
        except SourceUnavailable as error:
            collector.note(f"{error.reason}; unix sockets are not connected", error.hint)

    def of(self, used: Used) -> Place:
        """The place of a socket."""
        known = self._places.get(used.cookie)
        if known is None:
            known = Place(self._unix_entity(used.row.inode) if used.row.unix else self._entity(used))
            self._places[used.cookie] = known
        return known

    def process_id(self, row: SocketRow) -> str:
        """Who opened a connection, or accepted it."""
        return self._starts.process_id(row.pid, row.process_start_ns)

    # --- internet sockets ------------------------------------------------------------------------------------------

    def _place_internet(self, world: World, internet: list[Used]) -> None:
        if not internet:
            return
        table = world.netlink.inet_sockets()
        datagrams = [used for used in internet if used.row.protocol != 6]
        if datagrams:
            there = {socket.key for socket in table.sockets if socket.protocol != "tcp"}
            for used in datagrams:
                _judge(used, used.inet(self._own_netns).key in there)
        joined = table.joined
        if joined is None:
            joined = _join(table.sockets, table, world)
        rest: list[Used] = []
        for used in internet:
            if used.row.ended_ns:
                used.ended = True
            if not used.row.remote_port:
                continue
            socket = used.inet(self._own_netns)
            found = joined(socket.key) or joined(socket.mirror)
            if found is None:
                rest.append(used)
                continue
            source, target, sure = found
            own = self._entity(used)
            if own.id not in (source, target):
                rest.append(used)
                continue
            other = _bare(target if own.id == source else source)
            self._places[used.cookie] = Place(own, source, target, sure, shown=True, other=other)
        if rest:
            self._join_rest(rest, table, world)

    def _join_rest(self, rest: list[Used], table: InetTable, world: World) -> None:
        """Connections that no snapshot has: among themselves, and with whoever listens."""
        made = {used.cookie: used.inet(self._own_netns) for used in rest}
        bound = [socket for socket in table.sockets if not socket.remote]
        joins = SocketJoins([*bound, *made.values()], table.addresses, translations=world.netlink.translations)
        by_key = {socket.key: connection_ends(connection, joins) for connection in joins.connections()
                  for socket in (connection.client, connection.server) if socket is not None}  # fmt: skip
        for used in rest:
            socket = made[used.cookie]
            found = by_key.get(socket.key)
            if found is None:
                continue
            source, target, sure, far = found
            listener = joins.listener(socket.netns, socket.protocol, socket.local_address, socket.local_port)
            own = self._entity(used, "" if listener is None or listener.id == socket.id else listener.id)
            self._places[used.cookie] = Place(own, source, target, sure, other=far)

    def _entity(self, used: Used, listener: str = "") -> nodes.Socket:
        socket = used.inet(self._own_netns)
        attributes = {"state": "CLOSED"} if used.row.ended_ns else {}
        if listener:
            attributes["listener"] = listener
        return nodes.Socket(
            id=socket.id,
            protocol=socket.protocol,
            address=socket.local,
            netns=socket.netns,
            attributes=attributes,
        )

    # --- unix sockets ----------------------------------------------------------------------------------------------

    def _place_unix(self, world: World, unix: list[Used]) -> None:
        if not unix:
            return
        records = {record.inode: record for record in world.netlink.unix_sockets().sockets if record.inode}
        listening = {(record.netns, record.path) for record in records.values() if record.state == "LISTEN"}
        for used in unix:
            inode = used.row.inode
            record = records.get(inode)
            if not inode:
                continue
            _judge(used, record is not None)
            place = Place(self._unix_entity(inode))
            if record is not None:
                place = self._joined_unix(record, records, listening)
            elif used.row.peer_inode:
                first, second = sorted((inode, used.row.peer_inode))
                place = Place(
                    self._unix_entity(inode),
                    self._unix_entity(first).id,
                    self._unix_entity(second).id,
                    sure=False,
                    other=self._unix_entity(used.row.peer_inode),
                )
            self._places[used.cookie] = place

    def _joined_unix(
        self, record: UnixSocketRecord, records: dict[int, UnixSocketRecord], listening: set[tuple[int, str]]
    ) -> Place:
        own = self._unix_entity(record.inode)
        other = records.get(record.peer or 0)
        if other is None:
            return Place(own)
        if other.peer != record.inode:  # a datagram socket that sends there
            far = self._unix_entity(other.inode)
            return Place(own, own.id, far.id, shown=True, other=far)
        lower, higher = (record, other) if record.inode <= other.inode else (other, record)
        source, target, sure = direction_of(lower, higher, listening)
        ends = self._unix_entity(source.inode).id, self._unix_entity(target.inode).id
        return Place(own, *ends, sure, shown=True, other=self._unix_entity(other.inode))

    def _unix_entity(self, inode: int) -> nodes.UnixSocket:
        return nodes.UnixSocket(inode=inode)


def connection_ends(connection: Connection, joins: SocketJoins) -> tuple[str, str, bool, nodes.Socket | None]:
    """(source id, target id, whether the direction is known, the end that is no socket here) of a connection, as the
    collector of sockets draws it."""
    client, server = connection.client, connection.server
    if client is not None and server is not None:
        return client.id, server.id, connection.sure, None
    here = client if client is not None else server
    assert here is not None  # noqa: S101 - a connection has an end
    home = joins.home(here.netns, here.remote_address)
    netns = home if home is not None else 0
    far = nodes.Socket(
        id=socket_id(here.protocol, here.remote, netns),
        protocol=here.protocol,
        address=here.remote,
        netns=netns,
        attributes={"remote": True} if home is None else {},
    )
    return (here.id, far.id, connection.sure, far) if client is not None else (far.id, here.id, connection.sure, far)


def _join(sockets: list[InetSocket], table: InetTable, world: World) -> Joined:
    """What ``InetTable.joined`` answers, found here."""
    joins = SocketJoins(sockets, table.addresses, translations=world.netlink.translations)
    found: dict[InetKey, tuple[str, str, bool]] = {}
    for connection in joins.connections():
        ends = connection_ends(connection, joins)[:3]
        for socket in (connection.client, connection.server):
            if socket is not None and socket.remote:
                found[socket.key] = ends
    return found.get


def _bare(endpoint: str) -> nodes.Socket:
    """The entity of an id that ``socket_id`` made."""
    protocol, address, *netns = endpoint[len("Socket(") : -1].split(",")
    space = int(netns[0].removeprefix("netns=")) if netns else 0
    return nodes.Socket(id=endpoint, protocol=protocol, address=address, netns=space)


def _judge(used: Used, there: bool) -> None:
    """Whether a socket that has no last event of its own is over: the second snapshot in a row lacks it."""
    used.ended = used.missed and not there
    used.missed = not there


def _own_netns(world: World) -> int:
    try:
        return world.procfs.own_namespace("net")
    except (OSError, ValueError):
        return 0
