"""Programs that record their GPU session on this machine, in namespaces of their own or not, watched through /proc."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuflight.collectors.base import Batch
from gpuflight.collectors.session_processes import OTHER_HOST
from gpuflight.collectors.sessions import Sessions, SessionsSettings
from gpuflight.sources.open import open_world

PROGRAM = Path(__file__).parents[1] / "e2e" / "session_program.py"
UUID = "GPU-fa4e0000-0000-4000-8000-000000000002"
PATIENCE_S = 30.0


class Watcher:
    """The collector, alone, over this machine."""

    def __init__(self, folder: Path, **settings: object) -> None:
        self.world = open_world()
        self.collector = Sessions(SessionsSettings(**{"folders": [str(folder)], "notify": False, **settings}))  # type: ignore[arg-type]
        self.number = 0

    def round(self) -> Batch:
        self.number += 1
        self.world.begin_round(self.number)
        self.collector.notes.clear()
        self.collector.observe(self.world)
        return self.collector.seed()

    def until(self, wanted: Callable[[Batch], bool]) -> Batch:
        """Rounds until one is as wanted."""
        until_s = time.monotonic() + PATIENCE_S
        while not wanted(batch := self.round()):
            assert time.monotonic() < until_s, [node.id for node in batch.nodes]
            time.sleep(0.05)
        return batch

    def close(self) -> None:
        self.collector.close()
        self.world.close()


@contextlib.contextmanager
def watching(folder: Path, **settings: object) -> Iterator[Watcher]:
    watcher = Watcher(folder, **settings)
    try:
        yield watcher
    finally:
        watcher.close()


@contextlib.contextmanager
def program(folder: Path, *before: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [*before, sys.executable, str(PROGRAM), str(folder), UUID]
    env = {**os.environ, **environment}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as running:
        assert running.stdin is not None and running.stdout is not None
        try:
            session_id = running.stdout.readline().strip()
            if not session_id:
                pytest.skip(f"cannot run {' '.join(before)} here")
            yield running, session_id
        finally:
            with contextlib.suppress(BrokenPipeError):
                running.stdin.close()
            running.wait(PATIENCE_S)


def owner_of(batch: Batch, session_id: str) -> str | None:
    ends = [edge.source for edge in batch.edges if edge.kind == "Own" and edge.target == f"Session({session_id})"]
    return ends[0] if ends else None


def test_a_program_from_its_first_line_to_its_end(tmp_path: Path) -> None:
    with watching(tmp_path) as watcher:
        with program(tmp_path) as (running, session_id):
            batch = watcher.until(lambda batch: owner_of(batch, session_id) is not None)
            owner = owner_of(batch, session_id)
            assert owner is not None and owner.startswith(f"Process(pid={running.pid},")
            watcher.until(lambda batch: any(node.id == f"Kernel({owner},gemm)" for node in batch.nodes))
        ended = watcher.until(lambda batch: owner_of(batch, session_id) is None)
        session = next(node for node in ended.nodes if node.kind == "Session")
        assert str(session.attributes["state"]).startswith("ended: ")
        watcher.until(lambda batch: any(node.attributes.get("state") == "ended: shutdown" for node in batch.nodes))


def test_a_program_that_is_killed(tmp_path: Path) -> None:
    with watching(tmp_path) as watcher, program(tmp_path) as (running, session_id):
        watcher.until(lambda batch: owner_of(batch, session_id) is not None)
        running.kill()
        running.wait(PATIENCE_S)
        batch = watcher.until(lambda batch: owner_of(batch, session_id) is None)
        session = next(node for node in batch.nodes if node.kind == "Session")
        assert session.attributes["state"] == "ended: process gone"


needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)
CONTAINER = ("unshare", "--pid", "--uts", "--fork", "--mount-proc", "sh", "-c", 'hostname box-7 && exec "$@"', "sh")


@needs_namespaces
def test_a_program_in_a_container_is_known_by_its_inner_pid_and_its_host_name(tmp_path: Path) -> None:
    """It sees itself as pid 1 of box-7; pid 1 of this host is another."""
    with watching(tmp_path) as watcher, program(tmp_path, *CONTAINER, HOSTNAME="box-7") as (running, session_id):
        batch = watcher.until(lambda batch: owner_of(batch, session_id) is not None)
        owner = owner_of(batch, session_id) or ""
        pid = int(owner.partition("pid=")[2].partition(",")[0])
        assert pid not in (1, running.pid)
        assert str(PROGRAM) in watcher.world.procfs.cmdline(pid)
        session = next(node for node in batch.nodes if node.kind == "Session")
        assert (session.attributes["pid"], session.attributes["hostname"]) == (1, "box-7")


@needs_namespaces
def test_a_container_that_cannot_be_told_is_nobody_s(tmp_path: Path) -> None:
    """Nothing says that the namespaces with pid 1 in them are those of box-7."""
    with program(tmp_path, *CONTAINER, HOSTNAME="") as (_, session_id):
        with watching(tmp_path, other_hosts=True) as watcher:
            batch = watcher.until(lambda batch: any(node.kind == "Session" for node in batch.nodes))
            assert owner_of(batch, session_id) is None
            session = next(node for node in batch.nodes if node.kind == "Session")
            assert (session.unknown or {})["process"] == OTHER_HOST
        with watching(tmp_path) as watcher:
            watcher.until(lambda batch: bool(watcher.collector.notes))
