"""A server that speaks S3 (moto) in a process of its own on loopback; it can be killed and started again.

    python -m tests.services.s3 PORT [BUCKET…]

``S3Server.fault`` makes a front before it answer otherwise, once per entry: 503, a redirect, a damaged upload.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.conftest import ROOT

PATIENCE_S = 60.0
ACCESS, SECRET = "AKIAGPUFLIGHTTEST000", "secret-of-the-tests/0123456789abcdef"


class S3Server:
    """Running from construction on. What it keeps is gone when it is killed, as its memory is all it has; the buckets
    are there again, empty, before it listens."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self.process: subprocess.Popen[bytes] | None = None
        self._buckets: list[str] = []
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            # It ends with its standard input, and so with this process however that ends.
            [sys.executable, "-m", "tests.services.s3", str(self.port), *self._buckets],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == b"ready"

    def kill(self) -> None:
        """``kill -9``."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                assert stream is not None
                stream.close()
            self.process = None

    def ask(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            signed = {"Authorization": f"AWS4-HMAC-SHA256 Credential={ACCESS}/20260101/us-east-1/s3/aws4_request"}
            connection.request(method, path, body, {**signed, **(headers or {})})
            answer = connection.getresponse()
            data = answer.read()
            assert answer.status < 300, (answer.status, data)
            return data
        finally:
            connection.close()

    def make_bucket(self, name: str) -> None:
        self.ask("PUT", f"/{name}")
        self._buckets.append(name)

    def keys(self, bucket: str) -> list[str]:
        """In the order of S3, which sorts them."""
        import xml.etree.ElementTree as ElementTree

        listing = ElementTree.fromstring(self.ask("GET", f"/{bucket}?list-type=2&max-keys=1000"))
        return [
            element.text or "" for element in listing.iter() if element.tag.endswith("}Key") or element.tag == "Key"
        ]

    def get(self, bucket: str, key: str) -> bytes:
        return self.ask("GET", f"/{bucket}/{key}")


def settings(server_url: str, bucket: str, **more: Any) -> dict[str, Any]:
    """Settings of a subscriber that stores there."""
    keys = {"access_key": ACCESS, "secret_key": SECRET}
    return {"type": "s3", "bucket": bucket, "endpoint_url": server_url, **keys, "namespace": "node-1", **more}


@contextmanager
def s3_server() -> Iterator[S3Server]:
    server = S3Server()
    try:
        yield server
    finally:
        server.kill()


@dataclass
class Fault:
    """An answer in place of the server's. ``damage`` changes the body on its way instead."""

    status: int = 503
    code: str = "SlowDown"
    message: str = "Please reduce your request rate."
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    damage: bool = False
    hang: bool = False

    @property
    def data(self) -> bytes:
        if self.body is not None:
            return self.body
        text = f"<Code>{self.code}</Code><Message>{self.message}</Message><RequestId>1</RequestId>"
        return f'<?xml version="1.0" encoding="UTF-8"?><Error>{text}</Error>'.encode()


@dataclass
class Passed:
    """A request that came by."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Front:
    """Before a server: lets requests through, but for those that ``fault`` gives an answer to. Checks Content-MD5 as S3
    does, which moto does not."""

    def __init__(
        self, upstream_port: int, fault: Callable[[Passed], Fault | None], tls: ssl.SSLContext | None = None
    ) -> None:
        self.seen: list[Passed] = []
        self.over = threading.Event()
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                passed = Passed(self.command, self.path, headers, body)
                front.seen.append(passed)
                fault = fault_of(passed)
                if fault is not None and fault.hang:
                    front.over.wait()
                    return
                if fault is not None and fault.damage:
                    body, fault = body[:-1] + b"?", None
                digest = base64.b64encode(hashlib.md5(body).digest()).decode()
                if fault is None and headers.get("content-md5", digest) != digest:
                    fault = Fault(400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
                if fault is not None:
                    self.reply(fault.status, fault.headers, fault.data)
                    return
                upstream = http.client.HTTPConnection("127.0.0.1", upstream_port, timeout=PATIENCE_S)
                try:
                    upstream.request(self.command, self.path, body, headers)
                    found = upstream.getresponse()
                    data = found.read()
                    kept = {k: v for k, v in found.getheaders() if k.lower() not in ("content-length", "connection")}
                    self.reply(found.status, kept, data)
                except OSError:
                    self.reply(502, {}, b"<html>bad gateway</html>")
                finally:
                    upstream.close()

            do_PUT = do_GET = do_DELETE = do_HEAD = do_POST = answer

            def reply(self, status: int, headers: dict[str, str], data: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: object) -> None:
                """A client that went away."""

        fault_of = fault
        self._server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def wait_for(condition: Callable[[], Any]) -> None:
    """Until it holds; only a broken program takes so long."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


if __name__ == "__main__":
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends
    from moto.server import ThreadedMotoServer

    for bucket in sys.argv[2:]:
        s3_backends[DEFAULT_ACCOUNT_ID]["aws"].create_bucket(bucket, "us-east-1")
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=int(sys.argv[1]), verbose=False)
    moto.start()
    print("ready", flush=True)
    sys.stdin.read()
