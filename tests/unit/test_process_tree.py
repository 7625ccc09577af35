"""The process tree: who started whom, what each uses over the round, what is read of whom, what is said of losses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes.proc import KERNEL_THREAD, FakeProc

from gpuflight.collectors.base import Batch
from gpuflight.collectors.process_facts import main_cgroup
from gpuflight.collectors.process_tree import ProcessTree, ProcessTreeSettings
from gpuflight.collectors.rates import FIRST_READING
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import nodes


class Rig:
    """A ProcessTree on a /proc in memory."""

    def __init__(self, **settings: Any) -> None:
        self.proc = FakeProc()
        self.tree = ProcessTree(ProcessTreeSettings(**settings))
        self.proc.add(1, "systemd", ppid=0)

    def round(self, seconds: float = 1.0) -> Batch:
        self.tree.losses, self.tree.notes = {}, {}
        self.proc.next_round(seconds)
        self.tree.observe(SimpleNamespace(procfs=self.proc.procfs))  # type: ignore[arg-type]
        return self.tree.seed()

    def process(self, batch: Batch, pid: int) -> nodes.Process:
        found = [node for node in batch.nodes if isinstance(node, nodes.Process) and node.pid == pid]
        assert len(found) == 1
        return found[0]


def links(batch: Batch) -> set[tuple[str, str, str]]:
    return {(edge.kind, short(edge.source), short(edge.target)) for edge in batch.edges}


def short(text: str) -> str:
    return text.partition("pid=")[2].partition(",")[0] or text


def pids(batch: Batch) -> list[int]:
    return sorted(node.pid for node in batch.nodes if isinstance(node, nodes.Process))


def test_who_started_whom() -> None:
    rig = Rig()
    rig.proc.add(42, "bash")
    rig.proc.add(43, "python", ppid=42)
    rig.proc.add(50, "injected", ppid=0)
    batch = rig.round()
    assert links(batch) == {
        ("Host", "Host(node1)", "1"),
        ("Host", "Host(node1)", "50"),
        ("Own", "1", "42"),
        ("Own", "42", "43"),
    }
    assert [node.id for node in batch.nodes if isinstance(node, nodes.Host)] == ["Host(node1)"]
    assert rig.tree.losses == {}


def test_what_a_process_is() -> None:
    rig = Rig()
    rig.proc.add(42, "python", argv=["python", "train.py", "--hf-token", "abc"], uid=1000, netns=7, state="R", rss=256)
    rig.proc.open(42, 0, "socket:[1]")
    rig.proc.open(42, 1, "socket:[2]")
    process = rig.process(rig.round(), 42)
    assert process.id == "Process(pid=42,start=420)"
    assert process.attributes == {
        "name": "python",
        "cmdline": "python train.py --hf-token ***",
        "exe": "/usr/bin/python",
        "uid": 1000,
        "user": "ann",
        "cpus_allowed": "0-3",
        "cgroup": "/system.slice/42.service",
        "netns": 7,
        "state": "R",
        "ppid": 1,
    }
    assert process.metrics == {"threads_count": 1, "rss_bytes": 256 * 4096, "fds_count": 2}
    assert process.unknown == dict.fromkeys(("cpu_pct", "major_faults_per_s", "minor_faults_per_s"), FIRST_READING)


def test_rates_are_over_the_round() -> None:
    rig = Rig(detail_max_processes=0)
    rig.proc.add(42, "python", utime=5_000, majflt=10)
    rig.round()
    rig.proc.change(42, utime=5_030, stime=20, majflt=14, minflt=100)
    process = rig.process(rig.round(seconds=2), 42)
    assert process.metrics["cpu_pct"] == 25.0
    assert process.metrics["major_faults_per_s"] == 2.0
    assert process.metrics["minor_faults_per_s"] == 50.0
    assert process.unknown is None
    assert rig.process(rig.round(), 42).metrics["cpu_pct"] == 0.0


def test_a_process_born_since_the_last_round_has_rates_at_once() -> None:
    rig = Rig(detail_max_processes=0)
    rig.round()
    rig.proc.add(42, "python", utime=100)
    assert rig.process(rig.round(seconds=4), 42).metrics["cpu_pct"] == 25.0


def test_a_process_that_did_nothing_is_the_very_same_entity() -> None:
    rig = Rig()
    rig.proc.add(42, "sleep")
    rig.round()
    first = rig.process(rig.round(), 42)
    second = rig.round()
    assert rig.process(second, 42) is first
    assert [edge for edge in second.edges if edge.target == first.id]


def test_a_reused_pid_is_another_entity() -> None:
    """T32."""
    rig = Rig()
    rig.proc.add(42, "python", utime=500)
    rig.round()
    rig.proc.end(42)
    rig.proc.add(42, "bash", start=999, utime=10)
    process = rig.process(rig.round(), 42)
    assert process.id == "Process(pid=42,start=999)"
    assert process.attributes["name"] == "bash"
    assert process.metrics["cpu_pct"] == 10.0


def test_exec_and_a_new_parent_show_at_once() -> None:
    rig = Rig()
    rig.proc.add(42, "bash")
    rig.proc.add(43, "sh", ppid=42)
    rig.round()
    rig.proc.end(42)
    rig.proc.fs.files["/proc/43/cmdline"] = b"python\0x.py\0"
    rig.proc.change(43, comm=b"python", ppid=1)
    batch = rig.round()
    assert rig.process(batch, 43).attributes["cmdline"] == "python x.py"
    assert rig.process(batch, 43).attributes["ppid"] == 1
    assert links(batch) == {("Host", "Host(node1)", "1"), ("Own", "1", "43")}


def test_a_process_that_ends_meanwhile_costs_only_itself() -> None:
    """T12: read, then gone before its command line was; its child is not left hanging on it."""
    rig = Rig()
    rig.proc.add(42, "bash")
    rig.proc.add(43, "python", ppid=42)
    del rig.proc.fs.files["/proc/42/cmdline"]
    batch = rig.round()
    assert pids(batch) == [1, 43]
    assert links(batch) == {("Host", "Host(node1)", "1")}
    assert rig.tree.losses == {"vanished processes": 1}


def test_vanished_and_unreadable_ones_are_counted() -> None:
    rig = Rig()
    rig.proc.add(42, "gone")
    del rig.proc.fs.files["/proc/42/stat"]
    rig.proc.add(43, "odd")
    rig.proc.fs.files["/proc/43/stat"] = b"?"
    assert pids(rig.round()) == [1]
    assert rig.tree.losses == {"vanished processes": 1, "unreadable processes": 1}


def test_without_the_right_to_look_the_rest_is_shown_and_said_once() -> None:
    rig = Rig()
    for pid in (42, 43):
        rig.proc.add(pid, "secretive")
        for name in ("exe", "ns", "fd", "io"):
            rig.proc.fs.denied.add(f"/proc/{pid}/{name}")
    process = rig.process(rig.round(), 42)
    assert process.attributes["name"] == "secretive"
    assert process.attributes["uid"] == 0
    assert {"exe", "netns", "fds_count"} <= set(process.unknown or ())
    assert "fds_count" not in process.metrics
    note = rig.tree.notes["executables, I/O and open files of some processes may not be read"]
    assert (note.count, note.hint) == (2, "run as root or grant CAP_SYS_PTRACE")


def test_hidden_processes_are_said() -> None:
    rig = Rig()
    rig.proc.fs.files["/proc/self/mountinfo"] = b"2 1 0:2 / /proc rw - proc proc rw,hidepid=2\n"
    rig.round()
    assert any("hidepid" in reason for reason in rig.tree.notes)


def test_kernel_threads_only_on_demand() -> None:
    def host(rig: Rig) -> Rig:
        rig.proc.add(2, "kthreadd", ppid=0, flags=KERNEL_THREAD)
        rig.proc.add(3, "kworker/0:1", ppid=2, flags=KERNEL_THREAD)
        return rig

    assert pids(host(Rig()).round()) == [1]
    rig = host(Rig(kernel_threads=True))
    batch = rig.round()
    assert pids(batch) == [1, 2, 3]
    assert ("Own", "2", "3") in links(batch)
    kernel = rig.process(batch, 3)
    assert "rss_bytes" not in kernel.metrics
    assert "cmdline" not in kernel.attributes
    assert "exe" not in kernel.attributes
    assert not {"exe", "fds_count"} & set(kernel.unknown or ())


def test_a_zombie_has_no_descriptors_and_no_executable() -> None:
    rig = Rig()
    rig.proc.add(42, "gone", state="Z", argv=[])
    process = rig.process(rig.round(), 42)
    assert process.attributes["state"] == "Z"
    assert not {"exe", "fds_count"} & {*process.attributes, *process.metrics, *(process.unknown or ())}


def test_switches_and_io_of_those_that_use_cpu() -> None:
    rig = Rig()
    rig.proc.add(42, "python", threads=2)
    rig.proc.add(43, "sleep")
    rig.proc.switches(42, 42, 100, 10)
    rig.proc.switches(42, 44, 50, 5)
    rig.round()
    rig.proc.change(42, utime=50)
    first = rig.process(rig.round(), 42)
    assert first.unknown == dict.fromkeys(
        ("context_switches_voluntary_per_s", "context_switches_involuntary_per_s", "io_read_bytes_per_s",
         "io_write_bytes_per_s"), FIRST_READING)  # fmt: skip
    rig.proc.switches(42, 42, 140, 10)
    rig.proc.switches(42, 45, 7, 1)  # born since; 44 ended
    del rig.proc.fs.files["/proc/42/task/44/status"]
    rig.proc.fs.files["/proc/42/io"] = b"rchar: 1\nread_bytes: 4096\nwrite_bytes: 8192\n"
    rig.proc.change(42, utime=100)
    batch = rig.round(seconds=2)
    busy = rig.process(batch, 42)
    assert busy.metrics["context_switches_voluntary_per_s"] == (40 + 7) / 2
    assert busy.metrics["context_switches_involuntary_per_s"] == 1 / 2
    assert busy.metrics["io_read_bytes_per_s"] == 2048
    assert busy.metrics["io_write_bytes_per_s"] == 4096
    assert not any("switches" in name or "io_" in name for name in rig.process(batch, 43).metrics)
    assert rig.proc.fs.count("read", "/43/io") == 0


def test_switches_of_those_that_hold_a_gpu_open() -> None:
    rig = Rig()
    rig.proc.add(42, "python")
    rig.proc.open(42, 3, "/dev/nvidia0")
    rig.round()
    assert rig.process(rig.round(), 42).metrics["io_read_bytes_per_s"] == 0.0


def test_details_of_too_many_are_counted_not_read() -> None:
    rig = Rig(detail_max_processes=1)
    rig.proc.add(42, "a")
    rig.proc.add(43, "b")
    rig.round()
    rig.proc.change(42, utime=50)
    rig.proc.change(43, utime=60)
    rig.round()
    assert rig.tree.losses == {"processes without context switches and I/O": 1}
    assert rig.proc.fs.count("read", "/42/io") == 0
    assert rig.proc.fs.count("read", "/43/io") == 1


def test_too_many_threads_are_said() -> None:
    rig = Rig(detail_max_threads=4)
    rig.proc.add(42, "java", threads=5)
    rig.round()
    rig.proc.change(42, utime=50)
    unknown = rig.process(rig.round(), 42).unknown or {}
    assert "too many threads" in unknown["context_switches_voluntary_per_s"]


def test_io_that_may_not_be_read_is_unknown_not_0() -> None:
    rig = Rig()
    rig.proc.add(42, "a")
    rig.proc.fs.denied.add("/proc/42/io")
    rig.round()
    rig.proc.change(42, utime=50)
    process = rig.process(rig.round(), 42)
    assert "io_read_bytes_per_s" not in process.metrics
    assert "right" in (process.unknown or {})["io_read_bytes_per_s"]


def test_descriptors_that_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()

    def busy() -> Any:
        raise SourceUnavailable("still being read", "wait")

    monkeypatch.setattr(rig.proc.procfs, "fds", busy)
    process = rig.process(rig.round(), 1)
    assert (process.unknown or {})["fds_count"] == "still being read"
    assert "still being read" in rig.tree.notes


def test_long_command_lines_are_cut() -> None:
    rig = Rig(cmdline_max_chars=20)
    rig.proc.add(42, "python", argv=["python", "x" * 100])
    assert rig.process(rig.round(), 42).attributes["cmdline"] == "python xxxxxxxxxxxx…"


# --- scoped --------------------------------------------------------------------------------------------------------


def family() -> Rig:
    rig = Rig(seed_all=False)
    rig.proc.add(10, "sshd")
    rig.proc.add(20, "bash", ppid=10)
    rig.proc.add(30, "python", ppid=20)
    rig.proc.add(31, "worker", ppid=30)
    rig.proc.add(32, "worker", ppid=31)
    rig.proc.add(40, "other", ppid=10)
    rig.proc.add(41, "child of other", ppid=40)
    return rig


def test_scoped_it_starts_from_nothing() -> None:
    assert family().round() == Batch()


def test_scoped_it_shows_ancestors_and_the_descendants_of_what_was_asked_for() -> None:
    rig = family()
    rig.round()
    batch = rig.tree.expand([nodes.Process(pid=30, start=300, attributes={"seeded": True})])
    assert pids(batch) == [1, 10, 20, 30, 31]
    batch = rig.tree.expand([node for node in batch.nodes if isinstance(node, nodes.Process)])
    assert pids(batch) == [32]
    assert links(batch) == {("Own", "31", "32")}
    assert pids(rig.tree.expand([node for node in batch.nodes if isinstance(node, nodes.Process)])) == []


def test_scoped_a_peer_comes_with_its_ancestors_only() -> None:
    rig = family()
    rig.round()
    batch = rig.tree.expand([nodes.Process(pid=40, start=400)])
    assert pids(batch) == [1, 10, 40]
    assert rig.tree.expand([node for node in batch.nodes if isinstance(node, nodes.Process)]) == Batch()


def test_a_frontier_of_what_is_no_more() -> None:
    rig = family()
    rig.round()
    assert rig.tree.expand([nodes.Process(pid=30, start=1), nodes.Process(pid=99, start=1)]) == Batch()
    assert rig.tree.losses == {"vanished processes": 2}


def test_unscoped_expansion_adds_nothing_twice() -> None:
    rig = Rig()
    rig.proc.add(42, "bash")
    batch = rig.round()
    assert rig.tree.expand([node for node in batch.nodes if isinstance(node, nodes.Process)]) == Batch()


# --- cost ----------------------------------------------------------------------------------------------------------


def test_an_idle_host_costs_one_small_read_per_process_and_round() -> None:
    rig = Rig()
    for pid in range(100, 200):
        rig.proc.add(pid, "sleep")
        rig.proc.open(pid, 0, "/dev/null")
    rig.round()
    rig.round()
    rig.proc.fs.asked.clear()
    rounds = 24
    for _ in range(rounds):
        rig.round()
    assert rig.proc.fs.count("read", "/stat") == 101 * rounds
    # Facts turn up once in 48 rounds, descriptors are counted every other round and listed once in 16.
    assert sum(rig.proc.fs.asked.values()) - 101 * rounds < 101 * rounds


def test_nothing_is_kept_of_what_ended() -> None:
    rig = Rig()
    for pid in range(1000, 1200):
        rig.proc.add(pid, "short", utime=100)
        rig.round()
        rig.proc.end(pid)
    rig.round()
    assert set(rig.tree._shown) == {1}
    assert rig.tree._details._io == {}


@pytest.mark.parametrize(
    ("groups", "path"),
    [
        ([("", "/a")], "/a"),
        ([("name=systemd", "/s"), ("memory", "/m"), ("", "/")], "/m"),
        ([("cpu,cpuacct", "/c"), ("memory", "/"), ("", "/")], "/c"),
        ([("", "/")], "/"),
        ([], "/"),
    ],
)
def test_the_cgroup_that_says_most(groups: list[tuple[str, str]], path: str) -> None:
    assert main_cgroup(groups) == path
