"""The recorder's parts: windows, control, stacks, torch, readings, occupancy, joins; and what a report makes of it."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("cupti")
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.fakes import cupti_driver as cupti
from tests.fakes.cupti_driver import FakeCupti
from tests.unit.recorder_rig import UUID, UUID_TEXT, Read, options, recording, until

import gpuflight
from gpuflight.errors import ConfigError, SourceUnavailable
from gpuflight.events.format import matrix
from gpuflight.events.recorder import control, process, ranges
from gpuflight.events.recorder.binding import Binding, Unavailable, load, profiling_in_torch
from gpuflight.events.recorder.clock import Clock, anchor
from gpuflight.events.recorder.control import SOCKET_NAME, ControlServer, Request, ask, find_recorders
from gpuflight.events.recorder.correlate import Recent
from gpuflight.events.recorder.metrics import Metrics
from gpuflight.events.recorder.occupancy import Limits, occupancy
from gpuflight.events.recorder.options import KINDS, Options
from gpuflight.events.recorder.recorder import Recorder
from gpuflight.events.recorder.window import Window

S = 1_000_000_000


@pytest.fixture(autouse=True, scope="module")
def quick_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(os, "fdatasync", lambda descriptor: None)
        yield


# --- windows ---


def test_a_window_opens_and_closes_by_time() -> None:
    window = Window(Options(after_s=10, for_s=5), 0)
    assert [window.look(t * S, 0) for t in (0, 9, 10, 14, 15, 100)] == [False, False, True, True, False, False]
    assert window.next_s(0) is None
    ((closed, _),) = window.closed
    assert (closed["close_reason"], closed["duration_ns"], closed["requested_duration_ms"]) == ("deadline", 5 * S, 5000)


def test_a_window_closes_by_launches() -> None:
    window = Window(Options(launches=100), 0)
    assert [window.look(S, count) for count in (7, 106, 107, 500)] == [True, True, False, False]
    ((closed, before),) = window.closed
    assert (closed["close_reason"], closed["requested_max_launches"], before) == ("launch_budget", 100, 7)


def test_on_demand_waits_to_be_asked_and_can_be_asked_again() -> None:
    window = Window(Options(on_demand=True), 0)
    assert not window.look(10 * S, 0) and window.next_s(10 * S) is None
    window.ask(2, 0, "first", 20 * S)
    assert [window.look(t * S, 0) for t in (20, 21)] == [True, True]
    window.ask(10, 0, "longer", 21 * S)
    assert [window.look(t * S, 5) for t in (23, 30, 31)] == [True, True, False]
    window.ask(0, 0, "open end", 40 * S)
    assert window.look(41 * S, 5)
    window.end("manual", 50 * S)
    assert not window.look(60 * S, 9)
    assert [(w["name"], w["close_reason"]) for w, _ in window.closed] == [
        ("longer", "deadline"),
        ("open end", "manual"),
    ]


def test_a_recording_without_a_window_tells_of_none() -> None:
    window = Window(Options(), 0)
    assert window.look(0, 0)
    window.end("session_stop", S)
    assert not window.closed


def test_only_what_is_in_the_window_is_recorded(tmp_path: Path) -> None:
    with recording(tmp_path, on_demand=True) as (recorder, fake):
        fake.launch("before")
        assert recorder.state == "waiting"
        answer = ask(recorder.path, Request("start", for_s=60, name="look"))
        assert (answer.ok, answer.state) == (True, "recording")
        fake.launch("inside")
        answer = ask(recorder.path, Request("stop"))
        assert (answer.state, answer.counts["kernel"], answer.lost) == ("waiting", 1, 0)
        fake.launch("after")
    read = Read(tmp_path)
    assert [read.text("kernel", row["kernel_id"]) for row in read.rows("kernel")] == ["inside"]
    window = read.one("deep_window")
    assert (window["name"], window["close_reason"], window["launches_covered"]) == ("look", "manual", 1)
    assert json.loads(window["engines"]) == ["nvidia.trace"]


# --- control ---


def test_only_its_user_may_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(tmp_path) as (recorder, _):
        path = f"{recorder.path}/{SOCKET_NAME}"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        monkeypatch.setattr(control, "_peer", lambda connection: (1, os.geteuid() + 4242))
        answer = ask(recorder.path, Request("start"))
        assert not answer.ok and "only the user" in answer.error
    assert not os.path.exists(path)


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"{}\n", b'{"do":"dance"}\n', b'{"do":"start","for_s":-1}\n', b"\xff\n", b"[" * 100_000 + b"\n"],
)
def test_nonsense_is_answered_and_nothing_else(tmp_path: Path, line: bytes) -> None:
    with recording(tmp_path) as (recorder, _):
        with control._connected(recorder.path, 5.0) as client:
            client.sendall(line)
            client.shutdown(socket.SHUT_WR)
            answer = json.loads(client.makefile().read())
        assert not answer["ok"] and "not understood" in answer["error"]
        assert ask(recorder.path, Request("status")).state == "recording"


def test_a_client_that_says_nothing_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_PATIENCE_S", 0.05)
    with recording(tmp_path) as (recorder, fake), control._connected(recorder.path, 5.0):
        fake.launch("k")
        fake.deliver()
        assert ask(recorder.path, Request("flush")).ok
    assert len(Read(tmp_path).rows("kernel")) == 1


def test_who_does_not_answer_is_told(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match="no recorder listens"):
        ask(str(tmp_path), Request("status"))
    server = ControlServer(str(tmp_path), lambda request: control.Answer(ok=True))
    with pytest.raises(SourceUnavailable, match="no answer within"):
        ask(str(tmp_path), Request("status"), timeout_s=0.05)
    server._socket.close()  # type: ignore[union-attr]
    with pytest.raises(SourceUnavailable, match="its process is gone"):
        ask(str(tmp_path), Request("status"))


def test_recorders_are_found_in_deep_folders_with_long_names(tmp_path: Path) -> None:
    """A socket's path may have 107 bytes; that of a session may have more."""
    deep = tmp_path / ("x" * 120) / "run"
    with recording(deep) as (recorder, _):
        assert find_recorders([str(tmp_path), str(tmp_path), "/nonexistent"]) == [recorder.path]
        assert ask(recorder.path, Request("status")).session_id == recorder.session_id
    assert find_recorders([str(tmp_path)]) == []


def test_a_folder_that_takes_no_socket_costs_the_control_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: str) -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(control, "_bound", refuse)
    with recording(tmp_path) as (_, fake):
        fake.launch("k")
    read = Read(tmp_path)
    assert len(read.rows("kernel")) == 1
    assert read.capability("on_demand_control")["status"] == "skipped"


# --- the program's own names ---


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Recorder, FakeCupti]]:
    """The recorder of this process, as the public functions see it."""
    with recording(tmp_path) as (recorder, fake):
        monkeypatch.setattr(process._resident, "recorder", recorder)
        yield recorder, fake


def test_scopes_around_code_functions_and_coroutines(tmp_path: Path, in_process: tuple[Recorder, FakeCupti]) -> None:
    import asyncio

    @gpuflight.scope("called")
    def called(value: int) -> int:
        """Doubles."""
        return 2 * value

    @gpuflight.scope("awaited")
    async def awaited() -> int:
        await asyncio.sleep(0)
        return 3

    step = gpuflight.scope("step")
    with step, step:
        assert (called(4), called.__doc__, asyncio.run(awaited())) == (8, "Doubles.", 3)
    with pytest.raises(ZeroDivisionError), gpuflight.scope("fails"):
        _ = 1 // 0
    in_process[0].close()
    read = Read(tmp_path)
    told = [(read.text("scope", r["name_id"]), r["event_type"], r["depth"]) for r in read.rows("scope")]
    assert told == [
        ("step", 0, 0), ("step", 0, 1), ("called", 0, 2), ("called", 1, 2), ("awaited", 0, 2), ("awaited", 1, 2),
        ("step", 1, 1), ("step", 1, 0), ("fails", 0, 0), ("fails", 1, 0),
    ]  # fmt: skip


def test_scopes_without_a_recorder_do_nothing() -> None:
    assert process.running() is None
    with gpuflight.scope("step") as entered:
        assert entered.name == "step"
    gpuflight.shutdown()


def test_init_refuses_options_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ({"kinds": ["kernels"]}, {"colour": "red"}, {"for_s": "long"}, {"launches": -1}):
        with pytest.raises(ConfigError):
            gpuflight.init("train", **wrong)
    assert process.running() is None


def test_record_function_of_torch_makes_scopes(
    tmp_path: Path, in_process: tuple[Recorder, FakeCupti], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class record_function:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> Any:
            seen.append("enter")
            return self

        def __exit__(self, *what: Any) -> None:
            seen.append("exit")

    module = types.ModuleType("torch.autograd.profiler")
    module.record_function = record_function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", module)
    until(lambda: getattr(record_function, "_gpuflight_ranges", False))
    with record_function("forward") as entered:
        assert isinstance(entered, record_function)
    in_process[0].close()
    with record_function("after the end"):
        pass
    read = Read(tmp_path)
    assert [read.text("scope", row["name_id"]) for row in read.rows("scope")] == ["forward", "forward"]
    assert seen == ["enter", "exit"] * 2


def test_torch_profiler_has_cupti_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """N19: one at a time; we step aside, say so, and go on afterwards."""
    profiling = types.SimpleNamespace(autograd=types.SimpleNamespace(_profiler_enabled=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", profiling)
    with recording(tmp_path) as (recorder, fake):
        fake.launch("before")
        profiling.autograd._profiler_enabled = lambda: True
        until(lambda: recorder.state == "paused")
        assert not fake.enabled
        assert "torch.profiler is running" in ask(recorder.path, Request("status")).why
        fake.launch("during")
        profiling.autograd._profiler_enabled = lambda: False
        until(lambda: recorder.state == "recording")
        fake.launch("after")
    read = Read(tmp_path)
    assert [read.text("kernel", row["kernel_id"]) for row in read.rows("kernel")] == ["before", "after"]
    assert read.capability("torch_profiler")["status"] == "skipped"


def test_nvtx_ranges_of_torch_are_no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"now": "ProfilerType.NVTX"}
    inner = types.SimpleNamespace(_autograd=types.SimpleNamespace(_profiler_type=lambda: kinds["now"]))
    torch = types.SimpleNamespace(autograd=types.SimpleNamespace(_profiler_enabled=lambda: True), _C=inner)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert not profiling_in_torch()
    kinds["now"] = "ActiveProfilerType.KINETO"
    assert profiling_in_torch()
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace())
    assert not profiling_in_torch()


def test_names_of_scopes_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "MOST_NAMES", 3)
    with recording(tmp_path) as (recorder, _):
        for number in range(6):
            recorder.ranges.leave(recorder.ranges.enter(f"step {number}"))
    read = Read(tmp_path)
    names = [read.text("scope", row["name_id"]) for row in read.rows("scope") if row["event_type"] == 0]
    assert names == ["step 0", "step 1", "step 2", *[ranges.OTHER] * 3]


def test_a_write_that_fails_costs_those_records_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCupti()
    recorder = Recorder(options(tmp_path), lambda: Binding(fake))
    assert recorder.start()
    with recorder._work:
        fake.emit(*[cupti.kernel("k", 10, 20, correlation_id=i) for i in range(7)])
        fake.deliver()
        with monkeypatch.context() as patch:
            patch.setattr(recorder._writer, "rows", lambda *what, **more: os.stat("/no/space/left"))
            recorder._drain(everything=True)
    fake.launch("fine")
    recorder.close()
    assert "No such file" in recorder.problem
    read = Read(tmp_path)
    assert [read.text("kernel", row["kernel_id"]) for row in read.rows("kernel")] == ["fine"]
    assert "queue=7" in read.losses["marked_loss"]


def test_a_full_disk_ends_the_capture_and_says_so(tmp_path: Path) -> None:
    with recording(tmp_path) as (recorder, fake):
        fake.launch("before")
        fake.deliver()
        recorder.flush()
        assert recorder._writer is not None
        recorder._writer._stop("filesystem_reserve_reached:available_bytes=1")
        until(lambda: recorder.state == "off" and not fake.enabled)
        assert "filesystem_reserve_reached" in ask(recorder.path, Request("status")).why
        fake.launch("after")
    read = Read(tmp_path)
    assert len(read.rows("kernel")) == 1
    assert read.losses["marked_loss"].startswith("spool: filesystem_reserve_reached")


def test_stacks_of_launches(tmp_path: Path) -> None:
    with recording(tmp_path, stacks=2) as (_, fake):

        def launched_here(correlation_id: int) -> None:
            call = types.SimpleNamespace(callback_site=0, correlation_id=correlation_id)
            fake.subscribed(None, 2, 211, call)
            fake.subscribed(None, 2, 211, types.SimpleNamespace(callback_site=1, correlation_id=correlation_id))

        for number in (1, 2, 3, 4):
            launched_here(number)
            fake.emit(cupti.kernel("k", 10, 20, correlation_id=number))
        fake.subscribed(None, 2, 211, None)  # a call that cannot be read
        fake.deliver()
    read = Read(tmp_path)
    details = {row["corr_id"]: row for row in read.rows("kernel_detail")}
    assert set(details) == {1, 2, 4}  # the first of its shape, and those with a stack
    stack = read.text("stack", details[2]["stack_id"])
    assert stack.endswith("launched_here (test_recorder_parts.py:" + stack.rpartition(":")[2])
    assert "gpuflight" not in stack.rpartition("|")[2]
    assert "every 2th launch: 2 stacks" in read.capability("launch_stacks")["message"]


# --- figures ---


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "expected"),
    [
        # values of NVIDIA's occupancy calculator for compute capability 9.0
        (256, 32, 0, (1.0, "warps", 8)),
        (256, 128, 0, (0.25, "registers", 2)),
        (1024, 64, 0, (0.5, "registers", 1)),
        (32, 16, 0, (0.5, "blocks", 32)),
        (128, 32, 49_152, (0.25, "shared_mem", 4)),
        (1024, 255, 0, (0.0, "registers", 0)),
    ],
)
def test_occupancy(threads: int, registers: int, shared: int, expected: tuple[float, str, int]) -> None:
    told = occupancy(Limits(64, 32, 65_536, 65_536, 233_472, 9), threads, registers, shared)
    assert told is not None
    assert (told["occupancy"], told["limiting_resource"], told["max_active_blocks"]) == expected


def test_occupancy_of_nonsense_is_unknown() -> None:
    limits = Limits(64, 32, 65_536, 65_536, 233_472, 9)
    assert occupancy(limits, 0, 32, 0) is None
    assert occupancy(limits, 100_000, 32, 0) is None
    assert occupancy(Limits(0, 0, 0, 0, 0, 9), 128, 32, 0) is None


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2**64 - 1)), max_size=20), max_size=8))
def test_joins_know_the_last_of_each_id(parts: list[list[tuple[int, int]]]) -> None:
    known, expected, asked = Recent(1), {}, set()
    for part in parts:
        keys = np.array([key for key, _ in part], dtype=np.int64)
        known.add(keys, np.array([value for _, value in part], dtype=np.uint64))
        expected.update(part)
        wanted = np.arange(1, 62)
        found, (values,) = known.find(wanted, seen=len(part) % 2 == 0)
        assert {int(k): int(v) for k, v, f in zip(wanted, values, found, strict=True) if f} == expected
        asked = set(expected) if len(part) % 2 == 0 else asked - {key for key, _ in part}
    assert known.unseen() == len(set(expected) - asked)


def test_joins_forget_what_is_old_and_still_count_it() -> None:
    known = Recent(1, kept=100)
    for begin in range(0, 1000, 50):
        keys = np.arange(begin, begin + 50)
        known.add(keys, keys)
        known.find(keys[:10], seen=True)
    assert len(known) <= 200 and known.unseen() == 800
    assert known.find(np.array([0]))[0].tolist() == [False]


def test_clocks_are_related_and_jitter_moves_nothing() -> None:
    clock = Clock(wall_ns=lambda: 1_700_000_000 * S, mono_ns=iter(range(0, 10**9, 100)).__next__)
    first = anchor(clock, lambda: clock.now_ns() - 5 * S)
    assert abs(first.offset_ns - 5 * S) <= first.spread_ns <= 200
    assert anchor(clock, lambda: clock.now_ns() - 5 * S - 10_000, first) is first
    moved = anchor(clock, lambda: clock.now_ns() - 6 * S, first)
    assert abs(moved.offset_ns - 6 * S) <= 200


def test_arrays_become_the_same_json_with_and_without_orjson(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = [np.array([-5, 7]), np.array([1, 2], dtype=np.uint64), np.array([2**62, 0])]
    text = matrix.array_text(columns)
    if text is not None:
        assert json.loads(text) == [[-5, 1, 2**62], [7, 2, 0]]
    large = [np.array([1, 2]), np.array([2**64 - 1, 2], dtype=np.uint64)]
    text = matrix.array_text(large)
    if text is not None:
        assert json.loads(text) == [[1, 2**64 - 1], [2, 2]]
    assert matrix.array_text([np.array([-1]), np.array([2**64 - 1], dtype=np.uint64)]) is None
    assert matrix.array_text([np.array([0.5])]) is None
    monkeypatch.setattr(matrix, "_orjson", lambda: None)
    assert matrix.array_text(columns) is None


# --- readings ---


class PlayedNvml:
    """Library of ``sources.nvml`` as far as it is used: two GPUs, of which one has no power reading."""

    def call(self, function: str, *arguments: Any) -> Any:
        from gpuflight.sources.nvml.library import Refused

        if function == "nvmlDeviceGetCount":
            return 2
        if function == "nvmlDeviceGetHandleByIndex":
            return arguments[0]
        number = arguments[0]
        answers: dict[str, Any] = {
            "nvmlDeviceGetUUID": f"GPU-{number}",
            "nvmlDeviceGetName": b"NVIDIA H200",
            "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=77, memory=33),
            "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(used=3 << 20, total=5 << 20),
            "nvmlDeviceGetTemperature": 50 + number,
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetTotalEnergyConsumption": 2**40,
        }
        if function == "nvmlDeviceGetPowerUsage" and number == 0:
            return 700_000
        if function not in answers:
            raise Refused(3)
        return answers[function]


def test_readings_of_host_and_gpus(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "meminfo").write_text("MemTotal: 4096 kB\nMemFree: 10 kB\nMemAvailable: 1024 kB\n")
    (proc / "stat").write_text("cpu 100 0 0 900 0 0 0 0 0 0\n")
    with recording(tmp_path / "out") as (recorder, fake):
        fake.emit(cupti.device(1, UUID, "H200"))
        metrics = Metrics(recorder.clock, 1.0, proc=str(proc))
        recorder.metrics = metrics
        metrics.look_at_host()
        (proc / "stat").write_text("cpu 175 0 0 925 0 0 0 0 0 0\n")
        metrics.look_at_host()
        metrics.look_at_gpus(PlayedNvml())  # type: ignore[arg-type]
    read = Read(tmp_path / "out")
    first, second = read.rows("host_metric")
    assert "cpu_pct" not in first and (second["cpu_pct"], second["ram_used_mib"], second["ram_total_mib"]) == (
        75.0,
        3,
        4,
    )
    assert not read.rows("device_metric")  # CUPTI names one GPU, and it is none of these: nobody can say which is which


def test_numbers_of_gpus_follow_from_cupti_then_from_the_environment() -> None:
    metrics = Metrics(Clock(), 1.0)
    metrics.gpus = [{"uuid": f"GPU-{letter}", "index": i, "name": "H200"} for i, letter in enumerate("abc")]
    assert metrics.numbers({0: {"uuid": "GPU-c"}}, {}) == {"GPU-c": 0}
    assert metrics.numbers({}, {}) == {"GPU-a": 0, "GPU-b": 1, "GPU-c": 2}
    assert metrics.numbers({}, {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-a"}) == {"GPU-c": 0, "GPU-a": 1}
    assert metrics.numbers({}, {"CUDA_VISIBLE_DEVICES": "GPU-x"}) == {}
    assert metrics.numbers({}, {"CUDA_VISIBLE_DEVICES": "1"}) == {}
    metrics.gpus[0]["name"] = "A10"
    assert metrics.numbers({}, {}) == {}
    assert len(metrics.numbers({}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})) == 3


def test_gpu_readings_stand_under_cudas_numbers(tmp_path: Path) -> None:
    with recording(tmp_path) as (recorder, _):
        metrics = Metrics(recorder.clock, 1.0, proc="/nonexistent")
        metrics.look_at_host()
        metrics.look_at_gpus(PlayedNvml())  # type: ignore[arg-type]
        recorder.metrics = metrics
    read = Read(tmp_path)
    assert not read.rows("host_metric")
    rows = {row["device_id"]: row for row in read.rows("device_metric")}
    assert (rows[0]["power_mw"], rows[0]["energy_uj"], rows[0]["used_mib"], rows[0]["clock_sm_mhz"]) == (
        700_000,
        1000 * 2**40,
        3,
        1980,
    )
    assert rows[1]["temp_c"] == 51 and "power_mw" not in rows[1]
    assert {row["uuid"] for row in read.rows("device") if row.get("uuid")} == {"GPU-0", "GPU-1"}


# --- the real binding, and a report ---


def test_the_real_cupti_without_a_driver_says_so(tmp_path: Path) -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("there is a driver")
    binding = load()
    with pytest.raises(Unavailable) as caught:
        binding.timestamp()
    assert caught.value.why.code == "no_driver"
    recorder = Recorder(options(tmp_path))
    assert recorder.start() and recorder.state == "off"
    recorder.close()
    assert Read(tmp_path).capability("kernel_events")["reason_code"] == "no_driver"


@pytest.mark.parametrize(("missing", "code"), [("numpy", "no_numpy"), ("cupti", "no_cupti")])
def test_packages_that_are_missing_are_named(missing: str, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(Unavailable) as caught:
        load()
    assert caught.value.why.code == code and "gpuflight[cupti" in caught.value.why.hint


def test_a_report_tells_what_was_recorded_and_what_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("duckdb")
    from gpuflight.cli import main

    monkeypatch.setenv("COLUMNS", "400")
    with recording(tmp_path, kinds=("kernel", "memcpy", "external")) as (recorder, fake):
        fake.emit(cupti.device(0, UUID, "NVIDIA H200"))
        scope = recorder.ranges.enter("step")
        for _ in range(10):
            fake.launch("gemm<float>", duration_ns=2_000_000, registers_per_thread=128, block_x=256)
        recorder.ranges.leave(scope)
        now = time.time_ns()
        fake.emit(cupti.memcpy(now, now + 1000, bytes=1 << 20), cupti.kernel("bad", 0, 0))
        fake.deliver()
    assert main(["report", str(tmp_path), "--json"]) == 0
    told = capsys.readouterr().out
    assert "gemm<float>" in told and UUID_TEXT in told and "step" in told
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "gemm<float>" in text and "records without sane times" in text, text


def test_the_page_names_every_option_kind_and_reason() -> None:
    page = (Path(__file__).parents[2] / "docs" / "recorder.md").read_text("utf-8")
    named = set(re.findall(r"`([a-z_0-9]+)`", page))
    assert set(Options.__struct_fields__) | set(KINDS) <= named
    source = "".join(
        path.read_text("utf-8") for path in Path(gpuflight.__file__ or "").parent.glob("events/recorder/*.py")
    )
    codes = set(re.findall(r'Why\(\s*"([a-z_]+)"', source))
    shown = codes - {"sampled", "dropped", "no_gpu_readings", "no_socket"}  # of other features than the records
    rare = {"not_linux", "old_binding", "unknown_kind", "cupti_error", "recorder_error", "not_supported_here"}
    assert shown - rare - {"enabled_but_no_records", "not_asked_for"} <= named
