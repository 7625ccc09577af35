"""The PNG picture: a valid file of the right size with something on it, or one line that says what is missing."""

from __future__ import annotations

import io
import re
import struct
import sys
import time
import zlib
from collections import Counter

import pytest
from tests.unit import vis_scenes
from tests.unit.test_vis_layout import lay_out
from tests.unit.test_vis_svg import small

from gpuflight.errors import MissingExtra, SourceUnavailable
from gpuflight.graph import Graph
from gpuflight.registry import get
from gpuflight.vis.base import Renderer
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.render import png
from gpuflight.vis.render.png import PIXELS_MAX, SIDE_MAX, PngRenderer, PngSettings, pixels


def written(layout: LayoutGraph, settings: PngSettings | None = None) -> bytes:
    pytest.importorskip("resvg_py")
    if png._font() is None:
        pytest.skip("no font is installed")
    renderer = PngRenderer(settings)
    file = io.BytesIO()
    renderer.write(renderer.build(layout), file)
    return file.getvalue()


def opened(data: bytes) -> tuple[int, int, list[bytes]]:
    """Width, height and the colours (RGBA) of every 13th pixel; an independent reader of 8-bit RGBA."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    at, packed, width, height = 8, b"", 0, 0
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + body)
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", body[:10])
            assert (depth, colour) == (8, 6)
        elif kind == b"IDAT":
            packed += body
        at += 12 + size
    raw = zlib.decompress(packed)
    assert len(raw) == height * (1 + 4 * width)
    return width, height, [raw[i : i + 4] for i in range(1, 4 * width, 52)] if raw[0] == 0 else []


def test_registered():
    assert get(Renderer, "png") is PngRenderer
    assert PngRenderer.binary


def test_it_is_a_picture_in_the_proportions_of_the_layout():
    layout = lay_out(vis_scenes.h100())
    data = written(layout, PngSettings(theme="light", zoom=0.5))
    width, height, _ = opened(data)
    document = PngRenderer().build(layout)
    assert (width, height) == pytest.approx(pixels(document.width, document.height, 0.5), abs=1)
    assert len(data) > 50_000, "nothing is on it"


def test_themes_differ_and_bytes_repeat():
    layout = lay_out(small())
    light, dark = (written(layout, PngSettings(theme=theme, zoom=1)) for theme in ("light", "dark"))
    assert light != dark
    assert light == written(layout, PngSettings(theme="light", zoom=1))


def test_the_ground_is_that_of_the_theme():
    _, _, colours = opened(written(lay_out(Graph()), PngSettings(theme="dark", zoom=1)))
    if colours:
        assert Counter(colours).most_common(1)[0][0] == bytes.fromhex("12161cff")


@pytest.mark.parametrize("size", [(1e6, 10.0), (10.0, 1e6), (50_000.0, 40_000.0), (1.0, 1.0)])
def test_large_pictures_are_drawn_smaller(size: tuple[float, float]):
    width, height = pixels(*size, 8)
    assert 1 <= width <= SIDE_MAX and 1 <= height <= SIDE_MAX and width * height <= PIXELS_MAX


def test_a_picture_that_is_drawn_smaller_says_so():
    layout = lay_out(vis_scenes.crowd(1000))
    said = "Drawn with "
    assert said not in PngRenderer(PngSettings(theme="light", zoom=0.2)).build(layout).foot
    document = PngRenderer(PngSettings(theme="light", zoom=8)).build(layout)
    assert said in document.foot and "not 8: a PNG has at most 40 million pixels" in document.foot
    assert not layout.notes or said not in layout.notes[0], "the layout is that of the caller"


def test_a_thousand_entities_take_seconds():
    """CPU time: 2 s, and 30 s when each line was a picture of its own."""
    layout = lay_out(vis_scenes.crowd(1000))
    began = time.process_time()
    written(layout, PngSettings(theme="light", zoom=1))
    assert time.process_time() - began < 10


def test_lines_are_as_thin_in_colour_as_in_svg():
    """The sheet that goes before that of the picture: without it, lines would be layers."""
    layout = lay_out(small())
    style = PngRenderer().build(layout).style
    assert re.search(r"^\.e\{.*opacity:\.85\}$", style, re.MULTILINE)
    assert png._STYLE == "path.e{opacity:1;stroke-opacity:.85}"


def test_without_the_package_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(MissingExtra, match=r"pip install 'gpuflight\[png\]'"):
        PngRenderer().write(PngRenderer().build(lay_out(small())), io.BytesIO())


def test_without_a_font_one_line_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("resvg_py")
    monkeypatch.setattr(png, "_font", lambda: None)
    with pytest.raises(SourceUnavailable, match="apt-get install fonts-dejavu-core"):
        PngRenderer().write(PngRenderer().build(lay_out(small())), io.BytesIO())


def test_other_scripts_are_drawn_too():
    graph = small()
    graph.nodes["Process(pid=7,start=1)"].attributes["name"] = "漢字 תהליך 🚀"
    assert opened(written(lay_out(graph), PngSettings(theme="light", zoom=1)))[0] > 0
