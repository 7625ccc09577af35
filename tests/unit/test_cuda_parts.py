"""The parts of cuda_probes that are plain functions: statistics, budget, histograms, rows by process, names, stacks."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import cuda_rows as rows

from gpuflight.collectors.cuda_budget import MOST_ROUNDS_OFF, Budget
from gpuflight.collectors.cuda_metrics import histogram, percentile_ns
from gpuflight.collectors.cuda_rows import Counters, by_process
from gpuflight.collectors.cuda_statistics import Capacity, StreamWork, Use, active_pct, cores_used, fit
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.cuda_errors import error_name
from gpuflight.sources.cuda_probe.rows import CudaRows
from gpuflight.sources.demangle import demangle
from gpuflight.sources.elf_symbols import ElfFile
from gpuflight.sources.fs import HostFs
from gpuflight.sources.live_environ import LiveEnviron
from gpuflight.sources.procfs import ProcFs
from gpuflight.sources.recording import Tape
from gpuflight.sources.user_stacks import UserStacks

# --- statistics ------------------------------------------------------------------------------------------------------


def test_cores_used_is_span_times_threads_up_to_the_cores_there_are() -> None:
    assert cores_used([StreamWork(500, 1000.0), StreamWork(1000, 10.0)], 100, 1000) == 60.0
    assert cores_used([], 100, 1000) == 0.0
    assert active_pct(250, 1000) == 25.0 and active_pct(2000, 1000) == 100.0


spans = st.integers(0, 10**9)


@given(works=st.lists(st.builds(StreamWork, spans, st.floats(0, 1e9)), max_size=5), cores=st.integers(1, 20_000))
def test_no_stream_uses_more_cores_than_there_are(works: list[StreamWork], cores: int) -> None:
    used = cores_used(works, cores, 10**9)
    assert 0 <= used <= cores * len(works) * (1 + 1e-9)


amounts = st.none() | st.floats(0, 1e12)


@given(
    uses=st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), amounts, amounts), max_size=8),
    cores=st.none() | st.integers(1, 20_000),
    memory=st.none() | st.integers(1, 10**12),
)
def test_what_exceeds_a_gpu_fits_after_scaling_and_nothing_else_changes(
    uses: list[tuple[str, float | None, float | None]], cores: int | None, memory: int | None
) -> None:
    made = [Use(process=str(at), gpu=gpu, cores=c, held_bytes=h) for at, (gpu, c, h) in enumerate(uses)]
    fit(made, {"a": Capacity(cores, memory), "b": Capacity()})
    for gpu in ("a", "b", "c"):
        members = [(use, before) for use, before in zip(made, uses, strict=True) if use.gpu == gpu]
        total = sum(before[1] or 0 for _, before in members)
        exceeded = gpu == "a" and cores is not None and total > cores
        for use, (_, before, held) in members:
            assert (use.cores is None) == (before is None) and (use.held_bytes is None) == (held is None)
            if not exceeded:
                assert use.cores == before and use.cores_scaled_by == 1
        if exceeded:
            assert sum(use.cores or 0 for use, _ in members) == pytest.approx(cores)
            assert len({use.cores_scaled_by for use, _ in members if use.cores is not None}) == 1


# --- budget ----------------------------------------------------------------------------------------------------------


@given(rate=st.floats(1, 1e9), budget=st.floats(1, 1e6))
def test_on_average_no_more_is_watched_than_the_budget_as_far_as_pauses_go(rate: float, budget: float) -> None:
    made = Budget(budget)
    watched = 0
    rounds = 3 * (MOST_ROUNDS_OFF + 1)
    for _ in range(rounds):
        is_watched = "x" not in made.left_alone()
        made.next_round()
        if is_watched:
            watched += 1
            made.saw("x", round(rate), 1.0)
    share = watched / rounds
    if round(rate) <= budget:
        assert share == 1 and made.share("x") == 1
    else:
        assert share == pytest.approx(made.share("x"), abs=2 / rounds)
        longest = made.share("x") == pytest.approx(1 / (MOST_ROUNDS_OFF + 1))
        assert longest or made.share("x") * round(rate) <= budget * 1.000001
    made.drop(set())
    assert made.share("x") == 1 and not made.left_alone()


# --- rows ------------------------------------------------------------------------------------------------------------


def test_rows_come_apart_by_process() -> None:
    reading = CudaRows(9, processes=[rows.process(1), rows.process(2)], launches=[rows.launch(1, 5, device=3)])
    reading.allocations = [rows.allocation(3, 1, 1)]
    found = by_process(reading)
    assert found.keys() == {1, 2, 3}
    assert found[1].numbers() == {3} and found[1].used_ns() == 5
    assert found[2].launches == [] and found[2].used_ns() is None
    assert found[3].process is None and found[3].used_ns() == 3


def test_counters() -> None:
    counters = Counters()
    counters.begin(10 * rows.SECOND)
    assert counters.increase("a", 7) is None and counters.seconds is None and counters.window_ns is None
    counters.begin(12 * rows.SECOND)
    assert counters.seconds == 2.0 and counters.window_ns == 2 * rows.SECOND
    assert counters.increase("a", 9) == 2 and counters.increase("new", 4) == 4
    counters.begin(13 * rows.SECOND)
    assert counters.increase("a", 3) == 3, "it began anew"
    counters.begin(13 * rows.SECOND)
    assert counters.increase("a", 5) is None, "no time passed"


@given(st.dictionaries(st.integers(0, 39), st.integers(1, 1000), min_size=1), st.floats(0.1, 100))
def test_percentiles_lie_in_the_bucket_of_the_value(counts: dict[int, int], percent: float) -> None:
    buckets = histogram([rows.call(1, "cudaDeviceSynchronize", counts, 1)])
    assert sum(buckets) == sum(counts.values()) and buckets[-1] > 0
    durations = sorted(2**index for index, count in counts.items() for _ in range(count))
    at = max(0, -(-len(durations) * percent // 100) - 1)
    value = durations[int(min(at, len(durations) - 1))]
    assert value / 2 <= percentile_ns(buckets, percent) <= value * 4


def test_error_codes_have_names() -> None:
    assert error_name("cudaMalloc", 2) == error_name("cuMemAlloc", 2) == "out of memory"
    assert error_name("ncclAllReduce", 2) == "system error" and error_name("cudaFree", 4242) == "error 4242"


# --- names and places in memory --------------------------------------------------------------------------------------


def test_names_are_demangled_as_recorders_do() -> None:
    if demangle("_Z3addPfi") == "_Z3addPfi":
        pytest.skip("no libstdc++ here")
    assert demangle("_Z3addPfi") == "add(float*, int)"
    assert demangle("_ZN2at6native6kernelIfEEvT_") == "void at::native::kernel<float>(float)"
    for plain in ("main", "", "_Zbroken", "_Z" + "9" * 5000, "_Zü"):
        assert demangle(plain) == plain


@pytest.fixture
def procfs() -> ProcFs:
    made = ProcFs(HostFs(), ManualClock())
    made.begin_round(1)
    return made


def test_addresses_of_this_very_process_have_names(procfs: ProcFs) -> None:
    libc = ctypes.CDLL(None)
    address = ctypes.cast(libc.malloc, ctypes.c_void_p).value
    assert address is not None
    stacks = UserStacks(HostFs(), procfs)
    first, last = stacks.resolve(os.getpid(), [address + 3, 5])
    assert first.startswith("malloc+0x3 (") and last == "0x5"
    assert stacks.functions(os.getpid(), [address, address + 3]) == {address: "malloc"}
    assert stacks.resolve(99_999_999, [address]) == [f"0x{address:x}"]
    stacks.drop([])
    assert stacks.resolve(os.getpid(), [address]) == [first.replace("+0x3", "+0x0")]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_functions_are_found_by_any_place_in_them(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    code = b"static int inner(int a) { return a * 7; } int outer(int a) { return inner(a) + inner(a + 1); } int last;"
    subprocess.run(["gcc", "-O0", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=code, check=True)
    raw = library.read_bytes()
    lines = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout.splitlines()
    places = {words[2]: int(words[0], 16) for line in lines if len(words := line.split()) == 3}
    found = ElfFile(lambda offset, size: raw[offset : offset + size]).functions_at(
        [places["inner"], places["inner"] + 4, places["outer"] + 1, 0]
    )
    assert found[places["inner"] + 4] == ("inner", 4) and found[places["outer"] + 1] == ("outer", 1)
    assert 0 not in found


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
def test_what_a_program_set_itself_is_read_from_its_memory(procfs: ProcFs) -> None:
    code = "import os; os.environ.update(CUDA_VISIBLE_DEVICES='3,1', SECRET='HUSH'); print(1, flush=True); input()"
    program = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"CUDA_VISIBLE_DEVICES": "0"}
    )
    try:
        assert program.stdout is not None
        program.stdout.readline()
        environ = LiveEnviron(HostFs(), procfs)
        found = environ.read(program.pid, ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"])
        if found is None:
            pytest.skip("its memory may not be read here")
        assert found == {"CUDA_VISIBLE_DEVICES": "3,1"}
    finally:
        program.communicate(b"\n")
    assert environ.read(program.pid, ["CUDA_VISIBLE_DEVICES"]) is None


def test_a_recording_holds_the_variables_that_were_asked_for_and_no_other(procfs: ProcFs, tmp_path: Path) -> None:
    path = str(tmp_path / "recording")
    tape = Tape.record(path, ManualClock())
    tape.begin_round(1)
    live = LiveEnviron(HostFs(), procfs, tape).read(os.getpid(), ["CUDA_VISIBLE_DEVICES"])
    tape.close()
    replay = Tape.replay(path)
    replay.begin_round(1)
    assert LiveEnviron(HostFs(), procfs, replay).read(os.getpid(), ["CUDA_VISIBLE_DEVICES"]) == live
    assert LiveEnviron(HostFs(), procfs, replay).read(os.getpid(), ["PATH"]) is None
    assert LiveEnviron(HostFs(str(tmp_path)), procfs).read(os.getpid(), ["PATH"]) is None, (
        "a tree of files has no memory"
    )
