"""mxGraph, the library that draw.io is built on, reads our diagrams: cells, nesting, labels, places, lines.

``make test`` fetches the package ``mxgraph`` from npm into the virtual environment where npm is installed.
"""

from __future__ import annotations

import html
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from tests.e2e.test_vis_mermaid import CHROMIUM, opened
from tests.unit import vis_scenes
from tests.unit.test_plugin_conformance import HOSTILE, hostile_graph
from tests.unit.vis_files import picture, small, written

from gpuflight.graph import Graph
from gpuflight.vis.render.tables import boxes_by_id
from gpuflight.vis.text import clean

SCRIPT = Path(
    os.environ.get("GPUFLIGHT_MXGRAPH_JS", Path(sys.prefix) / "npm/mxgraph/package/javascript/mxClient.min.js")
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.skipif(not SCRIPT.exists(), reason="needs the npm package mxgraph: make test fetches it"),
]

PAGE = """<!doctype html><meta charset="utf-8"><body><pre id="out"></pre><div id="view"></div>
<script>mxLoadResources = false; mxLoadStylesheets = false; mxBasePath = "nowhere";</script><script src="%s"></script>
<script>
const found = [];
for (const text of %s) {
  const graph = new mxGraph(document.getElementById("view"));
  graph.convertValueToString =
    cell => cell.value && cell.value.getAttribute ? cell.value.getAttribute("label") : cell.value;
  const page = mxUtils.parseXml(text).documentElement;
  new mxCodec(page.ownerDocument).decode(page, graph.getModel());
  const cells = Object.values(graph.getModel().cells).filter(cell => cell.vertex || cell.edge).map(cell => ({
    label: graph.getLabel(cell),
    entity: cell.value && cell.value.getAttribute ? cell.value.getAttribute("entity") : null,
    edge: Boolean(cell.edge),
    joined: Boolean(cell.edge && cell.source && cell.target),
    drawn: Boolean(graph.view.getState(cell)),
    x: graph.view.getState(cell) ? graph.view.getState(cell).x : null,
    y: graph.view.getState(cell) ? graph.view.getState(cell).y : null,
  }));
  found.push(cells);
}
document.getElementById("out").textContent = JSON.stringify(found);
</script>"""


def test_mxgraph_draws_every_box_and_line_where_it_belongs(tmp_path: Path) -> None:
    pictures = [
        picture(small()),
        picture(hostile_graph(), title=HOSTILE[0]),
        picture(Graph()),
        picture(vis_scenes.h100()),
    ]
    models = []
    for laid_out in pictures:
        model = ET.fromstring(written("drawio", laid_out)).find("diagram/mxGraphModel")
        assert model is not None
        models.append(ET.tostring(model, encoding="unicode"))
    page = tmp_path / "page.html"
    data = json.dumps(models).replace("<", "\\u003c")
    page.write_text(PAGE % (SCRIPT.resolve().as_uri(), data), "utf-8")
    said = re.search(r'<pre id="out">(.*?)</pre>', opened(page).stdout, re.DOTALL)
    assert said is not None and said[1]
    results: list[list[dict[str, Any]]] = json.loads(html.unescape(said[1]))
    for cells, laid_out in zip(results, pictures, strict=True):
        boxes = {clean(name, 2000): box for name, box in boxes_by_id(laid_out.boxes).items()}
        drawn = {cell["entity"]: cell for cell in cells if cell["entity"] is not None}
        assert drawn.keys() == boxes.keys()
        for name, cell in drawn.items():
            assert cell["drawn"] and cell["label"].startswith(clean(boxes[name].label, 200).strip())
            assert (cell["x"], cell["y"]) == pytest.approx((boxes[name].x, boxes[name].y), abs=0.5)
        lines = [cell for cell in cells if cell["edge"]]
        assert all(cell["joined"] for cell in lines)
        assert len(lines) == len({(route.source, route.target, route.medium) for route in laid_out.routes})
