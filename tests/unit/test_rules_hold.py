"""What no rule may do, whatever it judges: fire on missing data, at the first sight of a counter, after a reset, on a
step of the clock, or before its time; and what each finding says: its numbers. Over the scenes of every rule.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from tests.rule_scenes import Elements, Player, Scene
from tests.unit.test_rule_conformance import CASES, RULES

from gpuflight.bottlenecks.engine import Engine, Judgement
from gpuflight.bottlenecks.series import Series
from gpuflight.bottlenecks.window import Window
from gpuflight.graph import Edge, Entity
from gpuflight.rounds import Evidence, Finding

ALL = pytest.mark.parametrize("name", [name for name in RULES if name in CASES])
HOUR_NS = 3600 * 10**9


def _player(name: str, scene: Scene) -> Player:
    return Player(Engine([RULES[name]()], subscribers=lambda: scene.subscribers))


def _rounds(scene: Scene) -> list[Elements]:
    return [*scene.rounds, *[scene.rounds[-1]] * scene.repeat]


def _told(judged: list[Judgement]) -> list[str]:
    return [finding.message for judgement in judged for finding in judgement.findings]


def _changed(scene: Scene, change: Callable[[int, Entity | Edge], Entity | Edge]) -> Scene:
    """The scene with every element of every round changed; ``change`` is given the number of the round."""
    rounds = [[change(number, element) for element in elements] for number, elements in enumerate(_rounds(scene))]
    return replace_scene(scene, rounds)


def _without(element: Entity | Edge, names: set[str]) -> Entity | Edge:
    return replace(element, metrics={k: v for k, v in element.metrics.items() if k not in names})


def replace_scene(scene: Scene, rounds: list[Any]) -> Scene:
    other = {name: getattr(scene, name) for name in scene.__dataclass_fields__ if name not in ("rounds", "repeat")}
    return Scene(rounds, repeat=0, **other)


@ALL
def test_what_is_missing_is_no_finding(name: str) -> None:
    """In the scene where it fires, none of the evidence that the rule asks for is there."""
    needs: dict[type[Any], tuple[set[str], set[str]]] = {}
    for need in RULES[name].needs:
        metrics, attributes = needs.setdefault(need.kind, (set(), set()))
        metrics.update(need.metrics)
        attributes.update(need.attributes)
    subjects = getattr(RULES[name], "subjects", tuple)()
    for kind in subjects[1:]:  # what is asked of the first is asked of its kin
        needs.setdefault(kind, needs.get(subjects[0], (set(), set())))
    if not any(metrics or attributes for metrics, attributes in needs.values()):
        pytest.skip("it judges whether something is there at all")

    def without(_number: int, element: Entity | Edge) -> Entity | Edge:
        metrics, attributes = needs.get(type(element), (set(), set()))
        return replace(
            element,
            metrics={k: v for k, v in element.metrics.items() if k not in metrics},
            attributes={k: v for k, v in element.attributes.items() if k not in attributes},
        )

    scene = _changed(CASES[name].fires, without)
    judged = _player(name, scene).play(scene)
    assert _told(judged) == []
    assert not [note for judgement in judged for note in judgement.coverage.notes if " failed: " in note.reason]


def _counters(name: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Which metrics the rule looks at by their increase, found out by watching it."""
    asked: set[int] = set()
    named: set[str] = set()
    increase, of_element = Series.increase, Window.increase

    def watched(self: Series, now_s: float, window_s: float) -> float | None:
        asked.add(id(self))
        return increase(self, now_s, window_s)

    def watched_window(self: Window, element: Entity | Edge, metric: str, window_s: float) -> float | None:
        named.add(metric)
        return of_element(self, element, metric, window_s)

    monkeypatch.setattr(Series, "increase", watched)
    monkeypatch.setattr(Window, "increase", watched_window)
    player = _player(name, CASES[name].fires)
    player.play(CASES[name].fires)
    monkeypatch.undo()
    rows = player.engine._index.histories.values()
    return named | {metric for row in rows for metric, series in row.items() if id(series) in asked}


@ALL
def test_a_counter_that_is_reset_or_seen_first_is_no_finding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = _counters(name, monkeypatch)
    if not counters:
        pytest.skip("it looks at no counter")
    scene = CASES[name].fires
    last = _rounds(scene)[-1]
    uncounted = replace_scene(scene, [[_without(element, counters) for element in each] for each in _rounds(scene)])
    if _told(_player(name, uncounted).play(uncounted)):
        pytest.skip("it fires without any counter here")

    def standing(high: float) -> Elements:
        return [
            replace(element, metrics={k: high if k in counters else v for k, v in element.metrics.items()})
            for element in last
        ]

    for label, rounds in (
        ("first sight", [standing(1e6)] * 12),
        ("reset", [standing(1e6)] * 6 + [standing(0.0)] * 12),
        ("appears late", [[]] + [standing(1e6)] * 12),
    ):
        shown = replace_scene(scene, rounds)
        player = _player(name, shown)
        player.wall_ns += 24 * HOUR_NS  # times that elements carry are long past
        assert _told(player.play(shown)) == [], label


@ALL
def test_steps_of_the_clock_are_no_finding(name: str) -> None:
    """The wall clock jumps to and fro; then the machine sleeps, and its monotonic clock begins anew."""
    scene = CASES[name].clear
    rounds = _rounds(scene)
    player = _player(name, scene)
    judged = []
    for number, elements in enumerate(rounds * 2):
        player.wall_ns += (0, HOUR_NS, -2 * HOUR_NS, HOUR_NS)[number % 4]
        if number == len(rounds):
            player.now_s += 100_000.0
        if number == len(rounds) + 2:
            player.now_s = 5.0
        if number <= len(rounds) + 3:
            judged.append(player.round(elements, scene))
    assert _told(judged) == []


@ALL
def test_a_step_of_the_wall_clock_changes_no_verdict(name: str) -> None:
    scene = CASES[name].fires
    player, still = _player(name, scene), _player(name, scene)
    for number, elements in enumerate(_rounds(scene)):
        player.wall_ns += (HOUR_NS, -HOUR_NS, -HOUR_NS, HOUR_NS)[number % 4]
        stepped, plain = player.round(elements, scene), still.round(elements, scene)
        assert [f.id for f in stepped.findings] == [f.id for f in plain.findings]


@ALL
def test_after_a_gap_it_begins_anew(name: str) -> None:
    """Rounds that were missed prove nothing: what was pending before the machine slept is not sure after it."""
    rule, scene = RULES[name], CASES[name].fires
    if rule.whole_session or (rule.persist_rounds == 1 and not rule.persist_s):
        pytest.skip("one look is enough")
    player = _player(name, scene)
    for _ in range(3):  # so that it is known how far rounds are apart
        player.round([], scene)
    seen = 0
    for elements in _rounds(scene):
        if player.round(elements, scene).findings:
            break
        seen += 1
    player = _player(name, scene)
    for elements in [[]] * 3 + _rounds(scene)[:seen]:
        player.round(elements, scene)
    player.now_s += 100_000.0
    assert player.round(_rounds(scene)[seen], scene).findings == []


@ALL
def test_not_before_its_time(name: str) -> None:
    rule, scene = RULES[name], CASES[name].fires
    if rule.whole_session:
        pytest.skip("its numbers are of the whole session")
    player = _player(name, scene)
    for number, elements in enumerate(_rounds(scene)):
        found = player.round(elements, scene).findings
        passed_s = number * scene.step_s
        if number + 1 < rule.persist_rounds or passed_s < max(0.95 * rule.persist_s, rule.warm_up_s):
            assert found == [], f"after {passed_s} s"


def _numbers(message: str) -> list[float]:
    return [float(text.replace(",", "")) for text in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", message)]


def _quoted(values: list[float], numbers: list[float]) -> bool:
    """Whether one of the values (or the share of one in another, or in all) is among the numbers, in any unit."""
    total = sum(map(abs, values)) or 1.0
    shares = [100 * a / b for a in values for b in values if b]
    shares += [100 * (b - a) / b for a in values for b in values if b] + [100 * a / total for a in values]
    scales = [1.0, *(1000.0**n for n in (-3, -2, -1, 1, 2, 3, 4)), *(1024.0**n for n in (1, 2, 3, 4)), 60.0, 3600.0]
    return any(
        abs(abs(value) / scale - number) <= max(0.06 * number, 0.51 if number >= 2 else 0.06)
        for number in numbers
        for value in [*values, *shares]
        for scale in scales
    )


def _findings(name: str) -> Iterator[Finding]:
    case = CASES[name]
    for scene in [case.fires, *(scene for _, scene in case.also.values())]:
        yield from _player(name, scene).play(scene)[-1].findings


@ALL
def test_the_message_quotes_its_numbers(name: str) -> None:
    for finding in _findings(name):
        evidence: list[Evidence] = finding.evidence
        values = [float(seen.value) for seen in evidence if not isinstance(seen.value, str)]
        assert not values or _quoted(values, _numbers(finding.message)), (finding.message, values)
        texts = [str(seen.value) for seen in evidence if isinstance(seen.value, str)]
        assert values or any(text in finding.message for text in texts) or re.search(r"\d", finding.message)
