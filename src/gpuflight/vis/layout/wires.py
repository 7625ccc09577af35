"""The edges of a graph as layouts read them: between items, each with what its kind and those of its ends say."""

from __future__ import annotations

from collections.abc import Iterator

from gpuflight.graph import Edge, Graph
from gpuflight.graph.element import EMPTY
from gpuflight.vis.layout.cards import write_card
from gpuflight.vis.layout.item import Item
from gpuflight.vis.model import Link
from gpuflight.vis.visual import medium_of

RUNNING = frozenset(("Process", "Thread"))
SHORT = {"UnixSocket": "unix", "SharedMemory": "shm", "Pipe": "pipe", "MessageQueue": "queue", "Semaphore": "sem"}
"""The word for what a line passes, of kinds whose entities a line counts."""
_NESTING = frozenset(("Own", "Host", "Belong", "RunOn"))


class Sort:
    """What edges of one kind between ends of two kinds have in common: there are few sorts, and many edges of each, so
    that whatever depends on kinds alone is found out once. ``flows``: data does, from end to end. ``nests``: it says in
    what an end may stand, its holder or who uses it. ``passes``: an end is of a kind that lines count."""

    __slots__ = ("category", "directed", "flows", "kind", "medium", "nests", "passes", "source_kind", "target_kind")

    def __init__(self, edge: Edge, kind: str, source_kind: str, target_kind: str) -> None:
        self.kind = kind
        self.source_kind = source_kind
        self.target_kind = target_kind
        self.category = edge.category
        self.flows = edge.category == "data_stream"
        self.passes = source_kind in SHORT or target_kind in SHORT
        self.nests = kind in _NESTING or (self.flows and (source_kind in RUNNING or target_kind in RUNNING))
        self.directed = edge.directed
        self.medium = medium_of(kind, edge.category, source_kind, target_kind)


class Wires:
    """All edges of a graph, in order: what of each, in columns, which for many edges need half the memory and time of
    an object for each. An edge's number is its place in every column."""

    __slots__ = ("links", "sorts", "sources", "targets")

    def __init__(self) -> None:
        self.sorts: list[Sort] = []
        self.sources: list[Item] = []
        self.targets: list[Item] = []
        self.links: list[Link] = []  # as they go into the picture

    def __iter__(self) -> Iterator[tuple[Sort, Item, Item]]:
        return zip(self.sorts, self.sources, self.targets, strict=True)


def read_wires(graph: Graph, items: dict[str, Item]) -> tuple[Wires, list[Item]]:
    """The edges of ``graph`` between ``items``; and an item for each end that only edges name, which is added to
    ``items``."""
    sorts: dict[tuple[str, str, str], Sort] = {}
    wires = Wires()
    missing: list[Item] = []

    def stand_in(end: str) -> Item:
        kind = end.partition("(")[0] if "(" in end else "?"
        items[end] = item = Item(end, kind if kind.isidentifier() else "?", None, end)
        item.missing = True
        write_card(item)
        missing.append(item)
        return item

    add_sort, add_source, add_target = wires.sorts.append, wires.sources.append, wires.targets.append
    add_link = wires.links.append
    for (source, target, kind), edge in graph.edges.items():
        try:
            first, second = items[source], items[target]
        except KeyError:
            first = items.get(source) or stand_in(source)
            second = items.get(target) or stand_in(target)
        kinds = kind, first.kind, second.kind
        try:
            sort = sorts[kinds]
        except KeyError:
            sorts[kinds] = sort = Sort(edge, *kinds)
        add_sort(sort)
        add_source(first)
        add_target(second)
        add_link(
            Link(
                source=source,
                target=target,
                kind=kind,
                category=sort.category,
                medium=sort.medium,
                directed=sort.directed,
                attributes=edge.attributes or EMPTY,
                metrics=edge.metrics or EMPTY,
                unknown=edge.unknown or EMPTY,
            )
        )
    return wires, missing
