"""What the CPU's counters say in tests: answers of the source, made of plain numbers."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

import msgspec

from gpuflight.sources.clock import ManualClock
from gpuflight.sources.perf_events import Answer, Watched

NAMES = ("llc_reads", "llc_misses", "instructions", "cycles")
Row = Sequence[int]
"""ns enabled, ns on a counter, then the value of each event."""


def watched(rows: Mapping[int, Row], watch: int = 1, left_out_count: int = 0) -> Watched:
    """A process whose threads' counters say that, by tid."""
    raw = b"".join(struct.pack(f"={1 + len(row)}Q", len(row) - 2, *row) for row in rows.values())
    return Watched(watch, list(rows), raw, left_out_count)


def answer(read_ns: int, processes: Mapping[str, Watched], **fields: object) -> Answer:
    """One look at processes' counters, of the four usual events."""
    usual = {"set": "LLC-loads", "events": list(NAMES), "inherits": True}
    return msgspec.convert({**usual, **fields, "read_ns": read_ns, "processes": dict(processes)}, Answer)


def perf_answers(clock: ManualClock, *pids: int) -> dict[tuple[str, str], Callable[[], bytes]]:
    """Of the processes of ``machine.py``: each reads 10 million times per s, and a third of that misses."""

    def counts() -> bytes:
        ms = int(clock.monotonic_s() * 1000)
        row = (ms * 10**6, ms * 10**6, ms * 10_000, ms * 3_333, ms * 10**6, ms * 2 * 10**6)
        found = {f"Process(pid={pid},start={1000 + pid})": watched({pid: row}) for pid in pids}
        return msgspec.msgpack.encode(answer(ms * 10**6, found))

    return {("perf", "counts"): counts}
