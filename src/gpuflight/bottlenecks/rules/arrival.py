"""Ranks of one job at the beginning of collectives: who comes last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from statistics import median

from gpuflight.bottlenecks.base import GroupRule, Need, NotYet, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.jobs import MEMBERS, RELATIONS, Clocks, Job, Rank, jobs_of
from gpuflight.bottlenecks.window import Window, evidence, name_of
from gpuflight.graph import nodes

_WARM_UP_S = 20.0
"""Of a job that runs: what was before the first sight is its start-up."""


class ArrivalSkew(GroupRule):
    """One rank comes to collectives later than the others, which spin on their GPUs until it is there.

    The same collective (by its number on the stream of NCCL, and its operation) is compared over all ranks: the start
    of the last one against the median. Clocks of other hosts are corrected by their measured offset; what lies within
    the error of that is unknown. A collective cannot end anywhere before it has begun everywhere: where it seems so,
    the numbers of the ranks do not mean the same collective, and nothing is judged.
    """

    catalogue_id = "C04"
    needs = (
        Need(kind=nodes.Process, attributes=("rank", "job", "world_size"), given_by="ranks"),
        Need(kind=nodes.Session, attributes=("collective_marks",), given_by="sessions"),
        Need(kind=nodes.Host, metrics=("clock_offset_s", "clock_offset_error_s"), given_by="remote"),
    )
    thresholds = {
        "skew": Threshold(value=1.0, clear_at=0.8, unit="ms", source="TraceLens: start skew", guess=True),
        "share": Threshold(value=10, clear_at=8, unit="% of the operation", source="as above", guess=True),
        "operations": Threshold(value=20, unit="operations", source="as above", guess=True, falling=True),
    }
    guard = "the times of at least 20 collectives are told by two ranks or more"
    every_rounds = 6
    whole_session = True
    members = MEMBERS
    relations = RELATIONS
    explains = ("communication_share", "slow_collective", "exposed_communication")
    cost_formula = "waiting time ÷ time between collectives x the ranks that wait: GPU-seconds per second"
    advice = "look at what the last rank does before: data loading, garbage collection, host CPU, another GPU clock"
    verify = "gpuflight doctor on the host of that rank"

    def judge(self, window: Window) -> Iterable[Verdict]:
        clocks = Clocks(window)
        for job in jobs_of(window):
            if job.world_size == 1:
                continue
            try:
                if job.live and window.watched_s < _WARM_UP_S and not window.snapshot:
                    raise NotYet(f"watched for {window.watched_s:.0f} s, {_WARM_UP_S:.0f} s are needed")
                verdict = self._skew(window, job, clocks)
            except Unknown as reason:
                yield Verdict(state="unknown", subject=job.id, reason=str(reason))
                continue
            yield verdict

    def _skew(self, window: Window, job: Job, clocks: Clocks) -> Verdict:
        def limit(name: str) -> float:
            return window.overrides.threshold(self, name).value

        arrivals = _arrivals(job, clocks, int(limit("operations")))
        compared = len(arrivals[0][0])
        errors = [clocks.offset_s(ns)[1] for ns in {job.ranks[number].ns for number in arrivals[0][0]}]
        error_ms = 1e3 * sum(sorted(errors)[-2:])
        skews, lasts, took = [], Counter[int](), []
        for begins, ends in arrivals:
            if max(begins.values()) - 1e6 * error_ms > min(ends.values()):
                raise Unknown("the ranks do not number their collectives alike (several groups, or a late beginning)")
            last = max(begins, key=begins.__getitem__)
            skews.append((begins[last] - median(begins.values())) / 1e6)
            took.append((ends[last] - begins[last]) / 1e6)
            lasts[last] += 1
        skew_ms, operation_ms = median(skews), median(took)
        least_ms = max(limit("skew"), limit("share") / 100 * operation_ms)
        if skew_ms + error_ms <= least_ms:
            if compared < len(job) or job.missing:
                raise Unknown(f"the times of collectives are told by {job.compared(compared)} only")
            return Verdict(state="clear", subject=job.id)
        if skew_ms - error_ms <= least_ms:
            raise Unknown(
                f"the last rank comes {skew_ms:.2f} ms after the median, which the clocks' error of {error_ms:.2f} ms"
                " may explain"
            )
        number, times = lasts.most_common(1)[0]
        rank = job.ranks[number]
        span_ms = (max(min(b.values()) for b, _ in arrivals) - min(min(b.values()) for b, _ in arrivals)) / 1e6
        who = f"rank {number} ({name_of(window, rank.element.id)}{rank.where()}) in {times} of {len(arrivals)}"
        waits = sum(skews) / span_ms * (compared - 1) * _density(arrivals, job) if span_ms > 0 else None
        return Verdict(
            state="fired",
            subject=job.id,
            severity=self.severity,
            entities=[rank.element.id, *[each.element.id for each in job if each is not rank][:7]],
            evidence=[
                evidence(rank.element.id, "arrival_skew_ms", skew_ms, samples_count=len(arrivals)),
                evidence(rank.element.id, "operation_ms", operation_ms, samples_count=len(arrivals)),
                evidence(rank.element.id, "clock_error_ms", error_ms),
                evidence(rank.element.id, "rank", number),
            ],
            message=f"the last rank of {job.name} comes to collectives {skew_ms:.2f} ms after the median, mostly {who};"
            f" an operation takes {operation_ms:.2f} ms, the clocks differ by at most {error_ms:.2f} ms; compared:"
            f" {job.compared(compared)}",
            cost_gpu_s=None if waits is None else round(min(waits, compared - 1.0), 3),
            cost="" if waits is None else "time in which the other ranks wait in collectives",
            advice=self.advice,
            verify=self.verify,
        )


Arrival = tuple[dict[int, float], dict[int, float]]
"""Begin and end of one collective by rank, ns of our clock."""


def _density(arrivals: list[Arrival], job: Job) -> float:
    """Of collectives only some are marked: one in so many, which the distance of the numbers tells."""
    numbers = sorted({number for rank in job for number in _marks(rank)})
    steps = [later - earlier for earlier, later in pairwise(numbers)]
    return float(max(median(steps), 1)) if steps else 1.0


def _marks(rank: Rank) -> dict[int, tuple[str, int, int]]:
    """Collectives of a rank by their number: operation, begin and end. What does not read so is left out."""
    found: dict[int, tuple[str, int, int]] = {}
    for session in rank.sessions:
        for text in session.attributes.get("collective_marks") or ():
            parts = str(text).split(":")
            if len(parts) == 4 and parts[0].isdigit() and parts[2].isdigit() and parts[3].isdigit():
                found[int(parts[0])] = (parts[1], int(parts[2]), int(parts[3]))
        if found:
            break
    return found


def _arrivals(job: Job, clocks: Clocks, least: int) -> list[Arrival]:
    """The collectives that all ranks with marks have in common. Raises Unknown."""
    marks = {rank.number: told_of for rank in job if (told_of := _marks(rank))}
    if len(marks) < 2:
        session = next((session for rank in job for session in rank.sessions), None)
        why = (session.unknown or {}).get("collective_marks") if session is not None else None
        raise Unknown(f"the times of collectives are told by {len(marks)} ranks: {why or 'not measured here'}")
    common = set.intersection(*(set(told_of) for told_of in marks.values()))
    hosts = {str(rank.element.attributes.get("hostname")) for rank in job if rank.number in marks and not rank.process}
    if len(hosts) > 1:
        raise Unknown(f"how the clocks of {', '.join(sorted(hosts))} differed when this was recorded is not known")
    offsets = {number: 1e9 * clocks.offset_s(job.ranks[number].ns)[0] for number in marks}
    found: list[Arrival] = []
    for number in sorted(common):
        if len({told_of[number][0] for told_of in marks.values()}) != 1:
            raise Unknown("the ranks do not run the same collectives in the same order (several groups)")
        begins = {rank: told_of[number][1] - offsets[rank] for rank, told_of in marks.items()}
        ends = {rank: told_of[number][2] - offsets[rank] for rank, told_of in marks.items()}
        found.append((begins, ends))
    if len(found) < least:
        raise NotYet(f"{len(found)} collectives are told by all ranks, {least} are needed")
    return found
