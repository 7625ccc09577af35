"""Who holds what open: what is classified how, what is read again when, and whose files are never touched."""

from __future__ import annotations

import pytest
from tests.fakes.proc import FIFO, KERNEL_THREAD, FakeProc

from gpuflight.sources.procfs import FdRef
from gpuflight.sources.procfs import fds as module
from gpuflight.sources.procfs.mounts import parse_mounts


@pytest.fixture
def proc() -> FakeProc:
    proc = FakeProc()
    proc.add(1, "systemd", ppid=0)
    proc.add(42, "python")
    proc.add(43, "worker")
    return proc


def links_read(proc: FakeProc, pid: int) -> int:
    return proc.fs.count("link", beginning=f"/proc/{pid}/fd/")


def test_kinds_of_descriptor(proc: FakeProc) -> None:
    proc.open(42, 0, "/dev/null")
    proc.open(42, 1, "/dev/pts/3")
    proc.open(42, 2, "socket:[100]")
    proc.open(42, 3, "pipe:[200]", mode=0o300)
    proc.open(43, 0, "pipe:[200]", mode=0o500)
    proc.open(42, 4, "anon_inode:[eventfd]")
    proc.open(42, 5, "anon_inode:[eventfd]")
    proc.open(42, 6, "anon_inode:inotify")
    proc.open(42, 7, "/dev/nvidia0")
    proc.open(42, 8, "/memfd:cache (deleted)", inode=8)
    proc.open(43, 8, "/memfd:cache (deleted)", inode=9)
    proc.open(42, 9, "/dev/shm/weights", inode=10)
    proc.open(42, 10, "/queue", inode=11)
    proc.open(42, 11, "/var/log/app.log", inode=12)
    proc.open(42, 12, "/run/app.fifo", mode=0o500, inode=13, kind=FIFO)
    proc.open(42, 13, "/tmp/gone (deleted)", inode=14)
    proc.open(42, 14, "net:[4026531840]")
    proc.next_round()
    index = proc.procfs.fds()
    assert index.sockets == {100: (FdRef(42, 2, True, True),)}
    assert index.pipes == {200: [FdRef(42, 3, False, True), FdRef(43, 0, True, False)]}
    assert index.anon == {"eventfd": {42: 2}, "inotify": {42: 1}}
    assert set(index.paths) == {
        *(
            "/dev/nvidia0",
            "/memfd:cache (deleted)",
            "/dev/shm/weights",
            "/queue",
            "/run/app.fifo",
            "/tmp/gone (deleted)",
        )
    }
    assert {index.inodes[ref] for ref in index.paths["/memfd:cache (deleted)"]} == {(5, 8), (5, 9)}
    assert index.fifos == {(5, 13): [FdRef(42, 12, True, False)]}
    assert index.fifo_paths == {(5, 13): "/run/app.fifo"}
    assert index.counts == {1: 0, 42: 15, 43: 2}
    assert index.holders(("/dev/nvidia",)) == {42}
    assert index.unreadable_pids == 0


def test_one_scan_per_round(proc: FakeProc) -> None:
    proc.open(42, 2, "socket:[100]")
    proc.next_round()
    assert proc.procfs.fds() is proc.procfs.fds()
    assert links_read(proc, 42) == 1


def test_kernel_threads_and_zombies_are_not_looked_into(proc: FakeProc) -> None:
    proc.add(2, "kthreadd", ppid=0, flags=KERNEL_THREAD)
    proc.add(50, "gone", state="Z")
    proc.next_round()
    proc.procfs.fds()
    for pid in (2, 50):
        assert proc.fs.count("stat", beginning=f"/proc/{pid}/fd") + proc.fs.count("list", f"/proc/{pid}/fd") == 0


def test_a_process_that_did_nothing_is_not_read_again(proc: FakeProc) -> None:
    proc.open(42, 2, "socket:[100]")
    proc.next_round()
    proc.procfs.fds()
    proc.next_round()
    index = proc.procfs.fds()
    assert links_read(proc, 42) == 1
    assert index.sockets == {100: (FdRef(42, 2, True, True),)}


def test_a_process_that_ran_is_read_again(proc: FakeProc) -> None:
    """Closed and opened under the same number: the count is as before, only the link tells."""
    proc.open(42, 3, "pipe:[200]", mode=0o300)
    proc.next_round()
    proc.procfs.fds()
    proc.change(42, minflt=1)
    proc.open(42, 3, "pipe:[201]", mode=0o500)
    proc.next_round()
    assert proc.procfs.fds().pipes == {201: [FdRef(42, 3, True, False)]}


def test_a_process_that_holds_more_than_before_is_read_again(proc: FakeProc) -> None:
    """It did not run a tick, but closed one, opened two, and so one has a number that is known."""
    proc.open(42, 3, "pipe:[200]")
    proc.next_round()
    proc.procfs.fds()
    proc.open(42, 3, "pipe:[201]")
    proc.open(42, 4, "pipe:[202]")
    for _ in range(2):
        proc.next_round()
        index = proc.procfs.fds()
    assert set(index.pipes) == {201, 202}


@pytest.mark.parametrize("kernel_counts_fds", [True, False])
def test_a_new_descriptor_of_an_idle_process_is_seen_within_two_rounds(kernel_counts_fds: bool) -> None:
    proc = FakeProc()
    proc.kernel_counts_fds = kernel_counts_fds
    proc.add(42, "python")
    proc.next_round()
    proc.procfs.fds()
    proc.open(42, 3, "pipe:[200]")
    for _ in range(2):
        proc.next_round()
        index = proc.procfs.fds()
    assert 200 in index.pipes


def test_an_idle_process_is_read_again_in_turns(proc: FakeProc) -> None:
    proc.open(42, 3, "pipe:[200]")
    proc.next_round()
    proc.procfs.fds()
    proc.open(42, 3, "pipe:[201]")
    for _ in range(module.IDLE_ROTATION):
        proc.next_round()
        index = proc.procfs.fds()
    assert set(index.pipes) == {201}


def test_of_many_descriptors_a_part_is_read_each_round(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGE", 10)
    for fd in range(80):
        proc.open(42, fd, f"socket:[{1000 + fd}]")
    proc.next_round()
    proc.procfs.fds()
    for fd in range(80):
        proc.open(42, fd, f"socket:[{2000 + fd}]")
    proc.open(42, 80, "socket:[3000]")
    for number in range(module.ROTATION):
        before = links_read(proc, 42)
        proc.change(42, utime=number + 1)
        proc.next_round()
        index = proc.procfs.fds()
        assert links_read(proc, 42) - before <= 80 / module.ROTATION + 2
        assert 3000 in index.sockets  # a new number at once
    assert set(index.sockets) == {*range(2000, 2080), 3000}


def test_unowned_sockets_are_looked_for_at_once(proc: FakeProc) -> None:
    proc.open(42, 3, "socket:[100]")
    proc.next_round()
    proc.procfs.fds()
    proc.open(42, 3, "socket:[101]")
    proc.next_round()
    assert set(proc.procfs.fds().sockets) == {100}
    index = proc.procfs.fds(verify_sockets={101})
    assert index.sockets == {101: (FdRef(42, 3, True, True),)}
    assert proc.procfs.fds() is index


def test_sockets_of_nobody_are_looked_for_once(proc: FakeProc) -> None:
    proc.open(42, 3, "socket:[100]")
    proc.next_round()
    proc.procfs.fds(verify_sockets={999})
    proc.next_round()
    proc.procfs.fds()
    proc.procfs.fds(verify_sockets={999})
    before = links_read(proc, 42)
    proc.next_round()
    proc.procfs.fds()
    proc.procfs.fds(verify_sockets={999})
    assert links_read(proc, 42) == before


def test_a_process_we_may_not_look_into_is_counted_and_costs_only_itself(proc: FakeProc) -> None:
    proc.open(42, 3, "pipe:[200]")
    proc.open(43, 3, "pipe:[200]")
    proc.fs.denied.add("/proc/42/fd/3")  # may be listed, not followed
    proc.next_round()
    index = proc.procfs.fds()
    assert index.pipes == {200: [FdRef(43, 3, True, True)]}
    assert index.unreadable_pids == 1
    assert index.counts[42] == 1
    proc.fs.denied.clear()
    for _ in range(module.IDLE_ROTATION):
        proc.next_round()
        index = proc.procfs.fds()
    assert index.unreadable_pids == 0
    assert len(index.pipes[200]) == 2


def test_a_process_that_ends_while_being_looked_into(proc: FakeProc) -> None:
    proc.open(42, 3, "pipe:[200]")
    proc.open(43, 3, "pipe:[200]")
    procfs = proc.next_round()
    procfs.processes()
    proc.end(42)
    assert procfs.fds().pipes == {200: [FdRef(43, 3, True, True)]}


def test_a_pid_given_to_another_process_is_read_anew(proc: FakeProc) -> None:
    proc.open(42, 3, "pipe:[200]")
    proc.next_round()
    proc.procfs.fds()
    proc.end(42)
    proc.add(42, "other", start=9)
    proc.open(42, 3, "pipe:[300]")
    proc.next_round()
    assert set(proc.procfs.fds().pipes) == {300}


def test_files_on_remote_file_systems_are_never_touched(proc: FakeProc) -> None:
    """A stat on a dead NFS server blocks for ever."""
    proc.fs.files["/proc/42/mountinfo"] = (
        b"1 0 0:1 / / rw - ext4 /dev/vda rw\n"
        b"2 1 0:9 / /data rw - nfs4 server:/x rw\n"
        b"3 1 0:8 / /my\\040disk rw - fuse.sshfs x rw\n"
        b"4 2 0:7 / /data/local rw - xfs /dev/vdb rw\n"
    )
    proc.open(42, 3, "/data/set.bin", inode=1)
    proc.open(42, 4, "/data/gone (deleted)", inode=2)
    proc.open(42, 5, "/my disk/x", inode=3)
    proc.open(42, 6, "/data/local/fifo", inode=4, kind=FIFO)
    proc.next_round()
    index = proc.procfs.fds()
    assert set(index.paths) == {"/data/gone (deleted)", "/data/local/fifo"}
    assert [fd for fd in (3, 4, 5, 6) if proc.fs.asked["stat", f"/proc/42/fd/{fd}"]] == [6]


def test_nothing_is_touched_where_the_mounts_cannot_be_read(proc: FakeProc) -> None:
    del proc.fs.files["/proc/42/mountinfo"]
    proc.open(42, 3, "/run/fifo", inode=4, kind=FIFO)
    proc.next_round()
    proc.procfs.fds()
    assert proc.fs.asked["stat", "/proc/42/fd/3"] == 0


def test_of_two_mounts_on_one_point_the_later_counts() -> None:
    mounts = parse_mounts(b"1 0 0:1 / /x rw - ext4 a rw\n2 1 0:2 / /x rw shared:1 - nfs b rw\nbroken line\n")
    assert mounts == [("/x/", False), ("/x/", True)]
