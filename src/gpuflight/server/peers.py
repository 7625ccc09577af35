"""Who is at the other end of a unix socket, and what that user may.

The kernel says which user connected (SO_PEERCRED), so no secret is needed: root and the user of the server are admins,
others have the role that ``server.socket_users`` and ``server.socket_groups`` give them, and nobody else has one.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import socket
import struct
from array import array
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from gpuflight.errors import ConfigError
from gpuflight.server.tokens import Role

if TYPE_CHECKING:
    from gpuflight.settings.model import Server

PEER_KEY = "gpuflight.peer"
"""Where the scope of a request over a unix socket has its Peer."""

_PEERCRED = struct.Struct("iII")  # struct ucred: pid_t, uid_t, gid_t
_SO_PEERGROUPS = 59  # asm-generic/socket.h, Linux 4.13; not in the module socket
_MAX_GROUPS = 65_536  # NGROUPS_MAX


class Peer(Struct, frozen=True):
    """A process that connected, as it was when it did. ``groups`` are the supplementary ones and ``gid``."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int]


def peer_of(transport: Any) -> Peer | None:
    """The peer of a connection; None if it is not over a unix socket."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    pid, uid, gid = _PEERCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
    groups = array("I")
    with contextlib.suppress(OSError):  # an older kernel: then the first group alone counts
        groups.frombytes(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS))
    return Peer(pid, uid, gid, frozenset((gid, *groups)))


class PeerRoles:
    """Roles by user and group. Raises ConfigError for names that this machine does not know."""

    def __init__(self, settings: Server) -> None:
        self._users = {_user(name): Role.of(role) for name, role in settings.socket_users.items()}
        self._groups = {_group(name): Role.of(role) for name, role in settings.socket_groups.items()}
        for admin in (0, os.geteuid()):
            self._users[admin] = Role.ADMIN

    @property
    def for_others(self) -> bool:
        """Whether anybody but root and the user of the server may come in."""
        return len(self._users) > len({0, os.geteuid()}) or bool(self._groups)

    def role_of(self, peer: Peer) -> Role | None:
        """What a peer may: what its user is given, else the most that one of its groups is; None: nothing."""
        own = self._users.get(peer.uid)
        if own is not None:
            return own
        return max((role for group, role in self._groups.items() if group in peer.groups), default=None)


def _user(name: str) -> int:
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        raise ConfigError(f"server.socket_users: there is no user {name!r} on this machine") from None


def _group(name: str) -> int:
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(f"server.socket_groups: there is no group {name!r} on this machine") from None
