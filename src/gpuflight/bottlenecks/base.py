"""What a rule is: it looks at elements of the newest round and their recent past, and says what holds the machine back.

Rules that hold for every rule (checked over all registered ones by tests/unit/test_rule_conformance.py):

* Three answers: ``fired``, ``clear``, ``unknown`` with the reason. What could not be read makes a rule unknown, never
  clear (``look.metric`` raises ``Unknown`` by itself); a rule that does not apply (its guard) is clear.
* Counters are judged by their increase over the time that really passed; the first sight of one never fires.
* A fired verdict carries the numbers it saw (``look.saw``): element, metric, value with unit, samples, window. Its
  message quotes them.
* A threshold says its unit and where it comes from; one that is a guess of ours says so.
* Persistence, warm-up, clearing, flapping, folding and ranking are the engine's; a rule only declares them.
* A rule changes nothing it is given, keeps nothing between rounds, reads no clock and no file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from msgspec import Struct, field

from gpuflight.graph import Edge, Entity
from gpuflight.registry import Plugin
from gpuflight.rounds import Evidence, Severity

if TYPE_CHECKING:
    from gpuflight.bottlenecks.window import Look, Window

State = Literal["fired", "clear", "unknown"]
Comparison = Literal[">", ">=", "<", "<=", "in"]


class Unknown(Exception):
    """The rule cannot judge this subject; the text is the reason, for people."""


class NotYet(Unknown):
    """The rule cannot judge this subject yet: what it looks back on is too short. It is asked again each round."""


class Threshold(Struct, frozen=True, kw_only=True):
    """A number that a rule compares with. ``clear_at`` is where an open finding ends (``value`` if None); ``guess``
    marks a number of ours. ``warn`` and ``crit`` of one quantity are two thresholds, named ``<quantity>_warn`` and
    ``<quantity>_crit``; ``falling`` says that less is worse."""

    value: float
    unit: str
    source: str
    clear_at: float | None = None
    guess: bool = False
    falling: bool = False


class Screen(Struct, frozen=True):
    """A necessary condition that costs next to nothing: elements that do not meet it are not judged further.

    ``metric`` of the subject against ``limit``: a number, or the name of a threshold of the rule (overrides count).
    With ``in`` it is an attribute, and ``limit`` the values of it that are worth judging.
    """

    metric: str
    comparison: Comparison
    limit: float | str | tuple[str, ...]


class Need(Struct, frozen=True, kw_only=True):
    """Evidence that a rule asks for: metrics and attributes of a kind of element, and who gives them (for people)."""

    kind: type[Entity] | type[Edge]
    metrics: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    given_by: str = ""


class Verdict(Struct, kw_only=True):
    """What a rule says about one subject. ``subject`` is the id that the finding's id is made of."""

    state: State
    subject: str = ""
    reason: str = ""
    severity: Severity = "warn"
    entities: list[str] = field(default_factory=list)
    edges: list[str] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    message: str = ""
    cost: str = ""
    cost_gpu_s: float | None = None
    advice: str = ""
    verify: str = ""


CLEAR = Verdict(state="clear")


class Rule(Plugin, family="rules", package="gpuflight.bottlenecks"):
    """Base of both sorts of rule. The first line of its docstring is its title, the rest its documentation."""

    catalogue_id: ClassVar[str] = ""
    """Its id in the catalogue (H01 …), which says what it is about: G GPU activity, C communication, H device health,
    S host, N network, M gpuflight itself."""

    severity: ClassVar[Severity] = "warn"
    needs: ClassVar[tuple[Need, ...]] = ()
    thresholds: ClassVar[dict[str, Threshold]] = {}
    guard: ClassVar[str] = ""
    """When it does not apply, in words; the code does it."""

    warm_up_s: ClassVar[float] = 0.0
    """For how long after the first sight of a subject the rule keeps quiet about it."""

    persist_s: ClassVar[float] = 0.0
    """For how long its condition must hold before it becomes a finding, beside ``persist_rounds``."""

    persist_rounds: ClassVar[int] = 2
    clear_rounds: ClassVar[int] = 2
    """In how many rounds in a row the condition must be met, and be gone, to open and to clear a finding. An event that
    is already counted over a window (an error counter that rose) declares 1."""

    every_rounds: ClassVar[int] = 1
    """Judge each element, or the group, only in every so many rounds: for what takes hours to show or hardly ever
    changes, and looks at much."""

    whole_session: ClassVar[bool] = False
    """Its metrics are sums over the whole of a recorded session, so one look is enough: no persistence is asked for.
    While the session goes on, what is quiet is judged in every third round only (``index.CALM_ROUNDS``)."""

    explains: ClassVar[tuple[str, ...]] = ()
    """Names of rules whose findings about the same elements are symptoms of this one."""

    cost_formula: ClassVar[str] = "unknown"
    """How ``cost_gpu_s`` is computed, in words."""

    advice: ClassVar[str] = ""
    verify: ClassVar[str] = ""
    """A command that shows whether the advice helped."""

    histories: ClassVar[dict[type[Entity] | type[Edge], dict[str, float]]] = {}
    """Metrics whose past it looks at, by kind: name → seconds."""

    relations: ClassVar[tuple[type[Edge], ...]] = ()
    """Kinds of edge that it follows with ``window.out_of`` and ``window.into``."""

    members: ClassVar[dict[type[Entity], str]] = {}
    """Kind → attribute: the entities that have it are kept for ``window.members``, few of a mass kind."""

    abstract: ClassVar[bool] = True

    def __init__(self, settings: Any = None) -> None:
        self.settings = settings if settings is not None or self.settings_class is None else self.settings_class()


class ElementRule(Rule):
    """Judges one element of one kind: when it changed, while it meets a screen, and while a finding is open."""

    abstract: ClassVar[bool] = True

    subject: ClassVar[type[Entity] | type[Edge] | tuple[type[Entity] | type[Edge], ...]]
    """The kind (or kinds) of what it judges."""

    screens: ClassVar[Sequence[Screen]] = ()
    """Any one of these makes an element worth judging; none: each that changed. Kinds of which a host has thousands
    (``MASS_KINDS``) need one."""

    every_round: ClassVar[bool] = False
    """Judge all elements of the kind in every round: for rules that also look at other elements. Small kinds only."""

    gpu_users_only: ClassVar[bool] = False
    """Judge only processes that use a GPU (an ``Access`` edge leads to one)."""

    measured_of_some: ClassVar[bool] = False
    """Its metric is measured of the elements that matter only: where some have it, those that neither have it nor say
    why are no subjects. The rule is unknown where none has it."""

    time_matters: ClassVar[bool] = True
    """With ``histories`` and no screens: judge in every round, since means move although nothing changes. False for
    counters, where only a change of the element can make it fire."""

    @classmethod
    def subjects(cls) -> tuple[type[Entity] | type[Edge], ...]:
        """``subject`` as a tuple."""
        return cls.subject if isinstance(cls.subject, tuple) else (cls.subject,)

    @abstractmethod
    def judge(self, look: Look) -> Verdict:
        """The verdict about ``look.element``. Raises Unknown."""


class GroupRule(Rule):
    """Judges elements together (the ranks of a job, the GPUs of a host), or the round itself. Called once a round."""

    abstract: ClassVar[bool] = True

    @abstractmethod
    def judge(self, window: Window) -> Iterable[Verdict]:
        """Verdicts, each with its ``subject``; a subject that is not mentioned is clear. Raises Unknown for all."""


MASS_KINDS = frozenset(
    {"Process", "Thread", "Socket", "UnixSocket", "Pipe", "ConnectTo", "SendTo", "Belong", "Own", "Access"}
)
"""Kinds of which one host may have thousands."""
