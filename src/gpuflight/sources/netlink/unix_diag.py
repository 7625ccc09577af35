"""unix_diag: unix-domain sockets with their peers from NETLINK_SOCK_DIAG (include/uapi/linux/unix_diag.h)."""

from __future__ import annotations

import socket
import struct

from gpuflight.sources.netlink.records import UnixSocketRecord
from gpuflight.sources.netlink.wire import HEADER, NLMSG_DONE

SOCK_DIAG_BY_FAMILY = 20

_NAME, _PEER, _ICONS, _RQLEN, _UID = 0, 2, 3, 4, 7
_SHOW = 1 << 0 | 1 << 2 | 1 << 3 | 1 << 4 | 1 << 6  # NAME, PEER, ICONS, RQLEN, UID
_BODY = 16
_ATTRIBUTES = _BODY + 16

TYPES = {1: "stream", 2: "dgram", 5: "seqpacket"}
STATES = {1: "ESTABLISHED", 2: "SYN_SENT", 7: "UNCONN", 10: "LISTEN"}


def request() -> bytes:
    """struct unix_diag_req for every unix socket of the namespace."""
    return struct.pack("=BBHIII2I", socket.AF_UNIX, 0, 0, 0xFFFF_FFFF, 0, _SHOW, 0, 0)


class UnixParser:
    """Turns the dumps of one namespace into records, round after round; a message that is byte for byte as last time
    gives the record of last time."""

    def __init__(self, netns: int) -> None:
        self._netns = netns
        self._known: dict[bytes, UnixSocketRecord] = {}
        self.garbage = 0
        """Messages of the last dump that made no sense."""

    def parse(self, data: bytes) -> list[UnixSocketRecord]:
        """The sockets in a dump; messages that are cut short or make no sense are counted in ``garbage``."""
        self.garbage = 0
        fresh: dict[bytes, UnixSocketRecord] = {}
        known, header = self._known, HEADER.unpack_from
        offset, end = 0, len(data)
        while offset + _BODY <= end:
            length, kind, _, _, _ = header(data, offset)
            if length < _BODY or offset + length > end:
                self.garbage += 1
                break
            if kind == SOCK_DIAG_BY_FAMILY and length >= _ATTRIBUTES:
                body = data[offset + _BODY : offset + length]
                record = known.get(body)
                if record is None:
                    try:
                        record = _record(body, self._netns)
                    except (struct.error, IndexError):
                        self.garbage += 1
                        offset += (length + 3) & ~3
                        continue
                fresh[body] = record
            elif kind == NLMSG_DONE:
                break
            else:
                self.garbage += 1
            offset += (length + 3) & ~3
        self._known = fresh
        return list(fresh.values())


def _record(body: bytes, netns: int) -> UnixSocketRecord:
    _, type_number, state_number, inode = struct.unpack_from("=BBBxI", body)
    path, peer = "", 0
    pending: tuple[int, ...] = ()
    recv_queue: int | None = None
    send_queue: int | None = None
    uid: int | None = None
    at = 16
    while at + 4 <= len(body):
        size, kind = struct.unpack_from("=HH", body, at)
        if size < 4 or at + size > len(body):
            raise IndexError("attribute runs over the end")
        value = body[at + 4 : at + size]
        if kind == _NAME:
            path = name_text(value)
        elif kind == _PEER:
            (peer,) = struct.unpack_from("=I", value)
        elif kind == _ICONS:
            inodes = struct.unpack(f"={len(value) // 4}I", value[: len(value) // 4 * 4])
            pending = tuple(number for number in inodes if number)
        elif kind == _RQLEN:
            recv_queue, send_queue = struct.unpack_from("=II", value)
        elif kind == _UID:
            (uid,) = struct.unpack_from("=I", value)
        at += (size + 3) & ~3
    return UnixSocketRecord(
        inode=inode,
        netns=netns,
        type=TYPES.get(type_number, f"type_{type_number}"),
        state=STATES.get(state_number, f"STATE_{state_number}"),
        path=path,
        peer=peer,
        pending=pending,
        recv_queue=recv_queue,
        send_queue=send_queue,
        uid=uid,
    )


def name_text(raw: bytes) -> str:
    """sun_path as text: an abstract name's leading NUL, and any other within it, as ``@`` (as ``ss`` and /proc do)."""
    raw = raw.replace(b"\0", b"@") if raw.startswith(b"\0") else raw.split(b"\0", 1)[0]
    return raw.decode("utf-8", "backslashreplace")
