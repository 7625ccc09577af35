"""The effective configuration, secrets masked."""

from __future__ import annotations

from typing import Any

from fastapi import Depends

from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.router import PlainRouter
from gpuflight.server.samples import sample
from gpuflight.settings import dump

router = PlainRouter(prefix="/api/v1", tags=["configuration"], dependencies=[Depends(require(Role.OPERATOR))])


@router.get("/config", summary="The effective configuration", openapi_extra=sample("GET", "/api/v1/config"))
async def config(state: State) -> dict[str, Any]:
    """All settings in force, the plugins' included; secrets are masked."""
    return state.configuration() if state.configuration is not None else dump(state.settings)
