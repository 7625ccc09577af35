"""API keys of agents over REST: list, create, revoke; for the role admin. A key only sends events."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.events import api_keys
from gpuflight.server.samples import sample

ROOT = "/api/v1/api-keys"
router = APIRouter(prefix=ROOT, tags=["API keys"], dependencies=[Depends(require(Role.ADMIN))])


class NewKey(BaseModel):
    """What a key to be made is called."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"name": "node-7"}})

    name: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="unique; made from an id when null"
    )


@router.get("", summary="Every API key, without its secret", openapi_extra=sample("GET", ROOT))
def list_keys(state: State) -> dict[str, Any]:
    """They are access tokens of the role ingest: those of `gpuflight token create --role ingest` are here too."""
    return {"api_keys": [api_keys.shown(info) for info in api_keys.keys_of(state)]}


@router.post(
    "",
    summary="Make an API key",
    status_code=201,
    responses={409: {"description": "the name is taken"}},
    openapi_extra=sample("POST", ROOT, {"name": "node-7"}),
)
def create_key(state: State, wanted: NewKey) -> dict[str, Any]:
    """The answer holds the key; it cannot be had again. From now on no request comes in without a token."""
    key, info = api_keys.create(state, wanted.name)
    return {"api_key": key, **api_keys.shown(info)}


@router.delete(
    "/{which}",
    summary="Revoke an API key by name or id",
    responses={404: {"description": "no such key"}},
    openapi_extra=sample("DELETE", f"{ROOT}/node-1"),
)
def revoke_key(state: State, which: str) -> dict[str, Any]:
    """It is refused from now on."""
    return {"revoked": api_keys.shown(api_keys.revoke(state, which))}
