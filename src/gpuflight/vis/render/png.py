"""The SVG picture as pixels, by resvg (Rust, no Cairo, no browser).

Letters are those of the machine that draws: without any font there is nothing to write with, and that is said.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, ClassVar, Literal

from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.errors import MissingExtra, SourceUnavailable
from gpuflight.vis.base import Renderer
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.render.svg import SvgDocument, SvgRenderer, SvgSettings

SIDE_MAX = 16_000
"""Pixels of the longer side at most: what programs that show pictures still open."""
PIXELS_MAX = 40_000_000
"""Pixels in all at most: 160 MB while they are drawn, and seconds to compress. A thousand boxes can be read."""
_STYLE = "path.e{opacity:1;stroke-opacity:.85}"
"""Lines are as thin in colour as in SVG, their ink rather than the whole: resvg makes a picture of its own, as large as
what it covers, of each thing with an opacity, which took nine tenths of the time. ``path.e`` goes before ``.e``."""
_FAMILIES = (
    ("DejaVu Sans", "dejavusans.ttf", "dejavusans-bold.ttf"),
    ("Noto Sans", "notosans-regular.ttf", "notosans-bold.ttf"),
    ("Liberation Sans", "liberationsans-regular.ttf", "liberationsans-bold.ttf"),
    ("Roboto", "roboto-regular.ttf", "roboto-bold.ttf"),
    ("Open Sans", "opensans-regular.ttf", "opensans-bold.ttf"),
    ("Arial", "arial.ttf", "arialbd.ttf"),
    ("FreeSans", "freesans.ttf", "freesansbold.ttf"),
)
_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts", "/Library/Fonts")
_SUFFIXES = (".ttf", ".otf", ".ttc")
_RARE = re.compile("[^\x00-\u052f\u2010-\u22ff\u2400-\u243f\ufffd]")
"""What one family of letters may lack, so that the other fonts of the machine are wanted: half a second to read all."""


class PngSettings(BaseModel):
    """Settings of the PNG renderer."""

    model_config = ConfigDict(extra="forbid")
    theme: Literal["light", "dark"] = Field("light", description="the colours: light, dark")
    zoom: float = Field(1.5, gt=0, le=8, description="pixels per unit of the picture; less where it would be too large")


class PngRenderer(Renderer):
    """The picture as placed in pixels, up to 40 million; needs no Graphviz and no browser."""

    name = "png"
    stability = "beta"
    suffix: ClassVar[str] = ".png"
    binary: ClassVar[bool] = True
    settings_class = PngSettings

    def __init__(self, settings: PngSettings | None = None) -> None:
        self.settings = settings or PngSettings(theme="light", zoom=1.5)

    def build(self, layout: LayoutGraph) -> SvgDocument:
        """See Renderer.build. A picture that is drawn smaller than was asked for says so in its notes."""
        svg = SvgRenderer(SvgSettings(theme=self.settings.theme))
        document = svg.build(layout)
        if (zoom := zoom_of(document.width, document.height, self.settings.zoom)) < self.settings.zoom:
            note = (
                f"Drawn with {zoom:.2g} pixels a unit, not {self.settings.zoom:g}: a PNG has at most "
                f"{PIXELS_MAX // 10**6} million pixels and {SIDE_MAX:,} a side. The formats svg and html have no limit"
            )
            document = svg.build(replace(layout, notes=[note, *layout.notes]))
        return document

    def write(self, document: SvgDocument, file: BinaryIO) -> None:
        """See Renderer.write. The same bytes only with the same fonts and version of resvg."""
        try:
            import resvg_py
        except ImportError:
            raise MissingExtra("resvg-py", "png", "drawing PNG") from None
        font = _font()
        if font is None:
            raise SourceUnavailable("no font is installed to write with", "apt-get install fonts-dejavu-core")
        family, files = font
        svg = BytesIO()
        SvgRenderer().write(document, svg)
        text = svg.getvalue().decode()
        width, height = pixels(document.width, document.height, self.settings.zoom)
        file.write(
            resvg_py.svg_to_bytes(
                svg_string=text,
                width=width,
                height=height,
                font_family=family,
                sans_serif_family=family,
                font_files=files,
                skip_system_fonts=bool(files) and not _RARE.search(text),
                style_sheet=_STYLE,
            )
        )


def zoom_of(width: float, height: float, wanted: float) -> float:
    """Pixels per unit of a picture: what is wanted, or as many as the limits leave."""
    return min(wanted, SIDE_MAX / max(width, height), math.sqrt(PIXELS_MAX / (width * height)))


def pixels(width: float, height: float, zoom: float) -> tuple[int, int]:
    """Width and height in pixels of a picture, in its proportions and not above the limits."""
    zoom = zoom_of(width, height, zoom)
    return max(1, int(width * zoom)), max(1, int(height * zoom))


@cache
def _font() -> tuple[str, list[str]] | None:
    """The first family that we know to be good and is installed, with its files; any other; None without any font."""
    found = dict(_fonts())
    for family, *names in _FAMILIES:
        if names[0] in found:
            return family, [found[name] for name in names if name in found]
    return ("sans-serif", []) if found else None


def _fonts() -> Iterator[tuple[str, str]]:
    for folder in _FOLDERS:
        for path, folders, names in os.walk(Path(folder).expanduser()):
            folders.sort()
            yield from ((name.lower(), f"{path}/{name}") for name in sorted(names) if name.lower().endswith(_SUFFIXES))
