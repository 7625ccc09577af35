"""Socket traffic from round to round: what each process and each of its threads moved through each socket since."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from gpuflight.collectors.kernel_net_rows import TCP, Calls, SocketRow, calls, socket_row
from gpuflight.collectors.kernel_programs import Starts
from gpuflight.graph import Edge
from gpuflight.sources.netlink import InetSocket

_IDLE_ROUNDS = 240
"""Rounds after which a row that nothing happened to is dropped, so that an old server's sockets do not fill the map.
It starts anew, at 0, when the thread uses the socket again."""


class Amount(Struct, gc=False):
    """Bytes and calls of one side, since the last round (``…_count`` metrics: since first seen)."""

    sent_bytes: int = 0
    sends: int = 0
    received_bytes: int = 0
    receives: int = 0
    failures: int = 0

    def add(self, other: Amount) -> None:
        self.sent_bytes += other.sent_bytes
        self.sends += other.sends
        self.received_bytes += other.received_bytes
        self.receives += other.receives
        self.failures += other.failures

    def grown(self) -> dict[str, float]:
        """By the names of the metrics, as the side itself sees it: what it sent, what it received."""
        return {
            "sent_bytes_per_s": self.sent_bytes,
            "received_bytes_per_s": self.received_bytes,
            "sends_per_s": self.sends,
            "receives_per_s": self.receives,
        }


class User(Struct, gc=False):
    """One thread's use of one socket."""

    key: bytes
    raw: bytes
    row: Calls
    process: str
    thread: str
    now: Amount
    idle_rounds: int = 0


class Used(Struct, gc=False):
    """One socket with those that used it.

    ``ended``: it is closed, and this is the last time that it is told; ``told``: it was. ``missed``: the snapshot did
    not have it, this round. ``resting_edge``: of its connection, while that moves nothing.
    """

    cookie: bytes
    raw: bytes
    row: SocketRow
    users: list[User]
    ended: bool = False
    missed: bool = False
    told: bool = False
    socket: InetSocket | None = None
    resting_edge: Edge | None = None

    @property
    def rests(self) -> bool:
        """Whether nobody used it since the last round."""
        return all(user.idle_rounds for user in self.users)

    def inet(self, own_netns: int) -> InetSocket:
        """The internet socket as netlink would tell it; kept while its row stays the same."""
        if self.socket is None:
            self.socket = self.row.as_socket(own_netns)
        return self.socket

    def amounts(self) -> dict[str, Amount]:
        """By process id."""
        found: dict[str, Amount] = {}
        for user in self.users:
            found.setdefault(user.process, Amount()).add(user.now)
        return found

    def total(self) -> Amount:
        """Of all processes."""
        whole = Amount()
        for user in self.users:
            whole.add(user.now)
        return whole

    def since_first_seen(self) -> Amount:
        """Bytes and calls since the probes saw the socket first."""
        whole = Amount()
        for user in self.users:
            row = user.row
            whole.add(Amount(row.sent_bytes, row.sends, row.received_bytes, row.receives, row.failures))
        return whole


class Flows:
    """The rows of both maps, compared with those of the round before."""

    def __init__(self, starts: Starts) -> None:
        self.by_cookie: dict[bytes, Used] = {}
        self._users: dict[bytes, User] = {}
        self._starts = starts

    def update(self, sockets: Iterable[tuple[bytes, bytes]], traffic: Iterable[tuple[bytes, bytes]]) -> None:
        """Take over one reading of ``sockets`` and, made before it, of ``traffic``."""
        before, self.by_cookie = self.by_cookie, {}
        for cookie, raw in sockets:
            known = before.get(cookie)
            if known is None:
                known = Used(cookie, raw, socket_row(raw), [])
            elif known.raw != raw:
                known.raw, known.row, known.socket = raw, socket_row(raw), None
            known.users = []
            self.by_cookie[cookie] = known
        users, self._users = self._users, {}
        for key, raw in traffic:
            user = self._user(key, raw, users.get(key))
            self._users[key] = user
            used = self.by_cookie.get(key[:8])
            if used is not None:  # else there was no room for the socket, which is counted
                used.users.append(user)

    def _user(self, key: bytes, raw: bytes, known: User | None) -> User:
        if known is not None and known.raw == raw:
            known.idle_rounds += 1
            if known.idle_rounds == 1:
                known.now = Amount()
            return known
        row = calls(raw)
        if known is None or known.row.thread_start_ns != row.thread_start_ns or known.row.sends > row.sends:
            process = self._starts.process_id(row.pid, row.process_start_ns) if row.pid else ""
            thread = self._starts.thread_id(row.tid, row.thread_start_ns)
            now = Amount(row.sent_bytes, row.sends, row.received_bytes, row.receives, row.failures)
            return User(key, raw, row, process, thread, now)
        last = known.row
        known.now = Amount(
            row.sent_bytes - last.sent_bytes,
            row.sends - last.sends,
            row.received_bytes - last.received_bytes,
            row.receives - last.receives,
            row.failures - last.failures,
        )
        known.raw, known.row, known.idle_rounds = raw, row, 0
        return known

    def finished(self, alive: set[str]) -> tuple[list[bytes], list[bytes]]:
        """Keys of ``sockets`` and of ``traffic`` that were told for the last time: to be deleted. ``alive``: processes;
        what others did not do since the last round they never will."""
        sockets = [
            cookie
            for cookie, used in self.by_cookie.items()
            # Without users and no TCP: nothing would tell us when it is closed; it comes back with its next call.
            if used.told or (not used.users and used.row.protocol != TCP)
        ]
        gone = set(sockets)
        users = [
            key
            for key, user in self._users.items()
            if key[:8] in gone
            or key[:8] not in self.by_cookie
            or user.idle_rounds >= _IDLE_ROUNDS
            or (user.idle_rounds and user.process not in alive)
        ]
        for cookie in sockets:
            del self.by_cookie[cookie]
        for key in users:
            user = self._users.pop(key)
            used = self.by_cookie.get(key[:8])
            if used is not None:
                used.users.remove(user)
        return sockets, users
