"""Joins by correlation id: what calls and external ranges tell of the kernels and copies that they started."""

from __future__ import annotations

from typing import Any

from gpuflight.events.arrays import numpy

_KEPT = 1 << 18


class Recent:
    """The most recent correlation ids with a few values each. Bounded; what is older is forgotten."""

    def __init__(self, width: int, kept: int = _KEPT) -> None:
        np = numpy()
        self._kept = kept
        self._keys = np.empty(0, dtype=np.int64)
        self._values = [np.empty(0, dtype=np.uint64) for _ in range(width)]
        self._seen = np.empty(0, dtype=bool)
        self._forgotten_unseen = 0

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Any, *values: Any) -> None:
        """Take some in; of a key that is told twice the last one holds."""
        np = numpy()
        self._keys = np.concatenate([self._keys, keys])
        self._values = [
            np.concatenate([old, new.astype(np.uint64)]) for old, new in zip(self._values, values, strict=True)
        ]
        self._seen = np.concatenate([self._seen, np.zeros(len(keys), dtype=bool)])
        if len(self._keys) > 2 * self._kept:
            self._forgotten_unseen += int(np.count_nonzero(~self._seen[: -self._kept]))
            self._keys, self._seen = self._keys[-self._kept :], self._seen[-self._kept :]
            self._values = [column[-self._kept :] for column in self._values]
        if len(keys) and (np.diff(self._keys) <= 0).any():
            backwards = self._keys[::-1]
            _, last = np.unique(backwards, return_index=True)
            chosen = len(backwards) - 1 - last
            self._keys, self._seen = self._keys[chosen], self._seen[chosen]
            self._values = [column[chosen] for column in self._values]

    def unseen(self) -> int:
        """How many were never asked for with ``seen``, those that are forgotten included."""
        return self._forgotten_unseen + int(numpy().count_nonzero(~self._seen))

    def find(self, keys: Any, *, seen: bool = False) -> tuple[Any, list[Any]]:
        """(which of the keys are known, their values or 0). ``seen``: remember that they were asked for."""
        np = numpy()
        if not len(self._keys):
            return np.zeros(len(keys), dtype=bool), [np.zeros(len(keys), dtype=np.uint64) for _ in self._values]
        places = np.searchsorted(self._keys, keys)
        places[places == len(self._keys)] = 0
        known = self._keys[places] == keys
        if seen:
            self._seen[places[known]] = True
        return known, [np.where(known, column[places], np.uint64(0)) for column in self._values]
