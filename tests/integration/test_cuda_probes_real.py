"""The collector cuda_probes over real uprobes: fake CUDA libraries under real programs, a fake NVML that lists GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.collecting import Outcome, check
from tests.fakes.cuda.build import Fakes
from tests.fakes.cuda.build import why_not as why_no_fakes
from tests.fakes.nvml import FakeNvml, NoCompiler, fake_nvml
from tests.integration.bpf_rig import why_not

from gpuflight.collectors.cuda_probes import CudaProbes, CudaProbesSettings
from gpuflight.graph import Edge, Entity, Graph
from gpuflight.sources.nvml import Nvml
from gpuflight.sources.open import open_world
from gpuflight.sources.procfs import ProcStat
from gpuflight.sources.world import World

WHY_NOT = why_not() or why_no_fakes() or ("" if os.geteuid() == 0 else "needs root")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "probes work here")

WORK = """
0 launch f0 4 1 1 256 1 1 64 s1
0 launch f1 2 1 1 32 1 1 0 0
0 memcpy 1000 1
0 memcpy 10 2
0 malloc 1 4096
0 ssync s1
0 sync
"""
BEGIN = "0 register 0\n0 register 1\n0 screate 1 1\n"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Fakes:
    return Fakes.compile(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    try:
        return fake_nvml("h100x8", tmp_path_factory.mktemp("nvml"))
    except NoCompiler:
        pytest.skip("the fake NVML needs a C compiler")


class Rig:
    """Programs, and the collector on this machine as if there were no other processes than theirs."""

    def __init__(self, fakes: Fakes, nvml: FakeNvml, record: Path | None = None, **settings: Any) -> None:
        self.fakes = fakes
        self.nvml = nvml
        self.programs: list[subprocess.Popen[str]] = []
        self.collector = CudaProbes(CudaProbesSettings(**settings))
        self.world = open_world(record=record)
        self.number = 0
        if record is None:  # what is recorded has to be asked for in the same way when it is replayed
            self.world.nvml = Nvml(library=nvml.library, clock=self.world.clock)
            whole: Callable[[], dict[int, ProcStat]] = self.world.procfs.processes
            self.world.procfs.processes = lambda: self._ours(whole())  # type: ignore[method-assign]

    def _ours(self, processes: dict[int, ProcStat]) -> dict[int, ProcStat]:
        own = {program.pid for program in self.programs}
        for pid, stat in processes.items():  # a child has a higher number than its parent
            if stat.ppid in own:
                own.add(pid)
        return {pid: stat for pid, stat in processes.items() if pid in own}

    def start(self, script: str, program: str = "plain", **more: Any) -> subprocess.Popen[str]:
        """Start a program, and wait until it says that it pauses."""
        started = self.fakes.start(script, program, **more)
        self.programs.append(started)
        self.wait(started)
        return started

    @staticmethod
    def wait(program: subprocess.Popen[str]) -> None:
        assert program.stdout is not None
        assert program.stdout.readline() == "paused\n"

    def go_on(self, program: subprocess.Popen[str], *, to_the_end: bool = False) -> None:
        """Let it run to its next pause, or to its end."""
        assert program.stdin is not None
        program.stdin.write("\n")
        program.stdin.flush()
        if to_the_end:
            assert program.wait(60) in (0, 7)
        else:
            self.wait(program)

    def round(self) -> Graph:
        self.number += 1
        self.collector.losses.clear()
        self.collector.notes.clear()
        with self.nvml.activated():
            self.world.begin_round(self.number)
            self.collector.observe(self.world)
        batch = self.collector.seed()
        check(Outcome(True, nodes=batch.nodes, edges=batch.edges))
        return Graph(batch.nodes, batch.edges)

    def notes(self) -> str:
        return "\n".join(self.collector.notes)

    def close(self) -> None:
        self.collector.close()
        self.world.close()
        for program in self.programs:
            if program.poll() is None:
                program.kill()
            for stream in (program.stdin, program.stdout):
                if stream is not None:
                    stream.close()
            program.wait()


@pytest.fixture
def rig(compiled: Fakes, nvml: FakeNvml, tmp_path: Path) -> Iterator[Rig]:
    made = Rig(compiled.copy(tmp_path / "fakes"), nvml)
    yield made
    made.close()


def of_kind(graph: Graph, kind: str, pid: int) -> list[Entity]:
    return [node for node in graph.nodes.values() if node.kind == kind and f"pid={pid}," in node.id]


def kernels(graph: Graph, pid: int) -> dict[str, Entity]:
    return {node.label: node for node in of_kind(graph, "Kernel", pid)}


def process(graph: Graph, pid: int) -> Entity:
    (found,) = of_kind(graph, "Process", pid)
    return found


def gpus(graph: Graph, pid: int) -> set[str]:
    """UUIDs of the GPUs that the streams of a process run on."""
    streams = {node.id for node in of_kind(graph, "Stream", pid)}
    return {edge.target for edge in graph.edges.values() if edge.kind == "RunOn" and edge.source in streams}


def gpu_id(nvml: FakeNvml, number: int) -> str:
    with nvml.activated():
        source = Nvml(library=nvml.library)
        try:
            return f"GPU(uuid={source.snapshot().gpus[number].uuid})"
        finally:
            source.close()


def edge_of(graph: Graph, kind: str, source: str, target: str) -> Edge:
    return graph.edges[source, target, kind]


# --- one program -----------------------------------------------------------------------------------------------------


def test_a_program_that_starts_while_it_is_watched(rig: Rig) -> None:
    """Everything of it, from its first call: the library was hooked for another one."""
    holder = rig.start("0 pause\n0 pause")
    rig.round()
    variables = {"CUDA_VISIBLE_DEVICES": "0"}
    script = f"0 setenv CUDA_VISIBLE_DEVICES 5,3,6\n0 setdevice 1\n{BEGIN}{WORK}0 pause\n{WORK * 9}0 pause\n0 pause"
    program = rig.start(script, environment=variables)
    graph = rig.round()
    rig.go_on(program)
    graph = rig.round()
    pid = program.pid
    found = kernels(graph, pid)
    assert found["kernel_0(float*)"].metrics["launches_count"] == 10
    assert found["kernel_1(float*)"].metrics["launches_count"] == 10
    assert found["kernel_0(float*)"].metrics["launches_per_s"] > 0
    assert found["kernel_0(float*)"].attributes == {"grid": "4x1x1", "block": "256x1x1"}
    assert found["kernel_0(float*)"].metrics["threads_mean_count"] == 1024
    assert found["kernel_0(float*)"].metrics["shared_max_bytes"] == 64
    gpu = gpu_id(rig.nvml, 3)
    assert gpus(graph, pid) == {gpu}, "the second of the list that it set itself"
    node = process(graph, pid)
    assert not node.attributes.get("cuda_watched_late")
    to_gpu, back = edge_of(graph, "Transfer", node.id, gpu), edge_of(graph, "Transfer", gpu, node.id)
    assert (to_gpu.metrics["copied_bytes"], back.metrics["copied_bytes"]) == (10_000, 100)
    access = edge_of(graph, "Access", node.id, gpu)
    assert access.metrics["held_bytes"] == 10 * 4096
    assert 0 < access.metrics["sm_util_pct"] <= 100 and access.metrics["used_cores"] > 0
    streams = {stream.attributes["name"]: stream for stream in of_kind(graph, "Stream", pid)}
    assert len(streams) == 2 and "default stream" in streams
    assert all(stream.metrics["work_ms"] > 0 and 0 < stream.metrics["work_pct"] <= 100 for stream in streams.values())
    assert node.metrics["cuda_waits_count"] >= 20 and node.metrics["cuda_wait_ms"] > 0
    assert kernels(graph, holder.pid) == {}


def test_a_program_that_ran_before(rig: Rig) -> None:
    """Its kernels have names by its symbols, its device by its memory: it set its environment before."""
    script = (
        f"0 setenv CUDA_VISIBLE_DEVICES 6,2\n{BEGIN}{WORK}0 pause\n0 setdevice 1\n0 screate 1 1\n{WORK}0 pause\n0 pause"
    )
    program = rig.start(script)
    rig.round()
    rig.go_on(program)
    graph = rig.round()
    assert set(kernels(graph, program.pid)) == {"kernel_0(float*)", "kernel_1(float*)"}
    assert gpus(graph, program.pid) == {gpu_id(rig.nvml, 2)}
    assert process(graph, program.pid).attributes["cuda_watched_late"] is True


def test_children_that_are_forked(rig: Rig) -> None:
    """They have the environment that the parent set, and the names that it registered."""
    rig.start("0 pause\n0 pause")
    rig.round()
    child = f"0 setdevice 1\n0 screate 1 1\n{WORK}0 pause"
    script = f"0 setenv CUDA_VISIBLE_DEVICES 7,4\n{BEGIN}0 pause\nfork\n{child}\njoin\n0 pause"
    program = rig.start(script)
    rig.round()
    rig.go_on(program)
    graph = rig.round()
    (child,) = [pid for pid in rig.world.procfs.processes() if rig.world.procfs.processes()[pid].ppid == program.pid]
    assert set(kernels(graph, child)) == {"kernel_0(float*)", "kernel_1(float*)"}
    assert gpus(graph, child) == {gpu_id(rig.nvml, 4)}
    assert kernels(graph, program.pid) == {}


@pytest.mark.parametrize("program", ["static", "dlopen"])
def test_however_it_is_linked(rig: Rig, program: str) -> None:
    """A runtime in the program itself shows when it loads a driver; one that is loaded late is found when it is."""
    begin = "0 pause\n0 load\n" if program == "dlopen" else "0 culaunch 99 1 1 1 1 1 1 0 0\n"
    environment = {"FAKE_DRIVER": str(rig.fakes.driver)}
    started = rig.start(f"{begin}{BEGIN}0 pause\n{WORK}0 pause\n0 pause", program, environment=environment)
    if program == "dlopen":
        rig.start("0 pause\n0 pause", "static")  # somebody else, so that there is something to look at
        with pytest.raises(Exception, match="CUDA"):
            rig.round()
        rig.go_on(started)
    for _ in range(3):
        rig.round()
    rig.go_on(started)
    graph = rig.round()
    assert kernels(graph, started.pid)["kernel_0(float*)"].metrics["launches_count"] == 1
    if program == "static":
        assert "linked into them" in rig.notes()
        assert process(graph, started.pid).attributes["cuda_layers"] == ["runtime", "driver"]


def test_a_stripped_one_is_watched_at_the_driver(rig: Rig) -> None:
    environment = {"FAKE_DRIVER": str(rig.fakes.driver)}
    script = f"0 culaunch 99 1 1 1 1 1 1 0 0\n{BEGIN}0 pause\n{WORK}0 pause\n0 pause"
    program = rig.start(script, "stripped", environment=environment)
    rig.round()
    assert "without a runtime that has symbols" in rig.notes()
    rig.go_on(program)
    graph = rig.round()
    assert process(graph, program.pid).metrics["cuda_launches_count"] == 2
    assert process(graph, program.pid).attributes["cuda_layers"] == ["driver"]


def test_launches_past_the_runtime_count_and_the_runtimes_own_count_once(rig: Rig) -> None:
    environment = {"FAKE_DRIVER": str(rig.fakes.driver)}
    script = f"0 culaunch 99 1 1 1 1 1 1 0 0\n{BEGIN}0 pause\n{WORK}0 culaunch 4242 1 1 1 64 1 1 0 0\n0 pause\n0 pause"
    program = rig.start(script, environment=environment)
    rig.round()
    rig.go_on(program)
    graph = rig.round()
    assert process(graph, program.pid).metrics["cuda_launches_count"] == 3
    assert sum(kernel.metrics["launches_count"] for kernel in kernels(graph, program.pid).values()) == 3
    assert process(graph, program.pid).metrics["cuda_held_bytes"] == 4096, "and so does memory"


def test_another_mount_namespace(rig: Rig, tmp_path: Path) -> None:
    """As in a container: the library's path means nothing here, and its file system is given back when it ends."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    inside = tmp_path / "inside"
    inside.mkdir()
    command = (
        f"mount -t tmpfs none {inside} && cp {rig.fakes.folder}/* {inside} && cd {inside} &&"
        f' FAKE_CUDART={inside}/libcudart.so.12 exec "{inside}/$(basename $0)" "$1"'
    )
    prefix = ["unshare", "-m", "--propagation", "private", "sh", "-c", command]
    program = rig.start(f"{BEGIN}0 pause\n{WORK}0 pause", prefix=prefix)
    assert not (inside / "libcudart.so.12").exists()
    rig.round()
    rig.go_on(program)
    graph = rig.round()
    assert kernels(graph, program.pid)["kernel_0(float*)"].metrics["launches_count"] == 1
    assert process(graph, program.pid).attributes["cuda_libraries"] == [f"{inside}/libcudart.so.12"]
    rig.go_on(program, to_the_end=True)
    rig.start("0 pause\n0 pause")
    for _ in range(5):
        rig.round()
    paths = [hooked.library.path for hooked in rig.collector._watch.hooked.values()]
    assert not [path for path in paths if path.startswith(str(inside))]


def test_a_process_that_executes_another_program(rig: Rig) -> None:
    rig.start("0 pause\n0 pause")
    rig.round()
    following = rig.fakes.folder / "following"
    following.write_text(f"0 register 1\n0 screate 1 1\n0 pause\n{WORK}0 pause\n0 pause\n")
    program = rig.start(f"0 setenv CUDA_VISIBLE_DEVICES 4\n{BEGIN}{WORK}0 pause\nexec {following}")
    before = rig.round()
    assert gpus(before, program.pid) == {gpu_id(rig.nvml, 4)}
    rig.go_on(program)
    rig.round()
    rig.go_on(program)
    graph = rig.round()
    assert gpus(graph, program.pid) == {gpu_id(rig.nvml, 4)}, "by what exec handed over"
    assert process(graph, program.pid).metrics["cuda_launches_count"] == 2
    assert kernels(graph, program.pid)["kernel_1(float*)"].metrics["launches_count"] == 1


def test_two_containers_of_one_image_count_once_each(rig: Rig, tmp_path: Path) -> None:
    """Each sees the library on an overlay of its own; the kernel hooks the one file beneath, for both."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    programs = []
    for name in ("one", "two"):
        merged, upper, work = (tmp_path / name / part for part in ("merged", "upper", "work"))
        for folder in (merged, upper, work):
            folder.mkdir(parents=True)
        options = f"lowerdir={rig.fakes.folder},upperdir={upper},workdir={work}"
        command = (
            f"mount -t overlay overlay -o {options} {merged} || {{ echo no overlay; exit 0; }};"
            f' cd {merged} && exec "{merged}/$(basename $0)" "$1"'
        )
        prefix = ["unshare", "-m", "--propagation", "private", "sh", "-c", command]
        started = rig.fakes.start(f"{BEGIN}0 pause\n{WORK}0 pause\n{WORK}0 pause\n0 pause", prefix=prefix)
        rig.programs.append(started)
        assert started.stdout is not None
        if started.stdout.readline() != "paused\n":
            pytest.skip("no overlay file system here")
        programs.append(started)
    rig.round()
    for program in programs:
        rig.go_on(program)
    graph = rig.round()
    for program in programs:
        assert kernels(graph, program.pid)["kernel_0(float*)"].metrics["launches_count"] == 1
        assert process(graph, program.pid).metrics["cuda_held_bytes"] == 4096
    hooked = [one for one in rig.collector._watch.hooked.values() if one.layer == "runtime"]
    assert len(hooked) == 1
    first = next(program for program in programs if program.pid == hooked[0].pid)
    (other,) = [program for program in programs if program is not first]
    first.kill()
    first.wait()
    rig.round()
    assert [one.pid for one in rig.collector._watch.hooked.values() if one.layer == "runtime"] == [other.pid]
    rig.go_on(other)
    assert kernels(rig.round(), other.pid)["kernel_0(float*)"].metrics["launches_count"] == 2


# --- its end ---------------------------------------------------------------------------------------------------------


def test_the_end_of_a_program_closes_its_spans_and_tells_its_leaks(rig: Rig) -> None:
    rig.start("0 pause\n0 pause")
    rig.round()
    script = (
        f"{BEGIN}0 malloc 1 1000000\n0 malloc 2 500\n0 free 2\n0 pause\n0 launch f0 1 1 1 32 1 1 0 s1\n0 usleep 1000\n"
    )
    program = rig.start(script)
    rig.round()
    rig.go_on(program, to_the_end=True)
    graph = rig.round()
    node = process(graph, program.pid)
    assert node.attributes["cuda_exit_code"] == 0
    assert (node.metrics["cuda_leaked_bytes"], node.metrics["cuda_leaks_count"]) == (1_000_000, 1)
    assert kernels(graph, program.pid)["kernel_0(float*)"].metrics["launches_count"] == 1
    (stream,) = of_kind(graph, "Stream", program.pid)
    assert stream.metrics["work_ms"] > 0
    assert not of_kind(rig.round(), "Process", program.pid)


def test_who_holds_memory(rig: Rig) -> None:
    program = rig.start(f"{BEGIN}0 pause\n0 malloc 1 1048576\n0 malloc 2 1048576\n0 pause\n0 pause")
    rig.round()
    rig.go_on(program)
    for _ in range(6):
        graph = rig.round()
    (text,) = process(graph, program.pid).attributes["cuda_allocations"]
    assert text.startswith("2 MiB in 2 pieces by cudaMalloc (device), called by run+0x")


# --- budget ----------------------------------------------------------------------------------------------------------


def test_nothing_traps_while_a_program_over_its_budget_is_left_alone(
    compiled: Fakes, nvml: FakeNvml, tmp_path: Path
) -> None:
    rig = Rig(compiled.copy(tmp_path / "fakes"), nvml, budget_launches_per_s=1)
    try:
        burst = "0 launches 1000 f0\n0 pause\n"
        program = rig.start(f"{BEGIN}0 pause\n{burst * 3}0 pause")
        rig.round()
        rig.go_on(program)
        graph = rig.round()
        assert process(graph, program.pid).metrics["cuda_launches_count"] == 1000
        rig.go_on(program)
        graph = rig.round()
        node = process(graph, program.pid)
        assert node.metrics["cuda_launches_count"] == 1000, "those of now were not seen"
        assert node.attributes["cuda_estimated"] is True and node.metrics["cuda_launches_per_s"] > 0
        assert node.metrics["cuda_watched_pct"] < 10
        assert "watched in some rounds only" in rig.notes()
    finally:
        rig.close()


# --- a recording -----------------------------------------------------------------------------------------------------


def test_a_recording_shows_the_same_picture_without_programs_probes_and_libraries(
    compiled: Fakes, nvml: FakeNvml, tmp_path: Path
) -> None:
    path = tmp_path / "machine"
    rig = Rig(compiled.copy(tmp_path / "fakes"), nvml, record=path)
    try:
        program = rig.start(f"{BEGIN}0 pause\n{WORK}0 pause\n{WORK}0 pause\n0 pause")
        live = []
        for _ in range(2):
            live.append(rig.round())
            rig.go_on(program)
        live.append(rig.round())
    finally:
        rig.close()
    shutil.rmtree(rig.fakes.folder)
    world: World = open_world(replay=path)
    collector = CudaProbes()
    try:
        for number, graph in enumerate(live, 1):
            world.begin_round(number)
            collector.observe(world)
            batch = collector.seed()
            again = Graph(batch.nodes, batch.edges)
            assert again == graph
    finally:
        collector.close()
        world.close()
    assert kernels(live[2], program.pid)["kernel_0(float*)"].metrics["launches_count"] == 2
