"""Top CPU: by rate over the round, not since the processes started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.fakes.proc import FakeProc

from gpuflight.collectors.top_cpu import TopCpu, TopCpuSettings
from gpuflight.graph import nodes


class Rig:
    """A TopCpu on a /proc in memory."""

    def __init__(self, **settings: Any) -> None:
        self.proc = FakeProc()
        self.top = TopCpu(TopCpuSettings(**settings))
        for pid in (10, 11, 12, 13):
            self.proc.add(pid, "app", utime=10_000 * pid)

    def round(self, seconds: float = 1.0) -> dict[int, int]:
        """pid → rank of those marked."""
        self.proc.next_round(seconds)
        self.top.observe(SimpleNamespace(procfs=self.proc.procfs))  # type: ignore[arg-type]
        processes = self.proc.procfs.processes()
        marked = self.top.expand([nodes.Process(pid=pid, start=stat.start) for pid, stat in processes.items()])
        return {node.pid: node.attributes["top_cpu"] for node in marked.nodes if isinstance(node, nodes.Process)}

    def spend(self, pid: int, ticks: int) -> None:
        self.proc.change(pid, utime=self.proc.processes[pid]["utime"] + ticks)


def test_the_first_round_marks_nobody() -> None:
    assert Rig().round() == {}


def test_ranks_by_use_over_the_round() -> None:
    rig = Rig(count=2)
    rig.round()
    rig.spend(10, 50)
    rig.spend(11, 20)
    rig.spend(12, 90)
    assert rig.round() == {12: 1, 10: 2}
    rig.spend(13, 30)
    assert rig.round() == {13: 1}


def test_too_little_use_is_no_rank() -> None:
    rig = Rig(min_pct=10)
    rig.round()
    rig.spend(10, 19)
    rig.spend(11, 20)
    assert rig.round(seconds=2.0) == {11: 1}


def test_new_processes_and_reused_pids_count_from_0() -> None:
    rig = Rig()
    rig.round()
    rig.proc.add(20, "new", utime=80)
    rig.proc.end(13)
    rig.proc.add(13, "other", start=999, utime=40)
    assert rig.round() == {20: 1, 13: 2}


def test_seeding_is_on_demand() -> None:
    for seed, count in ((False, 0), (True, 1)):
        rig = Rig(seed=seed)
        rig.round()
        rig.spend(10, 50)
        rig.round()
        assert len(rig.top.seed().nodes) == count
