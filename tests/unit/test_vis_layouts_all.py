"""What holds of every picture of the layouts gephi, constraint and fabric: all there, once, within the picture."""

from __future__ import annotations

import sys
from collections import Counter

import msgspec
import pytest
from tests.unit import vis_scenes
from tests.unit.server_fixture import small
from tests.unit.test_vis_layout import SCENES, boxes_of

from gpuflight.cli import vis
from gpuflight.errors import MissingExtra
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.codec import encode_graph
from gpuflight.registry import get
from gpuflight.vis.base import Layout, LayoutOptions
from gpuflight.vis.model import LayoutGraph

LAYOUTS = ("gephi", "constraint", "fabric")


def lay_out(name: str, graph: Graph, **options: object) -> LayoutGraph:
    return get(Layout, name)().layout(graph, LayoutOptions(**options))  # type: ignore[arg-type]


def check(picture: LayoutGraph, graph: Graph) -> None:
    slack = 1.0
    seen = Counter(box.id for box, _ in boxes_of(picture))
    assert not [box_id for box_id, count in seen.items() if count > 1]
    ends = {end for edge in graph.edges.values() for end in (edge.source, edge.target)}
    assert {box.id for box, _ in boxes_of(picture) if not box.synthetic} == set(graph.nodes) | ends
    assert {box.id for box, _ in boxes_of(picture) if box.missing} == ends - set(graph.nodes)
    for box, around in boxes_of(picture):
        assert box.w > 0 and box.h > 0
        if around is not None:
            assert around.x - slack <= box.x and box.x + box.w <= around.x + around.w + slack, (box.id, around.id)
            assert around.y - slack <= box.y and box.y + box.h <= around.y + around.h + slack, (box.id, around.id)
        if box.role == "group":
            assert box.rule and box.count == sum(child.count for child in box.children)
    for box in picture.boxes:
        assert box.x >= 0 and box.x + box.w <= picture.width and box.y >= 0 and box.y + box.h <= picture.height
    assert 0.33 <= picture.width / picture.height <= 3.01
    assert len(picture.links) == len(graph.edges)
    by_id = {box.id: box for box, _ in boxes_of(picture)}
    for route in picture.routes:
        assert route.source != route.target and len(route.points) >= 2 and route.links
        for box_id, (x, y) in ((route.source, route.points[0]), (route.target, route.points[-1])):
            box = by_id[box_id]
            assert box.x - 1 <= x <= box.x + box.w + 1 and box.y - 1 <= y <= box.y + box.h + 1, (route, box)
    assert all(-1 <= link.route < len(picture.routes) for link in picture.links)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("scene", SCENES)
def test_every_scene_is_whole_and_in_proportion(name: str, scene: str) -> None:
    graph = SCENES[scene]()
    check(lay_out(name, graph), graph)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_graph_gives_the_same_bytes_and_stays_as_it_was(name: str) -> None:
    graph = vis_scenes.h100()
    before = encode_graph(graph)
    options = {"environment": vis_scenes.ENV, "findings": vis_scenes.findings(graph)}
    first, second = lay_out(name, graph, **options), lay_out(name, vis_scenes.h100(), **options)
    assert msgspec.json.encode(first) == msgspec.json.encode(second)
    assert encode_graph(graph) == before
    assert (first.layout, first.title) == (name, "dgx-01")


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_command_draws_it(name: str, tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    (folder / "graph.json").write_bytes(encode_graph(vis_scenes.crowd(40)))
    assert vis.main([str(folder / "graph.json"), "--layout-engine", name, "-o", str(folder / "out.html")]) == 0
    assert (folder / "out.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "module", "package"), [("gephi", "numpy", "numpy"), ("constraint", "fast_sugiyama", "fast-sugiyama")]
)
def test_without_its_package_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"{name} needs the package {package}: pip install 'gpuflight\[vis\]'"):
        lay_out(name, Graph([nodes.Host(hostname="a")]))


def test_the_layouts_load_no_package_before_they_are_used() -> None:
    import subprocess

    code = (
        "import sys; from gpuflight.registry import plugins; from gpuflight.vis.base import Layout; plugins(Layout);"
        " assert not {'numpy', 'fast_sugiyama'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_names_itself_is_no_line() -> None:
    process = nodes.Process(pid=1, start=1)
    graph = Graph([process], [edges.SendTo(process.id, process.id)])
    for name in LAYOUTS:
        picture = lay_out(name, graph)
        assert not picture.routes and len(picture.links) == 1


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_server_exports_it(name: str) -> None:
    with small() as served:
        answer = served.get(f"/api/v1/graph/export?layout={name}")
        assert f'"layout":"{name}"'.encode() in answer.content
