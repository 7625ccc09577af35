"""What of a session is compressed: as much as the recorder's share of a core leaves time for."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from gpuflight.events.files import find_sessions
from gpuflight.events.format.writer import SessionWriter
from gpuflight.events.recorder import budget as budgets
from gpuflight.events.recorder.budget import CpuBudget

MIB = 1 << 20


def burn(cpu_ms: float) -> None:
    end = time.thread_time() + cpu_ms / 1e3
    while time.thread_time() < end:
        pass


def test_short_sessions_are_compressed_and_long_busy_ones_are_not() -> None:
    now = [0.0]
    budget = CpuBudget(0.02, lambda: now[0])
    assert budget.allows(1 * MIB, False), "before anything was spent there is credit"
    burn(20)  # what compressing it took, as far as the budget can see: 20 ns a byte
    assert not budget.allows(64 * MIB, False), "1.3 s of work in no time"
    now[0] = 100.0
    assert budget.allows(64 * MIB, False), "1.3 s of 2 s"
    assert (budget.windows, budget.plain) == (3, 1)
    assert budget.allows(1 << 40, True), "the disk would be full of plain windows"


def test_the_cost_of_every_thread_counts_and_stays_counted() -> None:
    budget = CpuBudget(0.02, lambda: 0.0)

    def work(*, tells: bool) -> None:
        budget.watch()
        burn(30)
        budget.watch()
        if tells:
            budget.left()

    for tells in (True, False):
        thread = threading.Thread(target=work, kwargs={"tells": tells})
        thread.start()
        thread.join()
    assert budget.spent_ns >= 30e6, "what a thread that ended without a word cost may be known no more"
    budget.watch()
    before = budget.spent_ns
    burn(5)
    assert budget.spent_ns >= before + 5e6


def test_without_a_limit_all_is_compressed() -> None:
    budget = CpuBudget(0, lambda: 0.0)
    assert all(budget.allows(1 << 40, False) for _ in range(3)) and not budget.plain


def test_a_session_that_fills_its_space_is_compressed_whatever_it_costs(tmp_path: Path) -> None:
    asked: list[tuple[int, bool]] = []

    def compress(size: int, needed: bool) -> bool:
        asked.append((size, needed))
        return needed

    folder = tmp_path / "s"
    with SessionWriter(str(tmp_path), "s", rotate_bytes=2 * MIB, max_spool_bytes=30 * MIB, compress=compress) as writer:
        for number in range(12):
            for begin in range(10):
                writer.event("kernel_detail", {"corr_id": number * 10 + begin, "stack_trace": "x" * 200_000})
            while len(list(folder.glob("device.*.log*"))) < number:  # one window after the other
                time.sleep(0.01)
    assert not writer.stopped
    assert len(asked) == 12 and all(size > 1.8 * MIB for size, _ in asked)
    assert not any(needed for _, needed in asked[:3]) and any(needed for _, needed in asked[3:10])
    assert len(list(folder.glob("device.*.log"))) == sum(not needed for _, needed in asked)
    assert len(list(folder.glob("device.*.log.gz"))) == sum(needed for _, needed in asked)


def test_windows_beyond_the_budget_are_plain_readable_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numpy")
    pytest.importorskip("cupti")
    from tests.fakes import cupti_driver as cupti
    from tests.unit.recorder_rig import Read, recording, until

    monkeypatch.setattr(budgets, "_CREDIT_NS", 0)
    now = time.time_ns()
    with recording(tmp_path, cpu_budget_pct=1e-9, rotate_after_s=0.1) as (recorder, fake):
        fake.emit(*[cupti.kernel(f"k{i % 40}", now + i, now + i + 5, correlation_id=i) for i in range(5_000)])
        fake.deliver()
        recorder.flush()
        until(lambda: recorder.budget.plain)
    read = Read(tmp_path)
    assert not read.losses
    assert sorted(row["corr_id"] for row in read.rows("kernel")) == list(range(5_000))
    (folder,) = find_sessions(str(tmp_path))
    assert all(window.name.endswith(".log") for found in folder.windows.values() for window in found)
    told = read.capability("window_compression")
    assert told["status"] == "partial" and "were left plain" in told["message"] and "cpu_budget_pct" in told["message"]
