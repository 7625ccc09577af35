"""The live stream over real sockets: uvicorn, a hundred clients, some that never read, some that go in the middle."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from tests.unit.stream_rig import Rounds

from gpuflight.graph import Graph, nodes
from gpuflight.graph.codec import decode_diff, decode_graph
from gpuflight.graph.diff import apply
from gpuflight.server.app import create_app
from gpuflight.server.hub import STOPPING, TOO_SLOW, StreamHub
from gpuflight.server.state import ServerState
from gpuflight.server.tokens import TokenStore
from gpuflight.server.transport import HttpProtocol, WebSocketProtocol
from gpuflight.settings import Settings

PATIENCE_S = 60.0
SSE = b"GET /api/v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
WEBSOCKET = (
    b"GET /api/v1/stream/ws HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class Live:
    """A real server; ``round`` is what the core's thread does."""

    def __init__(self) -> None:
        self.hub = StreamHub(stall_s=1.0, grace_s=0.2, heartbeat_s=0.3)
        self.rounds = Rounds(self.hub)
        app = create_app(
            ServerState(controller=self.rounds, settings=Settings(), hub=self.hub, tokens=TokenStore())  # type: ignore[arg-type]
        )
        self.listener = socket.socket()
        # Small buffers: a client that does not read is felt after kilobytes, not after megabytes.
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(256)
        self.address = self.listener.getsockname()
        config = uvicorn.Config(
            app, http=HttpProtocol, ws=WebSocketProtocol, lifespan="off", log_config=None, access_log=False,
            ws_per_message_deflate=False, timeout_graceful_shutdown=10,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True)
        self.thread.start()

    def round(self, value: int) -> Any:
        return self.rounds.round(
            [nodes.Process(pid=pid, start=1, metrics={"cpu_pct": value, "rss_bytes": pid}) for pid in range(200)]
        )

    def stop(self) -> None:
        self.hub.close()
        self.server.should_exit = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def live() -> Iterator[Live]:
    made = Live()
    yield made
    made.stop()


class Reader:
    """Reads the events of one stream."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.graph = Graph()
        self.end = ""
        self.news = asyncio.Event()

    async def connect(self, address: Any) -> Reader:
        self.stream, self.writer = await asyncio.open_connection(*address, limit=1 << 24)
        self.writer.write(SSE)
        head = await self.stream.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and b"text/event-stream" in head
        self.task = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        buffer = bytearray()
        while size := int(await self.stream.readuntil(b"\r\n"), 16):
            buffer += (await self.stream.readexactly(size + 2))[:-2]
            while (at := buffer.find(b"\n\n")) >= 0:
                block, buffer = bytes(buffer[:at]), buffer[at + 2 :]
                fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
                if fields.get(b"event") == b"end":
                    self.end = json.loads(fields[b"data"])["reason"]
                elif b"data" in fields:
                    self._event(fields)
                self.news.set()

    def _event(self, fields: dict[bytes, bytes]) -> None:
        if fields[b"event"] == b"graph":
            self.graph = decode_graph(fields[b"data"])
        else:
            self.graph = apply(decode_diff(fields[b"data"], self.graph)[0], self.graph)
        self.numbers.append(int(fields[b"id"].split(b"-")[0]))

    async def has(self, number: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.numbers or self.numbers[-1] < number:
                self.news.clear()
                await self.news.wait()

    def cut(self) -> None:
        """Go without a word: the peer gets a reset."""
        self.task.cancel()
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def silent(address: Any, request: bytes) -> socket.socket:
    """A client that asks and never reads."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(address)
    client.sendall(request)
    return client


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_hundred_clients_of_which_ten_never_read(live: Live) -> None:
    async def test() -> None:
        live.round(0)
        readers = [await Reader().connect(live.address) for _ in range(90)]
        dead = [silent(live.address, WEBSOCKET if index < 3 else SSE) for index in range(10)]
        await until(lambda: live.hub.clients_count == 100)
        for reader in readers:
            await reader.has(1)
        first_fds, first_threads, first_bytes = fds(), threading.active_count(), resident_bytes()
        number = 1
        while live.hub.clients_count > 90 or number < 40:
            number = (await asyncio.to_thread(live.round, number)).number
            for reader in readers:
                await reader.has(number)
            assert fds() <= first_fds + 2
            # A slice for each that never reads, and the rounds of a history: not what they missed.
            assert resident_bytes() - first_bytes < 64 * 1024 * 1024
        # The server's ends of the ten are given back although the peers still hold theirs.
        await until(lambda: fds() <= first_fds - 10)
        assert threading.active_count() <= first_threads + 1  # the one of to_thread
        assert live.hub.closed_counts == {TOO_SLOW: 10}
        latest = live.rounds.latest
        assert latest is not None
        for reader in readers:
            assert reader.numbers == list(range(1, number + 1))
            assert reader.graph == latest.graph
        for client in dead:
            client.close()
        await asyncio.to_thread(live.stop)
        for reader in readers:
            await asyncio.wait_for(reader.task, PATIENCE_S)
            assert reader.end == STOPPING
            reader.writer.close()

    asyncio.run(test())


def test_f20_clients_that_go_during_a_send_leave_nothing(live: Live) -> None:
    async def test() -> None:
        live.round(0)
        steady = await Reader().connect(live.address)
        await steady.has(1)
        first = fds()
        number = 1
        for _ in range(5):
            readers = [await Reader().connect(live.address) for _ in range(20)]
            await until(lambda: live.hub.clients_count == 21)
            publishing = asyncio.create_task(asyncio.to_thread(live.round, number))
            for reader in readers:
                reader.cut()
            number = (await publishing).number
            await steady.has(number)
            await until(lambda: live.hub.clients_count == 1 and fds() <= first)
        assert steady.numbers == list(range(1, number + 1))
        steady.cut()
        await until(lambda: live.hub.clients_count == 0)

    asyncio.run(test())


def test_websocket_over_the_wire(live: Live) -> None:
    from websockets.exceptions import ConnectionClosed, InvalidStatus
    from websockets.sync.client import connect

    url = f"ws://127.0.0.1:{live.address[1]}/api/v1/stream/ws"
    live.round(0)
    with pytest.raises(InvalidStatus) as refused:
        connect(url, additional_headers={"Authorization": "Bearer gpfl_wrong"})
    assert refused.value.response.status_code == 401
    with pytest.raises(InvalidStatus) as foreign:
        connect(url, origin="https://evil.example")  # type: ignore[arg-type]
    assert foreign.value.response.status_code == 403
    with connect(url) as client:
        first = json.loads(client.recv(PATIENCE_S))
        last = live.round(1)
        second = json.loads(client.recv(PATIENCE_S))
        graph = decode_graph(json.dumps(first["data"]).encode())
        assert apply(decode_diff(json.dumps(second["data"]), graph)[0], graph) == last.graph
        live.hub.close()
        assert json.loads(client.recv(PATIENCE_S))["data"] == {"reason": STOPPING}
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(PATIENCE_S)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001


def test_resume_over_the_wire(live: Live) -> None:
    import httpx

    url = f"http://127.0.0.1:{live.address[1]}/api/v1/stream?max_events=1"
    live.round(0)
    first = httpx.get(url).text
    event_id = next(line[4:] for line in first.splitlines() if line.startswith("id: "))
    live.round(1)
    last = live.round(2)
    again = httpx.get(url, headers={"Last-Event-ID": event_id}).text
    data = {text.splitlines()[1]: text.splitlines()[2][6:] for text in (first + again).split("\n\n") if "id: " in text}
    graph = decode_graph(data["event: graph"].encode())
    assert apply(decode_diff(data["event: diff"], graph)[0], graph) == last.graph


def test_clients_of_others_read_the_gzip_stream_as_it_comes(live: Live) -> None:
    """Every event when it comes, not at the end: what a decoder held back would be missed here."""
    import httpx

    url = f"http://127.0.0.1:{live.address[1]}/api/v1/stream"
    live.round(0)
    number = 1
    with httpx.stream("GET", url, headers={"Accept-Encoding": "gzip"}, timeout=PATIENCE_S) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        graph = Graph()
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: ") and name == "end":
                assert json.loads(line.removeprefix("data: "))["reason"] == STOPPING
            elif line.startswith("data: "):
                data = line.removeprefix("data: ")
                graph = decode_graph(data) if name == "graph" else apply(decode_diff(data, graph)[0], graph)
                latest = live.rounds.latest
                assert latest is not None and graph == latest.graph
                if number == 5:
                    live.hub.close()
                else:
                    number = live.round(number).number
    assert number == 5


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_reads_the_gzip_stream_as_it_comes(live: Live) -> None:
    url = f"http://127.0.0.1:{live.address[1]}/api/v1/stream"
    live.round(0)
    curl = subprocess.Popen(
        ["curl", "-sSN", "--fail", "-H", "Accept-Encoding: gzip", "--compressed", "-D", "/dev/stderr", url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert curl.stdout is not None
        for number in range(1, 5):
            while not (line := curl.stdout.readline()).startswith(b"id: "):
                assert line, "curl ended"
            assert line.startswith(b"id: %d-" % number)
            live.round(number)
        live.hub.close()
        rest, head = curl.communicate(timeout=PATIENCE_S)
        assert STOPPING.encode() in rest and curl.returncode == 0, head
        assert b"content-encoding: gzip" in head.lower()
    finally:
        curl.kill()
        curl.wait()
