"""Copies and fills of memory: by direction, by size, how fast."""

from __future__ import annotations

import msgspec

from gpuflight.events.query.reader import Reader, Where, page
from gpuflight.events.tables import COPY_KINDS

_SIZE_CLASSES = (4096, 65_536, 1 << 20, 16 << 20, 256 << 20)
"""Upper bounds, bytes: below a page, small (latency bound), medium, large, huge; a choice of ours for reading."""


class CopyLine(msgspec.Struct, kw_only=True):
    """Copies of one direction (``HtoD`` …; None: the log does not say) and, if asked for, size class.

    ``bytes_per_s``: bytes over time, of the copies with a duration above 0 (``timed_count`` of them); ``best`` is that
    of the fastest single one. None if there is none. ``unsized_count``: copies whose size is not known; they count in
    ``count`` and ``total_ns`` only.
    """

    direction: str | None
    size_from_bytes: int | None = None
    size_to_bytes: int | None = None
    count: int
    bytes: int
    total_ns: int
    timed_count: int
    bytes_per_s: float | None
    best_bytes_per_s: float | None
    min_bytes: int | None
    max_bytes: int | None
    unsized_count: int = 0


def copies(
    reader: Reader, *, by_size: bool = False, from_ns: int | None = None, to_ns: int | None = None
) -> list[CopyLine]:
    """Copies by direction, the longest in all first; with ``by_size`` by class of size too."""
    where = _time(from_ns, to_ns)
    size = "CASE WHEN bytes IS NULL THEN -2 "
    size += " ".join(f"WHEN bytes < {edge} THEN {i}" for i, edge in enumerate(_SIZE_CLASSES))
    size += f" ELSE {len(_SIZE_CLASSES)} END"
    rows = reader.rows(
        f"""
        SELECT CASE WHEN copy_kind BETWEEN 1 AND {max(COPY_KINDS)} THEN copy_kind ELSE 0 END AS direction,
            CASE WHEN copy_kind BETWEEN 1 AND {max(COPY_KINDS)} THEN ''
                ELSE coalesce(src_kind || 'To' || dst_kind, '') END AS kinds,
            {size if by_size else "-1"} AS size,
            count(*) AS count, coalesce(sum(bytes), 0) AS bytes, sum(coalesce(duration_ns, 0)) AS total_ns,
            min(bytes) AS min_bytes, max(bytes) AS max_bytes, count(*) FILTER (bytes IS NULL) AS unsized_count,
            count(*) FILTER (duration_ns > 0 AND bytes IS NOT NULL) AS timed_count,
            sum(bytes) FILTER (duration_ns > 0) * 1e9
                / sum(duration_ns) FILTER (duration_ns > 0 AND bytes IS NOT NULL) AS bytes_per_s,
            max(bytes * 1e9 / duration_ns) FILTER (duration_ns > 0) AS best_bytes_per_s
        FROM {reader.table("memcpy")} {where.sql}
        GROUP BY direction, kinds, size ORDER BY total_ns DESC, direction, kinds, size
        """,  # noqa: S608
        where.values,
    )
    return [
        CopyLine(
            direction=COPY_KINDS.get(row["direction"]) or row["kinds"] or None,
            size_from_bytes=_bound(row["size"] - 1) or 0 if row["size"] >= 0 else None,
            size_to_bytes=_bound(row["size"]) if row["size"] >= 0 else None,
            count=row["count"],
            bytes=int(row["bytes"]),
            total_ns=int(row["total_ns"]),
            timed_count=row["timed_count"],
            bytes_per_s=row["bytes_per_s"],
            best_bytes_per_s=row["best_bytes_per_s"],
            min_bytes=row["min_bytes"],
            max_bytes=row["max_bytes"],
            unsized_count=row["unsized_count"],
        )
        for row in rows
    ]


class FillLine(msgspec.Struct, kw_only=True):
    """Fills of memory (memset) of one device and stream."""

    device_id: int | None
    stream_id: int | None
    count: int
    bytes: int
    total_ns: int
    bytes_per_s: float | None


def fills(reader: Reader, *, from_ns: int | None = None, to_ns: int | None = None, limit: int = 1000) -> list[FillLine]:
    """Fills by device and stream, the longest in all first."""
    where = _time(from_ns, to_ns)
    rows = reader.rows(
        f"""
        SELECT device_id, stream_id, count(*) AS count, sum(coalesce(bytes, 0)) AS bytes,
            sum(coalesce(duration_ns, 0)) AS total_ns,
            sum(bytes) FILTER (duration_ns > 0) * 1e9
                / sum(duration_ns) FILTER (duration_ns > 0 AND bytes IS NOT NULL) AS bytes_per_s
        FROM {reader.table("memset")} {where.sql}
        GROUP BY device_id, stream_id ORDER BY total_ns DESC, device_id, stream_id {page(limit)}
        """,  # noqa: S608
        where.values,
    )
    return [FillLine(**{**row, "bytes": int(row["bytes"]), "total_ns": int(row["total_ns"])}) for row in rows]


def _time(from_ns: int | None, to_ns: int | None) -> Where:
    where = Where().add("start_ns < ?", to_ns).add("start_ns + coalesce(duration_ns, 0) >= ?", from_ns)
    return where.add("clock = 0") if from_ns is not None or to_ns is not None else where


def _bound(index: int) -> int | None:
    return _SIZE_CLASSES[index] if 0 <= index < len(_SIZE_CLASSES) else None
