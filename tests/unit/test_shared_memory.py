"""The shared memory collector: which segments are drawn, with what, and where they take space."""

from __future__ import annotations

import os
from typing import Any

import pytest
from fake_ipc import FakeWorld, Look

from gpuflight.collectors.shared_memory import SharedMemoryCollector
from gpuflight.sources.ipc import SysvSharedMemory
from gpuflight.sources.segments import Segment, ShmFile, ShmMount, Use

DEVICE = os.makedev(0, 27)
OTHER = os.makedev(0, 55)
POSIX = "SharedMemory(posix,ino=5,dev=0:27)"


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


def users(*pids: int) -> dict[int, Use]:
    return {pid: Use(4096, 0, True, True) for pid in pids}


def row(shmid: int, attached: int) -> SysvSharedMemory:
    return SysvSharedMemory(shmid, 0x77, 0o600, 8192, 10, 11, attached, 1000, 0, 0, 4096, 0)


def test_posix(world: FakeWorld) -> None:
    a, b, c = world.process(10), world.process(11), world.process(12)
    held = users(10, 11)
    held[11] = Use(0, 2, True, False)
    held[12] = Use(4096, 1, True, True)
    world.ipc.segment(Segment("posix", DEVICE, 5, 0, "/dev/shm/psm_1", False, 4096, held))
    world.ipc.sizes[5] = 8192
    look = Look(world, SharedMemoryCollector())
    assert look.how(POSIX) == {
        a: {"how": "mapped", "ends": "rw"},
        b: {"how": "open", "ends": "r"},
        c: {"how": "mapped, open", "ends": "rw"},
    }
    node = look.graph.nodes[POSIX]
    assert node.attributes == {"name": "psm_1", "path": "/dev/shm/psm_1"}
    assert node.metrics == {"size_bytes": 8192, "attached_count": 2}
    (edge,) = [edge for edge in look.graph.edges.values() if edge.source == a]
    assert edge.metrics == {"mapped_bytes": 4096}


def test_a_size_that_nobody_tells_is_unknown_and_at_least_what_is_mapped(world: FakeWorld) -> None:
    world.process(10)
    world.ipc.segment(Segment("posix", DEVICE, 5, 0, "/dev/shm/x", True, 4096, users(10)))
    node = Look(world, SharedMemoryCollector()).graph.nodes[POSIX]
    assert node.metrics == {"attached_count": 1, "mapped_bytes": 4096}
    assert node.attributes["deleted"] is True
    assert node.unknown is not None
    assert set(node.unknown) == {"size_bytes"}


def test_system_v_takes_its_figures_from_the_table(world: FakeWorld) -> None:
    a = world.process(10)
    world.ipc.shm[3] = row(3, 2)
    world.ipc.segment(Segment("sysv", 1, 3, 0, "/SYSV00000077", True, 8192, users(10)))
    look = Look(world, SharedMemoryCollector())
    node = look.graph.nodes["SharedMemory(sysv,3)"]
    assert set(look.how(node.id)) == {a}
    assert node.metrics == {"attached_count": 2, "size_bytes": 8192, "resident_bytes": 4096}
    assert node.attributes == {"sysv_key": "0x00000077", "owner_uid": 1000, "creator_pid": 10}


def test_the_same_shmid_in_another_ipc_namespace(world: FakeWorld) -> None:
    a, b = world.process(10), world.process(11)
    world.ipc.shm[3] = row(3, 1)
    world.ipc.segment(Segment("sysv", 1, 3, 0, "/SYSV00000077", True, 8192, users(10)))
    world.ipc.segment(Segment("sysv", 1, 3, 77, "/SYSV00000000", True, 4096, users(11)))
    look = Look(world, SharedMemoryCollector())
    assert set(look.how("SharedMemory(sysv,3)")) == {a}
    assert set(look.how("SharedMemory(sysv,3,ipcns=77)")) == {b}
    foreign = look.graph.nodes["SharedMemory(sysv,3,ipcns=77)"]
    assert "creator_pid" not in foreign.attributes  # that of our table is another segment's
    assert "size_bytes" not in foreign.metrics


def test_a_segment_that_nobody_has_attached_hangs_on_the_host(world: FakeWorld) -> None:
    world.ipc.shm[3] = row(3, 0)
    look = Look(world, SharedMemoryCollector())
    assert ("Host(box)", "SharedMemory(sysv,3)", "Host") in look.host_edges


def test_a_segment_whose_users_cannot_be_seen_is_a_loss(world: FakeWorld) -> None:
    world.ipc.shm[3] = row(3, 2)
    world.ipc.maps.unreadable = 4
    collector = SharedMemoryCollector()
    Look(world, collector)
    assert collector.losses == {"System V segments whose users cannot be seen": 1}
    assert any(note.count == 4 and note.hint for note in collector.notes.values())


def test_what_only_one_process_has_is_no_exchange(world: FakeWorld) -> None:
    world.process(10)
    world.process(11)
    for inode, mechanism, who in ((1, "memfd", (10,)), (2, "anonymous", (10,)), (3, "memfd", (10, 11))):
        world.ipc.segment(Segment(mechanism, 1, inode, 0, "/memfd:x", True, 4096, users(*who)))  # type: ignore[arg-type]
    look = Look(world, SharedMemoryCollector())
    assert [node.id for node in look.graph.nodes.values() if node.kind == "SharedMemory"] == [
        "SharedMemory(memfd,ino=3,dev=0:1)"
    ]
    assert look.graph.nodes["SharedMemory(memfd,ino=3,dev=0:1)"].attributes["name"] == "x"


def test_named_semaphores_are_left_to_their_collector(world: FakeWorld) -> None:
    world.process(10)
    world.ipc.segment(Segment("posix", DEVICE, 5, 0, "/dev/shm/sem.x", False, 4096, users(10)))
    assert not any(node.kind == "SharedMemory" for node in Look(world, SharedMemoryCollector()).graph.nodes.values())


def test_a_process_that_ended_between_the_scans_is_left_out(world: FakeWorld) -> None:
    a = world.process(10)
    world.ipc.segment(Segment("posix", DEVICE, 5, 0, "/dev/shm/x", False, 4096, users(10, 99)))
    assert set(Look(world, SharedMemoryCollector()).how(POSIX)) == {a}


def test_space_of_our_dev_shm(world: FakeWorld) -> None:
    world.process(10)
    world.ipc.mounts[None] = ShmMount(DEVICE, True, 1000, 250, 3)
    world.ipc.segment(Segment("posix", DEVICE, 5, 0, "/dev/shm/x", False, 4096, users(10)))
    look = Look(world, SharedMemoryCollector())
    assert (POSIX, "Mount(/dev/shm)", "Belong") in look.graph.edges
    node = look.on_host["Mount(/dev/shm)"]
    assert node.metrics["used_bytes"] == 750
    assert node.metrics["used_pct"] == 75.0
    assert ("Host(box)", "Mount(/dev/shm)", "Host") in look.host_edges


def test_space_of_a_container_s_dev_shm(world: FakeWorld) -> None:
    """Docker's default of 64 MiB is what data loaders run full."""
    world.process(10)
    world.process(11)
    world.ipc.mounts[None] = ShmMount(DEVICE, True, 1000, 1000, 0)
    world.ipc.mounts[11] = ShmMount(OTHER, False, 64 << 20, 0, 9)  # of process 10 it may not be asked
    world.ipc.segment(Segment("posix", OTHER, 5, 0, "/dev/shm/x", False, 4096, users(10, 11)))
    look = Look(world, SharedMemoryCollector())
    mount = look.graph.nodes["Mount(/dev/shm,dev=0:55)"]
    assert mount.label == "/dev/shm"
    assert mount.metrics["used_pct"] == 100.0
    assert (f"Container({'c' * 64})", mount.id, "Host") in look.graph.edges
    assert ("SharedMemory(posix,ino=5,dev=0:55)", mount.id, "Belong") in look.graph.edges


def files(world: FakeWorld, **sizes: int) -> None:
    for inode, (name, size) in enumerate(sizes.items(), 100):
        world.ipc.files[DEVICE, inode] = ShmFile(name.replace("__", "."), size, 0)


def test_files_that_nobody_uses(world: FakeWorld) -> None:
    world.ipc.mounts[None] = ShmMount(DEVICE, True, 1000, 250, 3)
    files(world, left=10, sem__jobs=32, **{f"data{number}": 1000 + number for number in range(40)})
    look = Look(world, SharedMemoryCollector())
    drawn = [node for node in look.on_host.values() if node.kind == "SharedMemory"]
    assert [node.label for node in drawn] == [f"data{number}" for number in range(39, 23, -1)]  # the 16 largest
    metrics: dict[str, Any] = look.on_host["Mount(/dev/shm)"].metrics
    assert metrics["unused_files_count"] == 42
    assert metrics["unused_bytes"] == 10 + 32 + sum(range(1000, 1040))


def test_nothing_is_called_unused_while_somebody_cannot_be_seen(world: FakeWorld) -> None:
    world.ipc.mounts[None] = ShmMount(DEVICE, True, 1000, 250, 3)
    files(world, left=10)
    world.procfs.unreadable_pids = 1
    look = Look(world, SharedMemoryCollector())
    assert list(look.on_host) == ["Mount(/dev/shm)"]
    assert "unused_bytes" not in look.on_host["Mount(/dev/shm)"].metrics


def test_processes_not_looked_at_yet_are_counted(world: FakeWorld) -> None:
    world.ipc.maps.pending = 7
    collector = SharedMemoryCollector()
    Look(world, collector)
    assert collector.losses == {"processes whose memory maps were not looked at yet": 7}


def test_no_system_v_in_this_kernel(world: FakeWorld) -> None:
    world.ipc.missing = True
    collector = SharedMemoryCollector()
    Look(world, collector)
    assert any("no System V" in reason for reason in collector.notes)
