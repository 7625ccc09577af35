"""The graph as an algebra: building, merging, comparing, for graphs of every kind."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import agreeing_graphs, edges, entities, graphs

from gpuflight.graph import Edge, Entity, Graph, merge_entities, nodes
from gpuflight.graph import edges as edge_kinds


@given(graphs())
def test_merge_is_idempotent(graph: Graph) -> None:
    assert graph + graph == graph


@given(graphs(), graphs(), graphs())
def test_merge_is_associative(a: Graph, b: Graph, c: Graph) -> None:
    assert (a + b) + c == a + (b + c)


@given(agreeing_graphs(3))
def test_merge_is_associative_where_graphs_overlap(parts: list[Graph]) -> None:
    a, b, c = parts
    assert (a + b) + c == a + (b + c)


@given(agreeing_graphs(2))
def test_merge_is_commutative_where_graphs_agree(parts: list[Graph]) -> None:
    a, b = parts
    assert _without_reasons(a + b) == _without_reasons(b + a)


@given(graphs())
def test_the_empty_graph_is_neutral(graph: Graph) -> None:
    assert graph + Graph() == graph == Graph() + graph


@given(agreeing_graphs(2))
def test_merge_contains_every_element_of_both(parts: list[Graph]) -> None:
    a, b = parts
    both = a + b
    assert both.nodes.keys() == a.nodes.keys() | b.nodes.keys()
    assert both.edges.keys() == a.edges.keys() | b.edges.keys()
    for part in parts:
        for node_id, node in part.nodes.items():
            assert node.metrics.items() <= both.nodes[node_id].metrics.items()
            assert node.attributes.keys() <= both.nodes[node_id].attributes.keys()


@given(graphs(), graphs())
def test_merge_leaves_its_operands_alone(a: Graph, b: Graph) -> None:
    before = Graph(a.nodes.values(), a.edges.values()), Graph(b.nodes.values(), b.edges.values())
    merged = a + b
    merged.try_add_node(nodes.Host(hostname="later"))
    assert (a, b) == before


@given(graphs())
def test_building_again_in_any_order_gives_the_same_graph(graph: Graph) -> None:
    again = Graph(reversed(list(graph.nodes.values())), reversed(list(graph.edges.values())))
    twice = Graph([*graph.nodes.values()] * 2, [*graph.edges.values()] * 2)
    assert graph == again == twice


@given(graphs())
def test_comparisons_agree(graph: Graph) -> None:
    assert graph <= graph
    assert graph >= graph
    assert all(node in graph and node.id in graph for node in graph.nodes.values())
    assert all(edge in graph and edge.key in graph for edge in graph.edges.values())


@given(graphs(), graphs())
def test_both_ways_contained_is_equal(a: Graph, b: Graph) -> None:
    assert (a <= b and b <= a) == (a == b)
    assert (a <= b) == (b >= a)


@given(graphs(), st.data())
def test_a_part_is_contained_and_a_changed_graph_is_not(graph: Graph, data: st.DataObject) -> None:
    kept = data.draw(st.sets(st.sampled_from(sorted(graph.nodes))) if graph.nodes else st.just(set()))
    part = Graph([graph.nodes[node_id] for node_id in sorted(kept)])
    assert part <= graph
    assert part == graph or not graph <= part
    extra = nodes.Host(hostname="not drawn by the strategy: " + "x" * 40)
    assert not Graph([*part.nodes.values(), extra]) <= graph


def test_contains_asks_for_equality_of_elements_not_only_of_ids() -> None:
    graph = Graph([nodes.Process(pid=1, start=1, metrics={"cpu_pct": 1.0})])
    assert nodes.Process(pid=1, start=1, metrics={"cpu_pct": 1.0}) in graph
    assert nodes.Process(pid=1, start=1, metrics={"cpu_pct": 2.0}) not in graph
    assert "Process(pid=1,start=1)" in graph
    assert ("a", "b", "Own") not in graph
    assert 7 not in graph


def test_the_left_graph_wins_a_contradiction_and_the_right_one_fills_gaps() -> None:
    newer = nodes.Process(
        pid=1, start=1, attributes={"state": "R"}, metrics={"cpu_pct": 5.0}, unknown={"rss_bytes": "x"}
    )
    older = nodes.Process(
        pid=1, start=1, attributes={"state": "S", "exe": "/x"}, metrics={"cpu_pct": 9.0, "rss_bytes": 4}
    )
    merged = (Graph([newer]) + Graph([older])).nodes[newer.id]
    assert merged.attributes == {"state": "R", "exe": "/x"}
    assert merged.metrics == {"cpu_pct": 5.0, "rss_bytes": 4}
    assert merged.unknown is None  # what one of them knows is not unknown


def test_merging_a_graph_keeps_the_order_of_first_sight() -> None:
    a = Graph([nodes.Host(hostname=name) for name in "bd"])
    b = Graph([nodes.Host(hostname=name) for name in "abc"])
    assert [node.hostname for node in (a + b)] == ["b", "d", "a", "c"]


def test_an_element_that_adds_nothing_is_not_copied() -> None:
    rich = nodes.Process(pid=1, start=1, attributes={"name": "x"}, metrics={"cpu_pct": 1.0})
    graph = Graph([rich])
    assert graph.try_add_node(nodes.Process(pid=1, start=1)) is False
    assert graph.nodes[rich.id] is rich
    assert merge_entities(rich, nodes.Process(pid=1, start=1)) is rich


def test_metrics_do_not_freeze_at_first_sight() -> None:
    """Defect 2 of the reference system: interned entities kept the numbers of the first round."""
    first = nodes.GPU(uuid="a", metrics={"sm_util_pct": 10})
    second = nodes.GPU(uuid="a", metrics={"sm_util_pct": 90})
    assert (Graph([second]) + Graph([first])).nodes[first.id].metrics == {"sm_util_pct": 90}


def test_the_same_pid_with_another_start_is_another_process() -> None:
    """Defect 11 and row T32: identity is pid and start time."""
    graph = Graph([nodes.Process(pid=100, start=1), nodes.Process(pid=100, start=2)])
    assert list(graph.nodes) == ["Process(pid=100,start=1)", "Process(pid=100,start=2)"]


def test_a_foreign_process_is_never_one_of_ours() -> None:
    graph = Graph([nodes.Process(pid=1, start=1), nodes.Process(pid=1, start=1, ns="node-7")])
    assert list(graph.nodes) == ["Process(pid=1,start=1)", "Process(ns=node-7,pid=1,start=1)"]


def test_edges_are_one_per_source_target_and_kind() -> None:
    graph = Graph()
    assert graph.try_add_edge(edge_kinds.Own("a", "b"))
    assert graph.try_add_edge(edge_kinds.Own("b", "a"))
    assert graph.try_add_edge(edge_kinds.Host("a", "b"))
    assert not graph.try_add_edge(edge_kinds.Own("a", "b", {}, {"x_count": 1}))
    assert graph.edges["a", "b", "Own"].metrics == {"x_count": 1}
    assert [edge.id for edge in graph.dangling()] == ["Own(a->b)", "Own(b->a)", "Host(a->b)"]


def test_a_graph_is_true_even_when_empty_and_cannot_be_hashed() -> None:
    assert Graph()
    assert len(Graph()) == 0
    with pytest.raises(TypeError):
        hash(Graph())
    assert Graph() != "graph"


@given(entities())
def test_an_id_names_the_kind_the_namespace_and_the_identity(entity: Entity) -> None:
    assert entity.id.startswith(f"{entity.kind}(")
    assert entity.id.endswith(")")
    assert (f"(ns={entity.ns}," in entity.id) == bool(entity.ns)
    assert isinstance(entity.label, str)


@given(entities(bare=True), st.data())
def test_different_identities_have_different_ids(entity: Entity, data: st.DataObject) -> None:
    """Numbers only: text identities may hold the separators themselves, see docs/graph.md."""
    fields = {name: getattr(entity, name) for name in entity.__struct_fields__ if name not in Entity.__struct_fields__}
    numbers = [name for name, value in fields.items() if isinstance(value, int)]
    for name in numbers:
        other = type(entity)(**{**fields, name: fields[name] + 1}, ns=entity.ns)
        assert other.id != entity.id


@given(edges())
def test_the_category_and_direction_belong_to_the_kind(edge: Edge) -> None:
    assert edge.category in ("deploy", "data_stream", "placement", "attribute")
    assert edge.directed is type(edge).directed
    assert edge.key == (edge.source, edge.target, edge.kind)


def test_elements_stay_out_of_the_garbage_collector() -> None:
    """specs/measured.md: the collector, not hashing, is the hidden cost of graphs in Python."""
    assert not gc.is_tracked(nodes.Process(pid=1, start=1, attributes={"a": 1}))
    assert not gc.is_tracked(edge_kinds.Own("a", "b"))
    for kind in (*nodes.NODE_KINDS.values(), *edge_kinds.EDGE_KINDS.values()):
        assert kind.__struct_config__.gc is False, kind


def _without_reasons(graph: Graph) -> Graph:
    """Which of two reasons for one gap is told depends on the order; that there is a gap does not."""
    from msgspec.structs import replace

    def blank(element: Entity) -> Entity:
        return replace(element, unknown=dict.fromkeys(element.unknown, "") if element.unknown else None)

    return Graph.of(
        {key: blank(node) for key, node in graph.nodes.items()},
        {key: blank(edge) for key, edge in graph.edges.items()},  # type: ignore[arg-type]
    )
