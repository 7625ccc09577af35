"""A graph as compact text for people and language models.

Programs first: the deploy edges as an indented tree, one line per entity, what it sends where below it. Then the
hardware, with what is wired to what. Siblings that differ in nothing but their identity fold into one line with a
count. The text depends on the graph alone, not on the order in which it was built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from gpuflight.graph.element import Edge, Entity
from gpuflight.graph.graph import Graph
from gpuflight.graph.nodes import (
    GPU,
    NPU,
    CpuPackage,
    Device,
    Disk,
    MigInstance,
    Mount,
    Nic,
    Numa,
    NumaSet,
    NvSwitch,
    PciDevice,
    Pipe,
    Process,
    RdmaDevice,
    RdmaPort,
)
from gpuflight.graph.tree import Tree, natural_key, references
from gpuflight.graph.units import human, quantity

HARDWARE: tuple[type[Entity], ...] = (
    GPU,
    MigInstance,
    NPU,
    NvSwitch,
    CpuPackage,
    Numa,
    NumaSet,
    RdmaDevice,
    RdmaPort,
    Nic,
    Disk,
    Mount,
    PciDevice,
    Device,
)
"""Kinds of the hardware section, in its order."""

METRICS_SHOWN = 6
"""Metrics on a line, unless ``detail`` or the kind has a choice of its own in KEY_METRICS."""

KEY_METRICS: dict[str, tuple[str, ...]] = {
    "Process": ("cpu_pct", "rss_bytes", "threads_count", "fds_count", "io_read_bytes_per_s", "io_write_bytes_per_s"),
    "GPU": (
        "sm_util_pct",
        "memory_used_bytes",
        "memory_total_bytes",
        "power_watts",
        "temperature_celsius",
        "sm_clock_hz",
        "pcie_gen",
        "pcie_width",
    ),
    "Host": ("cpus_count", "cpu_busy_pct", "memory_total_bytes", "memory_available_bytes", "load_1min"),
    "Container": ("cpu_pct", "throttled_pct", "memory_used_bytes", "memory_limit_bytes"),
    "Numa": ("memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "numa_miss_per_s"),
    "Nic": ("speed_bits_per_s", "rx_bytes_per_s", "tx_bytes_per_s", "rx_drops_per_s"),
    "NumaAccess": ("cpu_memory_similarity", "resident_bytes", "cpu_memory_dot_product"),
}
"""What of a kind's metrics is shown; METRICS_SHOWN of the others where an element has none of these."""

KEY_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "Process": ("cmdline", "user", "state"),
    "Thread": ("state",),
    "Host": ("kernel", "architecture", "virtualisation"),
    "Container": ("runtime", "image"),
    "GPU": ("state", "pci_address", "driver", "clock_event_reasons"),
    "MigInstance": ("profile",),
    "NPU": ("pci_address", "health", "cpus"),
    "Numa": ("cpus",),
    "CpuPackage": ("cpus",),
    "Socket": ("state",),
    "UnixSocket": ("path", "state"),
    "Pipe": ("path",),
    "SharedMemory": ("path",),
    "Nic": ("operstate", "pci_address"),
    "Disk": ("model",),
    "Mount": ("fstype", "source"),
    "PciDevice": ("class_name", "driver"),
    "Device": ("reference_type", "original_kind"),
}

TEXT_LIMIT = 100
"""Characters of one attribute."""

FOLD_FROM = 3
"""So many like siblings become one line."""

FOLD_EDGES_FROM = 5
"""So many edges of one kind from one entity to entities of one kind become one line."""

NEVER_FOLDED: tuple[type[Entity], ...] = (GPU, MigInstance, NPU, NvSwitch, CpuPackage, Numa, RdmaDevice, RdmaPort, Nic)

NAMES_IN_FOLD = 4


def describe(graph: Graph, *, limit: int | None = None, detail: bool = False) -> str:
    """The graph as text, ended by a newline.

    ``limit`` bounds the lines (at least one stays; the last says how many were left out). ``detail`` shows every metric
    and attribute, and folds nothing.
    """
    lines = _Writer(graph, detail).lines()
    if limit is not None and len(lines) > max(limit, 1):
        kept = max(limit, 1) - 1
        lines = [*lines[:kept], f"… {len(lines) - kept} more lines"]
    return "\n".join(lines) + "\n"


class _Writer:
    def __init__(self, graph: Graph, detail: bool) -> None:
        self.graph = graph
        self.detail = detail
        refs = references(graph)
        self.tree = Tree(graph, refs)
        self.refs = {node_id: _clip(ref) for node_id, ref in refs.items()}
        self.flows: dict[str, list[Edge]] = {}
        self.wiring: dict[str, list[Edge]] = {}
        for edge in graph.edges.values():
            if edge.category == "data_stream":
                self.flows.setdefault(edge.source, []).append(edge)
            elif edge.category != "deploy":
                self.wiring.setdefault(edge.source, []).append(edge)
        self.told_by_writer = set() if detail else self._pipes_told_by_writers()

    def _pipes_told_by_writers(self) -> set[str]:
        """Pipes whose writers say who reads, so that they need no line of their own."""
        nodes = self.graph.nodes
        written = {edge.target for node, edges in self.flows.items() if node in nodes for edge in edges}
        return {node for node in written if type(nodes.get(node)) is Pipe and node not in self.tree.parent}

    def lines(self) -> list[str]:
        graph = self.graph
        out = [f"graph: {_plural(len(graph.nodes), 'node')}, {_plural(len(graph.edges), 'edge')}"]
        for kinds in ([e.kind for e in graph.nodes.values()], [e.kind for e in graph.edges.values()]):
            counted = sorted(Counter(kinds).items(), key=lambda item: (-item[1], item[0]))
            if counted:
                out.append("  " + ", ".join(f"{kind} {count}" for kind, count in counted))
        roots = [node for node in self.tree.roots if node not in self.told_by_writer]
        self._siblings([node for node in roots if not isinstance(graph.nodes[node], HARDWARE)], 0, out)
        hardware = [node for node in roots if isinstance(graph.nodes[node], HARDWARE)]
        if hardware:
            out.append("hardware:")
            hardware.sort(key=lambda node: HARDWARE.index(type(graph.nodes[node])))
            self._siblings(hardware, 1, out)
        outside = sorted({end for e in graph.edges.values() for end in (e.source, e.target)} - graph.nodes.keys())
        if outside:
            names = ", ".join(_clip(name) for name in outside[:NAMES_IN_FOLD])
            out.append(f"outside this graph: {len(outside)} ends of edges ({names}{_more(outside)})")
        out.extend(self._unknown())
        return out

    def _siblings(self, nodes: Sequence[str], depth: int, out: list[str]) -> None:
        """Nodes of one parent and all below them; like ones next to each other folded.

        With a stack of its own, since the depth of a process tree is not ours to bound.
        """
        pending = self._runs(nodes, depth)
        while pending:
            run, depth = pending.pop()
            if len(run) > 1:
                self._folded(run, depth, out)
                continue
            node = run[0]
            out.append("  " * depth + self._line(node))
            out.extend("  " * (depth + 1) + line for line in self._edge_lines(node))
            pending.extend(self._runs(self.tree.children.get(node, ()), depth + 1))

    def _runs(self, nodes: Sequence[str], depth: int) -> list[tuple[list[str], int]]:
        """Siblings as runs to print, last first: a run of several is to be folded."""
        runs: list[tuple[list[str], int]] = []
        for likeness, group in groupby(nodes, key=self._likeness):
            run = list(group)
            if likeness is not None and len(run) >= FOLD_FROM:
                runs.append((run, depth))
            else:
                runs.extend(([node], depth) for node in run)
        return runs[::-1]

    def _likeness(self, node: str) -> tuple[object, ...] | None:
        """What siblings must share to fold: kind, name, the kinds of their edges and of what these lead to."""
        if self.detail or self.tree.children.get(node):
            return None
        entity = self.graph.nodes[node]
        if isinstance(entity, NEVER_FOLDED):
            return None
        return (
            entity.kind,
            entity.ns,
            str(entity.attributes.get("name", "")),
            str(entity.attributes.get("state", "")),
            "ended_round" in entity.attributes,
            # Who talks to whom must not be lost; the sockets of one process may differ in their peers.
            tuple(sorted({(e.kind, e.target if type(entity) is Process else "") for e in self._edges(node)})),
        )

    def _folded(self, run: Sequence[str], depth: int, out: list[str]) -> None:
        entities = [self.graph.nodes[node] for node in run]
        first = entities[0]
        name = _clip(str(first.attributes.get("name") or ""))
        shorts = [_short(self.refs[node], first.kind).removesuffix(f" {name}") for node in run[:NAMES_IN_FOLD]]
        head = f"{first.kind} ×{len(run)}" + (f" {name}" if name else "") + f": {', '.join(shorts)}{_more(run)}"
        out.append("  " * depth + " ".join([head, *_marks(first)]) + _ranges(entities))
        by_kind: dict[str, list[Edge]] = {}
        for node in run:
            for edge in self._edges(node):
                by_kind.setdefault(edge.kind, []).append(edge)
        for kind in sorted(by_kind):
            edges = by_kind[kind]
            targets = Counter(self._ref(edge.target) for edge in edges)
            frequent = sorted(targets.items(), key=lambda item: (-item[1], natural_key(item[0])))[:NAMES_IN_FOLD]
            told = [f"{target}{f' ×{count}' if count > 1 else ''}" for target, count in frequent]
            rest = f" … {len(targets)} in all" if len(targets) > len(told) else ""
            out.append("  " * (depth + 1) + f"{_arrow(edges[0])} {kind} {', '.join(told)}{rest}" + _ranges(edges))

    def _line(self, node: str) -> str:
        entity = self.graph.nodes[node]
        ref = self.refs[node]
        parts = [ref]
        name = str(entity.attributes.get("name") or "")
        if name and name not in ref:
            parts.append(_clip(name))
        shown: list[str] = []
        attributes = entity.attributes
        names: Iterable[str] = KEY_ATTRIBUTES.get(entity.kind, ())
        if self.detail:
            names = sorted(attributes.keys() - {"name", "ended_round"})
        for key in names:
            value = attributes.get(key)
            if value not in (None, "", [], ()):
                shown.append(f"{key} {_clip(_text(value))}")
        shown.extend(_metrics(entity, KEY_METRICS.get(entity.kind, ()), self.detail))
        others = self.tree.other_parents.get(node, ())
        if others:
            shown.append("also of " + ", ".join(self.refs[parent] for parent in others[:NAMES_IN_FOLD]) + _more(others))
        parts.extend(_marks(entity))
        return " ".join(parts) + (": " + ", ".join(shown) if shown else "")

    def _edge_lines(self, node: str) -> list[str]:
        lines: list[str] = []
        for _, group in groupby(self._edges(node), key=self._sameness):
            run = list(group)
            if self.detail or len(run) < FOLD_EDGES_FROM:
                lines.extend(self._edge_line(edge) for edge in run)
                continue
            first = self.graph.nodes.get(run[0].target)
            kind = first.kind if first is not None else "outside"
            names = [_short(self._ref(edge.target), kind) for edge in run[:NAMES_IN_FOLD]]
            head = [_arrow(run[0]), run[0].kind, kind, f"×{len(run)}:", ", ".join(names) + _more(run), *_marks(run[0])]
            lines.append(" ".join(head) + _ranges(run))
        return lines

    def _sameness(self, edge: Edge) -> tuple[object, ...]:
        target = self.graph.nodes.get(edge.target)
        return edge.kind, target.kind if target is not None else "", "ended_round" in edge.attributes

    def _edge_line(self, edge: Edge) -> str:
        names: Iterable[str] = (
            sorted(edge.attributes.keys() - {"ended_round"}) if self.detail else ("state", "distance")
        )
        shown = [f"{key} {_clip(_text(edge.attributes[key]))}" for key in names if key in edge.attributes]
        shown.extend(_metrics(edge, KEY_METRICS.get(edge.kind, ()), self.detail))
        head = " ".join([_arrow(edge), edge.kind, self._ref(edge.target), *self._readers(edge), *_marks(edge)])
        return head + (": " + ", ".join(shown) if shown else "")

    def _readers(self, edge: Edge) -> list[str]:
        if edge.target not in self.told_by_writer:
            return []
        readers = [self._ref(reading.target) for reading in self._edges(edge.target)]
        return ["->", ", ".join(readers[:NAMES_IN_FOLD]) + _more(readers)] if readers else ["-> nobody"]

    def _edges(self, node: str) -> list[Edge]:
        edges = self.flows.get(node, []) + self.wiring.get(node, [])
        return sorted(edges, key=self._edge_order) if len(edges) > 1 else edges

    def _edge_order(self, edge: Edge) -> tuple[object, ...]:
        sameness = map(str, self._sameness(edge))
        return edge.category != "data_stream", *sameness, natural_key(self._ref(edge.target)), edge.target

    def _ref(self, node_id: str) -> str:
        return self.refs.get(node_id) or _clip(node_id)

    def _unknown(self) -> list[str]:
        """What could not be read, once per kind, metric and reason."""
        counted: Counter[tuple[str, str, str]] = Counter()
        elements: list[Entity | Edge] = [*self.graph.nodes.values(), *self.graph.edges.values()]
        for element in elements:
            for name, reason in (element.unknown or {}).items():
                counted[element.kind, reason, name] += 1
        by_reason: dict[tuple[str, str], list[str]] = {}
        for (kind, reason, name), count in sorted(counted.items()):
            by_reason.setdefault((kind, reason), []).append(f"{name} ×{count}" if count > 1 else name)
        if not by_reason:
            return []
        return ["unknown:"] + [
            f"  {kind}: {', '.join(names)}: {_clip(reason)}" for (kind, reason), names in by_reason.items()
        ]


def _metrics(element: Entity | Edge, preferred: Sequence[str], detail: bool) -> list[str]:
    return [_metric(name, element.metrics[name]) for name in _chosen(element.metrics, preferred, detail)]


def _chosen(names: Collection[str], preferred: Sequence[str], detail: bool) -> list[str]:
    chosen = [name for name in preferred if name in names]
    if detail:
        return chosen + sorted(name for name in names if name not in chosen)
    return chosen or sorted(names)[:METRICS_SHOWN]


def _metric(name: str, value: float) -> str:
    return f"{quantity(name)} {human(name, value)}"


def _ranges(elements: Sequence[Entity | Edge]) -> str:
    """The metrics that all of a fold have, as least to greatest."""
    if not elements:
        return ""
    shared = set(elements[0].metrics).intersection(*(element.metrics.keys() for element in elements[1:]))
    told = []
    for name in _chosen(shared, KEY_METRICS.get(elements[0].kind, ()), False):
        values = [element.metrics[name] for element in elements]
        low, high = human(name, min(values)), human(name, max(values))
        told.append(f"{quantity(name)} {low}" if low == high else f"{quantity(name)} {low} to {high}")
    return "; " + ", ".join(told) if told else ""


def _marks(element: Entity | Edge) -> list[str]:
    """``[ended in round 12]`` for a tombstone, ``[remote]`` for what is not on this host."""
    marks = []
    if "ended_round" in element.attributes:
        marks.append(f"[ended in round {element.attributes['ended_round']}]")
    if element.attributes.get("remote") is True:
        marks.append("[remote]")
    return marks


def _short(ref: str, kind: str) -> str:
    return ref.removeprefix(kind).strip()


def _arrow(edge: Edge) -> str:
    return "->" if edge.category == "data_stream" else "~"


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _clip(text: str) -> str:
    """One line, printable, not too long; the text of a stranger's command line may hold anything."""
    clean = text[: TEXT_LIMIT + 1]
    if not clean.isprintable():
        clean = "".join(char if char.isprintable() else "�" for char in clean)
    return clean if len(clean) <= TEXT_LIMIT else clean[: TEXT_LIMIT - 1] + "…"


def _more(items: Sequence[object]) -> str:
    return ", …" if len(items) > NAMES_IN_FOLD else ""


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
