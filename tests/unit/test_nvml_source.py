"""The Nvml source over the real pynvml on the fake library: readings, refusals, failures, recording."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.nvml import Gpu, Nvml, NvmlSnapshot
from gpuflight.sources.nvml.processes import _decode
from gpuflight.sources.nvml.source import Backoff
from gpuflight.sources.recording import Tape

if TYPE_CHECKING:  # pytest loads them as a plugin
    from tests.fakes.nvml.fixtures import MakeFake, MakeRig

pytest_plugins = ("tests.fakes.nvml.fixtures",)
UNSUPPORTED = "not supported by this GPU or driver"


def nth(snapshot: NvmlSnapshot, index: int) -> Gpu:
    return next(gpu for gpu in snapshot.gpus if gpu.index == index)


def test_every_reading_of_an_h100_has_its_unit(make_rig: MakeRig) -> None:
    snapshot = make_rig("h100x8").snapshot()
    gpu = snapshot.gpus[0]
    assert len(snapshot.gpus) == 8
    assert (snapshot.driver_version, snapshot.cuda_version) == ("570.124.06", "12.8")
    assert gpu.address == "0000:1b:00.0"
    expected = {
        "sm_util_pct": 87,
        "memory_util_pct": 41,
        "memory_total_bytes": 81559 << 20,
        "memory_reserved_bytes": 551 << 20,
        "memory_used_bytes": (40960 + 4) << 20,
        "bar1_total_bytes": 128 << 30,
        "sm_clock_hz": 1755_000_000,
        "sm_clock_max_hz": 1980_000_000,
        "memory_clock_hz": 2619_000_000,
        "power_watts": 95.0,
        "power_limit_watts": 700.0,
        "temperature_celsius": 34,
        "temperature_memory_celsius": 41,
        "temperature_slowdown_celsius": 89,
        "pcie_gen": 5,
        "pcie_width_max": 16,
        "row_remap_failed": 0,
    }
    assert {name: gpu.metrics.get(name) for name in expected} == expected
    facts = {
        "compute_capability": "9.0",
        "architecture": "Hopper",
        "clock_event_reasons": [],
        "persistence": "enabled",
        "compute_mode": "default",
        "fabric_state": "completed",
        "fabric_bandwidth_degraded": False,
        "cpus": "0-47,96-143",
        "numa_nodes": "0",
        "mig_mode": "disabled",
    }
    assert {name: gpu.facts.get(name) for name in facts} == facts
    assert nth(snapshot, 7).facts["clock_event_reasons"] == ["hw_slowdown", "hw_thermal_slowdown"]


def test_links_carry_their_version_state_and_other_end(make_rig: MakeRig) -> None:
    snapshot = make_rig("h100x8", {"gpu2": {"link.3.errors": "2 0 5 0"}}).snapshot()
    links = nth(snapshot, 6).links
    assert len(links) == 18
    assert [link.number for link in links if not link.active] == [17]
    assert {link.version for link in links} == {"4.0"}
    assert {link.remote for link in links} == {"switch"}
    assert links[17].remote_address == "0000:08:00.0"
    assert nth(snapshot, 2).links[3].errors_count == 7


def test_a_refused_reading_is_unknown_with_its_reason_and_never_zero(make_rig: MakeRig) -> None:
    rig = make_rig(
        "h100x8",
        {"gpu0": {"utilization": "!NOT_SUPPORTED", "power_mw": "!NO_PERMISSION", "temperature": "!UNKNOWN"}},
    )
    gpu = rig.snapshot().gpus[0]
    for name in ("sm_util_pct", "memory_util_pct", "power_watts", "temperature_celsius", "fan_pct"):
        assert name not in gpu.metrics
    assert gpu.unknown["sm_util_pct"] == UNSUPPORTED
    assert gpu.unknown["power_watts"] == "no permission"
    assert gpu.unknown["temperature_celsius"] == "NVML error 999"
    assert gpu.metrics["memory_total_bytes"]  # the rest still stands


def test_n01_an_old_driver_is_read_through_the_functions_it_has(make_rig: MakeRig) -> None:
    gpu = make_rig("v100-old").snapshot().gpus[0]
    assert gpu.metrics["memory_used_bytes"] == (256 + 1536) << 20  # v1 counts the reserve too
    assert gpu.facts["memory_used_includes_reserved"] is True
    assert "memory_reserved_bytes" not in gpu.metrics
    assert gpu.facts["clock_event_reasons"] == []  # by its old name, throttle reasons
    assert [(p.pid, p.memory_used_bytes) for p in gpu.processes] == [(7001, 1024 << 20), (7002, 512 << 20)]
    assert gpu.unknown["rows_remapped_corrected_count"] == "the driver is too old for it"
    assert gpu.unknown["fabric_state"] == "the driver is too old for it"
    assert gpu.metrics["pages_retired_single_bit_count"] == 2
    assert gpu.metrics["pages_retired_double_bit_count"] == 1
    assert [link.active for link in gpu.links] == [True, True, False, False, False, False]
    assert gpu.links[0].remote_address == "0000:16:00.0"
    assert gpu.links[0].errors_count == 0


def test_n01_the_fake_of_the_old_driver_really_lacks_the_symbols(make_fake: MakeFake) -> None:
    """With the newest functions only, as many tools call them, that machine cannot be read at all."""
    fake = make_fake("v100-old")
    code = (
        "import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        "try: pynvml.nvmlDeviceGetComputeRunningProcesses_v3(h)\n"
        "except pynvml.NVMLError as e: print(e.value)"
    )
    environment = {**os.environ, **fake.environment}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "13"  # NVML_ERROR_FUNCTION_NOT_FOUND


@pytest.mark.parametrize("struct_bytes", ["24", "32"])
def test_process_structures_are_told_apart_by_what_the_driver_wrote(make_rig: MakeRig, struct_bytes: str) -> None:
    rig = make_rig("h100x2-struct535", {"system": {"process_struct_bytes": struct_bytes}})
    gpu = rig.snapshot().gpus[0]
    assert [(p.pid, p.memory_used_bytes) for p in gpu.processes] == [
        (8001, 1000 << 20),
        (8002, 2000 << 20),
        (8003, 3000 << 20),
    ]
    assert gpu.processes_garbled_count == 0


def test_pynvml_alone_misreads_that_driver(make_fake: MakeFake) -> None:
    """What the test above guards against: the plain binding gives pids that do not exist."""
    fake = make_fake("h100x2-struct535")
    code = (
        "import pynvml; pynvml.nvmlInit(); h = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        "print(sorted(p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(h)))"
    )
    environment = {**os.environ, **fake.environment}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() != "[8001, 8002, 8003]"


def test_impossible_entries_are_counted_and_left_out(make_rig: MakeRig) -> None:
    rig = make_rig("h100x2-struct535", {"gpu0": {"process": "none"}, "gpu1": {"process": "4294967295:1"}})
    rig.fake.set("gpu 0", process="8001:99999999")  # more than the GPU has
    first, second = rig.snapshot().gpus
    assert (first.processes, first.processes_garbled_count) == ([], 1)
    assert (len(second.processes), second.processes_garbled_count) == (3, 1)


def test_compute_and_graphics_of_one_process_are_one(make_rig: MakeRig) -> None:
    rig = make_rig("l40sx4", {"gpu1": {"process": "77:10:C"}})
    rig.fake.set("gpu 1", {"process": "77:10:G"})
    rig.fake.set("gpu 1", {"process": "78:?:M"})
    one, other = nth(rig.snapshot(), 1).processes
    assert (one.pid, one.kinds, one.memory_used_bytes) == (77, ["compute", "graphics"], 10 << 20)
    assert (other.pid, other.kinds, other.memory_used_bytes) == (78, ["mps"], None)


def test_processes_that_may_not_be_listed_are_unknown_not_none(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", {"system": {"fail.nvmlDeviceGetComputeRunningProcesses_v3": "NO_PERMISSION"}})
    gpu = rig.snapshot().gpus[0]
    assert gpu.processes == []
    assert gpu.processes_reason == "no permission"


def test_n06_no_samples_is_an_empty_list_and_unknown_on_a_busy_gpu(make_rig: MakeRig) -> None:
    rig = make_rig(
        "h100x8",
        {
            "gpu0": {"process": "none"},
            "gpu1": {"utilization": "50 20", "process": "11:1"},
            "gpu2": {"utilization": "0 0", "process": "12:1"},
        },
    )
    snapshot = rig.snapshot()
    assert nth(snapshot, 0).processes == []
    busy, idle = nth(snapshot, 1).processes[0], nth(snapshot, 2).processes[0]
    assert (busy.sm_util_pct, busy.util_reason) == (None, "NVML gave no samples")
    assert (idle.sm_util_pct, idle.util_reason) == (0.0, "")


def test_a_process_without_samples_beside_one_with_was_idle(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", {"gpu0": {"process": "4102:10"}})
    by_pid = {process.pid: process.sm_util_pct for process in rig.snapshot().gpus[0].processes}
    assert by_pid == {4101: 87.0, 4102: 0.0}


def test_mig_devices_are_listed_with_their_own_memory(make_rig: MakeRig) -> None:
    gpu = make_rig("a100-mig").snapshot().gpus[0]
    assert [(mig.facts["profile"], mig.gpu_instance, mig.metrics["memory_total_bytes"] >> 20) for mig in gpu.migs] == [
        ("3g.40gb", 1, 40192),
        ("2g.20gb", 3, 19968),
        ("1g.10gb", 9, 9728),
    ]
    assert gpu.unknown["sm_util_pct"] == gpu.migs[0].unknown["sm_util_pct"] == UNSUPPORTED
    assert [(process.pid, process.gpu_instance) for process in gpu.processes] == [(5001, 1), (5002, 3)]


def test_pairs_say_distance_and_peer_access(make_rig: MakeRig) -> None:
    rig = make_rig("l40sx4")
    pairs = {(pair.a[-1], pair.b[-1]): pair for pair in rig.snapshot().pairs}
    assert len(pairs) == 6
    assert [pairs["0", "1"].distance, pairs["2", "3"].distance, pairs["0", "2"].distance] == ["PIX", "PHB", "SYS"]
    assert pairs["0", "1"].p2p == {"read": "ok", "write": "ok", "nvlink": "not_supported", "atomics": "not_supported"}
    assert pairs["1", "3"].p2p["read"] == "chipset_not_supported"


def test_n03_a_gpu_lost_in_the_middle_of_a_round_is_not_called_again(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8-lost-midway")
    gpus = rig.snapshot().gpus
    assert [gpu.state for gpu in gpus] == ["ok"] * 3 + ["lost"] + ["ok"] * 4
    lost = gpus[3]
    assert lost.reason == "the GPU is lost: it has fallen off the bus"
    assert lost.facts["name"] == "NVIDIA H100 80GB HBM3"
    assert not lost.processes and not lost.links and "sm_util_pct" not in lost.metrics
    # Any further call on it would hang, and the round with it.
    rig.fake.set("gpu 3", {"hang.nvmlDeviceGetUtilizationRates": "yes", "hang.nvmlDeviceGetName": "yes"})
    again = rig.snapshot()
    assert again.stale_reason == ""
    assert nth(again, 3).state == "lost"


def test_a_lost_gpu_that_was_reset_comes_back(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8")
    rig.snapshot()
    rig.fake.set("gpu 3", lost="yes")
    assert nth(rig.snapshot(), 3).state == "lost"
    rig.fake.set("gpu 3", lost="no")
    assert nth(rig.snapshot(), 3).state == "lost"  # not asked again yet
    assert nth(rig.snapshot(seconds=31), 3).state == "ok"


def test_n13_a_gpu_that_is_no_longer_enumerated_stays_as_lost(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8")
    rig.snapshot()
    rig.fake.set("gpu 3", visible="no")
    snapshot = rig.snapshot()
    by_uuid = {gpu.uuid[-1]: gpu for gpu in snapshot.gpus}
    assert len(by_uuid) == 8
    assert (by_uuid["3"].state, by_uuid["3"].reason) == ("lost", "NVML does not list it any more")
    assert by_uuid["4"].state == "ok" and by_uuid["4"].index == 3  # NVML counts anew


def test_a_gpu_lost_before_it_was_ever_seen_has_no_name(make_rig: MakeRig) -> None:
    snapshot = make_rig("h100x8-lost").snapshot()
    assert len(snapshot.gpus) == 7
    assert snapshot.nameless == [(3, "the GPU is lost: it has fallen off the bus")]


def test_n09_a_hanging_call_costs_the_deadline_once_and_no_second_thread(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", deadline_s=0.1)
    fresh = rig.snapshot()
    threads = threading.active_count()
    rig.fake.set("gpu 2", {"hang.nvmlDeviceGetUtilizationRates": "yes"})
    for rounds in range(1, 6):
        stale = rig.snapshot()
        assert stale.stale_reason.startswith("nvmlDeviceGetUtilizationRates of GPU 2 has not returned for")
        assert stale.age_s == 5.0 * rounds
        assert stale.gpus == fresh.gpus
    assert threading.active_count() == threads
    rig.fake.set("gpu 2", {"hang.nvmlDeviceGetUtilizationRates": "no"})
    rig.nvml._watchdog._current.done.wait(10)  # the call comes back, late
    assert rig.snapshot().stale_reason == ""
    assert threading.active_count() == threads


def test_n09_hanging_from_the_first_call_on_is_no_source(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", {"system": {"hang.nvmlInit": "yes"}}, first_deadline_s=0.1)
    with pytest.raises(SourceUnavailable, match=r"nvmlInit has not returned for 0\.1 s .*persistence"):
        rig.snapshot()
    with pytest.raises(SourceUnavailable, match=r"for 5\.1 s"):
        rig.snapshot()
    rig.nvml.close()  # does not wait for it
    rig.fake.set("system", {"hang.nvmlInit": "no"})


def test_n15_stale_values_show_their_age_and_expire(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", expires_s=60)
    rig.snapshot()
    rig.fake.set("system", {"fail.nvmlDeviceGetCount_v2": "DRIVER_NOT_LOADED"})
    stale = rig.snapshot(seconds=7)
    assert (stale.age_s, stale.events) == (7.0, [])
    assert "NVML stopped working: nvmlDeviceGetCount: the NVIDIA driver is not loaded" in stale.stale_reason
    with pytest.raises(SourceUnavailable, match="the last values are 61 s old"):
        rig.snapshot(seconds=54)


def test_n14_it_recovers_after_failures_with_growing_pauses(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", {"system": {"fail.nvmlInit": "DRIVER_NOT_LOADED"}})
    for _ in range(3):
        with pytest.raises(SourceUnavailable, match="the NVIDIA driver is not loaded"):
            rig.snapshot(seconds=1)
    with pytest.raises(SourceUnavailable, match="next try in"):
        rig.snapshot(seconds=1)
    rig.fake.set("system", {"fail.nvmlInit": "none"})
    rig.fake._replace(rig.fake.description.read_text().replace("fail.nvmlInit", "was.nvmlInit"))
    assert len(rig.snapshot(seconds=10).gpus) == 8


def test_backoff_doubles_up_to_its_limit() -> None:
    backoff = Backoff(5.0)
    waits = []
    for _ in range(8):
        backoff.failed(100.0)
        waits.append(backoff.wait_s(100.0))
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300]
    backoff.succeeded()
    assert backoff.wait_s(100.0) == 0


@pytest.mark.parametrize(
    ("machine", "reason", "hint"),
    [
        (None, "is not there", "install the NVIDIA driver"),
        ("driver-not-loaded", "the NVIDIA driver is not loaded", "modprobe nvidia"),
        ("version-mismatch", "of different versions", "reboot"),
        ("no-permission", "no permission", "run as root"),
    ],
)
def test_why_there_is_no_nvml(make_rig: MakeRig, machine: str | None, reason: str, hint: str) -> None:
    with pytest.raises(SourceUnavailable) as caught:
        make_rig(machine).snapshot()
    assert reason in caught.value.reason
    assert hint in caught.value.hint


def test_a_library_that_is_none(tmp_path: Path) -> None:
    broken = tmp_path / "libnvidia-ml.so.1"
    broken.write_text("not a library")
    with pytest.raises(SourceUnavailable, match="cannot be loaded"):
        Nvml(str(broken)).snapshot()


def test_n11_an_xid_is_told_once(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", {"gpu4": {"event": "1 8 31"}})
    assert rig.snapshot().events == []  # it happened before anybody listened
    rig.fake.set("gpu 4", event="2 8 79")
    rig.fake.set("gpu 4", event="3 2 0")
    events = rig.snapshot().events
    assert [(event.uuid[-1], event.kind, event.code) for event in events] == [
        ("4", "xid", 79),
        ("4", "ecc_double_bit", 0),
    ]
    assert events[0].wall_ns == rig.clock.wall_ns()
    assert [rig.snapshot().events for _ in range(10)] == [[]] * 10


def test_n18_a_reading_held_by_a_profiler_is_left_alone_for_a_while(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8", {"gpu0": {"utilization": "!IN_USE"}})
    assert rig.snapshot().gpus[0].unknown["sm_util_pct"].startswith("in use by another profiler")
    rig.fake.set("gpu 0", utilization="10 5")
    assert "sm_util_pct" not in rig.snapshot().gpus[0].metrics
    assert rig.snapshot(seconds=31).gpus[0].metrics["sm_util_pct"] == 10


def test_pcie_throughput_stands_in_where_there_are_no_byte_counters(make_rig: MakeRig) -> None:
    gpu = make_rig("l40sx4").snapshot().gpus[0]
    assert gpu.metrics["pcie_tx_bytes_per_s"] == 2048 * 1000
    assert "pcie_tx_bytes" not in gpu.counters
    assert "pcie_tx_bytes" in make_rig("h100x8").snapshot().gpus[0].counters


def test_one_snapshot_a_round(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8")
    first = rig.snapshot()
    rig.fake.set("gpu 0", temperature="99")
    assert rig.nvml.snapshot() is first
    assert rig.snapshot().gpus[0].metrics["temperature_celsius"] == 99


def test_a_snapshot_survives_msgpack_and_json(make_rig: MakeRig) -> None:
    for machine in ("h100x8", "a100-mig", "v100-old"):
        snapshot = make_rig(machine).snapshot()
        assert msgspec.json.decode(msgspec.json.encode(snapshot), type=NvmlSnapshot) == snapshot
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(snapshot), type=NvmlSnapshot) == snapshot


def test_a_recording_is_replayed_without_any_nvml(make_fake: MakeFake, tmp_path: Path) -> None:
    fake, clock, path = make_fake("l40sx4"), ManualClock(), str(tmp_path / "machine.tar.zst")
    tape = Tape.record(path, clock)
    nvml = Nvml(fake.library, tape, clock)
    recorded: list[NvmlSnapshot | str] = []
    for number in (1, 2, 3):
        if number == 3:
            fake.set("system", {"fail.nvmlDeviceGetCount_v2": "UNKNOWN"})
        clock.advance(100)
        tape.begin_round(number)
        nvml.begin_round(number)
        try:
            recorded.append(nvml.snapshot())
        except SourceUnavailable as error:
            recorded.append(error.reason)
    nvml.close()
    tape.close()
    assert isinstance(recorded[2], str)
    replayed: list[NvmlSnapshot | str] = []
    tape = Tape.replay(path)
    nvml = Nvml("/nonexistent/libnvidia-ml.so.1", tape)
    for number in (1, 2, 3):
        tape.begin_round(number)
        nvml.begin_round(number)
        try:
            replayed.append(nvml.snapshot())
        except SourceUnavailable as error:
            replayed.append(error.reason)
    assert replayed == recorded


def test_closing_twice_and_reading_again(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8")
    rig.snapshot()
    rig.nvml.close()
    rig.nvml.close()
    assert len(rig.snapshot().gpus) == 8


_ENTRIES = st.lists(
    st.tuples(st.integers(1, 4_194_304), st.integers(0, 1 << 36), st.integers(0, 7), st.integers(0, 7)), max_size=20
)


@given(_ENTRIES, st.sampled_from([16, 24, 32]), st.sampled_from([16, 24]))
def test_any_layout_is_decoded_as_it_was_written(
    entries: list[tuple[int, int, int, int]], size: int, usual: int
) -> None:
    """Whatever structure the driver wrote and whatever version it was asked for."""
    written = b"".join(struct.pack("=I4xQIIQ", *entry, 0)[:size] for entry in entries)
    raw = written + b"\xa5" * ((len(entries) * 2 + 5) * 32 - len(written))
    found, garbled = _decode(raw, len(entries), usual, 1 << 40)
    assert garbled == 0
    assert [tuple(entry)[: 2 if size == 16 else 4] for entry in found] == [
        entry[: 2 if size == 16 else 4] for entry in entries
    ]


def test_many_sessions_leave_no_thread_and_no_descriptor(make_rig: MakeRig) -> None:
    rig = make_rig("h100x8")
    rig.snapshot()
    rig.nvml.close()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(30):
        rig.snapshot()
        rig.nvml.close()
    assert threading.active_count() <= threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors
