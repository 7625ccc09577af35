"""The default layout as geometry: everything placed once, inside what holds it, beside its siblings, joined."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import graphs
from tests.unit import vis_scenes

from gpuflight.graph import Graph, edges, nodes
from gpuflight.registry import get, plugins
from gpuflight.vis.base import Layout, LayoutOptions
from gpuflight.vis.layout.default import DefaultLayout
from gpuflight.vis.layout.picture import rounded
from gpuflight.vis.model import Box, LayoutGraph


def lay_out(graph: Graph, **options: Any) -> LayoutGraph:
    return DefaultLayout().layout(graph, LayoutOptions(**options))


def boxes_of(picture: LayoutGraph) -> Iterator[tuple[Box, Box | None]]:
    """Every box with the one around it."""
    stack: list[tuple[Box, Box | None]] = [(box, None) for box in picture.boxes]
    while stack:
        box, around = stack.pop()
        yield box, around
        stack.extend((child, box) for child in box.children)


def find(picture: LayoutGraph, box_id: str) -> Box:
    return next(box for box, _ in boxes_of(picture) if box.id == box_id)


def path(picture: LayoutGraph, box_id: str) -> list[str]:
    """Kinds and ids around a box, outermost first."""
    around = {box.id: above for box, above in boxes_of(picture)}
    found: list[str] = []
    above = around[box_id]
    while above is not None:
        found.insert(0, above.id)
        above = around[above.id]
    return found


def check_geometry(picture: LayoutGraph, graph: Graph) -> None:
    """What holds of every picture."""
    slack = 0.6
    seen = Counter(box.id for box, _ in boxes_of(picture))
    assert not [box_id for box_id, count in seen.items() if count > 1]
    ends = {end for edge in graph.edges.values() for end in (edge.source, edge.target)}
    real = {box.id for box, _ in boxes_of(picture) if not box.synthetic}
    assert real == set(graph.nodes) | ends
    assert {box.id for box, _ in boxes_of(picture) if box.missing} == ends - set(graph.nodes)
    for box, around in boxes_of(picture):
        assert box.w > 0 and box.h > 0
        if around is not None:
            assert around.x - slack <= box.x and box.x + box.w <= around.x + around.w + slack, (box.id, around.id)
            assert around.y - slack <= box.y and box.y + box.h <= around.y + around.h + slack, (box.id, around.id)
            assert box.y >= around.y + (around.header if around.role == "frame" else 0) - slack
        siblings = sorted(box.children, key=lambda child: child.y)
        if len(siblings) <= 60:
            for at, one in enumerate(siblings):
                for two in siblings[at + 1 :]:
                    apart = (
                        one.x + one.w <= two.x + slack * two.scale
                        or two.x + two.w <= one.x + slack * one.scale
                        or one.y + one.h <= two.y + slack * two.scale
                        or two.y + two.h <= one.y + slack * one.scale
                    )
                    assert apart, (one.id, two.id)
    for box in picture.boxes:
        assert box.x >= 0 and box.x + box.w <= picture.width and box.y >= 0 and box.y + box.h <= picture.height
    assert 0.33 <= picture.width / picture.height <= 3.01
    assert len(picture.links) == len(graph.edges)
    by_id = {box.id: box for box, _ in boxes_of(picture)}
    for route in picture.routes:
        assert route.source in by_id and route.target in by_id and route.source != route.target
        assert len(route.points) >= 2 and route.links
        for box_id, (x, y) in ((route.source, route.points[0]), (route.target, route.points[-1])):
            box = by_id[box_id]
            assert box.x - 1 <= x <= box.x + box.w + 1 and box.y - 1 <= y <= box.y + box.h + 1
    assert all(-1 <= link.route < len(picture.routes) for link in picture.links)


SCENES = {
    "empty": Graph,
    "one node": lambda: Graph([nodes.Process(pid=1, start=1)]),
    "one GPU": lambda: Graph([nodes.GPU(uuid="GPU-a")]),
    "only edges": lambda: Graph([], [edges.SendTo("Process(pid=1,start=1)", "Pipe(ino=3)")]),
    "8 x H100": vis_scenes.h100,
    "100": lambda: vis_scenes.crowd(100),
    "1000": lambda: vis_scenes.crowd(1000),
    "10000": lambda: vis_scenes.crowd(10_000),
    "star of 3000 sockets": lambda: Graph(
        [nodes.Process(pid=1, start=1), *(nodes.Socket(protocol="tcp", address=f"h:{n}") for n in range(3000))],
        [edges.Belong(f"Socket(tcp,h:{n})", "Process(pid=1,start=1)") for n in range(3000)],
    ),
    "chain of 3000 processes": lambda: Graph(
        [nodes.Process(pid=n, start=1) for n in range(3000)],
        [edges.Own(f"Process(pid={n},start=1)", f"Process(pid={n + 1},start=1)") for n in range(2999)],
    ),
    "2000 hosts": lambda: Graph([nodes.Host(hostname=f"n{n}", ns=f"n{n}") for n in range(2000)]),
    "circle of owners": lambda: Graph(
        [nodes.Process(pid=n, start=1) for n in range(5)],
        [edges.Own(f"Process(pid={n},start=1)", f"Process(pid={(n + 1) % 5},start=1)") for n in range(5)],
    ),
    "circle of 3000 holders": lambda: Graph(
        [nodes.Socket(protocol="tcp", address=f"h:{n}") for n in range(3000)],
        [edges.Belong(f"Socket(tcp,h:{n})", f"Socket(tcp,h:{(n + 1) % 3000})") for n in range(3000)],
    ),
    "self loops": lambda: Graph(
        [nodes.Process(pid=1, start=1), nodes.Process(pid=2, start=1)],
        [
            kind("Process(pid=1,start=1)", "Process(pid=1,start=1)")
            for kind in (edges.Own, edges.Belong, edges.SendTo, edges.NvLink, edges.HasAttribute)
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("scene", SCENES)
def test_every_scene_is_laid_out_whole(scene: str) -> None:
    graph = SCENES[scene]()
    check_geometry(lay_out(graph), graph)


@given(graphs(max_nodes=12, max_edges=24))
def test_any_graph_is_laid_out_whole(graph: Graph) -> None:
    check_geometry(lay_out(graph), graph)


@given(st.randoms(use_true_random=False), st.integers(2, 60))
def test_any_tangle_of_ownership_is_laid_out_whole(random: Any, count: int) -> None:
    makers = (
        lambda n: nodes.Process(pid=n, start=1),
        lambda n: nodes.Thread(tid=n, start=1),
        lambda n: nodes.Container(container_id=f"c{n}"),
        lambda n: nodes.Socket(protocol="tcp", address=f"a:{n}"),
        lambda n: nodes.Pipe(inode=n),
        lambda n: nodes.GPU(uuid=f"GPU-{n}"),
        lambda n: nodes.Numa(index=n),
        lambda n: nodes.PciDevice(address=f"0000:{n:02x}:00.0"),
        lambda n: nodes.Host(hostname=f"h{n}"),
    )
    members = [random.choice(makers)(n) for n in range(count)]
    ids = [entity.id for entity in members]
    kinds = (
        edges.Own, edges.Host, edges.Belong, edges.RunOn, edges.SendTo, edges.ConnectTo, edges.Access, edges.PcieLink,
        edges.AttachedTo, edges.Affinity, edges.NvLink,
    )  # fmt: skip
    links = [random.choice(kinds)(random.choice(ids), random.choice(ids)) for _ in range(3 * count)]
    graph = Graph(members, links)
    check_geometry(lay_out(graph), graph)


@pytest.mark.parametrize("scene", ["8 x H100", "1000"])
def test_the_same_graph_gives_the_same_picture(scene: str) -> None:
    first, second = (msgspec.json.encode(lay_out(SCENES[scene]())) for _ in range(2))
    assert first == second


def test_the_graph_is_left_as_it_was() -> None:
    graph, untouched = vis_scenes.h100(), vis_scenes.h100()
    lay_out(graph)
    assert graph == untouched


def test_names_decide_over_order_of_sight() -> None:
    """Collectors report in any order; the picture does not depend on it."""
    graph = vis_scenes.h100()
    shuffled = Graph(reversed(list(graph.nodes.values())), reversed(list(graph.edges.values())))
    places = [
        {box.id: (box.x, box.y, box.w, box.h) for box, _ in boxes_of(lay_out(g)) if box.role in ("frame", "card")}
        for g in (graph, shuffled)
    ]
    assert places[0] == places[1]


def test_ranks_stand_in_the_order_of_their_gpus_and_over_them() -> None:
    picture = lay_out(vis_scenes.h100())
    ranks = [find(picture, f"Process(pid={4100 + rank},start={4200 + rank})") for rank in range(8)]
    gpus = sorted((box for box, _ in boxes_of(picture) if box.kind == "GPU"), key=lambda box: box.attributes["index"])
    assert [rank.x for rank in ranks] == sorted(rank.x for rank in ranks)
    assert [gpu.x for gpu in gpus] == sorted(gpu.x for gpu in gpus)
    assert len({rank.y for rank in ranks}) == len({gpu.y for gpu in gpus}) == 1
    assert all(rank.y + rank.h < gpu.y for rank, gpu in zip(ranks, gpus, strict=True))


def test_a_rank_says_which_one_it_is() -> None:
    picture = lay_out(vis_scenes.h100())
    assert find(picture, "Process(pid=4103,start=4203)").label == "python3 train.py local-rank=3"


def test_lines_down_to_gpus_do_not_cross() -> None:
    routes = [route for route in lay_out(vis_scenes.h100()).routes if route.medium == "gpu"]
    assert len(routes) == 8
    spans = sorted((min(x for x, _ in route.points), max(x for x, _ in route.points)) for route in routes)
    assert all(left[1] <= right[0] for left, right in pairwise(spans))


def test_the_collector_of_garbage_is_left_as_it_was() -> None:
    assert gc.isenabled()
    lay_out(vis_scenes.h100())
    assert gc.isenabled()
    gc.disable()
    try:
        lay_out(vis_scenes.h100())
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(AttributeError):
        lay_out(None)  # type: ignore[arg-type]
    assert gc.isenabled()


def test_registered() -> None:
    assert get(Layout, "default") is DefaultLayout
    assert plugins(Layout)["default"].description


def _talkers(*peers: int) -> Graph:
    """A process with so many connections to each of some others."""
    graph = Graph([nodes.Process(pid=1, start=1, attributes={"name": "hub"})])
    port = 1000
    for pid, count in enumerate(peers, 2):
        other = nodes.Process(pid=pid, start=1, attributes={"name": f"peer-{pid}"})
        graph.try_add_node(other)
        for _ in range(count):
            port += 1
            near = nodes.Socket(protocol="tcp", address=f"10.0.0.1:{port}", attributes={"state": "ESTABLISHED"})
            far = nodes.Socket(protocol="tcp", address=f"10.0.0.2:{port}", attributes={"state": "ESTABLISHED"})
            for socket, holder in ((near, "Process(pid=1,start=1)"), (far, other.id)):
                graph.try_add_node(socket)
                graph.try_add_edge(edges.Belong(socket.id, holder))
            graph.try_add_edge(edges.ConnectTo(near.id, far.id))
    return graph


def test_sockets_of_one_pair_fold_with_their_count_and_a_note_says_so() -> None:
    picture = DefaultLayout().layout(_talkers(5, 4, 1), LayoutOptions())
    hub = find(picture, "Process(pid=1,start=1)")
    groups = {box.label: (box.count, box.rule) for box in hub.children if box.role == "group"}
    assert groups == {
        "5 sockets ↔ peer-2": (5, "connections of one pair"),
        "4 sockets ↔ peer-3": (4, "connections of one pair"),
    }
    assert any("folded into" in note and "each says" in note for note in picture.notes)
    crowd = DefaultLayout().layout(_talkers(*[3] * 9), LayoutOptions())
    hub = find(crowd, "Process(pid=1,start=1)")
    assert [box.label for box in hub.children] == ["27 TCP sockets"], "many pairs are told by their lines"


@given(
    st.lists(
        st.tuples(
            st.floats(-1e6, 1e6) | st.integers(-(10**6), 10**6).map(lambda step: step * 6.405),  # a letter's width
            st.sampled_from((1, 2, 4, 5, 7)),
        )
    )
)
def test_numbers_are_rounded_exactly_as_round_does(numbers: list[tuple[float, int]]) -> None:
    for number, digits in numbers:
        assert rounded(number, digits) == round(number, digits)
