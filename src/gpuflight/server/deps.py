"""What routes depend on."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from gpuflight.server.state import ServerState


async def state(connection: HTTPConnection) -> ServerState:
    """What all requests share; for routes of HTTP and of WebSockets. A coroutine: anything else takes a thread."""
    found: ServerState = connection.app.state.gpuflight
    return found


State = Annotated[ServerState, Depends(state)]
