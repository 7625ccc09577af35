"""A session as a report, as a trace for Perfetto, and its tables, as streams: memory does not grow with the session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Depends, Path, Query, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse

from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.events.answers import answer, ask, session_of
from gpuflight.server.events.parameters import SessionId
from gpuflight.server.events.samples import SESSION
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample
from gpuflight.server.state import ServerState

if TYPE_CHECKING:
    from gpuflight.events.query.reader import Reader
    from gpuflight.events.report import Report

ROOT = "/api/v1/sessions/{session_id}"
router = PlainRouter(prefix=ROOT, tags=["sessions"], dependencies=[Depends(require(Role.VIEWER))])

MEDIA = {
    "csv": "text/csv; charset=utf-8; header=present",
    "ndjson": "application/x-ndjson",
    "arrow": "application/vnd.apache.arrow.stream",
}

_SAMPLES = f"/api/v1/sessions/{SESSION}"
Top = Annotated[int, Query(ge=1, le=1000, description="most lines of a list")]


@router.get(
    "/report",
    summary="All about a session: kernels, copies, waits, memory, telemetry, hints, losses",
    openapi_extra=sample("GET", f"{_SAMPLES}/report?top=10"),
)
async def report(
    request: Request,
    state: State,
    session_id: SessionId,
    top: Top = 20,
    form: Annotated[
        Literal["json", "html"], Query(alias="format", description="as data, or as one page that needs nothing else")
    ] = "json",
) -> Response:
    """As `gpuflight report` makes it: what the session did, what slowed it down, and what could not be seen."""

    def built(reader: Reader) -> Report:
        from gpuflight.events.report import build_report

        return build_report(reader.store, reader.sessions[0], now_ns=state.events.wall_ns(), top=top)  # type: ignore[arg-type]

    if form == "json":
        return await answer(request, state, session_id, lambda reader: {"report": built(reader)})
    text = await _ask_reader(state, session_id, lambda reader: _page(built(reader)))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return HTMLResponse(text, headers={"cache-control": "no-store", "content-security-policy": policy})


@router.get("/trace", summary="A timeline for Perfetto", openapi_extra=sample("GET", f"{_SAMPLES}/trace"))
async def trace(state: State, session_id: SessionId) -> Response:
    """Chrome's JSON trace format, for ui.perfetto.dev and chrome://tracing: lanes per device and stream, scopes, calls
    with arrows to what they started, counters."""
    from gpuflight.events.export.trace import chrome_trace

    pieces = await _ask_reader(state, session_id, chrome_trace)
    return _stream(state, pieces, "application/json", f"{session_id}.json")


@router.get(
    "/tables/{name}",
    summary="A table, or an answer, whole",
    openapi_extra=sample("GET", f"{_SAMPLES}/tables/kernel?format=ndjson"),
)
async def table(
    state: State,
    session_id: SessionId,
    name: Annotated[str, Path(max_length=64, description="as `gpuflight export --list` shows them")],
    form: Annotated[
        Literal["csv", "ndjson", "arrow"], Query(alias="format", description="lines, or an Arrow IPC stream")
    ] = "csv",
) -> Response:
    """Every row of a table in order of time with the texts of its ids, or all lines of an answer (`top-kernels`)."""
    from gpuflight.errors import InputError
    from gpuflight.events.export.arrow import arrow_stream
    from gpuflight.events.export.tables import QUERIES, columns_of, text_of
    from gpuflight.server.errors import ApiError

    if name not in QUERIES:
        try:
            columns_of(name)
        except InputError as error:
            raise ApiError(404, "no_such_table", str(error)[:1000]) from None

    def pieces_of(reader: Reader) -> Iterator[bytes]:
        if form == "arrow":
            return arrow_stream(reader.store, reader.sessions, name)
        return text_of(reader, name, form)

    pieces = await _ask_reader(state, session_id, pieces_of)
    media = MEDIA[form]
    return _stream(state, pieces, media, f"{session_id}-{name}.{form}")


async def _ask_reader(state: ServerState, session_id: str, question: Callable[[Reader], Any]) -> Any:
    def asked(store: Any) -> Any:
        from gpuflight.events.query.reader import Reader

        return question(Reader(store, [session_of(store, session_id)]))

    return await ask(state, asked)


def _stream(state: ServerState, pieces: Iterator[bytes], media: str, name: str) -> Response:
    """Each piece is made by one of the threads for questions, when the peer has taken the one before."""

    async def body() -> AsyncIterator[bytes]:
        while (piece := await ask(state, lambda store: next(pieces, None))) is not None:
            yield piece

    safe = "".join(c if (c.isalnum() and c.isascii()) or c in "-_." else "_" for c in name)
    headers = {"cache-control": "no-store", "content-disposition": f'attachment; filename="{safe}"'}
    return StreamingResponse(body(), media_type=media, headers=headers)


def _page(made: Report) -> str:
    from gpuflight import __version__
    from gpuflight.events.report.html import page

    return page([made], f"gpuflight {__version__}")
