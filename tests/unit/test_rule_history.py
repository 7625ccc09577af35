"""What rules remember: series and tables of the past, and how often quiet sessions are judged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_rule_engine import Host, ids

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Verdict
from gpuflight.bottlenecks.engine import Engine
from gpuflight.bottlenecks.index import CALM_ROUNDS
from gpuflight.bottlenecks.series import Series, Table
from gpuflight.bottlenecks.window import Look
from gpuflight.graph import nodes

READINGS = st.lists(
    st.tuples(st.sampled_from([0.05, 1.0, 5.0, 40.0]), st.one_of(st.none(), st.integers(0, 6))), min_size=1, max_size=80
)
"""Seconds since the reading before, and what was read; None for nothing."""
WINDOW_S = 30.0


def naive_increase(series: Series, now_s: float) -> float | None:
    if len(series.values) < 2:
        return None
    total = 0.0
    for n in range(1, len(series.values)):
        if series.times_s[n] > now_s - WINDOW_S:
            step = series.values[n] - series.values[n - 1]
            total += step if step >= 0 else series.values[n]
    return total


@given(READINGS)
def test_an_increase_counts_resets_and_a_mean_weighs_by_time(readings: list[tuple[float, int | None]]) -> None:
    series, now_s = Series(WINDOW_S), 100.0
    for step_s, value in readings:
        now_s += step_s
        if value is None:
            series.restart()
            continue
        series.append(now_s, value)
        assert series.increase(now_s, WINDOW_S) == naive_increase(series, now_s)
        later_s = now_s + 7.0
        spans = series.spans(later_s, WINDOW_S)
        total_s = sum(held_s for held_s, _ in spans)
        assert all(held_s > 0 for held_s, _ in spans) and total_s <= WINDOW_S + 1e-9
        assert series.mean(later_s, WINDOW_S) == pytest.approx(sum(h * v for h, v in spans) / total_s)
        share = series.share(later_s, WINDOW_S, lambda value: value > 3)
        assert share == pytest.approx(sum(h for h, v in spans if v > 3) / total_s)


@given(READINGS)
def test_a_table_tells_what_a_series_of_each_of_its_metrics_tells(readings: list[tuple[float, int | None]]) -> None:
    series, table, now_s = Series(WINDOW_S), Table({"other": 0, "count": 1}, WINDOW_S), 100.0
    for step_s, value in readings:
        now_s += max(step_s, 1.0)  # closer ones are put together, by a series only where the value changed
        table.append(now_s, {"other": now_s} if value is None else {"other": now_s, "count": value})
        if value is None:
            series.restart()
        else:
            series.append(now_s, value)
        assert table.increase("count", now_s, WINDOW_S) == series.rose(now_s, WINDOW_S)
        assert table.series("count").covered_s(now_s) <= series.covered_s(now_s)
    table.restart()
    assert table.increase("count", now_s, WINDOW_S) is None and table.size_bytes == 0


class Idle(ElementRule):
    """A session is idle."""

    abstract = True
    name = "idle"
    subject = nodes.Session
    whole_session = True
    clear_rounds = 1
    judged = 0

    def judge(self, look: Look) -> Verdict:
        type(self).judged += 1
        idle = look.metric("idle_pct")
        return look.fired("idle", [look.saw("idle_pct")]) if idle > 50 else CLEAR


def session(idle_pct: float, work: int, state: str = "live") -> nodes.Session:
    return nodes.Session(
        session_id="s", attributes={"state": state}, metrics={"idle_pct": idle_pct, "launches_count": work}
    )


@pytest.mark.parametrize("quiet_rounds", range(2, 2 + CALM_ROUNDS))
def test_a_quiet_session_is_judged_now_and_then_and_one_with_a_finding_each_round(quiet_rounds: int) -> None:
    host = Host(Engine([Idle()]))
    for n in range(30):
        host.round(session(1, n))
    Idle.judged = 0
    for n in range(30, 60):
        host.round(session(1, n))
    assert Idle.judged == 30 // CALM_ROUNDS
    for n in range(60, 60 + quiet_rounds):
        host.round(session(1, n))
    found = [ids(host.round(session(90, 100 + n))) for n in range(CALM_ROUNDS)]
    assert found[-1] == ["idle@Session(s)"]
    Idle.judged = 0
    for n in range(200, 205):
        host.round(session(90, n))
    assert Idle.judged == 5
    assert ids(host.round(session(1, 300))) == []


@pytest.mark.parametrize("quiet_rounds", range(2, 2 + CALM_ROUNDS))
def test_what_a_session_did_last_is_judged_though_it_changes_no_more(quiet_rounds: int) -> None:
    host = Host(Engine([Idle()]))
    for n in range(quiet_rounds):
        host.round(session(1, n))
    stalled = session(90, 100)
    assert [ids(host.round(stalled)) for _ in range(CALM_ROUNDS)][-1] == ["idle@Session(s)"]
    host = Host(Engine([Idle()]))
    for n in range(quiet_rounds):
        host.round(session(1, n))
    assert ids(host.round(session(90, 100, state="ended: shutdown"))) == ["idle@Session(s)"]
