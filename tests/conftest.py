"""What every test may ask for: data folder, witty-profiler fixture, a small machine; and the Hypothesis profiles."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from gpuflight.graph import Graph, edges, nodes

# The same examples on every run, so that no test fails by luck; HYPOTHESIS_PROFILE=deep searches further.
settings.register_profile("steady", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("deep", deadline=None, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

# What runs in the background of a script ignores Ctrl-C and hang-ups, and so would all that tests start.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

pytest_plugins = ["tests.services.kafka", "tests.services.mongodb"]

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """tests/data."""
    return DATA


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture
def witty_json() -> dict[str, Any]:
    """A graph that witty-profiler ships as its example: vLLM, tensor parallelism 4, on an Ascend host."""
    loaded: dict[str, Any] = json.loads((DATA / "witty" / "vllm-tp4-npu.json").read_bytes())
    return loaded


@pytest.fixture
def machine() -> Graph:
    """Two GPUs behind one PCIe switch, NVLink between them, a NIC on the other socket, and two talking processes."""
    return Graph(
        [
            nodes.Host(hostname="node1", attributes={"kernel": "6.1.0"}),
            nodes.Container(container_id="c" * 64, attributes={"name": "train", "runtime": "docker"}),
            nodes.Process(pid=1, start=1, attributes={"name": "systemd"}),
            nodes.Process(
                pid=10, start=5, attributes={"name": "python"}, metrics={"cpu_pct": 99.5, "rss_bytes": 2**31}
            ),
            nodes.Process(pid=11, start=6, attributes={"name": "python"}),
            nodes.Thread(tid=10, start=5, attributes={"name": "python"}),
            nodes.Socket(protocol="tcp", address="10.0.0.5:40000"),
            nodes.Socket(protocol="tcp", address="10.0.0.5:29500"),
            nodes.Pipe(inode=7),
            nodes.GPU(uuid="GPU-a", attributes={"index": 0}, metrics={"pcie_gen": 5, "pcie_width": 16}),
            nodes.GPU(uuid="GPU-b", attributes={"index": 1}, metrics={"pcie_gen": 5, "pcie_width": 8}),
            nodes.Numa(index=0),
            nodes.Numa(index=1),
            nodes.PciDevice(address="0000:00:01.0"),
            nodes.PciDevice(address="0000:01:00.0"),
            nodes.PciDevice(address="0000:02:00.0"),
            nodes.Nic(name="eth0", attributes={"addresses": ["10.0.0.5/24"]}, metrics={"speed_bits_per_s": 10**11}),
        ],
        [
            edges.Host("Host(node1)", "Process(pid=1,start=1)"),
            edges.Host("Host(node1)", f"Container({'c' * 64})"),
            edges.Host(f"Container({'c' * 64})", "Process(pid=10,start=5)"),
            edges.Host(f"Container({'c' * 64})", "Process(pid=11,start=6)"),
            edges.Own("Process(pid=1,start=1)", "Process(pid=10,start=5)"),
            edges.Own("Process(pid=10,start=5)", "Process(pid=11,start=6)"),
            edges.Own("Process(pid=10,start=5)", "Thread(tid=10,start=5)"),
            edges.Belong("Socket(tcp,10.0.0.5:40000)", "Process(pid=11,start=6)"),
            edges.Belong("Socket(tcp,10.0.0.5:29500)", "Process(pid=10,start=5)"),
            edges.ConnectTo("Socket(tcp,10.0.0.5:40000)", "Socket(tcp,10.0.0.5:29500)", {}, {"rtt_ms": 0.05}),
            edges.SendTo("Process(pid=11,start=6)", "Pipe(ino=7)"),
            edges.SendTo("Pipe(ino=7)", "Process(pid=10,start=5)"),
            edges.Access("Process(pid=10,start=5)", "GPU(uuid=GPU-a)", {}, {"memory_used_bytes": 2**34}),
            edges.NumaAccess("Process(pid=10,start=5)", "Numa(0)"),
            edges.AttachedTo("GPU(uuid=GPU-a)", "PciDevice(0000:01:00.0)"),
            edges.AttachedTo("GPU(uuid=GPU-b)", "PciDevice(0000:02:00.0)"),
            edges.PcieLink(
                "PciDevice(0000:00:01.0)",
                "PciDevice(0000:01:00.0)",
                {},
                {"link_speed_gt_per_s": 32.0, "link_width": 16},
            ),
            edges.PcieLink(
                "PciDevice(0000:00:01.0)", "PciDevice(0000:02:00.0)", {}, {"link_speed_gt_per_s": 32.0, "link_width": 8}
            ),
            edges.Affinity("PciDevice(0000:00:01.0)", "Numa(0)"),
            edges.Affinity("GPU(uuid=GPU-a)", "Numa(0)"),
            edges.Affinity("GPU(uuid=GPU-b)", "Numa(0)"),
            edges.Affinity("Nic(eth0)", "Numa(1)"),
            edges.NumaDistance("Numa(0)", "Numa(1)", {}, {"distance": 21}),
            edges.Proximity("GPU(uuid=GPU-a)", "GPU(uuid=GPU-b)", {"distance": "PIX"}),
        ],
    )
