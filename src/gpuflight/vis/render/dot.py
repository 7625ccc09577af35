"""DOT, the language of Graphviz (https://graphviz.org/doc/info/lang.html): boxes in boxes as clusters.

Names stand in double quotes always, so none is taken for an HTML label, a port or a keyword, and ids are numbers. In a
quoted label Graphviz still knows ``\\N`` and the like, and entities: backslashes are doubled and ``&``, ``<`` and ``>``
are entities. Positions are left to Graphviz.

A box with others in it is a cluster with a node of its own, at which its lines end.
"""

from __future__ import annotations

import math
from typing import BinaryIO, ClassVar

from gpuflight.vis.base import Document, Renderer
from gpuflight.vis.model import Box, LayoutGraph
from gpuflight.vis.render.shown import Shown, ShownBox, ShownLine, shown
from gpuflight.vis.text import clean
from gpuflight.vis.visual import CATEGORIES, CHANGES, MEDIA, signed

LABEL_LIMIT = 120
CARD_LINES_MAX = 4


class DotDocument(Document):
    """The graph as lines of DOT, and how many boxes and lines it draws."""

    lines: list[str]
    boxes_count: int
    lines_count: int


class DotRenderer(Renderer):
    """Graphviz DOT: nested clusters, nodes and lines as text; Graphviz places them."""

    name = "dot"
    suffix: ClassVar[str] = ".gv"

    def build(self, layout: LayoutGraph) -> DotDocument:
        """See Renderer.build."""
        return dot_document(layout)

    def write(self, document: DotDocument, file: BinaryIO) -> None:
        """See Renderer.write."""
        file.write("\n".join(document.lines).encode() + b"\n")


def dot_document(layout: LayoutGraph) -> DotDocument:
    """A picture as DOT."""
    picture = shown(layout)
    heading = quoted(*filter(None, (layout.title, picture.key_of_changes())))
    lines = [
        "digraph gpuflight {",
        f"  graph [label={heading}, labelloc=t, fontname=Helvetica, fontsize=18, compound=true, "
        'rankdir=LR, nodesep=0.12, ranksep=0.6, charset="UTF-8"];',
        "  node [shape=box, style=rounded, fontname=Helvetica, fontsize=11];",
        "  edge [fontname=Helvetica, fontsize=9];",
    ]
    outermost = [item for item in picture.boxes if item.parent < 0]
    stack: list[tuple[ShownBox | None, int]] = [(item, 1) for item in reversed(outermost)]
    while stack:
        item, depth = stack.pop()
        indent = "  " * depth
        if item is None:  # the end of a cluster
            lines.append(f"{indent}}}")
            continue
        if not item.is_frame:
            lines.append(f"{indent}b{item.number} [{_node(item.box)}];")
            continue
        lines.append(f"{indent}subgraph cluster_{item.number} {{")
        lines.append(f"{indent}  graph [{_cluster(item.box)}];")
        lines.append(f'{indent}  b{item.number} [shape=point, width=0.05, label="", color="{_colour(item.box)}"];')
        stack.append((None, depth))
        stack += [(picture.boxes[child], depth + 1) for child in reversed(item.children)]
    lines += [f"  b{first} -> b{second} [style=invis, weight=0];" for first, second in _columns(picture)]
    lines += [f"  b{line.source} -> b{line.target} [{_edge(line, picture)}];" for line in picture.lines]
    lines.append("}")
    return DotDocument(
        title=clean(layout.title, 200), lines=lines, boxes_count=len(picture.boxes), lines_count=len(picture.lines)
    )


def _columns(picture: Shown) -> list[tuple[int, int]]:
    """Pairs of boxes in one frame that no line touches, so that these stand in rows: else all would be one column."""
    touched = {end for line in picture.lines for end in (line.source, line.target)}
    pairs: list[tuple[int, int]] = []
    groups = [item.children for item in picture.boxes if item.is_frame]
    for children in groups:
        loose = [child for child in children if child not in touched and not picture.boxes[child].is_frame]
        height = max(4, math.ceil(len(loose) ** 0.5))
        pairs += zip(loose, loose[height:], strict=False)
    return pairs


def quoted(*texts: str) -> str:
    """Lines of any text as one quoted string of DOT."""
    return '"' + "\\n".join(_escaped(clean(text, LABEL_LIMIT)) for text in texts) + '"'


def _escaped(text: str) -> str:
    for raw, safe in (("\\", "\\\\"), ("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        text = text.replace(raw, safe)
    return text


def _colour(box: Box) -> str:
    return CHANGES.get(box.change, CATEGORIES.get(box.category, CATEGORIES["group"]))[1]


def _style(box: Box, *, dashed: bool) -> str:
    style = 'style="rounded,dashed"' if dashed or box.change == "removed" else 'style="rounded"'
    return f"{style}, penwidth=2.5" if box.change in CHANGES else style


def _node(box: Box) -> str:
    texts = [
        signed(box.label, box.change),
        *box.lines[:CARD_LINES_MAX],
        *(f"{bar.label} {bar.text}" for bar in box.bars[:CARD_LINES_MAX]),
    ]
    colour, many = f'color="{_colour(box)}"', ", peripheries=2" if box.role == "group" else ""
    return f"label={quoted(*texts)}, {colour}, {_style(box, dashed=box.missing)}{many}, tooltip={quoted(box.id)}"


def _cluster(box: Box) -> str:
    return (
        f'label={quoted(signed(box.label, box.change))}, labeljust=l, fontsize=12, color="{_colour(box)}", '
        f'fontcolor="{_colour(box)}", {_style(box, dashed=box.synthetic or box.missing)}, tooltip={quoted(box.id)}'
    )


def _edge(line: ShownLine, picture: Shown) -> str:
    route = line.route
    _, colour, _, dashes = MEDIA.get(route.medium, MEDIA["attribute"])
    both, none = route.forward and route.backward, not route.forward and not route.backward
    direction = "both" if both else "none" if none else "forward" if route.forward else "back"
    colour = CHANGES.get(route.change, ("", colour))[1]
    parts = [f'color="{colour}"', f"dir={direction}", f"penwidth={1 + 3 * route.weight:.2f}"]
    label = signed(route.label, route.change)
    if label:
        parts.append(f"label={quoted(label)}")
    if route.change == "removed":
        parts.append("style=dashed")
    elif dashes:
        parts.append("style=dashed" if route.medium == "deploy" else "style=dotted")
    for end, other, name in ((line.source, line.target, "ltail"), (line.target, line.source, "lhead")):
        if picture.boxes[end].is_frame and not _holds(picture, end, other):
            parts.append(f"{name}=cluster_{end}")
    return ", ".join(parts)


def _holds(picture: Shown, outer: int, inner: int) -> bool:
    while inner >= 0:
        if inner == outer:
            return True
        inner = picture.boxes[inner].parent
    return False
