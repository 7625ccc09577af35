"""GPUs of one job that are not used alike."""

from __future__ import annotations

from collections.abc import Iterable

from gpuflight.bottlenecks.base import GroupRule, Need, NotYet, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.jobs import MEMBERS, RELATIONS, Job, jobs_of
from gpuflight.bottlenecks.series import Series
from gpuflight.bottlenecks.window import Window, evidence, name_of
from gpuflight.graph import nodes

_WINDOW_S = 300.0
_BINS = 10
_UTIL = "sm_util_pct"


class GpuLoadImbalance(GroupRule):
    """One GPU of a job is used otherwise than the others: work is spread unevenly, or it waits for something.

    The shares of the last five minutes that a GPU spent in each tenth of its utilisation, against those of the other
    GPUs of the job together: the distance is half the sum of the differences, 0 for alike and 1 for nothing in common.
    """

    catalogue_id = "H16"
    needs = (
        Need(kind=nodes.GPU, metrics=(_UTIL,), given_by="nvml"),
        Need(kind=nodes.Process, attributes=("rank", "job"), given_by="ranks"),
        Need(kind=nodes.Session),
        Need(kind=nodes.Host),
    )
    thresholds = {
        "distance": Threshold(value=0.5, clear_at=0.4, unit="of 1", source="SageMaker LoadBalancing: 0.5"),
        "difference": Threshold(
            value=20, clear_at=15, unit="percentage points", source="so that 89 and 91 % are alike", guess=True
        ),
    }
    guard = "at least two GPUs of one job, known for five minutes; one of them in use"
    every_rounds = 3
    warm_up_s = _WINDOW_S
    persist_s = 60.0
    histories = {nodes.GPU: {_UTIL: _WINDOW_S}}
    members = MEMBERS
    relations = RELATIONS
    explains = ("idle_reserved_gpu",)
    cost_formula = "difference of the utilisation of the GPUs that wait: GPU-seconds per second"
    advice = (
        "give each rank the same work (batch, layers of a pipeline stage, experts); if it has it, look for what slows"
        " the rank that the others wait for"
    )
    verify = "nvidia-smi dmon -s u"

    def judge(self, window: Window) -> Iterable[Verdict]:
        for job in jobs_of(window):
            gpus = {gpu.id: gpu for rank in job for gpu in rank.gpus(window)}
            if len(gpus) < 2:
                continue
            try:
                yield from self._judge_job(window, job, list(gpus.values()))
            except Unknown as reason:
                yield Verdict(state="unknown", subject=job.id, reason=str(reason))

    def _judge_job(self, window: Window, job: Job, gpus: list[nodes.GPU]) -> Iterable[Verdict]:
        past = {gpu.id: _past(window, gpu) for gpu in gpus}
        means = {gpu_id: series.mean(window.now_s, _WINDOW_S) or 0.0 for gpu_id, series in past.items()}
        yield Verdict(state="clear", subject=job.id)
        total = sum(means.values())
        for gpu in gpus:
            mean = (total - means[gpu.id]) / (len(gpus) - 1)
            if abs(means[gpu.id] - mean) <= window.overrides.threshold(self, "difference", gpu).value:
                continue
            others = [other for other in gpus if other is not gpu]
            distance = _distance(past, gpu, others, window.now_s)
            if distance <= window.overrides.threshold(self, "distance", gpu).value:
                continue
            lost = (means[gpu.id] - mean) * len(others) if means[gpu.id] > mean else mean - means[gpu.id]
            owners = [rank for rank in job if gpu in rank.gpus(window)]
            ranks = ", ".join(f"rank {rank.number}{rank.where()}" for rank in owners)
            yield Verdict(
                state="fired",
                subject=gpu.id,
                severity=self.severity,
                entities=[gpu.id, *(rank.element.id for rank in owners), *(other.id for other in others[:7])],
                evidence=[
                    evidence(gpu.id, _UTIL, means[gpu.id], samples_count=past[gpu.id].rounds_count, window_s=_WINDOW_S),
                    evidence(others[0].id, f"usual_{_UTIL}", mean, samples_count=len(others), window_s=_WINDOW_S),
                    evidence(gpu.id, "histogram_distance", distance, samples_count=len(others), window_s=_WINDOW_S),
                ],
                message=f"{name_of(window, gpu.id)} ({ranks} of {job.name}) is {means[gpu.id]:.0f} % used, the other"
                f" {len(others)} GPUs {mean:.0f} % (distance {distance:.2f}); compared: {job.seen()}",
                cost=f"{lost:.0f} % of a GPU",
                cost_gpu_s=round(lost / 100, 3),
            )


def _past(window: Window, gpu: nodes.GPU) -> Series:
    """Raises Unknown."""
    if _UTIL not in gpu.metrics:
        raise Unknown(f"{_UTIL} of GPU: {(gpu.unknown or {}).get(_UTIL) or 'not measured here'}")
    series = window.history(gpu, _UTIL)
    if series is None or series.covered_s(window.now_s) < _WINDOW_S * 0.9:
        raise NotYet(f"{_UTIL} of GPU: not known for 5 minutes yet")
    return series


def _distance(past: dict[str, Series], gpu: nodes.GPU, others: list[nodes.GPU], now_s: float) -> float:
    """How otherwise a GPU spent its time than the others together did."""
    bins = [_histogram(past[other.id], now_s) for other in others]
    usual: list[float] = [sum(column) / len(others) for column in zip(*bins, strict=True)]
    mine = _histogram(past[gpu.id], now_s)
    return sum(abs(own - theirs) for own, theirs in zip(mine, usual, strict=True)) / 2


def _histogram(series: Series, now_s: float) -> list[float]:
    """Share of the time in each tenth."""
    bins = [0.0] * _BINS
    spans = series.spans(now_s, _WINDOW_S)
    total_s = sum(held_s for held_s, _ in spans)
    for held_s, value in spans:
        bins[min(max(int(value / 100 * _BINS), 0), _BINS - 1)] += held_s / total_s
    return bins
