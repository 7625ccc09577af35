"""API keys: access tokens of the role ingest, made over REST, and when each was last used since the start."""

from __future__ import annotations

from typing import Any

from gpuflight.errors import InputError
from gpuflight.server.errors import ApiError
from gpuflight.server.state import ServerState
from gpuflight.server.tokens import Role, TokenInfo


def keys_of(state: ServerState) -> list[TokenInfo]:
    """Every API key."""
    return [info for info in state.tokens.all() if info.rank is Role.INGEST]


def create(state: ServerState, name: str | None) -> tuple[str, TokenInfo]:
    """A new key, which cannot be had again. Raises ApiError 409 if the name is taken, InputError."""
    if name is not None and any(name in (info.name, info.id) for info in state.tokens.all()):
        raise ApiError(409, "name_taken", f"there is a token {name!r} already")
    made: tuple[str, TokenInfo] = state.tokens.create(Role.INGEST, name)
    return made


def revoke(state: ServerState, which: str) -> TokenInfo:
    """Revoke a key by name or id. Raises ApiError 404; a token of another role is no key."""
    found = next((info for info in keys_of(state) if which in (info.name, info.id)), None)
    if found is None:
        raise ApiError(404, "no_such_key", f"there is no API key {which[:100]!r}")
    try:
        state.tokens.revoke(found.id)
    except InputError:  # somebody else was faster
        raise ApiError(404, "no_such_key", f"there is no API key {which[:100]!r}") from None
    return found


def shown(info: TokenInfo) -> dict[str, Any]:
    """What may be shown of a key."""
    return {"id": info.id, "name": info.name, "created": info.created, "prefix": info.prefix}
