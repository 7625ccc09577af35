"""A kernel's sockets for tests: the bytes that netlink and /proc/net would give, and the sources that hand them out."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from gpuflight.sources.clock import ManualClock
from gpuflight.sources.netlink import InetSocket, InetTable, TcpInfo, UnixSocketRecord, UnixTable, inet_socket
from gpuflight.sources.netlink.records import TCP_STATES
from gpuflight.sources.procfs import FdIndex, FdRef, ProcStat, parse_stat

OWN = 4026531840
"""Inode of gpuflight's own network namespace in these tests."""

STATES = {"ESTABLISHED": 1, "SYN_SENT": 2, "TIME_WAIT": 6, "CLOSE": 7, "UNCONN": 7, "CLOSE_WAIT": 8, "LISTEN": 10}


# --- netlink messages ------------------------------------------------------------------------------------------------


def attribute(kind: int, value: bytes) -> bytes:
    """One netlink attribute, padded."""
    return (struct.pack("=HH", 4 + len(value), kind) + value).ljust((4 + len(value) + 3) & ~3, b"\0")


def message(kind: int, body: bytes, flags: int = 2) -> bytes:
    """One netlink message, padded; its sequence number is filled in by FakeLink."""
    return (struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body).ljust((16 + len(body) + 3) & ~3, b"\0")


def tcp_info(
    *,
    rtt_us: int = 0,
    retransmits: int = 0,
    acked: int = 0,
    received: int = 0,
    sent: int = 0,
    resent: int = 0,
    segments: int = 0,
    busy_us: int = 0,
    receiver_limited_us: int = 0,
    buffer_limited_us: int = 0,
    idle_ms: int = 0,
    size: int = 248,
) -> bytes:
    """struct tcp_info, cut to ``size`` as an older kernel would have it."""
    raw = bytearray(280)
    for offset, value in ((44, idle_ms), (48, idle_ms), (52, idle_ms), (56, idle_ms), (60, 65483), (68, rtt_us),
                          (80, 10), (100, retransmits), (156, segments)):  # fmt: skip
        struct.pack_into("=I", raw, offset, value)
    for offset, value in ((120, acked), (128, received), (168, busy_us), (176, receiver_limited_us),
                          (184, buffer_limited_us), (200, sent), (208, resent)):  # fmt: skip
        struct.pack_into("=Q", raw, offset, value)
    return bytes(raw[:size])


def inet_message(
    local: tuple[str, int],
    remote: tuple[str, int] | None = None,
    *,
    state: str = "ESTABLISHED",
    inode: int = 1,
    uid: int = 0,
    cookie: int | None = None,
    recv_queue: int = 0,
    send_queue: int = 0,
    info: bytes | None = None,
    memory: tuple[int, ...] | None = (0, 131072, 0, 2626560, 0, 0, 0, 0, 0),
    shutdown: bool = True,
) -> bytes:
    """One inet_diag_msg as the kernel sends it for a socket."""
    v6 = ":" in local[0]
    family = socket.AF_INET6 if v6 else socket.AF_INET
    nowhere = ("::" if v6 else "0.0.0.0", 0)
    ends = [socket.inet_pton(family, address).ljust(16, b"\0") for address, _ in (local, remote or nowhere)]
    body = struct.pack("=BBBB", family, STATES[state], 0, 0)
    body += struct.pack(">HH", local[1], (remote or nowhere)[1]) + ends[0] + ends[1]
    body += struct.pack("=IQ", 0, cookie if cookie is not None else inode)
    body += struct.pack("=IIIII", 0, recv_queue, send_queue, uid, inode)
    if shutdown:
        body += attribute(8, b"\0")
    if memory is not None:
        body += attribute(7, struct.pack("=9I", *memory))
    if info is not None:
        body += attribute(2, info)
    return message(20, body)


def unix_message(
    inode: int,
    *,
    type_: int = 1,
    state: int = 1,
    path: bytes | None = None,
    peer: int | None = None,
    pending: Iterable[int] = (),
    queues: tuple[int, int] = (0, 0),
) -> bytes:
    """One unix_diag_msg as the kernel sends it for a socket."""
    body = struct.pack("=BBBxIII", socket.AF_UNIX, type_, state, inode, inode, 0)
    if path is not None:
        body += attribute(0, path)
    if peer is not None:
        body += attribute(2, struct.pack("=I", peer))
    if pending:
        body += attribute(3, struct.pack(f"={len(list(pending))}I", *pending))
    return message(20, body + attribute(4, struct.pack("=II", *queues)) + attribute(7, struct.pack("=I", 0)))


def address_message(address: str) -> bytes:
    """One RTM_NEWADDR."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    raw = socket.inet_pton(family, address)
    return message(20, struct.pack("=BBBBI", family, 24, 0, 0, 1) + attribute(1, raw) + attribute(2, raw))


def done(status: int = 0, flags: int = 2) -> bytes:
    """NLMSG_DONE."""
    return message(3, struct.pack("=i", status), flags)


# --- a netlink that answers from a script ----------------------------------------------------------------------------


class FakeLink:
    """One netlink socket. ``answers`` maps (family, protocol) of a request to its parts, or to errors, in order."""

    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel
        self.closed = False
        self._queue: list[bytes | OSError] = []

    def send(self, data: bytes, /) -> int:
        sequence = struct.unpack_from("=I", data, 8)[0]
        family, protocol = data[16], data[17]
        self.kernel.asked.append((family, protocol))
        scripted = self.kernel.answers.get((family, protocol), [[done()]])
        parts = scripted.pop(0) if len(scripted) > 1 else scripted[0]
        self._queue = [part if isinstance(part, OSError) else _sequenced(part, sequence) for part in parts]
        return len(data)

    def recv(self, size: int, /) -> bytes:
        part = self._queue.pop(0)
        if isinstance(part, OSError):
            raise part
        return part

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeKernel:
    """``connect`` for Netlink: every link answers from ``answers``. ``refuse``: errno of making a link."""

    answers: dict[tuple[int, int], list[list[bytes | OSError]]] = field(default_factory=dict)
    refuse: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)
    links: list[FakeLink] = field(default_factory=list)

    def connect(self, protocol: int) -> FakeLink:
        if self.refuse:
            raise OSError(self.refuse, os.strerror(self.refuse))
        self.links.append(FakeLink(self))
        return self.links[-1]


def _sequenced(part: bytes, sequence: int) -> bytes:
    raw = bytearray(part)
    offset = 0
    while offset + 16 <= len(raw):
        length = struct.unpack_from("=I", raw, offset)[0]
        struct.pack_into("=I", raw, offset + 8, sequence)
        if length < 16:
            break
        offset += (length + 3) & ~3
    return bytes(raw)


# --- the other sources -----------------------------------------------------------------------------------------------


class FakeProcFs:
    """What of ProcFs the sockets need. ``files`` maps (pid, name under net/) to bytes or an error."""

    root = "/proc"

    def __init__(self) -> None:
        self.stats: dict[int, ProcStat] = {}
        self.namespaces: dict[int, int | OSError] = {}
        self.files: dict[tuple[int | str, str], bytes | OSError] = {}
        self.opened: list[tuple[int | str, str]] = []
        self.index = FdIndex()
        self.own: int | OSError = OWN
        self.hidden: dict[int, tuple[FdRef, ...]] = {}
        self.texts: dict[str, str] = {}

    def add(self, pid: int, *inodes: int, netns: int | OSError = OWN, start: int = 100) -> str:
        """A process that holds sockets; returns its id."""
        self.stats[pid] = process_stat(pid, start)
        self.namespaces[pid] = netns
        for fd, inode in enumerate(inodes, 3):
            held = self.index.sockets.get(inode, ())
            self.index.sockets[inode] = (*held, FdRef(pid, fd, True, True))
        return self.stats[pid].id

    def end(self, pid: int) -> None:
        """The process ends."""
        del self.stats[pid]
        for inode, references in list(self.index.sockets.items()):
            self.index.sockets[inode] = tuple(reference for reference in references if reference.pid != pid)
            if not self.index.sockets[inode]:
                del self.index.sockets[inode]

    def processes(self) -> dict[int, ProcStat]:
        return self.stats

    def namespace(self, pid: int, kind: str) -> int:
        assert kind == "net"
        return _value(self.namespaces[pid])

    def own_namespace(self, kind: str) -> int:
        return _value(self.own)

    def net(self, pid: int | str, name: str) -> bytes:
        self.opened.append((pid, name))
        found = self.files.get((pid, name), FileNotFoundError(errno.ENOENT, "no such file"))
        if isinstance(found, OSError):
            raise found
        return found

    def text(self, name: str) -> str:
        if name not in self.texts:
            raise FileNotFoundError(errno.ENOENT, name)
        return self.texts[name]

    def fds(self, verify_sockets: set[int] | None = None) -> FdIndex:
        for inode in verify_sockets or ():
            if inode in self.hidden:
                self.index.sockets[inode] = self.hidden[inode]
        return self.index


def _value(found: int | OSError) -> int:
    if isinstance(found, OSError):
        raise found
    return found


def process_stat(pid: int, start: int = 100) -> ProcStat:
    """A process as /proc/PID/stat has it; everything not asked for is 0."""
    fields = ["S", *["0"] * 50]
    fields[19] = str(start)
    return parse_stat(f"{pid} (p{pid}) {' '.join(fields)}".encode())


class FakeNetlink:
    """Netlink for the collectors: tables as given."""

    def __init__(self) -> None:
        self.inet = InetTable()
        self.unix = UnixTable()
        self.nat: dict[Any, Any] = {}
        self.nat_asked = 0
        self.time_wait_limit: int | None = None

    def inet_sockets(self, time_wait_limit: int = 0) -> InetTable:
        self.time_wait_limit = time_wait_limit
        return self.inet

    def unix_sockets(self) -> UnixTable:
        return self.unix

    def translations(self) -> dict[Any, Any]:
        self.nat_asked += 1
        return self.nat


class FakeWorld:
    """The sources that the socket collectors use."""

    def __init__(self) -> None:
        self.procfs = FakeProcFs()
        self.netlink = FakeNetlink()
        self.clock = ManualClock()


def inet(
    local: tuple[str, int],
    remote: tuple[str, int] | None = None,
    *,
    state: str = "",
    protocol: str = "tcp",
    netns: int = 0,
    inode: int = 0,
    uid: int = 0,
    recv_queue: int = 0,
    send_queue: int = 0,
    tcp: TcpInfo | None = None,
    drops: int | None = 0,
) -> InetSocket:
    """One internet socket as Netlink gives it."""
    bound = "LISTEN" if protocol == "tcp" else "UNCONN"
    made = inet_socket(
        netns,
        protocol,
        local,
        remote or ("", 0),
        TCP_STATES.index("ESTABLISHED"),
        inode,
        uid,
        inode,
        (recv_queue, send_queue),
        (None, 87040, drops),
        tcp,
    )
    return replace(made, state=state or ("ESTABLISHED" if remote else bound))


def info(
    sent: int | None = 0, received: int | None = 0, *, rtt_us: int = 100, retransmits: int = 0, opened: bool = False,
    receiver_limited_us: int = 0, segments: int = 0,
) -> TcpInfo:  # fmt: skip
    """tcp_info as Netlink gives it."""
    return TcpInfo(rtt_us, 10, retransmits, sent, received, segments, 0, receiver_limited_us, 0, opened)


def unix(inode: int, **fields: Any) -> UnixSocketRecord:
    """One unix socket as Netlink gives it."""
    values: dict[str, Any] = {"netns": 0, "type": "stream", "state": "ESTABLISHED", "path": "", "peer": 0} | fields
    return UnixSocketRecord(inode=inode, **values)
