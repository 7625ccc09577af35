"""Threads: which are shown, what each uses, and what is not read again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.fakes.proc import KERNEL_THREAD, FakeProc

from gpuflight.collectors.base import Batch
from gpuflight.collectors.rates import FIRST_READING
from gpuflight.collectors.threads import Threads, ThreadsSettings
from gpuflight.graph import nodes


class Rig:
    """A Threads collector on a /proc in memory with one server of three threads."""

    def __init__(self, **settings: Any) -> None:
        self.proc = FakeProc()
        self.threads = Threads(ThreadsSettings(**settings))
        self.proc.add(1, "systemd", ppid=0)
        self.proc.add(42, "server", threads=3)
        for tid in (42, 43, 44):
            self.proc.thread(42, tid, comm=f"t{tid}", state="S", processor=tid - 42)

    def round(self, seconds: float = 1.0, *pids: int) -> Batch:
        self.threads.losses, self.threads.notes = {}, {}
        self.proc.next_round(seconds)
        self.threads.observe(SimpleNamespace(procfs=self.proc.procfs))  # type: ignore[arg-type]
        processes = self.proc.procfs.processes()
        return self.threads.expand([nodes.Process(pid=pid, start=processes[pid].start) for pid in pids or processes])


def shown(batch: Batch) -> dict[int, nodes.Thread]:
    return {node.tid: node for node in batch.nodes if isinstance(node, nodes.Thread)}


def test_threads_of_processes_that_have_several() -> None:
    rig = Rig()
    batch = rig.round()
    threads = shown(batch)
    assert list(threads) == [42, 43, 44]
    assert threads[43].id == "Thread(tid=43,start=430)"
    assert threads[43].attributes == {"name": "t43", "state": "S", "processor": 1}
    assert threads[43].unknown == {"cpu_pct": FIRST_READING}
    assert {(edge.kind, edge.source, edge.target) for edge in batch.edges} == {
        ("Own", "Process(pid=42,start=420)", thread.id) for thread in threads.values()
    }
    assert {edge.source for edge in batch.edges} <= {node.id for node in batch.nodes}


def test_use_and_delay_over_the_round() -> None:
    rig = Rig()
    rig.round()
    rig.proc.change(42, utime=60)
    rig.proc.thread(42, 43, comm="t43", utime=40, stime=10, delay_ns=500_000_000)
    threads = shown(rig.round(2.0))
    assert threads[43].metrics == {"cpu_pct": 25.0, "run_delay_pct": 25.0}
    assert threads[44].metrics == {"cpu_pct": 0.0, "run_delay_pct": 0.0}
    assert threads[43].unknown is None


def test_a_thread_born_since_has_its_use_at_once() -> None:
    rig = Rig()
    rig.round()
    rig.proc.change(42, utime=60)
    rig.proc.thread(42, 45, utime=50, delay_ns=10_000_000)
    assert shown(rig.round())[45].metrics == {"cpu_pct": 50.0, "run_delay_pct": 1.0}


def test_a_kernel_that_keeps_no_delays() -> None:
    rig = Rig()
    for tid in (42, 43, 44):
        del rig.proc.fs.files[f"/proc/42/task/{tid}/schedstat"]
    rig.round()
    rig.proc.change(42, utime=60)
    rig.proc.thread(42, 43, utime=50)
    del rig.proc.fs.files["/proc/42/task/43/schedstat"]
    assert shown(rig.round())[43].metrics == {"cpu_pct": 50.0}


def test_an_idle_process_gives_the_very_same_entities() -> None:
    rig = Rig()
    rig.round()
    first = shown(rig.round())
    second = shown(rig.round())
    assert all(first[tid] is second[tid] for tid in first)
    assert rig.proc.fs.count("read", "/schedstat") == 3


def test_the_busiest_are_shown_and_the_rest_counted() -> None:
    rig = Rig(max_per_process=2)
    rig.proc.thread(42, 44, utime=500)
    assert list(shown(rig.round())) == [44, 42]
    assert rig.threads.losses == {"threads beyond max_per_process": 1}


def test_a_limit_over_all() -> None:
    rig = Rig(max_threads=4)
    rig.proc.add(60, "other", threads=2)
    rig.proc.thread(60, 60)
    rig.proc.thread(60, 61)
    assert len(shown(rig.round())) == 4
    assert rig.threads.losses == {"threads beyond max_threads": 1}


def test_kernel_threads_and_the_vanished_are_left_out() -> None:
    rig = Rig()
    rig.proc.add(2, "kthreadd", flags=KERNEL_THREAD, threads=2)
    rig.proc.add(60, "gone", threads=2)
    assert list(shown(rig.round())) == [42, 43, 44]
    assert rig.threads.losses == {"vanished processes": 1}


def test_a_thread_that_ends_meanwhile_costs_only_itself() -> None:
    rig = Rig()
    rig.proc.fs.files["/proc/42/task/43/stat"] = b""
    assert list(shown(rig.round())) == [42, 44]


def test_reused_ids_are_others() -> None:
    rig = Rig()
    rig.round()
    rig.proc.end(42)
    rig.proc.add(42, "new", threads=2, start=999)
    rig.proc.thread(42, 42, start=999, utime=70)
    rig.proc.thread(42, 43, start=999, utime=70)
    threads = shown(rig.round())
    assert threads[43].id == "Thread(tid=43,start=999)"
    assert threads[43].unknown == {"cpu_pct": FIRST_READING}


def test_each_process_once_a_round_and_foreign_starts_never() -> None:
    rig = Rig()
    rig.round(1.0, 42)
    assert rig.threads.expand([nodes.Process(pid=42, start=420)]) == Batch()
    assert rig.threads.expand([nodes.Process(pid=42, start=1)]) == Batch()


def test_nothing_is_kept_of_what_ended() -> None:
    rig = Rig()
    rig.round()
    rig.proc.end(42)
    rig.round()
    assert rig.threads._groups == {}
