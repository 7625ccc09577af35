"""Differences of graphs, their application, their noise filter, their JSON form."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import agreeing_graphs, graphs

from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph import diff as diff_module
from gpuflight.graph.codec import decode_diff, encode_diff
from gpuflight.graph.diff import Noise, apply, apply_all, diff, merge_diffs


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


def _chain(graphs_: list[Graph]) -> list[diff_module.Diff]:
    return [diff(a, b) for a, b in itertools.pairwise(graphs_)]


@given(st.lists(graphs(max_nodes=3), min_size=1, max_size=5) | agreeing_graphs(4))
def test_a_merged_difference_is_all_of_them_in_one(line: list[Graph]) -> None:
    merged = merge_diffs(*_chain(line))
    assert apply(merged, line[0]) == line[-1]
    assert apply(merged, line[0]) == apply_all(_chain(line), line[0])


@given(agreeing_graphs(4))
def test_merging_is_associative_and_nothing_is_its_unit(line: list[Graph]) -> None:
    one, two, three = _chain(line)
    left = apply(merge_diffs(merge_diffs(one, two), three), line[0])
    assert left == apply(merge_diffs(one, merge_diffs(two, three)), line[0]) == line[-1]
    assert apply(merge_diffs(diff_module.Diff(), one), line[0]) == apply(one, line[0])


@given(agreeing_graphs(4))
def test_a_merged_difference_survives_its_json_form(line: list[Graph]) -> None:
    change, _ = decode_diff(encode_diff(merge_diffs(*_chain(line)), 4), line[0])
    assert apply(change, line[0]) == line[-1]


def test_what_came_and_went_or_changed_back_is_not_told() -> None:
    here, gone = _process(cpu_pct=1), Graph()
    assert not merge_diffs(diff(gone, here), diff(here, gone))
    assert not merge_diffs(diff(here, _process(cpu_pct=2)), diff(_process(cpu_pct=2), _process(cpu_pct=1)))
    again = merge_diffs(diff(here, gone), diff(gone, _process(cpu_pct=2)))
    assert again.counts() == {**dict.fromkeys(again.counts(), 0), "nodes_added": 1, "nodes_removed": 1}
    # What it was before is known here, so only what is different is told.
    moved = merge_diffs(
        diff(here, _process(cpu_pct=3)), diff(_process(cpu_pct=3), gone), diff(gone, _process(cpu_pct=2))
    )
    assert moved.counts() == {**dict.fromkeys(moved.counts(), 0), "nodes_changed": 1}
