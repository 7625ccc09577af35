"""The rule engine: persistence, clearing, unknown, warm-up, flapping, gaps, screens, folding, order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from gpuflight.bottlenecks.base import CLEAR, ElementRule, GroupRule, Screen, Threshold, Unknown, Verdict
from gpuflight.bottlenecks.engine import Engine, Judgement
from gpuflight.bottlenecks.overrides import Override, Overrides
from gpuflight.bottlenecks.window import Look, Window, evidence
from gpuflight.graph import Edge, Entity, edges, nodes
from gpuflight.graph.store import LiveStore
from gpuflight.rounds import Environment, Round


class Hot(ElementRule):
    """A GPU is hot."""

    abstract = True
    name = "hot"
    subject = nodes.GPU
    thresholds = {"hot_warn": Threshold(value=80, clear_at=70, unit="°C", source="test")}
    explains = ("slow",)

    def judge(self, look: Look) -> Verdict:
        value = look.metric("temperature_celsius")
        if value <= look.limit("hot_warn"):
            return CLEAR
        return look.fired(f"{look.label} has {value:g} °C", [look.saw("temperature_celsius")], cost_gpu_s=value / 100)


class Slow(ElementRule):
    """A process is slow."""

    abstract = True
    name = "slow"
    subject = nodes.Process
    screens = (Screen("cpu_pct", ">", "busy"),)
    thresholds = {"busy": Threshold(value=50, unit="%", source="test")}

    judged = 0

    def judge(self, look: Look) -> Verdict:
        type(self).judged += 1
        value = look.metric("cpu_pct")
        return look.fired("slow", [look.saw("cpu_pct")]) if value > look.limit("busy") else CLEAR


class Rising(ElementRule):
    """A counter rose in the last 60 s."""

    abstract = True
    name = "rising"
    subject = nodes.GPU
    persist_rounds = clear_rounds = 1
    histories = {nodes.GPU: {"pcie_replays_count": 60.0}}

    def judge(self, look: Look) -> Verdict:
        rose = look.increase("pcie_replays_count", 60.0)
        return look.fired(f"rose by {rose:g}", [look.saw("pcie_replays_count", rose)]) if rose > 0 else CLEAR


class Host:
    """Rounds of made-up elements, as the core makes them."""

    def __init__(self, engine: Engine, step_s: float = 5.0) -> None:
        self.engine = engine
        self.store = LiveStore(tombstone_rounds=2)
        self.number = 0
        self.step_s = step_s
        self.now_s = 1000.0
        self.wall_ns = 1_700_000_000_000_000_000
        self.monotonic = True

    def round(self, *elements: Entity | Edge, after_s: float | None = None) -> Judgement:
        self.number += 1
        self.now_s += self.step_s if after_s is None else after_s
        self.wall_ns += int((self.step_s if after_s is None else after_s) * 1e9)
        found = [e for e in elements if isinstance(e, Entity)]
        wires = [e for e in elements if isinstance(e, Edge)]
        advance = self.store.advance(self.number, [found], [wires])
        done = Round(
            number=self.number, time_ns=self.wall_ns, duration_s=0.1, graph=advance.graph, diff=advance.diff,
            coverage=[], env=Environment(), monotonic_s=self.now_s if self.monotonic else None,
        )  # fmt: skip
        return self.engine.judge(done)


def gpu(celsius: float | None = None, **metrics: float) -> nodes.GPU:
    """A GPU; without a temperature it says why."""
    known = dict(metrics) | ({} if celsius is None else {"temperature_celsius": celsius})
    unknown = {"temperature_celsius": "no right"} if celsius is None else None
    return nodes.GPU(uuid="GPU-0", attributes={"index": 0}, metrics=known, unknown=unknown)


def ids(judgement: Judgement) -> list[str]:
    return [finding.id for finding in judgement.findings]


def test_a_condition_must_hold_and_ends_at_its_clearing_threshold() -> None:
    host = Host(Engine([Hot()]))
    assert ids(host.round(gpu(90))) == []
    opened = host.round(gpu(91)).findings
    assert [f.id for f in opened] == ["hot@GPU(uuid=GPU-0)"]
    assert opened[0].change == "opened"
    assert opened[0].message == "GPU 0 has 91 °C"
    assert opened[0].evidence[0].unit == "°C"
    assert ids(host.round(gpu(75))) == ["hot@GPU(uuid=GPU-0)"]  # above where it clears
    assert ids(host.round(gpu(65))) == ["hot@GPU(uuid=GPU-0)"]  # gone for one round
    last = host.round(gpu(66))
    assert ids(last) == []
    assert [(f.id, f.change, f.opened_round) for f in last.cleared] == [("hot@GPU(uuid=GPU-0)", "cleared", 2)]


def test_a_single_round_is_no_finding() -> None:
    host = Host(Engine([Hot()]))
    host.round(gpu(50))
    assert ids(host.round(gpu(90))) == []
    assert ids(host.round(gpu(50))) == []
    assert ids(host.round(gpu(90))) == []


def test_an_element_that_does_not_change_is_judged_on() -> None:
    host = Host(Engine([Hot()]))
    same = gpu(90)
    host.round(same)
    assert ids(host.round(same)) == ["hot@GPU(uuid=GPU-0)"]


def test_what_cannot_be_read_is_unknown_and_an_open_finding_stands_for_three_rounds() -> None:
    host = Host(Engine([Hot()]))
    host.round(gpu(90))
    host.round(gpu(90))
    assert ids(host.round(gpu(None))) == ["hot@GPU(uuid=GPU-0)"]
    assert host.engine.survey()[0].state == "fired"
    host.round(gpu(None))
    gone = host.round(gpu(None))
    assert ids(gone) == []
    assert [f.change for f in gone.cleared] == ["cleared"]
    state = host.engine.survey()[0]
    assert (state.state, state.unknown) == ("unknown", {"temperature_celsius of GPU: no right": 1})


def test_the_coverage_line_says_what_rules_cannot_judge() -> None:
    judged = Host(Engine([Hot()])).round(gpu(None))
    reasons = [note.reason for note in judged.coverage.notes]
    assert reasons == ["rules that cannot judge: temperature_celsius of GPU: no right"]


def test_warm_up_is_counted_from_the_first_sight_of_the_element() -> None:
    class Warm(Hot):
        """Hot, after a while."""

        abstract = True
        name = "warm"
        warm_up_s = 20.0

    host = Host(Engine([Warm()]))
    for _ in range(3):
        host.round()
    found = [ids(host.round(gpu(90))) for _ in range(6)]
    assert found.index(["warm@GPU(uuid=GPU-0)"]) == 4


def test_an_element_that_goes_takes_its_finding_along() -> None:
    host = Host(Engine([Hot()]))
    host.round(gpu(90))
    host.round(gpu(90))
    gone = host.round()
    assert ids(gone) == []
    assert [f.change for f in gone.cleared] == ["cleared"]


def test_a_flapping_finding_is_held_open() -> None:
    host = Host(Engine([Hot()]), step_s=1.0)
    history = []
    for _ in range(4):
        for celsius in (90, 90, 50, 50):
            judged = host.round(gpu(celsius))
            history.append((ids(judged) != [], any(f.flapping for f in judged.findings)))
    assert history[3] == (False, False)  # the first time it ends
    assert history[11] == (True, True)  # the third time it is held
    assert all(opened for opened, _ in history[9:])


def test_a_counter_says_nothing_at_first_sight_and_a_reset_is_no_event() -> None:
    host = Host(Engine([Rising()]))
    assert ids(host.round(gpu(1, pcie_replays_count=1_000_000))) == []
    assert ids(host.round(gpu(1, pcie_replays_count=1_000_000))) == []
    rose = host.round(gpu(1, pcie_replays_count=1_000_004))
    assert [f.message for f in rose.findings] == ["rose by 4"]
    reset = host.round(gpu(1, pcie_replays_count=0))
    assert [f.message for f in reset.findings] == ["rose by 4"]
    for _ in range(13):
        last = host.round(gpu(1, pcie_replays_count=0))
    assert last.findings == []


def test_a_hole_between_rounds_begins_anew() -> None:
    host = Host(Engine([Hot(), Rising()]))
    host.round(gpu(50, pcie_replays_count=1))
    host.round(gpu(50, pcie_replays_count=1))
    host.round(gpu(90, pcie_replays_count=1))
    assert ids(host.round(gpu(90, pcie_replays_count=9), after_s=3600)) == []  # suspended: 90 °C twice, an hour apart


@pytest.mark.parametrize("step_s", [-3600.0, 3600.0])
def test_a_step_of_the_wall_clock_fires_nothing(step_s: float) -> None:
    host = Host(Engine([Hot(), Rising()]))
    host.monotonic = False
    host.round(gpu(50, pcie_replays_count=1))
    host.round(gpu(50, pcie_replays_count=1))
    assert ids(host.round(gpu(90, pcie_replays_count=1), after_s=step_s)) == []


def test_only_what_meets_a_screen_is_judged() -> None:
    Slow.judged = 0
    host = Host(Engine([Slow()]))
    many = [nodes.Process(pid=n, start=1, metrics={"cpu_pct": 1.0 + n % 7}) for n in range(1, 500)]
    host.round(*many)
    host.round(*[nodes.Process(pid=p.pid, start=1, metrics={"cpu_pct": 2.0}) for p in many])
    assert Slow.judged == 0
    state = host.engine.survey()[0]
    assert (state.clear_count, state.unknown) == (499, {})
    assert ids(host.round(nodes.Process(pid=1, start=1, metrics={"cpu_pct": 99.0}))) == []
    assert ids(host.round(nodes.Process(pid=1, start=1, metrics={"cpu_pct": 99.0}))) == ["slow@Process(pid=1,start=1)"]


def test_foreign_elements_are_judged_by_their_own_gpuflight() -> None:
    host = Host(Engine([Hot()]))
    foreign = nodes.GPU(uuid="GPU-1", ns="node-7", metrics={"temperature_celsius": 99.0})
    host.round(foreign)
    assert ids(host.round(foreign)) == []


def test_a_rule_that_throws_costs_that_rule_one_round() -> None:
    class Broken(Hot):
        """Broken."""

        abstract = True
        name = "broken"

        def judge(self, look: Look) -> Verdict:
            raise KeyError("x")

    host = Host(Engine([Broken(), Hot()]))
    host.round(gpu(90))
    judged = host.round(gpu(90))
    assert ids(judged) == ["hot@GPU(uuid=GPU-0)"]
    assert judged.coverage.notes[0].reason == "rule broken failed: KeyError: 'x'"
    assert {s.rule: s.state for s in host.engine.survey()}["broken"] == "failed"


def test_a_verdict_without_evidence_is_a_defect_of_the_rule() -> None:
    class Bare(Hot):
        """No evidence."""

        abstract = True
        name = "bare"

        def judge(self, look: Look) -> Verdict:
            return look.fired("because", [])

    judged = Host(Engine([Bare()])).round(gpu(90))
    assert "without evidence" in judged.coverage.notes[0].reason


def test_symptoms_fold_under_their_cause_and_causes_go_by_severity_and_cost() -> None:
    host = Host(Engine([Slow(), Hot()]))
    process = nodes.Process(pid=1, start=1, metrics={"cpu_pct": 99.0})
    other = nodes.Process(pid=2, start=1, metrics={"cpu_pct": 99.0})
    scene: list[Any] = [gpu(90), process, other, edges.Access(process.id, "GPU(uuid=GPU-0)")]
    host.round(*scene)
    judged = host.round(*scene)
    assert ids(judged) == ["hot@GPU(uuid=GPU-0)", "slow@Process(pid=1,start=1)", "slow@Process(pid=2,start=1)"]
    cause, symptom, stranger = judged.findings
    assert cause.explains == [symptom.id]
    assert symptom.explained_by == cause.id
    assert stranger.explained_by == ""


def test_group_rules_name_their_subjects() -> None:
    class Odd(GroupRule):
        """The GPU with another temperature than most."""

        abstract = True
        name = "odd"
        histories = {nodes.GPU: {"temperature_celsius": 10.0}}

        def judge(self, window: Window) -> Iterable[Verdict]:
            found = list(window.all(nodes.GPU))
            if len(found) < 2:
                raise Unknown("one GPU is no group")
            hottest = max(found, key=lambda g: g.metrics["temperature_celsius"])
            value = hottest.metrics["temperature_celsius"]
            if value > 80:
                yield Verdict(
                    state="fired", subject=hottest.id, entities=[hottest.id], message=f"{value:g} °C",
                    evidence=[evidence(hottest.id, "temperature_celsius", value)],
                )  # fmt: skip

    def pair(a: float, b: float) -> list[nodes.GPU]:
        return [nodes.GPU(uuid=u, metrics={"temperature_celsius": v}) for u, v in (("A", a), ("B", b))]

    host = Host(Engine([Odd()]))
    host.round(*pair(50, 90))
    assert ids(host.round(*pair(50, 91))) == ["odd@GPU(uuid=B)"]
    host.round(*pair(90, 50))
    assert ids(host.round(*pair(90, 50))) == ["odd@GPU(uuid=A)"]
    host.round(*pair(50, 50))
    assert ids(host.round(*pair(50, 50))) == []
    host.round(pair(50, 50)[0])
    assert {s.rule: s.unknown for s in host.engine.survey()} == {"odd": {"one GPU is no group": 1}}


def test_overrides_of_thresholds_by_selector() -> None:
    only_a = Overrides([Override(rule="hot", thresholds={"hot_warn": 95.0}, where={"uuid": "GPU-A*"})])
    host = Host(Engine([Hot()], overrides=only_a))
    both = [nodes.GPU(uuid=u, metrics={"temperature_celsius": 90.0}) for u in ("GPU-A1", "GPU-B1")]
    host.round(*both)
    assert ids(host.round(*both)) == ["hot@GPU(uuid=GPU-B1)"]
    hotter = [nodes.GPU(uuid=u, metrics={"temperature_celsius": 96.0}) for u in ("GPU-A1", "GPU-B1")]
    host.round(*hotter)
    assert ids(host.round(*hotter)) == ["hot@GPU(uuid=GPU-A1)", "hot@GPU(uuid=GPU-B1)"]


def test_an_override_opens_the_screen_too() -> None:
    looser = Overrides([Override(rule="slow", thresholds={"busy": 5.0})])
    host = Host(Engine([Slow()], overrides=looser))
    process = nodes.Process(pid=1, start=1, metrics={"cpu_pct": 9.0})
    host.round(process)
    assert ids(host.round(process)) == ["slow@Process(pid=1,start=1)"]


def test_a_saved_graph_gives_findings_that_are_not_confirmed() -> None:
    judged = Host(Engine([Hot()], snapshot=True)).round(gpu(90))
    assert [(f.id, f.confirmed) for f in judged.findings] == [("hot@GPU(uuid=GPU-0)", False)]


def test_memory_is_bounded_by_what_lives() -> None:
    host = Host(Engine([Hot(), Slow(), Rising()]))

    def make(r: int) -> list[Entity]:
        hot = {"temperature_celsius": 90.0, "pcie_replays_count": r}
        gpus = [nodes.GPU(uuid=f"G{r}-{n}", metrics=hot) for n in range(20)]
        return [*gpus, *(nodes.Process(pid=r * 100 + n, start=1, metrics={"cpu_pct": 99.0}) for n in range(50))]

    for r in range(5):
        host.round(*make(r))
    early = host.engine.memory_bytes()
    for r in range(5, 60):
        host.round(*make(r))
    assert host.engine.memory_bytes() <= early * 1.1
