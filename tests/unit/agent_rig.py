"""An agent in this process, between a copy of a session and a receiver that does what a test says."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import DATA
from tests.fakes.http_receiver import Answer, Received, Receiver

from gpuflight.agent import gate, line_sinks, session
from gpuflight.agent.agent import Agent, make_agent
from gpuflight.agent.options import make_settings

CLEAN = DATA / "gpufl" / "gen" / "v1.3.0rc1-clean"
CLEAN_ID = "11111111-1111-4111-8111-111111111111"
ACKNOWLEDGED = b'{"accepted":1,"rejected":0,"window_acknowledged":true}'
QUICK = {"poll-interval": "0.05", "settle": "0.1", "orphan-wait": "0.2", "give-up-after": "60"}
PATIENCE_S = 60.0


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of some milliseconds before it is tried again."""
    for module in (gate, line_sinks, session):
        monkeypatch.setattr(module, "FIRST_S", 0.02)
        monkeypatch.setattr(module, "LONGEST_S", 0.1)


def copy(name: str | Path, target: Path) -> Path:
    """A folder of recorded logs, as of long ago, so that nobody seems to write it; its path."""
    source = name if isinstance(name, Path) else DATA / "gpufl" / "gen" / name
    shutil.copytree(source, target, dirs_exist_ok=True)
    for folder, _, files in os.walk(target):
        for path in (folder, *(os.path.join(folder, file) for file in files)):
            os.chmod(path, 0o755 if os.path.isdir(path) else 0o644)
            os.utime(path, (1_700_000_000, 1_700_000_000))
    return target


class Store:
    """What a receiver has taken: windows by their identity, and all lines. It checks what it can."""

    def __init__(self, *, acknowledges: bool = True) -> None:
        self.acknowledges = acknowledges
        self.windows: dict[str, int] = {}
        self.lines: list[bytes] = []
        self.completed: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, request: Received) -> Answer:
        with self._lock:
            if request.path.endswith("/session-complete"):
                self.completed.append(request.headers["x-gpuflight-session-id"])
                return Answer(202)
            if request.path.endswith("/stream"):
                window = request.headers.get("x-gpuflight-window-id")
                if window is not None:
                    assert int(request.headers["x-gpuflight-window-crc32"]) == zlib.crc32(request.body)
                    self.windows[window] = self.windows.get(window, 0) + 1
                    if self.windows[window] > 1:
                        return Answer(200, body=ACKNOWLEDGED)
                self.lines += [line for line in gzip.decompress(request.body).split(b"\n") if line.strip()]
                return Answer(202, body=ACKNOWLEDGED if self.acknowledges and window is not None else b"{}")
            event = json.loads(request.body)
            assert request.path.endswith(f"/events/{event['type']}")
            self.lines.append(event["data"].encode())
            return Answer(202)


def lines_of(folder: Path) -> list[bytes]:
    """Every whole line that lies in or below a folder, of all channels, sorted."""
    found: list[bytes] = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or ".log" not in path.name or path.name.endswith(".part"):
            continue
        try:
            data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        except (OSError, EOFError, zlib.error):
            continue
        found += [line for line in data.split(b"\n") if line.strip()]
    return sorted(found)


def agent_for(folder: Path, receiver: Receiver | str, state: Path, **flags: str) -> Agent:
    """An agent that has begun. ``flags`` with underscores."""
    url = receiver if isinstance(receiver, str) else f"http://127.0.0.1:{receiver.port}"
    given = {"folder": str(folder), "url": url, "token": "tok", "state-folder": str(state), **QUICK}
    given |= {name.replace("_", "-"): value for name, value in flags.items()}
    return make_agent(make_settings(given, {}))


def ship(folder: Path, receiver: Receiver | str, state: Path, **flags: str) -> int:
    """Run an agent until all is delivered; its exit code."""
    agent = agent_for(folder, receiver, state, **{"exit-when-drained": "true", **flags})
    try:
        return run(agent)
    finally:
        agent.close()


def run(agent: Agent) -> int:
    """The exit code; a run that does not end fails."""
    stop = threading.Event()
    guard = threading.Timer(PATIENCE_S, stop.set)
    guard.start()
    try:
        return agent.run(stop)
    finally:
        assert not stop.is_set(), "it did not end"
        guard.cancel()


def answering(*answers: Answer | Callable[[Received], Answer], then: Callable[[Received], Answer]) -> Any:
    """Answers one after the other to what is not session-complete, then as ``then``."""
    left = list(answers)
    lock = threading.Lock()

    def answer(request: Received) -> Answer:
        with lock:
            if left and not request.path.endswith("/session-complete"):
                first = left.pop(0)
                return first(request) if callable(first) else first
        return then(request)

    return answer
