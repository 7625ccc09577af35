"""The sockets collector: entities, owners, joins, directions, counters, limits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.sockets import FakeWorld, inet, info

from gpuflight.collectors.rates import FIRST_READING
from gpuflight.collectors.sockets import Sockets, SocketsSettings
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Graph, edges, nodes
from gpuflight.sources.netlink import Flow, InetSocket, InetTable, Limit
from gpuflight.sources.procfs import FdRef

LO, HOST, PEER = "127.0.0.1", "10.0.0.5", "10.0.0.9"
N1, N2 = 4026532001, 4026532002


def look(world: FakeWorld, *sockets: InetSocket, collector: Sockets | None = None, **table: Any) -> Graph:
    """One round over these sockets, as a graph."""
    collector = collector or Sockets()
    world.netlink.inet = InetTable(sockets=list(sockets), **table)
    collector.losses.clear()
    collector.notes.clear()
    world.clock.advance(2.0)
    collector.observe(world)  # type: ignore[arg-type]
    batch = collector.seed()
    graph = Graph(batch.nodes, batch.edges)
    assert graph.dangling() == []
    keys = [edge.key for edge in batch.edges]
    assert len(keys) == len(set(keys)), "an edge twice"
    return graph


def connections(graph: Graph) -> list[tuple[str, str]]:
    return sorted((edge.source, edge.target) for edge in graph.edges_of_kind(edges.ConnectTo))


def belongs(graph: Graph) -> set[tuple[str, str]]:
    return {(edge.source, edge.target) for edge in graph.edges_of_kind(edges.Belong)}


def only(graph: Graph) -> edges.ConnectTo:
    (edge,) = graph.edges_of_kind(edges.ConnectTo)
    return edge


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


def loopback_pair(client: int = 11, server: int = 12, port: int = 40000, **fields: Any) -> list[InetSocket]:
    return [
        inet((LO, port), (LO, 9000), inode=client, **fields),
        inet((LO, 9000), (LO, port), inode=server),
    ]


# --- entities and owners ---------------------------------------------------------------------------------------------


def test_listener_and_its_connections_are_one_endpoint(world: FakeWorld) -> None:
    server, one, two = world.procfs.add(1, 10, 12, 14), world.procfs.add(2, 11), world.procfs.add(3, 13)
    graph = look(
        world,
        inet((LO, 9000), inode=10, recv_queue=3, send_queue=128, uid=7),
        *loopback_pair(),
        *loopback_pair(13, 14, 40001),
    )
    endpoint = graph.nodes[f"Socket(tcp,{LO}:9000)"]
    assert endpoint.attributes == {"state": "LISTEN", "uid": 7, "inode": 10}
    assert endpoint.metrics == {
        "backlog_count": 3,
        "backlog_max_count": 128,
        "recv_queue_bytes": 0,
        "send_queue_bytes": 0,
        "connections_count": 2,
        "drops_count": 0,
    }
    assert connections(graph) == [
        (f"Socket(tcp,{LO}:40000)", endpoint.id),
        (f"Socket(tcp,{LO}:40001)", endpoint.id),
    ]
    assert belongs(graph) == {
        (endpoint.id, server),
        (f"Socket(tcp,{LO}:40000)", one),
        (f"Socket(tcp,{LO}:40001)", two),
    }


def test_wildcard_listener_is_its_own_endpoint_and_named_by_the_concrete_one(world: FakeWorld) -> None:
    server = world.procfs.add(1, 10, 12)
    graph = look(world, inet(("0.0.0.0", 9000), inode=10), *loopback_pair())
    concrete, wildcard = graph.nodes[f"Socket(tcp,{LO}:9000)"], graph.nodes["Socket(tcp,0.0.0.0:9000)"]
    assert concrete.attributes["listener"] == wildcard.id
    assert concrete.attributes["state"] == "ESTABLISHED"
    assert wildcard.metrics["connections_count"] == 1
    assert {(wildcard.id, server), (concrete.id, server)} <= belongs(graph)


def test_dual_stack_listener_answers_ipv4(world: FakeWorld) -> None:
    graph = look(world, inet(("::", 9000), inode=10), *loopback_pair())
    assert graph.nodes[f"Socket(tcp,{LO}:9000)"].attributes["listener"] == "Socket(tcp,[::]:9000)"
    assert only(graph).target == f"Socket(tcp,{LO}:9000)"


def test_socket_of_a_forked_process_belongs_to_both(world: FakeWorld) -> None:
    parent, child = world.procfs.add(1, 11), world.procfs.add(2, 11)
    graph = look(world, *loopback_pair())
    source = only(graph).source
    assert {(source, parent), (source, child)} <= belongs(graph)


def test_workers_that_share_an_endpoint_are_told_apart_on_the_edge(world: FakeWorld) -> None:
    one, two = world.procfs.add(1, 10, 12), world.procfs.add(2, 10, 14)
    graph = look(world, inet((LO, 9000), inode=10), *loopback_pair(), *loopback_pair(13, 14, 40001))
    by_source = {edge.source: edge.attributes for edge in graph.edges_of_kind(edges.ConnectTo)}
    assert by_source[f"Socket(tcp,{LO}:40000)"]["target_processes"] == [one]
    assert by_source[f"Socket(tcp,{LO}:40001)"]["target_processes"] == [two]


def test_connection_that_waits_to_be_accepted_belongs_to_the_listener(world: FakeWorld) -> None:
    server = world.procfs.add(1, 10)
    graph = look(world, inet(("0.0.0.0", 9000), inode=10), *loopback_pair(11, 0))
    assert (f"Socket(tcp,{LO}:9000)", server) in belongs(graph)


def test_reused_pid_is_a_new_process(world: FakeWorld) -> None:
    collector = Sockets()
    old = world.procfs.add(1, 11)
    assert (f"Socket(tcp,{LO}:40000)", old) in belongs(look(world, *loopback_pair(), collector=collector))
    world.procfs.end(1)
    new = world.procfs.add(1, 11, start=900)
    graph = look(world, *loopback_pair(), collector=collector)
    assert {target for _, target in belongs(graph)} == {new}
    assert old not in graph


def test_socket_opened_since_the_descriptors_were_read_is_looked_for_again(world: FakeWorld) -> None:
    late = world.procfs.add(1)
    world.procfs.hidden[11] = [FdRef(1, 3, True, True)]
    assert (f"Socket(tcp,{LO}:40000)", late) in belongs(look(world, *loopback_pair()))


def test_without_the_right_to_look_sockets_are_shown_without_owner_and_said_once(world: FakeWorld) -> None:
    world.procfs.index.unreadable_pids = 3
    collector = Sockets()
    graph = look(world, *loopback_pair(), inet((LO, 1), inode=0), collector=collector)
    assert belongs(graph) == set()
    assert len(connections(graph)) == 1
    (note,) = collector.notes.values()
    assert note.count == 2  # the one without an inode is nobody's
    assert "CAP_SYS_PTRACE" in note.hint


def test_losses_and_limits_of_the_source_are_passed_on(world: FakeWorld) -> None:
    """T10: what netlink lost stands in the round's coverage."""
    collector = Sockets()
    look(
        world,
        collector=collector,
        losses={"netlink overruns": 2},
        limits=[Limit("no netlink", "allow it", 3)],
        time_wait_count=9,
    )
    assert collector.losses == {"netlink overruns": 2, "connections in TIME_WAIT over the limit": 9}
    (note,) = collector.notes.values()
    assert (note.reason, note.hint, note.count) == ("no netlink", "allow it", 3)


def test_source_that_is_not_there_costs_the_round(world: FakeWorld) -> None:
    def refuse(limit: int) -> InetTable:
        raise SourceUnavailable("no sockets", "be root")

    world.netlink.inet_sockets = refuse  # type: ignore[method-assign, assignment]
    with pytest.raises(SourceUnavailable):
        Sockets().observe(world)  # type: ignore[arg-type]


# --- which ends belong together --------------------------------------------------------------------------------------


def test_ends_that_come_from_different_dumps_join(world: FakeWorld) -> None:
    """T02: A→B from the IPv4 dump, B's accepted end from the IPv6 dump (IPv4-mapped, normalised by the source)."""
    a, b = inet((HOST, 40000), (HOST, 9000), inode=1), inet((HOST, 9000), (HOST, 40000), inode=2)
    assert len(connections(look(world, a, inet(("::", 9000), inode=3), b))) == 1


def test_same_loopback_addresses_in_two_namespaces_never_cross(world: FakeWorld) -> None:
    """T01: the namespace is part of the key."""
    sockets = [
        inet((LO, 40000), (LO, 9000), inode=1, netns=N1),
        inet((LO, 9000), (LO, 40000), inode=2, netns=N1),
        inet((LO, 40000), (LO, 9000), inode=3, netns=N2),
        inet((LO, 9000), (LO, 40000), inode=4, netns=N2),
    ]
    for pid, socket in enumerate(sockets, 1):
        world.procfs.add(pid, socket.inode)
    assert connections(look(world, *sockets)) == [
        (f"Socket(tcp,{LO}:40000,netns={N1})", f"Socket(tcp,{LO}:9000,netns={N1})"),
        (f"Socket(tcp,{LO}:40000,netns={N2})", f"Socket(tcp,{LO}:9000,netns={N2})"),
    ]


def test_loopback_halves_in_two_namespaces_do_not_join(world: FakeWorld) -> None:
    graph = look(
        world,
        inet((LO, 40000), (LO, 9000), inode=1, netns=N1),
        inet((LO, 9000), (LO, 40000), inode=2, netns=N2),
    )
    assert len(connections(graph)) == 2
    assert all(edge.attributes["half"] for edge in graph.edges_of_kind(edges.ConnectTo))


def test_ends_in_two_namespaces_join_over_veth(world: FakeWorld) -> None:
    client, server = world.procfs.add(1, 1), world.procfs.add(2, 2)
    graph = look(
        world,
        inet(("10.9.0.2", 40000), ("10.9.0.1", 9000), inode=1, netns=N1, tcp=info(opened=True)),
        inet(("10.9.0.1", 9000), ("10.9.0.2", 40000), inode=2),
    )
    edge = only(graph)
    assert (edge.source, edge.target) == (f"Socket(tcp,10.9.0.2:40000,netns={N1})", "Socket(tcp,10.9.0.1:9000)")
    assert "half" not in edge.attributes
    assert belongs(graph) == {(edge.source, client), (edge.target, server)}


def test_two_candidates_in_other_namespaces_are_none(world: FakeWorld) -> None:
    a, b = ("10.9.0.2", 40000), ("10.9.0.1", 9000)
    graph = look(world, inet(a, b, inode=1), inet(b, a, inode=2, netns=N1), inet(b, a, inode=3, netns=N2))
    assert all(edge.attributes.get("half") for edge in graph.edges_of_kind(edges.ConnectTo))


def test_two_claimants_of_one_end_are_none(world: FakeWorld) -> None:
    a, b = ("10.9.0.2", 40000), ("10.9.0.1", 9000)
    graph = look(world, inet(a, b, inode=1, netns=N1), inet(a, b, inode=2, netns=N2), inet(b, a, inode=3))
    assert all(edge.attributes.get("half") for edge in graph.edges_of_kind(edges.ConnectTo))


def test_own_namespace_is_preferred_to_a_mirror_elsewhere(world: FakeWorld) -> None:
    a, b = ("10.9.0.1", 40000), ("10.9.0.1", 9000)
    graph = look(world, inet(a, b, inode=1), inet(b, a, inode=2), inet(b, a, inode=3, netns=N1))
    full = [edge for edge in graph.edges_of_kind(edges.ConnectTo) if "half" not in edge.attributes]
    assert [edge.key[:2] for edge in full] == [("Socket(tcp,10.9.0.1:40000)", "Socket(tcp,10.9.0.1:9000)")]


def test_one_sided_connection_is_kept_as_half(world: FakeWorld) -> None:
    """T04: never dropped."""
    mine = world.procfs.add(1, 1)
    graph = look(world, inet((HOST, 40000), (PEER, 443), inode=1, netns=N1), addresses={N1: frozenset({HOST})})
    edge = only(graph)
    assert (edge.source, edge.target) == (f"Socket(tcp,{HOST}:40000,netns={N1})", f"Socket(tcp,{PEER}:443)")
    assert edge.attributes == {"state": "ESTABLISHED", "half": True, "direction": "guessed"}
    assert graph.nodes[edge.target].attributes == {"remote": True}
    assert belongs(graph) == {(edge.source, mine)}


def test_peer_on_this_host_whose_socket_is_gone_is_not_remote(world: FakeWorld) -> None:
    graph = look(world, inet((HOST, 40000), (HOST, 9000), inode=1, state="CLOSE_WAIT"))
    target = graph.nodes[only(graph).target]
    assert "remote" not in target.attributes
    assert only(graph).attributes["half"] is True


def test_ends_that_nat_keeps_apart_are_joined_by_the_hosts_translations(world: FakeWorld) -> None:
    """T04: translated, not dropped."""
    opener = Flow("tcp", "172.17.0.2:4242", "10.0.0.5:8080")
    server = Flow("tcp", "172.17.0.3:80", "172.17.0.2:4242")
    world.netlink.nat = {opener: server, server: opener}
    graph = look(
        world,
        inet(("172.17.0.2", 4242), ("10.0.0.5", 8080), inode=1, netns=N1),
        inet(("172.17.0.3", 80), ("172.17.0.2", 4242), inode=2, netns=N2),
    )
    edge = only(graph)
    assert (edge.source, edge.target) == (
        f"Socket(tcp,172.17.0.2:4242,netns={N1})",
        f"Socket(tcp,172.17.0.3:80,netns={N2})",
    )
    assert edge.attributes["nat"] is True


def test_the_table_of_translations_is_read_again_only_for_what_was_not_looked_up_in_it(world: FakeWorld) -> None:
    """It is as long as the host has connections, and half of these are never joined."""
    collector = Sockets()
    half = inet((HOST, 40000), (PEER, 443), inode=1)
    opener = inet(("172.17.0.2", 4242), ("10.0.0.5", 8080), inode=2, netns=N1)
    server = inet(("172.17.0.3", 80), ("172.17.0.2", 4242), inode=3, netns=N2)
    look(world, half, collector=collector)
    assert world.netlink.nat_asked == 1
    look(world, half, inet((LO, 9000), inode=9), collector=collector)
    assert world.netlink.nat_asked == 1
    ends = Flow("tcp", opener.local, opener.remote), Flow("tcp", server.local, server.remote)
    world.netlink.nat = {ends[0]: ends[1], ends[1]: ends[0]}
    look(world, half, opener, collector=collector)
    assert world.netlink.nat_asked == 2
    graph = look(world, half, opener, server, collector=collector)  # its other end comes a round later
    assert world.netlink.nat_asked == 3
    assert (opener.id, server.id) in connections(graph)


def test_being_in_the_same_network_is_no_connection(world: FakeWorld) -> None:
    """T06: only a socket connected to a socket is an edge."""
    graph = look(
        world,
        inet((HOST, 9000), inode=1),
        inet((HOST, 9001), inode=2),
        inet(("0.0.0.0", 53), protocol="udp", inode=3),
        addresses={0: frozenset({HOST, "10.0.0.6"})},
    )
    assert connections(graph) == []


def test_udp_pair_connected_at_both_ends(world: FakeWorld) -> None:
    graph = look(
        world,
        inet((LO, 5001), (LO, 5000), protocol="udp", inode=1),
        inet((LO, 5000), (LO, 5001), protocol="udp", inode=2),
    )
    assert connections(graph) == [(f"Socket(udp,{LO}:5001)", f"Socket(udp,{LO}:5000)")]
    assert only(graph).attributes["direction"] == "guessed"
    assert only(graph).unknown is None


@pytest.mark.parametrize("bound", [LO, "0.0.0.0", "::"])
def test_udp_connected_to_one_that_is_only_bound(world: FakeWorld, bound: str) -> None:
    client, server = world.procfs.add(1, 1), world.procfs.add(2, 2)
    graph = look(
        world,
        inet((LO, 50000), (LO, 5000), protocol="udp", inode=1),
        inet((bound, 5000), protocol="udp", inode=2, recv_queue=9),
    )
    edge = only(graph)
    assert "half" not in edge.attributes
    assert "peer_recv_queue_bytes" not in edge.metrics  # it is the queue of all its clients
    assert belongs(graph) == {(edge.source, client), (edge.target, server)}


def test_udp_to_a_wildcard_receiver_in_another_namespace(world: FakeWorld) -> None:
    graph = look(
        world,
        inet(("10.9.0.2", 50000), ("10.9.0.1", 5000), protocol="udp", inode=1, netns=N1),
        inet(("0.0.0.0", 5000), protocol="udp", inode=2),
        inet(("0.0.0.0", 5000), protocol="udp", inode=3, netns=N2),
        addresses={0: frozenset({"10.9.0.1"}), N1: frozenset({"10.9.0.2"}), N2: frozenset({"10.9.1.1"})},
    )
    assert connections(graph) == [(f"Socket(udp,10.9.0.2:50000,netns={N1})", "Socket(udp,0.0.0.0:5000)")]


def test_udp_to_a_far_host_does_not_join_a_local_wildcard(world: FakeWorld) -> None:
    graph = look(
        world,
        inet((HOST, 50000), ("8.8.8.8", 53), protocol="udp", inode=1),
        inet(("0.0.0.0", 53), protocol="udp", inode=2),
        addresses={0: frozenset({HOST})},
    )
    assert only(graph).target == "Socket(udp,8.8.8.8:53)"
    assert graph.nodes[only(graph).target].attributes["remote"] is True


def test_socket_connected_to_itself(world: FakeWorld) -> None:
    assert connections(look(world, inet((LO, 9000), (LO, 9000), inode=1))) == [
        (f"Socket(tcp,{LO}:9000)", f"Socket(tcp,{LO}:9000)")
    ]


@given(st.data())
def test_every_connection_once_and_none_false(data: st.DataObject) -> None:
    """Any mix of namespaces and ports: a pair in one namespace is one full edge, a lone end one half."""
    pairs = data.draw(
        st.lists(
            st.tuples(st.sampled_from([0, N1, N2]), st.integers(1, 9), st.sampled_from(["both", "client", "server"])),
            unique_by=lambda pair: pair[:2],
            max_size=12,
        )
    )
    world, sockets, full, half = FakeWorld(), [], set(), set()
    for netns, number, kept in pairs:
        client, server = (LO, 40000 + number), (LO, 9000)
        suffix = f",netns={netns})" if netns else ")"
        ends = f"Socket(tcp,{LO}:{client[1]}{suffix}", f"Socket(tcp,{LO}:9000{suffix}"
        if kept in ("both", "client"):
            sockets.append(inet(client, server, inode=number, netns=netns))
        if kept in ("both", "server"):
            sockets.append(inet(server, client, inode=number + 100, netns=netns))
        (full if kept == "both" else half).add(ends)
    graph = look(world, *data.draw(st.permutations(sockets)))
    drawn = graph.edges_of_kind(edges.ConnectTo)
    assert {(edge.source, edge.target) for edge in drawn if "half" not in edge.attributes} == full
    assert {(edge.source, edge.target) for edge in drawn if "half" in edge.attributes} == half


# --- who opened it ---------------------------------------------------------------------------------------------------


def test_the_syn_that_was_counted_decides(world: FakeWorld) -> None:
    graph = look(
        world,
        inet((LO, 9000), (LO, 40000), inode=1, tcp=info(opened=True)),
        inet((LO, 40000), (LO, 9000), inode=2, tcp=info()),
    )
    assert only(graph).target == f"Socket(tcp,{LO}:40000)"
    assert "direction" not in only(graph).attributes


def test_a_listener_on_a_high_port_decides(world: FakeWorld) -> None:
    graph = look(
        world,
        inet((LO, 50000), inode=3),
        inet((LO, 9000), (LO, 50000), inode=1),
        inet((LO, 50000), (LO, 9000), inode=2),
    )
    assert only(graph).target == f"Socket(tcp,{LO}:50000)"


def test_a_half_whose_peer_listens_is_the_client(world: FakeWorld) -> None:
    graph = look(world, inet((LO, 50000), inode=3), inet((LO, 9000), (LO, 50000), inode=1, state="CLOSE_WAIT"))
    assert only(graph).target == f"Socket(tcp,{LO}:50000)"
    assert "direction" not in only(graph).attributes


def test_the_lower_port_is_a_guess_and_called_one(world: FakeWorld) -> None:
    edge = only(look(world, *loopback_pair()))
    assert (edge.target, edge.attributes["direction"]) == (f"Socket(tcp,{LO}:9000)", "guessed")


def test_direction_once_known_outlives_the_listener(world: FakeWorld) -> None:
    """T07: an edge must not flap because its evidence is gone."""
    collector = Sockets()
    pair = [inet((LO, 9000), (LO, 50000), inode=1), inet((LO, 50000), (LO, 9000), inode=2)]
    first = look(world, inet((LO, 50000), inode=3), *pair, collector=collector)
    second = look(world, *pair, collector=collector)
    third = look(world, pair[0], collector=collector)  # the server's end is gone
    assert only(first).key == only(second).key == only(third).key
    assert "direction" not in only(third).attributes


# --- counters --------------------------------------------------------------------------------------------------------


def tcp_pair(client: Any, server: Any) -> list[InetSocket]:
    return [
        inet((LO, 40000), (LO, 9000), inode=1, tcp=client, send_queue=5, recv_queue=6),
        inet((LO, 9000), (LO, 40000), inode=2, tcp=server, send_queue=7, recv_queue=8),
    ]


def test_traffic_is_counted_once(world: FakeWorld) -> None:
    """Defect 3 of the reference: both ends count the same bytes."""
    edge = only(
        look(
            world,
            *tcp_pair(
                info(1000, 30, rtt_us=250, retransmits=2, opened=True, segments=10),
                info(30, 1000, rtt_us=90, retransmits=1, segments=4),
            ),
        )
    )
    assert edge.metrics == {
        "send_queue_bytes": 5,
        "recv_queue_bytes": 6,
        "send_buffer_bytes": 87040,
        "peer_send_queue_bytes": 7,
        "peer_recv_queue_bytes": 8,
        "peer_send_buffer_bytes": 87040,
        "rtt_ms": 0.25,
        "congestion_window_segments": 10,
        "retransmits_count": 3,
        "bytes_sent_count": 1000,
        "bytes_received_count": 30,
        "segments_sent_count": 14,
    }
    assert edge.unknown == dict.fromkeys(
        ("bytes_sent_per_s", "bytes_received_per_s", "retransmits_per_s", "segments_sent_per_s"), FIRST_READING
    )


def test_server_alone_is_seen_from_the_clients_side(world: FakeWorld) -> None:
    graph = look(world, inet((HOST, 9000), inode=3), inet((HOST, 9000), (PEER, 40000), inode=2, tcp=info(30, 1000)))
    edge = only(graph)
    assert (edge.source, edge.target) == (f"Socket(tcp,{PEER}:40000)", f"Socket(tcp,{HOST}:9000)")
    assert (edge.metrics["bytes_sent_count"], edge.metrics["bytes_received_count"]) == (1000, 30)
    assert "send_queue_bytes" not in edge.metrics


def test_rates_over_the_round_then_zero_then_the_same_object(world: FakeWorld) -> None:
    """Defect 2 of the reference: metrics must not freeze at first sight."""
    collector = Sockets()
    look(world, *tcp_pair(info(1000, 0, opened=True), info(0, 1000)), collector=collector)
    moving = tcp_pair(info(5000, 600, opened=True, retransmits=4, receiver_limited_us=500_000), info(600, 5000))
    second = only(look(world, *moving, collector=collector))
    assert second.metrics["bytes_sent_per_s"] == 2000
    assert second.metrics["bytes_received_per_s"] == 300
    assert second.metrics["retransmits_per_s"] == 2
    assert second.metrics["receiver_limited_pct"] == 25
    assert second.unknown is None
    third = only(look(world, *moving, collector=collector))
    assert third.metrics["bytes_sent_per_s"] == 0
    fourth = only(look(world, *moving, collector=collector))
    assert fourth is third  # the core's diff sees at once that nothing changed
    look(world, *moving, collector=collector)
    last = look(world, *tcp_pair(info(7000, 600, opened=True), info(600, 7000)), collector=collector)
    assert only(last).metrics["bytes_sent_per_s"] == 1000  # over the last round, not since it rested


def test_counter_that_went_back_gives_no_rate(world: FakeWorld) -> None:
    collector = Sockets()
    look(world, *tcp_pair(info(1000, 0, opened=True), None), collector=collector)
    edge = only(look(world, *tcp_pair(info(10, 0, opened=True), None), collector=collector))
    assert "bytes_sent_per_s" not in edge.metrics
    assert "bytes_sent_per_s" in (edge.unknown or {})


def test_rtt_that_was_never_measured_is_unknown(world: FakeWorld) -> None:
    edge = only(look(world, *tcp_pair(info(rtt_us=0), info(rtt_us=5))))
    assert "rtt_ms" not in edge.metrics
    assert "rtt_ms" in (edge.unknown or {})


def test_counters_that_the_kernel_is_too_old_for_are_unknown(world: FakeWorld) -> None:
    edge = only(look(world, *tcp_pair(info(None, None), None)))
    assert "bytes_sent_count" not in edge.metrics
    assert "tcp_info" in (edge.unknown or {})["bytes_sent_count"]


def test_without_netlink_metrics_are_unknown_with_the_reason(world: FakeWorld) -> None:
    edge = only(look(world, *loopback_pair()))
    assert set(edge.unknown or {}) == {"rtt_ms", "retransmits_count", "bytes_sent_count", "bytes_received_count"}


def test_state_of_both_ends(world: FakeWorld) -> None:
    edge = only(
        look(
            world,
            inet((LO, 40000), (LO, 9000), inode=1, state="FIN_WAIT2"),
            inet((LO, 9000), (LO, 40000), inode=2, state="CLOSE_WAIT"),
        )
    )
    assert (edge.attributes["state"], edge.attributes["peer_state"]) == ("FIN_WAIT2", "CLOSE_WAIT")


# --- connections that are over ---------------------------------------------------------------------------------------


def test_short_connection_between_two_rounds_shows_by_its_time_wait(world: FakeWorld) -> None:
    """T03: connect and close between two rounds; only TIME_WAIT is left of it."""
    collector = Sockets()
    server = world.procfs.add(1, 10)
    listener = inet(("0.0.0.0", 9000), inode=10)
    assert connections(look(world, listener, collector=collector)) == []
    graph = look(world, listener, inet((LO, 40000), (LO, 9000), state="TIME_WAIT"), collector=collector)
    edge = only(graph)
    assert (edge.source, edge.target) == (f"Socket(tcp,{LO}:40000)", f"Socket(tcp,{LO}:9000)")
    assert edge.attributes == {"state": "TIME_WAIT", "ended": True}
    assert (edge.target, server) in belongs(graph)
    assert edge.metrics == {}


def test_time_wait_keeps_the_owner_that_was_seen(world: FakeWorld) -> None:
    """T03: the connection was seen alive; what is left of it is still this process's."""
    collector = Sockets()
    world.procfs.add(1, 10, 12)
    client = world.procfs.add(2, 11)
    listener = inet((LO, 9000), inode=10)
    alive = look(world, listener, *loopback_pair(), collector=collector)
    over = look(world, listener, inet((LO, 40000), (LO, 9000), state="TIME_WAIT"), collector=collector)
    assert only(over).key == only(alive).key
    assert (only(over).source, client) in belongs(over)
    world.procfs.end(2)
    later = look(world, listener, inet((LO, 40000), (LO, 9000), state="TIME_WAIT"), collector=collector)
    assert client not in later


def test_time_wait_from_before_the_first_round_is_counted_only(world: FakeWorld) -> None:
    collector = Sockets()
    over = inet((LO, 40000), (LO, 9000), state="TIME_WAIT")
    for _ in range(3):
        graph = look(world, inet((LO, 9000), inode=10), over, collector=collector)
        assert connections(graph) == []
        assert collector.losses == {"ended connections that are not shown": 1}


def test_time_wait_of_an_older_listener_is_not_laid_at_the_new_ones_door(world: FakeWorld) -> None:
    collector = Sockets()
    look(world, inet((LO, 9000), inode=10), collector=collector)
    over = inet((LO, 40000), (LO, 9000), state="TIME_WAIT")
    for _ in range(2):
        graph = look(world, inet((LO, 9000), inode=20), over, collector=collector)
        assert connections(graph) == []


def test_server_that_closed_first(world: FakeWorld) -> None:
    collector = Sockets()
    server = world.procfs.add(1, 10)
    look(world, inet((LO, 9000), inode=10), collector=collector)
    over = inet((LO, 9000), (LO, 40000), state="TIME_WAIT")
    graph = look(world, inet((LO, 9000), inode=10), over, collector=collector)
    assert connections(graph) == [(f"Socket(tcp,{LO}:40000)", f"Socket(tcp,{LO}:9000)")]
    assert belongs(graph) == {(f"Socket(tcp,{LO}:9000)", server)}


def test_time_wait_to_nobody_we_know_is_counted_only(world: FakeWorld) -> None:
    collector = Sockets()
    graph = look(world, inet((HOST, 40000), (PEER, 443), state="TIME_WAIT"), collector=collector)
    assert len(graph) == 0
    assert collector.losses == {"ended connections that are not shown": 1}


def test_ended_connections_are_limited(world: FakeWorld) -> None:
    collector = Sockets(SocketsSettings(ended_limit=2))
    listener = inet((LO, 9000), inode=10)
    look(world, listener, collector=collector)
    over = [inet((LO, 40000 + number), (LO, 9000), state="TIME_WAIT") for number in range(5)]
    for _ in range(3):
        assert len(connections(look(world, listener, *over, collector=collector))) == 2
        assert collector.losses == {"ended connections that are not shown": 3}


def test_time_wait_limit_reaches_the_source(world: FakeWorld) -> None:
    look(world, collector=Sockets(SocketsSettings(time_wait_limit=7)))
    assert world.netlink.time_wait_limit == 7


def test_what_is_gone_is_forgotten(world: FakeWorld) -> None:
    collector = Sockets()
    look(world, *loopback_pair(), collector=collector)
    look(world, collector=collector)
    look(world, collector=collector)
    assert not collector._links
    assert not collector._endpoints.all
    assert not collector._endpoints._groups
    assert not collector._known


@pytest.mark.parametrize("listening", [LO, "0.0.0.0"])
def test_what_an_older_process_left_behind_is_not_the_new_listeners(world: FakeWorld, listening: str) -> None:
    """Sockets without a process (closed, the other end never answered) have only the address in common with it."""
    new = world.procfs.add(1, 10)
    graph = look(
        world,
        inet((listening, 9000), inode=10),
        inet((LO, 40000), (LO, 9000), state="FIN_WAIT1"),
        inet((LO, 9000), (LO, 40001), state="LAST_ACK"),
    )
    assert connections(graph) == []
    assert belongs(graph) == {(f"Socket(tcp,{listening}:9000)", new)}


def test_end_that_was_closed_of_a_connection_that_is_still_held(world: FakeWorld) -> None:
    server = world.procfs.add(1, 10, 2)
    graph = look(
        world,
        inet((LO, 9000), inode=10),
        inet((LO, 40000), (LO, 9000), state="FIN_WAIT2"),
        inet((LO, 9000), (LO, 40000), state="CLOSE_WAIT", inode=2),
    )
    assert connections(graph) == [(f"Socket(tcp,{LO}:40000)", f"Socket(tcp,{LO}:9000)")]
    assert "ended" not in only(graph).attributes
    assert belongs(graph) == {(f"Socket(tcp,{LO}:9000)", server)}


def test_connection_that_is_being_opened_reaches_for_the_listener(world: FakeWorld) -> None:
    server = world.procfs.add(1, 10)
    graph = look(world, inet(("0.0.0.0", 9000), inode=10), inet((LO, 40000), (LO, 9000), inode=2, state="SYN_SENT"))
    assert (only(graph).target, server) in belongs(graph)


# --- how much of it --------------------------------------------------------------------------------------------------


def test_unchanged_round_gives_the_same_objects(world: FakeWorld) -> None:
    collector = Sockets()
    world.procfs.add(1, 10, 11, 12)
    sockets = [inet((LO, 9000), inode=10), *tcp_pair(info(opened=True), info())]
    graphs = [look(world, *sockets, collector=collector) for _ in range(4)]
    for before, after in ((graphs[2].nodes, graphs[3].nodes), (graphs[2].edges, graphs[3].edges)):
        assert all(before[key] is after[key] for key in after)  # type: ignore[index]


def test_limit_keeps_listeners_and_joined_connections(world: FakeWorld) -> None:
    for inode in (10, 11, 12):
        world.procfs.add(inode, inode)
    collector = Sockets(SocketsSettings(limit=3))
    far = [inet((HOST, 40000 + number), (PEER, 443), inode=90 + number) for number in range(5)]
    graph = look(world, *far, inet(("0.0.0.0", 9000), inode=10), *loopback_pair(), collector=collector)
    assert {node.id for node in graph.of_kind(nodes.Socket)} == {
        "Socket(tcp,0.0.0.0:9000)",
        f"Socket(tcp,{LO}:40000)",
        f"Socket(tcp,{LO}:9000)",
    }
    assert collector.losses == {"sockets over the limit": 6}
    assert len(connections(graph)) == 1


def scoped(world: FakeWorld, *processes: nodes.Process) -> Graph:
    collector = Sockets()
    collector.observe(world)  # type: ignore[arg-type]
    batch = collector.expand(processes)
    graph = Graph(batch.nodes, batch.edges)
    assert graph.dangling() == []
    return graph


def test_expand_shows_only_the_processes_asked_for_and_their_peers(world: FakeWorld) -> None:
    world.procfs.add(1, 10, 12, 14)
    world.procfs.add(2, 11)
    world.procfs.add(3, 13)
    world.netlink.inet = InetTable([inet((LO, 9000), inode=10), *loopback_pair(), *loopback_pair(13, 14, 40001)])
    graph = scoped(world, nodes.Process(pid=2, start=100))
    assert connections(graph) == [(f"Socket(tcp,{LO}:40000)", f"Socket(tcp,{LO}:9000)")]
    assert {node.pid for node in graph.of_kind(nodes.Process)} == {1, 2}
    assert len(connections(scoped(world, nodes.Process(pid=1, start=100)))) == 2
    assert len(scoped(world, nodes.Process(pid=1, start=7))) == 0  # another process that had this pid


def test_expand_of_one_worker_leaves_out_the_other_workers_connections(world: FakeWorld) -> None:
    world.procfs.add(1, 10, 12)
    world.procfs.add(2, 10, 14)
    world.netlink.inet = InetTable([inet((LO, 9000), inode=10), *loopback_pair(), *loopback_pair(13, 14, 40001)])
    graph = scoped(world, nodes.Process(pid=2, start=100))
    assert connections(graph) == [(f"Socket(tcp,{LO}:40001)", f"Socket(tcp,{LO}:9000)")]


def test_expand_after_seed_adds_nothing(world: FakeWorld) -> None:
    collector = Sockets()
    world.procfs.add(2, 11)
    look(world, *loopback_pair(), collector=collector)
    assert collector.expand([nodes.Process(pid=2, start=100)]).nodes == []


def test_rounds_with_little_change_show_what_a_first_look_shows(world: FakeWorld) -> None:
    """Measurements are taken over into the standing picture; it must be the one that joining anew would give."""
    world.procfs.add(1, 10, 12, 14)
    world.procfs.add(2, 11)
    world.procfs.add(3, 13, 20)
    collector = Sockets()

    def sockets(turn: int) -> list[InetSocket]:
        return [
            inet((LO, 9000), inode=10, recv_queue=turn, send_queue=128),
            inet((LO, 40000), (LO, 9000), inode=11, tcp=info(turn * 10, 5, opened=True), send_queue=turn),
            inet((LO, 9000), (LO, 40000), inode=12, tcp=info(5, turn * 10)),
            inet((LO, 40001), (LO, 9000), inode=13, tcp=info(7, 5, opened=True)),
            inet((LO, 9000), (LO, 40001), inode=14, recv_queue=turn, tcp=info(5, 7)),
            inet((HOST, 41000), (PEER, 443), inode=20, tcp=info(turn, turn, opened=True)),
            inet((LO, 5000), (LO, 5001), protocol="udp", inode=21, recv_queue=turn),
            inet((LO, 5001), (LO, 5000), protocol="udp", inode=22),
        ]

    standing = sockets(1)
    for turn in range(1, 6):
        standing = [old if old == new else new for old, new in zip(standing, sockets(turn), strict=True)]
        graph = look(world, *standing, collector=collector)
        fresh = look(world, *standing)
        assert graph.nodes == fresh.nodes
        assert graph.edges.keys() == fresh.edges.keys()
        for key, edge in fresh.edges.items():
            known = graph.edges[key]
            assert known.attributes == edge.attributes
            assert known.metrics.items() >= edge.metrics.items()
    assert (
        graph.edges[f"Socket(tcp,{LO}:40000)", f"Socket(tcp,{LO}:9000)", "ConnectTo"].metrics["bytes_sent_per_s"] == 2.5
    )


@pytest.mark.parametrize("change", ["closed", "new owner", "new addresses", "half joined", "reused"])
def test_change_of_structure_is_not_taken_for_a_measurement(world: FakeWorld, change: str) -> None:
    world.procfs.add(1, 12)
    world.procfs.add(2, 11)
    collector, pair = Sockets(), [inet((HOST, 40000), (PEER, 9000), inode=11), inet((LO, 9001), inode=12)]
    table: dict[str, Any] = {"addresses": {0: frozenset({HOST})}}
    first = look(world, *pair, collector=collector, **table)
    assert first.nodes[only(first).target].attributes == {"remote": True}
    if change == "closed":
        graph = look(world, pair[1], collector=collector, **table)
        assert connections(graph) == []
    elif change == "new owner":
        new = world.procfs.add(3, 11)
        graph = look(world, *pair, collector=collector, **table)
        assert (f"Socket(tcp,{HOST}:40000)", new) in belongs(graph)
    elif change == "new addresses":
        graph = look(world, *pair, collector=collector, addresses={0: frozenset({HOST, PEER})})
        assert "remote" not in graph.nodes[only(graph).target].attributes
    elif change == "half joined":
        other = inet((PEER, 9000), (HOST, 40000), inode=13, netns=N1)
        graph = look(world, pair[0], other, collector=collector, **table)
        assert only(graph).target == f"Socket(tcp,{PEER}:9000,netns={N1})"
    else:
        reused = inet((HOST, 40000), (PEER, 9000), inode=12)
        graph = look(world, reused, inet((LO, 9001), inode=11), collector=collector, **table)
        assert (f"Socket(tcp,{HOST}:40000)", "Process(pid=1,start=100)") in belongs(graph)
