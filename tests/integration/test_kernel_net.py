"""What the kernel's programs say of sockets is what was sent, to the byte, by whom, on the edge that others draw."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.kernel_rig import Puppet, Watch, needs_probes, watching

from gpuflight.graph import nodes

pytestmark = needs_probes
SNAPSHOTS = ("process_tree", "sockets", "unix_sockets")


@pytest.fixture
def child() -> Iterator[Puppet]:
    with Puppet() as puppet:
        puppet.do("import socket, os, threading")
        yield puppet


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def port_of(made: socket.socket) -> int:
    return int(made.getsockname()[1])


def connected(child: Puppet, listener: socket.socket) -> tuple[socket.socket, str]:
    """The child connects; our end of it, and the endpoint of the child's."""
    child.do(f"c = socket.create_connection(('127.0.0.1', {port_of(listener)}))")
    ours, (address, port) = listener.accept()
    return ours, f"Socket(tcp,{address}:{port})"


def exchange(child: Puppet, ours: socket.socket) -> None:
    """The child sends 10 × 1000 bytes and reads 4096 in 2 calls of 2048."""
    child.do("for _ in range(10): c.sendall(b'x' * 1000)")
    left = 10_000
    while left:
        left -= len(ours.recv(left))
    ours.sendall(b"y" * 4096)
    child.do("for _ in range(2): c.recv(2048, socket.MSG_WAITALL)")


def test_bytes_and_calls_of_a_connection_stand_at_the_process_and_on_the_edge_of_the_snapshot(
    child: Puppet, listener: socket.socket
) -> None:
    with watching(*SNAPSHOTS, "kernel_net") as watch:
        ours, client = connected(child, listener)
        watch.round()
        exchange(child, ours)
        graph = watch.round()
        server = f"Socket(tcp,127.0.0.1:{port_of(listener)})"
        held = watch.edge("Belong", client, watch.process(child.pid)).metrics
        assert held["sent_bytes_per_s"] == 10_000 and held["received_bytes_per_s"] == 4096
        assert held["sends_per_s"] == 10 and held["receives_per_s"] == 2
        edge = watch.edge("ConnectTo", client, server)
        assert edge.metrics["bytes_sent_per_s"] == 10_000 and edge.metrics["sends_per_s"] == 10
        assert edge.metrics["connect_ms"] >= 0 and edge.attributes["state"] == "ESTABLISHED"
        assert (server, client, "ConnectTo") not in graph.edges
        assert graph.nodes[watch.process(child.pid)].metrics["socket_sent_bytes_per_s"] == 10_000
        quiet = watch.round().edges[client, server, "ConnectTo"]
        assert quiet.metrics["sends_per_s"] == 0
        ours.close()


def test_looking_at_what_is_there_counts_once(child: Puppet, listener: socket.socket) -> None:
    """MSG_PEEK leaves the bytes where they are."""
    with watching("kernel_net") as watch:
        ours, client = connected(child, listener)
        ours.sendall(b"z" * 100)
        child.do("c.recv(100, socket.MSG_PEEK); c.recv(100)")
        watch.round()
        held = watch.edge("Belong", client, watch.process(child.pid)).metrics
        assert held["received_bytes_per_s"] == 100 and held["receives_per_s"] == 1
        ours.close()


def test_threads_of_a_process_are_told_apart(child: Puppet, listener: socket.socket) -> None:
    with watching("kernel_net") as watch:
        ours, client = connected(child, listener)
        child.do("t = threading.Thread(target=lambda: c.sendall(b'x' * 30)); t.start(); t.join(); c.sendall(b'x' * 12)")
        watch.round()
        used = {edge.source: edge for edge in watch.edges("Access") if edge.target == client}
        sent = {source: edge.metrics["sent_bytes_per_s"] for source, edge in used.items()}
        assert sorted(sent.values()) == [12, 30]
        assert next(source for source, bytes_ in sent.items() if bytes_ == 12).startswith(f"Thread(tid={child.pid},")
        assert all(edge.attributes["target_processes"] == [watch.process(child.pid)] for edge in used.values())
        assert watch.edge("Belong", client, watch.process(child.pid)).metrics["sent_bytes_per_s"] == 42
        ours.close()


def test_a_connection_that_no_snapshot_saw_is_told_with_its_totals_and_only_once(
    child: Puppet, listener: socket.socket
) -> None:
    with watching(*SNAPSHOTS, "kernel_net") as watch:
        ours, client = connected(child, listener)
        exchange(child, ours)
        child.do("c.close()")
        assert ours.recv(1) == b""
        ours.close()
        watch.round()
        edge = watch.edge("ConnectTo", client, f"Socket(tcp,127.0.0.1:{port_of(listener)})")
        assert edge.attributes["ended"] is True
        assert (edge.metrics["bytes_sent_count"], edge.metrics["bytes_received_count"]) == (10_000, 4096)
        assert edge.metrics["retransmits_count"] == 0 and edge.metrics["segments_sent_count"] >= 6
        assert edge.metrics["duration_ms"] > 0 and edge.metrics["connect_ms"] > 0
        assert watch.edge("Belong", client, watch.process(child.pid)).metrics["sent_bytes_per_s"] == 10_000
        waited = watch.graph.nodes[watch.process(child.pid)]
        assert sum(waited.attributes["connect_us_log2"]) == 1 and waited.metrics["connects_per_s"] == 1
        again = watch.round()
        assert not [key for key in again.edges if client in key and again.edges[key].metrics.get("bytes_sent_count")]


def test_a_client_that_is_gone_before_the_round_is_still_named(listener: socket.socket) -> None:
    with watching("process_tree", "sockets", "kernel_net", "kernel_process") as watch:
        with Puppet() as short:
            short.do("import socket")
            ours, client = connected(short, listener)
            short.do("c.sendall(b'x' * 77); c.close()")
            assert ours.recv(100) == b"x" * 77
            pid = short.pid
        ours.close()
        graph = watch.round()
        edge = next(edge for edge in watch.edges("ConnectTo", ended=True) if edge.source == client)
        [process] = edge.attributes["source_processes"]
        assert process.startswith(f"Process(pid={pid},") and edge.metrics["bytes_sent_count"] == 77
        gone = graph.nodes[process]
        assert gone.attributes["ended"] is True and gone.attributes["exit_signal"] == 9


def test_a_connection_that_was_refused(child: Puppet, listener: socket.socket) -> None:
    port = port_of(listener)
    listener.close()
    with watching("kernel_net") as watch:
        answer = child.do(f"s = socket.socket(); answer = s.connect_ex(('127.0.0.1', {port}))")
        assert int(answer) == 111
        watch.round()
        [edge] = [edge for edge in watch.edges("ConnectTo") if edge.target == f"Socket(tcp,127.0.0.1:{port})"]
        assert edge.attributes["failed"] is True and edge.attributes["ended"] is True
        assert "connect_ms" not in edge.metrics
        assert watch.edge("Belong", edge.source, watch.process(child.pid))


@pytest.mark.parametrize("family, address", [("AF_INET", "127.0.0.1"), ("AF_INET6", "::1")])
def test_udp_has_bytes_too(child: Puppet, family: str, address: str) -> None:
    with watching(*SNAPSHOTS, "kernel_net") as watch, socket.socket(getattr(socket, family), socket.SOCK_DGRAM) as ours:
        ours.bind((address, 0))
        answer = child.do(
            f"c = socket.socket(socket.{family}, socket.SOCK_DGRAM); c.connect(('{address}', {port_of(ours)}));"
            "answer = c.getsockname()[1]"
        )
        child.do("for _ in range(5): c.send(b'x' * 300)")
        for _ in range(5):
            ours.recv(1000)
        watch.round()
        shown = f"[{address}]" if ":" in address else address
        edge = watch.edge("ConnectTo", f"Socket(udp,{shown}:{answer})", f"Socket(udp,{shown}:{port_of(ours)})")
        assert edge.metrics["bytes_sent_per_s"] == 1500 and edge.metrics["sends_per_s"] == 5
        child.do("c.close()")
        watch.round()  # one snapshot that lacks it says nothing yet
        watch.round()
        [over] = [edge for edge in watch.edges("ConnectTo", ended=True) if edge.source.endswith(f":{answer})")]
        assert over.metrics["bytes_sent_count"] == 1500
        watch.round()
        assert not [edge for edge in watch.edges("ConnectTo") if edge.source.endswith(f":{answer})")]


def test_unix_sockets(child: Puppet, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with watching(*SNAPSHOTS, "kernel_net") as watch, socket.socket(socket.AF_UNIX) as made:
        made.bind(path)
        made.listen()
        child.do(f"c = socket.socket(socket.AF_UNIX); c.connect({path!r})")
        ours, _ = made.accept()
        child.do("for _ in range(3): c.sendall(b'x' * 50)")
        assert len(ours.recv(150, socket.MSG_WAITALL)) == 150
        ours.sendall(b"y" * 7)
        child.do("c.recv(7)")
        watch.round()
        inode = int(child.do("answer = os.fstat(c.fileno()).st_ino"))
        [edge] = [edge for edge in watch.edges("ConnectTo") if f"UnixSocket(ino={inode})" in (edge.source, edge.target)]
        assert edge.source == f"UnixSocket(ino={inode})", "the end without a name connected"
        assert (edge.metrics["bytes_sent_per_s"], edge.metrics["bytes_received_per_s"]) == (150, 7)
        held = watch.edge("Belong", edge.source, watch.process(child.pid)).metrics
        assert held["sends_per_s"] == 3 and held["receives_per_s"] == 1
        ours.close()


def test_alone_it_draws_the_same_edges_as_beside_the_snapshots(child: Puppet, listener: socket.socket) -> None:
    """Nothing is drawn twice, whichever collector found it first and whoever of them is switched off."""
    with watching("kernel_net") as alone, watching(*SNAPSHOTS, "kernel_net") as beside:
        ours, client = connected(child, listener)
        child.do("a, b = socket.socketpair(); a.send(b'1'); b.recv(1)")
        exchange(child, ours)
        alone.round()
        beside.round()
        held = {edge.source for edge in alone.edges("Belong") if edge.target == alone.process(child.pid)}
        mine = {key for key in alone.graph.edges if key[2] == "ConnectTo" and held & {key[0], key[1]}}
        both = {key for key in beside.graph.edges if key[2] == "ConnectTo" and held & {key[0], key[1]}}
        assert (client, f"Socket(tcp,127.0.0.1:{port_of(listener)})", "ConnectTo") in mine and len(mine) >= 2
        assert mine <= both
        assert not [key for key in both if (key[1], key[0], key[2]) in both]
        ours.close()


@pytest.mark.skipif(not Path("/proc/self/ns/net").exists(), reason="no network namespaces")
def test_another_network_namespace() -> None:
    with Puppet("unshare", "-n") as inside, watching("kernel_net") as watch:
        inside.do("import socket, os, subprocess; subprocess.run(['ip', 'link', 'set', 'lo', 'up'])")
        netns = int(inside.do("answer = os.stat('/proc/self/ns/net').st_ino"))
        port = inside.do(
            "l = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(l.getsockname());"
            "a, _ = l.accept(); c.sendall(b'x' * 500); a.recv(500); answer = l.getsockname()[1]"
        )
        client = inside.do("answer = c.getsockname()[1]")
        watch.round()
        ends = [f"Socket(tcp,127.0.0.1:{which},netns={netns})" for which in (client, port)]
        edge = watch.edge("ConnectTo", *ends)
        assert edge.metrics["bytes_sent_per_s"] == 500
        assert watch.edge("Belong", ends[1], watch.process(inside.pid)).metrics["received_bytes_per_s"] == 500
        node = watch.graph.nodes[ends[0]]
        assert isinstance(node, nodes.Socket) and node.netns == netns


def test_a_short_connection_between_two_network_namespaces_is_one_edge() -> None:
    """Over a veth pair, as between two containers: both ends are found, in their own namespaces."""
    with Puppet("unshare", "-n") as here, Puppet("unshare", "-n") as there, watching("sockets", "kernel_net") as watch:
        for puppet in (here, there):
            puppet.do("import socket, os, subprocess; ip = lambda *words: subprocess.run(['ip', *words]).returncode")
        made = here.do(
            f"answer = ip('link', 'add', 'va', 'type', 'veth', 'peer', 'name', 'vb', 'netns', '{there.pid}')"
            " or ip('addr', 'add', '192.0.2.1/24', 'dev', 'va') or ip('link', 'set', 'va', 'up')"
        )
        up = there.do("answer = ip('addr', 'add', '192.0.2.2/24', 'dev', 'vb') or ip('link', 'set', 'vb', 'up')")
        if made != "0" or up != "0":
            pytest.skip("no veth here")
        spaces = [int(puppet.do("answer = os.stat('/proc/self/ns/net').st_ino")) for puppet in (here, there)]
        port = there.do("l = socket.create_server(('192.0.2.2', 0)); answer = l.getsockname()[1]")
        watch.round()
        own = here.do(
            f"c = socket.create_connection(('192.0.2.2', {port})); c.sendall(b'x' * 300); answer = c.getsockname()[1]"
        )
        there.do("a, _ = l.accept(); a.recv(300, socket.MSG_WAITALL); a.sendall(b'y' * 20)")
        here.do("c.recv(20, socket.MSG_WAITALL); c.close()")
        there.do("a.recv(1); a.close()")
        watch.round()
        ends = [
            f"Socket(tcp,192.0.2.1:{own},netns={spaces[0]})",
            f"Socket(tcp,192.0.2.2:{port},netns={spaces[1]})",
        ]
        found = [edge for edge in watch.edges("ConnectTo") if ends[0] in (edge.source, edge.target)]
        assert [(edge.source, edge.target) for edge in found] == [tuple(ends)]
        assert found[0].attributes["ended"] is True and "half" not in found[0].attributes
        assert (found[0].metrics["bytes_sent_count"], found[0].metrics["bytes_received_count"]) == (300, 20)
        assert found[0].attributes["source_processes"] == [watch.process(here.pid)]
        assert found[0].attributes["target_processes"] == [watch.process(there.pid)]


def test_how_long_a_connection_waits_for_accept(child: Puppet, listener: socket.socket) -> None:
    with watching("kernel_net", kernel_net={"accept_latency": True}) as watch:
        ours, client = connected(child, listener)
        ours.sendall(b"1")
        child.do("c.recv(1)")
        watch.round()
        edge = watch.edge("ConnectTo", client, f"Socket(tcp,127.0.0.1:{port_of(listener)})")
        assert edge.metrics["accept_ms"] > 0
        process = next(node for node in watch.graph.nodes.values() if "accept_us_log2" in node.attributes)
        assert sum(process.attributes["accept_us_log2"]) >= 1
        assert "on_accept" in watch.of("kernel_net").programs
        ours.close()


def test_what_finds_no_room_is_counted() -> None:
    with watching("kernel_net", kernel_net={"max_sockets": 64, "max_uses": 64}) as watch:
        made = [socket.socketpair() for _ in range(100)]
        for one, other in made:
            one.send(b"1")
            other.recv(1)
        watch.round()
        losses = watch.of("kernel_net").losses
        assert losses["uses of sockets that found no room"] >= 100
        for pair in made:
            for end in pair:
                end.close()


def test_too_many_ended_connections_are_counted(listener: socket.socket) -> None:
    with watching("kernel_net", kernel_net={"ended_limit": 3}) as watch:
        for _ in range(8):
            with socket.create_connection(listener.getsockname()) as made:
                ours, _ = listener.accept()
                made.sendall(b"1")
                ours.recv(1)
            assert ours.recv(1) == b""
            ours.close()
        watch.round()
        assert watch.of("kernel_net").losses["ended connections that are not shown"] >= 5
        assert len(watch.edges("ConnectTo", ended=True)) == 3


def test_rows_of_what_ended_are_given_back(listener: socket.socket) -> None:
    with watching("kernel_net") as watch:
        for _ in range(20):
            with socket.create_connection(listener.getsockname()) as made:
                made.sendall(b"1")
                ours, _ = listener.accept()
                ours.recv(1)
            assert ours.recv(1) == b""
            ours.close()
        port = port_of(listener)
        watch.round()
        watch.round()
        watch.round()
        left = watch.of("kernel_net")._flows.by_cookie.values()  # type: ignore[attr-defined]
        assert not [used for used in left if port in (used.row.local_port, used.row.remote_port) and used.row.ended_ns]


def test_a_recording_gives_the_same_picture(tmp_path: Path, child: Puppet, listener: socket.socket) -> None:
    path = tmp_path / "tape.gpuflight"
    pictures = []

    def picture(watch: Watch) -> set[tuple[str, ...]]:
        return {(*key, repr(sorted(edge.metrics.items()))) for key, edge in watch.graph.edges.items()}

    with watching("sockets", "kernel_net", record=path) as watch:
        ours, client = connected(child, listener)
        exchange(child, ours)
        watch.round()
        pictures.append(picture(watch))
        child.do("c.close()")
        threading.Thread(target=ours.recv, args=(1,)).start()
        watch.round()
        pictures.append(picture(watch))
        ours.close()
    assert any(client in key for key in pictures[0])
    with watching("sockets", "kernel_net", replay=path) as again:
        for expected in pictures:
            again.round()
            assert sorted(picture(again) ^ expected) == []
