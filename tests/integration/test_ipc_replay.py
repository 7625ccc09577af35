"""What is recorded of containers and IPC on the real machine gives, replayed, the very same picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from test_ipc_rig import COLLECTORS, start_rig

from gpuflight.collectors.containers import ContainersCollector
from gpuflight.graph import nodes
from gpuflight.sources.open import open_world
from gpuflight.sources.world import World

pytestmark = pytest.mark.rig


def picture(world: World, facts: dict[str, Any]) -> list[Any]:
    """What two rounds of the collectors say about the rig; the rest of the machine may change while it is looked at."""
    collectors = [collector() for collector in (*COLLECTORS, ContainersCollector)]
    rig = tuple(f"Process(pid={pid}," for pid in facts["pids"].values())
    seen: list[Any] = []
    for number in (1, 2):
        world.begin_round(number)
        processes = world.procfs.processes().values()
        frontier: list[Any] = [nodes.Process(pid=stat.pid, start=stat.start) for stat in processes]
        for collector in collectors:
            collector.observe(world)
            batch = collector.expand(frontier)
            edges = {
                edge.key: edge for edge in batch.edges if edge.source.startswith(rig) or edge.target.startswith(rig)
            }
            ends = {end for source, target, _ in edges for end in (source, target)}
            found = {node.id: node for node in batch.nodes if node.id in ends}
            seen.append((collector.name, sorted(map(repr, found.values())), sorted(map(repr, edges.values()))))
    return seen


def test_replay(tmp_path: Path) -> None:
    process, facts = start_rig()
    try:
        world = open_world(record=tmp_path / "recording")
        live = picture(world, facts)
        world.close()
    finally:
        process.communicate(timeout=20)
    assert not os.path.exists(f"/proc/{facts['pids']['a']}")  # what follows can only come from the recording
    assert picture(open_world(replay=tmp_path / "recording"), facts) == live
    assert [name for name, found, edges in live if found and edges] == 2 * [
        "pipes",
        "shared_memory",
        "message_queues",
        "semaphores",
    ]
