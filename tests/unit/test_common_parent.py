"""The nearest common ancestor of processes that use a GPU, or were asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.proc import FakeProc

from gpuflight.collectors.base import Batch
from gpuflight.collectors.common_parent import CommonParent, CommonParentSettings
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import nodes


class Rig:
    """Two jobs below one sshd: torchrun 20 with ranks 21 and 22, a shell 30 that started 31 → 32 and 33."""

    def __init__(self, *gpu_pids: int, **settings: Any) -> None:
        self.proc = FakeProc()
        self.collector = CommonParent(CommonParentSettings(**settings))
        for pid, ppid in (
            (1, 0),
            (10, 1),
            (20, 10),
            (21, 20),
            (22, 20),
            (23, 20),
            (30, 10),
            (31, 30),
            (32, 31),
            (33, 30),
        ):
            self.proc.add(pid, "app", ppid=ppid)
        for pid in gpu_pids:
            self.proc.open(pid, 3, "/dev/nvidia0")

    def observe(self) -> None:
        self.proc.next_round()
        self.collector.observe(SimpleNamespace(procfs=self.proc.procfs))  # type: ignore[arg-type]

    def expand(self, *pids: int, seeded: bool = False) -> Batch:
        attributes = {"seeded": True} if seeded else {}
        return self.collector.expand([nodes.Process(pid=pid, start=pid * 10, attributes=attributes) for pid in pids])

    def all(self) -> Batch:
        self.observe()
        return self.expand(*self.proc.processes)


def parents(batch: Batch) -> dict[int, int]:
    return {
        node.pid: node.attributes["common_parent_of"]
        for node in batch.nodes
        if isinstance(node, nodes.Process) and "common_parent_of" in node.attributes
    }


def pairs(batch: Batch) -> set[tuple[str, str]]:
    return {(edge.source.split("=")[1].split(",")[0], edge.target.split("=")[1].split(",")[0]) for edge in batch.edges}


def test_the_launcher_of_two_ranks_with_its_other_children() -> None:
    batch = Rig(21, 22).all()
    assert parents(batch) == {20: 2}
    assert pairs(batch) == {("20", "21"), ("20", "22"), ("20", "23")}
    assert {edge.kind for edge in batch.edges} == {"Own"}


def test_two_jobs_keep_their_own() -> None:
    batch = Rig(21, 22, 32, 33).all()
    assert parents(batch) == {20: 2, 30: 2}
    assert {("30", "31"), ("31", "32"), ("30", "33")} <= pairs(batch)
    assert ("10", "20") not in pairs(batch)


def test_a_lone_one_joins_the_next_above() -> None:
    batch = Rig(21, 22, 32).all()
    assert parents(batch) == {20: 2, 10: 3}


def test_a_launcher_that_uses_a_gpu_itself() -> None:
    assert parents(Rig(20, 21).all()) == {20: 2}


def test_one_alone_or_only_init_in_common_is_no_family() -> None:
    assert Rig(21).all() == Batch()
    rig = Rig(21)
    rig.proc.add(50, "app", ppid=1)
    rig.proc.open(50, 3, "/dev/nvidia1")
    assert parents(rig.all()) == {}


def test_those_that_were_asked_for_count_too() -> None:
    rig = Rig()
    rig.observe()
    assert rig.expand(21, 22) == Batch()
    assert parents(rig.expand(21, 22, seeded=True)) == {20: 2}


def test_members_may_come_in_waves_and_are_not_reported_twice() -> None:
    rig = Rig(21, 22)
    rig.observe()
    assert rig.expand(21) == Batch()
    assert parents(rig.expand(22)) == {20: 2}
    assert rig.expand(21, 22) == Batch()


def test_siblings_beyond_the_limit_are_counted() -> None:
    rig = Rig(21, 22, max_siblings=1)
    rig.all()
    assert rig.collector.losses == {"siblings beyond max_siblings": 2}


def test_a_round_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(21, 22)

    def busy() -> Any:
        raise SourceUnavailable("still being read")

    monkeypatch.setattr(rig.proc.procfs, "fds", busy)
    assert rig.all() == Batch()
    assert "still being read" in rig.collector.notes
