"""A table's rows in order of time, some thousands at a time, from any store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuflight.events.query.reader import Reader

_STEPS = 4096
_ROWS_AT_ONCE = 20_000


def in_order(reader: Reader, sql: str, time: str, order: str = "") -> Iterator[list[dict[str, Any]]]:
    """Rows of ``sql`` (a SELECT in brackets, or a table), by ``time`` and then ``order``, in lists of at most 20,000
    (more only if more have the very same time). Rows whose time is unknown are left out."""
    keys = ", ".join(key for key in (time, order) if key)
    for inside in parts(reader, sql, time, _ROWS_AT_ONCE):
        yield reader.rows(f"SELECT * FROM {sql} WHERE {inside} ORDER BY {keys}")  # noqa: S608


def parts(reader: Reader, sql: str, time: str, rows_at_once: int) -> Iterator[str]:
    """Conditions that part rows by their time, in order, so that each holds for at most so many.

    One look counts how many there are in each step of the time, then a part is some steps; a step that alone is too
    much is looked at again. To ask for page after page by OFFSET would sort everything for each.
    """
    span = reader.rows(f"SELECT min({time}) AS first, max({time}) AS last, count({time}) AS count FROM {sql}")[0]  # noqa: S608
    if span["count"]:
        yield from _between(reader, sql, time, rows_at_once, span["first"], span["last"] + 1, span["count"])


def _between(
    reader: Reader, sql: str, time: str, rows_at_once: int, from_ns: int, to_ns: int, count: int
) -> Iterator[str]:
    """Conditions from one time up to another."""
    inside = f"{time} >= {from_ns} AND {time} < {to_ns}"
    if count <= rows_at_once or to_ns - from_ns == 1:
        yield inside
        return
    step = (to_ns - from_ns - 1) // _STEPS + 1
    counts = reader.rows(
        f"SELECT ({time} - {from_ns}) // {step} AS part, count(*) AS count FROM {sql} WHERE {inside}"  # noqa: S608
        " GROUP BY part ORDER BY part"
    )
    groups: list[tuple[int, int, int]] = []  # first step, step behind the last, rows
    for row in counts:
        if groups and groups[-1][2] + row["count"] <= rows_at_once:
            groups[-1] = (groups[-1][0], row["part"] + 1, groups[-1][2] + row["count"])
        else:
            groups.append((row["part"], row["part"] + 1, row["count"]))
    for first, behind, held in groups:
        low, high = from_ns + first * step, min(from_ns + behind * step, to_ns)
        yield from _between(reader, sql, time, rows_at_once, low, high, held)
