"""What the kernel says about sockets, as plain records; the same whether netlink or /proc/net said it.

Records are values that are kept and handed out again, the very same object, as long as nothing in them changes: whoever
caches by record may compare with ``is``.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct, field

InetKey = str
"""Network namespace, protocol, local endpoint and remote endpoint, as ``inet_key`` puts them together. Text and not a
tuple, because text remembers its hash, and keys are looked up thousands of times a round."""


class TcpInfo(Struct, gc=False, frozen=True):
    """Of ``struct tcp_info`` (include/uapi/linux/tcp.h) what is reported. None: the kernel is too old.

    ``bytes_sent`` counts first transmissions only (tcpi_bytes_sent − tcpi_bytes_retrans, Linux 4.19; before that
    tcpi_bytes_acked, which on the opening end counts the SYN as one byte). The ``…_limited_us`` and ``busy_us`` are the
    kernel's chronograph: how long the sender had data in flight, and was held back by the receiver's window or by its
    own send buffer (µs since the connection opened). ``opened``: this end is known to have opened the connection, since
    more was acknowledged than it sent: the SYN (RFC 4898 counts it); False says nothing.
    """

    rtt_us: int
    congestion_window_segments: int
    retransmits: int
    bytes_sent: int | None
    bytes_received: int | None
    segments_sent: int | None
    busy_us: int | None
    receiver_limited_us: int | None
    send_buffer_limited_us: int | None
    opened: bool = False


class InetSocket(Struct, gc=False, frozen=True):
    """One internet socket of the kernel. ``id`` is that of its endpoint's entity; ``mirror`` the key of its other end.

    ``netns`` is 0 in gpuflight's own network namespace, else the namespace's inode. Endpoints are ``10.0.0.5:80`` or
    ``[::1]:80``, IPv4-mapped IPv6 addresses as IPv4; ``remote`` is empty when not connected. ``inode`` is 0 when no
    descriptor refers to the socket (TIME_WAIT, not yet accepted). On a listener the queues are the number of
    connections that wait to be accepted and its limit; else bytes.
    """

    id: str
    key: InetKey
    mirror: InetKey
    netns: int
    protocol: str
    local: str
    remote: str
    local_address: str
    local_port: int
    remote_address: str
    remote_port: int
    loopback: bool
    state: str
    inode: int
    uid: int
    cookie: int
    recv_queue: int
    send_queue: int
    recv_buffer_bytes: int | None = None
    send_buffer_bytes: int | None = None
    drops: int | None = None
    tcp: TcpInfo | None = None


class UnixSocketRecord(Struct, gc=False, frozen=True):
    """One unix-domain socket of the kernel.

    ``path`` begins with ``@`` for an abstract name and is empty for an unnamed socket. ``peer`` is the inode of the
    connected end, 0 if none, None if the source cannot say; ``pending`` are the inodes of the ends that wait to be
    accepted. On a listener the queues are waiting connections and their limit; else bytes, None if not said.
    """

    inode: int
    netns: int
    type: str
    state: str
    path: str
    peer: int | None
    pending: tuple[int, ...] = ()
    recv_queue: int | None = None
    send_queue: int | None = None
    uid: int | None = None


class Limit(Struct):
    """Something that a source could not see: why, what to do, how often."""

    reason: str
    hint: str = ""
    count: int = 1


Joined = Callable[[InetKey], tuple[str, str, bool] | None]
"""Of a connected socket's key: the ids of the endpoints that its connection is drawn from and to, and whether that
direction is known; None for a connection that is not drawn."""


class InetTable(Struct):
    """Every internet socket seen this round. ``time_wait_count`` are those in TIME_WAIT that were counted only.

    ``addresses`` are each namespace's own addresses; a namespace is absent where they could not be read. ``joined`` is
    left here by the collector that joins connections, for those that know more of them; None while nobody did."""

    sockets: list[InetSocket] = field(default_factory=list)
    addresses: dict[int, frozenset[str]] = field(default_factory=dict)
    time_wait_count: int = 0
    losses: dict[str, int] = field(default_factory=dict)
    limits: list[Limit] = field(default_factory=list)
    joined: Joined | None = None


class UnixTable(Struct):
    """Every unix-domain socket seen this round."""

    sockets: list[UnixSocketRecord] = field(default_factory=list)
    losses: dict[str, int] = field(default_factory=dict)
    limits: list[Limit] = field(default_factory=list)


TCP_STATES = (
    "", "ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT", "CLOSE", "CLOSE_WAIT", "LAST_ACK",
    "LISTEN", "CLOSING", "SYN_RECV", "BOUND",
)  # fmt: skip
"""Names by the kernel's number (include/net/tcp_states.h)."""


def state_name(protocol: str, number: int) -> str:
    """The state as ``ss`` names it: a datagram socket that is bound but not connected is UNCONN."""
    if number == 7 and protocol != "tcp":
        return "UNCONN"
    return TCP_STATES[number] if 0 < number < len(TCP_STATES) else f"STATE_{number}"


def inet_key(netns: int, protocol: str, local: str, remote: str) -> InetKey:
    """The key of a socket."""
    return f"{netns} {protocol} {local} {remote}"


def socket_id(protocol: str, local: str, netns: int) -> str:
    """The id of the entity of an endpoint: ``Socket(tcp,10.0.0.5:80)``, with ``,netns=…`` in a foreign namespace."""
    return f"Socket({protocol},{local},netns={netns})" if netns else f"Socket({protocol},{local})"


def inet_socket(
    netns: int,
    protocol: str,
    local: tuple[str, int],
    remote: tuple[str, int],
    state: int,
    inode: int,
    uid: int,
    cookie: int,
    queues: tuple[int, int],
    memory: tuple[int | None, int | None, int | None] = (None, None, None),
    tcp: TcpInfo | None = None,
) -> InetSocket:
    """A record from what both sources know. ``remote`` has port 0 if there is none; ``queues``: receive, send;
    ``memory``: receive buffer, send buffer (bytes), drops."""
    local_address, local_port = local
    remote_address, remote_port = remote
    here = endpoint(local_address, local_port)
    loopback = is_loopback(local_address)
    if remote_port:
        there = endpoint(remote_address, remote_port)
        loopback = loopback or is_loopback(remote_address)
    else:
        there = remote_address = ""
    # By position: this is half as dear as by name, and a first round makes thousands.
    return InetSocket(
        socket_id(protocol, here, netns),
        inet_key(netns, protocol, here, there),
        inet_key(netns, protocol, there, here),
        netns,
        protocol,
        here,
        there,
        local_address,
        local_port,
        remote_address,
        remote_port,
        loopback,
        state_name(protocol, state),
        inode,
        uid,
        cookie,
        queues[0],
        queues[1],
        memory[0],
        memory[1],
        memory[2],
        tcp,
    )


def endpoint(address: str, port: int) -> str:
    """``10.0.0.5:80``, ``[::1]:80``."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def is_loopback(address: str) -> bool:
    """Whether an address never leaves its network namespace."""
    return address.startswith("127.") or address == "::1"
