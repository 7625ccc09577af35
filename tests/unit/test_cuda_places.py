"""Where the device numbers of processes lead, on machines with MIG, lost GPUs, device cgroups and unreadable files; and
one picture of a program that is watched by probes and recorded too."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest
from tests.fakes import cuda_rows as rows
from tests.fakes.collecting import collect, make
from tests.fakes.machine import rich_machine
from tests.fakes.machine_answers import TRAINER, nvml_snapshot
from tests.unit.test_cuda_probes import ONE_STREAM, PROCESS, Rig, graph_of, without_nvml_processes, work

from gpuflight.collectors.cuda_probes import CudaProbes
from gpuflight.collectors.sessions import Sessions
from gpuflight.graph.store import LiveStore
from gpuflight.sources.cuda_devices import MIG_AND_GPU, MIXED
from gpuflight.sources.nvml.model import Mig

pytestmark = pytest.mark.skipif(nvml_snapshot() is None, reason="the fake NVML needs a C compiler")


def reason(rig: Rig, *lists: list[Any]) -> str:
    """Why the GPU of the one stream is unknown."""
    node = graph_of(rig.round(*lists)).nodes[ONE_STREAM]
    return str((node.unknown or {})["gpu"])


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    made = Rig(monkeypatch)
    without_nvml_processes(made)
    return made


def split(rig: Rig, number: int) -> None:
    """Make one GPU two MIG devices."""
    gpu = rig.nvml.gpus[number]
    gpu.facts["mig_mode"] = "enabled"
    gpu.migs = [Mig(f"MIG-{number}-{at}", at + 1, 0, metrics={"memory_total_bytes": 1 << 33}) for at in range(2)]


def test_a_mig_device_by_its_uuid(rig: Rig) -> None:
    split(rig, 0)
    chosen = [rows.setenv(TRAINER, "MIG-0-1", 1)]
    graph = graph_of(rig.round([*work(1, 0), rows.memory(TRAINER, 1 << 31, 1 << 32), *chosen]))
    mig = "MigInstance(uuid=MIG-0-1)"
    assert (ONE_STREAM, mig, "RunOn") in graph.edges
    assert graph.edges[PROCESS, mig, "Access"].metrics["held_pct"] == 25.0
    graph = graph_of(rig.round([*work(5, 10**8), rows.memory(TRAINER, 1 << 31, 1 << 32)]))
    access = graph.edges[PROCESS, mig, "Access"]
    assert access.metrics["sm_util_pct"] == 10.0, "NVML measures none of MIG devices"
    assert "cores" in (access.unknown or {})["used_cores"]


def test_numbers_beside_a_gpu_in_mig_mode_are_nobodys_guess(rig: Rig) -> None:
    split(rig, 3)
    assert reason(rig, work(1, 0)) == MIG_AND_GPU


def test_numbers_on_a_box_of_several_models(rig: Rig) -> None:
    rig.nvml.gpus[1].facts["name"] = "T4"
    assert reason(rig, work(1, 0)) == MIXED
    ordered = [rows.setenv(TRAINER, "PCI_BUS_ID", 9, variable="CUDA_DEVICE_ORDER")]
    assert reason(rig, work(1, 0), ordered) == MIXED, "CUDA was in use by then"


def test_numbers_after_a_gpu_was_lost(rig: Rig) -> None:
    rig.nvml.gpus[5].state = "lost"
    assert "GPU 5 is lost" in reason(rig, work(1, 0))


def test_an_environment_that_may_not_be_read(rig: Rig) -> None:
    def refuse(what: str, path: str) -> bytes | None:
        if path == f"/proc/{TRAINER}/environ":
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
        return None

    rig.machine.fs.fault = refuse
    assert "environment of the process cannot be read" in reason(rig, work(1, 0))


def test_a_device_cgroup_of_version_one(monkeypatch: pytest.MonkeyPatch) -> None:
    files = rich_machine().copy()
    files.write(f"/proc/{TRAINER}/cgroup", "5:devices:/docker/x\n0::/\n")
    files.write("/sys/fs/cgroup/devices/docker/x/devices.list", "c 1:3 rwm\nc 195:2 rw\nc 195:7 rw\nc 195:255 rw\n")
    rig = Rig(monkeypatch, files)
    without_nvml_processes(rig)
    graph = graph_of(rig.round(work(1, 0, device=1)))
    assert (ONE_STREAM, rig.gpus[7], "RunOn") in graph.edges


def test_what_the_container_was_given_where_its_files_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    files = rich_machine().copy()
    files.write(f"/proc/{TRAINER}/environ", b"NVIDIA_VISIBLE_DEVICES=6,4\0CUDA_VISIBLE_DEVICES=1\0")
    rig = Rig(monkeypatch, files)
    without_nvml_processes(rig)
    graph = graph_of(rig.round(work(1, 0)))
    assert (ONE_STREAM, rig.gpus[6], "RunOn") in graph.edges


def test_a_program_that_is_recorded_too_has_one_entity_per_kernel_and_the_recorders_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(monkeypatch)
    name = rows.name(TRAINER, "gemm")
    rig.round([*work(7, 0)[:-1], name])
    world = rig.machine.next_round()
    recorded = collect(make("sessions"), world, [])
    probed = collect(rig.collector, world, [])
    assert Sessions.precedence > CudaProbes.precedence
    graph = LiveStore().advance(1, [recorded.nodes, probed.nodes], [recorded.edges, probed.edges]).graph
    (kernel,) = [node for node in graph.nodes.values() if node.kind == "Kernel" and node.label == "gemm"]
    assert kernel.metrics["launches_count"] == 20 and kernel.metrics["gpu_time_ms"] == 2.0
    assert kernel.metrics["block_threads_max_count"] == 256, "which the log does not tell"
    assert len([edge for edge in graph.edges.values() if edge.kind == "Launch" and edge.target == kernel.id]) == 1
