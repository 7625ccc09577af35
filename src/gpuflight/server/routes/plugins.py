"""Every plugin of every family, broken ones included."""

from __future__ import annotations

from typing import Any

from fastapi import Depends
from starlette.concurrency import run_in_threadpool

from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample

router = PlainRouter(prefix="/api/v1", tags=["plugins"], dependencies=[Depends(require(Role.VIEWER))])


@router.get("/plugins", summary="All plugins", openapi_extra=sample("GET", "/api/v1/plugins"))
async def plugins(state: State, family: str | None = None) -> dict[str, Any]:
    """Family → its plugins with their settings; what could not be loaded says why."""
    if state.plugins is None:
        raise ApiError(501, "not_here", "this server was made without a list of plugins")
    found = await run_in_threadpool(state.plugins)
    if family is None:
        return found
    if family not in found:
        raise ApiError(404, "no_such_family", f"there is no family {family!r}", {"families": list(found)})
    return {family: found[family]}
