"""A foreign graph in a namespace of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from tests import strategies

from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.codec import decode_graph, encode_graph
from gpuflight.graph.namespaces import (
    depth,
    name_from,
    namespaced_id,
    nested,
    valid_name,
    with_namespace,
    within,
    without_namespaces,
)


def test_ids_change_in_nodes_edges_and_references() -> None:
    process = nodes.Process(pid=1, start=2, attributes={"name": "a"}, metrics={"rss_bytes": 5})
    socket = nodes.Socket(protocol="tcp", address="10.0.0.5:80", attributes={"listener": process.id, "x": "f(y)"})
    deeper = nodes.Process(pid=1, start=2, ns="node-9")
    edge = edges.Belong(socket.id, process.id, {"source_processes": [process.id, "gone"]})
    before = Graph([process, socket, deeper], [edge, edges.Own(process.id, deeper.id)])
    moved = with_namespace(before, "node-7")
    assert list(moved.nodes) == [
        "Process(ns=node-7,pid=1,start=2)",
        "Socket(ns=node-7,tcp,10.0.0.5:80)",
        "Process(ns=node-7/node-9,pid=1,start=2)",
    ]
    assert all(entity.id == id_ == entity._render_id() for id_, entity in moved.nodes.items())
    assert [entity.ns for entity in moved] == ["node-7", "node-7", "node-7/node-9"]
    other = moved.nodes["Socket(ns=node-7,tcp,10.0.0.5:80)"]
    assert other.attributes == {"listener": "Process(ns=node-7,pid=1,start=2)", "x": "f(y)"}
    belong = moved.edges_of_kind(edges.Belong)[0]
    assert belong.attributes == {"source_processes": ["Process(ns=node-7,pid=1,start=2)", "gone"]}
    assert not moved.dangling()
    # What was handed in is as it was.
    assert process.id == "Process(pid=1,start=2)" and socket.attributes["listener"] == process.id
    assert before.edges[edge.key] is edge and edge.source == socket.id


@given(strategies.graphs())
def test_nothing_is_lost_merged_or_ours_afterwards(graph: Graph) -> None:
    moved = with_namespace(graph, "peer")
    assert len(moved.nodes) == len(graph.nodes) and len(moved.edges) == len(graph.edges)
    assert not moved.nodes.keys() & graph.nodes.keys()
    for before, after in zip(graph.nodes.values(), moved.nodes.values(), strict=True):
        assert type(after) is type(before) and after.ns == nested("peer", before.ns)
        assert after.metrics == before.metrics and after.id == after._render_id()
    assert len(moved.dangling()) == len(graph.dangling())
    for key, edge in moved.edges.items():
        assert edge.key == key


@given(strategies.graphs())
def test_namespaces_of_two_peers_never_meet(graph: Graph) -> None:
    one, other = with_namespace(graph, "a"), with_namespace(with_namespace(graph, "a"), "b")
    assert not one.nodes.keys() & other.nodes.keys()
    assert all(depth(entity.ns) >= 2 for entity in other)


def test_hosts_in_between_can_be_taken_out_with_all_beneath() -> None:
    at = [nodes.Process(pid=1, start=1, ns=ns) for ns in ("", "a", "a/b", "ab")]
    links = [edges.Own(at[0].id, one.id) for one in at[1:]]
    left = without_namespaces(Graph(at, links), {"a"})
    assert [entity.ns for entity in left] == ["", "ab"]
    assert list(left.edges) == [links[2].key]
    graph = Graph(at, links)
    assert without_namespaces(graph, set()) is graph


@pytest.mark.parametrize("name", ["", "a/b", "a,b", "a(b", "a)b", "a=b", "a b", "é", "x" * 129])
def test_names_that_would_break_an_id_are_refused(name: str) -> None:
    assert not valid_name(name)
    with pytest.raises(ValueError, match="not a name"):
        with_namespace(Graph(), name)
    assert valid_name(name_from(name))


def test_small_questions() -> None:
    assert (depth(""), depth("a"), depth("a/b")) == (0, 1, 2)
    assert within("a/b", "a") and within("a", "a") and not within("ab", "a")
    assert namespaced_id("nothing", "a") == "nothing(ns=a,)"
    assert namespaced_id("Pipe(ns=b,ino=1)", "a", "b") == "Pipe(ns=a/b,ino=1)"
    assert name_from("node7.example:1") == "node7.example:1"


def test_kinds_that_nobody_here_knows_stay_apart_too() -> None:
    text = b'{"schema":1,"nodes":[{"kind":"Tpu","id":"Tpu(3)","index":3},{"kind":"Tpu","id":"Tpu(ns=x,3)","ns":"x"}]}'
    moved = with_namespace(decode_graph(text), "p")
    assert list(moved.nodes) == ["Tpu(ns=p,3)", "Tpu(ns=p/x,3)"]
    assert decode_graph(encode_graph(moved)) == moved
