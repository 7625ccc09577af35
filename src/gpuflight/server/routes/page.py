"""The live page: the viewer of the pictures over the newest round, following the stream.

The page itself is for everyone: it holds nothing of the machine, and a browser cannot send a token for a page. What it
shows it asks for as a viewer: the picture here, the rounds from the stream.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request
from starlette.responses import Response

from gpuflight.graph import codec
from gpuflight.registry import plugins
from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.respond import MEDIA_TYPES, answer
from gpuflight.server.router import PlainRouter
from gpuflight.server.routes.export import Depth, Focus, Kinds, MinMetric, picture_of
from gpuflight.server.samples import sample
from gpuflight.server.selection import select_round
from gpuflight.vis.base import Layout
from gpuflight.vis.choose import Choice
from gpuflight.vis.render.html import live_page
from gpuflight.vis.render.payload import payload

router = PlainRouter(tags=["page"])


@router.get("/", summary="The live page", openapi_extra=sample("GET", "/"))
async def page() -> Response:
    """The viewer, for a browser. Its address takes the parameters of ``/api/v1/graph/view``: ``/?focus=gpu:0``."""
    text, policy = live_page()
    return Response(
        text,
        media_type="text/html; charset=utf-8",
        headers={
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        },
    )


@router.get(
    "/api/v1/graph/view",
    summary="The picture that the live page shows",
    dependencies=[Depends(require(Role.VIEWER))],
    openapi_extra=sample("GET", "/api/v1/graph/view?focus=gpu:0&depth=1"),
)
async def view(
    request: Request,
    state: State,
    layout: Annotated[str, Query(max_length=100, description="a layout, see /plugins")] = "default",
    title: Annotated[str, Query(max_length=200, description="what to write above it; the host's name without")] = "",
    number: Annotated[
        int | None, Query(alias="round", ge=1, le=2**53, description="a round; the latest without")
    ] = None,
    focus: Focus = (),
    depth: Depth = 1,
    kinds: Kinds = (),
    min_metric: MinMetric = (),
) -> Response:
    """Boxes and lines with their places, in the columns that the viewer reads: not a format to build upon, see
    ``/api/v1/graph/export`` for those."""
    if layout not in (known := plugins(Layout)):
        raise ApiError(422, "bad_request", f"layout: there is no {layout!r}", {"there_are": list(known)})
    done = await select_round(state, number)
    choice = Choice(focus, depth, kinds, min_metric)
    return await answer(
        request,
        state,
        number=done.number,
        representation=f"view|{layout}|{title}|{choice}",
        media_type=MEDIA_TYPES["json"],
        build=lambda: codec.encode(payload(picture_of(done, layout, title, choice))),
    )
