"""The HTML page: self-contained, allowed to run only itself, harmless whatever is in the graph."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zlib
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import pytest
from hypothesis import given
from tests.strategies import graphs
from tests.unit import vis_scenes
from tests.unit.test_vis_layout import boxes_of, lay_out

from gpuflight.graph import Graph, edges, nodes
from gpuflight.registry import get
from gpuflight.rounds import Coverage, Environment, Finding
from gpuflight.vis.base import Renderer
from gpuflight.vis.render.html import HtmlRenderer
from gpuflight.vis.visual import CATEGORIES, CHANGES, GLYPHS, KIND_CATEGORY, KIND_NOUN, MEDIA


def render(graph: Graph, **options: Any) -> str:
    renderer = HtmlRenderer()
    file = io.BytesIO()
    renderer.write(renderer.build(lay_out(graph, **options)), file)
    return file.getvalue().decode()


class Page(HTMLParser):
    """The page as an independent reader sees it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.text: dict[str, str] = {}
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not self.inside:
            return
        self.text[self.inside[-1]] = self.text.get(self.inside[-1], "") + data
        if self.inside[-1] == "script":
            self.scripts.append(data)
        elif self.inside[-1] == "style":
            self.styles.append(data)

    def data(self) -> dict[str, Any]:
        [encoding] = [
            attrs["data-encoding"] for tag, attrs in self.tags if tag == "script" and attrs.get("id") == "data"
        ]
        text = self.scripts[0]
        if encoding == "deflate":
            text = zlib.decompress(base64.b64decode(text)).decode()
        loaded: dict[str, Any] = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
        return loaded


def test_registered():
    assert get(Renderer, "html") is HtmlRenderer
    assert HtmlRenderer.suffix == ".html"


def test_the_page_loads_nothing_and_may_run_only_itself():
    text = render(vis_scenes.h100())
    page = Page(text)
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not {name for name in attrs if name.startswith("on")} and "src" not in attrs and "href" not in attrs
        assert "style" not in attrs, "the policy forbids style attributes"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    [policy] = [a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy and "connect-src" not in policy
    for body in (page.scripts[1], page.styles[0]):
        assert "sha256-" + base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() in policy


def test_the_page_is_the_same_each_time():
    assert render(vis_scenes.h100()) == render(vis_scenes.h100())


def test_every_entity_and_every_edge_is_in_the_page():
    graph = vis_scenes.h100()
    data = Page(render(graph)).data()
    ids = data["boxes"]["id"]
    assert set(graph.nodes) <= set(ids)
    ends = data["links"]["ends"]
    kinds = [data["words"][kind] for kind in data["links"]["kind"]]
    found = {(ids[ends[2 * at]], ids[ends[2 * at + 1]], kind) for at, kind in enumerate(kinds)}
    assert found == set(graph.edges)
    gpu = next(box for box, _ in boxes_of(lay_out(graph)) if box.kind == "GPU")
    attributes, metrics, unknown = data["boxes"]["facts"][ids.index(gpu.id)]
    assert (attributes, metrics, unknown) == (gpu.attributes, gpu.metrics, gpu.unknown)


def test_large_data_is_deflated_and_read_back():
    graph = vis_scenes.crowd(3000)
    text = render(graph)
    assert 'data-encoding="deflate"' in text
    assert len(Page(text).data()["boxes"]["id"]) >= 3000


HOSTILE = (
    "</script><script>alert(1)</script>", "<!--<script>", "]]>", "<img src=x onerror=alert(1)>", "\"'&<>`",
    "a\x00b\x1b[31m",
    "\u202egnp.exe", "תהליך", "🚀" * 40, "x" * 65536, "\ud800 lone", "\u2028\u2029", "{{data}}", "${x}", "__proto__",
    "constructor", "a\nb\r\nc", "%s %d", "javascript:alert(1)",
)  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_harmless(name: str):
    graph = Graph(
        [
            nodes.Process(
                pid=1, start=1, attributes={"name": name, name: [name], "cmdline": name}, unknown={name: name}
            ),
            nodes.Container(container_id=name, attributes={"name": name, "runtime": name}),
            nodes.Socket(protocol=name, address=name),
            nodes.Numa(index=0, ns=name),
        ],
        [edges.Access("Process(pid=1,start=1)", name, {name: name}, {"x": 1})],
    )
    coverage = [Coverage(collector=name, status="failed", reason=name, hint=name, losses={name: 1})]
    finding = Finding(id=name, rule=name, severity="warn", message=name, entities=["Process(pid=1,start=1)", name])
    text = render(
        graph, title=name, coverage=coverage, findings=[finding], environment=Environment(hostname=name), notes=[name]
    )
    plain = Page(render(Graph()))
    page = Page(text)
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags], "the names made no element"
    assert page.scripts[1] == plain.scripts[1]
    data = page.scripts[0]
    assert "<" not in data and ">" not in data and "\u2028" not in data
    for label in page.data()["boxes"]["label"]:
        assert len(label) <= 240 and "\x00" not in label and "\u202e" not in label


def test_numbers_that_are_none_stay_readable():
    metrics: dict[str, Any] = {
        "a_pct": float("nan"), "b_bytes": float("inf"), "c_count": None, "d_count": 2**70, "rss_bytes": float("-inf"),
        "cpu_pct": float("nan"),
    }  # fmt: skip
    data = Page(render(Graph([nodes.Process(pid=1, start=1, metrics=metrics)]))).data()
    found = data["boxes"]["facts"][0][1]
    assert found == {
        "a_pct": "nan", "b_bytes": "inf", "c_count": None, "d_count": str(2**70), "rss_bytes": "-inf", "cpu_pct": "nan",
    }  # fmt: skip
    assert data["boxes"]["lines"] == [["pid 1"]]


@given(graphs())
def test_any_graph_renders_to_strict_json(graph: Graph):
    data = Page(render(graph)).data()
    assert len(data["links"]["kind"]) == len(graph.edges)


def test_findings_point_to_their_boxes_and_edges():
    graph = vis_scenes.h100()
    access = next(edge for edge in graph.edges.values() if edge.kind == "Access")
    absent = "Process(pid=0,start=0)"
    finding = Finding(
        id="f", rule="r", severity="critical", message="m", entities=[access.source, absent], edges=[access.id]
    )
    data = Page(render(graph, findings=[finding])).data()
    [found] = data["findings"]
    assert [data["boxes"]["id"][at] for at in found["boxes"]] == [access.source]
    assert found["elsewhere"] == [absent]
    [link] = found["links"]
    assert data["boxes"]["id"][data["links"]["ends"][2 * link]] == access.source


def test_ten_thousand_nodes_stay_under_two_megabytes():
    assert len(render(vis_scenes.crowd(10_000)).encode()) < 2_000_000


def test_every_kind_has_a_category_a_noun_and_a_glyph():
    from gpuflight.graph.nodes import NODE_KINDS

    assert set(KIND_CATEGORY) == set(KIND_NOUN) == set(NODE_KINDS)
    assert set(NODE_KINDS) <= set(GLYPHS)
    assert set(KIND_CATEGORY.values()) <= set(CATEGORIES)


def _contrast(one: str, two: str) -> float:
    """Contrast ratio of two colours, WCAG 2.1 §1.4.3."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("at", "surface"), [(1, "#ffffff"), (2, "#1b2129")])
def test_colours_stand_out_from_their_ground(at: int, surface: str):
    for table in (CATEGORIES, MEDIA, CHANGES):
        for key, entry in table.items():
            assert _contrast(entry[at], surface) >= 3.0, key


def test_the_viewer_has_the_colours_of_changes():
    style = resources.files("gpuflight.vis.render").joinpath("assets", "viewer.css").read_text()
    script = resources.files("gpuflight.vis.render").joinpath("assets", "draw.js").read_text()
    for change, (sign, light, dark) in CHANGES.items():
        assert re.findall(rf"--{change}: (#\w+)", style)[:2] == [light, dark]
        assert f'{change}: "{sign}"' in script


def test_the_visual_language_is_written_down(repository):
    text = (repository / "docs" / "visual-language.md").read_text()
    for label, *_ in (*CATEGORIES.values(), *MEDIA.values()):
        assert label in text
    for kind in KIND_CATEGORY:
        assert f"`{kind}`" in text
