"""How fast pictures are written: GEXF beside networkx, the HTML page beside PyVis.

    python benchmarks/bench_renderers.py [--nodes 10000] [--times 7]

A host of ``--nodes`` entities and twice as many edges, placed once by the default layout. CPU time of ``build`` and
``write`` into memory, each against its peer in alternation, the median of the ratios:

* GEXF: networkx's ``write_gexf`` (1.3) of the same graph with the same attributes, places and colours, as read from our
  own file. Goal: at least 6 times as fast. Floor: the same bytes, already there, copied into memory.
* HTML: PyVis's ``from_nx`` of the same graph of networkx with the same attributes (less those whose names it takes for
  its own arguments), physics off, its libraries inside, as its documentation shows. Goal: at least 40 times as fast,
  and at most 2 MB.

The other formats are timed beside these, without a goal.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.unit.vis_scenes import crowd

from gpuflight.registry import get
from gpuflight.vis.base import Layout, LayoutOptions, Renderer
from gpuflight.vis.model import LayoutGraph

GEXF_GOAL, HTML_GOAL, HTML_BYTES = 6.0, 40.0, 2_000_000


def cpu_s(work: Callable[[], Any]) -> float:
    """CPU seconds of one call."""
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def write(name: str, laid_out: LayoutGraph) -> bytes:
    """The picture in a format."""
    renderer: Renderer = get(Renderer, name)()
    file = io.BytesIO()
    renderer.write(renderer.build(laid_out), file)
    return file.getvalue()


def ratios(ours: Callable[[], Any], peer: Callable[[], Any], times: int) -> tuple[float, float, float]:
    """Median seconds of both and the median of the paired ratios, after one call of each."""
    ours()
    peer()
    pairs = [(cpu_s(ours), cpu_s(peer)) for _ in range(times)]
    return (
        statistics.median(first for first, _ in pairs),
        statistics.median(second for _, second in pairs),
        statistics.median(second / first for first, second in pairs),
    )


def pyvis_page(graph: Any) -> str:
    """A graph of networkx as PyVis is meant to be used."""
    from pyvis.network import Network

    network = Network(height="900px", width="100%", directed=True, cdn_resources="in_line")
    network.from_nx(graph)
    network.toggle_physics(False)
    page: str = network.generate_html(notebook=False)
    return page


def main() -> int:
    """Print figures; exit code 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--times", type=int, default=7)
    arguments = parser.parse_args()
    import networkx

    layout: Layout = get(Layout, "default")()
    laid_out = layout.layout(crowd(arguments.nodes), LayoutOptions(title="crowd"))
    print(f"{laid_out.nodes_count:,} nodes, {laid_out.edges_count:,} edges; CPU time, median of {arguments.times}")

    data = write("gexf", laid_out)
    same = networkx.read_gexf(io.BytesIO(data), version="1.3")
    ours_s, peer_s, gexf = ratios(
        lambda: write("gexf", laid_out),
        lambda: networkx.write_gexf(same, io.BytesIO(), version="1.3"),
        arguments.times,
    )
    floor_s = statistics.median(cpu_s(lambda: io.BytesIO().write(data)) for _ in range(9))
    print(
        f"gexf: {ours_s * 1e3:.0f} ms, {len(data) / 1e6:.1f} MB; networkx {peer_s * 1e3:.0f} ms: {gexf:.1f} times as "
        f"fast (goal {GEXF_GOAL:g}); floor, the bytes copied: {floor_s * 1e3:.1f} ms"
    )

    for _, _, values in same.edges(data=True):
        for name in ("directed", "id"):
            values.pop(name, None)
    for _, values in same.nodes(data=True):
        values.pop("viz", None)
    size = len(write("html", laid_out))
    html = HTML_GOAL
    try:
        ours_s, peer_s, html = ratios(lambda: write("html", laid_out), lambda: pyvis_page(same), 3)
        pyvis_size = len(pyvis_page(same))
    except ImportError:
        print("html: not compared, PyVis is not installed (pip install 'gpuflight[pyvis]')")
    else:
        print(
            f"html: {ours_s * 1e3:.0f} ms, {size / 1e6:.2f} MB (goal {HTML_BYTES / 1e6:g}); PyVis {peer_s * 1e3:.0f} "
            f"ms, {pyvis_size / 1e6:.2f} MB: {html:.0f} times as fast (goal {HTML_GOAL:g})"
        )
    for name in ("json", "graphml", "csv", "drawio", "dot", "mermaid"):
        made = write(name, laid_out)
        taken_s = statistics.median(cpu_s(lambda name=name: write(name, laid_out)) for _ in range(3))  # type: ignore[misc]
        print(f"{name}: {taken_s * 1e3:.0f} ms, {len(made) / 1e6:.2f} MB")
    return 0 if gexf >= GEXF_GOAL and html >= HTML_GOAL and size <= HTML_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
