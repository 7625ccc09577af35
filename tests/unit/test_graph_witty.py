"""Reading witty-profiler's JSON: everything arrives, nothing damaged stops the rest."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import DATA
from tests.strategies import json_values

from gpuflight.errors import InputError
from gpuflight.graph import edges, nodes
from gpuflight.graph.codec import decode_graph, encode_graph
from gpuflight.graph.lift import lift
from gpuflight.graph.load import parse_graph
from gpuflight.graph.witty import load_witty, looks_like_witty, read_witty
from gpuflight.graph.witty_kinds import EDGES, NODES

SAMPLE = json.loads((DATA / "witty" / "vllm-tp4-npu.json").read_bytes())

ENTITIES: dict[str, dict[str, Any]] = {
    "ProcessEntity": {"pid": 7, "ppid": 1, "name": "x", "cmdline": "x -y"},
    "ThreadEntity": {"tid": 8, "name": "x", "process": {"entity_type": "ProcessEntity", "pid": 7, "ppid": 1}},
    "SocketEntity": {"socket_type": "TCP", "socket_addr": "10.0.0.5", "socket_port": 80},
    "SharedMemoryEntity": {"shm_name": "/dev/shm/a", "shm_size": 4096},
    "NumaEntity": {"numa_id": 0, "cpu_set": "0-3", "mem_info": {"MemTotal": "2 kB"}, "numa_stats": {"numa_hit": 5}},
    "NumaSetEntity": {"numa_id_str": "0,2-4"},
    "GPUEntity": {"id": 0, "device_id": "device-id-unknown", "pci_bus_id": "0000:3B:00.0", "numa_affinity": "0"},
    "NPUEntity": {"id": 3, "pci_bus_id": "0000:C1:00.0", "cpu_affinity": "0-7"},
    "DeviceEntity": {"device_id": "toaster", "device_type": "other"},
    "ContainerEntity": {"container_id": "cac9af6a", "container_name": "docker-x", "container_type": "docker"},
    "PodEntity": {"pod_id": "uid-1"},
    "RdmaQueuePairEndpoint": {"qpn": 9},
    "RdmaLocalQueuePair": {"qpn": 10, "pid": 7, "pdn": 2, "dev": "mlx5_0", "port": 1, "rqpn": 9},
    "RdmaProtectionDomain": {"pdn": 2, "pid": 7, "dev": "mlx5_0"},
    "RdmaMemoryRegion": {"lkey": 77, "rkey": 78, "mrlen": 4096, "pdn": 2, "pid": 7},
    "RdmaDevice": {"dev": "mlx5_0", "stats": {"mlx5_0/1": {"send_pkts": 1.5}}},
    "RdmaStatisticPerSecond": {"dev": "mlx5_0", "port": 1, "send_pkts": 2.0, "dupl_pkts": 0.5},
}


def _entity(kind: str, **more: Any) -> dict[str, Any]:
    return {"entity_namespace": "local", "entity_type": kind, "details": {}, **ENTITIES[kind], **more}


def _edge(kind: str, source: dict[str, Any], target: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"edge_type": kind, "weight": None, "source_node": source, "target_node": target, **more}


def test_the_example_arrives_whole(witty_json: dict[str, Any]) -> None:
    report = read_witty(witty_json)
    graph = report.graph
    assert len(graph.nodes) == len(witty_json["nodes"]) == 129
    assert len(graph.edges) - report.derived_edges_count == len(witty_json["edges"]) == 259
    assert report.derived_edges_count == 39  # threads whose process is told by nesting only
    assert not graph.dangling()
    assert (report.unknown_types, report.damaged_nodes_count, report.damaged_edges_count) == ({}, 0, 0)
    assert report.contradictions_count == 0
    assert decode_graph(encode_graph(graph)) == graph
    kinds = {kind: len(graph.of_kind(kind)) for kind in (nodes.Process, nodes.Thread, nodes.Socket, nodes.NPU)}
    assert kinds == {nodes.Process: 12, nodes.Thread: 41, nodes.Socket: 44, nodes.NPU: 8}


def test_the_example_answers_who_sends_to_whom(witty_json: dict[str, Any]) -> None:
    [flow] = lift(load_witty(witty_json))
    assert (flow.source, flow.target) == ("Process(pid=1894499,start=0)", "Process(pid=3821739,start=0)")
    assert len(flow.via) == 44
    sent = sum(e["data_flow"]["data_size"] for e in witty_json["edges"] if e["edge_type"] == "SendToSocketEdge")
    assert flow.metrics["bytes_sent_count"] == sent == 927_418


def test_every_scalar_of_the_example_is_found_again(witty_json: dict[str, Any]) -> None:
    """As an identity, an attribute or a metric; numbers with a unit prefix are converted, so they are looked up so."""
    graph = load_witty(witty_json)
    told = {json.dumps(value) for value in _scalars(graph.model_dump())}
    text = graph.model_dump_json().decode()
    missing = []
    for value in _scalars({"nodes": witty_json["nodes"], "edges": witty_json["edges"]}):
        if value in EDGES or value in NODES or value == "local":
            continue
        if isinstance(value, str) and value.endswith(" kB"):
            value = int(value[:-3]) * 1024
        if json.dumps(value) in told or (isinstance(value, str) and value.lower() in text):
            continue
        if str(value) not in text:
            missing.append(value)
    assert missing == []


def test_old_processes_say_that_their_start_is_not_known(witty_json: dict[str, Any]) -> None:
    graph = load_witty(witty_json)
    process = graph.nodes["Process(pid=1894499,start=0)"]
    assert process.unknown == {"start": "not recorded by witty-profiler"}
    assert process.attributes["ppid"] == 1893833
    assert process.attributes["name"] == "vllm"


def test_memory_is_in_bytes_and_counters_are_counts(witty_json: dict[str, Any]) -> None:
    numa = load_witty(witty_json).nodes["Numa(0)"]
    assert numa.metrics["memory_total_bytes"] == 131507688 * 1024
    assert numa.metrics["active_anon_bytes"] == 1180328 * 1024
    assert numa.metrics["huge_pages_total_count"] == 0
    assert numa.metrics["numa_miss_count"] == 4016745
    assert numa.attributes["distance_to_all_numa.7"] == 25
    assert numa.attributes["cpus"] == "0-23"


@pytest.mark.parametrize("wrap", [lambda g: g, lambda g: {"env": {}, "content": g}, lambda g: {"data": g, "x": 1}])
def test_with_and_without_an_envelope(wrap: Any) -> None:
    graph = {"nodes": [_entity("PodEntity")], "edges": []}
    assert looks_like_witty(wrap(graph))
    assert list(load_witty(wrap(graph)).nodes) == ["Pod(uid-1)"]


def test_the_environment_of_the_envelope_is_kept() -> None:
    env = {"local_ip": "10.0.0.5", "hostname": "node1", "machine_id": "abc"}
    assert read_witty({"env": env, "content": {"nodes": [], "edges": []}}).env == env


@pytest.mark.parametrize(
    "obj", [None, 7, [], {}, {"nodes": []}, {"schema": 1, "nodes": [], "edges": []}, {"nodes": [1]}]
)
def test_what_is_not_witty_does_not_look_like_it(obj: Any) -> None:
    assert not looks_like_witty(obj)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ProcessEntity", "Process(pid=7,start=0)"),
        ("ThreadEntity", "Thread(tid=8,start=0)"),
        ("SocketEntity", "Socket(tcp,10.0.0.5:80)"),
        ("SharedMemoryEntity", "SharedMemory(posix,/dev/shm/a)"),
        ("NumaEntity", "Numa(0)"),
        ("NumaSetEntity", "NumaSet(0,2-4)"),
        ("GPUEntity", "GPU(uuid=0000:3b:00.0)"),
        ("NPUEntity", "NPU(3)"),
        ("DeviceEntity", "Device(toaster)"),
        ("ContainerEntity", "Container(cac9af6a)"),
        ("PodEntity", "Pod(uid-1)"),
        ("RdmaQueuePairEndpoint", "RdmaQueuePairEndpoint(,qpn=9)"),
        ("RdmaLocalQueuePair", "RdmaQueuePair(mlx5_0,qpn=10)"),
        ("RdmaProtectionDomain", "RdmaProtectionDomain(mlx5_0,pdn=2)"),
        ("RdmaMemoryRegion", "RdmaMemoryRegion(,mrn=77)"),
        ("RdmaDevice", "RdmaDevice(mlx5_0)"),
        ("RdmaStatisticPerSecond", "RdmaPort(mlx5_0/1)"),
    ],
)
def test_every_kind_of_entity(kind: str, expected: str) -> None:
    assert set(NODES) == set(ENTITIES)
    report = read_witty({"nodes": [_entity(kind)], "edges": []})
    assert next(iter(report.graph.nodes)) == expected
    assert (report.unknown_types, report.damaged_nodes_count) == ({}, 0)
    foreign = read_witty({"nodes": [_entity(kind, entity_namespace="10.1.1.1")], "edges": []})
    first = next(iter(foreign.graph.nodes.values()))
    assert first.ns == "10.1.1.1"
    assert first.id.startswith(expected.partition("(")[0] + "(ns=10.1.1.1,")


def test_a_memory_region_gets_its_device_from_its_protection_domain() -> None:
    graph = load_witty({"nodes": [_entity("RdmaMemoryRegion"), _entity("RdmaProtectionDomain")], "edges": []})
    region = graph.nodes["RdmaMemoryRegion(mlx5_0,mrn=77)"]
    assert region.metrics["length_bytes"] == 4096


@pytest.mark.parametrize("kind", sorted(EDGES))
def test_every_kind_of_edge(kind: str) -> None:
    process, thread = _entity("ProcessEntity"), _entity("PodEntity")
    report = read_witty({"nodes": [], "edges": [_edge(kind, process, thread, note={"a": 1})]})
    [edge] = report.graph.edges.values()
    assert type(edge) is EDGES[kind]
    assert edge.attributes["note.a"] == 1
    assert (edge.source, edge.target) == ("Process(pid=7,start=0)", "Pod(uid-1)")
    assert (report.unknown_types, report.damaged_edges_count) == ({}, 0)


def test_kinds_that_share_one_here_stay_told_apart() -> None:
    process, numa = _entity("ProcessEntity"), _entity("NumaSetEntity")
    status = {"cpus_allowed_list": "0-3", "voluntary_ctxt_switches": 5}
    graph = load_witty(
        {
            "nodes": [],
            "edges": [
                _edge(
                    "NumaAccessEdge", process, numa, numa_access_info={"total_pages": {"0": 9}}, proc_status={"x": 1}
                ),
                _edge("AccessWithProcStatusEdge", process, numa, proc_status={**status, "x": 2}),
            ],
        }
    )
    [edge] = graph.edges.values()
    assert isinstance(edge, edges.NumaAccess)
    assert edge.metrics["total_pages_node0_count"] == 9
    assert edge.metrics["voluntary_ctxt_switches_count"] == 5
    assert edge.attributes["proc_status.x"] == 1
    assert edge.attributes["AccessWithProcStatusEdge.proc_status.x"] == 2


def test_bandwidths_are_in_bytes_and_operations_per_second() -> None:
    numa = _entity("NumaEntity")
    info = {"read_bw": 1.5, "timestamp": 3.0}
    graph = load_witty({"nodes": [], "edges": [_edge("DDRBandwidthEdge", numa, numa, bandwidth_info=info)]})
    [edge] = graph.edges.values()
    assert edge.metrics == {"read_bw_bytes_per_s": 1.5e9}
    assert edge.attributes == {"bandwidth_info.timestamp": 3.0}
    ops = {"cross_socket_ops": 0.25}
    graph = load_witty({"nodes": [], "edges": [_edge("HCCSBandwidthEdge", numa, numa, bandwidth_info=ops)]})
    assert next(iter(graph.edges.values())).metrics == {"cross_socket_ops_ops_per_s": 0.25e9}


def test_unknown_types_are_kept_and_counted() -> None:
    stranger = {
        "entity_type": "FluxEntity",
        "entity_namespace": "local",
        "flux_id": "f1",
        "level": 3,
        "deep": {"a": [1]},
    }
    report = read_witty({"nodes": [stranger], "edges": [_edge("FluxEdge", stranger, _entity("PodEntity"))]})
    device = report.graph.nodes["Device(FluxEntity(flux_id=f1))"]
    assert device.attributes == {"reference_type": "FluxEntity", "flux_id": "f1", "level": 3, "deep.a": [1]}
    [edge] = report.graph.edges.values()
    assert isinstance(edge, edges.HasAttribute)
    assert edge.attributes["reference_type"] == "FluxEdge"
    assert report.unknown_types == {"FluxEntity": 1, "FluxEdge": 1}


def test_an_entity_without_its_identity_is_kept_and_counted() -> None:
    report = read_witty({"nodes": [{"entity_type": "ProcessEntity", "name": "x", "pid": None}, 7, None], "edges": []})
    assert list(report.graph.nodes) == ["Device(ProcessEntity(name=x))"]
    assert report.damaged_nodes_count == 3


def test_an_edge_without_an_end_is_left_out_and_counted() -> None:
    process = _entity("ProcessEntity")
    report = read_witty({"nodes": [], "edges": [_edge("OwnEdge", process, None), {"edge_type": "OwnEdge"}, "x"]})  # type: ignore[arg-type]
    assert len(report.graph.edges) == 0
    assert report.damaged_edges_count == 3


def test_undirected_edges_have_a_list_of_nodes() -> None:
    both = [_entity("ProcessEntity"), _entity("PodEntity")]
    [edge] = load_witty({"nodes": [], "edges": [{"edge_type": "UndirectedEdge", "nodes": both}]}).edges.values()
    assert edge.key == ("Process(pid=7,start=0)", "Pod(uid-1)", "HasAttribute")


def test_later_copies_of_a_node_fill_and_contradictions_are_counted() -> None:
    first, copy_ = _entity("ProcessEntity"), _entity("ProcessEntity", name="other", extra=1)
    report = read_witty({"nodes": [first, copy_], "edges": []})
    [process] = report.graph.nodes.values()
    assert (process.attributes["name"], process.attributes["extra"]) == ("x", 1)
    assert report.contradictions_count == 1


@pytest.mark.parametrize(
    "obj", [None, [], {}, {"nodes": 1, "edges": []}, {"content": 3}, {"nodes": []}, "text", {"edges": []}]
)
def test_what_is_no_graph_is_an_input_error(obj: Any) -> None:
    with pytest.raises(InputError):
        load_witty(obj)


PATHS = [("nodes", n) for n in range(0, 129, 8)] + [("edges", n) for n in range(0, 259, 16)]


@given(st.data())
def test_mutated_files_load_or_are_input_errors(data: st.DataObject) -> None:
    """Any one value replaced by anything, anywhere: the rest still arrives, and can be written and read again."""
    small = {key: [SAMPLE[key][n] for k, n in PATHS if k == key] for key in ("nodes", "edges")}
    small = copy.deepcopy(small)
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = small
        key: Any = data.draw(st.sampled_from(("nodes", "edges")))
        while data.draw(st.integers(0, 4)) and isinstance(place[key], dict | list) and place[key]:
            place = place[key]
            key = (
                data.draw(st.sampled_from(sorted(place)))
                if isinstance(place, dict)
                else data.draw(st.integers(0, len(place) - 1))
            )
        place[key] = data.draw(json_values())
    try:
        graph = load_witty(small)
    except InputError:
        return
    assert not graph.dangling()
    assert decode_graph(encode_graph(graph)) == graph


@given(json_values())
def test_anything_at_all_loads_or_is_an_input_error(value: Any) -> None:
    looks_like_witty(value)
    for obj in (value, {"nodes": [value], "edges": [value]}, {"content": value}):
        try:
            graph = load_witty(obj)
        except InputError:
            continue
        encode_graph(graph)


def test_hostile_numbers_and_text() -> None:
    process = _entity("ProcessEntity", name="\ud800x", big=10**400, nan=float("nan"), inf=float("inf"), wide=2**63)
    [entity] = load_witty({"nodes": [process], "edges": []}).nodes.values()
    assert entity.attributes["name"] == "\ufffdx"
    assert entity.attributes["big"] == str(10**400)
    assert (entity.attributes["nan"], entity.attributes["inf"]) == ("nan", "inf")
    assert entity.attributes["wide"] == 2**63
    encode_graph(load_witty({"nodes": [process], "edges": []}))


def test_a_file_with_nan_as_python_writes_it_opens() -> None:
    text = json.dumps({"nodes": [_entity("ProcessEntity", odd=float("nan"), name="\ud800")], "edges": []})
    [entity] = parse_graph(text.encode()).graph.nodes.values()
    assert (entity.attributes["odd"], entity.attributes["name"]) == ("nan", "\ufffd")


def test_a_foreign_host_is_not_ours() -> None:
    """Defect 4 of the reference system concerned these: same pid, other host."""
    graph = load_witty(
        {"nodes": [_entity("ProcessEntity"), _entity("ProcessEntity", entity_namespace="n2")], "edges": []}
    )
    assert list(graph.nodes) == ["Process(pid=7,start=0)", "Process(ns=n2,pid=7,start=0)"]


def _scalars(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [scalar for inner in value.values() for scalar in _scalars(inner)]
    if isinstance(value, list | tuple):
        return [scalar for inner in value for scalar in _scalars(inner)]
    return [] if value is None else [value]
