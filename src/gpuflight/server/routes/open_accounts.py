"""Accounts of GPU Flight's open backend, for its front: here an account is an access token, and its password too."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from starlette.responses import Response

from gpuflight.server import auth
from gpuflight.server.auth import Principal, Role, require
from gpuflight.server.deps import State
from gpuflight.server.events import api_keys
from gpuflight.server.samples import sample

ROOT = "/api/v1/auth"
router = APIRouter(prefix=ROOT, tags=["open backend"])

_ADMIN = [Depends(require(Role.ADMIN))]


class Login(BaseModel):
    """Who logs in."""

    model_config = ConfigDict(extra="ignore")

    emailOrUsername: str = Field(default="", max_length=256, description="is not looked at")
    password: SecretStr = Field(max_length=1024, description="an access token of this server")


class KeyName(BaseModel):
    """What a key is called."""

    model_config = ConfigDict(extra="ignore", json_schema_extra={"example": {"name": "node-8"}})

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="unique")


@router.post("/login", summary="Log in with an access token", openapi_extra=sample("POST", f"{ROOT}/login", {
    "emailOrUsername": "me", "password": "gpfl_EXAMPLE"}))  # fmt: skip
async def login(request: Request, wanted: Login) -> dict[str, Any]:
    """The token that was given, if it is one of this server, to be sent as ``Authorization: Bearer``."""
    token = wanted.password.get_secret_value()
    headers = [pair for pair in request.scope["headers"] if pair[0] not in (b"authorization", b"x-api-key")]
    scope = {
        **request.scope,
        "headers": [*headers, (b"authorization", b"Bearer " + token.encode("latin-1", "replace"))],
    }
    principal = auth.authenticate(scope, request.app.state.gpuflight.tokens)
    return {"token": token, "username": principal.name, "role": _role(principal)}


@router.get("/profile", summary="Who asks", openapi_extra=sample("GET", f"{ROOT}/profile"))
async def profile(who: Principal = Depends(require(Role.VIEWER))) -> dict[str, Any]:  # noqa: B008 - FastAPI's way
    """The name of the token."""
    return {
        "username": who.name,
        "email": None,
        "displayName": who.name,
        "bio": None,
        "avatarUrl": None,
        "role": _role(who),
    }


@router.get(
    "/api-keys", summary="API keys, as its front shows them", dependencies=_ADMIN,
    openapi_extra=sample("GET", f"{ROOT}/api-keys"),
)  # fmt: skip
def list_keys(state: State) -> list[dict[str, Any]]:
    """``lastUsedAt`` is null: it is not kept."""
    return [
        {"id": info.id, "name": info.name, "keyPrefix": info.prefix, "createdAt": info.created, "lastUsedAt": None}
        for info in api_keys.keys_of(state)
    ]


@router.post(
    "/api-keys", summary="Make an API key, as its front does", dependencies=_ADMIN,
    responses={409: {"description": "the name is taken"}},
    openapi_extra=sample("POST", f"{ROOT}/api-keys", {"name": "node-8"}),
)  # fmt: skip
def create_key(state: State, wanted: KeyName) -> dict[str, Any]:
    """As ``POST /api/v1/api-keys``."""
    key, info = api_keys.create(state, wanted.name)
    return {"id": info.id, "name": info.name, "rawKey": key}


@router.delete(
    "/api-keys/{which}", summary="Revoke an API key, as its front does", status_code=204, dependencies=_ADMIN,
    response_class=Response, openapi_extra=sample("DELETE", f"{ROOT}/api-keys/node-1"),
)  # fmt: skip
def revoke_key(state: State, which: str) -> Response:
    """As ``DELETE /api/v1/api-keys/{which}``."""
    api_keys.revoke(state, which)
    return Response(status_code=204)


@router.get(
    "/demo-tokens",
    summary="No demo links here",
    dependencies=_ADMIN,
    openapi_extra=sample("GET", f"{ROOT}/demo-tokens"),
)
async def demo_tokens() -> list[dict[str, Any]]:
    """Always empty: a token of the role viewer is what a demo link would be."""
    return []


def _role(who: Principal) -> str:
    return "ADMIN" if who.role is Role.ADMIN else "USER"
