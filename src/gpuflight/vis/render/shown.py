"""A picture as boxes and lines between them, for formats that place things themselves (Mermaid, Graphviz, PyVis).

What a group folds is not opened: it is one box that says how many it stands for. A line whose end is inside a group
ends at the group; lines that thereby join the same boxes in the same medium are one.
"""

from __future__ import annotations

from msgspec import Struct, field

from gpuflight.vis.model import Box, LayoutGraph, Route
from gpuflight.vis.visual import key_of_changes


class ShownBox(Struct):
    """A box that is drawn, its number, and the number of the box around it (-1: none). Parents come first."""

    number: int
    box: Box
    parent: int
    children: list[int] = field(default_factory=list)

    @property
    def is_frame(self) -> bool:
        """Whether other boxes are drawn in it."""
        return bool(self.children)


class ShownLine(Struct):
    """A line between two boxes, by their numbers."""

    source: int
    target: int
    route: Route


class Shown(Struct):
    """All boxes, outermost first, and all lines, the heaviest first."""

    boxes: list[ShownBox] = field(default_factory=list)
    lines: list[ShownLine] = field(default_factory=list)

    def key_of_changes(self) -> str:
        """What the signs of a comparison mean, of those that are there."""
        return key_of_changes([*(item.box.change for item in self.boxes), *(line.route.change for line in self.lines)])


def shown(layout: LayoutGraph) -> Shown:
    """The boxes and lines of a picture. O(boxes + routes · log routes)."""
    found = Shown()
    number_of: dict[str, int] = {}
    level: list[tuple[Box, int]] = [(box, -1) for box in layout.boxes]
    while level:  # level by level: where a format has to stop, what is outside is there
        below: list[tuple[Box, int]] = []
        for box, parent in level:
            number = len(found.boxes)
            found.boxes.append(ShownBox(number, box, parent))
            number_of[box.id] = number
            if parent >= 0:
                found.boxes[parent].children.append(number)
            if box.role == "group":
                _close(box, number, number_of)
            else:
                below += [(child, number) for child in box.children]
        level = below
    joined: dict[tuple[int, int, str], ShownLine] = {}
    for route in sorted(layout.routes, key=lambda route: -route.weight):
        source, target = number_of.get(route.source), number_of.get(route.target)
        if source is None or target is None:
            continue
        known = joined.setdefault((source, target, route.medium), ShownLine(source, target, route))
        if known.route is not route:
            known.route = _joined(known.route, route)
    found.lines = list(joined.values())
    return found


def _close(group: Box, number: int, number_of: dict[str, int]) -> None:
    stack = list(group.children)
    while stack:
        box = stack.pop()
        number_of[box.id] = number
        stack += box.children


def _joined(first: Route, second: Route) -> Route:
    return Route(
        source=first.source,
        target=first.target,
        medium=first.medium,
        label=first.label if first.label == second.label else "",
        points=first.points,
        forward=first.forward or second.forward,
        backward=first.backward or second.backward,
        weight=max(first.weight, second.weight),
        links=[*first.links, *second.links],
        change=first.change if first.change == second.change else "changed",
    )
