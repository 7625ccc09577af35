"""Lanes of a timeline: viewers draw events of one lane only if each is inside another or beside it."""

from __future__ import annotations


class Lanes:
    """Lanes of one track. Hand in intervals in order of their starts."""

    def __init__(self, *, nested: bool) -> None:
        self._nested = nested
        self._open: list[list[int]] = []

    def place(self, start_ns: int, end_ns: int) -> int:
        """The first lane where it lies beside the others or, with ``nested``, wholly inside of one."""
        for lane, ends in enumerate(self._open):
            while ends and ends[-1] <= start_ns:
                ends.pop()
            if not ends or (self._nested and end_ns <= ends[-1]):
                ends.append(end_ns)
                return lane
        self._open.append([end_ns])
        return len(self._open) - 1
