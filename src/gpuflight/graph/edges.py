"""The kinds of edge, one class each, in four categories that also drive the layout of a picture.

*deploy*: what is part of or runs inside what; nests boxes. *data_stream*: what moves data. *placement*: what is near
what. *attribute*: everything else. A placement edge that can carry data says how much it should be able to carry in
``expected_bytes_per_s`` (one direction), which path queries use to find the narrowest hop.
"""

from __future__ import annotations

from typing import ClassVar

from gpuflight.graph.element import Category, Edge


class Deploy(Edge, gc=False):
    """Base of the deploy edges."""

    category: ClassVar[Category] = "deploy"


class DataStream(Edge, gc=False):
    """Base of the data stream edges."""

    category: ClassVar[Category] = "data_stream"


class Placement(Edge, gc=False):
    """Base of the placement edges."""

    category: ClassVar[Category] = "placement"


class Attribute(Edge, gc=False):
    """Base of the attribute edges."""

    category: ClassVar[Category] = "attribute"


class Own(Deploy, tag="Own", gc=False):
    """A process owns its children and its threads (parent → child)."""


class Host(Deploy, tag="Host", gc=False):
    """A host, pod, container or unit holds what runs inside it (outer → inner)."""


class Belong(Deploy, tag="Belong", gc=False):
    """An endpoint belongs to who holds it open (socket, pipe end, MIG instance → process, GPU). metrics, of a socket
    where kernel probes may be loaded: sent_bytes_per_s, received_bytes_per_s, sends_per_s, receives_per_s (calls)."""


class RunOn(Deploy, tag="RunOn", gc=False):
    """Work runs on something (kernel → stream → GPU; process → container in old graphs)."""


class Access(DataStream, tag="Access", gc=False):
    """A process uses a device, a memory segment, a queue, a file system. attributes: ends (r, w, rw, of queues), how.
    metrics: of a GPU memory_used_bytes, sm_util_pct, memory_util_pct; of recorded sessions and probes held_bytes and
    alloc_peak_bytes; of probes held_pct and alloc_peak_pct (of the GPU's memory), used_cores (CUDA cores at work, at
    most), sm_util_pct where NVML has none (named in the attribute ``estimated``); attributes: container,
    cores_scaled_by and memory_scaled_by (the processes of the GPU exceed it together)."""


class SendTo(DataStream, tag="SendTo", gc=False):
    """Bytes flow from source to target (process → pipe → process; socket traffic). metrics: bytes_per_s, writes_per_s,
    reads_per_s."""


class ConnectTo(DataStream, tag="ConnectTo", gc=False):
    """A connection from the end that opened it to the end that accepted it. attributes: state, half (one end not
    known here), ended (shown once more), failed. metrics: rtt_ms, retransmits_count, bytes_sent_count,
    bytes_received_count, send_queue_bytes …, of kernel probes sends_per_s, connect_ms, accept_ms, duration_ms."""


class Transfer(DataStream, tag="Transfer", gc=False):
    """A copy between host and device memory or between devices. metrics: copies_count, copied_bytes,
    copy_time_ms, copy_bytes_per_s (over the round)."""


class Launch(DataStream, tag="Launch", gc=False):
    """A process launches a kernel."""


class Ipc(DataStream, tag="Ipc", gc=False):
    """Any other exchange between two processes (old graphs)."""


class NumaAccess(Placement, tag="NumaAccess", gc=False):
    """A process's memory and CPUs on NUMA nodes. attributes: cpus_allowed. metrics: resident_bytes,
    cpu_memory_similarity (cosine, 0 to 1)."""


class Affinity(Placement, tag="Affinity", gc=False):
    """A device, or a package, is local to a NUMA node or a set of them."""


class NumaSetContain(Placement, tag="NumaSetContain", gc=False):
    """A set of NUMA nodes contains this one."""


class NumaDistance(Placement, tag="NumaDistance", gc=False):
    """Distance of two NUMA nodes as the firmware gives it. metrics: distance (10 = local)."""

    directed: ClassVar[bool] = False


class AttachedTo(Placement, tag="AttachedTo", gc=False):
    """A device (GPU, NIC, disk, RDMA device) is this PCI function."""


class PcieLink(Placement, tag="PcieLink", gc=False):
    """A PCIe link, upstream → downstream. metrics: expected_bytes_per_s, link_speed_gt_per_s, link_width."""


class NvLink(Placement, tag="NvLink", gc=False):
    """NVLink between two GPUs or a GPU and a switch. metrics: links_count, links_active_count,
    expected_bytes_per_s, errors_count."""

    directed: ClassVar[bool] = False


class Proximity(Placement, tag="Proximity", gc=False):
    """How near two devices are. attributes: distance (``NV<n>``, PIX, PXB, PHB, NODE, SYS), p2p_read, p2p_write."""

    directed: ClassVar[bool] = False


class HccsBandwidth(Placement, tag="HccsBandwidth", gc=False):
    """HCCS bandwidth between two NPUs (old graphs)."""


class DdrBandwidth(Placement, tag="DdrBandwidth", gc=False):
    """DDR bandwidth of a NUMA node (old graphs)."""


class HhaBandwidth(Placement, tag="HhaBandwidth", gc=False):
    """HHA bandwidth of a NUMA node (old graphs)."""


class L3cBandwidth(Placement, tag="L3cBandwidth", gc=False):
    """Last-level cache bandwidth of a NUMA node (old graphs)."""


class PaBandwidth(Placement, tag="PaBandwidth", gc=False):
    """PA bandwidth between sockets (old graphs)."""


class HasAttribute(Attribute, tag="HasAttribute", gc=False):
    """Anything worth drawing that is neither containment, flow nor place."""


AnyEdge = (
    Own
    | Host
    | Belong
    | RunOn
    | Access
    | SendTo
    | ConnectTo
    | Transfer
    | Launch
    | Ipc
    | NumaAccess
    | Affinity
    | NumaSetContain
    | NumaDistance
    | AttachedTo
    | PcieLink
    | NvLink
    | Proximity
    | HccsBandwidth
    | DdrBandwidth
    | HhaBandwidth
    | L3cBandwidth
    | PaBandwidth
    | HasAttribute
)
"""Every kind of edge, as the JSON decoder's tagged union."""

EDGE_KINDS: dict[str, type[Edge]] = {cls.__struct_config__.tag: cls for cls in AnyEdge.__args__}
