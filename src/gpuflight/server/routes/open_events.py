"""Endpoints of GPU Flight's open backend that read what is stored, and those that its front calls and it lacks."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import Depends, Query
from starlette.responses import Response

from gpuflight.graph import codec
from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.events.answers import ask, change, session_of
from gpuflight.server.events.parameters import SessionId, time_ns
from gpuflight.server.events.samples import SESSION
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample

ROOT = "/api/v1"
router = PlainRouter(prefix=ROOT, tags=["open backend"], dependencies=[Depends(require(Role.VIEWER))])

_DAY_NS = 86_400 * 10**9
_ADMIN, _OPERATOR = [Depends(require(Role.ADMIN))], [Depends(require(Role.OPERATOR))]

Which = Annotated[str, Query(alias="sessionId", max_length=256, description="id of the session")]
DateFrom = Annotated[str | None, Query(alias="dateFrom", max_length=64, description="ISO 8601")]
DateTo = Annotated[str | None, Query(alias="dateTo", max_length=64, description="ISO 8601")]


@router.get("/events/hosts", summary="Hosts and their sessions", openapi_extra=sample("GET", f"{ROOT}/events/hosts"))
async def hosts(state: State) -> Response:
    """At most 500 sessions, the latest."""
    from gpuflight.server.events import open_backend

    return await _bounded(state, open_backend.hosts)


@router.get("/events/init", summary="Sessions with their rows", openapi_extra=sample("GET", f"{ROOT}/events/init"))
async def init(
    state: State,
    first: DateFrom = None,
    last: DateTo = None,
    session_id: Annotated[str | None, Query(alias="sessionId", max_length=256, description="only this one")] = None,
) -> Response:
    """Of the last 24 hours unless ``dateFrom`` and ``dateTo`` say otherwise; at most 20,000 kernels in all. The header
    ``gpuflight-truncated: true`` says that something was left out."""
    from gpuflight.server.events import open_backend

    to_ns = time_ns(last)
    from_ns = time_ns(first)
    now_ns = state.events.wall_ns() if state.events is not None else 0
    if to_ns is None:
        to_ns = now_ns
    if from_ns is None:
        from_ns = to_ns - _DAY_NS
    begin_ns, end_ns = from_ns, to_ns
    return await _bounded(state, lambda store: open_backend.init(store, begin_ns, end_ns, session_id))


@router.get(
    "/events/system",
    summary="Telemetry of a session",
    openapi_extra=sample("GET", f"{ROOT}/events/system?sessionId={SESSION}"),
)
async def system(state: State, session_id: Which, first: DateFrom = None, last: DateTo = None) -> Response:
    """A list of periods with the readings of host and devices in each."""
    from gpuflight.server.events import open_backend

    from_ns, to_ns = time_ns(first), time_ns(last)
    return await _bounded(
        state, lambda store: open_backend.system(store, session_of(store, session_id), from_ns, to_ns)
    )


@router.get(
    "/events/profile-samples",
    summary="Profile samples of a session",
    openapi_extra=sample("GET", f"{ROOT}/events/profile-samples?sessionId={SESSION}"),
)
async def profile_samples(state: State, session_id: Which) -> Response:
    """Added up by scope, function, place, kind and metric."""
    from gpuflight.server.events import open_backend

    return await _bounded(state, lambda store: open_backend.profile_samples(store, session_of(store, session_id)))


@router.get(
    "/events/source-content",
    summary="Lines of a source file",
    openapi_extra=sample("GET", f"{ROOT}/events/source-content?sessionId={SESSION}"),
)
async def source_content(
    state: State,
    session_id: Which,
    file: Annotated[str | None, Query(alias="sourceFile", max_length=4096, description="path of the file")] = None,
) -> dict[str, Any]:
    """Of the file that is named, else of every file that the session has (at most 100)."""

    def question(store: Any) -> dict[str, Any]:
        session = session_of(store, session_id)
        files, names = (store.relation(name, [session]).sql for name in ("source_file", "name"))
        rows = store.rows(
            f"SELECT f.lines, n.text FROM {files} AS f LEFT JOIN {names} AS n"  # noqa: S608 - names are ours
            " ON n.id = f.source_file_id AND n.dictionary = 'source_file'"
            " WHERE ? IS NULL OR n.text = ? ORDER BY n.text LIMIT 100",
            (file, file),
        )
        return {
            "sessionId": session_id,
            "files": [{"sourceFile": row["text"], "lines": _json(row["lines"])} for row in rows],
        }

    found: dict[str, Any] = await ask(state, question)
    return found


@router.get(
    "/events/disassembly",
    summary="SASS of functions",
    openapi_extra=sample("GET", f"{ROOT}/events/disassembly?sessionId={SESSION}"),
)
async def disassembly(
    state: State,
    session_id: Which,
    function: Annotated[
        str | None, Query(alias="functionName", max_length=4096, description="mangled name of the function")
    ] = None,
) -> dict[str, Any]:
    """Of the function that is named, else of every function that the session has (at most 1,000)."""

    def question(store: Any) -> dict[str, Any]:
        session = session_of(store, session_id)
        rows = store.rows(
            f"SELECT * FROM {store.relation('disassembly', [session]).sql}"  # noqa: S608
            " WHERE ? IS NULL OR function_name = ? ORDER BY function_name LIMIT 1000",
            (function, function),
        )
        return {
            "sessionId": session_id,
            "functions": [
                {
                    "functionName": row["function_name"],
                    "cubinCrc": row["cubin_crc"],
                    "entries": _json(row["entries"]),
                }
                for row in rows
            ],
        }

    found: dict[str, Any] = await ask(state, question)
    return found


@router.delete(
    "/events/sessions/{session_id}",
    summary="Delete a session, as its front does",
    dependencies=_OPERATOR,
    openapi_extra=sample("DELETE", f"{ROOT}/events/sessions/{SESSION}"),
)
async def delete(state: State, session_id: SessionId) -> dict[str, Any]:
    """As ``DELETE /api/v1/sessions/{session_id}``."""
    await change(state, lambda service, store: service.remove(store, session_of(store, session_id)))
    return {"deleted": session_id}


@router.post(
    "/events/admin/retention/run",
    summary="Enforce retention now",
    dependencies=_ADMIN,
    openapi_extra=sample("POST", f"{ROOT}/events/admin/retention/run"),
)
async def run_retention(state: State) -> dict[str, Any]:
    """It is enforced without being asked for as well (``events.retention_interval_s``)."""
    count: int = await change(state, lambda service, store: service.enforce_retention(store))
    return {"deletedSessions": count}


@router.get(
    "/insights/{session_id}",
    summary="What the open backend's rules find",
    openapi_extra=sample("GET", f"{ROOT}/insights/{SESSION}"),
)
async def insights_of(state: State, session_id: SessionId) -> dict[str, Any]:
    """Per kernel or function, the gravest first."""

    def question(store: Any) -> list[Any]:
        from gpuflight.events.query.reader import Reader
        from gpuflight.server.events.insights import insights

        return insights(Reader(store, [session_of(store, session_id)]))

    return {"sessionId": session_id, "insights": await ask(state, question)}


async def _bounded(state: Any, question: Any) -> Response:
    def work(store: Any) -> tuple[bytes, bool]:
        found = question(store)
        return codec.encode(list(found)), found.truncated

    body, truncated = await ask(state, work)
    headers = {"cache-control": "no-store"}
    if truncated:
        headers["gpuflight-truncated"] = "true"
    return Response(body, headers=headers, media_type="application/json")


def _json(text: str | None) -> Any:
    try:
        return msgspec.json.decode(text) if text else None
    except msgspec.DecodeError:
        raise ApiError(404, "unreadable", "what is stored of it cannot be read") from None
