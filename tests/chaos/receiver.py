"""A receiver of HTTP POST, to be killed: what it answered 204 to is in its file, in the order of the answers.

    python -m tests.chaos.receiver PORT FILE SEED

A line is the ``Idempotency-Key`` of a round and its ``Gpuflight-Base-Round`` (empty for a whole round). The line is
written before the answer, so that whoever got the answer can rely on it; ``kill -9`` takes nothing from the file.
Some requests are refused for a while (429, 502, 503), as ``SEED`` has it.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MOODS = [204] * 9 + [429, 502, 503]


class Server(ThreadingHTTPServer):
    """One thread for each connection; the file and the dice are shared."""

    daemon_threads = True

    def __init__(self, port: int, path: str, seed: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.dice = random.Random(seed)
        self.turn = threading.Lock()
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        line = f"{self.headers['Idempotency-Key']} {self.headers.get('Gpuflight-Base-Round', '')}\n"
        with self.server.turn:
            status = self.server.dice.choice(MOODS)
            if status == 204:
                os.write(self.server.file, line.encode())
        self.send_response(status)
        if status == 429:
            self.send_header("Retry-After", "0")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Quiet."""


if __name__ == "__main__":
    receiver = Server(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    print(receiver.server_address[1], flush=True)
    receiver.serve_forever(poll_interval=0.05)
