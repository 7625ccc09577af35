"""GPU sessions that are stored: which there are, one of them, deleting one, how long one is kept, two side by side."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.events.answers import answer, ask, change, session_of
from gpuflight.server.events.parameters import From, Limit, Offset, SessionId, To, time_ns
from gpuflight.server.events.samples import OTHER_SESSION, SESSION
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample

ROOT = "/api/v1/sessions"
router = PlainRouter(prefix=ROOT, tags=["sessions"], dependencies=[Depends(require(Role.VIEWER))])

_OPERATOR = [Depends(require(Role.OPERATOR))]


@router.get("", summary="Sessions, the latest first", openapi_extra=sample("GET", f"{ROOT}?app=train&limit=20"))
async def sessions(
    state: State,
    host: Annotated[str | None, Query(max_length=256, description="host name")] = None,
    app: Annotated[str | None, Query(max_length=256, description="name of the program")] = None,
    run: Annotated[str | None, Query(max_length=256, description="run of a segmented session")] = None,
    first: From = None,
    last: To = None,
    live: Annotated[bool | None, Query(description="only those that still run, or only the others")] = None,
    limit: Limit = 100,
    offset: Offset = 0,
) -> dict[str, Any]:
    """Each with its state (live, ended, died, silent), whether all of it is here, what was lost, and rows by table.
    ``from`` and ``to``: those that ran at some time in between."""
    from gpuflight.events.query.sessions import list_sessions

    from_ns, to_ns = time_ns(first), time_ns(last)
    service = state.events
    found = await ask(
        state,
        lambda store: list_sessions(
            store,
            service.wall_ns(),
            hostname=host,
            app=app,
            run_id=run,
            from_ns=from_ns,
            to_ns=to_ns,
            live=live,
            limit=limit,
            offset=offset,
        ),
    )
    return {"sessions": found.sessions, "sessions_count": found.sessions_count}


@router.get("/{session_id}", summary="One session", openapi_extra=sample("GET", f"{ROOT}/{SESSION}"))
async def one(state: State, session_id: SessionId) -> dict[str, Any]:
    """With its devices, what was captured, and its ledger: what did not become a record, and why."""
    from gpuflight.events.query.sessions import describe

    service = state.events

    def question(store: Any) -> dict[str, Any]:
        session = session_of(store, session_id)
        tables = {name: store.relation(name, [session]).sql for name in ("device", "capability")}
        return {
            **_line(describe(store, [session], service.wall_ns())[0]),
            "devices": [_known(row) for row in store.rows(f"SELECT * FROM {tables['device']} ORDER BY device_id")],  # noqa: S608
            "capabilities": [
                _known(row)
                for row in store.rows(f"SELECT * FROM {tables['capability']} ORDER BY feature")  # noqa: S608
            ],
            "losses": store.losses(session),
        }

    found: dict[str, Any] = await ask(state, question)
    return found


@router.delete(
    "/{session_id}",
    summary="Delete a session",
    dependencies=_OPERATOR,
    openapi_extra=sample("DELETE", f"{ROOT}/{SESSION}"),
)
async def delete(state: State, session_id: SessionId) -> dict[str, Any]:
    """With all its records. What is sent of it afterwards begins it anew."""
    await change(state, lambda service, store: service.remove(store, session_of(store, session_id)))
    return {"deleted": session_id}


class Keep(BaseModel):
    """How long a session is kept."""

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, json_schema_extra={"example": {"retention_days": 90}}
    )

    retention_days: float | None = Field(
        ge=0, le=36_500, description="days after its last event; 0: for ever; null: as the server says"
    )


@router.put(
    "/{session_id}/retention",
    summary="How long a session is kept",
    dependencies=_OPERATOR,
    openapi_extra=sample("PUT", f"{ROOT}/{SESSION}/retention", {"retention_days": 90}),
)
async def keep(state: State, session_id: SessionId, wanted: Keep) -> dict[str, Any]:
    """In place of the server's rule."""

    def work(_: Any, store: Any) -> None:
        store.catalogue.set_retention(session_of(store, session_id).session_no, wanted.retention_days)

    await change(state, work)
    return {"session_id": session_id, "retention_days": wanted.retention_days}


@router.get(
    "/{session_id}/compare",
    summary="Two sessions side by side",
    openapi_extra=sample("GET", f"{ROOT}/{SESSION}/compare?with={OTHER_SESSION}"),
)
async def compare_with(
    request: Request,
    state: State,
    session_id: SessionId,
    other: Annotated[str, Query(alias="with", max_length=256, description="id of the later session")],
    limit: Limit = 100,
    offset: Offset = 0,
) -> Response:
    """Kernels by name: launches, total and mean time of both, the greatest change of total time first."""
    from gpuflight.events.query.compare import compare
    from gpuflight.events.query.reader import Reader

    def question(before: Any) -> Any:
        after = before.store.session(other)
        if after is None:
            raise ApiError(404, "no_such_session", f"there is no session {other!r}")
        return compare(before, Reader(before.store, [after]), limit=limit, offset=offset)

    return await answer(request, state, session_id, question)


def _line(line: Any) -> dict[str, Any]:
    return {name: getattr(line, name) for name in line.__struct_fields__}


def _known(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None and name not in ("session_no", "clock")}
