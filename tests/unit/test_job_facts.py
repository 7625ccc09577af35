"""Which rank of which job a process is: by its environment, read once, and only where it has a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.proc import FakeProc

from gpuflight.collectors.base import Batch
from gpuflight.collectors.process_facts import NO_RIGHT
from gpuflight.collectors.ranks import Ranks
from gpuflight.graph import nodes
from gpuflight.redaction import redact_environ
from gpuflight.sources.job_environment import NOTHING, job_facts

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node-1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "night-7",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, (5, 8, 1, "torchrun night-7 at node-1:29500")),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, (5, 8, 1, "torchrun node-1:29500")),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", **TORCHRUN}, (5, 8, 1, "torchrun night-7 at node-1:29500")),
        (
            {
                "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77",
                "SLURM_STEP_ID": "0",
            },
            (3, 4, 0, "Slurm 77.0"),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
                "PMIX_NAMESPACE": "prterun-node-1-9@1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1",
            },
            (2, 4, 2, "Open MPI prterun-node-1-9@1"),
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "16", "MPI_LOCALRANKID": "0", "SLURM_JOB_ID": "9"},
            (0, 16, 0, "MPI 9"),
        ),
        ({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2", "FLUX_JOB_ID": "f23"}, (1, 2, None, "Flux f23")),
        ({"JOB_COMPLETION_INDEX": "4", "HOSTNAME": "train-4"}, (4, None, None, "Kubernetes train")),
    ],
)  # fmt: skip
def test_launchers(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    facts = job_facts(environ, "node-1").attributes
    assert tuple(facts.get(name) for name in ("rank", "world_size", "local_rank", "job")) == expected
    kept = redact_environ({**environ, "AWS_SECRET_ACCESS_KEY": "x"})
    assert job_facts(kept, "node-1").attributes == facts, "a recording says the same"


def test_what_launchers_do_not_say_is_unknown() -> None:
    facts = job_facts({"JOB_COMPLETION_INDEX": "4"}, "node-1")
    assert facts.attributes == {"rank": 4, "job_launcher": "Kubernetes"}
    assert set(facts.unknown) == {"world_size", "job"}
    assert job_facts({"PATH": "/bin"}, "node-1") is NOTHING


@pytest.mark.parametrize("rank", ["-1", "8", "x", "٣", "9" * 30])
def test_what_is_no_rank_is_unknown(rank: str) -> None:
    facts = job_facts({**TORCHRUN, "RANK": rank}, "node-1")
    assert facts.attributes == {} and "is none" in facts.unknown["rank"]


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_addresses_that_every_host_has_name_different_jobs(address: str) -> None:
    one, other = (job_facts({**TORCHRUN, "MASTER_ADDR": address}, host).attributes["job"] for host in ("a", "b"))
    assert one != other


class Rig:
    def __init__(self) -> None:
        self.proc = FakeProc()
        self.proc.add(1, "systemd", ppid=0)
        self.collector = Ranks()

    def add(self, pid: int, environ: dict[str, str], gpu: bool = True) -> None:
        self.proc.add(pid, "python")
        self.proc.fs.files[f"/proc/{pid}/environ"] = "".join(f"{k}={v}\0" for k, v in environ.items()).encode()
        if gpu:
            self.proc.open(pid, 3, "/dev/nvidia0")

    def round(self) -> dict[int, nodes.Process]:
        self.collector.losses, self.collector.notes = {}, {}
        self.proc.next_round()
        self.collector.observe(SimpleNamespace(procfs=self.proc.procfs))  # type: ignore[arg-type]
        everyone = [nodes.Process(pid=pid, start=stat.start) for pid, stat in self.proc.procfs.processes().items()]
        batch: Batch = self.collector.expand(everyone)
        return {entity.pid: entity for entity in batch.nodes if isinstance(entity, nodes.Process)}


def test_only_processes_with_a_gpu_are_asked_and_only_once() -> None:
    rig = Rig()
    rig.add(42, TORCHRUN)
    rig.add(43, {**TORCHRUN, "RANK": "6"}, gpu=False)
    for _ in range(3):
        found = rig.round()
        assert list(found) == [42]
        assert found[42].attributes["rank"] == 5
    assert rig.proc.fs.count("read", "/environ") == 1


def test_another_program_under_the_same_pid_is_asked_again() -> None:
    rig = Rig()
    rig.add(42, TORCHRUN)
    rig.round()
    rig.proc.end(42)
    rig.add(42, {**TORCHRUN, "RANK": "7"})
    rig.proc.change(42, start=99_999)
    assert rig.round()[42].attributes["rank"] == 7


def test_without_the_right_it_is_unknown_and_said() -> None:
    rig = Rig()
    rig.add(42, TORCHRUN)
    rig.proc.fs.denied.add("/proc/42/environ")
    found = rig.round()
    assert found[42].attributes == {} and found[42].unknown == {"rank": NO_RIGHT}
    assert [note.count for note in rig.collector.notes.values()] == [1]
