"""Mermaid's own code, in headless Chromium, reads and draws the charts; PyVis pages open without a word.

``make test`` fetches the package ``mermaid`` from npm into the virtual environment where npm is installed.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit import vis_scenes
from tests.unit.test_plugin_conformance import HOSTILE, hostile_graph
from tests.unit.vis_files import picture, small, written

from gpuflight.graph import Graph, edges, nodes
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.render import mermaid
from gpuflight.vis.render.shown import shown
from gpuflight.vis.text import clean

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
SCRIPT = Path(os.environ.get("GPUFLIGHT_MERMAID_JS", Path(sys.prefix) / "npm/mermaid/package/dist/mermaid.min.js"))
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
needs_mermaid = pytest.mark.skipif(not SCRIPT.exists(), reason="needs the npm package mermaid: make test fetches it")

PAGE = """<!doctype html><meta charset="utf-8"><body><pre id="out"></pre><script src="%s"></script><script>
const charts = %s;
(async () => {
  mermaid.initialize({startOnLoad: false});
  const found = [];
  for (const [number, chart] of charts.entries()) {
    try {
      await mermaid.parse(chart);
      const svg = new DOMParser().parseFromString((await mermaid.render("m" + number, chart)).svg, "text/html");
      found.push({
        labels: [...svg.querySelectorAll(".nodeLabel")].map(label => label.innerText || label.textContent),
        nodes: svg.querySelectorAll("g.node").length,
        frames: svg.querySelectorAll("g.cluster").length,
        lines: svg.querySelectorAll("path.flowchart-link").length,
        active: svg.querySelectorAll("script, img, iframe, a").length,
      });
    } catch (error) { found.push({error: String(error)}); }
  }
  document.getElementById("out").textContent = JSON.stringify(found);
})();
</script>"""


def opened(page: Path) -> subprocess.CompletedProcess[str]:
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--allow-file-access-from-files",
        f"--user-data-dir={page.parent / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=60000",
        "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120, check=True)


@needs_mermaid
def test_mermaid_draws_every_box_and_line(tmp_path: Path) -> None:
    """A small graph, hostile names, owners that talk to what they own, a host of 8 GPUs, one too large."""
    one, two = nodes.Process(pid=1, start=1), nodes.Process(pid=2, start=1)
    talk = [
        edges.Own(one.id, two.id), edges.SendTo(one.id, one.id), edges.SendTo(one.id, two.id),
        edges.SendTo(two.id, one.id), edges.SendTo(two.id, two.id),
    ]  # fmt: skip
    pictures: list[LayoutGraph] = [
        picture(small()), picture(hostile_graph(), title=HOSTILE[0]), picture(Graph([one, two], talk)),
        picture(Graph()), picture(vis_scenes.h100()), picture(vis_scenes.crowd(600)),
    ]  # fmt: skip
    charts = [written("mermaid", laid_out).decode() for laid_out in pictures]
    page = tmp_path / "page.html"
    page.write_text(PAGE % (SCRIPT.resolve().as_uri(), json.dumps(charts).replace("<", "\\u003c")), "utf-8")
    said = re.search(r'<pre id="out">(.*?)</pre>', opened(page).stdout, re.DOTALL)
    assert said is not None and said[1]
    results: list[dict[str, Any]] = json.loads(html.unescape(said[1]))
    for result, laid_out in zip(results, pictures, strict=True):
        assert "error" not in result, result
        assert result["active"] == 0
        document = mermaid.MermaidRenderer().build(laid_out)
        found = shown(laid_out)
        if not document.boxes_left_out and not document.lines_left_out:
            own = sum(bool(re.match(r" +b\d+i\(", line)) for line in document.lines)
            assert result["nodes"] + result["frames"] == len(found.boxes) + own
            assert result["lines"] == len(found.lines)
    for text in HOSTILE[:4]:
        assert any(clean(text, mermaid.LABEL_LIMIT) in label for label in results[1]["labels"]), text


def test_pyvis_pages_open_without_a_word_on_the_console(tmp_path: Path) -> None:
    pytest.importorskip("pyvis")
    page = tmp_path / "page.html"
    page.write_bytes(written("pyvis", hostile_graph(), title=HOSTILE[0]))
    done = opened(page)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert re.search(r'<div class="vis-network"[^>]*>\s*<canvas', done.stdout), "vis-network drew"
