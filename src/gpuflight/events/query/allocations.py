"""Device and host memory that the program took: how much at once, what it never gave back."""

from __future__ import annotations

import msgspec

from gpuflight.events.query.reader import Reader, page
from gpuflight.events.tables import MEMORY_KINDS


class MemoryLine(msgspec.Struct, kw_only=True):
    """Memory of one kind on one device. ``peak_bytes`` was in use at ``peak_ns``, as far as the log saw it begin;
    ``held_bytes`` in ``held_count`` pieces at its end. ``unmatched_frees_count``: given back, never seen taken;
    ``unseen_frees_count``: its address was taken again without having been given back in the log. Frees count for the
    kind and device of what they free, where that is known."""

    kind: str
    device_id: int | None
    allocations_count: int
    allocated_bytes: int
    frees_count: int
    unmatched_frees_count: int
    unseen_frees_count: int
    peak_bytes: int
    peak_ns: int | None
    held_bytes: int
    held_count: int


class Held(msgspec.Struct, kw_only=True):
    """A piece that was never given back: a leak, if the program ended in order. ``bytes`` None: unknown."""

    kind: str
    device_id: int | None
    address: int
    bytes: int | None
    start_ns: int
    scope: str | None
    stack: str | None


def _event(reader: Reader) -> str:
    """SQL of every allocation with what comes next at its address, and of every free with what came before. Addresses
    are those of the program's one address space, so they tell pieces apart whatever the device."""
    return f"""
        WITH event AS (
            SELECT *, coalesce(memory_kind, 0) AS kind,
                lead(memory_op) OVER piece AS next_op, lead(start_ns) OVER piece AS next_ns,
                lag(memory_op) OVER piece AS last_op, lag(coalesce(memory_kind, 0)) OVER piece AS last_kind,
                lag(device_id) OVER piece AS last_device
            FROM {reader.table("allocation")}
            WHERE clock = 0 AND memory_op IN (1, 2) AND address IS NOT NULL AND start_ns IS NOT NULL
            WINDOW piece AS (PARTITION BY session_no, address ORDER BY start_ns, memory_op DESC))
    """  # noqa: S608


_STEP = """
        step AS (
            SELECT session_no, kind, device_id, start_ns AS at_ns, 1 AS taken, coalesce(bytes, 0) AS change
            FROM event WHERE memory_op = 1
            UNION ALL
            SELECT session_no, kind, device_id, next_ns, 0, -coalesce(bytes, 0)
            FROM event WHERE memory_op = 1 AND next_op IS NOT NULL)
"""
"""SQL of what every event changes: of one moment what is given back comes before what is taken."""


def memory_use(reader: Reader) -> list[MemoryLine]:
    """Memory by kind and device, the highest peak first."""
    rows = reader.rows(
        f"""
        {_event(reader)}, {_STEP},
        level AS (
            SELECT *, sum(change) OVER (
                PARTITION BY session_no, kind, device_id ORDER BY at_ns, taken ROWS UNBOUNDED PRECEDING) AS used
            FROM step),
        peak AS (
            SELECT kind, device_id, max(used) AS peak_bytes, arg_min(at_ns, (-used, at_ns)) AS peak_ns
            FROM level GROUP BY kind, device_id),
        counted AS (
            SELECT CASE WHEN memory_op = 2 AND last_op = 1 THEN last_kind ELSE kind END AS kind,
                CASE WHEN memory_op = 2 AND last_op = 1 THEN last_device ELSE device_id END AS device_id,
                count(*) FILTER (memory_op = 1) AS allocations_count,
                coalesce(sum(bytes) FILTER (memory_op = 1), 0) AS allocated_bytes,
                count(*) FILTER (memory_op = 2) AS frees_count,
                count(*) FILTER (memory_op = 2 AND coalesce(last_op, 0) <> 1) AS unmatched_frees_count,
                count(*) FILTER (memory_op = 1 AND next_op = 1) AS unseen_frees_count,
                coalesce(sum(bytes) FILTER (memory_op = 1 AND next_op IS NULL), 0) AS held_bytes,
                count(*) FILTER (memory_op = 1 AND next_op IS NULL) AS held_count
            FROM event GROUP BY 1, 2)
        SELECT counted.*, coalesce(peak_bytes, 0) AS peak_bytes, peak_ns
        FROM counted LEFT JOIN peak
            ON peak.kind = counted.kind AND peak.device_id IS NOT DISTINCT FROM counted.device_id
        ORDER BY peak_bytes DESC, counted.kind, counted.device_id
        """  # noqa: S608
    )
    sums = ("allocated_bytes", "peak_bytes", "held_bytes")
    return [
        MemoryLine(
            **{
                **row,
                "kind": MEMORY_KINDS.get(row["kind"], str(row["kind"])),
                **{name: int(row[name]) for name in sums},
            }
        )
        for row in rows
    ]


def held(reader: Reader, *, limit: int = 100, offset: int = 0) -> list[Held]:
    """What was never given back, the largest first."""
    rows = reader.rows(
        f"""
        {_event(reader)}
        SELECT session_no, kind, device_id, address, bytes, start_ns,
            coalesce(scope_id, 0) AS scope_id, coalesce(stack_id, 0) AS stack_id
        FROM event WHERE memory_op = 1 AND next_op IS NULL
        ORDER BY bytes DESC NULLS LAST, start_ns, session_no, address {page(limit, offset)}
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
    """The most that was in use at once within a step; ``time_ns``: of the step's first change."""

    time_ns: int
    bytes: int


def memory_series(reader: Reader, *, device_id: int | None = None, points: int = 500) -> list[MemoryPoint]:
    """Device memory (device, array, managed, static) in use over time, in at most ``points`` steps; those in which
    nothing changes are left out."""
    page(points)
    device = "" if device_id is None else f"AND device_id = {int(device_id)}"
    rows = reader.rows(
        f"""
        {_event(reader)}, {_STEP},
        level AS (
            SELECT at_ns, change, sum(change) OVER (ORDER BY at_ns, taken ROWS UNBOUNDED PRECEDING) AS used
            FROM step WHERE kind IN (3, 4, 5, 6, 7) {device}),
        span AS (SELECT min(at_ns) AS first, greatest(max(at_ns) - min(at_ns), 1) AS length FROM level)
        SELECT min(at_ns) AS time_ns, max(greatest(used, used - change)) AS bytes
        FROM level, span GROUP BY least((at_ns - first)::HUGEINT * {int(points)} // length, {int(points) - 1})
        ORDER BY time_ns
        """  # noqa: S608
    )
    return [MemoryPoint(row["time_ns"], int(row["bytes"])) for row in rows]
