"""Writing witty-profiler's JSON: its readers find their fields, ours has the graph back whole."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from tests.strategies import graphs

from gpuflight.graph import Graph, codec, edges, nodes
from gpuflight.graph.witty import load_witty, looks_like_witty, read_witty
from gpuflight.graph.witty_write import to_witty


def through(graph: Graph) -> Any:
    return json.loads(codec.encode(to_witty(graph)))


@given(graphs())
def test_our_reader_has_any_graph_back_whole(graph: Graph) -> None:
    report = read_witty(through(graph))
    whole = json.loads(codec.encode_graph(graph))
    known = {node["id"] for node in whole.get("nodes", [])}
    lost = [edge for edge in whole.get("edges", []) if not {edge["source"], edge["target"]} <= known]
    assert set(report.graph.nodes) == known
    assert len(report.graph.edges) == len(whole.get("edges", [])) - len(lost)
    again = json.loads(codec.encode_graph(report.graph))
    assert again.get("nodes", []) == whole.get("nodes", [])
    assert [edge for edge in whole.get("edges", []) if edge not in lost] == again.get("edges", [])
    assert (report.damaged_nodes_count, report.damaged_edges_count, report.unknown_types) == (0, 0, {})


def test_the_sample_of_the_reference_system_comes_out_as_it_went_in(witty_json: dict[str, Any]) -> None:
    graph = load_witty(witty_json)
    written = through(graph)
    assert looks_like_witty(written) and load_witty(written) == graph

    def named(source: dict[str, Any]) -> set[tuple[str, Any]]:
        return {
            (node["entity_type"], node.get("pid") or node.get("tid") or node.get("socket_port") or node.get("id"))
            for node in source["nodes"]
        }

    assert named(written) == named(witty_json)
    kinds = [[edge["edge_type"] for edge in source["edges"]] for source in (written, witty_json)]
    assert set(kinds[1]) <= set(kinds[0])


def test_its_own_fields_are_there() -> None:
    process = nodes.Process(pid=7, start=9, attributes={"name": "x", "ppid": 1})
    end = nodes.Socket(protocol="tcp", address="[::1]:80")
    other = nodes.Nic(name="eth0", ns="node-7")
    graph = Graph([process, end, other], [edges.Belong(end.id, process.id)])
    written = through(graph)
    first, second, third = written["nodes"]
    assert (first["entity_type"], first["pid"], first["ppid"], first["entity_namespace"]) == (
        "ProcessEntity",
        7,
        1,
        "local",
    )
    assert (second["socket_type"], second["socket_addr"], second["socket_port"]) == ("TCP", "::1", 80)
    assert (third["entity_type"], third["device_type"], third["entity_namespace"]) == ("DeviceEntity", "Nic", "node-7")
    [edge] = written["edges"]
    assert edge["edge_type"] == "BelongEdge" and edge["source_node"]["socket_port"] == 80


def test_a_false_copy_of_itself_is_not_believed() -> None:
    written = through(Graph([nodes.Process(pid=7, start=9)]))
    own = written["nodes"][0]["details"]["gpuflight"]
    own["id"] = "GPU(uuid=x)"
    assert list(load_witty(written).nodes) == ["Process(pid=7,start=9)"]
    own["pid"] = "seven"
    assert list(load_witty(written).nodes) == ["Process(pid=7,start=0)"]
