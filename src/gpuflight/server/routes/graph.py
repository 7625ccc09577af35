"""The graph of a round, whole or in part."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gpuflight.graph import Graph
from gpuflight.round_codec import encode_round
from gpuflight.rounds import Round
from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.following import changes_since, encode_changes
from gpuflight.server.query import GraphQuery, cursor_at, page_of, select
from gpuflight.server.representations import encode
from gpuflight.server.respond import MEDIA_TYPES, answer, choose_format
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample
from gpuflight.server.selection import select_round
from gpuflight.server.state import ServerState

router = PlainRouter(prefix="/api/v1", tags=["graph"], dependencies=[Depends(require(Role.VIEWER))])


@router.get(
    "/graph",
    summary="The graph",
    openapi_extra=sample("GET", "/api/v1/graph?kind=Process&fields=name,cpu_pct&limit=100"),
    responses={304: {"description": "the same as the ETag given"}, 410: {"description": "the pages' round is gone"}},
)
async def graph(request: Request, state: State, query: Annotated[GraphQuery, Query()]) -> Response:
    """The graph of the latest round, or of ``round`` or ``at``; the header ``gpuflight-round`` says which it is.

    A page (``limit``) holds nodes first, then edges; ``next_cursor`` in the answer, and the header
    ``gpuflight-next-cursor``, lead to the next page of the same round. Text has pages of nodes.

    With ``since`` the whole graph is followed from round to round: see the parameter, and docs/remote.md.
    """
    if query.since is not None:
        return await _followed(request, state, query)
    page = page_of(query)
    if page is None:
        done = await select_round(state, query.round, query.at)
    else:
        if query.at is not None or query.round not in (None, page.round):
            raise ApiError(422, "bad_cursor", "the cursor says which round it is of")
        try:
            done = await select_round(state, page.round)
        except ApiError as error:
            if error.code != "no_such_round":
                raise
            raise ApiError(
                410, "round_gone", f"round {page.round}, which the cursor is of, is no longer here"
            ) from None
    form = choose_format(query.format, request.headers.get("accept", ""))
    selection = query.selection()
    representation = f"graph|{form}|{selection}"
    if query.limit is None and page is None:
        return await answer(
            request,
            state,
            number=done.number,
            representation=representation,
            media_type=MEDIA_TYPES[form],
            build=lambda: encode(done, _part(state, done, query, selection), form),
            repeatable=query.round is None and query.at is None,
        )
    part = await run_in_threadpool(_part, state, done, query, selection)
    offset = page.offset if page is not None else 0
    total = len(part.nodes) if form == "text" else len(part)
    end = total if query.limit is None else offset + query.limit
    cursor = cursor_at(done.number, end, query) if end < total else ""
    return await answer(
        request,
        state,
        number=done.number,
        representation=f"{representation}|{offset}|{query.limit}",
        media_type=MEDIA_TYPES[form],
        build=lambda: encode(done, part, form, offset=offset, limit=query.limit, next_cursor=cursor),
        headers={"gpuflight-next-cursor": cursor} if cursor else None,
    )


async def _followed(request: Request, state: ServerState, query: GraphQuery) -> Response:
    """The latest round for somebody who has an earlier one. The ETag names the round, whichever way it is told."""
    if query.model_dump(exclude={"since", "format"}, exclude_defaults=True) or query.format not in (None, "json"):
        raise ApiError(422, "bad_request", "since: the whole graph is followed, in JSON: give no other parameter")
    done = await select_round(state)
    instance, _, number = (query.since or "").rpartition("-")
    base = int(number) if instance == state.instance_id and number.isascii() and number.isdigit() else 0
    change = await run_in_threadpool(changes_since, state.controller.history, base, done) if base else None
    headers = None if change is None else {"gpuflight-from-round": str(base)}
    return await answer(
        request,
        state,
        number=done.number,
        representation="graph|json|" if change is None else f"since|{base}",
        media_type=MEDIA_TYPES["json"],
        build=lambda: encode_round(done) if change is None else encode_changes(done, base, change),
        headers=headers,
        repeatable=True,
        etag=f'W/"{state.instance_id}-{done.number}"',
    )


def _part(state: ServerState, done: Round, query: GraphQuery, selection: str) -> Graph:
    if not selection:
        return done.graph
    return state.parts.get((done.number, selection), lambda: select(done.graph, query))
