"""The server against the floor under it: a bare ASGI application on the same uvicorn that sends the same bytes.

One server process holds both applications; a client of plain sockets asks them by turns over kept connections. Ratios
are medians of the paired ratios of ``--repeats`` pairs:

* a cached graph: our requests per second by the bare application's (wanted: at least 0.85);
* an unchanged round: 304 per second by whole bodies per second (wanted: at least 15);
* compression: CPU time of ``gzip -1`` of the standard library by ours (wanted: at least 3), with the sizes.

    python benchmarks/bench_server.py [--nodes 10000] [--edges 40000] [--repeats 7] [--requests 40]
"""

from __future__ import annotations

import argparse
import gzip
import multiprocessing
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from gpuflight.graph import Graph, edges, nodes
from gpuflight.rounds import Environment, Round
from gpuflight.server.bodies import Encoding, compress

WANTED = {"graph": 0.85, "304": 15.0, "gzip": 3.0, "zstd": 3.0}


def sample_round(node_count: int, edge_count: int) -> Round:
    """A round of processes and connections, as large as asked for."""
    from gpuflight.graph.diff import Diff

    chance = random.Random(1)
    found = [
        nodes.Process(
            pid=index,
            start=900_000 + index,
            attributes={"name": f"proc{index % 50}", "cmdline": f"python train.py --rank {index}", "state": "S"},
            metrics={"cpu_pct": chance.random() * 100, "rss_bytes": chance.randrange(1 << 34), "threads_count": 4},
        )
        for index in range(node_count)
    ]
    graph = Graph(found)
    while len(graph.edges) < edge_count:
        one, other = chance.choice(found), chance.choice(found)
        graph.try_add_edge(
            edges.SendTo(one.id, other.id, {"join": "both"}, {"bytes": chance.randrange(1 << 40), "packets": 9})
        )
    return Round(
        number=1, time_ns=time.time_ns(), duration_s=0.1, graph=graph, diff=Diff(), coverage=[], env=Environment()
    )


def serve(done: Round, ready: Connection) -> None:
    """The child: our application, and under ``/raw`` and ``/raw-304`` one that only sends bytes."""
    import uvicorn

    from gpuflight.core.controller import Controller
    from gpuflight.round_codec import encode_round
    from gpuflight.server.app import create_app
    from gpuflight.server.state import ServerState
    from gpuflight.server.tokens import TokenStore
    from gpuflight.server.transport import HttpProtocol
    from gpuflight.settings import Settings

    class World:
        """Never asked for a round."""

        def close(self) -> None:
            """Nothing to give back."""

    settings = Settings()
    world: Any = World()
    controller = Controller(world, settings=settings, collectors=[])
    controller.latest = done
    controller.history.append(done)
    ours = create_app(ServerState(controller=controller, settings=settings, tokens=TokenStore()))
    body = encode_round(done)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/raw"):
            whole = scope["path"] == "/raw"
            await send(
                {"type": "http.response.start", "status": 200 if whole else 304, "headers": headers[: 2 * whole]}
            )
            await send({"type": "http.response.body", "body": body if whole else b""})
        else:
            await ours(scope, receive, send)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, http=HttpProtocol, lifespan="off", log_config=None, access_log=False)
        ready.send((listener.getsockname()[1], len(body)))
        uvicorn.Server(config).run(sockets=[listener])


class Client:
    """One kept connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.buffer = bytearray(4 << 20)

    def get(self, path: str, *headers: str) -> tuple[int, bytes]:
        """Status, and the head of the answer; the body is read and thrown away."""
        lines = [f"GET {path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]
        self.socket.sendall("\r\n".join(lines).encode())
        view = memoryview(self.buffer)
        got = self.socket.recv_into(view)
        while (end := self.buffer.find(b"\r\n\r\n", 0, got)) < 0:
            got += self.socket.recv_into(view[got:])
        head = bytes(view[:end])
        status = int(head[9:12])
        length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0)
        left = (0 if status == 304 else length) - (got - end - 4)
        while left > 0:
            left -= self.socket.recv_into(view, min(left, len(view)))
        return status, head


def rate(work: Callable[[], Any], count: int) -> float:
    """Calls per second."""
    began = time.perf_counter()
    for _ in range(count):
        work()
    return count / (time.perf_counter() - began)


def cpu_s(work: Callable[[], Any]) -> float:
    """CPU time of one call, s."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> int:
    """Measure, print, and say by the exit code whether all ratios are as wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--edges", type=int, default=40_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--requests", type=int, default=40)
    arguments = parser.parse_args()
    done = sample_round(arguments.nodes, arguments.edges)
    parent, child = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(done, child), daemon=True)
    process.start()
    port, size = parent.recv()
    print(f"{arguments.nodes} nodes, {arguments.edges} edges, {size / 1e6:.1f} MB of JSON")
    try:
        ratios = requests(Client(port), arguments.repeats, arguments.requests)
    finally:
        process.terminate()
        process.join()
    ratios |= compression(done, arguments.repeats)
    for name, ratio in ratios.items():
        print(f"{name:6} {ratio:7.2f}x  wanted {WANTED[name]:g}x  {'ok' if ratio >= WANTED[name] else 'MISSED'}")
    return int(any(ratio < WANTED[name] for name, ratio in ratios.items()))


def requests(client: Client, repeats: int, count: int) -> dict[str, float]:
    """What the clients see."""
    status, head = client.get("/api/v1/graph")
    assert status == 200
    etag = next(line[6:] for line in head.decode().split("\r\n") if line.lower().startswith("etag: "))
    unchanged = f"If-None-Match: {etag}"
    assert client.get("/api/v1/graph", unchanged)[0] == 304
    assert client.get("/raw")[0] == 200
    whole: list[float] = []
    short: list[float] = []
    rates: dict[str, list[float]] = {"raw": [], "graph": [], "304": [], "raw 304": []}
    for _ in range(repeats):
        raw = rate(lambda: client.get("/raw"), count)
        ours = rate(lambda: client.get("/api/v1/graph"), count)
        same = rate(lambda: client.get("/api/v1/graph", unchanged), count * 20)
        bare = rate(lambda: client.get("/raw-304"), count * 20)
        whole.append(ours / raw)
        short.append(same / ours)
        for name, value in zip(rates, (raw, ours, same, bare), strict=True):
            rates[name].append(value)
    for name, values in rates.items():
        print(f"{name:8} {statistics.median(values):10.1f} requests/s")
    return {"graph": statistics.median(whole), "304": statistics.median(short)}


def compression(done: Round, repeats: int) -> dict[str, float]:
    """What a compressed body takes to make."""
    from gpuflight.round_codec import encode_round

    body = encode_round(done)
    ratios: dict[str, float] = {}
    encodings: tuple[Encoding, ...] = ("gzip", "zstd")
    standard_size = len(gzip.compress(body, 1))
    for encoding in encodings:
        pairs = [
            cpu_s(lambda: gzip.compress(body, 1)) / cpu_s(lambda encoding=encoding: compress(body, encoding))  # type: ignore[misc]
            for _ in range(repeats)
        ]
        ratios[encoding] = statistics.median(pairs)
        print(f"{encoding} {len(compress(body, encoding)) / 1e6:.2f} MB, gzip -1 {standard_size / 1e6:.2f} MB")
    return ratios


if __name__ == "__main__":
    sys.exit(main())
