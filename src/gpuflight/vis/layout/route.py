"""Ways of the lines: down from a box into the gutter between the rows, along a lane of their own, and down (or up) to
the other box. Neighbours in a row are joined straight across."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable

from gpuflight.vis.layout.bundle import Bundle
from gpuflight.vis.layout.item import Item

PORT_GAP = 9.0
INSET = 10.0
LANES_MAX = 40  # more than a gutter has room for: the rest shares the last


class _Way:
    """A line while it is being routed: where it leaves and enters, and in which gutter it crosses over."""

    __slots__ = ("bundle", "gutter", "lane", "xa", "xb")

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.xa = self.xb = 0.0
        self.gutter = (0, 0.0, 0.0)  # which one, its top and bottom
        self.lane = 0


_End = tuple[float, str, str, str, int, _Way, bool]
"""An end of a line at a side of a box: where its other end is, what tells it from others there, which way it is of."""


def route(bundles: Iterable[Bundle]) -> None:
    """Set ``points`` of every bundle; places must be absolute."""
    ways: list[_Way] = []
    bottoms: dict[Item, list[float]] = {}  # of the rows of a box
    sides: dict[tuple[int, str], list[_End]] = defaultdict(list)
    for number, bundle in enumerate(bundles):
        box, below_a, below_b = bundle.inner
        a, b = bundle.first, bundle.second
        if box is a or box is b:
            _inward(bundle, *((a, b) if box is a else (b, a)), flipped=box is b)
            continue
        rows = bottoms.get(box)
        if rows is None:
            bottoms[box] = rows = [bottom for _, bottom in box.rows]
        row_a, row_b = _row(box, rows, below_a), _row(box, rows, below_b)
        if row_a == row_b and below_a is a and below_b is b and _straight(bundle, a, b, box):
            continue
        way = _Way(bundle)
        way.xa, way.xb = _meet(a, b)
        ways.append(way)
        if row_a == row_b:
            side_a = side_b = "bottom"
            upper = row_a
        elif row_a < row_b:
            side_a, side_b, upper = "bottom", "top", row_b - 1
        else:
            side_a, side_b, upper = "top", "bottom", row_a - 1
        way.gutter = _gutter(box, upper, below_a, below_b)
        sides[id(a), side_a].append((way.xb, bundle.medium, a.id, b.id, number, way, True))
        sides[id(b), side_b].append((way.xa, bundle.medium, a.id, b.id, number, way, False))
    for ends in sides.values():
        if len(ends) > 1:
            _spread(ends)
    _assign_lanes(ways)


def _row(box: Item, bottoms: list[float], child: Item) -> int:
    """Index of the row of ``box`` that ``child`` stands in, by its middle."""
    if len(bottoms) < 2:
        return 0
    return min(bisect_left(bottoms, child.y - box.y + child.h / 2), len(bottoms) - 1)


def _gutter(box: Item, upper: int, below_a: Item, below_b: Item) -> tuple[int, float, float]:
    rows = box.rows
    if not rows:  # inside a group: lines are not laid out there
        y = max(below_a.y + below_a.h, below_b.y + below_b.h)
        return (id(box), y, y + 4)
    offset = box.y
    top = offset + rows[upper][1]
    bottom = offset + rows[upper + 1][0] if upper + 1 < len(rows) else box.y + box.h
    return (id(box), top, max(bottom, top + 4))


def _meet(a: Item, b: Item) -> tuple[float, float]:
    """Where a line leaves ``a`` and enters ``b``: straight down if they overlap, else at the near ends."""
    left, right = max(a.x, b.x) + INSET, min(a.x + a.w, b.x + b.w) - INSET
    if left <= right:
        middle = (left + right) / 2
        return middle, middle
    return _clamp(b.x + b.w / 2, a), _clamp(a.x + a.w / 2, b)


def _clamp(x: float, item: Item) -> float:
    inset = min(INSET, item.w / 3)
    left, right = item.x + inset, item.x + item.w - inset
    return right if x > right else left if x < left else x


def _spread(ends: list[_End]) -> None:
    """Keep the ends at one side of a box apart, in the order of their other ends."""
    ends.sort()
    *_, way, is_first = ends[0]
    item = way.bundle.first if is_first else way.bundle.second
    inset = min(INSET, item.w / 3)
    low, high = item.x + inset, item.x + item.w - inset
    gap = min(PORT_GAP, (high - low) / (len(ends) - 1))
    at = low
    places: list[float] = []
    for *_, way, is_first in ends:
        wanted = way.xa if is_first else way.xb
        places.append(wanted if wanted > at else at)
        at = places[-1] + gap
    most = high
    for index in range(len(places) - 1, -1, -1):
        places[index] = most = min(places[index], most)
        most -= gap
    for place, (*_, way, is_first) in zip(places, ends, strict=True):
        if is_first:
            way.xa = place
        else:
            way.xb = place


def _assign_lanes(ways: list[_Way]) -> None:
    gutters: dict[tuple[int, float, float], list[tuple[float, float, str, str, int, _Way]]] = defaultdict(list)
    for number, way in enumerate(ways):
        left, right = (way.xa, way.xb) if way.xa < way.xb else (way.xb, way.xa)
        gutters[way.gutter].append((left, -right, way.bundle.first.id, way.bundle.second.id, number, way))
    for (_, top, bottom), crossing in gutters.items():
        crossing.sort()
        ends: list[float] = []  # where the last line of each lane ends
        for left, right, _, _, _, way in crossing:
            right = -right
            if right - left < 1.0:
                way.lane = -1
                continue
            free = left - 4
            if ends and min(ends) < free:
                way.lane = next(lane for lane, end in enumerate(ends) if end < free)
                ends[way.lane] = right
            elif len(ends) < LANES_MAX:
                way.lane = len(ends)
                ends.append(right)
            else:
                way.lane = LANES_MAX - 1
                ends[-1] = max(ends[-1], right)
        step = (bottom - top) / (len(ends) + 1)
        for *_, way in crossing:
            _draw(way, top + step * (way.lane + 1))


def _draw(way: _Way, lane_y: float) -> None:
    a, b = way.bundle.first, way.bundle.second
    start_y = a.y + a.h if a.y + a.h <= lane_y else a.y
    end_y = b.y + b.h if b.y + b.h <= lane_y else b.y
    if way.lane < 0:
        way.bundle.points = [(way.xa, start_y), (way.xb, end_y)]
    else:
        way.bundle.points = [(way.xa, start_y), (way.xa, lane_y), (way.xb, lane_y), (way.xb, end_y)]


def _straight(bundle: Bundle, a: Item, b: Item, box: Item) -> bool:
    """Join two boxes of one row across the gap between them, if nothing stands between."""
    left, right = (a, b) if a.x < b.x else (b, a)
    x0, x1 = left.x + left.w, right.x
    if x1 < x0 or x1 - x0 > 60:
        return False
    top, bottom = max(a.y, b.y), min(a.y + a.h, b.y + b.h)
    if bottom - top < 8:
        return False
    media = ("gpu", "network", "ipc", "storage", "data", "fabric")
    slot = media.index(bundle.medium) if bundle.medium in media else len(media)
    y = top + (bottom - top) * (slot + 1) / (len(media) + 2)
    points = [(x0, y), (x1, y)]
    bundle.points = points if left is a else points[::-1]
    return True


def _inward(bundle: Bundle, outer: Item, inner: Item, flipped: bool) -> None:
    """From the header of a box down to something inside it."""
    x = inner.x + inner.w / 2 + {"ipc": 0.0, "network": -8.0, "deploy": 8.0}.get(bundle.medium, 4.0) * inner.scale
    points = [(x, outer.y + outer.header), (x, inner.y)]
    bundle.points = points[::-1] if flipped else points
