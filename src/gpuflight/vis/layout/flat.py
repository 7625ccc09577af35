"""Entities side by side, not in each other: what layouts by lines (not by boxes in boxes) place.

Things that nothing tells apart (one kind, wired to the very same others) fold into one group with their count.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from gpuflight.graph import Graph
from gpuflight.graph.joins import connected_once
from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.layout.bundle import CROWDED_KINDS
from gpuflight.vis.layout.cards import items_of
from gpuflight.vis.layout.item import Item, natural_key, set_depths
from gpuflight.vis.layout.wires import read_wires
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
        self.used: set[int] = set()
        self.root = Item("picture", "Picture")
        self.items = items_of(graph)
        if left_out := len(whole.nodes) - len(graph.nodes):
            self.notes.append(
                f"{plural(left_out, 'stand-in')} for ends on other hosts left out: those connections are drawn once,"
                " between their real ends"
            )
        self.wires, missing = read_wires(graph, self.items)
        if missing:
            self.notes.append(f"{plural(len(missing), 'entity')} named by an edge but not in the graph: dashed")
        self._note_implied()
        groups, grouped = self._twins()
        root = self.root
        for item in self.items.values():
            if item not in grouped:
                root.adopt(item)
        for members in groups:
            self._group(members)
        set_depths(root)
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

    def _note_implied(self) -> None:
        """What a host holds by way of a process or container it holds needs no line of its own to the host."""
        within: set[Item] = set()
        for sort, source, target in self.wires:
            if sort.kind == "Own":
                if sort.source_kind in _WORK:
                    within.add(target)
            elif sort.kind in ("Belong", "RunOn"):
                if sort.target_kind in _WORK:
                    within.add(source)
            elif sort.kind == "Host" and sort.source_kind in _HOLDERS:
                within.add(target)
        for number, (sort, _, target) in enumerate(self.wires):
            if sort.kind == "Host" and sort.source_kind == "Host" and target in within:
                self.used.add(number)
        if self.used:
            self.notes.append(
                f"{plural(len(self.used), 'edge')} from a host to what its processes or containers hold: in the"
                " details, not drawn"
            )

    def _twins(self) -> tuple[list[list[Item]], set[Item]]:
        """Entities of one kind that are wired to the same others in the same way."""
        wires = [
            wire
            for number, wire in enumerate(self.wires)
            if number not in self.used and wire[0].kind not in CROWDED_KINDS
        ]
        ends = Counter(source for _, source, _ in wires)
        ends.update(target for _, _, target in wires)
        few = {item for item, count in ends.items() if count <= TWINS_WIRED_MAX}
        wired: dict[Item, list[tuple[str, str, bool]]] = defaultdict(list)
        for sort, source, target in wires:
            if source in few:
                wired[source].append((target.id, sort.kind, True))
            if target in few:
                wired[target].append((source.id, sort.kind, False))
        named = {name for finding in self.options.findings for name in finding.entities}
        alike: dict[tuple[str, tuple[tuple[str, str, bool], ...]], list[Item]] = defaultdict(list)
        for item in self.items.values():
            ways = wired.get(item)
            if ways and item.entity is not None and item.id not in named:
                alike[item.kind, tuple(sorted(ways))].append(item)
        groups = [members for members in alike.values() if len(members) >= TWINS_MIN]
        return groups, {item for members in groups for item in members}

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
        self.root.adopt(group)
        for item in members:
            group.adopt(item)
