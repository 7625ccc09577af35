"""The rows of a columnar batch as columns: at once where they are plain integers, cell by cell where they are not.

The fast way hands the text of all rows to numpy's integer parser. It is taken only if that is sure to be exact: the
text without its digits must be the very skeleton of n rows of c values (so no floats, strings, nulls, short rows),
minus signs must add up to the negative values found (so nothing above 2^63 went into a signed column), and no value
may be 2^64-1, which is also what the parser answers for anything larger.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from gpuflight.events.arrays import numpy
from gpuflight.events.format.cells import Value, read
from gpuflight.events.format.plans import Plan

DIGITS = b"0123456789-"
_BRACKETS = b"[]"
_DTYPES = {"i64": "int64", "u64": "uint64", "f64": "float64"}
_any_rows = msgspec.json.Decoder(list[Any])


@lru_cache(maxsize=64)
def _skeleton(rows: int, width: int) -> bytes:
    return b"[" + b",".join([b"[" + b"," * (width - 1) + b"]"] * rows) + b"]"


def integers(text: bytes, width: int) -> Any:
    """All values as an uint64 array of ``width`` rows (one per column), or None if the text is not that plain.

    Negative values are there modulo 2^64: a view as int64 is exact.
    """
    np = numpy()
    found = text.translate(None, DIGITS)
    count = (len(found) - 1) // (width + 2)
    if not count or found != _skeleton(count, width):
        return None
    values = np.fromstring(text.translate(None, _BRACKETS), dtype=np.ulonglong, sep=",")
    if values.size != count * width:
        return None
    return np.ascontiguousarray(values.reshape(count, width).T)


def exact(values: Any, text: bytes, signed: list[int], unsigned: list[int]) -> bool:
    """Whether the parsed integers are what the text says, given which columns are signed."""
    np = numpy()
    negatives = sum(int(np.count_nonzero(values[j].view(np.int64) < 0)) for j in signed)
    if negatives != text.count(b"-"):
        return False
    limit = (1 << 64) - 1
    return not any(bool((values[j] == limit).any()) for j in unsigned)


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
    plan: Plan, wire_type: str, names: list[str], rows: bytes | list[Any], problems: Problems
) -> list[Parsed]:
    """Columns under our names (``dt_ns`` still relative), rows that lack something apart from the others.

    ``rows``: their JSON, or what it says. Raises ValueError if that is no list.
    """
    fields = [plan.fields.get(name) for name in names]
    for name, field in zip(names, fields, strict=True):
        if field is None:
            problems.add("unknown_column", f"{wire_type}.{name}")
    floats = any(field is not None and field.column.kind == "f64" and field.how != "x100" for field in fields)
    if isinstance(rows, bytes):
        fast = _fast(names, fields, rows) if names and not floats else None
        if fast is not None:
            return [fast]
        rows = _any_rows.decode(rows)
    return _slow(wire_type, names, fields, rows, problems)


def _fast(names: list[str], fields: list[Any], text: bytes) -> Parsed | None:
    np = numpy()
    values = integers(text, len(names))
    if values is None:
        return None
    unsigned = [j for j, field in enumerate(fields) if field is not None and field.column.kind == "u64"]
    signed = [j for j in range(len(names)) if j not in unsigned]
    if not exact(values, text, signed, unsigned):
        return None
    columns: dict[str, Any] = {}
    extra: dict[str, list[Any]] = {}
    for j, (name, field) in enumerate(zip(names, fields, strict=True)):
        if field is None:
            extra[name] = values[j].view(np.int64).tolist()
        elif field.column.kind == "u64":
            columns[field.column.name] = values[j].view(np.uint64)
        elif field.how == "x100":
            columns[field.column.name] = values[j].view(np.int64) / 100
        else:
            columns[field.column.name] = values[j].view(np.int64)
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
