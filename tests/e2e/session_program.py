"""A program that records its GPU session while it runs, with our writer; the GPU's work is made up.

    python session_program.py FOLDER UUID

It has a round of work every 0.1 s until its standard input is closed, and then ends the session. In each round: ten
launches of ``gemm`` (200 µs) on stream 7 and five of ``relu`` (100 µs) on stream 9, a copy of 1 MiB to the GPU, a wait
of 1 ms, in the scope ``step`` of the scope ``epoch``. The session's id is printed.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time

from gpuflight.events.format.writer import SessionWriter

PERIOD_S = 0.1


def main(folder: str, uuid: str) -> None:
    with SessionWriter(folder, rotate_bytes=200_000) as writer:
        who = {"pid": os.getpid(), "app": "session_program"}
        device = {"id": 0, "uuid": uuid, "name": "Made-up GPU", "vendor": "NVIDIA"}
        host = {"hostname": socket.gethostname(), "devices": [device]}
        writer.event("job_start", {**who, **host, "ts_ns": time.time_ns(),
                                   "session_kind": "trace", "profiling_engine": "nvidia.trace"})  # fmt: skip
        gemm, relu = writer.text("kernel", "gemm"), writer.text("kernel", "relu")
        epoch, step = writer.text("scope", "epoch"), writer.text("scope", "step")
        scope(writer, time.time_ns(), 1, epoch, 0, 0)
        writer.rows("memory_alloc_event_batch", {
            "dt_ns": [time.time_ns()], "duration_ns": [0], "memory_op": [1], "memory_kind": [3], "address": [4096],
            "bytes": [1 << 30], "device_id": [0], "stream_id": [0], "corr_id": [1]})  # fmt: skip
        print(writer.session_id, flush=True)
        number = 0
        while not select.select([sys.stdin], [], [], PERIOD_S)[0]:
            number += 1
            work(writer, number, gemm, relu, step)
            writer.flush(sync=False)
        scope(writer, time.time_ns(), 1, epoch, 1, 0)
        writer.event("shutdown", {**who, "ts_ns": time.time_ns()})


def work(writer: SessionWriter, number: int, gemm: int, relu: int, step: int) -> None:
    now_ns = time.time_ns() - 10_000_000
    scope(writer, now_ns, 1 + number, step, 0, 1)
    first = 15 * number
    writer.rows("kernel_event_batch", {
        "dt_ns": [now_ns + n * 200_000 for n in range(10)] + [now_ns + 2_000_000 + n * 100_000 for n in range(5)],
        "kernel_id": [gemm] * 10 + [relu] * 5, "stream_id": [7] * 10 + [9] * 5,
        "duration_ns": [200_000] * 10 + [100_000] * 5, "corr_id": list(range(first, first + 15))})  # fmt: skip
    writer.rows("memcpy_event_batch", {
        "dt_ns": [now_ns], "stream_id": [7], "duration_ns": [50_000], "bytes": [1 << 20], "copy_kind": [1],
        "corr_id": [-number]})  # fmt: skip
    writer.rows("synchronization_event_batch", {
        "dt_ns": [now_ns], "duration_ns": [1_000_000], "sync_type": [3], "stream_id": [7], "event_id": [0],
        "context_id": [1], "corr_id": [-number], "function_id": [0]})  # fmt: skip
    scope(writer, now_ns + 9_000_000, 1 + number, step, 1, 1)


def scope(writer: SessionWriter, time_ns: int, instance: int, name: int, event: int, depth: int) -> None:
    writer.rows("scope_event_batch", {
        "dt_ns": [time_ns], "scope_instance_id": [instance], "name_id": [name], "event_type": [event], "depth": [depth],
        "repeat": [0], "warmup": [0], "original_start_ns": [0]})  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
