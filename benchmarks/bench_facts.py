"""What the facts of a whole session cost that ``gpuflight doctor --from FOLDER`` adds: a million kernels in a store.

    bench_facts.py [--kernels 1000000]

Both sides in one process: the floor reads the same rows as arrays out of the store; the peer asks the same of the
records in SQL alone (gaps by a window function, copies hidden by kernels by a join of intervals). Goal: at most 2 s of
a core for a million kernels.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import numpy as np

from gpuflight.events.batch import Batch
from gpuflight.events.facts import session_facts
from gpuflight.events.query.reader import Reader
from gpuflight.events.store import EventStore

BASE = 1_790_000_000_000_000_000
PER_STEP = 1000
GOAL_S = 2.0


def _fill(store: EventStore, kernels: int) -> Reader:
    """Steps of a thousand kernels on two streams, a copy each, with the times of their calls."""
    random = np.random.default_rng(5)
    took = random.integers(4_000, 40_000, kernels)
    starts = BASE + np.cumsum(took + random.integers(0, 9_000, kernels))
    calls = starts - random.integers(4_000, 60_000, kernels)
    number = np.arange(kernels, dtype=np.int64)
    columns = {
        "start_ns": starts, "duration_ns": took, "kernel_id": number % 40 + 1, "stream_id": number % 2 + 7,
        "corr_id": number + 1, "api_start_ns": calls, "api_exit_ns": calls + 4_000,
    }  # fmt: skip
    made = []
    for part in np.array_split(number, max(kernels // 100_000, 1)):
        made.append(Batch("kernel", "s", len(part), {name: column[part] for name, column in columns.items()}))
    steps = kernels // PER_STEP
    first = starts[::PER_STEP][:steps]
    copies = {
        "start_ns": first, "duration_ns": np.full(steps, 900_000), "bytes": np.full(steps, 1 << 22),
        "copy_kind": np.ones(steps, np.int64),
    }  # fmt: skip
    made.append(Batch("memcpy", "s", steps, copies))
    instances = np.repeat(np.arange(1, steps + 1), 2)
    times = np.stack([first, np.append(first[1:], starts[-1])], axis=1).ravel()
    made.append(Batch("scope", "s", 2 * steps, {"time_ns": times, "scope_instance_id": instances,
                      "name_id": np.ones(2 * steps, np.int64), "event_type": np.tile([0, 1], steps)}))  # fmt: skip
    made.append(Batch("name", "s", 1, {"dictionary": ["scope"], "id": np.array([1]), "text": ["train_step"]}))
    store.write(made)
    found = store.session("s")
    assert found is not None
    return Reader(store, [found])


def _floor(reader: Reader) -> None:
    for table in ("kernel", "memcpy"):
        reader.store.columns(
            f"SELECT start_ns, start_ns + duration_ns, stream_id, device_id, api_start_ns FROM {reader.table(table)}"
            " WHERE clock = 0 AND start_ns > 0 AND duration_ns >= 0 ORDER BY start_ns"
        )


def _peer(reader: Reader) -> None:
    work = f"SELECT start_ns AS s, start_ns + duration_ns AS e FROM {reader.table('kernel')} WHERE duration_ns >= 0"
    reader.rows(
        f"""
        WITH work AS ({work}), before AS (SELECT s, e, max(e) OVER (ORDER BY s ROWS BETWEEN UNBOUNDED PRECEDING AND
            1 PRECEDING) AS b FROM work)
        SELECT b, s - b AS gap FROM before WHERE s > b ORDER BY gap DESC LIMIT 3
        """
    )
    reader.rows(
        f"""
        WITH work AS ({work}), copy AS (SELECT start_ns AS s, start_ns + duration_ns AS e FROM {reader.table("memcpy")})
        SELECT sum(least(copy.e, work.e) - greatest(copy.s, work.s)) AS hidden FROM copy JOIN work
            ON work.s < copy.e AND work.e > copy.s
        """
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = EventStore(folder)
        try:
            reader = _fill(store, options.kernels)
            spent: dict[str, list[float]] = {}
            for _ in range(3):
                for name, asks in (("facts", session_facts), ("floor", _floor), ("peer", _peer)):
                    began, cpu = time.perf_counter(), time.process_time()
                    asks(reader)  # type: ignore[operator]
                    spent.setdefault(name, []).append(time.process_time() - cpu)
                    spent.setdefault(f"{name} wall", []).append(time.perf_counter() - began)
        finally:
            store.close()
    best = {name: min(times) for name, times in spent.items()}
    print(
        f"{options.kernels:,} kernels: facts {best['facts']:.2f} s of CPU, {best['facts wall']:.2f} s (goal {GOAL_S} s)"
    )
    print(f"floor (reading the rows) {best['floor']:.2f} s of CPU: x{best['facts'] / best['floor']:.1f}")
    print(
        f"peer (gaps and hidden copies in SQL alone) {best['peer']:.2f} s of CPU: x{best['facts'] / best['peer']:.2f}"
    )


if __name__ == "__main__":
    main()
