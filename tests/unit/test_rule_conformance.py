"""Every registered rule: what it declares, and that it fires, is clear and is unknown where its cases say so."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from tests.rule_scenes import Case, Player, Scene
from tests.unit import rule_cases

from gpuflight.bottlenecks.base import MASS_KINDS, ElementRule, GroupRule, Rule
from gpuflight.bottlenecks.catalogue import CATALOGUE, NOT_HERE
from gpuflight.bottlenecks.engine import Engine
from gpuflight.bottlenecks.pages import all_pages
from gpuflight.registry import plugins
from gpuflight.rounds import Finding

RULES: dict[str, type[Rule]] = plugins(Rule)
CASES: dict[str, Case] = {}
for module in pkgutil.iter_modules(rule_cases.__path__):
    CASES |= importlib.import_module(f"tests.unit.rule_cases.{module.name}").CASES
ALL = pytest.mark.parametrize("name", RULES)
DOCS = Path(__file__).parents[2] / "docs" / "rules"


def test_no_rule_is_broken() -> None:
    assert [broken for broken in Rule.family.broken if broken.origin.startswith("gpuflight.")] == []


def test_the_catalogue_is_whole() -> None:
    ids = [rule.catalogue_id for rule in RULES.values()]
    assert len(CATALOGUE) == 94
    assert sorted([*ids, *NOT_HERE]) == sorted(CATALOGUE)
    assert all(NOT_HERE.values())


@ALL
def test_declares_what_people_need(name: str) -> None:
    rule = RULES[name]
    assert issubclass(rule, ElementRule | GroupRule)
    assert rule.description and rule.advice and rule.needs
    assert set(rule.explains) <= set(CATALOGUE.values()) | set(RULES), "explains a rule that does not exist"
    assert CATALOGUE[rule.catalogue_id] == name
    assert name not in rule.explains
    assert rule.persist_rounds >= 1 and rule.clear_rounds >= 1


@ALL
def test_thresholds_have_sources_and_warnings_come_before_critical(name: str) -> None:
    thresholds = RULES[name].thresholds
    for key, threshold in thresholds.items():
        assert threshold.source, key
        if threshold.clear_at is not None:
            ahead = threshold.clear_at - threshold.value
            assert ahead >= 0 if threshold.falling else ahead <= 0, f"{key} clears on the wrong side"
        if key.endswith("_warn") and (critical := thresholds.get(key.removesuffix("_warn") + "_crit")) is not None:
            assert critical.unit == threshold.unit
            first = threshold.value > critical.value if threshold.falling else threshold.value < critical.value
            assert first, f"{key} is never reached before critical"
            assert threshold.falling == critical.falling


@ALL
def test_masses_are_screened(name: str) -> None:
    rule = RULES[name]
    if issubclass(rule, ElementRule):
        crowded = [kind for kind in rule.subjects() if kind.__struct_config__.tag in MASS_KINDS]
        if crowded:
            assert rule.screens and not rule.every_round
        assert not [kind for kind in rule.histories if kind.__struct_config__.tag in MASS_KINDS - {"Process"}]
        for screen in rule.screens:
            assert not isinstance(screen.limit, str) or screen.limit in rule.thresholds


@ALL
def test_has_cases(name: str) -> None:
    assert name in CASES, "tests/unit/rule_cases has no case for it"
    assert CASES[name].unknown is not None or CASES[name].never_unknown


def test_no_case_without_a_rule() -> None:
    assert sorted(set(CASES) - set(RULES)) == []


def _play(name: str, scene: Scene) -> tuple[list[Finding], str]:
    """Findings open in the last round, and the state of the rule by a survey."""
    engine = Engine([RULES[name]()], subscribers=lambda: scene.subscribers)
    judged = Player(engine).play(scene)
    failed = [note.reason for judgement in judged for note in judgement.coverage.notes if " failed: " in note.reason]
    assert failed == []
    return judged[-1].findings, engine.survey()[0].state


@ALL
def test_fires(name: str) -> None:
    case = CASES[name]
    found, _ = _play(name, case.fires)
    assert [finding.rule for finding in found] == [name] * max(1, len(found))
    finding = found[0]
    assert not case.about or case.about in (*finding.entities, *finding.edges)
    assert not case.severity or finding.severity == case.severity
    assert finding.evidence and finding.advice
    assert all(seen.samples_count >= 1 for seen in finding.evidence)
    numbers = [seen.value for seen in finding.evidence if not isinstance(seen.value, str)]
    assert not numbers or re.search(r"\d", finding.message), "the message quotes none of its numbers"
    for seen in finding.evidence:
        assert not isinstance(seen.value, float) or seen.value == seen.value, "NaN in evidence"


@ALL
def test_is_clear(name: str) -> None:
    assert _play(name, CASES[name].clear) == ([], "clear")


@ALL
def test_is_unknown(name: str) -> None:
    scene = CASES[name].unknown
    if scene is not None:
        assert _play(name, scene) == ([], "unknown")


@ALL
def test_further_cases(name: str) -> None:
    for label, (expected, scene) in CASES[name].also.items():
        found, state = _play(name, scene)
        severities = {finding.severity for finding in found}
        told = severities if expected in ("info", "warn", "critical") else {"fired"} if found else {state}
        assert told == {expected}, label


@ALL
def test_says_nothing_in_the_first_round_and_ends_with_its_cause(name: str) -> None:
    """Nothing fires at first sight, unless the rule says that one round is enough; and what is mended ends."""
    case, rule = CASES[name], RULES[name]
    engine = Engine([rule()], subscribers=lambda: case.fires.subscribers)
    player = Player(engine)
    judged = player.play(case.fires)
    if rule.persist_rounds > 1 and not rule.whole_session:
        assert judged[0].findings == []


def test_pages_are_up_to_date() -> None:
    pages = all_pages(RULES)
    assert {
        path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md") if path.name != "accuracy.md"
    } == pages
