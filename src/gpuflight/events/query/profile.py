"""Where instructions stall and what they do: PC samples and SASS metrics per function and line."""

from __future__ import annotations

import msgspec

from gpuflight.errors import InputError
from gpuflight.events.query.reader import Reader, Where, page


class ProfileLine(msgspec.Struct, kw_only=True):
    """One metric of one function, or of one of its lines. ``kind``: pc_sampling (``value`` is samples; ``share`` of all
    samples of the function, 0 to 1), sass_metric (``value`` is the counter's sum).

    ``metric`` is the name as collected; the number of a stall is not trusted, since the family's programs disagree on
    some (specs of the format), and used only where there is no name.
    """

    kind: str
    function: str | None
    metric: str
    source_file: str | None = None
    source_line: int | None = None
    pc_offset: int | None = None
    value: int
    samples_count: int
    share: float | None = None


_CODES = {"pc_sampling": 0, "sass_metric": 1}
_DETAIL = {
    "function": "",
    "line": ", coalesce(source_file_id, 0) AS source_file_id, source_line",
    "instruction": ", coalesce(source_file_id, 0) AS source_file_id, source_line, pc_offset",
}


def profile(
    reader: Reader,
    *,
    kind: str = "pc_sampling",
    per: str = "function",
    function_contains: str | None = None,
    limit: int = 200,
    offset: int = 0,
) -> list[ProfileLine]:
    """Metrics per function, line or instruction, the greatest first. Raises InputError for another kind or ``per``."""
    if kind not in _CODES:
        raise InputError(f"kind is {kind}; one of {', '.join(_CODES)}")
    if per not in _DETAIL:
        raise InputError(f"per is {per}; one of {', '.join(_DETAIL)}")
    where = Where().add("coalesce(sample_kind, 0) = ?", _CODES[kind])
    if function_contains is not None:
        where.add(
            f"(session_no, function_id) IN (SELECT (session_no, id) FROM {reader.table('name')}"  # noqa: S608
            " WHERE dictionary = 'function' AND contains(text, ?))",
            function_contains,
        )
    detail = _DETAIL[per]
    names = detail.replace("coalesce(source_file_id, 0) AS source_file_id", "source_file_id")
    rows = reader.rows(
        f"""
        WITH line AS (
            SELECT session_no, coalesce(function_id, 0) AS function_id, coalesce(metric_id, 0) AS metric_id,
                CASE WHEN coalesce(metric_id, 0) = 0 THEN coalesce(stall_reason, 0) ELSE 0 END AS stall{detail},
                sum(metric_value) AS value, count(*) AS samples_count
            FROM {reader.table("profile_sample")} {where.sql}
            GROUP BY ALL)
        SELECT *, sum(value) OVER (PARTITION BY session_no, function_id) AS function_value
        FROM line ORDER BY value DESC, session_no, function_id, metric_id, stall{names} {page(limit, offset)}
        """,  # noqa: S608
        where.values,
    )
    functions = reader.texts("function", (row["function_id"] for row in rows))
    metrics = reader.texts("metric", (row["metric_id"] for row in rows))
    files = reader.texts("source_file", (row.get("source_file_id", 0) for row in rows))
    return [
        ProfileLine(
            kind=kind,
            function=functions.get((row["session_no"], row["function_id"])),
            metric=metrics.get((row["session_no"], row["metric_id"])) or f"stall_reason_{row['stall']}",
            source_file=files.get((row["session_no"], row.get("source_file_id", 0))),
            source_line=row.get("source_line") or None,
            pc_offset=row.get("pc_offset"),
            value=int(row["value"] or 0),
            samples_count=row["samples_count"],
            share=int(row["value"]) / int(row["function_value"])
            if kind == "pc_sampling" and row["function_value"]
            else None,
        )
        for row in rows
    ]
