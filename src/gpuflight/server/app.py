"""The ASGI application: routers found by scanning ``gpuflight.server.routes``, the error shape, the limits."""

from __future__ import annotations

import importlib
import pkgutil

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute

from gpuflight import __version__
from gpuflight.server import errors, openapi, routes
from gpuflight.server.auth import Role
from gpuflight.server.head import HeadAsGet
from gpuflight.server.hosts import HostCheck, cors
from gpuflight.server.middleware import RepeatedAnswers, RequestLimit
from gpuflight.server.peers import PeerRoles
from gpuflight.server.state import ServerState
from gpuflight.server.timestamps import TimeStamps

API = "/api/v1"


def create_app(state: ServerState) -> FastAPI:
    """The application around ``state``. Starts nothing; whoever serves it starts and stops the controller."""
    app = FastAPI(
        title="gpuflight",
        version=__version__,
        description="What is wired to what on a GPU machine, what each GPU does, and what holds it back.",
        openapi_url=f"{API}/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=errors.JsonResponse,
    )
    app.state.gpuflight = state
    app.state.gpuflight_peer_roles = PeerRoles(state.settings.server)
    errors.install(app)
    openapi.install(app)
    found = routers()
    for router in found:
        app.include_router(router)
    app.state.gpuflight_allowed = lambda path: allowed_methods(found, path)
    # The last one added is the first one passed.
    app.add_middleware(RepeatedAnswers, state=state, role=Role.VIEWER)
    app.add_middleware(HeadAsGet)
    larger = {f"{API}/events/": state.events.settings.max_body_bytes} if state.events is not None else {}
    app.add_middleware(RequestLimit, max_bytes=state.settings.server.max_request_bytes, larger=larger)
    cors(app, state.settings.server)
    app.add_middleware(HostCheck, settings=state.settings.server)
    app.add_middleware(TimeStamps)
    return app


def allowed_methods(found: list[APIRouter], path: str) -> list[str]:
    """The methods of every route that has a path; starlette names those of the first one only."""
    methods: set[str] = set()
    for router in found:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.path_regex.match(path):
                methods |= route.methods or set()
    if not methods or "GET" in methods:
        methods |= {"GET", "HEAD"}
    return sorted(methods)


def routers() -> list[APIRouter]:
    """The ``router`` of every module in ``gpuflight.server.routes``, by module name."""
    found = []
    for module in sorted(pkgutil.iter_modules(routes.__path__, routes.__name__ + "."), key=lambda found: found.name):
        router = getattr(importlib.import_module(module.name), "router", None)
        if isinstance(router, APIRouter):
            found.append(router)
    return found
