"""The event store against what it must cost and against SQLite: writing, size, top kernels.

    python benchmarks/bench_store.py [--rows 10000000] [--sqlite-rows 1000000]

1. Writing kernels (batches of 2,048 rows, 100 at a time, as ingest does) against the bare DuckDB insert of the same
   arrays, and against SQLite's executemany of the same rows. Goal: rows/s for ingest >= 700 k/s with decoding.
2. Size on disk per million kernels. Goal: at most 15 MB.
3. Top kernels over all rows by total, and with p99. Goal: at most 100 ms and 400 ms over 10 M rows.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import duckdb
import numpy as np

from gpuflight.events.batch import Batch
from gpuflight.events.query.kernels import top_kernels
from gpuflight.events.query.reader import Reader
from gpuflight.events.store import EventStore, Source

BATCH_ROWS = 2048
BATCHES_AT_ONCE = 100
SESSION = "11111111-1111-4111-8111-111111111111"


def batches(number: int, rng: np.random.Generator) -> list[Batch]:
    """Kernels as a training job launches them: 200 kernels, 4 streams, durations of 1 µs to some ms."""
    made = []
    for index in range(BATCHES_AT_ONCE):
        batch_id = number * BATCHES_AT_ONCE + index + 1
        start = 1_790_000_000_000_000_000 + batch_id * BATCH_ROWS * 12_000
        kernel = rng.zipf(1.5, BATCH_ROWS) % 200 + 1
        columns = {
            "start_ns": start + np.cumsum(rng.integers(1_000, 20_000, BATCH_ROWS)),
            "duration_ns": (rng.lognormal(2, 1, BATCH_ROWS) * 1000).astype(np.int64),
            "kernel_id": kernel,
            "stream_id": rng.integers(7, 11, BATCH_ROWS),
            "corr_id": np.arange(batch_id * BATCH_ROWS, (batch_id + 1) * BATCH_ROWS),
            "dyn_shared_bytes": kernel % 4 * 16384,
            "num_regs": kernel % 255,
            "has_details": np.ones(BATCH_ROWS, np.int64),
            "external_kind": np.zeros(BATCH_ROWS, np.int64),
            "external_id": np.zeros(BATCH_ROWS, np.uint64),
        }
        made.append(Batch("kernel", SESSION, BATCH_ROWS, columns, "kernel_event_batch", batch_id))
    return made


def wall_s(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--sqlite-rows", type=int, default=1_000_000)
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(prefix="gpuflight-bench-") as folder:
        store = EventStore(os.path.join(folder, "store"))
        bare = duckdb.connect(os.path.join(folder, "bare.duckdb"))
        table = "CREATE TABLE kernel (session_no UINTEGER, clock UTINYINT, "
        bare.execute(table + ", ".join(f"{name} BIGINT" for name in batches(0, rng)[0].columns) + ")")
        other = sqlite3.connect(os.path.join(folder, "sqlite.db"))
        other.execute("PRAGMA journal_mode=WAL")
        other.execute(f"CREATE TABLE kernel ({', '.join(batches(0, rng)[0].columns)})")
        ours, floors, peers = [], [], []
        rows = 0
        while rows < options.rows:
            chunk = batches(rows // (BATCH_ROWS * BATCHES_AT_ONCE), rng)
            count = sum(batch.count for batch in chunk)
            ours.append(wall_s(lambda c=chunk, r=rows, n=count: store.write(c, Source("f", r, r + n))) / count)  # type: ignore[misc]
            if len(floors) < 20:
                floors.append(wall_s(lambda c=chunk: _bare(bare, c)) / count)  # type: ignore[misc]
            if rows < options.sqlite_rows:
                peers.append(wall_s(lambda c=chunk: _sqlite(other, c)) / count)  # type: ignore[misc]
            rows += count
        mine, floor, peer = (1 / statistics.median(times) for times in (ours, floors, peers))
        print(f"write: {mine / 1e3:.0f} k rows/s; bare DuckDB insert {floor / 1e3:.0f} k, SQLite {peer / 1e3:.0f} k")
        print(f"  {mine / floor:.2f}x the bare insert, {mine / peer:.1f}x SQLite")
        used = store.records.used_bytes() / rows
        print(f"size: {used:.1f} MB per million kernels (goal 15)")
        found = store.session(SESSION)
        assert found is not None
        reader = Reader(store, [found])
        for name, goal_ms, quantiles in (("by total", 100, False), ("with p99", 400, True)):
            times = [wall_s(lambda q=quantiles: top_kernels(reader, quantiles=q)) for _ in range(7)]  # type: ignore[misc]
            print(f"top kernels of {rows / 1e6:.1f} M {name}: {statistics.median(times) * 1e3:.0f} ms (goal {goal_ms})")
        query = "SELECT kernel_id, count(*), sum(duration_ns) AS s FROM kernel GROUP BY 1 ORDER BY s DESC LIMIT 20"
        stored = other.execute("SELECT count(*) FROM kernel").fetchone()[0]
        slow = wall_s(lambda: other.execute(query).fetchall())
        print(f"  SQLite: {slow * 1e3:.0f} ms for {stored / 1e6:.1f} M rows")
        store.close()


def _bare(connection: duckdb.DuckDBPyConnection, chunk: list[Batch]) -> None:
    columns = {name: np.concatenate([batch.columns[name] for batch in chunk]) for name in chunk[0].columns}
    columns["session_no"] = np.ones(len(columns["start_ns"]), np.uint32)
    columns["clock"] = np.zeros(len(columns["start_ns"]), np.uint8)
    connection.register("rows", columns)
    connection.execute("INSERT INTO kernel BY NAME SELECT * FROM rows")
    connection.unregister("rows")


def _sqlite(connection: sqlite3.Connection, chunk: list[Batch]) -> None:
    marks = ", ".join("?" * len(chunk[0].columns))
    for batch in chunk:
        lists = [column.tolist() for column in batch.columns.values()]
        connection.executemany(f"INSERT INTO kernel VALUES ({marks})", zip(*lists, strict=True))
    connection.commit()


if __name__ == "__main__":
    main()
