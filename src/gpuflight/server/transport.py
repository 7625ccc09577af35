"""Protocols of uvicorn that hand the connection to the application, and bound what one client can take.

``scope["gpuflight.transport"]`` is the connection: ASGI has no way to end one whose peer does not read, since closing
waits for the buffer to empty, for hours. With the transport, a stream can be aborted, and bytes that many clients get
can be written without a copy for each; after the start of an answer of HTTP/1.1 without length, they must be chunks.
``scope["gpuflight.peer"]`` says who is at the other end of a unix socket.

uvicorn waits without end for a request that comes in byte by byte, for an answer to be read, and for the end of a head,
however long. ``ConnectionLimits`` ends each of these. ``uvicorn.Config(app, http=HttpProtocol, ws=WebSocketProtocol)``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from gpuflight.server.errors import error_body
from gpuflight.server.peers import PEER_KEY, peer_of

SCOPE_KEY = "gpuflight.transport"

_LEAST_SENT_BYTES = 64 * 1024
"""What a client must read in the time it is given, to be given as much time again: about 1 kB/s."""


class ConnectionLimits(Struct, frozen=True):
    """``request_s``: for a request, from its first byte (of the first one: from the connection) to its last.
    ``send_s``: for a client that takes next to nothing of an answer. ``head_bytes``: request line and headers."""

    connections: int = 2000
    request_s: float = 30.0
    send_s: float = 60.0
    head_bytes: int = 64 * 1024


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 by httptools."""

    limits = ConnectionLimits()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        self._request_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0
        self._head_bytes = 0
        self._in_head = True
        self._refusal = (400, "bad_http", "this is no valid HTTP request")
        full = len(self.connections) >= self.limits.connections
        super().connection_made(transport)
        if full:
            self._refuse(503, "too_many_connections", "there are too many connections")
            return
        self.app = _with_connection(self.app, transport)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended, whoever ended it."""
        self._stop_request_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a request, or of several."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        # httptools holds a header until its last byte came, so what is not yet told is counted here.
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.head_bytes and not self.transport.is_closing():
                self._refuse(*_HEAD_TOO_LARGE)
        waits = self.cycle is None or self.cycle.response_complete
        if waits and self._request_timer is None and self.timeout_keep_alive_task is None:
            self._await_request()  # empty lines, which begin no request, stop uvicorn's timer of idle connections

    def on_message_begin(self) -> None:
        """The first byte of a request came."""
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = 0
        if self._request_timer is None:
            self._await_request()

    def on_url(self, url: bytes) -> None:
        """A part of the target came."""
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header came."""
        super().on_header(name, value)
        self._count_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """The head is whole, the application is asked."""
        self._in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._stop_request_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The answer was written, though not necessarily sent."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reader()

    def handle_websocket_upgrade(self) -> None:
        """From here on another protocol has the connection."""
        self._stop_request_timer()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP, or more than is taken."""
        self._refuse(*self._refusal)

    def pause_writing(self) -> None:
        """The peer does not read as fast as is written."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """The peer read."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_send_timer()

    def timeout_keep_alive_handler(self) -> None:
        """No further request came."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # nor was the last answer read: closing would wait for that
        else:
            super().timeout_keep_alive_handler()

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.limits.head_bytes:
            self._refusal = _HEAD_TOO_LARGE
            raise ValueError("the head of a request is too large")  # the parser stops, and send_400_response is called

    def _await_request(self) -> None:
        if self.transport.is_closing():
            return
        self._request_timer = self.loop.call_later(self.limits.request_s, self._request_too_slow)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _request_too_slow(self) -> None:
        self._request_timer = None
        self._refuse(408, "too_slow", "the request did not come in within its time")

    def _await_reader(self) -> None:
        if self._send_timer is None:
            self._unsent_bytes = self.transport.get_write_buffer_size()
            self._send_timer = self.loop.call_later(self.limits.send_s, self._check_reader)

    def _check_reader(self) -> None:
        self._send_timer = None
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent > self._unsent_bytes - _LEAST_SENT_BYTES:
            self.transport.abort()
        elif unsent:
            self._await_reader()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """End the connection, with an error unless the answer to this request has begun."""
        if self._in_head or self.cycle is None or not self.cycle.response_started:
            body = error_body(code, message)
            self.transport.write(
                b"%scontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
                % (STATUS_LINE[status], len(body), body)
            )
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application is told, and what it still sends is let go
            self.cycle.message_event.set()
        self.transport.close()
        self._await_reader()


_HEAD_TOO_LARGE = (431, "head_too_large", "the head of the request is too large")


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """WebSocket by websockets."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client asked to change from HTTP."""
        super().connection_made(transport)
        self.app = _with_connection(self.app, transport)


def _with_connection(app: Any, transport: Any) -> Any:
    inner: ASGIApp = app
    peer = peer_of(transport)

    async def with_connection(scope: Scope, receive: Receive, send: Send) -> None:
        scope[SCOPE_KEY] = transport
        if peer is not None:
            scope[PEER_KEY] = peer
        try:
            await inner(scope, receive, send)
        except RuntimeError:
            if not transport.is_closing():  # else uvloop's word for a write after the end, which is nobody's defect
                raise

    return with_connection
