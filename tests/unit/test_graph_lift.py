"""Data streams lifted to processes: every one between the right two, none twice, none false."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.graph import Entity, Graph, edges, nodes
from gpuflight.graph.lift import LiftedEdge, lift


def _process(pid: int) -> nodes.Process:
    return nodes.Process(pid=pid, start=1)


def _id(pid: int) -> str:
    return f"Process(pid={pid},start=1)"


def _pairs(lifted: list[LiftedEdge]) -> list[tuple[str, str, bool]]:
    return [(edge.source, edge.target, edge.directed) for edge in lifted]


def _tcp(client: int, server: int, port: int = 40000) -> Graph:
    a, b = nodes.Socket(protocol="tcp", address=f"10.0.0.5:{port}"), nodes.Socket(protocol="tcp", address="10.0.0.5:80")
    return Graph(
        [_process(client), _process(server), a, b],
        [
            edges.Belong(a.id, _id(client)),
            edges.Belong(b.id, _id(server)),
            edges.ConnectTo(a.id, b.id, {}, {"bytes_sent_count": 10, "rtt_ms": 2.0}),
        ],
    )


def test_a_connection_becomes_one_edge_between_its_processes() -> None:
    [edge] = lift(_tcp(1, 2))
    assert edge == LiftedEdge(
        source=_id(1),
        target=_id(2),
        directed=True,
        via=["ConnectTo(Socket(tcp,10.0.0.5:40000)->Socket(tcp,10.0.0.5:80))"],
        kinds=["ConnectTo"],
        metrics={"bytes_sent_count": 10, "rtt_ms": 2.0},
    )


def test_several_connections_add_up_and_latency_is_the_worst() -> None:
    graph = _tcp(1, 2) + _tcp(1, 2, 40001)
    key = ("Socket(tcp,10.0.0.5:40001)", "Socket(tcp,10.0.0.5:80)", "ConnectTo")
    graph.edges[key] = edges.ConnectTo(*key[:2], {}, {"bytes_sent_count": 5, "rtt_ms": 7.0})
    [edge] = lift(graph)
    assert len(edge.via) == len(set(edge.via)) == 2
    assert edge.metrics == {"bytes_sent_count": 15, "rtt_ms": 7.0}


def test_a_connection_of_a_process_with_itself_is_no_edge() -> None:
    assert lift(_tcp(1, 1)) == []


def test_a_connection_with_an_end_elsewhere_is_left_out_or_loose() -> None:
    graph = _tcp(1, 2)
    del graph.edges["Socket(tcp,10.0.0.5:80)", _id(2), "Belong"]
    assert lift(graph) == []
    assert _pairs(lift(graph, loose=True)) == [(_id(1), "Socket(tcp,10.0.0.5:80)", True)]


def test_workers_that_share_a_listener_get_only_their_own_connections() -> None:
    graph = _tcp(1, 2)
    graph.try_add_node(_process(3))
    graph.try_add_edge(edges.Belong("Socket(tcp,10.0.0.5:80)", _id(3)))
    assert len(lift(graph)) == 2  # nothing says which worker it is
    key = ("Socket(tcp,10.0.0.5:40000)", "Socket(tcp,10.0.0.5:80)", "ConnectTo")
    graph.edges[key] = edges.ConnectTo(*key[:2], {"target_processes": [_id(3)]})
    assert _pairs(lift(graph)) == [(_id(1), _id(3), True)]


def test_a_pipe_goes_from_writers_to_readers() -> None:
    pipe = nodes.Pipe(inode=7)
    graph = Graph(
        [_process(1), _process(2), _process(3), pipe],
        [edges.SendTo(_id(1), pipe.id), edges.SendTo(pipe.id, _id(2)), edges.SendTo(pipe.id, _id(3))],
    )
    assert _pairs(lift(graph)) == [(_id(1), _id(2), True), (_id(1), _id(3), True)]
    assert [edge.via for edge in lift(graph)] == [["Pipe(ino=7)"], ["Pipe(ino=7)"]]


def test_a_pipe_of_which_both_hold_both_ends_is_one_undirected_edge() -> None:
    pipe = nodes.Pipe(inode=7)
    graph = Graph(
        [_process(1), _process(2), pipe],
        [edges.SendTo(_id(n), pipe.id) for n in (1, 2)] + [edges.SendTo(pipe.id, _id(n)) for n in (1, 2)],
    )
    assert _pairs(lift(graph)) == [(_id(1), _id(2), False)]


def test_a_pipe_nobody_reads_is_no_edge() -> None:
    pipe = nodes.Pipe(inode=7)
    assert lift(Graph([_process(1), _process(2), pipe], [edges.SendTo(_id(n), pipe.id) for n in (1, 2)])) == []


@pytest.mark.parametrize(
    "hub",
    [
        nodes.SharedMemory(mechanism="posix", key="a"),
        nodes.MessageQueue(mechanism="sysv", key="1"),
        nodes.Semaphore(mechanism="posix", key="s"),
    ],
)
def test_users_of_one_object_are_paired_once(hub: Entity) -> None:
    graph = Graph([_process(n) for n in (1, 2, 3)] + [hub], [edges.Access(_id(n), hub.id) for n in (3, 1, 2)])
    assert sorted(_pairs(lift(graph))) == [(_id(1), _id(2), False), (_id(1), _id(3), False), (_id(2), _id(3), False)]
    assert all(edge.via == [hub.id] and edge.kinds == [hub.kind] for edge in lift(graph))


def test_a_queue_that_one_may_only_write_and_one_only_read_is_directed() -> None:
    queue = nodes.MessageQueue(mechanism="posix", key="/q")
    graph = Graph(
        [_process(1), _process(2), queue],
        [edges.Access(_id(2), queue.id, {"ends": "w"}), edges.Access(_id(1), queue.id, {"ends": "r"})],
    )
    assert _pairs(lift(graph)) == [(_id(2), _id(1), True)]


@pytest.mark.parametrize("shared", [nodes.GPU(uuid="a"), nodes.Disk(name="sda"), nodes.Mount(path="/")])
def test_users_of_one_device_do_not_talk_by_it(shared: Entity) -> None:
    graph = Graph([_process(1), _process(2), shared], [edges.Access(_id(n), shared.id) for n in (1, 2)])
    assert lift(graph) == []
    assert lift(graph, loose=True) != []


def test_threads_lift_to_their_process_and_children_do_not_lift_to_their_parent() -> None:
    pipe = nodes.Pipe(inode=7)
    graph = Graph(
        [_process(1), _process(2), nodes.Thread(tid=5, start=1), pipe],
        [
            edges.Own(_id(1), _id(2)),
            edges.Own(_id(2), "Thread(tid=5,start=1)"),
            edges.SendTo("Thread(tid=5,start=1)", pipe.id),
            edges.SendTo(pipe.id, _id(1)),
        ],
    )
    assert _pairs(lift(graph)) == [(_id(2), _id(1), True)]


def test_lifting_to_containers() -> None:
    graph = _tcp(1, 2) + Graph(
        [nodes.Container(container_id="a"), nodes.Container(container_id="b"), nodes.Host(hostname="h")],
        [
            edges.Host("Container(a)", _id(1)),
            edges.Host("Container(b)", _id(2)),
            edges.Host("Host(h)", "Container(a)"),
        ],
    )
    assert _pairs(lift(graph, (nodes.Container,))) == [("Container(a)", "Container(b)", True)]
    assert _pairs(lift(graph, (nodes.Container, nodes.Process))) == [(_id(1), _id(2), True)]


def test_ended_connections_are_not_told() -> None:
    graph = _tcp(1, 2)
    key = ("Socket(tcp,10.0.0.5:40000)", "Socket(tcp,10.0.0.5:80)", "ConnectTo")
    graph.edges[key] = edges.ConnectTo(*key[:2], {"ended_round": 4})
    assert lift(graph) == []


def test_an_object_of_very_many_stands_for_itself() -> None:
    count = 2_000
    pipe = nodes.Pipe(inode=7)
    graph = Graph(
        [_process(n) for n in range(count)] + [pipe],
        [edges.SendTo(_id(n), pipe.id) for n in range(count)] + [edges.SendTo(pipe.id, _id(0))],
    )
    lifted = lift(graph)
    assert len(lifted) == count  # each with the pipe, not two millions of pairs
    assert _pairs(lifted)[0] == (pipe.id, _id(0), False)
    assert _pairs(lifted)[1] == (_id(1), pipe.id, True)


def test_cycles_of_containment_end() -> None:
    graph = Graph(
        [nodes.Unit(path="a"), nodes.Unit(path="b"), nodes.Socket(protocol="tcp", address="x:1"), _process(1)],
        [
            edges.Host("Unit(a)", "Unit(b)"),
            edges.Host("Unit(b)", "Unit(a)"),
            edges.Belong("Socket(tcp,x:1)", "Unit(a)"),
            edges.ConnectTo("Socket(tcp,x:1)", _id(1)),
        ],
    )
    assert lift(graph) == []


@st.composite
def _worlds(draw: st.DrawFn) -> tuple[Graph, dict[str, set[str]]]:
    """Processes holding unix sockets, some connected; and who holds which, as the oracle."""
    count = draw(st.integers(1, 4))
    graph = Graph([_process(n) for n in range(count)])
    holders: dict[str, set[str]] = {}
    for inode in range(draw(st.integers(0, 6))):
        socket = nodes.UnixSocket(inode=inode)
        graph.try_add_node(socket)
        holders[socket.id] = {_id(n) for n in draw(st.sets(st.integers(0, count - 1), max_size=3))}
        for holder in sorted(holders[socket.id]):
            graph.try_add_edge(edges.Belong(socket.id, holder))
    ids = sorted(holders)
    for _ in range(draw(st.integers(0, 6)) if ids else 0):
        graph.try_add_edge(edges.ConnectTo(draw(st.sampled_from(ids)), draw(st.sampled_from(ids))))
    return graph, holders


@given(_worlds())
def test_every_pair_is_told_exactly_once_per_connection(world: tuple[Graph, dict[str, set[str]]]) -> None:
    graph, holders = world
    expected: set[tuple[str, frozenset[str]]] = set()
    for edge in graph.edges_of_kind(edges.ConnectTo):
        for source in holders[edge.source]:
            for target in holders[edge.target] - {source}:
                expected.add((edge.id, frozenset((source, target))))
    told = [(via, frozenset((edge.source, edge.target))) for edge in lift(graph) for via in edge.via]
    assert len(told) == len(set(told))
    assert set(told) == expected
    assert len(lift(graph)) == len({(e.source, e.target, e.directed) for e in lift(graph)})
