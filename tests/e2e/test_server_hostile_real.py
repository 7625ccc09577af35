"""Clients that mean no good, over the wire: slow ones, endless ones, many of them, and ambiguous requests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.e2e.test_server_real import PATIENCE_S, Instance, running, wait_ready

REQUEST_S = 2.0
SEND_S = 1.0
CONNECTIONS = 30


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with running(tmp_path_factory.mktemp("hostile")) as made:
        wait_ready(made.url)
        yield made


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """One that waits for nobody."""
    limits = {"request_timeout_s": REQUEST_S, "send_timeout_s": SEND_S, "max_connections": CONNECTIONS}
    with running(tmp_path_factory.mktemp("hasty"), config={"server": limits}) as made:
        wait_ready(made.url)
        yield made


def connect(server: Instance, **options: int) -> socket.socket:
    client = socket.socket()
    for name, value in options.items():
        client.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    client.settimeout(PATIENCE_S)
    client.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    return client


def everything(client: socket.socket) -> bytes:
    """What comes until the server ends the connection; fails if it does not."""
    data = b""
    try:
        while part := client.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def refusal(answer: bytes, status: int) -> str:
    """The code of the one answer that came."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in head.lower(), answer[:500]
    code: str = json.loads(body)["error"]["code"]
    return code


def held(server: Instance) -> int:
    """How many connections the server holds."""
    port = int(server.url.rpartition(":")[2])
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = "0A"
    ours = {f"socket:[{line[9]}]" for line in lines if int(line[1].split(":")[1], 16) == port and line[3] != listening}
    found = 0
    for entry in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(entry) in ours
    return found


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET /api/v1/gra",
        b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
        b"POST /api/v1/subscribers HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{",
        b"POST /api/v1/subscribers HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n50\r\n{",
        b"\r\n",
    ],
    ids=["nothing", "line", "headers", "body", "chunk", "empty lines"],
)
def test_who_sends_byte_by_byte_is_told_and_left(hasty: Instance, begun: bytes) -> None:
    with connect(hasty) as client:
        client.sendall(begun)
        client.settimeout(REQUEST_S / 5)
        answer = b""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            try:
                part = client.recv(65536)
                if not part:
                    break
                answer += part
            except TimeoutError:
                if begun:
                    client.sendall(b"\r\n" if begun == b"\r\n" else b"x")
            except (ConnectionResetError, BrokenPipeError):
                break
        else:
            pytest.fail("the connection was held for ever")
        assert refusal(answer, 408) == "too_slow"


def test_who_was_answered_before_the_end_of_the_request_gets_no_second_answer(hasty: Instance) -> None:
    with connect(hasty) as client:
        client.sendall(b"POST /api/v1/control/clear HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
        assert everything(client).count(b"HTTP/1.1 ") == 1


def test_after_an_answer_too(hasty: Instance) -> None:
    with connect(hasty) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answer = b""
        while b"}" not in answer:
            answer += client.recv(65536)
        client.sendall(b"GET /hea")
        assert refusal(everything(client), 408) == "too_slow"


def test_a_head_without_end_is_cut(server: Instance) -> None:
    endless = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: "
    many = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X-A: b\r\n" * 20_000
    target = b"GET /healthz?" + b"a" * 100_000
    for head, more in ((endless, b"x" * 16384), (many, b""), (target, b"")):
        with connect(server) as client:
            answer = b""
            try:
                client.sendall(head)
                for _ in range(2000):
                    client.sendall(more)
                    if not more:
                        break
                else:
                    pytest.fail("30 MB of a header were taken")
            except (ConnectionResetError, BrokenPipeError):
                pass
            answer = everything(client)
            # A reset may overtake the words.
            assert not answer or refusal(answer, 431) == "head_too_large"
    with connect(server) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"x" * 70_000 + b"\r\n\r\n")
        assert refusal(everything(client), 431) == "head_too_large"
    with connect(server) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Long: " + b"x" * 30_000 + b"\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")


SMUGGLED = b"GET /api/v1/smuggled HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\n",
        b"Content-Length: 0\r\nContent-Length: 5\r\n\r\n",
        b"Content-Length: 5, 0\r\n\r\n",
        b"Content-Length: +0\r\n\r\n",
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length : 0\r\n\r\n",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0x0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcdeX\r\n0\r\n\r\n",
        b"X: a\x00b\r\n\r\n",
        b" folded: yes\r\n\r\n",
    ],
)
def test_ambiguous_requests_end_the_connection(server: Instance, head: bytes) -> None:
    with connect(server) as client:
        client.sendall(b"POST /api/v1/control/clear HTTP/1.1\r\nHost: 127.0.0.1\r\n" + head + SMUGGLED)
        answer = everything(client)
    assert answer.count(b"HTTP/1.1 ") == 1 and b"smuggled" not in answer
    assert refusal(answer, 400) == "bad_http"


def test_two_hosts_are_refused(server: Instance) -> None:
    with connect(server) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        assert everything(client).startswith(b"HTTP/1.1 421")


def test_one_connection_too_many_is_told(hasty: Instance) -> None:
    idle = [connect(hasty) for _ in range(CONNECTIONS)]
    try:
        with connect(hasty) as one_more:
            assert refusal(everything(one_more), 503) == "too_many_connections"
    finally:
        for client in idle:
            client.close()
    end_s = time.monotonic() + PATIENCE_S
    while True:  # and when they went there is room again
        try:
            assert httpx.get(f"{hasty.url}/healthz").status_code in (200, 503)
            if httpx.get(f"{hasty.url}/healthz").status_code == 200:
                break
        except httpx.RemoteProtocolError:
            pass
        assert time.monotonic() < end_s


def test_who_reads_no_answer_is_cut_off(hasty: Instance) -> None:
    request = b"GET /api/v1/graph/export?format=html HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    deaf = [connect(hasty, SO_RCVBUF=2048) for _ in range(5)]
    try:
        for client in deaf:
            client.sendall(request * 100)  # many answers, of which the first does not fit anywhere
        assert httpx.get(f"{hasty.url}/healthz", timeout=PATIENCE_S).status_code == 200
        end_s = time.monotonic() + PATIENCE_S
        assert held(hasty) >= 5
        while held(hasty):
            assert time.monotonic() < end_s, "their connections are held for ever"
            time.sleep(0.05)
    finally:
        for client in deaf:
            client.close()


def test_the_end_comes_in_time_whoever_hangs_on(tmp_path: Path) -> None:
    with running(tmp_path, config={"server": {"stop_deadline_s": 5}}) as server:
        wait_ready(server.url)
        stream = b"GET /api/v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        hanging = [connect(server, SO_RCVBUF=2048) for _ in range(9)]
        for client in hanging[:3]:
            client.sendall(stream)
        for client in hanging[3:6]:
            client.sendall(b"GET /api/v1/gra")
        began_s = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0
        assert time.monotonic() - began_s < 5 + 10  # the deadline, and what a busy machine takes
        for client in hanging:
            client.close()
