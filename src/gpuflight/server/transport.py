"""Protocols of uvicorn that hand the connection to the application, as ``scope["gpuflight.transport"]``.

ASGI has no way to end a connection whose peer does not read: closing waits for the buffer to empty, for hours. With
the transport, a stream can be aborted, and bytes that many clients get can be written without a copy for each; after
the start of an answer of HTTP/1.1 without length, they must be chunks.
``uvicorn.Config(app, http=HttpProtocol, ws=WebSocketProtocol)``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

SCOPE_KEY = "gpuflight.transport"


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 by httptools."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(transport)
        self.app = _with_transport(self.app, transport)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """WebSocket by websockets."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client asked to change from HTTP."""
        super().connection_made(transport)
        self.app = _with_transport(self.app, transport)


def _with_transport(app: Any, transport: Any) -> Any:
    inner: ASGIApp = app

    async def with_transport(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SCOPE_KEY] = transport
        await inner(scope, receive, send)

    return with_transport
