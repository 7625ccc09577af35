"""NPUs: tables of several generations of npu-smi, and what becomes of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.sysfs_tree import Tree

from gpuflight.collectors.npu import Npu, NpuSettings
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Graph, nodes
from gpuflight.sources.npu_smi import parse_info, parse_topology

LINE = "+---------------------------+---------------+----------------------------------------------------+\n"
DOUBLE = "+===========================+===============+====================================================+\n"
ONE_CHIP = (
    LINE
    + "| npu-smi 25.5.2                   Version: 25.5.2                                               |\n"
    + LINE
    + "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|\n"
    + "| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |\n"
    + DOUBLE
    + "| 0     910B4               | OK            | 89.9        39                0    / 0             |\n"
    + "| 0                         | 0000:C1:00.0  | 97          0    / 0          30711/ 32768         |\n"
    + DOUBLE
    + "| 5     910B4               | Warning       | 93.2        44                0    / 0             |\n"
    + "| 0                         | 0000:41:00.0  | 0           0    / 0          2847 / 32768         |\n"
    + DOUBLE
    + LINE
    + "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |\n"
    + DOUBLE
    + "| 0       0                 | 4242          | python3                  | 20000                   |\n"
    + "| 0       0                 | 4243          |                          | 100                     |\n"
    + DOUBLE
    + "| No running processes found in NPU 5                                                            |\n"
    + DOUBLE
)
TWO_CHIPS = (
    LINE
    + "| npu-smi 24.1.rc3.3               Version: 24.1.rc3.3                                           |\n"
    + LINE
    + "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|\n"
    + "| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |\n"
    + DOUBLE
    + "| 1     Ascend910           | OK            | 182.0       36                0    / 0             |\n"
    + "| 0     2                   | 0000:9D:00.0  | 0           0    / 0          3402 / 65536         |\n"
    + LINE
    + "| 1     Ascend910           | OK            | -           35                0    / 0             |\n"
    + "| 1     3                   | 0000:9F:00.0  | 12          0    / 0          3200 / 65536         |\n"
    + DOUBLE
)
NO_HBM = (
    "| npu-smi 23.0.0                   Version: 23.0.0                                               |\n"
    + "| NPU     Name              | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |\n"
    + "| Chip    Device            | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |\n"
    + "| 2       310P3             | OK              | NA           43                0     / 0             |\n"
    + "| 0       0                 | 0000:01:00.0    | 5            1572  / 21527                           |\n"
    + "| 310     310B4             | Alarm           | 0.0          65                15    / 15            |\n"
    + "| 0       NA                | NA              | 0            3628  / 15609                           |\n"
)
TOPOLOGY = """\
\t   NPU0       NPU1       NPU5       CPU Affinity
NPU0       X          HCCS       PHB        144-167
NPU1       HCCS       X          SYS        0-23,48
NPU5       PHB        SYS        X          NA

Legend:

  X    = Self
  SYS  = Path traversing PCIe and NUMA nodes. Nodes are connected through SMP, such as QPI, UPI.
  PHB  = Path traversing PCIe and the PCIe host bridge of a CPU.
"""


def test_one_chip_per_card() -> None:
    info = parse_info(ONE_CHIP)
    assert info.version == "25.5.2" and info.unparsed == 0
    first, second = info.chips
    assert (first.index, first.name, first.health, first.pci_address) == (0, "910B4", "OK", "0000:c1:00.0")
    assert (first.power_watts, first.temperature_celsius, first.util_pct) == (89.9, 39, 97)
    assert (first.memory_used_bytes, first.memory_total_bytes) == (30711 << 20, 32768 << 20)
    assert second.index == 5 and second.health == "Warning"
    assert [(process.pid, process.name, process.memory_bytes >> 20) for process in info.processes] == [
        (4242, "python3", 20000),
        (4243, "", 100),
    ]


def test_two_chips_per_card_are_told_apart_by_physical_id() -> None:
    first, second = parse_info(TWO_CHIPS).chips
    assert (first.card, first.chip, first.index) == (1, 0, 2)
    assert (second.card, second.chip, second.index) == (1, 1, 3)
    assert first.power_watts == 182.0 and second.power_watts is None  # "-": the card's power is shown once


def test_without_hbm_and_without_figures() -> None:
    first, second = parse_info(NO_HBM).chips
    assert first.memory_kind == "DDR" and first.memory_total_bytes == 21527 << 20
    assert first.power_watts is None and first.util_pct == 5
    assert second.pci_address == "" and second.health == "Alarm"
    assert first.index != second.index


@pytest.mark.parametrize("text", ["", "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\n", ONE_CHIP[:700]])
def test_anything_else_gives_no_chips_and_no_exception(text: str) -> None:
    parse_info(text)
    assert parse_info("").chips == []


def test_rows_that_make_no_sense_are_counted() -> None:
    assert parse_info(ONE_CHIP.replace("| 4242          |", "| n/a           |")).unparsed == 1


def test_topology() -> None:
    found = parse_topology(TOPOLOGY)
    assert found.links == {(0, 1): "HCCS", (0, 5): "PHB", (1, 5): "SYS"}
    assert found.cpus == {0: "144-167", 1: "0-23,48"}


def test_topology_of_one_and_of_none() -> None:
    assert parse_topology("   NPU0   CPU Affinity\nNPU0   X   0-3\n").cpus == {0: "0-3"}
    assert parse_topology("").links == {} and parse_topology("This device does not support querying topo.").cpus == {}


class Tool:
    """npu-smi that prints what it is told to, or fails."""

    def __init__(self, info: str = ONE_CHIP, topology: str | None = TOPOLOGY) -> None:
        self.info: str | None = info
        self.topology = topology
        self.runs: list[list[str]] = []

    def which(self, name: str) -> str | None:
        return f"/usr/local/bin/{name}"

    def run(self, argv: list[str], timeout_s: float) -> bytes:
        self.runs.append(argv[1:])
        text = self.info if len(argv) == 2 else self.topology
        if text is None:
            raise SourceUnavailable("npu-smi did not answer within 4 s")
        return text.encode()


def capture(tree: Tree, collector: Npu, seconds: float = 5.0) -> Graph:
    tree.round(collector, seconds)
    batch = collector.seed()
    graph = Graph(batch.nodes, batch.edges)
    assert not graph.dangling()
    return graph


def host(tmp_path: Path, namespace: int = 0xEFFFFFFC) -> Tree:
    tree = Tree(tmp_path)
    tree.tools = Tool()
    tree.process(4242)
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to(f"pid:[{namespace}]")
    return tree


def test_npus_their_processes_and_links(tmp_path: Path) -> None:
    tree = host(tmp_path)
    collector = Npu()
    graph = capture(tree, collector)
    npu = graph.nodes["NPU(0)"]
    assert npu.attributes["cpus"] == "144-167" and npu.attributes["pci_address"] == "0000:c1:00.0"
    assert npu.metrics["util_pct"] == 97 and npu.metrics["memory_total_bytes"] == 32 << 30
    access = graph.edges[("Process(pid=4242,start=1000)", "NPU(0)", "Access")]
    assert access.metrics == {"memory_used_bytes": 20000 << 20}
    assert graph.edges[("NPU(0)", "NPU(5)", "Proximity")].attributes == {"distance": "PHB"}
    assert ("NPU(0)", "PciDevice(0000:c1:00.0)", "AttachedTo") in graph
    assert collector.losses == {"vanished processes": 1}  # 4243


def test_the_tool_is_not_run_every_round_and_the_age_is_said(tmp_path: Path) -> None:
    tree = host(tmp_path)
    collector = Npu(NpuSettings(interval_s=15))
    for _ in range(4):
        graph = capture(tree, collector)
    assert tree.tools.runs == [["info"], ["info", "-t", "topo"], ["info"]]
    assert "reading_age_s" not in graph.nodes["NPU(0)"].metrics
    assert capture(tree, collector).nodes["NPU(0)"].metrics["reading_age_s"] == pytest.approx(5)


def test_pids_of_the_host_are_not_taken_for_ours_in_a_container(tmp_path: Path) -> None:
    tree = host(tmp_path, namespace=4026532999)
    collector = Npu()
    graph = capture(tree, collector)
    assert not graph.of_kind(nodes.Process) and "NPU(0)" in graph
    assert any("pids of the host" in reason for reason in collector.notes)


def test_a_hanging_tool_is_left_alone_for_a_while_and_then_tried_again(tmp_path: Path) -> None:
    tree = host(tmp_path)
    tree.tools.info = None
    collector = Npu(NpuSettings(interval_s=10))
    for _ in range(8):
        with pytest.raises(SourceUnavailable, match="did not answer"):
            tree.round(collector, 5.0)
    assert len(tree.tools.runs) == 1
    tree.tools.info = ONE_CHIP
    assert "NPU(0)" in capture(tree, collector)


def test_without_topology_the_rest_stands(tmp_path: Path) -> None:
    tree = host(tmp_path)
    tree.tools.topology = None
    collector = Npu()
    graph = capture(tree, collector)
    assert "NPU(5)" in graph and any("links between NPUs" in reason for reason in collector.notes)


def test_figures_that_are_not_printed_are_unknown(tmp_path: Path) -> None:
    tree = host(tmp_path)
    tree.tools.info = TWO_CHIPS
    npu = capture(tree, Npu()).nodes["NPU(3)"]
    assert "power_watts" not in npu.metrics and "power_watts" in npu.unknown  # type: ignore[operator]


def test_without_the_tool(tmp_path: Path) -> None:
    tree = host(tmp_path)
    tree.tools.which = lambda name: None
    with pytest.raises(SourceUnavailable) as caught:
        tree.round(Npu())
    assert caught.value.hint


def test_a_tool_that_shows_nothing(tmp_path: Path) -> None:
    tree = host(tmp_path)
    tree.tools.info = "no device\n"
    with pytest.raises(SourceUnavailable, match="no NPUs"):
        tree.round(Npu())
