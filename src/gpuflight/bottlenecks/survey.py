"""What every rule can say about a round, and above all what it cannot say and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct, field

from gpuflight.bottlenecks.base import ElementRule, Rule, Unknown, Verdict

_REASONS = 5
"""Reasons kept per rule, the most frequent first."""


class RuleState(Struct, kw_only=True):
    """One rule at one moment: how many subjects it has an open finding about, found clear, and could not judge, by
    reason. ``failed``: how it broke."""

    rule: str
    open_count: int = 0
    clear_count: int = 0
    unknown: dict[str, int] = field(default_factory=dict)
    failed: str = ""

    @property
    def state(self) -> str:
        """``failed`` | ``fired`` | ``unknown`` (mostly) | ``clear`` | ``no subject``, the first that applies."""
        if self.failed:
            return "failed"
        if self.open_count:
            return "fired"
        if sum(self.unknown.values()) > self.clear_count:
            return "unknown"
        return "clear" if self.clear_count else "no subject"


def survey_elements(
    rule: ElementRule,
    elements: Sequence[Any],
    judge: Callable[[Rule, Any], Verdict],
    screened: Callable[[ElementRule, Any], bool],
    state: RuleState,
) -> None:
    """Judge every element of the rule's kind, those without an open finding. What no screen lets through is clear where
    a screen's metric is known."""
    reasons: Counter[str] = Counter()
    silent: Counter[str] = Counter()  # of those of which nobody said anything
    wanted = [(screen.metric, screen.comparison == "in") for screen in rule.screens]
    for element in elements:
        if wanted and not screened(rule, element):
            known = any(name in (element.attributes if fact else element.metrics) for name, fact in wanted)
            if known:
                state.clear_count += 1
            else:
                missing = wanted[0][0]
                why = (element.unknown or {}).get(missing)
                (reasons if why else silent)[f"{missing} of {element.kind}: {why or 'not measured here'}"] += 1
            continue
        try:
            verdict = judge(rule, element)
        except Unknown as reason:
            reasons[str(reason)] += 1
            continue
        except Exception as error:  # noqa: BLE001 - a rule that throws costs that rule its answer
            state.failed = f"{type(error).__name__}: {error}"
            continue
        if verdict.state == "unknown":
            reasons[verdict.reason] += 1
        else:
            state.clear_count += 1
    if not (rule.measured_of_some and (state.clear_count or state.open_count)):
        reasons += silent
    state.unknown = dict(reasons.most_common(_REASONS))


def survey_group(judge: Callable[[], Sequence[Verdict]], state: RuleState) -> None:
    """Ask a group rule once more."""
    try:
        verdicts = judge()
    except Unknown as reason:
        state.unknown = {str(reason): 1}
        return
    except Exception as error:  # noqa: BLE001 - see above
        state.failed = f"{type(error).__name__}: {error}"
        return
    state.unknown = dict(Counter(v.reason for v in verdicts if v.state == "unknown").most_common(_REASONS))
    state.clear_count += sum(v.state == "clear" for v in verdicts)
    if not (state.unknown or state.open_count or state.clear_count):
        state.clear_count = 1
