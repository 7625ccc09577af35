"""Ranks of one job against each other: who is slower, and who comes last."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from msgspec import Struct

from gpuflight.bottlenecks.base import GroupRule, Need, NotYet, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.jobs import MEMBERS, RELATIONS, Job, Rank, jobs_of
from gpuflight.bottlenecks.window import Window, evidence, name_of, told
from gpuflight.graph import nodes
from gpuflight.sources.nccl_kernels import classify

_WINDOW_S = 60.0
_WARM_UP_S = 30.0
"""Of a job that runs: what was before the first sight is its start-up."""
_STEPS = 3
_LAUNCHES = 20
"""Medians of fewer launches say nothing."""
_RANK_NEED = Need(kind=nodes.Process, attributes=("rank", "job", "world_size"), given_by="ranks")


class Pace(Struct):
    """How a rank does against the others: ``value`` against ``usual``; ``slower`` is 1 for as fast as the median.
    ``samples``: steps, or launches; ``compared``: ranks."""

    slower: float
    metric: str
    value: float
    usual: float
    element: str
    samples: int
    compared: int


class StragglerRank(GroupRule):
    """One rank of a job is slower than the others, which wait for it in every collective.

    By the duration of its steps in the last minute against the median of all ranks, and by the median durations of the
    kernels that it has in common with the others, communication left out (the relative score of NVIDIA's resiliency
    extension: the mean over its kernels of median ÷ own, weighted by time). Where ranks wait for each other in each
    step all steps last alike, and only the kernels show who is slow.
    """

    catalogue_id = "C03"
    needs = (
        _RANK_NEED,
        Need(kind=nodes.Session, metrics=("steps_ms", "steps_count"), attributes=("step_scope",), given_by="sessions"),
        Need(kind=nodes.Kernel, metrics=("p50_us", "gpu_time_ms", "launches_count"), given_by="sessions"),
        Need(kind=nodes.Host),
    )
    thresholds = {
        "score": Threshold(value=0.75, clear_at=0.8, unit="of the median", source="NVRx: 0.75", falling=True),
        "step_warn": Threshold(
            value=1.2, clear_at=1.15, unit="x the median step", source="1.2 x for 3 steps, third party"
        ),
        "step_crit": Threshold(value=2.0, clear_at=1.9, unit="x the median step", source="DLRover: 2 x the median"),
        "ranks": Threshold(value=4, unit="ranks", source="of three, one is no outlier", guess=True, falling=True),
    }
    guard = "at least 4 ranks are seen, with steps of one name or kernels in common"
    every_rounds = 3
    whole_session = True
    histories = {nodes.Session: {"steps_ms": _WINDOW_S, "steps_count": _WINDOW_S}}
    members = MEMBERS
    relations = RELATIONS
    explains = ("arrival_skew", "communication_share", "exposed_communication", "slow_collective")
    cost_formula = "(1 - median / slowest) x the other ranks: GPU-seconds per second"
    advice = "look at that rank's GPU (clocks, heat, PCIe, ECC) and host (CPU, NUMA, network); swap it out to be sure"
    verify = "gpuflight doctor on that host"

    def judge(self, window: Window) -> Iterable[Verdict]:
        jobs = jobs_of(window)
        least = window.overrides.threshold(self, "ranks").value
        kernels = _kernels_of(window, [job for job in jobs if len(job) >= least])
        for job in jobs:
            if job.world_size is not None and job.world_size < least:
                yield Verdict(state="clear", subject=job.id)
                continue
            try:
                if job.live and window.watched_s < _WARM_UP_S and not window.snapshot:
                    raise NotYet(f"watched for {window.watched_s:.0f} s, {_WARM_UP_S:.0f} s are needed")
                if len(job) < least:
                    raise Unknown(f"only {job.seen()} of the job are seen, {least:.0f} are needed")
                paces = _worst(_paces_of_steps(window, job, least), _paces_of_kernels(job, kernels, least))
                if not paces:
                    raise Unknown("neither steps nor kernels with times are known of 4 ranks or more")
            except Unknown as reason:
                yield Verdict(state="unknown", subject=job.id, reason=str(reason))
                continue
            yield Verdict(state="clear", subject=job.id)
            for number, pace in paces.items():
                verdict = self._verdict(window, job, job.ranks[number], pace)
                if verdict is not None:
                    yield verdict

    def _verdict(self, window: Window, job: Job, rank: Rank, pace: Pace) -> Verdict | None:
        def limit(name: str) -> float:
            return window.overrides.threshold(self, name, rank.element).value

        steps = pace.metric == "step_mean_ms"
        if (pace.slower <= limit("step_warn")) if steps else (1 / pace.slower >= limit("score")):
            return None
        gpus = [gpu.id for gpu in rank.gpus(window)]
        what = (
            f"its steps take {told('x_ms', pace.value)}, the median is {told('x_ms', pace.usual)}"
            if steps
            else f"its kernels run at {100 * pace.value:.0f} % of the speed that is usual in the job"
        )
        lost = (1 - 1 / pace.slower) * (len(job) - 1)
        return Verdict(
            state="fired",
            subject=rank.element.id,
            severity="critical" if steps and pace.slower > limit("step_crit") else "warn",
            entities=[rank.element.id, *[session.id for session in rank.sessions[:2]], *gpus[:8]],
            evidence=[
                evidence(pace.element, pace.metric, pace.value, samples_count=pace.samples, window_s=_WINDOW_S),
                evidence(pace.element, f"usual_{pace.metric}", pace.usual, samples_count=pace.compared),
                evidence(rank.element.id, "rank", rank.number),
            ],
            message=f"rank {rank.number} of {job.name} ({name_of(window, rank.element.id)}{rank.where()}) is slow:"
            f" {what}; compared: {job.compared(pace.compared)}",
            cost=f"{len(job) - 1} other ranks wait {100 * (1 - 1 / pace.slower):.0f} % of the time",
            cost_gpu_s=round(lost, 3),
        )


def _worst(*given: dict[int, Pace]) -> dict[int, Pace]:
    """Of several measures of a rank the one in which it is slowest."""
    found: dict[int, Pace] = {}
    for paces in given:
        for number, pace in paces.items():
            if number not in found or pace.slower > found[number].slower:
                found[number] = pace
    return found


def _paces_of_steps(window: Window, job: Job, least: float) -> dict[int, Pace]:
    by_name: dict[str, dict[int, tuple[nodes.Session, float, float]]] = {}
    for rank in job:
        for session in rank.sessions:
            steps = _steps(window, session)
            if steps is not None:
                name = str(session.attributes.get("step_scope", ""))
                by_name.setdefault(name, {})[rank.number] = (session, *steps)
                break
    means = max(by_name.values(), key=len, default={})
    if len(means) < least:
        return {}
    usual = median(mean for _, mean, _ in means.values())
    if usual <= 0:
        return {}
    return {
        number: Pace(max(mean / usual, 1e-9), "step_mean_ms", mean, usual, session.id, int(count), len(means))
        for number, (session, mean, count) in means.items()
    }


def _steps(window: Window, session: nodes.Session) -> tuple[float, float] | None:
    """(mean duration, how many) of the steps of the last minute; of a session that is over, of all."""
    if "steps_ms" not in session.metrics or "steps_count" not in session.metrics:
        return None
    took_ms, count = session.metrics["steps_ms"], session.metrics["steps_count"]
    if session.attributes.get("state") == "live" and not window.snapshot:
        grown = []
        for name in ("steps_ms", "steps_count"):
            series = window.history(session, name)
            grown.append(series.increase(window.now_s, _WINDOW_S) if series is not None else None)
        if grown[0] is None or grown[1] is None:
            return None
        took_ms, count = grown[0], grown[1]
    return (took_ms / count, count) if count >= _STEPS else None


Kernels = dict[tuple[str, int], list[nodes.Kernel]]


def _kernels_of(window: Window, jobs: list[Job]) -> Kernels:
    """Kernels of each rank, by job and number, without communication: kernels name their owner as its own host does."""
    found: Kernels = {}
    owners: dict[tuple[str, str], list[nodes.Kernel]] = {}
    for job in jobs:
        for rank in job:
            mine = found[job.name, rank.number] = []
            for name in _owners(rank):
                owners[rank.ns, name] = mine
    if owners:
        for kernel in window.all(nodes.Kernel):
            known = owners.get((kernel.ns, kernel.process))
            if known is None or classify(kernel.name) is not None:
                continue
            if kernel.metrics.get("launches_count", 0) >= _LAUNCHES and "p50_us" in kernel.metrics:
                known.append(kernel)
    return found


def _owners(rank: Rank) -> Iterable[str]:
    if rank.process is not None:
        yield f"Process(pid={rank.process.pid},start={rank.process.start})"
    for session in rank.sessions:
        yield f"Session({session.session_id})"


def _paces_of_kernels(job: Job, kernels: Kernels, least: float) -> dict[int, Pace]:
    known: dict[str, dict[int, nodes.Kernel]] = {}
    for rank in job:
        for kernel in kernels[job.name, rank.number]:
            known.setdefault(kernel.name, {})[rank.number] = kernel
    usual = {
        name: median([kernel.metrics["p50_us"] for kernel in ranks.values()])
        for name, ranks in known.items()
        if len(ranks) >= least
    }
    paces: dict[int, Pace] = {}
    for rank in job:
        weight = total = 0.0
        launches = 0
        for name, middle in usual.items():
            own = known[name].get(rank.number)
            if own is None or not own.metrics["p50_us"] or not middle:
                continue
            took = own.metrics.get("gpu_time_ms", 0.0)
            total += took * middle / own.metrics["p50_us"]
            weight += took
            launches += int(own.metrics["launches_count"])
        if weight and total:
            score = total / weight
            paces[rank.number] = Pace(1 / score, "relative_score", score, 1.0, rank.element.id, launches, 0)
    for pace in paces.values():
        pace.compared = len(paces)
    return paces
