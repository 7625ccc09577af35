"""Jobs that hang: a collective that some ranks wait in, and that never ends."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from gpuflight.bottlenecks.base import GroupRule, Need, NotYet, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.jobs import MEMBERS, RELATIONS, Job, Rank, jobs_of, rank_names
from gpuflight.bottlenecks.window import Window, evidence
from gpuflight.graph import Entity, nodes

_HORIZON_S = 900.0
_PROGRESS = ("nccl_calls_count", "communication_kernels_count")
"""What counts collectives: the CUDA probe at the process, or a session."""
_WORK = {
    "io_read_bytes_per_s": 1e6, "io_write_bytes_per_s": 1e6, "cuda_launches_per_s": 0.1, "launches_per_s": 0.1,
    "cuda_copy_htod_bytes_per_s": 1e6, "cuda_copy_dtoh_bytes_per_s": 1e6, "copy_htod_bytes_per_s": 1e6,
    "copy_dtoh_bytes_per_s": 1e6, "nccl_calls_per_s": 0.01,
}  # fmt: skip
"""What a rank does that is at work, though it calls no collective, and from how much on: writing or reading a
checkpoint, moving data to or from the GPU, launching kernels."""
_RAS_FINDS_NOTHING = ("healthy", "answers")
_MOST_QUOTED = 3
_IO = ("io_read_bytes_per_s", "io_write_bytes_per_s")


class Standing(Struct):
    """One rank whose progress stands still: since when, where its counter stands, who says so."""

    rank: Rank
    element: Entity
    metric: str
    count: float
    since_s: float
    late: bool


class CollectiveHang(GroupRule):
    """A job hangs: no rank has called a collective for minutes, and GPUs spin in one that never ends.

    Two independent signs are needed, since each alone has another cause too. The first: on every rank the count of
    collectives stands still, though it rose before. The second: some ranks' GPUs are busy, or their threads wait for
    CUDA, while no rank does anything else: no I/O, no copies, no launches. So a long checkpoint is no hang, and neither
    is a job that is over. NCCL's RAS compares how many collectives the ranks launched: whom it names is named, but
    nothing that it finds healthy is believed, as ranks that all wait in the same collective seem healthy to it. All
    ranks have to be seen; else one that is not seen may well be at work.
    """

    catalogue_id = "C05"
    severity = "critical"
    needs = (
        Need(
            kind=nodes.Process,
            metrics=("nccl_calls_count", "cuda_wait_pct", *_IO),
            attributes=("rank", "job", "world_size", "nccl_ras", "nccl_ras_troubles"),
            given_by="ranks, nccl_ras, cuda_probes, process_tree",
        ),
        Need(kind=nodes.Session, metrics=("communication_kernels_count", "launches_per_s"), given_by="sessions"),
        Need(kind=nodes.GPU, metrics=("sm_util_pct",), given_by="nvml"),
        Need(kind=nodes.Host),
    )
    thresholds = {
        "still": Threshold(value=300, unit="s without a collective", source="DLRover: about 5 min"),
        "busy": Threshold(
            value=90, unit="% GPU utilisation, or of a thread in CUDA waits", source="a kernel that spins: 100 %",
            guess=True, falling=True,
        ),
    }  # fmt: skip
    guard = "a job of at least two ranks, all of them seen"
    every_rounds = 3
    histories = {
        nodes.Process: {"nccl_calls_count": _HORIZON_S},
        nodes.Session: {"communication_kernels_count": _HORIZON_S},
        nodes.GPU: {"sm_util_pct": _HORIZON_S},
    }
    members = MEMBERS
    relations = RELATIONS
    explains = ("arrival_skew", "straggler_rank", "gpu_load_imbalance", "idle_reserved_gpu")
    cost_formula = "the GPUs of all ranks"
    advice = (
        "dump stacks of the ranks that are absent (py-spy dump --pid, NCCL flight recorder) before anything is"
        " restarted; if all ranks wait in the same collective, look at the network and at the links of the GPUs"
    )
    verify = "py-spy dump --pid <rank>; TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1"

    def judge(self, window: Window) -> Iterable[Verdict]:
        for job in jobs_of(window):
            if job.world_size is not None and job.world_size < 2:
                continue
            try:
                yield self._judge_job(window, job)
            except Unknown as reason:
                yield Verdict(state="unknown", subject=job.id, reason=str(reason))

    def _judge_job(self, window: Window, job: Job) -> Verdict:
        clear = Verdict(state="clear", subject=job.id)
        still_s = window.overrides.threshold(self, "still").value
        busy_pct = window.overrides.threshold(self, "busy").value
        job.whole()
        standing = [_standing(window, rank) for rank in job]
        if min(each.since_s for each in standing) < still_s:
            return clear
        if any(_at_work(rank) for rank in job):
            return clear
        waiting = {each.rank.number: why for each in standing if (why := _waits(window, each, busy_pct))}
        if not waiting:
            return clear
        blind = [rank for rank in job if not any(rank.metric(name) for name in _IO)]
        if blind:
            why = (blind[0].element.unknown or {}).get(_IO[0]) or "not measured here"
            raise Unknown(f"{_IO[0]} of Process: {why}; {rank_names(blind)} may be writing a checkpoint")
        return self._fired(job, standing, waiting)

    def _fired(self, job: Job, standing: list[Standing], waiting: dict[int, str]) -> Verdict:
        absent = [each.rank for each in standing if each.rank.number not in waiting]
        accused = {rank.number: said for rank in job if (said := _ras_says(rank)) not in ("", *_RAS_FINDS_NOTHING)}
        comparable = not any(each.late for each in standing) and len({each.metric for each in standing}) == 1
        if not absent and comparable:
            most = max(each.count for each in standing)
            absent = [each.rank for each in standing if each.count < most]
        if not absent:
            absent = _fewer_than(len(job), [job.ranks[number] for number in accused])
        inside = [each.rank for each in standing if each.rank not in absent]
        still_s = min(each.since_s for each in standing)
        message = (
            f"{job.name} hangs: no rank has called a collective for {still_s / 60:.0f} minutes; {rank_names(inside)}"
        )
        message += f" wait{'s' * (len(inside) == 1)} in one ({next(iter(waiting.values()))})"
        if absent:
            message += f", {rank_names(absent)} {'is' if len(absent) == 1 else 'are'} not there"
        else:
            message += ": all of them are there, so it is their way to each other that fails"
        message += _quote(job, accused)
        named = [*(absent or inside), *(job.ranks[number] for number in accused)]
        named = list({rank.number: rank for rank in named}.values())
        return Verdict(
            state="fired",
            subject=job.id,
            severity=self.severity,
            entities=[rank.element.id for rank in (*named, *(rank for rank in job if rank not in named))][:32],
            evidence=[
                evidence(each.element.id, each.metric, each.count, window_s=each.since_s) for each in standing[:16]
            ]
            + [evidence(job.ranks[number].element.id, "waits", why) for number, why in list(waiting.items())[:16]]
            + [evidence(job.ranks[number].element.id, "nccl_ras", said) for number, said in list(accused.items())[:16]],
            message=message,
            cost=f"all {len(job)} GPUs",
            cost_gpu_s=float(len(job)),
            advice=self.advice,
            verify=self.verify,
        )


def _ras_says(rank: Rank) -> str:
    return str(rank.element.attributes.get("nccl_ras", ""))


def _fewer_than(whole: int, ranks: list[Rank]) -> list[Rank]:
    """Those ranks, unless they are all: then none of them is the one that the others wait for."""
    return ranks if len(ranks) < whole else []


def _quote(job: Job, accused: dict[int, str]) -> str:
    """What NCCL's RAS says, for the message: of whom it says the same, together."""
    if accused:
        by_what: dict[str, list[Rank]] = {}
        for number, said in accused.items():
            by_what.setdefault(said, []).append(job.ranks[number])
        parts = [f"{rank_names(ranks)}: {said}" for said, ranks in list(by_what.items())[:_MOST_QUOTED]]
        more = len(by_what) - len(parts)
        return f"; NCCL's RAS says of {'; of '.join(parts)}{f'; and of {more} more' if more else ''}"
    for rank in job:  # what it names is not in the picture, or not listed
        troubles = rank.element.attributes.get("nccl_ras_troubles")
        if isinstance(troubles, list | tuple) and troubles:
            return f"; NCCL's RAS says: {'; '.join(map(str, troubles[:_MOST_QUOTED]))}"
    found = {said for rank in job if (said := _ras_says(rank))}
    return f"; NCCL's RAS says {', '.join(sorted(found))}, which only means that ranks answer" if found else ""


def _standing(window: Window, rank: Rank) -> Standing:
    """How long a rank's count of collectives has not moved. Raises Unknown."""
    for name in _PROGRESS:
        found = rank.metric(name)
        if found is None:
            continue
        element, count = found
        series = window.history(element, name)
        if series is None or not series.times_s:
            continue
        if len(series.values) < 2:
            raise NotYet(f"{name} of rank {rank.number} has not moved since it is watched: the job may not have begun")
        late = bool(element.attributes.get("cuda_watched_late"))
        return Standing(rank, element, name, count, window.now_s - series.times_s[-1], late)
    why = (rank.element.unknown or {}).get(_PROGRESS[0]) or "not measured here"
    raise Unknown(f"collectives of rank {rank.number}: {_PROGRESS[0]} of Process: {why}")


def _at_work(rank: Rank) -> bool:
    for entity in (rank.element, *rank.sessions):
        if any(entity.metrics.get(name, 0.0) >= least for name, least in _WORK.items()):
            return True
    return False


def _waits(window: Window, standing: Standing, busy_pct: float) -> str:
    """The second sign, for people: what shows that the rank waits in a collective; empty if nothing does."""
    rank = standing.rank
    for gpu in rank.gpus(window):
        series = window.history(gpu, "sm_util_pct")
        mean = series.mean(window.now_s, min(standing.since_s, 300.0)) if series is not None else None
        if mean is not None and mean >= busy_pct and gpu.metrics.get("sm_util_pct", 0.0) >= busy_pct:
            return f"GPU {mean:.0f} % busy, nothing launched"
    found = rank.metric("cuda_wait_pct")
    if found is not None and found[1] >= busy_pct:
        return f"{found[1]:.0f} % of a thread waits for CUDA"
    return ""
