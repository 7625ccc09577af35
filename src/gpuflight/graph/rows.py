"""Making elements from rows of values only where a row is new.

From one round to the next most of what a collector reads is as it was. A row (a tuple of everything the element is made
of) that was seen in the last round gives the very object of that round: no construction, and the store sees at one
pointer comparison that nothing changed. Worth it from some thousands of elements on (benchmarks/bench_graph.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Rows(Generic[T]):
    """``make(*row)`` gives the element of a row; it must depend on nothing else, or a stale element would come back."""

    def __init__(self, make: Callable[..., T]) -> None:
        self._make = make
        self._known: dict[tuple[Any, ...], T] = {}

    def elements(self, rows: Sequence[tuple[Any, ...]]) -> list[T]:
        """One element per row, in order. Rows are hashable and hold no NaN (which equals nothing, itself included)."""
        known = self._known
        found: list[Any] = list(map(known.get, rows))
        if None in found:
            make = self._make
            for index, element in enumerate(found):
                if element is None:
                    row = rows[index]
                    if (element := known.get(row)) is None:  # the same row twice
                        element = known[row] = make(*row)
                    found[index] = element
        if len(known) > 2 * len(rows):
            self._known = dict(zip(rows, found, strict=True))
        return found
