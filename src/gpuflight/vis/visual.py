"""The visual language that all renderers share: category and glyph of each kind, medium and visibility of each edge.

docs/visual-language.md says it in words; tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

CATEGORIES: dict[str, tuple[str, str, str]] = {
    # key: (label, colour on light, colour on dark). Hues after Okabe & Ito 2008 (safe for colour-blind readers), moved
    # in lightness until each reaches 3:1 against the ground it is drawn on (WCAG 2.1, 1.4.11).
    "host": ("Hosts", "#4b5768", "#9aa7b8"),
    "container": ("Containers, pods, units", "#5f6fb2", "#9aa8e6"),
    "process": ("Processes, threads", "#0072b2", "#56b4e9"),
    "gpu": ("GPUs and their fabric", "#00805c", "#2fc99c"),
    "memory": ("CPUs and NUMA memory", "#a8527f", "#e096bd"),
    "network": ("Network and RDMA", "#1b7f9e", "#5fd0e8"),
    "ipc": ("Local exchange: shared memory, pipes, queues", "#b36b00", "#f0b040"),
    "storage": ("Storage", "#7d6420", "#d3bd6a"),
    "bus": ("PCIe and other devices", "#6b7280", "#a3abb8"),
    "session": ("Recorded sessions, kernels", "#8a4fbf", "#c9a0ee"),
    "group": ("Folded groups", "#6b7280", "#a3abb8"),
}

MEDIA: dict[str, tuple[str, str, str, str]] = {
    # key: (label, colour on light, colour on dark, dash pattern in units; "" is solid)
    "gpu": ("GPU use", "#00805c", "#2fc99c", ""),
    "network": ("Network", "#1b7f9e", "#5fd0e8", ""),
    "ipc": ("Local exchange", "#b36b00", "#f0b040", ""),
    "storage": ("Storage", "#7d6420", "#d3bd6a", ""),
    "data": ("Other data", "#0072b2", "#56b4e9", ""),
    "fabric": ("NVLink, PCIe", "#6b5a9e", "#b7a6ea", ""),
    "placement": ("NUMA and device placement", "#a8527f", "#e096bd", "2 3"),
    "deploy": ("Ownership across boxes", "#6b7280", "#a3abb8", "6 4"),
    "attribute": ("Attributes", "#6b7280", "#a3abb8", "1 3"),
}

CHANGES: dict[str, tuple[str, str, str]] = {
    # key: (sign, colour on light, colour on dark). To some readers purple is near blue: the sign is always there too.
    "added": ("+", "#0072b2", "#56b4e9"),
    "removed": ("−", "#b84800", "#ff9a5c"),
    "changed": ("~", "#8a4fbf", "#c9a0ee"),
}
REMOVED_DASH = "3 3"
"""Dashes of a line that is gone, in its widths."""

KIND_CATEGORY: dict[str, str] = {
    "Host": "host",
    "Container": "container", "Pod": "container", "Unit": "container",
    "Process": "process", "Thread": "process",
    "Socket": "network", "Nic": "network", "RdmaDevice": "network", "RdmaPort": "network", "RdmaQueuePair": "network",
    "RdmaQueuePairEndpoint": "network", "RdmaProtectionDomain": "network", "RdmaMemoryRegion": "network",
    "UnixSocket": "ipc", "Pipe": "ipc", "SharedMemory": "ipc", "MessageQueue": "ipc", "Semaphore": "ipc",
    "CpuPackage": "memory", "Numa": "memory", "NumaSet": "memory",
    "GPU": "gpu", "MigInstance": "gpu", "NvSwitch": "gpu", "NPU": "gpu",
    "PciDevice": "bus", "Device": "bus",
    "Disk": "storage", "Mount": "storage",
    "Session": "session", "Application": "session", "Scope": "session", "Kernel": "session", "Stream": "session",
}  # fmt: skip

KIND_NOUN: dict[str, str] = {
    "Host": "host", "Container": "container", "Pod": "pod", "Unit": "unit", "Process": "process", "Thread": "thread",
    "Socket": "socket", "UnixSocket": "unix socket", "Pipe": "pipe", "SharedMemory": "shared memory segment",
    "MessageQueue": "message queue", "Semaphore": "semaphore", "CpuPackage": "CPU package", "Numa": "NUMA node",
    "NumaSet": "NUMA set", "GPU": "GPU", "MigInstance": "MIG instance", "NvSwitch": "NVSwitch", "NPU": "NPU",
    "PciDevice": "PCI device", "Nic": "network interface", "Disk": "disk", "Mount": "mount",
    "RdmaDevice": "RDMA device", "RdmaPort": "RDMA port", "RdmaQueuePair": "RDMA queue pair",
    "RdmaQueuePairEndpoint": "RDMA endpoint", "RdmaProtectionDomain": "RDMA protection domain",
    "RdmaMemoryRegion": "RDMA memory region", "Device": "device", "Session": "session", "Application": "application",
    "Scope": "scope", "Kernel": "kernel", "Stream": "stream",
}  # fmt: skip

GLYPHS: dict[str, str] = {
    # SVG path data on a 16 x 16 grid, drawn as strokes 1.4 wide in the colour of the category.
    "Host": "M2.5 2.5h11v4.5h-11z M2.5 9h11v4.5h-11z M5 4.8h.1 M5 11.3h.1 M8 4.8h3.5 M8 11.3h3.5",
    "Container": "M8 1.8 13.8 4.8v6.4L8 14.2 2.2 11.2V4.8z M2.2 4.8 8 7.8l5.8-3 M8 7.8v6.4",
    "Pod": "M8 1.5 13.6 4.2 15 10.2 11.1 14.8H4.9L1 10.2 2.4 4.2z M8 5.5v5 M5.5 8h5",
    "Unit": "M2 4h12v8H2z M5 7l2 1.5L5 10 M8.5 10H11",
    "Process": "M8 2.2a5.8 5.8 0 1 0 .01 0z M6.5 5.4v5.2L10.8 8z",
    "Thread": "M5 1.5c5 3-3 5 1.5 6.5s-3 4.5 1.5 6.5 M9.5 1.5c5 3-3 5 1.5 6.5s-3 4.5 1.5 6.5",
    "Socket": "M5 2v4 M11 2v4 M3 6h10v2.5a5 4 0 0 1-10 0z M8 12.3v2.2",
    "UnixSocket": "M2 8h4 M10 8h4 M6 4.5h-.5a3.5 3.5 0 0 0 0 7H6z M10 4.5h.5a3.5 3.5 0 0 1 0 7H10z",
    "Pipe": "M4 4.5h8.5 M4 11.5h8.5 M4 4.5a1.8 3.5 0 1 0 .01 0z M12.5 4.5a1.8 3.5 0 0 1 0 7",
    "SharedMemory": "M8 2 14 5 8 8 2 5z M2 8l6 3 6-3 M2 11l6 3 6-3",
    "MessageQueue": "M2 4h12v8H2z M5 4v8 M8 4v8 M11 4v8",
    "Semaphore": "M5.5 1.5h5v13h-5z M8 4.2h.1 M8 8h.1 M8 11.8h.1",
    "CpuPackage": "M3.5 3.5h9v9h-9z M6 6h4v4H6z M6 1v2 M10 1v2 M6 13v2 M10 13v2 M1 6h2 M1 10h2 M13 6h2 M13 10h2",
    "Numa": "M1.5 4.5h13v7h-13z M4 7v2.5 M6.7 7v2.5 M9.3 7v2.5 M12 7v2.5 M3 11.5V13 M13 11.5V13",
    "NumaSet": "M1.5 2.5h8v5h-8z M6.5 8.5h8v5h-8z M9.5 5h2.5v3.5",
    "GPU": "M1.5 4h13v7.5h-13z M5 6a1.9 1.9 0 1 0 .01 0z M11 6a1.9 1.9 0 1 0 .01 0z M3 11.5v2h5v-2",
    "MigInstance": "M1.5 4h13v7.5h-13z M5.8 4v7.5 M10.2 4v7.5",
    "NvSwitch": "M2 4h3l6 8h3 M2 12h3l6-8h3",
    "NPU": "M2.5 2.5h11v11h-11z M5 10.5v-5l3 5v-5 M11 5.5v5",
    "PciDevice": "M1.5 3v10.5 M1.5 5h12.5v5.5H1.5 M5 10.5v2 M7.5 10.5v2 M10 10.5v2",
    "Nic": "M2 2.5h12v11H2z M4.5 13.5v-4h1.8v-2h3.4v2h1.8v4",
    "Disk": "M2.5 4.2a5.5 2.2 0 1 0 11 0a5.5 2.2 0 1 0-11 0z M2.5 4.2v7.6a5.5 2.2 0 0 0 11 0V4.2",
    "Mount": "M1.5 3.5h4.5l1.5 2h7v7.5h-13z",
    "RdmaDevice": "M2 5h9 M8.5 2.5 11.5 5l-3 2.5 M14 11H5 M7.5 8.5 4.5 11l3 2.5",
    "Device": "M3 3h10v10H3z M6 8h4",
    "Session": "M2 12.5 5 6l3 4.5L11 3l3 9.5",
    "Kernel": "M2.5 2.5h11v11h-11z M2.5 6.2h11 M2.5 9.8h11 M6.2 2.5v11 M9.8 2.5v11",
    "Stream": "M1.5 5c4-3 5 3 13 0 M1.5 11c4-3 5 3 13 0",
    "Group": "M2 5.5h9v8.5H2z M4.5 5.5V3h9v8.5H11",
    "Hardware": "M2 10.5h12v3H2z M4 10.5v-5h8v5 M6 5.5V3h4v2.5",
    "Elsewhere": "M8 1.8a6.2 6.2 0 1 0 .01 0z M1.8 8h12.4 M8 1.8c-4.5 4-4.5 8.4 0 12.4 M8 1.8c4.5 4 4.5 8.4 0 12.4",
    "?": "M5 5.5a3 3 0 1 1 4.2 2.8C8.3 8.8 8 9.3 8 10.3 M8 12.8h.1",
}
for _kind, _same in (
    ("RdmaPort", "RdmaDevice"), ("RdmaQueuePair", "RdmaDevice"), ("RdmaQueuePairEndpoint", "RdmaDevice"),
    ("RdmaProtectionDomain", "RdmaDevice"), ("RdmaMemoryRegion", "SharedMemory"), ("Application", "Session"),
    ("Scope", "Session"),
):  # fmt: skip
    GLYPHS[_kind] = GLYPHS[_same]

SLICES: dict[str, tuple[str, str, str]] = {
    # kind of a slice of a timeline: (kind of its box, noun, category)
    "kernel": ("KernelSlice", "kernel run", "gpu"),
    "copy": ("CopySlice", "copy", "ipc"),
    "fill": ("FillSlice", "fill", "storage"),
    "scope": ("ScopeSlice", "scope run", "session"),
    "range": ("RangeSlice", "NVTX range", "container"),
    "wait": ("WaitSlice", "wait", "group"),
    "window": ("WindowSlice", "deep window", "memory"),
    "session": ("SessionSlice", "session bar", "session"),
}
for _kind, _, _ in SLICES.values():
    GLYPHS[_kind] = "M2 5h12v6H2z"
GLYPHS["Tick"] = "M8 2.5v11 M5 2.5h6"
GLYPHS["Timeline"] = "M2 3.5h7v3H2z M6 9.5h8v3H6z"


def signed(text: str, change: str) -> str:
    """A text behind the sign of a change; as it is where there is none."""
    return f"{CHANGES[change][0]} {text}".rstrip() if change in CHANGES else text


def key_of_changes(found: Iterable[str]) -> str:
    """What the signs in a picture mean, of those that are in it; empty where nothing was compared."""
    there = set(found)
    return " · ".join(f"{sign} {change}" for change, (sign, _, _) in CHANGES.items() if change in there)


QUIET_KINDS = frozenset(
    ("NumaAccess", "Affinity", "NumaSetContain", "NumaDistance", "AttachedTo", "Proximity", "HasAttribute")
)
"""Kinds of edge that are drawn only when asked for: nesting and the lines in a box say them already."""

FABRIC_KINDS = frozenset(("NvLink", "PcieLink", "HccsBandwidth", "PaBandwidth"))

_GPU_KINDS = frozenset(("GPU", "NPU", "MigInstance", "Kernel", "Stream"))
_NETWORK_KINDS = frozenset(kind for kind, category in KIND_CATEGORY.items() if category == "network")
_IPC_KINDS = frozenset(kind for kind, category in KIND_CATEGORY.items() if category == "ipc")
_STORAGE_KINDS = frozenset(("Disk", "Mount"))


@lru_cache(maxsize=4096)
def medium_of(kind: str, category: str, source_kind: str, target_kind: str) -> str:
    """What an edge goes through: its colour in the picture."""
    if category == "data_stream":
        for kinds, medium in (
            (_GPU_KINDS, "gpu"),
            (_NETWORK_KINDS, "network"),
            (_IPC_KINDS, "ipc"),
            (_STORAGE_KINDS, "storage"),
        ):
            if source_kind in kinds or target_kind in kinds:
                return medium
        return "ipc" if kind == "Ipc" else "data"
    if kind in FABRIC_KINDS:
        return "fabric"
    return category if category in MEDIA else "attribute"
