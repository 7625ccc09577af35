"""The live store against a model that does the same the slow and obvious way."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.diff import apply
from gpuflight.graph.rows import Rows
from gpuflight.graph.store import ENDED, LiveStore


def make_process(pid: int, name: str | None, cpu: int | None) -> nodes.Process:
    return nodes.Process(
        pid=pid,
        start=1,
        attributes={} if name is None else {"name": name},
        metrics={} if cpu is None else {"cpu_pct": cpu},
    )


def make_edge(a: int, b: int, sent: int) -> Any:
    return edges.ConnectTo(make_process(a, None, None).id, make_process(b, None, None).id, metrics={"bytes": sent})


node_rows = st.tuples(st.integers(0, 5), st.sampled_from([None, "x", "y"]), st.sampled_from([None, 1, 2]))
edge_rows = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 1))
batches = st.lists(st.tuples(st.lists(node_rows, max_size=6), st.lists(edge_rows, max_size=6)), max_size=3)


@given(rounds=st.lists(batches, max_size=8), tombstone_rounds=st.integers(0, 3), reuse=st.booleans())
def test_store_is_the_fold_of_the_reports_plus_tombstones(
    rounds: list[Any], tombstone_rounds: int, reuse: bool
) -> None:
    store = LiveStore(tombstone_rounds)
    before = Graph()
    # Each collector keeps its own objects from round to round, as real ones do; without it every object is new.
    node_makers = [Rows(make_process) for _ in range(3)]
    edge_makers = [Rows(make_edge) for _ in range(3)]
    absent_since: dict[Any, int] = {}
    for number, reports in enumerate(rounds, start=1):
        node_batches, edge_batches = [], []
        for index, (node_report, edge_report) in enumerate(reports):
            if reuse:
                node_batches.append(node_makers[index].elements(node_report))
                edge_batches.append(edge_makers[index].elements(edge_report))
            else:
                node_batches.append([make_process(*row) for row in node_report])
                edge_batches.append([make_edge(*row) for row in edge_report])
        result = store.advance(number, node_batches, edge_batches)
        current = result.graph

        expected = Graph(e for batch in node_batches for e in batch)
        live = {key: e for key, e in current.nodes.items() if ENDED not in e.attributes}
        assert live == expected.nodes

        absent_since = {key: since for key, since in absent_since.items() if key not in expected.nodes}
        for key in before.nodes:
            if key not in expected.nodes:
                absent_since.setdefault(key, number)
        absent_since = {key: since for key, since in absent_since.items() if number - since < tombstone_rounds}
        assert {k: e.attributes[ENDED] for k, e in current.nodes.items() if ENDED in e.attributes} == absent_since

        expected_edges = Graph((), (e for batch in edge_batches for e in batch)).edges
        joined = {k: e for k, e in expected_edges.items() if k[0] in current.nodes and k[1] in current.nodes}
        assert {key: e for key, e in current.edges.items() if ENDED not in e.attributes} == joined
        assert not current.dangling()

        assert apply(result.diff, before) == current
        assert len(result.diff.nodes_added) == len(current.nodes.keys() - before.nodes.keys())
        assert set(result.diff.nodes_removed) == before.nodes.keys() - current.nodes.keys()
        assert set(result.diff.edges_removed) == before.edges.keys() - current.edges.keys()
        assert all(step.before != step.after for step in result.diff.nodes_changed + result.diff.edges_changed)
        before = current


def test_an_equal_report_is_no_change_and_a_repeated_object_is_known_at_sight() -> None:
    store = LiveStore()
    store.advance(1, [[make_process(1, "a", 1)]], [[]])
    again = make_process(1, "a", 1)
    second = store.advance(2, [[again]], [[]])
    assert not second.diff
    third = store.advance(3, [[again]], [[]])
    assert not third.diff
    assert third.graph.nodes[again.id] is again


def test_rows_give_the_object_of_the_last_round_and_forget_what_is_gone() -> None:
    made: list[int] = []

    def make(value: int) -> object:
        made.append(value)
        return object()

    rows = Rows(make)
    first = rows.elements([(value,) for value in range(10)])
    assert rows.elements([(value,) for value in range(10)]) == first
    assert made == list(range(10))
    twice = rows.elements([(99,), (99,), (3,)])
    assert twice[0] is twice[1]
    assert twice[2] is first[3]
    rows.elements([(99,)])
    rows.elements([(99,)])
    assert len(rows._known) <= 2


def test_elements_without_numbers_can_be_copied_pickled_and_not_changed_by_accident() -> None:
    bare = make_process(1, None, None)
    full = nodes.Process(pid=1, start=1)
    for again in (copy.copy(full), copy.deepcopy(full), pickle.loads(pickle.dumps(full))):
        assert again == full == bare
        assert again.attributes is full.attributes
    with pytest.raises(TypeError, match="replaced"):
        full.metrics["cpu_pct"] = 1.0
    with pytest.raises(TypeError, match="replaced"):
        full.attributes.update(name="x")
    assert nodes.Process(pid=2, start=1).metrics == {}
