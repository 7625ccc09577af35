"""Which name a server answers to, and which web pages may use it.

A web page of a stranger can have a browser on this machine send requests here: by a name of its own that it lets point
to 127.0.0.1 (DNS rebinding), by a form or ``fetch`` that needs no answer, or by a WebSocket, which no browser confines
to one origin. On loopback no token would stop them. So the Host must be a name of ours, and a request that changes
something, or opens a WebSocket, must not come from another origin. Addresses are names of ours: nobody can rebind them.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from gpuflight.errors import ConfigError
from gpuflight.server.auth import is_loopback
from gpuflight.server.errors import error_response
from gpuflight.server.peers import PEER_KEY

if TYPE_CHECKING:
    from gpuflight.server.tokens import TokenStore
    from gpuflight.settings.model import Server

_LOOPBACK_NAMES = frozenset(("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"))
_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))


class HostCheck:
    """Pure ASGI: 421 for a Host that is not ours, 403 for a foreign origin."""

    def __init__(self, app: ASGIApp, settings: Server) -> None:
        self.app = app
        self.names = allowed_names(settings)
        self.origins = frozenset(origin.lower().rstrip("/") for origin in settings.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let through, or refuse."""
        # No page of a browser gets to a unix socket, and the names that clients of one make up say nothing.
        if scope["type"] not in ("http", "websocket") or PEER_KEY in scope:
            await self.app(scope, receive, send)
            return
        hosts = [value for key, value in scope["headers"] if key == b"host"]
        origins = [value for key, value in scope["headers"] if key == b"origin"]
        if len(hosts) != 1 or not self.is_ours(hosts[0].decode("latin-1")):
            await _refuse(
                scope, receive, send, 421, "wrong_host",
                "this server does not answer to that name; `server.allowed_hosts` adds names",
            )  # fmt: skip
            return
        if origins and (scope["type"] == "websocket" or scope["method"] not in _SAFE_METHODS):
            host = hosts[0].decode("latin-1").lower()
            if len(origins) != 1 or not self.is_same(origins[0].decode("latin-1").lower(), host):
                await _refuse(
                    scope, receive, send, 403, "foreign_origin",
                    "a web page of another origin may not do this; `server.cors_origins` adds origins",
                )  # fmt: skip
                return
        await self.app(scope, receive, send)

    def is_ours(self, host: str) -> bool:
        """Whether a Host header names this server."""
        try:
            parts = urlsplit(f"//{host}")
            name = (parts.hostname or "").rstrip(".")
            _ = parts.port
        except ValueError:
            return False
        if not name or parts.path or parts.username is not None or parts.query or parts.fragment:
            return False
        return name in self.names or _is_address(name)

    def is_same(self, origin: str, host: str) -> bool:
        """Whether an Origin header is our own page, or one that was allowed."""
        if origin in self.origins:
            return True
        scheme, separator, rest = origin.partition("://")
        return bool(separator) and scheme in ("http", "https") and rest == host


def cors(app: Starlette, settings: Server) -> None:
    """Let the web pages of the configured origins read answers; without any, no answer says that a page may."""
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[origin.rstrip("/") for origin in settings.cors_origins],
            allow_methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "If-None-Match", "Last-Event-ID"],
            expose_headers=["ETag", "Retry-After"],
        )


def allowed_names(settings: Server) -> frozenset[str]:
    """The names by which this server may be called: loopback names, configured ones; off loopback its own name too."""
    names = {*_LOOPBACK_NAMES, *(name.lower().rstrip(".") for name in settings.allowed_hosts)}
    if settings.host is not None:
        names.add(settings.host.lower())
    if settings.host is not None and not _is_loopback_bind(settings.host):
        names.add(socket.gethostname().lower())
    return frozenset(names)


def check_bind(settings: Server, tokens: TokenStore) -> None:
    """Refuse to listen where strangers could come in without a token. Raises ConfigError."""
    if settings.host is None or _is_loopback_bind(settings.host) or tokens.configured:
        return
    raise ConfigError(
        f"server.host: {settings.host} is not a loopback address, and no token is configured: anyone could control this"
        " machine's profiler; make one with `gpuflight token create --role viewer`, or listen on 127.0.0.1 or on a"
        " `server.socket`"
    )


def _is_loopback_bind(host: str) -> bool:
    return host.lower() in _LOOPBACK_NAMES or is_loopback(host)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, code: str, message: str) -> None:
    response = error_response(status, code, message)
    if scope["type"] == "http" or "websocket.http.response" in scope.get("extensions", {}):
        await response(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": message[:120]})
