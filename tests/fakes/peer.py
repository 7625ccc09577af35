"""A tiny real HTTP server that speaks the part of the API a parent pulls: rounds with ETag, 304, gzip and zstd.

    with FakePeer() as peer:
        peer.set_round(graph, number=3, env={...})
        Remote(RemoteSettings(peers=[{"url": peer.url, "name": "node-7"}]))

``peer.reply`` replaces the answers (a status, or any function of the handler); ``peer.asked`` is what came in.
"""

from __future__ import annotations

import gzip
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import zstandard

from gpuflight.graph import Graph
from gpuflight.graph.codec import encode_graph, time_text

LATEST = "/api/v1/graph"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        peer = self.server.peer
        peer.asked.append((self.path, dict(self.headers)))
        if peer.reply is not None:
            peer.reply(self)
            return
        if peer.token and self.headers.get("Authorization") != f"Bearer {peer.token}":
            self.answer(401, b"{}")
            return
        path = self.path.partition("?")[0]
        body = peer.bodies.get(path)
        if body is None:
            self.answer(404, b"{}")
            return
        etag = peer.etags.get(path, "")
        if etag and self.headers.get("If-None-Match") == etag:
            self.answer(304, b"", ETag=etag)
            return
        headers = {"ETag": etag} if etag else {}
        if peer.encoding == "gzip":
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
        elif peer.encoding == "zstd":
            body, headers["Content-Encoding"] = zstandard.compress(body), "zstd"
        self.answer(200, body, **headers)

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        """A whole answer."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if status != 304:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() + self.server.peer.clock_offset_s)

    def log_message(self, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, peer: FakePeer, port: int) -> None:
        self.peer = peer
        self.open: set[Any] = set()
        self.context: ssl.SSLContext | None = None
        super().__init__(("127.0.0.1", port), Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self.context is not None:
            request = self.context.wrap_socket(request, server_side=True)
        super().finish_request(request, client_address)
        if self.context is not None:
            request.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that gave up


class FakePeer:
    """The instance behind ``url``. It is stopped and started again at the same port by ``stop`` and ``start``."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.etags: dict[str, str] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.token = ""
        self.encoding = ""
        self.clock_offset_s = 0.0
        self.reply: Callable[[Handler], None] | None = None
        self._port = 0
        self._server: _Server | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def set_round(self, graph: Graph, number: int = 1, env: dict[str, str] | None = None, path: str = LATEST) -> None:
        """Serve a graph as the latest round; the ETag is its number."""
        time_ns = time.time_ns() + int(self.clock_offset_s * 1e9)
        environment = env if env is not None else {"hostname": "node-7", "machine_id": "m7", "boot_id": "b7"}
        self.bodies[path] = encode_graph(graph, round=number, time=time_text(time_ns), env=environment)
        self.etags[path] = f'"{number}"'

    def start(self) -> None:
        self._server = _Server(self, self._port)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def tls(self, certificate: str, key: str) -> None:
        """Speak TLS on connections that come from now on."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        assert self._server is not None
        self._server.context = context

    def stop(self) -> None:
        """As if it were killed: connections end too."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            for request in list(server.open):
                try:
                    request.shutdown(2)
                except OSError:
                    pass
            server.server_close()

    def __enter__(self) -> FakePeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
