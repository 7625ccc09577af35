"""Boxes of an SVG picture: frames below the lines, cards, chips and words above them.

Every box is drawn in units of its own text: what stands small inside a group is the same drawing, scaled.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuflight.vis.glyph_widths import cut_to, text_width
from gpuflight.vis.model import Bar, Box, LayoutGraph
from gpuflight.vis.render.xml_text import xml
from gpuflight.vis.visual import CHANGES, GLYPHS, SLICES, signed

TEXT_MIN = 1.5
"""Letters smaller than this, in units of the picture, are left out: nobody zooms so far in. Titles stay."""
TITLE_LIMIT = 300
_SLICES = frozenset(kind for kind, _, _ in SLICES.values())
RANK = {"": 0, "info": 1, "warn": 2, "critical": 3}


def number(value: float) -> str:
    """A coordinate, as short as it can be without being seen."""
    text = f"{value:.2f}" if abs(value) >= 1 else f"{value:.4f}"
    text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


class Boxes:
    """Draws the boxes of a picture into two layers; knows which glyphs and categories they used."""

    def __init__(self, layout: LayoutGraph) -> None:
        self.frames: list[str] = []
        self.cards: list[str] = []
        self.glyphs: set[str] = set()
        self.categories: set[str] = set()
        self.looks: set[str] = set()
        """What a comparison found of them."""
        self.obstacles: list[tuple[float, float, float, float]] = []
        """What no word of a line may cover: x, y, right, bottom."""
        self._severity = severities(layout)
        self._ticks: list[str] = []
        for box, inside in in_order(layout):
            self._draw(box, inside)
        self.frames += self._ticks  # seen through the frames of the lanes

    def _draw(self, box: Box, inside: bool) -> None:
        self.categories.add(box.category)
        scale = box.scale or 1.0
        width, height = box.w / scale, box.h / scale
        place = f'<g transform="translate({number(box.x)} {number(box.y)})'
        place += f'scale({scale:.5g})">' if scale != 1.0 else '">'
        name = f"<title>{xml(self._name(box), TITLE_LIMIT)}</title>"
        dashed = " d" if box.missing or (box.synthetic and box.role != "group" and box.kind != "Timeline") else ""
        if box.role == "frame":
            rect = f'<rect class="f-{box.category}{dashed}" width="{number(width)}" height="{number(height)}" rx="9"/>'
            words = self._words(box, 9.0, width, scale, framed=True)
            if inside:
                self.cards.append(f"{place}{name}{rect}{words}{self._change(box, width, height)}</g>")
                return
            self.frames.append(f"{place}{name}{rect}</g>")
            right = box.x + min(width, _head_width(box)) * scale
            self.obstacles.append((box.x, box.y, right, box.y + max(box.header, 22 * scale)))
            self.cards.append(f"{place}{words}{self._marks(box, width, height)}</g>")
            return
        if not inside:
            self.obstacles.append((box.x, box.y, box.x + box.w, box.y + box.h))
        if box.kind in _SLICES:
            self.cards.append(f"{place}{name}{_slice(box)}{self._change(box, width, height)}</g>")
            return
        if box.kind == "Tick":
            self._ticks.append(_tick(box))
            return
        chip = height < 22
        if (10.5 if chip else 12.0) * scale < TEXT_MIN:
            speck = f'<rect class="p-{box.category}" width="{number(width)}" height="{number(height)}" rx="5"/>'
            self.cards.append(f"{place}{name}{speck}{self._marks(box, width, height)}</g>")
            return
        size = f'width="{number(width)}" height="{number(height)}"'
        parts = [place, name]
        if box.role == "group":
            parts.append(f'<rect class="a-{box.category}" x="3" y="3" {size} rx="6"/>')
        radius = min(10.0, height / 2) if chip and box.role != "group" else 6.0
        parts.append(f'<rect class="a-{box.category}{dashed}" {size} rx="{number(radius)}"/>')
        if not chip:
            edge = number(height - 6)
            parts.append(
                f'<path class="k-{box.category}" d="M3.5 0V{number(height)}A6 6 0 0 1 0 {edge}V6A6 6 0 0 1 3.5 0z"/>'
            )
        parts.append(self._words(box, 7.0 if chip else 10.0, width, scale, framed=False))
        parts.append(self._marks(box, width, height))
        parts.append("</g>")
        self.cards.append("".join(parts))

    def _name(self, box: Box) -> str:
        """What a reader's pointer is told."""
        label = signed(box.label, box.change)
        if box.role == "group":
            return f"{label}: {box.rule}" if box.rule else label
        if box.kind in _SLICES:
            return "\n".join((label, *box.lines))
        return label if box.synthetic or box.label == box.id else f"{label}\n{box.id}"

    def _words(self, box: Box, left: float, width: float, scale: float, *, framed: bool) -> str:
        height = box.h / scale
        chip = height < 22 and not framed
        size = 10.5 if chip else 12.0
        if size * scale < TEXT_MIN:
            return ""
        middle = height / 2 if chip else 13.0
        glyph = 11 if chip else 14
        kind = _kind_of(box)
        kind = kind if kind in GLYPHS else "?"
        self.glyphs.add(kind)
        halo = f" h h-{box.category}" if framed else ""
        text_x = left + glyph + 5
        room = width - text_x - (20 if self._severity.get(box.id) else 6)
        label = cut_to(_said(box.label), room, size, bold=not chip)
        parts = [
            f'<use href="#g-{kind.replace("?", "unknown")}" class="g g-{box.category}" x="{number(left)}"'
            f' y="{number(middle - glyph / 2)}" width="{glyph}" height="{glyph}"/>'
        ]
        if label:
            look = "c" if chip else "t"
            parts.append(
                f'<text class="{look}{halo}" x="{number(text_x)}" y="{number(middle + size * 0.36)}">'
                f"{xml(label)}</text>"
            )
        if chip:
            return "".join(parts)
        y = 31.0
        for line in box.lines:
            shown = cut_to(_said(line), width - left - 8, 10.5)
            if shown:
                parts.append(f'<text class="s{halo}" x="{number(left)}" y="{number(y + 3.8)}">{xml(shown)}</text>')
            y += 15
        for bar in box.bars:
            parts.append(self._bar(box, bar, left, y, width, halo))
            y += 15
        return "".join(parts)

    def _bar(self, box: Box, bar: Bar, left: float, y: float, width: float, halo: str) -> str:
        """A label, a track that is filled by the share, and the numbers right of it."""
        said = cut_to(_said(bar.text), width - left - 50, 9.5)
        track_x = left + 29
        track = min(width, 260.0) - track_x - text_width(said, 9.5) - 14
        label = cut_to(_said(bar.label), 27, 9.5)
        parts = [f'<text class="b{halo}" x="{number(left)}" y="{number(y + 3.4)}">{xml(label)}</text>']
        if track >= 12:
            place = f'x="{number(track_x)}" y="{number(y - 3)}"'
            parts.append(f'<rect class="z-{box.category}" {place} width="{number(track)}" height="6" rx="3"/>')
            if bar.fraction > 0:  # also not for NaN
                filled = max(6.0, track * min(bar.fraction, 1.0))
                parts.append(f'<rect class="k-{box.category}" {place} width="{number(filled)}" height="6" rx="3"/>')
        else:
            track = 0.0
        parts.append(
            f'<text class="v{halo}" x="{number(track_x + track + 5)}" y="{number(y + 3.4)}">{xml(said)}</text>'
        )
        return "".join(parts)

    def _marks(self, box: Box, width: float, height: float) -> str:
        """A triangle and a ring for a finding, and what marks a change."""
        severity = self._severity.get(box.id, "")
        if not severity:
            return self._change(box, width, height)
        x, y = width - 11, min(12.0, height / 2 + 1)
        return (
            f"{_ring(box, severity, width, height, 4 if box.change in CHANGES else 2)}"
            f'<path class="{severity}" d="{triangle(x, y)}"/>'
            f'<text class="m w" x="{number(x)}" y="{number(y + 4.6)}">!</text>{self._change(box, width, height)}'
        )

    def _change(self, box: Box, width: float, height: float) -> str:
        """A ring, and a sign at the corner, for what a comparison found."""
        if box.change not in CHANGES:
            return ""
        self.looks.add(box.change)
        return (
            f'{_ring(box, box.change, width, height, 2)}<circle class="i-{box.change}" cx="1" cy="1" r="6.5"/>'
            f'<text class="m w" x="1" y="4.3">{CHANGES[box.change][0]}</text>'
        )


def _ring(box: Box, mark: str, width: float, height: float, out: int) -> str:
    look = f"r-{mark} d" if mark == "removed" else f"r-{mark}"
    radius = (9 if box.role == "frame" else 7) + out
    size = f'width="{number(width + 2 * out)}" height="{number(height + 2 * out)}"'
    return f'<rect class="{look}" x="-{out}" y="-{out}" {size} rx="{radius}" stroke-width="1.8"/>'


def _slice(box: Box) -> str:
    """A bar of a timeline. One that stands for many is filled from below as far as they were busy."""
    size = f'width="{number(box.w)}" height="{number(box.h)}"'
    radius = number(min(2.5, box.w / 3))
    busy, taken = box.metrics.get("busy_ms"), box.metrics.get("duration_ms")
    if box.w < 6:  # a thin one has to be dark to be seen
        parts = [f'<rect class="k-{box.category}" {size}/>']
    elif busy is None or not taken:
        parts = [f'<rect class="p-{box.category}" {size} rx="{radius}"/>']
    else:
        filled = box.h * min(max(busy / taken, 0.1), 1.0)
        parts = [
            f'<rect class="z-{box.category}" {size} rx="{radius}"/><rect class="p-{box.category}"'
            f' y="{number(box.h - filled)}" width="{number(box.w)}" height="{number(filled)}" rx="{radius}"/>'
        ]
    label = cut_to(_said(box.label), box.w - 6, 10) if box.w >= 24 else ""
    if len(label) > 2:
        parts.append(f'<text class="c" x="3" y="{number(box.h / 2 + 3.6)}" style="font-size:10px">{xml(label)}</text>')
    return "".join(parts)


def _tick(box: Box) -> str:
    """A time at the axis, and a line down through the lanes."""
    down = box.attributes.get("to_y")
    line = f"M{number(box.x)} {number(box.y)}V{number(down if isinstance(down, float) else box.y + box.h)}"
    return (
        f'<path class="rule" d="{line}"/>'
        f'<text class="s" x="{number(box.x + 4)}" y="{number(box.y + 11)}">{xml(box.label)}</text>'
    )


def triangle(x: float, y: float) -> str:
    """Path of the sign of a finding around a point."""
    return f"M{number(x)} {number(y - 7)}l8 13h-16z"


def in_order(layout: LayoutGraph) -> Iterator[tuple[Box, bool]]:
    """Every box, parents before children, and whether it stands inside a group; without recursion."""
    stack = [(box, False) for box in reversed(layout.boxes)]
    while stack:
        box, inside = stack.pop()
        yield box, inside
        if box.children:
            below = inside or box.role == "group"
            stack.extend((child, below) for child in reversed(box.children))


def severities(layout: LayoutGraph) -> dict[str, str]:
    """The worst that a finding says of each box; a group has that of what it folds."""
    named: dict[str, str] = {}
    for finding in layout.findings:
        for name in finding.entities:
            if RANK[finding.severity] > RANK[named.get(name, "")]:
                named[name] = finding.severity
    if not named:
        return {}
    found: dict[str, str] = {}
    stack: list[tuple[Box, tuple[str, ...]]] = [(box, ()) for box in layout.boxes]
    while stack:
        box, groups = stack.pop()
        severity = named.get(box.id, "")
        for each in (box.id, *groups) if severity else ():
            if RANK[severity] > RANK[found.get(each, "")]:
                found[each] = severity
        below = (*groups, box.id) if box.role == "group" else groups
        stack.extend((child, below) for child in box.children)
    return found


def _head_width(box: Box) -> float:
    """How far the words of a frame reach."""
    widths = [30 + text_width(_said(box.label), 12, bold=True)]
    widths += [10 + text_width(_said(line), 10.5) for line in box.lines]
    return max(widths) if not box.bars else max(260.0, *widths)


def _kind_of(box: Box) -> str:
    if box.role != "group":
        return box.kind
    return box.children[0].kind if box.children else "Group"


def _said(text: str) -> str:
    """As much of a text as can be wanted in one line."""
    return text[:240]
