"""Access tokens over REST: list, create, revoke; for the role admin."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError
from gpuflight.server.samples import sample

router = APIRouter(prefix="/api/v1/tokens", tags=["tokens"], dependencies=[Depends(require(Role.ADMIN))])


class NewToken(BaseModel):
    """What a token to be made is for."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"role": "viewer", "name": "grafana"}})

    role: Literal["ingest", "viewer", "operator", "admin"] = Field(description="what it may do")
    name: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="unique; made from role and id when null",
    )


@router.get("", summary="Every token, without its secret", openapi_extra=sample("GET", "/api/v1/tokens"))
def list_tokens(state: State) -> dict[str, Any]:
    """Those of the settings have ids that begin with ``settings-``."""
    return {"tokens": [info.public() for info in state.tokens.all()]}


@router.post(
    "",
    summary="Make a token",
    status_code=201,
    responses={409: {"description": "the name is taken"}},
    openapi_extra=sample("POST", "/api/v1/tokens", {"role": "viewer"}),
)
def create_token(state: State, wanted: NewToken) -> dict[str, Any]:
    """The answer holds the token; it cannot be had again. From now on no request comes in without a token."""
    if wanted.name is not None and any(wanted.name in (info.name, info.id) for info in state.tokens.all()):
        raise ApiError(409, "name_taken", f"there is a token {wanted.name!r} already")
    token, info = state.tokens.create(Role.of(wanted.role), wanted.name)
    return {"token": token, **info.public()}


@router.delete(
    "/{which}",
    summary="Revoke a token by name or id",
    responses={404: {"description": "no such token"}},
    openapi_extra=sample("DELETE", "/api/v1/tokens/grafana"),
)
def revoke_token(state: State, which: str) -> dict[str, Any]:
    """It is refused from now on, and the streams that it opened end with the next round."""
    found = next((info for info in state.tokens.all() if which in (info.name, info.id)), None)
    if found is None:
        raise ApiError(404, "no_such_token", f"there is no token {which!r}")
    if found.id.startswith("settings-"):
        raise ApiError(409, "token_of_settings", "this token comes from the settings: change them and start again")
    return {"revoked": state.tokens.revoke(which).public()}
