"""Processes that are killed and started again, on the same port and with the same files."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tests.conftest import ROOT
from tests.services.service import free_port

SERVER = str(Path(sys.executable).with_name("gpuflight-server"))
PATIENCE_S = 90.0
"""Only a broken program takes so long."""

Answer = TypeVar("Answer")


def until(reached: Callable[[], Answer], tell: Callable[[], Any] = lambda: None) -> Answer:
    """Wait for something; fails if it never comes, with what ``tell`` then says."""
    end_s = time.monotonic() + PATIENCE_S
    while not (found := reached()):
        assert time.monotonic() < end_s, f"it never came: {tell()}"
        time.sleep(0.02)
    return found


class Victim:
    """A process with everything it says in a file. ``start`` and ``kill`` take turns; ``lives`` counts the starts."""

    name = "victim"

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.said = folder / "said.txt"
        self.lives = 0
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """What to run."""
        raise NotImplementedError

    def start(self) -> None:
        """Run it, and wait until it answers."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GPUFLIGHT_")}
        environment["XDG_RUNTIME_DIR"] = str(self.folder)
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                self.command(), cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said
            )
        self.lives += 1
        until(self.answers)

    def answers(self) -> bool:
        """Whether it can be used."""
        assert self.process is not None and self.process.poll() is None, self.said.read_text()
        return True

    def kill(self) -> None:
        """``kill -9``."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


class ReceiverVictim(Victim):
    """``tests.chaos.receiver``."""

    name = "receiver"

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder)
        self.port, self.seed, self.file = free_port(), seed, folder / "received.txt"

    def command(self) -> list[str]:
        arguments = [str(self.port), str(self.file), str(self.seed + self.lives)]
        return [sys.executable, "-m", "tests.chaos.receiver", *arguments]

    def answers(self) -> bool:
        return super().answers() and self.said.read_bytes().endswith(b"\n")

    def received(self) -> list[tuple[str, str]]:
        """Key and base of each round, in the order of arrival."""
        if not self.file.exists():
            return []
        return [(line.split(" ")[0], line.split(" ")[1]) for line in self.file.read_text().splitlines()]


class ServerVictim(Victim):
    """``gpuflight-server`` with a configuration and arguments; ``machine_id`` makes it one of another machine (needs
    root)."""

    name = "server"

    def __init__(self, folder: Path, config: dict[str, Any], *arguments: str, machine_id: str = "") -> None:
        super().__init__(folder)
        self.port = free_port()
        server = {"port": self.port, "auth": {"store_file": str(folder / "tokens.json")}}
        server["state_folder"] = str(folder / "state")
        self.config = folder / "server.json"
        self.config.write_text(json.dumps({**config, "server": server}))
        self.arguments = arguments
        self.machine_id = machine_id

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        command = [SERVER, "--config", str(self.config), *self.arguments]
        if not self.machine_id:
            return command
        (self.folder / "machine-id").write_text(self.machine_id + "\n")
        script = f'mount --bind "{self.folder}/machine-id" /etc/machine-id && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, "sh", *command]

    def answers(self) -> bool:
        return super().answers() and re.search(r"serving http", self.said.read_text()) is not None


class SpoolBook:
    """What a spool has ever accepted, read from copies of its file while nobody has it open."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self.path, self.scratch = path, scratch
        self.waiting: list[str] = []
        """Keys that lay in it when it was read last."""
        self.known: set[str] = set()
        """Keys that lay in it whenever it was read."""
        self.accepted_count = 0
        """Rounds that it ever accepted: SQLite never gives a number twice (AUTOINCREMENT)."""

    def read(self) -> None:
        """Read it as the crash left it: the file and its log, none of which is touched."""
        self.scratch.mkdir(exist_ok=True)
        for suffix in ("", "-wal"):
            copy, source = self.scratch / f"copy{suffix}", Path(f"{self.path}{suffix}")
            copy.unlink(missing_ok=True)
            if source.exists():
                copy.write_bytes(source.read_bytes())
        (self.scratch / "copy-shm").unlink(missing_ok=True)
        connection = sqlite3.connect(self.scratch / "copy")
        try:
            (sound,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            assert sound == "ok", f"{self.path} was damaged by kill -9: {sound}"
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'parcel'").fetchone():
                return  # killed before it was made
            self.waiting = [key for (key,) in connection.execute("SELECT key FROM parcel ORDER BY id")]
            counted = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'parcel'").fetchone()
            assert not connection.execute("SELECT count(*) FROM poison").fetchone()[0]
        finally:
            connection.close()
        self.known.update(self.waiting)
        self.accepted_count = max(self.accepted_count, counted[0] if counted else 0)
