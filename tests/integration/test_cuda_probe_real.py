"""The CUDA probe on NVIDIA's own runtimes: without a driver every call fails, and is seen with its arguments."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.cuda.build import Fakes
from tests.integration.cuda_rig import compiled, loaded, read_of_ended, why_no_probe

from gpuflight.sources.cuda_probe.functions import API_NUMBERS, FUNCTIONS, SYMBOLS
from gpuflight.sources.cuda_probe.probe import CudaProbe
from gpuflight.sources.cuda_probe.rows import LEGACY_STREAM, per_thread_stream
from gpuflight.sources.cuda_probe.symbols import find_places

pytestmark = pytest.mark.skipif(bool(why_no_probe()), reason=why_no_probe())

LIBRARIES = {12: "cuda_runtime/lib/libcudart.so.12", 13: "cu13/lib/libcudart.so.13"}
NO_DRIVER = {35, 100, 3, 999}  # cudaErrorInsufficientDriver, NoDevice, InitializationError, Unknown

# Every hooked kind of call; what each must be seen as is in the tests.
SCRIPT = """
    0 load
    0 register 2
    0 launch f0 2 3 4 32 4 2 1000 0
    0 launch f0 5 1 1 16 1 1 2000 0x7f0000001000
    0 launchptsz f1 1 2 1 64 1 1 0 0
    0 launchcoop f3 7 1 1 8 1 1 0 2
    0 launch__ f2 1 1 1 1 1 1 0 0
    0 launchex f3 9 8 7 3 2 1 512 0x7f0000002000
    0 graphlaunch 0 0
    0 malloc 1 4096
    0 malloc 1 8192
    0 mallocasync 1 100 0
    0 managed 1 100
    0 mallochost 1 100
    0 pitch 1 100 7
    0 malloc3d 1 100 7 3
    0 hostregister 2 4096
    0 memcpy 1000 1
    0 memcpy 1000 2
    0 memcpyasync 1000 1 0
    0 memcpy2d 100 10 2
    0 memcpy3d 10 10 10 1
    0 memset 100
    0 memsetasync 100 0
    0 sync
    0 ssync 0x7f0000001000
    0 ssyncptsz 0
    0 squery 0
    0 screate 1 1
    0 ecreate 1
    0 erecord 1 0
    0 equery 1
    0 esync 1
    0 setdevice 1
"""
CALLS = {
    "cudaMalloc": 2,
    "cudaMallocAsync": 1,
    "cudaMallocManaged": 1,
    "cudaMallocHost": 1,
    "cudaMallocPitch": 1,
    "cudaMalloc3D": 1,
    "cudaHostRegister": 1,
    "cudaMemcpy": 2,
    "cudaMemcpyAsync": 1,
    "cudaMemcpy2D": 1,
    "cudaMemcpy3D": 1,
    "cudaMemset": 1,
    "cudaMemsetAsync": 1,
    "cudaDeviceSynchronize": 1,
    "cudaStreamSynchronize": 2,
    "cudaStreamQuery": 1,
    "cudaStreamCreateWithFlags": 1,
    "cudaEventCreateWithFlags": 1,
    "cudaEventRecord": 1,
    "cudaEventQuery": 1,
    "cudaEventSynchronize": 1,
    "cudaSetDevice": 1,
}


def _library(version: int) -> Path:
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        if (path := Path(folder) / LIBRARIES[version]).exists():
            return path
    pytest.skip(f"nvidia-cuda-runtime of CUDA {version} is not installed")


@pytest.fixture(scope="module")
def probe() -> Iterator[CudaProbe]:
    with loaded(launch_codes=True) as made:
        yield made


@pytest.mark.parametrize("version", [12, 13])
def test_every_call_is_seen_with_its_arguments(probe: CudaProbe, tmp_path: Path, version: int) -> None:
    fakes = Fakes(tmp_path)
    shutil.copy(compiled().folder / "dlopen", tmp_path)
    runtime = tmp_path / f"libcudart.so.{version}"
    shutil.copy(_library(version), runtime)
    attachment = probe.attach(str(runtime), "runtime")
    try:
        pid = fakes.run(SCRIPT, "dlopen", {"FAKE_CUDART": str(runtime)})
        rows, _ = read_of_ended(probe, pid)
    finally:
        probe.detach(attachment)
    assert not attachment.failed
    assert attachment.found.tails == ["__cudaLaunchKernel", "__cudaLaunchKernel_ptsz"]
    functions = {row.function: name for row in rows.names if row.pid == pid and (name := row.name)}
    assert list(functions.values()) == ["_Z8kernel_2Pf"]  # the one that was registered
    runtime_launches = [row for row in rows.launches if row.pid == pid and row.kind == "runtime"]
    assert {thread for row in runtime_launches if (thread := per_thread_stream(row.stream))} == {pid}
    shapes = sorted(
        (row.grid, row.block, row.shared_bytes_max, 2 if per_thread_stream(row.stream) else row.stream)
        for row in runtime_launches
    )
    assert shapes == [
        ((1, 1, 1), (1, 1, 1), 0, LEGACY_STREAM),
        ((1, 2, 1), (64, 1, 1), 0, 2),
        ((2, 3, 4), (32, 4, 2), 1000, LEGACY_STREAM),
        ((5, 1, 1), (16, 1, 1), 2000, 0x7F0000001000),
        ((7, 1, 1), (8, 1, 1), 0, 2),
        ((9, 8, 7), (3, 2, 1), 512, 0x7F0000002000),
    ]
    assert [row.launches for row in rows.launches if row.pid == pid and row.kind == "graph"] == [1]
    calls = {row.api: row for row in rows.calls if row.pid == pid}
    assert {api: row.calls for api, row in calls.items()} == CALLS
    for row in calls.values():
        assert sum(row.buckets) == row.calls
        assert row.buckets[row.max_ns.bit_length() - 1] >= 1
        assert row.max_ns <= row.total_ns < sum(count << at + 1 for at, count in enumerate(row.buckets))
    assert {row.api for row in calls.values() if row.waits} == {
        *("cudaMemcpy", "cudaMemcpy2D", "cudaMemcpy3D", "cudaDeviceSynchronize", "cudaStreamSynchronize"),
        "cudaEventSynchronize",
    }
    errors = {row.api: (row.code, row.errors) for row in rows.errors if row.pid == pid}
    launches = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel", "cudaGraphLaunch"}
    assert errors.keys() == CALLS.keys() | launches
    assert {api: count for api, (_, count) in errors.items() if api in CALLS} == CALLS
    assert {code for code, _ in errors.values()} <= NO_DRIVER
    # What failed holds nothing, copies nothing, makes nothing.
    assert not [row for row in (*rows.memory, *rows.allocations, *rows.copies) if row.pid == pid]
    (process,) = (row for row in rows.processes if row.pid == pid)
    assert (process.streams_created, process.events_created, process.set_device_calls) == (0, 0, 0)
    assert rows.hits[attachment.number] >= sum(CALLS.values())


@pytest.mark.parametrize("version", [12, 13])
def test_the_table_of_functions_fits_the_library(version: int) -> None:
    """A function that no runtime has would be a slip of ours."""
    found = find_places(str(_library(version)), "runtime")
    gone = {"cudaThreadExit", "cudaThreadSynchronize"} if version == 13 else set()
    new = {"cudaExecutionCtxStreamCreate", "cudaExecutionCtxSynchronize", "cudaMemcpyWithAttributesAsync"}
    have = {SYMBOLS["runtime"][place.symbol][0].name for place in found.places}
    missing = {function.name for function in FUNCTIONS["runtime"]} - have
    assert missing == {"__cudaLaunchKernel"} | gone | (new if version == 12 else set())


def test_numbers_of_functions_are_theirs_alone() -> None:
    assert len(set(API_NUMBERS.values())) == len(API_NUMBERS)
    assert max(API_NUMBERS.values()) < 1024
    for layer, functions in FUNCTIONS.items():
        numbers = [API_NUMBERS[layer, function.name] for function in functions]
        assert max(numbers) - min(numbers) < 256


@pytest.mark.parametrize("version", [12, 13])
def test_attaching_all_of_a_real_library_fails_nowhere(probe: CudaProbe, tmp_path: Path, version: int) -> None:
    runtime = tmp_path / "libcudart.so"
    shutil.copy(_library(version), runtime)
    attachment = probe.attach(str(runtime), "runtime")
    probe.detach(attachment)
    assert len(attachment.attached) == len(attachment.found.places) > 140
