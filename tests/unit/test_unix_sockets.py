"""The unix_sockets collector: peers, directions, owners."""

from __future__ import annotations

import pytest
from tests.fakes.sockets import FakeWorld, unix

from gpuflight.collectors.unix_sockets import UnixSockets, UnixSocketsSettings
from gpuflight.graph import Graph, edges, nodes
from gpuflight.sources.netlink import Limit, UnixSocketRecord, UnixTable


def look(world: FakeWorld, *records: UnixSocketRecord, collector: UnixSockets | None = None) -> Graph:
    collector = collector or UnixSockets()
    world.netlink.unix.sockets = list(records)
    collector.observe(world)  # type: ignore[arg-type]
    batch = collector.seed()
    graph = Graph(batch.nodes, batch.edges)
    assert graph.dangling() == []
    keys = [edge.key for edge in batch.edges]
    assert len(keys) == len(set(keys)), "an edge twice"
    return graph


def connections(graph: Graph) -> list[tuple[str, str]]:
    return sorted((edge.source, edge.target) for edge in graph.edges_of_kind(edges.ConnectTo))


def ends(*pairs: tuple[int, int]) -> list[tuple[str, str]]:
    return sorted((f"UnixSocket(ino={source})", f"UnixSocket(ino={target})") for source, target in pairs)


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


def test_named_stream_goes_from_client_to_server(world: FakeWorld) -> None:
    server, client = world.procfs.add(1, 10, 12), world.procfs.add(2, 11)
    graph = look(
        world,
        unix(10, state="LISTEN", path="/run/x", recv_queue=1, send_queue=128),
        unix(11, peer=12),
        unix(12, path="/run/x", peer=11, recv_queue=4, send_queue=5),
    )
    assert connections(graph) == ends((11, 12))
    assert {(edge.source, edge.target) for edge in graph.edges_of_kind(edges.Belong)} == {
        ("UnixSocket(ino=10)", server),
        ("UnixSocket(ino=12)", server),
        ("UnixSocket(ino=11)", client),
    }
    assert graph.nodes["UnixSocket(ino=10)"].metrics == {"backlog_count": 1, "backlog_max_count": 128}
    assert graph.nodes["UnixSocket(ino=12)"].metrics == {"recv_queue_bytes": 4, "send_queue_bytes": 5}
    assert graph.nodes["UnixSocket(ino=12)"].attributes == {"type": "stream", "state": "ESTABLISHED", "path": "/run/x"}


def test_client_with_a_name_of_its_own(world: FakeWorld) -> None:
    graph = look(
        world,
        unix(10, state="LISTEN", path="/run/x"),
        unix(11, path="/tmp/mine", peer=12),
        unix(12, path="/run/x", peer=11),
    )
    assert connections(graph) == ends((11, 12))


def test_server_whose_listener_is_gone_is_known_by_its_name(world: FakeWorld) -> None:
    graph = look(world, unix(11, path="/run/x", peer=12), unix(12, peer=11))
    assert connections(graph) == ends((12, 11))


def test_socketpair_is_one_edge_in_a_fixed_order(world: FakeWorld) -> None:
    for records in ((unix(8, peer=9), unix(9, peer=8)), (unix(9, peer=8), unix(8, peer=9))):
        graph = look(world, *records)
        assert connections(graph) == ends((8, 9))
        (edge,) = graph.edges_of_kind(edges.ConnectTo)
        assert edge.attributes == {"type": "stream", "state": "ESTABLISHED", "direction": "none"}


def test_datagram_clients_of_one_server(world: FakeWorld) -> None:
    graph = look(
        world,
        unix(5, type="dgram", state="UNCONN", path="/dev/log"),
        unix(6, type="dgram", peer=5),
        unix(7, type="dgram", peer=5),
    )
    assert connections(graph) == ends((6, 5), (7, 5))


def test_connection_that_waits_to_be_accepted(world: FakeWorld) -> None:
    graph = look(
        world,
        unix(10, state="LISTEN", path="@x", pending=(11,)),
        unix(11, peer=0),
        unix(0, path="@x", peer=11),
    )
    assert connections(graph) == ends((11, 10))
    (edge,) = graph.edges_of_kind(edges.ConnectTo)
    assert edge.attributes["state"] == "pending"
    assert "UnixSocket(ino=0)" not in graph


def test_ends_in_two_network_namespaces(world: FakeWorld) -> None:
    """A socket file is shared between network namespaces; inodes are the host's."""
    graph = look(world, unix(11, peer=12, netns=7), unix(12, path="/run/x", peer=11))
    assert connections(graph) == ends((11, 12))
    assert graph.nodes["UnixSocket(ino=11)"].attributes["netns"] == 7


def test_peer_that_is_not_seen_is_not_invented(world: FakeWorld) -> None:
    graph = look(world, unix(11, peer=12))
    assert connections(graph) == []
    assert set(graph.nodes) == {"UnixSocket(ino=11)"}


def test_without_netlink_peers_are_unknown_and_nothing_is_joined(world: FakeWorld) -> None:
    world.netlink.unix = UnixTable(limits=[Limit("unix sockets without their peers", "allow netlink")])
    collector = UnixSockets()
    graph = look(
        world, unix(10, state="LISTEN", path="/x", peer=None), unix(11, peer=None), unix(12, path="/x", peer=None),
        collector=collector,
    )  # fmt: skip
    assert connections(graph) == []
    assert "peer" in graph.nodes["UnixSocket(ino=11)"].unknown
    assert graph.nodes["UnixSocket(ino=10)"].unknown is None
    assert [note.hint for note in collector.notes.values()] == ["allow netlink"]


def test_sockets_of_processes_that_may_not_be_looked_into(world: FakeWorld) -> None:
    world.procfs.index.unreadable_pids = 2
    world.procfs.add(1, 8)
    collector = UnixSockets()
    graph = look(world, unix(8, peer=9), unix(9, peer=8), collector=collector)
    assert connections(graph) == ends((8, 9))
    assert len(graph.edges_of_kind(edges.Belong)) == 1
    (note,) = collector.notes.values()
    assert note.count == 1


def test_limit_keeps_what_is_owned_and_connected(world: FakeWorld) -> None:
    world.procfs.add(1, 8, 9)
    collector = UnixSockets(UnixSocketsSettings(limit=2))
    graph = look(world, unix(1), unix(2), unix(8, peer=9), unix(9, peer=8), unix(3), collector=collector)
    assert connections(graph) == ends((8, 9))
    assert collector.losses == {"unix sockets over the limit": 3}


def test_unchanged_round_gives_the_same_objects(world: FakeWorld) -> None:
    world.procfs.add(1, 8, 9)
    records, collector = [unix(8, peer=9), unix(9, peer=8)], UnixSockets()
    one, two = look(world, *records, collector=collector), look(world, *records, collector=collector)
    assert all(one.nodes[key] is two.nodes[key] for key in two.nodes)
    assert all(one.edges[key] is two.edges[key] for key in two.edges)


def test_changed_queue_is_a_changed_entity(world: FakeWorld) -> None:
    collector = UnixSockets()
    look(world, unix(8, recv_queue=1, send_queue=0), collector=collector)
    graph = look(world, unix(8, recv_queue=2, send_queue=0), collector=collector)
    assert graph.nodes["UnixSocket(ino=8)"].metrics["recv_queue_bytes"] == 2


def test_expand_shows_only_the_processes_asked_for_and_their_peers(world: FakeWorld) -> None:
    world.procfs.add(1, 8)
    world.procfs.add(2, 9)
    world.procfs.add(3, 5)
    world.netlink.unix.sockets = [unix(8, peer=9), unix(9, peer=8), unix(5)]
    collector = UnixSockets()
    collector.observe(world)  # type: ignore[arg-type]
    batch = collector.expand([nodes.Process(pid=1, start=100)])
    graph = Graph(batch.nodes, batch.edges)
    assert graph.dangling() == []
    assert connections(graph) == ends((8, 9))
    assert {node.pid for node in graph.of_kind(nodes.Process)} == {1, 2}
    collector.seed()
    assert collector.expand([nodes.Process(pid=1, start=100)]).nodes == []
