"""From verdicts to findings: how long a condition must hold, when a finding ends, and what flaps.

One ``Track`` per (rule, subject) that is more than clear: the condition is met but not for long enough (pending), or a
finding is open.
"""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from gpuflight.bottlenecks.base import Rule, Verdict
from gpuflight.graph.element import EdgeKey
from gpuflight.rounds import Finding

FLAP_COUNT = 3
FLAP_WINDOW_S = 600.0
"""A finding that opened this often within the window is held open until the condition has been gone for a quarter of
it: after gpud's flap rules (three changes); the numbers are a guess of ours."""

UNKNOWN_ROUNDS = 3
"""For how many rounds an open finding stands when its evidence is missing; then it ends, since nothing supports it."""

_NEARLY = 0.95
"""Rounds are not as far apart as asked to the millisecond: two of 5 s are 10 s, though they took 9.99."""


class Track:
    """The state of one rule about one subject."""

    __slots__ = (
        "cleared_s", "finding", "gone_rounds", "key", "met_rounds", "met_since_s", "opened_at_s", "rule", "subject",
        "unknown_rounds", "verdict",
    )  # fmt: skip

    def __init__(self, rule: Rule, subject: str, key: str | EdgeKey | None) -> None:
        self.rule = rule
        self.subject = subject
        self.key = key
        """Of the element that it is about; None for a group."""
        self.verdict: Verdict | None = None
        self.finding: Finding | None = None
        self.met_since_s: float | None = None
        self.met_rounds = 0
        self.gone_rounds = 0
        self.unknown_rounds = 0
        self.cleared_s: float | None = None
        self.opened_at_s: deque[float] = deque(maxlen=FLAP_COUNT)

    @property
    def idle(self) -> bool:
        """Whether nothing is pending and no finding is open."""
        return self.finding is None and self.met_since_s is None

    def forgettable(self, now_s: float) -> bool:
        """Whether nothing need be remembered, not even that it opened lately."""
        return self.idle and not (self.opened_at_s and now_s - self.opened_at_s[-1] < FLAP_WINDOW_S)

    def flapping(self, now_s: float) -> bool:
        """Whether it opened too often lately."""
        return len(self.opened_at_s) == FLAP_COUNT and now_s - self.opened_at_s[0] < FLAP_WINDOW_S

    def restart(self) -> None:
        """Rounds were missed: what is pending begins anew."""
        self.met_since_s = None
        self.met_rounds = 0
        self.gone_rounds = 0

    def fired(self, verdict: Verdict, now_s: float, number: int, time_ns: int, ready: bool) -> None:
        """The condition is met in this round. ``ready`` is False during the subject's warm-up."""
        self.verdict = verdict
        self.unknown_rounds = self.gone_rounds = 0
        self.cleared_s = None
        if self.met_since_s is None:
            self.met_since_s = now_s
            self.met_rounds = 0
        self.met_rounds += 1
        if self.finding is not None:
            before = self.finding
            self.finding = self._finding(before.opened_round, before.opened_time_ns, now_s)
            if _shape(before) != _shape(self.finding):
                self.finding.change = "updated"
        elif ready and self._held(now_s):
            self.opened_at_s.append(now_s)
            self.finding = self._finding(number, time_ns, now_s)
            self.finding.change = "opened"

    def suspected(self, number: int, time_ns: int, now_s: float) -> Finding:
        """What is pending, as a finding that is not confirmed."""
        finding = self._finding(number, time_ns, now_s)
        finding.confirmed = False
        return finding

    def clear(self, now_s: float) -> Finding | None:
        """The condition is not met in this round; the finding that ends by it, if any."""
        self.met_since_s = None
        self.met_rounds = 0
        self.unknown_rounds = 0
        if self.finding is None:
            return None
        self.finding.change = ""
        self.gone_rounds += 1
        if self.cleared_s is None:
            self.cleared_s = now_s
        if self.gone_rounds < self.rule.clear_rounds:
            return None
        if self.flapping(now_s) and now_s - self.cleared_s < FLAP_WINDOW_S / 4:
            self.finding.flapping = True
            return None
        return self.end()

    def unknown(self, now_s: float) -> Finding | None:
        """Nothing can be said in this round; an open finding stands for a few rounds."""
        self.unknown_rounds += 1
        if self.finding is not None:
            self.finding.change = ""
        if self.unknown_rounds < UNKNOWN_ROUNDS:
            return None
        self.restart()
        return self.end()

    def end(self) -> Finding | None:
        """Take the open finding away; None if there was none."""
        ended, self.finding = self.finding, None
        self.restart()
        self.cleared_s = None
        if ended is None:
            return None
        return replace(ended, change="cleared", explains=[], explained_by="")

    def _held(self, now_s: float) -> bool:
        if self.rule.whole_session:
            return True
        since_s = self.met_since_s if self.met_since_s is not None else now_s
        return self.met_rounds >= self.rule.persist_rounds and now_s - since_s >= self.rule.persist_s * _NEARLY

    def _finding(self, opened_round: int, opened_time_ns: int, now_s: float) -> Finding:
        verdict = self.verdict
        assert verdict is not None  # noqa: S101 - set by fired
        return Finding(
            id=f"{self.rule.name}@{self.subject}",
            rule=self.rule.name,
            severity=verdict.severity,
            message=verdict.message,
            entities=verdict.entities,
            edges=verdict.edges,
            evidence=verdict.evidence,
            cost=verdict.cost,
            cost_gpu_s=verdict.cost_gpu_s,
            advice=verdict.advice or self.rule.advice,
            verify=verdict.verify or self.rule.verify,
            opened_round=opened_round,
            opened_time_ns=opened_time_ns,
            flapping=self.flapping(now_s),
        )


def _shape(finding: Finding) -> tuple[object, ...]:
    return (finding.severity, finding.entities, finding.edges)
