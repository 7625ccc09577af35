"""The rows of a columnar batch as columns: at once where they are plain integers, cell by cell where they are not.

The fast way takes a text only if what is not a digit is the very skeleton of n rows of c values, but for minus signs in
front of numbers (so no floats, strings, nulls, blanks, short rows), and if every number fits into its column.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from gpuflight.events.arrays import numpy
from gpuflight.events.format import digits
from gpuflight.events.format.cells import Value, read
from gpuflight.events.format.plans import MEMORY_WORDS, Plan

_FEWEST_BYTES = 4096
"""Shorter texts are sooner read cell by cell."""
_BEFORE = 8
_PADDING = bytes(_BEFORE)
_DTYPES = {"i64": "int64", "u64": "uint64", "f64": "float64"}
_any_rows = msgspec.json.Decoder(list[Any])


@lru_cache(maxsize=64)
def _skeleton(rows: int, width: int) -> bytes:
    return b"[" + b",".join([b"[" + b"," * (width - 1) + b"]"] * rows) + b"]"


def integers(text: bytes, width: int) -> tuple[Any, Any] | None:
    """All values as ``width`` rows (one per column) of uint64, without their signs, and which are negative (None: none
    is). None if the text is not that plain, or has a number of 2^64 or more.
    """
    np = numpy()
    padded = b"".join([_PADDING, text])
    content = np.frombuffer(padded, dtype=np.uint8)
    marks = np.flatnonzero((content[_BEFORE:] - np.uint8(48)) > 9)
    marks += _BEFORE
    kinds = content[marks]
    minuses = 0
    if b"-" in text:
        others = kinds != ord("-")
        minuses = len(marks)
        marks, kinds = marks[others], kinds[others]
        minuses -= len(marks)
    count = (len(marks) - 1) // (width + 2)
    if count < 1 or kinds.tobytes() != _skeleton(count, width):
        return None
    places = np.ascontiguousarray(marks[1:].reshape(count, width + 2).T)
    ends = places[1:-1]
    lengths = ends - places[:-2]
    lengths -= 1
    if int(lengths.sum()) + len(marks) != len(text):  # something between brackets
        return None
    negative = None
    if minuses:
        negative = content[places[:-2] + 1] == ord("-")
        if int(np.count_nonzero(negative)) != minuses:
            return None
        lengths -= negative
    values = digits.columns(padded, ends, lengths)
    return None if values is None else (values, negative)


def column_of(values: Any, negative: Any, kind: str) -> Any:
    """A column of the kind, or None if a value is none of its values."""
    np = numpy()
    if kind == "u64":
        return values if negative is None or not negative.any() else None
    signed = values.view(np.int64)
    if signed.min() < 0:
        return None
    return signed if negative is None else np.where(negative, -signed, signed)


class Parsed(msgspec.Struct):
    """Columns of some rows of one batch; ``indices``: which rows these are (None: all), in their order."""

    columns: dict[str, Any]
    extra: dict[str, list[Any]]
    count: int
    indices: list[int] | None = None


class Problems(msgspec.Struct):
    """What was met on the way: counts by reason, and by column for cells."""

    counts: dict[tuple[str, str], int] = msgspec.field(default_factory=dict)

    def add(self, reason: str, subject: str = "", count: int = 1) -> None:
        key = (reason, subject)
        self.counts[key] = self.counts.get(key, 0) + count


def parse_rows(
    plan: Plan, wire_type: str, names: list[str], rows: bytes | list[Any], problems: Problems, *, plain: bool = False
) -> list[Parsed]:
    """Columns under our names (``dt_ns`` still relative), rows that lack something apart from the others.

    ``rows``: their JSON, or what it says. Raises ValueError if that is no list, or with ``plain`` if it is anything but
    plain integers.
    """
    fields = [plan.fields.get(name) for name in names]
    for name, field in zip(names, fields, strict=True):
        if field is None:
            problems.add("unknown_column", f"{wire_type}.{name}")
    floats = any(field is not None and field.column.kind == "f64" and field.how != "x100" for field in fields)
    if isinstance(rows, bytes):
        fast = _fast(names, fields, rows) if names and not floats and len(rows) >= _FEWEST_BYTES else None
        if fast is not None:
            return [fast]
        if plain:
            raise ValueError("rows are not plain integers")
        rows = _any_rows.decode(rows)
    return _slow(wire_type, names, fields, rows, problems)


def _fast(names: list[str], fields: list[Any], text: bytes) -> Parsed | None:
    parsed = integers(text, len(names))
    if parsed is None:
        return None
    values, negative = parsed
    columns: dict[str, Any] = {}
    extra: dict[str, list[Any]] = {}
    for j, (name, field) in enumerate(zip(names, fields, strict=True)):
        kind = "i64" if field is None or field.how == "memory_word" else field.column.kind
        column = column_of(values[j], None if negative is None else negative[j], kind)
        if column is None:
            return None
        if field is None:
            extra[name] = column.tolist()
        elif field.how == "memory_word":
            codes = column.tolist()
            if not MEMORY_WORDS.keys() >= set(codes):
                return None
            columns[field.column.name] = list(map(MEMORY_WORDS.__getitem__, codes))
        else:
            columns[field.column.name] = column / 100 if field.how == "x100" else column
    return Parsed(columns, extra, values.shape[1])


def _slow(wire_type: str, names: list[str], fields: list[Any], decoded: list[Any], problems: Problems) -> list[Parsed]:
    rows: list[dict[str, Value]] = []
    extras: list[dict[str, Any]] = []
    whole = _uniform(names, fields, decoded)
    if whole is not None:
        return [whole]
    indices: list[int] = []
    for number, values in enumerate(decoded):
        if not isinstance(values, list):
            problems.add("bad_row", wire_type)
            continue
        if len(values) != len(names):
            problems.add("short_row" if len(values) < len(names) else "long_row", wire_type)
        row: dict[str, Value] = {}
        extra: dict[str, Any] = {}
        for name, field, value in zip(names, fields, values, strict=False):
            if field is None:
                extra[name] = value
            elif value is not None:
                got = read(value, field)
                if got is None:
                    problems.add("bad_cell", f"{wire_type}.{name}")
                else:
                    row[field.column.name] = got
        if len(values) > len(names):
            extra["…"] = values[len(names) :]
        rows.append(row)
        extras.append(extra)
        indices.append(number)
    kinds = {field.column.name: field.column.kind for field in fields if field is not None}
    return [
        Parsed(columns, extra, len(chosen), [indices[i] for i in chosen])
        for chosen, columns, extra in gather(rows, extras, kinds)
    ]


def _uniform(names: list[str], fields: list[Any], rows: list[Any]) -> Parsed | None:
    """Rows all of one length and every column of one plain type: floats among integers, as counters have them."""
    np = numpy()
    width = len(names)
    if not rows or any(type(row) is not list or len(row) != width for row in rows):
        return None
    columns: dict[str, Any] = {}
    extra: dict[str, list[Any]] = {}
    for name, field, values in zip(names, fields, zip(*rows, strict=True), strict=True):
        if field is None:
            extra[name] = list(values)
            continue
        kinds = set(map(type, values))
        floats = field.column.kind == "f64"
        if not kinds <= ({int, float} if floats else {int}):
            return None
        try:
            column = np.array(values, dtype=_DTYPES[field.column.kind])
        except (OverflowError, KeyError):
            return None
        columns[field.column.name] = column / 100 if field.how == "x100" else column
    return Parsed(columns, extra, len(rows))


def gather(
    rows: list[dict[str, Value]], extras: list[dict[str, Any]], kinds: dict[str, str]
) -> list[tuple[list[int], dict[str, Any], dict[str, list[Any]]]]:
    """Rows with the same columns together: (which rows, their columns, their unknown columns)."""
    groups: dict[tuple[frozenset[str], frozenset[str]], list[int]] = {}
    for i, (row, extra) in enumerate(zip(rows, extras, strict=True)):
        groups.setdefault((frozenset(row), frozenset(extra)), []).append(i)
    result = []
    for chosen in groups.values():
        first = chosen[0]
        columns = {name: array([rows[i][name] for i in chosen], kinds[name]) for name in rows[first]}
        extra_columns = {name: [extras[i][name] for i in chosen] for name in extras[first]}
        result.append((chosen, columns, extra_columns))
    return result


def array(values: list[Any], kind: str) -> Any:
    """A column of a kind: a numpy array, for text and json the list itself."""
    if kind in ("text", "json"):
        return values
    return numpy().array(values, dtype=_DTYPES[kind])
