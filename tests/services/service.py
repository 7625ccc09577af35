"""A service that tests talk to: started on a loopback port, killed, started again on the same port and data, and never
left behind. Shared between the workers of one run, or owned by one test."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

START_DEADLINE_S = 90.0
_GIVEN_FOR_S = 3600.0
_GUARD = str(Path(__file__).with_name("guard.py"))


def free_port() -> int:
    """A port that nobody has now, and no other test was given within an hour. Below those that the kernel gives to
    connections, so that it is still free when a service that was killed comes back."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if _nobody_was_given(port):
            return port


def _nobody_was_given(port: int) -> bool:
    folder = Path(tempfile.gettempdir()) / f"gpuflight-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    note = folder / str(port)
    try:
        note.touch(exist_ok=False)
    except FileExistsError:
        if time.time() - note.stat().st_mtime < _GIVEN_FOR_S:
            return False
        note.touch()
    return True


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock among processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Service(ABC):
    """One service in a folder of its own. Its ports are chosen at first and kept in there, as is its pid."""

    port_names: tuple[str, ...] = ("main",)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        ports = folder / "ports.json"
        if not ports.exists():
            ports.write_text(json.dumps({name: free_port() for name in self.port_names}))
        self.ports: dict[str, int] = json.loads(ports.read_text())
        self.log_path = folder / "log"
        self._guard: subprocess.Popen[str] | None = None
        self._held: int | None = None

    @abstractmethod
    def argv(self) -> list[str]:
        """The program to run; called before each start."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether it answers."""

    @property
    def address(self) -> str:
        """``127.0.0.1:port``."""
        return f"127.0.0.1:{self.ports[self.port_names[0]]}"

    @property
    def pid(self) -> int | None:
        """Of the running service; None if it does not run."""
        try:
            pid = int((self.folder / "pid").read_text())
            about = Path(f"/proc/{pid}/cmdline").read_bytes() + os.readlink(f"/proc/{pid}/cwd").encode()
        except (OSError, ValueError):
            return None
        return pid if str(self.folder).encode() in about else None  # else the pid is somebody else's by now

    def start(self) -> None:
        """Start it, unless it runs, and wait until it answers."""
        with locked(self.folder / "start.lock"):
            if self._held is None:
                self._held = os.open(self.folder / "users.lock", os.O_RDWR | os.O_CREAT)
                fcntl.flock(self._held, fcntl.LOCK_SH)
            if self.pid is None:
                self._reap()
                argv = [sys.executable, _GUARD, str(self.folder / "users.lock"), str(self.log_path), *self.argv()]
                self._guard = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=self.folder)
                assert self._guard.stdout is not None
                (self.folder / "pid").write_text(self._guard.stdout.readline())
                self._guard.stdout.close()
            deadline_s = time.monotonic() + START_DEADLINE_S
            while not self.ready():
                if self.pid is None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"{type(self).__name__} does not start:\n{self.log()[-3000:]}")
                time.sleep(0.05)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._end(signal.SIGKILL, 10.0)

    def stop(self) -> None:
        """Ask it to end, kill it if it does not, and give everything back."""
        self._end(signal.SIGTERM, 15.0)
        if self.pid is not None:
            self.kill()
        self.release()

    def release(self) -> None:
        """Use it no longer: it ends as soon as nobody does."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def log(self) -> str:
        """What it has written."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def _end(self, by: signal.Signals, within_s: float) -> None:
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, by)
        deadline_s = time.monotonic() + within_s
        while self.pid is not None and time.monotonic() < deadline_s:
            time.sleep(0.02)
        if self.pid is None:
            self._reap()

    def _reap(self) -> None:
        if self._guard is not None:
            self._guard.wait(10.0)
            self._guard = None
