"""Lines of an SVG picture, with their arrows and words."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from gpuflight.vis.glyph_widths import text_width
from gpuflight.vis.model import LayoutGraph, Route
from gpuflight.vis.render.svg_boxes import RANK, number, triangle
from gpuflight.vis.render.xml_text import xml
from gpuflight.vis.visual import CHANGES, MEDIA, REMOVED_DASH, signed

WORDS_MAX = 400
"""Lines with words in one picture; the heaviest have them."""
_CELL = 96.0
_CORNER = 7.0
Point = tuple[float, float]
Area = tuple[float, float, float, float]


class Lines:
    """Draws the routes of a picture into a layer of lines and one of words."""

    def __init__(self, layout: LayoutGraph, obstacles: Sequence[Area]) -> None:
        self.lines: list[str] = []
        self.words: list[str] = []
        self.media: set[str] = set()
        self.looks: set[str] = set()
        """What the lines are drawn as: their medium, or what a comparison found."""
        self.without_words = 0
        taken = _Space(obstacles)
        marked = _marked(layout)
        drawn = [(at, route) for at, route in enumerate(layout.routes) if len(route.points) > 1]
        thin = 1.0 if len(drawn) <= 400 else max(0.35, math.sqrt(400 / len(drawn)))  # many lines: lighter
        for at, route in drawn:
            self._line(layout, route, thin, marked.get(at, ""))
        for at, severity in marked.items():
            if len(layout.routes[at].points) > 1:
                x, y = _middle(layout.routes[at].points)
                taken.take((x - 9, y - 9, x + 9, y + 9))
                self.words.append(f'<path class="{severity}" d="{triangle(x, y)}"/>')
                self.words.append(f'<text class="m w" x="{number(x)}" y="{number(y + 4.6)}">!</text>')
        for _, route in sorted(drawn, key=lambda each: (not each[1].change, -each[1].weight)):
            if route.label or route.change in CHANGES:
                self._label(route, taken)

    def _line(self, layout: LayoutGraph, route: Route, thin: float, severity: str) -> None:
        self.media.add(route.medium)
        width = (1.2 + 2.2 * min(max(route.weight, 0.0), 1.0)) * thin
        look = _look(route)
        self.looks.add(look)
        dash = MEDIA[route.medium][3] if route.change != "removed" else REMOVED_DASH
        points = _shortened(route)
        path = _path(points)
        if severity:
            self.lines.append(f'<path class="k r-{severity}" d="{path}" stroke-width="{number(width + 5)}"/>')
        parts = [f'<path class="e e-{look}" d="{path}" stroke-width="{number(width)}"']
        if dash:
            parts.append(
                ' stroke-dasharray="{}"'.format(" ".join(number(float(part) * width) for part in dash.split()))
            )
        if len(layout.routes) <= 4000:
            parts.append(f' marker-start="url(#{"a" if route.backward else "o"}-{look})"')
            parts.append(f' marker-end="url(#{"a" if route.forward else "o"}-{look})"')
        elif route.forward or route.backward:
            end = "end" if route.forward else "start"
            parts.append(f' marker-{end}="url(#a-{look})"')
        parts.append(f"><title>{xml(_title(layout, route), 300)}</title></path>")
        self.lines.append("".join(parts))

    def _label(self, route: Route, taken: _Space) -> None:
        look, words = _look(route), signed(route.label[:80], route.change)
        width = text_width(words, 9.5) + 8
        spot = _spot(route, width, taken) if len(self.words) < 2 * WORDS_MAX else None
        if spot is None:
            self.without_words += 1
            return
        x, y = spot
        self.words.append(
            f'<rect class="l-{look}" x="{number(x - width / 2)}" y="{number(y - 6.5)}" width="{number(width)}"'
            f' height="13" rx="4" stroke-width=".7"/>'
        )
        self.words.append(f'<text class="q i-{look}" x="{number(x)}" y="{number(y + 3.4)}">{xml(words)}</text>')


class _Space:
    """What is taken, in cells, so that a look costs the same however many boxes there are."""

    def __init__(self, areas: Sequence[Area]) -> None:
        self._cells: dict[tuple[int, int], list[Area]] = defaultdict(list)
        for area in areas:
            self.take(area)

    def take(self, area: Area) -> None:
        """Nothing else may stand here."""
        for cell in self._over(area):
            self._cells[cell].append(area)

    def free(self, area: Area) -> bool:
        """Whether nothing stands here."""
        x, y, right, bottom = area
        return not any(
            other[0] < right and x < other[2] and other[1] < bottom and y < other[3]
            for cell in self._over(area)
            for other in self._cells.get(cell, ())
        )

    def _over(self, area: Area) -> list[tuple[int, int]]:
        x, y, right, bottom = (math.floor(value / _CELL) for value in area)
        return [(column, row) for column in range(x, right + 1) for row in range(y, bottom + 1)]


def _spot(route: Route, width: float, taken: _Space) -> Point | None:
    """The longest level stretch that has room, never over a card or other words."""
    spots = []
    for (x0, y0), (x1, y1) in pairwise(route.points):
        level = abs(y1 - y0) < 1
        length = math.hypot(x1 - x0, y1 - y0)
        if length <= (width + 6 if level else 20):
            continue
        for share in (0.5, 0.25, 0.75):
            worth = (2 * length if level else length) - (share != 0.5)
            spots.append((-worth, x0 + (x1 - x0) * share, y0 + (y1 - y0) * share))
    spots.sort()
    for _, x, y in spots:
        if taken.free((x - width / 2, y - 7, x + width / 2, y + 7)):
            taken.take((x - width / 2 - 1, y - 7.5, x + width / 2 + 1, y + 7.5))
            return x, y
    return None


def _look(route: Route) -> str:
    return route.change if route.change in CHANGES else route.medium


def _shortened(route: Route) -> list[Point]:
    """The way without the last bit under an arrow, so that no blunt end looks out beside its tip."""
    points = list(route.points)
    if route.forward:
        points[-1] = _before(points[-2], points[-1])
    if route.backward:
        points[0] = _before(points[1], points[0])
    return points


def _before(inner: Point, end: Point) -> Point:
    length = math.hypot(end[0] - inner[0], end[1] - inner[1])
    if length < 6:
        return end
    share = 4 / length
    return end[0] - (end[0] - inner[0]) * share, end[1] - (end[1] - inner[1]) * share


def _path(points: Sequence[Point]) -> str:
    """A way with round corners."""
    parts = [f"M{number(points[0][0])} {number(points[0][1])}"]
    for (px, py), (x, y), (nx, ny) in zip(points, points[1:], points[2:], strict=False):
        before, after = math.hypot(x - px, y - py), math.hypot(nx - x, ny - y)
        radius = min(_CORNER, before / 2, after / 2)
        if radius < 0.5:
            parts.append(f"L{number(x)} {number(y)}")
            continue
        ax, ay = x + (px - x) * radius / before, y + (py - y) * radius / before
        bx, by = x + (nx - x) * radius / after, y + (ny - y) * radius / after
        parts.append(f"L{number(ax)} {number(ay)}Q{number(x)} {number(y)} {number(bx)} {number(by)}")
    parts.append(f"L{number(points[-1][0])} {number(points[-1][1])}")
    return "".join(parts)


def _middle(points: Sequence[Point]) -> Point:
    """The point half-way along a route."""
    lengths = [math.hypot(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(points)]
    left = sum(lengths) / 2
    for (x0, y0), (x1, y1), length in zip(points, points[1:], lengths, strict=False):
        if length and left <= length:
            return x0 + (x1 - x0) * left / length, y0 + (y1 - y0) * left / length
        left -= length
    return points[-1]


def _title(layout: LayoutGraph, route: Route) -> str:
    arrow = "↔" if route.forward and route.backward else "→" if route.forward else "←" if route.backward else "—"
    what = route.label or MEDIA[route.medium][0]
    return f"{signed(what, route.change)}: {route.source[:100]} {arrow} {route.target[:100]}"


def _marked(layout: LayoutGraph) -> dict[int, str]:
    """Routes whose links a finding names, with the worst that is said."""
    named: dict[str, str] = {}
    for finding in layout.findings:
        for name in finding.edges:
            if RANK[finding.severity] > RANK[named.get(name, "")]:
                named[name] = finding.severity
    found: dict[int, str] = {}
    if named:
        for link in layout.links:
            severity = named.get(f"{link.kind}({link.source}->{link.target})", "") if link.route >= 0 else ""
            if RANK[severity] > RANK[found.get(link.route, "")]:
                found[link.route] = severity
    return found
