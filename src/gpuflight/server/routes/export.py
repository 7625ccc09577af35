"""The graph as a picture, or as a file of any registered format."""

from __future__ import annotations

import io
from typing import Annotated

from fastapi import Depends, Query, Request
from starlette.responses import Response

from gpuflight.registry import plugins
from gpuflight.rounds import Round
from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.openapi import media_type_of
from gpuflight.server.respond import answer
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample
from gpuflight.server.selection import select_round
from gpuflight.vis.base import Layout, LayoutOptions, Renderer

router = PlainRouter(prefix="/api/v1", tags=["export"], dependencies=[Depends(require(Role.VIEWER))])


@router.get(
    "/graph/export",
    summary="The graph as a picture",
    openapi_extra=sample("GET", "/api/v1/graph/export?format=html&layout=default"),
)
async def export(
    request: Request,
    state: State,
    form: Annotated[str, Query(alias="format", max_length=100, description="a renderer, see /plugins")] = "html",
    layout: Annotated[str, Query(max_length=100, description="a layout, see /plugins")] = "default",
    title: Annotated[str, Query(max_length=200, description="what to write above it; the host's name without")] = "",
    number: Annotated[
        int | None, Query(alias="round", ge=1, le=2**53, description="a round; the latest without")
    ] = None,
    at: Annotated[str | None, Query(max_length=64, description="a time: the round that stood then")] = None,
) -> Response:
    """The graph of a round, placed by a layout and written by a renderer."""
    layouts, renderers = plugins(Layout), plugins(Renderer)
    for what, name, known in (("layout", layout, layouts), ("format", form, renderers)):
        if name not in known:
            raise ApiError(422, "bad_request", f"{what}: there is no {name!r}", {"there_are": list(known)})
    done = await select_round(state, number, at)
    suffix = renderers[form].suffix

    def build() -> bytes:
        renderer = renderers[form]()
        file = io.BytesIO()
        renderer.write(renderer.build(layouts[layout]().layout(done.graph, _options(done, title))), file)
        return file.getvalue()

    return await answer(
        request,
        state,
        number=done.number,
        representation=f"export|{form}|{layout}|{title}",
        media_type=media_type_of(suffix),
        build=build,
        headers={
            "content-disposition": f'inline; filename="gpuflight-{done.number}{suffix}"',
            # A picture is a page of ours that shows names of others: nothing in it may reach this API.
            "content-security-policy": "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline';"
            " style-src 'unsafe-inline'; img-src data:",
            "x-content-type-options": "nosniff",
        },
    )


def _options(done: Round, title: str) -> LayoutOptions:
    notes = []
    if done.truncated_by:
        notes.append(f"The round ended early, limited by {done.truncated_by}: there is more than is shown")
    return LayoutOptions(
        title=title,
        environment=done.env,
        coverage=done.coverage,
        findings=done.findings,
        round_number=done.number,
        time_ns=done.time_ns,
        notes=notes,
    )
