"""Sockets of every network namespace: raw netlink (inet_diag, unix_diag), /proc/PID/net where there is none."""

from gpuflight.sources.netlink.conntrack import Flow
from gpuflight.sources.netlink.records import (
    InetKey,
    InetSocket,
    InetTable,
    Joined,
    Limit,
    TcpInfo,
    UnixSocketRecord,
    UnixTable,
    endpoint,
    inet_socket,
    socket_id,
)
from gpuflight.sources.netlink.source import Netlink

__all__ = [
    "Flow",
    "InetKey",
    "InetSocket",
    "InetTable",
    "Joined",
    "Limit",
    "Netlink",
    "TcpInfo",
    "UnixSocketRecord",
    "UnixTable",
    "endpoint",
    "inet_socket",
    "socket_id",
]
