"""Ipc: System V tables, POSIX queues, waits, segments joined from mappings and descriptors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from proc_fixture import ProcFixture

from gpuflight.errors import SourceUnavailable
from gpuflight.sources import ipc as ipc_module
from gpuflight.sources.fs import HostFs, Stat
from gpuflight.sources.ipc import Ipc, SysvQueue, SysvSemaphores, SysvSharedMemory, Wait, parse_sysvipc
from gpuflight.sources.maps import parse_shared
from gpuflight.sources.mqueues import parse_mqueue
from gpuflight.sources.procfs import FdIndex, FdRef
from gpuflight.sources.recording import Tape
from gpuflight.sources.segments import (
    Segment,
    Use,
    is_semaphore,
    join,
    list_files,
    mount,
    semaphore_name,
    semaphore_state,
    shared,
    size_bytes,
)

TABLES = Path(__file__).parent.parent / "data" / "sysvipc"


@pytest.fixture
def machine(tmp_path: Path) -> ProcFixture:
    machine = ProcFixture(tmp_path)
    machine.own()
    for table in TABLES.iterdir():
        machine.write(f"/proc/sysvipc/{table.name}", table.read_bytes())
    return machine


def test_system_v_tables(machine: ProcFixture) -> None:
    ipc = Ipc(machine.fs, machine.procfs)
    assert ipc.sysv_shared_memory() == {
        32769: SysvSharedMemory(32769, 0, 0o1600, 12288, 100, 101, 2, 1000, 1700000100, 1700000050, 4096, 0),
        7: SysvSharedMemory(7, -559038737, 0o666, 16, 200, 200, 0, 0, 1700000100, 1700000050, 0, 0),
    }
    assert ipc.sysv_queues() == {3: SysvQueue(3, 123456789, 0o644, 128, 2, 100, 101, 0, 1700000100, 1700000101)}
    assert ipc.sysv_semaphores() == {11: SysvSemaphores(11, 0, 0o600, 2, 0, 1700000100)}


def test_tables_are_read_once_per_round(machine: ProcFixture) -> None:
    ipc = Ipc(machine.fs, machine.procfs)
    assert ipc.sysv_queues()
    machine.write("/proc/sysvipc/msg", (TABLES / "msg").read_text().splitlines()[0] + "\n")
    assert ipc.sysv_queues()
    ipc.begin_round(2)
    assert ipc.sysv_queues() == {}


def test_a_kernel_without_system_v_ipc(tmp_path: Path) -> None:
    machine = ProcFixture(tmp_path)
    ipc = Ipc(machine.fs, machine.procfs)
    with pytest.raises(FileNotFoundError):
        ipc.sysv_queues()
    assert ipc.waits() == {}


def test_a_line_that_is_cut_short_is_left_out() -> None:
    assert parse_sysvipc(b"") == []
    assert parse_sysvipc((TABLES / "msg").read_bytes()[:-30]) == []


def test_who_waits_on_what(machine: ProcFixture) -> None:
    machine.process(10, files={"syscall": "70 0x3 0x7ffe 0x10 0x0 0x0 0x0 0x7ffe 0x7f00\n"})  # msgrcv(3)
    machine.process(11, files={"syscall": "220 0xb 0x7ffe 0x1 0x0 0x0 0x0 0x7ffe 0x7f00\n"})  # semtimedop(11)
    machine.process(12, files={"syscall": "7 0x3 0x7ffe 0x10 0x0 0x0 0x0 0x7ffe 0x7f00\n"})  # poll
    machine.process(13, files={"syscall": "running\n"})
    machine.process(14, files={"syscall": "-1 0x7ffe 0x7f00\n"})
    machine.process(15)  # may not be asked
    machine.process(16, files={"syscall": "70 0x3 0x7ffe 0x10 0x0 0x0 0x0 0x7ffe 0x7f00\n"}, namespaces={"ipc": 77})
    machine.process(17, state="R", files={"syscall": "70 0x3 0x0 0x0 0x0 0x0 0x0 0x0 0x0\n"})
    ipc = Ipc(machine.fs, machine.procfs)
    assert ipc.waits() == {("msg", 3): [Wait(10, "receive")], ("sem", 11): [Wait(11, "operate")]}


def test_the_syscall_numbers_are_the_architecture_s(machine: ProcFixture) -> None:
    machine.write("/proc/sys/kernel/arch", "aarch64\n")
    machine.process(10, files={"syscall": "189 0x3 0x7ffe 0x10 0x0 0x0 0x0 0x7ffe 0x7f00\n"})
    machine.process(11, files={"syscall": "70 0x3 0x7ffe 0x10 0x0 0x0 0x0 0x7ffe 0x7f00\n"})  # preadv
    assert Ipc(machine.fs, machine.procfs).waits() == {("msg", 3): [Wait(10, "send")]}


class ScriptedTape(Tape):
    """Answers semctl instead of the kernel."""

    def __init__(self, pids: list[int]) -> None:
        super().__init__()
        self.pids = pids
        self.asked: list[tuple[str, str]] = []

    def ask(self, source: str, key: str, live: Any) -> bytes:
        self.asked.append((source, key))
        return msgspec.msgpack.encode(self.pids)


def test_semaphore_pids_go_over_the_tape_and_are_bounded(machine: ProcFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_module, "SEMAPHORES_PER_ROUND", 3)
    tape = ScriptedTape([5, 6])
    ipc = Ipc(machine.fs, machine.procfs, tape)
    assert ipc.semaphore_pids(11, 2) == [5, 6]
    assert tape.asked == [("ipc", "sem_pids 11")]
    ipc.semaphore_pids(12, 2)  # one of them is left
    with pytest.raises(SourceUnavailable):
        ipc.semaphore_pids(13, 2)
    ipc.begin_round(2)
    assert ipc.semaphore_pids(13, 2) == [5, 6]


def test_a_fixture_s_semaphores_are_never_asked_of_this_machine(machine: ProcFixture) -> None:
    with pytest.raises(SourceUnavailable):
        Ipc(machine.fs, machine.procfs, Tape.blank()).semaphore_pids(11, 2)


def test_foreign_namespaces(machine: ProcFixture) -> None:
    machine.process(10)
    machine.process(11, namespaces={"ipc": 77})
    machine.process(12, namespaces={"ipc": 77})
    machine.process(13)
    (machine.root / "proc/13/ns/ipc").unlink()  # no right to ask
    ipc = Ipc(machine.fs, machine.procfs)
    assert ipc.foreign_namespaces() == {77: 2}
    assert ipc.ipc_namespace(10) == 0
    with pytest.raises(OSError):
        ipc.ipc_namespace(13)


# POSIX message queues


def test_mqueue_status() -> None:
    assert parse_mqueue(b"QSIZE:129        NOTIFY:2    SIGNO:0     NOTIFY_PID:8260  \n") == {
        "QSIZE": 129,
        "NOTIFY": 2,
        "SIGNO": 0,
        "NOTIFY_PID": 8260,
    }
    assert parse_mqueue(b"80 bytes of something else") is None


def test_queues_listed_by_the_mount(machine: ProcFixture) -> None:
    machine.write("/dev/mqueue/jobs", b"QSIZE:64         NOTIFY:0     SIGNO:0     NOTIFY_PID:0     ".ljust(79) + b"\n")
    machine.write("/dev/mqueue/other", b"not a queue")
    (queue,) = Ipc(machine.fs, machine.procfs).posix_queues().values()
    assert (queue.name, queue.queued_bytes, queue.users, queue.ipc_namespace) == ("/jobs", 64, [], 0)


# segments


def index_of(*paths: tuple[str, FdRef, tuple[int, int] | None]) -> FdIndex:
    index = FdIndex()
    for path, ref, inode in paths:
        index.paths.setdefault(path, []).append(ref)
        if inode is not None:
            index.inodes[ref] = inode
    return index


DEVICE = os.makedev(0, 0x1B)


def test_join_by_device_and_inode_whatever_the_name_is() -> None:
    maps = {
        10: parse_shared(b"1000-3000 rw-s 00000000 00:1b 5 /dev/shm/sem.Xy12Za (deleted)\n"),
        11: parse_shared(b"1000-2000 r--s 00000000 00:1b 5 /dev/shm/sem.jobs\n"),
        12: parse_shared(b"1000-2000 rw-s 00000000 00:1c 5 /dev/shm/sem.jobs\n"),  # another container's
    }
    index = index_of(("/dev/shm/sem.jobs", FdRef(13, 3, True, False), (DEVICE, 5)))
    found = join(maps, index, lambda pid: 0)
    assert len(found) == 2
    segment = found["posix", DEVICE, 5, 0]
    assert segment.name == "/dev/shm/sem.jobs"
    assert not segment.deleted
    assert segment.users == {
        10: Use(0x2000, 0, True, True),
        11: Use(0x1000, 0, True, False),
        13: Use(0, 1, True, False),
    }


def test_the_same_number_in_two_ipc_namespaces_is_two_segments() -> None:
    raw = b"1000-2000 rw-s 00000000 00:01 0 /SYSV00000000 (deleted)\n"
    maps = {10: parse_shared(raw), 11: parse_shared(raw), 12: parse_shared(raw)}

    def namespace(pid: int) -> int:
        if pid == 12:
            raise ProcessLookupError
        return 77 if pid == 11 else 0

    found = join(maps, FdIndex(), namespace)
    assert {key[3]: set(segment.users) for key, segment in found.items()} == {0: {10}, 77: {11}}


def test_a_descriptor_whose_file_could_not_be_asked_is_left_out() -> None:
    index = index_of(("/memfd:x (deleted)", FdRef(13, 3, True, True), None))
    assert join({}, index, lambda pid: 0) == {}


def test_what_counts_as_exchange() -> None:
    reader, writer = Use(1, 0, True, False), Use(1, 0, True, True)

    def segment(mechanism: Any, *users: Use) -> Segment:
        return Segment(mechanism, 1, 1, users=dict(enumerate(users)))

    drawn = [segment("posix"), segment("sysv"), segment("memfd", reader, reader), segment("file", reader, writer)]
    left = [segment("memfd", writer), segment("anonymous", writer), segment("file", reader, reader)]
    assert shared([*drawn, *left]) == drawn


class OneFile(HostFs):
    """Knows the status and content of single paths."""

    def __init__(self, stats: dict[str, Stat], content: bytes = b"") -> None:
        super().__init__()
        self.stats = stats
        self.content = content

    def stat(self, path: str) -> Stat:
        if path not in self.stats:
            raise FileNotFoundError(2, "no", path)
        return self.stats[path]

    def read_record(self, path: str) -> bytes:
        return self.content


def test_the_size_is_that_of_the_same_file() -> None:
    segment = Segment("posix", DEVICE, 5, ways=["/a", "/b", "/c"])
    other, same = Stat(0o100600, 6, DEVICE, 0, 0, 111), Stat(0o100600, 5, DEVICE, 0, 0, 222)
    assert size_bytes(OneFile({"/a": other, "/c": same}), segment) == 222
    assert size_bytes(OneFile({"/a": other}), segment) is None  # the name was given to another file


@pytest.mark.parametrize(
    ("name", "deleted", "extent", "expected"),
    [
        ("/dev/shm/sem.jobs", False, 4096, True),
        ("/dev/shm/sem.Xy12Za", True, 4096, True),
        ("/dev/shm/Xy12Za", True, 4096, True),  # glibc before 2.34
        ("/dev/shm/Xy12Za", False, 4096, False),
        ("/dev/shm/Xy12Za", True, 1 << 20, False),
        ("/dev/shm/psm_1234abcd", True, 4096, False),
    ],
)
def test_what_is_a_semaphore(name: str, deleted: bool, extent: int, expected: bool) -> None:
    assert is_semaphore(Segment("posix", 1, 1, name=name, deleted=deleted, extent_bytes=extent)) is expected
    assert not is_semaphore(Segment("memfd", 1, 1, name=name, deleted=deleted))


def test_the_name_of_a_semaphore_comes_from_the_folder_if_only_its_maker_is_known(machine: ProcFixture) -> None:
    machine.write("/dev/shm/sem.jobs", bytes(32))
    files, left = list_files(machine.fs)
    (device, inode) = next(iter(files))
    assert left == 0
    made = Segment("posix", device, inode, name="/dev/shm/sem.Xy12Za", deleted=True)
    assert semaphore_name(made, files) == "/jobs"
    assert semaphore_name(made, {}) == ""
    opened = Segment("posix", device, inode + 1, name="/dev/shm/sem.other", deleted=False)
    assert semaphore_name(opened, files) == "/other"


def test_the_state_of_a_semaphore() -> None:
    segment = Segment("posix", DEVICE, 5, ways=["/a"])
    stat = Stat(0o100600, 5, DEVICE, 0, 0, 32)
    state = semaphore_state(
        OneFile({"/a": stat}, (3).to_bytes(4, "little") + (2).to_bytes(4, "little") + bytes(24)), segment
    )
    assert state == (3, 2)
    assert semaphore_state(OneFile({"/a": stat._replace(size=16)}, bytes(16)), segment) is None
    assert semaphore_state(OneFile({}), segment) is None


def test_dev_shm_that_is_an_ordinary_folder_has_no_space_of_its_own(machine: ProcFixture) -> None:
    machine.write("/dev/shm/x", b"")
    assert mount(machine.fs) is None
    with pytest.raises(OSError):
        mount(machine.fs, 10)
