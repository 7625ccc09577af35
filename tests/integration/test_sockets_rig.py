"""Real processes with real sockets: every connection between the right processes, none twice, none false."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.services.service import free_port

from gpuflight.collectors.base import Collector
from gpuflight.collectors.sockets import Sockets
from gpuflight.collectors.unix_sockets import UnixSockets
from gpuflight.graph import Graph, edges, nodes
from gpuflight.sources.netlink import Netlink
from gpuflight.sources.open import open_world
from gpuflight.sources.world import World

RIG = Path(__file__).with_name("socket_rig.py")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="making network namespaces needs root")
pytestmark = pytest.mark.rig


class Child:
    """A process of the rig. ``words`` are what it said when it was ready."""

    def __init__(self, *arguments: str, **options: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(RIG), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,  # type: ignore[call-overload]
        )
        self.pid: int = self.process.pid
        self.words: list[str] = []

    def wait_ready(self) -> Child:
        assert self.process.stdout is not None
        first, *self.words = self.process.stdout.readline().split()
        if first != "ready":
            pytest.skip(f"the rig cannot run here: {first} {' '.join(self.words)}")
        return self

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def start_one(*arguments: str, **options: object) -> Child:
            child = Child(*arguments, **options)
            stack.callback(child.end)
            return child.wait_ready()

        yield start_one


@pytest.fixture
def world() -> Iterator[World]:
    opened = open_world()
    yield opened
    opened.close()


def capture(world: World, collector: Collector, number: int = 1) -> Graph:
    world.begin_round(number)
    collector.observe(world)
    batch = collector.seed()
    keys = [edge.key for edge in batch.edges]
    assert len(keys) == len(set(keys)), "an edge twice"
    graph = Graph(batch.nodes, batch.edges)
    assert graph.dangling() == []
    return graph


def between(graph: Graph, *pids: int) -> list[tuple[int, int]]:
    """(pid, pid) of every connection that touches one of these processes, at process level; 0: no process."""
    owners: dict[str, set[int]] = {}
    for edge in graph.edges_of_kind(edges.Belong):
        owners.setdefault(edge.source, set()).add(graph.nodes[edge.target].pid)
    found = []
    for edge in graph.edges_of_kind(edges.ConnectTo):
        for source in owners.get(edge.source, {0}):
            for target in owners.get(edge.target, {0}):
                if source in pids or target in pids:
                    found.append((source, target))
    return sorted(found)


def edge_of(graph: Graph, client: int) -> edges.ConnectTo:
    """The one connection that a process opened."""
    ids = {edge.source for edge in graph.edges_of_kind(edges.Belong) if graph.nodes[edge.target].pid == client}
    (found,) = [edge for edge in graph.edges_of_kind(edges.ConnectTo) if edge.source in ids]
    return found


@pytest.mark.parametrize(
    ("listen", "to"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")]
)
def test_tcp_pair(start: Start, world: World, listen: str, to: str) -> None:
    if ":" in listen and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    server = start("tcp_server", listen)
    client = start("tcp_client", to, server.words[0])
    graph = capture(world, Sockets())
    assert between(graph, server.pid, client.pid) == [(client.pid, server.pid)]
    edge = edge_of(graph, client.pid)
    assert "direction" not in edge.attributes
    assert "half" not in edge.attributes
    if "rtt_ms" not in (edge.unknown or {}):
        assert edge.metrics["bytes_sent_count"] == edge.metrics["bytes_received_count"] == 1000
        assert 0 < edge.metrics["rtt_ms"] < 1000


def test_udp_pair_connected_at_both_ends(start: Start, world: World) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = start("udp_connected", "127.0.0.1", str(port))
    two = start("udp_connected", "127.0.0.1", one.words[0], str(port))
    graph = capture(world, Sockets())
    assert between(graph, one.pid, two.pid) in ([(one.pid, two.pid)], [(two.pid, one.pid)])


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_udp_client_of_a_bound_socket(start: Start, world: World, address: str) -> None:
    server = start("udp_bound", address)
    client = start("udp_connected", "127.0.0.1", server.words[0])
    assert between(capture(world, Sockets()), server.pid, client.pid) == [(client.pid, server.pid)]


def test_socketpair(start: Start, world: World) -> None:
    one, two = socket.socketpair()
    with one, two:
        first = start("inherited", str(one.fileno()), pass_fds=[one.fileno()])
        second = start("inherited", str(two.fileno()), pass_fds=[two.fileno()])
    graph = capture(world, UnixSockets())
    assert between(graph, first.pid, second.pid) in ([(first.pid, second.pid)], [(second.pid, first.pid)])


@pytest.mark.parametrize("abstract", [False, True])
def test_named_unix_pair(start: Start, world: World, tmp_path: Path, abstract: bool) -> None:
    path = f"@gpuflight-{uuid.uuid4()}" if abstract else str(tmp_path / "s")
    server = start("unix_server", path)
    client = start("unix_client", path)
    graph = capture(world, UnixSockets())
    assert between(graph, server.pid, client.pid) == [(client.pid, server.pid)]
    assert graph.nodes[edge_of(graph, client.pid).target].attributes["path"] == path


def test_short_connection_between_two_rounds(start: Start, world: World) -> None:
    """T03: connected and closed between two rounds."""
    collector = Sockets()
    server = start("tcp_short_server", "127.0.0.1")
    port = server.words[0]
    client = start("after_line", "tcp_short", "127.0.0.1", port)
    assert between(capture(world, collector), server.pid, client.pid) == []
    client.go()
    client.wait_ready()
    server.wait_ready()
    graph = capture(world, collector, 2)
    edge = graph.edges[f"Socket(tcp,127.0.0.1:{client.words[0]})", f"Socket(tcp,127.0.0.1:{port})", "ConnectTo"]
    assert edge.attributes["ended"] is True
    assert between(graph, server.pid) == [(0, server.pid)]


@needs_root
def test_same_addresses_in_two_namespaces_do_not_cross(start: Start, world: World) -> None:
    """T01: three namespaces with the very same loopback connection."""
    port = free_port()  # and the next one: neither is of those that connections get
    here = start("tcp_pair", str(port))
    one = start("in_new_namespace", "tcp_pair", str(port))
    two = start("in_new_namespace", "tcp_pair", str(port))
    graph = capture(world, Sockets())
    assert between(graph, here.pid, one.pid, two.pid) == sorted((pid, pid) for pid in (here.pid, one.pid, two.pid))
    sockets = [node for node in graph.of_kind(nodes.Socket) if node.address == f"127.0.0.1:{port}"]
    assert len({node.netns for node in sockets}) == 3
    assert 0 in {node.netns for node in sockets}


@needs_root
def test_unix_pair_inside_a_namespace(start: Start, world: World) -> None:
    path = f"@gpuflight-{uuid.uuid4()}"
    server = start("in_new_namespace", "unix_server", path)
    graph = capture(world, UnixSockets())
    (listener,) = [node for node in graph.of_kind(nodes.UnixSocket) if node.attributes.get("path") == path]
    assert listener.attributes["netns"] == os.stat(f"/proc/{server.pid}/ns/net").st_ino
    assert (listener.id, world.procfs.id_of(server.pid), "Belong") in graph


@pytest.fixture
def veth(start: Start) -> Iterator[tuple[Child, str, str]]:
    """A process in a namespace of its own that is reached over veth: (it, address here, address there)."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a veth pair needs root and the command ip")
    far = start("in_new_namespace", "after_line", "tcp_server", "0.0.0.0", "29555")
    name = f"gf{os.getpid() % 100000}"
    here, there = "10.213.7.1", "10.213.7.2"
    commands = [
        ["ip", "link", "add", name, "type", "veth", "peer", "name", name + "p", "netns", str(far.pid)],
        ["ip", "addr", "add", f"{here}/24", "dev", name],
        ["ip", "link", "set", name, "up"],
        ["nsenter", "-t", str(far.pid), "-n", "ip", "addr", "add", f"{there}/24", "dev", name + "p"],
        ["nsenter", "-t", str(far.pid), "-n", "ip", "link", "set", name + "p", "up"],
    ]
    try:
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no veth here: {done.stderr.strip()}")
        yield far, here, there
    finally:
        subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)


def test_connection_between_two_namespaces_joins_over_veth(
    start: Start, world: World, veth: tuple[Child, str, str]
) -> None:
    """T02: the ends are found in different dumps."""
    server, here, there = veth
    server.go()
    server.wait_ready()
    client = start("tcp_client", there, server.words[0])
    graph = capture(world, Sockets())
    assert between(graph, server.pid, client.pid) == [(client.pid, server.pid)]
    edge = edge_of(graph, client.pid)
    netns = os.stat(f"/proc/{server.pid}/ns/net").st_ino
    assert (graph.nodes[edge.source].address, graph.nodes[edge.source].netns) == (f"{here}:{client.words[0]}", 0)
    assert (graph.nodes[edge.target].address, graph.nodes[edge.target].netns) == (f"{there}:29555", netns)
    assert edge.metrics["bytes_sent_count"] == 1000


def test_namespace_is_not_kept_alive(start: Start, world: World) -> None:
    if os.geteuid() != 0:
        pytest.skip("making network namespaces needs root")
    child = start("in_new_namespace", "empty")
    netns = os.stat(f"/proc/{child.pid}/ns/net").st_ino
    capture(world, Sockets())
    child.end()
    held = []
    for name in os.listdir("/proc/self/fd"):
        try:
            held.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    assert f"net:[{netns}]" not in held
    assert os.stat("/proc/thread-self/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino
    capture(world, Sockets(), 2)


def test_without_netlink_the_pair_is_still_found(start: Start, world: World) -> None:
    def refuse(protocol: int) -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    world.netlink = Netlink(world.procfs, connect=refuse)
    server = start("tcp_server", "127.0.0.1")
    client = start("tcp_client", "127.0.0.1", server.words[0])
    collector = Sockets()
    graph = capture(world, collector)
    assert between(graph, server.pid, client.pid) == [(client.pid, server.pid)]
    assert edge_of(graph, client.pid).unknown
    assert any("/proc/net" in reason for reason in collector.notes)
    unix = UnixSockets()
    capture(world, unix, 2)
    assert any("peers" in reason for reason in unix.notes)


def test_recording_replays_the_same_picture(start: Start, tmp_path: Path) -> None:
    server = start("tcp_server", "127.0.0.1")
    client = start("tcp_client", "127.0.0.1", server.words[0])
    recording = tmp_path / "r.tar.zst"
    world = open_world(record=recording)
    taken = capture(world, Sockets()), capture(world, UnixSockets())
    world.close()
    replayed = open_world(replay=recording)
    again = capture(replayed, Sockets()), capture(replayed, UnixSockets())
    pair = [(client.pid, server.pid)]
    assert between(again[0], server.pid, client.pid) == between(taken[0], server.pid, client.pid) == pair
    once_more = open_world(replay=recording)
    assert (capture(once_more, Sockets()), capture(once_more, UnixSockets())) == again


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_as_an_ordinary_user(start: Start) -> None:
    """What the user may see is joined; for the rest: no traceback, no false edge, one note with a count and a hint."""
    theirs = start("tcp_server", "127.0.0.1")
    start("tcp_client", "127.0.0.1", theirs.words[0])
    mine = start("as_nobody", "tcp_server", "127.0.0.1")
    client = start("as_nobody", "tcp_client", "127.0.0.1", mine.words[0])
    done = subprocess.run([sys.executable, str(RIG), "look_as_nobody"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert [part["dangling"] for part in answers.values()] == [0, 0]
    answer = answers["sockets"]
    found = {tuple(edge) for edge in answer["edges"]}
    source, target = f"Socket(tcp,127.0.0.1:{client.words[0]})", f"Socket(tcp,127.0.0.1:{mine.words[0]})"
    assert ("ConnectTo", source, target) in found
    owned = {(kind, end, process.split(",")[0]) for kind, end, process in found if kind == "Belong"}
    assert ("Belong", source, f"Process(pid={client.pid}") in owned
    assert ("Belong", target, f"Process(pid={mine.pid}") in owned
    unowned = f"Socket(tcp,127.0.0.1:{theirs.words[0]})"
    assert not [edge for edge in found if edge[0] == "Belong" and edge[1] == unowned]
    assert [edge for edge in found if edge[0] == "ConnectTo" and edge[2] == unowned]
    hint, count = answer["notes"]["sockets whose process may not be looked into"]
    assert "CAP_SYS_PTRACE" in hint
    assert count >= 3
