"""The event store of a fleet beside the embedded one: writing, size, top kernels.

    python benchmarks/bench_parquet.py [--rows 10000000]

1. Writing kernels (batches of 2,048 rows, 100 at a time, as ingest does), every write fsynced, against ``EventStore``
   and against DuckDB's bare COPY of the same arrays to Parquet without fsync.
2. Bytes on disk per million kernels, as written and after files were put together.
3. Top kernels over all rows by total, and with p99, as written and after. Goals, of the embedded store: at most 100 ms
   and 400 ms over 10 M rows.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from typing import Any

import duckdb
import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_store import BATCH_ROWS, BATCHES_AT_ONCE, SESSION, batches, wall_s
from gpuflight.events.query.kernels import top_kernels
from gpuflight.events.query.reader import Reader
from gpuflight.events.store import EventStore, Source
from gpuflight.events.store.parquet import ParquetStore

_LATER_NS = 3600 * 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory(prefix="gpuflight-bench-") as folder:
        embedded = EventStore(os.path.join(folder, "embedded"))
        fleet = ParquetStore(os.path.join(folder, "fleet"), upkeep_interval_s=0)
        bare = duckdb.connect()
        figures: dict[str, list[float]] = {"fleet": [], "embedded": [], "bare COPY": []}
        rows = 0
        while rows < options.rows:
            chunk = batches(rows // (BATCH_ROWS * BATCHES_AT_ONCE), rng)
            count = sum(batch.count for batch in chunk)
            source = Source("f", rows, rows + count)
            path = os.path.join(folder, "bare.parquet")
            for name, work in (
                ("fleet", lambda c=chunk, s=source: fleet.write(c, s)),
                ("embedded", lambda c=chunk, s=source: embedded.write(c, s)),
                ("bare COPY", lambda c=chunk, p=path: _bare(bare, c, p)),
            ):
                figures[name].append(wall_s(work) / count)
            rows += count
        rates = {name: 1 / statistics.median(times) for name, times in figures.items()}
        print("write: " + ", ".join(f"{name} {rate / 1e3:.0f} k rows/s" for name, rate in rates.items()))
        print(f"size: embedded {embedded.records.used_bytes() / rows:.1f} MB per million kernels")
        _ask("embedded", embedded, rows)
        _report("fleet, as written", fleet, rows)
        fleet._wall_ns = lambda now=fleet._wall_ns: now() + _LATER_NS  # nothing comes any more
        took_s = wall_s(fleet.maintain)
        print(f"merging: {rows / took_s / 1e3:.0f} k rows/s")
        _report("fleet, merged", fleet, rows)
        fleet.close()
        embedded.close()


def _report(name: str, store: ParquetStore, rows: int) -> None:
    found = store.session(SESSION)
    assert found is not None
    files = len(store.records.fleet.state.files_of(SESSION, "kernel"))
    print(f"size: {name} {store.records.used_bytes() / rows:.1f} MB per million kernels in {files} files")
    _ask(name, store, rows)


def _ask(name: str, store: EventStore, rows: int) -> None:
    found = store.session(SESSION)
    assert found is not None
    reader = Reader(store, [found])
    for what, quantiles in (("by total", False), ("with p99", True)):
        times = [wall_s(lambda q=quantiles: top_kernels(reader, quantiles=q)) for _ in range(7)]  # type: ignore[misc]
        print(f"top kernels of {rows / 1e6:.1f} M {what}, {name}: {statistics.median(times) * 1e3:.0f} ms")


def _bare(connection: duckdb.DuckDBPyConnection, chunk: list[Any], path: str) -> None:
    columns = {name: np.concatenate([batch.columns[name] for batch in chunk]) for name in chunk[0].columns}
    connection.register("rows", columns)
    connection.execute(f"COPY (SELECT * FROM rows) TO '{path}' (FORMAT parquet, COMPRESSION zstd)")
    connection.unregister("rows")


if __name__ == "__main__":
    main()
