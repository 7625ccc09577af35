"""The CUDA probe on programs of every kind: linked, loading, static, stripped, forking, in another mount namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.cuda.build import Fakes
from tests.fakes.cuda.check import check
from tests.fakes.cuda.oracle import expect, read_log
from tests.integration.cuda_rig import compiled, loaded, read_of_ended, why_no_probe

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.bcc_backend import BccBackend
from gpuflight.sources.bpf.elf import read_elf
from gpuflight.sources.bpf.probes import Probes
from gpuflight.sources.clock import SystemClock
from gpuflight.sources.cuda_probe import layouts
from gpuflight.sources.cuda_probe.probe import CudaProbe
from gpuflight.sources.cuda_probe.rows import CudaRows, LaunchRow, NcclRow, per_thread_stream
from gpuflight.sources.recording import Tape

pytestmark = pytest.mark.skipif(bool(why_no_probe()), reason=why_no_probe())

SCRIPT = """
    0 load
    0 register 0
    0 screate 1 1
    0 malloc 1 4096
    0 launch f0 2 3 1 32 2 1 16 s1
    0 launchex f1 1 1 1 64 1 1 0 0
    0 ssync s1
    0 sync
    0 free 1
"""


@pytest.fixture(scope="module")
def probe() -> Iterator[CudaProbe]:
    with loaded() as made:
        yield made


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return compiled().copy(tmp_path / "cuda")


def _launches(rows: CudaRows, pid: int) -> list[LaunchRow]:
    return [row for row in rows.launches if row.pid == pid]


def _own_libc(folder: Path) -> Path:
    """A copy of the C library that no other program maps."""
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    libc = next(path for path in mapped if path.startswith("/") and Path(path).name.startswith(("libc.so", "libc-")))
    shutil.copy(libc, folder / "libc.so.6")
    return folder / "libc.so.6"


def _place(maps: str, address: int) -> int:
    """Where in its file an address of a process lies."""
    for line in maps.splitlines():
        addresses, _, offset, *_ = line.split()
        begin, end = (int(word, 16) for word in addresses.split("-"))
        if begin <= address < end:
            return address - begin + int(offset, 16)
    raise AssertionError("no file there")


@pytest.mark.parametrize("program", ["plain", "dlopen", "static"])
def test_linked_loading_and_static_programs(probe: CudaProbe, fakes: Fakes, program: str) -> None:
    attachment = probe.attach(str(fakes.folder / "static" if program == "static" else fakes.runtime), "runtime")
    try:
        pid = fakes.run(SCRIPT, program)
        rows, ended = read_of_ended(probe, pid)
    finally:
        probe.detach(attachment)
    assert attachment.found.static == (program == "static")
    assert not attachment.failed
    check(rows, pid, expect(read_log(fakes.log, time.monotonic_ns()), pid, ended))
    assert {row.name for row in rows.names if row.pid == pid} == {"_Z8kernel_0Pf"}


def test_a_stripped_static_program_has_nothing_to_hook(probe: CudaProbe, fakes: Fakes) -> None:
    with pytest.raises(SourceUnavailable, match="none of the functions"):
        probe.attach(str(fakes.folder / "stripped"), "runtime")
    for path, layer in ((fakes.folder / "static", "driver"), (fakes.nccl, "runtime"), (fakes.runtime, "nccl")):
        with pytest.raises(SourceUnavailable, match=f"the CUDA {layer} layer"):
            probe.attach(str(path), layer)


def test_what_is_no_library_or_not_there_is_said(probe: CudaProbe, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no ELF file")
    for path in (tmp_path / "text", tmp_path / "gone"):
        with pytest.raises(SourceUnavailable):
            probe.attach(str(path), "runtime")


def test_a_function_that_only_jumps_to_another_is_counted_once(probe: CudaProbe, fakes: Fakes) -> None:
    attachment = probe.attach(str(fakes.runtime), "runtime")
    try:
        pid = fakes.run(["0 launch__ f0 1 1 1 1 1 1 0 0"])
        rows, _ = read_of_ended(probe, pid)
    finally:
        probe.detach(attachment)
    assert attachment.found.tails == ["__cudaLaunchKernel"]
    assert [row.launches for row in _launches(rows, pid)] == [1]


def test_hooks_that_come_late_see_what_follows(probe: CudaProbe, fakes: Fakes) -> None:
    """What was allocated and launched before is unknown, its free is no negative sum, and the name comes from ELF."""
    process = fakes.start(
        """
        0 register 0
        0 malloc 1 4096
        0 launch f0 1 1 1 1 1 1 0 0
        0 pause
        0 free 1
        0 malloc 2 100
        0 launch f0 1 1 1 8 1 1 0 0
        0 pause
        0 sync
        """
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    attachment = probe.attach(f"/proc/{process.pid}/root{fakes.runtime}", "runtime", process.pid)
    try:
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        live = probe.read(allocations=True)
        (launch,) = _launches(live, process.pid)
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        process.communicate("\n", timeout=30)
        rows, _ = read_of_ended(probe, process.pid)
    finally:
        probe.detach(attachment)
    (memory,) = (row for row in live.memory if row.pid == process.pid)
    assert (memory.current_bytes, memory.unknown_frees, memory.frees) == (100, 1, 0)
    assert [row.size_bytes for row in live.allocations if row.pid == process.pid] == [100]
    assert (launch.launches, launch.threads) == (1, 8)
    (device,) = (row for row in live.devices if row.pid == process.pid)
    assert device.open_since_ns and device.busy_ns == live.time_ns - device.open_since_ns
    assert not [row for row in live.names if row.pid == process.pid]
    at = _place(maps, launch.function)
    symbols = read_elf(str(fakes.folder / "plain")).functions()
    assert [symbol.name for symbol in symbols if symbol.offset == at] == ["_Z8kernel_0Pf"]
    assert [row.spans for row in rows.devices if row.pid == process.pid] == [1]


def test_a_library_of_another_mount_namespace(probe: CudaProbe, fakes: Fakes, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no right to make a mount namespace")
    commands = f'mount -t tmpfs none {hidden} && cp -r {fakes.folder}/. {hidden} && exec "$0" "$@"'
    process = fakes.start(
        ["0 pause", "0 launch f0 1 1 1 1 1 1 0 0", "0 sync"], prefix=["unshare", "-m", "sh", "-c", commands]
    )
    assert process.stdout is not None
    process.stdout.readline()
    path = f"/proc/{process.pid}/root{hidden}/libcudart.so.12"
    assert not (hidden / "libcudart.so.12").exists() and os.path.exists(path)
    process.communicate("\n", timeout=30)
    inside = fakes.start(
        ["0 load", "0 pause", "0 launch f0 1 1 1 1 1 1 0 0", "0 sync"],
        program="dlopen",
        environment={"FAKE_CUDART": str(hidden / "libcudart.so.12")},
        prefix=["unshare", "-m", "sh", "-c", commands],
    )
    assert inside.stdout is not None
    inside.stdout.readline()
    attachment = probe.attach(f"/proc/{inside.pid}/root{hidden}/libcudart.so.12", "runtime")
    try:
        inside.communicate("\n", timeout=30)
        rows, _ = read_of_ended(probe, inside.pid)
    finally:
        probe.detach(attachment)
    assert [row.launches for row in _launches(rows, inside.pid)] == [1]
    assert rows.hits[attachment.number] >= 2


def test_fork_exec_and_exit(probe: CudaProbe, fakes: Fakes) -> None:
    """A forked child launches what its parent registered; a program that another one replaces begins anew."""
    attachment = probe.attach(str(fakes.runtime), "runtime")
    (fakes.folder / "second").write_text("0 launch f2 1 1 1 1 1 1 0 0\n0 malloc 1 77\n")
    try:
        pid = fakes.run(
            f"""
            0 register 1
            0 malloc 1 500
            fork
            0 launch f1 1 1 1 1 1 1 0 0
            join
            fork
            exec {fakes.folder / "second"}
            """
        )
        rows, _ = read_of_ended(probe, pid)
        names = {(row.pid, row.name) for row in rows.names}
        again = probe.read()
    finally:
        probe.detach(attachment)
    forks = [row.child_pid for row in rows.life if row.event == "fork" and row.pid == pid]
    assert len(forks) == 2
    assert {row.parent_pid for row in rows.processes if row.pid in forks} <= {pid, 0}
    assert (forks[0], "_Z8kernel_1Pf") in names
    exits = {row.pid: row.exit_code >> 8 for row in rows.life if row.event == "exit"}
    assert exits == {pid: 0, forks[0]: 7, forks[1]: 0}
    assert [row.pid for row in rows.life if row.event == "exec"] == [forks[1]]
    assert {row.pid: row.size_bytes for row in rows.allocations} == {pid: 500, forks[1]: 77}
    ours = {pid, *forks}
    assert not [row for row in (*again.launches, *again.processes, *again.memory) if row.pid in ours]


def test_the_variables_that_choose_devices(probe: CudaProbe, fakes: Fakes, tmp_path: Path) -> None:
    own = _own_libc(tmp_path)
    attachment = probe.attach(str(own), "libc")
    try:
        process = fakes.start(
            [
                "0 setenv CUDA_VISIBLE_DEVICES 1,GPU-abc",
                "0 setenv CUDA_VISIBLE_DEVICE 7",
                "0 setenv CUDA_VISIBLE_DEVICES_X 7",
                "0 setenv CUDA_DEVICE_ORDER PCI_BUS_ID",
                "0 putenv CUDA_VISIBLE_DEVICES=2",
                "0 putenv PATH=/bin",
                "0 unsetenv CUDA_VISIBLE_DEVICES",
                "fork",
                "join",
            ],
            environment={"LD_PRELOAD": str(own)},
        )
        process.communicate("\n", timeout=30)
        rows, _ = read_of_ended(probe, process.pid)
    finally:
        probe.detach(attachment)
    assert [(row.variable, row.value) for row in rows.environment if row.pid == process.pid] == [
        ("CUDA_VISIBLE_DEVICES", "1,GPU-abc"),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        ("CUDA_VISIBLE_DEVICES", "2"),
        ("CUDA_VISIBLE_DEVICES", None),
    ]
    assert [row.event for row in rows.life if row.pid == process.pid] == ["fork", "exit"]


def test_streams_of_threads_and_devices(probe: CudaProbe, fakes: Fakes) -> None:
    attachment = probe.attach(str(fakes.runtime), "runtime")
    try:
        process = fakes.start(
            ["1 setdevice 3", "1 launchptsz f0 1 1 1 1 1 1 0 0", "2 launchptsz f0 1 1 1 1 1 1 0 0", "0 pause"]
        )
        assert process.stdout is not None
        process.stdout.readline()
        rows = probe.read()
        process.communicate("\n", timeout=30)
    finally:
        probe.detach(attachment)
    launches = {row.device: row for row in _launches(rows, process.pid)}
    threads = [row for row in rows.threads if row.pid == process.pid]
    assert [(row.device, row.tid != row.pid) for row in threads] == [(3, True)]
    assert per_thread_stream(launches[3].stream) == threads[0].tid
    assert not launches[3].device_assumed
    assert launches[0].device_assumed  # a thread that never chose: CUDA takes device 0


def test_names_by_handle(probe: CudaProbe, fakes: Fakes) -> None:
    attachment = probe.attach(str(fakes.runtime), "runtime")
    try:
        pid = fakes.run(
            """
            0 register 0
            0 getkernel 0
            0 launch h0 1 1 1 1 1 1 0 0
            0 getkernel 1
            0 launch h1 1 1 1 1 1 1 0 0
            """
        )
        rows, _ = read_of_ended(probe, pid)
    finally:
        probe.detach(attachment)
    names = {row.function: row.name for row in rows.names if row.pid == pid}
    assert sorted(names.values()) == ["_Z8kernel_0Pf"]
    (alias,) = (row for row in rows.aliases if row.pid == pid)
    functions = {row.function for row in _launches(rows, pid)}
    assert functions == {*names, alias.function}


DRIVER_SCRIPT = """
    0 launch f0 2 1 1 32 1 1 0 0
    0 launchex f1 4 1 1 32 1 1 0 0
    0 malloc 1 1000
    0 culaunch 0x7000 3 1 1 16 1 1 0 0
    0 culaunchex 0x7000 3 1 1 16 1 1 0 0
    0 cumalloc 5000
    0 cufunction triton_kernel
    0 begincapture 0
    0 endcapture 0 0
    0 graphlaunch 0 0
"""


def test_a_launch_that_passes_both_layers_is_counted_once(probe: CudaProbe, fakes: Fakes) -> None:
    runtime = probe.attach(str(fakes.runtime), "runtime")
    driver = probe.attach(str(fakes.driver), "driver")
    try:
        pid = fakes.run(DRIVER_SCRIPT, environment={"FAKE_DRIVER": str(fakes.driver)})
        rows, _ = read_of_ended(probe, pid)
    finally:
        probe.detach(driver)
        probe.detach(runtime)
    launches: dict[str, int] = {}
    for row in _launches(rows, pid):
        launches[row.kind] = launches.get(row.kind, 0) + row.launches
    assert launches == {"runtime": 2, "driver": 3, "graph": 1}
    (process,) = (row for row in rows.processes if row.pid == pid)
    assert process.launches_inner == 3
    assert process.runtime_calls and process.driver_calls
    (memory,) = (row for row in rows.memory if row.pid == pid)
    assert (memory.allocations, memory.current_bytes) == (2, 6000)
    assert {row.api: row.calls for row in rows.calls if row.pid == pid and "Alloc" in row.api} == {"cuMemAlloc": 1}
    assert "triton_kernel" in {row.name for row in rows.names if row.pid == pid}


def test_the_driver_alone(probe: CudaProbe, fakes: Fakes) -> None:
    driver = probe.attach(str(fakes.driver), "driver")
    try:
        pid = fakes.run(
            DRIVER_SCRIPT
            + """
            0 cumemcpyhtod 100
            0 cumemcpydtohasync 200
            0 cumemset32 10
            0 cumemcpy2d 2 1 30 4
            0 cucontext 5
            0 culaunch 0x8000 1 1 1 1 1 1 0 0
            0 cusync
            """,
            environment={"FAKE_DRIVER": str(fakes.driver)},
        )
        rows, _ = read_of_ended(probe, pid)
    finally:
        probe.detach(driver)
    (process,) = (row for row in rows.processes if row.pid == pid)
    assert (process.launches, process.launches_inner) == (7, 0)
    copies = {(row.direction, row.asynchronous): row.bytes for row in rows.copies if row.pid == pid}
    assert copies == {("HtoD", False): 100, ("DtoH", True): 200, ("memset", True): 40, ("DtoH", False): 120}
    assert [row.device for row in _launches(rows, pid) if row.function == 0x8000] == [5]
    assert [row.spans for row in rows.devices if row.pid == pid and row.device == 5] == [1]


def test_nccl(probe: CudaProbe, fakes: Fakes) -> None:
    runtime, nccl = probe.attach(str(fakes.runtime), "runtime"), probe.attach(str(fakes.nccl), "nccl")
    try:
        pid = fakes.run(
            """
            0 comm 4 2
            0 allreduce 1000 7 0 0x7c0000000080 0
            0 allreduce 24 7 0 0x7c0000000080 0
            0 allreduce 13 7 0 0x7c0000000080 0
            0 reduce 10 6 2 0x7c0000000080 0
            0 allreduce 8 99 7 0x7c0000000080 0
            0 broadcast 5 8 0x7c0000000080 0
            0 bcast 6 8 0x7c0000000080 0
            0 allgather 7 9 0x7c0000000080 0
            0 send 3 10 0x7c0000000080 0
            0 send 249999 7 0x7c0000000080 0
            0 send 250000 7 0x7c0000000080 0
            0 commall 2
            0 commdestroy 0x7c0000000080
            """
        )
        rows, _ = read_of_ended(probe, pid)
    finally:
        probe.detach(nccl)
        probe.detach(runtime)
    found = {(row.operation, row.datatype): row for row in rows.nccl if row.pid == pid}

    def told(row: NcclRow) -> tuple[int, int, str, int]:
        return row.calls, row.bytes, row.reduction, row.errors

    assert {key: told(row) for key, row in found.items()} == {
        ("ncclAllReduce", "float32"): (3, 4096, "sum", 1),
        ("ncclReduce", "float16"): (1, 20, "max", 0),
        ("ncclAllReduce", "unknown(99)"): (1, 0, "user(7)", 0),
        ("ncclBroadcast", "float64"): (1, 40, "", 0),
        ("ncclBcast", "float64"): (1, 48, "", 0),
        ("ncclAllGather", "bfloat16"): (1, 14, "", 0),
        ("ncclSend", "float8e4m3"): (1, 3, "", 0),
        ("ncclSend", "float32"): (2, 1_999_996, "", 0),
    }
    assert {key: row.small_calls for key, row in found.items() if row.small_calls != row.calls} == {
        ("ncclAllReduce", "float32"): 2,  # one failed
        ("ncclAllReduce", "unknown(99)"): 0,
        ("ncclSend", "float32"): 1,
    }
    assert found["ncclAllReduce", "unknown(99)"].bytes_unknown_calls == 1
    assert {row.communicator for row in found.values()} == {0x7C0000000080}
    assert all(0 < row.host_ns_max <= row.host_ns for row in found.values())
    assert [(row.api, row.code) for row in rows.errors if row.pid == pid] == [("ncclAllReduce", 5)]
    assert sum(row.launches for row in _launches(rows, pid)) == 7  # its kernels are CUDA launches all the same
    made = {(row.communicator, row.ranks, row.rank, row.device, row.destroyed) for row in rows.communicators}
    assert made == {
        (0x7C0000000080, 4, 2, 0, True),
        (0x7C1000000000, 2, 0, 1, False),
        (0x7C1000000040, 2, 1, 0, False),
    }


def test_leaks_have_a_stack(probe: CudaProbe, fakes: Fakes) -> None:
    attachment = probe.attach(str(fakes.runtime), "runtime")
    try:
        pid = fakes.run(["0 malloc 1 123456", "0 malloc 2 10", "0 free 2"])
        rows, _ = read_of_ended(probe, pid)
    finally:
        probe.detach(attachment)
    (leak,) = (row for row in rows.allocations if row.pid == pid)
    assert (leak.size_bytes, leak.api, leak.kind, leak.tid) == (123456, "cudaMalloc", "device", pid)
    stack = rows.stacks[leak.stack_id]
    assert leak.caller in stack[:3] and len(stack) >= 3


def test_launches_can_be_left_alone_for_a_time(probe: CudaProbe, fakes: Fakes) -> None:
    attachment = probe.attach(str(fakes.runtime), "runtime")
    process = fakes.start(
        """
        0 launch f0 1 1 1 1 1 1 0 0
        0 pause
        0 launches 5 f0
        0 malloc 1 8
        0 pause
        0 launch f0 1 1 1 1 1 1 0 0
        0 pause
        """
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        counted = []
        for step in (attachment.pause_launches, attachment.resume_launches, lambda: None):
            process.stdout.readline()
            rows = probe.read()
            counted.append(sum(row.launches for row in _launches(rows, process.pid)))
            step()
            assert attachment.launches_hooked == (step != attachment.pause_launches)
            process.stdin.write("\n")
            process.stdin.flush()
        process.communicate(timeout=30)
    finally:
        probe.detach(attachment)
    assert counted == [1, 1, 2]
    assert [row.current_bytes for row in rows.memory if row.pid == process.pid] == [8]


def test_every_bound_counts_what_it_lost(fakes: Fakes) -> None:
    bounds = {"launches": 1, "allocations": 1, "streams": 2, "events": 1, "durations": 2, "copies": 1, "errors": 1}
    with loaded(map_entries=bounds) as small:
        small.attach(str(fakes.runtime), "runtime")
        pid = fakes.run(
            [f"0 launch f{number} 1 1 1 1 1 1 0 0" for number in range(3)]
            + ["0 malloc 1 10", "0 malloc 2 10", f"0 malloc 3 {1 << 60}", "0 screate 1 0", "0 screate 2 0"]
            + ["0 launch f0 1 1 1 1 1 1 0 s1", "0 launch f0 1 1 1 1 1 1 0 s2", "0 setdevice 99"]
            + ["0 ecreate 1", "0 ecreate 2", "0 erecord 1 0", "0 erecord 2 0", "0 memcpy 1 1", "0 memcpy 1 2"]
        )
        rows, _ = read_of_ended(small, pid)
    (process,) = (row for row in rows.processes if row.pid == pid)
    assert (process.launches, process.launches_lost) == (5, 4)
    assert [row.current_bytes for row in rows.memory] == [10]  # what is not in the table is in no sum
    assert rows.losses.keys() == {"launches", "allocations", "streams", "events", "calls", "copies", "errors"}
    assert rows.losses["launches"] == 4 and rows.losses["allocations"] == 1


def test_a_ring_buffer_that_overflows_says_so(fakes: Fakes, tmp_path: Path) -> None:
    own = _own_libc(tmp_path)
    with loaded(map_entries={"life": 4096}) as small:
        small.attach(str(own), "libc")
        fakes.run(
            [f"0 setenv CUDA_VISIBLE_DEVICES {number}" for number in range(40)], environment={"LD_PRELOAD": str(own)}
        )
        rows = small.read()
    assert 0 < len(rows.environment) < 40
    assert len(rows.environment) + len(rows.life) + rows.losses["life"] == 41  # and the exit


def test_layouts_have_the_sizes_of_the_maps(probe: CudaProbe) -> None:
    sizes = {
        "processes": (layouts.PID.size, layouts.PROCESS.size),
        "threads": (layouts.THREAD_ID.size, layouts.THREAD_BYTES),
        "launches": (layouts.LAUNCH_KEY.size, layouts.LAUNCH.size),
        "devices": (layouts.DEVICE_KEY.size, layouts.DEVICE_BYTES),
        "streams": (layouts.STREAM_KEY.size, layouts.STREAM.size),
        "allocations": (layouts.HANDLE_KEY.size, layouts.ALLOCATION.size),
        "memory": (layouts.MEMORY_KEY.size, layouts.MEMORY.size),
        "copies": (layouts.COPY_KEY.size, layouts.COPY.size),
        "durations": (layouts.API_KEY.size, layouts.DURATION.size),
        "errors": (layouts.ERROR_KEY.size, layouts.ERROR.size),
        "collectives": (layouts.COLLECTIVE_KEY.size, layouts.COLLECTIVE.size),
        "communicators": (layouts.HANDLE_KEY.size, layouts.COMMUNICATOR.size),
        "names": (layouts.HANDLE_KEY.size, layouts.NAME_LENGTH.size + layouts.NAME_BYTES),
    }
    inside = probe._object
    for name, (key, value) in sizes.items():
        with pytest.raises(ValueError, match="bytes"):
            inside.update(name, bytes(key), bytes(value + 1))
        assert inside.lookup(name, bytes(key)) is None
    assert layouts.LAUNCH_READ.size == layouts.LAUNCH.size


def test_bcc_gives_the_same_rows(fakes: Fakes) -> None:
    """The same source, compiled here: all but what needs structures of the kernel."""
    backend = BccBackend()
    try:
        backend.available()
    except SourceUnavailable as error:
        pytest.skip(str(error))
    with loaded(probes=Probes(backends=[backend])) as probe:
        assert set(probe.without) == {"cuda_fork", "cuda_exec", "cuda_exit"}
        probe.attach(str(fakes.runtime), "runtime")
        process = fakes.start([*SCRIPT.splitlines(), "0 pause"])
        assert process.stdout is not None
        process.stdout.readline()
        rows = probe.read(allocations=True)
        process.communicate("\n", timeout=30)
    check(rows, process.pid, expect(read_log(fakes.log, time.monotonic_ns()), process.pid, rows.time_ns))
    assert {row.name for row in rows.names} == {"_Z8kernel_0Pf"}


def test_a_recording_says_the_same_again(fakes: Fakes, tmp_path: Path) -> None:
    file = str(tmp_path / "machine.gpuflight")
    readings: list[tuple[CudaRows, list[str], list[tuple[str, str]]]] = []
    for make in (lambda: Tape.record(file, SystemClock()), lambda: Tape.replay(file)):
        tape = make()
        probes = Probes(tape)
        tape.begin_round(1)
        probes.begin_round(1)
        probe = CudaProbe(probes, tape=tape)
        attachment = probe.attach(str(fakes.runtime), "runtime")
        if not readings:
            fakes.run(SCRIPT)
        readings.append((probe.read(), list(attachment.attached), attachment.failed))
        probe.close()
        tape.close()
    assert readings[0] == readings[1]
    assert readings[0][0].launches


def test_codes_of_launches_on_demand(fakes: Fakes) -> None:
    with loaded(launch_codes=True) as probe:
        probe.attach(str(fakes.runtime), "runtime")
        pid = fakes.run(["0 launch f0 1 1 1 2048 1 1 0 0", "0 launch f0 1 1 1 1 1 1 0 0"])
        rows, _ = read_of_ended(probe, pid)
    assert [(row.api, row.code, row.errors) for row in rows.errors if row.pid == pid] == [("cudaLaunchKernel", 9, 1)]


def test_ends_that_no_hook_tells(probe: CudaProbe, fakes: Fakes) -> None:
    """Without hooks of the kernel the caller says who ended; the next reading is the last with those rows."""
    attachment = probe.attach(str(fakes.runtime), "runtime")
    try:
        process = fakes.start(["0 malloc 1 9", "0 launch f0 1 1 1 1 1 1 0 0", "0 pause"])
        assert process.stdout is not None
        process.stdout.readline()
        probe.forget([process.pid])
        rows = probe.read()
        again = probe.read()
        process.communicate("\n", timeout=30)
    finally:
        probe.detach(attachment)
        probe.read()
    assert [row.size_bytes for row in rows.allocations if row.pid == process.pid] == [9]
    assert not [row for row in (*again.processes, *again.launches, *again.memory) if row.pid == process.pid]
