"""How two GPUs of a machine stand to each other: nearest common ancestor and peer access."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuflight.sources.nvml.library import Lost, Refused
from gpuflight.sources.nvml.model import Pair

if TYPE_CHECKING:
    from gpuflight.sources.nvml.device import Device
    from gpuflight.sources.nvml.library import Library

DISTANCES = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""nvmlGpuTopologyLevel_t in the words of ``nvidia-smi topo -m``; level 0 is two GPUs on one board."""

P2P_CAPABILITIES = ("read", "write", "nvlink", "atomics")
"""In the order of nvmlGpuP2PCapsIndex_t. (pynvml's own constant for the first is a tuple by mistake.)"""

P2P_STATUS = (
    "ok",
    "chipset_not_supported",
    "gpu_not_supported",
    "topology_not_supported",
    "disabled_by_regkey",
    "not_supported",
    "unknown",
)
"""nvmlGpuP2PStatus_t."""


def read_pairs(library: Library, devices: Sequence[Device]) -> list[Pair]:
    """Every pair of GPUs that both still answer. Raises Broken."""
    pairs = []
    for at, first in enumerate(devices):
        for second in devices[at + 1 :]:
            if first.lost or second.lost:
                continue
            try:
                pairs.append(_pair(library, first, second))
            except Lost:
                continue  # which of the two it is, their own readings will tell
    return pairs


def _pair(library: Library, first: Device, second: Device) -> Pair:
    what = f"GPU {first.index} and GPU {second.index}"
    pair = Pair(first.uuid, second.uuid)
    try:
        level = library.call("nvmlDeviceGetTopologyCommonAncestor", first.handle, second.handle, what=what)
        pair.distance = DISTANCES.get(level, "")
        if not pair.distance:
            pair.unknown["distance"] = f"unknown level {level}"
    except Refused as refused:
        pair.unknown["distance"] = refused.reason
    for index, capability in enumerate(P2P_CAPABILITIES):
        try:
            status = library.call("nvmlDeviceGetP2PStatus", first.handle, second.handle, index, what=what)
            pair.p2p[capability] = P2P_STATUS[status] if status < len(P2P_STATUS) else f"unknown ({status})"
        except Refused as refused:
            pair.unknown[f"p2p_{capability}"] = refused.reason
    return pair
