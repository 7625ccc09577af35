"""The live stream of rounds: Server-Sent Events and WebSocket (docs/security.md, ``gpuflight.server.hub``)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from gpuflight.graph.codec import encode
from gpuflight.server import auth
from gpuflight.server.auth import Role, require
from gpuflight.server.deps import State
from gpuflight.server.errors import ApiError, error_response
from gpuflight.server.gzip_stream import HEADER, GzipStream, compress_part
from gpuflight.server.hub import STOPPING, StreamClient
from gpuflight.server.hub_events import Event, GzipForm, chunk
from gpuflight.server.respond import takes_gzip
from gpuflight.server.samples import sample
from gpuflight.server.state import ServerState
from gpuflight.server.transport import SCOPE_KEY

router = APIRouter(prefix="/api/v1/stream", tags=["stream"])

REVOKED = "the token is not valid any more"
ENOUGH = "as many events as were asked for"
_GONE = "client went away"
_HEARTBEAT = (b": alive\n\n",)
_HEARTBEAT_CHUNKS = tuple(map(chunk, _HEARTBEAT))
_HEARTBEAT_GZIP = GzipForm.of(_HEARTBEAT[0])
_RETRY_MS = 2000

_EXAMPLE = (
    'retry: 2000\n\nid: 7-5f0c9a1e\nevent: graph\ndata: {"schema":1,"round":7,"nodes":[],"edges":[]}\n\n'
    'id: 8-5f0c9a1e\nevent: diff\ndata: {"type":"diff","schema":1,"round":8}\n\n'
)


@router.get(
    "",
    summary="Every round as it happens, as Server-Sent Events",
    response_class=Response,
    responses={
        200: {
            "description": "`graph`: a whole round; `diff`: what leads on from the event before; `end`: why it ends",
            "content": {"text/event-stream": {"example": _EXAMPLE}},
        },
        503: {"description": "too many streams, or the server is stopping"},
    },
    dependencies=[Depends(require(Role.VIEWER))],
    openapi_extra=sample("GET", "/api/v1/stream?max_events=1"),
)
async def stream(
    state: State,
    last_event_id: Annotated[
        str | None, Query(max_length=64, description="as the header, for clients that cannot set it")
    ] = None,
    max_events: Annotated[int | None, Query(ge=1, description="end after so many events; without: never")] = None,
    last_event_id_header: Annotated[
        str | None,
        Header(alias="Last-Event-ID", max_length=64, description="id of the last event that the client has"),
    ] = None,
) -> Response:
    """The first event is the newest graph, or what changed since ``Last-Event-ID`` while the server remembers it.

    A client that reads too slowly gets what it missed as one difference; one that does not read is closed.
    """
    return EventStream(state, last_event_id_header or last_event_id, max_events)


class EventStream(Response):
    """The answer that does not end by itself."""

    media_type = "text/event-stream"

    def __init__(self, state: ServerState, last_event_id: str | None, max_events: int | None = None) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", "vary": "accept-encoding"})
        del self.headers["content-length"]
        self.stream_state = state
        self.last_event_id = last_event_id
        self.max_events = max_events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until either side ends it."""

        whole = True
        gzip = GzipStream() if takes_gzip(scope) else None

        async def begin() -> None:
            if gzip is not None:
                self.headers["content-encoding"] = "gzip"
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await body((HEADER if gzip is not None else b"") + packed(b"retry: %d\n\n" % _RETRY_MS))

        def packed(data: bytes) -> bytes:
            if gzip is None:
                return data
            part = compress_part(data)
            gzip.add(part)
            return part.data

        async def body(data: bytes, more_body: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more_body})

        transport: Any = scope.get(SCOPE_KEY)
        # Past the server, which would copy every piece for every client to put it into a chunk.
        direct = transport if scope["http_version"] == "1.1" else None

        async def event(client: StreamClient, found: Event | None) -> None:
            nonlocal whole
            if gzip is not None:
                form = await found.gzipped() if found is not None else _HEARTBEAT_GZIP
                if client.reason:
                    return
                gzip.add(form.part)
                pieces = form.chunked if direct is not None else form.pieces
            elif direct is not None:
                pieces = found.chunked() if found is not None else _HEARTBEAT_CHUNKS
            else:
                pieces = found.sse() if found is not None else _HEARTBEAT
            for count, piece in enumerate(pieces, 1):
                client.sending()
                if direct is None:
                    await body(piece)
                else:
                    direct.write(piece)
                    if direct.is_closing() or direct.get_write_buffer_size():
                        await body(b"")  # waits while the server's flow control says so
                client.sent()
                if client.reason:
                    whole = count == len(pieces)
                    return

        async def end(reason: str) -> None:
            # Half an event must not be completed by the empty line that this would begin with.
            if not whole:
                await body(b"", False)
                return
            last = packed(b"event: end\ndata: %s\n\n" % encode({"reason": reason}))
            await body(last + (gzip.end() if gzip is not None else b""), False)

        refusal = await _serve(
            self.stream_state, self.last_event_id, self.max_events, scope, receive, begin, event, end
        )
        if refusal is not None:
            await error_response(refusal.status, refusal.code, refusal.message)(scope, receive, send)


@router.websocket("/ws")
async def stream_ws(
    socket: WebSocket, state: State, last_event_id: str | None = None, max_events: int | None = None
) -> None:
    """The same as messages ``{"id", "event", "data"}``; what the client sends is not read."""
    try:
        auth.check(socket.scope, state.tokens, Role.VIEWER)
    except ApiError as error:
        await _deny(socket, error)
        return

    async def event(client: StreamClient, found: Event | None) -> None:
        if found is None:
            return  # the protocol has pings of its own
        client.sending()
        await socket.send_text(found.text())
        client.sent()

    async def end(reason: str) -> None:
        await socket.send_text(encode({"event": "end", "data": {"reason": reason}}).decode())
        code = 1001 if reason == STOPPING else 1008 if reason == REVOKED else 1000 if reason == ENOUGH else 1013
        await socket.close(code, reason)

    event_id = last_event_id or socket.headers.get("last-event-id")
    refusal = await _serve(state, event_id, max_events, socket.scope, socket.receive, socket.accept, event, end)
    if refusal is not None:
        await _deny(socket, refusal)


async def _deny(socket: WebSocket, error: ApiError) -> None:
    response = error_response(error.status, error.code, error.message, error.detail, error.headers)
    if "websocket.http.response" in socket.scope.get("extensions", {}):
        await socket.send_denial_response(response)
    else:
        await socket.close(1008, error.message)


async def _serve(
    state: ServerState,
    last_event_id: str | None,
    max_events: int | None,
    scope: Scope,
    receive: Receive,
    begin: Callable[[], Awaitable[None]],
    event: Callable[[StreamClient, Event | None], Awaitable[None]],
    end: Callable[[str], Awaitable[None]],
) -> ApiError | None:
    """Attach, send, detach; the way in and out is the same for both protocols. An ApiError if there is no room."""
    task = asyncio.current_task()
    transport: Any = scope.get(SCOPE_KEY)
    abort = transport.abort if transport is not None else task.cancel if task is not None else None
    hub = state.hub
    client = hub.attach(
        state.controller.latest, last_event_id=last_event_id, history=state.controller.history, abort=abort
    )
    if client is None:
        return ApiError(503, "no_stream", "there are too many streams, or the server is stopping")
    watcher = None
    try:
        await begin()
        watcher = asyncio.create_task(_watch(client, receive))
        async for found in client:
            if not auth.still_valid(scope, state.tokens):
                client.close(REVOKED)
                break
            await event(client, found if isinstance(found, Event) else None)
            if isinstance(found, Event) and max_events is not None:
                max_events -= 1
                if max_events <= 0:
                    client.close(ENOUGH)
                    break
        if client.reason != _GONE:
            client.sending()
            await end(client.reason)
    except asyncio.CancelledError:
        if not client.aborted or transport is not None or task is None:
            raise
        task.uncancel()  # our own abort
    except (OSError, WebSocketDisconnect):
        client.close(_GONE)  # while something was sent to it
    except RuntimeError:
        if not client.reason:  # else: starlette about a message after the end
            raise
    finally:
        hub.detach(client)
        if watcher is not None:
            watcher.cancel()
    return None


async def _watch(client: StreamClient, receive: Receive) -> None:
    """Wait for the peer to go; whatever else it sends is let go."""
    while (await receive())["type"] not in ("http.disconnect", "websocket.disconnect"):
        pass
    client.close(_GONE)
