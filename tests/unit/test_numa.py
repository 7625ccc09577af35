"""NUMA: nodes, packages, where a process's memory lies, and the cosine of it and its CPUs."""

from __future__ import annotations

import errno
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.sysfs_tree import Tree, flat_vm, grace_host, hgx_host

from gpuflight.collectors.numa import Numa, NumaSettings, cosine
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Graph, edges, nodes
from gpuflight.sources.numa_maps import parse_numa_maps

MAPS = """\
55a0 default file=/usr/bin/python3 mapped=200 N0=150 N1=50 kernelpagesize_kB=4
7f00 bind:1 anon=512 dirty=512 active=0 N1=512 kernelpagesize_kB=4
7f80 default file=/dev/hugepages/a\\040N0=9 huge anon=3 dirty=3 N0=3 kernelpagesize_kB=2048
7f90 default
7fa0 default anon=1 N0=1
"""


def test_numa_maps_counts_each_mapping_in_its_own_page_size() -> None:
    sizes = parse_numa_maps(MAPS.encode(), 4096)
    assert sizes == {0: 150 * 4096 + 3 * (2 << 20) + 4096, 1: (50 + 512) * 4096}


def test_numa_maps_of_64k_pages() -> None:
    assert parse_numa_maps(b"7f00 default anon=2 N1=2 kernelpagesize_kB=64\n") == {1: 2 * 65536}


def test_numa_maps_empty() -> None:
    assert parse_numa_maps(b"") == {}


@given(st.dictionaries(st.integers(0, 7), st.integers(1, 1 << 40), min_size=1))
def test_cosine_of_a_distribution_with_any_multiple_of_itself_is_one(sizes: dict[int, int]) -> None:
    assert cosine({node: value / 7 for node, value in sizes.items()}, sizes) == pytest.approx(1.0)


@given(
    st.dictionaries(st.integers(0, 7), st.integers(0, 1000)),
    st.dictionaries(st.integers(0, 7), st.integers(0, 1000)),
)
def test_cosine_lies_between_zero_and_one(left: dict[int, int], right: dict[int, int]) -> None:
    value = cosine(left, right)
    assert value is None or 0 <= value <= 1
    assert (value is None) == (not any(left.values()) or not any(right.values()))


def test_a_perfect_match_over_two_nodes_is_one_not_a_half() -> None:
    assert cosine({0: 1, 1: 1}, {0: 512, 1: 512}) == pytest.approx(1.0)


def capture(tree: Tree, collector: Numa, *pids: int, **attributes: Any) -> Graph:
    tree.round(collector)
    batch = collector.seed()
    graph = Graph(batch.nodes, batch.edges)
    processes = [
        nodes.Process(pid=pid, start=tree.procfs.processes()[pid].start, attributes=attributes) for pid in pids
    ]
    batch = collector.expand(processes)
    for entity in [*processes, *batch.nodes]:
        graph.try_add_node(entity)
    for edge in batch.edges:
        graph.try_add_edge(edge)
    assert not graph.dangling()
    return graph


def accesses(graph: Graph) -> dict[str, edges.NumaAccess]:
    return {edge.target: edge for edge in graph.edges_of_kind(edges.NumaAccess)}


def accesses_of_sets(graph: Graph) -> list[edges.NumaAccess]:
    return [edge for edge in graph.edges_of_kind(edges.NumaAccess) if edge.target.startswith("NumaSet")]


def test_two_sockets(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    graph = capture(tree, Numa())
    package = graph.nodes["CpuPackage(1)"]
    assert package.attributes == {"cpus": "2-3", "name": "Intel(R) Xeon(R) Platinum 8480C"}
    assert package.metrics == {"cores_count": 2, "cpus_count": 2}
    assert ("CpuPackage(1)", "Numa(1)", "Affinity") in graph
    distances = graph.edges_of_kind(edges.NumaDistance)
    assert [(edge.source, edge.target, edge.metrics) for edge in distances] == [
        ("Numa(0)", "Numa(1)", {"distance": 21})
    ]
    assert graph.nodes["Numa(0)"].metrics["memory_total_bytes"] == 1 << 30


def test_rates_are_unknown_at_first_then_measured_and_survive_a_reset(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    collector = Numa()
    first = capture(tree, collector).nodes["Numa(0)"]
    assert "numa_miss_per_s" not in first.metrics
    assert "two readings" in first.unknown["numa_miss_per_s"]  # type: ignore[index]
    tree.numastat(0, miss=50)
    second = capture(tree, collector).nodes["Numa(0)"]
    assert second.metrics["numa_miss_per_s"] == 50
    tree.numastat(0, miss=1)
    third = capture(tree, collector).nodes["Numa(0)"]
    assert "reset" in third.unknown["numa_miss_per_s"]  # type: ignore[index]


def test_a_node_without_cpus(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    grace_host(tree)
    graph = capture(tree, Numa())
    node = graph.nodes["Numa(1)"]
    assert node.attributes["has_cpus"] is False and node.attributes["has_memory"] is True
    assert ("CpuPackage(0)", "Numa(1)", "Affinity") not in graph
    assert "name" in (graph.nodes["CpuPackage(0)"].unknown or {})


def test_a_node_without_memory(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.cpus([[0], [1]])
    tree.numa({0: ([0], 1024), 1: ([1], 0)}, [[10, 20], [20, 10]])
    node = capture(tree, Numa()).nodes["Numa(1)"]
    assert node.attributes["has_memory"] is False
    assert node.metrics["memory_total_bytes"] == 0  # said by the kernel


def test_nodes_with_gaps_in_their_numbers(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.cpus([[0], [1]])
    tree.numa({0: ([0], 1024), 8: ([1], 1024)}, [[10, 40], [40, 10]])
    graph = capture(tree, Numa())
    assert ("Numa(0)", "Numa(8)", "NumaDistance") in graph


def test_kernel_without_numa_still_shows_packages(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.cpus([[0, 1]])
    tree.process(100)
    collector = Numa()
    graph = capture(tree, collector, 100)
    assert "CpuPackage(0)" in graph and not graph.of_kind(nodes.Numa)
    assert any("no NUMA support" in reason for reason in collector.notes)


def test_no_sysfs_costs_the_round(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable):
        Tree(tmp_path).round(Numa())


def test_memory_per_node_and_the_set_it_may_run_on(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(100, cpus="0-3", numa_maps="7f00 default anon=300 N0=300 N1=400 kernelpagesize_kB=4\n")
    graph = capture(tree, Numa(), 100)
    found = accesses(graph)
    assert set(found) == {"Numa(0)", "Numa(1)", "NumaSet(0-1)"}
    assert found["Numa(0)"].metrics["resident_bytes"] == 300 * 4096
    assert found["Numa(1)"].metrics["resident_bytes"] == 400 * 4096
    whole = found["NumaSet(0-1)"]
    assert whole.metrics["resident_bytes"] == 700 * 4096
    assert whole.metrics["cpu_memory_similarity"] == pytest.approx(700 / (math.sqrt(2) * 500))
    assert whole.attributes["similarity_basis"] == "cpus_allowed"
    assert whole.attributes["cpus_allowed"] == "0-3"
    assert whole.attributes["mems_allowed"] == "0-1"
    assert ("NumaSet(0-1)", "Numa(1)", "NumaSetContain") in graph


def test_pinned_to_one_node_with_memory_on_the_other(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(100, cpus="2-3", numa_maps="7f00 default anon=300 N0=300 kernelpagesize_kB=4\n")
    found = accesses(capture(tree, Numa(), 100))
    assert set(found) == {"Numa(0)", "Numa(1)"}
    assert found["Numa(1)"].metrics == {
        "resident_bytes": 0,
        "resident_total_bytes": 300 * 4096,
        "cpu_memory_similarity": 0.0,
    }
    assert found["Numa(0)"].metrics == {"resident_bytes": 300 * 4096}


def test_pinned_and_local_is_a_perfect_match(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(100, cpus="2-3", numa_maps="7f00 default anon=300 N1=300 kernelpagesize_kB=4\n")
    found = accesses(capture(tree, Numa(), 100))
    assert set(found) == {"Numa(1)"}
    assert found["Numa(1)"].metrics["cpu_memory_similarity"] == pytest.approx(1.0)


def test_small_processes_are_not_walked_and_say_so(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(100, rss_pages=10, numa_maps="7f00 default N0=1 kernelpagesize_kB=4\n")
    found = accesses(capture(tree, Numa(), 100))
    assert tree.fs.reads.get("/proc/100/numa_maps", 0) == 0
    assert "64 MiB" in found["NumaSet(0-1)"].unknown["resident_bytes"]  # type: ignore[index]
    assert "resident_bytes" not in found["NumaSet(0-1)"].metrics


@pytest.mark.parametrize(("code", "said"), [(errno.EACCES, "permission"), (errno.ENOENT, "CONFIG_NUMA")])
def test_unreadable_numa_maps_is_a_reason(tmp_path: Path, code: int, said: str) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(100, numa_maps="")
    tree.fail("/proc/100/numa_maps", code)
    collector = Numa()
    found = accesses(capture(tree, collector, 100))
    assert said in found["NumaSet(0-1)"].unknown["resident_bytes"]  # type: ignore[index]
    assert bool(collector.notes) == (code == errno.EACCES)


def test_one_node_host_derives_from_rss_and_reads_no_numa_maps(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    flat_vm(tree)
    tree.process(100, rss_pages=5000, cpus="0-1", numa_maps="7f00 default N0=1 kernelpagesize_kB=4\n")
    found = accesses(capture(tree, Numa(), 100))
    assert tree.fs.reads.get("/proc/100/numa_maps", 0) == 0
    assert found["Numa(0)"].metrics["resident_bytes"] == 5000 * tree.procfs.page_size
    assert found["Numa(0)"].attributes == {"resident_source": "rss", "cpus_allowed": "0-1"}


def test_time_budget_rotates_so_that_everyone_gets_a_turn(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    for pid in (100, 101, 102):
        tree.process(pid, numa_maps="7f00 default N0=300 kernelpagesize_kB=4\n")
    collector = Numa(NumaSettings(budget_ms=40))
    known = []
    for _ in range(3):
        for pid in (100, 101, 102):  # each read takes 30 ms: two fit into a round
            tree.fs.on_read[f"/proc/{pid}/numa_maps"] = lambda: tree.clock.advance(0.030)
        graph = capture(tree, collector, 100, 101, 102)
        known.append([edge.metrics.get("resident_bytes") for edge in accesses_of_sets(graph)])
        assert any("rotation" in reason for reason in collector.notes)
    assert known[0].count(None) == 1
    assert None not in known[1], "everyone was read within two rounds"
    assert sum(tree.fs.reads[f"/proc/{pid}/numa_maps"] for pid in (100, 101, 102)) == 6


def test_reused_pid_and_vanished_process_are_counted_not_reported(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(100, start=7, numa_maps="")
    collector = tree.round(Numa())
    batch = collector.expand([nodes.Process(pid=100, start=6), nodes.Process(pid=999, start=1)])
    assert not batch.edges and collector.losses == {"vanished processes": 2}


def test_kernel_threads_have_no_memory(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(2, flags=0x00200000)
    assert not accesses(capture(tree, Numa(), 2))


def test_cpu_time_by_node_of_a_gpu_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(100, threads=2, numa_maps="7f00 default N0=300 kernelpagesize_kB=4\n")
    (tmp_path / "proc/100/fd").mkdir()
    (tmp_path / "proc/100/fd/3").symlink_to("/dev/nvidia0")
    collector = Numa()
    for ticks in (0, 50):
        # The first thread ran on node 1 for half a second, the second idled on node 0.
        tree.process(100, threads=2, ticks=ticks, numa_maps="7f00 default N0=300 kernelpagesize_kB=4\n")
        tree.thread(100, 100, ticks=ticks, processor=3)
        tree.thread(100, 101, ticks=0, processor=0)
        found = accesses(capture(tree, collector, 100))
    assert found["Numa(1)"].metrics["cpu_pct"] == pytest.approx(50 * 100 / tree.procfs.ticks_per_second)
    assert found["NumaSet(0-1)"].metrics["cpu_memory_similarity"] == 0.0
    assert found["NumaSet(0-1)"].attributes["similarity_basis"] == "cpu_time"


def test_state_of_ended_processes_is_forgotten(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(100, numa_maps="7f00 default N0=1 kernelpagesize_kB=4\n")
    collector = Numa()
    capture(tree, collector, 100)
    tree.remove("/proc/100")
    capture(tree, collector)
    assert not collector._memory and not collector._allowed
