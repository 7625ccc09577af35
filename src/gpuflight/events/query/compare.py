"""Two sessions side by side: which kernels take longer, which came and went."""

from __future__ import annotations

import msgspec

from gpuflight.errors import InputError
from gpuflight.events.query.reader import Reader, page


class KernelChange(msgspec.Struct, kw_only=True):
    """A kernel by name in both sessions; what one of them does not have is 0 launches. ``mean_ratio``: mean duration
    after over before, None if one has none. ``total_change_ns``: after less before."""

    name: str
    before_count: int
    after_count: int
    before_total_ns: int
    after_total_ns: int
    before_mean_ns: float | None
    after_mean_ns: float | None
    mean_ratio: float | None
    total_change_ns: int


class Comparison(msgspec.Struct, kw_only=True):
    """Of all kernels that have a name: totals, and ``kernels`` with the greatest change of total time first."""

    before_count: int
    after_count: int
    before_total_ns: int
    after_total_ns: int
    kernels: list[KernelChange]
    kernels_count: int


def compare(before: Reader, after: Reader, *, limit: int = 100, offset: int = 0) -> Comparison:
    """Kernels of ``before`` against those of ``after``, by name: ids of two sessions mean nothing to each other."""
    if before.store is not after.store:
        raise InputError("the two sessions are in different stores")

    def by_name(reader: Reader) -> str:
        return f"""
            SELECT n.text AS name, count(*) AS count, sum(k.duration_ns) AS total_ns
            FROM (SELECT session_no, kernel_id, duration_ns FROM {reader.table("kernel")}) AS k
                JOIN {reader.table("name")} AS n ON n.session_no = k.session_no AND n.id = k.kernel_id
            WHERE n.dictionary = 'kernel' AND k.duration_ns IS NOT NULL GROUP BY n.text"""  # noqa: S608

    rows = before.rows(
        f"""
        WITH joined AS (
            SELECT coalesce(b.name, a.name) AS name, coalesce(b.count, 0) AS before_count,
                coalesce(a.count, 0) AS after_count, coalesce(b.total_ns, 0) AS before_total_ns,
                coalesce(a.total_ns, 0) AS after_total_ns
            FROM ({by_name(before)}) AS b FULL JOIN ({by_name(after)}) AS a ON a.name = b.name)
        SELECT *, count(*) OVER () AS kernels_count, (sum(before_count) OVER ())::BIGINT AS all_before_count,
            (sum(after_count) OVER ())::BIGINT AS all_after_count, sum(before_total_ns) OVER () AS all_before_ns,
            sum(after_total_ns) OVER () AS all_after_ns
        FROM joined ORDER BY abs(after_total_ns - before_total_ns) DESC, name {page(limit, offset)}
        """  # noqa: S608
    )
    if not rows and offset:  # beyond the end: the totals still hold
        return msgspec.structs.replace(compare(before, after, limit=1), kernels=[])
    first = rows[0] if rows else {}
    return Comparison(
        before_count=first.get("all_before_count", 0),
        after_count=first.get("all_after_count", 0),
        before_total_ns=int(first.get("all_before_ns", 0)),
        after_total_ns=int(first.get("all_after_ns", 0)),
        kernels=[
            _change(
                row["name"],
                row["before_count"],
                row["after_count"],
                int(row["before_total_ns"]),
                int(row["after_total_ns"]),
            )
            for row in rows
        ],
        kernels_count=first.get("kernels_count", 0),
    )


def _change(name: str, before_count: int, after_count: int, before_ns: int, after_ns: int) -> KernelChange:
    before_mean = before_ns / before_count if before_count else None
    after_mean = after_ns / after_count if after_count else None
    return KernelChange(
        name=name,
        before_count=before_count,
        after_count=after_count,
        before_total_ns=before_ns,
        after_total_ns=after_ns,
        before_mean_ns=before_mean,
        after_mean_ns=after_mean,
        mean_ratio=after_mean / before_mean if before_mean and after_mean is not None else None,
        total_change_ns=after_ns - before_ns,
    )
