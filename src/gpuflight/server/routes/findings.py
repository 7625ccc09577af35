"""Findings: what holds the machine back; and the rules that say so."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, Path, Query
from starlette.concurrency import run_in_threadpool

from gpuflight.bottlenecks.base import ElementRule, Rule
from gpuflight.bottlenecks.engine import Engine
from gpuflight.graph import codec
from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample
from gpuflight.server.selection import latest_round
from gpuflight.server.state import ServerState

router = PlainRouter(prefix="/api/v1", tags=["findings"], dependencies=[Depends(require(Role.VIEWER))])

Text = Annotated[str | None, Query(max_length=4096)]


@router.get("/findings", summary="Open findings", openapi_extra=sample("GET", "/api/v1/findings?severity=critical"))
async def findings(
    state: State,
    severity: Annotated[Literal["info", "warn", "critical"] | None, Query(description="only of this severity")] = None,
    rule: Text = None,
    entity: Text = None,
) -> dict[str, Any]:
    """The findings of the latest round, roots first, and those that ended with it; by ``rule`` (its name) and
    ``entity`` (the id of one that is concerned)."""
    done = latest_round(state)

    def wanted(finding: Any) -> bool:
        return (
            (severity is None or finding.severity == severity)
            and (rule is None or finding.rule == rule)
            and (entity is None or entity in finding.entities)
        )

    return {
        "round": done.number,
        "time": codec.time_text(done.time_ns),
        "findings": [finding for finding in done.findings if wanted(finding)],
        "cleared": [finding for finding in done.cleared if wanted(finding)],
    }


@router.get("/rules", summary="All rules", openapi_extra=sample("GET", "/api/v1/rules?states=true"))
async def rules(
    state: State,
    states: Annotated[bool, Query(description="also what each says now, and what it cannot say and why")] = False,
) -> dict[str, Any]:
    """Every rule that judges here, with its thresholds. ``states`` asks all of them about everything: it takes a moment
    on a large graph, and waits for the round under way."""
    engine = _engine(state)
    surveyed = {}
    if states:
        surveyed = {each.rule: each for each in await run_in_threadpool(state.controller.survey)}
    return {"rules": [_described(rule, surveyed.get(name)) for name, rule in engine.rules.items()]}


@router.get("/rules/{name}", summary="One rule", openapi_extra=sample("GET", "/api/v1/rules/cpu_throttled"))
async def rule(state: State, name: Annotated[str, Path(max_length=200)]) -> dict[str, Any]:
    """What one rule judges, its thresholds with their sources, and what to do about its findings."""
    engine = _engine(state)
    found = engine.rules.get(name)
    if found is None:
        raise ApiError(404, "no_such_rule", f"there is no rule {name!r} here", {"rules": list(engine.rules)})
    return _described(found, None)


def _engine(state: ServerState) -> Engine:
    engine = state.controller.judge
    if not isinstance(engine, Engine):
        raise ApiError(404, "no_rules", "nothing judges here: the setting rules.enabled is false")
    return engine


def _described(rule: Rule, surveyed: Any) -> dict[str, Any]:
    kinds = rule.subjects() if isinstance(rule, ElementRule) else ()
    found: dict[str, Any] = {
        "rule": rule.name,
        "id": rule.catalogue_id,
        "description": rule.description,
        "severity": rule.severity,
        "judges": [str(kind.__struct_config__.tag) for kind in kinds],
        "thresholds": {name: msgspec.to_builtins(threshold) for name, threshold in rule.thresholds.items()},
        "persist_s": rule.persist_s,
        "explains": list(rule.explains),
        "advice": rule.advice,
        "verify": rule.verify,
    }
    if surveyed is not None:
        found |= {**msgspec.to_builtins(surveyed), "state": surveyed.state}
    return found
