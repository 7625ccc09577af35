"""Shared mappings of /proc/PID/maps: parsing, and which processes are read in which round."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuflight.sources import maps as maps_module
from gpuflight.sources.maps import SharedMaps, mechanism_of, parse_shared

PYTHON = b"""\
55d0c0a00000-55d0c0a01000 r--p 00000000 fe:00 1234                       /usr/bin/python3.11
7f8bff800000-7f8bff802000 rw-s 00000000 00:01 32769                      /SYSV0000abcd (deleted)
7f8bff828000-7f8bff82a000 rw-s 00000000 00:01 1025                       /dev/zero (deleted)
7f8c00555000-7f8c00556000 rw-s 00000000 00:01 1026                       /memfd:hi there-s  x (deleted)
7f8c00556000-7f8c00557000 rw-s 00000000 00:1b 3                          /dev/shm/sem.MrgA4d (deleted)
7f8c00557000-7f8c00558000 r--s 00000000 00:1b 2                          /dev/shm/a file
7f8c00558000-7f8c0055a000 -w-s 00002000 00:1b 2                          /dev/shm/a file
7f8c0055a000-7f8c0055f000 r-xs 00000000 fe:00 325737                     /usr/lib/gconv-modules.cache
7f8c00560000-7f8c00570000 rw-s 00000000 00:06 99                         /dev/nvidia0
7f8c00570000-7f8c00580000 rw-s 00000000 00:0f 1063                       anon_inode:[io_uring]
7f8c00580000-7f8c00590000 rw-s 00000000 00:01 7                          /drm mm object (deleted)
7f8c00590000-7f8c00591000 rw-p 00000000 00:00 0
7f8c00591000-7f8c00592000 rw-p 00000000 fe:00 7                          /tmp/rw-s is my name
7ffd0c9f0000-7ffd0ca11000 rw-p 00000000 00:00 0                          [stack]
"""


def test_parse() -> None:
    found = {(m.mechanism, m.inode): m for m in parse_shared(PYTHON)}
    assert set(found) == {
        ("sysv", 32769),
        ("anonymous", 1025),
        ("memfd", 1026),
        ("posix", 3),
        ("posix", 2),
        ("file", 325737),
    }
    shm = found["posix", 2]
    assert (shm.name, shm.deleted, shm.readable, shm.writable) == ("/dev/shm/a file", False, True, True)
    assert shm.device == os.makedev(0, 0x1B)
    assert (shm.mapped_bytes, shm.extent_bytes) == (0x3000, 0x4000)
    assert shm.address_range == "7f8c00557000-7f8c00558000"
    assert found["posix", 3].deleted
    assert found["memfd", 1026].name == "/memfd:hi there-s  x"
    assert not found["file", 325737].writable


def test_no_shared_mapping_and_no_final_newline() -> None:
    assert parse_shared(b"") == ()
    assert parse_shared(b"55d0-55d1 r--p 0 fe:00 1 /bin/sh\n") == ()
    (only,) = parse_shared(b"1000-3000 rw-s 00000000 00:1b 2 /dev/shm/x")
    assert only.mapped_bytes == 0x2000


@pytest.mark.parametrize(
    ("path", "mechanism"),
    [
        (b"/dev/shm/x", "posix"),
        (b"/run/shm/x", "posix"),
        (b"/SYSV00000000 (deleted)", "sysv"),
        (b"/memfd:x (deleted)", "memfd"),
        (b"/anon_hugepage (deleted)", "anonymous"),
        (b"/dev/hugepages/x", "file"),
        (b"/data/index.lmdb", "file"),
        (b"/dev/nvidiactl", None),
        (b"/dmabuf:", None),
        (b"socket:[7]", None),
        (b"anon_inode:[perf_event]", None),
    ],
)
def test_mechanisms(path: bytes, mechanism: str | None) -> None:
    assert mechanism_of(path) == mechanism


_LINES = st.tuples(
    st.integers(1, 2**40),
    st.integers(1, 2**20),
    st.sampled_from(["rw-s", "r--s", "rw-p", "rwxs", "---p", "r-xs"]),
    st.sampled_from(
        ["/dev/shm/a", "/dev/shm/b-s c", "/memfd:xs y (deleted)", "/lib/x.so", "[heap]", "", "/SYSV (deleted)"]
    ),
)


@given(st.lists(_LINES, max_size=20))
def test_searching_finds_what_splitting_finds(lines: list[tuple[int, int, str, str]]) -> None:
    raw = "".join(
        f"{low:x}-{low + size:x} {perms} 00000000 00:1b {len(name)} {name}\n" for low, size, perms, name in lines
    )
    expected: dict[tuple[str, int], int] = {}
    for _, size, perms, name in lines:
        mechanism = mechanism_of(name.encode())
        if perms[3] == "s" and mechanism:
            expected[mechanism, len(name)] = expected.get((mechanism, len(name)), 0) + size
    assert {(m.mechanism, m.inode): m.mapped_bytes for m in parse_shared(raw.encode())} == expected


SHM = b"1000-2000 rw-s 00000000 00:1b 2 /dev/shm/x\n"
PLAIN = b"1000-2000 r--p 00000000 fe:00 2 /bin/x\n"


class Stat:
    def __init__(self, pid: int, start: int = 1, ppid: int = 0, kernel: bool = False) -> None:
        self.pid, self.start, self.ppid, self.kernel_thread, self.state = pid, start, ppid, kernel, "S"


class Index:
    def __init__(self) -> None:
        self.paths: dict[str, list[Any]] = {}


class FakeProcFs:
    """Processes by pid with their maps; counts who is read."""

    def __init__(self) -> None:
        self.stats: dict[int, Stat] = {}
        self.raw: dict[int, bytes | OSError] = {}
        self.shared_kb: dict[int, int] = {}
        self.index = Index()
        self.read: list[int] = []

    def add(self, pid: int, raw: bytes | OSError, shared_kb: int = 0, ppid: int = 0) -> None:
        self.stats[pid] = Stat(pid, ppid=ppid)
        self.raw[pid], self.shared_kb[pid] = raw, shared_kb

    def runs(self, pid: int) -> None:
        """What a changed stat record looks like: another object."""
        self.stats[pid] = Stat(pid, self.stats[pid].start, self.stats[pid].ppid)

    def processes(self) -> dict[int, Stat]:
        return dict(self.stats)

    def fds(self) -> Index:
        return self.index

    def status(self, pid: int) -> dict[str, str]:
        return {"RssShmem": f"{self.shared_kb[pid]} kB"}

    def maps(self, pid: int) -> bytes:
        self.read.append(pid)
        raw = self.raw[pid]
        if isinstance(raw, OSError):
            raise raw
        return raw


class Scan:
    def __init__(self, procfs: FakeProcFs) -> None:
        self.procfs = procfs
        self.maps = SharedMaps(procfs)  # type: ignore[arg-type]
        self.number = 0

    def __call__(self) -> tuple[set[int], list[int]]:
        """(pids with shared mappings, pids whose maps were read in this round)."""
        self.number += 1
        self.procfs.read.clear()
        self.maps.begin_round(self.number)
        found = set(self.maps.scan())
        self.maps.scan()  # a second asker in the same round costs nothing
        return found, list(self.procfs.read)


def test_the_first_round_finds_all_and_the_next_reads_nothing() -> None:
    procfs = FakeProcFs()
    procfs.add(1, PLAIN)
    procfs.add(2, SHM, shared_kb=4)
    procfs.add(3, SHM)  # nobody touched it yet
    scan = Scan(procfs)
    assert scan() == ({2, 3}, [2, 1, 3])
    assert scan() == ({2, 3}, [])
    assert scan.maps.pending == 0


def test_a_holder_that_ran_is_read_again_and_an_idle_one_is_not() -> None:
    procfs = FakeProcFs()
    procfs.add(1, SHM, shared_kb=4)
    procfs.add(2, SHM, shared_kb=4)
    scan = Scan(procfs)
    scan()
    procfs.raw[1] = PLAIN  # unmapped it
    procfs.shared_kb[1] = 0
    procfs.runs(1)
    assert scan() == ({2}, [1])


def test_a_process_that_begins_to_share_is_found_when_it_ran() -> None:
    procfs = FakeProcFs()
    procfs.add(1, PLAIN)
    scan = Scan(procfs)
    assert scan() == (set(), [1])
    procfs.raw[1] = SHM
    procfs.runs(1)
    assert scan() == (set(), [])  # ran, but no page of shared memory is resident
    procfs.shared_kb[1] = 4
    procfs.runs(1)
    assert scan() == ({1}, [1])


def test_an_open_segment_makes_a_holder() -> None:
    procfs = FakeProcFs()
    procfs.add(1, PLAIN)
    scan = Scan(procfs)
    scan()
    procfs.raw[1] = SHM
    procfs.index.paths["/memfd:x (deleted)"] = [Stat(1)]
    procfs.runs(1)
    assert scan() == ({1}, [1])


def test_everybody_is_looked_at_again_after_the_rotation() -> None:
    procfs = FakeProcFs()
    procfs.add(1, PLAIN)
    scan = Scan(procfs)
    scan()
    procfs.raw[1] = SHM
    found_in = next(number for number in range(2, 200) if scan()[0])
    assert found_in == 1 + maps_module.ROTATION


def test_an_unreadable_process_stops_nothing() -> None:
    """Defect 12 of the reference system: its scan ended there."""
    procfs = FakeProcFs()
    procfs.add(1, PermissionError(13, "denied"), shared_kb=4)
    procfs.add(2, ProcessLookupError(3, "gone"), shared_kb=4)
    procfs.add(3, SHM, shared_kb=4)
    scan = Scan(procfs)
    found, read = scan()
    assert found == {3}
    assert sorted(read) == [1, 2, 3]
    assert scan.maps.unreadable == 1
    procfs.runs(1)
    assert scan()[1] == []  # not asked again every round
    assert scan.maps.unreadable == 1


def test_a_reused_pid_is_another_process() -> None:
    procfs = FakeProcFs()
    procfs.add(1, SHM, shared_kb=4)
    scan = Scan(procfs)
    scan()
    procfs.stats[1] = Stat(1, start=99)
    procfs.raw[1], procfs.shared_kb[1] = PLAIN, 0
    assert scan() == (set(), [1])
    del procfs.stats[1]
    scan()
    assert scan.maps._kept == {}


def test_kernel_threads_are_not_asked() -> None:
    procfs = FakeProcFs()
    procfs.add(1, SHM, shared_kb=4)
    procfs.stats[1] = Stat(1, kernel=True)
    assert Scan(procfs)() == (set(), [])


def test_bounds_delay_but_lose_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps_module, "OTHERS_BYTES", 3 * len(PLAIN))
    monkeypatch.setattr(maps_module, "HOLDER_BYTES", 2 * len(SHM))
    procfs = FakeProcFs()
    for pid in range(1, 6):
        procfs.add(pid, SHM, shared_kb=4)
    for pid in range(11, 18):
        procfs.add(pid, PLAIN)
    scan = Scan(procfs)
    assert len(scan()[0]) == 2
    assert scan.maps.pending == 3 + 4
    assert len(scan()[0]) == 4
    assert len(scan()[0]) == 5
    assert scan.maps.pending == 0


def test_children_of_holders_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps_module, "OTHERS_BYTES", 1)
    procfs = FakeProcFs()
    procfs.add(10, SHM, shared_kb=4)
    procfs.add(11, PLAIN)
    procfs.add(12, SHM, ppid=10)  # inherited by fork and not touched: no page of it is resident yet
    assert Scan(procfs)()[0] == {10, 12}
