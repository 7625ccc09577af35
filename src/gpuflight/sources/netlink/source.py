"""Netlink: every socket of every network namespace on this host, asked once per namespace and round."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.netlink import addresses, inet_diag, unix_diag
from gpuflight.sources.netlink.conntrack import MAX_ENTRIES, Flow, parse_translations
from gpuflight.sources.netlink.inet_diag import InetParser
from gpuflight.sources.netlink.namespaces import Namespace, Namespaces
from gpuflight.sources.netlink.proc_tables import InetTableParser, parse_sockstat, parse_unix
from gpuflight.sources.netlink.records import InetTable, Limit, UnixTable
from gpuflight.sources.netlink.unix_diag import UnixParser
from gpuflight.sources.netlink.wire import (
    NETLINK_ROUTE,
    NETLINK_SOCK_DIAG,
    Channel,
    Connect,
    connect,
    open_in_namespaces,
)

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcFs
    from gpuflight.sources.recording import Tape

LOCK_TIMEOUT_S = 3.0
"""How long a caller waits for another thread's dump before it gives up its round."""

_FAMILIES = ((socket.AF_INET, ""), (socket.AF_INET6, "6"))
_PROTOCOLS = ("tcp", "udp", "udplite")


class Dump(NamedTuple):
    """One question to the kernel: its name on the tape, netlink protocol, message type and body."""

    name: str
    protocol: int
    message_type: int
    request: bytes


_ADDRESSES = Dump("addresses", NETLINK_ROUTE, addresses.RTM_GETADDR, addresses.request())
_UNIX = Dump("unix", NETLINK_SOCK_DIAG, unix_diag.SOCK_DIAG_BY_FAMILY, unix_diag.request())
_UNPRIVILEGED = "run as root or grant CAP_SYS_ADMIN to enter network namespaces"
_BLOCKED = "allow AF_NETLINK sockets (seccomp profile, LSM) and enable CONFIG_INET_DIAG and CONFIG_UNIX_DIAG"


class Netlink:
    """Sockets from NETLINK_SOCK_DIAG, from /proc/PID/net where that is not to be had.

    Each namespace is asked once per round, whatever the number of its processes, and only for the families and
    protocols that its ``sockstat`` says it has: a dump walks the hash tables of the whole host. Nothing stays open
    between rounds, since a netlink socket would keep a dead container's namespace alive.

    ``tape`` records each reply, or its error, under ``<namespace>/<what>``; ``connect`` is replaced in tests.
    """

    def __init__(self, procfs: ProcFs, tape: Tape | None = None, connect: Connect = connect) -> None:
        self._procfs = procfs
        self._tape = tape
        self._connect = connect
        self._namespaces = Namespaces(procfs)
        self._lock = threading.Lock()
        self._generation = 0
        self._inet: InetTable | None = None
        self._unix: UnixTable | None = None
        self._translations: dict[Flow, Flow] | None = None
        self._channels: dict[int, Channel | OSError] = {}
        self._inet_parsers: dict[tuple[int, str, str], InetParser] = {}
        self._table_parsers: dict[tuple[int, str, str], InetTableParser] = {}
        self._unix_parsers: dict[int, UnixParser] = {}

    def begin_round(self, number: int) -> None:
        """Forget what was read for the last round."""
        self._generation += 1
        self._inet = None
        self._unix = None
        self._translations = None

    def close(self) -> None:
        """Give back the sockets of a dump that was cut off. May be called twice."""
        self._close_channels()

    def inet_sockets(self, time_wait_limit: int = 0) -> InetTable:
        """Every TCP, UDP and UDP-Lite socket, read at most once per round.

        At most ``time_wait_limit`` sockets in TIME_WAIT per namespace, family and protocol are among them; with 0 the
        kernel is not even asked for them. Raises SourceUnavailable.
        """
        found = self._inet
        if found is not None:
            return found
        with self._reading():
            if self._inet is None:
                generation = self._generation
                table = self._read_inet(time_wait_limit)
                if generation != self._generation:
                    return table
                self._inet = table
            return self._inet

    def unix_sockets(self) -> UnixTable:
        """Every unix-domain socket, read at most once per round. Raises SourceUnavailable."""
        found = self._unix
        if found is not None:
            return found
        with self._reading():
            if self._unix is None:
                generation = self._generation
                table = self._read_unix()
                if generation != self._generation:
                    return table
                self._unix = table
            return self._unix

    def translations(self) -> dict[Flow, Flow]:
        """Connections of gpuflight's own network namespace that NAT changes: one end's view → the other's, both ways.

        Read at most once per round. Empty without connection tracking, without the right to read it, or with more than
        ``MAX_ENTRIES`` entries.
        """
        if self._translations is None:
            try:
                short = int(self._procfs.text("sys/net/netfilter/nf_conntrack_count") or 0) <= MAX_ENTRIES
                self._translations = parse_translations(self._procfs.net("self", "nf_conntrack")) if short else {}
            except (OSError, ValueError):
                self._translations = {}
        return self._translations

    # --- internet sockets ------------------------------------------------------------------------------------------

    def _read_inet(self, time_wait_limit: int) -> InetTable:
        table = InetTable()
        spaces = self._find_namespaces(table)
        live = set()
        for space in spaces:
            counts = self._counts(space)
            for protocol in _PROTOCOLS:
                for family, suffix in _FAMILIES:
                    name = protocol + suffix
                    # UDP-Lite is asked for only where sockstat says that there is some.
                    if counts.get(name.upper(), 0 if protocol == "udplite" else 1) <= 0:
                        continue
                    live.add((space.netns, protocol, suffix))
                    self._read_protocol(table, spaces, space, protocol, family, suffix, time_wait_limit)
            self._read_addresses(table, spaces, space)
        for parsers in (self._inet_parsers, self._table_parsers):
            for gone in parsers.keys() - live:
                del parsers[gone]
        if not table.sockets and any(limit.reason.startswith("sockets of") for limit in table.limits):
            raise SourceUnavailable("neither netlink nor /proc/net gives sockets", _BLOCKED)
        return table

    def _read_protocol(
        self,
        table: InetTable,
        spaces: list[Namespace],
        space: Namespace,
        protocol: str,
        family: int,
        suffix: str,
        time_wait_limit: int,
    ) -> None:
        key = (space.netns, protocol, suffix)
        parser: InetParser | InetTableParser
        try:
            request = inet_diag.request(family, protocol, time_wait=time_wait_limit > 0)
            dump = Dump(f"inet/{protocol}{suffix}", NETLINK_SOCK_DIAG, inet_diag.SOCK_DIAG_BY_FAMILY, request)
            data = self._ask(table.losses, spaces, space, dump)
            parser = self._inet_parsers.setdefault(key, InetParser(space.netns, protocol))
        except (OSError, SourceUnavailable) as refused:
            try:
                data = self._procfs.net(space.first_pid, protocol + suffix)
            except OSError as error:
                if not (suffix and error.errno == errno.ENOENT):  # no IPv6 in this kernel
                    _limit(table.limits, f"sockets of a network namespace ({_why(error)})", _UNPRIVILEGED)
                return
            _limit(
                table.limits,
                f"{protocol} sockets without rtt, retransmits and bytes: netlink {_why(refused)}, read from /proc/net",
                _UNPRIVILEGED if space.netns else _BLOCKED,
            )
            parser = self._table_parsers.setdefault(key, InetTableParser(space.netns, protocol))
        table.sockets += parser.parse(data, time_wait_limit)
        table.time_wait_count += parser.time_wait_count
        if parser.garbage:
            _lose(table.losses, "malformed socket messages", parser.garbage)

    def _counts(self, space: Namespace) -> dict[str, int]:
        counts: dict[str, int] = {}
        for name in ("sockstat", "sockstat6"):
            try:
                counts |= parse_sockstat(self._procfs.net(space.first_pid, name))
            except OSError:
                pass  # then every protocol is asked for
        return counts

    def _read_addresses(self, table: InetTable, spaces: list[Namespace], space: Namespace) -> None:
        try:
            data = self._ask(table.losses, spaces, space, _ADDRESSES)
        except (OSError, SourceUnavailable):
            return  # whose address it is then shows only from sockets that use it; the collector says "half"
        table.addresses[space.netns] = addresses.parse(data)

    # --- unix sockets ----------------------------------------------------------------------------------------------

    def _read_unix(self) -> UnixTable:
        table = UnixTable()
        spaces = self._find_namespaces(table)
        for space in spaces:
            try:
                data = self._ask(table.losses, spaces, space, _UNIX)
            except (OSError, SourceUnavailable) as refused:
                try:
                    data = self._procfs.net(space.first_pid, "unix")
                except OSError as error:
                    _limit(table.limits, f"unix sockets of a network namespace ({_why(error)})", _UNPRIVILEGED)
                    continue
                _limit(
                    table.limits,
                    f"unix sockets without their peers: netlink {_why(refused)}, read from /proc/net/unix",
                    _UNPRIVILEGED if space.netns else _BLOCKED,
                )
                found, garbage = parse_unix(data, space.netns)
                table.sockets += found
            else:
                parser = self._unix_parsers.setdefault(space.netns, UnixParser(space.netns))
                table.sockets += parser.parse(data)
                garbage = parser.garbage
            if garbage:
                _lose(table.losses, "malformed socket messages", garbage)
        for gone in self._unix_parsers.keys() - {space.netns for space in spaces}:
            del self._unix_parsers[gone]
        return table

    # --- both ------------------------------------------------------------------------------------------------------

    def _find_namespaces(self, table: InetTable | UnixTable) -> list[Namespace]:
        spaces = self._namespaces.find()
        if self._namespaces.unreadable:
            _limit(
                table.limits,
                "network namespace of some processes is not readable: if it is not ours, their sockets are not seen",
                "run as root or grant CAP_SYS_PTRACE",
                self._namespaces.unreadable,
            )
        return spaces

    def _ask(self, losses: dict[str, int], spaces: list[Namespace], space: Namespace, dump: Dump) -> bytes:
        def live() -> bytes:
            channel = self._channel(spaces, space)
            before = dict(channel.losses)
            try:
                return channel.dump(dump.protocol, dump.message_type, dump.request)
            finally:
                for name, count in channel.losses.items():
                    if count > before.get(name, 0):
                        _lose(losses, name, count - before.get(name, 0))

        if self._tape is None:
            return live()
        return self._tape.ask("netlink", f"{space.netns}/{dump.name}", live)

    def _channel(self, spaces: list[Namespace], space: Namespace) -> Channel:
        """The channel into a namespace; the first call for a foreign one opens those into all of them at once."""
        if not space.netns:
            own = self._channels.get(0)
            if own is None:
                own = self._channels[0] = Channel(self._connect)
            assert isinstance(own, Channel)  # noqa: S101 - our own needs no entering
            return own
        if space.netns not in self._channels:
            places = {other.netns: other.paths for other in spaces if other.netns}
            self._channels |= open_in_namespaces(places, self._connect, (NETLINK_SOCK_DIAG, NETLINK_ROUTE))
        channel = self._channels[space.netns]
        if isinstance(channel, OSError):
            raise channel
        return channel

    @contextmanager
    def _reading(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise SourceUnavailable("another thread still reads the sockets", "raise the interval between rounds")
        try:
            yield
        finally:
            self._close_channels()
            self._lock.release()

    def _close_channels(self) -> None:
        for channel in self._channels.values():
            if isinstance(channel, Channel):
                channel.close()
        self._channels = {}


def _why(error: OSError | SourceUnavailable) -> str:
    if isinstance(error, SourceUnavailable):
        return error.reason
    name = errno.errorcode.get(error.errno or 0, "")
    return f"refused ({name})" if name else f"failed ({error})"


def _lose(losses: dict[str, int], what: str, count: int) -> None:
    losses[what] = losses.get(what, 0) + count


def _limit(limits: list[Limit], reason: str, hint: str, count: int = 1) -> None:
    for known in limits:
        if known.reason == reason:
            known.count += count
            return
    limits.append(Limit(reason, hint, count))
