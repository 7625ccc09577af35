"""What the iterator and the switches say of threads is what /proc says, and what they did."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.kernel_rig import Puppet, needs_probes, watching

pytestmark = needs_probes


@pytest.fixture
def child() -> Iterator[Puppet]:
    with Puppet() as puppet:
        puppet.do("import os, time, mmap, threading")
        yield puppet


def switches(pid: int, tid: int) -> tuple[int, int]:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/task/{tid}/status").read_text().splitlines())
    return int(fields["voluntary_ctxt_switches"]), int(fields["nonvoluntary_ctxt_switches"])


def until_asleep(pid: int) -> None:
    """What it answers comes before it waits for the next line."""
    for _ in range(5000):
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S":
            return
        time.sleep(0.001)
    raise AssertionError("it never sleeps")


def test_switches_are_those_of_proc(child: Puppet) -> None:
    with watching("process_tree", "kernel_sched") as watch:
        until_asleep(child.pid)
        before = switches(child.pid, child.pid)
        watch.round()
        for _ in range(30):
            child.do("time.sleep(0.001)")
        until_asleep(child.pid)
        graph = watch.round()
        after = switches(child.pid, child.pid)
        metrics = graph.nodes[watch.process(child.pid)].metrics
        assert metrics["context_switches_voluntary_per_s"] == after[0] - before[0] >= 30
        assert metrics["context_switches_involuntary_per_s"] == after[1] - before[1]


def test_faults_of_a_thread_are_those_of_proc(child: Puppet) -> None:
    child.do("go = threading.Event(); done = threading.Event()")
    child.do(
        "def work():;;    go.wait();;    m = mmap.mmap(-1, 4096 * 200);;    "
        "[m.__setitem__(i * 4096, 1) for i in range(200)];;    done.set();;    threading.Event().wait()"
    )
    tid = child.do("t = threading.Thread(target=work, daemon=True); t.start(); answer = t.native_id")
    with watching("kernel_sched") as watch:
        child.do("go.set(); done.wait()")
        graph = watch.round()
        [thread] = [node for node in graph.nodes.values() if node.id.startswith(f"Thread(tid={tid},")]
        assert thread.metrics["minor_faults_per_s"] >= 200
        assert thread.metrics["major_faults_per_s"] == 0
        assert (watch.process(child.pid), thread.id, "Own") in graph.edges
        process = graph.nodes[watch.process(child.pid)]
        assert process.metrics["minor_faults_per_s"] >= thread.metrics["minor_faults_per_s"]


def test_a_thread_that_sleeps_is_off_the_cpu_and_one_that_works_is_not(child: Puppet) -> None:
    """The clock of the test goes 1 s per round, so shares are of one second of work."""
    with watching("kernel_sched") as watch:
        asleep = watch.round().nodes[watch.process(child.pid)].metrics
        assert asleep["off_cpu_pct"] > 99
        child.do("end = time.process_time() + 0.2;;while time.process_time() < end: pass")
        busy = watch.round().nodes[watch.process(child.pid)].metrics
        assert busy["off_cpu_pct"] < 85
        assert busy["run_delay_pct"] >= 0


def test_single_waits_and_sleeps_are_measured_on_request(child: Puppet) -> None:
    with watching("kernel_sched", kernel_sched={"latency": True}) as watch:
        for _ in range(20):
            child.do("time.sleep(0.001)")
        until_asleep(child.pid)
        node = watch.round().nodes[watch.process(child.pid)]
        assert sum(node.attributes["run_queue_wait_us_log2"]) >= 20
        assert sum(node.attributes["sleep_us_log2"]) >= 19
        assert node.metrics["run_queue_wait_p99_ms"] >= node.metrics["run_queue_wait_p50_ms"] >= 0
        assert {"on_switch", "on_wakeup", "each_thread"} <= watch.of("kernel_sched").programs.keys()


def test_a_thread_born_since_began_at_nothing(child: Puppet) -> None:
    with watching("kernel_sched") as watch:
        tid = child.do(
            "t = threading.Thread(target=threading.Event().wait, daemon=True); t.start(); answer = t.native_id"
        )
        [thread] = [node for node in watch.round().nodes.values() if node.id.startswith(f"Thread(tid={tid},")]
        assert "context_switches_voluntary_per_s" in thread.metrics and not thread.unknown
