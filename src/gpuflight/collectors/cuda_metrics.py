"""Sums of one process over all of its GPUs, and what they rose by per second, from the rows of the CUDA probe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from gpuflight.collectors.cuda_rows import Counters, Rows
from gpuflight.collectors.rates import FIRST_READING
from gpuflight.collectors.session_metrics import Values
from gpuflight.sources.cuda_errors import error_name
from gpuflight.sources.cuda_probe.rows import CallRow

PINNED = ("host", "registered")
"""Kinds of memory that are the host's."""

_DIRECTIONS = {"HtoD": "htod", "DtoH": "dtoh", "DtoD": "dtod", "PtoP": "ptop", "HtoH": "htoh", "default": "other"}
_PERCENTILES = ((50, "cuda_wait_p50_us"), (99, "cuda_wait_p99_us"))


def process_values(pid: int, rows: Rows, counters: Counters) -> Values:
    """Everything that is told at the process itself. Names begin with ``cuda_`` or ``nccl_``; counters are those since
    the probe was attached."""
    values = Values()
    if rows.process is not None:
        process = rows.process
        _counted(values, counters, pid, "cuda_launches", process.launches)
        values.add("cuda_streams_count", sum(not stream.destroyed for stream in rows.streams))
        if process.launches_lost:
            values.add("cuda_launches_lost_count", process.launches_lost)
            values.add("cuda_launches_lost_pct", round(100 * process.launches_lost / max(process.launches, 1), 3))
    _waits(values, counters, pid, [call for call in rows.calls if call.waits])
    _copies(values, counters, pid, rows)
    _memory(values, rows)
    _errors(values, counters, pid, rows)
    _collectives(values, counters, pid, rows)
    return values


def _counted(values: Values, counters: Counters, pid: int, name: str, count: int) -> None:
    """``name``_count and ``name``_per_s."""
    values.add(f"{name}_count", count)
    values.add(f"{name}_per_s", *rate(counters, (name, pid), count))


def rate(counters: Counters, key: object, count: int, digits: int = 3) -> tuple[float | None, str]:
    """What a counter rose by per s since the last reading; None and why."""
    new = counters.increase(key, count)
    if new is None or not counters.seconds:
        return None, FIRST_READING
    return round(new / counters.seconds, digits), ""


def _waits(values: Values, counters: Counters, pid: int, calls: list[CallRow]) -> None:
    total_ns = sum(call.total_ns for call in calls)
    values.add("cuda_waits_count", sum(call.calls for call in calls))
    values.add("cuda_wait_ms", round(total_ns / 1e6, 6))
    new = counters.increase(("wait", pid), total_ns)
    share = None if new is None or not counters.window_ns else round(100 * new / counters.window_ns, 2)
    values.add("cuda_wait_pct", share, FIRST_READING)
    if calls:
        values.add("cuda_wait_max_us", max(call.max_ns for call in calls) / 1e3)
        buckets = histogram(calls)
        for percent, name in _PERCENTILES:
            values.add(name, percentile_ns(buckets, percent) / 1e3)


def histogram(calls: Iterable[CallRow]) -> list[int]:
    """All waits by length: bucket i counts those of [2^i, 2^(i+1)) ns, without empty ones at the end."""
    found: list[int] = []
    for call in calls:
        found += [0] * (len(call.buckets) - len(found))
        for index, count in enumerate(call.buckets):
            found[index] += count
    while found and not found[-1]:
        found.pop()
    return found


def percentile_ns(buckets: Sequence[int], percent: float) -> float:
    """A percentile of a histogram of powers of two, within a factor of √2: the middle of the bucket that it falls
    in."""
    left = sum(buckets) * percent / 100
    for index, count in enumerate(buckets):
        left -= count
        if left <= 0:
            return float(2 ** (index + 0.5))
    return 0.0


def _copies(values: Values, counters: Counters, pid: int, rows: Rows) -> None:
    sums: dict[str, int] = defaultdict(int)
    for copy in rows.copies:
        if copy.direction != "memset":
            sums[_DIRECTIONS.get(copy.direction, "other")] += copy.bytes
    values.add("cuda_copies_count", sum(copy.copies for copy in rows.copies if copy.direction != "memset"))
    for name, size in sorted(sums.items()):
        values.add(f"cuda_copied_{name}_bytes", size)
        values.add(f"cuda_copy_{name}_bytes_per_s", *rate(counters, ("copied", pid, name), size, 1))
    if memsets := sum(copy.copies for copy in rows.copies if copy.direction == "memset"):
        values.add("cuda_memsets_count", memsets)


def _memory(values: Values, rows: Rows) -> None:
    gpus = [row for row in rows.memory if row.kind not in PINNED]
    pinned = [row for row in rows.memory if row.kind in PINNED]
    values.add("cuda_allocations_count", sum(row.allocations for row in gpus))
    values.add("cuda_frees_unmatched_count", sum(row.unknown_frees for row in rows.memory))
    values.add("cuda_held_bytes", sum(row.current_bytes for row in gpus))
    if len(gpus) <= 1:
        values.add("cuda_alloc_peak_bytes", sum(row.peak_bytes for row in gpus))
    else:
        values.add("cuda_alloc_peak_bytes", None, "of several GPUs or kinds of memory: see the edges to each GPU")
    if pinned:
        values.add("cuda_pinned_held_bytes", sum(row.current_bytes for row in pinned))


def _errors(values: Values, counters: Counters, pid: int, rows: Rows) -> None:
    _counted(values, counters, pid, "cuda_errors", sum(row.errors for row in rows.errors))


def error_texts(rows: Rows, most: int = 8) -> list[str]:
    """``cudaMalloc: out of memory (2), 3 times``, the most frequent first."""
    ordered = sorted(rows.errors, key=lambda row: (-row.errors, row.api, row.code))[:most]
    return [
        f"{row.api}: {error_name(row.api, row.code)} ({row.code}), {row.errors} time{'s' * (row.errors != 1)}"
        for row in ordered
    ]


def _collectives(values: Values, counters: Counters, pid: int, rows: Rows) -> None:
    if not rows.nccl:
        return
    calls = sum(row.calls for row in rows.nccl)
    host_ns = sum(row.host_ns for row in rows.nccl)
    _counted(values, counters, pid, "nccl_calls", calls)
    values.add("nccl_host_ms", round(host_ns / 1e6, 6))
    values.add("nccl_errors_count", sum(row.errors for row in rows.nccl))
    size = sum(row.bytes for row in rows.nccl)
    if strange := sum(row.bytes_unknown_calls for row in rows.nccl):
        why = f"{strange} of {calls} calls were of a data type whose size is not known"
        for name in ("nccl_bytes", "nccl_bytes_per_s", "nccl_small_calls_count", "nccl_bus_bytes"):
            values.add(name, None, why)
        return
    values.add("nccl_small_calls_count", sum(row.small_calls for row in rows.nccl))
    values.add("nccl_bus_bytes", *_bus_bytes(rows))
    values.add("nccl_bytes", size)
    values.add("nccl_bytes_per_s", *rate(counters, ("nccl bytes", pid), size, 1))


_BUS_SHARES: dict[str, Callable[[int], float]] = {
    "ncclAllReduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "ncclReduceScatter": lambda ranks: ranks - 1,
    "ncclAllGather": lambda ranks: ranks - 1,
    "ncclAlltoAll": lambda ranks: ranks - 1,
    "ncclRecv": lambda ranks: 0,
}  # fmt: skip
"""Bytes that each rank's link carries per byte that was given to the call: the factors of nccl-tests (PERFORMANCE.md),
for counts per rank as these calls take them. Others carry what they are given; what is received was sent by others."""


def _bus_bytes(rows: Rows) -> tuple[int | None, str]:
    """What the calls made the links carry, by the sizes of their communicators; None and why."""
    ranks = {row.communicator: row.ranks for row in rows.communicators if row.ranks > 0}
    strange = {row.communicator for row in rows.nccl} - ranks.keys()
    if strange:
        return None, f"how many ranks {len(strange)} of its communicators have is not known: they were made unseen"
    total = 0.0
    for row in rows.nccl:
        share = _BUS_SHARES.get(row.operation)
        total += row.bytes * (1 if share is None else share(ranks[row.communicator]))
    return round(total), ""


def collective_texts(rows: Rows) -> list[str]:
    """``ncclAllReduce float16 sum``, each operation that the process calls once."""
    return sorted({" ".join(filter(None, (row.operation, row.datatype, row.reduction))) for row in rows.nccl})


def communicator_texts(rows: Rows) -> list[str]:
    """``rank 0 of 8 on device 0`` of each communicator that is in use."""
    return sorted(
        f"{f'rank {row.rank}' if row.rank >= 0 else 'one rank'} of {row.ranks} on device {row.device}"
        for row in rows.communicators
        if not row.destroyed
    )
