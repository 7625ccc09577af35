"""Kernels: the longest in all, one by one, how their durations spread."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gpuflight.errors import InputError
from gpuflight.events.query.reader import Reader, Where, page
from gpuflight.events.tables import TABLES

Order = Literal["total_ns", "count", "mean_ns", "max_ns", "p99_ns"]
ORDERS: tuple[Order, ...] = ("total_ns", "count", "mean_ns", "max_ns", "p99_ns")
Dimension = Literal["stream_id", "device_id", "scope_id"]
DIMENSIONS: tuple[Dimension, ...] = ("stream_id", "device_id", "scope_id")

_SHAPE = tuple(column.name for column in TABLES["kernel_shape"].columns if column.name != "shape_id")


class KernelFilter(msgspec.Struct, kw_only=True):
    """Which kernels; None is any. Times are UNIX ns: those that run at some moment from ``from_ns`` up to ``to_ns``."""

    kernel_id: int | None = None
    stream_id: int | None = None
    device_id: int | None = None
    corr_id: int | None = None
    from_ns: int | None = None
    to_ns: int | None = None
    name_contains: str | None = None
    scope: str | None = None
    """A user scope (``global|outer|inner``); kernels of scopes inside it count too."""


class KernelLine(msgspec.Struct, kw_only=True):
    """Launches that have a kernel (and a ``by``, if asked for) in common. ``name`` None: the log never told it.

    ``p50_ns`` and ``p99_ns`` are durations that occurred (nearest rank), None if not asked for. ``share`` is the part
    of the time of all kernels that match, 0 to 1.
    """

    kernel_id: int | None
    name: str | None
    by: int | str | None = None
    count: int
    total_ns: int
    mean_ns: float
    min_ns: int
    max_ns: int
    p50_ns: int | None = None
    p99_ns: int | None = None
    share: float | None = None


class KernelPage(msgspec.Struct, kw_only=True):
    """A page of lines; ``lines_count``, ``count`` and ``total_ns`` are of all that match."""

    lines: list[KernelLine]
    lines_count: int
    count: int
    total_ns: int


def top_kernels(
    reader: Reader,
    *,
    order: Order = "total_ns",
    only: KernelFilter | None = None,
    by: Dimension | None = None,
    quantiles: bool = False,
    limit: int = 20,
    offset: int = 0,
) -> KernelPage:
    """Kernels by name, those first that are first by ``order``; with ``by`` one line per kernel and stream, device or
    user scope. ``order="p99_ns"`` computes the quantiles too. Only launches whose duration is known."""
    if order not in ORDERS:
        raise InputError(f"order is {order}; one of {', '.join(ORDERS)}")
    if by is not None and by not in DIMENSIONS:
        raise InputError(f"by is {by}; one of {', '.join(DIMENSIONS)}")
    source, where = _matching(reader, only or KernelFilter(), with_scope=by == "scope_id")
    where.add("duration_ns IS NOT NULL")
    quantiles = quantiles or order == "p99_ns"
    key = "kernel_id" if by is None else f"kernel_id, {by}"
    more = ", quantile_disc(duration_ns, [0.5, 0.99]) AS quantiles" if quantiles else ""
    column = "quantiles[2]" if order == "p99_ns" else order
    # Grouped by number first, the text of a kernel only fetched for the page: joining before would cost every launch.
    rows = reader.rows(
        f"""
        WITH line AS (
            SELECT session_no, {key}, count(*) AS count, sum(duration_ns) AS total_ns,
                min(duration_ns) AS min_ns, max(duration_ns) AS max_ns{more}
            FROM {source} {where.sql} GROUP BY session_no, {key}),
        summed AS (SELECT *, total_ns / count AS mean_ns FROM line)
        SELECT *, count(*) OVER () AS lines_count, (sum(count) OVER ())::BIGINT AS all_count,
            (sum(total_ns) OVER ())::HUGEINT AS all_ns
        FROM summed ORDER BY {column} DESC, session_no, {key} {page(limit, offset)}
        """,  # noqa: S608 - names are ours, values are bound
        where.values,
    )
    texts = reader.texts("kernel", (row["kernel_id"] or 0 for row in rows))
    scopes = reader.texts("user_scope", (row[by] or 0 for row in rows)) if by == "scope_id" else {}
    lines = []
    for row in rows:
        value = row[by] if by is not None else None
        if by == "scope_id":
            value = scopes.get((row["session_no"], value or 0))
        lines.append(
            KernelLine(
                kernel_id=row["kernel_id"],
                name=texts.get((row["session_no"], row["kernel_id"] or 0)),
                by=value,
                count=row["count"],
                total_ns=int(row["total_ns"]),
                mean_ns=float(row["mean_ns"]),
                min_ns=row["min_ns"],
                max_ns=row["max_ns"],
                p50_ns=row["quantiles"][0] if quantiles else None,
                p99_ns=row["quantiles"][1] if quantiles else None,
                share=int(row["total_ns"]) / int(row["all_ns"]) if row["all_ns"] else None,
            )
        )
    first = rows[0] if rows else {"lines_count": 0, "all_count": 0, "all_ns": 0}
    if not rows and offset:
        return msgspec.structs.replace(
            top_kernels(reader, order=order, only=only, by=by, quantiles=False, limit=1), lines=[]
        )
    return KernelPage(
        lines=lines, lines_count=first["lines_count"], count=first["all_count"], total_ns=int(first["all_ns"])
    )


class Launch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One launch. ``shape`` is its configuration (names and units of the table kernel_shape), None if the log has none;
    ``scope`` and ``stack`` are texts with ``|`` between their parts. ``synthetic``: start and duration are those of the
    call and the gap to the next, not the GPU's."""

    session_id: str
    start_ns: int | None
    duration_ns: int | None
    kernel_id: int | None
    name: str | None
    stream_id: int | None = None
    device_id: int | None = None
    corr_id: int | None = None
    num_regs: int | None = None
    dyn_shared_bytes: int | None = None
    api_start_ns: int | None = None
    api_exit_ns: int | None = None
    scope: str | None = None
    stack: str | None = None
    shape: dict[str, Any] | None = None
    synthetic: bool = False


def launches(
    reader: Reader,
    *,
    only: KernelFilter | None = None,
    longest_first: bool = False,
    limit: int = 100,
    offset: int = 0,
) -> list[Launch]:
    """Launches with all that is known of each, in order of time or the longest first."""
    only = only or KernelFilter()
    source, where = _matching(reader, only, with_scope=only.scope is not None)
    order = "duration_ns DESC NULLS LAST, start_ns" if longest_first else "start_ns NULLS LAST"
    shape = ", ".join(f"shape.{name}" for name in _SHAPE)
    rows = reader.rows(
        f"""
        WITH chosen AS (
            SELECT * FROM {source} {where.sql} ORDER BY {order}, corr_id {page(limit, offset)}),
        detail AS (
            SELECT session_no, corr_id, any_value(shape_id) AS shape_id, any_value(scope_id) AS detail_scope_id,
                any_value(stack_id) AS detail_stack_id
            FROM {reader.table("kernel_detail")}
            WHERE corr_id IN (SELECT corr_id FROM chosen) GROUP BY session_no, corr_id)
        SELECT chosen.*, detail.shape_id, detail.detail_scope_id, detail.detail_stack_id, {shape}
        FROM chosen LEFT JOIN detail USING (session_no, corr_id)
            LEFT JOIN {reader.table("kernel_shape")} AS shape
                ON shape.session_no = chosen.session_no AND shape.shape_id = detail.shape_id
        ORDER BY {order}, corr_id
        """,  # noqa: S608
        where.values,
    )
    names = reader.texts("kernel", (row["kernel_id"] or 0 for row in rows))
    for row in rows:
        row["scope_id"] = row["scope_id"] or row["detail_scope_id"] or 0
        row["stack_id"] = row["stack_id"] or row["detail_stack_id"] or 0
    scopes = reader.texts("user_scope", (row["scope_id"] for row in rows))
    stacks = reader.texts("stack", (row["stack_id"] for row in rows))
    ids = {session.session_no: session.session_id for session in reader.sessions}
    synthetic = _synthetic_sessions(reader)
    return [
        Launch(
            session_id=ids[row["session_no"]],
            start_ns=row["start_ns"],
            duration_ns=row["duration_ns"],
            kernel_id=row["kernel_id"],
            name=names.get((row["session_no"], row["kernel_id"] or 0)),
            stream_id=row["stream_id"],
            device_id=row["device_id"],
            corr_id=row["corr_id"],
            num_regs=row["num_regs"],
            dyn_shared_bytes=row["dyn_shared_bytes"],
            api_start_ns=row["api_start_ns"],
            api_exit_ns=row["api_exit_ns"],
            scope=scopes.get((row["session_no"], row["scope_id"])),
            stack=stacks.get((row["session_no"], row["stack_id"])),
            shape={name: row[name] for name in _SHAPE if row[name] is not None}
            if row["shape_id"] is not None
            else None,
            synthetic=row["session_no"] in synthetic,
        )
        for row in rows
    ]


class Bucket(msgspec.Struct):
    """Launches that took from ``from_ns`` up to ``to_ns``, the latter not included."""

    from_ns: int
    to_ns: int
    count: int
    total_ns: int


def duration_histogram(reader: Reader, *, only: KernelFilter | None = None, per_octave: int = 4) -> list[Bucket]:
    """How durations spread: ``per_octave`` (1 to 16) buckets from each power of two to the next, those that are empty
    left out; the first is for durations of 0."""
    if not 1 <= per_octave <= 16:
        raise InputError(f"per_octave is {per_octave}; it must be from 1 to 16")
    only = only or KernelFilter()
    source, where = _matching(reader, only, with_scope=only.scope is not None)
    where.add("duration_ns >= 0")
    rows = reader.rows(
        f"""
        SELECT count(*) AS count, sum(duration_ns) AS total_ns,
            CASE WHEN duration_ns = 0 THEN -1 ELSE floor(log2(duration_ns) * {int(per_octave)})::INTEGER END AS bucket
        FROM {source} {where.sql} GROUP BY bucket ORDER BY bucket
        """,  # noqa: S608
        where.values,
    )
    return [
        Bucket(
            0 if row["bucket"] < 0 else _edge(row["bucket"], per_octave),
            1 if row["bucket"] < 0 else max(_edge(row["bucket"] + 1, per_octave), 1),
            row["count"],
            int(row["total_ns"]),
        )
        for row in rows
    ]


def _edge(bucket: int, per_octave: int) -> int:
    """The least whole duration of a bucket."""
    edge = 2.0 ** (bucket / per_octave)
    return int(edge) if edge == int(edge) else int(edge) + 1


def _matching(reader: Reader, only: KernelFilter, *, with_scope: bool) -> tuple[str, Where]:
    """SQL of the kernels with their scope (of the launch details, where batches do not have it), and the conditions."""
    where = Where()
    where.add("kernel_id = ?", only.kernel_id)
    where.add("stream_id = ?", only.stream_id)
    where.add("device_id = ?", only.device_id)
    where.add("corr_id = ?", only.corr_id)
    where.add("start_ns < ?", only.to_ns)
    where.add("start_ns + coalesce(duration_ns, 0) >= ?", only.from_ns)
    if only.from_ns is not None or only.to_ns is not None:
        where.add("clock = 0")
    kernels = reader.table("kernel")
    names = reader.table("name")
    if only.name_contains is not None:
        where.add(
            f"(session_no, kernel_id) IN (SELECT (session_no, id) FROM {names}"  # noqa: S608
            " WHERE dictionary = 'kernel' AND contains(text, ?))",
            only.name_contains,
        )
    if with_scope:
        kernels = (
            "(SELECT k.* EXCLUDE (scope_id), coalesce(nullif(k.scope_id, 0), nullif(d.scope_id, 0)) AS scope_id"  # noqa: S608
            f" FROM {kernels} AS k LEFT JOIN (SELECT session_no, corr_id, any_value(scope_id) AS scope_id"
            f" FROM {reader.table('kernel_detail')} GROUP BY session_no, corr_id) AS d USING (session_no, corr_id))"
        )
    if only.scope is not None:
        where.add(
            f"(session_no, scope_id) IN (SELECT (session_no, id) FROM {names}"  # noqa: S608
            " WHERE dictionary = 'user_scope' AND (text = ? OR starts_with(text, ?)))",
            only.scope,
            only.scope + "|",
        )
    return kernels, where


def _synthetic_sessions(reader: Reader) -> set[int]:
    """Sessions whose kernels were not timed on the GPU: start of the call, gap to the next one."""
    rows = reader.rows(
        f"SELECT DISTINCT session_no FROM {reader.table('capability')} WHERE feature = 'kernel_events'"  # noqa: S608
        " AND status = 'fallback' AND mode = 'launch_callbacks_synthetic'"
    )
    return {row["session_no"] for row in rows}
