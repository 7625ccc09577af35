"""The collector cuda_probes on made-up rows: what the picture shows, per process and GPU, and what it says it lacks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.fakes import cuda_rows as rows
from tests.fakes.collecting import Outcome, check, collect
from tests.fakes.cuda_rows import SECOND, STREAM, STUB, FakeProbe
from tests.fakes.machine import CONTAINER, FakeMachine, add_process, rich_machine
from tests.fakes.machine_answers import RANK, SERVER, TRAINER, nvml_snapshot
from tests.fakes.memory_fs import MemoryFs

from gpuflight.collectors.cuda_probes import NO_CALL, NO_CUDA, CudaProbes, CudaProbesSettings
from gpuflight.collectors.cuda_watch import CudaWatch
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Graph
from gpuflight.sources import cuda_libraries
from gpuflight.sources.cuda_probe.rows import CudaRows
from gpuflight.sources.nvml import NvmlSnapshot

pytestmark = pytest.mark.skipif(nvml_snapshot() is None, reason="the fake NVML needs a C compiler")

PROCESS = f"Process(pid={TRAINER},start={1000 + TRAINER})"
KERNEL = f"Kernel({PROCESS},gemm(float*))"
ONE_STREAM = f"Stream({PROCESS},{STREAM})"


class Rig:
    """The rich machine with a probe that tells what a test says, one reading a second. Only the trainer has CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, files: MemoryFs | None = None, **settings: Any) -> None:
        files = files or rich_machine().copy()
        files.write(f"/proc/{RANK}/maps", "")
        self.machine = FakeMachine(files)
        self.probe = FakeProbe()
        self.collector = CudaProbes(CudaProbesSettings(**settings))
        self.refusal: SourceUnavailable | None = None
        self.opened = 0
        rig = self

        def open_probe(watch: CudaWatch, world: Any, round_number: int) -> Any:
            rig.opened += 1
            if rig.refusal is not None:
                raise rig.refusal
            watch.probe = rig.probe  # type: ignore[assignment]
            return rig.probe

        monkeypatch.setattr(CudaWatch, "open", open_probe)
        snapshot = nvml_snapshot()
        assert snapshot is not None
        self.nvml = msgspec.json.decode(snapshot, type=NvmlSnapshot)
        self.machine.tape.answers["nvml", "snapshot"] = lambda: msgspec.json.encode(self.nvml)
        self.gpus = [f"GPU(uuid={gpu.uuid})" for gpu in self.nvml.gpus]

    def round(self, *lists: list[Any], **more: Any) -> Outcome:
        """A reading with these rows; the kind of each list goes to the field of its name."""
        world = self.machine.next_round()
        reading = CudaRows(round(self.machine.clock.monotonic_s() * 1e9), **more)
        for made in lists:
            for row in made:
                getattr(reading, FIELDS[type(row).__name__]).append(row)
        self.probe.reading = reading
        outcome = collect(self.collector, world, [])
        if outcome.ok:
            check(outcome)
        return outcome


FIELDS = {
    "ProcessRow": "processes", "LaunchRow": "launches", "StreamRow": "streams", "DeviceRow": "devices",
    "CallRow": "calls", "MemoryRow": "memory", "CopyRow": "copies", "ErrorRow": "errors", "LifeRow": "life",
    "AllocationRow": "allocations", "NameRow": "names", "EnvironmentRow": "environment",
}  # fmt: skip


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def work(launches: int, busy_ns: int, pid: int = TRAINER, **more: Any) -> list[Any]:
    """A process that launched so often on one stream, which had work for so long."""
    return [
        rows.process(pid, launches=launches),
        rows.launch(pid, launches, **more),
        rows.stream(pid, busy_ns=busy_ns, device=more.get("device", 0)),
        rows.device(pid, busy_ns=busy_ns, device=more.get("device", 0)),
        rows.name(pid, "_Z4gemmPf"),
    ]


def graph_of(outcome: Outcome) -> Graph:
    assert outcome.ok, outcome.reason
    return outcome.graph


# --- the picture -----------------------------------------------------------------------------------------------------


def test_process_kernel_stream_gpu(rig: Rig) -> None:
    rig.round(work(10, 0))
    graph = graph_of(rig.round(work(40, SECOND // 4)))
    gpu = rig.gpus[0]
    for key in ((PROCESS, KERNEL, "Launch"), (KERNEL, ONE_STREAM, "RunOn"), (ONE_STREAM, gpu, "RunOn")):
        assert key in graph.edges, key
    kernel = graph.nodes[KERNEL]
    assert kernel.metrics["launches_count"] == 40 and kernel.metrics["launches_per_s"] == 30.0
    assert kernel.metrics["threads_mean_count"] == 1024 and kernel.attributes == {"grid": "4x1x1", "block": "256x1x1"}
    assert graph.edges[KERNEL, ONE_STREAM, "RunOn"].metrics == {"launches_count": 40, "launches_per_s": 30.0}
    stream = graph.nodes[ONE_STREAM]
    assert (stream.metrics["work_ms"], stream.metrics["work_pct"]) == (250.0, 25.0)
    process = graph.nodes[PROCESS]
    assert process.metrics["cuda_launches_per_s"] == 30.0
    assert process.attributes["cuda_layers"] == ["runtime", "nccl"]


def test_at_first_sight_rates_are_unknown_and_later_ones_go_by_the_time_that_passed(rig: Rig) -> None:
    first = graph_of(rig.round(work(10, SECOND)))
    assert "launches_per_s" in (first.nodes[KERNEL].unknown or {})
    assert "cuda_launches_per_s" in (first.nodes[PROCESS].unknown or {})
    assert "work_pct" in (first.nodes[ONE_STREAM].unknown or {})
    assert "used_cores" in (first.edges[PROCESS, rig.gpus[0], "Access"].unknown or {})
    rig.machine.clock.advance(3.0)
    later = graph_of(rig.round(work(50, SECOND)))
    assert later.nodes[KERNEL].metrics["launches_per_s"] == 10.0, "40 launches in 4 s"


def test_what_came_between_two_readings_counts_from_nothing(rig: Rig) -> None:
    """The counters begin at 0 when the probe is attached, so a new process is no reason for an unknown rate."""
    rig.round([])
    graph = graph_of(rig.round(work(40, 0)))
    assert graph.nodes[KERNEL].metrics["launches_per_s"] == 40.0


def test_a_process_with_cuda_that_called_nothing_is_shown_as_that(rig: Rig) -> None:
    graph = graph_of(rig.round([]))
    process = graph.nodes[PROCESS]
    assert process.unknown == {"cuda_launches_count": NO_CALL}
    assert process.attributes["cuda_libraries"] == ["/opt/venv/lib/libcudart.so.12", "/opt/venv/lib/libnccl.so.2"]


def test_functions_of_one_name_are_one_kernel_and_launches_of_destroyed_streams_stay_in_it(rig: Rig) -> None:
    two = [rows.launch(TRAINER, 7, function=STUB + 16), rows.name(TRAINER, "_Z4gemmPf", STUB + 16)]
    graph = graph_of(rig.round([*work(10, 0), *two]))
    assert graph.nodes[KERNEL].metrics["launches_count"] == 17
    graph = graph_of(rig.round(work(12, 0)))
    assert graph.nodes[KERNEL].metrics["launches_count"] == 19, "12, and the 7 of what is gone"
    graph = graph_of(rig.round(work(3, 0)))
    assert graph.nodes[KERNEL].metrics["launches_count"] == 22, "another stream with the same handle"
    assert graph.nodes[KERNEL].metrics["launches_per_s"] == 3.0


def test_captured_launches_are_none(rig: Rig) -> None:
    graph = graph_of(rig.round(work(10, 0, captured=4)))
    assert graph.nodes[KERNEL].metrics["launches_count"] == 6
    assert graph.nodes[KERNEL].metrics["captured_count"] == 4
    graphs = [rows.launch(TRAINER, 5, kind="graph", function=0x99)]
    graph = graph_of(rig.round([*work(10, 0), *graphs]))
    assert graph.nodes[f"Kernel({PROCESS},CUDA graph)"].metrics["launches_count"] == 5


def test_streams_have_the_names_that_people_use(rig: Rig) -> None:
    streams = [
        rows.stream(TRAINER, stream=1),
        rows.stream(TRAINER, stream=4101 << 32 | 2),
        rows.stream(TRAINER, destroyed=True),
    ]
    graph = graph_of(rig.round([rows.process(TRAINER), *streams]))
    names = {node.attributes["name"] for node in graph.nodes.values() if node.kind == "Stream"}
    assert names == {"default stream", "default stream of thread 4101"}


def test_copies_waits_memory_errors_and_collectives(rig: Rig) -> None:
    def reading(times: int) -> list[Any]:
        return [
            *work(10, 0),
            rows.copy(TRAINER, "HtoD", 1000 * times), rows.copy(TRAINER, "DtoH", 10 * times),
            rows.copy(TRAINER, "DtoD", 5 * times), rows.copy(TRAINER, "memset", 7), rows.copy(TRAINER, "default", 1),
            rows.call(TRAINER, "cudaEventSynchronize", {10: 99 * times, 20: times}, 10**8 * 2 * times, max_ns=1 << 21),
            rows.call(TRAINER, "cudaMalloc", {10: 5}, 5000, waits=False),
            rows.memory(TRAINER, 2048, 4096, allocations=3), rows.memory(TRAINER, 99, 100, kind="host"),
            rows.error(TRAINER, "cudaMalloc", 2, times),
        ]  # fmt: skip

    rig.round(reading(1))
    graph = graph_of(rig.round(reading(2)))
    gpu = rig.gpus[0]
    to_gpu, back = graph.edges[PROCESS, gpu, "Transfer"], graph.edges[gpu, PROCESS, "Transfer"]
    assert to_gpu.metrics == {"copies_count": 1, "copied_bytes": 2000, "copy_bytes_per_s": 1000.0}
    assert back.metrics["copied_bytes"] == 20
    process = graph.nodes[PROCESS]
    metrics, attributes = process.metrics, process.attributes
    assert metrics["cuda_copies_count"] == 4 and metrics["cuda_copied_dtod_bytes"] == 10
    assert metrics["cuda_copied_other_bytes"] == 1 and metrics["cuda_memsets_count"] == 1
    assert metrics["cuda_waits_count"] == 200 and metrics["cuda_wait_pct"] == 20.0
    assert metrics["cuda_wait_p50_us"] == pytest.approx(2**10.5 / 1e3) and metrics["cuda_wait_max_us"] == 2097.152
    assert metrics["cuda_wait_p99_us"] == pytest.approx(2**10.5 / 1e3)
    assert attributes["cuda_wait_ns_log2"] == [0] * 10 + [198] + [0] * 9 + [2]
    assert (metrics["cuda_held_bytes"], metrics["cuda_alloc_peak_bytes"]) == (2048, 4096)
    assert metrics["cuda_pinned_held_bytes"] == 99
    assert (metrics["cuda_errors_count"], metrics["cuda_errors_per_s"]) == (2, 1.0)
    assert attributes["cuda_errors"] == ["cudaMalloc: out of memory (2), 2 times"]
    access = graph.edges[PROCESS, gpu, "Access"]
    assert (access.metrics["held_bytes"], access.metrics["alloc_peak_bytes"]) == (2048, 4096)
    assert access.attributes["container"] == CONTAINER


def test_who_holds_memory_and_what_an_ended_process_leaked(rig: Rig) -> None:
    held = [rows.allocation(TRAINER, 16 * n, 1 << 20, caller=STUB) for n in range(3)]
    held.append(rows.allocation(TRAINER, 999, 5, stack_id=4, api="cudaMallocAsync", kind="async"))
    graph = graph_of(rig.round([*work(1, 0), *held], stacks={4: (STUB, STUB + 1)}))
    texts = graph.nodes[PROCESS].attributes["cuda_allocations"]
    assert texts[0] == f"3 MiB in 3 pieces by cudaMalloc (device), called by 0x{STUB:x}"
    assert texts[1] == f"5 B in 1 piece by cudaMallocAsync (async), called by 0x{STUB:x} < 0x{STUB + 1:x}"
    graph = graph_of(rig.round(work(1, 0)))
    assert graph.nodes[PROCESS].attributes["cuda_allocations"] == texts, "they are not asked for in every round"
    assert rig.probe.asked_allocations == [True, False]
    graph = graph_of(rig.round([*work(1, 0), *held[:2], rows.life("exit", TRAINER, exit_code=256)]))
    process = graph.nodes[PROCESS]
    assert process.metrics["cuda_leaked_bytes"] == 2 << 20 and process.metrics["cuda_leaks_count"] == 2
    assert process.attributes["cuda_exit_code"] == 256


def test_bounds_leave_the_rest_in_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, kernels_per_process=1, streams_per_process=1, allocations_per_process=0)
    more = [
        rows.launch(TRAINER, 7, function=1, stream=64),
        rows.name(TRAINER, "small", 1),
        rows.stream(TRAINER, stream=64),
    ]
    outcome = rig.round([*work(10, 5), *more])
    graph = graph_of(outcome)
    assert [node.kind for node in graph.nodes.values()].count("Kernel") == 1
    assert [node.kind for node in graph.nodes.values()].count("Stream") == 1
    metrics = graph.nodes[PROCESS].metrics
    assert (metrics["cuda_other_kernels_count"], metrics["cuda_other_launches_count"]) == (1, 7)
    assert sum("told in sum only" in note.reason for note in outcome.notes) == 2
    assert rig.probe.asked_allocations == [False]


def test_names_that_never_came_are_addresses_and_told(rig: Rig) -> None:
    outcome = rig.round([rows.process(TRAINER), rows.launch(TRAINER, 3), rows.stream(TRAINER)])
    assert f"Kernel({PROCESS},kernel at 0x{STUB:x} (its name was not seen))" in graph_of(outcome).nodes
    assert [note.count for note in outcome.notes if "without a name" in note.reason] == [3]


def test_secrets_in_names_of_kernels_are_not_shown(rig: Rig) -> None:
    outcome = rig.round([rows.process(TRAINER), rows.launch(TRAINER, 3), rows.name(TRAINER, "a --password=HUSH\n b")])
    (kernel,) = [node for node in graph_of(outcome).nodes.values() if node.kind == "Kernel"]
    assert "HUSH" not in kernel.id and "\n" not in kernel.id


# --- which GPU -------------------------------------------------------------------------------------------------------


def test_the_device_follows_from_the_environment_and_what_nvml_sees(rig: Rig) -> None:
    """NVML sees the trainer on GPU 0; it counts devices 0 and 3 as CUDA shows them."""
    graph = graph_of(rig.round(work(1, 0, device=3)))
    reason = (graph.nodes[PROCESS].unknown or {}).get("cuda_gpu", "")
    assert ONE_STREAM in graph.nodes and (ONE_STREAM, rig.gpus[0], "RunOn") in graph.edges, "NVML sees it on one GPU"
    assert not reason
    both = [*work(1, 0), rows.launch(TRAINER, 1, device=3), rows.stream(TRAINER, stream=64, device=3)]
    graph = graph_of(rig.round(both))
    assert "NVML sees it on other GPUs" in (graph.nodes[PROCESS].unknown or {})["cuda_gpu"]
    assert (ONE_STREAM, rig.gpus[0], "RunOn") in graph.edges


def without_nvml_processes(rig: Rig) -> None:
    for gpu in rig.nvml.gpus:
        gpu.processes = []


def test_setenv_at_run_time_counts_until_cuda_is_used_and_children_inherit_it(rig: Rig) -> None:
    without_nvml_processes(rig)
    early = [rows.setenv(TRAINER, "5,2", time_ns=1), rows.setenv(TRAINER, "7", time_ns=9 * SECOND)]
    graph = graph_of(rig.round([*work(1, 0), *early]))
    assert (ONE_STREAM, rig.gpus[5], "RunOn") in graph.edges
    child = work(1, 0, pid=RANK, device=1)
    events = [rows.life("fork", TRAINER, 10 * SECOND, child_pid=RANK)]
    graph = graph_of(rig.round([*work(1, 0), *child, *events]))
    stream = f"Stream(Process(pid={RANK},start={1000 + RANK}),{STREAM})"
    assert (stream, rig.gpus[2], "RunOn") in graph.edges
    graph = graph_of(rig.round([*work(1, 0), *child, rows.life("exec", RANK, 11 * SECOND)]))
    assert (stream, rig.gpus[1], "RunOn") in graph.edges, "another program, with the environment that /proc shows"


def test_setenv_without_overwrite_changes_nothing_that_is_set(rig: Rig) -> None:
    without_nvml_processes(rig)
    events = [
        rows.setenv(TRAINER, "4", 1, overwrite=False), rows.setenv(TRAINER, "6", 2, overwrite=False),
        rows.setenv(TRAINER, "PCI_BUS_ID", 3, variable="CUDA_DEVICE_ORDER"),
    ]  # fmt: skip
    graph = graph_of(rig.round([*work(1, 0), *events]))
    assert (ONE_STREAM, rig.gpus[4], "RunOn") in graph.edges


def test_a_choice_that_was_not_seen_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ran before the probe was there, has eight GPUs, and chose one of them then."""
    files = rich_machine().copy()
    files.write("/proc/uptime", "999999.00 1.00\n")
    rig = Rig(monkeypatch, files)
    without_nvml_processes(rig)
    assumed = [row for row in work(1, 0) if type(row).__name__ != "DeviceRow"]
    graph = graph_of(rig.round([*assumed, rows.device(TRAINER, device_assumed=True)]))
    process = graph.nodes[PROCESS]
    assert process.attributes["cuda_watched_late"] is True
    assert "before the probe" in (process.unknown or {})["cuda_gpu"]
    assert "before the probe" in (graph.nodes[ONE_STREAM].unknown or {})["gpu"]
    assert not [edge for edge in graph.edges.values() if edge.kind == "Access"]
    graph = graph_of(rig.round(work(1, 0)))
    assert "memory cannot be asked" in (graph.nodes[PROCESS].unknown or {})["cuda_gpu"], (
        "its environment may be another"
    )


def test_a_container_sees_the_gpus_whose_files_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    files = rich_machine().copy()
    files.write("/dev/nvidia0", "")
    files.remove(f"/proc/{TRAINER}/root")
    files.link(f"/proc/{TRAINER}/ns/mnt", "mnt:[4026539999]")
    for name in ("nvidia6", "nvidia3", "nvidiactl"):
        files.write(f"/proc/{TRAINER}/root/dev/{name}", "")
    rig = Rig(monkeypatch, files)
    without_nvml_processes(rig)
    graph = graph_of(rig.round(work(1, 0, device=1)))
    assert (ONE_STREAM, rig.gpus[6], "RunOn") in graph.edges


def test_without_nvml_no_number_means_a_gpu_and_everything_else_is_there(rig: Rig) -> None:
    def gone() -> bytes:
        raise SourceUnavailable("no NVML here")

    rig.machine.tape.answers["nvml", "snapshot"] = gone
    graph = graph_of(rig.round(work(40, 0)))
    assert graph.nodes[KERNEL].metrics["launches_count"] == 40
    assert "NVML" in (graph.nodes[PROCESS].unknown or {})["cuda_gpu"]


# --- statistics of each process on each GPU --------------------------------------------------------------------------


def test_cores_and_activity_of_a_process_on_a_gpu(rig: Rig) -> None:
    rig.nvml.gpus[0].processes[0].sm_util_pct = None
    rig.round(work(0, 0))
    graph = graph_of(rig.round(work(10, SECOND // 2)))
    access = graph.edges[PROCESS, rig.gpus[0], "Access"]
    assert access.metrics["used_cores"] == 512.0, "half the time, 1,024 threads"
    assert access.metrics["sm_util_pct"] == 50.0 and access.attributes["estimated"] == ["sm_util_pct"]
    container = graph.nodes[f"Container({CONTAINER})"]
    assert container.metrics["gpu_used_cores"] == 512.0


def test_nvml_wins_where_it_measures_the_same(rig: Rig) -> None:
    assert rig.nvml.gpus[0].processes[0].sm_util_pct is not None
    rig.round(work(0, 0))
    access = graph_of(rig.round(work(10, SECOND // 2))).edges[PROCESS, rig.gpus[0], "Access"]
    assert "sm_util_pct" not in access.metrics and "estimated" not in access.attributes


def test_processes_that_exceed_a_gpu_together_are_scaled_down_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    without_nvml_processes(rig)
    cores = int(rig.nvml.gpus[0].metrics["cores_count"])
    total = int(rig.nvml.gpus[0].metrics["memory_total_bytes"])

    def reading(busy_ns: int) -> list[Any]:
        found = []
        for pid, share in ((TRAINER, 1.0), (RANK, 0.5)):
            found += work(10, round(busy_ns * share), pid=pid, threads=10 * 10**9)
            found.append(rows.memory(pid, total, total))
        return found

    rig.round(reading(0))
    graph = graph_of(rig.round(reading(SECOND)))
    edges = [graph.edges[f"Process(pid={pid},start={1000 + pid})", rig.gpus[0], "Access"] for pid in (TRAINER, RANK)]
    assert sum(edge.metrics["used_cores"] for edge in edges) == pytest.approx(cores, rel=1e-3)
    assert edges[0].metrics["used_cores"] == pytest.approx(2 * edges[1].metrics["used_cores"], rel=1e-3)
    assert {edge.attributes["cores_scaled_by"] for edge in edges} == {0.6667}
    assert [edge.metrics["held_bytes"] for edge in edges] == [total // 2, total // 2]
    assert {edge.attributes["memory_scaled_by"] for edge in edges} == {0.5}


# --- budget ----------------------------------------------------------------------------------------------------------


def test_a_process_over_the_budget_is_watched_in_some_rounds_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, budget_launches_per_s=100)
    rig.round(work(0, 0))
    graph = graph_of(rig.round(work(250, SECOND)))
    assert not graph.nodes[PROCESS].attributes.get("cuda_estimated")
    hooked = [rig.probe.attachments[0].hooked]
    shares = []
    for _ in range(6):
        watched = hooked[-1]
        outcome = rig.round(work(250 * (1 + hooked.count(True)), SECOND))
        graph = graph_of(outcome)
        process = graph.nodes[PROCESS]
        assert process.metrics["cuda_launches_per_s"] == 250.0, "an estimate in rounds without a look"
        assert graph.nodes[KERNEL].metrics["launches_per_s"] == 250.0
        assert process.attributes["cuda_estimated"] is True
        shares.append(process.metrics["cuda_watched_pct"])
        assert any("watched in some rounds only" in note.reason for note in outcome.notes)
        assert "work_pct" in (graph.nodes[ONE_STREAM].unknown or {})
        assert watched in (True, False)
        hooked.append(rig.probe.attachments[0].hooked)
    assert hooked == [False, False, True, False, False, True, False]
    assert set(shares) == {33.33}
    assert process.metrics["cuda_launches_count"] == 750
    assert process.metrics["cuda_launches_estimated_count"] == 750 + 4 * 250, "and those of the rounds without a look"
    assert rig.probe.attachments[1].hooked, "NCCL launches no kernel"


def test_within_the_budget_again_it_is_watched_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, budget_launches_per_s=100)
    rig.round(work(0, 0))
    rig.round(work(250, 0))
    for _ in range(2):
        rig.round(work(250, 0))
    graph = graph_of(rig.round(work(260, 0)))
    assert rig.probe.attachments[0].hooked
    graph = graph_of(rig.round(work(270, 0)))
    assert "cuda_estimated" not in graph.nodes[PROCESS].attributes
    assert graph.nodes[KERNEL].metrics["launches_per_s"] == 10.0


# --- life ------------------------------------------------------------------------------------------------------------


def test_nothing_is_loaded_where_nobody_has_cuda_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = rich_machine().copy()
    files.write(f"/proc/{TRAINER}/maps", "")
    rig = Rig(monkeypatch, files)
    outcome = rig.round([])
    assert not outcome.ok and outcome.reason == NO_CUDA and rig.opened == 0


def test_nothing_found_yet_is_not_nothing_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_libraries, "FILES", 0)
    outcome = Rig(monkeypatch, rich_machine().copy()).round([])
    assert not outcome.ok and outcome.reason.startswith(NO_CUDA) and "wait for the next rounds" in outcome.reason


def test_a_lack_of_rights_is_one_reason_and_one_hint(rig: Rig) -> None:
    rig.refusal = SourceUnavailable("no right to load BPF programs", "run as root or grant CAP_BPF and CAP_PERFMON")
    outcome = rig.round([])
    assert (outcome.reason, outcome.hint) == (rig.refusal.reason, rig.refusal.hint)


def test_everything_is_detached_when_cuda_is_gone_for_long(rig: Rig) -> None:
    rig.round(work(1, 0))
    rig.machine.fs.files[f"/proc/{TRAINER}/stat"] = rig.machine.fs.files[f"/proc/{TRAINER}/stat"].replace(
        b" 1000000 ", b" 1 "
    )
    rig.machine.fs.remove(f"/proc/{TRAINER}")
    for _ in range(30):
        rig.round([])
    assert rig.probe.closed
    assert not rig.round([]).ok


def test_another_program_in_the_same_process_begins_at_nothing_and_is_watched_from_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = rich_machine().copy()
    files.write("/proc/uptime", "999999.00 1.00\n")
    rig = Rig(monkeypatch, files)
    graph = graph_of(rig.round(work(40, 0)))
    assert graph.nodes[PROCESS].attributes["cuda_watched_late"] is True
    rig.machine.fs.files["/proc/uptime"] = b"1000009.00 1.00\n"
    rig.round([*work(40, 0), rows.life("exec", TRAINER, round(rig.machine.clock.monotonic_s() * 1e9))])
    graph = graph_of(rig.round(work(3, 0)))
    assert graph.nodes[KERNEL].metrics["launches_count"] == 3
    assert "cuda_watched_late" not in graph.nodes[PROCESS].attributes


def test_a_process_that_nobody_saw_alive_is_counted(rig: Rig) -> None:
    outcome = rig.round([*work(1, 0), *work(5, 0, pid=77_777), rows.life("exit", 77_777)])
    assert outcome.losses == {"processes that began and ended between two rounds": 1}


def test_without_hooks_for_ends_the_probe_is_told_who_is_gone(rig: Rig) -> None:
    rig.probe.without = {"cuda_exit": "no right"}
    rig.round(work(1, 0))
    rig.machine.fs.remove(f"/proc/{TRAINER}")
    outcome = rig.round(work(1, 0))
    assert rig.probe.forgotten == {TRAINER}
    assert any("cuda_exit is missing" in note.reason for note in outcome.notes)


def test_losses_are_told_once_each_and_costs_per_program(rig: Rig) -> None:
    """N23: what a full table or ring buffer drops is in the coverage of the round in which it was dropped."""
    outcome = rig.round(work(1, 0), losses={"launches": 5, "life": 2})
    assert sorted(outcome.losses.values()) == [2, 5]
    assert rig.collector.programs["cuda_launch"].runs_count == 10 and "cuda_call" not in rig.collector.programs
    outcome = rig.round(work(1, 0), losses={"launches": 5, "life": 3})
    assert list(outcome.losses.values()) == [1]
    lost = [rows.process(TRAINER, launches=1000, launches_lost=10), rows.launch(TRAINER, 990)]
    process = graph_of(rig.round(lost)).nodes[PROCESS]
    assert (process.metrics["cuda_launches_lost_count"], process.metrics["cuda_launches_lost_pct"]) == (10, 1.0)


def test_a_pid_namespace_of_our_own_sees_nothing_rather_than_something_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    files = rich_machine().copy()
    files.link("/proc/self/ns/pid", "pid:[4026530001]")
    outcome = Rig(monkeypatch, files).round([])
    assert not outcome.ok and "pid namespace" in outcome.hint


# --- what is not seen ------------------------------------------------------------------------------------------------


def with_library(
    files: MemoryFs, rig_answers: dict[Any, Any], pid: int, path: str, inode: int, marks: list[str]
) -> None:
    """Map a file with these symbols into a process."""
    maps = f"/proc/{pid}/maps"
    files.write(maps, files.files[maps] + f"8000-8001 r-xp 00001000 103:01 {inode} {path}\n".encode())
    rig_answers["elf", f"{0x103 << 8 | 1}:{inode} {path}"] = msgspec.json.encode([marks, f"/proc/{pid}/root{path}"])


def test_how_programs_are_linked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    files = rich_machine().copy()
    answers: dict[Any, Any] = {}
    with_library(files, answers, SERVER, "/usr/lib/libcuda.so.1", 70, ["cuLaunchKernel"])
    with_library(files, answers, TRAINER, "/opt/other/libcudart.so.11", 71, ["cudaLaunchKernel"])
    rig = Rig(monkeypatch, files)
    rig.machine.tape.answers |= answers
    rig.probe.refuses = {f"/proc/{TRAINER}/root/opt/other/libcudart.so.11": "it has no function to hook"}
    told = {note.reason: note.count for note in rig.round([]).notes}
    assert told["it has no function to hook"] == 1
    assert [count for reason, count in told.items() if "without a runtime" in reason or "stripped" in reason] == [1]
    assert [count for reason, count in told.items() if "several CUDA runtimes" in reason] == [1]
    layers = [attachment.layer for attachment in rig.probe.attachments.values()]
    assert layers.count("driver") == 1


def test_the_driver_is_hooked_for_those_without_a_runtime_only_if_so_wished(monkeypatch: pytest.MonkeyPatch) -> None:
    files = rich_machine().copy()
    answers: dict[Any, Any] = {}
    with_library(files, answers, TRAINER, "/usr/lib/libcuda.so.1", 70, ["cuLaunchKernel"])
    rig = Rig(monkeypatch, files, driver="never", nccl=False)
    rig.machine.tape.answers |= answers
    rig.round([])
    assert [attachment.layer for attachment in rig.probe.attachments.values()] == ["runtime"]


def test_the_driver_is_left_alone_while_all_launches_are_the_runtimes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would cost a second trap; in one round of twelve it is looked whether somebody launches past the runtime."""
    files = rich_machine().copy()
    answers: dict[Any, Any] = {}
    with_library(files, answers, TRAINER, "/usr/lib/libcuda.so.1", 70, ["cuLaunchKernel"])
    rig = Rig(monkeypatch, files)
    rig.machine.tape.answers |= answers
    hooked, told = [], []
    for turn in range(30):
        outcome = rig.round(
            [rows.process(TRAINER, launches=6000 * turn, launches_inner=6000 * turn), rows.launch(TRAINER, 6000 * turn)]
        )
        (driver,) = [one for one in rig.probe.attachments.values() if one.layer == "driver"]
        hooked.append(driver.hooked)
        told.append(any("one round of 12" in note.reason for note in outcome.notes))
    assert told[5] and told == [not one for one in hooked]
    assert hooked[0] and 1 <= sum(hooked[2:]) <= 6
    assert all(one.hooked for one in rig.probe.attachments.values() if one.layer != "driver")


def test_a_library_that_is_never_called_by_who_uses_a_gpu_is_told(rig: Rig) -> None:
    rig.probe.hits = {}
    told: list[str] = []
    for _ in range(3):
        told = [note.reason for note in rig.round([]).notes]
    assert any("never called" in reason for reason in told)
    rig.probe.hits = None
    assert not any("never called" in note.reason for note in rig.round([]).notes)


def test_who_nvml_sees_without_a_cuda_library_is_told(rig: Rig) -> None:
    told = [note for note in rig.round([]).notes if "no CUDA library" in note.reason]
    assert [note.count for note in told] == [1], "the other rank"


def test_a_file_without_users_is_unhooked_at_once_in_a_container_and_late_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = rich_machine().copy()
    files.link(f"/proc/{TRAINER}/ns/mnt", "mnt:[4026539999]")
    answers: dict[Any, Any] = {}
    with_library(files, answers, SERVER, "/usr/lib/libcuda.so.1", 70, ["cuLaunchKernel"])
    rig = Rig(monkeypatch, files)
    rig.machine.tape.answers |= answers
    rig.round([])
    rig.machine.fs.remove(f"/proc/{TRAINER}")
    for _ in range(4):
        rig.round([])
    assert len(rig.probe.detached) == 2 and all("/opt/venv" in path for path in rig.probe.detached)


def test_many_processes_cost_no_more_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    files = rich_machine().copy()
    for pid in range(20_000, 20_200):
        add_process(files, pid, "python3", shared=files.files[f"/proc/{TRAINER}/maps"].decode())
    rig = Rig(monkeypatch, files)
    rig.round([])
    assert len(rig.probe.attachments) == 2
    before = sum(rig.machine.fs.asked.values())
    rig.round([])
    assert sum(rig.machine.fs.asked.values()) - before < 300, "the process list, and little more"
