"""Jobs that become slower at some moment and stay so."""

from __future__ import annotations

from operator import sub
from statistics import median

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, NotYet, Screen, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.change_points import change_points
from gpuflight.bottlenecks.window import Look, told
from gpuflight.errors import MissingExtra
from gpuflight.graph import edges, nodes

_HORIZON_S = 1800.0
_LEAST_POINTS = 24
_LEVEL_POINTS = 4
"""A level is told by so many values at least: each is the mean of the steps of a round, or of 15 s."""
_STEPS = ("steps_ms", "steps_count")


class FailSlow(ElementRule):
    """A program's steps have taken longer since a certain moment, and go on doing so.

    The mean step of each stretch of the last half hour is a series; a change point of it is where its level changes
    (PELT). Falcon saw such fail-slow events last 10 minutes to hours, with nothing failing.
    """

    catalogue_id = "C11"
    subject = nodes.Session
    needs = (Need(kind=nodes.Session, metrics=_STEPS, attributes=("step_scope",), given_by="sessions, cupti"),)
    screens = (Screen("steps_count", ">=", 50),)
    thresholds = {
        "shift": Threshold(
            value=10, clear_at=7, unit="% longer", source="Falcon: change of iteration time", guess=True
        ),
        "held": Threshold(
            value=60, unit="s since the change", source="shorter ones are pauses", guess=True, falling=True
        ),
    }
    guard = "at least 50 steps, and 24 stretches of the last half hour in which steps ended"
    persist_rounds = 1
    every_rounds = 6
    histories = {nodes.Session: dict.fromkeys(_STEPS, _HORIZON_S)}
    relations = (edges.Own, edges.Access)
    explains = ("step_outliers",)
    cost_formula = "shift / (1 + shift): GPU-seconds per second"
    advice = (
        "look at what happened at that moment: clocks and heat of GPUs, RDMA counters, throttled CPUs, another job on"
        " the host; a new learning phase (sequence length, batch size) changes steps too and is no fault"
    )
    verify = "gpuflight doctor, a while after the cause is gone"

    def judge(self, look: Look) -> Verdict:
        if look.element.attributes.get("state") != "live":
            return CLEAR
        for metric in _STEPS:
            look.metric(metric)
        series = _means(look)
        if len(series) < _LEAST_POINTS:
            raise NotYet(f"{len(series)} stretches with steps are known, {_LEAST_POINTS} are needed")
        values = [value for _, value in series]
        if max(values) <= (1 + look.limit("shift") / 100) * min(values):
            return CLEAR  # no two levels of it are that far apart
        try:
            found = change_points(values, _LEVEL_POINTS)
        except MissingExtra as missing:
            raise Unknown(str(missing)) from None
        if not found:
            return CLEAR
        limit, newest = look.limit("shift"), median(values[found[-1] :])
        for at in reversed(found):
            first = max((point for point in found if point < at), default=0)
            before, after = median(values[first:at]), median(values[at:])
            shift = 100 * (min(after, newest) / before - 1) if before > 0 else 0.0
            if shift > limit:
                break
        else:
            return CLEAR
        held_s = look.window.now_s - series[at][0]
        if held_s < look.limit("held"):
            return CLEAR
        owners = [edge.source for edge in look.window.into(look.id, edges.Own) if edge.source.startswith("Process(")]
        return look.fired(
            f"steps of {look.label} have taken {shift:.0f} % longer for {held_s / 60:.1f} minutes:"
            f" {told('x_ms', after)} in place of {told('x_ms', before)}",
            [
                look.saw("step_mean_ms", after, samples_count=len(values) - at, window_s=held_s),
                look.saw("step_mean_before_ms", before, samples_count=at - first, window_s=_HORIZON_S),
            ],
            entities=[look.id, *owners],
            cost_gpu_s=round(shift / (100 + shift), 3),
            cost=f"{100 * shift / (100 + shift):.0f} % of the GPU's time",
        )


def _means(look: Look) -> list[tuple[float, float]]:
    """(when it began, mean duration in ms) of each stretch between two readings in which steps ended."""
    window = look.window
    took, count = (window.history(look.element, name) for name in _STEPS)
    if took is None or count is None:
        return []
    times_s, sums, counts = took.times_s, took.values, count.values
    if times_s != count.times_s:
        known = dict(zip(count.times_s, counts, strict=True))
        points = [(s, ms, known[s]) for s, ms in zip(times_s, sums, strict=True) if s in known]
        times_s, sums, counts = ([point[n] for point in points] for n in range(3))
    return [
        (began_s, took_ms / steps)
        for began_s, took_ms, steps in zip(
            times_s, map(sub, sums[1:], sums), map(sub, counts[1:], counts), strict=False
        )
        if steps > 0 and took_ms >= 0
    ]
