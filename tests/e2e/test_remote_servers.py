"""Instances that pull instances: the installed server as child and as parent."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from tests.e2e.test_remote_real import Parent
from tests.e2e.test_server_real import running, wait_ready
from tests.fakes.peer import FakePeer

from gpuflight.collectors.remote_peer import Peer, PeerOptions
from gpuflight.graph import Graph, nodes
from gpuflight.graph.load import parse_graph
from gpuflight.graph.namespaces import with_namespace
from gpuflight.sources.http import Http

PATIENCE_S = 60.0
PULLING = {"collectors": {"remote": {"interval_s": 0.2, "backoff_max_s": 0.3}}}


def until(reached: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + PATIENCE_S
    while not (found := reached()):
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.02)
    return found


def entities(url: str) -> dict[str, dict[str, Any]]:
    found = httpx.get(f"{url}/api/v1/graph").raise_for_status().json()["nodes"]
    return {entity["id"]: entity for entity in found}


def coverage(url: str) -> dict[str, Any]:
    lines = httpx.get(f"{url}/api/v1/graph").raise_for_status().json()["coverage"]
    return next(line for line in lines if line["collector"] == "remote")


def test_a_server_is_pulled(tmp_path: Path) -> None:
    """By a parent on another machine, as its identity says: a whole round, then 304 or the next one."""
    with running(tmp_path) as child:
        wait_ready(child.url)
        with Parent(child.url) as parent:
            shown = until(parent.round)
            real = entities(child.url)
            assert any(entity.kind == "Process" for entity in shown.values())
            assert all(entity.ns == "n7" for entity in shown.values())
            (host,) = [entity for entity in shown.values() if entity.kind == "Host"]
            assert abs(host.metrics["clock_offset_s"]) <= host.metrics["clock_offset_error_s"]
            until(lambda: _host(parent.round()).metrics["clock_offset_error_s"] < 0.1)  # the best of some exchanges
            assert len(shown) > len(real) / 2
            child.process.kill()
            child.process.wait()
            until(lambda: any(entity.attributes.get("stale") for entity in parent.round().values()))


def _host(shown: dict[str, Any]) -> Any:
    return next(entity for entity in shown.values() if entity.kind == "Host")


def test_a_server_is_followed_by_differences_and_the_copy_is_its_graph(tmp_path: Path) -> None:
    """Real rounds of this machine, and what the server itself says of the very round that the parent has."""
    with running(tmp_path, config={"history": {"max_bytes": 64 << 20}}) as child, Parent(child.url) as parent:
        wait_ready(child.url)
        (peer,) = parent.collector._peers
        until(lambda: parent.round() and peer.diffs_count >= 12)
        parent.collector.close()
        lists = peer.view.copy.lists() if peer.view.copy else None
        assert lists is not None and peer.wholes_count <= 3 and peer.misfits_count == 0
        answer = httpx.get(f"{child.url}/api/v1/graph?round={peer.view.round_number}").raise_for_status()
        theirs = with_namespace(parse_graph(answer.content).graph, "n7")
        (host,) = theirs.of_kind(nodes.Host)
        assert {entity.id: entity for entity in lists.entities} == {
            id_: entity for id_, entity in theirs.nodes.items() if id_ != host.id
        }
        assert {edge.key: edge for edge in lists.connections} == theirs.edges
        assert peer.view.host is not None and peer.view.host.metrics == host.metrics


def test_a_server_that_was_killed_and_started_again_is_read_whole_once(tmp_path: Path) -> None:
    """At the same address, with rounds of the same numbers."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with ExitStack() as stack:
        child = stack.enter_context(running(tmp_path, config={"server": {"port": port}}))
        wait_ready(child.url)
        parent = stack.enter_context(Parent(child.url, timeout_s=10.0))
        (peer,) = parent.collector._peers
        wholes = []
        for _ in range(3):
            told, before = peer.diffs_count, peer.wholes_count
            until(lambda told=told: parent.round() and peer.diffs_count > told + 2)
            wholes.append(peer.wholes_count - before)
            assert peer.misfits_count == 0
            child.process.kill()
            child.process.wait()
            until(lambda: any(entity.attributes.get("stale") for entity in parent.round().values()))
            child = stack.enter_context(running(tmp_path, config={"server": {"port": port}}))
        # A parent that a busy machine kept waiting for longer than the child keeps rounds has to read it whole again.
        assert min(wholes) == 1 and max(wholes) <= 2, wholes


def test_the_reference_system_as_master_reads_us(tmp_path: Path) -> None:
    """It asks for /graph, knows no ETag, and takes an envelope with its own form of the graph apart."""
    with running(tmp_path) as child:
        wait_ready(child.url)
        answer = httpx.get(f"{child.url}/graph", headers={"accept": "*/*", "accept-encoding": "gzip, deflate"})
        told = answer.raise_for_status().json()
        assert set(told) == {"env", "content"} and {"local_ip", "hostname", "machine_id"} <= set(told["env"])
        assert all({"entity_type", "entity_namespace"} <= node.keys() for node in told["content"]["nodes"])
        assert all({"edge_type", "source_node", "target_node"} <= edge.keys() for edge in told["content"]["edges"])
        read = parse_graph(answer.content)
        assert read.origin == "witty-profiler" and any(entity.kind == "Process" for entity in read.graph)
        asker = Peer(PeerOptions(url=child.url, name="n7"))
        asker._path = 1
        http = Http()
        try:
            asker.poll(http, ("m", "b"))
        finally:
            http.close()
        assert asker.view.error == "" and asker.view.copy is not None
        assert len(asker.view.copy.lists().entities) > len(read.graph.nodes) / 2
        for action in ("start", "stop"):
            assert "content" in httpx.post(f"{child.url}/control/{action}").raise_for_status().json()


def test_a_server_pulls_and_serves_what_it_pulled(tmp_path: Path) -> None:
    with FakePeer() as peer:
        peer.set_round(Graph([nodes.Host(hostname="node-7"), nodes.Process(pid=1, start=1)]))
        peer.token = "hush"
        config = {**PULLING, "remotes": [{"url": peer.url, "name": "n7", "token": "hush"}]}
        with running(tmp_path, config=config) as server:
            wait_ready(server.url)
            until(lambda: "Process(ns=n7,pid=1,start=1)" in entities(server.url))
            assert "hush" not in httpx.get(f"{server.url}/api/v1/config").text
            peer.stop()
            host = until(lambda: _stale(entities(server.url)))
            assert host["metrics"]["stale_s"] >= 0
            assert "its last graph stands" in coverage(server.url)["notes"][0]["reason"]


def _stale(found: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    host = found.get("Host(ns=n7,node-7)", {})
    return host if host.get("attributes", {}).get("stale") else None


def test_a_server_that_pulls_itself_says_so(tmp_path: Path) -> None:
    """The smallest circle: two instances of one machine."""
    child_folder, parent_folder = tmp_path / "child", tmp_path / "parent"
    child_folder.mkdir()
    parent_folder.mkdir()
    with running(child_folder) as child:
        wait_ready(child.url)
        with running(parent_folder, config={**PULLING, "remotes": [{"url": child.url, "name": "me"}]}) as parent:
            wait_ready(parent.url)
            notes = until(lambda: [n for n in coverage(parent.url).get("notes", []) if "this very host" in n["reason"]])
            assert notes[0]["reason"].startswith("me: ")
            assert not [id_ for id_ in entities(parent.url) if "ns=me" in id_]
