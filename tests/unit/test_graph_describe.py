"""The text form: compact, complete in its hierarchy, the same for the same graph."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from tests.strategies import graphs

from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.describe import describe
from gpuflight.graph.tree import Tree, natural_key, references
from gpuflight.graph.units import human, quantity
from gpuflight.graph.witty import load_witty


def test_the_small_machine(machine: Graph) -> None:
    text = describe(machine)
    assert text.splitlines()[:3] == [
        "graph: 17 nodes, 24 edges",
        "  PciDevice 3, Process 3, GPU 2, Numa 2, Socket 2, Container 1, Host 1, Nic 1, Pipe 1, Thread 1",
        "  Affinity 4, Host 4, Own 3, AttachedTo 2, Belong 2, PcieLink 2, SendTo 2, Access 1, ConnectTo 1, "
        "NumaAccess 1, NumaDistance 1, Proximity 1",
    ]
    lines = text.splitlines()
    for line in (
        "Host node1: kernel 6.1.0",
        f"  Container {'c' * 64} train: runtime docker",
        "    Process 10 python: cpu 99.5 %, rss 2 GiB",
        "      -> Access GPU 0: memory used 16 GiB",
        "      ~ NumaAccess Numa 0",
        "      Process 11 python",
        "        -> SendTo Pipe 7 -> Process 10 python",
        "        Socket tcp,10.0.0.5:40000",
        "          -> ConnectTo Socket tcp,10.0.0.5:29500: rtt 0.05 ms",
        "      Socket tcp,10.0.0.5:29500",
        "      Thread 10 python",
        "hardware:",
        "  GPU 0: pcie gen 5, pcie width 16",
        "  Nic eth0: speed 100 Gb/s",
    ):
        assert line in lines, (line, text)


def test_it_is_a_fifth_of_the_json(witty_json: dict[str, Any]) -> None:
    graph = load_witty(witty_json)
    assert len(describe(graph).encode()) < 0.2 * len(graph.model_dump_json())


@given(graphs())
def test_it_depends_on_the_graph_alone(graph: Graph) -> None:
    shuffled_nodes, shuffled_edges = list(graph.nodes.values()), list(graph.edges.values())
    random.Random(7).shuffle(shuffled_nodes)
    random.Random(8).shuffle(shuffled_edges)
    assert describe(Graph(shuffled_nodes, shuffled_edges)) == describe(graph)
    assert describe(graph, detail=True) == describe(Graph(shuffled_nodes, shuffled_edges), detail=True)


@given(graphs())
def test_hostile_text_cannot_break_lines(graph: Graph) -> None:
    text = describe(graph, detail=True)
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        assert line.isprintable(), repr(line)


@given(graphs(max_nodes=4))
def test_detail_names_every_entity(graph: Graph) -> None:
    lines = describe(graph, detail=True).splitlines()
    starts = sum(any(line.lstrip().startswith(f"{kind}") for kind in nodes.NODE_KINDS) for line in lines)
    assert starts >= len(graph.nodes)


def test_a_limit_says_how_much_is_left_out(machine: Graph) -> None:
    whole = describe(machine).splitlines()
    short = describe(machine, limit=5).splitlines()
    assert short[:4] == whole[:4]
    assert short[4] == f"… {len(whole) - 4} more lines"
    assert describe(machine, limit=len(whole)) == describe(machine)
    assert describe(machine, limit=0).splitlines() == [f"… {len(whole)} more lines"]


def test_like_siblings_fold_and_unlike_ones_do_not() -> None:
    parent = nodes.Process(pid=1, start=1)
    threads = [
        nodes.Thread(tid=n, start=1, attributes={"name": "worker"}, metrics={"cpu_pct": n}) for n in range(2, 42)
    ]
    odd = nodes.Thread(tid=99, start=1, attributes={"name": "main"})
    graph = Graph([parent, *threads, odd], [edges.Own(parent.id, t.id) for t in (*threads, odd)])
    assert describe(graph).splitlines()[3:] == [
        "Process 1",
        "  Thread ×40 worker: 2, 3, 4, 5, …; cpu 2 % to 41 %",
        "  Thread 99 main",
    ]
    assert "×" not in describe(graph, detail=True)


def test_processes_that_talk_to_different_ones_do_not_fold() -> None:
    peers = [nodes.Process(pid=n, start=1, attributes={"name": "w"}) for n in range(10, 14)]
    targets = [nodes.SharedMemory(mechanism="posix", key=str(n)) for n in range(4)]
    flows = [edges.Access(peer.id, target.id) for peer, target in zip(peers, targets, strict=True)]
    assert "×" not in describe(Graph([*peers, *targets], flows)).replace("SharedMemory ×4", "")
    same = [edges.Access(peer.id, targets[0].id) for peer in peers]
    assert "Process ×4 w: 10, 11, 12, 13" in describe(Graph([*peers, *targets], same)).splitlines()


def test_a_pipe_is_told_with_its_readers_and_has_a_line_only_without_a_writer() -> None:
    graph = Graph(
        [nodes.Process(pid=1, start=1), *(nodes.Pipe(inode=n) for n in (7, 8, 9))],
        [
            edges.SendTo("Process(pid=1,start=1)", "Pipe(ino=7)"),
            edges.SendTo("Process(pid=1,start=1)", "Pipe(ino=8)"),
            edges.SendTo("Pipe(ino=8)", "Process(pid=1,start=1)"),
            edges.SendTo("Pipe(ino=9)", "Process(pid=1,start=1)"),
        ],
    )
    assert describe(graph).splitlines()[3:] == [
        "Pipe 9",
        "  -> SendTo Process 1",
        "Process 1",
        "  -> SendTo Pipe 7 -> nobody",
        "  -> SendTo Pipe 8 -> Process 1",
    ]
    assert "Pipe 7" in describe(graph, detail=True).splitlines()


def test_many_edges_of_one_kind_fold() -> None:
    process = nodes.Process(pid=1, start=1)
    mounts = [nodes.Mount(path=f"/m{n}") for n in range(12)]
    graph = Graph([process, *mounts], [edges.Access(process.id, m.id, {}, {"x_count": 2}) for m in mounts])
    assert "  -> Access Mount ×12: /m0, /m1, /m2, /m3, …; x 2" in describe(graph).splitlines()


def test_tombstones_are_marked() -> None:
    graph = Graph(
        [nodes.Process(pid=1, start=1, attributes={"ended_round": 12}), nodes.Process(pid=2, start=1)],
        [edges.SendTo("Process(pid=2,start=1)", "Process(pid=1,start=1)", {"ended_round": 12})],
    )
    lines = describe(graph).splitlines()
    assert "Process 1 [ended in round 12]" in lines
    assert "  -> SendTo Process 1 [ended in round 12]" in lines


def test_what_is_unknown_is_told_once_per_reason() -> None:
    gpus = [
        nodes.GPU(uuid=f"G{n}", attributes={"index": n}, unknown={"power_watts": "no right", "sm_util_pct": "no right"})
        for n in range(3)
    ]
    assert describe(Graph(gpus)).splitlines()[-2:] == ["unknown:", "  GPU: power_watts ×3, sm_util_pct ×3: no right"]


def test_a_pid_that_was_reused_is_told_by_its_id() -> None:
    graph = Graph([nodes.Process(pid=7, start=1), nodes.Process(pid=7, start=2)])
    assert set(references(graph).values()) == {"Process(pid=7,start=1)", "Process(pid=7,start=2)"}


def test_a_shared_endpoint_is_told_once_and_names_its_other_holders() -> None:
    graph = Graph(
        [nodes.Process(pid=1, start=1), nodes.Process(pid=2, start=1), nodes.Socket(protocol="tcp", address="[::]:80")],
        [
            edges.Belong("Socket(tcp,[::]:80)", "Process(pid=2,start=1)"),
            edges.Belong("Socket(tcp,[::]:80)", "Process(pid=1,start=1)"),
        ],
    )
    assert "  Socket tcp,[::]:80: also of Process 2" in describe(graph).splitlines()


def test_a_cycle_of_owners_loses_nobody() -> None:
    """Defect 20 of the reference system: cyclic ownership made nodes vanish."""
    names = [f"Process(pid={n},start=1)" for n in range(1, 4)]
    graph = Graph(
        [nodes.Process(pid=n, start=1) for n in range(1, 4)],
        [edges.Own(names[n], names[(n + 1) % 3]) for n in range(3)] + [edges.Own(names[0], names[0])],
    )
    tree = Tree(graph)
    assert tree.roots == [names[0]]
    assert tree.parent == {names[1]: names[0], names[2]: names[1]}
    assert all(f"Process {n}" in describe(graph) for n in range(1, 4))


@given(graphs())
def test_the_tree_holds_every_node_exactly_once(graph: Graph) -> None:
    tree = Tree(graph)
    seen: list[str] = []
    pending = list(tree.roots)
    while pending:
        node = pending.pop()
        seen.append(node)
        pending.extend(tree.children.get(node, ()))
    assert sorted(seen) == sorted(graph.nodes)


def test_a_process_tree_of_any_depth_is_described() -> None:
    count = 5_000
    graph = Graph(
        [nodes.Process(pid=n, start=1) for n in range(count)],
        [edges.Own(f"Process(pid={n},start=1)", f"Process(pid={n + 1},start=1)") for n in range(count - 1)],
    )
    assert len(describe(graph).splitlines()) == count + 3


def test_a_container_holds_the_processes_whose_parent_is_outside() -> None:
    graph = Graph(
        [
            nodes.Process(pid=1, start=1),
            nodes.Container(container_id="box"),
            nodes.Process(pid=2, start=1),
            nodes.Process(pid=3, start=1),
        ],
        [
            edges.Own("Process(pid=1,start=1)", "Process(pid=2,start=1)"),
            edges.Own("Process(pid=2,start=1)", "Process(pid=3,start=1)"),
            edges.Host("Container(box)", "Process(pid=2,start=1)"),
            edges.Host("Container(box)", "Process(pid=3,start=1)"),
        ],
    )
    assert Tree(graph).parent == {
        "Process(pid=2,start=1)": "Container(box)",
        "Process(pid=3,start=1)": "Process(pid=2,start=1)",
    }


def test_ends_outside_the_graph_are_told() -> None:
    graph = Graph([nodes.Process(pid=1, start=1)], [edges.Access("Process(pid=1,start=1)", "GPU(uuid=gone)")])
    lines = describe(graph).splitlines()
    assert "  -> Access GPU(uuid=gone)" in lines
    assert lines[-1] == "outside this graph: 1 ends of edges (GPU(uuid=gone))"


def test_an_empty_graph() -> None:
    assert describe(Graph()) == "graph: 0 nodes, 0 edges\n"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("memory_used_bytes", 2**31, "2 GiB"),
        ("memory_used_bytes", 1023, "1023 B"),
        ("size_bytes", 0, "0 B"),
        ("rx_bytes_per_s", 1.5e9, "1.5 GB/s"),
        ("speed_bits_per_s", 10**11, "100 Gb/s"),
        ("sm_clock_hz", 1.98e9, "1.98 GHz"),
        ("sm_util_pct", 37.25, "37.2 %"),
        ("temperature_celsius", 61, "61 °C"),
        ("power_watts", 699.94, "700 W"),
        ("rtt_ms", 0.0521, "0.0521 ms"),
        ("drops_per_s", 0.0, "0/s"),
        ("faults_per_s", 12_345.0, "12.3k/s"),
        ("link_speed_gt_per_s", 32.0, "32 GT/s"),
        ("pcie_replays_count", 1234567, "1234567"),
        ("distance", 10, "10"),
        ("x_ratio", 1e-9, "1e-09"),
        ("big_bytes", 2**70, "1048576 PiB"),
    ],
)
def test_numbers_for_people(name: str, value: float, text: str) -> None:
    assert human(name, value) == text


def test_quantities_drop_the_unit_only() -> None:
    assert quantity("memory_used_bytes") == "memory used"
    assert quantity("rx_bytes_per_s") == "rx"
    assert quantity("load_1min") == "load"
    assert quantity("distance") == "distance"


def test_natural_order() -> None:
    names = ["eth10", "eth2", "eth", "2", "10", "a" + "9" * 5000]
    assert sorted(names, key=natural_key) == ["2", "10", "a" + "9" * 5000, "eth", "eth2", "eth10"]
