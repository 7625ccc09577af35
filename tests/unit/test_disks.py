"""Disks: rates, partitions and volumes, place."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.sysfs_tree import Tree, flat_vm, hgx_host

from gpuflight.collectors.disks import Disks, DiskSettings
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Graph


def capture(tree: Tree, collector: Disks, seconds: float = 2.0) -> Graph:
    tree.round(collector, seconds)
    batch = collector.seed()
    graph = Graph(batch.nodes, batch.edges)
    assert not graph.dangling()
    return graph


def test_rates_load_and_waits(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    full = tree.disk("sda", "/sys/devices/pci0000:00/0000:00:1f.2", below="ata1/block/", sectors=4096)
    tree.write(f"{full}/stat", "100 0 1000 50 10 0 80 5 3 40 60 0 0 0 0 0 0\n")
    collector = Disks()
    first = capture(tree, collector).nodes["Disk(sda)"]
    assert first.metrics == {"size_bytes": 4096 * 512, "in_flight_count": 3}
    assert "two readings" in first.unknown["read_bytes_per_s"]  # type: ignore[index]
    tree.write(f"{full}/stat", "120 0 3000 150 10 0 80 5 0 1040 90 0 0 0 0 0 0\n")
    metrics = capture(tree, collector).nodes["Disk(sda)"].metrics
    assert metrics["read_bytes_per_s"] == 2000 * 512 / 2
    assert metrics["reads_per_s"] == 10
    assert metrics["write_bytes_per_s"] == 0
    assert metrics["read_wait_ms"] == 5
    assert "write_wait_ms" not in metrics  # nothing written: no mean
    assert metrics["io_time_pct"] == pytest.approx(50)
    tree.write(f"{full}/stat", "1 0 1 1 1 0 1 1 0 1 1\n")
    assert "reset" in capture(tree, collector).nodes["Disk(sda)"].unknown["read_bytes_per_s"]  # type: ignore[index]


def test_nvme_on_its_controller(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    graph = capture(tree, Disks())
    disk = graph.nodes["Disk(nvme3n1)"]
    assert disk.attributes["numa_node"] == 1 and disk.attributes["rotational"] is False
    assert ("Disk(nvme3n1)", f"PciDevice({disk.attributes['pci_address']})", "AttachedTo") in graph
    assert ("Disk(nvme3n1)", "Numa(1)", "Affinity") in graph


def test_guest_disk(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    flat_vm(tree)
    disk = capture(tree, Disks()).nodes["Disk(vda)"]
    assert disk.attributes["pci_address"] == "0000:00:02.0" and "numa_node" in (disk.unknown or {})


def test_raid_of_partitions_points_to_disks(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    device = tree.pci("pci0000:00/0000:00:17.0", 0x010601, link=None)
    for index, name in enumerate(("sda", "sdb")):
        full = tree.disk(name, device, below=f"ata{index}/block/")
        tree.partition(full, f"{name}1", f"8:{index * 16 + 1}")
    md = tree.disk("md0", sectors=10)
    tree.write(f"{md}/md/level", "raid1\n")
    for name in ("sda1", "sdb1"):
        tree.link(f"{md}/slaves/{name}", f"/sys/class/block/{name}")
    graph = capture(tree, Disks())
    assert graph.nodes["Disk(md0)"].attributes["raid_level"] == "raid1"
    assert ("Disk(md0)", "Disk(sda)", "HasAttribute") in graph and ("Disk(md0)", "Disk(sdb)", "HasAttribute") in graph
    assert "Disk(sda1)" not in graph


def test_loops_and_hidden_paths_are_left_out(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.disk("loop0", sectors=8)
    tree.disk("loop1", sectors=0)
    tree.disk("zram0", sectors=0)
    hidden = tree.disk("nvme0c0n1")
    tree.write(f"{hidden}/hidden", "1\n")
    assert not capture(tree, Disks()).nodes
    assert set(capture(tree, Disks(DiskSettings(loop_devices=True))).nodes) == {"Disk(loop0)"}


def test_disk_pulled_during_the_scan(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.disk("sda")
    full = tree.disk("sdb")
    tree.fs.on_read["/sys/block/sda/size"] = lambda: tree.remove(full)
    collector = Disks()
    graph = capture(tree, collector)
    assert set(graph.nodes) == {"Disk(sda)"}
    assert collector.losses == {"disks that vanished during the scan": 1}


def test_no_block_directory_costs_the_round(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable):
        Tree(tmp_path).round(Disks())
