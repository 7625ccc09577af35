"""Memory in use: what was taken and not given back, and the most that ever was in use at once."""

from __future__ import annotations

from typing import Any

from gpuflight.events.activity.summary import MemorySum

_PINNED = 2
_OF_A_GPU = frozenset((3, 4, 5, 6, 7))
MOST_PIECES = 1 << 20
"""Pieces of memory in use that are told apart; what comes beyond counts as never taken."""

Place = tuple[int | None, bool]


class Memory:
    """Rows of ``allocation``, nearly in order of time. Pageable memory of the host is left out: it is no concern of a
    GPU, and few writers record it."""

    def __init__(self) -> None:
        self.beyond = 0
        """Allocations that were not followed, for there were too many at once."""
        self._held: dict[int, tuple[Place, int]] = {}
        self._places: dict[Place, MemorySum] = {}

    def add(self, columns: dict[str, Any], count: int) -> None:
        times = columns.get("start_ns")
        order = range(count) if times is None else times.argsort(kind="stable").tolist()
        operations, addresses = columns.get("memory_op"), columns.get("address")
        if operations is None or addresses is None:
            return
        operations, addresses = operations.tolist(), addresses.tolist()
        sizes = _list(columns, "bytes", count, 0)
        kinds = _list(columns, "memory_kind", count, 3)
        devices = _list(columns, "device_id", count, None)
        for row in order:
            if operations[row] == 1:
                kind = kinds[row]
                if kind == _PINNED or kind in _OF_A_GPU or kind == 0:
                    place = (None, True) if kind == _PINNED else (devices[row], False)
                    self._take(addresses[row], place, max(sizes[row], 0))
            elif operations[row] == 2:
                self._give_back(addresses[row], kinds[row], devices[row])

    def _take(self, address: int, place: Place, size: int) -> None:
        before = self._held.pop(address, None)  # given back, and nobody told
        if before is not None:
            self._at(before[0]).held_bytes -= before[1]
        line = self._at(place)
        line.allocations += 1
        if len(self._held) >= MOST_PIECES:
            self.beyond += 1
            return
        self._held[address] = (place, size)
        line.held_bytes += size
        line.peak_bytes = max(line.peak_bytes, line.held_bytes)

    def _give_back(self, address: int, kind: int, device: int | None) -> None:
        held = self._held.pop(address, None)
        if held is None:
            if kind == _PINNED or kind in _OF_A_GPU:
                line = self._at((None, True) if kind == _PINNED else (device, False))
                line.frees += 1
                line.unmatched_frees += 1
            return
        line = self._at(held[0])
        line.frees += 1
        line.held_bytes -= held[1]

    def _at(self, place: Place) -> MemorySum:
        line = self._places.get(place)
        if line is None:
            line = self._places[place] = MemorySum(place[0], place[1], 0, 0, 0, 0, 0)
        return line

    def result(self) -> list[MemorySum]:
        """A copy, GPUs first, in order."""
        lines = sorted(self._places.values(), key=lambda m: (m.pinned, m.device_id is None, m.device_id or 0))
        return [MemorySum(m.device_id, m.pinned, m.allocations, m.frees, m.unmatched_frees, m.held_bytes, m.peak_bytes)
                for m in lines]  # fmt: skip


def _list(columns: dict[str, Any], name: str, count: int, instead: int | None) -> list[Any]:
    column = columns.get(name)
    return [instead] * count if column is None else list(column.tolist())
