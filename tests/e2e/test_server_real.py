"""The installed server on this very machine, on free loopback ports: begin, serve, refuse, end."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.services.watching import watching

SERVER = str(Path(sys.executable).with_name("gpuflight-server"))
PATIENCE_S = 60.0
"""Only a broken program takes so long."""


LIGHT = watching("host", "host_counters", "mounts", "nics", "process_tree")
"""What a server watches unless its configuration says more: rounds that come quickly, also beside other tests."""


class Instance:
    """A server process; ``url`` once it answers."""

    def __init__(self, folder: Path, *arguments: str, config: dict[str, Any] | None = None) -> None:
        self.folder = folder
        settings = {"interval_s": 0.2, "collectors": LIGHT, **(config or {})}
        ours = {"store_file": str(folder / "tokens.json")}
        server = {"port": 0, "auth": ours, "state_folder": str(folder / "state"), **settings.get("server", {})}
        (folder / "server.json").write_text(json.dumps({**settings, "server": server}))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GPUFLIGHT_")}
        environment["XDG_RUNTIME_DIR"] = str(folder)
        self.process = subprocess.Popen(
            [SERVER, "--config", str(folder / "server.json"), *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self.said = b""

    def line(self, pattern: str) -> re.Match[str]:
        """Wait until it says something on stderr."""
        assert self.process.stderr is not None
        end_s = time.monotonic() + PATIENCE_S
        while True:
            found = re.search(pattern, self.said.decode(errors="replace"))
            if found:
                return found
            ready, _, _ = select.select([self.process.stderr], [], [], max(0.0, end_s - time.monotonic()))
            data = os.read(self.process.stderr.fileno(), 65536) if ready else b""
            assert data, f"it never said {pattern}: {self.said!r}"
            self.said += data

    @property
    def url(self) -> str:
        return self.line(r"serving (http://\S+)")[1]

    def finish(self) -> int:
        """Exit code, once it ended by itself."""
        assert self.process.stderr is not None
        code = self.process.wait(PATIENCE_S)
        self.said += self.process.stderr.read()
        assert b"Traceback" not in self.said, self.said
        return code


@contextmanager
def running(folder: Path, *arguments: str, **options: Any) -> Iterator[Instance]:
    instance = Instance(folder, *arguments, **options)
    try:
        yield instance
    finally:
        instance.process.kill()
        instance.process.wait()
        assert instance.process.stderr is not None
        instance.process.stderr.close()


def wait_ready(url: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while httpx.get(f"{url}/readyz").status_code != 200:
        assert time.monotonic() < end_s


def test_it_serves_this_machine_and_ends_within_the_deadline_with_an_open_stream(tmp_path: Path) -> None:
    with running(tmp_path, config={"server": {"stop_deadline_s": 5}}) as server:
        url = server.url
        wait_ready(url)
        graph = httpx.get(f"{url}/api/v1/graph?kind=Process&fields=").json()
        assert any(node.get("pid") == server.process.pid for node in graph["nodes"])
        assert httpx.get(f"{url}/api/v1/collectors").json()["collectors"]
        assert httpx.get(f"{url}/api/v1/plugins").json()["server_backends"]
        assert httpx.get(f"{url}/api/v1/control").json()["references_count"] == 1
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), PATIENCE_S) as stream:
            stream.sendall(b"GET /api/v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert stream.recv(100).startswith(b"HTTP/1.1 200")
            began_s = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.finish() == 0
            assert time.monotonic() - began_s < 5 + 10  # the deadline, and what a busy machine takes
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)


def test_a_second_instance_is_refused_names_the_first_and_touches_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        url = first.url
        kept = tmp_path / "kept.json"
        kept.write_text("mine")
        before = sorted(os.listdir(tmp_path))
        subscriber = json.dumps([{"type": "file_json", "path": str(kept)}])
        done = subprocess.run(
            [SERVER, "--config", str(tmp_path / "server.json"), "--set", f"subscribers={subscriber}"],
            cwd=tmp_path,
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1 and f"pid {first.process.pid}" in done.stderr
        assert kept.read_text() == "mine" and sorted(os.listdir(tmp_path)) == before
        wait_ready(url)  # the first one goes on


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with running(tmp_path, config={"server": {"port": port}}) as server:
            assert server.finish() == 1
            assert f"127.0.0.1:{port}: Address already in use" in server.said.decode()
            assert len(server.said.splitlines()) == 1


def test_offline_it_delivers_rounds_and_serves_nobody(tmp_path: Path) -> None:
    out = tmp_path / "graph.json"
    config = {"subscribers": [{"type": "file_json", "path": str(out)}]}
    with running(tmp_path, "--backend", "offline", config=config) as server:
        server.line("serving nobody")
        end_s = time.monotonic() + PATIENCE_S
        while not out.exists():
            assert time.monotonic() < end_s
            time.sleep(0.05)
        server.process.send_signal(signal.SIGINT)
        assert server.finish() == 0
    assert json.loads(out.read_text())["round"] >= 1


def test_collectors_off_in_the_settings_can_be_switched_on(tmp_path: Path) -> None:
    with running(tmp_path, config={"collectors": {"host": {"enabled": False}}}) as server:
        url = server.url
        assert httpx.get(f"{url}/api/v1/collectors/host").json()["enabled"] is False
        assert httpx.post(f"{url}/api/v1/control/trigger").json()["round"] >= 1
        before = httpx.get(f"{url}/api/v1/graph?kind=Host").json().get("nodes", [])
        assert all("memory_total_bytes" not in node.get("metrics", {}) for node in before)
        assert httpx.post(f"{url}/api/v1/collectors/host/enable").json()["changed"] is True
        httpx.post(f"{url}/api/v1/control/trigger")
        assert httpx.get(f"{url}/api/v1/graph?kind=Host").json()["nodes"][0]["metrics"]["memory_total_bytes"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_with_a_certificate_it_speaks_tls_only(tmp_path: Path) -> None:
    import ssl

    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    name = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*make, *name, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    tls = {"certificate_file": str(certificate), "key_file": str(key)}
    with running(tmp_path, config={"server": {"tls": tls}}) as server:
        url = server.line(r"serving (https://\S+)")[1]
        context = ssl.create_default_context(cafile=str(certificate))
        assert httpx.get(f"{url}/healthz", verify=context).json() == {"status": "ok"}
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url.replace('https', 'http')}/healthz")
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0
