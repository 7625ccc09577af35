"""Rules of hints, at and around their thresholds."""

from __future__ import annotations

import pytest

from gpuflight.events.query.profile import ProfileLine
from gpuflight.events.query.waits import WaitLine
from gpuflight.events.report.hints import RULES, profile_hints, stall_name, stall_shares, wait_hints

PC = "smsp__pcsamp_warps_issue_stalled_"


def stalls(**samples: int) -> list[ProfileLine]:
    return [
        ProfileLine(kind="pc_sampling", function="f", metric=PC + name, value=value, samples_count=1)
        for name, value in samples.items()
    ]


def sass(**values: int) -> list[ProfileLine]:
    return [
        ProfileLine(kind="sass_metric", function="f", metric=f"smsp__sass_{name}", value=value, samples_count=1)
        for name, value in values.items()
    ]


def fired(*parts: list[ProfileLine]) -> dict[str, float]:
    lines = [line for part in parts for line in part]
    hints = profile_hints(
        [line for line in lines if line.kind == "pc_sampling"], [line for line in lines if line.kind == "sass_metric"]
    )
    return {hint.rule: hint.value for hint in hints}


@pytest.mark.parametrize(
    ("ideal", "sectors", "expected"),
    [
        ({"sectors_mem_global_ideal": 49}, 100, {"memory_efficiency": 0.49}),
        ({"sectors_mem_global_ideal": 50}, 100, {}),
        ({"sectors_mem_global_op_ld_ideal": 30, "sectors_mem_global_op_st_ideal": 10}, 100, {"memory_efficiency": 0.4}),
        ({"sectors_mem_global_op_ld_ideal": 30}, 100, {"memory_efficiency": 0.3}),
        ({}, 100, {}),
        ({"sectors_mem_global_ideal": 0}, 0, {}),
    ],
)
def test_memory_efficiency(ideal: dict[str, int], sectors: int, expected: dict[str, float]) -> None:
    assert fired(sass(sectors_mem_global=sectors, **ideal)) == expected


@pytest.mark.parametrize(("threads", "expected"), [(32 * 89, {"warp_efficiency": 0.89}), (32 * 90, {}), (32 * 100, {})])
def test_warp_efficiency(threads: int, expected: dict[str, float]) -> None:
    assert fired(sass(inst_executed=100, thread_inst_executed=threads)) == expected
    assert fired(sass(inst_executed=0, thread_inst_executed=5)) == {}


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ({"long_scoreboard": 21, "wait": 79}, {"long_scoreboard": 0.21}),
        ({"long_scoreboard": 20, "wait": 80}, {}),
        ({"mem_throttle": 31, "wait": 69}, {"memory_stalls": 0.31}),
        ({"mem_throttle": 30, "wait": 70}, {}),
        ({"math_pipe_throttle": 21, "wait": 79}, {"pipe_stalls": 0.21}),
        ({"math_pipe_throttle": 20, "wait": 80}, {}),
        ({"exec_dependency": 31, "wait": 69}, {"execution_stalls": 0.31}),
        ({"exec_dependency": 30, "wait": 70}, {}),
        ({"mem_a": 16, "mem_b": 16, "wait": 68}, {"memory_stalls": 0.32}),
    ],
)
def test_stalls(samples: dict[str, int], expected: dict[str, float]) -> None:
    assert fired(stalls(**samples)) == pytest.approx(expected)


def test_the_scoreboard_only_speaks_where_no_metric_does() -> None:
    samples = stalls(long_scoreboard=90, wait=10)
    assert fired(samples) == {"long_scoreboard": 0.9}
    assert fired(samples, sass(sectors_mem_global=100, sectors_mem_global_ideal=100)) == {}


def test_samples_are_not_counted_twice() -> None:
    """``…_not_issued`` is a part of the same stall, and a selected warp does not wait."""
    shares = stall_shares(stalls(wait=60, wait_not_issued=50, barrier_not_issued=40, selected=1000))
    assert shares == {"f": {"wait": 0.6, "barrier": 0.4}}


def test_names() -> None:
    assert stall_name(PC + "long_scoreboard_not_issued") == "long_scoreboard_not_issued"
    assert stall_name("Long Scoreboard") == "long_scoreboard"
    assert stall_name("stall_reason_7") == "stall_reason_7"


def wait(share: float | None, place: str | None = "main|step") -> WaitLine:
    return WaitLine(kind="stream", place=place, count=1, total_ns=1, mean_ns=1.0, max_ns=1, share=share)


@pytest.mark.parametrize(
    ("share", "severity"), [(0.51, ["high"]), (0.5, ["medium"]), (0.11, ["medium"]), (0.1, []), (None, [])]
)
def test_waits(share: float | None, severity: list[str]) -> None:
    assert [hint.severity for hint in wait_hints([wait(share)], {})] == severity
    assert wait_hints([wait(share, place=None)], {}) == []  # nothing to look at


@pytest.mark.parametrize(("count", "median", "hints"), [(3, 3.0, 1), (2, 3.0, 0), (3, 2.5, 0)])
def test_waits_in_a_loop(count: int, median: float, hints: int) -> None:
    assert len(wait_hints([], {"main|step": (count, median)})) == hints


def test_every_rule_says_where_its_threshold_is_from() -> None:
    assert all(rule.source and rule.threshold > 0 for rule in RULES)
