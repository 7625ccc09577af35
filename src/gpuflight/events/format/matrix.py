"""Rows of whole numbers straight from arrays to JSON, without a Python object per number, where orjson is installed."""

from __future__ import annotations

import functools
from typing import Any

from gpuflight.events.arrays import numpy


def array_text(columns: list[Any]) -> bytes | None:
    """``[[…],[…]]`` of integer arrays of one length; None if it has to be done another way."""
    orjson = _orjson()
    kinds = {column.dtype.kind for column in columns}
    if orjson is None or not kinds <= {"i", "u"}:
        return None
    np = numpy()
    dtype: Any = np.int64
    if "u" in kinds and any(column.dtype.kind == "u" and int(column.max()) >> 63 for column in columns):
        if any(column.dtype.kind == "i" and int(column.min()) < 0 for column in columns):
            return None
        dtype = np.uint64
    matrix = np.empty((len(columns[0]), len(columns)), dtype=dtype)
    for number, column in enumerate(columns):
        matrix[:, number] = column
    text: bytes = orjson.dumps(matrix, option=orjson.OPT_SERIALIZE_NUMPY)
    return text


def prepare() -> None:
    """Import what ``array_text`` needs now, rather than at the first of its calls."""
    if _orjson() is not None:
        numpy()


@functools.cache
def _orjson() -> Any:
    try:
        import orjson
    except ImportError:
        return None
    return orjson
