"""GPUs that wait in the middle of work, and for whom."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Threshold, Verdict
from gpuflight.bottlenecks.recorded import RELATIONS, Recorded, need, sums
from gpuflight.bottlenecks.window import Look
from gpuflight.graph import nodes

_GAPS = ("gpu_active_ms", "gpu_gaps_long_count", "gpu_gaps_long_ms")


def _percent(value: float) -> str:
    """Whole percents, but of the little that is left."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


class GpuIdleGaps(ElementRule):
    """A program's GPUs do nothing for much of the time between its first and its last work on them.

    Kernels, copies and fills of all streams together. Either they are idle for half of the time, or long pauses
    (over 500 ms) make up a good part of it. What the host did meanwhile, other findings may say.
    """

    catalogue_id = "G01"
    subject = nodes.Session
    needs = need("gpu_timeline_ms", *_GAPS)
    thresholds = {
        "busy": Threshold(
            value=50, clear_at=60, unit="%", source="PyTorch profiler, tb_plugin: below 50 %", falling=True
        ),
        "pauses": Threshold(
            value=5, clear_at=3, unit="% of the time, in gaps over 500 ms", source="nsys gpu_gaps: 500 ms", guess=True
        ),
    }
    guard = "work was done on a GPU: at least 5 s in the last 30 s, or 1 s in a session that is over"
    whole_session = True
    time_matters = False
    histories = sums(*_GAPS)
    relations = RELATIONS
    cost_formula = "share of the time in which nothing ran, times the GPUs that it works on"
    advice = "find what the host did in the gaps: loading data, waiting, checkpoints; see the longest ones in the trace"
    verify = "gpuflight export <folder> --as trace, then look at the gaps in ui.perfetto.dev"

    def judge(self, look: Look) -> Verdict:
        seen = Recorded(look)
        told_ms = seen.timeline_ms()
        if not told_ms:
            return CLEAR
        active_ms, long_ms = seen.sum("gpu_active_ms"), seen.sum("gpu_gaps_long_ms")
        busy, pauses = 100 * active_ms / told_ms, 100 * long_ms / told_ms
        if busy >= look.limit("busy") and pauses <= look.limit("pauses"):
            return CLEAR
        long = seen.sum("gpu_gaps_long_count")
        message = f"the GPU of {look.label} is busy {_percent(busy)} % of {told_ms / 1e3:.1f} s {seen.during()}"
        if long:
            message += f"; {long:.0f} pauses over 500 ms make up {long_ms / 1e3:.1f} s"
        if longest := look.element.attributes.get("longest_gap"):
            message += f"; the longest: {longest}"
        return look.fired(
            message,
            [
                seen.saw("gpu_timeline_ms"),
                seen.saw("gpu_active_ms"),
                *([seen.saw("gpu_gaps_long_ms", samples_count=int(long))] if long else []),
            ],
            entities=seen.around(),
            cost_gpu_s=round((1 - busy / 100) * seen.gpus, 3),
            cost=f"{100 - busy:.0f} % of the GPU's time",
        )


class HostBoundIdle(ElementRule):
    """A program's GPUs are idle because nothing was launched yet: the host is too slow to keep them busy.

    A gap counts as the host's if the call that ended it began only after the work before had ended (as in HTA's
    breakdown_analysis): then there was nothing that could have run.
    """

    catalogue_id = "G02"
    subject = nodes.Session
    needs = need(
        "host_wait_ms",
        "gpu_gaps_known_ms",
        "gpu_timeline_ms",
        given_by="sessions, cupti: logs with the times of calls (our recorder with api, Nsight Systems, PyTorch)",
    )
    thresholds = {
        "share": Threshold(
            value=50, clear_at=40, unit="% of the idle time", source="HTA breakdown_analysis: host_wait", guess=True
        ),
        "idle": Threshold(value=10, clear_at=7, unit="% of the time", source="less costs nobody much", guess=True),
    }
    guard = "the GPU is idle for more than a tenth of the time"
    whole_session = True
    time_matters = False
    histories = sums("host_wait_ms", "gpu_gaps_known_ms")
    relations = RELATIONS
    explains = ("gpu_idle_gaps",)
    cost_formula = "share of the time in which the GPU waits for the host, times the GPUs that it works on"
    advice = "CUDA graphs or torch.compile, fewer synchronisations (.item(), print), less Python between launches"
    verify = "gpuflight doctor --from <folder>  # host_wait_ms against gpu_timeline_ms"

    def judge(self, look: Look) -> Verdict:
        seen = Recorded(look)
        told_ms = seen.timeline_ms()
        if not told_ms:
            return CLEAR
        waits_ms, known_ms = seen.sum("host_wait_ms"), seen.sum("gpu_gaps_known_ms")
        idle, share = 100 * known_ms / told_ms, 100 * waits_ms / known_ms if known_ms else 0.0
        if idle <= look.limit("idle") or share <= look.limit("share"):
            return CLEAR
        lost = waits_ms / told_ms
        return look.fired(
            f"the GPU of {look.label} is idle {idle:.0f} % of the time {seen.during()}, and {share:.0f} % of that"
            f" ({waits_ms / 1e3:.1f} s) because nothing had been launched yet",
            [seen.saw("host_wait_ms"), seen.saw("gpu_gaps_known_ms"), seen.saw("gpu_timeline_ms")],
            entities=seen.around(),
            cost_gpu_s=round(lost * seen.gpus, 3),
            cost=f"{100 * lost:.0f} % of the GPU's time",
        )


class SyncHeavy(ElementRule):
    """A program stops again and again to wait for its GPU, which then runs empty until the next launch.

    A program that waits for a GPU that is busy all the time loses nothing, so that is no finding.
    """

    catalogue_id = "G10"
    subject = nodes.Session
    needs = need("host_sync_wait_ms", "host_syncs_count", "launches_count", "gpu_active_ms", "gpu_timeline_ms")
    thresholds = {
        "wall": Threshold(value=20, clear_at=15, unit="% of the time", source="nsys cuda_api_sync", guess=True),
        "per_launch": Threshold(
            value=0.5, clear_at=0.4, unit="waits per launch", source="msprof synchronize.yaml: 0.5"
        ),
        "idle": Threshold(
            value=10, clear_at=7, unit="% of the time", source="a busy GPU loses nothing by it", guess=True
        ),
    }
    guard = "the GPU is idle for more than a tenth of the time; at least 20 waits"
    whole_session = True
    time_matters = False
    histories = sums("host_sync_wait_ms", "host_syncs_count", "launches_count", "gpu_active_ms")
    relations = RELATIONS
    explains = ("host_bound_idle", "gpu_idle_gaps")
    cost_formula = "unknown: at most the share of the time in which the GPU is idle, whatever for"
    advice = "take .item(), .cpu(), print(tensor), loss logging and cuda.synchronize() out of the loop, or do it rarely"
    verify = "torch.cuda.set_sync_debug_mode('warn')  # in the program: names the lines that wait"

    def judge(self, look: Look) -> Verdict:
        seen = Recorded(look)
        told_ms = seen.timeline_ms()
        if not told_ms:
            return CLEAR
        waits, waited_ms = seen.sum("host_syncs_count"), seen.sum("host_sync_wait_ms")
        launches, idle = seen.sum("launches_count"), 100 * (seen.idle_share() or 0.0)
        share, each = 100 * waited_ms / seen.wall_ms(), waits / launches if launches else 0.0
        if idle <= look.limit("idle") or waits < 20:
            return CLEAR
        if share <= look.limit("wall") and each < look.limit("per_launch"):
            return CLEAR
        return look.fired(
            f"{look.label} waited {waits:.0f} times for its GPU {seen.during()} ({share:.0f} % of the time,"
            f" {each:.2f} waits per launch), while the GPU was idle {idle:.0f} % of the time",
            [
                seen.saw("host_syncs_count"),
                seen.saw("host_sync_wait_ms", samples_count=int(waits)),
                seen.saw("launches_count"),
                seen.saw("gpu_active_ms"),
            ],
            entities=seen.around(),
            cost=f"at most {idle:.0f} % of the GPU's time",
        )
