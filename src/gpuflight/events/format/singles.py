"""Lines of one event: a line's fields as a row, and many lines of one kind at once.

Of a single-event line only a few whole numbers change from line to line (times, corr_id, bytes); what is around them
repeats for every launch of the same kernel from the same place. So a line is cut at these numbers. The parts between
are looked up as they are, byte for byte: they were read in full when they came first, as part of a line whose cut
gave back what its fields say. The numbers of all lines go to numpy's parser at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from gpuflight.events.arrays import numpy
from gpuflight.events.format.cells import Value, cell, read
from gpuflight.events.format.digits import columns
from gpuflight.events.format.plans import SHAPED_FIELDS, Plan
from gpuflight.events.format.rows import array
from gpuflight.events.format.session import Session
from gpuflight.events.format.shapes import shape_of
from gpuflight.events.format.telemetry import FIELDS as TELEMETRY
from gpuflight.events.ledger import Ledger, Place

_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_KEPT_BYTES = 16 << 20
"""Of line parts and their rows per type, before all are forgotten."""
_ROW_BYTES = 1000


class Row(msgspec.Struct):
    """A line as a row: its columns and the fields that nobody knows."""

    values: dict[str, Value]
    extra: dict[str, Any]


def row_of(plan: Plan, wire_type: str, fields: dict[str, Any], session: Session, ledger: Ledger, place: Place) -> Row:
    """The row of a line. Null is unknown by the format's own rule; what cannot be read is counted and unknown."""
    values: dict[str, Value] = dict(plan.constants)
    extra: dict[str, Any] = {}
    shape_fields: dict[str, Any] = {}
    for wire, value in fields.items():
        field = plan.fields.get(wire)
        if field is not None:
            if value is None:
                continue
            got = read(value, field)
            if got is None:
                if field.how != "na":
                    ledger.add("bad_cell", place, subject=f"{wire_type}.{wire}")
            elif field.how[:1] == "@":
                if got != "":
                    values[field.column.name] = session.text(field.how[1:], str(got))
            else:
                values[field.column.name] = got
        elif wire in plan.ignored or (wire == "end_ns" and "start_ns" in plan.fields):
            continue
        elif plan.shaped and wire in SHAPED_FIELDS:
            shape_fields[wire] = value
        elif not (plan.telemetry and wire in TELEMETRY):
            extra[wire] = value
            ledger.add("unknown_column", place, subject=f"{wire_type}.{wire}")
    if shape_fields:
        shape, bad = shape_of(shape_fields)
        for wire in bad:
            ledger.add("bad_cell", place, subject=f"{wire_type}.{wire}")
        if shape:
            values["shape_id"] = session.shape(shape)
    if wire_type == "profile_sample" and "sample_kind" not in values:
        values["sample_kind"] = 1 if "metric_name" in fields else 0
    return Row(values, extra)


def add_duration(plan: Plan, values: dict[str, Value], fields: dict[str, Any]) -> None:
    """duration = end - start, where a line tells the end and no duration."""
    if "duration_ns" in values or "end_ns" in plan.fields or "start_ns" not in values:
        return
    end = cell(fields.get("end_ns"), "i64")
    if isinstance(end, int) and "duration_ns" in {c.name for c in plan.table.columns}:
        duration = end - int(values["start_ns"])
        if -(1 << 63) <= duration < 1 << 63:
            values["duration_ns"] = duration


Parts = tuple[tuple[bytes, ...], tuple[bytes, ...]]
_PADDING = bytes(8)


class Cut:
    """Where lines of one layout are cut: ``marks`` in order, the numbers between the first and second, third and
    fourth, …; ``skeletons``: the text of each group of numbers without its digits."""

    def __init__(self, marks: list[bytes], groups: list[list[str]]) -> None:
        self.marks = marks
        self.groups = groups
        self.skeletons = [b"".join([b"", *(b',"' + n.encode() + b'":' for n in names[1:])]) for names in groups]
        self.parts = _cutter(marks)
        """(what repeats, what changes) of a line; a line of another layout gives parts that nobody knows."""

    def texts(self, repeats: tuple[bytes, ...]) -> tuple[bytes, ...]:
        """What stands around the numbers of a line, marks included."""
        ends, begins = [*self.marks[::2], b""], [b"", *self.marks[1::2]]
        return tuple(b + text + e for b, text, e in zip(begins, repeats, ends, strict=True))

    def numbers(self, changes: list[tuple[bytes, ...]]) -> dict[str, Any] | None:
        """Fields → uint64 arrays, over all lines; None if a line has anything but digits where numbers should be."""
        result: dict[str, Any] = {}
        for g, (names, skeleton) in enumerate(zip(self.groups, self.skeletons, strict=True)):
            columns = numbers_between([change[g] for change in changes], names, skeleton)
            if columns is None:
                return None
            result.update(zip(names, columns, strict=True))
        return result


def numbers_between(texts: list[bytes], names: list[str], skeleton: bytes) -> Any | None:
    """A row of uint64 for each name, out of texts that are one number for each with a skeleton between them; None if
    one is anything else."""
    np = numpy()
    data = b"\n".join([_PADDING, *texts, b""])
    content = np.frombuffer(data, dtype=np.uint8)
    marks = np.flatnonzero((content[len(_PADDING) :] - np.uint8(48)) > 9)
    marks += len(_PADDING)
    if content[marks].tobytes() != b"\n" + (skeleton + b"\n") * len(texts):
        return None
    width = len(skeleton) + 1
    ends = np.empty((len(names), len(texts)), dtype=np.int64)
    lengths = np.empty_like(ends)
    at = 1
    for n, name in enumerate(names):
        if n:
            at += len(name) + 4
        ends[n] = marks[at::width]
        np.subtract(ends[n], marks[at - 1 : -1 : width], out=lengths[n])
    lengths -= 1
    if int(lengths.sum()) + len(marks) + len(_PADDING) != len(data):  # digits within the skeleton
        return None
    return columns(data, ends, lengths)


def _cutter(marks: list[bytes]) -> Callable[[bytes], Parts]:
    """The function that cuts: written out for one and two groups of numbers, which is what there is."""
    if len(marks) == 2:
        first, second = marks

        def one(line: bytes) -> Parts:
            a, _, rest = line.partition(first)
            x, _, b = rest.partition(second)
            return (a, b), (x,)

        return one
    if len(marks) == 4:
        first, second, third, fourth = marks

        def two(line: bytes) -> Parts:
            a, _, rest = line.partition(first)
            x, _, rest = rest.partition(second)
            b, _, rest = rest.partition(third)
            y, _, c = rest.partition(fourth)
            return (a, b, c), (x, y)

        return two

    def many(line: bytes) -> Parts:
        repeats: list[bytes] = []
        changes: list[bytes] = []
        rest = line
        for i, mark in enumerate(marks):
            part, _, rest = rest.partition(mark)
            (changes if i & 1 else repeats).append(part)
        return (*repeats, rest), tuple(changes)

    return many


def find_cut(plan: Plan, line: bytes) -> Cut | None:
    """How to cut lines like this one; None if it has no changing numbers or is not written compactly."""
    try:
        fields = _raw_fields.decode(line)
    except (ValueError, RecursionError):
        return None
    names = list(fields)
    texts = [bytes(fields[name]) for name in names]
    whole = b"{" + b",".join(b'"' + n.encode() + b'":' + t for n, t in zip(names, texts, strict=True)) + b"}"
    if whole != line:
        return None
    changing = [n in plan.volatile and t.isdigit() for n, t in zip(names, texts, strict=True)]
    if not any(changing) or changing[0]:
        return None
    marks: list[bytes] = []
    groups: list[list[str]] = []
    for i, name in enumerate(names):
        if changing[i] and not changing[i - 1]:
            marks.append(b',"' + name.encode() + b'":')
            groups.append([])
        if changing[i]:
            groups[-1].append(name)
        elif i and changing[i - 1]:
            marks.append(b',"' + name.encode() + b'":')
    if changing[-1]:
        marks.append(b"}")
    cut = Cut(marks, groups)
    _, changes = cut.parts(line)
    numbers = cut.numbers([changes])
    if numbers is None or any(str(int(numbers[n][0])).encode() != bytes(fields[n]) for g in groups for n in g):
        return None
    return cut


class Repeats:
    """Rows of what repeats, by the line parts that say it."""

    def __init__(self) -> None:
        self.index: dict[Any, int] = {}
        self.rows: list[Row] = []
        self._bytes = 0
        self._alike: dict[tuple[str, frozenset[str], frozenset[str]], _Alike] = {}
        self._groups: list[_Alike] = []
        self._group_of: list[int] = []
        self._place_in_group: list[int] = []
        self._arrays: tuple[Any, Any] | None = None

    def add(self, key: Any, size: int, row: Row, session_id: str) -> int:
        number = self.index[key] = len(self.rows)
        self.rows.append(row)
        signature = (session_id, frozenset(row.values), frozenset(row.extra))
        group = self._alike.get(signature)
        if group is None:
            group = self._alike[signature] = _Alike(session_id, len(self._groups))
            self._groups.append(group)
        self._group_of.append(group.number)
        self._place_in_group.append(len(group.rows))
        group.rows.append(row)
        self._arrays = group.columns = None
        self._bytes += size + _ROW_BYTES
        return number

    @property
    def full(self) -> bool:
        return self._bytes > _KEPT_BYTES

    def take(self, numbers: Any, kinds: dict[str, str]) -> list[Taken]:
        """Rows by number (a list or array of them); those of one session with the same columns together."""
        np = numpy()
        numbers = np.asarray(numbers, dtype=np.int64)
        if len(self._groups) == 1:
            return [self._groups[0].take(numbers, None, kinds)]
        if self._arrays is None:
            self._arrays = (np.array(self._group_of), np.array(self._place_in_group))
        groups, places = (array[numbers] for array in self._arrays)
        result = []
        for number in np.flatnonzero(np.bincount(groups)).tolist():
            positions = np.flatnonzero(groups == number)
            result.append(self._groups[number].take(places[positions], positions, kinds))
        return result


class _Alike:
    """Rows of one session with the same columns. ``columns``: all of them by column, None until they are asked for."""

    def __init__(self, session_id: str, number: int) -> None:
        self.number = number
        self.rows: list[Row] = []
        self.columns: dict[str, Any] | None = None
        self._session_id = session_id

    def take(self, places: Any, positions: Any, kinds: dict[str, str]) -> Taken:
        rows = self.rows
        if self.columns is None:
            self.columns = {n: array([row.values[n] for row in rows], kinds[n]) for n in rows[0].values}
        columns: dict[str, Any] = {}
        chosen: list[int] | None = None
        for name, column in self.columns.items():
            if isinstance(column, list):
                chosen = places.tolist() if chosen is None else chosen
                columns[name] = [column[i] for i in chosen]
            else:
                columns[name] = column[places]
        extra = {name: [rows[i].extra[name] for i in places.tolist()] for name in rows[0].extra}
        return Taken(self._session_id, len(places), positions, columns, extra)


class Taken(msgspec.Struct):
    """Rows of one session with the same columns; ``positions``: which of those asked for, None for all."""

    session_id: str
    count: int
    positions: Any
    columns: dict[str, Any]
    extra: dict[str, list[Any]]
