"""RDMA resources by process over NETLINK_RDMA (include/uapi/rdma/rdma_netlink.h): what ``rdma resource`` shows.

The kernel only tells of processes in the caller's pid namespace and gives their pids as seen there.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator

from msgspec import Struct

from gpuflight.sources.netlink.wire import HEADER, Channel, Connect, connect
from gpuflight.sources.recording import Tape

NETLINK_RDMA = 20
_NLDEV = 5  # RDMA_NL_NLDEV; RDMA_NL_GET_TYPE(client, op) is client << 10 | op

_GET, _QP_GET, _CM_ID_GET, _MR_GET, _PD_GET = 1, 10, 11, 13, 14
_DEV_INDEX, _DEV_NAME = 1, 2
_QP, _CM_ID, _MR, _PD = 19, 30, 40, 46  # each a table of entries of the next attribute type
_LQPN, _RQPN, _PATH_MIG, _TYPE, _STATE, _PID = 21, 22, 25, 26, 27, 28
_SRC, _DST, _MRLEN, _PDN, _MRN = 33, 34, 45, 60, 62
_TYPE_MASK = 0x3FFF  # less NLA_F_NESTED and NLA_F_NET_BYTEORDER
_ATTRIBUTE = struct.Struct("=HH")

# enum ib_qp_type, enum ib_qp_state, enum ib_mig_state of include/rdma/ib_verbs.h
_QP_TYPES = {0: "SMI", 1: "GSI", 2: "RC", 3: "UC", 4: "UD", 8: "RAW_PACKET", 9: "XRC_INI", 10: "XRC_TGT", 255: "DRIVER"}
_QP_STATES = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")
_MIG_STATES = ("MIGRATED", "REARM", "ARMED")
_AF_INET, _AF_INET6 = 2, 10


class QueuePair(Struct, gc=False):
    """A queue pair. ``pid`` is 0 for one of the kernel; ``remote_qpn`` and ``pdn`` are None where not told."""

    qpn: int
    pid: int
    type: str
    state: str
    remote_qpn: int | None = None
    pdn: int | None = None
    path_mig_state: str = ""


class Connection(Struct, gc=False):
    """Addresses (with ports) of a queue pair that was connected through the connection manager."""

    qpn: int
    source: str
    destination: str


class MemoryRegion(Struct, gc=False):
    """A registered memory region; ``pid`` is 0 for one of the kernel."""

    mrn: int
    pid: int
    length_bytes: int
    pdn: int | None = None


class RdmaNetlink:
    """Asks the kernel for RDMA resources. Every method raises OSError (EPROTONOSUPPORT: no RDMA in this kernel)."""

    def __init__(self, tape: Tape | None = None, connect: Connect = connect) -> None:
        self._tape = tape if tape is not None else Tape()
        self._channel = Channel(connect)

    def close(self) -> None:
        """Close the socket; the next question opens it again."""
        self._channel.close()

    def devices(self) -> dict[str, int]:
        """Index, as the other questions need it, by device name."""
        found = {}
        for fields in _messages(self._dump(_GET, None)):
            name, index = _text(fields.get(_DEV_NAME)), _number(fields.get(_DEV_INDEX))
            if name and index is not None:
                found[name] = index
        return found

    def queue_pairs(self, device: int) -> list[QueuePair]:
        """Queue pairs of a device, the kernel's own included."""
        found = []
        for fields in self._entries(_QP_GET, device, _QP):
            qpn = _number(fields.get(_LQPN))
            if qpn is None:
                continue
            state, mig = _number(fields.get(_STATE)), _number(fields.get(_PATH_MIG))
            kind = _number(fields.get(_TYPE))
            found.append(
                QueuePair(
                    qpn=qpn,
                    pid=_number(fields.get(_PID)) or 0,
                    type=_QP_TYPES.get(kind, str(kind)) if kind is not None else "",
                    state=_name(_QP_STATES, state),
                    remote_qpn=_number(fields.get(_RQPN)) or None,  # 0 until it is connected
                    pdn=_number(fields.get(_PDN)),
                    path_mig_state=_name(_MIG_STATES, mig),
                )
            )
        return found

    def connections(self, device: int) -> list[Connection]:
        """Connected identifiers of the connection manager that have a queue pair."""
        found = []
        for fields in self._entries(_CM_ID_GET, device, _CM_ID):
            qpn = _number(fields.get(_LQPN))
            destination = socket_address(fields.get(_DST, b""))
            if qpn and destination:
                found.append(Connection(qpn, socket_address(fields.get(_SRC, b"")), destination))
        return found

    def memory_regions(self, device: int) -> list[MemoryRegion]:
        """Registered memory regions of a device."""
        found = []
        for fields in self._entries(_MR_GET, device, _MR):
            mrn = _number(fields.get(_MRN))
            if mrn is not None:
                length = _number(fields.get(_MRLEN)) or 0
                found.append(MemoryRegion(mrn, _number(fields.get(_PID)) or 0, length, _number(fields.get(_PDN))))
        return found

    def protection_domains(self, device: int) -> dict[int, int]:
        """pid of the owner (0: the kernel) by protection domain number."""
        found = {}
        for fields in self._entries(_PD_GET, device, _PD):
            pdn = _number(fields.get(_PDN))
            if pdn is not None:
                found[pdn] = _number(fields.get(_PID)) or 0
        return found

    def _entries(self, operation: int, device: int, table: int) -> Iterator[dict[int, bytes]]:
        for fields in _messages(self._dump(operation, device)):
            for kind, value in _attributes(fields.get(table, b"")):
                if kind == table + 1:
                    yield dict(_attributes(value))

    def _dump(self, operation: int, device: int | None) -> bytes:
        request = b"" if device is None else struct.pack("=HHI", 8, _DEV_INDEX, device)
        key = f"rdma {operation}" + ("" if device is None else f" {device}")
        return self._tape.ask(
            "netlink", key, lambda: self._channel.dump(NETLINK_RDMA, _NLDEV << 10 | operation, request)
        )


def _messages(data: bytes) -> Iterator[dict[int, bytes]]:
    """Attributes of each message of a dump; there is no fixed part behind the header."""
    offset, end = 0, len(data)
    while offset + HEADER.size <= end:
        length, kind, _, _, _ = HEADER.unpack_from(data, offset)
        if length < HEADER.size or offset + length > end:
            return
        if kind >> 10 == _NLDEV:
            yield dict(_attributes(data[offset + HEADER.size : offset + length]))
        offset += (length + 3) & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset, end = 0, len(data)
    while offset + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < 4 or offset + length > end:
            return
        yield kind & _TYPE_MASK, data[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def _number(raw: bytes | None) -> int | None:
    """An integer attribute of 1, 2, 4 or 8 bytes in the machine's byte order."""
    if raw is None or len(raw) not in (1, 2, 4, 8):
        return None
    return int(struct.unpack("=" + {1: "B", 2: "H", 4: "I", 8: "Q"}[len(raw)], raw)[0])


def _text(raw: bytes | None) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace") if raw else ""


def _name(names: tuple[str, ...], number: int | None) -> str:
    if number is None:
        return ""
    return names[number] if number < len(names) else str(number)


def socket_address(raw: bytes) -> str:
    """``10.0.0.1:4791`` or ``[fe80::1]:4791`` of a struct sockaddr_storage; empty for other families."""
    if len(raw) < 8:
        return ""
    (family,) = struct.unpack_from("=H", raw)
    (port,) = struct.unpack_from(">H", raw, 2)
    if family == _AF_INET:
        return f"{ipaddress.IPv4Address(raw[4:8])}:{port}"
    if family == _AF_INET6 and len(raw) >= 24:
        return f"[{ipaddress.IPv6Address(raw[8:24])}]:{port}"
    return ""
