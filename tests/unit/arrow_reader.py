"""A reader of Arrow IPC streams for tests: as little of FlatBuffers and Arrow as ours write, written from the
specification and not from the writer."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any


class Table:
    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        vtable = at - struct.unpack_from("<i", data, at)[0]
        count = (struct.unpack_from("<H", data, vtable)[0] - 4) // 2
        self.offsets = struct.unpack_from(f"<{count}H", data, vtable + 4)

    def scalar(self, slot: int, form: str, default: Any = 0) -> Any:
        if slot >= len(self.offsets) or not self.offsets[slot]:
            return default
        place = self.at + self.offsets[slot]
        assert place % struct.calcsize(form) == 0, "not aligned"
        return struct.unpack_from(f"<{form}", self.data, place)[0]

    def place(self, slot: int) -> int:
        place = self.at + self.offsets[slot]
        return place + int(struct.unpack_from("<I", self.data, place)[0])

    def table(self, slot: int) -> Table:
        return Table(self.data, self.place(slot))

    def text(self, slot: int) -> str:
        place = self.place(slot)
        (size,) = struct.unpack_from("<I", self.data, place)
        assert self.data[place + 4 + size] == 0
        return self.data[place + 4 : place + 4 + size].decode()

    def tables(self, slot: int) -> list[Table]:
        place = self.place(slot)
        (count,) = struct.unpack_from("<I", self.data, place)
        places = [place + 4 + 4 * i for i in range(count)]
        return [Table(self.data, p + struct.unpack_from("<I", self.data, p)[0]) for p in places]

    def pairs(self, slot: int) -> list[tuple[int, int]]:
        place = self.place(slot)
        (count,) = struct.unpack_from("<I", self.data, place)
        assert (place + 4) % 8 == 0
        return [struct.unpack_from("<qq", self.data, place + 4 + 16 * i) for i in range(count)]


def read(stream: bytes) -> tuple[list[tuple[str, str]], list[dict[str, Any]], int]:
    """(name, type) of the columns, the rows without what is null, and how many batches there were."""
    columns: list[tuple[str, str]] = []
    rows: list[dict[str, Any]] = []
    at = batches = 0
    while True:
        marker, size = struct.unpack_from("<Ii", stream, at)
        assert marker == 0xFFFFFFFF and size % 8 == 0 and at % 8 == 0
        at += 8
        if size == 0:
            assert at == len(stream)
            return columns, rows, batches
        meta = stream[at : at + size]
        message = Table(meta, struct.unpack_from("<I", meta)[0])
        assert message.scalar(0, "h") == 4  # V5
        kind, length = message.scalar(1, "B"), message.scalar(3, "q")
        body = stream[at + size : at + size + length]
        at += size + length
        if kind == 1:
            assert not columns
            columns = [_column(field) for field in message.table(2).tables(1)]
        else:
            assert kind == 3
            batches += 1
            rows += _rows(message.table(2), columns, body)


def _column(field: Table) -> tuple[str, str]:
    assert field.scalar(1, "?") and field.tables(5) == []
    number, details = field.scalar(2, "B"), field.table(3)
    if number == 2:
        assert details.scalar(0, "i") == 64
        return field.text(0), "int64" if details.scalar(1, "?", False) else "uint64"
    if number == 3:
        assert details.scalar(0, "h") == 2
        return field.text(0), "float64"
    return field.text(0), {6: "bool", 20: "large_utf8"}[number]


def _rows(batch: Table, columns: list[tuple[str, str]], body: bytes) -> list[dict[str, Any]]:
    count = batch.scalar(0, "q")
    nodes, buffers = batch.pairs(1), iter(batch.pairs(2))
    assert len(nodes) == len(columns)
    rows: list[dict[str, Any]] = [{} for _ in range(count)]

    def part() -> bytes:
        start, size = next(buffers)
        assert start % 8 == 0 and start + size <= len(body)
        return body[start : start + size]

    for (name, kind), (length, nulls) in zip(columns, nodes, strict=True):
        assert length == count
        validity = part()
        valid = [not validity or bool(validity[i // 8] >> i % 8 & 1) for i in range(count)]
        assert valid.count(False) == nulls
        if kind == "large_utf8":
            offsets = struct.unpack(f"<{count + 1}q", part())
            data = part()
            values: list[Any] = [data[a:b].decode() for a, b in pairwise(offsets)]
        elif kind == "bool":
            bits = part()
            values = [bool(bits[i // 8] >> i % 8 & 1) for i in range(count)]
        else:
            values = list(struct.unpack(f"<{count}{ {'int64': 'q', 'uint64': 'Q', 'float64': 'd'}[kind] }", part()))
        for row, value, known in zip(rows, values, valid, strict=True):
            if known:
                row[name] = value
    assert next(buffers, None) is None
    return rows
