"""Pictures of several hosts: a connection that both ends of are known is drawn once, from machine to machine."""

from __future__ import annotations

from gpuflight.collectors.remote_join import halves_of, join_hosts
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.joins import connected_once
from gpuflight.graph.namespaces import with_namespace
from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.layout.default import DefaultLayout

A, B = "10.0.0.5:40000", "10.0.0.7:5432"
HERE, THERE = f"Socket(tcp,{A})", f"Socket(ns=node-7,tcp,{B})"


def host(at: str, name: str, client: str = A) -> Graph:
    """A host with one process that holds its end of a connection."""
    box, process = nodes.Host(hostname=name), nodes.Process(pid=1, start=1, attributes={"name": "train"})
    ends = [
        nodes.Socket(protocol="tcp", address=address, attributes={} if address == at else {"remote": True})
        for address in (client, B)
    ]
    own = ends[0] if ends[0].address == at else ends[1]
    links = [edges.Host(box.id, process.id), edges.Belong(own.id, process.id)]
    return Graph(
        [box, process, *ends], [*links, edges.ConnectTo(ends[0].id, ends[1].id, {"half": True}, {"rtt_ms": 1.0})]
    )


def both(client_as_the_server_sees_it: str = A) -> Graph:
    """Two hosts as the parent's round has them."""
    here, there = host(A, "here"), with_namespace(host(B, "there", client_as_the_server_sees_it), "node-7")
    graph = here.merge(there)
    halves = {"node-7": halves_of(there.nodes, there.edges.values())}
    joined = join_hosts(halves_of(here.nodes, here.edges.values()), halves, graph.nodes)
    return Graph(joined.nodes).merge(graph).merge(Graph([], joined.edges))


def test_a_connection_of_two_hosts_is_drawn_once() -> None:
    graph = both()
    picture = DefaultLayout().layout(graph, LayoutOptions())
    network = [(link.source, link.target) for link in picture.links if link.kind == "ConnectTo"]
    assert network == [(HERE, THERE)]
    assert len(graph.edges_of_kind(edges.ConnectTo)) == 3, "what each saw stays in the graph"
    assert {box.id for box in picture.boxes} == {"Host(here)", "Host(ns=node-7,there)"}, "nobody stands elsewhere"
    assert any("2 stand-ins" in note for note in picture.notes)


def test_behind_nat_both_halves_are_drawn_with_their_unknown_ends() -> None:
    graph = both("10.0.0.1:61000")
    assert connected_once(graph) is graph
    picture = DefaultLayout().layout(graph, LayoutOptions())
    network = {(link.source, link.target) for link in picture.links if link.kind == "ConnectTo"}
    assert network == {(HERE, f"Socket(tcp,{B})"), ("Socket(ns=node-7,tcp,10.0.0.1:61000)", THERE)}


def test_a_stand_in_that_something_else_touches_stays() -> None:
    graph = both()
    graph.try_add_edge(edges.ConnectTo(f"Socket(tcp,{B})", "Process(pid=1,start=1)"))
    once = connected_once(graph)
    assert f"Socket(tcp,{B})" in once and f"Socket(ns=node-7,tcp,{A})" not in once and not once.dangling()
