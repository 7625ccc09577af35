"""What the recorder costs: per record in CUPTI's callback and behind it, and per launch for scopes and stacks.

Made-up records of the real classes of cupti-python, in buffers of 30,000 (8 MiB) as CUPTI delivers them; there is no
GPU and no CUPTI in this. Sides: our way (bytes of all records of a class joined, read as columns), attribute by
attribute (what a class without a binary layout gets, and how the samples of cupti-python read records), and the
floor: joining the bytes, without which records are gone when the callback returns.

Peer: ``json.dumps`` of a dict per record, what a first version would do. CPU is of this process, all threads.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from tests.fakes.cupti_driver import FakeCupti, kernel

from gpuflight.events.recorder.binding import Binding
from gpuflight.events.recorder.budget import CpuBudget
from gpuflight.events.recorder.intake import ATTRIBUTES, Intake
from gpuflight.events.recorder.layouts import Layouts
from gpuflight.events.recorder.options import Options
from gpuflight.events.recorder.recorder import Recorder
from gpuflight.events.recorder.stacks import Stacks, stack_text

BUFFER = 30_000
BUFFERS = 20
NAMES = 60
PER_SECOND = 100_000
TOTAL_NS = 1000
MINUTES = 2
OUTSIDE_SHARE = 0.02


def buffer_of(count: int, start: int) -> list[Any]:
    """Kernels of a training step: few names, few shapes, times as they come."""
    random = np.random.default_rng(7)
    names = random.integers(0, NAMES, count).tolist()
    gaps = np.cumsum(random.integers(4_000, 16_000, count)).tolist()
    lengths = random.integers(1_500, 90_000, count).tolist()
    return [
        kernel(
            f"void at::native::kernel_{name}<float, 4>(int, float*)",
            start + gap,
            start + gap + length,
            correlation_id=number,
            grid_x=64 << name % 5,
            registers_per_thread=32 + name % 4 * 32,
            stream_id=7 + name % 2,
        )
        for number, (name, gap, length) in enumerate(zip(names, gaps, lengths, strict=True), 1)
    ]


def cpu_ns(work: Callable[[], Any], times: int) -> float:
    """CPU of the process per call, all threads."""
    before = time.process_time_ns()
    for _ in range(times):
        work()
    return (time.process_time_ns() - before) / times


def callback_cost(records: list[Any], layouts: Layouts) -> float:
    """ns per record in the callback; what it hands on is taken out at once."""
    intake = Intake(layouts, 1 << 34, 8 << 20, lambda: None)

    def work() -> None:
        intake.completed(records)
        while intake.take() is not None:
            pass

    work()
    return cpu_ns(work, 10) / len(records)


class NoLayouts(Layouts):
    """Of a class that nobody knows."""

    def of(self, record: Any) -> None:
        return None


def behind_cost(records: list[Any], folder: str, *, compress: bool) -> tuple[float, float, float]:
    """(ns per record behind the callback, of that for compressing at the end, bytes per record on disk)."""
    fake = FakeCupti()
    fake.enabled.add(10)
    options = Options(
        app="bench", folder=folder, wait_for_cuda=False, metrics_interval_s=0, compress=compress, cpu_budget_pct=0
    )
    recorder = Recorder(options, lambda: Binding(fake))
    assert recorder.start(), recorder.problem
    intake = recorder.capture.intake
    assert intake is not None
    begin, ours = time.process_time_ns(), time.thread_time_ns()
    for _ in range(BUFFERS):
        intake.completed(records)
        while intake.waiting_bytes:
            time.sleep(0.002)
    ours = time.thread_time_ns() - ours  # the callbacks, and waiting for the recorder's thread
    recorder.flush()
    written = time.process_time_ns()
    recorder.close()
    end = time.process_time_ns()
    count = BUFFERS * len(records)
    size = sum(entry.stat().st_size for entry in os.scandir(recorder.path) if entry.name.startswith("device."))
    return (written - begin - ours) / count, (end - written) / count, size / count


def within_budget(records: list[Any], folder: str, per_second: int) -> tuple[float, int, int, float]:
    """(share of a core outside the callback, windows that were compressed, all windows, bytes per record on disk) of
    two minutes of that many kernels per second, as a recorder does it by itself. Time is counted in records, so that
    they need not pass."""
    fake = FakeCupti()
    fake.enabled.add(10)
    options = Options(app="bench", folder=folder, wait_for_cuda=False, metrics_interval_s=0)
    recorder = Recorder(options, lambda: Binding(fake))
    delivered = 0
    recorder.budget = CpuBudget(options.cpu_budget_pct / 100, lambda: delivered / per_second)
    assert recorder.start(), recorder.problem
    intake = recorder.capture.intake
    assert intake is not None
    begin, ours = time.process_time_ns(), time.thread_time_ns()
    while delivered < MINUTES * 60 * per_second:
        intake.completed(records)
        delivered += len(records)
        while intake.waiting_bytes:
            time.sleep(0.002)
    ours = time.thread_time_ns() - ours
    recorder.close()
    spent = time.process_time_ns() - begin - ours
    size = sum(entry.stat().st_size for entry in os.scandir(recorder.path) if entry.name.startswith("device."))
    windows, plain = recorder.budget.windows, recorder.budget.plain
    return spent / 1e9 / (delivered / per_second), windows - plain, windows, size / delivered


def idle_share(folder: str, seconds: float) -> float:
    """Share of a core of a recorder that has nothing to do."""
    fake = FakeCupti()
    recorder = Recorder(Options(app="idle", folder=folder, wait_for_cuda=False), lambda: Binding(fake))
    assert recorder.start()
    time.sleep(0.5)
    before = time.process_time_ns()
    time.sleep(seconds)
    share = (time.process_time_ns() - before) / seconds / 1e9
    recorder.close()
    return share


def main() -> None:
    place = tempfile.mkdtemp(prefix="gpuflight-bench-")
    try:
        now = time.time_ns()
        records = buffer_of(BUFFER, now)
        layouts = Layouts(FakeCupti())
        print(f"{BUFFERS} buffers of {BUFFER:,} kernel records, {NAMES} names; CPU ns per record\n")
        floor = cpu_ns(lambda: b"".join(records), 10) / BUFFER
        ours = callback_cost(records, layouts)
        slow = callback_cost(records, NoLayouts(FakeCupti()))
        used = [name for name in ATTRIBUTES if hasattr(records[0], name)]

        def peer() -> None:
            for record in records:
                json.dumps({"name": record.name, **{name: getattr(record, name) for name in used[:16]}})

        naive = cpu_ns(peer, 1) / BUFFER
        print("in the callback")
        print(f"  ours, as bytes                      {ours:8.0f}    ({ours / floor:.1f} x the floor)")
        print(f"  attribute by attribute ({len(used)})         {slow:8.0f}    ({slow / ours:.1f} x ours)")
        print(f"  a dict and JSON per record (peer)   {naive:8.0f}    ({naive / ours:.1f} x ours)")
        print(f"  floor: copying the bytes            {floor:8.0f}\n")
        raw, _, raw_bytes = behind_cost(records, f"{place}/raw", compress=False)
        behind, compressing, packed_bytes = behind_cost(records, f"{place}/packed", compress=True)
        print("behind the callback (columns, names, JSON lines, files on the disk)")
        print(f"  written                             {min(raw, behind):8.0f}    {raw_bytes:.1f} bytes per record")
        print(f"  compressed when a window is full    {compressing:8.0f}    {packed_bytes:.1f} bytes per record\n")
        behind = min(raw, behind)
        total = ours + behind + compressing
        told = "kept" if total <= TOTAL_NS else "MISSED"
        print(f"in all: {total:.0f} ns per record; at most {TOTAL_NS}: {told}")
        share, whole = (cost * PER_SECOND / 1e9 for cost in (behind, behind + compressing))
        print(f"outside the callback at {PER_SECOND:,} kernels/s: {share:.2%} of a core to write, {whole:.2%} with all")
        print("of it compressed; what a recorder does by itself, whose budget is 2 %:")
        for per_second in (PER_SECOND // 10, PER_SECOND // 2, PER_SECOND):
            kept, packed, windows, size = within_budget(records, f"{place}/budget{per_second}", per_second)
            told = "kept" if kept <= OUTSIDE_SHARE else "MISSED"
            print(
                f"  {per_second:>7,} kernels/s for {MINUTES} min: {kept:.2%} of a core, {packed} of {windows} windows"
                f" compressed, {size:.1f} bytes per record; at most {OUTSIDE_SHARE:.0%}: {told}"
            )
        print(f"idle, with readings of the host every second: {idle_share(f'{place}/idle', 3):.3%} of a core\n")
        scopes(place)
    finally:
        shutil.rmtree(place)


def scopes(place: str) -> None:
    """Per scope, and per launch with a stack."""
    from gpuflight.events.recorder.scopes import scope

    count = 20_000

    def body() -> None:
        for _ in range(count):
            with scope("step"):
                pass

    off = cpu_ns(body, 3) / count
    fake = FakeCupti()
    recorder = Recorder(
        Options(app="scopes", folder=f"{place}/scopes", wait_for_cuda=False, metrics_interval_s=0),
        lambda: Binding(fake),
    )
    recorder.start()
    ranges = recorder.ranges

    def noted() -> None:
        for _ in range(count):
            ranges.leave(ranges.enter("step"))

    before = time.thread_time_ns()
    noted()
    on = (time.thread_time_ns() - before) / count
    recorder.close()
    stacks = Stacks(1)
    frame = sys._getframe()
    walked = cpu_ns(lambda: [stack_text(frame) for _ in range(1000)], 3) / 1000

    class Call:
        callback_site, correlation_id = 0, 1

    stacks.every = 1_000_000
    call = Call()
    passed = cpu_ns(lambda: [stacks._launch(None, 6, 211, call) for _ in range(10_000)], 3) / 10_000
    print(f"a scope: {on:.0f} ns while recording (in the program's thread), {off:.0f} ns while not")
    print(f"with --stacks N: {passed:.0f} ns of ours at every launch, {walked:.0f} ns at every Nth")


if __name__ == "__main__":
    main()
