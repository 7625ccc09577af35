"""Collectors: what each of them sees, costs and loses, and whether it is asked at all."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Path

from gpuflight.collectors.base import Collector
from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample
from gpuflight.server.state import ServerState
from gpuflight.settings import dump

router = PlainRouter(prefix="/api/v1/collectors", tags=["collectors"], dependencies=[Depends(require(Role.VIEWER))])

_operator = [Depends(require(Role.OPERATOR))]
Name = Annotated[str, Path(max_length=200, description="name of a collector")]


@router.get("", summary="All collectors", openapi_extra=sample("GET", "/api/v1/collectors"))
async def collectors(state: State) -> dict[str, Any]:
    """Every collector: whether it is on, its settings, and its coverage line of the latest round."""
    return {"collectors": [_described(state, collector) for collector in state.controller.collectors]}


@router.get("/{name}", summary="One collector", openapi_extra=sample("GET", "/api/v1/collectors/process_tree"))
async def collector(state: State, name: Name) -> dict[str, Any]:
    """One collector by its name."""
    return _described(state, _known(state, name))


@router.post(
    "/{name}/enable",
    summary="Switch a collector on",
    dependencies=_operator,
    openapi_extra=sample("POST", "/api/v1/collectors/process_tree/enable"),
)
async def enable(state: State, name: Name) -> dict[str, Any]:
    """Ask a collector again, from the next round on. ``changed`` is false if it was on."""
    return _switch(state, name, True)


@router.post(
    "/{name}/disable",
    summary="Switch a collector off",
    dependencies=_operator,
    openapi_extra=sample("POST", "/api/v1/collectors/process_tree/disable"),
)
async def disable(state: State, name: Name) -> dict[str, Any]:
    """Do not ask a collector any more, from the next round on. What it alone reported ends."""
    return _switch(state, name, False)


def _switch(state: ServerState, name: str, enabled: bool) -> dict[str, Any]:
    found = _known(state, name)
    changed = state.controller.set_enabled(name, enabled)
    return {**_described(state, found), "changed": changed}


def _known(state: ServerState, name: str) -> Collector:
    for found in state.controller.collectors:
        if found.name == name:
            return found
    names = [found.name for found in state.controller.collectors]
    raise ApiError(404, "no_such_collector", f"there is no collector {name!r} here", {"collectors": names})


def _described(state: ServerState, collector: Collector) -> dict[str, Any]:
    latest = state.controller.latest
    coverage = None
    if latest is not None:
        coverage = next((line for line in latest.coverage if line.collector == collector.name), None)
    return {
        "name": collector.name,
        "description": collector.description,
        "stability": collector.stability,
        "enabled": collector.name not in state.controller.disabled,
        "settings": dump(collector.settings) if collector.settings is not None else {},
        "round": latest.number if latest is not None else None,
        "coverage": coverage,
    }
