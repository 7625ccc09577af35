"""The result of looking at a machine: ranked findings, their places on the graph, and what could not be judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from gpuflight.bottlenecks.base import Rule
from gpuflight.bottlenecks.engine import Engine
from gpuflight.bottlenecks.folding import fold
from gpuflight.bottlenecks.survey import RuleState
from gpuflight.graph import Graph, nodes
from gpuflight.rounds import Coverage, Finding

_MAX_CLIMB = 6


class Unjudged(Struct, kw_only=True):
    """A reason why rules could not judge, which rules, and what would help."""

    reason: str
    rules: list[str]
    hint: str = ""


class Diagnosis(Struct, kw_only=True):
    """What a look at a machine, a recording, a graph or a session says.

    ``findings``: roots first, symptoms after theirs; those that are not ``confirmed`` come last. ``places``: for each
    finding's id where its elements are, outermost first. ``rules``: how many rules are in each state.
    """

    source: str
    hostname: str = ""
    seconds: float = 0.0
    rounds_count: int = 0
    findings: list[Finding] = field(default_factory=list)
    places: dict[str, list[str]] = field(default_factory=dict)
    rules: dict[str, int] = field(default_factory=dict)
    states: list[RuleState] = field(default_factory=list)
    unjudged: list[Unjudged] = field(default_factory=list)
    coverage: list[Coverage] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """``critical`` | ``warn`` | ``healthy`` | ``unknown``: of confirmed findings; notes (info) are healthy, and
        nothing is known where no rule could judge anything."""
        severities = {finding.severity for finding in self.findings if finding.confirmed}
        if "critical" in severities:
            return "critical"
        if "warn" in severities:
            return "warn"
        judged = self.rules.get("clear", 0) + self.rules.get("fired", 0)
        return "healthy" if judged else "unknown"


def diagnose(
    engine: Engine,
    source: str,
    findings: Sequence[Finding],
    graph: Graph,
    coverage: Sequence[Coverage],
    **known: object,
) -> Diagnosis:
    """Put together what the engine says after its last round. ``known``: further fields of Diagnosis."""
    suspected = [] if engine.snapshot else engine.suspected()
    ordered = [*findings, *fold(suspected, engine.rules, engine.window)]
    confirmed = [finding for finding in ordered if finding.confirmed]
    states = engine.survey()
    return Diagnosis(
        source=source,
        findings=[*confirmed, *(finding for finding in ordered if not finding.confirmed)],
        places={finding.id: place(graph, finding) for finding in ordered},
        rules=dict(Counter(state.state for state in states)),
        states=states,
        unjudged=unjudged(states, engine.rules, coverage),
        coverage=list(coverage),
        **known,  # type: ignore[arg-type]
    )


def place(graph: Graph, finding: Finding) -> list[str]:
    """Where a finding's first element is: what holds it, outermost first (``Host h``, ``Container c``, ``GPU 3``)."""
    first = next((each for each in finding.entities if each in graph.nodes), "")
    if not first and finding.edges:
        first = finding.edges[0].partition("(")[2].partition("->")[0]
    if first not in graph.nodes:
        return []
    holders = _holders(graph, first)
    return [label(graph, each) for each in reversed(holders)]


def _holders(graph: Graph, entity_id: str) -> list[str]:
    """The element and what holds it, by containment, innermost first. O(edges)."""
    outer: dict[str, str] = {}
    for source, target, kind in graph.edges:
        if kind == "Host" or (kind == "Own" and target not in outer and source.startswith("Process(")):
            outer[target] = source
        elif kind in ("Affinity", "Belong") and source not in outer and not target.startswith("Process("):
            outer[source] = target
    found = [entity_id]
    while len(found) < _MAX_CLIMB:
        holder = outer.get(found[-1])
        if holder is None or holder in found:
            return found
        if holder.startswith("Process(") and found[-1].startswith("Process("):
            # A process's parent says little about where it is: go on from there without naming it.
            outer[found[-1]] = outer.get(holder, "")
            if not outer[found[-1]]:
                return found
            continue
        found.append(holder)
    return found


def label(graph: Graph, entity_id: str) -> str:
    """An entity as people call it, with its kind."""
    entity = graph.nodes.get(entity_id)
    if entity is None:
        return entity_id
    if isinstance(entity, nodes.GPU):
        index = entity.attributes.get("index")
        return f"GPU {index if index is not None else entity.uuid}"
    if isinstance(entity, nodes.Process):
        return f"{entity.attributes.get('name') or 'process'} ({entity.pid})"
    text = entity.label
    return text if text.startswith(entity.kind) else f"{entity.kind} {text}"


def unjudged(states: Iterable[RuleState], rules: Mapping[str, Rule], coverage: Sequence[Coverage]) -> list[Unjudged]:
    """Why rules could not judge, the reasons that concern most rules first; each with the hint of the collector that
    would give the evidence, where one has a hint."""
    by_reason: dict[str, list[str]] = {}
    for state in states:
        if state.state == "unknown":
            by_reason.setdefault(next(iter(state.unknown)), []).append(state.rule)
        elif state.state == "no subject":
            by_reason.setdefault(_no_subject(rules[state.rule], coverage), []).append(state.rule)
        elif state.state == "failed":
            by_reason.setdefault(f"the rule failed: {state.failed}", []).append(state.rule)
    found = [
        Unjudged(reason=reason, rules=sorted(names), hint=_hint(rules[names[0]], coverage))
        for reason, names in by_reason.items()
    ]
    return sorted(found, key=lambda each: (-len(each.rules), each.reason))


def _givers(rule: Rule) -> list[str]:
    return [word.strip(",") for need in rule.needs for word in need.given_by.split()[:1] if word]


def _no_subject(rule: Rule, coverage: Sequence[Coverage]) -> str:
    for line in coverage:
        if line.collector in _givers(rule) and line.status != "ok":
            return f"{line.collector}: {line.reason}"
    kinds = sorted({str(need.kind.__struct_config__.tag) for need in rule.needs})
    return f"there is no {' or '.join(kinds)} here"


def _hint(rule: Rule, coverage: Sequence[Coverage]) -> str:
    for line in coverage:
        if line.collector in _givers(rule) and line.status != "ok" and line.hint:
            return line.hint
    return ""
