"""``gpuflight doctor --from`` logs of programs with one fault each: it finds that, and nothing in a healthy one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.gpufl_files import GEN
from tests.unit.recorded_program import MS, US, Program, findings

from gpuflight.cli import main

TRACE = Path(__file__).parents[1] / "data" / "imports" / "torch.pt.trace.json"


def found(folder: Path, capsys: pytest.CaptureFixture[str], expected: int | None = None) -> dict[str, dict[str, Any]]:
    code = main(["doctor", "--from", str(folder), "--json"])
    told = findings(capsys.readouterr().out)
    if expected is not None:
        assert code == expected, told
    return told


def test_a_healthy_training_has_no_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Program().write(tmp_path)
    assert found(tmp_path, capsys, expected=0) == {}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "gpu_idle_gaps": ({"pause_ns": 900 * MS}, "3 pauses over 500 ms"),
    "host_bound_idle": ({"python_ns": 900 * US, "syncs": 0}, "because nothing had been launched yet"),
    "launch_bound": (
        {"steps": 25, "kernels": 5000, "kernel_ns": 2 * US, "python_ns": 0, "launch_ns": 9 * US},
        "below 10 µs",
    ),
    "launch_delay": ({"slow_every": 20}, "took over 50 µs"),
    "data_loader_starvation": ({"load_ns": 40 * MS}, "loads data for 40.0 ms per step"),
    "pageable_copies": ({"pageable": True, "copy_ns": 3 * MS}, "from or to pageable memory"),
    "small_copies": ({"copies": 60, "copy_bytes": 4096, "copy_ns": 3 * US}, "100 % of them below 64 KiB"),
    "blocking_copies": ({"blocking": True, "copies": 8, "copy_ns": 2 * MS, "load_ns": 8 * MS}, "100 % of its 40 steps"),
    "sync_heavy": ({"syncs": 50, "kernel_ns": 300 * US, "python_ns": 300 * US}, "waited 2040 times"),
    "memory_operations_heavy": ({"copy_ns": 20 * MS}, "20.0 ms per step on memory"),
    "gc_pause": ({"gc_ns": 6 * MS}, "10 times for 1 ms or more"),
    "step_outliers": ({"steps": 600, "odd_steps": 12, "kernels": 4}, "12 of 600 steps"),
    "slow_start": ({"start_up_ns": 1_500_000 * MS}, "25 minutes after it began"),
    "low_occupancy": ({"occupancy": 0.25}, "occupancy of 25 %, limited by registers"),
    "register_pressure": ({"occupancy": 0.3}, "uses 40 registers per thread"),
    "local_memory_spill": ({"local_bytes": 48}, "keeps 48 bytes per thread in local memory"),
    "tail_effect": ({"grid": 1000}, "is 1.26 waves"),
    "dominant_stall": ({"stalls": {"long_scoreboard": 900, "wait_not_issued": 200, "selected": 100}}, "75 % of 1,200"),
}


@pytest.mark.parametrize("rule", FAULTS)
def test_one_fault_is_found(rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault, said = FAULTS[rule]
    Program(**fault).write(tmp_path)
    told = found(tmp_path, capsys)
    assert said in told[rule]["message"]


def test_without_times_of_calls_the_host_is_not_blamed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Program(python_ns=900 * US, syncs=0, calls=False).write(tmp_path)
    told = found(tmp_path, capsys, expected=0)
    assert "host_bound_idle" not in told
    main(["doctor", "--from", str(tmp_path), "--all"])
    assert "the log does not say when the host called" in " ".join(capsys.readouterr().out.split())


def test_the_longest_gap_is_told_with_what_the_host_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Program(load_ns=700 * MS, steps=12).write(tmp_path)
    told = found(tmp_path, capsys, expected=1)
    gaps = told["gpu_idle_gaps"]
    assert "the host in load_batch" in gaps["message"]
    assert gaps["explained_by"] == told["host_bound_idle"]["id"]
    assert told["host_bound_idle"]["explained_by"] == told["data_loader_starvation"]["id"]


def test_copies_of_one_session_are_judged_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Program().write(tmp_path / "a")
    Program().write(tmp_path / "b")
    assert found(tmp_path, capsys, expected=0) == {}


@pytest.mark.parametrize("log", sorted(path.name for path in GEN.iterdir()))
def test_logs_of_every_version_are_judged_in_80_columns(log: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--from", str(GEN / log), "--all"]) in (0, 1)
    out = capsys.readouterr().out
    assert "could judge" in out
    assert [row for row in out.splitlines() if len(row) > 80] == []


def test_a_trace_of_another_profiler_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--from", str(TRACE)]) == 0
    assert "0.292 ms of work on GPUs" in " ".join(capsys.readouterr().out.split())


def test_a_folder_without_anything_is_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--from", str(tmp_path)]) == 3
    assert "no GPU session in this folder" in capsys.readouterr().err
