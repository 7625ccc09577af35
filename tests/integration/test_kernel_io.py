"""Storage, pipes, queues and semaphores: bytes and calls as they were made, on the edges of the snapshots."""

from __future__ import annotations

import ctypes
import os
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.kernel_rig import Puppet, Watch, needs_probes, watching

pytestmark = needs_probes
CALLS = {"kernel_ipc": {"system_calls": True}}


@pytest.fixture
def child() -> Iterator[Puppet]:
    with Puppet() as puppet:
        puppet.do("import os, ctypes; libc = ctypes.CDLL(None, use_errno=True)")
        yield puppet


def test_block_requests_of_a_process(tmp_path: Path) -> None:
    """Written past the page cache, so that each request is the process's own."""
    target = tmp_path / "data"
    device = os.stat(tmp_path).st_dev
    if not Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").exists():
        pytest.skip("the temporary folder is on no block device")
    with watching("disks", "kernel_block") as watch:
        writer = subprocess.Popen(
            ["dd", "if=/dev/zero", f"of={target}", "bs=65536", "count=8", "oflag=direct"], stderr=subprocess.PIPE
        )
        if writer.wait():
            pytest.skip("no direct I/O here")
        watch.round()
        used = [edge for edge in watch.edges("Access") if edge.source.startswith(f"Process(pid={writer.pid},")]
        written = sum(edge.metrics.get("write_bytes_per_s", 0) for edge in used)
        assert written >= 8 * 65536
        edge = max(used, key=lambda edge: edge.metrics.get("write_bytes_per_s", 0))
        assert sum(edge.attributes["write_latency_us_log2"]) == edge.metrics["writes_per_s"] >= 8
        assert edge.metrics["write_latency_p99_ms"] >= edge.metrics["write_latency_p50_ms"] > 0
        disk = watch.graph.nodes[edge.target]
        assert disk.metrics["write_latency_mean_ms"] > 0
        if watch.graph.nodes[edge.target].metrics.get("size_bytes") is None:
            pytest.skip("this disk is none that the snapshot shows")
        assert disk.metrics["write_bytes_per_s"] >= 8 * 65536


def test_bytes_of_requests_that_grow_before_the_device_gets_them(tmp_path: Path) -> None:
    """Pieces of one large write are merged again in the queue: a request is larger then than when it was made."""
    device = os.stat(tmp_path).st_dev
    if not Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").exists():
        pytest.skip("the temporary folder is on no block device")
    with watching("disks", "kernel_block") as watch:
        command = ["dd", "if=/dev/zero", f"of={tmp_path}/data", "bs=1310720", "count=8", "oflag=direct"]
        writer = subprocess.Popen(command, stderr=subprocess.PIPE)
        if writer.wait():
            pytest.skip("no direct I/O here")
        watch.round()
        used = [edge for edge in watch.edges("Access") if edge.source.startswith(f"Process(pid={writer.pid},")]
        assert sum(edge.metrics.get("write_bytes_per_s", 0) for edge in used) >= 8 * 1310720


def test_a_pipe_between_two_processes(child: Puppet) -> None:
    """Its ends are the child's standard input and output, as the snapshot draws them."""
    with watching("process_tree", "pipes", "kernel_ipc", **CALLS) as watch:
        watch.round()
        child.do("os.write(1, b'x' * 1000); os.write(1, b'y' * 500); os.write(1, b'\\n')")
        assert child._line() == ""  # the line above was what the child wrote, this is the answer
        watch.round()
        inode = os.fstat(child.process.stdout.fileno()).st_ino  # type: ignore[union-attr]
        sent = watch.edge("SendTo", watch.process(child.pid), f"Pipe(ino={inode})").metrics
        assert sent["bytes_per_s"] >= 1501 and sent["writes_per_s"] >= 4
        got = watch.edge("SendTo", f"Pipe(ino={inode})", watch.process(os.getpid())).metrics
        assert got["bytes_per_s"] == sent["bytes_per_s"], "all was read"


def test_a_named_fifo(child: Puppet, tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    with watching("pipes", "kernel_ipc", **CALLS) as watch:
        ours = os.open(path, os.O_RDWR)
        child.do(f"f = os.open({str(path)!r}, os.O_WRONLY); [os.write(f, b'x' * 10) for _ in range(6)]")
        assert os.read(ours, 100) == b"x" * 60
        stat = os.stat(path)
        watch.world.procfs.processes()
        watch.round()
        fifo = f"Pipe(ino={stat.st_ino},dev={stat.st_dev})"
        assert watch.edge("SendTo", watch.process(child.pid), fifo).metrics["bytes_per_s"] == 60
        assert watch.edge("SendTo", watch.process(child.pid), fifo).metrics["writes_per_s"] == 6
        assert watch.edge("SendTo", fifo, watch.process(os.getpid())).metrics["reads_per_s"] == 1
        os.close(ours)


def accessed(watch: Watch, pid: int, target: str) -> dict[str, float]:
    return watch.edge("Access", watch.process(pid), target).metrics


def test_a_posix_queue(child: Puppet) -> None:
    name = f"/gpuflight-{uuid.uuid4().hex[:8]}"
    opened = child.do(f"q = libc.mq_open({name.encode()!r}, os.O_CREAT | os.O_RDWR, 0o600, None); answer = q")
    if int(opened) < 0:
        pytest.skip("no POSIX message queues here")
    try:
        with watching("message_queues", "kernel_ipc", **CALLS) as watch:
            child.do("[libc.mq_send(q, b'x' * 70, 70, 0) for _ in range(3)]")
            child.do("buffer = ctypes.create_string_buffer(8192); libc.mq_receive(q, buffer, 8192, None)")
            watch.round()
            found = accessed(watch, child.pid, f"MessageQueue(posix,{name.removeprefix('/')})") if (
                f"MessageQueue(posix,{name.removeprefix('/')})" in watch.graph.nodes
            ) else accessed(watch, child.pid, f"MessageQueue(posix,{name})")  # fmt: skip
            assert found["written_bytes_per_s"] == 210 and found["writes_per_s"] == 3
            assert found["read_bytes_per_s"] == 70 and found["reads_per_s"] == 1
    finally:
        ctypes.CDLL(None).mq_unlink(name.encode())


def test_a_system_v_queue_and_semaphore(child: Puppet) -> None:
    libc = ctypes.CDLL(None)
    queue, semaphores = libc.msgget(0, 0o600), libc.semget(0, 2, 0o600)
    if queue < 0 or semaphores < 0:
        pytest.skip("no System V IPC here")
    try:
        with watching("message_queues", "semaphores", "kernel_ipc", **CALLS) as watch:
            child.do("message = (ctypes.c_long * 12)(1)")
            child.do(
                f"[libc.msgsnd({queue}, message, 80, 0) for _ in range(4)]; libc.msgrcv({queue}, message, 80, 0, 0)"
            )
            child.do("up = (ctypes.c_short * 3)(0, 1, 0)")
            child.do(f"[libc.semop({semaphores}, up, 1) for _ in range(5)]")
            graph = watch.round()
            found = accessed(watch, child.pid, f"MessageQueue(sysv,{queue})")
            assert found["written_bytes_per_s"] == 320 and found["writes_per_s"] == 4
            assert found["read_bytes_per_s"] == 80 and found["reads_per_s"] == 1
            assert accessed(watch, child.pid, f"Semaphore(sysv,{semaphores})")["operations_per_s"] == 5
            assert graph.nodes[f"MessageQueue(sysv,{queue})"].metrics["messages_count"] == 3, "the snapshot's"
    finally:
        libc.msgctl(queue, 0, None)
        libc.semctl(semaphores, 0, 0)


def test_spliced_bytes_are_counted_on_both_pipes(child: Puppet) -> None:
    with watching("pipes", "kernel_ipc", **CALLS) as watch, Puppet() as other:
        inode = int(
            child.do(
                "a, b = os.pipe(); c, d = os.pipe(); os.write(b, b'x' * 900); os.splice(a, d, 900);"
                "answer = os.fstat(d).st_ino"
            )
            if hasattr(os, "splice")
            else 0
        )
        other.do("answer = 1")
        watch.round()
        uses = watch.of("kernel_ipc")._uses  # type: ignore[attr-defined]
        found = [use.counts for key, use in uses.items() if int.from_bytes(key[:8], "little") == inode]
        assert found == [(0, 0, 900, 1)]
        # Both ends are in one process: nothing to draw.
        assert not [key for key in watch.graph.edges if f"Pipe(ino={inode})" in key]
