"""Where rounds are delivered, over REST: what there is, create, change, pause, try, delete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends

from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.samples import sample
from gpuflight.server.state import ServerState
from gpuflight.server.subscriber_manager import Rejected, SubscriberManager

ROOT = "/api/v1/subscribers"
router = APIRouter(prefix=ROOT, tags=["subscribers"])

_VIEWER, _OPERATOR, _ADMIN = ([Depends(require(role))] for role in (Role.VIEWER, Role.OPERATOR, Role.ADMIN))
_NO_SUCH: dict[int | str, dict[str, Any]] = {404: {"description": "no such subscriber"}}
_REFUSED: dict[int | str, dict[str, Any]] = {
    409: {"description": "the name is taken, or it comes from the configuration"},
    422: {"description": "a setting that is not valid or not allowed, with its field"},
}
Values = Annotated[dict[str, Any], Body(description="settings; their keys depend on the type, see /types")]


@contextmanager
def _managed(state: ServerState) -> Iterator[SubscriberManager]:
    """The manager; what it rejects in the one shape of errors."""
    if not isinstance(state.subscribers, SubscriberManager):
        raise ApiError(409, "not_managed", "this server's subscribers cannot be managed")
    try:
        yield state.subscribers
    except Rejected as error:
        raise ApiError(error.status, error.code, str(error), error.detail) from None


@router.get("", summary="Every subscriber: state, statistics", dependencies=_VIEWER, openapi_extra=sample("GET", ROOT))
def list_subscribers(state: State) -> dict[str, Any]:
    """At every moment received = sent + dropped + queued. ``origin`` is ``configuration`` or ``rest``."""
    with _managed(state) as manager:
        return {"subscribers": manager.overview()}


@router.get(
    "/types",
    summary="Every type there is, with the JSON schema of its settings",
    dependencies=_VIEWER,
    openapi_extra=sample("GET", f"{ROOT}/types"),
)
def list_types(state: State) -> dict[str, Any]:
    """For forms and for checking settings beforehand."""
    with _managed(state) as manager:
        return {"types": manager.types()}


@router.post(
    "",
    summary="Create a subscriber",
    status_code=201,
    dependencies=_ADMIN,
    responses=_REFUSED,
    openapi_extra=sample("POST", ROOT, {"type": "memory", "name": "last-hour", "rounds_count": 720}),
)
def create(state: State, values: Values) -> dict[str, Any]:
    """Kept over restarts. It may write files and call hosts only as ``server.reach`` of the configuration allows."""
    with _managed(state) as manager:
        return manager.describe(manager.create(values))


@router.get(
    "/{name}",
    summary="One subscriber with its settings",
    dependencies=_ADMIN,
    responses=_NO_SUCH,
    openapi_extra=sample("GET", f"{ROOT}/recent"),
)
def read(state: State, name: str) -> dict[str, Any]:
    """Secrets are masked."""
    with _managed(state) as manager:
        return manager.describe(name)


@router.patch(
    "/{name}",
    summary="Change settings",
    dependencies=_ADMIN,
    responses=_NO_SUCH | _REFUSED,
    openapi_extra=sample("PATCH", f"{ROOT}/recent", {"expected_update_interval_s": 60}),
)
def update(state: State, name: str, values: Values) -> dict[str, Any]:
    """What is not named stays. Its statistics begin anew."""
    with _managed(state) as manager:
        manager.update(name, values)
        return manager.describe(name)


@router.delete(
    "/{name}",
    summary="Delete a subscriber",
    dependencies=_ADMIN,
    responses=_NO_SUCH | _REFUSED,
    openapi_extra=sample("DELETE", f"{ROOT}/recent"),
)
def delete(state: State, name: str) -> dict[str, Any]:
    """What waits is delivered within 5 s; what is left then is gone, spool included."""
    with _managed(state) as manager:
        return {"deleted": name, "ended_in_time": manager.delete(name)}


@router.get(
    "/{name}/statistics",
    summary="State and statistics of one subscriber",
    dependencies=_VIEWER,
    responses=_NO_SUCH,
    openapi_extra=sample("GET", f"{ROOT}/recent/statistics"),
)
def statistics(state: State, name: str) -> dict[str, Any]:
    """As in the list of all."""
    with _managed(state) as manager:
        return manager.statistics(name)


@router.post(
    "/{name}/pause",
    summary="Deliver nothing until resumed",
    dependencies=_OPERATOR,
    responses=_NO_SUCH,
    openapi_extra=sample("POST", f"{ROOT}/recent/pause"),
)
def pause(state: State, name: str) -> dict[str, Any]:
    """Rounds wait, or take each other's place, as its policy says."""
    with _managed(state) as manager:
        manager.set_paused(name, True)
        return manager.statistics(name)


@router.post(
    "/{name}/resume",
    summary="Deliver again",
    dependencies=_OPERATOR,
    responses=_NO_SUCH,
    openapi_extra=sample("POST", f"{ROOT}/recent/resume"),
)
def resume(state: State, name: str) -> dict[str, Any]:
    """The opposite of pause."""
    with _managed(state) as manager:
        manager.set_paused(name, False)
        return manager.statistics(name)


@router.post(
    "/{name}/test",
    summary="A trial delivery of the newest round",
    dependencies=_ADMIN,
    responses=_NO_SUCH | {503: {"description": "no round yet"}},
    openapi_extra=sample("POST", f"{ROOT}/recent/test"),
)
def test(state: State, name: str) -> dict[str, Any]:
    """Beside the queue, with a copy of the subscriber. ``ok`` tells whether it went well, ``error`` why not."""
    latest = state.controller.latest
    with _managed(state) as manager:
        manager.statistics(name)
        if latest is None:
            raise ApiError(503, "no_round", "no round has been completed yet")
        return manager.trial(name, latest)
