"""Device and host memory that the program took: how much at once, what it never gave back."""

from __future__ import annotations

import msgspec

from gpuflight.events.query.reader import Reader, page
from gpuflight.events.tables import MEMORY_KINDS


class MemoryLine(msgspec.Struct, kw_only=True):
    """Memory of one kind on one device. ``peak_bytes`` was in use at ``peak_ns``, as far as the log saw it begin;
    ``held_bytes`` in ``held_count`` pieces at its end. ``unmatched_frees_count``: given back, never seen taken."""

    kind: str
    device_id: int | None
    allocations_count: int
    allocated_bytes: int
    frees_count: int
    unmatched_frees_count: int
    peak_bytes: int
    peak_ns: int | None
    held_bytes: int
    held_count: int


class Held(msgspec.Struct, kw_only=True):
    """A piece that was never given back: a leak, if the program ended in order."""

    kind: str
    device_id: int | None
    address: int
    bytes: int
    start_ns: int
    scope: str | None
    stack: str | None


def _matched(reader: Reader) -> str:
    """SQL of every allocation with its free: of an address the first one after it. Addresses are used again, so each
    event is numbered among those of its address in time."""
    return f"""
        WITH event AS (
            SELECT *, lead(memory_op) OVER piece AS next_op, lead(start_ns) OVER piece AS next_ns,
                lag(memory_op) OVER piece AS last_op, lag(bytes) OVER piece AS last_bytes
            FROM {reader.table("allocation")} WHERE clock = 0 AND memory_op IN (1, 2) AND address IS NOT NULL
            WINDOW piece AS (PARTITION BY session_no, device_id, address ORDER BY start_ns, memory_op DESC))
    """  # noqa: S608


def memory_use(reader: Reader) -> list[MemoryLine]:
    """Memory by kind and device, the highest peak first."""
    rows = reader.rows(
        f"""
        {_matched(reader)},
        step AS (
            SELECT coalesce(memory_kind, 0) AS kind, device_id, start_ns, memory_op,
                CASE WHEN memory_op = 1 THEN bytes WHEN last_op = 1 THEN -last_bytes ELSE 0 END AS change,
                memory_op = 1 AND coalesce(next_op, 0) <> 2 AS held,
                memory_op = 2 AND coalesce(last_op, 0) <> 1 AS unmatched, bytes, session_no
            FROM event),
        level AS (
            SELECT *, sum(change) OVER (
                PARTITION BY session_no, kind, device_id ORDER BY start_ns, memory_op DESC
                ROWS UNBOUNDED PRECEDING) AS used FROM step)
        SELECT kind, device_id, count(*) FILTER (memory_op = 1) AS allocations_count,
            coalesce(sum(bytes) FILTER (memory_op = 1), 0) AS allocated_bytes,
            count(*) FILTER (memory_op = 2) AS frees_count, count(*) FILTER (unmatched) AS unmatched_frees_count,
            max(used) AS peak_bytes, arg_max(start_ns, used) AS peak_ns,
            coalesce(sum(bytes) FILTER (held), 0) AS held_bytes, count(*) FILTER (held) AS held_count
        FROM level GROUP BY kind, device_id ORDER BY peak_bytes DESC, kind, device_id
        """  # noqa: S608
    )
    return [
        MemoryLine(
            **{
                **row,
                "kind": MEMORY_KINDS.get(row["kind"], str(row["kind"])),
                "allocated_bytes": int(row["allocated_bytes"]),
                "peak_bytes": max(int(row["peak_bytes"]), 0),
                "held_bytes": int(row["held_bytes"]),
            }
        )
        for row in rows
    ]


def held(reader: Reader, *, limit: int = 100, offset: int = 0) -> list[Held]:
    """What was never given back, the largest first."""
    rows = reader.rows(
        f"""
        {_matched(reader)}
        SELECT session_no, coalesce(memory_kind, 0) AS kind, device_id, address, bytes, start_ns,
            coalesce(scope_id, 0) AS scope_id, coalesce(stack_id, 0) AS stack_id
        FROM event WHERE memory_op = 1 AND coalesce(next_op, 0) <> 2
        ORDER BY bytes DESC, start_ns, address {page(limit, offset)}
        """  # noqa: S608
    )
    scopes = reader.texts("user_scope", (row["scope_id"] for row in rows))
    stacks = reader.texts("stack", (row["stack_id"] for row in rows))
    return [
        Held(
            kind=MEMORY_KINDS.get(row["kind"], str(row["kind"])),
            device_id=row["device_id"],
            address=row["address"],
            bytes=row["bytes"],
            start_ns=row["start_ns"],
            scope=scopes.get((row["session_no"], row["scope_id"])),
            stack=stacks.get((row["session_no"], row["stack_id"])),
        )
        for row in rows
    ]


class MemoryPoint(msgspec.Struct):
    """Bytes in use from ``time_ns`` on, the most within the step that begins there."""

    time_ns: int
    bytes: int


def memory_series(reader: Reader, *, device_id: int | None = None, points: int = 500) -> list[MemoryPoint]:
    """Device memory (device, array, managed, static) in use over time: the most of each of at most ``points`` steps."""
    page(points)
    device = "" if device_id is None else f"AND device_id = {int(device_id)}"
    rows = reader.rows(
        f"""
        {_matched(reader)},
        level AS (
            SELECT start_ns, sum(CASE WHEN memory_op = 1 THEN bytes WHEN last_op = 1 THEN -last_bytes ELSE 0 END) OVER (
                ORDER BY start_ns, memory_op DESC ROWS UNBOUNDED PRECEDING) AS used
            FROM event WHERE memory_kind IN (3, 4, 5, 6, 7) {device}),
        span AS (SELECT min(start_ns) AS first, greatest(max(start_ns) - min(start_ns), 1) AS length FROM level)
        SELECT min(start_ns) AS time_ns, max(used) AS bytes
        FROM level, span GROUP BY least((start_ns - first)::HUGEINT * {int(points)} // length, {int(points) - 1})
        ORDER BY time_ns
        """  # noqa: S608
    )
    return [MemoryPoint(row["time_ns"], max(int(row["bytes"]), 0)) for row in rows]
