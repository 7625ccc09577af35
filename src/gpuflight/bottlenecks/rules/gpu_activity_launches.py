"""How kernels get to a GPU: too many small ones, and calls that take long."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.recorded import RELATIONS, Recorded, need, sums
from gpuflight.bottlenecks.window import Look
from gpuflight.graph import nodes

_CALL_US = 5.0
"""What a launch costs the host, about."""


class LaunchBound(ElementRule):
    """A program launches so many short kernels that the launching itself takes a good part of a core.

    Half of its kernels take less than 10 µs, and a launch costs the host about 5 µs: the GPU is through before the next
    kernel is there.
    """

    catalogue_id = "G03"
    subject = nodes.Session
    needs = need("short_launches_count", "launches_count", "graph_kernels_count", "gpu_timeline_ms")
    thresholds = {
        "short": Threshold(
            value=50, clear_at=45, unit="% of launches below 10 µs", source="TraceLens, HTA: 10 µs; the median"
        ),
        "core": Threshold(
            value=50, clear_at=40, unit="% of a core", source="5 µs per launch, pegainfer PR#163", guess=True
        ),
    }
    guard = "at least 1,000 launches, most of them not by graphs"
    whole_session = True
    time_matters = False
    histories = sums("short_launches_count", "launches_count", "graph_kernels_count", "gpu_active_ms")
    relations = RELATIONS
    explains = ("host_bound_idle", "gpu_idle_gaps")
    cost_formula = "unknown: at most the share of the time in which the GPU is idle, whatever for"
    advice = "CUDA graphs, torch.compile, fused kernels and optimisers (fused=True, foreach), larger batches"
    verify = "gpuflight doctor --from <folder>  # short_launches_count against launches_count"

    def judge(self, look: Look) -> Verdict:
        seen = Recorded(look)
        told_ms = seen.wall_ms()
        launches, by_graph = seen.sum("launches_count"), seen.sum("graph_kernels_count")
        if not told_ms or launches < 1000 or by_graph > 0.5 * launches:
            return CLEAR
        short = 100 * seen.sum("short_launches_count") / launches
        per_s = (launches - by_graph) / told_ms * 1e3
        core = 100 * per_s * _CALL_US / 1e6
        if short <= look.limit("short") or core <= look.limit("core"):
            return CLEAR
        idle = seen.idle_share()
        return look.fired(
            f"{look.label} launches {per_s:,.0f} kernels/s {seen.during()}, {short:.0f} % of them below 10 µs: about"
            f" {core:.0f} % of a core goes into launching",
            [seen.saw("launches_count"), seen.saw("short_launches_count"), seen.saw("gpu_timeline_ms")],
            entities=seen.around(),
            cost="" if idle is None else f"at most {100 * idle:.0f} % of the GPU's time",
        )


class LaunchDelay(ElementRule):
    """Launches take long although the GPU is free: the call is slow, or the kernel starts long after it.

    A kernel that waits behind earlier work is normal, so only launches onto an idle GPU are asked for their delay.
    """

    catalogue_id = "G04"
    subject = nodes.Session
    needs = need(
        "idle_launches_count",
        "delayed_launches_count",
        "launch_calls_count",
        "slow_launch_calls_count",
        given_by="sessions, cupti: logs with the times of calls",
    )
    thresholds = {
        "delayed": Threshold(
            value=1, clear_at=0.5, unit="% of launches onto an idle GPU", source="HTA: 100 µs", guess=True
        ),
        "slow": Threshold(value=1, clear_at=0.5, unit="% of launch calls", source="HTA: 50 µs", guess=True),
    }
    guard = "at least 1,000 launch calls; 100 launches onto an idle GPU"
    whole_session = True
    time_matters = False
    histories = sums(
        "idle_launches_count", "delayed_launches_count", "launch_calls_count", "slow_launch_calls_count",
        "slow_launch_calls_ms",
    )  # fmt: skip
    relations = RELATIONS
    explains = ("host_bound_idle",)
    cost_formula = "time of the slow calls over the time of the session"
    advice = "keep the launching thread on a core of its own (S02), look for locks between threads that launch"
    verify = "gpuflight doctor --from <folder>; perf sched timehist -p <pid>"

    def judge(self, look: Look) -> Verdict:
        seen = Recorded(look)
        told_ms = seen.wall_ms()
        calls, slow = seen.sum("launch_calls_count"), seen.sum("slow_launch_calls_count")
        if not told_ms:
            return CLEAR
        if calls < 1000:
            if seen.live:
                return CLEAR
            raise Unknown(f"{calls:.0f} launch calls have their times in the log, 1000 are needed")
        onto_idle, delayed = seen.known("idle_launches_count"), seen.known("delayed_launches_count")
        slow_share = 100 * slow / calls
        late_share = 100 * delayed / onto_idle if onto_idle >= 100 else 0.0
        if slow_share <= look.limit("slow") and late_share <= look.limit("delayed"):
            return CLEAR
        slow_ms = seen.known("slow_launch_calls_ms")
        return look.fired(
            f"of {calls:,.0f} launch calls of {look.label} {seen.during()} {slow_share:.1f} % took over 50 µs; of"
            f" {onto_idle:,.0f} launches onto an idle GPU {late_share:.1f} % began over 100 µs later",
            [
                seen.saw("launch_calls_count"),
                seen.saw("slow_launch_calls_count"),
                seen.saw("idle_launches_count", onto_idle),
                seen.saw("delayed_launches_count", delayed),
            ],
            entities=seen.around(),
            cost_gpu_s=round(min(slow_ms / told_ms, 1.0), 4) if slow else None,
            cost=f"{slow_ms / 1e3:.2f} s in slow calls" if slow else "",
        )
