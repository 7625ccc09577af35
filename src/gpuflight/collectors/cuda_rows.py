"""One reading of the CUDA probe by process, and what its counters rose by since the reading before."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from msgspec import Struct, field

from gpuflight.sources.cuda_probe.rows import (
    AllocationRow,
    CallRow,
    CommunicatorRow,
    CopyRow,
    CudaRows,
    DeviceRow,
    ErrorRow,
    LaunchRow,
    MemoryRow,
    NcclRow,
    ProcessRow,
    StreamRow,
)


class Rows(Struct):
    """What one reading holds of one process."""

    process: ProcessRow | None = None
    devices: list[DeviceRow] = field(default_factory=list)
    streams: list[StreamRow] = field(default_factory=list)
    launches: list[LaunchRow] = field(default_factory=list)
    calls: list[CallRow] = field(default_factory=list)
    errors: list[ErrorRow] = field(default_factory=list)
    memory: list[MemoryRow] = field(default_factory=list)
    allocations: list[AllocationRow] = field(default_factory=list)
    copies: list[CopyRow] = field(default_factory=list)
    nccl: list[NcclRow] = field(default_factory=list)
    communicators: list[CommunicatorRow] = field(default_factory=list)

    def numbers(self) -> set[int]:
        """The devices that the process used, as it counts them."""
        rows: Iterable[Any] = (*self.devices, *self.streams, *self.launches, *self.memory, *self.copies)
        return {row.device for row in rows if row.device >= 0}

    def used_ns(self) -> int | None:
        """When CUDA was at work in it, at the latest (ns, monotonic); None if that was not seen."""
        times = [row.first_ns for row in self.launches]
        times += [row.time_ns for row in self.allocations]
        times += [row.created_ns for row in self.streams if row.created_ns]
        return min(times, default=None)


def by_process(reading: CudaRows) -> dict[int, Rows]:
    """The rows of each process, by pid."""
    found: dict[int, Rows] = {}
    for name in Rows.__struct_fields__:
        if name == "process":
            continue
        for row in getattr(reading, name):
            rows = found.get(row.pid)
            if rows is None:
                rows = found[row.pid] = Rows()
            getattr(rows, name).append(row)
    for process in reading.processes:
        found.setdefault(process.pid, Rows()).process = process
    return found


class Counters:
    """Remembers the last value of every counter; what is not read any more is forgotten.

    The counters of the kernel side begin at 0 when the probe is loaded. So one that was not there in the last reading
    rose from 0; only in the very first reading nobody knows for how long it rose.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        """Time since the last reading, s; None in the first one."""
        self._time_ns: int | None = None
        self._last: dict[Hashable, int] = {}
        self._now: dict[Hashable, int] = {}

    def begin(self, time_ns: int) -> None:
        """A reading at a time (ns, monotonic)."""
        before, self._time_ns = self._time_ns, time_ns
        self.seconds = None if before is None or time_ns <= before else (time_ns - before) / 1e9
        self._last, self._now = self._now, {}

    @property
    def window_ns(self) -> int | None:
        """The same in ns."""
        return None if self.seconds is None else round(self.seconds * 1e9)

    def increase(self, key: Hashable, value: int) -> int | None:
        """What it rose by since the last reading; None in the first one. One that fell began anew."""
        self._now[key] = value
        if self.seconds is None:
            return None
        before = self._last.get(key, 0)
        return value - before if value >= before else value
