"""The viewer at 10,000 nodes and 20,000 edges, in headless Chromium: time on the main thread per frame while panning,
time to the first paint, size of the page.

Headless Chromium draws in software, so frame rates say nothing; what counts is how long the renderer's main thread is
busy, which the tracing of DevTools tells: script, layout, and the recording of what is to be drawn. The peer, PyVis, is
measured by bench_renderers.py (size and time to write).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chromium import Chromium
from tests.unit import vis_scenes

from gpuflight.vis.base import LayoutOptions
from gpuflight.vis.layout.default import DefaultLayout
from gpuflight.vis.render.html import HtmlRenderer

NODES = 10_000
FRAMES = 60
GOAL_FRAME_MS = 16.0
GOAL_PAINT_S = 1.5
GOAL_BYTES = 2_000_000
VIEWS = (("all of it", 1.0), ("4 times nearer", 4.0), ("16 times nearer", 16.0))


PAN = """(async () => {
  const canvas = document.getElementById("canvas"), at = canvas.getBoundingClientRect();
  const send = (kind, x, y) => canvas.dispatchEvent(new PointerEvent(kind, {pointerId: 1, clientX: at.x + x, clientY: at.y + y, bubbles: true}));
  canvas.setPointerCapture = () => {};
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  await frame(); await frame();
  send("pointerdown", 600, 400);
  for (let step = 1; step <= %d; step++) {
    send("pointermove", 600 + 180 * Math.sin(step / 9), 400 + 120 * Math.sin(step / 7));
    await frame();
  }
  send("pointerup", 600, 400);
  await frame(); await frame();
})()"""  # noqa: E501


def main_thread_ms(browser: Chromium) -> float:
    """Time of the renderer's main thread for each frame of a drag."""
    browser.call("Tracing.start", categories="toplevel,devtools.timeline,__metadata", transferMode="ReportEvents")
    browser.js(PAN % FRAMES)
    browser.events.clear()
    browser.call("Tracing.end")
    browser.wait("Tracing.tracingComplete")
    events = [
        event
        for message in browser.events
        if message.get("method") == "Tracing.dataCollected"
        for event in message["params"]["value"]
    ]
    mains = {
        (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == "CrRendererMain"
    }
    tasks = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) in mains and e["name"].endswith("RunTask")]
    busiest: dict[tuple[int, int], float] = {}
    names = {e["name"] for e in tasks}
    name = "RunTask" if "RunTask" in names else next(iter(names))
    for event in tasks:
        if event["name"] == name:
            key = (event["pid"], event["tid"])
            busiest[key] = busiest.get(key, 0.0) + event["dur"] / 1000
    return max(busiest.values()) / FRAMES


def row(what: str, value: str, goal: str, met: bool) -> None:
    print(f"{what:<52} {value:>12}   goal {goal:<10} {'met' if met else 'MISSED'}")


def main() -> None:
    graph = vis_scenes.crowd(NODES)
    renderer = HtmlRenderer()
    with tempfile.TemporaryDirectory() as name:
        page = Path(name) / "page.html"
        with open(page, "wb") as file:
            renderer.write(renderer.build(DefaultLayout().layout(graph, LayoutOptions())), file)
        size = page.stat().st_size
        print(f"viewer, {len(graph.nodes):,} nodes, {len(graph.edges):,} edges, headless Chromium 1600 x 1000")
        row("size of the page", f"{size / 1e6:.2f} MB", "2 MB", size <= GOAL_BYTES)
        with Chromium(Path(name) / "profile") as browser:
            paints = []
            for _ in range(3):
                browser.call("Page.navigate", url=page.as_uri())
                browser.until("performance.getEntriesByName('gpuflight-painted').length")
                paints.append(browser.js("performance.getEntriesByName('gpuflight-painted')[0].startTime") / 1000)
            row("first paint, best of 3", f"{min(paints):.2f} s", "1.5 s", min(paints) <= GOAL_PAINT_S)
            for words, factor in VIEWS:
                browser.js(f"gpuflightViewer.fit(); gpuflightViewer.zoom({factor});")
                best = min(main_thread_ms(browser) for _ in range(2))
                row(f"main thread per frame while panning, {words}", f"{best:.1f} ms", "16 ms", best <= GOAL_FRAME_MS)


if __name__ == "__main__":
    main()
