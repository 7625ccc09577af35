"""Reading and aggregating a GPU Flight session, beside a gzip + json.loads loop that computes the same table.

    python benchmarks/bench_events_decode.py [--lines 1000000] [--pairs 5] [--keep FOLDER]

A generation-E session is written with our writer: per 2,048 kernels one batch and 2,048 kernel_detail lines, copies,
fills, waits, NVTX ranges and telemetry (at 1 M lines 900 k kernels, about 650 MB of JSON). Then, alternating:

* ours: ``SessionReader`` + ``KernelTable``, which read every event of the session;
* the loop: every line through ``gzip`` and ``json.loads``, kernels joined with their details by corr_id.

Both give count, total, min, max, p99, details and mean occupancy per kernel and stream, and must agree (p99 within the
sketch's 0.8 %). Goal: the median of the paired ratios of wall time >= 5; peak RSS of a process that only reads <= 200
MB. Also columnar batches alone (goal >= 2 M events/s of CPU) and single-event lines of the first generation (goal >=
500 k lines/s of CPU), from memory, decoded and aggregated.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from gpuflight.events.aggregate import KernelTable
from gpuflight.events.files import SessionReader, find_sessions
from gpuflight.events.format.decoder import Decoder
from gpuflight.events.format.writer import SessionWriter
from gpuflight.events.ledger import Place

STEP = 2048
START_NS = 1_790_000_000_000_000_000
PIECE = 1 << 20
LINES_PER_STEP = STEP + 1 + 120 + 60 + 4
Table = dict[tuple[str, int], tuple[int, int, int, int, int, int, float]]


def write_session(folder: str, lines: int) -> int:
    """A session of about so many lines; the number of its kernels."""
    random.seed(4)
    kernels = 0
    with SessionWriter(folder, "11111111-1111-4111-8111-111111111111") as writer:
        writer.event(
            "job_start",
            {"pid": 4242, "app": "train", "log_path": folder, "ts_ns": START_NS, "hostname": "n1", "devices": []},
        )
        names = [
            f"void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_{i}x256_16x3_nn_align4>(Params)" for i in range(40)
        ]
        ids = [writer.text("kernel", name) for name in names]
        common = {"pid": 4242, "app": "train"}
        shapes = [
            {
                "grid": f"({64 + i},1,1)",
                "block": "(256,1,1)",
                "static_shared": 4096,
                "local_bytes": 0,
                "const_bytes": 352,
                "occupancy": 0.35 + i % 8 / 16,
                "reg_occupancy": 0.35,
                "smem_occupancy": 1.0,
                "warp_occupancy": 1.0,
                "block_occupancy": 1.0,
                "limiting_resource": "registers",
                "max_active_blocks": 4,
                "local_mem_total_bytes": 0,
                "local_mem_per_thread_bytes": 0,
                "cache_config_requested": 0,
                "cache_config_executed": 0,
                "shared_mem_executed_bytes": 4096,
                "user_scope": f"global|train_step|layer_{i}",
                "stack_trace": "main|train|forward|launch",
            }
            for i in range(40)
        ]
        now = START_NS
        for _ in range(max(1, lines // LINES_PER_STEP)):
            chosen = [random.randrange(40) for _ in range(STEP)]
            times = [now + i * 9000 for i in range(STEP)]
            now += STEP * 9000
            corr = range(kernels + 1, kernels + STEP + 1)
            kernels += STEP
            writer.rows(
                "kernel_event_batch",
                {
                    "dt_ns": times,
                    "kernel_id": [ids[k] for k in chosen],
                    "stream_id": [7 + k % 3 for k in chosen],
                    "duration_ns": [int(random.lognormvariate(10, 1)) for _ in chosen],
                    "corr_id": list(corr),
                    "dyn_shared": [0] * STEP,
                    "num_regs": [40] * STEP,
                    "has_details": [1] * STEP,
                    "external_kind": [4] * STEP,
                    "external_id": [14695981039346656041] * STEP,
                },
            )
            writer.kernel_details({**common, "corr_id": c, **shapes[k]} for c, k in zip(corr, chosen, strict=True))
            writer.rows(
                "memcpy_event_batch",
                {n: [1] * 256 for n in ("stream_id", "duration_ns", "bytes", "copy_kind")}
                | {"dt_ns": times[:256], "corr_id": list(range(256))},
            )
            writer.rows(
                "device_metric_batch",
                {n: [1] * 4 for n in ("device_id", "gpu_util", "mem_util", "temp_c")} | {"dt_ns": times[:4]},
            )
            for i in range(120):
                writer.event(
                    "memset_event",
                    {
                        **common,
                        "name": "memset",
                        "platform": "cuda",
                        "device_id": "0",
                        "stream_id": "7",
                        "stack_trace": "main|train",
                        "user_scope": "global|train_step",
                        "scope_depth": 1,
                        "start_ns": times[i],
                        "end_ns": times[i] + 800,
                        "api_start_ns": times[i] - 200,
                        "api_exit_ns": times[i] - 50,
                        "corr_id": i,
                        "bytes": 65536,
                    },
                )
            for i in range(60):
                writer.event(
                    "nvtx_marker_event",
                    {
                        **common,
                        "name": "torch::aten::mm@train.py:42",
                        "domain": "",
                        "start_ns": times[i],
                        "end_ns": times[i] + 90000,
                        "duration_ns": 90000,
                        "marker_id": i,
                    },
                )
        writer.event("shutdown", {**common, "ts_ns": now})
    return kernels


def ours(folder: str) -> Table:
    table = KernelTable()
    reader = SessionReader(find_sessions(folder)[0])
    for batch in reader:
        table.add(batch)
    assert reader.ledger.lost == 0
    return {
        (s.name or "", s.stream_id or 0): (
            s.count,
            s.total_ns,
            s.min_ns,
            s.max_ns,
            s.p99_ns,
            s.details,
            round(s.occupancy or 0, 6),
        )
        for s in table.stats()
    }


def loop(folder: str) -> Table:
    """The straightforward way: every line a dict; kernels wait by corr_id for their details."""
    session = find_sessions(folder)[0]
    names: dict[int, str] = {}
    durations: dict[tuple[int, int], list[int]] = {}
    details: dict[tuple[int, int], list[float]] = {}
    waiting: dict[int, tuple[int, int]] = {}
    for windows in session.windows.values():
        for window in windows:
            with gzip.open(window.path, "rb") as file:
                for line in file:
                    event = json.loads(line)
                    kind = event["type"]
                    if kind == "kernel_detail":
                        key = waiting.pop(event["corr_id"], None)
                        if key is not None:
                            details.setdefault(key, []).append(event["occupancy"])
                    elif kind == "kernel_event_batch":
                        at = {name: i for i, name in enumerate(event["columns"])}
                        k, s, d, c = (at[n] for n in ("kernel_id", "stream_id", "duration_ns", "corr_id"))
                        for row in event["rows"]:
                            key = (row[k], row[s])
                            durations.setdefault(key, []).append(row[d])
                            waiting[row[c]] = key
                    elif kind == "dictionary_update":
                        names.update({int(i): n for i, n in event.get("kernel_dict", {}).items()})
    table: Table = {}
    for key, values in durations.items():
        values.sort()
        found = details.get(key, [])
        table[names[key[0]], key[1]] = (
            len(values),
            sum(values),
            values[0],
            values[-1],
            values[int(0.99 * (len(values) - 1))],
            len(found),
            round(sum(found) / max(len(found), 1), 6),
        )
    return table


def agree(one: Table, other: Table) -> None:
    assert one.keys() == other.keys()
    for key, mine in one.items():
        theirs = other[key]
        assert mine[:4] == theirs[:4] and mine[5:] == theirs[5:], (key, mine, theirs)
        assert abs(mine[4] - theirs[4]) <= 0.02 * theirs[4] + 1, (key, mine, theirs)


def from_memory(blocks: list[bytes]) -> tuple[float, int]:
    """CPU seconds to decode and aggregate, and rows of the kernel table."""
    decoder, table = Decoder(), KernelTable()
    start, offset, rows = time.process_time(), 0, 0
    for block in blocks:
        for batch in decoder.feed(block, Place("memory", "device", 1, offset)):
            rows += batch.count if batch.table == "kernel" else 0
            table.add(batch)
        offset += len(block)
    table.stats()
    return time.process_time() - start, rows


def columnar_blocks(batches: int) -> list[bytes]:
    names = [
        "dt_ns",
        "kernel_id",
        "stream_id",
        "duration_ns",
        "corr_id",
        "dyn_shared",
        "num_regs",
        "has_details",
        "external_kind",
        "external_id",
    ]
    lines = []
    for number in range(batches):
        rows = [
            [
                i * 9000,
                random.randrange(1, 40),
                7 + i % 3,
                int(random.lognormvariate(10, 1)),
                number * STEP + i,
                0,
                40,
                1,
                4,
                14695981039346656041,
            ]
            for i in range(STEP)
        ]
        event = {
            "version": 1,
            "type": "kernel_event_batch",
            "session_id": "s",
            "batch_id": number + 1,
            "base_time_ns": START_NS,
            "columns": names,
            "rows": rows,
        }
        lines.append(json.dumps(event, separators=(",", ":")).encode() + b"\n")
    return in_pieces(lines)


def single_blocks(count: int) -> list[bytes]:
    lines = []
    for i in range(count):
        kernel = random.randrange(40)
        start = START_NS + i * 9000
        event = {
            "type": "kernel_event",
            "pid": 99,
            "app": "old",
            "session_id": "s",
            "name": f"kernel_{kernel}(int*)",
            "platform": "cuda",
            "has_details": True,
            "device_id": "0",
            "stream_id": "7",
            "stack_trace": "main|run",
            "user_scope": "global|epoch",
            "scope_depth": 1,
            "start_ns": start,
            "end_ns": start + 700 + i % 977,
            "api_start_ns": start - 300,
            "api_exit_ns": start - 100,
            "grid": f"({kernel},1,1)",
            "block": "(256,1,1)",
            "dyn_shared_bytes": 0,
            "num_regs": 32,
            "static_shared_bytes": 0,
            "local_bytes": 0,
            "const_bytes": 0,
            "occupancy": 0.66,
            "reg_occupancy": 0,
            "smem_occupancy": 0,
            "warp_occupancy": 0,
            "block_occupancy": 0,
            "limiting_resource": "registers",
            "max_active_blocks": 4,
            "corr_id": i,
            "local_mem_total": 0,
            "cache_config_requested": 0,
            "cache_config_executed": 0,
            "shared_mem_executed": 0,
        }
        lines.append(json.dumps(event, separators=(",", ":")).encode() + b"\n")
    return in_pieces(lines)


def in_pieces(lines: list[bytes]) -> list[bytes]:
    blocks, held, size = [], [], 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= PIECE:
            blocks.append(b"".join(held))
            held, size = [], 0
    return [*blocks, b"".join(held)] if held else blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--keep", default="", help="folder for the session; used again if it is there")
    parser.add_argument("--only-read", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only_read:
        ours(options.only_read)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or temporary
        os.makedirs(folder, exist_ok=True)
        if not find_sessions(folder):
            start = time.perf_counter()
            kernels = write_session(folder, options.lines)
            print(f"written: {kernels:,} kernels in {time.perf_counter() - start:.1f} s")
        session = find_sessions(folder)[0]
        packed = sum(os.path.getsize(w.path) for windows in session.windows.values() for w in windows)
        print(f"session: {packed / 1e6:.1f} MB compressed")
        ratios, walls, cpus = [], [], []
        for _ in range(options.pairs):
            first, cpu = time.perf_counter(), time.process_time()
            mine = ours(folder)
            second, cpu_second = time.perf_counter(), time.process_time()
            theirs = loop(folder)
            third, cpu_third = time.perf_counter(), time.process_time()
            agree(mine, theirs)
            walls.append(second - first)
            ratios.append((third - second) / (second - first))
            cpus.append((cpu_third - cpu_second) / (cpu_second - cpu))
        kernels = sum(line[0] for line in mine.values())
        print(
            f"read + aggregate: {statistics.median(walls):.2f} s, "
            f"{kernels / statistics.median(walls) / 1e3:,.0f} k kernels/s; "
            f"x{statistics.median(ratios):.1f} of gzip + json.loads (wall, {min(ratios):.1f}-{max(ratios):.1f}; "
            f"CPU x{statistics.median(cpus):.1f}); goal >= 5"
        )
        peak = subprocess.run(
            [sys.executable, __file__, "--only-read", folder], check=True, capture_output=True, text=True
        ).stdout.strip()
        print(f"peak RSS of reading: {peak} MB; goal <= 200")
    size = max(options.lines // 5, 2 * STEP)
    columnar, single = columnar_blocks(size // STEP), single_blocks(size)
    rates: dict[str, list[float]] = {"columnar": [], "single": []}
    for _ in range(options.pairs):
        for what, blocks in (("columnar", columnar), ("single", single)):
            seconds, rows = from_memory(blocks)
            rates[what].append(rows / seconds)
    print(f"columnar batches: {statistics.median(rates['columnar']) / 1e6:.2f} M events/s of CPU; goal >= 2")
    print(f"single-event lines: {statistics.median(rates['single']) / 1e3:,.0f} k lines/s of CPU; goal >= 500")


if __name__ == "__main__":
    main()
