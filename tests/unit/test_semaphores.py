"""The semaphore collector: POSIX ones by mapping, System V sets by who operated last or waits."""

from __future__ import annotations

import os

import pytest
from fake_ipc import BOOT_S, FakeWorld, Look

from gpuflight.collectors.semaphores import SemaphoresCollector
from gpuflight.errors import SourceUnavailable
from gpuflight.sources.ipc import SysvSemaphores, Wait
from gpuflight.sources.segments import Segment, SemaphoreState, ShmFile, Use

SET = "Semaphore(sysv,11)"
DEVICE = os.makedev(0, 27)
NAMED = "Semaphore(posix,ino=5,dev=0:27)"


@pytest.fixture
def world() -> FakeWorld:
    world = FakeWorld()
    world.ipc.sem[11] = SysvSemaphores(11, 0, 0o600, 2, 0, BOOT_S + 100)
    return world


def test_the_last_to_operate_on_each(world: FakeWorld) -> None:
    a, b = world.process(10), world.process(11)
    world.ipc.pids[11] = [10, 11]
    look = Look(world, SemaphoresCollector())
    assert look.how(SET) == {a: {"how": "operated"}, b: {"how": "operated"}}
    assert look.graph.nodes[SET].metrics == {"semaphores_count": 2, "waiting_count": 0}


def test_a_reused_pid_is_not_believed(world: FakeWorld) -> None:
    world.process(10, start=15_000)
    world.ipc.pids[11] = [10, 99]
    collector = SemaphoresCollector()
    look = Look(world, collector)
    assert look.how(SET) == {}
    assert SET in look.on_host
    assert collector.losses == {"last users of System V semaphores, ended since": 2}


def test_semaphores_beyond_the_round_s_bound_are_counted(world: FakeWorld) -> None:
    a = world.process(10)
    world.ipc.pids[11] = [10]
    collector = SemaphoresCollector()
    assert set(Look(world, collector).how(SET)) == {a}
    assert collector.losses == {"System V semaphores not asked for their users": 1}


def test_who_waits(world: FakeWorld) -> None:
    a = world.process(10)
    world.ipc.waiting["sem", 11] = [Wait(10, "operate")]
    assert Look(world, SemaphoresCollector()).how(SET) == {a: {"how": "waited", "waiting": True}}


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), SourceUnavailable("too many")])
def test_what_may_not_be_asked_is_said_and_the_set_still_drawn(world: FakeWorld, error: Exception) -> None:
    world.ipc.pids[11] = error
    collector = SemaphoresCollector()
    assert SET in Look(world, collector).on_host
    assert len(collector.notes) == 1


def test_a_set_that_was_removed_meanwhile_is_left_out(world: FakeWorld) -> None:
    world.ipc.pids[11] = OSError(22, "invalid argument")
    assert Look(world, SemaphoresCollector()).on_host == {}


def test_no_system_v_in_this_kernel(world: FakeWorld) -> None:
    world.ipc.missing = True
    collector = SemaphoresCollector()
    Look(world, collector)
    assert any("no System V" in reason for reason in collector.notes)


def named(world: FakeWorld, *pids: int, name: str = "/dev/shm/sem.jobs", deleted: bool = False) -> None:
    users = {pid: Use(4096, 0, True, True) for pid in pids}
    world.ipc.segment(Segment("posix", DEVICE, 5, 0, name, deleted, 4096, users))


def test_posix_semaphores(world: FakeWorld) -> None:
    a, b = world.process(10), world.process(11)
    named(world, 10, 11)
    world.ipc.states[5] = SemaphoreState(3, 1)
    look = Look(world, SemaphoresCollector())
    assert set(look.how(NAMED)) == {a, b}
    node = look.graph.nodes[NAMED]
    assert node.label == "/jobs"
    assert node.metrics == {"semaphores_count": 1, "value_count": 3, "waiting_count": 1}
    assert node.unknown is None


def test_a_posix_semaphore_whose_memory_may_not_be_read(world: FakeWorld) -> None:
    world.process(10)
    named(world, 10)
    node = Look(world, SemaphoresCollector()).graph.nodes[NAMED]
    assert node.metrics == {"semaphores_count": 1}
    assert node.unknown is not None
    assert set(node.unknown) == {"value_count", "waiting_count"}


def test_an_unlinked_one_is_drawn_only_between_processes(world: FakeWorld) -> None:
    """What multiprocessing.Lock is: made, unlinked at once, inherited by fork."""
    world.process(10)
    named(world, 10, name="/dev/shm/sem.Xy12Za", deleted=True)
    assert NAMED not in Look(world, SemaphoresCollector()).graph.nodes
    world.process(11)
    named(world, 10, 11, name="/dev/shm/sem.Xy12Za", deleted=True)
    node = Look(world, SemaphoresCollector()).graph.nodes[NAMED]
    assert node.attributes == {"deleted": True}


def test_the_maker_s_temporary_name_is_not_shown(world: FakeWorld) -> None:
    world.process(10)
    named(world, 10, name="/dev/shm/sem.Xy12Za", deleted=True)
    world.ipc.files[DEVICE, 5] = ShmFile("sem.jobs", 32, 0)
    assert Look(world, SemaphoresCollector()).graph.nodes[NAMED].attributes == {"name": "/jobs"}


def test_shared_memory_is_no_semaphore(world: FakeWorld) -> None:
    world.process(10)
    named(world, 10, name="/dev/shm/data")
    assert NAMED not in Look(world, SemaphoresCollector()).graph.nodes
