"""What the programs in the kernel have counted on the machine of ``machine.py``; the same in every round."""

from __future__ import annotations

from tests.fakes import kernel_rows as rows
from tests.fakes.kernel_rows import Answers

from gpuflight.sources.clock import ManualClock

FIRST_ROUND_S = 200.0
"""What the clock of the machine shows before its first round."""

EXECUTED = [b"backup", b"--password=HUSH-exec", b"/data"]


def kernel_answers(
    clock: ManualClock, *, server: int, worker: int, trainer: int, pod_netns: int, own_netns: int
) -> Answers:
    """The server talks with a client that has two threads; the trainer has unix sockets, a disk and threads."""
    begun = {pid: 1000 + pid for pid in (server, worker, trainer)}
    listener, client = ("10.0.0.5", 8000), ("10.0.0.5", 40000)
    net = {
        "traffic": [
            rows.traffic(12, server, server, begun[server], sent=(5000, 5), received=(100, 1)),
            rows.traffic(13, worker, worker, begun[worker], sent=(100, 1), received=(5000, 6)),
            rows.traffic(13, worker + 1, worker, begun[worker], sent=(7, 1), thread_start=begun[worker] + 1),
            rows.traffic(22, server, server, begun[server], sent=(300, 3)),
            rows.traffic(51, trainer, trainer, begun[trainer], sent=(64, 2)),
        ],
        "sockets": [
            rows.internet(12, listener, client, role=rows.SERVER_ROLE, established_ms=1000, netns=own_netns),
            rows.internet(13, client, listener, role=rows.CLIENT, opened_ms=999, established_ms=1000, netns=own_netns,
                          pid=worker, start=begun[worker]),
            rows.internet(22, ("10.0.0.5", 9000), ("10.0.0.5", 9001), protocol=rows.UDP, netns=own_netns),
            rows.unix(51, 651, 652, pod_netns),
        ],
        "waits": [rows.wait(worker, 0, begun[worker], [900, 1000]), rows.wait(server, 1, begun[server], [30])],
    }  # fmt: skip
    threads = b"".join(
        rows.thread(pid, tid, begun[pid], (5_000_000, 1_000_000, 10, 3, 100, 2), begun[pid] + tid - pid)
        for pid, tid in ((server, server), (trainer, trainer), (trainer, trainer + 1))
    )
    events = [
        rows.executed(9001, 20_000, EXECUTED, (server, begun[server])),
        rows.ended(9001, 20_000, 3 << 8, (server, begun[server])),
        rows.ended(9002, 20_001, 9, (9001, 20_000)),
    ]
    found = rows.probe_answers("net", ("on_send", "on_receive", "on_state"), net)
    found |= rows.probe_answers("tasks", ("each_thread",), {})
    found["bpf", "tasks iterate each_thread"] = rows.packed(threads)
    found |= rows.probe_answers("process", ("on_exec", "on_exit"), {})
    found["bpf", "process drain events"] = rows.drained(clock, FIRST_ROUND_S, events)
    found["bpf", "process lost events"] = rows.packed(0)
    io = [rows.block(trainer, begun[trainer], 0, b"nvme0n1", 40_960, [80] * 10)]
    found |= rows.probe_answers("block", ("on_io_start", "on_io_sent", "on_io_done"), {"io": io})
    ipc = [
        rows.ipc(1, 7001, 0, server, begun[server], (0, 0), (4096, 4)),
        rows.ipc(1, 7001, 0, worker, begun[worker], (4096, 2), (0, 0)),
        rows.ipc(3, 3, 4026531839, server, begun[server], (0, 0), (128, 2)),
        rows.ipc(4, 11, 4026531839, worker, begun[worker], (0, 0), (0, 5)),
    ]
    found |= rows.probe_answers("ipc", ("on_return",), {"ipc": ipc})
    return found
