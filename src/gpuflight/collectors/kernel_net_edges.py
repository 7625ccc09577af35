"""What is drawn of a round's socket traffic: endpoints, their processes and threads, connections; each edge once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct, field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.kernel_net_ends import Ends, Place
from gpuflight.collectors.kernel_net_flows import Amount, Used
from gpuflight.collectors.kernel_net_rows import CLIENT, SERVER, TCP
from gpuflight.collectors.kernel_programs import per_s, process_entity, thread_entity
from gpuflight.graph import Edge, EdgeKey, Entity, Metric, edges

_THREAD_ROUNDS = 2
"""Rounds for which a thread is shown beside a socket that it does not use any more: it may have ended."""


class _Connection(Struct):
    """One connection with those of its ends that are sockets here."""

    source: str
    target: str
    sure: bool
    shown: bool
    client: Used | None = None
    server: Used | None = None

    @property
    def ended(self) -> bool:
        """Whether every end that is here is closed."""
        return all(end.ended for end in (self.client, self.server) if end is not None)

    def moved_bytes(self) -> int:
        """For choosing: the connections that moved most are shown first."""
        ends = [end.row.sent_bytes + end.row.received_bytes for end in (self.client, self.server) if end is not None]
        return max(ends)


class _Use(Struct):
    """What a thread moved through an endpoint."""

    process: str
    amount: Amount = field(default_factory=Amount)


class Drawing:
    """One round's picture. ``draw`` once, ``add_process`` for each, then ``everything`` or ``of`` some processes."""

    def __init__(
        self, ends: Ends | None = None, elapsed_s: float | None = None, collector: Collector | None = None
    ) -> None:
        self._ends = ends
        self._elapsed_s = elapsed_s
        self._collector = collector
        self._entities: dict[str, Entity] = {}
        self._edges: dict[EdgeKey, Edge] = {}
        self._endpoints_of: dict[str, set[str]] = {}
        self._edges_of: dict[str, list[Edge]] = {}

    def draw(self, sockets: Iterable[Used], ended_limit: int, *, threads: bool) -> None:
        """Take one round's sockets; those that are over are marked as told."""
        assert self._ends is not None  # noqa: S101 - made with them
        holds: dict[tuple[str, str], Amount] = {}
        uses: dict[tuple[str, str], _Use] = {}
        connections: dict[tuple[str, str], list[_Connection]] = {}
        placed: list[tuple[Used, Place, _Connection | None]] = []
        for used in sockets:
            if used.told or not (used.users or used.ended):
                continue
            place = self._ends.of(used)
            connection = self._join(used, place, connections) if place.source else None
            placed.append((used, place, connection))
        left_out = self._choose(connections, ended_limit)
        for used, place, connection in placed:
            used.told = used.ended
            if connection is not None and id(connection) in left_out:
                continue
            self._entities.setdefault(place.own.id, place.own)
            if place.other is not None:
                self._entities.setdefault(place.other.id, place.other)
            for user in used.users:
                if not user.process:
                    continue
                holds.setdefault((place.own.id, user.process), Amount()).add(user.now)
                if threads and user.idle_rounds <= _THREAD_ROUNDS and not _is_whole(used, user.process):
                    uses.setdefault((user.thread, place.own.id), _Use(user.process)).amount.add(user.now)
            if not used.users and used.row.pid and used.ended:  # opened and closed, and nothing moved
                process = self._ends.process_id(used.row)
                holds.setdefault((place.own.id, process), Amount())
        self._draw_holders(holds, uses)
        for group in connections.values():
            for connection in group:
                if id(connection) not in left_out:
                    self._draw_connection(connection)

    def add_process(
        self,
        process: str,
        attributes: dict[str, Any],
        metrics: dict[str, Metric],
        unknown: dict[str, str] | None,
    ) -> None:
        """What one process did in all."""
        self._entities[process] = process_entity(process, attributes, metrics, unknown)
        self._endpoints_of.setdefault(process, set())

    def everything(self) -> Batch:
        """The whole picture."""
        return Batch(list(self._entities.values()), list(self._edges.values()))

    def of(self, processes: Sequence[str]) -> Batch:
        """The part that some processes have to do with."""
        batch = Batch()
        shown: set[str] = set()
        for process in processes:
            if process not in self._endpoints_of:
                continue
            shown.add(process)
            for endpoint in self._endpoints_of[process]:
                shown.add(endpoint)
                for edge in self._edges_of.get(endpoint, ()):
                    shown.update((edge.source, edge.target))
                    batch.edges.append(edge)
        batch.nodes = [self._entities[id_] for id_ in shown if id_ in self._entities]
        return batch

    # --- inside ----------------------------------------------------------------------------------------------------

    def _join(self, used: Used, place: Place, connections: dict[tuple[str, str], list[_Connection]]) -> _Connection:
        """The connection that a socket is an end of. One address can be used again, so a pair may come twice."""
        group = connections.setdefault((place.source, place.target), [])
        client = place.is_source
        for known in group:
            mine = known.client if client else known.server
            other = known.server if client else known.client
            if mine is None and (other is None or other.ended == used.ended):
                break
        else:
            known = _Connection(place.source, place.target, place.sure, place.shown)
            group.append(known)
        if client:
            known.client = used
        else:
            known.server = used
        known.shown |= place.shown
        return known

    def _choose(self, connections: dict[tuple[str, str], list[_Connection]], limit: int) -> set[int]:
        """Which of the ended connections are too many, by identity."""
        ended = [one for group in connections.values() for one in group if one.ended]
        if len(ended) <= limit:
            return set()
        ended.sort(key=lambda one: -one.moved_bytes())
        if self._collector is not None:
            self._collector.lose("ended connections that are not shown", len(ended) - limit)
        return {id(one) for one in ended[limit:]}

    def _draw_holders(self, holds: dict[tuple[str, str], Amount], uses: dict[tuple[str, str], _Use]) -> None:
        for (endpoint, process), amount in holds.items():
            self._entities.setdefault(process, process_entity(process))
            self._endpoints_of.setdefault(process, set()).add(endpoint)
            self._add(edges.Belong(endpoint, process, {}, *per_s(amount.grown(), self._elapsed_s)), endpoint)
        for (thread, endpoint), use in uses.items():
            self._entities.setdefault(thread, thread_entity(thread))
            self._add(edges.Own(use.process, thread), endpoint)
            # Of whoever else holds the socket too, this thread says nothing.
            attributes = {"target_processes": [use.process]}
            rates = per_s(use.amount.grown(), self._elapsed_s)
            self._add(edges.Access(thread, endpoint, attributes, *rates), endpoint)

    def _draw_connection(self, connection: _Connection) -> None:
        client, server = connection.client, connection.server
        first = client if client is not None else server
        assert first is not None  # noqa: S101 - a connection has an end
        rests = self._elapsed_s is not None and not connection.ended and first.rests
        rests = rests and (server is None or server.rests)
        known = first.resting_edge
        if rests and known is not None and _says(known, connection):  # most of a server's connections
            self._connect(known)
            return
        attributes: dict[str, Any] = {}
        metrics: dict[str, Metric] = {}
        unknown: dict[str, str] | None = None
        if not connection.shown:
            attributes["state"] = "CLOSED" if connection.ended else "ESTABLISHED"
            if not connection.sure:
                attributes["direction"] = "guessed" if client is None or not client.row.unix else "none"
            if client is None or server is None:
                attributes["half"] = True
        if connection.ended or not connection.shown:
            for name, end in (("source_processes", client), ("target_processes", server)):
                processes = sorted({user.process for user in end.users if user.process}) if end is not None else []
                if processes:
                    attributes[name] = processes
        if connection.ended:
            attributes["ended"] = True
            attributes.pop("half", None)
            if _failed(client):
                attributes["failed"] = True
            _add_totals(metrics, client, server)
        else:
            metrics, unknown = per_s(_rates(client, server), self._elapsed_s)
        _add_waits(metrics, client, server)
        edge = edges.ConnectTo(connection.source, connection.target, attributes, metrics, unknown)
        first.resting_edge = edge if rests else None
        self._connect(edge)

    def _connect(self, edge: Edge) -> None:
        self._add(edge, edge.source)
        if edge.target != edge.source:
            self._edges_of.setdefault(edge.target, []).append(edge)

    def _add(self, edge: Edge, endpoint: str) -> None:
        if edge.key in self._edges and isinstance(edge, edges.ConnectTo) and "ended" in edge.attributes:
            return  # the same addresses, used again: the newer one stands
        self._edges[edge.key] = edge
        self._edges_of.setdefault(endpoint, []).append(edge)


def _says(edge: Edge, connection: _Connection) -> bool:
    """Whether an edge of an earlier round is still that of the connection."""
    return (
        edge.source == connection.source
        and edge.target == connection.target
        and ("state" in edge.attributes) is not connection.shown
        and ("direction" in edge.attributes) is not (connection.shown or connection.sure)
        and ("half" in edge.attributes)
        is (not connection.shown and (connection.client is None or connection.server is None))
    )


def _is_whole(used: Used, process: str) -> bool:
    """Whether only the main thread of a process uses a socket: the process says all, then."""
    return all(user.row.tid == user.row.pid for user in used.users if user.process == process)


def _failed(client: Used | None) -> bool:
    return client is not None and client.row.role == CLIENT and not client.row.established_ns


def _rates(client: Used | None, server: Used | None) -> dict[str, float]:
    """What grew, as the client sees it, whose own calls stand if it is here."""
    if client is not None and client.users:
        amount = client.total()
        sent, received, prefix = amount.sent_bytes, amount.received_bytes, ""
    elif server is not None and server.users:
        amount = server.total()
        sent, received, prefix = amount.received_bytes, amount.sent_bytes, "peer_"
    else:
        return {}
    return {
        "bytes_sent_per_s": sent,
        "bytes_received_per_s": received,
        f"{prefix}sends_per_s": amount.sends,
        f"{prefix}receives_per_s": amount.receives,
    }


def _add_totals(metrics: dict[str, Metric], client: Used | None, server: Used | None) -> None:
    """Of a connection that is over: the kernel's own totals of TCP, else what the calls moved since first seen."""
    end = client if client is not None else server
    assert end is not None  # noqa: S101 - a connection has an end
    if end.row.protocol == TCP and not end.row.unix:
        sent, received = end.row.sent_bytes, end.row.received_bytes
        rows = [one.row for one in (client, server) if one is not None]
        metrics["retransmits_count"] = sum(row.retransmits for row in rows)
        metrics["segments_sent_count"] = sum(row.segments_sent for row in rows)
        if end.row.rtt_us:
            metrics["rtt_ms"] = end.row.rtt_us / 1000
    else:
        amount = end.since_first_seen()
        sent, received = amount.sent_bytes, amount.received_bytes
    if client is None:
        sent, received = received, sent
    metrics["bytes_sent_count"] = sent
    metrics["bytes_received_count"] = received
    begun_ns = [one.row.opened_ns for one in (client, server) if one is not None and one.row.role]
    ended_ns = [one.row.ended_ns for one in (client, server) if one is not None and one.row.ended_ns]
    if begun_ns and ended_ns:
        metrics["duration_ms"] = (max(ended_ns) - min(begun_ns)) / 1e6


def _add_waits(metrics: dict[str, Metric], client: Used | None, server: Used | None) -> None:
    """connect_ms: from the SYN to the connection; accept_ms: from there until a process took it."""
    if client is not None and client.row.role == CLIENT and client.row.established_ns:
        metrics["connect_ms"] = (client.row.established_ns - client.row.opened_ns) / 1e6
    if server is not None and server.row.role == SERVER and server.row.accepted_ns:
        metrics["accept_ms"] = (server.row.accepted_ns - server.row.established_ns) / 1e6
