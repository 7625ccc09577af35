"""Other hosts, as their own instances see them: pulled, put in namespaces, joined with this one by their sockets."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from operator import is_not
from typing import TYPE_CHECKING, Annotated

from msgspec import Struct, field
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.remote_copy import Identity, Lists
from gpuflight.collectors.remote_join import Half, Joined, join_hosts, joinable, marked
from gpuflight.collectors.remote_peer import Peer, PeerOptions, View
from gpuflight.collectors.remote_pool import Pool
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Edge, Entity, nodes
from gpuflight.graph.namespaces import NAME_PATTERN, depth, within

if TYPE_CHECKING:
    from gpuflight.sources.world import World

_CLOSE_S = 2.0
_IDLE_S, _IDLE_ROUNDS = 30.0, 3.0
_OVERDUE_INTERVALS = 3.0
_URL = r"https?://[^\s/?#@]+(/[^\s?#]*)?"
PeerName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]


class RemotePeer(BaseModel):
    """Another instance."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    url: str = Field(pattern=f"^{_URL}$", description="Base URL of the instance, without user, query or fragment.")
    name: PeerName | None = Field(None, description="Namespace of its entities; its own host name when null.")
    token: SecretStr | None = Field(None, description="Access token of that instance.")
    ca_file: str | None = Field(None, description="Certificate authorities (PEM); the system's when null.")
    interval_s: float | None = Field(None, ge=0.1, le=86_400, description="Time between two requests (s).")
    timeout_s: float | None = Field(None, gt=0, le=600, description="Longest time one answer may take (s).")


class RemoteSettings(BaseModel):
    """Which instances to pull, and how; a peer may have an interval and a timeout of its own."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    peers: list[RemotePeer] = Field(default_factory=list, description="Instances; those of `remotes` are added.")
    interval_s: float = Field(5.0, ge=0.1, le=86_400, description="Time between two requests to a peer (s), ± 10 %.")
    timeout_s: float = Field(5.0, gt=0, le=600, description="Longest time one answer may take (s).")
    backoff_max_s: float = Field(60.0, ge=0.1, description="Longest time between two tries of a peer that is down (s).")
    end_after_s: float = Field(
        300.0, ge=0, description="How long the last graph of a peer that is down stands, marked as stale (s)."
    )
    max_depth: int = Field(4, ge=1, le=16, description="Through how many instances a host may come.")
    max_bytes: int = Field(256 << 20, ge=1024, description="Largest answer, decompressed (bytes).")
    max_entities: int = Field(
        150_000,
        ge=1,
        description="Entities of all peers together; below `limits.max_nodes`, so that our own find room.",
    )
    max_edges: int = Field(700_000, ge=1, description="Edges of all peers together; below `limits.max_edges`.")

    @model_validator(mode="after")
    def _names_are_unique(self) -> RemoteSettings:
        names = [peer.name for peer in self.peers if peer.name is not None]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} is the name of several peers; names must be unique")
        return self


class _Part(Struct):
    """What of a view is shown: without hosts that are nearer through somebody else."""

    view: View
    gone: frozenset[str]
    lists: Lists
    entities: list[Entity] = field(default_factory=list)
    connections: list[Edge] = field(default_factory=list)
    halves: list[Half] = field(default_factory=list)


class Remote(Collector):
    """Other hosts as their own instances see them, joined with this one by their sockets"""

    seeds = True
    expands = (nodes.Socket,)
    precedence = -10  # after the sockets collector: it decides how much is read about sockets
    settings_class = RemoteSettings
    settings: RemoteSettings

    def __init__(self, settings: RemoteSettings | None = None) -> None:
        super().__init__(settings)
        self._peers = [Peer(self._options(peer)) for peer in self.settings.peers]
        self._pool: Pool | None = None
        self._observed_s = 0.0
        self._gap_s = 0.0
        self._own: Identity | None = None
        self._parts: list[_Part | None] = [None] * len(self._peers)
        self._shown: list[_Part] = []
        self._batch = Batch()
        self._halves: list[list[Half]] = []
        self._wanted: set[str] = set()
        self._local: list[Half] | None = None
        self._joined = Joined()
        self._between_peers: list[Edge] = []
        self._crossing: dict[str, list[Edge]] = {}

    def observe(self, world: World) -> None:
        self._batch = Batch()
        self._shown = []
        if not self._peers:
            return
        if self._own is None:
            self._own = world.procfs.identity()
        own, http = self._own, world.http
        now_s = time.monotonic()
        self._gap_s, self._observed_s = now_s - (self._observed_s or now_s), now_s
        if self._pool is None and not http.replaying:
            intervals_s = [peer.options.interval_s for peer in self._peers]

            def poll(index: int) -> None:
                if self._wanted_now():
                    self._peers[index].poll(http, own)

            self._pool = Pool(self._peers, poll, intervals_s, self.settings.backoff_max_s)
            for peer in self._peers:
                peer.keep_body = http.recording
            self._pool.start()
        if http.replaying or http.recording:
            for peer in self._peers:
                try:
                    answer = http.taped(peer.options.url, lambda peer=peer: peer.answer)  # type: ignore[misc]
                    if http.replaying:
                        peer.take(answer, own)
                except (OSError, SourceUnavailable) as error:
                    self.note(f"{peer.label}: {error}")
        now_ns = world.clock.wall_ns()
        views = [self._standing(peer, peer.view, now_ns) for peer in self._peers]
        self._choose(views)
        self._limit()
        self._join(world)
        for part in self._shown:
            self._show(part, now_ns)

    def seed(self) -> Batch:
        return self._batch

    def expand(self, entities: Sequence[nodes.Socket]) -> Batch:
        """The crossing edges of endpoints that are in the picture."""
        batch = Batch()
        if not self._crossing:
            return batch
        joined_to = self._joined.joined_to
        for entity in entities:
            batch.edges += self._crossing.get(entity.id, ())
            real = joined_to.get(entity.id)
            if real is not None and entity.attributes.get("remote") is True:
                batch.nodes.append(marked(entity, real))
        return batch

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop(_CLOSE_S)

    def _wanted_now(self) -> bool:
        """Whether rounds are being made with this collector: one that was switched off asks nobody."""
        return time.monotonic() - self._observed_s < max(_IDLE_S, _IDLE_ROUNDS * self._gap_s)

    # --- which peers stand -----------------------------------------------------------------------------------------

    def _options(self, peer: RemotePeer) -> PeerOptions:
        return PeerOptions(
            url=peer.url,
            name=peer.name or "",
            token=peer.token.get_secret_value() if peer.token is not None else "",
            ca_file=peer.ca_file or "",
            timeout_s=peer.timeout_s or self.settings.timeout_s,
            max_depth=self.settings.max_depth,
            max_bytes=self.settings.max_bytes,
            interval_s=peer.interval_s or self.settings.interval_s,
        )

    def _standing(self, peer: Peer, view: View, now_ns: int) -> View | None:
        """The peer's view if it is to be shown; says what is wrong with it."""
        for text in view.notes:
            self.note(f"{peer.label}: {text}")
        for what, count in view.losses.items():
            self.lose(what, count)
        age_s = max(0.0, (now_ns - view.good_ns) / 1e9)
        if view.error and not view.good_ns:
            self.note(f"{peer.label}: {view.error}", "it is tried again and again")
            return None
        if not view.has_graph:
            if not view.good_ns:
                self.note(f"{peer.label}: no answer yet")
            return None
        options = peer.options
        error = view.error
        if not error and age_s > _OVERDUE_INTERVALS * options.interval_s + options.timeout_s:
            error = "it was not asked for long"  # rounds, or this collector, were stopped for a while
        if not error:
            return view
        if age_s > self.settings.end_after_s:
            self.note(
                f"{peer.label}: {error}; no answer for {age_s:.0f} s, so its graph has ended",
                "it is tried again and again",
            )
            return None
        self.note(f"{peer.label}: {error}; its last graph stands, {age_s:.0f} s old")
        return replace(view, error=error)

    def _choose(self, views: list[View | None]) -> None:
        """Every host once: the way through the fewest instances, then the first peer."""
        ways: list[tuple[int, int, str, Identity]] = []
        taken: dict[str, int] = {}
        for index, view in enumerate(views):
            if view is None:
                continue
            first = taken.setdefault(view.ns, index)
            if first != index:
                label = self._peers[index].options.url
                self.note(f"{label}: another peer calls itself {view.ns} too", "give one of them a name")
                continue
            ways += [(depth(ns), index, ns, identity) for ns, identity in view.hosts.items()]
        gone: dict[int, set[str]] = {}
        seen: dict[Identity, str] = {}
        for _, index, ns, identity in sorted(ways):
            if identity[1] and seen.setdefault(identity, ns) != ns:
                gone.setdefault(index, set()).add(ns)
        for ns, index in taken.items():
            view = views[index]
            assert view is not None  # noqa: S101 - only views are taken
            doomed = frozenset(gone.get(index, ()))
            if ns in doomed:
                self.note(f"{ns}: the same host as {seen[view.hosts[ns]]}; it is drawn once")
                continue
            assert view.copy is not None  # noqa: S101 - only views with a graph are chosen
            known, lists = self._parts[index], view.copy.lists()
            if known is not None and known.gone == doomed and known.lists is lists:
                known.view = view
            else:
                known = self._parts[index] = _part(view, lists, doomed)
            self._shown.append(known)

    def _limit(self) -> None:
        """Leave out the peers, in their order, that are too much: they must not take the room of this host's own."""
        left_nodes, left_edges = self.settings.max_entities, self.settings.max_edges
        shown: list[_Part] = []
        for part in self._shown:
            nodes_count, edges_count = len(part.entities) + 1, len(part.connections)
            if nodes_count > left_nodes or edges_count > left_edges:
                limit = "max_entities" if nodes_count > left_nodes else "max_edges"
                self.note(f"{part.view.ns}: left out, since all peers together have more than {limit}")
                self.lose("entities of peers beyond the limit", nodes_count)
                continue
            left_nodes -= nodes_count
            left_edges -= edges_count
            shown.append(part)
        self._shown = shown

    # --- what is shown ---------------------------------------------------------------------------------------------

    def _show(self, part: _Part, now_ns: int) -> None:
        view = part.view
        assert view.host is not None  # noqa: S101 - only views with a graph are chosen
        host = view.host
        attributes, metrics = dict(host.attributes), dict(host.metrics)
        unknown = dict(host.unknown or {})
        age_s = max(0.0, (now_ns - view.good_ns) / 1e9)
        if view.error:
            attributes["stale"] = True
            metrics["stale_s"] = round(age_s, 1)
        if view.offset_s is None or view.offset_error_s is None:
            unknown["clock_offset_s"] = "its answers say no time"
        else:
            metrics["clock_offset_s"] = round(view.offset_s, 6)
            metrics["clock_offset_error_s"] = math.ceil(view.offset_error_s * 1e6) / 1e6
            if view.round_time_ns:
                age_s = now_ns / 1e9 - (view.round_time_ns / 1e9 - view.offset_s)
                metrics["round_age_s"] = round(max(0.0, age_s), 1)
        self._batch.nodes.append(replace(host, attributes=attributes, metrics=metrics, unknown=unknown or None))
        self._batch.nodes += part.entities
        self._batch.edges += part.connections

    # --- sockets ---------------------------------------------------------------------------------------------------

    def _join(self, world: World) -> None:
        """Join the halves of all hosts; what touches one of our endpoints waits until that is in the picture."""
        halves = [part.halves for part in self._shown if part.halves]
        known = self._halves
        if len(known) != len(halves) or any(map(is_not, known, halves)):
            self._halves = halves
            self._wanted = {half.far_address for found in halves for half in found}
            self._local = None
        local = self._local_halves(world) if halves else []
        if local != self._local:
            self._local = local
            self._join_all(local, halves)
        if self._joined.ambiguous_count:
            self.lose("connections that more than two hosts claim", self._joined.ambiguous_count)
        self._batch.nodes += self._joined.nodes
        self._batch.edges += self._between_peers

    def _join_all(self, local: list[Half], halves: list[list[Half]]) -> None:
        by_namespace: dict[str, list[Half]] = {}
        for found in halves:
            for half in found:  # a host that comes through a peer is a side of its own
                by_namespace.setdefault(_namespace_of(half), []).append(half)
        named: dict[str, Entity] = {}
        for part in self._shown:
            named.update(part.lists.stand_ins)
        self._joined = join_hosts(local, by_namespace, named, self._joined)
        ours = {half.own for half in local}
        self._between_peers, self._crossing = [], {}
        for edge in self._joined.edges:
            end = edge.source if edge.source in ours else edge.target if edge.target in ours else None
            if end is None:
                self._between_peers.append(edge)
            else:
                self._crossing.setdefault(end, []).append(edge)

    def _local_halves(self, world: World) -> list[Half]:
        """Our sockets that are the far end of something a peer reports."""
        try:
            table = world.netlink.inet_sockets()
        except (OSError, SourceUnavailable):
            return []  # the sockets collector says why
        wanted = self._wanted
        local: list[Half] = []
        for socket in table.sockets:
            if socket.local in wanted and socket.remote and not socket.loopback and joinable(socket.remote):
                opened = True if socket.tcp is not None and socket.tcp.opened else None
                far = f"Socket({socket.protocol},{socket.remote})"
                local.append(Half(socket.protocol, socket.local, socket.remote, socket.id, far, opened))
        return local


def _part(view: View, lists: Lists, gone: frozenset[str]) -> _Part:
    if not gone:
        return _Part(view, gone, lists, lists.entities, lists.connections, lists.halves)
    kept = [entity for entity in lists.entities if not any(within(entity.ns, outer) for outer in gone)]
    lost = {entity.id for entity in lists.entities} - {entity.id for entity in kept}
    return _Part(
        view,
        gone,
        lists,
        kept,
        [edge for edge in lists.connections if edge.source not in lost and edge.target not in lost],
        [half for half in lists.halves if half.own not in lost],
    )


def _namespace_of(half: Half) -> str:
    return half.own.partition("(ns=")[2].partition(",")[0]
