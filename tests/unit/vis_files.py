"""What the tests of picture formats share: a small graph with one of everything, and files of it."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from tests.conftest import DATA

from gpuflight.graph import Graph, edges, nodes
from gpuflight.registry import get
from gpuflight.rounds import Environment
from gpuflight.vis.base import Layout, LayoutOptions, Renderer
from gpuflight.vis.model import LayoutGraph

GOLDEN = DATA / "vis"
NAN, INF = float("nan"), float("inf")


def small() -> Graph:
    """A host with a container, a rank on a GPU, and awkward values: lists, mixed types, NaN, infinity, None, an end
    that is not there, an edge without direction, two edges between the same two."""
    host = nodes.Host(hostname="box", metrics={"cpus_count": 8})
    container = nodes.Container(container_id="5f1c", attributes={"name": "train & <co>", "image": None})
    rank = nodes.Process(
        pid=42, start=7, attributes={"name": "python3", "cmdline": ["python3", "train.py"], "state": "S", "top_cpu": 1},
        metrics={"cpu_pct": 99.5, "rss_bytes": 2**40, "odd": NAN}, unknown={"fds_count": "may not be read"},
    )  # fmt: skip
    worker = nodes.Process(
        pid=43, start=8, attributes={"name": '=cmd|" /C calc"!A0', "state": 3, "seeded": True},
        metrics={"cpu_pct": 1, "odd": -INF, "rss_bytes": 2**64},
    )  # fmt: skip
    gpus = [nodes.GPU(uuid=f"GPU-{index}", attributes={"name": "H100", "index": index}) for index in range(2)]
    return Graph(
        [host, container, rank, worker, *gpus],
        [
            edges.Host(host.id, container.id),
            edges.Host(container.id, rank.id),
            edges.Own(rank.id, worker.id),
            edges.Access(rank.id, gpus[0].id, {"how": "rw"}, {"memory_used_bytes": 3 * 2**30}),
            edges.SendTo(worker.id, rank.id, {}, {"bytes_per_s": INF}),
            edges.SendTo(rank.id, rank.id),
            edges.ConnectTo(rank.id, "Socket(tcp,10.0.0.7:80)", {}, {}, {"rtt_ms": "not measured"}),
            edges.NvLink(gpus[0].id, gpus[1].id, {}, {"links_count": 18}),
        ],
    )


def picture(graph: Graph, layout: str = "default", **options: Any) -> LayoutGraph:
    """A graph, laid out."""
    engine: Layout = get(Layout, layout)()
    return engine.layout(graph, LayoutOptions(**options))


def written(name: str, graph: Graph | LayoutGraph, layout: str = "default", **options: Any) -> bytes:
    """A graph as a file of a format."""
    renderer: Renderer = get(Renderer, name)()
    laid_out = graph if isinstance(graph, LayoutGraph) else picture(graph, layout, **options)
    file = io.BytesIO()
    renderer.write(renderer.build(laid_out), file)
    return file.getvalue()


def golden(name: str, suffix: str) -> tuple[bytes, bytes]:
    """What a format writes of ``small``, and what it wrote when it was last looked at (UPDATE_GOLDEN=1 writes that)."""
    data = written(name, small(), environment=Environment(hostname="box"), round_number=3, notes=["One & only"])
    path: Path = GOLDEN / f"small{suffix}"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_bytes(data)
    return data, path.read_bytes()
