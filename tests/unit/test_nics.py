"""Network interfaces: counters, speed, stacking, addresses, place."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tests.fakes.sysfs_tree import Tree, flat_vm, hgx_host

from gpuflight.collectors.nics import Nics, NicSettings
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Graph, nodes
from gpuflight.sources.netdev import local_addresses, parse_net_dev

HEADER = "Inter-|   Receive  |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes ...\n"


def net_dev(tree: Tree, **totals: int) -> None:
    """Receive bytes by interface; everything else follows from them."""
    lines = [f"{name}: {value} 10 1 2 0 0 0 0 {value * 2} 20 3 4 0 0 0 0\n" for name, value in totals.items()]
    tree.write("/proc/self/net/dev", HEADER + "".join(lines))


def capture(tree: Tree, collector: Nics, seconds: float = 2.0) -> Graph:
    tree.round(collector, seconds)
    batch = collector.seed()
    graph = Graph(batch.nodes, batch.edges)
    assert not graph.dangling()
    return graph


def test_parse_net_dev() -> None:
    found = parse_net_dev((HEADER + "  eth0:123 4 5 6 0 0 0 0 7 8 9 10 0 0 0 0\nbad: x\n").encode())
    assert list(found) == ["eth0"]
    counters = found["eth0"]
    assert (counters.rx_bytes, counters.rx_packets, counters.rx_errors, counters.rx_drops) == (123, 4, 5, 6)
    assert (counters.tx_bytes, counters.tx_packets, counters.tx_errors, counters.tx_drops) == (7, 8, 9, 10)


def test_rates_over_the_round_and_a_reset(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    collector = Nics()
    net_dev(tree, ib0=1000)
    first = capture(tree, collector).nodes["Nic(ib0)"]
    assert not [name for name in first.metrics if name.endswith("_per_s") and name != "speed_bits_per_s"]
    assert "two readings" in first.unknown["rx_bytes_per_s"]  # type: ignore[index]
    net_dev(tree, ib0=3000)
    second = capture(tree, collector).nodes["Nic(ib0)"]
    assert second.metrics["rx_bytes_per_s"] == 1000 and second.metrics["tx_bytes_per_s"] == 2000
    assert second.metrics["rx_errors_per_s"] == 0
    net_dev(tree, ib0=10)
    third = capture(tree, collector).nodes["Nic(ib0)"]
    assert "reset" in third.unknown["rx_bytes_per_s"]  # type: ignore[index]


def test_place_and_speed(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    graph = capture(tree, Nics())
    nic = graph.nodes["Nic(ib2)"]
    assert nic.metrics["speed_bits_per_s"] == 400e9
    assert nic.attributes["numa_node"] == 1 and nic.attributes["driver"] == "mlx5_core"
    assert ("Nic(ib2)", f"PciDevice({nic.attributes['pci_address']})", "AttachedTo") in graph
    assert ("Nic(ib2)", "Numa(1)", "Affinity") in graph


def test_guest_speed_minus_one_and_node_minus_one_are_unknown(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    flat_vm(tree)
    nic = capture(tree, Nics()).nodes["Nic(eth0)"]
    assert "-1" in nic.unknown["speed_bits_per_s"] and "-1" in nic.unknown["numa_node"]  # type: ignore[index]
    assert nic.attributes["pci_address"] == "0000:00:03.0"
    assert "not an interface" in nic.unknown["rx_bytes_per_s"] or nic.unknown["rx_bytes_per_s"]  # type: ignore[index]


def test_speed_of_a_link_that_is_down(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    full = tree.nic("eth9", "/sys/devices/pci0000:00/0000:00:1f.0", operstate="down")
    tree.fail(f"{full}/speed", errno.EINVAL)
    tree.fail("/sys/class/net/eth9/speed", errno.EINVAL)
    nic = capture(tree, Nics()).nodes["Nic(eth9)"]
    assert "down" in nic.unknown["speed_bits_per_s"]  # type: ignore[index]


def test_speed_is_asked_again_only_when_the_link_changed(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.nic("eth0", speed="1000")
    collector = Nics()
    for _ in range(5):
        capture(tree, collector)
    assert tree.fs.reads["/sys/class/net/eth0/speed"] == 1
    tree.write("/sys/devices/virtual/net/eth0/carrier_changes", "2\n")
    tree.write("/sys/devices/virtual/net/eth0/speed", "25000\n")
    assert capture(tree, collector).nodes["Nic(eth0)"].metrics["speed_bits_per_s"] == 25e9


def test_bond_with_members_and_its_control_file(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    bond = tree.nic("bond0", index=50)
    tree.link(f"{bond}/lower_ib0", "/sys/class/net/ib0")
    tree.link(f"{bond}/lower_ib1", "/sys/class/net/ib1")
    tree.write(f"{bond}/uevent", "DEVTYPE=bond\nINTERFACE=bond0\n")
    tree.write("/sys/class/net/bonding_masters", "bond0\n")
    graph = capture(tree, Nics())
    assert ("Nic(bond0)", "Nic(ib0)", "HasAttribute") in graph and ("Nic(bond0)", "Nic(ib1)", "HasAttribute") in graph
    assert graph.nodes["Nic(bond0)"].attributes["type"] == "bond"
    assert "Nic(bonding_masters)" not in graph


def test_veth_is_hidden_and_counted_but_a_vlan_is_not(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.nic("eth0", index=2)
    tree.nic("veth1", index=7, iflink="3")
    vlan = tree.nic("eth0.5", index=8, iflink="2")
    tree.link(f"{vlan}/lower_eth0", "/sys/class/net/eth0")
    collector = Nics()
    graph = capture(tree, collector)
    assert {node.id for node in graph.of_kind(nodes.Nic)} == {"Nic(eth0)", "Nic(eth0.5)"}
    assert [note.count for note in collector.notes.values()] == [1]
    assert "Nic(veth1)" in capture(tree, Nics(NicSettings(veth=True)))


FIB = """\
Main:
     |-- 10.1.0.0
        /16 link UNICAST
           |-- 10.1.2.3
              /32 host LOCAL
           |-- 10.1.255.255
              /32 link BROADCAST
     |-- 10.1.9.1
        /32 host LOCAL
     |-- 127.0.0.1
        /32 host LOCAL
     |-- 172.16.0.1
        /32 host LOCAL
Local:
           |-- 10.1.2.3
              /32 host LOCAL
"""
ROUTE = (
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
    "eth0\t00000000\t0100010A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    "eth0\t0000010A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
    "ib0\t0009010A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
)


def test_addresses_go_to_the_interface_with_the_longest_connected_prefix() -> None:
    import sys

    if sys.byteorder != "little":  # the kernel writes these numbers in its own order
        pytest.skip("fixture is little endian")
    inet6 = b"fe80000000000000000000000000000a 02 40 20 80     eth0\nbad\n"
    assert local_addresses(FIB.encode(), ROUTE.encode(), inet6) == {
        "eth0": ["10.1.2.3", "fe80::a"],
        "ib0": ["10.1.9.1"],
        "lo": ["127.0.0.1"],
    }


def test_interface_that_vanishes_during_the_scan_costs_itself(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.nic("eth0")
    tree.nic("eth1", index=3)
    tree.fs.on_read["/sys/class/net/eth0/operstate"] = lambda: (
        tree.remove("/sys/class/net/eth1"),
        tree.remove("/sys/devices/virtual/net/eth1"),
    )[0]
    collector = Nics()
    graph = capture(tree, collector)
    assert "Nic(eth0)" in graph and "Nic(eth1)" not in graph
    assert collector.losses == {"interfaces that vanished during the scan": 1}


def test_no_class_directory_costs_the_round(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable):
        Tree(tmp_path).round(Nics())
