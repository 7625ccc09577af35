"""The telemetry sections of a report: devices and host, energy, hardware counters."""

from __future__ import annotations

from typing import Any, Literal

from gpuflight.events.query.reader import MAX_ROWS, Reader
from gpuflight.events.query.series import metrics_of
from gpuflight.events.report.model import CounterLine, Energy, Metric
from gpuflight.events.tables import TABLES

_CUMULATIVE = frozenset(("energy_uj",))


def metrics(reader: Reader) -> list[Metric]:
    """Every metric of every device and of the host that has a sample."""
    return _metrics(reader, "device_metric") + _metrics(reader, "host_metric")


def _metrics(reader: Reader, table: Literal["device_metric", "host_metric"]) -> list[Metric]:
    names = [name for name in metrics_of(table) if name not in _CUMULATIVE]
    stats = ", ".join(
        f"count({n}) AS {n}_count, avg({n}) AS {n}_mean, min({n}) AS {n}_min, max({n}) AS {n}_max,"
        f" arg_max({n}, time_ns) FILTER ({n} IS NOT NULL) AS {n}_last"
        for n in names
    )
    device = "device_id" if table == "device_metric" else "NULL::BIGINT AS device_id"
    rows = reader.rows(f"SELECT {device}, {stats} FROM {reader.table(table)} GROUP BY ALL ORDER BY device_id")  # noqa: S608
    return [
        Metric(
            metric=name,
            device_id=row["device_id"],
            samples_count=row[f"{name}_count"],
            mean=float(row[f"{name}_mean"]),
            min=float(row[f"{name}_min"]),
            max=float(row[f"{name}_max"]),
            last=float(row[f"{name}_last"]),
        )
        for row in rows
        for name in names
        if row[f"{name}_count"]
    ]


def energy(reader: Reader) -> list[Energy]:
    """Energy by device: of its counter where it has one that only grew, else of power by trapezoids."""
    rows = reader.rows(
        f"""
        WITH sample AS (
            SELECT device_id, time_ns, power_mw, energy_uj, lag(time_ns) OVER device AS last_ns,
                lag(power_mw) OVER device AS last_mw, lag(energy_uj) OVER device AS last_uj
            FROM {reader.table("device_metric")} WHERE clock = 0 AND device_id IS NOT NULL AND power_mw IS NOT NULL
            WINDOW device AS (PARTITION BY session_no, device_id ORDER BY time_ns))
        SELECT device_id, sum((power_mw + last_mw) / 2e3 * (time_ns - last_ns) / 1e9) AS joules,
            sum(time_ns - last_ns) / 1e9 AS seconds,
            count(*) = count(energy_uj) AND min(energy_uj) > 0
                AND bool_and(coalesce(energy_uj >= last_uj, true)) AS counted,
            (max(energy_uj) - min(energy_uj)) / 1e6 AS counter_joules
        FROM sample GROUP BY device_id HAVING count(*) > 1 AND seconds > 0 ORDER BY device_id
        """  # noqa: S608
    )
    return [
        Energy(
            device_id=row["device_id"],
            joules=float(row["counter_joules"] if row["counted"] else row["joules"]),
            seconds=float(row["seconds"]),
            how="counter" if row["counted"] else "trapezoid",
        )
        for row in rows
    ]


def pm_sampling(reader: Reader) -> list[Metric]:
    """Sampled hardware counters by device, counter and scope."""
    rows = reader.rows(
        f"""
        SELECT device_id, coalesce(metric_id, 0) AS metric_no, coalesce(scope_name_id, 0) AS scope_no,
            count(value) AS samples_count, avg(value) AS mean, min(value) AS min, max(value) AS max
        FROM {reader.table("pm_sample")} GROUP BY ALL HAVING count(value) > 0
        ORDER BY device_id, metric_no, scope_no LIMIT {MAX_ROWS}
        """  # noqa: S608
    )
    texts = {number: text for (_, number), text in reader.texts("metric", {r["metric_no"] for r in rows}).items()}
    scopes = {number: text for (_, number), text in reader.texts("scope", {r["scope_no"] for r in rows}).items()}
    return [
        Metric(
            metric=texts.get(row["metric_no"], f"#{row['metric_no']}"),
            device_id=row["device_id"],
            samples_count=row["samples_count"],
            mean=row["mean"],
            min=row["min"],
            max=row["max"],
            scope=scopes.get(row["scope_no"]),
        )
        for row in rows
    ]


def counters(reader: Reader, limit: int) -> list[CounterLine]:
    """Range profiler counters by scope, replay counters by kernel."""
    scopes = reader.rows(_counter_sql(reader, "perf_metric", "coalesce(name_id, 0) AS key", limit))
    texts = {number: text for (_, number), text in reader.texts("scope", {row["key"] for row in scopes}).items()}
    lines = [_line(row, "scope", texts.get(row["key"], f"#{row['key']}"), "perf_metric") for row in scopes]
    kernels = reader.rows(
        _counter_sql(reader, "kernel_perf_metric", "kernel_name AS key, min(launch_ordinal) AS launch_ordinal", limit)
    )
    numbered = [row for row in kernels if (row["key"] or "").isdigit() and row["launch_ordinal"] is not None]
    names = _names_in_time(reader, [row["launch_ordinal"] for row in numbered])
    for row in kernels:
        name = names.get(row["launch_ordinal"]) if row in numbered else row["key"]
        lines.append(_line(row, "kernel", name or f"range {row['key']}", "kernel_perf_metric"))
    return lines


def _values(table: str) -> list[str]:
    skipped = ("start_ns", "end_ns", "device_id", "name_id", "scope_id", "scope_depth", "pid", "app", "range_index")
    return [
        c.name for c in TABLES[table].columns if c.kind in ("i64", "f64") and c.name not in (*skipped, "launch_ordinal")
    ]


def _counter_sql(reader: Reader, table: str, key: str, limit: int) -> str:
    stats = ", ".join(f"{'sum' if n.endswith('_bytes') else 'avg'}({n}) AS {n}" for n in _values(table))
    return f"""
        SELECT {key}, count(*) AS count, {stats} FROM {reader.table(table)}
        GROUP BY {key.split(" AS ")[0]} ORDER BY count DESC, key LIMIT {int(limit)}
        """  # noqa: S608


def _line(row: dict[str, Any], kind: str, of: str, table: str) -> CounterLine:
    values = {name: float(row[name]) for name in _values(table) if row[name] is not None}
    return CounterLine(of=of, kind=kind, count=row["count"], values=values)


def _names_in_time(reader: Reader, ordinals: list[int]) -> dict[int, str]:
    """Names of the n-th kernels in time; n counts from 0 (an ordinal 0 says so; without one they are not told)."""
    if 0 not in ordinals:
        return {}
    listed = ", ".join(str(int(number)) for number in ordinals)
    rows = reader.rows(
        f"""
        SELECT n, kernel_id FROM (
            SELECT row_number() OVER (ORDER BY start_ns, corr_id) - 1 AS n, kernel_id FROM {reader.table("kernel")}
            WHERE clock = 0) WHERE n IN ({listed})
        """  # noqa: S608
    )
    texts = {number: text for (_, number), text in reader.texts("kernel", {row["kernel_id"] for row in rows}).items()}
    return {row["n"]: texts[row["kernel_id"]] for row in rows if row["kernel_id"] in texts}
