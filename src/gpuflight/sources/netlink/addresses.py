"""The addresses of a network namespace from NETLINK_ROUTE (RTM_GETADDR, include/uapi/linux/if_addr.h)."""

from __future__ import annotations

import functools
import socket
import struct

from gpuflight.sources.netlink.wire import HEADER

RTM_GETADDR = 22
_RTM_NEWADDR = 20
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_MAPPED = b"\0" * 10 + b"\xff\xff"
_BODY = 16
_ATTRIBUTES = _BODY + 8


@functools.lru_cache(maxsize=4096)
def address_text(family: int, raw: bytes) -> str:
    """An address as the kernel's structures have it (16 bytes, of IPv4 the first 4) as text; IPv4 in IPv6 as IPv4."""
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, raw[:4])
    if raw.startswith(_MAPPED):
        return socket.inet_ntop(socket.AF_INET, raw[12:])
    return socket.inet_ntop(socket.AF_INET6, raw)


def request() -> bytes:
    """struct ifaddrmsg for the addresses of every family."""
    return struct.pack("=BBBBI", socket.AF_UNSPEC, 0, 0, 0, 0)


def parse(data: bytes) -> frozenset[str]:
    """The addresses in a dump. On a point-to-point link IFA_ADDRESS is the far end and IFA_LOCAL is ours."""
    found: set[str] = set()
    offset, end = 0, len(data)
    while offset + _BODY <= end:
        length, kind, _, _, _ = HEADER.unpack_from(data, offset)
        if length < _BODY or offset + length > end:
            break
        if kind == _RTM_NEWADDR and length >= _ATTRIBUTES:
            values: dict[int, bytes] = {}
            at = offset + _ATTRIBUTES
            while at + 4 <= offset + length:
                size, name = struct.unpack_from("=HH", data, at)
                if size < 4 or at + size > offset + length:
                    break
                values[name] = data[at + 4 : at + size]
                at += (size + 3) & ~3
            raw = values.get(_IFA_LOCAL, values.get(_IFA_ADDRESS, b""))
            if len(raw) in (4, 16):
                found.add(socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw))
        offset += (length + 3) & ~3
    return frozenset(found)
