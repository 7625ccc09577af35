"""Mermaid flowcharts (https://mermaid.js.org): boxes in boxes, and lines, as text for READMEs, wikis and issues.

Sites refuse charts of more than 50,000 characters or 500 lines, and a chart cannot raise these limits itself. So what
does not fit is left out, inner boxes and light lines first, and a box says how much that is.

Names stand in quotes with everything that means something to Mermaid, Markdown or HTML as an entity code (``#60;``),
and ids are numbers, so no name can be taken for syntax.
"""

from __future__ import annotations

import re
from typing import BinaryIO, ClassVar

from gpuflight.vis.base import Document, Renderer
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.render.shown import Shown, ShownBox, ShownLine, shown
from gpuflight.vis.text import clean, plural
from gpuflight.vis.visual import CATEGORIES, CHANGES, MEDIA, REMOVED_DASH, signed

TEXT_MAX = 48_000
LINES_MAX = 490
LABEL_LIMIT = 60
CARD_LINES_MAX = 3

_PLAIN = re.compile(r"[^\w .,:/()+-]", re.ASCII)
_LEADING = re.compile(r"^(?=\d+[.)]\s|[-+]\s|\s)")


class MermaidDocument(Document):
    """The chart as lines of text, and what did not fit."""

    lines: list[str]
    boxes_left_out: int = 0
    lines_left_out: int = 0


class MermaidRenderer(Renderer):
    """Mermaid flowchart, for Markdown: nested boxes and lines; large pictures are cut and say so."""

    name = "mermaid"
    suffix: ClassVar[str] = ".mmd"

    def build(self, layout: LayoutGraph) -> MermaidDocument:
        """See Renderer.build."""
        picture = shown(layout)
        texts = {item.number: _box_text(item) for item in picture.boxes}
        kept, size = _boxes_that_fit(picture, texts)
        lines, size = _lines_that_fit(picture.lines, kept, size)
        left_boxes = len(picture.boxes) - len(kept)
        left_lines = len(picture.lines) - len(lines)
        return MermaidDocument(
            title=clean(layout.title, 200),
            lines=_chart(layout, picture, texts, kept, lines, left_boxes, left_lines),
            boxes_left_out=left_boxes,
            lines_left_out=left_lines,
        )

    def write(self, document: MermaidDocument, file: BinaryIO) -> None:
        """See Renderer.write."""
        file.write("\n".join(document.lines).encode() + b"\n")


def quoted(text: str, limit: int = LABEL_LIMIT) -> str:
    """Any text as a quoted label. A number and a stop at its beginning are no list of Markdown."""
    text = clean(text, limit) or " "
    coded = _PLAIN.sub(lambda match: f"#{ord(match[0])};", text)
    return f'"{_LEADING.sub("#8203;", coded)}"'


def _box_text(item: ShownBox) -> str:
    box = item.box
    label = f"{box.count} × {box.label}" if box.role == "group" and not box.label[:1].isdigit() else box.label
    texts = [signed(label, box.change)]
    if not item.is_frame:
        texts += box.lines[:CARD_LINES_MAX]
        texts += [f"{bar.label} {bar.text}" for bar in box.bars[:CARD_LINES_MAX]]
    return '"' + "<br/>".join(quoted(text)[1:-1] for text in texts if text) + '"'


def _boxes_that_fit(picture: Shown, texts: dict[int, str]) -> tuple[set[int], int]:
    """Boxes from the outside in, until two thirds of the room are taken."""
    kept: set[int] = set()
    size = 2_500  # the heading, the styles and the box that tells what is missing
    for item in picture.boxes:
        size += len(texts[item.number]) + 40
        if size > TEXT_MAX * 2 // 3 or (item.parent >= 0 and item.parent not in kept):
            break
        kept.add(item.number)
    return kept, size


def _lines_that_fit(lines: list[ShownLine], kept: set[int], size: int) -> tuple[list[ShownLine], int]:
    fitting: list[ShownLine] = []
    for line in lines:
        if line.source not in kept or line.target not in kept:
            continue
        size += len(quoted(signed(line.route.label, line.route.change))) + 60
        if size > TEXT_MAX or len(fitting) == LINES_MAX:
            break
        fitting.append(line)
    return fitting, size


def _chart(
    layout: LayoutGraph, picture: Shown, texts: dict[int, str], kept: set[int], lines: list[ShownLine],
    left_boxes: int, left_lines: int,
) -> list[str]:  # fmt: skip
    chart = [f"%% {_comment(layout.title)}", "flowchart TB"]
    frames = {item.number for item in picture.boxes if any(child in kept for child in item.children)}
    inner, drawn = _ends(picture, frames, lines)
    classes: dict[str, list[str]] = {}
    outermost = [item for item in picture.boxes if item.parent < 0 and item.number in kept]
    stack: list[tuple[ShownBox | None, int]] = [(item, 1) for item in reversed(outermost)]
    while stack:
        item, depth = stack.pop()
        indent = "  " * depth
        if item is None:  # the end of a box
            chart.append(f"{indent}end")
            continue
        name, text, category = f"b{item.number}", texts[item.number], _class(item)
        classes.setdefault(category, []).append(name)
        if item.number not in frames:
            shape = (
                ("[[", "]]") if item.box.role == "group" else ("([", "])") if item.box.role == "chip" else ("[", "]")
            )
            chart.append(f"{indent}{name}{shape[0]}{text}{shape[1]}")
            continue
        chart.append(f"{indent}subgraph {name}[{text}]")
        if item.number in inner:
            chart.append(f"{indent}  {name}i([{text}])")
            classes[category].append(f"{name}i")
        stack.append((None, depth))
        stack += [(picture.boxes[child], depth + 1) for child in reversed(item.children) if child in kept]
    if left_boxes or left_lines:
        words = [plural(count, noun) for count, noun in ((left_boxes, "box"), (left_lines, "line")) if count]
        said = f"{' and '.join(words)} left out: no more fits into a Mermaid chart"
        chart.append(f"  more[{quoted(said, 200)}]")
        classes.setdefault("group", []).append("more")
    chart += [f"  {source} {arrow} {target}" for source, arrow, target in drawn]
    if key := picture.key_of_changes():
        chart.append(f"  key[{quoted(key)}]")
        classes.setdefault("group", []).append("key")
    for category, names in classes.items():
        width = f"4px{_dash(category)}" if category in CHANGES else "2px"
        chart.append(f"  classDef {category} stroke:{(CATEGORIES | CHANGES)[category][1]},stroke-width:{width}")
        chart.append(f"  class {','.join(names)} {category}")
    for look, (_, light, *_) in (MEDIA | CHANGES).items():
        numbers = [str(number) for number, line in enumerate(lines) if _look(line) == look]
        if numbers:
            chart.append(f"  linkStyle {','.join(numbers)} stroke:{light}{_dash(look)}")
    return chart


def _ends(picture: Shown, frames: set[int], lines: list[ShownLine]) -> tuple[set[int], list[tuple[str, str, str]]]:
    """The lines as text, and frames that need a node of their own: Mermaid cannot join a frame to what is in it."""
    inner: set[int] = set()
    drawn: list[tuple[str, str, str]] = []
    for line in lines:
        ends = [(line.source, line.target), (line.target, line.source)]
        names = []
        for end, other in ends:
            if end in frames and _holds(picture, end, other):
                inner.add(end)
                names.append(f"b{end}i")
            else:
                names.append(f"b{end}")
        arrow, turned = _arrow(line)
        drawn.append((names[1], arrow, names[0]) if turned else (names[0], arrow, names[1]))
    return inner, drawn


def _holds(picture: Shown, outer: int, inner: int) -> bool:
    while inner >= 0:
        if inner == outer:
            return True
        inner = picture.boxes[inner].parent
    return False


def _dash(look: str) -> str:
    return f",stroke-dasharray:{REMOVED_DASH}" if look == "removed" else ""


def _look(line: ShownLine) -> str:
    return line.route.change if line.route.change in CHANGES else line.route.medium


def _class(item: ShownBox) -> str:
    if item.box.change in CHANGES:
        return item.box.change
    return item.box.category if item.box.category in CATEGORIES else "group"


def _arrow(line: ShownLine) -> tuple[str, bool]:
    """The arrow with its label, and whether it has to be written from target to source."""
    forward, backward = line.route.forward, line.route.backward
    if MEDIA.get(line.route.medium, ("", "", "", ""))[3]:
        arrow = "<-.->" if forward and backward else "-.->" if forward or backward else "-.-"
    else:
        arrow = "<-->" if forward and backward else "-->" if forward or backward else "---"
    label = signed(line.route.label, line.route.change)
    return arrow + (f"|{quoted(label)}|" if label else ""), backward and not forward


def _comment(text: str) -> str:
    """A comment may hold anything but braces, which begin a directive, and line breaks, which clean has taken."""
    return re.sub(r"[{}<>&]", " ", clean(text, 200))
