"""Real processes of this machine: odd names, exec, threads, pipes and their directions, an end in the middle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpuflight.collectors.process_tree import ProcessTree
from gpuflight.collectors.threads import Threads
from gpuflight.graph import nodes
from gpuflight.sources.open import open_world
from gpuflight.sources.procfs import FdRef
from gpuflight.sources.world import World

PR_SET_NAME = 15


@pytest.fixture
def world() -> Iterator[World]:
    world = open_world()
    world.begin_round(1)
    yield world
    world.close()


class Child:
    """A Python process that runs a line at a time, as told."""

    def __init__(self, *pass_fds: int) -> None:
        code = "import sys\nfor line in sys.stdin:\n    exec(line); print('done', flush=True)"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
        )
        self.pid = self.process.pid
        self.tell("pass")

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def exec(self, *argv: str) -> None:
        """Become another program, which says ``done`` when it runs."""
        self.tell_without_answer(f"import os; os.execv({argv[0]!r}, {list(argv)!r})")
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "done\n"

    def tell_without_answer(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.end()


@pytest.mark.parametrize("comm", [b"a b) R 1 (", b"new\nline", b"caf\xe9", b""])
def test_any_comm(world: World, child: Child, comm: bytes) -> None:
    child.tell(f"import ctypes; ctypes.CDLL(None).prctl({PR_SET_NAME}, {comm!r}, 0, 0, 0)")
    stat = world.procfs.processes()[child.pid]
    assert stat.comm == comm.decode("utf-8", "backslashreplace")
    assert stat.ppid == os.getpid()
    assert world.procfs.status(child.pid)["PPid"] == str(os.getpid())


def test_exec_of_the_same_program_is_noticed(world: World, child: Child) -> None:
    world.procfs.processes()
    assert "-c" in world.procfs.cmdline(child.pid)
    before = world.procfs.id_of(child.pid)
    child.exec(sys.executable, "-uc", "print('done'); input()")
    world.begin_round(2)
    world.procfs.processes()
    assert world.procfs.cmdline(child.pid)[1] == "-uc"
    assert world.procfs.id_of(child.pid) == before


def test_pipes_and_files_by_direction_and_inode(world: World) -> None:
    read_end, write_end = os.pipe()
    memory = os.memfd_create("x")
    child = Child(read_end, write_end, memory)
    try:
        inode = os.fstat(read_end).st_ino
        index = world.procfs.fds()
        refs = index.pipes[inode]
        for pid in (os.getpid(), child.pid):
            assert FdRef(pid, read_end, True, False) in refs
            assert FdRef(pid, write_end, False, True) in refs
        holders = [ref for ref in index.paths["/memfd:x (deleted)"] if ref.fd == memory]
        assert {ref.pid for ref in holders} == {os.getpid(), child.pid}
        assert {index.inodes[ref] for ref in holders} == {(os.fstat(memory).st_dev, os.fstat(memory).st_ino)}
        assert index.counts[child.pid] == len(os.listdir(f"/proc/{child.pid}/fd"))

        os.close(write_end)
        child.tell(f"import os; os.close({write_end}); os.pipe()")
        for number in range(2, 4):
            world.begin_round(number)
            refs = world.procfs.fds().pipes[inode]
        assert [ref for ref in refs if ref.fd == write_end] == []
    finally:
        child.end()
        os.close(read_end)
        os.close(memory)


def test_tree_and_threads_of_a_real_process(world: World, child: Child) -> None:
    child.tell("import threading, time; e = threading.Event(); threading.Thread(target=e.wait, daemon=True).start()")
    tree, threads = ProcessTree(), Threads()
    tree.observe(world)
    threads.observe(world)
    batch = tree.seed()
    (process,) = [node for node in batch.nodes if isinstance(node, nodes.Process) and node.pid == child.pid]
    assert process.attributes["exe"] == os.path.realpath(sys.executable)
    assert process.attributes["uid"] == os.geteuid()
    assert process.metrics["threads_count"] == 2
    assert process.metrics["rss_bytes"] > 1_000_000
    found = threads.expand([process])
    tids = {node.tid for node in found.nodes if isinstance(node, nodes.Thread)}
    assert tids == {int(tid) for tid in os.listdir(f"/proc/{child.pid}/task")}
    counts = world.procfs.switches(child.pid)
    assert counts.keys() == tids
    assert world.procfs.run_delay_ns(child.pid, child.pid) >= 0


def test_cpu_use_over_the_round(world: World, child: Child) -> None:
    tree = ProcessTree()
    tree.observe(world)
    tree.seed()
    child.tell("import time; end = time.process_time() + 0.3; exec('while time.process_time() < end: pass')")
    world.begin_round(2)
    tree.observe(world)
    (process,) = [n for n in tree.seed().nodes if isinstance(n, nodes.Process) and n.pid == child.pid]
    assert 0 < process.metrics["cpu_pct"] <= 110


def test_a_process_that_ended_is_gone_and_raises(world: World, child: Child) -> None:
    world.procfs.processes()
    child.end()
    with pytest.raises((FileNotFoundError, ProcessLookupError)):
        world.procfs.status(child.pid)
    world.begin_round(2)
    assert child.pid not in world.procfs.processes()
    assert child.pid not in world.procfs.fds().counts
