"""The installed server on a unix socket: who may is decided by the kernel's word."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.e2e.test_server_real import PATIENCE_S, running, wait_ready
from websockets.sync.client import unix_connect

NOBODY = 65534
STRANGER = """
import os, socket, sys
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
s = socket.socket(socket.AF_UNIX)
try:
    s.connect(sys.argv[1])
except PermissionError:
    print("cannot connect")
    raise SystemExit
head = sys.argv[3] + " " + sys.argv[4] + " HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n"
s.sendall(head.encode())
data = b""
while part := s.recv(65536):
    data += part
print(data.split(b" ")[1].decode())
"""


def client(path: str) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://any.name.at.all")


def as_user(uid: int, path: str, method: str, target: str) -> str:
    """Status of a request by another user."""
    return subprocess.run(
        [sys.executable, "-c", STRANGER, path, str(uid), method, target], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_alone_without_a_port(tmp_path: Path) -> None:
    path = str(tmp_path / "gpuflight.sock")
    with running(tmp_path, "--socket", path, config={"server": {"host": None, "stop_deadline_s": 5}}) as server:
        assert server.line(r"serving (\S+)")[1] == f"unix:{path}"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with client(path) as here:
            # The host that a client names says nothing here, and no token is needed.
            assert here.get("/api/v1/control").json()["running"] is True
            assert here.post("/api/v1/tokens", json={"name": "a", "role": "viewer"}).status_code < 300
            assert here.get("/api/v1/tokens").status_code == 200, "with tokens too"
            # A WebSocket is somebody too.
            with unix_connect(path, "ws://any.name/api/v1/stream/ws") as socket:
                assert json.loads(socket.recv(PATIENCE_S))["event"] == "graph"
            with here.stream("GET", "/api/v1/stream") as stream:
                assert next(stream.iter_lines()).startswith("retry:")
                server.process.send_signal(signal.SIGTERM)
                assert server.finish() == 0
        assert not os.path.exists(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become others")
def test_other_users_have_what_they_are_given(tmp_path: Path) -> None:
    path = str(tmp_path / "gpuflight.sock")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o711)
    roles = {"socket_users": {"4001": "viewer"}, "socket_groups": {"4002": "operator"}}
    with running(tmp_path, "--socket", path, config={"server": roles}) as server:
        wait_ready(server.url)
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o666
        for uid, reads, controls in ((4001, "200", "403"), (4002, "200", "200"), (NOBODY, "401", "401")):
            assert as_user(uid, path, "GET", "/api/v1/graph") == reads, uid
            assert as_user(uid, path, "POST", "/api/v1/control/clear") == controls, uid
        assert as_user(0, path, "GET", "/api/v1/tokens") == "200"
        assert as_user(4002, path, "GET", "/api/v1/tokens") == "403"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become others")
def test_without_roles_others_do_not_even_connect(tmp_path: Path) -> None:
    path = str(tmp_path / "gpuflight.sock")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o711)
    with running(tmp_path, "--socket", path) as server:
        assert server.line(r"serving (\S+ and \S+)")[1].endswith(f"unix:{path}")
        assert as_user(NOBODY, path, "GET", "/healthz") == "cannot connect"


def test_what_is_in_the_way_is_one_line_unless_it_is_stale(tmp_path: Path) -> None:
    path = tmp_path / "gpuflight.sock"
    path.write_text("mine")
    with running(tmp_path, "--socket", str(path)) as server:
        assert server.finish() != 0
        assert len(server.said.splitlines()) == 1 and str(path).encode() in server.said
    assert path.read_text() == "mine"
    path.unlink()
    with running(tmp_path, "--socket", str(path)) as server:
        server.line("serving")
        server.process.kill()
        server.process.wait()
    assert path.exists()
    with running(tmp_path, "--socket", str(path)) as server:
        server.line("serving")
        with client(str(path)) as here:
            assert here.get("/healthz").status_code == 200
