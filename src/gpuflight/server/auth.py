"""Who may: the role of a request, from its token or from where it comes.

A route says what it needs: ``dependencies=[Depends(require(Role.OPERATOR))]``. What decides, in this order:

1. A request with a token (``Authorization: Bearer …``, or ``X-API-Key: …`` in its place) has the role of that token;
   a wrong one is 401, from anywhere.
2. Without a token, whoever comes by the unix socket has the role of its user (``gpuflight.server.peers``), and a client
   on the loopback interface is admin while no token is configured at all, unless a proxy
   says (``Forwarded``, ``X-Forwarded-For``) that it asks for somebody else.
3. Anyone else is 401.

An address that failed too often gets 429 with Retry-After, whatever token it brings. TestClient of starlette is neither
on loopback nor called so: ``TestClient(app, base_url="http://127.0.0.1", client=("127.0.0.1", 1))``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec import Struct
from starlette.requests import HTTPConnection
from starlette.types import Scope

from gpuflight.server.errors import ApiError
from gpuflight.server.login_limit import LoginLimit
from gpuflight.server.peers import PEER_KEY, Peer, PeerRoles
from gpuflight.server.tokens import Role, TokenStore

__all__ = ["Principal", "Role", "authenticate", "is_loopback", "require", "require_ingest"]

_PROXY_HEADERS = frozenset((b"forwarded", b"x-forwarded-for", b"x-real-ip"))


class Principal(Struct, frozen=True):
    """Who asks: the name of the token, ``loopback`` or ``uid:N``, and the role."""

    name: str
    role: Role


def require(role: Role) -> Callable[[HTTPConnection], Awaitable[Principal]]:
    """A dependency that lets a request or WebSocket through if its role is at least ``role``; gives the Principal."""

    async def dependency(connection: HTTPConnection) -> Principal:
        return check(connection.scope, connection.app.state.gpuflight.tokens, role)

    return dependency


async def require_ingest(connection: HTTPConnection) -> Principal:
    """A dependency that lets through who may send events: the role ingest, and from operator on."""
    principal = authenticate(connection.scope, connection.app.state.gpuflight.tokens)
    if principal.role is Role.VIEWER:
        raise ApiError(
            403, "forbidden", f"this needs the role ingest or operator, and the token {principal.name!r} is of viewer"
        )
    return principal


def check(scope: Scope, tokens: TokenStore, role: Role) -> Principal:
    """``authenticate``, and ApiError 403 if the role is not enough. For routes that are plain ASGI."""
    principal = authenticate(scope, tokens)
    if principal.role < role:
        raise ApiError(
            403,
            "forbidden",
            f"this needs the role {role.label}, and the token {principal.name!r} is of role {principal.role.label}",
        )
    return principal


def authenticate(scope: Scope, tokens: TokenStore) -> Principal:
    """Who sends the request of an ASGI scope. Raises ApiError 401 or 429."""
    address = client_address(scope)
    authorization = None
    api_key = None
    proxied = False
    for key, value in scope["headers"]:
        if key == b"authorization":
            if authorization is not None:
                raise _unauthorized("two Authorization headers")
            authorization = value
        elif key == b"x-api-key":
            api_key = value
        elif key in _PROXY_HEADERS:
            proxied = True
    limit = limit_of(scope)
    if authorization is None and api_key is not None:
        authorization = b"Bearer " + api_key
    if authorization is None:
        peer: Peer | None = scope.get(PEER_KEY)
        if peer is not None and not proxied:
            role = peer_roles_of(scope).role_of(peer)
            if role is None:
                raise _unauthorized(f"the user with uid {peer.uid} has no role here, and sent no token")
            return Principal(address, role)
        if is_loopback(address) and not proxied and not tokens.configured:
            return Principal("loopback", Role.ADMIN)
        raise _unauthorized("a token is needed: `Authorization: Bearer TOKEN`")
    wait_s = limit.wait_s(address)
    if wait_s > 0:
        raise ApiError(
            429,
            "too_many_failed_logins",
            "too many wrong tokens from this address",
            detail={"retry_after_s": wait_s},
            headers={"Retry-After": str(wait_s)},
        )
    scheme, _, token = authorization.partition(b" ")
    info = tokens.verify(token.strip().decode("latin-1")) if scheme.lower() == b"bearer" else None
    if info is None:
        limit.failed(address)
        raise _unauthorized("this token is not valid here")
    return Principal(info.name, info.rank)


def still_valid(scope: Scope, tokens: TokenStore) -> bool:
    """Whether what a long answer was granted for still holds: its token was not revoked, or none is needed yet."""
    headers = dict(scope["headers"])
    if b"authorization" in headers:
        return tokens.verify(headers[b"authorization"].partition(b" ")[2].strip().decode("latin-1")) is not None
    if b"x-api-key" in headers:
        return tokens.verify(headers[b"x-api-key"].strip().decode("latin-1")) is not None
    return PEER_KEY in scope or not tokens.configured


def peer_roles_of(scope: Scope) -> PeerRoles:
    """The roles on the unix socket, of the application that a scope belongs to."""
    roles: PeerRoles = scope["app"].state.gpuflight_peer_roles
    return roles


def limit_of(scope: Scope) -> LoginLimit:
    """The count of failed logins of the application that a scope belongs to."""
    state: Any = scope["app"].state
    limit: LoginLimit | None = getattr(state, "gpuflight_login_limit", None)
    if limit is None:
        limit = state.gpuflight_login_limit = LoginLimit()
    return limit


def client_address(scope: Scope) -> str:
    """The address of the peer, without port; ``uid:0`` on a unix socket."""
    peer: Peer | None = scope.get(PEER_KEY)
    if peer is not None:
        return f"uid:{peer.uid}"
    client = scope.get("client")
    return str(client[0]) if client else ""


def is_loopback(address: str) -> bool:
    """Whether an address is of the loopback interface (127.0.0.0/8, ::1, and the former written as IPv6)."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return parsed.ipv4_mapped.is_loopback
    return parsed.is_loopback


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, "unauthorized", message, headers={"WWW-Authenticate": 'Bearer realm="gpuflight"'})
