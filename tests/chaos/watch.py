"""Watches a server from outside: every round of its live stream, its threads and descriptors as the kernel has them."""

from __future__ import annotations

import itertools
import os
import statistics
import threading
from datetime import datetime
from pathlib import Path

import httpx
import msgspec
from tests.chaos.victims import ServerVictim


class Seen(msgspec.Struct, rename={"number": "round"}):
    """What is looked at of a round."""

    number: int
    time: str
    duration_s: float
    pid: int = 0
    threads_count: int = 0
    descriptors_count: int = 0

    @property
    def began_s(self) -> float:
        """When it began, s since the epoch."""
        return datetime.fromisoformat(self.time).timestamp()


class Watch:
    """``lives`` has the rounds of each life of the server, in order, until ``close``."""

    def __init__(self, server: ServerVictim) -> None:
        self.lives: list[list[Seen]] = []
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._over.wait(0.02):
            process = self._server.process
            if process is None:
                continue
            life: list[Seen] = []
            try:
                with httpx.stream("GET", f"{self._server.url}/api/v1/stream", timeout=20) as answer:
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            life.append(_looked_at(line[6:], process.pid))
                            if len(life) == 1:
                                self.lives.append(life)
                        if self._over.is_set():
                            return
            except (httpx.TransportError, OSError):
                continue  # killed, or not there yet


def _looked_at(data: str, pid: int) -> Seen:
    seen = msgspec.json.decode(data, type=Seen)
    seen.pid = pid
    seen.threads_count = len(os.listdir(f"/proc/{pid}/task"))
    seen.descriptors_count = len(os.listdir(f"/proc/{pid}/fd"))
    return seen


def stalls(path: Path) -> list[tuple[float, float]]:
    """What ``tests.chaos.stalls`` wrote: when, and how long."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return [(float(line[0]), float(line[1])) for line in lines if len(line) == 2]


def lateness(life: list[Seen], interval_s: float, stalled: list[tuple[float, float]]) -> list[tuple[int, float]]:
    """Rounds that began more than one interval too late, and by how much (s).

    A round begins an interval after the one before, or when that one is done if it took longer. What the machine kept
    everybody waiting meanwhile is nobody's fault.
    """
    late = []
    for before, after in itertools.pairwise(life):
        if after.number != before.number + 1:
            continue  # the watcher itself was too slow, and got a later round whole
        due_s = before.began_s + max(interval_s, before.duration_s)
        machine_s = sum(longer_s for when_s, longer_s in stalled if before.began_s - 1 <= when_s <= after.began_s)
        if after.began_s - due_s - machine_s > interval_s:
            late.append((after.number, after.began_s - due_s))
    return late


def growth(life: list[Seen], attribute: str) -> float:
    """How much more there was at the end of a life than when it was under way: medians of its quarters."""
    counts = [getattr(seen, attribute) for seen in life]
    quarter = len(counts) // 4
    return statistics.median(counts[-quarter:]) - statistics.median(counts[quarter : 2 * quarter])
