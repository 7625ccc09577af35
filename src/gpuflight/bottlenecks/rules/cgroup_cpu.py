"""CPU limits of containers, pods and units."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, Screen, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.window import Look, told
from gpuflight.graph import nodes


class CpuThrottled(ElementRule):
    """A container, pod or unit is throttled by its CPU limit.

    The scheduler stops all its threads until the next period begins (100 ms as a rule). A thread that launches kernels
    then launches none, however idle its GPU is.
    """

    catalogue_id = "S01"
    subject = (nodes.Container, nodes.Pod, nodes.Unit)
    needs = (
        Need(
            kind=nodes.Container,
            metrics=("throttled_pct", "enforcement_periods_count", "cpu_quota_cores"),
            given_by="containers",
        ),
    )
    screens = (Screen("throttled_pct", ">", "throttled_warn"),)
    thresholds = {
        "throttled_warn": Threshold(value=5.0, clear_at=3.0, unit="%", source="a fifth of critical", guess=True),
        "throttled_crit": Threshold(
            value=25.0, clear_at=20.0, unit="%", source="kubernetes-mixin, alert CPUThrottlingHigh (from memory)"
        ),
        "periods": Threshold(value=10, unit="periods", source="netdata#12595: fewer say little", guess=True),
    }
    guard = "enforcement periods passed in the round: none do while it wants no CPU. Fewer than 10 say nothing"
    explains = ("run_queue_delay", "gpu_idle_gaps")
    advice = "raise or remove the CPU limit, or give it whole CPUs (cpuset)"
    verify = "grep -E 'nr_periods|nr_throttled' /sys/fs/cgroup/<path>/cpu.stat"

    def judge(self, look: Look) -> Verdict:
        periods = look.element.metrics.get("enforcement_periods_count")
        if periods == 0:
            return CLEAR
        throttled = look.metric("throttled_pct")
        if throttled <= look.limit("throttled_warn"):
            return CLEAR
        if periods is not None and periods < look.limit("periods"):
            raise Unknown(f"throttled_pct of {look.element.kind}: {periods:.0f} periods in the round say too little")
        seen = [look.saw("throttled_pct")]
        limit = ""
        if look.has("cpu_quota_cores"):
            seen.append(look.saw("cpu_quota_cores"))
            limit = f", limit {told('cpu_quota_cores', look.metric('cpu_quota_cores'))}"
        return look.fired(
            f"{look.label} was stopped by its CPU limit in {throttled:.0f} % of the periods{limit}",
            seen,
            severity="critical" if throttled > look.limit("throttled_crit") else "warn",
        )
