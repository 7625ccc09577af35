"""inet_diag: internet sockets with tcp_info from NETLINK_SOCK_DIAG (include/uapi/linux/inet_diag.h).

Thousands of sockets are read every round and few of them change, so the parser does as little as it can for a socket
that is as it was: one ``unpack_from`` that cuts out only what stands still while a connection is idle (timers and the
``last_…`` ages of tcp_info are skipped), one lookup, one comparison; then the record of last time is given again.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, NamedTuple

from gpuflight.sources.netlink.records import InetSocket, TcpInfo, inet_socket
from gpuflight.sources.netlink.wire import NLMSG_DONE

SOCK_DIAG_BY_FAMILY = 20
PROTOCOLS = {"tcp": 6, "udp": 17, "udplite": 136}

_INFO = 2
_SKMEMINFO = 7
_EXTENSIONS = 1 << (_INFO - 1) | 1 << (_SKMEMINFO - 1)

_TIME_WAIT = 6
# Without SYN_RECV (3, 12): half-open requests have no owner, and a SYN flood must not become a picture.
_STATES = sum(1 << state for state in (1, 2, 4, 5, 7, 8, 9, 10, 11))

_NO_FIN_SENT = (1, 8)  # ESTABLISHED, CLOSE_WAIT

_NOTHING = struct.Struct("")
_LENGTH_KIND = struct.Struct("=IH")  # of nlmsghdr

_BODY = 16  # of the message: after nlmsghdr
_ATTRIBUTES = _BODY + 72  # after struct inet_diag_msg
_TCP_INFO_STILL = 60  # of tcp_info: everything before tcpi_pmtu either ages by itself or is not reported

_IDENTITY = struct.Struct(">HH16s16s")
_QUEUES = struct.Struct("=IIII")
_MEMORY = struct.Struct("=IIIIIIIII")
_TCP_BASE = struct.Struct("=8xI8xI16xI")  # from tcpi_pmtu: rtt, snd_cwnd, total_retrans
_TCP_BYTES = struct.Struct("=60xQQ")  # bytes_acked, bytes_received (Linux 4.1)
_TCP_SEGMENTS = struct.Struct("=96xI8xQQQ")  # data_segs_out, busy, rwnd_limited, sndbuf_limited (Linux 4.10)
_TCP_WHOLE = struct.Struct("=8xI8xI16xI16xQQ20xI8xQQQ8xQQ")  # these and bytes_sent, bytes_retrans (Linux 4.19)
_MAPPED = b"\0" * 10 + b"\xff\xff"


def request(family: int, protocol: str, *, time_wait: bool) -> bytes:
    """struct inet_diag_req_v2 for every socket of a family and protocol."""
    states = _STATES | (1 << _TIME_WAIT if time_wait else 0)
    return struct.pack("=BBBBI48x", family, PROTOCOLS[protocol], _EXTENSIONS, 0, states)


_Fields = tuple[Any, ...]
"""Of a message: length, type, family and state, identity, queues, then an attribute's head and value, and another's."""


class _Layout(NamedTuple):
    """How messages of one length are cut. ``info`` and ``memory`` are the places of the values in the fields, 0 for
    none; ``first`` and ``second`` what the heads must be; ``step`` is how far away the next message begins."""

    cut: struct.Struct
    step: int
    first: bytes
    second: bytes
    info: int
    memory: int


class InetParser:
    """Turns the dumps of one (namespace, family, protocol) into records, round after round."""

    def __init__(self, netns: int, protocol: str) -> None:
        self._netns = netns
        self._protocol = protocol
        self._known: dict[bytes, tuple[_Fields, InetSocket]] = {}
        self._layouts: dict[int, _Layout] = {}
        self._addresses: dict[bytes, str] = {}
        self.garbage = 0
        """Messages of the last dump that made no sense."""
        self.time_wait_count = 0
        """Sockets in TIME_WAIT of the last dump beyond the limit: counted, not returned."""

    def parse(self, data: bytes, time_wait_limit: int = 0) -> list[InetSocket]:
        """The sockets in a dump; messages that are cut short or make no sense are counted in ``garbage``."""
        self.garbage = self.time_wait_count = 0
        time_wait_left = time_wait_limit
        sockets: list[InetSocket] = []
        known, layouts, header = self._known, self._layouts, _LENGTH_KIND.unpack_from
        get, append = known.get, sockets.append
        offset, end = 0, len(data)
        cut, step = _NOTHING.unpack_from, 0
        while offset + _BODY <= end:
            # The next message is mostly cut like the one before, and mostly what it was: the length, type and heads in
            # ``fields`` are part of the comparison, so that a wrong guess cannot pass.
            if 0 < step <= end - offset:
                fields = cut(data, offset)
                entry = get(fields[3])
                if entry is not None and entry[0] == fields:
                    append(entry[1])
                    offset += step
                    continue
            length, kind = header(data, offset)
            if length < _BODY or offset + length > end:
                self.garbage += 1
                break
            if kind == SOCK_DIAG_BY_FAMILY and length >= _ATTRIBUTES:
                waiting = data[offset + 17] == _TIME_WAIT
                if waiting:
                    if time_wait_left <= 0:
                        self.time_wait_count += 1
                        offset += (length + 3) & ~3
                        continue
                    time_wait_left -= 1
                layout = layouts.get(length)
                if layout is None:
                    layout = layouts[length] = _learn(data, offset, length)
                fields = layout.cut.unpack_from(data, offset)
                if fields[5] != layout.first or fields[7] != layout.second:
                    layout = layouts[length] = _learn(data, offset, length)
                    fields = layout.cut.unpack_from(data, offset)
                if not waiting:  # those are counted one by one
                    cut, step = layout.cut.unpack_from, layout.step
                identity = fields[3]
                entry = get(identity)
                if entry is None or entry[0] != fields:
                    try:
                        entry = (fields, self._record(fields, layout))
                    except (struct.error, ValueError, IndexError):
                        self.garbage += 1
                        offset += (length + 3) & ~3
                        continue
                    known[identity] = entry
                append(entry[1])
            elif kind == NLMSG_DONE:
                break
            else:
                self.garbage += 1
            offset += (length + 3) & ~3
        if len(known) > len(sockets):  # some are gone
            alive = set(map(id, sockets))
            self._known = {identity: entry for identity, entry in known.items() if id(entry[1]) in alive}
        if len(layouts) > 64:
            layouts.clear()
        if len(self._addresses) > 4 * len(sockets) + 1024:
            self._addresses.clear()
        return sockets

    def _record(self, fields: _Fields, layout: _Layout) -> InetSocket:
        family, state = fields[2]
        identity = fields[3]
        local_port, remote_port, local, remote = _IDENTITY.unpack_from(identity)
        recv_queue, send_queue, uid, inode = _QUEUES.unpack(fields[4])
        memory: tuple[int | None, int | None, int | None] = (None, None, None)
        if layout.memory:
            raw = _MEMORY.unpack_from(fields[layout.memory])
            memory = (raw[1], raw[3], raw[8])
        return inet_socket(
            self._netns,
            self._protocol,
            (self._address(family, local), local_port),
            (self._address(family, remote), remote_port),
            state,
            inode,
            uid,
            int.from_bytes(identity[40:48], "little"),
            (recv_queue, send_queue),
            memory,
            _tcp_info(fields[layout.info], state) if layout.info and remote_port else None,
        )

    def _address(self, family: int, raw: bytes) -> str:
        key = raw if family == socket.AF_INET6 else raw[:4]
        text = self._addresses.get(key)
        if text is None:
            if len(key) == 4:
                text = socket.inet_ntop(socket.AF_INET, key)
            elif key.startswith(_MAPPED):
                text = socket.inet_ntop(socket.AF_INET, key[12:])
            else:
                text = socket.inet_ntop(socket.AF_INET6, key)
            self._addresses[key] = text
        return text


def _learn(data: bytes, offset: int, length: int) -> _Layout:
    """Where INFO and SKMEMINFO lie in this message. The kernel writes the attributes of like sockets in like order."""
    found: list[tuple[int, int, int]] = []  # (offset in the message, attribute length, type)
    at = _ATTRIBUTES
    while at + 4 <= length:
        size, kind = struct.unpack_from("=HH", data, offset + at)
        if size < 4 or at + size > length:
            break
        if (kind == _INFO and size >= 4 + 104) or (kind == _SKMEMINFO and size >= 4 + _MEMORY.size):
            found.append((at, size, kind))
        at += (size + 3) & ~3
    format_ = ["=IH10x2s2x48s4x16s"]
    position = _ATTRIBUTES
    heads: list[bytes] = []
    places = {_INFO: 0, _SKMEMINFO: 0}
    for at, size, kind in found[:2]:
        skipped = _TCP_INFO_STILL if kind == _INFO else 0
        kept = size - 4 - skipped
        format_.append(f"{at - position}x4s{skipped}x{kept}s")
        places[kind] = 6 + 2 * len(heads)
        heads.append(data[offset + at : offset + at + 4])
        position = at + size
    while len(heads) < 2:
        format_.append("0s0s")
        heads.append(b"")
    if position < (length + 3) & ~3:
        format_.append(f"{((length + 3) & ~3) - position}x")
    cut = struct.Struct("".join(format_))
    return _Layout(cut, cut.size, heads[0], heads[1], places[_INFO], places[_SKMEMINFO])


def _tcp_info(still: bytes, state: int) -> TcpInfo:
    """tcp_info from tcpi_pmtu on; it grows with the kernel, and never changes else."""
    if len(still) >= _TCP_WHOLE.size:
        (rtt_us, window, retransmits, acked, received, segments,
         busy, receiver_limited, buffer_limited, all_sent, resent) = _TCP_WHOLE.unpack_from(still)  # fmt: skip
        sent = max(all_sent - resent, 0)
        opened = acked > sent and state in _NO_FIN_SENT
        return TcpInfo(
            rtt_us, window, retransmits, sent, received, segments, busy, receiver_limited, buffer_limited, opened
        )
    rtt_us, window, retransmits = _TCP_BASE.unpack_from(still)
    acked = received = segments = busy = receiver_limited = buffer_limited = None
    if len(still) >= _TCP_BYTES.size:
        acked, received = _TCP_BYTES.unpack_from(still)
    if len(still) >= _TCP_SEGMENTS.size:
        segments, busy, receiver_limited, buffer_limited = _TCP_SEGMENTS.unpack_from(still)
    return TcpInfo(rtt_us, window, retransmits, acked, received, segments, busy, receiver_limited, buffer_limited)
