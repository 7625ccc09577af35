"""Rounds: which ones there are, what each of them says about itself, what changed in it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import Depends, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gpuflight.graph import codec
from gpuflight.graph.diff import Noise, diff
from gpuflight.round_codec import encode_round_diff
from gpuflight.rounds import Round
from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.respond import MEDIA_TYPES, answer
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample
from gpuflight.server.selection import parse_time, round_at, select_round

router = PlainRouter(prefix="/api/v1", tags=["rounds"], dependencies=[Depends(require(Role.VIEWER))])

Number = Annotated[int, Path(ge=1, le=2**53, description="number of a round")]
At = Annotated[str | None, Query(max_length=64, description="a time: the round that stood then")]


@router.get("/rounds", summary="The rounds kept", openapi_extra=sample("GET", "/api/v1/rounds?limit=10"))
async def rounds(
    state: State,
    first: Annotated[int, Query(alias="from", ge=0, le=2**53, description="least number")] = 0,
    last: Annotated[int, Query(alias="to", ge=0, le=2**53, description="greatest number")] = 2**53,
    at: At = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="at most so many, the newest")] = 1000,
) -> dict[str, Any]:
    """Number, time and sizes of each round of a range, oldest first; with ``at``, of the one that stood at a time."""
    if at is not None:
        first = last = round_at(state, parse_time(at))
    found = await run_in_threadpool(state.controller.history.rounds, first, last)
    return {"rounds": [_brief(done) for done in found[-limit:]], "truncated": len(found) > limit}


@router.get("/rounds/latest", summary="The newest round", openapi_extra=sample("GET", "/api/v1/rounds/latest"))
async def latest(state: State) -> dict[str, Any]:
    """What the newest round says about itself; its graph is at ``/graph``."""
    return _whole(await select_round(state))


@router.get("/rounds/{number}", summary="One round", openapi_extra=sample("GET", "/api/v1/rounds/1"))
async def one(state: State, number: Number) -> dict[str, Any]:
    """Coverage, findings, environment and cost of a round; its graph is at ``/graph?round=``."""
    return _whole(await select_round(state, number))


@router.get(
    "/rounds/{number}/diff", summary="What changed in one round", openapi_extra=sample("GET", "/api/v1/rounds/2/diff")
)
async def round_diff(request: Request, state: State, number: Number) -> Response:
    """The difference to the round before, as the streams give it. 404 where the round before is not kept."""
    done = await select_round(state, number)
    kept = await run_in_threadpool(state.controller.history.rounds, number - 1, number)
    if len(kept) < 2:
        raise ApiError(
            404, "no_round_before", f"the round before {number} is not kept, so there is no difference to it"
        )
    with_diff = msgspec.structs.replace(kept[-1], graph=done.graph)
    return await answer(
        request,
        state,
        number=number,
        representation="diff",
        media_type=MEDIA_TYPES["json"],
        build=lambda: encode_round_diff(with_diff),
    )


@router.get(
    "/diff", summary="What changed between two rounds", openapi_extra=sample("GET", "/api/v1/diff?from=1&to=2&noise=5")
)
async def between(
    request: Request,
    state: State,
    first: Annotated[int, Query(alias="from", ge=1, le=2**53, description="number of the earlier round")],
    last: Annotated[
        int | None, Query(alias="to", ge=1, le=2**53, description="the later one; the latest without")
    ] = None,
    noise: Annotated[
        float, Query(ge=0, le=1e6, description="leave out elements of which only metrics moved, by at most this (%)")
    ] = 0.0,
) -> Response:
    """What turns the graph of round ``from`` into that of round ``to``; ``from`` may be the later one."""
    after = await select_round(state, last)
    before = await select_round(state, first)
    filtered = Noise(relative=noise / 100) if noise else None

    def build() -> bytes:
        change = diff(before.graph, after.graph, filtered)
        return codec.encode_diff(change, after.number, time=codec.time_text(after.time_ns))

    return await answer(
        request,
        state,
        number=after.number,
        representation=f"diff|{first}|{noise:g}",
        media_type=MEDIA_TYPES["json"],
        build=build,
        headers={"gpuflight-from-round": str(before.number)},
    )


def _brief(done: Round) -> dict[str, Any]:
    core = next((line for line in done.coverage if line.collector == "core"), None)
    return {
        "round": done.number,
        "time": codec.time_text(done.time_ns),
        "duration_s": round(done.duration_s, 6),
        "nodes_count": core.nodes_count if core else None,
        "edges_count": core.edges_count if core else None,
        "truncated_by": done.truncated_by,
        "changes": done.diff.counts(),
        "findings_count": len(done.findings),
    }


def _whole(done: Round) -> dict[str, Any]:
    return {
        **_brief(done),
        "env": done.env,
        "coverage": done.coverage,
        "findings": done.findings,
        "cleared": done.cleared,
        "own_cost": done.own_cost,
    }
