"""HEAD wherever GET is: the same status and headers, ETag and Content-Length included, and no body. Pure ASGI."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuflight.server.transport import SCOPE_KEY


class HeadAsGet:
    """Passes HEAD on as GET and keeps the body to itself. An answer that does not end by itself ends after its head."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        # Without the connection: nothing may be written past us.
        as_get = {name: value for name, value in scope.items() if name != SCOPE_KEY} | {"method": "GET"}
        ended = False

        async def head_only(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                await send(message)
            elif not ended:
                ended = True
                await send({"type": "http.response.body", "body": b""})

        async def until_ended() -> Message:
            # To a stream, the peer is gone as soon as the head was sent.
            return {"type": "http.disconnect"} if ended else await receive()

        await self.app(as_get, until_ended, head_only)
