"""Fan-out of rounds to stream clients against raw uvloop writes of the same bytes.

    python benchmarks/bench_stream.py [--clients 100] [--rounds 30] [--sizes 1000x4000,10000x40000]

Ours: ``StreamHub.publish`` of a round with 5 % changes, encoded once, over uvicorn to every client of
``/api/v1/stream``. Raw: a uvloop protocol that writes the finished bytes to each connection. Same clients in a process
of their own, same number of bytes; a round follows when every client has the one before. Wanted: at least 0.3x.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import uvicorn
import uvloop

from bench_graph import OurCollector, our_round, reports
from gpuflight.core.history import History
from gpuflight.graph.store import LiveStore
from gpuflight.round_codec import encode_round_diff
from gpuflight.rounds import Environment, Round
from gpuflight.server.app import create_app
from gpuflight.server.hub import StreamHub
from gpuflight.server.state import ServerState
from gpuflight.server.tokens import TokenStore
from gpuflight.server.transport import HttpProtocol, WebSocketProtocol
from gpuflight.settings import Settings

REQUEST = b"GET /api/v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Client(asyncio.Protocol):
    """Counts; ``has_round`` once an empty line, which ends an event, was the last thing that came."""

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done
        self.tail = b""
        self.waiting = False

    def connection_made(self, transport: Any) -> None:
        transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        self.tail = (self.tail + data[-4:])[-4:]
        if self.waiting and (self.tail == b"\n\n\r\n" or self.tail[-2:] == b"\n\n"):
            self.waiting = False
            self.done()


def clients(port: int, count: int, pipe: Connection) -> None:
    """The process of the clients: for each word from the pipe, wait until everybody got an event, and say so."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        left = 0
        complete = asyncio.Event()

        def done() -> None:
            nonlocal left
            left -= 1
            if not left:
                complete.set()

        all_clients = [(await loop.create_connection(lambda: Client(done), "127.0.0.1", port))[1] for _ in range(count)]
        pipe.send("connected")
        while await asyncio.to_thread(pipe.recv):
            left = count
            complete.clear()
            for client in all_clients:
                client.waiting = True
            pipe.send("ready")
            await complete.wait()
            pipe.send("done")

    uvloop.run(run())


def make_rounds(nodes_count: int, edges_count: int, count: int) -> list[Round]:
    variants = [reports(nodes_count, edges_count, share) for share in (0.0, 0.05)]
    ids = [f"Process(pid={index},start={900_000 + index})" for index in range(nodes_count)]
    store, collector = LiveStore(), OurCollector(ids)
    made = []
    for number in range(1, count + 1):
        advance = our_round(store, collector, variants[number % 2], number)
        made.append(
            Round(
                number=number, time_ns=time.time_ns(), duration_s=0.1, graph=advance.graph, diff=advance.diff,
                coverage=[], env=Environment(hostname="bench"),
            )
        )  # fmt: skip
    return made


def measure(port: int, count: int, works: list[Callable[[], None]], ready: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU seconds of this process from one work to everybody having it, the median over all but the first."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=clients, args=(port, count, other), daemon=True)
    process.start()
    assert pipe.recv() == "connected"
    ready()
    wall, cpu = [], []
    for work in works:
        pipe.send(True)
        assert pipe.recv() == "ready"
        began, began_cpu = time.perf_counter(), time.process_time()
        work()
        assert pipe.recv() == "done"
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - began_cpu)
    process.terminate()
    process.join()
    return statistics.median(wall[1:]), statistics.median(cpu[1:])


def ours(rounds: list[Round], count: int) -> tuple[float, float]:
    hub = StreamHub()
    controller: Any = SimpleNamespace(latest=None, history=History(1))
    app = create_app(ServerState(controller=controller, settings=Settings(), hub=hub, tokens=TokenStore()))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    server = uvicorn.Server(
        uvicorn.Config(app, http=HttpProtocol, ws=WebSocketProtocol, loop="uvloop", lifespan="off", log_config=None)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()

    def ready() -> None:
        while hub.clients_count < count:
            time.sleep(0.01)

    works: list[Callable[[], None]] = [lambda done=done: hub.publish(done) for done in rounds]  # type: ignore[misc]
    result = measure(listener.getsockname()[1], count, works, ready)
    assert hub.coalesced_count == 0 and hub.events_count == len(rounds), hub.statistics()
    hub.close()
    server.should_exit = True
    thread.join()
    return result


def raw(frames: list[bytes], count: int) -> tuple[float, float]:
    transports: list[Any] = []

    class Server(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transports.append(transport)

    started = threading.Event()
    found: dict[str, Any] = {}

    async def run() -> None:
        loop = found["loop"] = asyncio.get_running_loop()
        server = await loop.create_server(Server, "127.0.0.1", 0, backlog=1024)
        found["port"] = server.sockets[0].getsockname()[1]
        found["stop"] = asyncio.Event()
        started.set()
        await found["stop"].wait()
        for transport in transports:
            transport.abort()
        server.close()

    thread = threading.Thread(target=lambda: uvloop.run(run()))
    thread.start()
    started.wait()

    def write(frame: bytes) -> None:
        for transport in transports:
            transport.write(frame)

    def ready() -> None:
        while len(transports) < count:
            time.sleep(0.01)

    works: list[Callable[[], None]] = [
        lambda frame=frame: found["loop"].call_soon_threadsafe(write, frame)  # type: ignore[misc]
        for frame in frames
    ]
    result = measure(found["port"], count, works, ready)
    found["loop"].call_soon_threadsafe(found["stop"].set)
    thread.join()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sizes", default="1000x4000,10000x40000")
    options = parser.parse_args()
    print(f"python {sys.version.split()[0]}, uvicorn {uvicorn.__version__}, uvloop {uvloop.__version__}")
    for size in options.sizes.split(","):
        nodes_count, edges_count = map(int, size.split("x"))
        rounds = make_rounds(nodes_count, edges_count, options.rounds)
        frames = [
            b"id: %d-00000000\nevent: diff\ndata: %s\n\n" % (done.number, encode_round_diff(done)) for done in rounds
        ]
        raw_wall, raw_cpu = raw(frames, options.clients)
        our_wall, our_cpu = ours(rounds, options.clients)
        print(
            f"fan-out {size}, {len(frames[-1]) / 1e3:.0f} kB to {options.clients} clients: ours {our_wall * 1e3:.1f} ms"
            f" ({our_cpu * 1e3:.1f} ms CPU), raw uvloop {raw_wall * 1e3:.1f} ms ({raw_cpu * 1e3:.1f} ms CPU);"
            f" {raw_wall / our_wall:.2f}x raw (wanted 0.3x), CPU {raw_cpu / our_cpu:.2f}x"
        )


if __name__ == "__main__":
    main()
