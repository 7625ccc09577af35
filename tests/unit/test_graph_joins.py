"""A connection of two hosts that are both known is one: its halves are told by nobody again."""

from __future__ import annotations

import pytest

from gpuflight.collectors.remote_join import halves_of, join_hosts
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.joins import is_joined_half
from gpuflight.graph.lift import lift
from gpuflight.graph.namespaces import with_namespace
from gpuflight.graph.paths import path

A, B = "10.0.0.5:40000", "10.0.0.7:5432"
CLIENT, SERVER = "Process(pid=1,start=1)", "Process(ns=node-7,pid=1,start=1)"


def _host(at: str, ns: str = "") -> Graph:
    """What one host reports: its process holds its end, the other end is a stand-in."""
    process = nodes.Process(pid=1, start=1)
    ends = {
        address: nodes.Socket(protocol="tcp", address=address, attributes={} if address == at else {"remote": True})
        for address in (A, B)
    }
    half = edges.ConnectTo(ends[A].id, ends[B].id, {"half": True}, {"bytes_sent_count": 10})
    graph = Graph([process, *ends.values()], [edges.Belong(ends[at].id, process.id), half])
    return with_namespace(graph, ns) if ns else graph


def _both(*, joined: bool = True) -> Graph:
    here, there = _host(A), _host(B, "node-7")
    both = here + there
    if not joined:
        return both
    found = join_hosts(
        halves_of(here.nodes, here.edges.values()),
        {"node-7": halves_of(there.nodes, there.edges.values())},
        both.nodes,
    )
    assert len(found.edges) == 1 and len(found.nodes) == 2
    marked = {**both.nodes, **{node.id: node for node in found.nodes}}
    return Graph.of(marked, {**both.edges, **{edge.key: edge for edge in found.edges}})


@pytest.mark.parametrize("loose", [False, True])
def test_a_joined_connection_is_lifted_once(loose: bool) -> None:
    [edge] = lift(_both(), loose=loose)
    assert (edge.source, edge.target, edge.directed) == (CLIENT, SERVER, True)
    assert edge.via == [f"ConnectTo(Socket(tcp,{A})->Socket(ns=node-7,tcp,{B}))"]
    assert edge.metrics == {"bytes_sent_count": 10}, "not what both halves say, added up"


def test_halves_that_nobody_joined_are_told_as_they_are() -> None:
    assert lift(_both(joined=False)) == []
    loose = lift(_both(joined=False), loose=True)
    assert {(edge.source, edge.target) for edge in loose} == {
        (CLIENT, f"Socket(tcp,{B})"),
        (f"Socket(ns=node-7,tcp,{A})", SERVER),
    }


def test_the_way_between_hosts_uses_the_joined_edge_once() -> None:
    graph = _both()
    found = path(graph, CLIENT, SERVER)
    assert found is not None
    assert [hop.kind for hop in found.hops] == ["Belong", "ConnectTo", "Belong"]
    assert found.hops[1].edge == (f"Socket(tcp,{A})", f"Socket(ns=node-7,tcp,{B})", "ConnectTo")
    assert path(graph, CLIENT, f"Socket(tcp,{B})") is None, "no way to a stand-in beside the joined edge"
    assert path(_both(joined=False), CLIENT, f"Socket(tcp,{B})") is not None


def test_a_half_stands_where_its_joined_edge_does_not() -> None:
    graph = _both()
    halves = [edge for edge in graph.edges.values() if is_joined_half(edge, graph)]
    assert len(halves) == 2
    for key, edge in list(graph.edges.items()):
        if edge.attributes.get("join") == "both_ends":
            ended = edges.ConnectTo(edge.source, edge.target, {**edge.attributes, "ended_round": 3})
            without = Graph.of(graph.nodes, {k: e for k, e in graph.edges.items() if k != key})
            over = Graph.of(graph.nodes, {**graph.edges, key: ended})
    # A part of a picture, and a connection that ended on one of the hosts first.
    assert not any(is_joined_half(half, part) for half in halves for part in (without, over))
    part = Graph.of({i: n for i, n in graph.nodes.items() if not i.startswith("Socket(ns=")}, graph.edges)
    assert not is_joined_half(next(half for half in halves if "ns=" not in half.id), part)
