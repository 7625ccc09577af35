"""One other instance: asking it, reading what it answers, and what is known of it in between."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from gpuflight.collectors.remote_clock import ClockOffset
from gpuflight.collectors.remote_copy import Copy, Identity, Misfit, same_host
from gpuflight.errors import InputError, SourceUnavailable
from gpuflight.graph import nodes
from gpuflight.graph.codec import time_from_text
from gpuflight.graph.delta import HEAD, decode_delta
from gpuflight.graph.load import LoadedGraph, parse_graph
from gpuflight.graph.namespaces import name_from
from gpuflight.sources.http import Answer, Http, Request

PATHS = ("/api/v1/graph", "/graph")
"""Where a graph may be found: of gpuflight, with what its round says; of the reference system, or of both."""

_NO_SINCE = (400, 422)
"""What an instance answers that does not know how to tell differences."""

_MISFITS_AT_MOST = 6
"""A peer of which differences did not fit so often in a row is asked for differences only every 2**6th time."""

CUT = "answers of peers that were cut off"
"""The loss: an answer that was larger, or took longer, than one may."""


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

    ``copy`` is the graph, in the peer's namespace already, as it is now; ``hosts`` are the machines in it by namespace,
    ``host`` is the peer's own."""

    ns: str = ""
    copy: Copy | None = None
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

    It is asked for what changed since the round that is here (docs/remote.md), and for the whole graph where it cannot
    tell, or tells what does not fit. ``poll`` and ``take`` are called by one thread at a time; ``view`` may be read by
    any. ``keep_body``: the last answer is wanted whole, for a recording.
    """

    def __init__(self, options: PeerOptions) -> None:
        self.options = options
        self.view = View()
        self.answer = Answer(options.url, error="not asked yet")
        self.keep_body = False
        self.failures_count = 0
        self.retry_after_s = 0.0
        self.cut_count = 0
        self.wholes_count = 0
        self.diffs_count = 0
        self.misfits_count = 0
        self._base = options.url.rstrip("/")
        self._urls = [self._base + path for path in PATHS]
        self._path = 0
        self._etag = ""
        self._digest = b""
        self._copy: Copy | None = None
        self._host_told: tuple[nodes.Host | None, nodes.Host] = (None, nodes.Host(hostname=""))
        self._env: dict[str, Any] = {}
        self._origin = ""
        self._tells_diffs = True
        self._misfits_in_a_row = 0
        self._wholes_to_come = 0
        self._clock = ClockOffset()
        self._lock = threading.Lock()

    @property
    def label(self) -> str:
        """What to call it in notes: its name, or where it is."""
        return self.options.name or self.view.ns or self._base

    def poll(self, http: Http, own: Identity) -> None:
        """Ask once, and take in the answer. Never raises."""
        answer = self._ask(http, self._etag if self.view.has_graph or self.view.is_self else "")
        misfits_count = self.misfits_count
        self.take(answer, own)
        if self.misfits_count > misfits_count:
            self.take(self._ask(http, ""), own)  # what it told did not fit: all of it, at once
        elif answer.status == 404 or answer.error:
            self._path, self._tells_diffs = 0, True  # it may be updated

    def _ask(self, http: Http, etag: str) -> Answer:
        while True:
            follow = self._path == 0 and self._tells_diffs and not self.keep_body
            known = self._copy is not None or self.view.is_self
            state = etag.removeprefix("W/").strip('"') if known and not self._wholes_to_come else ""
            self._wholes_to_come = max(0, self._wholes_to_come - 1)
            request = Request(
                self._urls[self._path],
                f"since={state}" if follow else "",
                token=self.options.token,
                etag=etag,
                timeout_s=self.options.timeout_s,
                max_bytes=self.options.max_bytes,
                ca_file=self.options.ca_file,
            )
            try:
                answer = http.get(request)
            except SourceUnavailable as error:
                return Answer(request.url, error=str(error))
            if follow and answer.status in _NO_SINCE:
                self._tells_diffs = False  # of an older version
            elif answer.status == 404 and self._path + 1 < len(PATHS):
                self._path += 1  # an older, or another, kind of instance
            else:
                return answer

    def take(self, answer: Answer, own: Identity) -> None:
        """Take in an answer, of the network or of a recording."""
        with self._lock:
            before = self.view
            self.retry_after_s = 0.0
            if answer.error or answer.status not in (200, 304):
                self._failed(before, answer)
            elif answer.status == 304:
                self._unchanged(before, answer)
            elif answer.body.startswith(HEAD):
                self._advanced(before, answer)
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
        losses = before.losses
        if answer.cut:
            self.cut_count += 1
            losses = {**losses, CUT: self.cut_count}
        self.view = replace(before, error=answer.error or _refusal(answer.status), losses=losses)

    def _unchanged(self, before: View, answer: Answer) -> None:
        self.failures_count = 0
        self._learn(answer)
        losses = _uncut(before.losses)
        self.view = replace(before, error="", good_ns=answer.received_ns, losses=losses, **self._offset())

    def _advanced(self, before: View, answer: Answer) -> None:
        """Take in a difference. If it cannot be used the last view stands until the whole graph came."""
        if before.is_self:  # of which nothing is shown
            self._etag = answer.headers.get("etag", "")
            self._unchanged(before, answer)
            return
        copy = self._copy
        try:
            if copy is None:
                raise Misfit("there is nothing that it leads on from")
            delta = decode_delta(answer.body)
            copy.apply(delta)
        except (InputError, Misfit) as error:
            self._copy, self._etag = None, ""
            self.misfits_count += 1
            self._misfits_in_a_row += 1
            self._wholes_to_come = 2 ** min(self._misfits_in_a_row, _MISFITS_AT_MOST)
            self.view = replace(before, error=f"what it says has changed does not fit: {error}")
            return
        self.failures_count = self._misfits_in_a_row = 0
        self.diffs_count += 1
        self._etag = answer.headers.get("etag", "")
        time_ns = time_from_text(delta.time)
        self._learn(answer, time_ns)
        self.view = self._view(copy, before, answer, time_ns)

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
            self._copy, self._etag = None, ""
            self.view = replace(before, error=str(error))
            return
        self.failures_count = 0
        self.wholes_count += 1
        self._etag, self._digest = etag, digest
        self._env, self._origin = loaded.env, loaded.origin
        self._learn(answer, loaded.time_ns)
        self._copy, self._host_told = None, (None, nodes.Host(hostname=""))
        self.view = self._first_view(loaded, answer, own)

    def _first_view(self, loaded: LoadedGraph, answer: Answer, own: Identity) -> View:
        env = loaded.env
        identity = (str(env.get("machine_id", "")), str(env.get("boot_id", "")))
        ns = self.options.name or name_from(str(env.get("hostname", "")) or _host_of(self._base))
        if same_host(identity, own):
            return View(
                ns=ns,
                good_ns=answer.received_ns,
                is_self=True,
                notes=["it is this very host; it is not drawn twice"],
                **self._offset(),
            )
        self._copy = Copy(loaded.graph, ns, own, self.options.max_depth, loaded.round_number)
        before = View(ns=ns, hosts={ns: identity, **self._copy.hosts})
        if self._copy.too_deep_count:
            before.losses["entities beyond the depth limit of instances"] = self._copy.too_deep_count
        return self._view(self._copy, before, answer, loaded.time_ns)

    def _view(self, copy: Copy, before: View, answer: Answer, time_ns: int) -> View:
        return View(
            ns=before.ns,
            copy=copy,
            hosts=before.hosts,
            host=self._host_of(copy, before),
            good_ns=answer.received_ns,
            round_time_ns=time_ns,
            round_number=copy.round_number,
            losses=_uncut(before.losses),
            **self._offset(),
        )

    def _host_of(self, copy: Copy, before: View) -> nodes.Host:
        host = copy.host
        if host is not None and host is self._host_told[0]:
            return self._host_told[1]
        if host is None:
            host = nodes.Host(hostname=str(self._env.get("hostname", "")) or before.ns, ns=before.ns)
        machine_id, boot_id = before.hosts[before.ns]
        told = {
            "name": host.hostname,
            "machine_id": machine_id,
            "boot_id": boot_id,
            "instance": self._base,
            "poll_interval_s": self.options.interval_s,
            "gpuflight_version": str(self._env.get("version", "")),
        }
        if self._origin != "gpuflight":
            told["instance_kind"] = self._origin
        known = host.attributes
        host = _with(host, {name: value for name, value in told.items() if value and name not in known})
        self._host_told = copy.host, host
        return host

    def _learn(self, answer: Answer, ended_ns: int = 0) -> None:
        headers = answer.headers
        self._clock.learn(
            answer.sent_ns, answer.received_ns, headers.get("date", ""), ended_ns, headers.get("gpuflight-time-ns", "")
        )

    def _offset(self) -> dict[str, Any]:
        if not self._clock.known:
            return {"offset_s": None, "offset_error_s": None}
        return {"offset_s": self._clock.offset_s, "offset_error_s": self._clock.error_s}


def _with(host: nodes.Host, attributes: dict[str, Any]) -> nodes.Host:
    return replace(host, attributes={**host.attributes, **attributes}) if attributes else host


def _confirmed(body: Answer, answer: Answer) -> Answer:
    headers = dict(body.headers)
    for name in ("date", "gpuflight-time-ns"):
        if name in answer.headers:
            headers[name] = answer.headers[name]
    return replace(body, headers=headers, sent_ns=answer.sent_ns, received_ns=answer.received_ns)


def _uncut(losses: dict[str, int]) -> dict[str, int]:
    return {what: count for what, count in losses.items() if what != CUT} if CUT in losses else losses


def _host_of(url: str) -> str:
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2] or url


def _refusal(status: int) -> str:
    if status in (401, 403):
        return f"it refuses our token (HTTP {status})"
    if status == 404:
        return "it has no graph under any path that we know (HTTP 404): not an instance, or one of another API version"
    if 300 <= status < 400:
        return f"it redirects (HTTP {status}); give the final URL"
    return f"HTTP {status}"
