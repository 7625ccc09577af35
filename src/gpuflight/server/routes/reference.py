"""The routes of the reference system (witty-profiler), so that its clients and master instances work against us.

Answers come in its envelope ``{"env": {"local_ip", "hostname", "machine_id"}, "content": …}``; errors in our shape.
What changes something is POST only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Depends, Request
from starlette.responses import Response

from gpuflight.graph import codec
from gpuflight.graph.witty_write import to_witty
from gpuflight.rounds import Round
from gpuflight.server.auth import Role, is_loopback, require
from gpuflight.server.deps import State
from gpuflight.server.respond import MEDIA_TYPES, answer
from gpuflight.server.router import PlainRouter
from gpuflight.server.routes import control
from gpuflight.server.samples import sample
from gpuflight.server.selection import select_round
from gpuflight.server.state import ServerState

router = PlainRouter(tags=["reference system"], dependencies=[Depends(require(Role.VIEWER))])

_operator = [Depends(require(Role.OPERATOR))]


@router.get("/graph", summary="The graph in witty-profiler's form", openapi_extra=sample("GET", "/graph"))
async def graph(request: Request, state: State) -> Response:
    """Nodes and edges of the latest round as witty-profiler writes them."""
    return await _of_round(request, state, "graph", lambda done: to_witty(done.graph))


@router.get("/compressed_graph", summary="The graph as text", openapi_extra=sample("GET", "/compressed_graph"))
async def compressed_graph(request: Request, state: State) -> Response:
    """The latest round as compact text, in the envelope."""
    return await _of_round(request, state, "text", lambda done: done.graph.describe())


@router.get("/status", summary="What is going on, in the envelope", openapi_extra=sample("GET", "/status"))
async def status(state: State) -> dict[str, Any]:
    """As ``/api/v1/control``."""
    return _enveloped(state, control.control_status(state))


@router.post(
    "/control/start", summary="As /api/v1/control/start", dependencies=_operator,
    openapi_extra=sample("POST", "/control/start"),
)  # fmt: skip
async def start(state: State) -> dict[str, Any]:
    """One more reference to the background rounds."""
    return _enveloped(state, await control.begin(state))


@router.post(
    "/control/stop", summary="As /api/v1/control/stop", dependencies=_operator,
    openapi_extra=sample("POST", "/control/stop"),
)  # fmt: skip
async def stop(state: State) -> dict[str, Any]:
    """Give back one reference; ``running`` says whether others are left."""
    return _enveloped(state, await control.end(state))


@router.post(
    "/control/trigger", summary="As /api/v1/control/trigger", dependencies=_operator,
    openapi_extra=sample("POST", "/control/trigger"),
)  # fmt: skip
async def trigger(state: State) -> dict[str, Any]:
    """Wait for a round that begins after this request."""
    return _enveloped(state, await control.one_round(state, 60.0))


@router.post(
    "/control/clear", summary="As /api/v1/control/clear", dependencies=_operator,
    openapi_extra=sample("POST", "/control/clear"),
)  # fmt: skip
async def clear(state: State) -> dict[str, Any]:
    """Forget graph and history."""
    return _enveloped(state, await control.forget(state))


async def _of_round(request: Request, state: ServerState, what: str, content: Callable[[Round], Any]) -> Response:
    done = await select_round(state)
    env = {**_env(state), "hostname": done.env.hostname, "machine_id": done.env.machine_id}
    return await answer(
        request,
        state,
        number=done.number,
        representation=f"reference|{what}",
        media_type=MEDIA_TYPES["json"],
        build=lambda: codec.encode({"env": env, "content": content(done)}),
        repeatable=True,
    )


def _enveloped(state: ServerState, content: dict[str, Any]) -> dict[str, Any]:
    env = _env(state)
    latest = state.controller.latest
    if latest is not None:
        env |= {"hostname": latest.env.hostname, "machine_id": latest.env.machine_id}
    return {"env": env, "content": content}


def _env(state: ServerState) -> dict[str, str]:
    host = state.settings.server.host
    return {
        "local_ip": "127.0.0.1" if host is None or host == "localhost" or is_loopback(host) else host,
        "hostname": "",
        "machine_id": "",
    }
