"""What the kinds of witty-profiler become here: the tables by which ``witty.py`` reads its files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from gpuflight.graph import edges, nodes
from gpuflight.graph.element import Edge, Entity, Metric

Fields = dict[str, Any]

NOT_RECORDED = "not recorded by witty-profiler"

OURS = "gpuflight"
"""Key under ``details`` of an element that gpuflight itself wrote in this form: the element as it is."""


class Malformed(Exception):
    """An element lacks a part of its identity."""


def _take(fields: Fields, name: str, kind: type[Any]) -> Any:
    """Remove an identity field; Malformed if it is missing or of the wrong type."""
    value = fields.pop(name, None)
    if kind is int and isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    if kind is int and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, kind) and not isinstance(value, bool) and value != "":
        return clean(value) if isinstance(value, str) else _in_range(value)
    raise Malformed(name)


def _in_range(value: int) -> int:
    if not -(2**63) <= value < 2**63:
        raise Malformed("a number too large to be an identity")
    return value


def _process(fields: Fields, ns: str) -> Entity:
    return nodes.Process(pid=_take(fields, "pid", int), start=0, ns=ns, unknown={"start": NOT_RECORDED})


def _thread(fields: Fields, ns: str) -> Entity:
    return nodes.Thread(tid=_take(fields, "tid", int), start=0, ns=ns, unknown={"start": NOT_RECORDED})


def _socket(fields: Fields, ns: str) -> Entity:
    protocol = _take(fields, "socket_type", str).lower()
    address = _take(fields, "socket_addr", str)
    port = _take(fields, "socket_port", int)
    host = f"[{address}]" if ":" in address else address
    return nodes.Socket(protocol=protocol, address=f"{host}:{port}", ns=ns)


def _shared_memory(fields: Fields, ns: str) -> Entity:
    name = _take(fields, "shm_name", str)
    if name.startswith("/memfd:"):
        mechanism = "memfd"
    elif name.startswith("/SYSV"):
        mechanism = "sysv"
    else:
        mechanism = "posix"
    return nodes.SharedMemory(mechanism=mechanism, key=name, ns=ns, attributes={"name": name})


def _numa(fields: Fields, ns: str) -> Entity:
    return nodes.Numa(index=_take(fields, "numa_id", int), ns=ns)


def _numa_set(fields: Fields, ns: str) -> Entity:
    return nodes.NumaSet(nodes=_take(fields, "numa_id_str", str), ns=ns)


def _gpu(fields: Fields, ns: str) -> Entity:
    address = str(fields.get("pci_bus_id") or "").lower()
    device = fields.get("device_id")
    known = isinstance(device, str) and device and not device.startswith("device-id-")
    uuid = _take(fields, "device_id", str) if known else clean(address)
    if not uuid:
        raise Malformed("pci_bus_id")
    return nodes.GPU(uuid=uuid, ns=ns, unknown=None if known else {"uuid": NOT_RECORDED})


def _npu(fields: Fields, ns: str) -> Entity:
    return nodes.NPU(index=_take(fields, "id", int), ns=ns)


def _device(fields: Fields, ns: str) -> Entity:
    return nodes.Device(name=_take(fields, "device_id", str), ns=ns)


def _container(fields: Fields, ns: str) -> Entity:
    container_id = _take(fields, "container_id", str)
    unknown = {"full_id": "cut to 8 characters by witty-profiler"} if len(container_id) == 8 else None
    return nodes.Container(container_id=container_id, ns=ns, unknown=unknown)


def _pod(fields: Fields, ns: str) -> Entity:
    return nodes.Pod(uid=_take(fields, "pod_id", str), ns=ns)


def _qp_endpoint(fields: Fields, ns: str) -> Entity:
    number = _take(fields, "qpn", int)
    return nodes.RdmaQueuePairEndpoint(address="", qpn=number, ns=ns, unknown={"address": NOT_RECORDED})


def _queue_pair(fields: Fields, ns: str) -> Entity:
    return nodes.RdmaQueuePair(device=_take(fields, "dev", str), qpn=_take(fields, "qpn", int), ns=ns)


def _protection_domain(fields: Fields, ns: str) -> Entity:
    return nodes.RdmaProtectionDomain(device=_take(fields, "dev", str), pdn=_take(fields, "pdn", int), ns=ns)


def _memory_region(fields: Fields, ns: str) -> Entity:
    # Its device stands only in the protection domain; learn_devices has put it here where there is one.
    device = _take(fields, "dev", str) if fields.get("dev") else ""
    key = _take(fields, "lkey", int)
    unknown = {"mrn": "the local key stands for it"} | ({} if device else {"device": NOT_RECORDED})
    return nodes.RdmaMemoryRegion(device=device, mrn=key, ns=ns, attributes={"lkey": key}, unknown=unknown)


def _rdma_device(fields: Fields, ns: str) -> Entity:
    return nodes.RdmaDevice(name=_take(fields, "dev", str), ns=ns)


def _rdma_port(fields: Fields, ns: str) -> Entity:
    return nodes.RdmaPort(device=_take(fields, "dev", str), port=_take(fields, "port", int), ns=ns)


NODES: dict[str, Callable[[Fields, str], Entity]] = {
    "ProcessEntity": _process,
    "ThreadEntity": _thread,
    "SocketEntity": _socket,
    "SharedMemoryEntity": _shared_memory,
    "NumaEntity": _numa,
    "NumaSetEntity": _numa_set,
    "GPUEntity": _gpu,
    "NPUEntity": _npu,
    "DeviceEntity": _device,
    "ContainerEntity": _container,
    "PodEntity": _pod,
    "RdmaQueuePairEndpoint": _qp_endpoint,
    "RdmaLocalQueuePair": _queue_pair,
    "RdmaProtectionDomain": _protection_domain,
    "RdmaMemoryRegion": _memory_region,
    "RdmaDevice": _rdma_device,
    "RdmaStatisticPerSecond": _rdma_port,
}
"""Type of entity there → how its fields become an entity here; each takes out the fields that are identity."""

RENAMED = {
    "ContainerEntity": {"container_name": "name", "container_type": "runtime"},
    "GPUEntity": {"pci_bus_id": "pci_address", "id": "index", "cpu_affinity": "cpus", "numa_affinity": "numa_node"},
    "NPUEntity": {"pci_bus_id": "pci_address", "cpu_affinity": "cpus"},
    "NumaEntity": {"cpu_set": "cpus"},
    "RdmaLocalQueuePair": {"rqpn": "remote_qpn"},
}
"""Names that our own collectors have another word for."""

EDGES: dict[str, type[Edge]] = {
    "OwnEdge": edges.Own,
    "HostEdge": edges.Host,
    "BelongEdge": edges.Belong,
    "RunOnEdge": edges.RunOn,
    "AccessEdge": edges.Access,
    "SendToSocketEdge": edges.SendTo,
    "ConnectToEdge": edges.ConnectTo,
    "IPCEdge": edges.Ipc,
    "HasAttributeEdge": edges.HasAttribute,
    "NumaAccessEdge": edges.NumaAccess,
    "AccessWithProcStatusEdge": edges.NumaAccess,
    "AffinitativeToNuma": edges.Affinity,
    "NumaSetContainEdge": edges.NumaSetContain,
    "HCCSBandwidthEdge": edges.HccsBandwidth,
    "HCCSStream": edges.HccsBandwidth,
    "DDRBandwidthEdge": edges.DdrBandwidth,
    "HHABandwidthEdge": edges.HhaBandwidth,
    "L3CBandwidthEdge": edges.L3cBandwidth,
    "PABandwidthEdge": edges.PaBandwidth,
    "DeployEdge": edges.Host,
    "DeployEdgeP2C": edges.Host,
    "DeployEdgeC2P": edges.Belong,
    "DataStreamEdge": edges.SendTo,
    "DirectedEdge": edges.HasAttribute,
    "UndirectedEdge": edges.HasAttribute,
    "Edge": edges.HasAttribute,
}
"""Type of edge there → kind here."""

PRIMARY: dict[type[Edge], str] = {kind: name for name, kind in reversed(EDGES.items())}
"""The type there that a kind here stands for by itself; edges of any other type say theirs in ``reference_type``."""

METRICS: dict[str, str] = {
    "data_flow.data_size": "bytes_sent_count",
    "data_flow.packets_cnt": "packets_sent_count",
    "shm_size": "size_bytes",
    "mrlen": "length_bytes",
    "send_pkts": "packets_sent_per_s",
    "recv_pkts": "packets_received_per_s",
    "dupl_pkts": "packets_duplicate_per_s",
    "rdma_sends": "rdma_sends_per_s",
    "rdma_recvs": "rdma_receives_per_s",
    "numa_access_info.numa_affinity_info.cpu_mem_access_cosine_similarity": "cpu_memory_dot_product",
    "numa_access_info.numa_affinity_info.total_dirty_anon_pages": "dirty_anonymous_pages_count",
}
"""Numbers of which the unit is known: name there → name here. What witty-profiler calls a cosine similarity is a dot
product that is not normalised (a perfect match can give 0.5), so it does not get the name of our cosine."""

MEMINFO = {"MemTotal": "memory_total_bytes", "MemFree": "memory_free_bytes", "MemUsed": "memory_used_bytes"}


def metric_of(name: str, value: Any, kind: str) -> tuple[str, Metric] | None:
    """Name and value of a metric, or None if the unit of this field of an element of type ``kind`` is not known."""
    head, _, leaf = name.rpartition(".")
    if head == "mem_info" and isinstance(value, str):
        return _meminfo(leaf, value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if name in METRICS:
        return METRICS[name], value
    if head == "numa_stats" or leaf.endswith("ctxt_switches"):
        return f"{leaf}_count", value
    if head == "bandwidth_info" and leaf != "timestamp":
        # Gigabytes and giga-operations per second (hccs_edge.py at 9b72cee).
        is_bytes = leaf.endswith("_bw") or kind == "PABandwidthEdge"
        return (f"{leaf}_bytes_per_s" if is_bytes else f"{leaf}_ops_per_s"), value * 1e9
    pages = head.rpartition(".")[2]
    if pages in ("read_only_pages", "dirty_anon_pages", "total_pages") and leaf.isascii() and leaf.isdigit():
        return f"{pages}_node{leaf}_count", value
    return None


def _meminfo(name: str, text: str) -> tuple[str, Metric] | None:
    """``"MemTotal": "131507688 kB"`` of a node's meminfo, where kB is 1024 bytes."""
    match = re.fullmatch(r"([0-9]{1,15})( kB)?", text)
    if match is None:
        return None
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("(", "_").replace(")", "").lower()
    if match[2]:
        return MEMINFO.get(name, f"{snake}_bytes"), int(match[1]) * 1024
    return f"{snake}_count", int(match[1])


def clean(text: str) -> str:
    """Text that JSON can hold: lone surrogates, which Python's own parser lets pass, become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
