"""One self-contained SVG of a picture: no script, no network, no font of its own, light and dark.

A person reads it in any browser and editor, zooms without end, searches its words. Boxes and lines have titles, which
a browser shows where the pointer rests: the label in full, and the id of the entity.
"""

from __future__ import annotations

from typing import BinaryIO, ClassVar, Literal

from msgspec import field
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.vis.base import Document, Renderer
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.render.svg_boxes import Boxes, number
from gpuflight.vis.render.svg_lines import Lines
from gpuflight.vis.render.svg_page import HEAD, Foot, head
from gpuflight.vis.render.svg_style import style_sheet
from gpuflight.vis.render.xml_text import xml
from gpuflight.vis.text import clean
from gpuflight.vis.visual import GLYPHS

WIDTH_MIN = 680.0
_PAGE_WIDTH = 1500.0
_PAGE_SCALE_MAX = 4.0

Theme = Literal["auto", "light", "dark"]


class SvgSettings(BaseModel):
    """Settings of the SVG renderer."""

    model_config = ConfigDict(extra="forbid")
    theme: Theme = Field("auto", description="auto follows what the reader's system prefers; light, dark")


class SvgDocument(Document):
    """The picture as pieces of SVG. ``width``, ``height`` are in units of the picture, head and foot included."""

    width: float
    height: float
    style: str
    defs: str
    description: str
    page: str
    foot: str
    content: str
    frames: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    cards: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


class SvgRenderer(Renderer):
    """One SVG file of the picture as placed, with legend and findings; light and dark, no Graphviz needed."""

    name = "svg"
    stability = "beta"
    suffix: ClassVar[str] = ".svg"
    settings_class = SvgSettings

    def __init__(self, settings: SvgSettings | None = None) -> None:
        self.settings = settings or SvgSettings(theme="auto")

    def build(self, layout: LayoutGraph) -> SvgDocument:
        """See Renderer.build."""
        boxes = Boxes(layout)
        lines = Lines(layout, boxes.obstacles)
        looks = lines.looks | boxes.looks
        width = max(layout.width, WIDTH_MIN)
        scale = min(max(1.0, width / _PAGE_WIDTH), _PAGE_SCALE_MAX)  # a large picture is seen from further away
        foot = Foot(layout, width / scale, lines.media, looks, lines.without_words)
        top = HEAD * scale
        height = top + layout.height + foot.height * scale
        left = (width - layout.width) / 2
        return SvgDocument(
            title=clean(layout.title, 200),
            width=width,
            height=height,
            style=style_sheet(self.settings.theme, boxes.categories | foot.categories, lines.media | looks),
            defs=_defs(boxes.glyphs | foot.glyphs, lines.looks),
            description=" ".join(clean(note, 400) for note in layout.notes[:8]),
            page=f'<g transform="scale({scale:.4g})">{head(layout, width / scale)}</g>',
            content=f"translate({number(left)} {number(top)})",
            foot=f'<g transform="translate(0 {number(top + layout.height)})scale({scale:.4g})">'
            + "".join(foot.parts)
            + "</g>",
            frames=boxes.frames,
            lines=lines.lines,
            cards=boxes.cards,
            words=lines.words,
        )

    def write(self, document: SvgDocument, file: BinaryIO) -> None:
        """See Renderer.write. The file is UTF-8."""
        width, height = number(document.width), number(document.height)
        file.write(
            f'<?xml version="1.0" encoding="UTF-8"?>\n'
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
            f' role="img">\n<title>{xml(document.title)}</title>\n<desc>{xml(document.description)}</desc>\n'
            f"<style>\n{document.style}</style>\n<defs>{document.defs}</defs>\n"
            f'<rect class="ground" width="100%" height="100%"/>\n{document.page}\n'
            f'<g transform="{document.content}">\n'.encode()
        )
        for layer, parts in (
            ("frames", document.frames),
            ("lines", document.lines),
            ("cards", document.cards),
            ("words", document.words),
        ):
            file.write(f'<g id="{layer}">\n'.encode())
            for at in range(0, len(parts), 1000):
                file.write(("\n".join(parts[at : at + 1000]) + "\n").encode())
            file.write(b"</g>\n")
        file.write(f"</g>\n{document.foot}\n</svg>\n".encode())


def _defs(glyphs: set[str], looks: set[str]) -> str:
    parts = [
        f'<symbol id="g-{kind.replace("?", "unknown")}" viewBox="0 0 16 16"><path d="{GLYPHS[kind]}"/></symbol>'
        for kind in sorted(glyphs)
    ]
    for look in sorted(looks):
        arrow, dot = f'class="i-{look}" d="M0 .8 7.6 4 0 7.2z"', f'class="i-{look}" cx="3" cy="3" r="2.4"'
        parts.append(f"{_marker('a', look, 8, 3.6, 'auto-start-reverse')}<path {arrow}/></marker>")
        parts.append(f"{_marker('o', look, 6, 3, '0')}<circle {dot}/></marker>")
    return "".join(parts)


def _marker(name: str, look: str, size: int, tip: float, orient: str) -> str:
    return (
        f'<marker id="{name}-{look}" viewBox="0 0 {size} {size}" refX="{tip}" refY="{size / 2:g}"'
        f' markerWidth="{size}" markerHeight="{size}" markerUnits="userSpaceOnUse" orient="{orient}">'
    )
