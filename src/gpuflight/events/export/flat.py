"""As much of FlatBuffers as the messages of Arrow need: tables, strings, vectors, written front to back."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

Writer = Callable[["Flat"], int]
Field = tuple[int, str, int | Writer]
"""Slot, format of ``struct`` (or ``ref`` for what lies elsewhere), value (or what writes it and tells where)."""

_SIZES = {"?": 1, "B": 1, "h": 2, "i": 4, "q": 8, "ref": 4}


class Flat:
    """A buffer that grows. Positions are from its beginning, which has to lie on a multiple of 8."""

    def __init__(self) -> None:
        self.data = bytearray(4)

    def finish(self, root: Writer) -> bytes:
        """The whole buffer, whose first word leads to the root; its length is a multiple of 8."""
        struct.pack_into("<I", self.data, 0, root(self))
        self._align(8)
        return bytes(self.data)

    def table(self, fields: Sequence[Field]) -> int:
        """A table; what it refers to follows behind it."""
        slots = max((slot for slot, _, _ in fields), default=-1) + 1
        places: dict[int, int] = {}
        size = 4
        for slot, form, _ in sorted(fields, key=lambda field: -_SIZES[field[1]]):
            size += -size % _SIZES[form]
            places[slot] = size
            size += _SIZES[form]
        self._align(2)
        vtable = len(self.data)
        offsets = [places.get(slot, 0) for slot in range(slots)]
        self.data += struct.pack(f"<{slots + 2}H", 4 + 2 * slots, size, *offsets)
        self._align(8)
        start = len(self.data)
        self.data += bytes(size)
        struct.pack_into("<i", self.data, start, start - vtable)
        for slot, form, value in fields:
            if not callable(value):
                struct.pack_into(f"<{form}", self.data, start + places[slot], value)
        for slot, _, value in fields:
            if callable(value):
                self._refer(start + places[slot], value)
        return start

    def text(self, text: str) -> int:
        """A string."""
        raw = text.encode("utf-8", "replace")
        self._align(4)
        start = len(self.data)
        self.data += struct.pack("<I", len(raw)) + raw + b"\0"
        return start

    def tables(self, writers: Sequence[Writer]) -> int:
        """A vector of references."""
        self._align(4)
        start = len(self.data)
        self.data += struct.pack("<I", len(writers)) + bytes(4 * len(writers))
        for index, writer in enumerate(writers):
            self._refer(start + 4 + 4 * index, writer)
        return start

    def pairs(self, pairs: Sequence[tuple[int, int]]) -> int:
        """A vector of structs of two 64-bit numbers."""
        self.data += bytes(-(len(self.data) + 4) % 8)
        start = len(self.data)
        self.data += struct.pack("<I", len(pairs))
        for pair in pairs:
            self.data += struct.pack("<qq", *pair)
        return start

    def _refer(self, place: int, writer: Writer) -> None:
        struct.pack_into("<I", self.data, place, writer(self) - place)

    def _align(self, size: int) -> None:
        self.data += bytes(-len(self.data) % size)
