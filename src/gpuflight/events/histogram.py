"""How often durations of each length occurred, per key: 64 buckets an octave, so within 0.8 % of what occurred."""

from __future__ import annotations

import struct
from typing import Any

from gpuflight.events.arrays import numpy

_CELLS = 1 << 18
"""Largest table; keys and lengths beyond it are counted one by one."""
_SHIFT = 52 - 6
_FIRST = 1023 << 6
_ALIGNED = 64
_BUCKETS = 1 << 12


class Histogram:
    """Counts by key (a small number) and bucket."""

    def __init__(self) -> None:
        self._first = 0
        self._table: Any = numpy().zeros((0, 0), dtype="int64")
        self._rest: dict[int, dict[int, int]] = {}

    def add(self, keys: Any, durations_ns: Any, number_of_keys: int) -> None:
        """One duration for each of the keys. What is below 1 ns counts as 1 ns."""
        np = numpy()
        bucket = np.maximum(durations_ns, 1).astype(np.float64).view(np.int64) >> _SHIFT
        bucket -= _FIRST
        if self._room(number_of_keys, int(bucket.min()), int(bucket.max())):
            rows, width = self._table.shape
            cells = keys * width
            cells += bucket
            cells -= self._first
            self._table += np.bincount(cells, minlength=rows * width).reshape(rows, width)
            return
        cells, counts = np.unique(keys * _BUCKETS + bucket, return_counts=True)
        for cell, count in zip(cells.tolist(), counts.tolist(), strict=True):
            own = self._rest.setdefault(cell // _BUCKETS, {})
            own[cell % _BUCKETS] = own.get(cell % _BUCKETS, 0) + count

    def _room(self, number_of_keys: int, least: int, most: int) -> bool:
        """Makes the table as large as is needed; False if that is too large."""
        np = numpy()
        rows, width = self._table.shape
        first, end = least // _ALIGNED * _ALIGNED, most // _ALIGNED * _ALIGNED + _ALIGNED
        if width:
            first, end = min(first, self._first), max(end, self._first + width)
        if number_of_keys <= rows and end - first == width:
            return True
        rows_then = max(rows, -(-number_of_keys // _ALIGNED) * _ALIGNED)
        if rows_then * (end - first) > _CELLS:
            return False
        table = np.zeros((rows_then, end - first), dtype=np.int64)
        if width:
            table[:rows, self._first - first : self._first - first + width] = self._table
        self._first, self._table = first, table
        return True

    def quantiles(self, keys: list[int], fractions: tuple[float, ...], least: int, most: int) -> list[int]:
        """Of all durations of the keys: the middle of the bucket where each quantile lies, between the least and the
        most that occurred."""
        np = numpy()
        counts = np.zeros(_BUCKETS, dtype=np.int64)
        inside = [key for key in keys if key < len(self._table)]
        width = self._table.shape[1]
        counts[self._first : self._first + width] = self._table[inside].sum(axis=0)
        for key in keys:
            for bucket, count in self._rest.get(key, {}).items():
                counts[bucket] += count
        seen = np.cumsum(counts)
        ranks = [q * (int(seen[-1]) - 1) for q in fractions]
        found = np.searchsorted(seen, ranks, side="right").tolist()
        return [most if b >= _BUCKETS else min(max(_middle(b), least), most) for b in found]


def _middle(bucket: int) -> int:
    low, high = struct.unpack("<2d", struct.pack("<2q", (bucket + _FIRST) << _SHIFT, (bucket + _FIRST + 1) << _SHIFT))
    return int((low + high) // 2)
