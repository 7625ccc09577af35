"""The SVG picture: whole and well-formed, loads nothing, readable, the same bytes each time."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tests.examples import examples
from tests.strategies import graphs
from tests.unit import vis_scenes
from tests.unit.test_vis_layout import boxes_of, lay_out
from tests.unit.test_vis_render import HOSTILE

from gpuflight.graph import Graph, edges, nodes
from gpuflight.registry import get
from gpuflight.rounds import Coverage, Environment, Finding
from gpuflight.vis.base import Layout, LayoutOptions, Renderer
from gpuflight.vis.changes import compare, mark_changes
from gpuflight.vis.glyph_widths import cut_to, text_width, wrapped
from gpuflight.vis.model import Box, LayoutGraph
from gpuflight.vis.render.svg import SvgRenderer, SvgSettings
from gpuflight.vis.render.svg_boxes import in_order, number

SVG = "{http://www.w3.org/2000/svg}"
GOLDEN = Path(__file__).parents[1] / "data" / "vis" / "small.svg"


def written(layout: LayoutGraph, theme: Any = "auto") -> bytes:
    renderer = SvgRenderer(SvgSettings(theme=theme))
    file = io.BytesIO()
    renderer.write(renderer.build(layout), file)
    return file.getvalue()


def parsed(layout: LayoutGraph, theme: Any = "auto") -> ElementTree.Element:
    return ElementTree.fromstring(written(layout, theme))


def titles(root: ElementTree.Element) -> set[str]:
    return {element.text or "" for element in root.iter(SVG + "title")}


def small() -> Graph:
    return Graph(
        [
            nodes.Host(hostname="box", attributes={"kernel": "6.1"}, metrics={"cpus_count": 8}),
            nodes.Process(pid=7, start=1, attributes={"name": "train"}, metrics={"cpu_pct": 99.0}),
            nodes.GPU(
                uuid="GPU-1", attributes={"name": "H100", "index": 0},
                metrics={"memory_used_bytes": 2**33, "memory_total_bytes": 2**34},
            ),
        ],
        [
            edges.Host("Host(box)", "Process(pid=7,start=1)"),
            edges.Access("Process(pid=7,start=1)", "GPU(GPU-1)", {}, {"memory_used_bytes": 2**33}),
        ],
    )  # fmt: skip


def test_registered():
    assert get(Renderer, "svg") is SvgRenderer


def test_the_small_picture_is_as_it_was():
    """Golden file; GPUFLIGHT_GOLDEN=1 writes it anew after a wanted change, which is then looked at."""
    found = written(lay_out(small(), title="small"))
    if os.environ.get("GPUFLIGHT_GOLDEN"):
        GOLDEN.write_bytes(found)
    assert found == GOLDEN.read_bytes()


def test_it_loads_nothing_and_runs_nothing():
    root = parsed(lay_out(vis_scenes.h100(), findings=vis_scenes.findings(vis_scenes.h100())))
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in {
            "svg", "g", "title", "desc", "style", "defs", "symbol", "marker", "path", "rect", "circle", "text", "use",
        }, element.tag  # fmt: skip
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            if name.rpartition("}")[2] == "href":
                assert value.startswith("#")
            assert "url(" not in value or value.startswith("url(#")
    [style] = root.iter(SVG + "style")
    assert "@import" not in (style.text or "") and "url(" not in (style.text or "")


def test_what_is_referred_to_is_there():
    text = written(lay_out(vis_scenes.h100())).decode()
    ids = set(re.findall(r' id="([^"]+)"', text))
    assert set(re.findall(r'(?:url\(|href=")#([^")]+)', text)) <= ids
    assert len(re.findall(r' id="', text)) == len(ids), "an id twice"


def test_every_box_and_every_line_is_drawn_and_named():
    graph = vis_scenes.h100()
    layout = lay_out(graph)
    root = parsed(layout)
    said = titles(root)
    for box, _ in boxes_of(layout):
        if not box.synthetic and box.role != "group":
            assert any(box.id in title for title in said), box.id
    lines = [element for element in root.iter(SVG + "path") if (element.get("class") or "").startswith("e e-")]
    named = [line for line in lines if line.find(SVG + "title") is not None]
    assert len(named) == len([route for route in layout.routes if len(route.points) > 1])


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_harmless(name: str):
    graph = Graph(
        [nodes.Process(pid=1, start=1, attributes={"name": name, "cmdline": name}), nodes.Container(container_id=name)],
        [edges.Access("Process(pid=1,start=1)", name)],
    )
    finding = Finding(
        id=name, rule=name, severity="warn", message=name, entities=["Process(pid=1,start=1)"], advice=name
    )
    layout = lay_out(
        graph, title=name, findings=[finding], notes=[name], environment=Environment(hostname=name, kernel=name),
        coverage=[Coverage(collector=name, status="failed", reason=name)],
    )  # fmt: skip
    root = parsed(layout)
    assert not [element for element in root.iter() if element.tag.removeprefix(SVG) in ("script", "img", "image", "a")]
    text = written(layout).decode()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\u2028\ufffe]", text)


@settings(max_examples=examples(40))
@given(graphs())
def test_any_graph_is_well_formed_and_has_numbers_for_coordinates(graph: Graph):
    text = written(lay_out(graph)).decode()
    ElementTree.fromstring(text)
    assert not re.search(r'="[^"<>]*\b(nan|inf)\b[^"<>]*"', re.sub(r"<(title|desc|text)[^>]*>[^<]*", "", text))


def test_words_stay_in_their_boxes():
    """By the widest usual font; what does not fit ends with an ellipsis."""
    root = parsed(lay_out(vis_scenes.h100()))
    checked = 0
    for group in root.iter(SVG + "g"):
        rect = group.find(SVG + "rect")
        if rect is None or not (rect.get("class") or "").startswith("a-"):
            continue
        for text in group.findall(SVG + "text"):
            look = (text.get("class") or "").split()[0]
            if look in ("t", "c", "s"):
                size = 12 if look == "t" else 10.5
                right = float(text.get("x") or 0) + text_width(text.text or "", size, bold=look == "t")
                assert right <= float(rect.get("width") or 0) + 0.5, text.text
                checked += 1
    assert checked > 200


def test_words_of_lines_cover_no_card_and_no_other_words():
    layout = lay_out(vis_scenes.h100())
    renderer = SvgRenderer()
    words = [
        tuple(float(part) for part in re.findall(r' (?:x|y|width|height)="([-\d.]+)"', each))
        for each in renderer.build(layout).words
        if each.startswith("<rect")
    ]
    assert len(words) > 20
    cards = [box for box, inside in in_order(layout) if box.role != "frame" and not inside]
    for at, (x, y, w, h) in enumerate(words):
        for box in cards:
            assert x >= box.x + box.w or x + w <= box.x or y >= box.y + box.h or y + h <= box.y, box.label
        for x2, y2, w2, h2 in words[:at]:
            assert x >= x2 + w2 or x + w <= x2 or y >= y2 + h2 or y + h <= y2


def test_findings_mark_boxes_and_lines_and_are_listed():
    graph = vis_scenes.h100()
    access = next(edge for edge in graph.edges.values() if edge.kind == "Access" and "GPU" in edge.target)
    finding = Finding(
        id="f", rule="r", severity="critical", message="it is slow", advice="mend it", entities=[access.source],
        edges=[access.id],
    )  # fmt: skip
    plain, marked = written(lay_out(graph)).decode(), written(lay_out(graph, findings=[finding])).decode()
    rings = '<rect class="r-critical"'
    assert rings not in plain and marked.count(rings) == 1
    assert marked.count('<path class="critical"') == 3  # at the box, at the line, in the list
    assert "critical: it is slow" in marked and "→ mend it" in marked
    assert '<path class="k r-critical"' in marked


def test_changes_are_marked_and_in_the_legend():
    before, after = small(), small()
    after.try_add_node(nodes.Process(pid=8, start=1, attributes={"name": "new"}))
    comparison = compare(before, after)
    layout = lay_out(comparison.graph)
    mark_changes(layout, comparison.changes)
    root = parsed(layout)
    [sign] = [element for element in root.iter(SVG + "circle") if element.get("class") == "i-added"]
    assert sign.get("r") == "6.5"
    rings = [element for element in root.iter(SVG + "rect") if element.get("class") == "r-added"]
    assert len(rings) == 2, "around the box, in the legend"
    assert "+ added" in {element.text for element in root.iter(SVG + "text")}


def test_themes():
    layout = lay_out(small())
    auto, light, dark = (written(layout, theme).decode() for theme in ("auto", "light", "dark"))
    assert "prefers-color-scheme:dark" in auto and "prefers-color-scheme" not in light + dark
    assert "#12161c" in auto and "#eef1f5" in auto
    assert "#12161c" in dark and "#eef1f5" not in dark and "#12161c" not in light


def test_a_name_that_is_no_kind_gets_the_glyph_of_the_unknown():
    layout = lay_out(Graph([], [edges.Access("Odd(1)", "<>")]))
    assert "g-unknown" in written(layout).decode()
    ElementTree.fromstring(written(layout))


@pytest.mark.parametrize("count", [0, 1])
def test_almost_nothing_is_a_picture(count: int):
    root = parsed(lay_out(Graph([nodes.Process(pid=1, start=1)][:count])))
    assert float(root.get("width") or 0) > 0 and float(root.get("height") or 0) > 0


@pytest.mark.parametrize("layout", ["default", "gephi"])
def test_ten_thousand_nodes(layout: str):
    picture = get(Layout, layout)().layout(vis_scenes.crowd(10_000), LayoutOptions())
    text = written(picture)
    assert len(text) < 8_000_000
    said = titles(ElementTree.fromstring(text))
    assert len(said) > 9_000


def test_xmllint_and_rsvg_agree(tmp_path: Path):
    """Independent readers, where they are installed."""
    path = tmp_path / "picture.svg"
    path.write_bytes(written(lay_out(vis_scenes.h100())))
    tools = {"xmllint": ["--noout", str(path)], "rsvg-convert": ["-o", str(tmp_path / "p.png"), str(path)]}
    there = [name for name in tools if shutil.which(name)]
    if not there:
        pytest.skip("neither xmllint nor rsvg-convert is installed")
    for name in there:
        found = subprocess.run([name, *tools[name]], capture_output=True, text=True, timeout=60)
        assert found.returncode == 0 and not found.stderr, found.stderr


def test_a_browser_shows_it(tmp_path: Path):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium is installed")
    path = tmp_path / "picture.svg"
    path.write_bytes(written(lay_out(small(), title="<small>")))
    found = subprocess.run(
        [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile", "--dump-dom",
         path.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "parsererror" not in found.stdout and "<title>&lt;small&gt;</title>" in found.stdout


def test_numbers_are_short_and_finite():
    assert [number(value) for value in (0.0, 1.0, 12.345, -0.00004, 0.1234567, 1e6)] == [
        "0", "1", "12.35", "0", "0.1235", "1000000",
    ]  # fmt: skip


def test_text_is_cut_where_it_would_not_fit():
    assert cut_to("short", 100, 10) == "short"
    cut = cut_to("a very long name of a process", 60, 10)
    assert cut.endswith("…") and text_width(cut, 10) <= 60
    assert cut_to("anything", 3, 10) == ""
    assert text_width("漢字", 10) > text_width("ab", 10)
    lines = wrapped("one two three four five six seven", 60, 10, 2)
    assert len(lines) == 2 and lines[1].endswith("…") and all(text_width(line, 10) <= 60 for line in lines)


def test_a_bar_of_no_number_is_empty():
    layout = lay_out(small())
    box = next(box for box, _ in boxes_of(layout) if box.kind == "GPU")
    assert isinstance(box, Box) and box.bars
    box.bars[0].fraction = float("nan")
    assert "nan" not in written(layout).decode()
