"""What every request passes before it reaches a route. Pure ASGI: nothing here copies or holds back a body."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuflight.server import auth
from gpuflight.server.errors import ApiError, error_response
from gpuflight.server.repeats import matches, request_key
from gpuflight.server.state import ServerState


class RequestLimit:
    """Refuses a request whose body is larger than ``max_bytes``, by its declared length or as it comes in.

    ``larger``: beginnings of paths with limits of their own."""

    def __init__(self, app: ASGIApp, max_bytes: int, larger: Mapping[str, int] | None = None) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.larger = dict(larger or {})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path: str = scope.get("path", "")
        limit = next((size for start, size in self.larger.items() if path.startswith(start)), self.max_bytes)
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if declared.isdigit() and int(declared) > limit:
            await self._refuse(limit, scope, receive, send)
            return
        taken = 0
        answered = False

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > limit:
                raise _TooLarge
            return message

        async def noted(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self.app(scope, counted, noted)
        except _TooLarge:
            if not answered:
                await self._refuse(limit, scope, receive, send)

    async def _refuse(self, limit: int, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"the body of a request may be {limit} bytes"
        # The rest of the body is not read, so the connection cannot be used again.
        response = error_response(413, "too_large", message, headers={"connection": "close"})
        await response(scope, receive, send)


class _TooLarge(Exception):
    pass


class RepeatedAnswers:
    """Answers what was asked before in this round (``repeats``), lets the rest through. Stands within HostCheck."""

    def __init__(self, app: ASGIApp, state: ServerState, role: auth.Role) -> None:
        self.app = app
        self.state = state
        self.role = role

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        key, if_none_match = request_key(scope)
        repeat = self.state.repeats.find(key)
        latest = self.state.controller.latest
        if repeat is None or latest is None or latest.number != repeat.number:
            await self.app(scope, receive, send)
            return
        body: bytes | None = b""
        unchanged = if_none_match is not None and matches(if_none_match, repeat.etag)
        if not unchanged:
            body = self.state.bodies.find(repeat.body)
            if body is None:
                await self.app(scope, receive, send)
                return
        try:
            auth.check(scope, self.state.tokens, self.role)
        except ApiError as error:
            refusal = error_response(error.status, error.code, error.message, error.detail, error.headers)
            await refusal(scope, receive, send)
            return
        headers = repeat.unchanged_headers if unchanged else repeat.headers
        # A copy: uvicorn and other middlewares may add to it.
        await send({"type": "http.response.start", "status": 304 if unchanged else 200, "headers": list(headers)})
        await send({"type": "http.response.body", "body": body})
