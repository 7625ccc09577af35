"""Recorders of programs that run on this host: which there are, and orders to them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from anyio import to_thread
from fastapi import Depends, Query
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample
from gpuflight.server.state import ServerState

ROOT = "/api/v1/recorders"
router = PlainRouter(prefix=ROOT, tags=["recorders"], dependencies=[Depends(require(Role.OPERATOR))])

_Name = Annotated[str, Field(min_length=1, max_length=256)]


class Order(BaseModel):
    """What recorders shall do, and which: those that any of ``pids``, ``names``, ``jobs`` and ``sessions`` names."""

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, json_schema_extra={"example": {"all": True, "for_s": 10}}
    )

    do: Literal["start", "stop", "flush", "status"] = Field("start", description="flush: everything into the files")
    all: bool = Field(False, description="every recorder of this host")
    pids: Sequence[Annotated[int, Field(ge=1, le=2**31)]] = Field((), max_length=1000, description="processes")
    names: Sequence[_Name] = Field((), max_length=1000, description="programs by name")
    jobs: Sequence[_Name] = Field((), max_length=1000, description="jobs as their launchers number them")
    sessions: Sequence[_Name] = Field((), max_length=1000, description="ids of sessions")
    for_s: float = Field(0, ge=0, le=31_536_000, description="start: stop after so long (s); 0: do not")
    launches: int = Field(0, ge=0, le=2**53, description="start: stop after so many kernels; 0: do not")
    stacks: int | None = Field(
        None, ge=0, le=2**31, description="start: the stack of every n-th launch; null: as before"
    )
    timeout_s: float = Field(5, gt=0, le=60, description="how long each recorder may take to answer (s)")


@router.get("", summary="Recorders of this host", openapi_extra=sample("GET", ROOT))
async def recorders(
    state: State,
    timeout_s: Annotated[float, Query(gt=0, le=60, description="how long each may take to answer (s)")] = 5,
) -> dict[str, Any]:
    """Programs that can be told to record, and what each does now; of other users only if the server is root's."""
    return await _tell(state, Order.model_validate({"do": "status", "all": True, "timeout_s": timeout_s}))


@router.post(
    "/trigger",
    summary="Record in running programs",
    openapi_extra=sample("POST", f"{ROOT}/trigger", {"all": True, "for_s": 10}),
)
async def trigger(state: State, order: Order) -> dict[str, Any]:
    """Tell recorders to start, to stop, or to write out what they hold. Each has its own outcome, done or failed with a
    reason: the status is 200 even if all of them failed. ``unmatched``: what was chosen and does not run here."""
    if not (order.all or order.pids or order.names or order.jobs or order.sessions):
        raise ApiError(422, "bad_request", "choose recorders: by pids, names, jobs, sessions, or all")
    return await _tell(state, order)


async def _tell(state: ServerState, order: Order) -> dict[str, Any]:
    from gpuflight.events.recorder.control import Request
    from gpuflight.events.recorder.trigger import Choice, trigger

    request = Request(order.do, for_s=order.for_s, launches=order.launches, stacks=order.stacks)
    chosen = (order.pids, order.names, order.jobs, order.sessions)
    choice = Choice(order.all, *map(tuple, chosen))  # type: ignore[arg-type]
    result = await to_thread.run_sync(lambda: trigger(folders(state), choice, request, order.timeout_s))
    outcomes = [msgspec.to_builtins(outcome) for outcome in result.outcomes]
    done = sum(outcome.status == "done" for outcome in result.outcomes)
    return {
        "hostname": socket.gethostname(),
        "done_count": done,
        "failed_count": len(outcomes) - done,
        "recorders": outcomes,
        "unmatched": result.unmatched,
    }


def folders(state: ServerState) -> list[str]:
    """Those that the collector ``sessions`` follows: nothing elsewhere is asked."""
    from gpuflight.collectors.sessions import WELL_KNOWN
    from gpuflight.events.reading import folders_of

    for collector in state.controller.collectors:
        if collector.name == "sessions":
            chosen: list[str] | None = getattr(collector.settings, "folders", None)
            if chosen is not None:
                return folders_of(chosen)
    return folders_of(WELL_KNOWN)
