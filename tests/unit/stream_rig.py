"""Stream clients without a network: each is one ASGI call whose ``send`` the test can hold back."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from gpuflight.core.history import History
from gpuflight.graph import Graph
from gpuflight.graph.codec import decode_diff, decode_graph
from gpuflight.graph.diff import apply
from gpuflight.graph.store import LiveStore
from gpuflight.rounds import Environment, Round
from gpuflight.server.transport import SCOPE_KEY


class Rounds:
    """Makes rounds as the core does: with its store, its history, its ``latest``; ``clear`` as the controller's."""

    def __init__(self, hub: Any) -> None:
        self.hub = hub
        self.history = History(1 << 30)
        self.latest: Round | None = None
        self.number = 0
        self._store = LiveStore(tombstone_rounds=1)

    def round(self, nodes: list[Any], edges: Any = (), *, publish: bool = True) -> Round:
        self.number += 1
        advance = self._store.advance(self.number, [nodes], [list(edges)])
        done = Round(
            number=self.number, time_ns=self.number, duration_s=0.1, graph=advance.graph, diff=advance.diff,
            coverage=[], env=Environment(hostname="box"),
        )  # fmt: skip
        self.latest = done
        self.history.append(done)
        if publish:
            self.hub.publish(done)
        return done

    def clear(self) -> None:
        self._store.clear()
        self.history.clear()
        self.latest = None


class FakeTransport:
    """A connection that can be cut."""

    def __init__(self, client: SseClient) -> None:
        self.client = client
        self.aborted = False
        self.buffered = bytearray()

    def write(self, data: bytes) -> None:
        """Chunks of HTTP/1.1: taken from the socket or kept in the buffer."""
        self.buffered += data
        if self.client.reading.is_set():
            self.flush()

    def flush(self) -> None:
        while self.buffered:
            size, _, rest = bytes(self.buffered).partition(b"\r\n")
            length = int(size, 16)
            assert rest[length : length + 2] == b"\r\n"
            self.client.took(rest[:length])
            self.buffered = bytearray(rest[length + 2 :])

    def is_closing(self) -> bool:
        return self.client.disconnected.is_set()

    def get_write_buffer_size(self) -> int:
        return len(self.buffered)

    def abort(self) -> None:
        self.aborted = True
        self.client.gone()


class SseClient:
    """One client of ``GET /api/v1/stream``; ``hold`` stops its reading, as a full socket does."""

    def __init__(self, app: Any, headers: tuple[tuple[str, str], ...] = (), *, transport: bool = True) -> None:
        self.app = app
        self.status = 0
        self.body = bytearray()
        self.finished = False
        self.hold_after_bytes = 1 << 60
        self.reading = asyncio.Event()
        self.reading.set()
        self.disconnected = asyncio.Event()
        self.news = asyncio.Event()
        self.transport = FakeTransport(self) if transport else None
        self.headers = headers
        self.task = asyncio.create_task(self._call())

    async def _call(self) -> None:
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
            "scheme": "http", "path": "/api/v1/stream", "raw_path": b"/api/v1/stream", "query_string": b"",
            "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
            "headers": [(b"host", b"127.0.0.1"), *((k.lower().encode(), v.encode()) for k, v in self.headers)],
        }  # fmt: skip
        if self.transport is not None:
            scope[SCOPE_KEY] = self.transport
        await self.app(scope, self._receive, self._send)
        self.finished = True
        self.news.set()

    async def _receive(self) -> dict[str, Any]:
        await self.disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reading.wait()
        if self.disconnected.is_set():
            return  # as uvicorn does
        if message["type"] == "http.response.start":
            self.status = message["status"]
        if self.transport is not None:
            self.transport.flush()
        self.took(message.get("body", b""))

    def took(self, data: bytes) -> None:
        self.body += data
        if len(self.body) > self.hold_after_bytes:
            self.hold_after_bytes = 1 << 60
            self.hold()
        self.news.set()

    def hold(self) -> None:
        self.reading.clear()

    def resume(self) -> None:
        self.reading.set()
        if self.transport is not None:
            self.transport.flush()

    def gone(self) -> None:
        self.disconnected.set()
        self.reading.set()

    def events(self) -> list[tuple[str, str, bytes]]:
        """(id, event, data) of every complete event."""
        found = []
        for block in bytes(self.body).split(b"\n\n")[:-1]:
            fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
            if b"data" in fields:
                found.append((fields.get(b"id", b"").decode(), fields[b"event"].decode(), fields[b"data"]))
        return found

    def numbers(self) -> list[int]:
        return [int(event_id.split("-")[0]) for event_id, name, _ in self.events() if name != "end"]

    def graph(self) -> Graph:
        """What the client knows after all events: fails if a difference does not fit."""
        graph = Graph()
        for _, name, data in self.events():
            if name == "graph":
                graph = decode_graph(data)
            elif name == "diff":
                graph = apply(decode_diff(data, graph)[0], graph)
        return graph

    def end_reason(self) -> str | None:
        event = self.events()[-1]
        return msgspec.json.decode(event[2])["reason"] if event[1] == "end" else None

    async def until(self, condition: Any) -> None:
        """Wait until something holds after news of this client; fails after a while."""
        async with asyncio.timeout(10):
            while not condition():
                self.news.clear()
                if condition():
                    return
                await self.news.wait()

    async def has(self, number: int) -> None:
        """Wait for a round."""
        await self.until(lambda: bool(self.numbers()) and self.numbers()[-1] >= number)


async def settle() -> None:
    """Let everything that can go on go on, without a clock."""
    for _ in range(200):
        await asyncio.sleep(0)
