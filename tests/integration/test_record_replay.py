"""This machine recorded while all collectors watch it, and the recording replayed: the same graphs, no secrets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard

from gpuflight.collectors.base import Collector
from gpuflight.core.expansion import CollectorRunner, Expansion, expand_world
from gpuflight.graph import Graph, nodes
from gpuflight.registry import plugins
from gpuflight.settings.model import Limits
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.open import open_world
from gpuflight.sources.world import World

SECRET = "tr0ub4dor-and-3"
ROUNDS = 3

CHILD = """
import os, socket, sys, time
listener = socket.socket(); listener.bind(("127.0.0.1", 0)); listener.listen()
client = socket.create_connection(listener.getsockname()); server, _ = listener.accept()
left, right = socket.socketpair()
read_end, write_end = os.pipe()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """A process with one of each, a secret on its command line and one in its environment."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, "--hf-token", SECRET, f"--password={SECRET}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"HF_TOKEN": SECRET, "RANK": "3", "PATH": "/usr/bin:/bin"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.communicate()


def watch(world: World, clock: ManualClock | None) -> list[tuple[Graph, Expansion]]:
    """``ROUNDS`` rounds of every collector; ``clock`` moves 5 s between them."""
    runners = [CollectorRunner(cls()) for cls in plugins(Collector).values()]
    runners.sort(key=lambda runner: -runner.collector.precedence)
    rounds = []
    try:
        for number in range(1, ROUNDS + 1):
            if clock is not None and number > 1:
                clock.advance(5)
            world.begin_round(number)
            expansion = expand_world(world, runners, Limits())
            graph = Graph()
            for entities in expansion.nodes:
                for entity in entities:
                    graph.try_add_node(entity)
            for edges in expansion.edges:
                for edge in edges:
                    graph.try_add_edge(edge)
            rounds.append((graph, expansion))
    finally:
        for runner in runners:
            runner.close()
        world.close()
    return rounds


def by_id(graph: Graph) -> dict[str, Any]:
    """Every element by id as plain data, without the arguments that only the replay has redacted."""
    elements: dict[str, Any] = {}
    for element in [*graph.nodes.values(), *graph.edges.values()]:
        elements[element.id] = msgspec.to_builtins(element)
    return elements


@pytest.fixture
def recorded(tmp_path: Path, child: subprocess.Popen[str]) -> tuple[Path, list[tuple[Graph, Expansion]]]:
    path = tmp_path / "machine.tar.zst"
    clock = ManualClock()
    world = open_world(record=path, clock=clock)
    world.begin_round(0)
    world.procfs.environ(child.pid)  # no collector reads it, a plugin may
    return path, watch(world, clock)


def test_a_replay_gives_the_same_graphs(recorded: tuple[Path, list[tuple[Graph, Expansion]]]) -> None:
    path, live = recorded
    replayed = watch(open_world(replay=path), None)
    for number, ((graph, expansion), (again, expansion_again)) in enumerate(zip(live, replayed, strict=True), 1):
        before, after = by_id(graph), by_id(again)
        different = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        assert not different, f"round {number}: " + "\n".join(
            f"{key}\n  {before.get(key)}\n  {after.get(key)}" for key in sorted(different)[:5]
        )
        status = {line.collector: (line.status, line.reason, line.losses) for line in expansion.coverage}
        assert {line.collector: (line.status, line.reason, line.losses) for line in expansion_again.coverage} == status


def test_the_graphs_hold_the_child_and_what_it_holds(
    recorded: tuple[Path, list[tuple[Graph, Expansion]]], child: subprocess.Popen[str]
) -> None:
    graph, _ = recorded[1][-1]
    (process,) = [node for node in graph.nodes.values() if isinstance(node, nodes.Process) and node.pid == child.pid]
    assert process.attributes["cmdline"].endswith("--hf-token *** --password=***")
    assert process.metrics["cpu_pct"] >= 0
    kinds = {graph.nodes[edge.source].kind for edge in graph.edges.values() if edge.target == process.id}
    kinds |= {graph.nodes[edge.target].kind for edge in graph.edges.values() if edge.source == process.id}
    assert {"Process", "Socket", "UnixSocket", "Pipe"} <= kinds
    assert not graph.dangling()


def test_no_secret_reaches_the_file(recorded: tuple[Path, list[tuple[Graph, Expansion]]]) -> None:
    path, _ = recorded
    with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as plain:
        content = plain.read()
    assert SECRET.encode() not in content
    assert b"--hf-token" in content
    assert b"RANK=3" in content


def test_without_redaction_everything_is_kept(tmp_path: Path, child: subprocess.Popen[str]) -> None:
    path = tmp_path / "machine.tar.zst"
    world = open_world(record=path, redact=False)
    world.begin_round(1)
    live = world.procfs.cmdline(child.pid)
    environ = world.procfs.environ(child.pid)
    world.close()
    world = open_world(replay=path)
    world.begin_round(1)
    assert world.procfs.cmdline(child.pid) == live
    assert SECRET in live
    assert world.procfs.environ(child.pid) == environ
    world.close()


def test_a_tree_of_files_beside_which_nothing_of_this_machine_is_asked(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (expansion,) = [expansion for _, expansion in watch(open_world(str(tmp_path)), None)][-1:]
    graph_nodes = [
        entity for entities in expansion.nodes for entity in entities if entity.kind not in ("Host", "Device")
    ]
    assert graph_nodes == []
    assert {line.status for line in expansion.coverage} <= {"ok", "skipped"}, expansion.coverage
