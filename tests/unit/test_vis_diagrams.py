"""draw.io, Mermaid, DOT, Graphviz's files and PyVis: what other programs read is the picture, whatever the names."""

from __future__ import annotations

import base64
import html
import io
import json
import re
import shutil
import subprocess
import time
import urllib.parse
import zlib
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from tests.examples import examples
from tests.strategies import graphs
from tests.unit import vis_scenes
from tests.unit.test_plugin_conformance import HOSTILE, hostile_graph
from tests.unit.vis_files import golden, picture, small, written

from gpuflight.cli import vis
from gpuflight.errors import InputError, MissingExtra, SourceUnavailable
from gpuflight.graph import Graph, edges, nodes
from gpuflight.registry import get
from gpuflight.sources.tools import Tools
from gpuflight.vis.base import Renderer
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.render import graphviz_files, mermaid, pyvis_page
from gpuflight.vis.render.drawio import DrawioRenderer
from gpuflight.vis.render.shown import shown
from gpuflight.vis.render.tables import boxes_by_id
from gpuflight.vis.text import clean

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz: apt-get install graphviz")


@pytest.mark.parametrize(("name", "suffix"), [("drawio", ".drawio"), ("mermaid", ".mmd"), ("dot", ".gv")])
def test_small_graph_is_written_as_it_was(name: str, suffix: str) -> None:
    data, before = golden(name, suffix)
    assert data == before


# --- draw.io ---------------------------------------------------------------------------------------------------------


def page(data: bytes, number: int = 0) -> dict[str, ET.Element]:
    """The cells of a page by id; those with data are the ``object`` around the cell."""
    root = ET.fromstring(data).findall("diagram")[number].find("mxGraphModel/root")
    assert root is not None
    return {element.get("id", ""): element for element in root}


def cell(element: ET.Element) -> ET.Element:
    inner = element.find("mxCell")
    return element if inner is None else inner


def place(element: ET.Element) -> tuple[float, ...]:
    geometry = cell(element).find("mxGeometry")
    assert geometry is not None
    return tuple(float(geometry.get(side, "0")) for side in ("x", "y", "width", "height"))


def of_entity(cells: dict[str, ET.Element], entity: str) -> ET.Element:
    return next(element for element in cells.values() if element.get("entity") == entity)


def move(data: bytes, entity: str, **sides: str) -> bytes:
    """The file after a person moved a box and saved."""
    whole = ET.fromstring(data)
    element = next(found for found in whole.iter("object") if found.get("entity") == entity)
    geometry = element.find("mxCell/mxGeometry")
    assert geometry is not None
    for side, value in sides.items():
        geometry.set(side, value)
    return ET.tostring(whole)


def again(graph: Graph | LayoutGraph, previous: bytes) -> bytes:
    """A new export over an earlier file."""
    renderer = DrawioRenderer()
    laid_out = graph if isinstance(graph, LayoutGraph) else picture(graph)
    file = io.BytesIO()
    renderer.write(renderer.keep(renderer.build(laid_out), io.BytesIO(previous)), file)
    return file.getvalue()


@settings(max_examples=examples(40), deadline=None)
@given(graph=graphs(max_nodes=6, max_edges=8))
def test_any_graph_is_a_drawio_file_with_all_its_boxes_and_lines(graph: Graph) -> None:
    laid_out = picture(graph)
    data = written("drawio", laid_out)
    cells = page(data)
    assert len(cells) == len(next(ET.fromstring(data).iter("root"))), "no id twice"
    boxes = boxes_by_id(laid_out.boxes)
    assert Counter(found.get("entity") for found in cells.values() if found.get("entity") is not None) == Counter(
        clean(box, 2000) for box in boxes
    )
    lines = [cell(found) for found in cells.values() if cell(found).get("edge") == "1"]
    assert len(lines) == len({(route.source, route.target, route.medium) for route in laid_out.routes})
    for found in cells.values():
        inner = cell(found)
        assert inner.get("parent", "0") in cells or found.get("id") == "0"
        if inner.get("edge") == "1":
            assert inner.get("source") in cells and inner.get("target") in cells
    absolute = {"0": (0.0, 0.0), "1": (0.0, 0.0)}
    for name, found in cells.items():  # parents come first
        if cell(found).get("vertex") == "1" and found.get("entity") is not None:
            x, y, _, _ = place(found)
            left, top = absolute[cell(found).get("parent", "")]
            absolute[name] = (left + x, top + y)
    centres = {clean(box.id, 2000): (box.x, box.y) for box in boxes.values()}
    for name, found in cells.items():
        if name in absolute and found.get("entity"):
            assert absolute[name] == pytest.approx(centres[found.get("entity", "")], abs=0.2)


def test_r17_labels_are_the_text_that_was_meant() -> None:
    """Written by an XML writer, as plain text: neither unescaped nor escaped twice."""
    graph = Graph([nodes.Process(pid=1, start=1, attributes={"name": "A&B<c> \"q\" 'a'"})])
    cells = page(written("drawio", graph))
    label = of_entity(cells, "Process(pid=1,start=1)").get("label", "")
    assert label.splitlines()[0] == "A&B<c> \"q\" 'a'"
    styles = [cell(found).get("style") for found in cells.values() if cell(found).get("style")]
    assert all("html=0" in (style or "") for style in styles), "a label is text, not markup"


def test_r18_one_root_and_hostile_names_are_data() -> None:
    data = written("drawio", hostile_graph(), title=HOSTILE[0], notes=[HOSTILE[1]])
    cells = page(data)  # "extra content at end" would be a ParseError
    row = of_entity(cells, "Process(pid=1,start=1)")
    assert row.get("cmdline") == HOSTILE[0] and row.get("label", "").startswith(HOSTILE[0])
    assert all(name not in ("link", "tooltip", "placeholders") for found in cells.values() for name in found.attrib)


def test_r20_quotes_and_ampersands_in_every_xml_format() -> None:
    graph = Graph([nodes.Host(hostname="a\"&'<b>", attributes={'x"&': "y\"&'<>"})])
    for name in ("drawio", "gexf", "graphml"):
        root = ET.fromstring(written(name, graph, title='t"&<'))
        texts = [text for found in root.iter() for text in (found.text, *found.attrib.values()) if text]
        assert any("a\"&'<b>" in text for text in texts) and any("y\"&'<>" in text for text in texts)
        assert not any("&amp;" in text or "&quot;" in text for text in texts), "escaped twice"


def test_a_new_export_keeps_what_was_moved_and_nothing_else() -> None:
    first = written("drawio", small())
    moved = move(first, "Process(pid=43,start=8)", x="333", y="17.5", width="90")
    after = small()
    after.try_add_node(nodes.Process(pid=50, start=1, attributes={"name": "another"}))
    after.try_add_edge(edges.Own("Process(pid=42,start=7)", "Process(pid=50,start=1)"))
    second = page(again(after, moved))
    fresh = page(written("drawio", after))
    assert place(of_entity(second, "Process(pid=43,start=8)"))[:3] == (333.0, 17.5, 90.0)
    for entity in (*after.nodes, "Socket(tcp,10.0.0.7:80)"):
        if entity != "Process(pid=43,start=8)":
            assert place(of_entity(second, entity)) == place(of_entity(fresh, entity)), entity
    third = page(again(after, again(after, moved)))
    assert place(of_entity(third, "Process(pid=43,start=8)"))[:3] == (333.0, 17.5, 90.0), "also the time after"
    assert again(small(), first) == first, "nobody did anything"


def test_a_box_that_now_stands_in_another_one_goes_where_the_layout_puts_it() -> None:
    moved = move(written("drawio", small()), "Process(pid=43,start=8)", x="333")
    after = Graph(
        small().nodes.values(), [edge for edge in small().edges.values() if edge.kind != "Own"]
    )  # no longer a child of 42
    assert place(of_entity(page(again(after, moved)), "Process(pid=43,start=8)"))[0] != 333.0


def test_a_new_export_keeps_what_a_person_added_and_bent() -> None:
    whole = ET.fromstring(written("drawio", small()))
    root = whole.find("diagram/mxGraphModel/root")
    assert root is not None
    cells = {found.get("id", ""): found for found in root}
    rank = of_entity(cells, "Process(pid=42,start=7)").get("id", "")
    gpu = of_entity(cells, "GPU(uuid=GPU-0)").get("id", "")
    ET.SubElement(
        root, "mxCell", {"id": "note", "value": "<b>look</b>", "vertex": "1", "parent": rank, "style": "html=1"}
    )
    ET.SubElement(root, "mxCell", {"id": "arrow", "edge": "1", "parent": "1", "source": "note", "target": gpu})
    lines = [found for found in root if cell(found).get("edge") == "1" and found.get("id") != "arrow"]
    line = lines[0]
    geometry = cell(line).find("mxGeometry")
    assert geometry is not None
    geometry.clear()
    geometry.attrib.update({"relative": "1", "as": "geometry"})
    corners = ET.SubElement(geometry, "Array", {"as": "points"})
    ET.SubElement(corners, "mxPoint", {"x": "5", "y": "6"})
    whole.insert(0, ET.fromstring('<diagram id="mine" name="My page"><mxGraphModel><root/></mxGraphModel></diagram>'))
    data = again(small(), ET.tostring(whole))
    assert [found.get("id") for found in ET.fromstring(data)] == ["mine", "gpuflight"]
    cells = page(data, 1)
    assert cells["note"].get("value") == "<b>look</b>" and cells["note"].get("parent") == rank
    assert cells["arrow"].get("target") == gpu
    points = [(point.get("x"), point.get("y")) for point in cells[line.get("id", "")].iter("mxPoint")]
    assert points == [("5", "6")]
    without = Graph([nodes.Host(hostname="box")])  # what it hung on is gone
    cells = page(again(without, data), 1)
    assert cells["note"].get("parent") == "1" and cells["arrow"].get("target") is None
    assert cells["arrow"].get("source") == "note"


def test_a_page_that_drawio_saved_compressed_is_read() -> None:
    moved = ET.fromstring(move(written("drawio", small()), "Process(pid=43,start=8)", x="333"))
    diagram = moved.find("diagram")
    assert diagram is not None
    model = diagram.find("mxGraphModel")
    assert model is not None
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    plain = urllib.parse.quote(ET.tostring(model).decode(), safe="").encode()
    diagram.text = base64.b64encode(packer.compress(plain) + packer.flush()).decode()
    diagram.remove(model)
    assert place(of_entity(page(again(small(), ET.tostring(moved))), "Process(pid=43,start=8)"))[0] == 333.0


@pytest.mark.parametrize(
    "data",
    [
        b"", b"precious notes", b"<html/>", b"<mxfile", b"\xff\xfe<", b'<?xml version="1.0" encoding="what"?><mxfile/>',
        b'<!DOCTYPE a [<!ENTITY b "c">]><mxfile>&b;</mxfile>',
        b'<mxfile><diagram id="gpuflight">????</diagram></mxfile>',
    ],
)  # fmt: skip
def test_a_file_that_is_no_drawio_file_is_not_replaced(data: bytes, tmp_path: Path) -> None:
    renderer = DrawioRenderer()
    with pytest.raises(InputError, match="file to be replaced") as caught:
        renderer.keep(renderer.build(picture(small())), io.BytesIO(data))
    assert "\n" not in str(caught.value)


def test_the_command_keeps_what_was_moved(tmp_path: Path) -> None:
    source, target = tmp_path / "graph.json", tmp_path / "mine.drawio"
    source.write_bytes(small().model_dump_json())
    assert vis.main([str(source), "-of", "drawio", "-o", str(target)]) == 0
    target.write_bytes(move(target.read_bytes(), "Process(pid=43,start=8)", x="333"))
    assert vis.main([str(source), "-of", "drawio", "-o", str(target), "--force"]) == 0
    assert place(of_entity(page(target.read_bytes()), "Process(pid=43,start=8)"))[0] == 333.0
    target.write_text("precious")
    assert vis.main([str(source), "-of", "drawio", "-o", str(target), "--force"]) == 2
    assert target.read_text() == "precious"


# --- boxes and lines -------------------------------------------------------------------------------------------------


@settings(max_examples=examples(40), deadline=None)
@given(graph=graphs(max_nodes=8, max_edges=10))
def test_shown_boxes_hold_all_entities_and_lines_all_routes(graph: Graph) -> None:
    laid_out = picture(graph)
    found = shown(laid_out)
    assert all(item.parent < item.number for item in found.boxes)
    assert sum(len(line.route.links) for line in found.lines) == sum(len(route.links) for route in laid_out.routes)
    boxes = {item.box.id for item in found.boxes}
    groups = {item.box.id: item.box for item in found.boxes if item.box.role == "group"}
    inside = {name for group in groups.values() for name in boxes_by_id(group.children)}
    assert boxes | inside == set(boxes_by_id(laid_out.boxes))


# --- Mermaid ---------------------------------------------------------------------------------------------------------

MERMAID_LINE = re.compile(
    r"""%%\ [^{}<>]* | flowchart\ TB | \ +end
    | \ +subgraph\ b\d+\["(?P<frame>[\w\ .,:/()+\#;<>-]*)"\]
    | \ +(b\d+i?|more)(\[\[|\(\[|\[)"(?P<label>[\w\ .,:/()+\#;<>-]*)"(\]\]|\]\)|\])
    | \ +b\d+i?\ (<?-\.-?>?|<?--[->])(\|"[\w\ .,:/()+\#;-]*"\|)?\ b\d+i?
    | \ +classDef\ \w+\ stroke:\#[0-9a-f]{6},stroke-width:2px
    | \ +class\ [\w,]+\ \w+ | \ +linkStyle\ [\d,]+\ stroke:\#[0-9a-f]{6}""",
    re.VERBOSE | re.ASCII,
)


def read_mermaid(data: bytes) -> tuple[list[str], int]:
    """The labels and how many lines; each line of the chart is of a form in which a name cannot be syntax."""
    labels: list[str] = []
    arrows = 0
    for line in data.decode().splitlines():
        found = MERMAID_LINE.fullmatch(line)
        assert found is not None, line
        text = found["frame"] if found["frame"] is not None else found["label"]
        if text is not None and not re.match(r" +b\d+i[\[(]", line):
            assert not re.search(r"<(?!br/>)", text)
            first = text.split("<br/>")[0]
            labels.append(re.sub(r"#(\d+);", lambda code: chr(int(code[1])), first).lstrip("\u200b"))
        arrows += bool(re.match(r" +b\d+i? [<-]", line))
    return labels, arrows


@settings(max_examples=examples(60), deadline=None)
@given(graph=graphs(max_nodes=8, max_edges=10))
def test_any_graph_is_a_mermaid_chart_with_all_its_boxes_and_lines(graph: Graph) -> None:
    laid_out = picture(graph)
    labels, arrows = read_mermaid(written("mermaid", laid_out))
    found = shown(laid_out)
    assert len(labels) == len(found.boxes) and arrows == len(found.lines)


def test_mermaid_says_names_as_they_are() -> None:
    labels, _ = read_mermaid(written("mermaid", hostile_graph(), title=HOSTILE[0], notes=[HOSTILE[1]]))
    for text in HOSTILE[:5]:
        assert clean(text, mermaid.LABEL_LIMIT) in labels


def test_mermaid_stays_within_what_sites_accept_and_says_what_is_missing() -> None:
    data = written("mermaid", vis_scenes.crowd(2000), "gephi")
    labels, arrows = read_mermaid(data)
    assert len(data) <= 50_000 and arrows <= 500
    assert re.fullmatch(r"[\d,\u202f]+ boxes and [\d,\u202f]+ lines left out: .*", labels[-1])
    document = get(Renderer, "mermaid")().build(picture(vis_scenes.crowd(2000), "gephi"))
    found = shown(picture(vis_scenes.crowd(2000), "gephi"))
    assert len(labels) - 1 + document.boxes_left_out == len(found.boxes)
    assert arrows + document.lines_left_out == len(found.lines)


# --- DOT and Graphviz ------------------------------------------------------------------------------------------------


def dot(data: bytes, form: str) -> bytes:
    done = subprocess.run(["dot", f"-T{form}"], input=data, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0 and b"Warning" not in done.stderr, done.stderr.decode()[:500]
    return done.stdout


@needs_dot
def test_graphviz_reads_the_boxes_and_lines_of_any_name() -> None:
    """R06, R14, R15: ids are numbers, labels always quoted, whatever ``<lambda>`` or ``tcp:80`` would mean."""
    graph = hostile_graph()
    laid_out = picture(graph, title="t:\\N<b>")
    read = json.loads(dot(written("dot", laid_out), "json0"))
    found = shown(laid_out)
    plain = [item for item in read["objects"] if not item["name"].startswith("cluster")]
    assert {item["name"] for item in plain} == {f"b{item.number}" for item in found.boxes}
    joined = [(plain_name(read, edge["tail"]), plain_name(read, edge["head"])) for edge in read["edges"]]
    visible = [pair for pair, edge in zip(joined, read["edges"], strict=True) if edge.get("style") != "invis"]
    assert Counter(visible) == Counter((f"b{line.source}", f"b{line.target}") for line in found.lines)
    said = ("<lambda>", 'back\\slash\\N \\" {x|<y>}', "&amp; node [shape=box]; graph", "tcp:80|<port>")
    named = Graph([nodes.Host(hostname=name) for name in said])
    svg = ET.fromstring(dot(written("dot", named), "svg"))
    texts = [found.text or "" for found in svg.iter("{http://www.w3.org/2000/svg}text")]
    for name in said:
        assert any(name in text for text in texts), name


def plain_name(read: dict[str, Any], number: int) -> str:
    return next(item["name"] for item in read["objects"] if item["_gvid"] == number)


@needs_dot
@settings(max_examples=examples(10), deadline=None)
@given(graph=graphs(max_nodes=6, max_edges=8))
def test_any_graph_is_accepted_by_graphviz(graph: Graph) -> None:
    read = json.loads(dot(written("dot", graph), "json0"))
    assert len([item for item in read.get("objects", []) if not item["name"].startswith("cluster")]) == len(
        shown(picture(graph)).boxes
    )


@needs_dot
@pytest.mark.parametrize(("name", "begins"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_graphviz_files_are_of_their_kind(name: str, begins: bytes) -> None:
    pytest.importorskip("graphviz")
    assert written(f"graphviz_{name}", small()).startswith(begins)


@needs_dot
def test_a_pdf_says_no_time() -> None:
    pytest.importorskip("graphviz")
    dates = re.findall(rb"/CreationDate \(D:(\d+)", written("graphviz_pdf", small()))
    assert all(set(date) == set(b"0") for date in dates)


def test_without_the_program_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("graphviz")
    monkeypatch.setattr(Tools, "which", lambda self, name: None)
    with pytest.raises(SourceUnavailable, match="install Graphviz: apt-get install graphviz"):
        written("graphviz_svg", small())
    source = tmp_path / "graph.json"
    source.write_bytes(small().model_dump_json())
    assert vis.main([str(source), "-of", "graphviz_png"]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and "apt-get install graphviz" in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["graph.json"]


def test_a_graph_that_takes_too_long_ends_with_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``dot`` needs more than a minute for a thousand boxes with two thousand lines."""
    pytest.importorskip("graphviz")
    slow = tmp_path / "dot"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(graphviz_files, "TIMEOUT_S", 0.2)
    began = time.monotonic()
    with pytest.raises(SourceUnavailable, match=r"did not answer within 0.2 s on \d+ boxes.*--focus"):
        written("graphviz_png", small())
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("name", "module", "extra"), [("graphviz_svg", "graphviz", "graphviz"), ("pyvis", "pyvis", "pyvis")]
)
def test_without_the_package_one_line_names_the_extra(
    name: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for known in [known for known in sys.modules if known == module or known.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"pip install 'gpuflight\[{extra}\]'"):
        written(name, small())


# --- PyVis -----------------------------------------------------------------------------------------------------------


def page_data(data: bytes, name: str) -> list[dict[str, Any]]:
    found = re.search(rf"{name} = new vis\.DataSet\((\[.*?\])\);\n", data.decode(), re.DOTALL)
    assert found is not None
    rows: list[dict[str, Any]] = json.loads(found[1])
    return rows


@settings(max_examples=examples(10), deadline=None)
@given(graph=graphs(max_nodes=6, max_edges=8))
def test_any_graph_is_a_pyvis_page_with_all_its_boxes_and_lines(graph: Graph) -> None:
    pytest.importorskip("pyvis")
    laid_out = picture(graph)
    found = shown(laid_out)
    data = written("pyvis", laid_out)
    labels = [clean(item.box.label, pyvis_page.LABEL_LIMIT) or " " for item in found.boxes]
    assert [row["label"] for row in page_data(data, "nodes")] == labels
    pairs = Counter((row["from"], row["to"]) for row in page_data(data, "edges"))
    assert pairs == Counter((line.source, line.target) for line in found.lines)


def test_r07_pages_are_utf8_whatever_the_locale(tmp_path: Path) -> None:
    pytest.importorskip("pyvis")
    import os
    import sys

    graph = small()
    graph.try_add_node(nodes.Process(pid=90, start=1, attributes={"name": "🚀 ünïcode"}))
    source = tmp_path / "graph.json"
    source.write_bytes(graph.model_dump_json())
    for form, suffix in (("pyvis", ".pyvis.html"), ("gexf", ".gexf"), ("drawio", ".drawio"), ("csv", ".csv")):
        done = subprocess.run(
            [sys.executable, "-m", "gpuflight.cli.vis", str(source), "-of", form],
            env={**os.environ, "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), form
        text = source.with_suffix(suffix).read_text("utf-8-sig")
        assert "🚀 ünïcode" in text or "\\ud83d\\ude80 \\u00fcn\\u00efcode" in text, form


def test_r08_pyvis_writes_without_a_notebook() -> None:
    pytest.importorskip("pyvis")
    data = written("pyvis", small(), title="A & B")
    assert data.startswith(b"<html>") and b"<title>A &amp; B</title>" in data
    assert data.count(b"</html>") == 1


def test_pyvis_pages_load_nothing_and_run_no_name() -> None:
    """R12, and no network: nothing is fetched, and a policy forbids it."""
    pytest.importorskip("pyvis")
    graph = hostile_graph()
    graph.try_add_node(
        nodes.Process(pid=95, start=1, attributes={"name": "</script><img onerror=alert(1)>", "href": "x"})
    )
    text = written("pyvis", graph, title=HOSTILE[0], notes=[HOSTILE[1]]).decode()
    assert not re.search(r"<(script|link|img|iframe)\b[^>]*\b(src|href)=", text)
    assert "default-src 'none'" in text and "cdn." not in text
    assert "<script>alert" not in text and "<img onerror" not in text and "<img src=x" not in text
    assert html.escape(HOSTILE[0]) in text


def test_r09_places_come_from_the_layout_and_the_browser_moves_nothing() -> None:
    pytest.importorskip("pyvis")
    data = written("pyvis", vis_scenes.h100())
    rows = page_data(data, "nodes")
    assert all(isinstance(row["x"], (int, float)) and row["physics"] is False for row in rows)
    assert len({(row["x"], row["y"]) for row in rows}) > len(rows) * 0.9
    assert b'"physics": {"enabled": false}' in data and b"loadingBar" not in data.split(b"<body>")[1]


def test_r10_a_large_graph_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyvis")
    monkeypatch.setattr(pyvis_page, "BOXES_MAX", 50)
    data = written("pyvis", vis_scenes.crowd(400), "gephi")
    assert len(page_data(data, "nodes")) == 50
    assert re.search(r"<p>[\d\u202f]+ boxes and [\d\u202f]+ lines left out: more than 50 boxes", data.decode())


def test_r11_the_path_is_the_one_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, with spaces, in a folder that is there; whole or not at all."""
    pytest.importorskip("pyvis")
    monkeypatch.chdir(tmp_path)
    Path("my folder").mkdir()
    Path("graph.json").write_bytes(small().model_dump_json())
    for form, name in (("pyvis", "a picture.html"), ("gexf", "b.x"), ("csv", "ü.csv")):
        assert vis.main(["graph.json", "-of", form, "-o", f"my folder/{name}"]) == 0
        assert Path("my folder", name).stat().st_size > 1000
    assert sorted(path.name for path in Path("my folder").iterdir()) == ["a picture.html", "b.x", "ü.csv"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["graph.json", "my folder"]
    assert vis.main(["graph.json", "-of", "csv", "-o", "my folder"]) == 2


def test_r21_every_registered_format_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text("utf-8")
    named = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    from gpuflight.registry import plugins

    assert named == {name for name, cls in plugins(Renderer).items() if cls.__module__.startswith("gpuflight.")}
