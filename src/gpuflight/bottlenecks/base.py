"""What a rule is: it reads a window of rounds and says what holds the machine back, where, at what cost, and what next.

Rules that hold for every rule:

* Three answers: ``fired``, ``clear``, ``unknown`` with the reason. What could not be read makes a rule unknown, never
  clear; a rule that does not apply (its guard) is clear.
* Counters are judged by their difference over the time that really passed; the first sight of one never fires.
* A verdict carries the numbers it saw: element, metric, value with unit, and over how many samples.
* A threshold says its unit and where it comes from; one that is a guess says so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from msgspec import Struct, field

from gpuflight.registry import Plugin
from gpuflight.rounds import Round, Severity

State = Literal["fired", "clear", "unknown"]


class Threshold(Struct, frozen=True, kw_only=True):
    """A number that a rule compares with. ``clear_at`` is where a finding ends; ``guess`` marks a number of ours."""

    value: float
    unit: str
    source: str
    clear_at: float | None = None
    guess: bool = False


class Evidence(Struct, frozen=True, kw_only=True):
    """One number that a verdict rests on: of which element (its id), over how many samples and seconds."""

    element: str
    metric: str
    value: float
    unit: str
    samples_count: int
    window_s: float = 0.0


class Verdict(Struct, kw_only=True):
    """What one rule says about one entity or edge (or, unknown for all, about none)."""

    state: State
    reason: str = ""
    severity: Severity = "warn"
    entities: list[str] = field(default_factory=list)
    edges: list[str] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    message: str = ""
    cost: str = ""
    advice: str = ""


class Rule(Plugin, family="rules", package="gpuflight.bottlenecks"):
    """Base of every rule. The engine handles warm-up, persistence, clearing and folding from what is declared here."""

    thresholds: ClassVar[dict[str, Threshold]] = {}
    warm_up_s: ClassVar[float] = 0.0
    """For how long after the first sight of an element the rule keeps quiet about it."""

    persist_s: ClassVar[float] = 0.0
    """For how long its condition must hold before it becomes a finding."""

    explains: ClassVar[tuple[str, ...]] = ()
    """Names of rules whose findings about the same elements are symptoms of this one."""

    def __init__(self, settings: Any = None) -> None:
        self.settings = settings if settings is not None or self.settings_class is None else self.settings_class()

    @abstractmethod
    def evaluate(self, window: Sequence[Round]) -> list[Verdict]:
        """Judge the newest of ``window`` (oldest first, at least one). Must not change the rounds."""
