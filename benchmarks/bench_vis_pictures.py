"""The SVG writer on 10,000 nodes: against writing as many bytes, and against Graphviz's svg of the same boxes.

Graphviz is given every place (``neato -n2``), so that it has nothing to do but to write. Run: no arguments, < 60 s.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.unit.vis_scenes import crowd

from gpuflight.registry import get
from gpuflight.vis.base import Layout, LayoutOptions
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.render.svg import SvgRenderer
from gpuflight.vis.render.svg_boxes import in_order

RUNS = 5


def least(work: object) -> float:
    """CPU seconds of the quickest of some runs."""
    found = []
    for _ in range(RUNS):
        start = time.process_time()
        work()  # type: ignore[operator]
        found.append(time.process_time() - start)
    return min(found)


def picture(layout: LayoutGraph) -> bytes:
    renderer = SvgRenderer()
    file = io.BytesIO()
    renderer.write(renderer.build(layout), file)
    return file.getvalue()


def dot_of(layout: LayoutGraph) -> bytes:
    """The same boxes, labels and lines, each box with its place."""
    lines = ["digraph {", "node [shape=box fixedsize=true fontsize=8]"]
    names = {}
    for box, _ in in_order(layout):
        names[box.id] = len(names)
        label = box.label.replace("\\", "\\\\").replace('"', '\\"')
        place = f"{box.x + box.w / 2:.1f},{-box.y - box.h / 2:.1f}"
        lines.append(f'{names[box.id]} [label="{label}" pos="{place}" width={box.w / 72:.4f} height={box.h / 72:.4f}]')
    lines += [f"{names[route.source]} -> {names[route.target]}" for route in layout.routes]
    return "\n".join([*lines, "}"]).encode()


def main() -> None:
    layout = get(Layout, "default")().layout(crowd(10_000), LayoutOptions())
    data = picture(layout)
    ours = least(lambda: picture(layout))
    floor = least(lambda: io.BytesIO().write(bytearray(data)))
    print(f"svg of {sum(1 for _ in in_order(layout)):,} boxes and {len(layout.routes):,} lines")
    print(f"  ours      {1000 * ours:7.1f} ms CPU  {len(data) / 1e6:5.2f} MB")
    print(f"  floor     {1000 * floor:7.1f} ms CPU  as many bytes copied: ours is {ours / max(floor, 1e-6):.0f} times")
    tool = shutil.which("neato")
    if tool is None:
        print("  Graphviz  not installed: not measured")
        return
    start = time.perf_counter()
    try:
        done = subprocess.run([tool, "-n2", "-Tsvg"], input=dot_of(layout), capture_output=True, timeout=30, check=True)
    except subprocess.TimeoutExpired:
        print(f"  Graphviz  more than 30 s: ours is over {30 / ours:.0f} times faster")
        return
    taken = time.perf_counter() - start
    print(f"  Graphviz  {1000 * taken:7.1f} ms      {len(done.stdout) / 1e6:5.2f} MB, {taken / ours:.1f} times ours")


if __name__ == "__main__":
    main()
