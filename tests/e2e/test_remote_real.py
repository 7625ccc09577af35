"""The collector of other hosts against real HTTP servers on loopback."""

from __future__ import annotations

import gzip
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT
from tests.fakes.machine import FakeMachine, rich_machine
from tests.fakes.peer import LATEST, FakePeer, Handler

from gpuflight.collectors.remote import Remote, RemoteSettings
from gpuflight.collectors.remote_peer import CUT, Peer, PeerOptions
from gpuflight.core.controller import Controller
from gpuflight.graph import Graph, nodes
from gpuflight.settings import Settings
from gpuflight.sources.clock import SystemClock
from gpuflight.sources.http import Http
from gpuflight.sources.open import open_world
from gpuflight.sources.recording import Tape
from gpuflight.sources.world import World

OWN = ("m1", "b1")
HOST = "Host(ns=n7,node-7)"


@pytest.fixture
def peer() -> Iterator[FakePeer]:
    with FakePeer() as made:
        made.set_round(graph(1))
        yield made


@pytest.fixture
def http() -> Iterator[Http]:
    source = Http()
    yield source
    source.close()


def graph(pid: int) -> Graph:
    return Graph([nodes.Host(hostname="node-7"), nodes.Process(pid=pid, start=1)])


def options(peer: FakePeer, **changes: Any) -> PeerOptions:
    return PeerOptions(url=peer.url, name="n7", **changes)


def until(reached: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for it; fails if it never comes."""
    deadline_s = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.01)


def ids(asker: Peer) -> list[str]:
    """Of all that is shown but the Host."""
    assert asker.view.copy is not None
    return [entity.id for entity in asker.view.copy.lists().entities]


# --- one exchange ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["", "gzip", "zstd"])
def test_a_graph_comes_once_and_is_only_confirmed_after_that(peer: FakePeer, http: Http, encoding: str) -> None:
    peer.encoding = encoding
    asker = Peer(options(peer))
    asker.poll(http, OWN)
    first = asker.view
    assert first.error == "" and ids(asker) == ["Process(ns=n7,pid=1,start=1)"]
    asker.poll(http, OWN)
    assert asker.view.copy is first.copy and asker.view.good_ns > first.good_ns
    peer.set_round(graph(2), number=2)
    asker.poll(http, OWN)
    assert ids(asker) == ["Process(ns=n7,pid=2,start=1)"]
    assert [headers.get("If-None-Match") for _, headers in peer.asked] == [None, '"1"', '"1"']


def test_one_connection_is_used_for_all(peer: FakePeer, http: Http) -> None:
    asker = Peer(options(peer))
    clients = set()

    def remember(handler: Handler) -> None:
        clients.add(handler.client_address)
        handler.answer(304, b"")

    asker.poll(http, OWN)
    peer.reply = remember
    for _ in range(5):
        asker.poll(http, OWN)
    assert len(clients) == 1


def test_the_clock_of_the_other_host(peer: FakePeer, http: Http) -> None:
    peer.clock_offset_s = 90.5
    peer.set_round(graph(1))
    asker = Peer(options(peer))
    asker.poll(http, OWN)
    view = asker.view
    assert view.offset_s is not None and view.offset_error_s is not None
    assert abs(view.offset_s - 90.5) <= view.offset_error_s <= 1.3


def test_the_token_is_sent_and_a_refusal_is_said(peer: FakePeer, http: Http) -> None:
    peer.token = "hush"
    asker = Peer(options(peer))
    asker.poll(http, OWN)
    assert asker.view.error == "it refuses our token (HTTP 401)"
    asker = Peer(options(peer, token="hush"))
    asker.poll(http, OWN)
    assert asker.view.error == "" and asker.view.has_graph
    assert "hush" not in repr(asker.view) + repr(asker.answer)


def test_a_redirect_is_not_followed_and_gets_no_token(peer: FakePeer, http: Http) -> None:
    with FakePeer() as thief:
        peer.reply = lambda handler: handler.answer(302, b"", Location=thief.url + LATEST)
        asker = Peer(options(peer, token="hush"))
        asker.poll(http, OWN)
        assert "it redirects" in asker.view.error and thief.asked == []


def test_proxies_of_the_environment_are_not_used(peer: FakePeer, http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakePeer() as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        asker = Peer(options(peer))
        asker.poll(http, OWN)
        assert asker.view.has_graph and proxy.asked == []


def test_a_body_that_drips_for_ever_ends_at_the_deadline(peer: FakePeer, http: Http) -> None:
    """Every byte comes in time; the whole does not."""
    stop = threading.Event()

    def drip(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        try:
            while not stop.wait(0.02):
                handler.wfile.write(b" ")
        except OSError:
            pass
        handler.close_connection = True

    peer.reply = drip
    asker = Peer(options(peer, timeout_s=0.3))
    started_s = time.monotonic()
    try:
        asker.poll(http, OWN)
    finally:
        stop.set()
    assert asker.view.error == "the answer took too long" and time.monotonic() - started_s < 5


def test_silence_ends_at_the_deadline(peer: FakePeer, http: Http) -> None:
    stop = threading.Event()
    peer.reply = lambda handler: (stop.wait(30), handler.answer(500, b""))[1]
    asker = Peer(options(peer, timeout_s=0.2))
    try:
        asker.poll(http, OWN)
    finally:
        stop.set()
    assert asker.view.error == "no answer within 0.2 s"


def test_too_large_and_swelling_bodies(peer: FakePeer, http: Http) -> None:
    for body, headers in ((b" " * 5000, {}), (gzip.compress(bytes(1 << 20)), {"Content-Encoding": "gzip"})):
        peer.reply = lambda handler, body=body, headers=headers: handler.answer(200, body, **headers)  # type: ignore[misc]
        asker = Peer(options(peer, max_bytes=4096))
        asker.poll(http, OWN)
        assert asker.view.error == "the answer is larger than 4096 bytes"


def test_what_is_cut_off_is_counted_until_it_answers_well(peer: FakePeer, http: Http) -> None:
    """Endless bodies of both kinds, endless heads, and a bomb, one after the other."""
    asker = Peer(options(peer, max_bytes=1 << 16, timeout_s=2.0))
    asker.poll(http, OWN)
    good = ids(asker)
    swelling = gzip.compress(bytes(1 << 20))
    for count, misdeed in enumerate((_endless_chunks, _endless_body, _endless_head, None), 1):
        peer.reply = misdeed or (lambda handler: handler.answer(200, swelling, Content_Encoding="gzip"))
        asker.poll(http, OWN)
        assert "larger than" in asker.view.error or "took too long" in asker.view.error
        assert asker.view.losses == {CUT: count} and ids(asker) == good, "its last graph stands"
    peer.reply = None
    asker.poll(http, OWN)
    assert asker.view.error == "" and asker.view.losses == {} and asker.cut_count == 4


def _endless(handler: Handler, part: bytes) -> None:
    handler.close_connection = True
    try:
        while True:
            handler.wfile.write(part)
    except OSError:
        pass  # the parent has enough of it


def _endless_chunks(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    _endless(handler, b"1000\r\n" + b" " * 4096 + b"\r\n")


def _endless_body(handler: Handler) -> None:
    handler.send_response(200)
    handler.end_headers()
    _endless(handler, b" " * 4096)


def _endless_head(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    _endless(handler, b"X-More: %b\r\n" % (b"x" * 1000))


def test_a_body_that_ends_with_the_connection_and_one_that_ends_too_early(peer: FakePeer, http: Http) -> None:
    body = peer.bodies[LATEST]

    def until_the_end(handler: Handler) -> None:
        handler.wfile.write(b'HTTP/1.1 200 OK\r\nETag: "9"\r\n\r\n' + body)
        handler.close_connection = True

    def too_early(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(body) + 1) + body)
        handler.close_connection = True

    def interim_first(handler: Handler) -> None:
        handler.wfile.write(b'HTTP/1.1 103 Early Hints\r\nETag: "x"\r\n\r\n')
        handler.answer(200, body, ETag='"10"')

    asker = Peer(options(peer))
    peer.reply = until_the_end
    asker.poll(http, OWN)
    assert asker.view.error == "" and ids(asker)
    peer.reply = too_early
    asker.poll(http, OWN)
    assert asker.view.error == "the answer was cut off" and ids(asker)
    peer.reply = interim_first
    asker.poll(http, OWN)
    assert asker.view.error == "" and asker.answer.headers["etag"] == '"10"'


def test_a_connection_that_was_closed_while_it_was_idle_costs_no_answer(peer: FakePeer, http: Http) -> None:
    asker = Peer(options(peer))
    asker.poll(http, OWN)
    for _ in range(3):
        peer.stop()
        peer.start()
        asker.poll(http, OWN)
        assert asker.view.error == "" and asker.failures_count == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_tls_with_an_authority_of_ones_own(peer: FakePeer, http: Http, tmp_path: Path) -> None:
    """The right authority; none; another one; a certificate of another host; no TLS at all."""
    ours, others, elsewhere = (
        _certificate(tmp_path / name, alternative)
        for name, alternative in (("a", "IP:127.0.0.1"), ("b", "IP:127.0.0.1"), ("c", "DNS:elsewhere"))
    )
    plain = peer.url.replace("http:", "https:")
    asker = Peer(PeerOptions(url=plain, name="n7", ca_file=ours[0], timeout_s=2.0))
    asker.poll(http, OWN)
    assert asker.view.error and not asker.view.has_graph and "\n" not in asker.view.error
    peer.tls(*ours)
    asker.poll(http, OWN)
    assert asker.view.error == "" and ids(asker)
    for ca_file in ("", others[0]):
        asker = Peer(PeerOptions(url=plain, name="n7", ca_file=ca_file, token="hush"))
        asked = len(peer.asked)
        asker.poll(http, OWN)
        assert "certificate verify failed" in asker.view.error and len(peer.asked) == asked, "nothing was said to it"
    peer.stop()
    peer.start()
    peer.tls(*elsewhere)
    asker = Peer(PeerOptions(url=plain, name="n7", ca_file=elsewhere[0]))
    asker.poll(http, OWN)
    assert "certificate verify failed" in asker.view.error
    for wrong in (str(tmp_path / "none.pem"), __file__):
        asker = Peer(PeerOptions(url=plain, name="n7", ca_file=wrong))
        asker.poll(http, OWN)
        assert asker.view.error.startswith(f"the CA file {wrong} cannot be used")


def _certificate(folder: Path, alternative: str) -> tuple[str, str]:
    folder.mkdir()
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
         "-subj", "/CN=peer", "-addext", f"subjectAltName={alternative}", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


def test_rubbish_instead_of_http(peer: FakePeer, http: Http) -> None:
    peer.reply = lambda handler: (handler.wfile.write(b"\0\1\2 nothing\r\n\r\n"), handler.wfile.flush())[1]
    asker = Peer(options(peer, timeout_s=1.0))
    asker.poll(http, OWN)
    assert asker.view.error and "\n" not in asker.view.error


def test_the_paths_of_older_and_other_instances_are_found(peer: FakePeer, http: Http) -> None:
    del peer.bodies[LATEST]
    peer.set_round(graph(3), path="/graph")
    asker = Peer(options(peer))
    asker.poll(http, OWN)
    asker.poll(http, OWN)
    assert asker.view.has_graph
    assert [path.partition("?")[0] for path, _ in peer.asked] == [LATEST, "/graph", "/graph"]
    peer.bodies.clear()
    asker.poll(http, OWN)
    assert "no graph under any path" in asker.view.error and asker.view.has_graph
    peer.set_round(graph(4), number=4)
    asker.poll(http, OWN)
    assert asker.view.error == "" and peer.asked[-1][0].startswith(LATEST), "it was updated meanwhile"


def test_a_peer_of_the_reference_system(peer: FakePeer, http: Http) -> None:
    """It knows /graph only, in its envelope, without a validator; the same again is not read again."""
    peer.bodies.clear()
    peer.bodies["/graph"] = (ROOT / "tests/data/witty/vllm-tp4-npu.json").read_bytes()
    asker = Peer(options(peer))
    asker.poll(http, OWN)
    assert asker.view.error == "" and len(ids(asker)) > 100 and all("(ns=n7," in id_ for id_ in ids(asker))
    assert asker.view.host is not None and asker.view.host.attributes["instance_kind"] == "witty-profiler"
    assert asker.view.offset_s is not None and asker.view.offset_error_s is not None
    assert abs(asker.view.offset_s) <= asker.view.offset_error_s and asker.view.offset_error_s > 0.5, "by its Date"
    copy = asker.view.copy
    asker.poll(http, OWN)
    assert asker.view.copy is copy and asker.wholes_count == 1


def test_a_newer_peer_in_one_line(peer: FakePeer, http: Http) -> None:
    """Of a newer schema; of a newer API, which has none of the paths known here."""
    peer.bodies[LATEST] = b'{"schema":99,"nodes":{"new":"form"}}'
    asker = Peer(options(peer))
    asker.poll(http, OWN)
    assert "schema 99 is newer" in asker.view.error and "update gpuflight" in asker.view.error
    peer.bodies.clear()
    asker.poll(http, OWN)
    assert "another API version" in asker.view.error
    assert "\n" not in asker.view.error


def test_retry_after(peer: FakePeer, http: Http) -> None:
    peer.reply = lambda handler: handler.answer(429, b"", Retry_After="17")
    asker = Peer(options(peer))
    asker.poll(http, OWN)
    assert asker.retry_after_s == 17.0 and asker.failures_count == 1


# --- the collector ---------------------------------------------------------------------------------------------------


class Parent:
    """A collector with its threads on a machine with a real clock."""

    def __init__(self, *urls: str, **options: Any) -> None:
        self.world: World = FakeMachine(rich_machine()).world
        self.world.http = Http()
        self.world.clock = SystemClock()
        peers = [{"url": url, "name": f"n{7 + index}"} for index, url in enumerate(urls)]
        defaults = {"interval_s": 0.1, "timeout_s": 2.0, "backoff_max_s": 0.2}
        self.collector = Remote(RemoteSettings.model_validate({"peers": peers, **defaults, **options}))
        self.slowest_s = 0.0

    def round(self) -> dict[str, Any]:
        self.collector.notes.clear()
        started_s = time.thread_time(), time.monotonic()
        self.collector.observe(self.world)
        self.slowest_s = max(self.slowest_s, time.monotonic() - started_s[1])
        return {entity.id: entity for entity in self.collector.seed().nodes}

    def __enter__(self) -> Parent:
        return self

    def __exit__(self, *_: object) -> None:
        self.collector.close()
        self.world.http.close()


def test_d16_killed_and_started_again(peer: FakePeer) -> None:
    peer.stop()
    with Parent(peer.url) as parent:
        until(lambda: not parent.round() and any("refused" in note for note in parent.collector.notes))
        peer.start()
        until(lambda: HOST in parent.round())
        peer.stop()
        until(lambda: parent.round()[HOST].attributes.get("stale") is True)
        assert "Process(ns=n7,pid=1,start=1)" in parent.round()
        peer.start()
        peer.set_round(graph(2), number=2)
        until(lambda: "Process(ns=n7,pid=2,start=1)" in parent.round())
        assert "stale" not in parent.round()[HOST].attributes


def test_a_peer_that_is_gone_for_long_ends(peer: FakePeer) -> None:
    with Parent(peer.url, end_after_s=0.2) as parent:
        until(lambda: HOST in parent.round())
        peer.stop()
        until(lambda: not parent.round())
        assert any("its graph has ended" in note for note in parent.collector.notes)


def test_no_round_waits_for_a_peer_and_none_for_another(peer: FakePeer) -> None:
    stop = threading.Event()
    with FakePeer() as silent:
        silent.reply = lambda handler: (stop.wait(60), handler.answer(500, b""))[1]
        with Parent(*[silent.url] * 5, peer.url, timeout_s=30.0) as parent:
            until(lambda: "Host(ns=n12,node-7)" in parent.round())
            assert len(silent.asked) >= 1
            assert parent.slowest_s < 1.0
            stop.set()


def test_nobody_is_asked_while_no_rounds_are_made(peer: FakePeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuflight.collectors.remote._IDLE_S", 0.0)
    monkeypatch.setattr("gpuflight.collectors.remote._IDLE_ROUNDS", 20.0)
    with Parent(peer.url) as parent:
        until(lambda: HOST in parent.round())
        until(lambda: not parent.collector._wanted_now())
        asked = len(peer.asked)
        time.sleep(0.5)  # five intervals
        assert len(peer.asked) <= asked + 1, "one may have been under way"
        until(lambda: parent.round() and len(peer.asked) > asked + 2)


def test_nothing_is_left_behind(peer: FakePeer) -> None:
    before = set(threading.enumerate())
    with Parent(peer.url) as parent:
        until(lambda: HOST in parent.round())
    left = [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("gpuflight-remote")]
    assert left == []


def test_a_recording_shows_the_same_without_asking(peer: FakePeer, tmp_path: Path) -> None:
    path = str(tmp_path / "recording.tar.zst")
    collector = Remote(RemoteSettings.model_validate({"peers": [{"url": peer.url, "name": "n7"}], "interval_s": 0.1}))
    world = open_world(record=path)
    shown: list[Graph] = []
    try:
        number = 0
        while not shown or HOST not in shown[-1] or len(shown) < 3:
            number += 1
            assert number < 500
            world.begin_round(number)
            collector.observe(world)
            batch = collector.seed()
            shown.append(Graph(batch.nodes, batch.edges))
            time.sleep(0.01)
    finally:
        collector.close()
        world.close()
    asked = len(peer.asked)
    peer.stop()
    again = Remote(RemoteSettings.model_validate({"peers": [{"url": peer.url, "name": "n7"}]}))
    replay = open_world(replay=path)
    try:
        for number, expected in enumerate(shown, 1):
            replay.begin_round(number)
            again.observe(replay)
            assert list(Graph(again.seed().nodes).nodes) == list(expected.nodes)
    finally:
        again.close()
        replay.close()
    assert len(peer.asked) == asked and Tape.replay(path).meta


def test_two_controllers_one_pulls_the_other(peer: FakePeer) -> None:
    """A child's whole round, made by the core, arrives as it is; the core expands nothing of it."""
    from gpuflight.cli.plugin_settings import make_collectors
    from gpuflight.round_codec import encode_round

    settings = Settings()
    child_world = FakeMachine(rich_machine()).world
    child = Controller(
        child_world, settings=settings, collectors=[one for one in make_collectors(settings) if one.name != "nvml"]
    )
    done = child.run_round()
    done.env.machine_id = done.env.boot_id = "another"
    peer.bodies[LATEST], peer.etags[LATEST] = encode_round(done), '"77"'
    with Parent(peer.url) as pulling:
        parent = Controller(pulling.world, settings=settings, collectors=[pulling.collector])
        until(lambda: "Host(ns=n7,node1)" in parent.run_round().graph)
        graph = parent.run_round().graph
        assert len(graph.nodes) == len(done.graph.nodes) and len(graph.edges) == len(done.graph.edges)
        assert all(entity.ns == "n7" for entity in graph)
    child.close()
