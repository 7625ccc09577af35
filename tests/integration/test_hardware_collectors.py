"""The hardware collectors on this very machine: as root and as nobody, against what psutil and the kernel say."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from gpuflight.collectors.disks import Disks
from gpuflight.collectors.mounts import Mounts
from gpuflight.collectors.nics import Nics
from gpuflight.collectors.npu import Npu
from gpuflight.collectors.numa import Numa
from gpuflight.collectors.pci import Pci
from gpuflight.collectors.rdma import Rdma
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Graph, nodes
from gpuflight.sources.clock import SystemClock
from gpuflight.sources.fs import HostFs
from gpuflight.sources.procfs import ProcFs
from gpuflight.sources.sysfs import SysFs
from gpuflight.sources.tools import Tools

COLLECTORS = (Numa, Pci, Nics, Disks, Mounts, Rdma, Npu)
# What cannot work on a machine without the hardware must say so; everything else must work everywhere.
OPTIONAL = {"rdma", "npu", "pci", "disks"}


def real_world() -> Any:
    fs, clock = HostFs(), SystemClock()
    return SimpleNamespace(fs=fs, clock=clock, sysfs=SysFs(fs), procfs=ProcFs(fs, clock), tools=Tools(), tape=None)


def rounds(world: Any, collector: Any, count: int = 2, first: int = 1) -> Graph:
    graph = Graph()
    for number in range(first, first + count):
        world.sysfs.begin_round(number)
        world.procfs.begin_round(number)
        world.tools.begin_round(number)
        collector.observe(world)
        batch = collector.seed()
        graph = Graph(batch.nodes, batch.edges)
        if nodes.Process in collector.expands:
            processes = [nodes.Process(pid=stat.pid, start=stat.start) for stat in world.procfs.processes().values()]
            batch = collector.expand(processes)
            for entity in [*processes, *batch.nodes]:
                graph.try_add_node(entity)
            for edge in batch.edges:
                graph.try_add_edge(edge)
    return graph


def check(graph: Graph, name: str) -> None:
    assert not graph.dangling(), name
    for element in [*graph.nodes.values(), *graph.edges.values()]:
        for metric, value in element.metrics.items():
            assert math.isfinite(value) and value >= 0, (element, metric)
        overlap = set(element.unknown or {}) & (set(element.metrics) | set(element.attributes))
        assert not overlap, (element, overlap)
        json.dumps([dict(element.attributes), dict(element.metrics), element.unknown], allow_nan=False)


@pytest.mark.parametrize("kind", COLLECTORS, ids=lambda kind: kind.name)
def test_runs_on_this_machine(kind: Any) -> None:
    collector = kind()
    try:
        graph = rounds(real_world(), collector)
    except SourceUnavailable as error:
        assert collector.name in OPTIONAL and error.reason
        return
    finally:
        collector.close()
        collector.close()
    check(graph, collector.name)
    assert graph.nodes


def test_interfaces_and_their_addresses_are_those_of_psutil() -> None:
    graph = rounds(real_world(), Nics())
    ours = {node.name: node for node in graph.of_kind(nodes.Nic)}
    theirs = psutil.net_if_addrs()
    connected = Path("/proc/net/route").read_text()
    for name, addresses in theirs.items():
        if name not in ours:
            continue  # a veth
        known = set(ours[name].attributes.get("addresses", ()))
        for address in addresses:
            if address.family == socket.AF_INET and (name == "lo" or name in connected):
                assert address.address in known, name
            elif address.family == socket.AF_INET6:
                assert address.address.partition("%")[0] in known, name
    assert "lo" in ours
    check(graph, "nics")


def test_loopback_traffic_is_measured() -> None:
    world, collector = real_world(), Nics()
    rounds(world, collector, 1)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        with peer:
            sent = 0
            for _ in range(64):
                client.sendall(b"x" * 65536)
                sent += len(peer.recv(65536, socket.MSG_WAITALL))
    lo = rounds(world, collector, 1, first=2).nodes["Nic(lo)"]
    assert lo.metrics["rx_bytes_per_s"] > 0 and sent == 64 * 65536
    assert lo.metrics["rx_bytes_per_s"] == pytest.approx(lo.metrics["tx_bytes_per_s"])


def test_root_file_system_is_that_of_the_kernel() -> None:
    graph = rounds(real_world(), Mounts())
    mount = graph.nodes["Mount(/)"]
    usage = psutil.disk_usage("/")
    assert mount.metrics["size_bytes"] == pytest.approx(usage.total, rel=0.01)
    assert mount.metrics["used_pct"] == pytest.approx(usage.percent, abs=1)


def test_writing_shows_on_the_disk_below_the_mount(tmp_path: Path) -> None:
    world, mounts, disks = real_world(), Mounts(), Disks()
    graph = rounds(world, mounts, 1)
    below = {edge.source: edge.target for edge in graph.edges.values() if edge.target.startswith("Disk(")}
    place = max(
        (node for node in graph.of_kind(nodes.Mount) if f"{tmp_path}/".startswith(node.path.rstrip("/") + "/")),
        key=lambda node: len(node.path),
    )
    disk = below.get(place.id)
    if disk is None:
        pytest.skip("temporary files are not on a disk here")
    rounds(world, disks, 1, first=2)
    with (tmp_path / "data").open("wb") as file:
        file.write(os.urandom(4 << 20))
        file.flush()
        os.fsync(file.fileno())
    assert rounds(world, disks, 1, first=3).nodes[disk].metrics["write_bytes_per_s"] > 0


def test_own_memory_lies_on_nodes_of_this_machine() -> None:
    graph = rounds(real_world(), Numa())
    mine = [edge for edge in graph.edges.values() if edge.source.startswith(f"Process(pid={os.getpid()},")]
    resident = sum(edge.metrics.get("resident_bytes", 0) for edge in mine if edge.target.startswith("Numa("))
    assert resident == pytest.approx(psutil.Process().memory_info().rss, rel=0.25)
    total = sum(node.metrics["memory_total_bytes"] for node in graph.of_kind(nodes.Numa))
    assert total > 0


def test_every_pci_function_of_the_kernel_is_there_when_asked_for() -> None:
    if not Path("/sys/bus/pci/devices").is_dir():
        pytest.skip("no PCI bus")
    from gpuflight.collectors.pci import PciSettings

    graph = rounds(real_world(), Pci(PciSettings(all_devices=True, virtual_functions=True)))
    assert {node.address for node in graph.of_kind(nodes.PciDevice)} == set(os.listdir("/sys/bus/pci/devices"))


_AS_NOBODY = """
import ctypes, os, sys
sys.path[:0] = {paths!r}
from tests.integration.test_hardware_collectors import COLLECTORS, check, real_world, rounds
from gpuflight.errors import SourceUnavailable
# Given up only now, since nobody may not be able to read the interpreter's own files.
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else our own /proc/self would still be root's
world = real_world()
for kind in COLLECTORS:
    collector = kind()
    try:
        graph = rounds(world, collector)
        check(graph, collector.name)
        print(collector.name, "ok", sorted(collector.notes), collector.losses)
    except SourceUnavailable as error:
        print(collector.name, "skipped", error.reason)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become nobody")
def test_runs_as_nobody() -> None:
    root = str(Path(__file__).parents[2])
    script = _AS_NOBODY.format(paths=[root, f"{root}/src"])
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    said = {line.split()[0]: line for line in run.stdout.splitlines()}
    assert set(said) == {kind.name for kind in COLLECTORS}
    for name in set(said) - OPTIONAL:
        assert " ok " in said[name], said[name]
    assert "other users" in said["mounts"], "what nobody cannot see must be said"
