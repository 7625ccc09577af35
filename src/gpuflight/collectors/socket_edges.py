"""A connection as a ConnectTo edge: its facts, its counters from the client's view, its rates."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from gpuflight.collectors.rates import FIRST_READING
from gpuflight.collectors.socket_joins import Connection, is_closed
from gpuflight.graph import Metric, edges
from gpuflight.sources.netlink import InetSocket, TcpInfo

_RATES = ("bytes_sent", "bytes_received", "retransmits", "segments_sent")
_NO_NETLINK = "the kernel was not asked over netlink, and /proc/net does not say"
_NO_INFO = {"rtt_ms": _NO_NETLINK, "retransmits_count": _NO_NETLINK, "bytes_sent_count": _NO_NETLINK,
            "bytes_received_count": _NO_NETLINK}  # fmt: skip
_FIRST = {f"{name}_per_s": FIRST_READING for name in _RATES}
_NO_RTT = "no round trip was measured yet"


class Counters(Struct, gc=False):
    """The counters of a connection at one time; None where the kernel is too old or an end is not here."""

    time_s: float
    bytes_sent: int | None
    bytes_received: int | None
    retransmits: int
    segments: int | None
    receiver_limited_us: tuple[int | None, int | None]
    buffer_limited_us: tuple[int | None, int | None]


def read_counters(connection: Connection, now_s: float) -> Counters | None:
    """Counters from the client's view; None without tcp_info.

    Both ends of a connection count the same bytes. The client's own count stands if the client is on this host, else
    the server's with the directions turned round; they are never added. What each end counts of its own doing
    (retransmissions, data segments) is added up over the ends that are here.
    """
    client, server = _info(connection.client), _info(connection.server)
    if client is not None:
        sent, received = client.bytes_sent, client.bytes_received
    elif server is not None:
        sent, received = server.bytes_received, server.bytes_sent
    else:
        return None
    ends = [info for info in (client, server) if info is not None]
    segments = [info.segments_sent for info in ends if info.segments_sent is not None]
    return Counters(
        now_s,
        sent,
        received,
        sum(info.retransmits for info in ends),
        sum(segments) if segments else None,
        (client and client.receiver_limited_us, server and server.receiver_limited_us),  # type: ignore[arg-type]
        (client and client.send_buffer_limited_us, server and server.send_buffer_limited_us),  # type: ignore[arg-type]
    )


def connect_to(
    source: str,
    target: str,
    connection: Connection,
    now: Counters | None,
    before: Counters | None,
    processes: tuple[list[str] | None, list[str] | None],
) -> edges.ConnectTo:
    """The edge of a connection. ``before`` are its counters of an earlier round, None at first sight.

    attributes: state (the client's, else the server's), peer_state if the server's differs; half, nat, ended if so;
    direction ``guessed`` if only the port numbers tell who opened it; source_processes, target_processes if an endpoint
    is shared by processes of which only these hold this connection.

    metrics: rtt_ms (smoothed, as the client measures it, else the server); bytes and rates as the client sees them;
    retransmits_count and segments_sent_count of the ends that are here; congestion_window_segments;
    receiver_limited_pct and send_buffer_limited_pct (time over the round in which the end that suffered more could not
    send because of the other's window, or of its own buffer); send_queue_bytes, recv_queue_bytes and send_buffer_bytes
    of the client, peer_… of the server. Counts are since the connection opened.
    """
    metrics: dict[str, Metric] = {}
    unknown: dict[str, str] | None = None
    client, server = connection.client, connection.server
    _queues(metrics, client, "")
    if server is not None and server.remote:  # else its queue is filled by all of its clients
        _queues(metrics, server, "peer_")
    attributes = _attributes(connection, processes)
    if now is not None:
        unknown = _tcp_metrics(metrics, connection, now, before)
    elif (client or server).protocol == "tcp" and "ended" not in attributes:  # type: ignore[union-attr]
        unknown = _NO_INFO
    return edges.ConnectTo(source, target, attributes, metrics, unknown)


def _attributes(connection: Connection, processes: tuple[list[str] | None, list[str] | None]) -> dict[str, Any]:
    client, server = connection.client, connection.server
    first = client if client is not None else server
    assert first is not None  # noqa: S101 - a connection has an end
    attributes: dict[str, Any] = {"state": first.state}
    if all(is_closed(end) for end in (client, server) if end is not None):
        attributes["ended"] = True
    elif client is None or server is None:
        attributes["half"] = True
    elif server.remote and server.state != first.state:
        attributes["peer_state"] = server.state
    if connection.nat:
        attributes["nat"] = True
    if not connection.sure:
        attributes["direction"] = "guessed"
    for name, owners in zip(("source_processes", "target_processes"), processes, strict=True):
        if owners is not None:
            attributes[name] = owners
    return attributes


def _queues(metrics: dict[str, Metric], socket: InetSocket | None, prefix: str) -> None:
    if socket is None or socket.state == "TIME_WAIT":
        return
    metrics[prefix + "send_queue_bytes"] = socket.send_queue
    metrics[prefix + "recv_queue_bytes"] = socket.recv_queue
    if socket.send_buffer_bytes is not None:
        metrics[prefix + "send_buffer_bytes"] = socket.send_buffer_bytes


def _tcp_metrics(
    metrics: dict[str, Metric], connection: Connection, now: Counters, before: Counters | None
) -> dict[str, str] | None:
    unknown: dict[str, str] | None = None
    info = _info(connection.client) or _info(connection.server)
    assert info is not None  # noqa: S101 - there are counters
    if info.rtt_us:
        metrics["rtt_ms"] = info.rtt_us / 1000
    else:
        unknown = {"rtt_ms": _NO_RTT}
    metrics["congestion_window_segments"] = info.congestion_window_segments
    metrics["retransmits_count"] = now.retransmits
    for name, value in (
        ("bytes_sent_count", now.bytes_sent),
        ("bytes_received_count", now.bytes_received),
        ("segments_sent_count", now.segments),
    ):
        if value is None:
            unknown = {**(unknown or {}), name: "this kernel's tcp_info does not have it"}
        else:
            metrics[name] = value
    elapsed_s = now.time_s - before.time_s if before is not None else 0.0
    if before is None or elapsed_s <= 0:
        return {**unknown, **_FIRST} if unknown else _FIRST
    for name, value, last in (
        ("bytes_sent_per_s", now.bytes_sent, before.bytes_sent),
        ("bytes_received_per_s", now.bytes_received, before.bytes_received),
        ("retransmits_per_s", now.retransmits, before.retransmits),
        ("segments_sent_per_s", now.segments, before.segments),
    ):
        if value is not None and last is not None and value >= last:
            metrics[name] = (value - last) / elapsed_s
        else:
            unknown = {**(unknown or {}), name: "the counter went back, or is not known"}
    for name, values, lasts in (
        ("receiver_limited_pct", now.receiver_limited_us, before.receiver_limited_us),
        ("send_buffer_limited_pct", now.buffer_limited_us, before.buffer_limited_us),
    ):
        grown = [new - old for new, old in zip(values, lasts, strict=True) if new is not None and old is not None]
        if grown:
            metrics[name] = min(max(*grown, 0) / (elapsed_s * 10_000), 100.0)  # µs of s, in percent
    return unknown


def _info(socket: InetSocket | None) -> TcpInfo | None:
    return socket.tcp if socket is not None else None
