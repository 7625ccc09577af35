"""Steps of a program: what delays them, which are out of line, and when the first one came."""

from __future__ import annotations

from datetime import datetime

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, NotYet, Screen, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.recorded import RELATIONS, Recorded, need, steps_of, sums
from gpuflight.bottlenecks.window import Look
from gpuflight.graph import edges, nodes

_WORKER = "pt_data_worker"
"""What PyTorch calls the processes of a DataLoader; others keep their parent's name."""


class DataLoaderStarvation(ElementRule):
    """Steps wait for their data: loading takes a good part of them, and the GPU is idle meanwhile.

    Where the log tells no steps, but the program's GPU is idle and its child processes wait for a disk, it is
    suspected.
    """

    catalogue_id = "G05"
    subject = nodes.Session
    needs = (
        *need("loader_ms", "steps_ms", "steps_count", "gpu_active_ms", given_by="sessions: scopes or NVTX ranges"),
        Need(kind=nodes.Process, metrics=("io_read_bytes_per_s",), attributes=("state",), given_by="process_tree"),
    )
    thresholds = {
        "share": Threshold(value=5, clear_at=3, unit="% of the steps' time", source="PyTorch profiler, tb_plugin: 5 %"),
        "per_step": Threshold(value=10, clear_at=8, unit="ms per step", source="msprof: 10,000 us per step"),
        "idle": Threshold(value=10, clear_at=7, unit="% of the time", source="GPU idle meanwhile", guess=True),
        "suspected": Threshold(value=50, unit="% idle", source="as gpu_idle_gaps, without steps", guess=True),
    }
    guard = "at least 3 steps"
    whole_session = True
    time_matters = False
    histories = sums("loader_ms", "steps_ms", "steps_count", "gpu_active_ms")
    relations = RELATIONS
    explains = ("gpu_idle_gaps", "host_bound_idle", "step_outliers")
    cost_formula = "share of the steps' time in which data is loaded, times the GPUs that it works on"
    advice = "more loader workers, pin_memory, prefetch_factor; decode ahead; faster or nearer storage"
    verify = "py-spy dump --pid <pid>; iostat -x 5"

    def judge(self, look: Look) -> Verdict:
        seen = Recorded(look)
        if not look.has("steps_count"):
            return self._suspected(look, seen)
        if seen.live and not seen.timeline_ms():
            return CLEAR
        steps = steps_of(seen)
        if not look.has("loader_ms"):
            raise Unknown("no scope of the log is named like the loading of data")
        loading_ms, steps_ms = seen.sum("loader_ms"), seen.sum("steps_ms")
        share = 100 * loading_ms / steps_ms if steps_ms else 0.0
        idle = seen.idle_share()
        slow = loading_ms / steps > look.limit("per_step") and 100 * (idle or 0.0) > look.limit("idle")
        if (share <= look.limit("share") and not slow) or (idle is not None and 100 * idle <= look.limit("share")):
            return CLEAR
        lost = min(loading_ms / steps_ms, 1.0) if steps_ms else 0.0
        lost = lost if idle is None else min(lost, idle)
        return look.fired(
            f"{look.label} loads data for {loading_ms / steps:.1f} ms per step {seen.during()} ({share:.0f} % of"
            f" {steps:.0f} steps)" + ("" if idle is None else f"; its GPU is idle {100 * idle:.0f} % of the time"),
            [seen.saw("loader_ms", samples_count=int(steps)), seen.saw("steps_ms"), seen.saw("steps_count")],
            entities=seen.around(),
            cost_gpu_s=round(lost * seen.gpus, 4),
            cost=f"{100 * lost:.0f} % of the steps' time",
        )

    def _suspected(self, look: Look, seen: Recorded) -> Verdict:
        window = look.window
        owners = [edge.source for edge in window.into(look.id, edges.Own) if edge.source.startswith("Process(")]
        if not seen.live or not owners:
            look.metric("steps_count")
        if not (told_ms := seen.timeline_ms()):
            return CLEAR
        idle = 100 * (1 - seen.sum("gpu_active_ms") / told_ms)
        children = [window.entity(edge.target) for owner in owners for edge in window.out_of(owner, edges.Own)]
        waiting = [
            child
            for child in children
            if isinstance(child, nodes.Process)
            and child.attributes.get("state") == "D"
            and child.metrics.get("io_read_bytes_per_s", 0) > 0
        ]
        if idle <= look.limit("suspected") or not waiting:
            return CLEAR
        read = sum(child.metrics["io_read_bytes_per_s"] for child in waiting)
        return look.fired(
            f"suspected: the GPU of {look.label} is idle {idle:.0f} % of the time {seen.during()} while"
            f" {len(waiting)} of its processes wait for a disk ({read / 1e6:.1f} MB/s are read)",
            [
                seen.saw("gpu_active_ms"),
                *(look.saw("io_read_bytes_per_s", of=child) for child in waiting[:4]),
            ],
            severity="info",
            entities=[*seen.around(), *(child.id for child in waiting[:4])],
        )


class LoaderWorkers(ElementRule):
    """A program has too few processes that load its data, so that its GPU waits; or far more than it has cores."""

    catalogue_id = "G06"
    subject = nodes.Process
    severity = "info"
    needs = (
        Need(kind=nodes.Process, metrics=("cpu_pct",), attributes=("name",), given_by="process_tree"),
        Need(kind=nodes.Host, metrics=("cpus_count",), given_by="host"),
        Need(kind=nodes.GPU, metrics=("sm_util_pct",), given_by="nvml"),
    )
    screens = (Screen("cpu_pct", ">", "parent"),)
    gpu_users_only = True
    every_rounds = 6
    thresholds = {
        "few": Threshold(value=70, unit="% of its cores", source="SageMaker Dataloader: min 70", falling=True),
        "many": Threshold(value=200, clear_at=180, unit="% of its cores", source="SageMaker Dataloader: max 200"),
        "hot": Threshold(value=90, clear_at=80, unit="% of a core each", source="else more would not help", guess=True),
        "gpu": Threshold(value=70, clear_at=80, unit="%", source="SageMaker: p95 below 70", guess=True, falling=True),
        "parent": Threshold(value=2, unit="% of a core", source="a training loop uses some CPU", guess=True),
    }
    guard = "it has at least 2 child processes that load data (pt_data_worker, or of its own name); too few only if all"
    persist_s = 30.0
    relations = (edges.Own, edges.Access)
    explains = ("data_loader_starvation", "gpu_idle_gaps")
    advice = "num_workers of the DataLoader: about one per core that it may use, shared by the ranks of the host"
    verify = "pidstat -p $(pgrep -P <pid> | paste -sd,) 5"

    def judge(self, look: Look) -> Verdict:
        window, parent = look.window, look.element
        gpus = window.gpus_of(parent)
        children = [window.entity(edge.target) for edge in window.out_of(parent.id, edges.Own)]
        names = (_WORKER, str(parent.attributes.get("name") or _WORKER))
        workers = [
            child
            for child in children
            if isinstance(child, nodes.Process) and child.attributes.get("name") in names and not window.gpus_of(child)
        ]
        if not gpus or len(workers) < 2:
            return CLEAR
        host = next(window.all(nodes.Host), None)
        if host is None:
            raise Unknown("cpus_count of Host: the host is not seen")
        allowed = parent.attributes.get("cpus_allowed")
        cores = _size_of(str(allowed)) if allowed else look.metric("cpus_count", host)
        share = 100 * len(workers) / cores if cores else 0.0
        busy = [look.metric("cpu_pct", worker) for worker in workers]
        mean = sum(busy) / len(busy)
        seen = [
            look.saw("cpu_pct", mean, samples_count=len(workers)),
            look.saw("workers_count", float(len(workers))),
            look.saw("cores_count", float(cores)),
        ]
        ids = [parent.id, *(worker.id for worker in workers[:4]), *(gpu.id for gpu in gpus[:8])]
        if share > look.limit("many"):
            return look.fired(
                f"{look.label} has {len(workers)} processes that load data for {cores:g} cores ({share:.0f} %)",
                seen,
                entities=ids,
            )
        util = [look.metric("sm_util_pct", gpu) for gpu in gpus]
        if share >= look.limit("few") or mean < look.limit("hot") or max(util) >= look.limit("gpu"):
            return CLEAR
        return look.fired(
            f"the {len(workers)} processes that load data for {look.label} are all busy ({mean:.0f} % of a core each),"
            f" its GPU only {max(util):.0f} %, and it may use {cores:g} cores",
            [*seen, look.saw("sm_util_pct", max(util), of=gpus[0])],
            severity="warn",
            entities=ids,
        )


def _size_of(listed: str) -> int:
    """How many CPUs ``0-3,8`` are."""
    count = 0
    for part in listed.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            count += int(last) - int(first) + 1 if last.isdigit() else 1
    return count


class GcPause(ElementRule):
    """Python collects garbage while a GPU waits for the next launch."""

    catalogue_id = "G22"
    subject = nodes.Session
    severity = "info"
    needs = need(
        "gc_pauses_count",
        "gc_long_pauses_count",
        "gc_pauses_ms",
        "gc_pause_max_ms",
        given_by="sessions, cupti: logs with ranges of garbage collection",
    )
    thresholds = {
        "pauses": Threshold(value=0, unit="pauses of 1 ms or more", source="msprof gc.yaml: 1 ms"),
        "time": Threshold(value=1, clear_at=0.5, unit="% of the time", source="ours: then it is a warning", guess=True),
    }
    whole_session = True
    time_matters = False
    histories = sums("gc_pauses_count", "gc_long_pauses_count", "gc_pauses_ms")
    relations = RELATIONS
    explains = ("step_outliers", "host_bound_idle", "straggler_rank")
    cost_formula = "share of the time in such pauses, at most"
    advice = "gc.freeze() after start-up, gc.disable() and gc.collect() between steps, fewer reference cycles"
    verify = "python -X importtime; gc.set_debug(gc.DEBUG_STATS)  # in the program"

    def judge(self, look: Look) -> Verdict:
        look.metric("gc_pauses_count")
        seen = Recorded(look)
        long, took_ms = seen.sum("gc_long_pauses_count"), seen.sum("gc_pauses_ms")
        if long <= look.limit("pauses"):
            return CLEAR
        told_ms = seen.wall_ms()
        share = 100 * took_ms / told_ms if told_ms else 0.0
        return look.fired(
            f"{look.label} collected garbage {seen.sum('gc_pauses_count'):.0f} times {seen.during()}, {long:.0f} times"
            f" for 1 ms or more ({took_ms:.0f} ms in all, {look.element.metrics.get('gc_pause_max_ms', 0.0):.0f} ms the"
            " longest)",
            [seen.saw("gc_long_pauses_count"), seen.saw("gc_pauses_ms", samples_count=int(long))],
            severity="warn" if share > look.limit("time") else "info",
            entities=seen.around(),
            cost_gpu_s=round(min(share / 100, 1.0), 4),
            cost=f"up to {share:.1f} % of the time",
        )


class StepOutliers(ElementRule):
    """Some steps take much longer than the others (mean and three standard deviations)."""

    catalogue_id = "G23"
    subject = nodes.Session
    needs = need(
        "step_outliers_count",
        "steps_judged_count",
        "step_p50_ms",
        "step_max_ms",
        given_by="sessions: scopes named step",
    )
    thresholds = {
        "outliers": Threshold(value=10, clear_at=9, unit="steps", source="SageMaker StepOutlier: 3 sigma, 10"),
        "steps": Threshold(value=100, unit="steps", source="fewer have no spread to speak of", guess=True),
    }
    guard = "at least 100 steps (the latest 4096 are looked at)"
    whole_session = True
    relations = RELATIONS
    cost_formula = "unknown: what the outliers took beyond the median is not kept"
    advice = "see what happens at these times: checkpoints, evaluation, garbage collection, storage, other tenants"
    verify = "gpuflight export <folder> --as trace, then look at the longest steps in ui.perfetto.dev"

    def judge(self, look: Look) -> Verdict:
        steps, outliers = look.metric("steps_judged_count"), look.metric("step_outliers_count")
        if steps < look.limit("steps"):
            raise (NotYet if look.element.attributes.get("state") == "live" else Unknown)(
                f"{steps:.0f} of the {look.limit('steps'):.0f} steps that are needed"
            )
        if outliers <= look.limit("outliers"):
            return CLEAR
        median, longest = look.metric("step_p50_ms"), look.metric("step_max_ms")
        return look.fired(
            f"{outliers:.0f} of {steps:.0f} steps of {look.label} take far longer than the others: half of all take"
            f" less than {median:.1f} ms, the longest {longest:.1f} ms",
            [
                look.saw("step_outliers_count", samples_count=int(steps)),
                look.saw("step_p50_ms", samples_count=int(steps)),
                look.saw("step_max_ms"),
            ],
        )


class SlowStart(ElementRule):
    """A program has not done its first step after 20 minutes, or took that long."""

    catalogue_id = "G24"
    subject = nodes.Session
    needs = need("first_step_s", "first_work_s", attributes=("started",))
    thresholds = {
        "first": Threshold(value=1200, unit="s", source="SageMaker MaxInitializationTime: 20 min"),
    }
    guard = "without steps in its log, its first work on a GPU counts"
    every_round = True
    whole_session = True
    explains = ("idle_reserved_gpu",)
    relations = RELATIONS
    cost_formula = "unknown: the GPU is held meanwhile"
    advice = (
        "keep compiled kernels (TORCHINDUCTOR_CACHE_DIR, CUDA_CACHE_PATH), stage data ahead, load weights in parallel"
    )
    verify = "py-spy dump --pid <pid>"

    def judge(self, look: Look) -> Verdict:
        metrics, limit = look.element.metrics, look.limit("first")
        live = look.element.attributes.get("state") == "live"
        first = "first_step_s" if "first_step_s" in metrics else "first_work_s"
        if first in metrics:
            if metrics[first] <= limit:
                return CLEAR
            what = "was done" if first == "first_step_s" else "was"
            noun = "step" if first == "first_step_s" else "work on a GPU"
            return look.fired(
                f"the first {noun} of {look.label} {what} {metrics[first] / 60:.0f} minutes after it began",
                [look.saw(first)],
                severity="info" if not live else "warn",
            )
        if not live:
            look.metric(first)
        began_s = datetime.fromisoformat(str(look.attribute("started"))).timestamp()
        waits_s = look.window.time_ns / 1e9 - began_s
        if waits_s <= limit:
            return CLEAR
        return look.fired(
            f"{look.label} began {waits_s / 60:.0f} minutes ago and has done no work on a GPU yet",
            [look.saw("started"), look.saw("waits_s", waits_s)],
        )
