"""The message queue collector: who is believed to have used a queue, and who is not."""

from __future__ import annotations

import pytest
from fake_ipc import BOOT_S, FakeWorld, Look

from gpuflight.collectors.message_queues import MessageQueuesCollector
from gpuflight.sources.ipc import SysvQueue, Wait
from gpuflight.sources.mqueues import PosixQueue
from gpuflight.sources.procfs import FdRef

QUEUE = "MessageQueue(sysv,3)"


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


def queue(sender: int, receiver: int, sent: int = BOOT_S + 100, received: int = BOOT_S + 100) -> SysvQueue:
    return SysvQueue(3, 0x1234, 0o600, 64, 2, sender, receiver, 0, sent, received)


def test_last_sender_and_receiver(world: FakeWorld) -> None:
    a, b = world.process(10), world.process(11)
    world.ipc.msg[3] = queue(10, 11)
    look = Look(world, MessageQueuesCollector())
    assert look.how(QUEUE) == {a: {"how": "sent"}, b: {"how": "received"}}
    node = look.graph.nodes[QUEUE]
    assert node.metrics == {"queued_bytes": 64, "messages_count": 2, "waiting_count": 0}
    assert node.attributes == {"sysv_key": "0x00001234", "owner_uid": 0}
    assert node.unknown == {"limit_bytes": "kernel.msgmnb cannot be read"}
    world.ipc.msgmnb = 16384
    assert Look(world, MessageQueuesCollector()).graph.nodes[QUEUE].metrics["limit_bytes"] == 16384


def test_a_process_that_started_after_the_message_is_not_its_sender(world: FakeWorld) -> None:
    """The pid was reused: the process that has it now began 50 s after the last message."""
    world.process(10, start=15_000)
    world.ipc.msg[3] = queue(10, 0)
    collector = MessageQueuesCollector()
    look = Look(world, collector)
    assert look.how(QUEUE) == {}
    assert QUEUE in look.on_host  # nobody is known: it hangs on the host
    assert ("Host(box)", QUEUE, "Host") in look.host_edges
    assert collector.losses == {"last users of System V queues, ended since": 1}


@pytest.mark.parametrize(("start", "believed"), [(10_000, True), (10_150, True), (10_250, False)])
def test_whole_seconds_in_the_table_are_allowed_for(world: FakeWorld, start: int, believed: bool) -> None:
    world.process(10, start=start)
    world.ipc.msg[3] = queue(10, 0)
    assert bool(Look(world, MessageQueuesCollector()).how(QUEUE)) is believed


def test_a_process_of_another_ipc_namespace_is_not_the_one(world: FakeWorld) -> None:
    world.process(10)
    world.ipc.namespaces[10] = 77
    world.ipc.msg[3] = queue(10, 0)
    assert Look(world, MessageQueuesCollector()).how(QUEUE) == {}


def test_without_the_right_to_ask_for_the_namespace_pid_and_time_have_to_do(world: FakeWorld) -> None:
    a = world.process(10)
    world.ipc.namespaces[10] = PermissionError(13, "denied")
    world.ipc.msg[3] = queue(10, 0)
    assert set(Look(world, MessageQueuesCollector()).how(QUEUE)) == {a}


def test_earlier_users_are_remembered_while_they_and_the_queue_live(world: FakeWorld) -> None:
    collector = MessageQueuesCollector()
    a, b = world.process(10), world.process(11)
    world.ipc.msg[3] = queue(10, 10)
    Look(world, collector)
    world.ipc.msg[3] = queue(11, 11)
    assert Look(world, collector).how(QUEUE) == {a: {"how": "received, sent"}, b: {"how": "received, sent"}}
    world.process(10, start=2000)  # ended, and the pid is another process's
    assert set(Look(world, collector).how(QUEUE)) == {b}
    del world.ipc.msg[3]
    Look(world, collector)
    world.ipc.msg[3] = queue(0, 0)
    assert Look(world, collector).how(QUEUE) == {}


def test_who_waits_is_seen_and_said(world: FakeWorld) -> None:
    collector = MessageQueuesCollector()
    a = world.process(10)
    world.ipc.msg[3] = queue(0, 0)
    world.ipc.waiting["msg", 3] = [Wait(10, "receive")]
    look = Look(world, collector)
    assert look.how(QUEUE) == {a: {"how": "waited to receive", "waiting": True}}
    assert look.graph.nodes[QUEUE].metrics["waiting_count"] == 1
    world.ipc.waiting.clear()
    assert Look(world, collector).how(QUEUE) == {a: {"how": "waited to receive"}}


def posix(
    name: str, inode: int, *users: FdRef, deleted: bool = False, namespace: int = 0, notify: int = 0
) -> PosixQueue:
    return PosixQueue(name, 20, inode, deleted, namespace, 5, notify, list(users))


def test_posix_queues_go_by_who_has_them_open(world: FakeWorld) -> None:
    a, b = world.process(10), world.process(11)
    world.ipc.queues = [
        posix("/jobs", 1, FdRef(10, 3, False, True), FdRef(11, 3, True, False), FdRef(11, 4, False, True), notify=11),
        posix("/jobs", 2, FdRef(10, 4, True, False), deleted=True),
        posix("/jobs", 3, FdRef(10, 5, True, False), namespace=77),
        posix("/idle", 4),
        posix("/gone", 5, FdRef(99, 5, True, False)),
    ]
    look = Look(world, MessageQueuesCollector())
    assert look.how("MessageQueue(posix,/jobs)") == {
        a: {"how": "open", "ends": "w"},
        b: {"how": "open", "ends": "rw", "notified": True},
    }
    assert look.how("MessageQueue(posix,/jobs,ino=2)") == {a: {"how": "open", "ends": "r"}}
    assert look.how("MessageQueue(posix,/jobs,ipcns=77)") == {a: {"how": "open", "ends": "r"}}
    assert set(look.on_host) == {"MessageQueue(posix,/idle)", "MessageQueue(posix,/gone)"}
    node = look.graph.nodes["MessageQueue(posix,/jobs)"]
    assert node.metrics == {"queued_bytes": 5}
    assert node.unknown is not None
    assert "messages_count" in node.unknown


def test_a_queue_that_may_not_be_opened_is_unknown_not_empty(world: FakeWorld) -> None:
    world.process(10)
    world.ipc.queues = [posix("/jobs", 1, FdRef(10, 3, True, True))._replace(queued_bytes=None)]
    node = Look(world, MessageQueuesCollector()).graph.nodes["MessageQueue(posix,/jobs)"]
    assert node.metrics == {}
    assert node.unknown is not None
    assert "queued_bytes" in node.unknown


def test_what_cannot_be_seen_is_said(world: FakeWorld) -> None:
    collector = MessageQueuesCollector()
    world.ipc.foreign = {77: 3, 78: 1}
    world.procfs.unreadable_pids = 5
    Look(world, collector)
    counts = sorted((note.count, bool(note.hint)) for note in collector.notes.values())
    assert counts == [(2, True), (5, True)]
    world.ipc.missing = True
    Look(world, collector)
    assert any("no System V" in reason for reason in collector.notes)
