"""Differences of graphs, their application, their noise filter, their JSON form."""

from __future__ import annotations

from hypothesis import given
from tests.strategies import agreeing_graphs, graphs

from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.codec import decode_diff, encode_diff
from gpuflight.graph.diff import Noise, apply, diff


@given(graphs(), graphs())
def test_applying_a_difference_gives_the_second_graph(a: Graph, b: Graph) -> None:
    assert apply(diff(a, b), a) == b


@given(agreeing_graphs(2))
def test_applying_a_difference_of_overlapping_graphs_gives_the_second(parts: list[Graph]) -> None:
    a, b = parts
    assert apply(diff(a, b), a) == b


@given(graphs())
def test_a_graph_does_not_differ_from_itself(graph: Graph) -> None:
    again = Graph(graph.nodes.values(), graph.edges.values())
    assert not diff(graph, again)
    assert sum(diff(graph, again).counts().values()) == 0


@given(agreeing_graphs(2))
def test_differences_are_symmetric(parts: list[Graph]) -> None:
    a, b = parts
    forth, back = diff(a, b), diff(b, a)
    assert {node.id for node in forth.nodes_added} == set(back.nodes_removed)
    assert {edge.key for edge in forth.edges_added} == set(back.edges_removed)
    assert len(forth.nodes_changed) == len(back.nodes_changed)
    assert bool(forth) == (a != b)


@given(agreeing_graphs(2))
def test_differences_survive_their_json_form(parts: list[Graph]) -> None:
    a, b = parts
    change, line = decode_diff(encode_diff(diff(a, b), 7), a)
    assert apply(change, a) == b
    assert line.round == 7


@given(graphs(), graphs())
def test_unrelated_differences_survive_their_json_form(a: Graph, b: Graph) -> None:
    change, _ = decode_diff(encode_diff(diff(a, b), 1), a)
    assert apply(change, a) == b


def _process(**metrics: float) -> Graph:
    return Graph([nodes.Process(pid=1, start=1, metrics=metrics)])


def test_fields_name_what_changed() -> None:
    before = nodes.Process(pid=1, start=1, attributes={"state": "S", "exe": "/a"}, metrics={"cpu_pct": 1})
    after = nodes.Process(pid=1, start=1, attributes={"state": "R", "exe": "/a"}, unknown={"cpu_pct": "gone"})
    [step] = diff(Graph([before]), Graph([after])).nodes_changed
    assert sorted(step.fields(), key=str) == [
        ("attributes", "state", "S", "R"),
        ("metrics", "cpu_pct", 1, None),
        ("unknown", "cpu_pct", None, "gone"),
    ]


def test_an_attribute_that_becomes_null_is_a_change() -> None:
    before = nodes.Process(pid=1, start=1)
    after = nodes.Process(pid=1, start=1, attributes={"exe": None})
    [step] = diff(Graph([before]), Graph([after])).nodes_changed
    assert list(step.fields()) == [("attributes", "exe", None, None)]


def test_noise_hides_small_steps_of_metrics_only() -> None:
    noise = Noise(relative=0.05, absolute=1)
    assert not diff(_process(cpu_pct=100.0), _process(cpu_pct=104.0), noise)
    assert diff(_process(cpu_pct=100.0), _process(cpu_pct=106.0), noise)
    assert not diff(_process(cpu_pct=0.0), _process(cpu_pct=0.9), noise)
    assert diff(_process(), _process(cpu_pct=0.0), noise)
    assert diff(_process(cpu_pct=0.0), _process(), noise)
    renamed = Graph([nodes.Process(pid=1, start=1, attributes={"name": "x"}, metrics={"cpu_pct": 1.0})])
    assert diff(_process(cpu_pct=1.0), renamed, noise)


def test_applying_to_a_graph_that_lacks_what_is_removed_is_no_error() -> None:
    full = Graph([nodes.Host(hostname="a")], [edges.Own("x", "y")])
    assert apply(diff(full, Graph()), Graph()) == Graph()
    assert apply(diff(full, Graph()), full) == Graph()


def test_unchanged_elements_keep_their_object() -> None:
    kept = nodes.Host(hostname="kept")
    a = Graph([kept])
    b = Graph([kept, nodes.Host(hostname="new")])
    assert apply(diff(a, b), a).nodes[kept.id] is kept
