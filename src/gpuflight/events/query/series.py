"""Telemetry of devices and of the host over time, in as many steps as a chart has room for."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gpuflight.errors import InputError
from gpuflight.events.query.reader import MAX_ROWS, Reader, Where
from gpuflight.events.tables import TABLES

Of = Literal["device_metric", "host_metric", "pm_sample"]

_NOT_METRICS = frozenset(("time_ns", "device_id", "sample_index", "metric_id", "scope_name_id"))


class Series(msgspec.Struct, kw_only=True):
    """One metric over time: per step where it begins, how many samples it holds (a step without any is not there), and
    of them the mean, the least and the greatest. ``device_id`` None: of the host."""

    metric: str
    device_id: int | None
    times_ns: list[int]
    counts: list[int]
    means: list[float]
    mins: list[float]
    maxs: list[float]


def metrics_of(table: Of) -> tuple[str, ...]:
    """Names of the metrics that a table of telemetry has."""
    return tuple(c.name for c in TABLES[table].columns if c.name not in _NOT_METRICS)


def telemetry(
    reader: Reader,
    table: Literal["device_metric", "host_metric"],
    *,
    metrics: list[str] | None = None,
    device_id: int | None = None,
    from_ns: int | None = None,
    to_ns: int | None = None,
    points: int = 500,
) -> list[Series]:
    """Series of the metrics asked for (None: all), of those that have a sample."""
    known = metrics_of(table)
    for metric in metrics or ():
        if metric not in known:
            raise InputError(f"there is no metric {metric} of {table}; there are {', '.join(known)}")
    wanted = [metric for metric in known if metrics is None or metric in metrics]
    where = Where().add("time_ns >= ?", from_ns).add("time_ns < ?", to_ns).add("clock = 0")
    device = "NULL::BIGINT"
    if table == "device_metric":
        where.add("device_id = ?", device_id)
        device = "device_id"
    columns = ", ".join(
        f"count({m}) AS {m}_count, avg({m}) AS {m}_mean, min({m}) AS {m}_min, max({m}) AS {m}_max" for m in wanted
    )
    rows = reader.rows(_stepped(reader, table, device, columns, where, points), where.values)
    found: dict[tuple[str, int | None], Series] = {}
    for row in rows:
        for metric in wanted:
            if row[f"{metric}_count"]:
                _append(found, metric, row["device"], row["step_ns"], *(row[f"{metric}_{s}"] for s in _STATS))
    return list(found.values())


def hardware_counters(
    reader: Reader,
    *,
    device_id: int | None = None,
    from_ns: int | None = None,
    to_ns: int | None = None,
    points: int = 500,
) -> list[Series]:
    """Sampled hardware counters (PM sampling), by the names their log gave them."""
    where = Where().add("time_ns >= ?", from_ns).add("time_ns < ?", to_ns).add("device_id = ?", device_id)
    where.add("clock = 0")
    columns = "count(value) AS count, avg(value) AS mean, min(value) AS min, max(value) AS max"
    sql = _stepped(reader, "pm_sample", "device_id", columns, where, points, more="session_no, metric_id")
    rows = reader.rows(sql, where.values)
    texts = reader.texts("metric", {row["metric_id"] or 0 for row in rows})
    found: dict[tuple[str, int | None], Series] = {}
    for row in rows:
        name = texts.get((row["session_no"], row["metric_id"] or 0), f"#{row['metric_id']}")
        if row["count"]:
            _append(found, name, row["device"], row["step_ns"], *(row[s] for s in _STATS))
    return list(found.values())


_STATS = ("count", "mean", "min", "max")


def _stepped(reader: Reader, table: str, device: str, columns: str, where: Where, points: int, more: str = "") -> str:
    """SQL of ``columns`` by device and step; steps are equal parts of the time that the samples cover."""
    if not 0 < points <= MAX_ROWS:
        raise InputError(f"points is {points}; it must be from 1 to {MAX_ROWS}")
    keys = f"{more}, " if more else ""
    return f"""
        WITH sample AS (SELECT * FROM {reader.table(table)} {where.sql}),
        span AS (SELECT min(time_ns) AS first, max(time_ns) - min(time_ns) + 1 AS length FROM sample),
        placed AS (
            SELECT *, {device} AS device, ((time_ns - first)::HUGEINT * {int(points)} // length)::BIGINT AS step
            FROM sample, span)
        SELECT {keys}device, min(time_ns) AS step_ns, {columns}
        FROM placed GROUP BY {keys}device, step ORDER BY {keys}device, step
        """  # noqa: S608


def _append(
    found: dict[tuple[str, int | None], Series], metric: str, device: int | None, time_ns: int, *stats: Any
) -> None:
    series = found.get((metric, device))
    if series is None:
        series = found[metric, device] = Series(
            metric=metric, device_id=device, times_ns=[], counts=[], means=[], mins=[], maxs=[]
        )
    count, mean, least, most = stats
    series.times_ns.append(time_ns)
    series.counts.append(count)
    series.means.append(float(mean))
    series.mins.append(float(least))
    series.maxs.append(float(most))
