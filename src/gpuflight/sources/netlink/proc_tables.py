"""/proc/PID/net/{tcp,tcp6,udp,udp6,udplite,udplite6,unix,sockstat}: what can be had without netlink.

No rtt, retransmits or byte counts, and no peers of unix sockets; but it needs no right and no change of namespace.
"""

from __future__ import annotations

import socket
import struct
import sys

from gpuflight.sources.netlink.records import InetSocket, UnixSocketRecord, inet_socket
from gpuflight.sources.netlink.unix_diag import STATES, TYPES

_TIME_WAIT = 6
_HALF_OPEN = (3, 12)  # SYN_RECV: as in inet_diag.py
_SO_ACCEPTCON = 0x10000
_WORDS = "<4I" if sys.byteorder == "little" else ">4I"


class InetTableParser:
    """Turns one namespace's table of one protocol and family into records, round after round; a line that is as it was
    in all that is reported gives the record of last time."""

    def __init__(self, netns: int, protocol: str) -> None:
        self._netns = netns
        self._protocol = protocol
        self._known: dict[tuple[bytes, ...], InetSocket] = {}
        self._addresses: dict[bytes, str] = {}
        self.garbage = 0
        """Lines of the last table that made no sense."""
        self.time_wait_count = 0
        """Sockets in TIME_WAIT beyond the limit: counted, not returned."""

    def parse(self, data: bytes, time_wait_limit: int = 0) -> list[InetSocket]:
        """The sockets in a table, in its order."""
        self.garbage = self.time_wait_count = 0
        left = time_wait_limit
        fresh: dict[tuple[bytes, ...], InetSocket] = {}
        sockets: list[InetSocket] = []
        for line in data.splitlines()[1:]:
            parts = line.split()
            try:
                state = int(parts[3], 16)
                if state in _HALF_OPEN and self._protocol == "tcp":
                    continue
                if state == _TIME_WAIT:
                    if left <= 0:
                        self.time_wait_count += 1
                        continue
                    left -= 1
                # Local, remote, state, queues, uid, inode, and UDP's drops; not the slot and the timers.
                still: tuple[bytes, ...] = (parts[1], parts[2], parts[3], parts[4], parts[7], parts[9])
                if self._protocol != "tcp":
                    still += (parts[12],)
                record = self._known.get(still)
                if record is None:
                    record = self._record(still, state)
            except (ValueError, IndexError, struct.error):
                self.garbage += 1
                continue
            fresh[still] = record
            sockets.append(record)
        self._known = fresh
        if len(self._addresses) > 4 * len(fresh) + 1024:
            self._addresses.clear()
        return sockets

    def _record(self, still: tuple[bytes, ...], state: int) -> InetSocket:
        send, _, recv = still[3].partition(b":")
        return inet_socket(
            self._netns,
            self._protocol,
            self._endpoint(still[0]),
            self._endpoint(still[1]),
            state,
            int(still[5]),
            int(still[4]),
            0,
            (int(recv, 16), int(send, 16)),
            (None, None, int(still[6]) if len(still) > 6 else None),
        )

    def _endpoint(self, text: bytes) -> tuple[str, int]:
        raw, _, port = text.partition(b":")
        address = self._addresses.get(raw)
        if address is None:
            address = self._addresses[raw] = hex_address(raw)
        return address, int(port, 16)


def hex_address(text: bytes) -> str:
    """An address as the kernel prints it, in 32-bit words of the host's byte order; IPv4-mapped as IPv4."""
    raw = bytes.fromhex(text.decode())
    if len(raw) == 4:
        return socket.inet_ntop(socket.AF_INET, raw[::-1] if sys.byteorder == "little" else raw)
    raw = struct.pack(">4I", *struct.unpack(_WORDS, raw))
    if raw.startswith(b"\0" * 10 + b"\xff\xff"):
        return socket.inet_ntop(socket.AF_INET, raw[12:])
    return socket.inet_ntop(socket.AF_INET6, raw)


def parse_unix(data: bytes, netns: int) -> tuple[list[UnixSocketRecord], int]:
    """(sockets, lines that made no sense) of /proc/net/unix; sockets that are not accepted yet are left out."""
    sockets: list[UnixSocketRecord] = []
    garbage = 0
    for line in data.splitlines()[1:]:
        parts = line.split(None, 7)
        try:
            flags, type_number, connection = (int(part, 16) for part in parts[3:6])
            inode = int(parts[6])
        except (ValueError, IndexError):
            garbage += 1
            continue
        if not inode:
            continue
        # The sixth column is the socket layer's state: 1 unconnected, 2 connecting, 3 connected (linux/net.h).
        state = STATES[10] if flags & _SO_ACCEPTCON else {2: STATES[2], 3: STATES[1]}.get(connection, STATES[7])
        path = parts[7].decode("utf-8", "backslashreplace") if len(parts) > 7 else ""
        name = TYPES.get(type_number, f"type_{type_number}")
        sockets.append(UnixSocketRecord(inode=inode, netns=netns, type=name, state=state, path=path, peer=None))
    return sockets, garbage


def parse_sockstat(data: bytes) -> dict[str, int]:
    """How many sockets of each protocol a namespace has (``TCP``, ``UDP``, ``UDPLITE``, with ``6`` in sockstat6)."""
    counts: dict[str, int] = {}
    for line in data.splitlines():
        name, _, rest = line.partition(b":")
        parts = rest.split()
        if len(parts) >= 2 and parts[0] == b"inuse" and parts[1].lstrip(b"-").isdigit():
            counts[name.decode()] = int(parts[1])
    return counts
