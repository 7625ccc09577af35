"""Ingest of GPU events over HTTP: decoded, stored and acknowledged, beside two floors on the same server.

A real uvicorn in one process on one core, a client of plain sockets in another on another core. The client sends
gzip windows of kernel batches (2,048 rows a line) over ``--connections`` connections, each waiting for its answer, by
turns to:

* ours: ``/api/v1/events/stream``, every window new, acknowledged when it is on disk;
* a handler that only reads the body of the same windows: what HTTP alone allows;
* a handler that takes the same kernels as ``list[Kernel]`` of pydantic, the usual FastAPI way, and only counts them.

Figures are medians of ``--repeats`` turns: kernels per second acknowledged. Goal: ours >= 700,000. At the end every
kernel that was acknowledged is counted in the store.

    python benchmarks/bench_ingest.py [--rows 2000000] [--window-batches 64] [--repeats 5] [--details]
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
import zlib
from multiprocessing.connection import Connection
from typing import Any

WANTED_ROWS_PER_S = 700_000
STEP = 2048
START_NS = 1_790_000_000_000_000_000
COLUMNS = (
    "dt_ns", "kernel_id", "stream_id", "duration_ns", "corr_id", "dyn_shared", "num_regs", "has_details",
    "external_kind", "external_id",
)  # fmt: skip
PYDANTIC_ROWS = 20_000


def line(kind: str, session: str, **fields: Any) -> bytes:
    """One line of a log."""
    return json.dumps({"version": 1, "type": kind, "session_id": session, **fields}, separators=(",", ":")).encode()


def window(session: str, number: int, batches: int, details: bool) -> bytes:
    """A window of kernels as a training job launches them, gzip."""
    chance = random.Random(f"{session}{number}")
    lines = []
    if number == 0:
        lines.append(line("job_start", session, pid=1, app="train", ts_ns=START_NS, hostname="n1"))
        names = {str(index): f"void cutlass::Kernel2<cutlass_80_gemm_{index}>(Params)" for index in range(1, 41)}
        lines.append(line("dictionary_update", session, kernel_dict=names))
    for index in range(batches):
        batch_id = number * batches + index + 1
        first = batch_id * STEP
        rows = []
        at = 0
        for row in range(STEP):
            at += chance.randrange(1000, 20_000)
            kernel = chance.randrange(1, 41)
            duration = int(chance.lognormvariate(10, 1))
            rows.append([at, kernel, 7 + kernel % 4, duration, first + row, kernel % 4 * 16384, 32 + kernel, 1, 0, 0])
        base = START_NS + first * 12_000
        lines.append(
            line("kernel_event_batch", session, batch_id=batch_id, base_time_ns=base, columns=COLUMNS, rows=rows)
        )
        if details:
            lines += [
                line("kernel_detail", session, pid=1, app="train", corr_id=first + row, grid=f"({rows[row][1]},1,1)",
                     block="(256,1,1)", static_shared=4096, local_bytes=0, const_bytes=352, occupancy=0.5,
                     limiting_resource="registers", max_active_blocks=4, user_scope="global|step",
                     stack_trace="main|train")
                for row in range(STEP)
            ]  # fmt: skip
    return gzip.compress(b"\n".join(lines) + b"\n", 3)


def objects() -> bytes:
    """Kernels as objects, the way a list of models is sent."""
    chance = random.Random(1)
    return json.dumps(
        [dict(zip(COLUMNS, (chance.randrange(1 << 40) for _ in COLUMNS), strict=True)) for _ in range(PYDANTIC_ROWS)],
        separators=(",", ":"),
    ).encode()


def serve(folder: str, core: int | None, ready: Connection) -> None:
    """The child: our application, and under ``/raw`` and ``/pydantic`` the floors."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    import uvicorn
    from fastapi import FastAPI, Request
    from pydantic import BaseModel

    from gpuflight.core.controller import Controller
    from gpuflight.server.app import create_app
    from gpuflight.server.events.service import EventService
    from gpuflight.server.events.settings import EventsSettings
    from gpuflight.server.state import ServerState
    from gpuflight.server.tokens import TokenStore
    from gpuflight.server.transport import HttpProtocol
    from gpuflight.settings import Settings

    class World:
        """Never asked for a round."""

        def close(self) -> None:
            """Nothing to give back."""

    settings = Settings()
    events = EventService(EventsSettings(), folder)
    events.start()
    world: Any = World()
    controller = Controller(world, settings=settings, collectors=[])
    ours = create_app(ServerState(controller=controller, settings=settings, tokens=TokenStore(), events=events))
    Kernel = type("Kernel", (BaseModel,), {"__annotations__": dict.fromkeys(COLUMNS, int)})
    floors = FastAPI()

    async def raw(request: Request) -> dict[str, int]:
        return {"bytes": len(await request.body())}

    async def pydantic(kernels: Any) -> dict[str, int]:
        return {"accepted": len(kernels)}

    raw.__annotations__["request"] = Request
    pydantic.__annotations__["kernels"] = list[Kernel]  # type: ignore[valid-type]
    floors.post("/floor/raw")(raw)
    floors.post("/floor/pydantic")(pydantic)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (floors if scope.get("path", "").startswith("/floor/") else ours)(scope, receive, send)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, http=HttpProtocol, lifespan="off", log_config=None, access_log=False)
        server = uvicorn.Server(config)
        ready.send(listener.getsockname()[1])
        threading.Thread(target=lambda: (ready.recv(), setattr(server, "should_exit", True)), daemon=True).start()
        server.run(sockets=[listener])
    events.stop(30)


def post(connection: socket.socket, path: str, body: bytes, *headers: str) -> bytes:
    """Send a request, read its answer; the answer's body. Raises RuntimeError unless it is 200."""
    head = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1", f"Content-Length: {len(body)}", *headers, "", ""]
    connection.sendall("\r\n".join(head).encode() + body)
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += connection.recv(65536)
    head_of, _, rest = answer.partition(b"\r\n\r\n")
    length = next(int(part[15:]) for part in head_of.lower().split(b"\r\n") if part.startswith(b"content-length:"))
    while len(rest) < length:
        rest += connection.recv(65536)
    if not head_of.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer[:500].decode(errors="replace"))
    return rest


def client(port: int, core: int | None, jobs: Connection) -> None:
    """The other child: sends what it is told to, answers with the seconds that took."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    while (job := jobs.recv()) is not None:
        path, bodies, connections = job
        waiting = list(enumerate(bodies))[::-1]
        lock = threading.Lock()
        failures: list[str] = []

        def work(path: str = path, waiting: Any = waiting, lock: Any = lock, failures: Any = failures) -> None:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while True:
                    with lock:
                        if not waiting:
                            return
                        _, (body, headers) = waiting.pop()
                    try:
                        post(connection, path, body, *headers)
                    except (OSError, RuntimeError) as error:
                        failures.append(str(error))
                        return

        threads = [threading.Thread(target=work) for _ in range(connections)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        jobs.send((time.perf_counter() - began, failures))


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, s."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Measure, print, and say by the exit code whether the goal is reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000, help="kernels per turn")
    parser.add_argument("--window-batches", type=int, default=64, help="batches of 2,048 kernels per window")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--details", action="store_true", help="a kernel_detail line for each kernel too")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    server_core, client_core = (cores[0], cores[-1]) if len(cores) > 1 else (None, None)
    windows = max(1, arguments.rows // (STEP * arguments.window_batches))
    rows = windows * STEP * arguments.window_batches
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="gpuflight-bench-") as folder:
        ready, theirs = context.Pipe()
        jobs, its = context.Pipe()
        server = context.Process(target=serve, args=(os.path.join(folder, "events"), server_core, theirs))
        server.start()
        port = ready.recv()
        sender = context.Process(target=client, args=(port, client_core, its))
        sender.start()
        ours, raw, pydantic = [], [], []
        per_cpu = []
        sent_bytes = 0

        def turn(path: str, bodies: list[Any]) -> float:
            jobs.send((path, bodies, arguments.connections))
            seconds, failures = jobs.recv()
            if failures:
                raise SystemExit(f"{path}: {failures[0]}")
            return float(seconds)

        model_bodies = [(objects(), ("Content-Type: application/json",))] * 4
        try:
            for number in range(arguments.repeats):
                session = f"11111111-1111-4111-8111-{number:012d}"
                bodies = []
                for index in range(windows):
                    body = window(session, index, arguments.window_batches, arguments.details)
                    bodies.append(
                        (
                            body,
                            (
                                "Content-Type: application/x-ndjson", "Content-Encoding: gzip",
                                f"X-GpuFlight-Session-Id: {session}", "X-GpuFlight-Window-Channel: device",
                                f"X-GpuFlight-Window-Id: w{index}", f"X-GpuFlight-Window-Sequence: {index + 1}",
                                f"X-GpuFlight-Window-CRC32: {zlib.crc32(body)}",
                            ),
                        )
                    )  # fmt: skip
                sent_bytes += sum(len(body) for body, _ in bodies)
                cpu_before_s = cpu_s(server.pid or 0)
                ours.append(rows / turn("/api/v1/events/stream", bodies))
                per_cpu.append(rows / (cpu_s(server.pid or 0) - cpu_before_s))
                raw.append(rows / turn("/floor/raw", bodies))
                pydantic.append(len(model_bodies) * PYDANTIC_ROWS / turn("/floor/pydantic", model_bodies))
        finally:
            jobs.send(None)
            ready.send(None)
            sender.join(30)
            server.join(60)
        from gpuflight.events.store import EventStore

        store = EventStore(os.path.join(folder, "events"))
        stored = store.rows("SELECT count(*) AS count FROM kernel")[0]["count"]
        size = os.path.getsize(os.path.join(folder, "events", "records.duckdb"))
        store.close()
    median = statistics.median(ours)
    total = rows * arguments.repeats
    print(f"{windows} windows of {arguments.window_batches * STEP:,} kernels, {sent_bytes / total:.1f} bytes a kernel")
    print(f"  ours, decoded, stored, acknowledged: {median:12,.0f} kernels/s  ({min(ours):,.0f} to {max(ours):,.0f})")
    print(f"    per second of the server's CPU:    {statistics.median(per_cpu):12,.0f} kernels")
    print(f"  body read only:                      {statistics.median(raw):12,.0f} kernels/s")
    print(f"  list[pydantic], counted only:        {statistics.median(pydantic):12,.0f} kernels/s")
    print(f"  ours by list[pydantic]: {median / statistics.median(pydantic):.1f} times")
    print(f"  {stored:,} of {total:,} acknowledged kernels are stored, {size / stored * 1e6 / 1e6:.1f} MB a million")
    if stored != total:
        print("  WRONG: not what was acknowledged")
        return 1
    return 0 if median >= WANTED_ROWS_PER_S else 1


if __name__ == "__main__":
    sys.exit(main())
