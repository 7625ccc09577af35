"""The widest way between two entities, checked against an exhaustive search."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.errors import InputError
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.bandwidth import Bandwidths, pcie_bytes_per_s
from gpuflight.graph.paths import Path, path

GB = 1e9


def _way(found: Path | None) -> list[str]:
    assert found is not None
    return [found.source, *(hop.target for hop in found.hops)]


def test_gpus_behind_one_switch_meet_at_it(machine: Graph) -> None:
    found = path(machine, "GPU(uuid=GPU-a)", "GPU(uuid=GPU-b)")
    assert _way(found) == [
        "GPU(uuid=GPU-a)",
        "PciDevice(0000:01:00.0)",
        "PciDevice(0000:00:01.0)",
        "PciDevice(0000:02:00.0)",
        "GPU(uuid=GPU-b)",
    ]
    assert found is not None
    assert found.narrowest is not None
    assert found.narrowest.edge == ("PciDevice(0000:00:01.0)", "PciDevice(0000:02:00.0)", "PcieLink")
    assert found.narrowest.expected_bytes_per_s == pytest.approx(31.5 * GB, rel=0.001)
    assert found.narrowest.text() == "PcieLink 31.5 GB/s (PCIe 5.0 x8)"
    assert found.unknown_count == 0
    assert [hop.unlimited for hop in found.hops] == [True, False, False, True]


def test_nvlink_is_taken_where_there_is_one(machine: Graph) -> None:
    machine.try_add_edge(edges.NvLink("GPU(uuid=GPU-a)", "GPU(uuid=GPU-b)", {}, {"expected_bytes_per_s": 450 * GB}))
    found = path(machine, "GPU(uuid=GPU-b)", "GPU(uuid=GPU-a)")
    assert found is not None
    [hop] = found.hops
    assert (hop.kind, hop.reverse, hop.expected_bytes_per_s) == ("NvLink", True, 450 * GB)
    assert (hop.source, hop.target) == ("GPU(uuid=GPU-b)", "GPU(uuid=GPU-a)")


def test_nvlink_of_unknown_version_still_beats_pcie_and_is_told_as_unknown(machine: Graph) -> None:
    machine.try_add_edge(edges.NvLink("GPU(uuid=GPU-a)", "GPU(uuid=GPU-b)", {}, {"links_active_count": 4}))
    found = path(machine, "GPU(uuid=GPU-a)", "GPU(uuid=GPU-b)")
    assert found is not None
    assert [hop.kind for hop in found.hops] == ["NvLink"]
    assert found.narrowest is None
    assert found.unknown_count == 1
    assert found.hops[0].expected_bytes_per_s is None
    assert found.hops[0].text() == "NvLink, unknown: the version of the NVLinks is not known"


def test_links_that_are_down_are_no_way(machine: Graph) -> None:
    machine.try_add_edge(
        edges.NvLink("GPU(uuid=GPU-a)", "GPU(uuid=GPU-b)", {"nvlink_version": "4.0"}, {"links_active_count": 0})
    )
    found = path(machine, "GPU(uuid=GPU-a)", "GPU(uuid=GPU-b)")
    assert found is not None
    assert "NvLink" not in {hop.kind for hop in found.hops}


def test_an_unreadable_link_is_drawn_with_its_reason(machine: Graph) -> None:
    """Row T23: unknown bandwidth, path still drawn, never 0."""
    key = ("PciDevice(0000:00:01.0)", "PciDevice(0000:02:00.0)", "PcieLink")
    machine.edges[key] = edges.PcieLink(*key[:2], {}, {}, {"expected_bytes_per_s": "link_speed cannot be read: EIO"})
    machine.edges.pop(("GPU(uuid=GPU-b)", "Numa(0)", "Affinity"))
    found = path(machine, "GPU(uuid=GPU-a)", "GPU(uuid=GPU-b)")
    assert found is not None
    assert found.unknown_count == 1
    [unknown] = [hop for hop in found.hops if hop.reason]
    assert (unknown.expected_bytes_per_s, unknown.reason) == (None, "link_speed cannot be read: EIO")
    assert found.narrowest is not None
    assert found.narrowest.basis == "PCIe 5.0 x16"


def test_a_process_reaches_its_gpu_and_is_bounded_by_its_pcie_link(machine: Graph) -> None:
    found = path(machine, "Process(pid=10,start=5)", "GPU(uuid=GPU-a)")
    assert found is not None
    [hop] = found.hops
    assert (hop.kind, hop.basis) == ("Access", "PCIe 5.0 x16")
    assert hop.expected_bytes_per_s == pytest.approx(63 * GB, rel=0.001)


def test_processes_talk_through_their_sockets_at_the_rate_of_the_interface(machine: Graph) -> None:
    machine.edges.pop(("Process(pid=11,start=6)", "Pipe(ino=7)", "SendTo"))
    found = path(machine, "Process(pid=11,start=6)", "Process(pid=10,start=5)")
    assert _way(found)[1:3] == ["Socket(tcp,10.0.0.5:40000)", "Socket(tcp,10.0.0.5:29500)"]
    assert found is not None
    assert found.narrowest is not None
    assert (found.narrowest.kind, found.narrowest.expected_bytes_per_s) == ("ConnectTo", 12.5 * GB)


def test_loopback_is_unknown(machine: Graph) -> None:
    graph = Graph(
        [nodes.Socket(protocol="tcp", address="127.0.0.1:1"), nodes.Socket(protocol="tcp", address="127.0.0.1:2")],
        [edges.ConnectTo("Socket(tcp,127.0.0.1:1)", "Socket(tcp,127.0.0.1:2)")],
    )
    found = path(graph, "Socket(tcp,127.0.0.1:1)", "Socket(tcp,127.0.0.1:2)")
    assert found is not None
    assert found.hops[0].reason == "loopback is bounded by CPU and memory, not by a link"


def test_users_of_one_gpu_one_listener_or_one_numa_node_are_not_linked_by_it() -> None:
    processes = [nodes.Process(pid=n, start=1) for n in (1, 2)]
    shared = [nodes.GPU(uuid="a"), nodes.Numa(index=0), nodes.Socket(protocol="tcp", address="x:1")]
    graph = Graph([*processes, *shared])
    for process in processes:
        graph.try_add_edge(edges.Access(process.id, "GPU(uuid=a)", {}, {"expected_bytes_per_s": 9}))
        graph.try_add_edge(edges.NumaAccess(process.id, "Numa(0)"))
        graph.try_add_edge(edges.Belong("Socket(tcp,x:1)", process.id))
    assert path(graph, processes[0], processes[1]) is None
    graph.try_add_node(nodes.SharedMemory(mechanism="posix", key="s"))
    for process in processes:
        graph.try_add_edge(edges.Access(process.id, "SharedMemory(posix,s)"))
    assert _way(path(graph, processes[0], processes[1]))[1] == "SharedMemory(posix,s)"


def test_a_thing_in_use_is_still_reached_and_left_in_another_way() -> None:
    """P1 uses GPU a; GPU a is wired to GPU b; P2 uses GPU b. And P1's socket is connected to P2's second one."""
    graph = Graph(
        [nodes.Process(pid=1, start=1), nodes.Process(pid=2, start=1), nodes.GPU(uuid="a"), nodes.GPU(uuid="b")],
        [
            edges.Access("Process(pid=1,start=1)", "GPU(uuid=a)", {}, {"expected_bytes_per_s": 5}),
            edges.Access("Process(pid=2,start=1)", "GPU(uuid=b)", {}, {"expected_bytes_per_s": 5}),
            edges.NvLink("GPU(uuid=a)", "GPU(uuid=b)", {}, {"expected_bytes_per_s": 7}),
        ],
    )
    assert len(_way(path(graph, "Process(pid=1,start=1)", "Process(pid=2,start=1)"))) == 4


def test_hardware_is_not_linked_by_a_program_where_wires_do() -> None:
    graph = Graph(
        [nodes.GPU(uuid="a"), nodes.GPU(uuid="b"), nodes.Numa(index=0), nodes.Process(pid=1, start=1)],
        [
            edges.Access("Process(pid=1,start=1)", "GPU(uuid=a)", {}, {"expected_bytes_per_s": 9e12}),
            edges.Access("Process(pid=1,start=1)", "GPU(uuid=b)", {}, {"expected_bytes_per_s": 9e12}),
            edges.Affinity("GPU(uuid=a)", "Numa(0)"),
            edges.Affinity("GPU(uuid=b)", "Numa(0)"),
        ],
    )
    assert _way(path(graph, "GPU(uuid=a)", "GPU(uuid=b)"))[1] == "Numa(0)"
    for key in [key for key in graph.edges if key[2] == "Affinity"]:
        del graph.edges[key]
    assert _way(path(graph, "GPU(uuid=a)", "GPU(uuid=b)"))[1] == "Process(pid=1,start=1)"


def test_containment_is_the_last_resort(machine: Graph) -> None:
    assert _way(path(machine, "Host(node1)", "Process(pid=1,start=1)")) == ["Host(node1)", "Process(pid=1,start=1)"]


def test_no_way_itself_and_unknown_ends(machine: Graph) -> None:
    machine.try_add_node(nodes.Disk(name="sda"))
    assert path(machine, "Disk(sda)", "GPU(uuid=GPU-a)") is None
    same = path(machine, "GPU(uuid=GPU-a)", machine.nodes["GPU(uuid=GPU-a)"])
    assert same is not None
    assert (same.hops, same.narrowest) == ([], None)
    with pytest.raises(InputError, match="no entity 'GPU"):
        path(machine, "GPU(uuid=none)", "Disk(sda)")


def test_ended_edges_are_no_way() -> None:
    graph = Graph(
        [nodes.Process(pid=1, start=1), nodes.Process(pid=2, start=1)],
        [edges.Ipc("Process(pid=1,start=1)", "Process(pid=2,start=1)", {"ended_round": 3})],
    )
    assert path(graph, "Process(pid=1,start=1)", "Process(pid=2,start=1)") is None


WIDTHS = st.sampled_from((None, 1.0, 2.0, 3.0, 4.0))


@st.composite
def _wirings(draw: st.DrawFn) -> tuple[Graph, int]:
    count = draw(st.integers(2, 6))
    graph = Graph([nodes.PciDevice(address=str(n)) for n in range(count)])
    for a, b in itertools.combinations(range(count), 2):
        if draw(st.booleans()):
            width = draw(WIDTHS)
            metrics = {} if width is None else {"expected_bytes_per_s": width}
            graph.try_add_edge(edges.PcieLink(f"PciDevice({a})", f"PciDevice({b})", {}, metrics))
    return graph, count


@given(_wirings())
def test_against_an_exhaustive_search(wiring: tuple[Graph, int]) -> None:
    """Fewest unknown hops, then the widest narrowest hop, then the fewest hops."""
    graph, count = wiring
    widths = {
        frozenset((edge.source, edge.target)): edge.metrics.get("expected_bytes_per_s") for edge in graph.edges.values()
    }
    start, goal = "PciDevice(0)", "PciDevice(1)"
    inner = [f"PciDevice({n})" for n in range(2, count)]
    best: tuple[int, float, int] | None = None
    for length in range(len(inner) + 1):
        for middle in itertools.permutations(inner, length):
            way = [start, *middle, goal]
            hops = [frozenset(pair) for pair in itertools.pairwise(way)]
            if not all(hop in widths for hop in hops):
                continue
            known = [width for hop in hops if (width := widths[hop]) is not None]
            key = (len(hops) - len(known), -min(known, default=math.inf), len(hops))
            best = key if best is None or key < best else best
    found = path(graph, start, goal)
    if best is None:
        assert found is None
        return
    assert found is not None
    narrowest = found.narrowest.expected_bytes_per_s if found.narrowest is not None else math.inf
    assert narrowest is not None
    assert (found.unknown_count, -narrowest, len(found.hops)) == best
    assert _way(found)[0] == start
    assert _way(found)[-1] == goal
    for before, after in itertools.pairwise([None, *found.hops]):
        assert before is None or (after is not None and before.target == after.source)


@pytest.mark.parametrize(
    ("speed", "width", "gigabytes"),
    [(2.5, 1, 0.25), (5.0, 4, 2.0), (8.0, 16, 15.754), (16.0, 16, 31.508), (32.0, 16, 63.015), (64.0, 16, 121.0)],
)
def test_pcie_rates(speed: float, width: int, gigabytes: float) -> None:
    assert pcie_bytes_per_s(speed, width) == pytest.approx(gigabytes * GB, rel=1e-4)


@pytest.mark.parametrize(("speed", "width"), [(7.0, 16), (0.0, 16), (8.0, 0), (8.0, -1)])
def test_links_that_do_not_exist_have_no_rate(speed: float, width: int) -> None:
    assert pcie_bytes_per_s(speed, width) is None


@pytest.mark.parametrize(
    ("version", "links", "gigabytes"), [("1.0", 4, 80), ("2.2", 6, 150), ("3.1", 12, 300), (4, 18, 450), (5.0, 18, 900)]
)
def test_nvlink_rates(version: object, links: int, gigabytes: float) -> None:
    edge = edges.NvLink("GPU(uuid=a)", "GPU(uuid=b)", {"nvlink_version": version}, {"links_active_count": links})
    graph = Graph([nodes.GPU(uuid="a"), nodes.GPU(uuid="b")], [edge])
    assert Bandwidths(graph).of(edge).bytes_per_s == gigabytes * GB


def test_a_device_is_bounded_by_the_pcie_link_of_its_function() -> None:
    graph = Graph(
        [
            nodes.NPU(index=0, attributes={"pci_address": "0000:C1:00.0"}),
            nodes.PciDevice(address="0000:c1:00.0", metrics={"link_speed_gt_per_s": 16.0, "link_width": 16}),
            nodes.Numa(index=0),
        ]
    )
    answer = Bandwidths(graph).of(edges.Affinity("NPU(0)", "Numa(0)"))
    assert answer.bytes_per_s == pytest.approx(31.5 * GB, rel=0.001)


def test_rdma_connections_have_the_rate_of_the_port() -> None:
    pair = nodes.RdmaQueuePair(device="mlx5_0", qpn=1)
    far = nodes.RdmaQueuePairEndpoint(address="fe80::1", qpn=2)
    port = nodes.RdmaPort(device="mlx5_0", port=1, metrics={"speed_bits_per_s": 4 * 10**11})
    graph = Graph([pair, far, port])
    assert Bandwidths(graph).of(edges.ConnectTo(pair.id, far.id)).bytes_per_s == 50 * GB


def test_a_large_graph_is_answered_in_one_pass_over_its_edges() -> None:
    count = 20_000
    graph = Graph(
        [nodes.PciDevice(address=str(n)) for n in range(count)],
        [
            edges.PcieLink(f"PciDevice({n})", f"PciDevice({n + 1})", {}, {"expected_bytes_per_s": 1 + n % 3})
            for n in range(count - 1)
        ],
    )
    found = path(graph, "PciDevice(0)", f"PciDevice({count - 1})")
    assert found is not None
    assert len(found.hops) == count - 1


def test_traffic_through_nvswitches_is_spread_over_all_of_them() -> None:
    gpus = [nodes.GPU(uuid=f"GPU-{index}") for index in range(2)]
    switches = [nodes.NvSwitch(address=f"0000:0{index}:00.0") for index in range(4)]
    shares = [125e9, 125e9, 100e9, 100e9]
    links = [
        edges.NvLink(
            gpu.id, switch.id, metrics={"expected_bytes_per_s": share, "links_active_count": int(share / 25e9)}
        )
        for gpu in gpus
        for switch, share in zip(switches, shares, strict=True)
    ]
    found = path(Graph([*gpus, *switches], links), gpus[0], gpus[1])
    assert found is not None
    assert [hop.expected_bytes_per_s for hop in found.hops] == [450e9, 450e9]
    assert "4 switches" in found.hops[0].basis
    # A link that is down takes its share with it, on its own side only.
    links[0].metrics["links_active_count"] = 0
    found = path(Graph([*gpus, *switches], links), gpus[0], gpus[1])
    assert found is not None
    assert found.narrowest is not None
    assert found.narrowest.expected_bytes_per_s == 325e9
