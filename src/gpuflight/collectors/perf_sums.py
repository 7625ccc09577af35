"""From two looks at a process's counters to what they grew by: per thread, scaled to the whole time, then added up.

Where more events are wanted than the CPU has counters, the kernel lets each group have them for a share of the time;
its figure is then scaled by the time that it was enabled over the time that it was on a counter, as ``perf stat`` does.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from msgspec import Struct

from gpuflight.sources.perf_events import HEAD_FIELDS, Watched

Rows = dict[int, tuple[int, ...]]
"""By tid: ns enabled, ns on a counter, then the value of each event."""


class Growth(Struct, gc=False):
    """What a process's counters grew by. ``events``: by name, scaled. ``uncounted_ns`` is the part of ``enabled_ns`` of
    threads that ran without ever getting a counter: what they did is in no figure. ``back_count``: threads whose
    counters went back, which are left out."""

    events: dict[str, float]
    enabled_ns: int = 0
    running_ns: int = 0
    uncounted_ns: int = 0
    back_count: int = 0


def rows_of(watched: Watched, events_count: int) -> Rows:
    """The records of a process. Raises ValueError if they have another length than they should."""
    record = struct.Struct(f"={HEAD_FIELDS + events_count}Q")
    if len(watched.raw) != record.size * len(watched.tids):
        raise ValueError(f"{len(watched.raw)} bytes for {len(watched.tids)} threads")
    return {tid: fields[1:] for tid, fields in zip(watched.tids, record.iter_unpack(watched.raw), strict=True)}


def growth(before: Mapping[int, tuple[int, ...]], now: Rows, names: Sequence[str]) -> Growth:
    """What grew since ``before``, of the same watch; a thread that was not in it yet has been counted from 0 since."""
    sums = [0.0] * len(names)
    found = Growth({})
    nothing = (0,) * (2 + len(names))
    for tid, row in now.items():
        last = before.get(tid, nothing)
        if last == row:  # it slept, as most threads do
            continue
        grown = [value - then for value, then in zip(row, last, strict=True)]
        if min(grown) < 0:
            found.back_count += 1
            continue
        enabled, running, *values = grown
        found.enabled_ns += enabled
        found.running_ns += running
        if not running:
            found.uncounted_ns += enabled
            continue
        scale = max(1.0, enabled / running)
        for index, value in enumerate(values):
            sums[index] += value * scale
    found.events = dict(zip(names, sums, strict=True))
    return found
