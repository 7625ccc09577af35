"""The layouts constraint (layers) and fabric (hardware alone)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit import vis_scenes
from tests.unit.test_vis_layout import boxes_of, find, path

from gpuflight.graph import Graph, edges, nodes
from gpuflight.registry import get
from gpuflight.vis.base import Layout, LayoutOptions
from gpuflight.vis.layout.circles import circles
from gpuflight.vis.layout.layers import _apart
from gpuflight.vis.model import LayoutGraph


def lay_out(name: str, graph: Graph, **options: object) -> LayoutGraph:
    return get(Layout, name)().layout(graph, LayoutOptions(**options))  # type: ignore[arg-type]


def constraint(graph: Graph, **options: object) -> LayoutGraph:
    pytest.importorskip("fast_sugiyama")
    return lay_out("constraint", graph, **options)


def process(pid: int, cpu: float = 50.0) -> nodes.Process:
    return nodes.Process(pid=pid, start=1, attributes={"name": f"p{pid}"}, metrics={"cpu_pct": cpu})


def name(pid: int) -> str:
    return f"Process(pid={pid},start=1)"


def test_holders_stand_above_what_they_hold_and_data_flows_down() -> None:
    host = nodes.Host(hostname="box")
    gpu = nodes.GPU(uuid="GPU-a", attributes={"index": 0, "name": "H100"})
    graph = Graph(
        [host, gpu, *(process(pid) for pid in (1, 2, 3))],
        [
            *(edges.Host(host.id, name(pid)) for pid in (1, 2, 3)),
            edges.Own(name(1), name(2)),
            edges.Own(name(1), name(3)),
            edges.SendTo(name(2), name(3)),
            edges.Access(name(3), gpu.id),
        ],
    )
    picture = constraint(graph)
    heights = [find(picture, box_id).y for box_id in (host.id, name(1), name(2), name(3), gpu.id)]
    assert heights == sorted(heights) and len(set(heights)) == 5
    lines = {frozenset((route.source, route.target)) for route in picture.routes}
    assert frozenset((host.id, name(1))) in lines and frozenset((name(1), name(2))) in lines
    assert frozenset((host.id, name(3))) not in lines, "said by way of its parent"


def test_a_circle_of_data_is_one_box_and_no_other_is_in_it() -> None:
    graph = Graph(
        [process(pid) for pid in range(1, 7)],
        [edges.SendTo(name(one), name(two)) for one, two in ((1, 2), (2, 3), (3, 1), (3, 4), (5, 1), (4, 6))],
    )
    picture = constraint(graph)
    frames = [box for box, _ in boxes_of(picture) if box.id.startswith("circle:")]
    assert [box.label for box in frames] == ["3 in a circle of data"]
    assert {child.id for child in frames[0].children} == {name(1), name(2), name(3)}
    assert frames[0].synthetic and frames[0].count == 3
    assert find(picture, name(5)).y < frames[0].y < find(picture, name(4)).y < find(picture, name(6)).y


def test_endpoints_stay_in_the_box_of_their_process() -> None:
    picture = constraint(vis_scenes.h100())
    groups = [box for box in find(picture, "Process(pid=4100,start=4200)").children if box.role == "group"]
    assert {box.label for box in groups} >= {"24 threads", "6 pipes"}


def test_lines_cross_little() -> None:
    """Two trees of three layers, their edges given in a bad order: drawn without a crossing."""
    links = [
        edges.SendTo(name(one), name(two)) for one, two in ((1, 30), (1, 10), (2, 20), (2, 40), (10, 11), (40, 41))
    ]
    picture = constraint(Graph([process(pid) for pid in (1, 2, 10, 20, 30, 40, 11, 41)], links))
    xs = {box.id: (box.y, box.x + box.w / 2) for box, _ in boxes_of(picture)}
    ends = [(xs[link.source], xs[link.target]) for link in picture.links]
    crossings = sum(
        a[0][0] == b[0][0] and a[1][0] == b[1][0] and (a[0][1] - b[0][1]) * (a[1][1] - b[1][1]) < 0
        for at, a in enumerate(ends)
        for b in ends[at + 1 :]
    )
    assert crossings == 0


@given(st.integers(1, 14), st.lists(st.tuples(st.integers(0, 13), st.integers(0, 13)), max_size=40))
def test_circles_are_what_leads_to_each_other(count: int, pairs: list[tuple[int, int]]) -> None:
    pairs = [(one % count, two % count) for one, two in pairs]
    reach = {one: {one} for one in range(count)}
    for _ in range(count):
        for one, two in pairs:
            for known in reach.values():
                if one in known:
                    known.add(two)
    wanted = {frozenset(two for two in range(count) if two in reach[one] and one in reach[two]) for one in range(count)}
    assert {frozenset(members) for members in circles(count, pairs)} == {part for part in wanted if len(part) > 1}


def test_boxes_of_a_row_keep_their_order_and_gaps() -> None:
    from gpuflight.vis.layout.item import Item
    from gpuflight.vis.layout.layers import GAP_X

    row = [Item(str(at), "Process") for at in range(4)]
    for item in row:
        item.w = 100.0
    assert _apart(row, [0.0, 500.0, 900.0, 2000.0]) == [0.0, 500.0, 900.0, 2000.0]
    pooled = _apart(row, [0.0, 0.0, 0.0, 0.0])
    assert [two - one for one, two in pairwise(pooled)] == [100.0 + GAP_X] * 3
    assert sum(pooled) == pytest.approx(0.0)


def test_fabric_shows_the_hardware_and_folds_the_rest_with_its_count() -> None:
    graph = vis_scenes.h100()
    picture = lay_out("fabric", graph)
    gpu = next(box for box, _ in boxes_of(picture) if box.label.startswith("GPU 5"))
    kinds = [around.split("(")[0] for around in path(picture, gpu.id)]
    assert kinds == ["Host", "hardware:", "CpuPackage", "Numa", "PciDevice"]
    groups = [box for box, _ in boxes_of(picture) if box.id.startswith("work:")]
    assert [box.label for box in groups] == [f"{box.count} entities that are no hardware" for box in groups]
    hardware = {"Host", "GPU", "NvSwitch", "Numa", "CpuPackage", "PciDevice", "RdmaDevice", "RdmaPort", "Nic", "Disk"}
    left = [entity for entity in graph.nodes.values() if entity.kind not in hardware]
    assert sum(box.count for box in groups) == len(left)
    assert all(not child.children for box in groups for child in box.children)
    assert {route.medium for route in picture.routes} == {"fabric"}
    assert sum(route.label.startswith("NVLink ×18") for route in picture.routes) == 8


def test_fabric_puts_both_nodes_of_a_package_into_it() -> None:
    package = nodes.CpuPackage(index=0)
    graph = Graph(
        [nodes.Host(hostname="a"), package, nodes.Numa(index=0), nodes.Numa(index=1)],
        [edges.Affinity(package.id, "Numa(0)"), edges.Affinity(package.id, "Numa(1)")],
    )
    picture = lay_out("fabric", graph)
    assert [child.id for child in find(picture, package.id).children] == ["Numa(0)", "Numa(1)"]


def test_fabric_of_software_alone_is_one_box() -> None:
    picture = lay_out("fabric", Graph([process(1), process(2)], [edges.SendTo(name(1), name(2))]))
    groups = [box for box, _ in boxes_of(picture) if box.role == "group"]
    assert [box.label for box in groups] == ["2 entities that are no hardware"] and not picture.routes
