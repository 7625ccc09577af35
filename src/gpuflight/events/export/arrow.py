"""A table or an answer as an Arrow IPC stream (https://arrow.apache.org/docs/format/Columnar.html), a batch at a time.

Written here because the libraries that write it weigh more than all of gpuflight. Columns are int64, uint64, float64,
bool and large_utf8, all nullable. PyArrow (``pyarrow.ipc.open_stream``), Polars, nanoarrow and DuckDB's extension read
it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from gpuflight.events.arrays import numpy
from gpuflight.events.export.flat import Field, Flat, Writer
from gpuflight.events.export.tables import (
    QUERIES,
    Columnar,
    answer_columns,
    answer_rows,
    columns_of,
    parts_of,
    table_sql,
)
from gpuflight.events.query.reader import Reader
from gpuflight.events.store.catalogue import Session
from gpuflight.events.tables import TABLES

ROWS_AT_ONCE = 65_536
_V5 = 4
_SCHEMA, _RECORD_BATCH = 1, 3
_INT, _FLOATING_POINT, _BOOL, _LARGE_UTF8 = 2, 3, 6, 20
_DOUBLE = 2
_END = struct.pack("<Ii", 0xFFFFFFFF, 0)
_NUMBERS = {"BIGINT": "int64", "UBIGINT": "uint64", "DOUBLE": "float64"}


def arrow_stream(store: Columnar, sessions: Sequence[Session], what: str) -> Iterator[bytes]:
    """Messages of the stream. Raises InputError for a table or answer that there is not."""
    reader = Reader(store, sessions)
    if what in QUERIES:
        rows = answer_rows(reader, what)
        columns = [(name, "VARCHAR" if kind == "HUGEINT" else kind) for name, kind in answer_columns(rows)]
        yield _message(_SCHEMA, lambda flat: _schema(flat, columns), b"")
        if rows:
            yield _batch(columns, {name: [row.get(name) for row in rows] for name, _ in columns}, len(rows))
    else:
        columns = columns_of(what)
        yield _message(_SCHEMA, lambda flat: _schema(flat, columns), b"")
        sql, time = table_sql(reader, what), TABLES[what].time
        for condition in parts_of(reader, what, ROWS_AT_ONCE):
            order = f'ORDER BY "{time}"' if time else "ORDER BY ALL"
            found = store.columns(f"SELECT * FROM {sql} WHERE {condition} {order}")  # noqa: S608
            count = len(found[columns[0][0]])
            if count:
                yield _batch(columns, found, count)
    yield _END


def _message(kind: int, header: Writer, body: bytes) -> bytes:
    fields: list[Field] = [(0, "h", _V5), (1, "B", kind), (2, "ref", header), (3, "q", len(body))]
    meta = Flat().finish(lambda flat: flat.table(fields))
    return struct.pack("<Ii", 0xFFFFFFFF, len(meta)) + meta + body


def _schema(flat: Flat, columns: Sequence[tuple[str, str]]) -> int:
    fields = [_field(name, kind) for name, kind in columns]
    return flat.table([(0, "h", 0), (1, "ref", lambda flat: flat.tables(fields))])


def _field(name: str, kind: str) -> Writer:
    number = _LARGE_UTF8
    details: list[Field] = []
    if kind in ("BIGINT", "UBIGINT"):
        number, details = _INT, [(0, "i", 64), (1, "?", kind == "BIGINT")]
    elif kind == "DOUBLE":
        number, details = _FLOATING_POINT, [(0, "h", _DOUBLE)]
    elif kind == "BOOLEAN":
        number = _BOOL
    return lambda flat: flat.table(
        [
            (0, "ref", lambda flat: flat.text(name)),
            (1, "?", True),
            (2, "B", number),
            (3, "ref", lambda flat: flat.table(details)),
            (5, "ref", lambda flat: flat.tables([])),
        ]
    )


def _batch(columns: Sequence[tuple[str, str]], found: dict[str, Any], count: int) -> bytes:
    nodes: list[tuple[int, int]] = []
    buffers: list[tuple[int, int]] = []
    body = bytearray()
    for name, kind in columns:
        nulls, parts = _column(found[name], kind)
        nodes.append((count, nulls))
        for part in parts:
            buffers.append((len(body), len(part)))
            body += part + bytes(-len(part) % 8)
    fields: list[Field] = [
        (0, "q", count),
        (1, "ref", lambda flat: flat.pairs(nodes)),
        (2, "ref", lambda flat: flat.pairs(buffers)),
    ]
    return _message(_RECORD_BATCH, lambda flat: flat.table(fields), bytes(body))


def _column(values: Any, kind: str) -> tuple[int, list[bytes]]:
    """How many are unknown; validity, then (text) offsets, then data."""
    np = numpy()
    if isinstance(values, np.ma.MaskedArray):
        missing = np.ma.getmaskarray(values)
        plain = values.data
    elif isinstance(values, list):
        missing = np.array([value is None for value in values], dtype=bool)
        plain = values
    else:
        plain = values
        missing = np.array([value is None for value in plain.tolist()]) if plain.dtype == object else None
    nulls = 0 if missing is None else int(missing.sum())
    valid = b"" if not nulls else np.packbits(~missing, bitorder="little").tobytes()
    if kind in _NUMBERS:
        if isinstance(plain, list):
            plain = [0 if value is None else value for value in plain]
        return nulls, [valid, np.asarray(plain, dtype=_NUMBERS[kind]).tobytes()]
    if kind == "BOOLEAN":
        return nulls, [valid, np.packbits([bool(value) for value in plain], bitorder="little").tobytes()]
    listed = plain if isinstance(plain, list) else plain.tolist()
    gone = [False] * len(listed) if missing is None else missing.tolist()
    texts = [b"" if no else str(text).encode("utf-8", "replace") for text, no in zip(listed, gone, strict=True)]
    offsets = np.zeros(len(texts) + 1, dtype="int64")
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    return nulls, [valid, offsets.tobytes(), b"".join(texts)]
