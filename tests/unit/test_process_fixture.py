"""The processes of a whole fixture tree, through the real file system and open_world."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuflight.collectors.common_parent import CommonParent
from gpuflight.collectors.host import Host
from gpuflight.collectors.process_tree import ProcessTree
from gpuflight.collectors.threads import Threads
from gpuflight.graph import Graph, nodes
from gpuflight.sources.open import open_world
from gpuflight.sources.world import World


@pytest.fixture
def world(data_dir: Path) -> Iterator[World]:
    world = open_world(str(data_dir / "proc" / "training-node"))
    world.begin_round(1)
    yield world
    world.close()


@pytest.fixture
def tree(world: World) -> ProcessTree:
    tree = ProcessTree()
    tree.observe(world)
    return tree


@pytest.fixture
def graph(world: World, tree: ProcessTree) -> Graph:
    graph = Graph()
    batches = [tree.seed()]
    processes = [node for node in batches[0].nodes if isinstance(node, nodes.Process)]
    for collector in (Threads(), CommonParent()):
        collector.observe(world)
        batches.append(collector.expand(processes))
    for batch in batches:
        for node in batch.nodes:
            graph.try_add_node(node)
        for edge in batch.edges:
            graph.try_add_edge(edge)
    return graph


def test_processes_and_what_is_odd_about_them(graph: Graph, tree: ProcessTree) -> None:
    names = {node.pid: node.attributes["name"] for node in graph.nodes.values() if isinstance(node, nodes.Process)}
    assert names == {
        1: "systemd",
        812: "containerd-shim",
        2210: "torchrun",
        2231: "pt main thread",
        2232: "pt_main) thread",
        3000: "caf\\xe9\nd\\x",
        3001: "defunct",
    }
    assert tree.losses == {"vanished processes": 1, "unreadable processes": 1}
    assert not graph.dangling()
    graph.model_dump_json()


def test_a_rank(graph: Graph) -> None:
    rank = graph.nodes["Process(pid=2232,start=91901)"]
    assert rank.attributes == {
        "name": "pt_main) thread",
        "cmdline": "/usr/bin/python3 -u train.py --max-tokens 4096",
        "exe": "/usr/bin/python3.11",
        "uid": 1000,
        "user": "ann",
        "cpus_allowed": "0-63",
        "nspids": [2232, 21],
        "cgroup": "/system.slice/docker-5f1c0a7be0d24b83a5e2f1f7d7a0c9f24a1f5d9c3f7e8b6a0d1c2b3a49586776.scope",
        "netns": 4026532600,
        "state": "R",
        "ppid": 2210,
    }
    assert rank.metrics == {"threads_count": 2, "rss_bytes": 1_500_000 * 65_536, "fds_count": 8}
    assert ("Process(pid=2210,start=91820)", rank.id, "Own") in graph.edges
    assert ("Process(pid=2232,start=91901)", "Thread(tid=2272,start=91902)", "Own") in graph.edges


def test_the_launcher_and_its_secret(graph: Graph) -> None:
    launcher = graph.nodes["Process(pid=2210,start=91820)"]
    assert launcher.attributes["cmdline"].endswith("train.py --wandb-api-key ***")
    assert launcher.attributes["common_parent_of"] == 2


def test_descriptors(world: World) -> None:
    index = world.procfs.fds()
    assert {
        pid: [ref.fd for ref in refs if ref.pid == pid] for refs in index.pipes.values() for pid in (2210, 2231)
    } == {
        2210: [5],
        2231: [1],
    }
    assert set(index.sockets) == {88000, 88001}
    assert set(index.paths) == {"/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/memfd:nccl (deleted)"}
    assert index.anon == {"eventfd": {2231: 1, 2232: 1}}


def test_the_machine(world: World) -> None:
    host = Host()
    host.observe(world)
    (node,) = host.seed().nodes
    assert node.id == "Host(gh200-07)"
    assert (node.attributes["architecture"], node.metrics["cpus_count"]) == ("aarch64", 64)
    assert node.attributes["kernel"] == "6.8.0-1012-nvidia-64k"
    assert world.procfs.boot_time_s == 1_795_000_000
    assert world.tools.which("sh") is None  # beside a tree of files nothing of this machine is asked
