"""The layout gephi: forces, coarsening, boxes moved apart, and a start from the previous picture."""

from __future__ import annotations

from itertools import combinations

import pytest

np = pytest.importorskip("numpy")

from tests.unit import vis_scenes  # noqa: E402
from tests.unit.test_vis_layout import boxes_of  # noqa: E402

from gpuflight.graph import Graph, edges, nodes  # noqa: E402
from gpuflight.vis.base import LayoutOptions  # noqa: E402
from gpuflight.vis.layout import force  # noqa: E402
from gpuflight.vis.layout.gephi import GephiLayout, parts  # noqa: E402
from gpuflight.vis.layout.spread import apart, make_room, touching  # noqa: E402
from gpuflight.vis.model import Box, LayoutGraph  # noqa: E402


def lay_out(graph: Graph, previous: LayoutGraph | None = None, **options: object) -> LayoutGraph:
    return GephiLayout().layout(graph, LayoutOptions(previous=previous, **options))  # type: ignore[arg-type]


def processes(count: int, pairs: list[tuple[int, int]]) -> Graph:
    members = [nodes.Process(pid=at, start=1, attributes={"name": f"p{at}"}) for at in range(count)]
    return Graph(members, [edges.SendTo(members[one].id, members[two].id) for one, two in pairs])


def ring_of_cliques(cliques: int, size: int) -> list[tuple[int, int]]:
    pairs = []
    for clique in range(cliques):
        first = clique * size
        pairs += list(combinations(range(first, first + size), 2))
        pairs.append((first, (first + size) % (cliques * size)))
    return pairs


def middle(box: Box) -> tuple[float, float]:
    return box.x + box.w / 2, box.y + box.h / 2


def overlapping(boxes: list[Box]) -> int:
    return sum(
        one.x < two.x + two.w and two.x < one.x + one.w and one.y < two.y + two.h and two.y < one.y + one.h
        for one, two in combinations(boxes, 2)
    )


def test_what_is_wired_together_stands_together() -> None:
    size = 12
    pairs = np.array(ring_of_cliques(40, size))
    places = force.solve(40 * size, pairs, np.ones(len(pairs)))
    within = np.hypot(*(places[pairs[:, 0]] - places[pairs[:, 1]]).T)
    far = np.hypot(*(places - places[np.arange(len(places))[::-1]]).T)
    assert within.mean() < 0.2 * far.mean()


def test_the_mesh_pushes_as_all_pairs_do() -> None:
    turn = np.arange(700) * 2.4
    places = np.sqrt(np.arange(700))[:, None] * 9 * np.stack((np.cos(turn), np.sin(turn)), axis=1)
    masses = 1.0 + np.arange(700) % 5
    exact, meshed = force._push_exact(places, masses), force._push_mesh(places, masses)
    error = np.hypot(*(exact - meshed).T) / np.hypot(*exact.T).mean()
    assert error.mean() < 0.05


def test_heaps_are_joined_neighbours_and_fewer() -> None:
    pairs = np.array(ring_of_cliques(20, 6))
    ends, weights = force._simple(120, pairs, np.ones(len(pairs)))
    heaps = force._heaps(120, ends, weights, np.ones(120))
    assert heaps.max() + 1 < 80
    joined = {frozenset(pair) for pair in pairs.tolist()}
    for heap in range(int(heaps.max()) + 1):
        members = np.flatnonzero(heaps == heap).tolist()
        assert len(members) == 1 or all(
            any(frozenset((one, two)) in joined for two in members if two != one) for one in members
        )


def test_the_unit_of_a_picture_is_found_again() -> None:
    pairs = np.array(ring_of_cliques(12, 8))
    places = force.solve(96, pairs, np.ones(len(pairs)))
    assert force.unit_of((places - places.mean(0)) * 7.0, pairs, np.ones(len(pairs))) == pytest.approx(7.0, rel=0.15)


def test_boxes_are_moved_apart() -> None:
    places = np.stack((np.arange(300) % 17 * 30.0, np.arange(300) // 17 * 12.0), axis=1)
    halves = np.stack((20.0 + np.arange(300) % 7 * 4, np.full(300, 8.0)), axis=1)
    before = len(touching(places, halves)[0])
    assert before > 1000
    assert len(touching(apart(places, halves, 2.0), halves)[0]) <= before // 100


def test_touching_finds_what_all_pairs_find() -> None:
    rng = np.random.default_rng(2)
    places, halves = rng.uniform(0, 400, (200, 2)), rng.uniform(3, 30, (200, 2))
    found = {tuple(sorted(pair)) for pair in zip(*(side.tolist() for side in touching(places, halves)), strict=True)}
    wanted = {
        (one, two)
        for one, two in combinations(range(200), 2)
        if (np.abs(places[one] - places[two]) < halves[one] + halves[two]).all()
    }
    assert found == wanted


def test_room_is_made_only_where_something_moved() -> None:
    places = np.stack((np.arange(100) * 50.0, np.zeros(100)), axis=1)
    places[40] = places[41]
    loose = np.zeros(100)
    loose[40] = 1.0
    halves = np.full((100, 2), 10.0)
    after = make_room(places, halves, loose, 0.0)
    assert len(touching(after, halves * 0.99)[0]) == 0
    still = np.delete(np.arange(100), (40, 41))
    assert np.abs(after - places)[still].max() < 1.0
    assert (make_room(places, halves, np.zeros(100)) == places).all()


def test_parts_are_told_apart() -> None:
    assert parts(6, np.array([(4, 2), (2, 0), (3, 5)])).tolist() == [0, 1, 0, 3, 0, 3]


def test_no_box_lies_on_another() -> None:
    assert overlapping(lay_out(vis_scenes.h100()).boxes) == 0
    assert overlapping(lay_out(vis_scenes.crowd(400)).boxes) <= 2


def test_the_more_wired_the_larger() -> None:
    picture = lay_out(processes(9, [(0, at) for at in range(1, 9)] + [(1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]))
    boxes = {box.label: box for box in picture.boxes}
    assert boxes["p0"].scale > boxes["p3"].scale > boxes["p8"].scale


def test_twins_fold_with_their_count_and_a_finding_keeps_its_own_box() -> None:
    graph = Graph([nodes.Process(pid=1, start=1)])
    for tid in range(30):
        thread = nodes.Thread(tid=tid, start=1, attributes={"name": "pool"})
        graph.try_add_node(thread)
        graph.try_add_edge(edges.Own("Process(pid=1,start=1)", thread.id))
    picture = lay_out(graph)
    group = next(box for box in picture.boxes if box.role == "group")
    assert (group.label, group.count, len(group.children)) == ("30 × pool", 30, 30)
    assert any(note.startswith("30 entities folded into 1 group") for note in picture.notes)
    finding = vis_scenes.findings(vis_scenes.h100())[0]
    finding.entities = ["Thread(tid=7,start=1)"]
    assert any(box.id == "Thread(tid=7,start=1)" for box in lay_out(graph, findings=[finding]).boxes)


def test_what_a_host_holds_by_way_of_others_has_no_line_to_it() -> None:
    picture = lay_out(vis_scenes.crowd(100))
    drawn = [route for route in picture.routes if "Host(crowd)" in (route.source, route.target)]
    assert len(drawn) == 1
    assert any("from a host to what its processes" in note for note in picture.notes)


def test_a_part_without_lines_to_others_stands_beside_them() -> None:
    picture = lay_out(processes(30, [(at, at + 1) for at in range(9)] + [(at, at + 1) for at in range(10, 29)]))
    boxes = {box.label: box for box in picture.boxes}
    small, large = ([boxes[f"p{at}"] for at in range(*ends)] for ends in ((0, 10), (10, 30)))
    apart_x = max(b.x + b.w for b in large) < min(b.x for b in small)
    apart_y = max(b.y + b.h for b in large) < min(b.y for b in small)
    assert apart_x or apart_y


def test_after_a_small_change_the_rest_stays_where_it_was() -> None:
    pairs = ring_of_cliques(30, 8)
    before = lay_out(processes(240, pairs))
    after = lay_out(processes(243, [*pairs, (240, 5), (241, 77), (242, 241)]), before)
    old, new = ({box.id: middle(box) for box in picture.boxes} for picture in (before, after))
    steps = np.array([np.subtract(new[name], at) for name, at in old.items()])
    moved = sorted(np.hypot(*(steps - np.median(steps, axis=0)).T))  # the whole may shift, to make room at the left
    assert moved[len(moved) // 2] < 1.0 and moved[int(len(moved) * 0.9)] < 30.0
    added, beside = new["Process(pid=240,start=1)"], new["Process(pid=5,start=1)"]
    assert np.hypot(added[0] - beside[0], added[1] - beside[1]) < 0.2 * before.width
    assert overlapping(after.boxes) <= 2
    assert after == lay_out(processes(243, [*pairs, (240, 5), (241, 77), (242, 241)]), before)


def test_what_is_new_and_wired_to_nothing_known_stands_below() -> None:
    pairs = ring_of_cliques(6, 5)
    before = lay_out(processes(30, pairs))
    after = lay_out(processes(33, [*pairs, (30, 31)]), before)
    lowest = max(box.y + box.h for box in after.boxes if box.id in {old.id for old in before.boxes})
    fresh = [box for box, _ in boxes_of(after) if box.label in ("p30", "p31", "p32")]
    assert len(fresh) == 3 and all(box.y > lowest for box in fresh)


def test_a_picture_of_another_layout_or_system_is_no_start() -> None:
    graph = processes(30, ring_of_cliques(6, 5))
    cold = lay_out(graph)
    other = lay_out(processes(8, [(0, 1), (1, 2)]))
    assert lay_out(graph, other) == cold
    foreign = lay_out(graph)
    foreign.layout = "default"
    assert lay_out(graph, foreign) == cold
