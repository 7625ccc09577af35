"""A graph in the JSON of witty-profiler, for its clients and master instances; the inverse of ``witty.py``.

Each element has the fields that witty-profiler gives it, as far as they are known here, and itself as it is under
``details.gpuflight``: from there our own reader has it back whole. Kinds that witty-profiler does not have are
``DeviceEntity``s, and edges of their category.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gpuflight.graph import nodes
from gpuflight.graph.edges import SendTo
from gpuflight.graph.element import Edge, Entity
from gpuflight.graph.graph import Graph
from gpuflight.graph.witty_kinds import EDGES, OURS, PRIMARY, Fields

_BY_CATEGORY = {"deploy": "DeployEdge", "data_stream": "DataStreamEdge"}


def to_witty(graph: Graph) -> Fields:
    """``{"nodes": […], "edges": […]}``; an edge holds its ends with their identity only. Edges of which an end is not
    in the graph are left out, since an end cannot be told from its id alone."""
    brief = {node_id: _node(_bare(entity)) for node_id, entity in graph.nodes.items()}
    return {
        "nodes": [_node(entity) for entity in graph.nodes.values()],
        "edges": [
            _edge(edge, brief[edge.source], brief[edge.target])
            for edge in graph.edges.values()
            if edge.source in brief and edge.target in brief
        ],
    }


def _bare(entity: Entity) -> Entity:
    return msgspec.structs.replace(entity, attributes={}, metrics={}, unknown=None)


def _node(entity: Entity) -> Fields:
    kind, fields = _TYPES.get(type(entity), _other)(entity)
    known = {name: value for name, value in fields.items() if value is not None}
    return {
        "entity_type": kind,
        "entity_namespace": entity.ns or "local",
        **known,
        "details": {OURS: msgspec.to_builtins(entity)},
    }


def _edge(edge: Edge, source: Fields, target: Fields) -> Fields:
    kind = edge.attributes.get("reference_type")  # what it was when it was read
    if kind not in EDGES:
        kind = PRIMARY.get(type(edge)) or _BY_CATEGORY.get(edge.category)
    kind = kind or ("DirectedEdge" if edge.directed else "UndirectedEdge")
    written: Fields = {"edge_type": kind, "weight": None, "source_node": source, "target_node": target}
    if isinstance(edge, SendTo) and "bytes_sent_count" in edge.metrics:
        written["data_flow"] = {
            "data_size": edge.metrics["bytes_sent_count"],
            "packets_cnt": edge.metrics.get("packets_sent_count"),
        }
    own = msgspec.to_builtins(edge)
    del own["source"], own["target"]
    written["details"] = {OURS: own}
    return written


def _process(entity: nodes.Process) -> tuple[str, Fields]:
    said = entity.attributes
    fields = {"pid": entity.pid, "ppid": said.get("ppid"), "name": said.get("name"), "cmdline": said.get("cmdline")}
    return "ProcessEntity", fields


def _thread(entity: nodes.Thread) -> tuple[str, Fields]:
    return "ThreadEntity", {"tid": entity.tid, "name": entity.attributes.get("name")}


def _socket(entity: nodes.Socket) -> tuple[str, Fields]:
    address, _, port = entity.address.rpartition(":")
    if not port.isdigit():
        return _other(entity)
    fields = {"socket_type": entity.protocol.upper(), "socket_addr": address.strip("[]"), "socket_port": int(port)}
    return "SocketEntity", fields


def _shared_memory(entity: nodes.SharedMemory) -> tuple[str, Fields]:
    name = entity.attributes.get("name", entity.key)
    return "SharedMemoryEntity", {"shm_name": name, "shm_size": entity.metrics.get("size_bytes")}


def _gpu(entity: nodes.GPU) -> tuple[str, Fields]:
    said = entity.attributes
    fields = {
        "id": said.get("index"),
        "device_id": entity.uuid,
        "pci_bus_id": said.get("pci_address"),
        "cpu_affinity": said.get("cpus"),
        "numa_affinity": said.get("numa_node"),
    }
    return "GPUEntity", fields


def _npu(entity: nodes.NPU) -> tuple[str, Fields]:
    said = entity.attributes
    return "NPUEntity", {"id": entity.index, "pci_bus_id": said.get("pci_address"), "cpu_affinity": said.get("cpus")}


def _container(entity: nodes.Container) -> tuple[str, Fields]:
    said = entity.attributes
    fields = {
        "container_id": entity.container_id,
        "container_name": said.get("name"),
        "container_type": said.get("runtime"),
    }
    return "ContainerEntity", fields


def _other(entity: Entity) -> tuple[str, Fields]:
    return "DeviceEntity", {"device_id": entity.id, "device_type": entity.kind, "name": entity.attributes.get("name")}


_TYPES: dict[type[Entity], Callable[[Any], tuple[str, Fields]]] = {
    nodes.Process: _process,
    nodes.Thread: _thread,
    nodes.Socket: _socket,
    nodes.SharedMemory: _shared_memory,
    nodes.GPU: _gpu,
    nodes.NPU: _npu,
    nodes.Container: _container,
    nodes.Numa: lambda entity: ("NumaEntity", {"numa_id": entity.index, "cpu_set": entity.attributes.get("cpus")}),
    nodes.NumaSet: lambda entity: ("NumaSetEntity", {"numa_id_str": entity.nodes}),
    nodes.Pod: lambda entity: ("PodEntity", {"pod_id": entity.uid}),
    nodes.RdmaDevice: lambda entity: ("RdmaDevice", {"dev": entity.name}),
    nodes.RdmaPort: lambda entity: ("RdmaStatisticPerSecond", {"dev": entity.device, "port": entity.port}),
    nodes.RdmaQueuePair: lambda entity: ("RdmaLocalQueuePair", {"dev": entity.device, "qpn": entity.qpn}),
    nodes.RdmaProtectionDomain: lambda entity: ("RdmaProtectionDomain", {"dev": entity.device, "pdn": entity.pdn}),
    nodes.RdmaQueuePairEndpoint: lambda entity: ("RdmaQueuePairEndpoint", {"qpn": entity.qpn}),
}
