"""Waits of the host for the GPU."""

from __future__ import annotations

import msgspec

from gpuflight.events.query.reader import Reader, Where, page
from gpuflight.events.tables import SYNC_TYPES


class WaitLine(msgspec.Struct, kw_only=True):
    """Waits of one kind at one place in the program. ``place``: the stack, outermost first, parts joined by ``|``; None
    if the log has none. ``share``: of the session's time, 0 to 1, None where that is not known."""

    kind: str
    place: str | None
    count: int
    total_ns: int
    mean_ns: float
    max_ns: int
    share: float | None


def waits(
    reader: Reader,
    *,
    by_place: bool = True,
    from_ns: int | None = None,
    to_ns: int | None = None,
    limit: int = 100,
    offset: int = 0,
) -> list[WaitLine]:
    """Waits by kind and (``by_place``) stack, the longest in all first."""
    where = Where().add("start_ns < ?", to_ns).add("start_ns + duration_ns >= ?", from_ns)
    where.add("duration_ns IS NOT NULL")
    if from_ns is not None or to_ns is not None:
        where.add("clock = 0")
    place = "coalesce(nullif(function_id, 0), nullif(stack_id, 0), 0)" if by_place else "0"
    rows = reader.rows(
        f"""
        SELECT session_no, coalesce(sync_type, 0) AS sync_type, {place} AS place, count(*) AS count,
            sum(duration_ns) AS total_ns, avg(duration_ns) AS mean_ns, max(duration_ns) AS max_ns
        FROM {reader.table("sync")} {where.sql}
        GROUP BY ALL ORDER BY total_ns DESC, session_no, sync_type, place {page(limit, offset)}
        """,  # noqa: S608
        where.values,
    )
    ids = [row["place"] for row in rows]
    texts = {**reader.texts("stack", ids), **reader.texts("function", ids)}
    spans = {
        session.session_no: (session.end_ns or session.last_event_ns or 0)
        - (session.start_ns or session.first_event_ns or 0)
        for session in reader.sessions
    }
    return [
        WaitLine(
            kind=SYNC_TYPES.get(row["sync_type"], str(row["sync_type"])),
            place=texts.get((row["session_no"], row["place"])),
            count=row["count"],
            total_ns=int(row["total_ns"]),
            mean_ns=row["mean_ns"],
            max_ns=row["max_ns"],
            share=int(row["total_ns"]) / spans[row["session_no"]] if spans[row["session_no"]] > 0 else None,
        )
        for row in rows
    ]
