"""The layout ``gephi``: what is wired together stands together, by forces, as Gephi's ForceAtlas2 would place it."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from gpuflight.graph import Graph
from gpuflight.vis.base import Layout, LayoutOptions
from gpuflight.vis.layout.bundle import Bundle, Bundles
from gpuflight.vis.layout.cards import CHIP_H, TEXT
from gpuflight.vis.layout.flat import Flat
from gpuflight.vis.layout.force import numpy, solve, unit_of
from gpuflight.vis.layout.item import Item
from gpuflight.vis.layout.pack import CHIP_GAP, pack_inside
from gpuflight.vis.layout.picture import MARGIN, finish
from gpuflight.vis.layout.spread import apart, make_room
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.text import width

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

WIDE = 1.5  # the picture is stretched sideways, as are its boxes
EVEN = 0.7  # how evenly the boxes of a part are spread over it, 0 to 1
FILLED = 0.4  # about the share of the picture that boxes cover
LABEL_MAX_W = 150.0
SCALE_MIN, SCALE_MAX = 0.7, 3.2
PART_GAP = 48.0  # between parts that no line joins
SMALL_PART = 3
_PULL = {"Host": 0.2, "AttachedTo": 0.6, "Affinity": 0.4, "HasAttribute": 0.5}
"""How much an edge of a kind pulls, where not 1: that a process runs on its host says little about it."""


class GephiLayout(Layout):
    """What is wired together stands together, whatever holds it: a force-directed picture (ForceAtlas2)."""

    name = "gephi"
    stability = "beta"

    def layout(self, graph: Graph, options: LayoutOptions) -> LayoutGraph:
        """See Layout.layout. Starts from ``options.previous`` if that has places for most of what is shown. Raises
        MissingExtra without numpy."""
        numpy()
        flat = Flat(graph, options)
        bundles = Bundles(flat, nested=False)
        shown = flat.root.children
        drawn = list(bundles.bundles.values())
        numbers = {id(item): number for number, item in enumerate(shown)}
        ends = [(numbers[id(bundle.first)], numbers[id(bundle.second)]) for bundle in drawn]
        size(shown, ends)
        place_all(shown, ends, [_pull(bundle, bundles) for bundle in drawn], options.previous)
        _route(drawn)
        bundles.weigh()
        return finish(self.name, flat, bundles, drawn)


def _pull(bundle: Bundle, bundles: Bundles) -> float:
    return max(_PULL.get(bundles.links[index].kind, 1.0) for index in bundle.links)


def size(shown: list[Item], ends: list[tuple[int, int]]) -> None:
    """Every entity is one line of text; the more it is wired to, the larger."""
    wired = [0] * len(shown)
    for first, second in ends:
        wired[first] += 1
        wired[second] += 1
    for item, lines in zip(shown, wired, strict=True):
        scale = min(SCALE_MAX, SCALE_MIN + 0.3 * math.log2(1 + lines))
        if item.folds:
            pack_inside(item)
        else:
            item.role = "chip"
            item.lines, item.bars = (), ()
            item.w = min(LABEL_MAX_W, max(44.0, width(item.label, TEXT) + 31))
            item.h = CHIP_H
        item.scale = scale
        item.w *= scale
        item.h *= scale
        item.header *= scale


def place_all(shown: list[Item], ends: list[tuple[int, int]], pulls: list[float], previous: LayoutGraph | None) -> None:
    np = numpy()
    if not shown:
        return
    halves = np.array([(item.w / 2, item.h / 2) for item in shown])
    joined, pulled = np.array(ends, dtype=np.int64).reshape(-1, 2), np.array(pulls)
    known = _known(shown, previous)
    if known is not None:
        places, placed = _resettle(known, halves, joined, pulled)
    else:
        places, placed = np.zeros((len(shown), 2)), np.zeros(len(shown), dtype=bool)
        placed[joined.ravel()] = True
        _place_parts(places, halves, joined, pulled)
    low, high = _bounds(places[placed], halves[placed])
    _row_up([shown[at] for at in np.flatnonzero(~placed)], places, ~placed, halves, low, high)
    low, _ = _bounds(places, halves)
    shift = MARGIN - low if known is None else np.maximum(0.0, MARGIN - low)
    corners = places + shift - halves
    for item, (x, y) in zip(shown, corners.tolist(), strict=True):
        item.x, item.y = x, y


def _place_parts(places: Floats, halves: Floats, ends: Any, pulls: Floats) -> None:
    """Set the middles of boxes that are wired to others: each connected part by forces, the parts in rows, the largest
    first."""
    np = numpy()
    part_of = parts(len(places), ends)
    order = np.argsort(part_of[ends[:, 0]], kind="stable") if len(ends) else np.zeros(0, dtype=np.int64)
    by_part: dict[int, list[int]] = defaultdict(list)
    for node in sorted(set(ends.ravel().tolist())):
        by_part[int(part_of[node])].append(node)
    edge_parts = part_of[ends[:, 0]][order]
    numbers = np.zeros(len(places), dtype=np.int64)
    laid: list[tuple[float, float, list[int]]] = []
    for label, members in by_part.items():
        edges = order[np.searchsorted(edge_parts, label, "left") : np.searchsorted(edge_parts, label, "right")]
        numbers[members] = np.arange(len(members))
        mine = halves[members]
        alone = len(members) <= SMALL_PART
        found = _string(mine) if alone else _forced(mine, numbers[ends[edges]], pulls[edges])
        low, high = _bounds(found, mine)
        places[members] = found - low
        laid.append((float(high[0] - low[0]), float(high[1] - low[1]), members))
    laid.sort(key=lambda part: (-part[0] * part[1], part[2][0]))
    gap = PART_GAP if len(laid) <= 40 else CHIP_GAP * 2
    total = sum((w + gap) * (h + gap) for w, h, _ in laid)
    across = max([math.sqrt(total * 1.7), *(w for w, _, _ in laid)])
    x = y = row = 0.0
    for w, h, members in laid:
        if x and x + w > across:
            x, y, row = 0.0, y + row + gap, 0.0
        places[members] += (x, y)
        x += w + gap
        row = max(row, h)


def _string(halves: Floats) -> Floats:
    """Two or three boxes under each other."""
    np = numpy()
    tops = np.cumsum(2 * halves[:, 1] + 2 * CHIP_GAP)
    return np.stack((halves[:, 0], tops - halves[:, 1]), axis=1)  # type: ignore[no-any-return]


def parts(count: int, ends: Any) -> Any:
    """For each node the lowest number of those it is joined to, directly or not."""
    np = numpy()
    above = list(range(count))
    for one, two in ends.tolist():
        while above[one] != one:
            above[one] = one = above[above[one]]
        while above[two] != two:
            above[two] = two = above[above[two]]
        if one != two:
            above[max(one, two)] = min(one, two)
    for at in range(count):
        above[at] = above[above[at]]  # the lower one is done already
    return np.array(above, dtype=np.int64)


def _forced(halves: Floats, ends: Any, pulls: Floats) -> Floats:
    """Middles of the boxes of one part, by forces, no two on each other."""
    np = numpy()
    places = _even(solve(len(halves), ends, pulls)) * np.array((WIDE, 1.0))
    covered = float((4 * (halves[:, 0] + CHIP_GAP) * (halves[:, 1] + CHIP_GAP)).sum())
    spread = places.std(axis=0)
    area = float(spread[0] * spread[1]) * 12 or 1.0  # a rectangle has 12 times the product of its deviations
    return apart(places * math.sqrt(covered / FILLED / area), halves, CHIP_GAP)


def _even(places: Floats) -> Floats:
    """Forces leave a dense core and a thin rim, of which a picture shows little but the emptiness: distances from the
    middle are drawn towards those of a disc filled evenly. Directions and the order of the distances stay."""
    np = numpy()
    count = len(places)
    places = places - np.median(places, axis=0)
    distance = np.sqrt((places**2).sum(axis=1)) + 1e-9
    rank = np.empty(count)
    rank[np.argsort(distance, kind="stable")] = np.arange(count) + 0.5
    even = np.sqrt(rank / count) * np.quantile(distance, 0.8) / math.sqrt(0.8)
    return places * ((1 - EVEN) + EVEN * even / distance)[:, None]  # type: ignore[no-any-return]


def _resettle(known: Floats, halves: Floats, ends: Any, pulls: Floats) -> tuple[Floats, Any]:
    """The known middles, with new boxes amid what they are wired to; and which boxes have a place now."""
    np = numpy()
    places, loose, placed = _fill(known, ends)
    kept = placed[ends].all(axis=1)
    inner = np.flatnonzero(placed)
    ends, pulls = (np.cumsum(placed) - 1)[ends[kept]], pulls[kept]
    stretch = np.array((WIDE, 1.0))
    middle = places[inner].mean(axis=0)
    flat = (places[inner] - middle) / stretch
    unit = unit_of(flat, ends, pulls)
    settled = solve(len(inner), ends, pulls, flat / unit, loose[inner]) * unit * stretch + middle
    places[inner] = make_room(settled, halves[inner], loose[inner], CHIP_GAP)
    return places, placed


def _known(shown: list[Item], previous: LayoutGraph | None) -> Floats | None:
    """Middles in the previous picture, not a number where there is none; None when that is of little use."""
    if previous is None or previous.layout != GephiLayout.name:
        return None
    np = numpy()
    nan = math.nan
    before = {box.id: (box.x + box.w / 2, box.y + box.h / 2) for box in previous.boxes}
    known = np.array([before.get(item.id, (nan, nan)) for item in shown])
    return known if np.isnan(known[:, 0]).mean() < 0.5 else None


def _fill(known: Floats, ends: Any) -> tuple[Floats, Floats, Any]:
    """Places for the new ones amid what they are wired to; how far each may move (the new ones freely, what they are
    wired to a little, the rest not); and which have a place, since new ones may be wired to nothing known."""
    np = numpy()
    count = len(known)
    new = np.isnan(known[:, 0])
    places = known.copy()
    unsure = new.copy()
    for _ in range(4):  # from what stands outwards
        one, two = np.concatenate((ends, ends[:, ::-1])).T
        usable = unsure[one] & ~unsure[two]
        many = np.bincount(one[usable], minlength=count)
        found = many > 0
        for axis in (0, 1):
            sums = np.bincount(one[usable], places[two[usable], axis], count)
            places[found, axis] = sums[found] / many[found]
        unsure &= ~found
    turn = np.arange(count) * 2.399963229728653
    places[new] += 30.0 * np.stack((np.cos(turn), np.sin(turn)), axis=1)[new]
    places[unsure] = 0.0
    loose = np.zeros(count)
    loose[ends[new[ends].any(axis=1)].ravel()] = 0.1
    loose[new] = 1.0
    return places, loose, ~unsure


def _bounds(places: Floats, halves: Floats) -> tuple[Any, Any]:
    np = numpy()
    if not len(places):
        return np.zeros(2), np.zeros(2)
    return (places - halves).min(axis=0), (places + halves).max(axis=0)


def _row_up(alone: list[Item], places: Floats, which: Any, halves: Floats, low: Any, high: Any) -> None:
    """What is wired to nothing: in rows under the rest."""
    np = numpy()
    area = sum((item.w + CHIP_GAP) * (item.h + CHIP_GAP) for item in alone)
    across = max(float(high[0] - low[0]), math.sqrt(area * 1.6))
    x = row = 0.0
    y = 3 * CHIP_H if high[1] > low[1] else 0.0
    corners = []
    for item in alone:
        if x and x + item.w > across:
            x, y, row = 0.0, y + row + CHIP_GAP, 0.0
        corners.append((x, y))
        x += item.w + CHIP_GAP
        row = max(row, item.h)
    if alone:
        places[which] = np.array(corners) + np.array((float(low[0]), float(high[1]))) + halves[which]


def _route(drawn: list[Bundle]) -> None:
    """Straight from border to border; lines of several media between two boxes run side by side."""
    beside: dict[tuple[str, str], int] = {}
    for bundle in drawn:
        a, b = bundle.first, bundle.second
        ax, ay, bx, by = a.x + a.w / 2, a.y + a.h / 2, b.x + b.w / 2, b.y + b.h / 2
        dx, dy = bx - ax, by - ay
        pair = (a.id, b.id)
        lane = beside[pair] = beside.get(pair, -1) + 1
        if lane:
            length = math.hypot(dx, dy) or 1.0
            aside = 4.0 * ((lane + 1) // 2) * (-1 if lane % 2 else 1)
            limit = min(a.h, b.h) / 2.5
            aside = max(-limit, min(limit, aside))
            ox, oy = -dy / length * aside, dx / length * aside
            ax, ay, bx, by = ax + ox, ay + oy, bx + ox, by + oy
        start, end = _reach(a, dx, dy), _reach(b, dx, dy)
        if start + end >= 1.0:
            start = end = 0.0
        bundle.points = [_within(a, ax + dx * start, ay + dy * start), _within(b, bx - dx * end, by - dy * end)]


def _reach(item: Item, dx: float, dy: float) -> float:
    """The share of a way (dx, dy) from the middle of a box that lies in it."""
    return min(item.w / 2 / abs(dx) if dx else math.inf, item.h / 2 / abs(dy) if dy else math.inf, 0.5)


def _within(item: Item, x: float, y: float) -> tuple[float, float]:
    return min(max(x, item.x), item.x + item.w), min(max(y, item.y), item.y + item.h)
