"""Compares one reading of the probe with what the log of the fake runtime says."""

from __future__ import annotations

from tests.fakes.cuda.oracle import Expected

from gpuflight.sources.cuda_probe.rows import CudaRows

CLOCK_NS = 20_000
"""By how much the clock of BPF programs may be off that of the log: it is the kernel's fast one, which may step a bit
when the kernel trims its clock (``ktime_get_mono_fast_ns``; 4 µs were seen)."""


def check(rows: CudaRows, pid: int, expected: Expected) -> None:
    """Every aggregate of one process; raises AssertionError with the first that differs."""
    process = next((row for row in rows.processes if row.pid == pid), None)
    assert process is not None, "the process has no row"
    assert process.launches == sum(sums.count for sums in expected.launches.values())
    assert process.streams_created == expected.streams_created
    assert process.streams_destroyed == expected.streams_destroyed
    assert process.event_records == expected.event_records
    assert process.set_device_calls == expected.set_device_calls
    _check_launches(rows, pid, expected)
    _check_calls(rows, pid, expected)
    _check_memory(rows, pid, expected)
    _check_spans(rows, pid, expected)
    copies = {
        (row.device, row.direction, row.asynchronous): (row.copies, row.bytes, row.bytes_max)
        for row in rows.copies
        if row.pid == pid
    }
    assert copies == expected.copies


def _check_launches(rows: CudaRows, pid: int, expected: Expected) -> None:
    found = {(row.device, row.stream, row.function, row.kind): row for row in rows.launches if row.pid == pid}
    assert found.keys() == expected.launches.keys()
    for key, sums in expected.launches.items():
        row = found[key]
        assert (row.launches, row.threads, row.blocks, row.captured) == (
            sums.count,
            sums.threads,
            sums.blocks,
            sums.captured,
        )
        assert (row.threads_max, row.block_threads_max, row.shared_bytes_max, row.grid, row.block) == (
            sums.threads_max,
            sums.block_max,
            sums.shared_max,
            sums.grid,
            sums.block,
        )


def _check_calls(rows: CudaRows, pid: int, expected: Expected) -> None:
    calls = {row.api: row for row in rows.calls if row.pid == pid}
    assert {api: row.calls for api, row in calls.items()} == expected.calls
    for api, row in calls.items():
        assert sum(row.buckets) == row.calls
        # Around the call, so never less than within it.
        assert row.total_ns + CLOCK_NS * row.calls >= expected.call_ns[api]
        assert row.max_ns <= row.total_ns
        lowest = sum(count << bucket for bucket, count in enumerate(row.buckets) if bucket)
        highest = sum(count << (bucket + 1) for bucket, count in enumerate(row.buckets))
        assert lowest <= row.total_ns < highest
        assert row.buckets[row.max_ns.bit_length() - 1] > 0
    errors = {(row.api, row.code): row.errors for row in rows.errors if row.pid == pid}
    assert errors == expected.errors


def _check_memory(rows: CudaRows, pid: int, expected: Expected) -> None:
    memory = {(row.device, row.kind): row for row in rows.memory if row.pid == pid}
    assert memory.keys() == expected.memory.keys()
    for key, sums in expected.memory.items():
        row = memory[key]
        assert (row.current_bytes, row.peak_bytes, row.allocated_bytes, row.allocations, row.frees) == (
            sums.current,
            sums.peak,
            sums.allocated,
            sums.allocations,
            sums.frees,
        )
        assert row.unknown_frees == 0
    leaks = {row.address: (row.size_bytes, row.device, row.kind, row.api) for row in rows.allocations if row.pid == pid}
    assert leaks == expected.allocations


def _check_spans(rows: CudaRows, pid: int, expected: Expected) -> None:
    lanes = {key: lane for key, lane in expected.lanes.items() if lane.spans or lane.longest}
    streams = {
        (row.stream, row.device if row.stream == 1 or row.stream & 7 == 2 else -1): row
        for row in rows.streams
        if row.pid == pid and (row.spans or row.busy_ns)
    }
    assert streams.keys() == lanes.keys()
    for key, lane in lanes.items():
        row = streams[key]
        assert row.spans == lane.spans, (key, lane, row)
        assert row.device == lane.device
        slack = CLOCK_NS * (lane.spans + 1)
        assert lane.shortest - slack <= row.busy_ns <= lane.longest + slack, (key, lane, row)
    devices = {row.device: row for row in rows.devices if row.pid == pid and (row.spans or row.busy_ns)}
    assert devices.keys() == expected.devices.keys()
    for device, (spans, shortest, longest) in expected.devices.items():
        row_ = devices[device]
        assert row_.spans == spans
        slack = CLOCK_NS * (spans + 1)
        assert shortest - slack <= row_.busy_ns <= longest + slack, (shortest, longest, row_)
