"""A receiver of HTTP POST on loopback that does what a test tells it to: answer with a status, hang, drip, redirect."""

from __future__ import annotations

import atexit
import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from tests.conftest import ROOT


@dataclass
class Received:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """What to say; ``hang`` waits for the end of the test first, ``drip`` sends a byte every 50 ms for ever."""

    status: int = 204
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    hang: bool = False
    drip: bool = False


class Receiver:
    """``answer`` is asked for each request; requests are kept in ``received``."""

    def __init__(self, answer: Callable[[Received], Answer] = lambda _: Answer(), port: int = 0) -> None:
        self.answer = answer
        self.received: list[Received] = []
        self.over = threading.Event()
        self._got = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = Received(self.path, {key.lower(): value for key, value in self.headers.items()}, body)
                with receiver._got:
                    receiver.received.append(request)
                    receiver._got.notify_all()
                answer = receiver.answer(request)
                if answer.hang:
                    receiver.over.wait()
                    return
                if answer.drip:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
                    while not receiver.over.wait(0.05):
                        self.wfile.write(b"x")
                    return
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A client that went away."""

        self._server = Server(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        """A URL of it."""
        return f"http://127.0.0.1:{self.port}/rounds?of=us"

    def wait_for(self, count: int, timeout_s: float = 60.0) -> list[Received]:
        """The requests, once there are so many."""
        with self._got:
            assert self._got.wait_for(lambda: len(self.received) >= count, timeout_s), (
                f"{len(self.received)} of {count}"
            )
            return list(self.received)

    def __enter__(self) -> Receiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@functools.cache
def url_elsewhere() -> str:
    """A URL of a receiver in a process of its own, until this one ends: its threads and descriptors are not ours."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.http_receiver"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    atexit.register(process.kill)
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


if __name__ == "__main__":
    print(Receiver().url, flush=True)
    sys.stdin.read()
