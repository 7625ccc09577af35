"""Real processes that share one object of each kind: found as edges between the right ones, none twice, none false."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.message_queues import MessageQueuesCollector
from gpuflight.collectors.pipes import PipesCollector
from gpuflight.collectors.semaphores import SemaphoresCollector
from gpuflight.collectors.shared_memory import SharedMemoryCollector
from gpuflight.graph import nodes
from gpuflight.sources.cgroups import Cgroups
from gpuflight.sources.clock import SystemClock
from gpuflight.sources.fs import HostFs
from gpuflight.sources.ipc import Ipc
from gpuflight.sources.procfs import ProcFs
from gpuflight.sources.world import World

pytestmark = pytest.mark.rig

COLLECTORS: tuple[type[Collector], ...] = (
    PipesCollector,
    SharedMemoryCollector,
    MessageQueuesCollector,
    SemaphoresCollector,
)


class Rig:
    """The processes of ipc_rig.py and one round of the collectors on them."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.tag: str = facts["tag"]
        self.pids: dict[str, int] = facts["pids"]
        self.inodes: dict[str, int] = facts["inodes"]
        self.ids: dict[str, int] = facts["ids"]
        fs, clock = HostFs(), SystemClock()
        procfs = ProcFs(fs, clock)
        unused: Any = _Unused()
        self.world = World(fs, procfs, unused, Cgroups(fs, procfs), unused, Ipc(fs, procfs), unused, unused, clock)
        self.collectors = [collector() for collector in COLLECTORS]
        self.nodes: dict[str, Any] = {}
        self.edges: list[Any] = []

    def look(self, number: int = 1) -> None:
        """One round, expanded from the rig's processes to the objects and from these to all their users."""
        self.world.begin_round(number)
        live = self.world.procfs.processes()
        self.names = {live[pid].id: who for who, pid in self.pids.items()}
        frontier = [nodes.Process(pid=pid, start=live[pid].start) for pid in self.pids.values()]
        self.nodes, self.edges = {}, []
        for collector in self.collectors:
            collector.losses.clear()
            collector.notes.clear()
            collector.observe(self.world)
            first = collector.expand(frontier)
            kind = collector.expands[1]
            objects = {node.id: node for node in first.nodes if isinstance(node, kind)}
            second = collector.expand(list(objects.values()))
            self._add(first)
            self._add(second)

    def _add(self, batch: Batch) -> None:
        self.nodes.update((node.id, node) for node in batch.nodes)
        self.edges.extend({edge.key: edge for edge in batch.edges}.values())

    def users(self, object_id: str) -> set[str]:
        """Roles with an Access edge to an object; a process that is not of the rig shows as its id."""
        found = {edge.source for edge in self.edges if edge.kind == "Access" and edge.target == object_id}
        return {self.names.get(source, source) for source in found}

    def one(self, kind: str, mechanism: str, **attributes: Any) -> Any:
        """The only node of a kind with these attributes."""
        found = [
            node
            for node in self.nodes.values()
            if node.kind == kind
            and node.mechanism == mechanism
            and all(node.attributes.get(name) == value for name, value in attributes.items())
        ]
        assert len(found) == 1, (kind, mechanism, attributes, found)
        return found[0]


class _Unused:
    def begin_round(self, number: int) -> None: ...

    def close(self) -> None: ...


def start_rig() -> tuple[subprocess.Popen[str], dict[str, Any]]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ipc_rig.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the rig did not come up"
    facts: dict[str, Any] = json.loads(line)
    deadline_s = time.monotonic() + 20
    while any(_state(facts["pids"][who]) != "S" for who in ("c", "d")):  # on their way into the blocking call
        assert time.monotonic() < deadline_s
        os.sched_yield()
    return process, facts


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    process, facts = start_rig()
    try:
        found = Rig(facts)
        found.look()
        yield found
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)
        assert process.stdout is not None
        process.stdout.close()


def test_pipe(rig: Rig) -> None:
    pipe = f"Pipe(ino={rig.inodes['pipe']})"
    flow = {(rig.names.get(e.source, e.source), rig.names.get(e.target, e.target)) for e in rig.edges if pipe in e.key}
    assert flow == {("a", pipe), (pipe, "b")}


def test_fifo(rig: Rig) -> None:
    fifo = next(node for node in rig.nodes.values() if node.kind == "Pipe" and node.inode == rig.inodes["fifo"])
    assert fifo.attributes == {"name": f"{rig.tag}.fifo", "path": f"/tmp/{rig.tag}.fifo"}
    assert fifo.device
    flow = {
        (rig.names.get(e.source, e.source), rig.names.get(e.target, e.target)) for e in rig.edges if fifo.id in e.key
    }
    assert flow == {("a", fifo.id), (fifo.id, "b")}


def test_shared_memory_of_python(rig: Rig) -> None:
    node = rig.one("SharedMemory", "posix", name=f"{rig.tag}_py")
    assert rig.users(node.id) == {"a", "b"}
    assert node.metrics["size_bytes"] == 4096
    assert node.metrics["attached_count"] == 2


def test_posix_shared_memory_unlinked_and_closed_after_mmap(rig: Rig) -> None:
    node = rig.one("SharedMemory", "posix", name=f"{rig.tag}_raw")
    assert node.attributes["deleted"] is True
    assert rig.users(node.id) == {"a", "b"}
    if os.geteuid() == 0:
        assert node.metrics["size_bytes"] == 8192


def test_memfd_inherited_by_fork(rig: Rig) -> None:
    node = rig.one("SharedMemory", "memfd", name=rig.tag)
    assert f"ino={rig.inodes['memfd']}," in node.key
    assert rig.users(node.id) == {"a", "b"}


def test_anonymous_memory_inherited_by_fork(rig: Rig) -> None:
    users = [
        rig.users(node.id)
        for node in rig.nodes.values()
        if node.kind == "SharedMemory" and node.mechanism == "anonymous"
    ]
    assert [found - {"c", "d"} for found in users if "a" in found] == [{"a", "b"}]


def test_sysv_shared_memory(rig: Rig) -> None:
    node = rig.nodes[f"SharedMemory(sysv,{rig.ids['segment']})"]
    assert rig.users(node.id) == {"a", "b"}
    assert node.metrics["size_bytes"] == 12288
    assert node.metrics["attached_count"] == 2
    assert node.attributes["creator_pid"] == rig.pids["r"]


def test_posix_message_queue(rig: Rig) -> None:
    node = rig.one("MessageQueue", "posix", name=f"/{rig.tag}_mq")
    ends = {rig.names[e.source]: e.attributes["ends"] for e in rig.edges if e.target == node.id}
    assert ends == {"a": "w", "b": "r"}
    assert node.metrics["queued_bytes"] == 0


def test_sysv_message_queue(rig: Rig) -> None:
    node = rig.nodes[f"MessageQueue(sysv,{rig.ids['queue']})"]
    how = {rig.names[e.source]: e.attributes["how"] for e in rig.edges if e.target == node.id}
    assert how == {"a": "sent", "b": "received"}
    assert node.metrics["messages_count"] == 0


def test_sysv_message_queue_that_a_process_waits_on(rig: Rig) -> None:
    node = rig.nodes[f"MessageQueue(sysv,{rig.ids['queue_of_c']})"]
    (edge,) = {e.key: e for e in rig.edges if e.target == node.id}.values()
    assert rig.names[edge.source] == "c"
    assert edge.attributes == {"how": "waited to receive", "waiting": True}
    assert node.metrics["waiting_count"] == 1


def test_sysv_semaphores(rig: Rig) -> None:
    node = rig.nodes[f"Semaphore(sysv,{rig.ids['semaphores']})"]
    assert rig.users(node.id) == {"a", "b"}
    assert node.metrics["semaphores_count"] == 2


def test_sysv_semaphore_that_a_process_waits_on(rig: Rig) -> None:
    node = rig.nodes[f"Semaphore(sysv,{rig.ids['semaphores_of_d']})"]
    assert rig.users(node.id) == {"d"}
    assert node.metrics["waiting_count"] == 1


def test_posix_named_semaphore(rig: Rig) -> None:
    node = rig.one("Semaphore", "posix", name=f"/{rig.tag}_sem")
    assert rig.users(node.id) == {"a", "b"}
    assert node.metrics["value_count"] == 3
    assert not any(
        rig.tag in str(n.attributes.get("name")) and "sem" in str(n.attributes["name"])
        for n in rig.nodes.values()
        if n.kind == "SharedMemory"
    )


def test_no_edge_twice_in_one_answer(rig: Rig) -> None:
    for collector in rig.collectors:
        live = rig.world.procfs.processes()
        frontier = [nodes.Process(pid=pid, start=live[pid].start) for pid in rig.pids.values()]
        twice = [
            key for key, count in Counter(edge.key for edge in collector.expand(frontier).edges).items() if count > 1
        ]
        assert not [key for key in twice if key[2] != "Host"]


def test_the_same_again_in_the_next_round(rig: Rig) -> None:
    before = {edge.key for edge in rig.edges}
    rig.look(2)
    assert {key for key in before if "gf_rig" in str(key)} <= {edge.key for edge in rig.edges}
    assert before == {edge.key for edge in rig.edges}
