"""Control of the rounds: start, stop, one round now, forget."""

from __future__ import annotations

from typing import Annotated, Any

import anyio
from anyio import to_thread
from fastapi import Depends, Query

from gpuflight.graph.codec import time_text
from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample
from gpuflight.server.state import ServerState

router = PlainRouter(prefix="/api/v1/control", tags=["control"], dependencies=[Depends(require(Role.VIEWER))])

_operator = [Depends(require(Role.OPERATOR))]

_WAITING_MAX = 8
"""Requests that may wait for a round at once: each has a thread of its own, not one of those that build answers."""


@router.get("", summary="What is going on", openapi_extra=sample("GET", "/api/v1/control"))
async def status(state: State) -> dict[str, Any]:
    """Whether rounds are made, how many have asked for that, and what is kept."""
    return control_status(state)


@router.post(
    "/start", summary="Have rounds made", dependencies=_operator, openapi_extra=sample("POST", "/api/v1/control/start")
)
async def start(state: State) -> dict[str, Any]:
    """One more reference to the background rounds; they run from the first to the last reference."""
    return await begin(state)


@router.post(
    "/stop",
    summary="Have no more rounds made",
    dependencies=_operator,
    openapi_extra=sample("POST", "/api/v1/control/stop"),
)
async def stop(state: State) -> dict[str, Any]:
    """Give back one reference. Rounds go on while others are left: ``running`` says so, ``changed`` is then false."""
    return await end(state)


@router.post(
    "/trigger",
    summary="One round now",
    dependencies=_operator,
    openapi_extra=sample("POST", "/api/v1/control/trigger?timeout_s=30"),
)
async def trigger(
    state: State,
    timeout_s: Annotated[float, Query(gt=0, le=600, description="how long to wait for it (s)")] = 60.0,
) -> dict[str, Any]:
    """Wait for a round that begins after this request; 504 if it is not done in time (it goes on)."""
    return await one_round(state, timeout_s)


@router.post("/clear", summary="Forget", dependencies=_operator, openapi_extra=sample("POST", "/api/v1/control/clear"))
async def clear(state: State) -> dict[str, Any]:
    """Forget graph and history; the next round starts anew."""
    return await forget(state)


async def begin(state: ServerState) -> dict[str, Any]:
    """Take a reference; the status after it, and whether that began the rounds."""
    before = state.controller.running
    await to_thread.run_sync(state.controller.start, limiter=_limiter(state))
    return {**control_status(state), "changed": state.controller.running != before}


async def end(state: ServerState) -> dict[str, Any]:
    """Give a reference back; the status after it, and whether that ended the rounds."""
    before = state.controller.running
    await to_thread.run_sync(state.controller.stop, limiter=_limiter(state))
    return {**control_status(state), "changed": state.controller.running != before}


async def one_round(state: ServerState, timeout_s: float) -> dict[str, Any]:
    """A round that begins now; the status after it. Raises ApiError 429, 504."""
    limiter = _limiter(state)
    if limiter.available_tokens < 1:
        raise ApiError(429, "busy", f"{_WAITING_MAX} requests wait for a round already", headers={"Retry-After": "5"})
    try:
        # Abandoned when the client goes: the round goes on and nobody waits for this thread.
        done = await to_thread.run_sync(
            lambda: state.controller.trigger(timeout_s), limiter=limiter, abandon_on_cancel=True
        )
    except TimeoutError as error:
        raise ApiError(504, "no_round_in_time", str(error)) from None
    return {**control_status(state), "round": done.number, "time": time_text(done.time_ns)}


async def forget(state: ServerState) -> dict[str, Any]:
    """Forget graph and history; the status after it."""
    await to_thread.run_sync(state.controller.clear, limiter=_limiter(state))
    state.clear_bodies()
    return control_status(state)


def control_status(state: ServerState) -> dict[str, Any]:
    """Running, references, rounds: of one moment."""
    controller = state.controller
    latest, kept = controller.latest, controller.history.numbers()
    return {
        "running": controller.running,
        "references_count": controller.references_count,
        "interval_s": state.settings.interval_s,
        "latest_round": latest.number if latest is not None else None,
        "failed_rounds_count": controller.failed_rounds_count,
        "history": {
            "rounds_count": len(kept),
            "oldest_round": kept[0] if kept else None,
            "used_bytes": controller.history.used_bytes,
            "max_bytes": controller.history.max_bytes,
        },
        "instance_id": state.instance_id,
    }


def _limiter(state: ServerState) -> anyio.CapacityLimiter:
    if state.waiting is None:
        state.waiting = anyio.CapacityLimiter(_WAITING_MAX)
    limiter: anyio.CapacityLimiter = state.waiting
    return limiter
