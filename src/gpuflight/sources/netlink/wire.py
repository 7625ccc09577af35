"""The netlink wire: asking the kernel for one dump, and doing so inside other network namespaces.

A netlink socket stays in the network namespace in which it was made, so a foreign namespace is entered only by a
short-lived thread that makes the socket there; nothing else of the process ever changes namespace.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import socket
import struct
import threading
from collections.abc import Callable
from typing import Protocol

NETLINK_ROUTE = 0
NETLINK_SOCK_DIAG = 4

NLMSG_ERROR = 2
NLMSG_DONE = 3
NLM_F_REQUEST = 0x001
NLM_F_DUMP_INTR = 0x010
NLM_F_DUMP = 0x300

CLONE_NEWNET = 0x4000_0000

HEADER = struct.Struct("=IHHII")
"""nlmsghdr: length, type, flags, sequence, port."""

_DONE = struct.Struct("=IHHIIi")
# The kernel never makes a dump message longer than 32 KiB (SKB_WITH_OVERHEAD(32768)), so this never truncates.
_RECEIVE_BYTES = 65_536
_TIMEOUT_S = 1
_ATTEMPTS = 3
_RETRIED = {errno.ENOBUFS: "netlink overruns", errno.EBUSY: "netlink busy replies"}


class NetlinkSocket(Protocol):
    """What is used of ``socket.socket``; tests hand in their own."""

    def send(self, data: bytes, /) -> int: ...

    def recv(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


Connect = Callable[[int], NetlinkSocket]
"""Makes a netlink socket of a protocol (NETLINK_…) in the calling thread's network namespace. Raises OSError."""


def connect(protocol: int) -> NetlinkSocket:
    """A real netlink socket; a kernel that does not answer within 1 s gives EAGAIN."""
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
    try:
        # As a socket option, not settimeout(): that would add a poll() to every recv().
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", _TIMEOUT_S, 0))
    except OSError:
        made.close()
        raise
    return made


class Channel:
    """Dumps from one network namespace, each over a socket that is replaced after a fault.

    ``losses`` counts what had to be asked again, or was taken although incomplete (plural nouns).
    """

    def __init__(self, reopen: Connect, opened: dict[int, NetlinkSocket] | None = None) -> None:
        self._reopen = reopen
        self._sockets = opened if opened is not None else {}
        self.losses: dict[str, int] = {}

    def dump(self, protocol: int, message_type: int, request: bytes) -> bytes:
        """Every message of one dump, headers included, up to and with NLMSG_DONE.

        Asked again after an overrun (ENOBUFS), a timeout, or a table that changed under the dump (NLM_F_DUMP_INTR); an
        interrupted dump is taken as it is after the last attempt, and counted. Raises OSError.
        """
        for attempt in range(_ATTEMPTS):
            last = attempt == _ATTEMPTS - 1
            try:
                data, interrupted = self._ask(protocol, message_type, request)
            except OSError as error:
                self._drop(protocol)  # what is left in its queue belongs to the dump that failed
                what = _RETRIED.get(error.errno or 0)
                if what is None:
                    raise
                self._lose(what)
                if last:
                    raise
                continue
            if not interrupted:
                return data
            if last:
                self._lose("interrupted socket dumps")
                return data
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close the sockets; they would keep their network namespace alive."""
        for protocol in list(self._sockets):
            self._drop(protocol)

    def _ask(self, protocol: int, message_type: int, request: bytes) -> tuple[bytes, bool]:
        link = self._sockets.get(protocol)
        if link is None:
            link = self._sockets[protocol] = self._reopen(protocol)
        sequence = random.getrandbits(31)
        link.send(
            HEADER.pack(HEADER.size + len(request), message_type, NLM_F_REQUEST | NLM_F_DUMP, sequence, 0) + request
        )
        parts: list[bytes] = []
        interrupted = False
        while True:
            part = link.recv(_RECEIVE_BYTES)
            if len(part) < HEADER.size:
                raise OSError(errno.EBADMSG, "netlink message cut short")
            _, kind, flags, answered, _ = HEADER.unpack_from(part)
            if answered != sequence:
                continue  # the rest of an older answer
            if kind == NLMSG_ERROR:
                raise _error(part, 0)
            interrupted = interrupted or bool(flags & NLM_F_DUMP_INTR)
            parts.append(part)
            # NLMSG_DONE is the last message of the last part; looking there saves walking each part twice.
            end = len(part) - _DONE.size
            if end < 0:
                continue
            length, kind, flags, answered, _, status = _DONE.unpack_from(part, end)
            if kind == NLMSG_DONE and length == _DONE.size and answered == sequence:
                if status < 0:
                    raise _error(part, end)
                return (parts[0] if len(parts) == 1 else b"".join(parts)), interrupted or bool(flags & NLM_F_DUMP_INTR)

    def _drop(self, protocol: int) -> None:
        link = self._sockets.pop(protocol, None)
        if link is not None:
            link.close()

    def _lose(self, what: str) -> None:
        self.losses[what] = self.losses.get(what, 0) + 1


def open_in_namespaces(
    places: dict[int, list[str]], connect: Connect, protocols: tuple[int, ...]
) -> dict[int, Channel | OSError]:
    """A channel per network namespace (by inode), made in one thread that enters each in turn and then ends.

    ``places`` gives for each namespace the paths of ``…/ns/net`` files through which it can be entered, best first; a
    path that leads to another namespace by now (pid reused) is passed over. What stands in the way of a namespace is
    returned in its place: EPERM without CAP_SYS_ADMIN, ENOENT when it is gone.
    """
    answer: dict[int, Channel | OSError] = {}

    def work() -> None:
        for namespace, paths in places.items():
            answer[namespace] = _open_in(namespace, paths, connect, protocols)

    thread = threading.Thread(target=work, name="gpuflight-netns", daemon=True)
    thread.start()
    thread.join()
    return answer


def _open_in(namespace: int, paths: list[str], connect: Connect, protocols: tuple[int, ...]) -> Channel | OSError:
    failure = OSError(errno.ENOENT, "the network namespace is gone")
    for path in paths:
        opened: dict[int, NetlinkSocket] = {}
        try:
            if not enter(namespace, path):
                continue
            for protocol in protocols:
                opened[protocol] = connect(protocol)
        except OSError as error:
            failure = error
            for link in opened.values():
                link.close()
            continue
        return Channel(_reopen_in(namespace, path, connect), opened)
    return failure


def _reopen_in(namespace: int, path: str, connect: Connect) -> Connect:
    def reopen(protocol: int) -> NetlinkSocket:
        made: list[NetlinkSocket | OSError] = []

        def work() -> None:
            channel = _open_in(namespace, [path], connect, (protocol,))
            made.append(channel if isinstance(channel, OSError) else channel._sockets[protocol])

        thread = threading.Thread(target=work, name="gpuflight-netns", daemon=True)
        thread.start()
        thread.join()
        if isinstance(made[0], OSError):
            raise made[0]
        return made[0]

    return reopen


def enter(namespace: int, path: str) -> bool:
    """Move the calling thread, which is to end soon, into a network namespace through its ``…/ns/net`` file; False if
    that leads to another namespace by now. Raises OSError: EPERM without CAP_SYS_ADMIN."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_ino != namespace:
            return False
        _setns(descriptor, CLONE_NEWNET)
        return True
    finally:
        os.close(descriptor)


def _setns(descriptor: int, kind: int) -> None:
    if hasattr(os, "setns"):  # Python 3.12
        os.setns(descriptor, kind)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, kind) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _error(part: bytes, offset: int) -> OSError:
    if len(part) < offset + HEADER.size + 4:
        return OSError(errno.EBADMSG, "netlink error message cut short")
    (status,) = struct.unpack_from("=i", part, offset + HEADER.size)
    code = -status if status < 0 else errno.EPROTO
    return OSError(code, os.strerror(code))
