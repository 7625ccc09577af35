"""The working box of the nested layout: an entity or group on its way to a place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuflight.vis.model import Bar, Role

if TYPE_CHECKING:
    from gpuflight.graph import Entity


class Item:
    """One box being laid out. ``x, y`` are relative to the parent's content until ``place`` makes them absolute;
    ``content_scale`` shrinks everything inside (groups)."""

    __slots__ = (
        "bars", "child_links", "children", "content_scale", "count", "depth", "entity", "folds", "ground", "group", "h",
        "header", "id", "kind", "label", "lines", "missing", "ns", "order", "parent", "role", "rows", "rule", "scale",
        "score", "w", "x", "y",
    )  # fmt: skip

    def __init__(self, item_id: str, kind: str, entity: Entity | None = None, label: str = "", ns: str = "") -> None:
        self.id = item_id
        self.kind = kind
        self.entity = entity
        self.ns = entity.ns if entity is not None else ns
        self.label = label
        self.parent: Item | None = None
        self.children: list[Item] = []
        self.depth = 0
        self.missing = False  # named by an edge, not in the graph
        self.role: Role = "card"
        self.lines: Sequence[str] = ()  # most have none, and an empty list each would be a third of their memory
        self.bars: Sequence[Bar] = ()
        self.rule = ""
        self.count = 1
        self.score = 0.0  # how much it is worth showing; set by scoring, read by folding
        self.ground = False  # something in it is wired to the hardware below
        self.folds = False  # its children are drawn small inside it
        self.group: Item | None = None  # the outermost one around it that folds; set with the depth
        self.order = 0.0
        self.child_links = 0  # drawn lines between its children: they need room between the rows
        self.x = self.y = self.w = self.h = 0.0
        self.header = 0.0
        self.scale = 1.0
        self.content_scale = 1.0
        self.rows: Sequence[tuple[float, float]] = ()  # top and bottom of each row of children, relative

    def __repr__(self) -> str:
        return f"<{self.role} {self.id} {len(self.children)}>"

    def adopt(self, child: Item) -> None:
        """Make ``child`` the last child of this item; its old parent must have let go of it."""
        child.parent = self
        self.children.append(child)


def walk(root: Item) -> list[Item]:
    """``root`` and everything under it, parents first, siblings in order; no recursion."""
    found: list[Item] = []
    add = found.append
    stack = [root]
    pop, push = stack.pop, stack.extend
    while stack:
        item = pop()
        add(item)
        if item.children:
            push(item.children[::-1])
    return found


def common_ancestor(first: Item, second: Item) -> Item:
    """The smallest item around both (or the one that is around the other). Depths must be set."""
    while first is not second:
        if first.depth < second.depth:
            first, second = second, first
        if first.parent is None:
            return first
        first = first.parent
    return first


def nearest(item: Item, kinds: frozenset[str]) -> Item | None:
    """The item itself or the nearest one around it that is of one of ``kinds``."""
    found: Item | None = item
    while found is not None and found.kind not in kinds:
        found = found.parent
    return found


def set_depths(root: Item) -> list[Item]:
    """Set depth and group of everything under ``root``; gives it and all under it that hold others, parents first."""
    root.depth = 0
    boxes = [root]
    for box in boxes:  # grows while it is read
        depth = box.depth + 1
        group = box.group or (box if box.folds else None)
        for child in box.children:
            child.depth = depth
            child.group = group
            if child.children:
                boxes.append(child)
    return boxes


def walk_boxes(root: Item) -> list[Item]:
    """``root`` and all under it that hold others, as ``walk`` meets them."""
    found: list[Item] = []
    stack = [root]
    while stack:
        box = stack.pop()
        found.append(box)
        stack += [child for child in reversed(box.children) if child.children]
    return found


def boxes_in(root: Item) -> list[Item]:
    """``root`` and all under it that hold others, parents first."""
    boxes = [root]
    for box in boxes:
        boxes += [child for child in box.children if child.children]
    return boxes


_NUMBER = re.compile("([0-9]+)")


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which ``gpu10`` follows ``gpu9``."""
    parts = _NUMBER.split(text[:80])
    if len(parts) == 1:
        return ((1, 0, text),)
    return tuple((0, int(part), "") if at % 2 else (1, 0, part) for at, part in enumerate(parts) if part)
