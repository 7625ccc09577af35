"""RDMA: counters that differ by vendor, resources over netlink, hosts without any of it."""

from __future__ import annotations

import errno
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.sysfs_tree import Tree, hgx_host

from gpuflight.collectors.rdma import Rdma, RdmaSettings
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Graph, edges, nodes
from gpuflight.sources.rdma_netlink import Connection, MemoryRegion, QueuePair, RdmaNetlink, socket_address


def attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + b"\0" * (-length % 4)


def u32(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


def u8(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=B", value))


NESTED = 0x8000


class Kernel:
    """A NETLINK_RDMA socket that answers dumps as ib_core does: one message per part, NLMSG_DONE last."""

    def __init__(self, answers: dict[tuple[int, int | None], list[bytes]], fails: dict[int, int] | None = None) -> None:
        self.answers = answers
        self.fails = fails or {}
        self.queue: list[bytes] = []

    def send(self, data: bytes) -> int:
        _, kind, _, sequence, _ = struct.unpack_from("=IHHII", data)
        assert kind >> 10 == 5
        operation = kind & 0x3FF
        device = struct.unpack_from("=I", data, 20)[0] if len(data) > 16 else None
        if operation in self.fails:
            body = struct.pack("=i", -self.fails[operation]) + data[:16]
            self.queue.append(struct.pack("=IHHII", 16 + len(body), 2, 0, sequence, 0) + body)
            return len(data)
        for body in self.answers.get((operation, device), []):
            self.queue.append(struct.pack("=IHHII", 16 + len(body), kind, 2, sequence, 0) + body)
        self.queue.append(struct.pack("=IHHIIi", 20, 3, 2, sequence, 0, 0))
        return len(data)

    def recv(self, size: int) -> bytes:
        return self.queue.pop(0)

    def close(self) -> None:
        self.queue.clear()


def device(index: int, name: str) -> bytes:
    return u32(1, index) + attribute(2, name.encode() + b"\0") + u32(3, 1)


def table(kind: int, *entries: bytes) -> bytes:
    inner = b"".join(attribute((kind + 1) | NESTED, entry) for entry in entries)
    return u32(1, 0) + attribute(2, b"mlx5_0\0") + attribute(kind | NESTED, inner)


RC = u32(21, 100) + u32(22, 777) + u8(25, 0) + u8(26, 2) + u8(27, 3) + u32(28, 4242) + u32(60, 9)
UD = u32(21, 101) + u8(26, 4) + u8(27, 3) + u32(28, 4242)
GSI = u32(21, 1) + u8(26, 1) + u8(27, 3) + attribute(29, b"ib_core\0")
SOCKADDR = struct.pack("=H", 2) + struct.pack(">H4B", 4791, 10, 0, 0, 7) + bytes(120)
CM = u32(21, 100) + u32(28, 4242) + attribute(33, SOCKADDR) + attribute(34, SOCKADDR)
MR = u32(62, 5) + u32(28, 4242) + attribute(45, struct.pack("=Q", 1 << 30)) + u32(60, 9)
PD = u32(60, 9) + u32(28, 4242)

FULL: dict[tuple[int, int | None], list[bytes]] = {
    (1, None): [device(0, "mlx5_0"), device(1, "mlx5_1")],
    (10, 0): [table(19, GSI, RC), table(19, UD)],
    (11, 0): [table(30, CM)],
    (13, 0): [table(40, MR)],
    (14, 0): [table(46, PD)],
}


def test_resources_as_the_kernel_packs_them() -> None:
    source = RdmaNetlink(connect=lambda protocol: Kernel(FULL))
    assert source.devices() == {"mlx5_0": 0, "mlx5_1": 1}
    assert source.queue_pairs(0) == [
        QueuePair(1, 0, "GSI", "RTS"),
        QueuePair(100, 4242, "RC", "RTS", 777, 9, "MIGRATED"),
        QueuePair(101, 4242, "UD", "RTS"),
    ]
    assert source.connections(0) == [Connection(100, "10.0.0.7:4791", "10.0.0.7:4791")]
    assert source.memory_regions(0) == [MemoryRegion(5, 4242, 1 << 30, 9)]
    assert source.protection_domains(0) == {9: 4242}
    assert source.queue_pairs(1) == []


def test_socket_addresses() -> None:
    v6 = struct.pack("=H", 10) + struct.pack(">HI", 18515, 0) + bytes.fromhex("fe80" + "00" * 13 + "0a") + bytes(100)
    assert socket_address(v6) == "[fe80::a]:18515"
    assert socket_address(struct.pack("=H", 27) + bytes(120)) == "" and socket_address(b"") == ""


def test_damaged_answers_do_not_raise() -> None:
    broken = {(1, None): [b"\x03\x00", u32(1, 0) + b"\xff\xff\x02\x00"], (10, 0): [table(19, b"\x01")[:-3]]}
    source = RdmaNetlink(connect=lambda protocol: Kernel(broken))
    assert source.devices() == {} and source.queue_pairs(0) == []


def capture(tree: Tree, collector: Rdma, kernel: Kernel | None = None, pids: tuple[int, ...] = ()) -> Graph:
    if collector._netlink is None:
        collector._netlink = RdmaNetlink(connect=lambda protocol: kernel or Kernel({}))
    tree.round(collector, 2.0)
    batch = collector.seed()
    graph = Graph(batch.nodes, batch.edges)
    processes = [nodes.Process(pid=pid, start=1000) for pid in pids]
    batch = collector.expand(processes)
    for entity in [*processes, *batch.nodes]:
        graph.try_add_node(entity)
    for edge in batch.edges:
        graph.try_add_edge(edge)
    assert not graph.dangling()
    return graph


def test_devices_ports_and_their_place(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    graph = capture(tree, Rdma())
    hca = graph.nodes["RdmaDevice(mlx5_2)"]
    assert hca.attributes["numa_node"] == 1 and hca.attributes["netdevs"] == ["ib2"]
    assert ("RdmaDevice(mlx5_2)", "Nic(ib2)", "HasAttribute") in graph
    assert ("RdmaDevice(mlx5_2)", f"PciDevice({hca.attributes['pci_address']})", "AttachedTo") in graph
    port = graph.nodes["RdmaPort(mlx5_2/1)"]
    assert port.metrics["speed_bits_per_s"] == 400e9
    assert port.attributes["state"] == "ACTIVE" and port.attributes["physical_state"] == "LinkUp"
    assert ("RdmaPort(mlx5_2/1)", "RdmaDevice(mlx5_2)", "Belong") in graph


PORT = "/sys/class/infiniband/mlx5_0/ports/1"


def test_counters_and_rates(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    collector = Rdma()
    first = capture(tree, collector).nodes["RdmaPort(mlx5_0/1)"]
    assert first.metrics["port_xmit_data_count"] == 0
    assert "two readings" in first.unknown["tx_bytes_per_s"]  # type: ignore[index]
    tree.write(f"{PORT}/counters/port_xmit_data", "1000\n")
    tree.write(f"{PORT}/hw_counters/out_of_sequence", "6\n")
    metrics = capture(tree, collector).nodes["RdmaPort(mlx5_0/1)"].metrics
    assert metrics["tx_bytes_per_s"] == 2000  # counted in units of four octets
    assert metrics["port_xmit_data_per_s"] == 500 and metrics["out_of_sequence_per_s"] == 3
    tree.write(f"{PORT}/counters/port_xmit_data", "1\n")
    reset = capture(tree, collector).nodes["RdmaPort(mlx5_0/1)"]
    assert "tx_bytes_per_s" not in reset.metrics and "reset" in reset.unknown["tx_bytes_per_s"]  # type: ignore[index]


def test_missing_counters_are_no_fault(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    real = tmp_path / PORT.lstrip("/")
    for name in ("counters/symbol_error", "hw_counters"):
        tree.remove(str((real / name).resolve().relative_to(tmp_path)))
    collector = Rdma()
    port = capture(tree, collector).nodes["RdmaPort(mlx5_0/1)"]
    assert "symbol_error_count" not in port.metrics and "symbol_error_count" not in (port.unknown or {})
    assert "out_of_sequence_count" not in port.metrics
    assert not collector.losses


def test_a_counter_that_fails_to_answer_is_unknown(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.fail(f"{PORT}/counters/symbol_error", errno.EINVAL)
    port = capture(tree, Rdma()).nodes["RdmaPort(mlx5_0/1)"]
    assert "symbol_error_count" not in port.metrics
    assert "EINVAL" in port.unknown["symbol_error_count"]  # type: ignore[index]


def test_less_telling_counters_take_turns(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.write(f"{PORT}/hw_counters/rx_atomic_requests", "0\n")
    collector = Rdma(RdmaSettings(counter_rounds=6))
    for _ in range(12):
        port = capture(tree, collector).nodes["RdmaPort(mlx5_0/1)"]
        assert "rx_atomic_requests_count" in port.metrics  # the last reading stands
    assert tree.fs.reads[f"{PORT}/hw_counters/rx_atomic_requests"] <= 3
    assert tree.fs.reads[f"{PORT}/counters/port_xmit_data"] == 12
    assert port.metrics["rx_atomic_requests_per_s"] == 0


def test_a_port_that_is_down(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.write(f"{PORT}/rate", "")
    tree.write(f"{PORT}/state", "1: DOWN\n")
    port = capture(tree, Rdma()).nodes["RdmaPort(mlx5_0/1)"]
    assert port.attributes["state"] == "DOWN" and "speed_bits_per_s" in port.unknown  # type: ignore[operator]


def test_queue_pairs_of_a_process(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(4242)
    graph = capture(tree, Rdma(), Kernel(FULL), (4242,))
    process = "Process(pid=4242,start=1000)"
    access = graph.edges[(process, "RdmaDevice(mlx5_0)", "Access")]
    assert access.metrics == {"queue_pairs_count": 2, "memory_regions_count": 1, "registered_bytes": 1 << 30}
    pair = graph.nodes["RdmaQueuePair(mlx5_0,qpn=100)"]
    assert pair.attributes["type"] == "RC" and pair.attributes["state"] == "RTS"
    assert (process, pair.id, "Access") in graph
    assert (pair.id, "RdmaDevice(mlx5_0)", "Belong") in graph
    assert (pair.id, "RdmaQueuePairEndpoint(10.0.0.7:4791,qpn=777)", "ConnectTo") in graph
    assert not [edge for edge in graph.edges_of_kind(edges.ConnectTo) if "qpn=101" in edge.source]  # datagrams
    assert "RdmaQueuePair(mlx5_0,qpn=1)" not in graph  # the kernel's own
    assert not graph.of_kind(nodes.RdmaMemoryRegion)


def test_peers_without_an_address_are_never_taken_for_one_another(tmp_path: Path) -> None:
    other = u32(21, 200) + u32(22, 777) + u8(26, 2) + u8(27, 3) + u32(28, 4242)
    kernel = Kernel({(1, None): [device(0, "mlx5_0")], (10, 0): [table(19, RC, other)]})
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(4242)
    graph = capture(tree, Rdma(), kernel, (4242,))
    ends = graph.of_kind(nodes.RdmaQueuePairEndpoint)
    assert len(ends) == 2 and all("address" in (end.unknown or {}) for end in ends)


def test_memory_regions_when_asked_for(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(4242)
    graph = capture(tree, Rdma(RdmaSettings(memory_regions=True)), Kernel(FULL), (4242,))
    assert graph.nodes["RdmaMemoryRegion(mlx5_0,mrn=5)"].metrics == {"length_bytes": 1 << 30}
    assert ("RdmaMemoryRegion(mlx5_0,mrn=5)", "RdmaProtectionDomain(mlx5_0,pdn=9)", "Belong") in graph


def test_limits_are_said(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(4242)
    collector = Rdma(RdmaSettings(max_queue_pairs=1))
    graph = capture(tree, collector, Kernel(FULL), (4242,))
    assert len(graph.of_kind(nodes.RdmaQueuePair)) == 1
    assert collector.notes["not every queue pair is drawn"].count == 1


@pytest.mark.parametrize("fails", [{1: errno.EPROTONOSUPPORT}, {10: errno.EOPNOTSUPP}])
def test_kernel_without_resource_tracking(tmp_path: Path, fails: dict[int, int]) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(4242)
    collector = Rdma()
    graph = capture(tree, collector, Kernel(FULL, fails), (4242,))
    assert "RdmaDevice(mlx5_0)" in graph
    assert any("queue pairs" in reason for reason in collector.notes)


def test_reused_pid_gets_nothing(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)
    tree.process(4242, start=5)
    collector = Rdma()
    graph = capture(tree, collector, Kernel(FULL), (4242,))
    assert not graph.edges_of_kind(edges.Access) and collector.losses == {"vanished processes": 1}


@pytest.mark.parametrize("empty", [True, False])
def test_no_devices_is_not_applicable(tmp_path: Path, empty: bool) -> None:
    tree = Tree(tmp_path)
    if empty:
        (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    with pytest.raises(SourceUnavailable) as caught:
        tree.round(Rdma())
    assert caught.value.reason == "no RDMA devices"


def test_device_that_vanishes_during_the_scan(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    hgx_host(tree)

    def unplug() -> Any:
        real = (tmp_path / "sys/class/infiniband/mlx5_1").resolve()
        tree.remove(str(real.relative_to(tmp_path)))
        tree.remove("/sys/class/infiniband/mlx5_1")

    tree.fs.on_read[f"{PORT}/counters/symbol_error"] = unplug
    collector = Rdma()
    graph = capture(tree, collector)
    assert "RdmaDevice(mlx5_0)" in graph and "RdmaDevice(mlx5_1)" not in graph
    assert collector.losses == {"RDMA devices that vanished during the scan": 1}
    assert "RdmaDevice(mlx5_1)" not in capture(tree, collector)


def test_soft_roce_names_its_interface(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.nic("eth0")
    full = tree.hca("rxe0", "/sys/devices/virtual", layer="Ethernet")
    tree.remove(f"{full}/device")
    tree.write(f"{full}/parent", "eth0\n")
    graph = capture(tree, Rdma())
    assert ("RdmaDevice(rxe0)", "Nic(eth0)", "HasAttribute") in graph
    assert "numa_node" not in (graph.nodes["RdmaDevice(rxe0)"].unknown or {})
