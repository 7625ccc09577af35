"""The kernel sections of a report."""

from __future__ import annotations

from typing import Any

from gpuflight.events.query.reader import Reader
from gpuflight.events.report.model import Device, KernelDetail, KernelSummary
from gpuflight.events.tables import TABLES

_SHAPE = tuple(column.name for column in TABLES["kernel_shape"].columns if column.name != "shape_id")


def summary(reader: Reader, span_ns: int | None, *, synthetic: bool) -> KernelSummary:
    """Counts, durations and busy time of all kernels."""
    kernels = reader.table("kernel")
    row = reader.rows(
        f"""
        SELECT count(*) AS count, count(duration_ns) AS timed_count, count(DISTINCT kernel_id) AS unique_count,
            coalesce(sum(duration_ns), 0) AS total_ns, avg(duration_ns) AS mean_ns, min(duration_ns) AS min_ns,
            max(duration_ns) AS max_ns, quantile_disc(duration_ns, [0.5, 0.9, 0.99]) AS quantiles
        FROM {kernels}
        """  # noqa: S608
    )[0]
    quantiles = row.pop("quantiles") or [None] * 3
    found = KernelSummary(
        **{**row, "total_ns": int(row["total_ns"])},
        synthetic=synthetic,
        median_ns=quantiles[0],
        p90_ns=quantiles[1],
        p99_ns=quantiles[2],
    )
    if found.timed_count and not synthetic:
        # Of kernels in order of their starts, each adds what lies beyond all ends before it.
        busy = reader.rows(
            f"""
            WITH run AS (
                SELECT start_ns, start_ns + duration_ns AS end_ns, max(start_ns + duration_ns) OVER (
                    ORDER BY start_ns ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before_ns
                FROM {kernels} WHERE clock = 0 AND duration_ns IS NOT NULL AND start_ns IS NOT NULL)
            SELECT sum(greatest(end_ns - greatest(start_ns, coalesce(before_ns, start_ns)), 0)) AS busy_ns FROM run
            """  # noqa: S608
        )[0]["busy_ns"]
        if busy is not None:
            found.busy_ns = int(busy)
            found.busy_share = found.busy_ns / span_ns if span_ns else None
    return found


def details(reader: Reader, kernel_ids: list[int], devices: list[Device]) -> list[KernelDetail]:
    """Launch configurations of some kernels, in their order."""
    wanted = ", ".join(str(int(number)) for number in kernel_ids)
    if not wanted:
        return []
    shape = ", ".join(f"shape.{name}" for name in _SHAPE)
    # A launch whose details came twice counts once.
    rows = reader.rows(
        f"""
        WITH launch AS (
            SELECT session_no, kernel_id, corr_id FROM {reader.table("kernel")} WHERE kernel_id IN ({wanted})),
        detail AS (
            SELECT session_no, corr_id, any_value(shape_id) AS shape_id FROM {reader.table("kernel_detail")}
            GROUP BY session_no, corr_id),
        used AS (
            SELECT session_no, kernel_id, shape_id, count(*) AS count
            FROM launch JOIN detail USING (session_no, corr_id) WHERE shape_id IS NOT NULL
            GROUP BY session_no, kernel_id, shape_id),
        first AS (
            SELECT session_no, kernel_id, (sum(count))::BIGINT AS details_count, count(*) AS shapes_count,
                max(count) AS shape_count, arg_max(shape_id, (count, shape_id)) AS shape_id
            FROM used GROUP BY session_no, kernel_id)
        SELECT first.*, {shape} FROM first JOIN {reader.table("kernel_shape")} AS shape
            ON shape.session_no = first.session_no AND shape.shape_id = first.shape_id
        """  # noqa: S608
    )
    by_kernel = {row["kernel_id"]: row for row in rows}
    registers = {
        row["kernel_id"]: row
        for row in reader.rows(
            f"""
            SELECT kernel_id, mode(num_regs) AS num_regs, max(dyn_shared_bytes) AS dyn_shared_bytes
            FROM {reader.table("kernel")} WHERE kernel_id IN ({wanted}) GROUP BY kernel_id
            """  # noqa: S608
        )
    }
    names = reader.texts("kernel", kernel_ids)
    texts = {number: text for (_, number), text in names.items()}
    found = []
    for number in kernel_ids:
        row, regs = by_kernel.get(number), registers.get(number, {})
        if row is None and regs.get("num_regs") is None:
            continue
        known = {name: row[name] for name in _SHAPE if row[name] is not None} if row is not None else {}
        found.append(
            KernelDetail(
                kernel_id=number,
                name=texts.get(number),
                details_count=row["details_count"] if row is not None else 0,
                shapes_count=row["shapes_count"] if row is not None else 0,
                shape_count=row["shape_count"] if row is not None else 0,
                shape=known,
                num_regs=regs.get("num_regs"),
                dyn_shared_bytes=regs.get("dyn_shared_bytes"),
                waves_per_sm=_waves(known, devices),
            )
        )
    return found


def _waves(shape: dict[str, Any], devices: list[Device]) -> float | None:
    """Only where all devices of the session have as many multiprocessors: kernels do not say on which one they ran."""
    counts = {device.multi_processor_count for device in devices}
    sides = [shape[f"grid_{axis}"] for axis in "xyz" if f"grid_{axis}" in shape]
    slots = shape.get("max_active_blocks", 0) * (counts.pop() or 0) if len(counts) == 1 else 0
    if slots <= 0 or len(sides) < 3:
        return None
    return float(sides[0] * sides[1] * sides[2] / slots)
