"""Rules over sessions while they run: collector, store and engine, round by round, as a program's log grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.gpufl_files import START_NS, read
from tests.unit.recorded_program import MS, US, Program
from tests.unit.test_sessions import Rig, session

from gpuflight.bottlenecks.base import Rule
from gpuflight.bottlenecks.engine import Engine
from gpuflight.events.activity.session import Activity
from gpuflight.events.batch import Batch
from gpuflight.graph.store import LiveStore
from gpuflight.registry import plugins
from gpuflight.rounds import Environment, Finding, Round

ROUND_S = 5.0
SECOND = 10**9


class Live:
    """A program's log, told a round's worth at a time to the collector of sessions, and judged by every rule."""

    def __init__(self, folder: Path, *parts: Program) -> None:
        """``parts``: what the program is like, one after the other."""
        self.activity = Activity("s")
        self.batches: list[Batch] = []
        after_ns = 0
        for number, part in enumerate(parts):
            batches, _ = read(part.write(folder / str(number)))
            moved = [_moved(batch, after_ns, number << 32) for batch in batches if batch.table != "session_end"]
            self.batches += moved
            after_ns += max(_latest(batch) for batch in batches) - START_NS
        self.until_ns = START_NS + parts[0].start_up_ns
        self.rig = Rig(session())
        self.store = LiveStore()
        self.engine = Engine([cls() for cls in plugins(Rule).values()])
        self.number = 0

    def round(self, seconds: float = ROUND_S) -> list[Finding]:
        """Findings about the session after another round in which the log grew by ``seconds``."""
        self.until_ns += int(seconds * SECOND)
        waiting = []
        for batch in self.batches:
            ready = _time(batch) <= self.until_ns
            if ready.any() if hasattr(ready, "any") else ready:
                self.activity.add(_chosen(batch, ready))
            if not (ready.all() if hasattr(ready, "all") else ready):
                waiting.append(_chosen(batch, ~ready))
        self.batches = waiting
        told = self.activity.summary(most_kernels=20, most_scopes=20, most_streams=20)
        told = replace(told, pid=None, hostname=session().hostname, writer="alive")
        outcome = self.rig.round(told, seconds=ROUND_S)
        self.number += 1
        advance = self.store.advance(self.number, [list(outcome.graph.nodes.values())],
                                     [list(outcome.graph.edges.values())])  # fmt: skip
        done = Round(
            number=self.number, time_ns=self.number * 5 * SECOND, duration_s=0.1, graph=advance.graph,
            diff=advance.diff, coverage=[], env=Environment(), monotonic_s=self.number * ROUND_S,
        )  # fmt: skip
        return self.engine.judge(done).findings


def _time(batch: Batch) -> Any:
    """When each row was, or True for what is told at once."""
    for name in ("start_ns", "time_ns"):
        if name in batch.columns and batch.table != "session_start":
            return batch.columns[name]
    return 0


def _latest(batch: Batch) -> int:
    times = _time(batch)
    return int(times.max()) if hasattr(times, "max") else 0


def _chosen(batch: Batch, rows: Any) -> Batch:
    if not hasattr(rows, "any"):
        return batch
    columns = {
        name: column[rows] if hasattr(column, "dtype") else [v for v, keep in zip(column, rows, strict=True) if keep]
        for name, column in batch.columns.items()
    }
    return replace(batch, columns=columns, count=int(rows.sum()))


def _moved(batch: Batch, by_ns: int, number: int) -> Batch:
    """The same later, with other numbers of launches and scopes."""
    columns = dict(batch.columns)
    for name in ("start_ns", "time_ns", "api_start_ns", "api_exit_ns", "original_start_ns"):
        if name in columns and hasattr(columns[name], "dtype"):
            columns[name] = columns[name] + by_ns
    for name in ("corr_id", "scope_instance_id"):
        if name in columns:
            columns[name] = columns[name] + number
    return replace(batch, columns=columns)


def _long(**fault: Any) -> Program:
    """A minute or two of it, with few records."""
    return Program(**{"steps": 700, "kernels": 4, "kernel_ns": 40 * MS, "copy_ns": 2 * MS, **fault})


def test_a_healthy_program_that_runs_has_no_finding(tmp_path: Path) -> None:
    live = Live(tmp_path, _long())
    assert [finding.message for _ in range(20) for finding in live.round()] == []


def test_a_program_that_holds_its_log_back_and_one_that_stops_have_none(tmp_path: Path) -> None:
    live = Live(tmp_path, _long(steps=300))
    found = [finding for n in range(30) for finding in live.round(10.0 if n % 2 else 0.0)]
    assert [finding.message for finding in found] == []


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ("data_loader_starvation", {"load_ns": 200 * MS}),
        ("gpu_idle_gaps", {"load_ns": 200 * MS}),
        ("host_bound_idle", {"python_ns": 50 * MS, "launch_ns": 40 * US}),
        ("memory_operations_heavy", {"copy_ns": 60 * MS}),
    ],
)
def test_a_fault_that_begins_is_found_and_ends(rule: str, fault: dict[str, Any], tmp_path: Path) -> None:
    live = Live(tmp_path, _long(steps=250), _long(steps=160, **fault), _long())
    told = [rule in {finding.rule for finding in live.round()} for _ in range(44)]
    first, last = told.index(True), len(told) - 1 - told[::-1].index(True)
    faulty = range(int(250 * 0.162 / ROUND_S), int((250 * 0.162 + 160 * 0.37) / ROUND_S) + 1)
    assert faulty.start <= first <= faulty.start + 6
    assert last <= faulty.stop + 8
    assert not told[-1]
