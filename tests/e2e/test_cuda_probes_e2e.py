"""The installed command on made-up GPUs, while programs run on a made-up CUDA: who launches what, and where."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.runner import PLAIN, USER, Sandbox, Way, sandbox
from tests.fakes.cuda.build import Fakes
from tests.fakes.cuda.build import why_not as why_no_fakes
from tests.fakes.nvml import FakeNvml, NoCompiler, fake_nvml
from tests.integration.bpf_rig import why_not

from gpuflight.graph import Graph
from gpuflight.graph.load import read_rounds

WHY_NOT = why_not() or why_no_fakes() or ("" if os.geteuid() == 0 else "needs root")
needs_probes = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "probes work here")

STEP = "0 setdevice 2\n0 launch f0 4 1 1 256 1 1 64 s1\n0 memcpy 4096 1\n0 ssync s1\n0 usleep 20000\n"
WORK = f"0 register 0\n0 screate 1 1\n0 malloc 1 1048576\n0 pause\n{STEP * 3000}"
COLLECTORS = "cuda_probes,nvml,containers,process_tree,host"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Fakes:
    if why_no_fakes():
        pytest.skip(why_no_fakes())
    return Fakes.compile(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    try:
        return fake_nvml("h100x8", tmp_path_factory.mktemp("nvml"))
    except NoCompiler:
        pytest.skip("the fake NVML needs a C compiler")


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with sandbox() as made:
        yield made


class Programs:
    """Started, and ended with the test."""

    def __init__(self, fakes: Fakes) -> None:
        self.fakes = fakes
        self.running: list[subprocess.Popen[str]] = []

    def start(self, script: str, *prefix: str, **environment: str) -> int:
        """Its pid, once it works."""
        program = self.fakes.start(script, environment=environment, prefix=prefix)
        self.running.append(program)
        assert program.stdout is not None and program.stdin is not None
        assert program.stdout.readline() == "paused\n"
        program.stdin.write("\n")
        program.stdin.flush()
        return program.pid

    def stop(self) -> None:
        for program in self.running:
            program.kill()
            program.communicate()


@pytest.fixture
def programs(compiled: Fakes, tmp_path: Path) -> Iterator[Programs]:
    made = Programs(compiled.copy(tmp_path / "fakes"))
    yield made
    made.stop()


def ids(graph: Graph, kind: str, pid: int) -> list[str]:
    return [node.id for node in graph.nodes.values() if node.kind == kind and f"pid={pid}," in node.id]


def capture(box: Sandbox, nvml: FakeNvml, way: Way = PLAIN, code: int = 0) -> str:
    """A run of three seconds; the name of its folder."""
    arguments = ("run", "--offline", "3", "--interval", "1", "--out", "run", "--collectors", COLLECTORS)
    environment = {**os.environ, **nvml.environment}
    box.run(*arguments, code=code, env=environment, way=way)
    return "run"


@needs_probes
def test_a_run_shows_kernel_stream_and_gpu_of_programs_here_and_in_a_container(
    box: Sandbox, nvml: FakeNvml, programs: Programs, tmp_path: Path
) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    plain = programs.start(f"0 setenv CUDA_VISIBLE_DEVICES 7,5,1\n{WORK}")
    inside = tmp_path / "inside"
    inside.mkdir()
    enter = (
        f"mount -t tmpfs none {inside} && cp {programs.fakes.folder}/* {inside} && cd {inside} &&"
        f' exec "{inside}/$(basename $0)" "$1"'
    )
    contained = programs.start(WORK, "unshare", "-m", "--propagation", "private", "sh", "-c", enter)
    found = box.capture(capture(box, nvml))
    graph, line = found.loaded.graph, found.lines["cuda_probes"]
    assert line["status"] == "ok", line
    gpus = {node.attributes["index"]: node.id for node in graph.nodes.values() if node.kind == "GPU"}
    for pid, index in ((plain, 1), (contained, 2)):
        (process,) = ids(graph, "Process", pid)
        (kernel,) = ids(graph, "Kernel", pid)
        (stream,) = ids(graph, "Stream", pid)
        assert kernel.endswith(",kernel_0(float*))")
        assert (process, kernel, "Launch") in graph.edges and (kernel, stream, "RunOn") in graph.edges
        metrics = graph.nodes[kernel].metrics
        assert metrics["launches_count"] > 10 and 5 < metrics["launches_per_s"] < 60
        assert graph.nodes[process].attributes["cuda_layers"] == ["runtime"]
        assert (stream, gpus[index], "RunOn") in graph.edges
    rounds = list(read_rounds(box.work / "run/rounds.jsonl.zst"))
    (told,) = [one for one in rounds[-1].coverage if one["collector"] == "cuda_probes"]
    assert {"cuda_launch", "cuda_call"} <= {program["program"] for program in told["programs"]}, "what each cost"


@needs_probes
def test_an_ordinary_user_is_told_one_reason_and_what_to_do(box: Sandbox, nvml: FakeNvml, programs: Programs) -> None:
    programs.start(WORK)
    said = box.capture(capture(box, nvml, way=USER)).lines["cuda_probes"]
    assert said["status"] == "skipped" and said["reason"] and said["hint"]


def test_without_cuda_nothing_is_loaded_and_nothing_fails(box: Sandbox, nvml: FakeNvml) -> None:
    line = box.capture(capture(box, nvml)).lines["cuda_probes"]
    assert line["status"] in ("ok", "skipped"), "other tests may run CUDA programs beside this one"
    if line["status"] == "skipped":
        assert "CUDA" in line["reason"] or "BPF" in line["reason"] or line["hint"]
