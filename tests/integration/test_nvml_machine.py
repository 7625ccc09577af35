"""NVML out of process: other people's use of pynvml on the fake, and a whole World that finds it by its usual name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.fakes.nvml import FakeNvml, NoCompiler, fake_nvml

from gpuflight.collectors.gpu import NvmlCollector
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Graph, edges, nodes
from gpuflight.sources.open import open_world

# What tools such as gpustat read, through nothing but pynvml.
_GPUSTAT = """
import json, pynvml as n
n.nvmlInit()
rows = []
for i in range(n.nvmlDeviceGetCount()):
    h = n.nvmlDeviceGetHandleByIndex(i)
    m, u = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetUtilizationRates(h)
    rows.append({
        "name": n.nvmlDeviceGetName(h), "uuid": n.nvmlDeviceGetUUID(h),
        "temperature": n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU),
        "power": n.nvmlDeviceGetPowerUsage(h), "limit": n.nvmlDeviceGetEnforcedPowerLimit(h),
        "total": m.total, "used": m.used, "free": m.free, "util": u.gpu,
        "bus": n.nvmlDeviceGetPciInfo(h).busId,
        "pids": [p.pid for p in n.nvmlDeviceGetComputeRunningProcesses(h)],
        "graphics": [p.pid for p in n.nvmlDeviceGetGraphicsRunningProcesses(h)],
        "same": n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(h))) == i
            and n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId(n.nvmlDeviceGetPciInfo(h).busId)) == i,
    })
try: n.nvmlDeviceGetFanSpeed(h)
except n.NVMLError_NotSupported as e: fan = str(e)
print(json.dumps({"rows": rows, "driver": n.nvmlSystemGetDriverVersion(), "fan": fan}))
n.nvmlShutdown()
try: n.nvmlDeviceGetCount()
except n.NVMLError as e: assert e.value == n.NVML_ERROR_UNINITIALIZED
"""

_CAPTURE = """
import sys
from gpuflight.collectors.gpu import NvmlCollector
from gpuflight.graph import Graph
from gpuflight.sources.open import open_world
world, collector = open_world(), NvmlCollector()
for number in (1, 2):
    world.begin_round(number)
    collector.observe(world)
    batch = collector.seed()
world.close()
sys.stdout.buffer.write(Graph(batch.nodes, batch.edges).model_dump_json())
"""


def _fake(machine: str, folder: Path, **sections: dict[str, str]) -> FakeNvml:
    try:
        return fake_nvml(machine, folder, **sections)
    except NoCompiler as error:
        pytest.skip(str(error))


def _run(code: str, fake: FakeNvml, **environment: str) -> bytes:
    merged = {**os.environ, **fake.environment, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=merged, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_other_peoples_tools_can_read_the_fake(tmp_path: Path) -> None:
    answer = json.loads(_run(_GPUSTAT, _fake("l40sx4", tmp_path)))
    assert answer["driver"] == "550.90.07"
    assert answer["fan"] == "Not Supported"
    first = answer["rows"][0]
    assert len(answer["rows"]) == 4 and all(row["same"] for row in answer["rows"])
    assert first["name"] == "NVIDIA L40S"
    assert first["bus"] == "00000000:17:00.0"
    assert (first["pids"], first["graphics"]) == ([6001], [6002])
    assert (first["temperature"], first["power"], first["limit"], first["util"]) == (61, 349_000, 350_000, 12)
    assert first["used"] + first["free"] == first["total"]


def test_a_real_process_on_a_made_up_gpu(tmp_path: Path) -> None:
    """The whole way: library by its usual name, unmodified pynvml, this machine's /proc."""
    fake = _fake("h100x8", tmp_path, gpu0={"process": "none"})
    out = _run(_CAPTURE, fake, FAKE_NVML_PROCESSES=f"2:{os.getpid()}:1234")
    graph = json.loads(out)
    kinds = [node["kind"] for node in graph["nodes"]]
    assert (kinds.count("GPU"), kinds.count("NvSwitch")) == (8, 4)
    (access,) = (edge for edge in graph["edges"] if edge["kind"] == "Access")
    assert access["source"].startswith(f"Process(pid={os.getpid()},start=")
    assert access["target"] == "GPU(uuid=GPU-fa4e0000-0000-4000-8000-000000000002)"
    assert access["metrics"]["memory_used_bytes"] == 1234 << 20
    gpu = next(node for node in graph["nodes"] if node["id"] == access["target"])
    assert gpu["metrics"]["power_mean_watts"] > 0  # a rate, in the second round
    assert gpu["metrics"]["memory_unattributed_bytes"] == 4 << 20


def test_this_machine_is_described_or_refused_but_never_breaks() -> None:
    """With a driver there are GPUs; without, one line says why."""
    world, collector = open_world(), NvmlCollector()
    world.begin_round(1)
    try:
        collector.observe(world)
    except SourceUnavailable as error:
        assert error.reason
    else:
        batch = collector.seed()
        graph = Graph(batch.nodes, batch.edges)
        assert graph.of_kind(nodes.GPU)
        assert not graph.dangling()
        assert all(edge.metrics or edge.unknown for edge in graph.edges_of_kind(edges.Access))
    finally:
        collector.close()
        world.close()
