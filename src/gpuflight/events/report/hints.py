"""Hints: what the numbers of a report suggest to look at.

The rules are those of GPU Flight's own reports (its C++ report has all of the profile rules, its Python report
``memory_efficiency`` and ``warp_efficiency``) and, for waits, those that its documentation describes; each carries its
threshold with where that is from. Nothing fires on what is not known.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from gpuflight.events.query.profile import ProfileLine
from gpuflight.events.query.waits import WaitLine
from gpuflight.events.report.model import Hint

_CPP = "GPU Flight C++ report (gpufl-client 59b14bf)"
_BOTH = "GPU Flight C++ and Python reports (gpufl-client 59b14bf)"
_DOCS = "GPU Flight documentation, synchronization insights"

LANES = 32
"""Threads of a warp."""


class Rule(NamedTuple):
    """``threshold``: a share, 0 to 1."""

    name: str
    severity: str
    threshold: float
    source: str


MEMORY_EFFICIENCY = Rule("memory_efficiency", "medium", 0.5, _BOTH)
LONG_SCOREBOARD = Rule("long_scoreboard", "medium", 0.2, _CPP)
MEMORY_STALLS = Rule("memory_stalls", "medium", 0.3, _CPP)
PIPE_STALLS = Rule("pipe_stalls", "low", 0.2, _CPP)
EXECUTION_STALLS = Rule("execution_stalls", "low", 0.3, _CPP)
WARP_EFFICIENCY = Rule("warp_efficiency", "medium", 0.9, _BOTH)
WAIT_MOST = Rule("wait_share", "high", 0.5, _DOCS)
WAIT_MUCH = Rule("wait_share", "medium", 0.1, _DOCS)
WAIT_IN_LOOP = Rule("wait_in_loop", "medium", 3, _DOCS)
RULES = (
    *(MEMORY_EFFICIENCY, LONG_SCOREBOARD, MEMORY_STALLS, PIPE_STALLS, EXECUTION_STALLS, WARP_EFFICIENCY),
    *(WAIT_MOST, WAIT_MUCH, WAIT_IN_LOOP),
)

_PREFIX = re.compile(r"^(?:smsp|sm)__pcsamp_(?:warps_issue_)?stalled_")
_NOT_ISSUED = "_not_issued"


def stall_name(metric: str) -> str:
    """``long_scoreboard`` of ``smsp__pcsamp_warps_issue_stalled_long_scoreboard`` or ``Long Scoreboard``."""
    return _PREFIX.sub("", metric).strip().lower().replace(" ", "_")


def stall_shares(lines: Iterable[ProfileLine]) -> dict[str, dict[str, float]]:
    """By function: the part that each stall has of the samples of stalled warps.

    ``…_not_issued`` counts samples again that the same name without it holds; it only counts where that one is not
    there. ``selected`` warps are not stalled.
    """
    samples: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for line in lines:
        samples[line.function or ""][stall_name(line.metric)] += line.value
    shares = {}
    for function, counts in samples.items():
        kept: dict[str, int] = defaultdict(int)
        for stall, value in counts.items():
            plain = stall.removesuffix(_NOT_ISSUED)
            if plain != "selected" and (plain == stall or plain not in counts):
                kept[plain] += value
        total = sum(kept.values())
        if total > 0:
            shares[function] = {stall: value / total for stall, value in kept.items()}
    return shares


def profile_hints(stalls: Iterable[ProfileLine], sass: Iterable[ProfileLine]) -> list[Hint]:
    """Hints of PC samples and SASS metrics, by function."""
    metrics: dict[str, dict[str, int]] = defaultdict(dict)
    for line in sass:
        metrics[line.function or ""][line.metric] = line.value
    shares = stall_shares(stalls)
    hints = []
    for function in sorted(metrics.keys() | shares.keys()):
        efficiency = _memory_efficiency(metrics.get(function, {}))
        if efficiency is not None and efficiency < MEMORY_EFFICIENCY.threshold:
            text = "of the global memory sectors moved were needed; look at the order in which threads access memory"
            hints.append(_hint(MEMORY_EFFICIENCY, function, efficiency, text))
        hints += _stall_hints(function, shares.get(function, {}), counted=efficiency is not None)
        warps = _warp_efficiency(metrics.get(function, {}))
        if warps is not None and warps < WARP_EFFICIENCY.threshold:
            text = "of the threads of a warp were active; look at divergent branches and idle lanes"
            hints.append(_hint(WARP_EFFICIENCY, function, warps, text))
    return hints


def _memory_efficiency(metrics: dict[str, int]) -> float | None:
    """Ideal sectors over sectors of global memory; the ideal is one metric, or that of loads and that of stores."""
    sectors = metrics.get("smsp__sass_sectors_mem_global")
    ideal = metrics.get("smsp__sass_sectors_mem_global_ideal")
    if ideal is None:
        parts = [metrics.get(f"smsp__sass_sectors_mem_global_op_{op}_ideal") for op in ("ld", "st")]
        known = [part for part in parts if part is not None]
        ideal = sum(known) if known else None
    return ideal / sectors if sectors and ideal is not None else None


def _warp_efficiency(metrics: dict[str, int]) -> float | None:
    threads, warps = (metrics.get(f"smsp__sass_{name}") for name in ("thread_inst_executed", "inst_executed"))
    return threads / warps / LANES if warps and threads is not None else None


def _stall_hints(function: str, shares: dict[str, float], *, counted: bool) -> list[Hint]:
    """``counted``: SASS metrics tell how well memory is used, so the stall that only suggests it is not asked."""

    def of(matches: Callable[[str], bool]) -> float:
        return sum(share for stall, share in shares.items() if matches(stall))

    hints = []
    scoreboard = of(lambda stall: stall == "long_scoreboard")
    if not counted and scoreboard > LONG_SCOREBOARD.threshold:
        text = "of stalled samples wait for global or local memory (long scoreboard)"
        hints.append(_hint(LONG_SCOREBOARD, function, scoreboard, text))
    for rule, word, text in (
        (MEMORY_STALLS, "mem", "of stalled samples wait on memory instructions"),
        (PIPE_STALLS, "pipe", "of stalled samples wait for a busy pipeline"),
        (EXECUTION_STALLS, "exec", "of stalled samples wait for the result of an earlier instruction"),
    ):
        share = of(lambda stall, word=word: word in stall)  # type: ignore[misc]
        if share > rule.threshold:
            hints.append(_hint(rule, function, share, text))
    return hints


def wait_hints(waits: Iterable[WaitLine], kernels_between: dict[str, tuple[int, float]]) -> list[Hint]:
    """Hints of waits at one place. ``kernels_between``: by place, how many waits and the median number of kernels
    launched between one and the next."""
    hints = []
    for wait in waits:
        if wait.place is None:
            continue
        for rule in (WAIT_MOST, WAIT_MUCH):
            if wait.share is not None and wait.share > rule.threshold:
                hints.append(_hint(rule, wait.place, wait.share, f"of the session's time is this wait ({wait.kind})"))
                break
    for place, (count, median) in kernels_between.items():
        if count >= 3 and median >= WAIT_IN_LOOP.threshold:
            text = f"kernels (median) between two waits at this place, {count} times: a wait in a loop"
            about = WAIT_IN_LOOP
            hints.append(
                Hint(
                    rule=about.name,
                    severity=about.severity,
                    about=place,
                    text=f"{median:g} {text}",
                    value=median,
                    threshold=about.threshold,
                    source=about.source,
                )
            )
    return hints


def _hint(rule: Rule, about: str, value: float, text: str) -> Hint:
    return Hint(
        rule=rule.name,
        severity=rule.severity,
        about=about or "(a function whose name never came)",
        text=f"{value:.1%} {text}",
        value=value,
        threshold=rule.threshold,
        source=rule.source,
    )
