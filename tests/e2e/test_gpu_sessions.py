"""A program that records its GPU session, watched by the installed command on a made-up GPU machine."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.e2e.runner import Sandbox, sandbox
from tests.fakes.nvml import NoCompiler, fake_nvml

from gpuflight.graph import Graph

UUID = "GPU-fa4e0000-0000-4000-8000-000000000002"
PROGRAM = Path(__file__).with_name("session_program.py")


@dataclass
class Watched:
    """What was found while the program ran, and who it was."""

    box: Sandbox
    graph: Graph
    session_id: str
    pid: int
    logs: Path
    environment: dict[str, str]

    @property
    def session(self) -> str:
        return f"Session({self.session_id})"

    @property
    def process(self) -> str:
        return next(id_ for id_ in self.graph.nodes if id_.startswith(f"Process(pid={self.pid},"))

    def way(self, a: str, b: str) -> list[str]:
        """The entities on the way as ``gpuflight path`` tells it, and the kinds of its edges."""
        out = self.box.run("path", a, b, "--graph", "run", "--json").out
        return [part for hop in json.loads(out)["hops"] for part in (hop["kind"], hop["target"])]


@contextlib.contextmanager
def program(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, str(PROGRAM), str(folder), UUID]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None and running.stdout is not None
        try:
            yield running, running.stdout.readline().strip()
        finally:
            running.stdin.close()
            running.wait(30)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    logs = tmp_path_factory.mktemp("logs")
    with sandbox() as box, program(logs) as (running, session_id):
        folder = box.home.parent / "nvml"
        folder.mkdir()
        try:
            fake = fake_nvml("h100x8", folder)
        except NoCompiler:
            pytest.skip("the fake NVML needs a C compiler")
        fake.description.write_text(
            fake.description.read_text().replace("process = 4101:", f"process = {running.pid}:")
        )
        box.run("run", "--offline", "4", "--interval", "1", "--out", "run",
                "--set", f'collectors.sessions.folders=["{logs}"]', env=fake.environment)  # fmt: skip
        yield Watched(box, box.capture("run").loaded.graph, session_id, running.pid, logs, dict(fake.environment))


def test_the_session_is_the_program_s(watched: Watched) -> None:
    graph = watched.graph
    assert (watched.process, watched.session, "Own") in graph.edges
    session = graph.nodes[watched.session]
    assert session.attributes["state"] == "live"
    assert session.attributes["app"] == "session_program"
    assert graph.nodes[watched.process].attributes["name"].startswith("python")


def test_what_it_does_in_numbers(watched: Watched) -> None:
    """150 launches per s, 25 ms of kernels in each; allow for a slow machine, not for a wrong factor."""
    metrics = watched.graph.nodes[watched.session].metrics
    assert 15 <= metrics["launches_per_s"] <= 160
    assert metrics["launches_count"] % 15 == 0 and metrics["kernels_count"] == 2
    share = metrics["busy_pct"] / metrics["launches_per_s"]
    assert share == pytest.approx(100 * 2.5e-3 / 15, rel=0.02)
    assert metrics["copy_htod_bytes_per_s"] / metrics["launches_per_s"] == pytest.approx((1 << 20) / 15, rel=0.02)
    assert metrics["sync_wait_pct"] / metrics["launches_per_s"] == pytest.approx(100e-3 / 15, rel=0.35)
    assert (metrics["held_bytes"], metrics["alloc_peak_bytes"]) == (1 << 30, 1 << 30)
    assert (metrics["losses_count"], metrics["lag_bytes"], metrics["scopes_count"]) == (0, 0, 2)
    gemm = watched.graph.nodes[f"Kernel({watched.process},gemm)"].metrics
    assert (gemm["mean_us"], gemm["p50_us"], gemm["p99_us"]) == (200, 200, 200)


def test_ways_from_the_session_to_its_gpu(watched: Watched) -> None:
    gpu, process = f"GPU(uuid={UUID})", watched.process
    gemm, stream = f"Kernel({process},gemm)", f"Stream({process},7)"
    assert watched.way(f"session:{watched.session_id}", f"pid:{watched.pid}")[-1] == process
    assert watched.way(f"pid:{watched.pid}", "gpu:2")[-1] == gpu
    assert watched.way("kernel:" + gemm.removeprefix("Kernel(")[:-1], "gpu:2") == ["RunOn", stream, "RunOn", gpu]
    assert watched.way(watched.session, gpu)[-1] == gpu
    assert watched.graph.nodes[gpu].attributes["index"] == 2  # it is the one that NVML names
    assert (process, gpu, "Transfer") in watched.graph.edges


def test_a_recording_answers_the_same(watched: Watched) -> None:
    option = ("--set", f'collectors.sessions.folders=["{watched.logs}"]')
    watched.box.run("record", "m.tar.zst", "--seconds", "2", "--interval", "0.5", *option, env=watched.environment)
    watched.box.run("run", "--replay", "m.tar.zst", "--out", "replayed")
    again = watched.box.capture("replayed").loaded.graph
    assert (watched.process, watched.session, "Own") in again.edges
    assert again.nodes[f"Kernel({watched.process},gemm)"].metrics["mean_us"] == 200


def test_the_session_ends_with_the_program(tmp_path: Path) -> None:
    with sandbox() as box:
        with program(tmp_path) as (_, session_id):
            pass
        box.run("run", "--offline", "0.5", "--interval", "0.5", "--out", "run",
                "--set", f'collectors.sessions.folders=["{tmp_path}"]')  # fmt: skip
        session = box.capture("run").loaded.graph.nodes[f"Session({session_id})"]
    assert session.attributes["state"] == "ended: shutdown"
    assert "process" in (session.unknown or {})
