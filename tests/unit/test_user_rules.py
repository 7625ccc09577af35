"""Rules as data: what they judge, what is refused, and that nothing of Python can be reached from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.rule_scenes import Player, changing, steady

from gpuflight.bottlenecks.base import Rule
from gpuflight.bottlenecks.build import make_engine
from gpuflight.bottlenecks.engine import Engine
from gpuflight.bottlenecks.settings import RulesSettings
from gpuflight.bottlenecks.user_rules import load_file, load_folder, make_rule
from gpuflight.errors import ConfigError
from gpuflight.graph import nodes
from gpuflight.registry import plugins

ROOT = Path(__file__).parents[2]
GOOD: dict[str, Any] = {
    "kind": "GPU",
    "when": "power_watts > 500",
    "message": "{label}: {power_watts:.0f} W",
    "advice": "x",
}


def gpu(name: str = "H100", **metrics: float) -> nodes.GPU:
    return nodes.GPU(uuid="GPU-1", attributes={"index": 1, "name": name}, metrics=metrics)


def messages(rule: Any, scene: Any) -> list[str]:
    return [finding.message for finding in Player(Engine([rule])).play(scene)[-1].findings]


def test_it_fires_with_its_numbers_as_evidence() -> None:
    found = Player(Engine([make_rule("hungry", GOOD)])).play(steady(gpu(power_watts=612.7)))[-1].findings
    assert [(f.id, f.message, f.severity) for f in found] == [("hungry@GPU(uuid=GPU-1)", "GPU 1: 613 W", "warn")]
    assert [(s.metric, s.value, s.unit) for s in found[0].evidence] == [("power_watts", 612.7, "W")]


def test_it_is_clear_and_unknown_like_any_other() -> None:
    rule = make_rule("hungry", GOOD)
    engine = Engine([rule])
    Player(engine).play(steady(gpu(power_watts=100.0)))
    assert engine.survey()[0].state == "clear"
    engine = Engine([rule])
    Player(engine).play(steady(gpu()))
    assert engine.survey()[0].state == "unknown"


def test_where_selects_and_for_waits() -> None:
    rule = make_rule("hungry", {**GOOD, "where": {"name": "H2*"}, "for_s": 20})
    assert messages(rule, steady(gpu(power_watts=612.7), seconds=60)) == []
    assert messages(rule, steady(gpu("H200", power_watts=612.7), seconds=10)) == []
    assert messages(rule, steady(gpu("H200", power_watts=612.7), seconds=30)) == ["GPU 1: 613 W"]


def test_another_condition_may_end_it() -> None:
    rule = make_rule("hungry", {**GOOD, "clear_when": "power_watts < 300"})
    values = [600, 600, 400, 400, 200, 200]
    player = Player(Engine([rule]))
    judged = player.play(changing(lambda n: [gpu(power_watts=values[n])], len(values)))
    assert [bool(each.findings) for each in judged] == [False, True, True, True, True, False]


def test_the_past_of_a_metric() -> None:
    rule = make_rule("warm", {**GOOD, "when": "mean('power_watts', 60) > 500 and power_watts > 0"})
    assert messages(rule, changing(lambda n: [gpu(power_watts=900 if n % 2 else 300)], 30)) != []
    assert messages(rule, changing(lambda n: [gpu(power_watts=600 if n % 4 == 0 else 100)], 30)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "Toaster"}, "there is no kind 'Toaster'"),
        ({"when": "power_watts >"}, "not an expression"),
        ({"when": "__import__('os').system('id')"}, "the functions are"),
        ({"when": "open('/etc/passwd')"}, "the functions are"),
        ({"when": "power_watts.__class__"}, "only names"),
        ({"when": "[x for x in (1,)]"}, "only names"),
        ({"when": "power_watts[0] > 1"}, "only names"),
        ({"when": "9 ** 9 ** 9 > power_watts"}, "** is not for here"),
        ({"when": "mean('power_watts') > 1"}, "takes the name of a metric"),
        ({"when": "(" * 300 + "1" + ")" * 300}, "not an expression"),
        ({"when": "x" * 3000}, "at most 2000"),
        ({"message": "{label.__class__}"}, "only {label} and names"),
        ({"message": "{0}"}, "only {label} and names"),
        ({"message": "{"}, "message"),
        ({"severity": "panic"}, "severity"),
        ({"for_s": -1}, "for_s"),
        ({"colour": "red"}, "there is no such key"),
        ({"kind": "Process", "when": "rss_bytes / 2 > fds_count"}, "a host has thousands"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_rule("mine", {**GOOD, **change})
    assert said in str(caught.value) and str(caught.value).startswith("mine")


@pytest.mark.parametrize("expression", ["power_watts / 0 > 1", "power_watts > 'a'", "'a' * 999999 * 99999 == 'b'"])
def test_what_cannot_be_computed_is_unknown(expression: str) -> None:
    engine = Engine([make_rule("mine", {**GOOD, "when": expression})])
    judged = Player(engine).play(steady(gpu(power_watts=1.0)))
    assert judged[-1].findings == []
    assert engine.survey()[0].state == "unknown"


def test_thousands_are_screened() -> None:
    rule = make_rule(
        "big", {**GOOD, "kind": "Process", "when": "1e9 < rss_bytes and fds_count > 5", "message": "{label}"}
    )
    assert [(s.metric, s.comparison, s.limit) for s in rule.screens] == [("rss_bytes", ">", 1e9)]


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[one]\nkind = "GPU"\nwhen = "x > 1"\nmessage = "m"\nadvice = "a"\n')
    (tmp_path / "b.txt").write_text("not ours")
    assert [rule.name for rule in load_folder(str(tmp_path))] == ["one"]
    (tmp_path / "c.toml").write_text("[two\n")
    with pytest.raises(ConfigError, match=r"c\.toml: not TOML"):
        load_folder(str(tmp_path))
    with pytest.raises(ConfigError, match="No such file"):
        load_file(str(tmp_path / "d.toml"))


def test_the_ready_examples_are_well_and_register_nothing() -> None:
    assert [rule.name for rule in load_folder(str(ROOT / "configs" / "rules"))] == ["hot_gpu", "big_python"]
    assert "hot_gpu" not in plugins(Rule)


def test_they_judge_beside_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        '[mine]\nkind = "GPU"\nwhen = "power_watts > 1"\nmessage = "m {power_watts}"\nadvice = "a"\n'
    )
    engine = make_engine(RulesSettings(folders=[str(tmp_path)]))
    assert engine is not None and "mine" in engine.rules and "gpu_lost" in engine.rules
    (tmp_path / "b.toml").write_text('[gpu_lost]\nkind = "GPU"\nwhen = "x > 1"\nmessage = "m"\nadvice = "a"\n')
    with pytest.raises(ConfigError, match="there is a rule 'gpu_lost' already"):
        make_engine(RulesSettings(folders=[str(tmp_path)]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"off": ["nosuch"]}, "there is no rule 'nosuch'"),
        ({"overrides": [{"rule": "gpu_lost", "thresholds": {"x": 1}}]}, "has no threshold 'x'"),
        ({"overrides": [{"rule": "nosuch", "thresholds": {"x": 1}}]}, "there is no rule 'nosuch'"),
    ],
)
def test_settings_that_name_nothing(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_engine(RulesSettings.model_validate(settings))
