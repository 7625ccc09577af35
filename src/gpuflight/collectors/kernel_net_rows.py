"""What net.bpf.c writes into its maps, as records: sockets by cookie, and calls by (thread, socket)."""

from __future__ import annotations

import struct

from msgspec import Struct

from gpuflight.sources.netlink import InetSocket, TcpInfo, inet_socket
from gpuflight.sources.netlink.addresses import address_text

AF_UNIX = 1
TCP = 6
CLIENT, SERVER = 1, 2
PROTOCOLS = {6: "tcp", 17: "udp", 136: "udplite"}

_TRAFFIC = struct.Struct("=7Q2I")
_SOCKET = struct.Struct("=9Q6I16s16s3H2B")
COOKIE_BYTES, KEY_BYTES, CALLS_BYTES, SOCKET_BYTES = 8, 16, _TRAFFIC.size, _SOCKET.size
_CLOSED_STATE = 7


class Calls(Struct, frozen=True, gc=False):
    """What one thread did with one socket since it was first seen; ``struct traffic``."""

    sent_bytes: int
    sends: int
    received_bytes: int
    receives: int
    failures: int
    process_start_ns: int
    thread_start_ns: int
    pid: int
    tid: int


class SocketRow(Struct, frozen=True, gc=False):
    """``struct socket_row``. Times are ns of the monotonic clock, 0 if not seen; totals are those of an ended TCP
    connection. ``pid``: of a client who connected it, of a server who accepted it (if that is watched), else 0."""

    opened_ns: int
    established_ns: int
    accepted_ns: int
    ended_ns: int
    sent_bytes: int
    received_bytes: int
    inode: int
    peer_inode: int
    process_start_ns: int
    pid: int
    netns: int
    retransmits: int
    segments_sent: int
    segments_received: int
    rtt_us: int
    local: bytes
    remote: bytes
    local_port: int
    remote_port: int
    family: int
    protocol: int
    role: int

    @property
    def unix(self) -> bool:
        """Whether it is a unix socket, which has inodes instead of addresses."""
        return self.family == AF_UNIX

    def as_socket(self, own_netns: int) -> InetSocket:
        """The socket as netlink would have told it while it lived, for those that it never saw."""
        remote = address_text(self.family, self.remote) if self.remote_port else ""
        return inet_socket(
            0 if self.netns == own_netns else self.netns,
            PROTOCOLS[self.protocol],
            (address_text(self.family, self.local), self.local_port),
            (remote, self.remote_port),
            _CLOSED_STATE,
            0,
            0,
            0,
            (0, 0),
            tcp=TcpInfo(self.rtt_us, 0, self.retransmits, self.sent_bytes, self.received_bytes, self.segments_sent,
                        None, None, None, opened=self.role == CLIENT),
        )  # fmt: skip


def calls(raw: bytes) -> Calls:
    """Raises struct.error for another layout."""
    return Calls(*_TRAFFIC.unpack(raw))


def socket_row(raw: bytes) -> SocketRow:
    """Raises struct.error for another layout."""
    return SocketRow(*_SOCKET.unpack(raw))
