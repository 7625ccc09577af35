"""The graph as a picture, or as a file of any registered format."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Annotated

from fastapi import Depends, Query, Request
from starlette.responses import Response

from gpuflight.registry import get, plugins
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
from gpuflight.vis.choose import Choice
from gpuflight.vis.model import LayoutGraph
from gpuflight.vis.picture import make_picture

router = PlainRouter(prefix="/api/v1", tags=["export"], dependencies=[Depends(require(Role.VIEWER))])

Depth = Annotated[int, Query(ge=0, le=64, description="with focus: how many lines away")]
Focus = Annotated[
    Sequence[str], Query(max_length=64, description="only what is around an entity: an id, pid:42, gpu:0; repeatable")
]
Kinds = Annotated[
    Sequence[str], Query(max_length=64, description="only entities of these kinds, separated by commas; repeatable")
]
MinMetric = Annotated[
    Sequence[str], Query(max_length=64, description="only what has such a metric: cpu_pct>50; repeatable")
]


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
    focus: Focus = (),
    depth: Depth = 1,
    kinds: Kinds = (),
    min_metric: MinMetric = (),
    diff: Annotated[
        int | None, Query(ge=1, le=2**53, description="an earlier round: what came, went and changed since is coloured")
    ] = None,
) -> Response:
    """The graph of a round, placed by a layout and written by a renderer; all of it, or the part that is chosen. Its
    findings are marked on it."""
    layouts, renderers = plugins(Layout), plugins(Renderer)
    for what, name, known in (("layout", layout, layouts), ("format", form, renderers)):
        if name not in known:
            raise ApiError(422, "bad_request", f"{what}: there is no {name!r}", {"there_are": list(known)})
    done = await select_round(state, number, at)
    before = await select_round(state, diff) if diff is not None else None
    choice = Choice(focus, depth, kinds, min_metric)
    suffix = renderers[form].suffix

    def build() -> bytes:
        renderer = renderers[form]()
        file = io.BytesIO()
        renderer.write(renderer.build(picture_of(done, layout, title, choice, before)), file)
        return file.getvalue()

    return await answer(
        request,
        state,
        number=done.number,
        representation=f"export|{form}|{layout}|{title}|{choice}|{diff}",
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


def picture_of(done: Round, layout: str, title: str, choice: Choice, before: Round | None = None) -> LayoutGraph:
    """A round as a picture. Raises InputError for a choice that cannot be used."""
    return make_picture(
        done.graph,
        _options(done, title),
        get(Layout, layout)(),
        choice=choice,
        before=before.graph if before is not None else None,
        before_name=f"round {before.number}" if before is not None else "",
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
