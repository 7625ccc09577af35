"""ProcFs: one pass per round, what is kept between rounds, and processes that come, go and change meanwhile."""

from __future__ import annotations

import struct
import threading

import pytest
from tests.fakes.proc import FakeFs, FakeProc

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.clock import ManualClock
from gpuflight.sources.procfs import ProcFs, source


@pytest.fixture
def proc() -> FakeProc:
    proc = FakeProc()
    proc.add(1, "systemd", ppid=0)
    proc.add(42, "python", argv=["python", "train.py"], uid=1000)
    proc.add(43, "sleep", ppid=42)
    return proc


def test_one_pass_per_round_however_often_asked(proc: FakeProc) -> None:
    procfs = proc.next_round()
    first = procfs.processes()
    assert procfs.processes() is first
    assert list(first) == [1, 42, 43]
    assert procfs.id_of(42) == "Process(pid=42,start=420)"
    assert procfs.id_of(99) is None
    assert proc.fs.count("read", "/stat") == 3


def test_a_process_that_did_nothing_is_the_very_same_object(proc: FakeProc) -> None:
    before = proc.next_round().processes()
    proc.change(43, utime=5)
    after = proc.next_round().processes()
    assert after[42] is before[42]
    assert after[43] is not before[43]
    assert after[43].cpu_ticks == 5


def test_a_process_that_vanishes_mid_scan_costs_only_itself(proc: FakeProc) -> None:
    def vanish(path: str) -> None:
        if path == "/proc/42/stat" and 42 in proc.processes:
            proc.end(42)

    proc.fs.on_read = vanish
    procfs = proc.next_round()
    assert list(procfs.processes()) == [1, 43]
    assert (procfs.vanished, procfs.unreadable) == (1, 0)


@pytest.mark.parametrize("record", [b"", b"42 (python) S 1"])
def test_an_empty_or_cut_record_costs_only_that_process(proc: FakeProc, record: bytes) -> None:
    proc.fs.files["/proc/42/stat"] = record
    procfs = proc.next_round()
    assert list(procfs.processes()) == [1, 43]
    assert (procfs.vanished, procfs.unreadable) == (0, 1)


def test_a_directory_without_stat_and_one_we_may_not_read(proc: FakeProc) -> None:
    del proc.fs.files["/proc/42/stat"]
    proc.fs.denied.add("/proc/43")
    procfs = proc.next_round()
    assert list(procfs.processes()) == [1]
    assert (procfs.vanished, procfs.unreadable) == (1, 1)


def test_no_proc_at_all() -> None:
    procfs = ProcFs(FakeFs(), ManualClock())
    with pytest.raises(SourceUnavailable, match="/proc cannot be listed"):
        procfs.processes()


def test_facts_are_read_once_and_again_after_exec(proc: FakeProc) -> None:
    procfs = proc.next_round()
    procfs.processes()
    for _ in range(3):
        assert procfs.cmdline(42) == ["python", "train.py"]
        assert (procfs.uid(42), procfs.nspids(42), procfs.cpus_allowed(42)) == (1000, [42], "0-3")
        assert procfs.exe(42) == "/usr/bin/python"
        assert procfs.namespace(42, "net") == 1
        assert procfs.cgroup(42) == [("", "/system.slice/42.service")]
    assert proc.fs.count("read", "/42/cmdline") == proc.fs.count("read", "/42/status") == 1
    assert proc.fs.count("link", "/42/exe") == proc.fs.count("link", "/42/ns/net") == 1

    proc.fs.files["/proc/42/cmdline"] = b"bash\0"
    proc.change(42, comm=b"bash")
    procfs = proc.next_round()
    procfs.processes()
    assert procfs.cmdline(42) == ["bash"]


def test_exec_of_the_same_name_shows_in_its_stack(proc: FakeProc) -> None:
    proc.next_round().processes()
    proc.procfs.cmdline(42)
    proc.fs.files["/proc/42/cmdline"] = b"python\0other.py\0"
    proc.change(42, start_stack=777)
    procfs = proc.next_round()
    procfs.processes()
    assert procfs.cmdline(42) == ["python", "other.py"]


def test_facts_turn_up_again_even_without_exec(proc: FakeProc) -> None:
    """A title, an owner or a cgroup may change at any time: seen within FACTS_ROUNDS if it runs, else IDLE_…."""
    proc.add(60, "idle")
    proc.next_round().processes()
    proc.procfs.cmdline(42)
    proc.procfs.cmdline(60)
    for pid in (42, 60):
        proc.fs.files[f"/proc/{pid}/cmdline"] = b"new title\0"
    seen: dict[int, int] = {}
    for number in range(source.IDLE_FACTS_ROUNDS):
        proc.change(42, utime=number + 1)
        procfs = proc.next_round()
        procfs.processes()
        for pid in (42, 60):
            if procfs.cmdline(pid) == ["new title"]:
                seen.setdefault(pid, number + 1)
    assert seen[42] <= source.FACTS_ROUNDS
    assert source.FACTS_ROUNDS < seen[60] <= source.IDLE_FACTS_ROUNDS


def test_a_reused_pid_is_another_process_with_other_facts(proc: FakeProc) -> None:
    procfs = proc.next_round()
    procfs.processes()
    first = procfs.id_of(42)
    procfs.cmdline(42)
    proc.end(42)
    proc.add(42, "python", start=999, argv=["python", "eval.py"])
    procfs = proc.next_round()
    assert procfs.id_of(42) == "Process(pid=42,start=999)" != first
    assert procfs.cmdline(42) == ["python", "eval.py"]


def test_nothing_is_kept_of_what_ended(proc: FakeProc) -> None:
    for pid in range(1000, 1500):
        proc.next_round()
        proc.add(pid)
        proc.open(pid, 0, "socket:[5]")
        proc.procfs.processes()
        proc.procfs.fds()
        proc.procfs.cmdline(pid)
        proc.end(pid)
    procfs = proc.next_round()
    procfs.fds()
    assert set(procfs._known) == set(procfs._fds._tables) == {1, 42, 43}


def test_a_pid_that_is_not_in_the_round_is_still_answered(proc: FakeProc) -> None:
    procfs = proc.next_round()
    procfs.processes()
    proc.add(50, "late")
    assert procfs.cmdline(50) == ["late"]
    with pytest.raises(FileNotFoundError):
        procfs.cmdline(51)


def test_two_threads_that_ask_at_once_share_one_scan(proc: FakeProc) -> None:
    procfs = proc.next_round()
    inside, go_on = threading.Event(), threading.Event()

    def hold(path: str) -> None:
        if path == "/proc/1/stat":
            inside.set()
            go_on.wait(10)

    proc.fs.on_read = hold
    answers: list[object] = []
    threads = [threading.Thread(target=lambda: answers.append(procfs.processes())) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert inside.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert answers[0] is answers[1]
    assert proc.fs.count("read", "/proc/1/stat") == 1


def test_a_scan_that_hangs_costs_others_their_round_and_then_serves_nobody(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "LOCK_TIMEOUT_S", 0.01)
    procfs = proc.next_round()
    inside, go_on = threading.Event(), threading.Event()

    def hold(path: str) -> None:
        inside.set()
        go_on.wait(10)

    proc.fs.on_read = hold
    hung = threading.Thread(target=procfs.processes)
    hung.start()
    assert inside.wait(10)
    with pytest.raises(SourceUnavailable, match="still being read"):
        procfs.processes()
    proc.next_round()  # does not wait either
    proc.fs.on_read = lambda path: None
    go_on.set()
    hung.join(10)
    proc.add(60, "new")
    assert 60 in procfs.processes()


def test_threads_are_read_again_only_if_the_process_ran(proc: FakeProc) -> None:
    proc.add(60, "server", threads=2)
    proc.thread(60, 60)
    proc.thread(60, 61)
    procfs = proc.next_round()
    procfs.processes()
    first = procfs.threads(60)
    assert [thread.pid for thread in first] == [60, 61]
    procfs = proc.next_round()  # (60 + 2) % THREADS_ROUNDS != 0
    procfs.processes()
    assert procfs.threads(60) is first
    assert proc.fs.count("list", "/60/task") == 1
    proc.change(60, utime=1)
    proc.thread(60, 61, utime=1)
    procfs = proc.next_round()
    procfs.processes()
    second = procfs.threads(60)
    assert second[0] is first[0]
    assert second[1].utime_ticks == 1


def test_switches_and_delays_of_threads(proc: FakeProc) -> None:
    proc.thread(42, 42, delay_ns=7_000)
    proc.switches(42, 42, 5, 6)
    proc.switches(42, 44, 1, 2)
    procfs = proc.next_round()
    assert procfs.switches(42) == {42: (5, 6), 44: (1, 2)}
    assert procfs.run_delay_ns(42, 42) == 7_000


def test_the_machine_comes_from_its_files(proc: FakeProc) -> None:
    proc.fs.files["/proc/self/auxv"] = struct.pack("=QQQQQQ", 6, 65_536, 17, 250, 0, 0)
    proc.fs.files["/proc/stat"] = b"cpu  1 2\nbtime 1700000000\n"
    assert (proc.procfs.page_size, proc.procfs.ticks_per_second) == (65_536, 250)
    assert proc.procfs.boot_time_s == 1_700_000_000.0
    assert proc.procfs.hostname == "node1"


def test_no_boot_time_is_said_not_guessed(proc: FakeProc) -> None:
    with pytest.raises(SourceUnavailable, match="cannot be read"):
        _ = proc.procfs.boot_time_s
    proc.fs.files["/proc/stat"] = b"cpu  1 2\n"
    with pytest.raises(SourceUnavailable, match="no btime"):
        _ = proc.procfs.boot_time_s


@pytest.mark.parametrize(
    ("options", "hides"),
    [("rw", False), ("rw,hidepid=invisible", True), ("rw,hidepid=2", True), ("rw,hidepid=0", False)],
)
def test_hidepid(proc: FakeProc, options: str, hides: bool) -> None:
    proc.fs.files["/proc/self/mountinfo"] = f"2 1 0:2 / /proc rw - proc proc {options}\n".encode()
    assert proc.procfs.hides_processes() is hides


def test_users_by_name(proc: FakeProc) -> None:
    assert (proc.procfs.user(1000), proc.procfs.user(4711)) == ("ann", None)
    proc.procfs.user(0)
    assert proc.fs.count("read", "/etc/passwd") == 1


def test_cpu_info_knows_the_architecture() -> None:
    fs = FakeFs()
    procfs = ProcFs(fs, ManualClock())
    assert procfs.cpu_info() == {}
    procfs.begin_round(1)
    fs.files["/proc/cpuinfo"] = b"processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\n\nprocessor\t: 1\n"
    assert procfs.cpu_info()["architecture"] == "aarch64"
    assert procfs.cpu_info() is procfs.cpu_info(), "read once a round"
    procfs.begin_round(2)
    fs.files["/proc/cpuinfo"] = b"processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon\nflags\t\t: fpu lm\n\n"
    assert procfs.cpu_info()["architecture"] == "x86_64"
    assert procfs.cpu_info()["model name"] == "Xeon"
