"""What a recorded GPU session did: in the last half minute while it runs, in all once it is over.

The metrics are sums since the session's beginning, so over half a minute it is their increase. Shares are of the time
that the log tells of (``gpu_timeline_ms``), not of the clock: writers hold lines back, and a program that uses no GPU
for a while is idle, which is no fault of its kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct, field

from gpuflight.bottlenecks.base import Need, NotYet, Unknown
from gpuflight.graph import Entity, edges, nodes

if TYPE_CHECKING:
    from gpuflight.bottlenecks.window import Look, Window
    from gpuflight.graph import Edge
    from gpuflight.rounds import Evidence

WINDOW_S = 30.0
_LEAST_S = 15.0
"""Of a session that runs so much must have been watched: what was before the first sight is its start-up."""
_LEAST_LIVE_MS = 5_000.0
_LEAST_MS = 1_000.0
"""Shares of less GPU time than this say nothing."""
TIMELINE = "gpu_timeline_ms"
RELATIONS = (edges.Own, edges.Access, edges.Transfer)


def sums(*metrics: str) -> dict[type[Entity] | type[Edge], dict[str, float]]:
    """``histories`` of a rule that looks at sums of sessions; always with the timeline."""
    return {nodes.Session: dict.fromkeys((TIMELINE, *metrics), WINDOW_S)}


def need(*metrics: str, attributes: tuple[str, ...] = (), given_by: str = "sessions, cupti") -> tuple[Need, ...]:
    """``needs`` of a rule about sessions."""
    return (Need(kind=nodes.Session, metrics=metrics, attributes=attributes, given_by=given_by),)


class _Session(Struct):
    """What the rules about one session have looked up in one round, for all of them."""

    window_s: float
    sums: dict[str, float] = field(default_factory=dict)


class Recorded:
    """One look at a session. ``live``: it runs, so ``window_s`` are looked at."""

    __slots__ = ("_sums", "live", "look", "window_s")

    def __init__(self, look: Look) -> None:
        self.look = look
        self.live = look.element.attributes.get("state") == "live"
        known = look.window.shared("recorded", _no_sessions)
        session = known.get(look.element.id)
        if session is None:
            window_s = 0.0
            if self.live:
                window_s = min(WINDOW_S, look.covered_s(TIMELINE, WINDOW_S, least=_LEAST_S / WINDOW_S))
            session = known[look.element.id] = _Session(window_s)
        self.window_s = session.window_s
        self._sums = session.sums

    def sum(self, metric: str) -> float:
        """How much of it there was. Raises Unknown."""
        found = self._sums.get(metric)
        if found is None:
            found = self.look.increase(metric, WINDOW_S) if self.live else self.look.metric(metric)
            self._sums[metric] = found
        return found

    def known(self, metric: str) -> float:
        """The same; 0 where the session has no such metric, because nothing of the kind happened."""
        return self.sum(metric) if self.look.has(metric) else 0.0

    def timeline_ms(self) -> float:
        """The time that is judged; 0 if a session that runs did nothing on GPUs lately. Raises Unknown if too short."""
        told_ms = self.sum(TIMELINE)
        if self.live:
            return told_ms if told_ms >= _LEAST_LIVE_MS else 0.0
        if told_ms < _LEAST_MS:
            raise Unknown(f"its log covers {told_ms:.3g} ms of work on GPUs, {_LEAST_MS:.0f} are needed")
        return told_ms

    def wall_ms(self) -> float:
        """The same as time that passed: of several GPUs that work side by side it is that of one. Raises Unknown."""
        return self.timeline_ms() / self.gpus

    @property
    def gpus(self) -> float:
        """How many GPUs it works on, as far as its kernels name them."""
        count: float = self.look.element.metrics.get("gpus_worked_count", 1)
        return max(count, 1)

    def saw(self, metric: str, value: float | None = None, samples_count: int = 1) -> Evidence:
        """Evidence: the sum that was judged."""
        return self.look.saw(
            metric,
            self.sum(metric) if value is None else value,
            samples_count=max(samples_count, 1),
            window_s=self.window_s,
        )

    def during(self) -> str:
        """The time that is judged, for messages."""
        return f"in the last {self.window_s:.0f} s" if self.live else "in the session"

    def idle_share(self) -> float | None:
        """Share of the time (0 to 1) in which nothing ran on its GPUs; None where it is not known."""
        if not self.look.has("gpu_active_ms") or not (told_ms := self.sum(TIMELINE)):
            return None
        return min(max(1 - self.sum("gpu_active_ms") / told_ms, 0.0), 1.0)

    def around(self) -> list[str]:
        """The session, its process and its GPUs, for findings that concern them."""
        look = self.look
        window = look.window
        owners = [edge.source for edge in window.into(look.id, edges.Own)]
        gpus: dict[str, None] = {}
        for holder in (look.id, *owners):
            gpus |= {e.target: None for e in window.out_of(holder, edges.Access) if e.target.startswith("GPU(")}
            gpus |= {e.target: None for e in window.out_of(holder, edges.Transfer) if e.target.startswith("GPU(")}
        return [look.id, *(owner for owner in owners if owner.startswith("Process(")), *list(gpus)[:8]]


def _no_sessions(_window: Window) -> dict[str, _Session]:
    return {}


def steps_of(seen: Recorded, least: int = 3) -> float:
    """How many steps there were. Raises Unknown where there are none, or fewer than ``least``."""
    steps = seen.sum("steps_count")
    if steps < least:
        raise (NotYet if seen.live else Unknown)(f"{steps:.0f} of the {least} steps that are needed")
    return steps
