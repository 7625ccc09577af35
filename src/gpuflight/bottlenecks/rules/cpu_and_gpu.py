"""The host's CPUs and storage where GPUs wait for them."""

from __future__ import annotations

from collections.abc import Iterable

from gpuflight.bottlenecks.base import CLEAR, ElementRule, GroupRule, Need, Screen, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.window import Look, Window, evidence, name_of
from gpuflight.graph import edges, nodes

_WINDOW_S = 60.0
_CPU, _IOWAIT, _UTIL = "cpu_busy_pct", "cpu_iowait_pct", "sm_util_pct"


class _IdleGpuWhile(GroupRule):
    """A figure of the host is high while GPUs that somebody uses are idle."""

    abstract = True

    needs = (
        Need(kind=nodes.Host, metrics=(_CPU, _IOWAIT), given_by="host"),
        Need(kind=nodes.GPU, metrics=(_UTIL, "processes_count"), given_by="nvml"),
    )
    guard = "a process holds the GPU; the first minute is excluded"
    warm_up_s = _WINDOW_S
    persist_rounds = 1
    histories = {nodes.Host: {_CPU: _WINDOW_S, _IOWAIT: _WINDOW_S}, nodes.GPU: {_UTIL: _WINDOW_S}}
    relations = (edges.Access,)
    cost_formula = "the idle share of each GPU concerned"
    metric = ""
    what = ""

    def judge(self, window: Window) -> Iterable[Verdict]:
        host = next(window.all(nodes.Host), None)
        gpus = [gpu for gpu in window.all(nodes.GPU) if not gpu.ns]
        if host is None or not gpus:
            return
        if self.metric not in host.metrics:
            raise Unknown(f"{self.metric} of Host: {(host.unknown or {}).get(self.metric) or 'not measured here'}")
        limit, idle = (window.overrides.threshold(self, name).value for name in ("host", "gpu"))
        share = window.overrides.threshold(self, "share").value / 100
        series = window.history(host, self.metric)
        if series is None or series.covered_s(window.now_s) < _WINDOW_S * 0.9:
            raise Unknown(f"{self.metric} of Host: watched for less than {_WINDOW_S:.0f} s")
        high = series.share(window.now_s, _WINDOW_S, lambda value: value > limit) or 0.0
        if high <= share:
            return
        waiting: list[tuple[nodes.GPU, float]] = []
        for gpu in gpus:
            used = window.history(gpu, _UTIL)
            if used is None or not gpu.metrics.get("processes_count"):
                continue
            low = used.share(window.now_s, _WINDOW_S, lambda value: value < idle) or 0.0
            if low > share:
                waiting.append((gpu, used.mean(window.now_s, _WINDOW_S) or 0.0))
        if not waiting:
            return
        mean = series.mean(window.now_s, _WINDOW_S) or 0.0
        count = max(series.rounds_count, 1)
        yield Verdict(
            state="fired",
            subject=host.id,
            severity=self.severity,
            entities=[host.id, *(gpu.id for gpu, _ in waiting)],
            evidence=[
                evidence(host.id, self.metric, mean, samples_count=count, window_s=_WINDOW_S),
                *(evidence(g.id, _UTIL, used, samples_count=count, window_s=_WINDOW_S) for g, used in waiting),
            ],
            message=f"{self.what} {mean:.0f} % of the time while {', '.join(name_of(window, g.id) for g, _ in waiting)}"
            f" did {max(used for _, used in waiting):.0f} % at most (last {_WINDOW_S:.0f} s)",
            cost_gpu_s=sum(1 - used / 100 for _, used in waiting),
            cost=f"{len(waiting)} GPUs wait",
        )


class CpuBoundIdleGpu(_IdleGpuWhile):
    """The CPUs are full while GPUs in use are idle: the host cannot feed them."""

    catalogue_id = "S03"
    metric = _CPU
    what = "the CPUs are busy"
    thresholds = {
        "host": Threshold(value=90, unit="%", source="SageMaker Debugger, CPUBottleneck"),
        "gpu": Threshold(value=10, unit="%", source="SageMaker Debugger, CPUBottleneck", falling=True),
        "share": Threshold(value=50, unit="% of the samples", source="SageMaker Debugger, CPUBottleneck"),
    }
    explains = ("gpu_idle_gaps", "data_loader_starvation", "host_bound_idle", "run_queue_delay")
    advice = "more loader workers will not help; make preprocessing cheaper, move it to the GPU, or use more cores"
    verify = "gpuflight doctor --seconds 60; top -H"


class IoBoundIdleGpu(_IdleGpuWhile):
    """The CPUs wait for storage while GPUs in use are idle.

    Time waited for I/O is unreliable on hosts with many cores; the pressure of I/O is told beside it.
    """

    catalogue_id = "S04"
    metric = _IOWAIT
    what = "the CPUs wait for storage"
    thresholds = {
        "host": Threshold(value=50, unit="%", source="SageMaker Debugger, IOBottleneck"),
        "gpu": Threshold(value=10, unit="%", source="SageMaker Debugger, IOBottleneck", falling=True),
        "share": Threshold(value=50, unit="% of the samples", source="SageMaker Debugger, IOBottleneck"),
    }
    explains = ("gpu_idle_gaps", "data_loader_starvation", "stuck_process")
    advice = "cache the data set on local NVMe, read larger blocks, more files in flight (workers, prefetch)"
    verify = "cat /proc/pressure/io; iostat -x 5"


class FewCpus(ElementRule):
    """A process that uses a GPU may run on one or two CPUs only.

    Launching kernels, loading data and communicating then share them.
    """

    catalogue_id = "S05"
    subject = nodes.Process
    needs = (
        Need(
            kind=nodes.Process,
            attributes=("cpus_allowed",),
            metrics=("cpu_pct", "run_delay_pct"),
            given_by="process_tree",
        ),
        Need(kind=nodes.GPU, given_by="nvml"),
    )
    screens = (Screen("cpu_pct", ">", "least"),)
    gpu_users_only = True
    thresholds = {
        "least": Threshold(value=5, unit="% of one core", source="below it nobody notices", guess=True),
        "cpus_count": Threshold(
            value=2, unit="CPUs", source="reports on SLURM and OMP pinning", guess=True, falling=True
        ),
        "cpu": Threshold(value=80, clear_at=60, unit="% of what it may use", source="beside the count", guess=True),
    }
    guard = "the process uses a GPU, and uses up the CPUs it may have: it runs on them, or waits in line for them"
    persist_s = 10.0
    relations = (edges.Access,)
    explains = ("run_queue_delay", "gpu_idle_gaps", "host_bound_idle")
    advice = "give it more CPUs: --cpus-per-task, --cpu-bind, numactl, OMP_PROC_BIND, or the container's cpuset"
    verify = "taskset -cp <pid>"

    def judge(self, look: Look) -> Verdict:
        gpus = look.window.gpus_of(look.element)
        if not gpus:
            return CLEAR
        allowed = cpu_count(str(look.attribute("cpus_allowed")))
        if allowed > look.limit("cpus_count"):
            return CLEAR
        used = look.metric("cpu_pct")
        waits = look.element.metrics.get("run_delay_pct", 0.0)
        if used + waits < allowed * look.limit("cpu"):
            return CLEAR
        return look.fired(
            f"{look.label} uses {', '.join(name_of(look.window, gpu.id) for gpu in gpus[:4])} and may run on {allowed}"
            f" {'CPU' if allowed == 1 else 'CPUs'} only, of which it uses {used / allowed:.0f} %"
            + (f" while its threads stand in line for them {waits:.0f} % of the time" if waits >= 1 else ""),
            [
                look.saw("cpus_allowed", str(look.attribute("cpus_allowed"))),
                look.saw("cpu_pct"),
                *([look.saw("run_delay_pct")] if waits else []),
            ],
            entities=[look.id, *(gpu.id for gpu in gpus[:8])],
        )


def cpu_count(listed: str) -> int:
    """How many CPUs a list like ``0-3,8`` names. Raises Unknown where it is no list."""
    try:
        parts = [part.partition("-") for part in listed.split(",") if part.strip()]
        return sum(int(last or first) - int(first) + 1 for first, _, last in parts)
    except ValueError:
        raise Unknown(f"cpus_allowed of Process: {listed!r} is no list of CPUs") from None
