"""PCI: the tree, links, distances, and what GPUs hang on."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.sysfs_tree import Tree, flat_vm, grace_host, hgx_host

from gpuflight.collectors.pci import Pci, PciSettings
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Graph, edges, nodes
from gpuflight.sources.pci import DISTANCES, PciTree, distance, parse_speed


def gpu(index: int, address: str, **attributes: Any) -> nodes.GPU:
    return nodes.GPU(uuid=f"GPU-{index}", attributes={"pci_address": address, **attributes})


def capture(tree: Tree, collector: Pci, gpus: list[nodes.GPU] | None = None) -> Graph:
    tree.round(collector)
    batch = collector.seed()
    graph = Graph([*batch.nodes, *(gpus or [])], batch.edges)
    if gpus:
        batch = collector.expand(gpus)
        for entity in batch.nodes:
            graph.try_add_node(entity)
        for edge in batch.edges:
            graph.try_add_edge(edge)
    assert not graph.dangling()
    return graph


def near(graph: Graph, one: str, other: str) -> str | None:
    edge = graph.edges[(one, other, "Proximity")]
    return edge.attributes.get("distance")


@pytest.mark.parametrize(
    ("text", "speed"), [("32.0 GT/s PCIe", 32.0), ("2.5 GT/s", 2.5), ("Unknown", None), ("Unknown speed", None)]
)
def test_parse_speed(text: str, speed: float | None) -> None:
    assert parse_speed(text) == speed


def test_tree_of_an_hgx_host(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    gpus = hgx_host(tree)
    graph = capture(tree, Pci())
    device = graph.nodes[f"PciDevice({gpus[0]})"]
    assert device.attributes["class_name"] == "3D controller"
    assert device.attributes["port_type"] == "endpoint"
    assert device.attributes["driver"] == "nvidia"
    assert device.metrics["link_speed_gt_per_s"] == 32.0 and device.metrics["link_width"] == 16
    kinds = {node.attributes.get("port_type") for node in graph.of_kind(nodes.PciDevice)}
    assert kinds == {"endpoint", "root_port", "switch_upstream", "switch_downstream"}
    assert not any("fe:00" in node.id for node in graph), "an uncore function is drawn"
    assert sum(node.attributes["class_name"] == "bridge" for node in graph.of_kind(nodes.PciDevice)) == 2  # NVSwitches


def test_expected_bandwidth_of_a_gen5_x16_link(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    gpus = hgx_host(tree)
    graph = capture(tree, Pci())
    (edge,) = [e for e in graph.edges_of_kind(edges.PcieLink) if e.target == f"PciDevice({gpus[0]})"]
    assert edge.metrics["expected_bytes_per_s"] == pytest.approx(32e9 * 16 * 128 / 130 / 8)
    assert edge.metrics["max_bytes_per_s"] == edge.metrics["expected_bytes_per_s"]
    inside = [e for e in graph.edges_of_kind(edges.PcieLink) if e.attributes.get("internal")]
    disk = next(e for e in inside if e.target == "PciDevice(0000:12:03.0)")  # the port of the x4 disk
    assert disk.metrics == {"expected_bytes_per_s": pytest.approx(16e9 * 4 * 128 / 130 / 8)}


def test_the_way_from_a_gpu_to_the_card_beside_it_stays_inside_their_switch(tmp_path: Path) -> None:
    from gpuflight.graph.paths import path

    tree = Tree(tmp_path)
    addresses = hgx_host(tree)
    graph = capture(tree, Pci(), [gpu(0, addresses[0])])
    found = path(graph, "GPU(uuid=GPU-0)", "PciDevice(0000:18:00.0)")  # the disk
    assert found is not None and {hop.kind for hop in found.hops} == {"AttachedTo", "PcieLink"}
    assert found.narrowest is not None and found.unknown_count == 0
    assert found.narrowest.expected_bytes_per_s == pytest.approx(16e9 * 4 * 128 / 130 / 8)


def test_a_link_that_runs_below_what_it_could(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    root = "pci0000:00/0000:00:01.0"
    tree.pci(root, 0x060400, 0)
    tree.pci(f"{root}/0000:01:00.0", 0x030200, 0, link=("2.5 GT/s PCIe", "8", "16.0 GT/s PCIe", "16"))
    (edge,) = capture(tree, Pci()).edges_of_kind(edges.PcieLink)
    assert edge.metrics["expected_bytes_per_s"] == 2.5e9 * 8 * 8 / 10 / 8
    assert edge.metrics["max_bytes_per_s"] == pytest.approx(16e9 * 16 * 128 / 130 / 8)


def test_unreadable_link_speed_is_unknown_and_the_path_is_still_drawn(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    root = "pci0000:00/0000:00:01.0"
    tree.pci(root, 0x060400, 0)
    full = tree.pci(f"{root}/0000:01:00.0", 0x030200, 0)
    tree.fail(f"{full}/current_link_speed", errno.EIO)
    graph = capture(tree, Pci())
    (edge,) = graph.edges_of_kind(edges.PcieLink)
    assert (edge.source, edge.target) == ("PciDevice(0000:00:01.0)", "PciDevice(0000:01:00.0)")
    assert "expected_bytes_per_s" not in edge.metrics
    assert "EIO" in edge.unknown["expected_bytes_per_s"]
    assert edge.metrics["link_width"] == 16
    assert "EIO" in graph.nodes["PciDevice(0000:01:00.0)"].unknown["link_speed_gt_per_s"]  # type: ignore[index]


@pytest.mark.parametrize("width", ["0", "63", "255"])
def test_impossible_widths_are_unknown(tmp_path: Path, width: str) -> None:
    tree = Tree(tmp_path)
    root = "pci0000:00/0000:00:01.0"
    tree.pci(root, 0x060400, 0)
    tree.pci(f"{root}/0000:01:00.0", 0x030200, 0, link=("Unknown", width, "16.0 GT/s PCIe", "16"))
    (edge,) = capture(tree, Pci()).edges_of_kind(edges.PcieLink)
    assert not {"link_width", "link_speed_gt_per_s", "expected_bytes_per_s"} & edge.metrics.keys()


def test_a_sleeping_device_is_not_woken(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    root = "pci0000:00/0000:00:01.0"
    tree.pci(root, 0x060400, 0)
    full = tree.pci(f"{root}/0000:01:00.0", 0x030200, 0)
    tree.write(f"{full}/power_state", "D3cold\n")
    (edge,) = capture(tree, Pci()).edges_of_kind(edges.PcieLink)
    assert "sleeps" in edge.unknown["expected_bytes_per_s"]
    assert f"{full}/current_link_width" not in tree.fs.reads


def test_distances_on_an_hgx_host(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    addresses = hgx_host(tree)
    graph = capture(tree, Pci(), [gpu(index, address) for index, address in addresses.items()])
    assert near(graph, "GPU(uuid=GPU-0)", "GPU(uuid=GPU-1)") == "PIX"  # one switch
    assert near(graph, "GPU(uuid=GPU-0)", "GPU(uuid=GPU-2)") == "NODE"  # two host bridges, one socket
    assert near(graph, "GPU(uuid=GPU-0)", "GPU(uuid=GPU-7)") == "SYS"
    assert near(graph, "GPU(uuid=GPU-0)", "Nic(ib0)") == "PIX"
    assert near(graph, "GPU(uuid=GPU-0)", "Nic(ib1)") == "NODE"
    assert near(graph, "GPU(uuid=GPU-0)", "Nic(ib3)") == "SYS"
    assert near(graph, "GPU(uuid=GPU-5)", "Disk(nvme2n1)") == "PIX"
    nearest = {
        edge.target
        for edge in graph.edges_of_kind(edges.Proximity)
        if edge.source == "GPU(uuid=GPU-5)" and edge.attributes.get("nearest")
    }
    assert nearest == {"Nic(ib2)", "Disk(nvme2n1)"}
    pairs = [(e.source, e.target) for e in graph.edges_of_kind(edges.Proximity) if e.target.startswith("GPU")]
    assert len(pairs) == 28 and len({frozenset(pair) for pair in pairs}) == 28
    assert ("GPU(uuid=GPU-4)", "Numa(1)", "Affinity") in graph
    assert ("GPU(uuid=GPU-4)", f"PciDevice({addresses[4]})", "AttachedTo") in graph


def test_gpus_that_come_in_two_waves_are_related_too(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    addresses = hgx_host(tree)
    collector = tree.round(Pci())
    collector.expand([gpu(0, addresses[0])])
    batch = collector.expand([gpu(1, addresses[1])])
    assert ("GPU(uuid=GPU-0)", "GPU(uuid=GPU-1)", "Proximity") in {edge.key for edge in batch.edges}


def tree_of(tmp_path: Path, *paths: str, node: dict[str, int] | None = None) -> PciTree:
    tree = Tree(tmp_path)
    for path in paths:
        parts = path.split("/")
        for depth in range(2, len(parts)):
            prefix = "/".join(parts[:depth])
            if not (tmp_path / "sys/bus/pci/devices" / parts[depth - 1]).is_symlink():
                tree.pci(prefix, 0x060400, (node or {}).get(parts[0], -1))
        tree.pci(path, 0x030200, (node or {}).get(parts[0], -1))
    found = PciTree(tree.sysfs)
    found.refresh()
    return found


ROOT = "pci0000:00/0000:00:01.0"
NESTED = f"{ROOT}/0000:01:00.0/0000:02:00.0/0000:03:00.0/0000:04:00.0"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (f"{ROOT}/0000:01:00.0", f"{ROOT}/0000:01:00.1", "PIX"),  # two functions of one card
        (f"{ROOT}/0000:01:00.0/0000:02:00.0/0000:03:00.0", f"{ROOT}/0000:01:00.0/0000:02:01.0/0000:04:00.0", "PIX"),
        (f"{NESTED}/0000:05:00.0", f"{ROOT}/0000:01:00.0/0000:02:01.0/0000:06:00.0", "PXB"),  # a switch below a switch
        (f"{ROOT}/0000:01:00.0", "pci0000:00/0000:00:02.0/0000:02:00.0", "PHB"),  # two root ports
        ("pci0000:00/0000:00:05.0", "pci0000:00/0000:00:06.0", "PHB"),  # a guest's flat bus
    ],
)
def test_distance_below_one_host_bridge(tmp_path: Path, one: str, other: str, expected: str) -> None:
    tree = tree_of(tmp_path, one, other)
    first, second = (tree.functions[path.rpartition("/")[2]] for path in (one, other))
    assert distance(first, second) == (expected, "")
    assert distance(second, first) == (expected, "")
    assert expected in DISTANCES


@pytest.mark.parametrize(("nodes_", "expected"), [((0, 0), "NODE"), ((0, 1), "SYS"), ((0, -1), ""), ((-1, -1), "")])
def test_distance_between_host_bridges(tmp_path: Path, nodes_: tuple[int, int], expected: str) -> None:
    one, other = "pci0000:00/0000:00:01.0/0000:01:00.0", "pci0000:80/0000:80:01.0/0000:81:00.0"
    tree = tree_of(tmp_path, one, other, node={"pci0000:00": nodes_[0], "pci0000:80": nodes_[1]})
    near, why = distance(tree.functions["0000:01:00.0"], tree.functions["0000:81:00.0"])
    assert near == expected
    assert bool(why) == (not expected)


def test_flat_guest(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    address = flat_vm(tree)
    graph = capture(tree, Pci(), [gpu(0, address.upper())])
    device = graph.nodes[f"PciDevice({address})"]
    assert "-1" in device.unknown["numa_node"] and "numa_node" not in device.attributes  # type: ignore[index]
    assert not device.metrics and not graph.edges_of_kind(edges.PcieLink)
    assert not graph.edges_of_kind(edges.Affinity)
    assert near(graph, "GPU(uuid=GPU-0)", "Nic(eth0)") == "PHB"
    assert near(graph, "GPU(uuid=GPU-0)", "Disk(vda)") == "PHB"
    assert (f"PciDevice({address})", "Device(pci0000:00)", "AttachedTo") in graph
    assert "PciDevice(0000:00:00.0)" not in graph  # the chipset's host bridge


def test_all_devices(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    flat_vm(tree)
    assert "PciDevice(0000:00:00.0)" in capture(tree, Pci(PciSettings(all_devices=True)))


def test_on_coherent_links_the_driver_knows_the_node_better(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    address = grace_host(tree)
    graph = capture(tree, Pci(), [gpu(0, address, numa_node=1)])
    assert ("GPU(uuid=GPU-0)", "Numa(1)", "Affinity") in graph
    assert ("GPU(uuid=GPU-0)", "Numa(0)", "Affinity") not in graph


def test_cpus_of_the_driver_win_over_pci(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    addresses = hgx_host(tree)
    graph = capture(tree, Pci(), [gpu(0, addresses[0], cpus="2-3")])
    assert ("GPU(uuid=GPU-0)", "Numa(1)", "Affinity") in graph


def test_several_nodes_of_the_driver_are_not_joined_by_another(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    addresses = hgx_host(tree)
    graph = capture(tree, Pci(), [gpu(0, addresses[0], numa_nodes=[1, 2]), gpu(7, addresses[7], numa_nodes=[1, 2])])
    assert ("GPU(uuid=GPU-0)", "Numa(0)", "Affinity") not in graph
    assert ("GPU(uuid=GPU-7)", "Numa(1)", "Affinity") in graph


def test_a_gpu_without_a_pci_function_here_is_counted(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    flat_vm(tree)
    collector = Pci()
    graph = capture(tree, collector, [gpu(0, "0000:99:00.0"), nodes.GPU(uuid="GPU-1")])
    assert collector.losses == {"GPUs that are not on a PCI bus seen here": 2}
    assert not graph.edges_of_kind(edges.Proximity)


def test_device_unplugged_in_the_middle_of_the_scan(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    addresses = hgx_host(tree)
    gone = "/sys/devices/pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:01.0/0000:14:00.0"
    assert gone.endswith(addresses[1])
    tree.fs.on_read[f"{gone}/class"] = lambda: tree.remove(gone)
    collector = Pci()
    graph = capture(tree, collector)
    assert f"PciDevice({addresses[1]})" not in graph
    assert f"PciDevice({addresses[0]})" in graph
    assert collector.losses == {"PCI devices unplugged during the scan": 1}


def test_hot_plug_is_seen_in_the_next_round(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    addresses = hgx_host(tree)
    collector = Pci()
    capture(tree, collector)
    path = "pci0000:90/0000:90:02.0"
    tree.pci(path, 0x060400, 0)
    tree.pci(f"{path}/0000:99:00.0", 0x010802, 0)
    assert "PciDevice(0000:99:00.0)" in capture(tree, collector)
    tree.remove("/sys/bus/pci/devices/0000:99:00.0")
    graph = capture(tree, collector)
    assert "PciDevice(0000:99:00.0)" not in graph and f"PciDevice({addresses[0]})" in graph


def test_static_facts_are_read_once(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    collector = Pci()
    capture(tree, collector)
    before = dict(tree.fs.reads)
    capture(tree, collector)
    again = {path for path, count in tree.fs.reads.items() if count > before.get(path, 0)}
    assert again and all(path.endswith(("current_link_speed", "current_link_width", "power_state")) for path in again)


def test_virtual_functions_are_left_out_and_counted(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    root = "pci0000:00/0000:00:01.0"
    tree.pci(root, 0x060400, 0)
    parent = tree.pci(f"{root}/0000:01:00.0", 0x020000, 0)
    virtual = tree.pci(f"{root}/0000:01:00.2", 0x020000, 0)
    tree.link(f"{virtual}/physfn", parent)
    collector = Pci()
    graph = capture(tree, collector)
    assert "PciDevice(0000:01:00.2)" not in graph
    assert any("virtual functions" in reason for reason in collector.notes)
    assert "PciDevice(0000:01:00.2)" in capture(tree, Pci(PciSettings(virtual_functions=True)))


def test_multipath_nvme_is_placed_by_its_controller(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    root = "pci0000:00/0000:00:01.0"
    tree.pci(root, 0x060400, 0)
    device = tree.pci(f"{root}/0000:01:00.0", 0x010802, 0)
    tree.pci("pci0000:00/0000:00:02.0", 0x060400, 0)
    tree.pci("pci0000:00/0000:00:02.0/0000:02:00.0", 0x030200, 0)
    tree.write(f"{device}/nvme/nvme0/state", "live\n")
    subsystem = "/sys/devices/virtual/nvme-subsystem/nvme-subsys0"
    tree.link(f"{subsystem}/nvme0", f"{device}/nvme/nvme0")
    tree.write(f"{subsystem}/nvme0n1/size", "8\n")
    tree.link("/sys/block/nvme0n1", f"{subsystem}/nvme0n1")
    graph = capture(tree, Pci(), [gpu(0, "0000:02:00.0")])
    assert near(graph, "GPU(uuid=GPU-0)", "Disk(nvme0n1)") == "PHB"


def test_no_pci_bus_costs_the_round(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable):
        Tree(tmp_path).round(Pci())
