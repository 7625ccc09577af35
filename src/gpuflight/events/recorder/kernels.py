"""Kernel records to rows: names and launch configurations once each, the rest column by column."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from gpuflight.events.arrays import numpy
from gpuflight.events.format.writer import SessionWriter
from gpuflight.events.recorder.layouts import Fields
from gpuflight.events.recorder.occupancy import Limits, occupancy

SHAPES_KEPT = 1 << 16
_SLOTS_FOR = 1024
_MIX = 0x9E3779B97F4A7C15
_CONFIGURATION = (
    *("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"),
    *("static_shared_memory", "dynamic_shared_memory", "registers_per_thread", "local_memory_per_thread", "device_id"),
)


class Shapes:
    """Launch configurations that were met: by a hash of the record's columns, found by a sorted search.

    A configuration is written when it is met first, as the detail of that launch; later launches of it say by their
    name, registers and shared memory what they are. ``beyond``: launches whose configuration no longer fitted.
    """

    def __init__(self, writer: SessionWriter, head: Mapping[str, Any]) -> None:
        np = numpy()
        self.beyond = 0
        self.limits: dict[int, Limits] = {}
        self._writer = writer
        self._head = dict(head)
        self._names: dict[int, str] = {}
        self._hashes = np.empty(0, dtype=np.uint64)
        self._ids = np.empty(0, dtype=np.int64)
        self._slots: tuple[Any, int] | None = None

    def learn(self, names: Mapping[int, str]) -> None:
        """Names behind pointers."""
        self._names.update(names)

    def find(self, fields: Mapping[str, Any], pointers: Any) -> tuple[Any, Any]:
        """(kernel_id of each record, positions of records that bring a new configuration)."""
        np = numpy()
        hashes = _hashes(fields, pointers)
        places = self._places(hashes)
        new = self._hashes[places] != hashes if len(self._hashes) else np.ones(len(hashes), dtype=bool)
        fresh = np.empty(0, dtype=np.int64)
        if new.any():
            positions = np.flatnonzero(new)
            _, first = np.unique(hashes[positions], return_index=True)
            fresh = np.sort(positions[first])
            room = SHAPES_KEPT - len(self._hashes)
            self.beyond += max(len(fresh) - room, 0)
            self._add(hashes, pointers, fresh[: max(room, 0)])
            places = self._places(hashes)
            if room < len(fresh):
                return self._with_strangers(hashes, pointers, places), fresh[: max(room, 0)]
        return self._ids[places], fresh

    def write(self, fields: Mapping[str, Any], corr_ids: Any, positions: Any, stacks: Mapping[int, str]) -> None:
        """Details of some launches."""
        self._writer.kernel_details(self._detail(fields, corr_ids, int(at), stacks) for at in positions)

    def _places(self, hashes: Any) -> Any:
        """Where each would stand among the known ones."""
        np = numpy()
        if self._slots is not None:
            slots, shift = self._slots
            return slots[(hashes >> np.uint64(shift)) & np.uint64(len(slots) - 1)]
        places = np.searchsorted(self._hashes, hashes)
        places[places == len(self._hashes)] = 0
        return places

    def _add(self, hashes: Any, pointers: Any, positions: Any) -> None:
        np = numpy()
        ids = [self._id(int(pointers[at])) for at in positions]
        merged = np.concatenate([self._hashes, hashes[positions]])
        order = np.argsort(merged)
        self._hashes = merged[order]
        self._ids = np.concatenate([self._ids, np.array(ids, dtype=np.int64)])[order]
        self._slots = _slots(self._hashes)

    def _id(self, pointer: int) -> int:
        return self._writer.text("kernel", self._names.get(pointer, ""))

    def _with_strangers(self, hashes: Any, pointers: Any, places: Any) -> Any:
        """Ids where some configurations no longer fit: those by name."""
        ids = self._ids[places]
        for at in (self._hashes[places] != hashes).nonzero()[0]:
            ids[at] = self._id(int(pointers[at]))
        return ids

    def _detail(self, fields: Mapping[str, Any], corr_ids: Any, at: int, stacks: Mapping[int, str]) -> dict[str, Any]:
        def value(name: str) -> int | None:
            return int(fields[name][at]) if name in fields else None

        corr = int(corr_ids[at])
        line: dict[str, Any] = {**self._head, "corr_id": corr}
        for name in ("grid", "block"):
            three = [value(f"{name}_{axis}") for axis in "xyz"]
            if None not in three:
                line[name] = f"({three[0]},{three[1]},{three[2]})"
        for wire, attribute in (
            ("static_shared", "static_shared_memory"),
            ("local_mem_per_thread_bytes", "local_memory_per_thread"),
            ("local_mem_total_bytes", "local_memory_total_v2"),
            ("shared_mem_executed_bytes", "shared_memory_executed"),
        ):
            if (told := value(attribute)) is not None:
                line[wire] = told
        limits = self.limits.get(value("device_id") or 0)
        block = [value(f"block_{axis}") for axis in "xyz"]
        registers = value("registers_per_thread")
        shared = (value("static_shared_memory") or 0) + (value("dynamic_shared_memory") or 0)
        if limits is not None and registers is not None and None not in block:
            threads = (block[0] or 0) * (block[1] or 0) * (block[2] or 0)
            line.update(occupancy(limits, threads, registers, shared) or {})
        if corr in stacks:
            line["stack_trace"] = stacks[corr]
        return line


def _slots(hashes: Any) -> tuple[Any, int] | None:
    """(table, shift) in which some bits of each hash lead to its place, and no two to the same: a look instead of a
    search. None where there are too many for a small table."""
    np = numpy()
    if len(hashes) > _SLOTS_FOR:
        return None
    for bits in (12, 14, 16):
        for shift in range(0, 64 - bits, 4):
            taken = (hashes >> np.uint64(shift)) & np.uint64((1 << bits) - 1)
            if len(np.unique(taken)) == len(hashes):
                slots = np.zeros(1 << bits, dtype=np.intp)
                slots[taken.astype(np.intp)] = np.arange(len(hashes))
                return slots, shift
    return None


@cache
def _lanes(dtype: Any) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
    """(a layout in which two neighbours of four bytes are one lane, its names, what is left to be read one by one)."""
    np = numpy()
    places = {name: dtype.fields[name][1] for name in _CONFIGURATION if name in dtype.fields}
    small = {place: name for name, place in places.items() if dtype.fields[name][0].itemsize == 4}
    lanes: list[int] = []
    paired: set[str] = set()
    for place in sorted(small):
        if place + 4 in small and not {small[place], small[place + 4]} & paired:
            paired |= {small[place], small[place + 4]}
            lanes.append(place)
    names = tuple(f"lane{place}" for place in lanes)
    layout = {"names": names, "formats": ["<u8"] * len(lanes), "offsets": lanes, "itemsize": dtype.itemsize}
    return np.dtype(layout), names, tuple(name for name in places if name not in paired)


def _hashes(fields: Mapping[str, Any], pointers: Any) -> Any:
    """Of name and configuration; columns that a record lacks do not count."""
    np = numpy()
    columns: list[Any]
    if isinstance(fields, Fields):
        layout, lanes, others = _lanes(fields.array.dtype)
        view = fields.array.view(layout)
        columns = [*(view[name] for name in lanes), *(fields[name] for name in others)]
    else:
        columns = [fields[name] for name in _CONFIGURATION if name in fields]
    mixed = pointers.astype(np.uint64)
    mixed *= np.uint64(_MIX)
    for column in columns:
        mixed ^= column.astype(np.uint64)
        mixed *= np.uint64(_MIX)
        mixed ^= mixed >> np.uint64(32)
    return mixed
