"""What is written on a box: its name, the few lines under it, its bars. One function per kind that has more to say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from gpuflight.graph import Entity, Graph
from gpuflight.vis.layout.item import Item
from gpuflight.vis.model import Bar, Role
from gpuflight.vis.text import finite, human, human_bytes, human_pct, width

CHIP_KINDS = frozenset(
    (
        "Thread", "Socket", "UnixSocket", "Pipe", "SharedMemory", "MessageQueue", "Semaphore", "NumaSet", "PciDevice",
        "Mount", "RdmaPort", "RdmaQueuePair", "RdmaQueuePairEndpoint", "RdmaProtectionDomain", "RdmaMemoryRegion",
        "Device", "Stream", "Scope", "CpuPackage",
    )
)  # fmt: skip
TEXT = 10.5  # font size
CHIP_H, CHIP_MAX_W = 20.0, 200.0
_ARGUMENT = re.compile(r"(--?[\w-]+=)?[\w./:-]{1,40}")  # worth showing on its own: an option with its value, a word
_Label = Callable[[Entity], str]
_Lines = Callable[[Entity], list[str]]
_Bars = Callable[[dict[str, Any], dict[str, str]], list[Bar]]
_INTERPRETERS = ("python", "bash", "sh", "dash", "node", "java", "perl", "ruby", "uv", "zsh")


def _chip_width(label: str) -> float:
    return min(CHIP_MAX_W, max(44.0, width(label, TEXT) + 31))


_CHIP_WIDTHS = [_chip_width("x" * length) for length in range(201)]
"""Of labels in ASCII, by their length: most boxes of a big picture are chips."""


def chip_width(label: str) -> float:
    """How wide a box of one line is."""
    return _CHIP_WIDTHS[len(label)] if label.isascii() and len(label) <= 200 else _chip_width(label)


def items_of(graph: Graph) -> dict[str, Item]:
    """An item for each entity of ``graph``, with its words, by id and in order."""
    kinds = {cls: str(cls.__struct_config__.tag) for cls in {type(entity) for entity in graph.nodes.values()}}
    items: dict[str, Item] = {}
    for node_id, entity in graph.nodes.items():
        items[node_id] = item = Item(node_id, kinds[type(entity)], entity)
        write_card(item)
    return items


def write_card(item: Item) -> None:
    """Set label, lines, bars and role of an item that stands for one entity, and the size of a chip: its label alone
    says it, and is at hand."""
    role, write_label, write_lines, write_bars = _CARDS.get(item.kind, _PLAIN)
    item.role = role
    entity = item.entity
    if entity is not None:
        item.label = write_label(entity)
        if write_lines is not None:
            item.lines = [line for line in write_lines(entity) if line]
        if write_bars is not None:
            item.bars = write_bars(entity.metrics, entity.unknown or {})
    elif not item.label:
        item.label = item.id
    if role == "chip":
        item.w, item.h = chip_width(item.label), CHIP_H


def _plain_label(entity: Entity) -> str:
    return str(entity.label)[:200]


def arguments(entity: Entity) -> list[str]:
    """The command line of a process as a list, whichever way it was recorded."""
    value = entity.attributes.get("cmdline")
    if isinstance(value, str):
        return value.split()
    return [str(part) for part in value] if isinstance(value, (list, tuple)) else []


def _process_label(entity: Entity) -> str:
    """The command's name; of an interpreter, also what it interprets: ``python3 train.py``."""
    attributes = entity.attributes
    name = str(attributes.get("name") or "")[:200]
    words = arguments(entity) if "cmdline" in attributes else ()
    program = words[0].rpartition("/")[2] if words else ""
    if not name:
        name = program or f"pid {getattr(entity, 'pid', '?')}"
    if program.startswith(_INTERPRETERS):
        for at, word in enumerate(words[1:8], 1):
            if word == "-m" and at + 1 < len(words):
                return f"{name} -m {words[at + 1]}"[:200]
            if word == "-c":
                break
            if not word.startswith("-"):
                script = word.rpartition("/")[2]
                return name if script == name else f"{name} {script}"[:200]
    return name


def _process_lines(entity: Entity) -> list[str]:
    usage = [f"pid {getattr(entity, 'pid', '?')}"]
    cpu = finite(entity.metrics, "cpu_pct")
    if cpu is not None:
        usage.append(f"{human_pct(cpu)} CPU")
    rss = finite(entity.metrics, "rss_bytes")
    if rss is not None:
        usage.append(human_bytes(rss))
    return [" · ".join(usage)]


def _thread_label(entity: Entity) -> str:
    name = entity.attributes.get("name")
    return f"{name} {getattr(entity, 'tid', '')}"[:200] if name else f"tid {getattr(entity, 'tid', '?')}"


def _socket_label(entity: Entity) -> str:
    protocol = str(getattr(entity, "protocol", ""))
    state = str(entity.attributes.get("state") or "")
    text = f"{protocol} {getattr(entity, 'address', '')}"
    return f"{text} listening" if state == "LISTEN" else text[:200]


def _unix_label(entity: Entity) -> str:
    path = entity.attributes.get("path")
    return f"unix {path}"[:200] if path else f"unix {getattr(entity, 'inode', '')}"


def _pipe_label(entity: Entity) -> str:
    path = entity.attributes.get("path")
    return f"fifo {path}"[:200] if path else f"pipe {getattr(entity, 'inode', '')}"


def _keyed_label(entity: Entity) -> str:
    name = entity.attributes.get("name") or getattr(entity, "key", "")
    size = finite(entity.metrics, "size_bytes")
    text = f"{getattr(entity, 'mechanism', '')} {name}"[:200]
    return f"{text} · {human_bytes(size)}" if size is not None else text


def _container_label(entity: Entity) -> str:
    name = entity.attributes.get("name")
    identity = str(getattr(entity, "container_id", "") or getattr(entity, "uid", ""))
    return str(name)[:200] if name else f"{entity.kind.lower()} {identity[:12]}"


def _unit_label(entity: Entity) -> str:
    path = str(getattr(entity, "path", ""))
    return str(entity.attributes.get("name") or path.rpartition("/")[2] or path)[:200]


def _holder_lines(entity: Entity) -> list[str]:
    found = [str(entity.attributes[name])[:60] for name in ("runtime", "image", "qos") if entity.attributes.get(name)]
    metrics = entity.metrics
    cpu = finite(metrics, "cpu_pct")
    if cpu is not None:
        quota = finite(metrics, "cpu_quota_cores")
        found.append(f"{human('cpu_pct', cpu)} CPU" + (f" of {quota * 100:.0f} %" if quota else ""))
    throttled = finite(metrics, "throttled_pct")
    if throttled:
        found.append(f"throttled {human('throttled_pct', throttled)}")
    return [" · ".join(found)] if found else []


def _host_lines(entity: Entity) -> list[str]:
    attributes, metrics = entity.attributes, entity.metrics
    words = [
        str(attributes[name])[:40] for name in ("kernel", "architecture", "virtualisation") if attributes.get(name)
    ]
    cpus = finite(metrics, "cpus_count")
    if cpus is not None:
        words.append(f"{cpus:.0f} CPUs")
    load = finite(metrics, "load_1min")
    if load is not None:
        words.append(f"load {load:.2f}")
    return [" · ".join(words)] if words else []


def _numa_label(entity: Entity) -> str:
    return f"NUMA node {getattr(entity, 'index', '?')}"


def _numa_lines(entity: Entity) -> list[str]:
    cpus = entity.attributes.get("cpus")
    if entity.attributes.get("has_cpus") is False:
        return ["no CPUs"]
    return [f"CPUs {str(cpus)[:40]}"] if cpus not in (None, "") else []


def _gpu_label(entity: Entity) -> str:
    index = entity.attributes.get("index", getattr(entity, "index", None))
    name = str(entity.attributes.get("name") or "").removeprefix("NVIDIA ")
    return f"{entity.kind} {index} · {name}"[:200].rstrip(" ·") if index is not None else name or entity.label


def _gpu_lines(entity: Entity) -> list[str]:
    metrics = entity.metrics
    state = entity.attributes.get("state")
    words = [f"state: {state}"] if state not in (None, "ok") else []
    power, limit = finite(metrics, "power_watts"), finite(metrics, "power_limit_watts")
    if power is not None:
        words.append(f"{power:.0f}" + (f"/{limit:.0f} W" if limit is not None else " W"))
    temperature = finite(metrics, "temperature_celsius")
    if temperature is not None:
        words.append(f"{temperature:.0f} °C")
    gen, link = finite(metrics, "pcie_gen"), finite(metrics, "pcie_width")
    if gen is not None and link is not None:
        words.append(f"PCIe {gen:.0f}×{link:.0f}")
    if not words:
        words = [str(entity.attributes[name])[:40] for name in ("pci_address", "health") if entity.attributes.get(name)]
    return [" · ".join(words)] if words else []


def _nic_lines(entity: Entity) -> list[str]:
    words = []
    speed = finite(entity.metrics, "speed_bits_per_s")
    if speed is not None:
        words.append(human("speed_bits_per_s", speed))
    elif entity.attributes.get("operstate"):
        words.append(str(entity.attributes["operstate"])[:20])
    rx, tx = finite(entity.metrics, "rx_bytes_per_s"), finite(entity.metrics, "tx_bytes_per_s")
    if rx is not None and tx is not None:
        words.append(f"↓ {human('rx_bytes_per_s', rx)} ↑ {human('tx_bytes_per_s', tx)}")
    return [" · ".join(words)] if words else []


def _disk_lines(entity: Entity) -> list[str]:
    words = []
    size = finite(entity.metrics, "size_bytes")
    if size is not None:
        words.append(human_bytes(size))
    read, write = finite(entity.metrics, "read_bytes_per_s"), finite(entity.metrics, "write_bytes_per_s")
    if read is not None and write is not None:
        words.append(f"r {human('read_bytes_per_s', read)} w {human('write_bytes_per_s', write)}")
    return [" · ".join(words)] if words else []


def _session_lines(entity: Entity) -> list[str]:
    words = [str(entity.attributes.get("state") or "")[:40]]
    words += _said(entity, (("launches_per_s", "{}"), ("busy_pct", "busy {}"), ("lag_bytes", "behind {}")))
    return [" · ".join(word for word in words if word)]


def _kernel_lines(entity: Entity) -> list[str]:
    words = _said(entity, (("launches_per_s", "{}"), ("gpu_time_pct", "{}"), ("mean_us", "mean {}")))
    return [" · ".join(words)] if words else []


def _said(entity: Entity, wanted: tuple[tuple[str, str], ...]) -> list[str]:
    """The metrics that are known and not 0, in words."""
    found = ((name, pattern, finite(entity.metrics, name)) for name, pattern in wanted)
    return [pattern.format(human(name, value)) for name, pattern, value in found if value]


def _mount_label(entity: Entity) -> str:
    kind = entity.attributes.get("fstype")
    return f"{getattr(entity, 'path', '')} ({kind})"[:200] if kind else str(getattr(entity, "path", ""))[:200]


def _port_label(entity: Entity) -> str:
    speed = finite(entity.metrics, "speed_bits_per_s")
    words = [f"port {getattr(entity, 'port', '?')}", str(entity.attributes.get("state") or "").lower()]
    if speed is not None:
        words.append(human("speed_bits_per_s", speed))
    return " · ".join(word for word in words if word)[:200]


def _pci_label(entity: Entity) -> str:
    metrics = entity.metrics
    if "switch" in str(entity.attributes.get("port_type", "")).lower():
        return f"PCIe switch {getattr(entity, 'address', '')}"
    speed, lanes = finite(metrics, "link_speed_gt_per_s"), finite(metrics, "link_width")
    text = f"PCI {getattr(entity, 'address', '')}"
    if speed is not None and lanes is not None:
        return f"{text} · {speed:g} GT/s ×{lanes:.0f}"
    name = entity.attributes.get("class_name")
    return f"{text} · {name}"[:200] if name else text


def _kind_and(name: str, noun: str) -> Callable[[Entity], str]:
    def label(entity: Entity) -> str:
        return str(entity.attributes.get("name") or f"{noun} {getattr(entity, name, '')}")[:200]

    return label


def _memory_bar(metrics: dict[str, Any], unknown: dict[str, str]) -> list[Bar]:
    total = finite(metrics, "memory_total_bytes") or finite(metrics, "memory_limit_bytes")
    used = finite(metrics, "memory_used_bytes")
    if used is None and total:
        free = finite(metrics, "memory_available_bytes")
        free = free if free is not None else finite(metrics, "memory_free_bytes")
        used = total - free if free is not None else None
    return _filled("mem", used, total) if total else []


def _filled(label: str, used: float | None, total: float) -> list[Bar]:
    if used is None or total <= 0:
        return []
    return [Bar(label, min(1.0, max(0.0, used / total)), f"{human_bytes(used)} / {human_bytes(total)}")]


def _gpu_bars(metrics: dict[str, Any], unknown: dict[str, str]) -> list[Bar]:
    bars = _memory_bar(metrics, unknown)
    for label, name in (("SM", "sm_util_pct"), ("util", "util_pct")):
        value = finite(metrics, name)
        if value is not None:
            bars.append(Bar(label, min(1.0, max(0.0, value / 100)), human(name, value)))
        elif name in unknown:
            bars.append(Bar(label, 0.0, "unknown"))
    return bars


def _used_bar(metrics: dict[str, Any], unknown: dict[str, str]) -> list[Bar]:
    total = finite(metrics, "size_bytes")
    used = finite(metrics, "used_bytes")
    return _filled("used", used, total) if total else []


_LABELS: dict[str, _Label] = {
    "Process": _process_label, "Thread": _thread_label, "Socket": _socket_label, "UnixSocket": _unix_label,
    "Pipe": _pipe_label, "SharedMemory": _keyed_label, "MessageQueue": _keyed_label, "Semaphore": _keyed_label,
    "Container": _container_label, "Pod": _container_label, "Unit": _unit_label, "Numa": _numa_label, "GPU": _gpu_label,
    "NPU": _gpu_label, "MigInstance": _gpu_label, "Mount": _mount_label, "PciDevice": _pci_label,
    "NumaSet": _kind_and("nodes", "NUMA nodes"), "NvSwitch": _kind_and("address", "NVSwitch"),
    "CpuPackage": _kind_and("index", "CPU package"), "Stream": _kind_and("stream", "stream"),
    "Host": _kind_and("hostname", "host"), "RdmaPort": _port_label,
}  # fmt: skip
_LINES: dict[str, _Lines] = {
    "Process": _process_lines, "Container": _holder_lines, "Pod": _holder_lines, "Unit": _holder_lines,
    "Host": _host_lines, "Numa": _numa_lines, "GPU": _gpu_lines, "NPU": _gpu_lines, "MigInstance": _gpu_lines,
    "Nic": _nic_lines, "Disk": _disk_lines, "Session": _session_lines, "Kernel": _kernel_lines,
}  # fmt: skip
_BARS: dict[str, _Bars] = {
    "GPU": _gpu_bars, "NPU": _gpu_bars, "MigInstance": _gpu_bars, "Numa": _memory_bar, "Host": _memory_bar,
    "Container": _memory_bar, "Pod": _memory_bar, "Disk": _used_bar,
}  # fmt: skip


_PLAIN: tuple[Role, _Label, None, None] = ("card", _plain_label, None, None)
_CARDS: dict[str, tuple[Role, _Label, _Lines | None, _Bars | None]] = {
    kind: ("chip" if kind in CHIP_KINDS else "card", _LABELS.get(kind, _plain_label), _LINES.get(kind), _BARS.get(kind))
    for kind in CHIP_KINDS | _LABELS.keys() | _LINES.keys() | _BARS.keys()
}
"""What to write on a box of each kind, of those that are not written plainly."""


def tell_apart(processes: list[Item]) -> None:
    """Processes of one name in one box: add the first argument in which all their command lines differ."""
    if len(processes) < 2:
        return
    alike: dict[str, list[Item]] = {}
    for item in processes:
        if item.entity is not None:
            alike.setdefault(item.label, []).append(item)
    for members in alike.values():
        if not 2 <= len(members) <= 64:
            continue
        lines = [arguments(item.entity) for item in members if item.entity is not None]
        if len({len(words) for words in lines}) != 1:
            continue
        for words in zip(*lines, strict=True):
            if len(set(words)) == len(members) and all(map(_ARGUMENT.fullmatch, words)):
                for item, word in zip(members, words, strict=True):
                    item.label = f"{item.label} {word.lstrip('-')}"[:200]
                break
