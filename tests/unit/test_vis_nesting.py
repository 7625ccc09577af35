"""What stands in what, what folds, and which lines are drawn between what."""

from __future__ import annotations

from tests.unit import vis_scenes
from tests.unit.test_vis_layout import boxes_of, find, lay_out, path

from gpuflight.graph import Graph, edges, nodes
from gpuflight.rounds import Environment, Finding
from gpuflight.vis.model import Box, LayoutGraph, Route


def process(pid: int, name: str = "", **metrics: float) -> nodes.Process:
    return nodes.Process(pid=pid, start=1, attributes={"name": name or f"p{pid}"}, metrics=metrics)


def pid(number: int) -> str:
    return f"Process(pid={number},start=1)"


def route_between(picture: LayoutGraph, one: str, two: str) -> list[Route]:
    return [route for route in picture.routes if {route.source, route.target} == {one, two}]


def groups(picture: LayoutGraph) -> dict[str, Box]:
    return {box.label: box for box, _ in boxes_of(picture) if box.role == "group"}


def test_host_holds_container_holds_process_holds_child_and_thread():
    picture = lay_out(vis_scenes.h100())
    thread = path(picture, "Thread(tid=41203,start=9)")
    assert thread[:5] == [
        "Host(dgx-01)", "Container(5f1c9a7e2b40)", "Process(pid=4000,start=4100)", "Process(pid=4102,start=4202)",
        "group:Thread:Process(pid=4102,start=4202)",
    ]  # fmt: skip


def test_a_process_in_a_container_stands_in_it_and_not_in_its_parent_outside():
    picture = lay_out(vis_scenes.h100())
    assert path(picture, "Process(pid=4000,start=4100)") == ["Host(dgx-01)", "Container(5f1c9a7e2b40)"]
    crossing = [link for link in picture.links if link.target == "Process(pid=4000,start=4100)" and link.kind == "Own"]
    assert [link.route >= 0 for link in crossing] == [True]


def test_devices_stand_in_their_switch_and_numa_node():
    picture = lay_out(vis_scenes.h100())
    gpu = next(box for box, _ in boxes_of(picture) if box.kind == "GPU" and box.attributes["index"] == 6)
    assert path(picture, gpu.id) == ["Host(dgx-01)", "hardware:", "Numa(1)", "PciDevice(0000:c5:00.0)"]
    assert path(picture, "PciDevice(0000:c7:00.0)")[-1] == gpu.id
    assert path(picture, "RdmaPort(mlx5_3/1)")[-1] == "RdmaDevice(mlx5_3)"
    assert path(picture, "Disk(nvme1n1)")[-1] == "Numa(1)"
    assert path(picture, "CpuPackage(1)")[-1] == "Numa(1)"


def test_a_device_is_placed_through_a_set_of_one_numa_node():
    graph = Graph(
        [nodes.Numa(index=6), nodes.NumaSet(nodes="6"), nodes.NPU(index=0), nodes.Numa(index=7)],
        [edges.Affinity("NPU(0)", "NumaSet(6)"), edges.NumaSetContain("NumaSet(6)", "Numa(6)")],
    )
    assert path(lay_out(graph), "NPU(0)")[-1] == "Numa(6)"


def test_ppid_nests_where_a_graph_has_no_own_edges():
    child = nodes.Process(pid=2, start=1, attributes={"ppid": 1})
    assert path(lay_out(Graph([process(1), child])), pid(2))[-1] == pid(1)


def test_what_processes_share_stands_in_the_smallest_box_around_them():
    graph = Graph(
        [process(1), process(2), process(3), process(4), nodes.SharedMemory(mechanism="posix", key="a")],
        [
            edges.Own(pid(1), pid(2)),
            edges.Own(pid(2), pid(3)),
            edges.Own(pid(2), pid(4)),
            edges.Access(pid(3), "SharedMemory(posix,a)"),
            edges.Access(pid(4), "SharedMemory(posix,a)"),
        ],
    )
    picture = lay_out(graph)
    assert path(picture, "SharedMemory(posix,a)")[-1] == pid(2)
    assert route_between(picture, pid(3), "SharedMemory(posix,a)")


def test_a_foreign_host_has_a_box_of_its_own():
    far = nodes.Process(pid=1, start=1, ns="node-7")
    picture = lay_out(Graph([process(1), far]), environment=Environment(hostname="here"))
    assert [box.label for box in picture.boxes] == ["here", "node-7"]
    assert path(picture, far.id) == ["host:node-7"]


def test_connections_are_lifted_to_processes_and_counted():
    ends = [nodes.Socket(protocol="tcp", address=f"a:{n}", attributes={"state": "ESTABLISHED"}) for n in range(6)]
    graph = Graph(
        [process(1), process(2), *ends],
        [
            *(edges.Belong(end.id, pid(1 + n % 2)) for n, end in enumerate(ends)),
            edges.ConnectTo(ends[0].id, ends[1].id, {}, {"bytes_per_s": 1e6}),
            edges.ConnectTo(ends[2].id, ends[3].id, {}, {"bytes_per_s": 2e6}),
            edges.ConnectTo(ends[5].id, ends[4].id, {}, {"bytes_per_s": 3e6}),
        ],
    )
    picture = lay_out(graph)
    [route] = route_between(picture, pid(1), pid(2))
    assert (route.medium, route.label, len(route.links)) == ("network", "3 conn. · 6 MB/s", 3)
    assert route.forward and route.backward


def test_a_pipe_is_a_line_from_writer_to_reader():
    graph = Graph(
        [process(1), process(2), nodes.Pipe(inode=5)],
        [edges.SendTo(pid(1), "Pipe(ino=5)"), edges.SendTo("Pipe(ino=5)", pid(2))],
    )
    picture = lay_out(graph)
    [route] = picture.routes
    assert (route.source, route.target, route.forward, route.backward) in (
        (pid(1), pid(2), True, False), (pid(2), pid(1), False, True),
    )  # fmt: skip
    assert route.label == "pipe" and sorted(route.links) == [0, 1]


def test_a_pipe_with_very_many_ends_is_not_multiplied():
    count = 40
    graph = Graph(
        [*(process(n) for n in range(1, 2 * count + 1)), nodes.Pipe(inode=5)],
        [
            *(edges.SendTo(pid(n), "Pipe(ino=5)") for n in range(1, count + 1)),
            *(edges.SendTo("Pipe(ino=5)", pid(n)) for n in range(count + 1, 2 * count + 1)),
        ],
    )
    assert len(lay_out(graph).routes) <= 2 * count


def test_idle_processes_fold_and_say_why():
    many = [process(n, cpu_pct=0.0, rss_bytes=1024.0**2) for n in range(2, 40)]
    graph = Graph([process(1), *many], [edges.Own(pid(1), item.id) for item in many])
    found = groups(lay_out(graph))
    assert list(found) == ["38 idle processes"]
    group = found["38 idle processes"]
    assert group.count == 38 and "no connection" in group.rule and group.lines == ["0 % CPU · 38 MiB"]


def test_what_a_finding_names_or_a_gpu_knows_is_never_folded():
    many = [process(n, "worker", cpu_pct=0.0) for n in range(2, 40)]
    graph = Graph(
        [process(1), nodes.GPU(uuid="GPU-a"), *many],
        [*(edges.Own(pid(1), item.id) for item in many), edges.Access(pid(9), "GPU(uuid=GPU-a)")],
    )
    finding = Finding(id="f", rule="r", severity="warn", message="m", entities=[pid(7)])
    picture = lay_out(graph, findings=[finding])
    assert path(picture, pid(7))[-1] == path(picture, pid(9))[-1] == pid(1)
    assert groups(picture)["36 × worker"].count == 36


def test_kernel_threads_fold_together():
    found = groups(lay_out(vis_scenes.h100()))
    assert found["58 kernel threads"].count == 58


def test_workers_of_one_name_fold_and_their_lines_are_bundled():
    picture = lay_out(vis_scenes.h100())
    workers = next(box for box, _ in boxes_of(picture) if box.label == "6 × pt_data_worker")
    rank = path(picture, workers.id)[-1]
    labels = [route.label for route in route_between(picture, workers.id, rank)]
    assert labels == ["pipe ×6 · 24 MB/s"]


def test_far_ends_of_connections_stand_outside_the_host_by_address():
    picture = lay_out(vis_scenes.h100())
    outside = next(box for box in picture.boxes if box.kind == "Elsewhere")
    assert sorted(box.label for box in outside.children) == [f"10.0.0.{n} · 4 sockets" for n in (6, 7, 8)]


def test_more_siblings_than_fit_fold_the_least_connected():
    busy = [process(n, f"name{n}", cpu_pct=5.0 + n) for n in range(2, 102)]
    graph = Graph([process(1), *busy], [edges.Own(pid(1), item.id) for item in busy])
    picture = lay_out(graph)
    [group] = groups(picture).values()
    assert group.label == "64 processes more"
    assert path(picture, pid(101))[-1] == pid(1), "the busiest stands on its own"
    assert path(picture, pid(2))[-1] == group.id


def test_nothing_is_folded_without_a_rule_and_a_count():
    for graph in (vis_scenes.h100(), vis_scenes.crowd(2000)):
        for box, _ in boxes_of(lay_out(graph)):
            if box.role == "group":
                assert box.rule and box.count == sum(child.count for child in box.children) > 0


def test_a_circle_of_ownership_is_said():
    graph = Graph([process(1), process(2)], [edges.Own(pid(1), pid(2)), edges.Own(pid(2), pid(1))])
    picture = lay_out(graph)
    assert any("circle" in note for note in picture.notes)
    assert [link.route >= 0 for link in picture.links].count(True) == 1, "the cut edge is drawn"


def test_an_end_that_is_not_in_the_graph_is_drawn_and_said():
    picture = lay_out(Graph([process(1)], [edges.Access(pid(1), "GPU(uuid=GPU-gone)")]))
    gone = find(picture, "GPU(uuid=GPU-gone)")
    assert gone.missing and gone.kind == "GPU"
    assert any("not in the graph" in note for note in picture.notes)
    assert route_between(picture, pid(1), gone.id)


def test_depth_is_cut_and_said():
    count = 40
    graph = Graph([process(n) for n in range(count)], [edges.Own(pid(n), pid(n + 1)) for n in range(count - 1)])
    picture = lay_out(graph, depth_max=5)
    assert max(len(path(picture, pid(n))) for n in range(count)) <= 6
    assert any("nested deeper than 5" in note for note in picture.notes)


def test_depth_is_cut_in_a_frame_that_no_entity_stands_for_too():
    graph = Graph([process(1), process(2), nodes.Numa(index=0)], [edges.Own(pid(1), pid(2))])
    for depth_max in (1, 2):  # at the frame of the host; at that of its hardware
        picture = lay_out(graph, depth_max=depth_max)
        assert max(len(path(picture, node)) for node in graph.nodes) == depth_max
        assert any(f"nested deeper than {depth_max}" in note for note in picture.notes)


def test_placement_lines_wait_until_they_are_asked_for():
    picture = lay_out(vis_scenes.h100())
    assert {link.route for link in picture.links if link.medium == "placement"} == {-1}


def test_a_gpu_shows_memory_and_utilisation_and_what_is_unknown():
    gpu = nodes.GPU(
        uuid="GPU-a", metrics={"memory_used_bytes": 20, "memory_total_bytes": 80}, unknown={"sm_util_pct": "no rights"}
    )
    bars = {bar.label: (bar.fraction, bar.text) for bar in find(lay_out(Graph([gpu])), gpu.id).bars}
    assert bars == {"mem": (0.25, "20 B / 80 B"), "SM": (0.0, "unknown")}


def test_a_crowd_shows_the_most_connected_and_folds_the_rest():
    picture = lay_out(vis_scenes.crowd(8000))
    grouped: set[str] = set()
    shown = []
    for box, around in boxes_of(picture):  # parents first
        if around is not None and (around.id in grouped or around.id.startswith("group:")):
            grouped.add(box.id)
        elif box.kind == "Process":
            shown.append(box)
    assert 60 <= len(shown) <= 200
    assert max(picture.width, picture.height) < 10_000
