"""Histograms that programs in the kernel fill: powers of two of µs, their differences, and percentiles."""

from __future__ import annotations

import struct
from typing import Any

from msgspec import Struct

from gpuflight.graph import Metric

SLOTS = 32
LAYOUT = f"3Q{SLOTS}Q"
"""struct gf_histogram of kernel.h: count, sum and maximum (µs), slots."""

SIZE = struct.calcsize("=" + LAYOUT)


class Histogram(Struct, gc=False):
    """Slot 0 counts what took less than 1 µs, slot n what took 2^(n-1) to 2^n µs."""

    count: int
    sum_us: int
    slots: tuple[int, ...]

    @classmethod
    def of(cls, fields: tuple[int, ...]) -> Histogram:
        """From what ``LAYOUT`` unpacks to."""
        return cls(fields[0], fields[1], fields[3:])

    def since(self, before: Histogram | None) -> Histogram:
        """What was added since ``before``. The sums are not read at one instant, so none goes below 0."""
        if before is None:
            return self
        slots = tuple(max(0, now - then) for now, then in zip(self.slots, before.slots, strict=True))
        return Histogram(sum(slots), max(0, self.sum_us - before.sum_us), slots)

    def percentile_us(self, share: float) -> float:
        """The value that ``share`` (0 to 1) of all are at most, µs: within its slot by a straight line, so exact to a
        factor of two. 0.0 of an empty one."""
        wanted = share * sum(self.slots)
        passed = 0
        for number, count in enumerate(self.slots):
            if count and passed + count >= wanted:
                low = 0.0 if number == 0 else float(1 << (number - 1))
                high = float(1 << number)
                return low + (high - low) * (wanted - passed) / count
            passed += count
        return 0.0

    def add_to(self, metrics: dict[str, Metric], attributes: dict[str, Any], name: str) -> None:
        """``name``_mean_ms, _p50_ms, _p99_ms (upper bounds within a factor of two) and, as an attribute, the slots
        themselves as ``name``_us_log2 up to the last one that is not 0. Nothing of an empty histogram."""
        total = sum(self.slots)
        if not total:
            return
        metrics[f"{name}_mean_ms"] = self.sum_us / total / 1000
        metrics[f"{name}_p50_ms"] = self.percentile_us(0.5) / 1000
        metrics[f"{name}_p99_ms"] = self.percentile_us(0.99) / 1000
        last = max(number for number, count in enumerate(self.slots) if count)
        attributes[f"{name}_us_log2"] = list(self.slots[: last + 1])
