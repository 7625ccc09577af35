"""Neighbours, parts of a graph, what a text means, and the networkx form."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import graphs

from gpuflight.errors import InputError
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph import adjacency as adjacency_module
from gpuflight.graph.adjacency import adjacency
from gpuflight.graph.element import Category
from gpuflight.graph.interop import from_networkx, to_networkx
from gpuflight.graph.queries import CATEGORIES, find, find_one, neighbours, subgraph

P10, P11 = "Process(pid=10,start=5)", "Process(pid=11,start=6)"


def test_neighbours_at_one_edge(machine: Graph) -> None:
    around = neighbours(machine, P11)
    assert set(around.nodes) == {P11, f"Container({'c' * 64})", P10, "Socket(tcp,10.0.0.5:40000)", "Pipe(ino=7)"}
    assert (P10, P11, "Own") in around
    assert ("Pipe(ino=7)", P10, "SendTo") in around  # between two that were found
    assert around <= machine


def test_neighbours_at_no_edge_is_the_entity(machine: Graph) -> None:
    assert list(neighbours(machine, P11, 0).nodes) == [P11]


def test_neighbours_by_category_and_direction(machine: Graph) -> None:
    wired = neighbours(machine, "GPU(uuid=GPU-a)", 9, ["placement"])
    assert P10 in wired  # by its memory on the node
    assert "Host(node1)" not in wired
    assert {edge.category for edge in wired.edges.values()} == {"placement"}
    below = neighbours(machine, P11, 9, ["data_stream"], directed=True)
    assert set(below.nodes) == {P11, "Pipe(ino=7)", P10, "GPU(uuid=GPU-a)"}
    undirected = neighbours(machine, "Numa(1)", 1, directed=True)
    assert set(undirected.nodes) == {"Numa(1)", "Numa(0)"}  # distance has no direction, affinity has


def test_questions_that_make_no_sense_are_input_errors(machine: Graph) -> None:
    with pytest.raises(InputError, match="no entity"):
        neighbours(machine, "Process(pid=0,start=0)")
    with pytest.raises(InputError, match="depth of -1"):
        neighbours(machine, P10, -1)
    with pytest.raises(InputError, match=r"'wires'.*deploy"):
        neighbours(machine, P10, 1, ["wires"])  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"'Toaster'.*GPU"):
        subgraph(machine, ["Toaster"])


@given(graphs(dangling=True), st.integers(0, 4), st.booleans(), st.sampled_from([None, *CATEGORIES]))
def test_neighbours_against_a_plain_search(graph: Graph, depth: int, directed: bool, category: Category | None) -> None:
    allowed = [edge for edge in graph.edges.values() if category in (None, edge.category)]
    for start in graph.nodes:
        found = {start}
        for _ in range(depth):
            found |= {e.target for e in allowed if e.source in found and e.target in graph.nodes} | {
                e.source
                for e in allowed
                if e.target in found and e.source in graph.nodes and not (directed and e.directed)
            }
        answer = neighbours(graph, start, depth, None if category is None else [category], directed=directed)
        assert set(answer.nodes) == found
        assert set(answer.edges) == {e.key for e in allowed if e.source in found and e.target in found}


def test_subgraph_by_kind_namespace_and_attribute(machine: Graph) -> None:
    machine.try_add_node(nodes.Process(pid=1, start=1, ns="node-7", attributes={"name": "python"}))
    assert set(subgraph(machine, [nodes.GPU, "numa"]).nodes) == {
        "GPU(uuid=GPU-a)",
        "GPU(uuid=GPU-b)",
        "Numa(0)",
        "Numa(1)",
    }
    assert set(subgraph(machine, [nodes.GPU, "Numa"]).edges) == {
        ("GPU(uuid=GPU-a)", "Numa(0)", "Affinity"),
        ("GPU(uuid=GPU-b)", "Numa(0)", "Affinity"),
        ("Numa(0)", "Numa(1)", "NumaDistance"),
        ("GPU(uuid=GPU-a)", "GPU(uuid=GPU-b)", "Proximity"),
    }
    assert list(subgraph(machine, namespaces=["node-7"]).nodes) == ["Process(ns=node-7,pid=1,start=1)"]
    assert set(subgraph(machine, ["Process"], [""], {"name": "python"}).nodes) == {P10, P11}
    assert set(subgraph(machine, where={"name": "python", "pid": 10}).nodes) == {P10}
    assert set(subgraph(machine, where={"cpu_pct": lambda value: value is not None and value > 50}).nodes) == {P10}
    assert set(subgraph(machine, where=lambda entity: entity.kind == "Pipe").nodes) == {"Pipe(ino=7)"}
    assert subgraph(machine) == machine


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        (P10, [P10]),
        ("pid:10", [P10]),
        (" pid: 10 ", [P10]),
        ("PID:10", [P10]),
        ("pid:1", ["Process(pid=1,start=1)"]),
        ("pid:99", []),
        ("tid:10", ["Thread(tid=10,start=5)"]),
        ("gpu:0", ["GPU(uuid=GPU-a)"]),
        ("gpu:1", ["GPU(uuid=GPU-b)"]),
        ("gpu:gpu-b", ["GPU(uuid=GPU-b)"]),
        ("gpu:GPU", ["GPU(uuid=GPU-a)", "GPU(uuid=GPU-b)"]),
        ("numa:0", ["Numa(0)"]),
        ("nic:eth0", ["Nic(eth0)"]),
        ("port:29500", ["Socket(tcp,10.0.0.5:29500)"]),
        ("container:cccc", [f"Container({'c' * 64})"]),
        ("container:train", [f"Container({'c' * 64})"]),
        ("pci:0000:01:00.0", ["PciDevice(0000:01:00.0)"]),
        ("systemd", ["Process(pid=1,start=1)"]),
        ("SYST", ["Process(pid=1,start=1)"]),
        ("python", [P10, P11, "Thread(tid=10,start=5)"]),
        ("eth0", ["Nic(eth0)"]),
        ("Numa(", ["Numa(0)", "Numa(1)"]),
        ("process:10", [P10]),
        ("nothing", []),
        ("", []),
        ("  ", []),
        (":", []),
        ("pid:", []),
    ],
)
def test_what_a_text_means(machine: Graph, text: str, ids: list[str]) -> None:
    assert [entity.id for entity in find(machine, text)] == ids


def test_the_live_one_is_meant_where_an_ended_one_has_the_same_pid(machine: Graph) -> None:
    machine.try_add_node(nodes.Process(pid=10, start=1, attributes={"ended_round": 3}))
    assert find_one(machine, "pid:10").id == P10
    machine.try_add_node(nodes.Process(pid=77, start=1, attributes={"ended_round": 3}))
    assert find_one(machine, "pid:77").id == "Process(pid=77,start=1)"


def test_an_ambiguous_text_lists_its_candidates(machine: Graph) -> None:
    with pytest.raises(InputError) as caught:
        find_one(machine, "python")
    assert str(caught.value).splitlines() == [
        "'python' can mean 3 entities; give one of these ids:",
        f"  {P10}  python",
        f"  {P11}  python",
        "  Thread(tid=10,start=5)  python",
    ]
    many = Graph([nodes.Disk(name=f"sda{n}") for n in range(30)])
    with pytest.raises(InputError, match="… and 20 more"):
        find_one(many, "sda")
    with pytest.raises(InputError, match="nothing in this graph is called 'x'"):
        find_one(machine, "x")


@given(graphs(), st.text(max_size=8))
def test_any_text_has_an_answer_and_every_id_its_entity(graph: Graph, text: str) -> None:
    assert all(entity in graph for entity in find(graph, text))
    for entity in graph:
        assert find(graph, entity.id) == [entity] or entity.id != entity.id.strip()


def test_adjacency_is_kept_while_the_graph_lives_and_renewed_when_it_grows(machine: Graph) -> None:
    first = adjacency(machine)
    assert adjacency(machine) is first
    machine.try_add_edge(edges.Own("Process(pid=1,start=1)", P11))
    assert adjacency(machine) is not first
    assert len(adjacency(machine).edges) == len(first.edges) + 1
    number = id(machine)
    graph = Graph([nodes.Host(hostname="x")])
    adjacency(graph)
    key = id(graph)
    assert key in adjacency_module._cache
    del graph
    gc.collect()
    assert key not in adjacency_module._cache
    assert number in adjacency_module._cache


@given(graphs())
def test_networkx_and_back(graph: Graph) -> None:
    assert from_networkx(to_networkx(graph)) == graph


def test_the_networkx_form_is_flat(machine: Graph) -> None:
    form = to_networkx(machine)
    assert form.number_of_nodes() == len(machine.nodes)
    assert form.number_of_edges() == len(machine.edges)
    data: dict[str, Any] = form.nodes[P10]
    assert (data["kind"], data["pid"], data["metrics"]["cpu_pct"]) == ("Process", 10, 99.5)
    link = form.edges["Numa(0)", "Numa(1)", "NumaDistance"]
    assert (link["category"], link["directed"], link["metrics"]) == ("placement", False, {"distance": 21})
    form.nodes[P10]["metrics"]["cpu_pct"] = 0
    assert machine.nodes[P10].metrics["cpu_pct"] == 99.5


def test_a_foreign_networkx_graph_is_an_input_error() -> None:
    import networkx

    strange = networkx.MultiDiGraph()
    strange.add_node("a", kind="Toaster")
    with pytest.raises(InputError, match="Toaster"):
        from_networkx(strange)
    incomplete = networkx.MultiDiGraph()
    incomplete.add_node("a", kind="Process", pid="seven")
    with pytest.raises(InputError, match="node a"):
        from_networkx(incomplete)
    loose = networkx.MultiDiGraph()
    loose.add_edge("a", "b", "Toasts")
    with pytest.raises(InputError, match="Toasts"):
        from_networkx(loose)
