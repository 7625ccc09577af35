"""``kill -9`` of the agent and of the receiver, again and again, while a session is written."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.conftest import ROOT
from tests.e2e.test_server_real import Instance, running, wait_ready
from tests.services.service import free_port
from tests.unit.agent_rig import copy, lines_of

from gpuflight.events.format.writer import SessionWriter

PATIENCE_S = 120.0
QUICK = ("--poll-interval=0.05", "--settle=0.2", "--orphan-wait=0.3")
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("GPUFL_", "GPUFLIGHT_"))},
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
}


def start_agent(logs: Path, state: Path, *more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [
            sys.executable, "-m", "gpuflight.cli", "agent", f"--folder={logs}", f"--state-folder={state}", *QUICK,
            "--exit-when-drained", *more,
        ],
        env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def finished(agent: subprocess.Popen[bytes]) -> tuple[int, str]:
    said = agent.communicate(timeout=PATIENCE_S)[1].decode()
    assert "Traceback" not in said, said
    return agent.returncode, said


def killed(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def wait_for(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.005)


class WindowReceiver:
    """``tests.fakes.window_receiver`` at a port that stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.port = free_port()
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fakes.window_receiver", str(self.folder), str(self.port)],
            env=ENVIRONMENT, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == b"ready"

    def count(self, what: str = "") -> int:
        return sum(name.startswith(what) for name in os.listdir(self.folder) if not name.startswith("."))

    def lines(self) -> list[bytes]:
        files = [path for path in self.folder.iterdir() if path.name.startswith(("window-", "lines-"))]
        return [line for path in files for line in gzip.decompress(path.read_bytes()).split(b"\n") if line]


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[WindowReceiver]:
    made = WindowReceiver(tmp_path / "received")
    yield made
    killed(made.process)


@contextmanager
def written(logs: Path, rows: int) -> Iterator[threading.Thread]:
    """A session that is written beside, in many small windows."""
    logs.mkdir(exist_ok=True)

    def write() -> None:
        with SessionWriter(str(logs), "5e551011-0000-4000-8000-00000000aaaa", rotate_bytes=4000) as writer:
            writer.event("job_start", {"ts_ns": 1_790_000_000_000_000_000, "app": "train", "pid": 1, "hostname": "n1"})
            kernel = writer.text("kernel", "matmul")
            for number in range(rows):
                columns = {
                    "dt_ns": [1_790_000_000_000_000_000 + number],
                    "kernel_id": [kernel], "duration_ns": [number + 1], "stream_id": [7], "corr_id": [number],
                }  # fmt: skip
                writer.rows("kernel_event_batch", columns)
                writer.flush(sync=False)
            writer.event("shutdown", {"ts_ns": 1_790_000_001_000_000_000, "app": "train", "pid": 1})

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(PATIENCE_S)


def test_agent_and_receiver_killed_in_turn(tmp_path: Path, receiver: WindowReceiver) -> None:
    logs, state = tmp_path / "logs", tmp_path / "state"
    to = f"--url=http://127.0.0.1:{receiver.port}"
    with written(logs, 400):
        for _ in range(3):
            before = receiver.count()
            agent = start_agent(logs, state, to)
            wait_for(lambda before=before: receiver.count() > before)  # type: ignore[misc]
            killed(agent)
        agent = start_agent(logs, state, to)
        for _ in range(3):
            before = receiver.count()
            killed(receiver.process)
            receiver.start()

            def moved(before: int = before) -> bool:
                return receiver.count() > before or agent.poll() is not None

            wait_for(moved)
    code, said = finished(agent)
    assert code == 0, said
    (session,) = logs.iterdir()
    assert (session / ".uploaded").exists()
    windows = sorted(session.glob("*.log.gz"))
    assert receiver.count("window-") == len(windows) == len(list(session.glob(".gpufl-window-ack.*")))
    assert len(windows) > 20
    assert not list(session.glob("*.tmp")), "a mark that a kill has cut is written anew"
    assert sorted(receiver.lines()) == lines_of(logs)
    assert receiver.count("complete-") == 1


def test_lines_of_a_killed_session_while_the_agent_is_killed(tmp_path: Path, receiver: WindowReceiver) -> None:
    """Out of ``.tmp``, some at a time: where it was is remembered; little comes twice, nothing is missing."""
    logs, state = copy("v1.3.0rc1-killed", tmp_path / "logs"), tmp_path / "state"
    more = (f"--url=http://127.0.0.1:{receiver.port}", "--stream-max-lines=2", "--senders=1")
    expected = lines_of(logs)
    for _ in range(3):
        before = receiver.count()
        agent = start_agent(logs, state, *more)
        wait_for(lambda before=before: receiver.count() > before + 2)  # type: ignore[misc]
        killed(agent)
    code, said = finished(start_agent(logs, state, *more))
    assert code == 0, said
    arrived = receiver.lines()
    assert sorted(set(arrived)) == sorted(set(expected))
    assert len(expected) <= len(arrived) <= len(expected) + 3 * 2


@pytest.mark.parametrize("mode", ["--live", "--upload-mode=stream"])
def test_into_a_real_server_that_is_killed(tmp_path: Path, mode: str) -> None:
    """The server's store holds each row once, though both were killed in the middle."""
    pytest.importorskip("duckdb")
    rows = 300
    port = free_port()
    config: dict[str, Any] = {"server": {"port": port}, "collectors": {}, "interval_s": 5}
    logs, state = tmp_path / "logs", tmp_path / "state"
    (tmp_path / "server").mkdir()
    url = f"http://127.0.0.1:{port}"

    def kernels(server: Instance) -> int:
        assert server.process.poll() is None
        answer = httpx.get(f"{url}/api/v1/sessions", timeout=30)
        answer.raise_for_status()
        found = json.dumps(answer.json())
        return found.count("5e551011")

    with written(logs, rows), running(tmp_path / "server", config=config) as server:
        wait_ready(server.url)
        agent = start_agent(logs, state, f"--url={url}", mode)
        wait_for(lambda: kernels(server))
        killed(agent)
        agent = start_agent(logs, state, f"--url={url}", mode)
    # and the server is killed
    with running(tmp_path / "server", config=config) as server:
        wait_ready(server.url)
        code, said = finished(agent)
        assert code == 0, said
        session = f"{url}/api/v1/sessions/5e551011-0000-4000-8000-00000000aaaa"
        assert httpx.get(session, timeout=30).json()["session"]["session_id"].startswith("5e551011")
        found = httpx.get(f"{session}/kernels?limit={rows + 100}", timeout=30).json()["kernels"]
        assert [kernel["corr_id"] for kernel in found] == list(range(rows))
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0
