"""Which two sockets of this host are the ends of one connection, and which of them opened it."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from gpuflight.sources.netlink import Flow, InetKey, InetSocket

_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - compared, never bound
_CLOSED = frozenset(("TIME_WAIT", "FIN_WAIT1", "FIN_WAIT2", "CLOSING", "LAST_ACK"))

Translations = Callable[[], dict[Flow, Flow]]
Asked = frozenset[tuple[InetKey, int]]
"""Sockets by key and cookie: addresses are used again."""


class Connection(Struct, gc=False):
    """One connection. An end that is no socket of this host is None; ``sure``: the direction is known, not guessed."""

    client: InetSocket | None
    server: InetSocket | None
    sure: bool
    nat: bool = False


class SocketJoins:
    """The connections among the sockets of one round.

    Two sockets are joined if each one's addresses are the other's, mirrored, in the same network namespace; or across
    namespaces (veth) if there is exactly one such pair on the host and no end is a loopback address. A connected UDP
    socket whose peer is bound but not connected is joined to that. Ends that NAT keeps apart are joined by the host's
    table of translations. Whatever stays alone is a half connection; none is dropped.

    ``asked``: sockets that stayed alone in an earlier round, though the table was looked at. It is long, so it is read
    again only for others: what NAT does to a connection is settled when that begins.
    """

    def __init__(
        self,
        sockets: list[InetSocket],
        addresses: dict[int, frozenset[str]],
        known: dict[InetKey, Connection] | None = None,
        translations: Translations | None = None,
        asked: Asked = frozenset(),
    ) -> None:
        self._bound: dict[tuple[int, str, str, int], InetSocket] = {}
        self._addresses = addresses
        self._known = known if known is not None else {}
        self._translations = translations
        self._asked = asked
        self.alone: Asked = frozenset()
        """Set by ``connections``: what to hand in as ``asked`` next time."""
        connected = {socket.key: socket for socket in sockets if socket.remote}
        others = 0
        for socket in sockets:
            if not socket.remote:
                others += 1
                self._bound.setdefault((socket.netns, socket.protocol, socket.local_address, socket.local_port), socket)
        if len(connected) + others < len(sockets):  # one address used twice: what is alive, and came first
            for socket in reversed(sockets):
                if socket.remote and not (is_closed(socket) and not is_closed(connected[socket.key])):
                    connected[socket.key] = socket
        self._connected = connected
        self._by_address: dict[str, set[int]] | None = None

    def connections(self) -> list[Connection]:
        """Every connection, once."""
        joined: list[Connection] = []
        alone: list[InetSocket] = []
        connected, known = self._connected, self._known
        done: set[InetKey] = set()
        for key, socket in connected.items():
            if key in done:
                continue
            before = known.get(key)
            if before is not None and before.sure:
                client, server = before.client, before.server
                if client is not None and server is not None:
                    other = server if client is socket else client
                    if connected.get(other.key) is other and (other is server or server is socket):
                        done.add(other.key)
                        joined.append(before)
                        continue
            mirrored = connected.get(socket.mirror)
            if mirrored is None:
                alone.append(socket)
            else:
                done.add(socket.mirror)
                joined.append(self._pair(socket, mirrored))
        if alone:
            alone = self._join_across(alone, joined)
        if alone:
            alone = self._join_to_bound(alone, joined)
        if alone:
            alone = self._join_translated(alone, joined)
        self.alone = frozenset([(socket.key, socket.cookie) for socket in alone])
        joined += [self._half(socket) for socket in alone]
        return joined

    def listener(self, netns: int, protocol: str, address: str, port: int) -> InetSocket | None:
        """The socket that answers at an address: bound to it, or to every address of its namespace."""
        found = self._bound.get((netns, protocol, address, port))
        if found is None:
            for wildcard in _WILDCARDS if "." in address else _WILDCARDS[1:]:
                found = self._bound.get((netns, protocol, wildcard, port))
                if found is not None:
                    break
        return found

    def home(self, netns: int, address: str) -> int | None:
        """The namespace that an address, seen from ``netns``, belongs to; None if it is not of this host, or not of
        exactly one namespace of it."""
        if self._by_address is None:
            by_address: dict[str, set[int]] = {}
            for space, addresses in self._addresses.items():
                for known in addresses:
                    by_address.setdefault(known, set()).add(space)
            # Where addresses cannot be read, those that sockets use stand in for them.
            for socket in self._connected.values():
                if socket.netns not in self._addresses:
                    by_address.setdefault(socket.local_address, set()).add(socket.netns)
            for space, _, known, _ in self._bound:
                if space not in self._addresses:
                    by_address.setdefault(known, set()).add(space)
            self._by_address = by_address
        if address.startswith("127.") or address == "::1":
            return netns
        spaces = self._by_address.get(address, set())
        if netns in spaces:
            return netns
        return next(iter(spaces)) if len(spaces) == 1 else None

    # --- one pair --------------------------------------------------------------------------------------------------

    def _pair(self, one: InetSocket, other: InetSocket, *, nat: bool = False) -> Connection:
        """Who opened it, in order of certainty: what was certain before; the SYN that tcp_info counted; whose port has
        a listener; the lower port is the server's (services have fixed, low ports; ephemeral ones start at 32768)."""
        was_client = self._was_client(one)
        if was_client is not None:
            return Connection(one, other, True, nat) if was_client else Connection(other, one, True, nat)
        first, second = _opened(one), _opened(other)
        if first != second:
            return Connection(one, other, True, nat) if first else Connection(other, one, True, nat)
        first, second = self._serves(one), self._serves(other)
        if first != second:
            return Connection(other, one, True, nat) if first else Connection(one, other, True, nat)
        if (one.local_port, one.local, one.netns) < (other.local_port, other.local, other.netns):
            return Connection(other, one, False, nat)
        return Connection(one, other, False, nat)

    def _half(self, socket: InetSocket) -> Connection:
        was_client = self._was_client(socket)
        if was_client is None and _opened(socket):
            was_client = True
        if was_client is not None:
            return Connection(socket, None, True) if was_client else Connection(None, socket, True)
        served, serves = self._is_served(socket), self._serves(socket)
        if served != serves:
            return Connection(socket, None, True) if served else Connection(None, socket, True)
        if socket.local_port < socket.remote_port:
            return Connection(None, socket, False)
        return Connection(socket, None, False)

    def _serves(self, socket: InetSocket) -> bool:
        found = self.listener(socket.netns, socket.protocol, socket.local_address, socket.local_port)
        return found is not None and found is not socket

    def _was_client(self, socket: InetSocket) -> bool | None:
        """Which end it was of the connection of the round before; None if that was not certain, or there was none."""
        before = self._known.get(socket.key)
        if before is None or not before.sure:
            return None
        return before.client is not None and before.client.key == socket.key

    def _is_served(self, socket: InetSocket) -> bool:
        home = self.home(socket.netns, socket.remote_address) if self._bound else None
        return (
            home is not None
            and self.listener(home, socket.protocol, socket.remote_address, socket.remote_port) is not None
        )

    # --- pairs that are further apart ------------------------------------------------------------------------------

    def _join_across(self, alone: list[InetSocket], joined: list[Connection]) -> list[InetSocket]:
        if len({socket.netns for socket in alone}) < 2:
            return alone
        index: dict[Flow, list[InetSocket]] = {}
        for socket in alone:
            if not socket.loopback:
                index.setdefault(_flow(socket), []).append(socket)
        rest: list[InetSocket] = []
        done: set[InetKey] = set()
        for socket in alone:
            if socket.key in done:
                continue
            mine, theirs = index.get(_flow(socket), ()), index.get(_mirrored(socket), ())
            if len(mine) == len(theirs) == 1 and theirs[0].netns != socket.netns:
                done.add(theirs[0].key)
                joined.append(self._pair(socket, theirs[0]))
            else:
                rest.append(socket)
        return rest

    def _join_to_bound(self, alone: list[InetSocket], joined: list[Connection]) -> list[InetSocket]:
        rest: list[InetSocket] = []
        for socket in alone:
            peer = self._bound_peer(socket) if socket.protocol != "tcp" else None
            if peer is None:
                rest.append(socket)
            elif self._serves(socket):
                joined.append(Connection(peer, socket, True))
            else:
                joined.append(Connection(socket, peer, True))
        return rest

    def _bound_peer(self, socket: InetSocket) -> InetSocket | None:
        home = self.home(socket.netns, socket.remote_address)
        if home is None:
            return None
        found = self.listener(home, socket.protocol, socket.remote_address, socket.remote_port)
        return None if found is socket else found

    def _join_translated(self, alone: list[InetSocket], joined: list[Connection]) -> list[InetSocket]:
        asked = self._asked
        if self._translations is None or all(
            socket.loopback or (socket.key, socket.cookie) in asked for socket in alone
        ):
            return alone
        table = self._translations()
        if not table:
            return alone
        index: dict[Flow, list[InetSocket]] = {}
        for socket in alone:
            index.setdefault(_flow(socket), []).append(socket)
        rest: list[InetSocket] = []
        done: set[InetKey] = set()
        for socket in alone:
            if socket.key in done:
                continue
            other = table.get(_flow(socket))
            theirs = index.get(other, []) if other is not None else []
            if len(theirs) == len(index[_flow(socket)]) == 1 and theirs[0] is not socket:
                done.add(theirs[0].key)
                joined.append(self._pair(socket, theirs[0], nat=True))
            else:
                rest.append(socket)
        return rest


def _flow(socket: InetSocket) -> Flow:
    return Flow(socket.protocol, socket.local, socket.remote)


def _mirrored(socket: InetSocket) -> Flow:
    return Flow(socket.protocol, socket.remote, socket.local)


def is_closed(socket: InetSocket) -> bool:
    """Whether every process let go of a TCP socket that the kernel still keeps: to end in order, or in TIME_WAIT."""
    return not socket.inode and socket.state in _CLOSED


def _opened(socket: InetSocket) -> bool:
    return socket.tcp is not None and socket.tcp.opened
