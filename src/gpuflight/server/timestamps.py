"""The wall clock in every answer, for who compares clocks: ``gpuflight-time-ns: RECEIVED SENT``.

Both are ns since the epoch: when the request was here, and when the answer began. They are T2 and T3 of NTP (RFC 5905
§8); with its own T1 and T4 a client knows the offset of the clocks to within half the time that was spent on the way.
"""

from __future__ import annotations

from time import time_ns
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"gpuflight-time-ns"


class TimeStamps:
    """Adds the header to whatever is answered. Outermost, so that nothing here is taken for time on the way."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        received_ns = time_ns()

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                stamp = (HEADER, b"%d %d" % (received_ns, time_ns()))
                message = {**message, "headers": [*message["headers"], stamp]}
            await send(message)

        await self.app(scope, receive, stamped)
