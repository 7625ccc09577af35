"""Sums of columns by a few whole-numbered keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuflight.events.arrays import numpy

_ROWS_AT_ONCE = 1 << 14
MOST_KEYS = 4096
"""Distinct keys; what has yet another one is summed up under ``OTHER``."""

OTHER = -2
UNKNOWN = -1
"""In place of a value of a column that the rows do not have."""


class Sums:
    """``lines[key]`` is [rows, a sum per column of ``summed``, the largest of the first]; read them by ``result``."""

    def __init__(self, keys: Sequence[str], summed: Sequence[str]) -> None:
        self._keys = keys
        self._summed = summed
        self._lines: dict[tuple[int, ...], list[int]] = {}
        self._waiting: list[list[Any]] = []
        self._rows = 0

    def add(self, columns: dict[str, Any], count: int) -> None:
        np = numpy()
        missing: Any = None
        part = []
        for name in (*self._keys, *self._summed):
            column = columns.get(name)
            if column is None:
                if missing is None:
                    missing = np.full(count, UNKNOWN, dtype=np.int64)
                column = missing if name in self._keys else np.zeros(count, dtype=np.int64)
            part.append(column)
        self._waiting.append(part)
        self._rows += count
        if self._rows >= _ROWS_AT_ONCE:
            self._reduce()

    def result(self) -> dict[tuple[int, ...], list[int]]:
        self._reduce()
        return self._lines

    def _reduce(self) -> None:
        if not self._waiting:
            return
        np = numpy()
        columns = [np.concatenate(parts) for parts in zip(*self._waiting, strict=True)]
        self._waiting, self._rows = [], 0
        width = len(self._keys)
        order = np.lexsort(columns[:width][::-1])
        keys = [column[order] for column in columns[:width]]
        differs = np.zeros(len(order), dtype=bool)
        differs[0] = True
        for key in keys:
            differs[1:] |= key[1:] != key[:-1]
        starts = np.flatnonzero(differs)
        counts = np.diff(np.append(starts, len(order))).tolist()
        values = [np.maximum(column[order], 0) for column in columns[width:]]
        sums = [np.add.reduceat(value, starts).tolist() for value in values]
        largest = np.maximum.reduceat(values[0], starts).tolist()
        for place, key in enumerate(zip(*(column[starts].tolist() for column in keys), strict=True)):
            line = self._lines.get(key)
            if line is None:
                if len(self._lines) >= MOST_KEYS:
                    key = (OTHER,) * width
                line = self._lines.setdefault(key, [0] * (2 + len(sums)))
            line[0] += counts[place]
            for index, column in enumerate(sums, 1):
                line[index] += column[place]
            line[-1] = max(line[-1], largest[place])
