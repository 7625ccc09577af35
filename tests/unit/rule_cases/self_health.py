"""Cases of the rules about gpuflight itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.rule_scenes import Case, steady

from gpuflight.graph import nodes
from gpuflight.rounds import Coverage

_HOST = nodes.Host(hostname="h")
_NONE = nodes.Process(pid=1, start=1)


def _line(**other: Any) -> list[Coverage]:
    return [Coverage(**{"collector": "sockets", "status": "ok", "wall_ms": 20.0, "cpu_ms": 15.0, **other})]


def _sink(lag_s: float, **dropped: int) -> list[Any]:
    statistics = SimpleNamespace(lag_s=lag_s, queued=7, dropped_by=dropped)
    return [SimpleNamespace(name="kafka", state="running", statistics=statistics)]


def _session(**metrics: float) -> nodes.Session:
    return nodes.Session(session_id="s", attributes={"name": "train"}, metrics=metrics)


def _peer(**metrics: float) -> nodes.Host:
    return nodes.Host(hostname="b", ns="node-7", attributes={"name": "b", "stale": True}, metrics=metrics)


CASES = {
    "collector_over_budget": Case(
        fires=steady(_HOST, coverage=_line(cpu_ms=900.0), seconds=70),
        clear=steady(_HOST, coverage=_line(), seconds=70),
        unknown=steady(_NONE, coverage=_line(cpu_ms=900.0), seconds=70),
        also={"asked for": ("clear", steady(_HOST, coverage=_line(cpu_ms=900.0), seconds=70, step_s=1.0))},
    ),
    "invalid_records": Case(
        fires=steady(_session(invalid_records_count=30, launches_count=10_000)),
        about="Session(s)",
        clear=steady(_session(invalid_records_count=2, launches_count=10_000)),
        unknown=steady(_session(launches_count=10_000)),
    ),
    "subscriber_backlog": Case(
        fires=steady(_HOST, subscribers=_sink(120.0)),
        clear=steady(_HOST, subscribers=_sink(0.1, replaced=9, rejected=4)),
        unknown=steady(_NONE, subscribers=_sink(120.0)),
    ),
    "incomplete_round": Case(
        fires=steady(_HOST, truncated_by="max_nodes"),
        severity="warn",
        clear=steady(_HOST, coverage=_line()),
        unknown=steady(_NONE, coverage=_line()),
        also={"failed": ("info", steady(_HOST, coverage=_line(status="failed", reason="KeyError: 'x'")))},
    ),
    "profiler_overhead": Case(
        fires=steady(_session(profiler_overhead_pct=6.0)),
        about="Session(s)",
        clear=steady(_session(profiler_overhead_pct=0.4)),
        unknown=steady(_session(launches_count=1)),
    ),
    "stale_remote": Case(
        fires=steady(_HOST, _peer(stale_s=80.0)),
        about="Host(ns=node-7,b)",
        clear=steady(_HOST, _peer(stale_s=6.0)),
        unknown=steady(_HOST, _peer()),
    ),
}
