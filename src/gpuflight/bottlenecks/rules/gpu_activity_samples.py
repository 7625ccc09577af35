"""What instructions wait for, and how many threads take part in them: from samples of a profiler."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.recorded import need
from gpuflight.bottlenecks.window import Look
from gpuflight.graph import nodes

_STALLS: dict[str, tuple[str, str]] = {
    "long_scoreboard": ("data from global or local memory", "coalesce loads, keep data in shared memory, prefetch"),
    "short_scoreboard": ("data from shared memory or special units", "resolve bank conflicts, fewer shared accesses"),
    "lg_throttle": ("the queue of loads and stores", "fewer and wider loads (float4), less local memory"),
    "mio_throttle": ("the queue of memory instructions", "fewer shared-memory and special instructions"),
    "tex_throttle": ("the queue of texture instructions", "fewer texture reads, or spread them"),
    "drain": ("stores to memory at the end", "coalesce the last stores"),
    "imc_miss": ("constants from memory", "use constants with the same address in a warp"),
    "barrier": ("other warps at a barrier", "smaller blocks, less work between barriers, even work per warp"),
    "membar": ("a memory fence", "fewer fences, narrower scope"),
    "wait": ("a fixed latency", "more independent instructions (unroll)"),
    "math_pipe_throttle": ("an arithmetic unit that is full", "that is what a compute-bound kernel does"),
    "no_instruction": ("instructions to be fetched", "smaller loops, fewer branches"),
    "branch_resolving": ("a branch", "fewer branches, predication"),
    "dispatch_stall": ("the dispatcher", "fewer conflicting register accesses"),
    "sleeping": ("a sleep", "look for __nanosleep in spin loops"),
}
"""What a warp waits for at each reason (names of Nsight Compute), and what helps."""
_MEMORY = frozenset(("long_scoreboard", "lg_throttle", "mio_throttle", "tex_throttle", "drain", "imc_miss"))


class DominantStall(ElementRule):
    """The instructions of a program's kernels wait mostly for one thing."""

    catalogue_id = "G14"
    subject = nodes.Session
    severity = "info"
    needs = need(
        "stall_samples_count",
        "stall_top_pct",
        attributes=("stall_top",),
        given_by="sessions: logs with PC sampling",
    )
    thresholds = {
        "share": Threshold(value=40, clear_at=35, unit="% of the samples", source="GPUFlight backend"),
        "samples": Threshold(value=1000, unit="samples", source="ours", guess=True),
    }
    guard = "at least 1,000 samples; 40 % of fewer is chance"
    whole_session = True
    advice = "see which lines wait: gpuflight report <folder>"
    verify = "ncu --section WarpStateStats --section SourceCounters <program>"

    def judge(self, look: Look) -> Verdict:
        samples, top = look.metric("stall_samples_count"), look.element.metrics.get("stall_top_pct", 0.0)
        if samples < look.limit("samples"):
            raise Unknown(f"{samples:.0f} PC samples, {look.limit('samples'):.0f} are needed")
        if top < look.limit("share"):
            return CLEAR
        reason = str(look.attribute("stall_top"))
        waits_for, helps = _STALLS.get(reason, (f"“{reason}”", ""))
        return look.fired(
            f"{top:.0f} % of {samples:,.0f} samples of {look.label} wait for {waits_for} ({reason})",
            [look.saw("stall_top_pct", samples_count=int(samples)), look.saw("stall_top")],
            severity="warn" if reason in _MEMORY else "info",
            advice=f"{helps}; {self.advice}" if helps else self.advice,
        )


class ThreadInefficiency(ElementRule):
    """Many threads of a warp sit out its instructions: they took another branch, or the block is no multiple of 32."""

    catalogue_id = "G15"
    subject = nodes.Session
    needs = need(
        "thread_efficiency_pct",
        "instructions_count",
        given_by="sessions: logs with SASS metrics (inst_executed, thread_inst_executed)",
    )
    thresholds = {
        "efficiency_warn": Threshold(value=75, clear_at=80, unit="%", source="GPUFlight backend: 0.75", falling=True),
        "efficiency_crit": Threshold(value=50, clear_at=55, unit="%", source="GPUFlight backend: 0.5", falling=True),
    }
    guard = "at least 1,000 instructions were counted"
    whole_session = True
    advice = "sort or bin data so that neighbours take the same branch; blocks of a multiple of 32 threads"
    verify = "ncu --metrics smsp__thread_inst_executed_per_inst_executed.ratio <program>  # of 32"

    def judge(self, look: Look) -> Verdict:
        efficiency, count = look.metric("thread_efficiency_pct"), look.metric("instructions_count")
        if count < 1000:
            raise Unknown(f"{count:.0f} instructions were counted, 1000 are needed")
        if efficiency >= look.limit("efficiency_warn"):
            return CLEAR
        return look.fired(
            f"on average {efficiency * 0.32:.0f} of 32 threads take part in an instruction of {look.label}"
            f" ({efficiency:.0f} %)",
            [look.saw("thread_efficiency_pct", samples_count=int(count)), look.saw("instructions_count")],
            severity="critical" if efficiency < look.limit("efficiency_crit") else "warn",
        )
