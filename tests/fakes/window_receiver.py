"""A receiver of GPU Flight windows that can be killed: what it has acknowledged lies in a folder, synced.

python -m tests.fakes.window_receiver FOLDER PORT
"""

from __future__ import annotations

import gzip
import os
import sys
import threading
import uuid
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def keep(folder: str, name: str, data: bytes) -> None:
    temporary = os.path.join(folder, f".{uuid.uuid4().hex}")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, os.path.join(folder, name))


def serve(folder: str, port: int) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            window = self.headers.get("X-GpuFlight-Window-Id")
            answer = b"{}"
            if self.path.endswith("/session-complete"):
                keep(folder, f"complete-{self.headers['X-GpuFlight-Session-Id']}", b"")
            elif window is not None:
                assert zlib.crc32(body) == int(self.headers["X-GpuFlight-Window-CRC32"])
                keep(folder, f"window-{window}", body)
                answer = b'{"window_acknowledged":true}'
            else:
                gzip.decompress(body)
                keep(folder, f"lines-{uuid.uuid4().hex}", body)
            self.send_response(202)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

        def handle_error(self, *_: object) -> None:
            """A client that was killed."""

    server = Server(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()  # it ends with whoever started it


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
