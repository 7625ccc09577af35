"""The recorder over the real cupti-python: its registration, its callbacks in a thread of CUPTI's, its record objects.

Only the library under it is played (tests/fakes/cupti_library.c): it delivers the bytes of real records in buffers that
it asks for, and has them back afterwards, as CUPTI does.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("cupti")
from tests.unit.recorder_rig import UUID_TEXT, Read

ROOT = Path(__file__).parents[2]
DRIVER = """
int cuInit(unsigned int flags) { return (int)flags; }
int cuDriverGetVersion(int *version) { *version = 13050; return 0; }
"""
HEAD = """
    import ctypes, sys, time
    sys.path.insert(0, {root!r})
    cuda = ctypes.CDLL({place!r} + "/libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL({place!r} + "/libcupti.so.13", mode=ctypes.RTLD_GLOBAL)
    from tests.fakes import cupti_driver as made
    kept = []
    def emit(*records):
        for record in records:
            data = bytes(memoryview(record))
            library.fake_size(record.kind, ctypes.c_size_t(len(data)))
            library.fake_emit(data, ctypes.c_size_t(len(data)))
            kept.append(record)
    import gpuflight
    def begin(**options):
        return gpuflight.init("train", folder={sessions!r}, metrics_interval_s=0, **options)
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUPTI and a driver under the names that cupti-python looks for."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    place = tmp_path_factory.mktemp("libraries")
    (place / "driver.c").write_text(DRIVER)
    for source, name in (
        (place / "driver.c", "libcuda.so.1"),
        (ROOT / "tests/fakes/cupti_library.c", "libcupti.so.13"),
    ):
        command = ["gcc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{name}"]
        subprocess.run([*command, "-o", str(place / name), str(source)], check=True)
    return place


def run(libraries: Path, tmp_path: Path, program: str) -> str:
    head = textwrap.dedent(HEAD).format(root=str(ROOT), place=str(libraries), sessions=str(tmp_path / "sessions"))
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(program)],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


def test_records_come_through_the_real_binding(libraries: Path, tmp_path: Path) -> None:
    program = """
        recorder = begin(kinds=["kernel", "memcpy", "memset", "sync", "memory", "nvtx", "external", "overhead", "api"])
        assert recorder.state == "recording", recorder.capture.why
        assert library.fake_subscribers() == 0  # who was asked about is let go: torch.profiler can have it
        assert [kind for kind in range(64) if library.fake_enabled(kind)] == [1, 2, 8, 10, 12, 17, 22, 38, 39, 49]
        now = time.time_ns()
        emit(made.device(0, bytes(range(1, 17)), "NVIDIA H200"), made.external(1, 5, 7))
        emit(*[made.kernel("gemm<float>", now + i, now + i + 100, correlation_id=i) for i in range(1, 6)])
        emit(made.memcpy(now, now + 10, bytes=99), made.peer_copy(now, now + 20), made.memset(now, now + 1))
        emit(made.wait(now, now + 3), made.allocation(now), made.overhead(now, now + 5, 2))
        emit(made.marker(now, 1, 2, "forward", "torch"), made.marker(now + 50, 1, 4))
        recorder.capture.binding.flush(forced=False)  # a thread of CUPTI's own delivers, and we hold no lock meanwhile
        emit(made.kernel("relu", now + 500, now + 600, correlation_id=9), made.kernel("bad", 0, 0))
        library.fake_drop(ctypes.c_size_t(4))
        recorder.capture.binding.flush(forced=False)
        gpuflight.shutdown()
        assert not any(library.fake_enabled(kind) for kind in range(64))
    """
    run(libraries, tmp_path, program.replace(', "api"]', "]"))
    read = Read(tmp_path / "sessions")
    names = [read.text("kernel", row["kernel_id"]) for row in read.rows("kernel")]
    assert names == ["gemm<float>"] * 5 + ["relu"]
    first = read.rows("kernel")[0]
    assert (first["duration_ns"], first["corr_id"], first["external_id"], first["num_regs"]) == (100, 1, 7, 32)
    assert sorted((row["copy_kind"], row["bytes"]) for row in read.rows("memcpy")) == [(1, 99), (10, 4096)]
    assert len(read.rows("memset")) == len(read.rows("sync")) == len(read.rows("allocation")) == 1
    assert {read.text("marker", row["name_id"]) for row in read.rows("nvtx")} == {"forward", "CUPTI buffer flush"}
    assert {row["uuid"] for row in read.rows("device") if row.get("uuid")} == {UUID_TEXT}
    assert read.one("kernel_shape")["occupancy"] == 1.0
    assert "cupti=4,invalid_timestamps=1" in read.losses["marked_loss"]


def test_only_calls_that_launch_are_asked_for(libraries: Path, tmp_path: Path) -> None:
    """This CUPTI cannot choose calls: then that kind is missing, told, and everything else is there."""
    program = """
        recorder = begin(kinds=["kernel", "api"])
        assert recorder.state == "recording"
        emit(made.kernel("k", 10, 20))
        gpuflight.shutdown()
    """
    run(libraries, tmp_path, program)
    read = Read(tmp_path / "sessions")
    assert len(read.rows("kernel")) == 1
    told = read.capability("api_activity")
    assert told["status"] == "skipped" and "cuptiActivityEnableRuntimeApi" in told["message"]


def test_another_subscriber_is_left_alone_and_named(libraries: Path, tmp_path: Path) -> None:
    program = """
        library.fake_other(1)
        recorder = begin()
        assert recorder.state == "off"
        with gpuflight.scope("step"): pass
    """
    run(libraries, tmp_path, program)
    read = Read(tmp_path / "sessions")
    told: dict[str, Any] = read.capability("kernel_events")
    assert told["reason_code"] == "other_subscriber" and "'CUPTI for another tool'" in told["message"]
    assert len(read.rows("scope")) == 2 and not read.losses
