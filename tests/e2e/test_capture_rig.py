"""The promise of the product: a capture of this very machine finds every exchange of a rig started beside it.

``gpuflight run --offline`` is run as a user runs it; its graph.json is read back and lifted to processes. Between the
rig's processes there must be one edge per pair, made of exactly one underlying thing, and none else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflight.graph import nodes
from gpuflight.graph.lift import lift
from gpuflight.graph.load import LoadedGraph, load_graph, read_rounds

pytestmark = pytest.mark.rig

RIG = Path(__file__).with_name("capture_rig.py")
BY = {
    "tcp": "ConnectTo",
    "tcp_in_namespace": "ConnectTo",
    "udp": "ConnectTo",
    "unix": "ConnectTo",
    "pipe": "Pipe",
    "posix_shared_memory": "SharedMemory",
    "sysv_shared_memory": "SharedMemory",
    "memfd": "SharedMemory",
    "message_queue": "MessageQueue",
    "semaphore": "Semaphore",
}


@pytest.fixture(scope="module")
def rig() -> Iterator[dict[str, Any]]:
    with subprocess.Popen(
        [sys.executable, str(RIG)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the rig did not start"
        yield json.loads(line)
        process.stdin.close()
        process.wait(30)


@pytest.fixture(scope="module")
def folder(rig: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("capture") / "run"
    done = subprocess.run(
        [sys.executable, "-m", "gpuflight.cli", "run", "--offline", "3", "--interval", "1", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return out


@pytest.fixture(scope="module")
def capture(folder: Path) -> LoadedGraph:
    return load_graph(folder)


def pairs_of(rig: dict[str, Any]) -> dict[frozenset[int], str]:
    return {frozenset(pair): name for name, pair in rig["pairs"].items() if name not in rig["refused"]}


def test_every_pair_is_one_edge_of_one_thing_and_nothing_else_is(rig: dict[str, Any], capture: LoadedGraph) -> None:
    expected = pairs_of(rig)
    ours = {pid for pair in rig["pairs"].values() for pid in pair}
    pid_of = {entity.id: entity.pid for entity in capture.graph.of_kind(nodes.Process)}
    found: dict[frozenset[int], list[Any]] = {}
    for edge in lift(capture.graph):
        ends = {pid_of[edge.source], pid_of[edge.target]}
        if ends & ours:
            found.setdefault(frozenset(ends), []).append(edge)
    missing = [name for pair, name in expected.items() if pair not in found]
    false = [sorted(pair) for pair in found if pair not in expected]
    assert missing == []
    assert false == []
    for pair, name in expected.items():
        assert len(found[pair]) == 1, f"{name}: more than one edge"
        assert len(found[pair][0].via) == 1, f"{name} counted twice: {found[pair][0].via}"
        assert found[pair][0].kinds == [BY[name]], name


def test_the_pipe_points_from_writer_to_reader(rig: dict[str, Any], capture: LoadedGraph) -> None:
    writer, reader = rig["pairs"]["pipe"]
    pid_of = {entity.id: entity.pid for entity in capture.graph.of_kind(nodes.Process)}
    ways = [(pid_of[e.source], pid_of[e.target]) for e in lift(capture.graph) if e.kinds == ["Pipe"] and e.directed]
    assert (writer, reader) in ways
    assert (reader, writer) not in ways


def test_the_other_network_namespace_was_seen_when_we_may(rig: dict[str, Any], capture: LoadedGraph) -> None:
    if os.geteuid() == 0:
        assert rig["refused"] == {}
    if "tcp_in_namespace" not in rig["refused"]:
        assert any(entity.netns for entity in capture.graph.of_kind(nodes.Socket))


def test_the_stream_of_rounds_ends_in_the_graph(folder: Path, capture: LoadedGraph) -> None:
    rounds = list(read_rounds(folder / "rounds.jsonl.zst"))
    assert len(rounds) >= 2
    assert rounds[-1].graph == capture.graph
    assert [item.round_number for item in rounds] == list(range(1, len(rounds) + 1))


def test_nothing_dangles_and_no_number_is_made_up(capture: LoadedGraph) -> None:
    assert capture.graph.dangling() == []
    for element in [*capture.graph.nodes.values(), *capture.graph.edges.values()]:
        for name, value in element.metrics.items():
            assert value == value, (element, name)
            assert name not in (element.unknown or {}), (element, name)
