"""How the bytes of a map are laid out: C fields, one by one, as the compiler places them.

A field is written as in C: ``u32 pid``, ``s64 error``, ``u64 slots[32]``, ``char comm[16]``. Each lies at the next
multiple of its size, and the whole is a multiple of its largest one (System V psABI and AAPCS64 alike).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence

from msgspec import Struct

_FIELD = re.compile(r"\s*(?:__)?(?:([us])(8|16|32|64)|(char))\s+([A-Za-z_]\w*)\s*(?:\[\s*(\d+)\s*\])?\s*;?\s*")
_CODES = {8: "b", 16: "h", 32: "i", 64: "q"}
MAX_LENGTH = 4096


class Field(Struct, frozen=True):
    """One field: where its value begins among those of ``Layout.unpack``, and how many it has (0: it is text)."""

    name: str
    index: int
    length: int = 1
    array: bool = False


class LayoutError(ValueError):
    """A field that cannot be read: ``number`` says which (from 0)."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


class Layout:
    """The fields of a key or a value, and their bytes."""

    def __init__(self, lines: Sequence[str]) -> None:
        """Raises LayoutError."""
        self.fields: dict[str, Field] = {}
        codes = ["<"]
        at, largest, index = 0, 1, 0
        for number, line in enumerate(lines):
            sign, bits, char, name, length = _parse(number, line)
            if name in self.fields:
                raise LayoutError(number, f"there are two fields {name}")
            size = 1 if char else int(bits) // 8
            if -at % size:
                codes.append(f"{-at % size}x")
                at += -at % size
            count = int(length) if length else 1
            code = "s" if char else _CODES[int(bits)].upper() if sign == "u" else _CODES[int(bits)]
            codes.append(f"{count}{code}")
            places = 1 if char else count
            self.fields[name] = Field(name, index, 0 if char else count, bool(length))
            at += size * count
            index += places
            largest = max(largest, size)
        if -at % largest:
            codes.append(f"{-at % largest}x")
        self._struct = struct.Struct("".join(codes))

    @property
    def size(self) -> int:
        """Bytes of one key or value."""
        return self._struct.size

    def unpack(self, data: bytes) -> tuple[int | bytes, ...]:
        """The values of all fields in a row; those of an array one after the other. Raises struct.error."""
        return self._struct.unpack(data)

    def total(self, data: bytes) -> tuple[int | bytes, ...]:
        """As ``unpack``, of a per-CPU value: the sum over all CPUs (each rounded up to 8 bytes)."""
        stride = (self.size + 7) // 8 * 8
        if stride != self.size:
            data = b"".join(data[at : at + self.size] for at in range(0, len(data), stride))
        columns = zip(*self._struct.iter_unpack(data), strict=True)
        return tuple(column[0] if isinstance(column[0], bytes) else sum(column) for column in columns)


def _parse(number: int, line: str) -> tuple[str, str, str, str, str]:
    found = _FIELD.fullmatch(line)
    if found is None:
        raise LayoutError(number, f"{line!r} is no field; write u32 pid, s64 error, u64 slots[32] or char comm[16]")
    sign, bits, char, name, length = (part or "" for part in found.groups())
    if length and not 0 < int(length) <= MAX_LENGTH:
        raise LayoutError(number, f"{line!r} has {length} elements; 1 to {MAX_LENGTH} are possible")
    return sign, bits, char, name, length
