"""A table's rows in order of time, some thousands at a time, from any store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpuflight.events.query.reader import Reader

_STEPS = 4096
_ROWS_AT_ONCE = 20_000


def in_order(reader: Reader, sql: str, time: str, order: str = "") -> Iterator[list[dict[str, Any]]]:
    """Rows of ``sql`` (a SELECT in brackets, or a table), by ``time`` and then ``order``, in lists of at most 20,000.
    Rows whose time is unknown are left out.

    One look counts how many there are in each part of the time, then parts are asked for: to ask for page after page by
    OFFSET would sort everything for each.
    """
    span = reader.rows(f"SELECT min({time}) AS first, max({time}) AS last, count({time}) AS count FROM {sql}")[0]  # noqa: S608
    if not span["count"]:
        return
    first, step = span["first"], (span["last"] - span["first"]) // _STEPS + 1
    counts = reader.rows(
        f"SELECT ({time} - {first}) // {step} AS part, count(*) AS count FROM {sql} WHERE {time} IS NOT NULL"  # noqa: S608
        " GROUP BY part ORDER BY part"
    )
    start, held = 0, 0
    for index, row in enumerate(counts):
        if held and held + row["count"] > _ROWS_AT_ONCE:
            yield from _part(reader, sql, time, order, first + start * step, first + row["part"] * step, held)
            start, held = row["part"], 0
        held += row["count"]
        if index == len(counts) - 1:
            yield from _part(reader, sql, time, order, first + start * step, span["last"] + 1, held)


def _part(
    reader: Reader, sql: str, time: str, order: str, from_ns: int, to_ns: int, count: int
) -> Iterator[list[dict[str, Any]]]:
    """One part; in pages, should very many rows have nearly the same time."""
    keys = ", ".join(key for key in (time, order) if key)
    for offset in range(0, count, _ROWS_AT_ONCE):
        page = f"LIMIT {_ROWS_AT_ONCE} OFFSET {offset}" if count > _ROWS_AT_ONCE else ""
        yield reader.rows(
            f"SELECT * FROM {sql} WHERE {time} >= {from_ns} AND {time} < {to_ns} ORDER BY {keys} {page}"  # noqa: S608
        )
