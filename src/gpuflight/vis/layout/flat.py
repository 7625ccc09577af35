"""Entities side by side, not in each other: what layouts by lines (not by boxes in boxes) place.

Things that nothing tells apart (one kind, wired to the very same others) fold into one group with their count.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from gpuflight.graph import Graph
from gpuflight.graph.joins import connected_once
from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.layout.bundle import CROWDED_KINDS
from gpuflight.vis.layout.cards import write_card
from gpuflight.vis.layout.item import Item, natural_key
from gpuflight.vis.text import plural
from gpuflight.vis.visual import KIND_NOUN

_HOLDERS = frozenset(("Container", "Pod", "Unit"))
_WORK = frozenset(("Process", "Thread")) | _HOLDERS
TWINS_MIN = 4
TWINS_WIRED_MAX = 3  # who is wired to more is someone


class Flat:
    """The items of a picture without nesting, but for groups of twins. Attributes are those of ``Placed``."""

    def __init__(self, graph: Graph, options: LayoutOptions) -> None:
        whole, graph = graph, connected_once(graph)
        self.graph = graph
        self.options = options
        self.notes: list[str] = list(options.notes)
        self.used: set[tuple[str, str, str]] = set()
        self.root = Item("picture", "Picture")
        self.items = {node_id: Item(node_id, entity.kind, entity) for node_id, entity in graph.nodes.items()}
        if left_out := len(whole.nodes) - len(graph.nodes):
            self.notes.append(
                f"{plural(left_out, 'stand-in')} for ends on other hosts left out: those connections are drawn once,"
                " between their real ends"
            )
        self._add_missing()
        for item in self.items.values():
            write_card(item)
        self._note_implied()
        groups, grouped = self._twins()
        root = self.root
        for item in self.items.values():
            if item.id not in grouped:
                root.adopt(item)
                item.depth = 1
        for members in groups:
            self._group(members)
        if groups:
            self.notes.append(
                f"{plural(len(grouped), 'entity')} folded into {plural(len(groups), 'group')}; each says how many, and"
                " why"
            )

    def fresh_id(self, wanted: str) -> str:
        """An id for a box of ours that no entity has."""
        while wanted in self.items:
            wanted += "'"
        return wanted

    def _add_missing(self) -> None:
        items, missing = self.items, 0
        for source, target, _ in self.graph.edges:
            for end in (source, target):
                if end not in items:
                    kind = end.partition("(")[0] if "(" in end else "?"
                    items[end] = item = Item(end, kind if kind.isidentifier() else "?", None, end)
                    item.missing = True
                    missing += 1
        if missing:
            self.notes.append(f"{plural(missing, 'entity')} named by an edge but not in the graph: dashed")

    def _note_implied(self) -> None:
        """What a host holds by way of a process or container it holds needs no line of its own to the host."""
        items = self.items
        within = {
            target if kind == "Own" else source
            for source, target, kind in self.graph.edges
            if (kind == "Own" and items[source].kind in _WORK)
            or (kind in ("Belong", "RunOn") and items[target].kind in _WORK)
        } | {target for source, target, kind in self.graph.edges if kind == "Host" and items[source].kind in _HOLDERS}
        for key in self.graph.edges:
            if key[2] == "Host" and items[key[0]].kind == "Host" and key[1] in within:
                self.used.add(key)
        if self.used:
            self.notes.append(
                f"{plural(len(self.used), 'edge')} from a host to what its processes or containers hold: in the"
                " details, not drawn"
            )

    def _twins(self) -> tuple[list[list[Item]], set[str]]:
        """Entities of one kind that are wired to the same others in the same way."""
        edges = [key for key in self.graph.edges if key[2] not in CROWDED_KINDS and key not in self.used]
        ends = Counter(key[0] for key in edges)
        ends.update(key[1] for key in edges)
        few = {node_id for node_id, count in ends.items() if count <= TWINS_WIRED_MAX}
        wired: dict[str, list[tuple[str, str, bool]]] = defaultdict(list)
        for source, target, kind in edges:
            if source in few:
                wired[source].append((target, kind, True))
            if target in few:
                wired[target].append((source, kind, False))
        named = {name for finding in self.options.findings for name in finding.entities}
        alike: dict[tuple[str, tuple[tuple[str, str, bool], ...]], list[Item]] = defaultdict(list)
        for node_id, item in self.items.items():
            ways = wired.get(node_id)
            if ways and item.entity is not None and node_id not in named:
                alike[item.kind, tuple(sorted(ways))].append(item)
        groups = [members for members in alike.values() if len(members) >= TWINS_MIN]
        return groups, {item.id for members in groups for item in members}

    def _group(self, members: list[Item]) -> None:
        members.sort(key=lambda item: (natural_key(item.label), item.id))
        first = members[0]
        group = Item(self.fresh_id(f"twins:{first.id}"), "Group", ns=first.ns)
        group.label = plural(len(members), KIND_NOUN.get(first.kind, "entity"))
        names = {str(item.entity.attributes.get("name", "")) for item in members if item.entity is not None}
        if len(names) == 1 and (name := names.pop()):
            group.label = f"{len(members)} × {name[:60]}"
        group.rule = "one kind, wired to the same others"
        group.count = 0
        group.folds = True
        group.role = "group"
        group.depth = 1
        self.root.adopt(group)
        for item in members:
            group.adopt(item)
            item.depth = 2
