"""One other instance: asking it, reading what it answers, and what is known of it in between."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from gpuflight.collectors.remote_clock import ClockOffset
from gpuflight.collectors.remote_join import Half, halves_of
from gpuflight.errors import InputError, SourceUnavailable
from gpuflight.graph import LOCAL, Edge, Entity, Graph, nodes
from gpuflight.graph.load import LoadedGraph, parse_graph
from gpuflight.graph.namespaces import depth, move_into, name_from, without_namespaces
from gpuflight.sources.http import Answer, Http, Request

PATHS = ("/api/v1/graph", "/graph")
"""Where a graph may be found: of gpuflight, with what its round says; of the reference system, or of both."""

Identity = tuple[str, str]
"""Machine id and boot id of a host."""


class PeerOptions(Struct, frozen=True):
    """What a peer needs to know; see ``RemotePeer`` and ``RemoteSettings`` of remote.py."""

    url: str
    name: str = ""
    token: str = ""
    ca_file: str = ""
    timeout_s: float = 5.0
    max_depth: int = 4
    max_bytes: int = 256 << 20
    interval_s: float = 5.0


class View(Struct):
    """What is known of a peer; replaced as a whole, never changed. Times are this host's wall clock in ns, 0: never.

    ``entities`` (all but ``host``) and ``connections`` are in the peer's namespace already. ``hosts`` are the machines
    in it by namespace, ``halves`` its connections with others, ``stand_ins`` the far ends of these."""

    ns: str = ""
    entities: list[Entity] = field(default_factory=list)
    connections: list[Edge] = field(default_factory=list)
    halves: list[Half] = field(default_factory=list)
    stand_ins: dict[str, Entity] = field(default_factory=dict)
    hosts: dict[str, Identity] = field(default_factory=dict)
    host: nodes.Host | None = None
    good_ns: int = 0
    round_time_ns: int = 0
    round_number: int = 0
    offset_s: float | None = None
    offset_error_s: float | None = None
    error: str = ""
    is_self: bool = False
    notes: list[str] = field(default_factory=list)
    losses: dict[str, int] = field(default_factory=dict)

    @property
    def has_graph(self) -> bool:
        """Whether there is anything to show."""
        return self.host is not None


class Peer:
    """One instance that is asked again and again.

    ``poll`` and ``take`` are called by one thread at a time; ``view`` may be read by any. ``keep_body``: the last
    answer is wanted whole, for a recording."""

    def __init__(self, options: PeerOptions) -> None:
        self.options = options
        self.view = View()
        self.answer = Answer(options.url, error="not asked yet")
        self.keep_body = False
        self.failures_count = 0
        self.retry_after_s = 0.0
        self._base = options.url.rstrip("/")
        self._path = 0
        self._etag = ""
        self._digest = b""
        self._clock = ClockOffset()
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        """What to call it in notes: its name, or where it is."""
        return self.options.name or self.view.ns or self._base

    def poll(self, http: Http, own: Identity) -> None:
        """Ask once, and take in the answer. Never raises."""
        request = Request(
            self._base + PATHS[self._path],
            token=self.options.token,
            etag=self._etag if self.view.has_graph or self.view.is_self else "",
            timeout_s=self.options.timeout_s,
            max_bytes=self.options.max_bytes,
            ca_file=self.options.ca_file,
        )
        try:
            answer = http.get(request)
        except SourceUnavailable as error:
            answer = Answer(request.url, error=str(error))
        if answer.status == 404 and self._path + 1 < len(PATHS):
            self._path += 1  # an older, or another, kind of instance
            self.poll(http, own)
            return
        self.take(answer, own)
        if answer.status == 404:
            self._path = 0  # none of them now; it may be updated

    def take(self, answer: Answer, own: Identity) -> None:
        """Take in an answer, of the network or of a recording."""
        with self._lock:
            before = self.view
            self.retry_after_s = 0.0
            if answer.error or answer.status not in (200, 304):
                self._failed(before, answer)
            elif answer.status == 304:
                self._unchanged(before, answer)
            else:
                self._changed(before, answer, own)
            if answer.status != 304:
                self.answer = answer if self.keep_body else replace(answer, body=b"")
            elif not self.answer.error and self.answer.status == 200:
                # To a recording the last body is still the answer; only when it was confirmed is new.
                self.answer = _confirmed(self.answer, answer)

    def _failed(self, before: View, answer: Answer) -> None:
        self.failures_count += 1
        after = answer.headers.get("retry-after", "")
        if after.isdigit():
            self.retry_after_s = float(min(int(after), 3600))
        self.view = replace(before, error=answer.error or _refusal(answer.status))

    def _unchanged(self, before: View, answer: Answer) -> None:
        self.failures_count = 0
        self._clock.learn(answer.sent_ns, answer.received_ns, answer.headers.get("date", ""))
        self.view = replace(before, error="", good_ns=answer.received_ns, **self._offset())

    def _changed(self, before: View, answer: Answer, own: Identity) -> None:
        etag = answer.headers.get("etag", "")
        digest = b"" if etag else hashlib.blake2b(answer.body, digest_size=16).digest()
        if (etag, digest) == (self._etag, self._digest) and (before.has_graph or before.is_self):
            self._unchanged(before, answer)  # of an instance without validators, or of a recording
            return
        try:
            loaded = parse_graph(answer.body)
        except InputError as error:
            # Also a schema that is newer than ours: the last graph stands, and it is said what to do.
            self.failures_count += 1
            self.view = replace(before, error=str(error))
            return
        self.failures_count = 0
        self._etag, self._digest = etag, digest
        self._clock.learn(answer.sent_ns, answer.received_ns, answer.headers.get("date", ""), loaded.time_ns)
        view = View(
            good_ns=answer.received_ns, round_time_ns=loaded.time_ns, round_number=loaded.round_number, **self._offset()
        )
        self._fill(view, loaded, own)
        self.view = view

    def _offset(self) -> dict[str, Any]:
        if not self._clock.known:
            return {"offset_s": None, "offset_error_s": None}
        return {"offset_s": self._clock.offset_s, "offset_error_s": self._clock.error_s}

    def _fill(self, view: View, loaded: LoadedGraph, own: Identity) -> None:
        identity = (str(loaded.env.get("machine_id", "")), str(loaded.env.get("boot_id", "")))
        graph = loaded.graph
        view.ns = self.options.name or name_from(str(loaded.env.get("hostname", "")) or _host_of(self._base))
        if _same(identity, own):
            view.is_self = True
            view.notes.append("it is this very host; it is not drawn twice")
            return
        graph = self._less_what_is_too_far(view, graph, own)
        connections = list(graph.edges.values())
        moved = move_into(graph.nodes.values(), connections, view.ns)
        view.hosts = {view.ns: identity}
        host: nodes.Host | None = None
        stand_ins: dict[str, Entity] = {}
        for id_, entity in moved.items():
            if type(entity) is nodes.Host:
                if entity.ns == view.ns:
                    host = host or entity
                else:
                    view.hosts[entity.ns] = _identity_of(entity)
            elif type(entity) is nodes.Socket and entity.attributes.get("remote") is True:
                stand_ins[id_] = entity
        if host is None:
            host = nodes.Host(hostname=str(loaded.env.get("hostname", "")) or view.ns, ns=view.ns)
            moved[host.id] = host
        told = {
            "name": host.hostname,
            "machine_id": identity[0],
            "boot_id": identity[1],
            "instance": self._base,
            "poll_interval_s": self.options.interval_s,
            "gpuflight_version": str(loaded.env.get("version", "")),
        }
        if loaded.origin != "gpuflight":
            told["instance_kind"] = loaded.origin
        host = _with(host, {name: value for name, value in told.items() if value and name not in host.attributes})
        moved[host.id] = host
        view.host = host  # apart from the others: it alone changes between two answers
        if stand_ins:
            view.halves = halves_of(moved, connections)
        del moved[host.id]
        view.entities = list(moved.values())
        view.connections = connections
        view.stand_ins = stand_ins

    def _less_what_is_too_far(self, view: View, graph: Graph, own: Identity) -> Graph:
        """Without our own host as it comes back through others, and without what came through too many hosts."""
        gone: set[str] = set()
        spaces: set[str] = set()
        for entity in graph.nodes.values():
            if entity.ns == LOCAL:
                continue
            spaces.add(entity.ns)
            if type(entity) is nodes.Host and _same(_identity_of(entity), own):
                gone.add(entity.ns)
        too_deep = {ns for ns in spaces if depth(ns) + 1 > self.options.max_depth}
        if not gone and not too_deep:
            return graph
        left = without_namespaces(graph, gone | too_deep)
        lost = sum(1 for entity in graph.nodes.values() if entity.ns in too_deep)
        if lost:
            view.losses["entities beyond the depth limit of instances"] = lost
        return left


def _same(one: Identity, other: Identity) -> bool:
    """A boot id is made anew at each start of a kernel; without one nothing can be said."""
    return bool(one[1]) and one == other


def _identity_of(host: nodes.Host) -> Identity:
    return str(host.attributes.get("machine_id", "")), str(host.attributes.get("boot_id", ""))


def _with(host: nodes.Host, attributes: dict[str, Any]) -> nodes.Host:
    return replace(host, attributes={**host.attributes, **attributes}) if attributes else host


def _confirmed(body: Answer, answer: Answer) -> Answer:
    headers = dict(body.headers)
    if "date" in answer.headers:
        headers["date"] = answer.headers["date"]
    return replace(body, headers=headers, sent_ns=answer.sent_ns, received_ns=answer.received_ns)


def _host_of(url: str) -> str:
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2] or url


def _refusal(status: int) -> str:
    if status in (401, 403):
        return f"it refuses our token (HTTP {status})"
    if status == 404:
        return "it has no graph under any path that we know (HTTP 404)"
    if 300 <= status < 400:
        return f"it redirects (HTTP {status}); give the final URL"
    return f"HTTP {status}"
