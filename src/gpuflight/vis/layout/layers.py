"""Layers and their order by the package fast-sugiyama (MIT; layered drawing after Sugiyama, Tagawa and Toda, 1981),
places by us, since it knows nothing of the sizes of boxes."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from gpuflight.errors import MissingExtra
from gpuflight.vis.layout.item import Item

GAP_X, GAP_Y = 20.0, 34.0
LANE = 5.0
SWEEPS = 6
REDUCED_MAX = 400
RATIO = 1.9  # width to height, beyond which a layer is several rows
WIDTH_MIN = 1600.0


class Layers:
    """Boxes and what must stand above what, never in a circle."""

    def __init__(self, boxes: list[Item]) -> None:
        self.boxes = boxes
        self.below: dict[Item, list[Item]] = defaultdict(list)
        self.above: dict[Item, list[Item]] = defaultdict(list)
        self.count = 0

    @staticmethod
    def require() -> Any:
        """The function that orders layers. Raises MissingExtra without its package."""
        try:
            from fast_sugiyama import from_edges
        except ImportError:
            raise MissingExtra("fast-sugiyama", "vis", "the layout constraint") from None
        return from_edges

    def add(self, upper: Item, lower: Item, most: int) -> bool:
        """Let ``upper`` stand above ``lower``; False if there are ``most`` such already. What would close a circle is
        left to the ones before it."""
        if upper is lower or lower in self.below[upper] or self._leads(lower, upper):
            return True
        if self.count >= most:
            return False
        self.count += 1
        self.below[upper].append(lower)
        self.above[lower].append(upper)
        return True

    def _leads(self, source: Item, target: Item) -> bool:
        seen = {source}
        pending = [source]
        while pending:
            for item in self.below[pending.pop()]:
                if item is target:
                    return True
                if item not in seen:
                    seen.add(item)
                    pending.append(item)
        return False

    def _told(self) -> dict[Item, list[Item]]:
        """``below`` without what follows from the rest: long lines that only repeat it lead the order astray."""
        if self.count > REDUCED_MAX:
            return self.below
        told: dict[Item, list[Item]] = {}
        for upper, lowers in list(self.below.items()):
            told[upper] = [
                lower
                for lower in lowers
                if not any(self._leads(other, lower) for other in lowers if other is not lower)
            ]
        return told

    def ordered(self) -> tuple[list[list[Item]], list[Item]]:
        """The layers from top to bottom, each from left to right; and the boxes without any order."""
        told = self._told()
        joined = [item for item in self.boxes if self.below[item] or self.above[item]]
        number = {item: at for at, item in enumerate(joined)}
        edges = [(number[upper], number[lower]) for upper in joined for lower in told.get(upper, ())]
        rows: dict[int, list[tuple[int, float, int]]] = defaultdict(list)
        found = self.require()(edges, ranking_type="minimize", transpose=True, check_layout=False) if edges else []
        parts = []
        for part in found:
            places = {node: place for node, place in part[0] if node < len(joined)}  # others are bends of lines
            parts.append((min(places), places))
        for at, (_, places) in enumerate(sorted(parts, key=lambda part: part[0])):
            sign = -1 if _falls(places, edges) else 1
            levels = sorted({sign * y for _, y in places.values()})
            rank = {level: level_at for level_at, level in enumerate(levels)}
            for node, (x, y) in places.items():
                rows[rank[sign * y]].append((at, x, node))
        layers = [[joined[node] for _, _, node in sorted(rows[level])] for level in sorted(rows)]
        return layers, [item for item in self.boxes if item not in number]


def _falls(places: dict[int, tuple[float, float]], edges: list[tuple[int, int]]) -> bool:
    """Whether the y of the library gets smaller downwards."""
    upper, lower = next((one, two) for one, two in edges if one in places)
    return places[upper][1] > places[lower][1]


def place_layers(root: Item, layers: Layers) -> None:
    """Set the places of the boxes in ``root``, whose sizes are known, and its rows."""
    ordered, alone = layers.ordered()
    area = sum((item.w + GAP_X) * (item.h + GAP_Y * 1.5) for item in root.children)
    most = max([WIDTH_MIN, math.sqrt(area * RATIO), *(item.w for item in root.children)])
    rows: list[list[Item]] = []
    for layer in ordered:
        rows.extend(_split(layer, most))
    _align(rows, layers, most)
    left = min((item.x for row in rows for item in row), default=0.0)
    for row in rows:
        for item in row:
            item.x -= left
    right = max((item.x + item.w for row in rows for item in row), default=0.0)
    rows.extend(_fill(alone, max(right, math.sqrt(area * RATIO))))
    root.rows = []
    y = 0.0
    for row in rows:
        height = max(item.h for item in row)
        for item in row:
            item.y = y
        root.rows.append((y, y + height))
        lines = sum(len(layers.below[item]) for item in row)
        y += height + GAP_Y + min(70.0, LANE * lines / 2)


def _split(layer: list[Item], most: float) -> list[list[Item]]:
    """A layer that is too wide as several rows; neighbours stand under each other."""
    total = sum(item.w + GAP_X for item in layer)
    count = max(1, math.ceil(total / most))
    return [row for at in range(count) if (row := layer[at::count])]


def _fill(items: list[Item], most: float) -> list[list[Item]]:
    rows: list[list[Item]] = []
    x = 0.0
    for item in items:
        if not rows or x + item.w > most:
            rows.append([])
            x = 0.0
        item.x = x
        x += item.w + GAP_X
        rows[-1].append(item)
    return rows


def _align(rows: list[list[Item]], layers: Layers, most: float) -> None:
    """Each box as near as its neighbours in the row let it to the middle of what it is joined to."""
    for row in rows:
        x = (most - sum(item.w + GAP_X for item in row)) / 2
        for item in row:
            item.x = x
            x += item.w + GAP_X
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = []
            for item in row:
                ends = layers.above[item] if sweep % 2 == 0 else layers.below[item]
                ends = ends or layers.above[item] + layers.below[item]
                middle = sum(end.x + end.w / 2 for end in ends) / len(ends)
                wanted.append(middle - item.w / 2)
            for item, x in zip(row, _apart(row, wanted), strict=True):
                item.x = x


def _apart(row: list[Item], wanted: list[float]) -> list[float]:
    """The places nearest to the wanted ones (least squares) that keep the order and the gaps: pooled neighbours."""
    offsets = [0.0]
    for item in row[:-1]:
        offsets.append(offsets[-1] + item.w + GAP_X)
    pools: list[tuple[float, int]] = []  # sum and number of those that stand gap to gap
    for want, offset in zip(wanted, offsets, strict=True):
        total, count = want - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            before, many = pools.pop()
            total, count = total + before, count + many
        pools.append((total, count))
    means = [total / count for total, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]
