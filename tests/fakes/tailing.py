"""Tailers with a clock moved by hand, a store and a sink that keep what they are given, writers of log files."""

from __future__ import annotations

import gzip
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gpuflight.events.tail import Chunk, Disk, Tailer, TailSettings

SESSION = "11111111-1111-4111-8111-111111111111"


class Clock:
    """Seconds that pass when told to. ``wall`` is the real one plus ``ahead_s``: files carry real times."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return time.time() + self.ahead_s

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds


class Store:
    """The rule of events.store.Records: what lies before a source's position is stored already."""

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}
        self.lines: Counter[bytes] = Counter()

    def write(self, chunk: Chunk) -> None:
        position = self.positions.get(chunk.source, 0)
        if position >= chunk.end:
            return
        data = chunk.after(position)
        self.lines.update(line.rstrip(b"\r") for line in data.split(b"\n") if line.strip())
        self.positions[chunk.source] = chunk.end


class Rig:
    """A tailer in a folder, with its clock, store and sink."""

    def __init__(self, folder: Path, *, checkpoint: str | None = "", disk: Disk | None = None, **settings: Any) -> None:
        self.folder = folder
        self.checkpoint = str(folder.parent / "checkpoint" / "tail.json") if checkpoint == "" else checkpoint
        self.settings = TailSettings(**{"notify": False, "save_interval_s": 0, **settings})
        self.disk = disk
        self.clock = Clock()
        self.store = Store()
        self.sink: list[bytes] = []
        self.chunks: list[Chunk] = []
        self.tailer = self.open()

    opened: list[Tailer] = []
    """Of all rigs; a test's fixture closes them."""

    @classmethod
    def close_all(cls) -> None:
        while cls.opened:
            cls.opened.pop().close(save=False)

    def open(self, **more: Any) -> Tailer:
        tailer = Tailer(
            str(self.folder),
            self.checkpoint,
            self.settings,
            disk=self.disk,
            monotonic_s=self.clock.monotonic,
            wall_s=self.clock.wall,
            **more,
        )
        self.opened.append(tailer)
        return tailer

    def poll(self, seconds: float = 10) -> list[Chunk]:
        """What one poll hands out, some time later."""
        self.clock.pass_s(seconds)
        return self.tailer.poll()

    def take(self, chunks: Iterable[Chunk]) -> None:
        """Store, deliver, commit."""
        for chunk in chunks:
            self.chunks.append(chunk)
            self.store.write(chunk)
            self.sink += chunk.lines()
            self.tailer.commit(chunk)

    def drain(self, rounds: int = 6) -> list[bytes]:
        """Polls until nothing comes for some rounds; the lines that came."""
        before = len(self.sink)
        quiet = 0
        while quiet < rounds:
            chunks = self.poll()
            self.take(chunks)
            quiet = 0 if chunks else quiet + 1
        return self.sink[before:]

    def kill(self) -> None:
        """As ``kill -9`` does: nothing is saved, descriptors and locks are gone; started again."""
        self.tailer.close(save=False)
        self.tailer = self.open()

    def restart(self) -> None:
        self.tailer.close()
        self.tailer = self.open()

    def count(self, reason: str) -> int:
        return self.tailer.ledger.count(reason)


def line(number: int, size: int = 0) -> bytes:
    """A line of its own, without newline, of at least ``size`` bytes."""
    text = b'{"type":"memset_event","n":%d}' % number
    return (
        text
        if len(text) >= size
        else b'{"type":"memset_event","n":%d,"pad":"%s"}' % (number, b"x" * (size - len(text) - 9))
    )


def lines(*numbers: int) -> bytes:
    return b"".join(line(number) + b"\n" for number in numbers)


def put(path: Path, data: bytes, mode: str = "wb") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, mode) as file:
        file.write(data)
    return path


def pack(path: Path, data: bytes) -> Path:
    return put(path, gzip.compress(data, 1))


def compress(path: Path) -> Path:
    """A plain file becomes a compressed one, beside and then instead."""
    packed = pack(path.with_name(path.name + ".gz"), path.read_bytes())
    path.unlink()
    return packed


class FaultyDisk(Disk):
    """A disk whose answers can be changed: ``fault(what, path)`` may raise; ``seen(stamp)`` may alter numbers."""

    def __init__(self) -> None:
        self.fault: Callable[[str, str], None] = lambda what, path: None
        self.network = False
        self.shift = 0
        self.looks = 0
        self.listings = 0
        self._paths: dict[int, str] = {}

    def open(self, path: str) -> int:
        self.fault("open", path)
        descriptor = super().open(path)
        self._paths[descriptor] = path
        return descriptor

    def read(self, descriptor: int, size: int, offset: int) -> bytes:
        self.fault("read", self._paths[descriptor])
        return super().read(descriptor, size, offset)

    def look(self, path: str) -> Any:
        self.looks += 1
        self.fault("look", path)
        return self._altered(super().look(path))

    def status(self, descriptor: int) -> Any:
        return self._altered(super().status(descriptor))

    def entries(self, folder: str) -> Any:
        self.listings += 1
        self.fault("list", folder)
        return super().entries(folder)

    def is_network(self, path: str) -> bool:
        return self.network

    def _altered(self, stamp: Any) -> Any:
        """Numbers that mean nothing, as on NFS after a remount."""
        return stamp._replace(device=stamp.device + self.shift, inode=stamp.inode ^ self.shift) if self.shift else stamp


def descriptors_of(folder: Path) -> list[str]:
    """Files below a folder that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found
