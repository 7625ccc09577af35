"""Lines of a block that are like known ones, until they become batches."""

from __future__ import annotations

from typing import Any, NamedTuple

from gpuflight.events.ledger import Place


class Found(NamedTuple):
    """Which lines of the block, where they start, the number of what repeats in each, the numbers by field (below
    2^63)."""

    lines: Any
    offsets: Any
    numbers: Any
    values: dict[str, Any]

    def part(self, which: slice) -> Found:
        """Some of the lines."""
        values = {name: column[which] for name, column in self.values.items()}
        return Found(self.lines[which], self.offsets[which], self.numbers[which], values)


class Waiting:
    """What was found and has not become batches yet."""

    def __init__(self) -> None:
        self._found: list[tuple[Found, Place]] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, found: Found, place: Place) -> None:
        """``place``: of the block."""
        self._found.append((found, place))

    def take(self, before: int | None) -> list[tuple[Found, Place]]:
        """What starts before this offset in the file (None: all), with the place of its first line. It waits no
        more."""
        if not self._found:
            return []
        taken = []
        waiting, self._found = self._found, []
        for found, place in waiting:
            count = len(found.lines) if before is None else int(found.offsets.searchsorted(before - place.offset))
            if count < len(found.lines):
                self._found.append((found.part(slice(count, None)), place))
                found = found.part(slice(count))
            if count:
                taken.append((found, place._replace(offset=place.offset + int(found.offsets[0]))))
        return taken
