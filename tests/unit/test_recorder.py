"""The recorder: real CUPTI record objects with made-up values in, sessions that our own reader reads out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")
pytest.importorskip("cupti")
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.fakes import cupti_driver as cupti
from tests.fakes.cupti_driver import FakeCupti
from tests.unit.recorder_rig import UUID, UUID_TEXT, Read, options, recording, until

from gpuflight.errors import ConfigError
from gpuflight.events.recorder import layouts
from gpuflight.events.recorder.binding import Binding
from gpuflight.events.recorder.options import DEFAULT_KINDS, KINDS, Options, decoded, encoded
from gpuflight.events.recorder.recorder import Recorder

SKEW_NS = 7_000_000_000


@pytest.fixture(autouse=True, scope="module")
def quick_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(os, "fdatasync", lambda descriptor: None)
        yield


def test_every_kind_of_record_comes_back(tmp_path: Path) -> None:
    """One record of each kind, on a CUPTI whose clock is seven seconds ahead."""
    fake = FakeCupti()
    fake.skew_ns = SKEW_NS
    with recording(tmp_path, fake):
        told = time.time_ns() + SKEW_NS
        fake.emit(
            cupti.device(0, UUID, "NVIDIA H200"),
            cupti.call(told - 500, told - 100, 42, cbid=211),
            cupti.external(42, 4, 99),
            cupti.kernel("gemm<float>", told, told + 250, correlation_id=42, dynamic_shared_memory=1024),
            cupti.memcpy(told + 1, told + 31, correlation_id=43, bytes=1 << 33),
            cupti.peer_copy(told + 2, told + 4, correlation_id=44, device_id=1),
            cupti.memset(told + 5, told + 8, correlation_id=45, bytes=77),
            cupti.wait(told + 6, told + 906, correlation_id=46, cuda_event_id=5),
            cupti.allocation(told + 7, address=(1 << 63) + 5, bytes=123),
            cupti.overhead(told + 8, told + 18, 2),
            cupti.marker(told + 9, 1, 2, "forward", "torch"),
            cupti.marker(told + 19, 1, 4),
            cupti.marker(told + 20, 2, 1, "here"),
            cupti.graph(told + 30, told + 80, graph_id=3, correlation_id=47),
        )
        fake.deliver()
    read = Read(tmp_path)
    assert not read.losses
    kernel = read.one("kernel")
    wall = told - SKEW_NS
    assert abs(kernel["start_ns"] - wall) < 50_000_000
    at = kernel["start_ns"]
    expected = {"duration_ns": 250, "stream_id": 7, "corr_id": 42, "dyn_shared_bytes": 1024, "num_regs": 32}
    expected |= {"external_kind": 4, "external_id": 99, "device_id": 0, "has_details": 1}
    expected |= {"api_start_ns": at - 500, "api_exit_ns": at - 100}
    assert {name: kernel[name] for name in expected} == expected
    assert read.text("kernel", kernel["kernel_id"]) == "gemm<float>"
    copies = sorted(read.rows("memcpy"), key=lambda row: row["corr_id"])
    assert [(c["copy_kind"], c["bytes"], c["device_id"], c["start_ns"] - at) for c in copies] == [
        (1, 1 << 33, 0, 1),
        (10, 4096, 1, 2),
    ]
    assert [(c["src_kind"], c["dst_kind"]) for c in copies] == [("pageable", "device"), ("", "")]
    fill = read.one("memset")
    assert (fill["bytes"], fill["duration_ns"], fill["device_id"], fill["stream_id"]) == (77, 3, 0, 7)
    waited = read.one("sync")
    assert (waited["sync_type"], waited["duration_ns"], waited["event_id"]) == (3, 900, 5)
    taken = read.one("allocation")
    assert (taken["address"], taken["bytes"], taken["memory_op"], taken["memory_kind"]) == ((1 << 63) + 5, 123, 1, 3)
    ranges = {(read.text("marker", r["name_id"]), r.get("domain", ""), r["duration_ns"]) for r in read.rows("nvtx")}
    assert ranges == {("forward", "torch", 10), ("here", "", 0), ("CUPTI buffer flush", "CUPTI overhead", 10)}
    assert (read.one("graph_launch")["graph_id"], read.one("graph_launch")["duration_ns"]) == (3, 50)
    device = next(row for row in read.rows("device") if row.get("uuid"))
    assert (device["device_id"], device["uuid"], device["name"]) == (0, UUID_TEXT, "NVIDIA H200")
    shape = read.one("kernel_shape")
    assert (shape["grid_x"], shape["block_x"]) == (64, 128)
    assert (shape["occupancy"], shape["limiting_resource"], shape["max_active_blocks"]) == (1.0, "warps", 16)
    start, end = read.one("session_start"), read.one("session_end")
    assert (start["app"], start["pid"], start["session_kind"]) == ("train", os.getpid(), "trace")
    assert start["time_ns"] <= at and end["time_ns"] >= start["time_ns"] and not end.get("synthetic")
    assert read.capability("kernel_events")["status"] == "collected"
    assert "CUPTI's clock -" in read.capability("clock")["message"]


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b<int>", "c" * 300, "näme"]),
            st.integers(0, 2**48),
            st.integers(-5, 2**40),
            st.integers(1, 2**31 - 1),
            st.integers(0, 2**16 - 1),
        ),
        max_size=60,
    ),
    st.booleans(),
)
def test_kernels_are_what_was_recorded(
    tmp_path_factory: pytest.TempPathFactory, kernels: list[tuple[str, int, int, int, int]], with_layouts: bool
) -> None:
    """Any kernels: those with sane times come back, the others are counted; with and without a binary layout."""
    folder = tmp_path_factory.mktemp("kernels")
    fake = FakeCupti()
    with pytest.MonkeyPatch.context() as patch:
        if not with_layouts:
            patch.setattr(layouts.Layouts, "_find", lambda self, record: None)
        with recording(folder, fake) as (recorder, _):
            for number, (name, start, duration, grid, registers) in enumerate(kernels):
                end = max(start + duration, 0)
                facts = {"grid_x": grid, "registers_per_thread": registers, "correlation_id": number}
                fake.emit(cupti.kernel(name, start, end, **facts))
                if number % 7 == 0:
                    fake.deliver()
            fake.deliver()
            recorder.flush()
            assert recorder.capture.anchor is not None
            offset = recorder.capture.anchor.offset_ns
    read = Read(folder)
    sane = {i: k for i, k in enumerate(kernels) if k[1] > 0 and max(k[1] + k[2], 0) >= k[1]}
    rows = {row["corr_id"]: row for row in read.rows("kernel")}
    assert set(rows) == set(sane)
    for number, (name, start, duration, _, registers) in sane.items():
        row = rows[number]
        assert read.text("kernel", row["kernel_id"]) == name
        assert (row["duration_ns"], row["num_regs"]) == (duration, registers)
        assert row["start_ns"] == start + offset
    details = {row["corr_id"]: row for row in read.rows("kernel_detail")}
    assert set(details) == {number for number, row in rows.items() if row["has_details"]}
    shapes = {row["shape_id"]: row["grid_x"] for row in read.rows("kernel_shape")}
    assert {shapes[detail["shape_id"]] for detail in details.values()} == {kernel[3] for kernel in sane.values()}
    bad = len(kernels) - len(sane)
    assert ("marked_loss" in read.losses) == bool(bad)
    if bad:
        assert f"invalid_timestamps={bad}" in read.losses["marked_loss"]
        assert f"{bad} records without sane times" in read.capability("kernel_events")["message"]


def test_records_without_an_attribute_leave_it_unknown(tmp_path: Path) -> None:
    """An older or newer class: what it lacks is not 0."""

    class Old:
        kind, start, end, correlation_id, stream_id, name = 10, 1000, 1500, 1, 3, "old"

    with recording(tmp_path) as (_, fake):
        fake.emit(Old())
        fake.deliver()
    kernel = Read(tmp_path).one("kernel")
    assert (kernel["stream_id"], kernel["duration_ns"]) == (3, 500)
    assert not {"num_regs", "dyn_shared_bytes", "device_id"} & set(kernel)


def test_what_nobody_knows_is_counted(tmp_path: Path) -> None:
    class Strange:
        kind = 4242

    with recording(tmp_path) as (_, fake):
        fake.enabled.add(4242)
        fake.emit(Strange(), cupti.kernel("a", 10, 20))
        fake.deliver()
    read = Read(tmp_path)
    assert len(read.rows("kernel")) == 1
    assert "1 Strange" in read.capability("kernel_events")["message"]


def test_dropped_records_are_counted_and_marked(tmp_path: Path) -> None:
    """N20, N23: CUPTI's own drops, and those of a queue that is full."""
    fake = FakeCupti()
    with recording(tmp_path, fake, max_pending_bytes=1 << 20) as (recorder, _):
        with recorder._work:  # nothing is written meanwhile
            for _ in range(30):
                fake.emit(*[cupti.kernel("k", 10, 20, correlation_id=i) for i in range(300)])
                fake.deliver()
        fake.dropped = 17
    read = Read(tmp_path)
    written = len(read.rows("kernel"))
    assert 0 < written < 9000
    reason = read.losses["marked_loss"]
    assert "cupti=17" in reason and f"queue={9000 - written}" in reason
    told = read.capability("kernel_events")
    assert (told["status"], told["reason_code"]) == ("partial", "records_dropped")
    assert "17 records of any kind dropped by CUPTI" in told["message"]


def test_launches_without_kernels_are_told(tmp_path: Path) -> None:
    """N20: a launch was called, no kernel of it ever came."""
    with recording(tmp_path) as (_, fake):
        fake.emit(*[cupti.call(10 + i, 12 + i, i + 1) for i in range(5)])
        fake.emit(*[cupti.kernel("k", 20, 30, correlation_id=i + 1) for i in range(3)])
        fake.deliver()
    read = Read(tmp_path)
    assert len(read.rows("kernel")) == 3
    assert "2 launches and copies of which no record came" in read.capability("kernel_events")["message"]


def test_a_callback_that_fails_is_counted_and_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with recording(tmp_path) as (recorder, fake):
        assert recorder.capture.intake is not None
        recorder.capture.intake.completed(None)  # type: ignore[arg-type]

        class Broken:
            @property
            def kind(self) -> int:
                raise RuntimeError("a record that cannot be read")

        recorder.capture.intake.completed([Broken(), Broken()])
        fake.emit(cupti.kernel("fine", 10, 20))
        fake.deliver()
    read = Read(tmp_path)
    assert len(read.rows("kernel")) == 1
    assert "callback=3" in read.losses["marked_loss"]
    assert "3 records in failed callbacks (RuntimeError" in read.capability("kernel_events")["message"]


def test_clock_conversion_follows_cupti(tmp_path: Path) -> None:
    """N24: CUPTI counts since boot; times in the session are of the epoch, and stay so when its clock drifts."""
    fake = FakeCupti()
    fake.skew_ns = -1_700_000_000_000_000_000
    with recording(tmp_path, fake) as (recorder, _):
        before = time.time_ns()
        fake.launch("early")
        fake.deliver()
        recorder.flush()
        fake.skew_ns += 3_000_000
        recorder.capture._last_flush_ns = 0
        recorder.capture.tick()
        fake.launch("late")
        fake.deliver()
        after = time.time_ns()
    read = Read(tmp_path)
    assert read.clocks == {"wall"}
    early, late = sorted(read.rows("kernel"), key=lambda row: row["corr_id"])
    assert before - 1_000_000 < early["start_ns"] <= late["start_ns"] + 1_000_000 < after + 2_000_000


def test_scopes_and_the_launches_in_them(tmp_path: Path) -> None:
    with recording(tmp_path) as (recorder, fake):
        outer = recorder.ranges.enter("step")
        inner = recorder.ranges.enter("forward")
        inside = fake.launch("k")
        recorder.ranges.leave(inner)
        recorder.ranges.leave(outer)
        outside = fake.launch("k")
        fake.deliver()
    read = Read(tmp_path)
    scopes = read.rows("scope")
    assert [(read.text("scope", s["name_id"]), s["event_type"], s["depth"]) for s in scopes] == [
        ("step", 0, 0),
        ("forward", 0, 1),
        ("forward", 1, 1),
        ("step", 1, 0),
    ]
    assert [s["time_ns"] for s in scopes] == sorted(s["time_ns"] for s in scopes)
    kernels = {row["corr_id"]: row for row in read.rows("kernel")}
    assert kernels[inside]["external_id"] == scopes[1]["scope_instance_id"]
    assert kernels[outside]["external_id"] == 0


def test_many_kernels_in_few_lines(tmp_path: Path) -> None:
    """Buffers of thousands of records become whole batches; nothing is lost or told twice between them."""
    now = time.time_ns()
    with recording(tmp_path) as (_, fake):
        for begin in range(0, 12_000, 5_000):
            many = range(begin, min(begin + 5_000, 12_000))
            fake.emit(*[cupti.kernel(f"k{i % 40}", now + i, now + i + 5, correlation_id=i) for i in many])
            fake.deliver()
    read = Read(tmp_path)
    assert not read.losses
    assert sorted(row["corr_id"] for row in read.rows("kernel")) == list(range(12_000))
    assert len(read.rows("kernel_detail")) == 40


def test_options_survive_the_environment() -> None:
    made = Options(app="a b", kinds=("kernel", "nvtx"), for_s=2.5, stacks=100)
    assert decoded(encoded(made)) == made
    assert decoded("{}") == Options()
    for bad in ('{"kinds": ["kernels"]}', '{"for_s": -1}', '{"colour": 1}', "[", '{"metrics_interval_s": 0.001}'):
        with pytest.raises(ConfigError):
            decoded(bad)


def test_a_folder_that_cannot_be_made_costs_the_recording_only(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder = Recorder(options(tmp_path / "file" / "below"), lambda: Binding(FakeCupti()))
    assert not recorder.start()
    assert "file" in recorder.problem and recorder.state == "closed"
    recorder.ranges.leave(recorder.ranges.enter("step"))
    recorder.flush()
    recorder.close()


def test_kinds_that_were_not_asked_for_are_not_switched_on(tmp_path: Path) -> None:
    with recording(tmp_path, kinds=("kernel", "sync")) as (_, fake):
        until(lambda: fake.enabled)
        assert fake.enabled == {8, 10, 38}
    assert {c["feature"] for c in Read(tmp_path).rows("capability") if c["status"] == "not_requested"} >= {
        "memcpy_activity",
        "nvtx_markers",
        "graph_activity",
    }
    assert set(KINDS) > {"kernel", "sync"}


def test_a_kind_that_cupti_refuses_costs_that_kind_only(tmp_path: Path) -> None:
    fake = FakeCupti()
    fake.refuse_kinds = {49: 27}
    with recording(tmp_path, fake):
        fake.launch("k")
        fake.emit(cupti.allocation(5))
        fake.deliver()
    read = Read(tmp_path)
    assert read.capability("memory_activity")["status"] == "skipped"
    assert "NOT_SUPPORTED" in read.capability("memory_activity")["message"]
    assert read.capability("kernel_events")["status"] == "collected"


@pytest.mark.parametrize(
    ("call", "error", "code", "words"),
    [
        ("subscribe_v2", 39, "other_subscriber", "another tool is attached"),
        ("activity_enable", 35, "insufficient_privilege", "RestrictProfilingToAdminUsers"),
        ("activity_enable", 14, "driver_mismatch", "cupti-python<13"),
        ("activity_enable", 26, "hardware_busy", "another process has the GPU"),
        ("activity_enable", 41, "not_supported_here", "does not work on this GPU"),
        ("activity_enable", 999, "cupti_error", "ERROR_UNKNOWN"),
        ("get_timestamp", RuntimeError("CUDA driver is not found (libcuda.so.1)"), "no_driver", "no NVIDIA driver"),
        ("activity_register_callbacks", ValueError("odd"), "cupti_error", "odd"),
    ],
)
def test_why_there_are_no_records_is_in_the_session(
    tmp_path: Path, call: str, error: Any, code: str, words: str
) -> None:
    """N18, N19: the program runs on, scopes are recorded, and the session says why it holds no kernels."""
    fake = FakeCupti()
    fake.refuse[call] = error
    with recording(tmp_path, fake, kinds=DEFAULT_KINDS) as (recorder, _):
        assert recorder.state == "off"
        recorder.ranges.leave(recorder.ranges.enter("step"))
        fake.launch("k")
        fake.deliver()
    read = Read(tmp_path)
    assert not read.rows("kernel") and len(read.rows("scope")) == 2
    told = read.capability("kernel_events")
    assert (told["status"], told["reason_code"]) == ("skipped", code), told["message"]
    assert words in told["message"]
    assert read.one("session_end")


def test_who_has_cupti_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSYS_PROFILING_SESSION_ID", "1")
    fake = FakeCupti()
    fake.refuse["subscribe_v2"], fake.holder = 39, "CUPTI for nsys"
    with recording(tmp_path, fake):
        pass
    message = Read(tmp_path).capability("kernel_events")["message"]
    assert "Likely Nsight Systems." in message and "It calls itself 'CUPTI for nsys'." in message
