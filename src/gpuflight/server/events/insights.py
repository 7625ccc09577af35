"""The rules of the open backend about one session: what they find, per kernel and not per launch.

Rules and thresholds are those of GPU Flight's open snapshot (specs of the format, §3.4); gpuflight's own rules are
``gpuflight.bottlenecks``. Every finding rests on samples that are there: a session without them has none.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gpuflight.events.query.profile import profile
from gpuflight.events.query.reader import Reader

MAX_KERNELS = 200
_RANK = {"HIGH": 0, "MEDIUM": 1, "LOW": 2}
_MEMORY_STALLS = ("scoreboard", "memory", "lg_throttle", "mio", "tex", "drain", "imc")
"""Parts of the names of stalls that wait for memory."""


class Insight(msgspec.Struct, kw_only=True, rename="camel"):
    """One finding; ``metric`` is what it rests on."""

    severity: str
    category: str
    kernel_name: str | None = None
    function_name: str | None = None
    title: str
    message: str
    metric: dict[str, Any]


def insights(reader: Reader) -> list[Insight]:
    """Everything the rules find, the gravest first."""
    found = [*_launch_configurations(reader), *_stalls(reader), *_divergence(reader), *_temperature(reader)]
    return sorted(found, key=lambda insight: (_RANK[insight.severity], insight.category, insight.kernel_name or ""))


def _launch_configurations(reader: Reader) -> list[Insight]:
    """Low occupancy, spilled registers, registers as the limit."""
    rows = reader.rows(
        f"""
        SELECT k.session_no, k.kernel_id, count(*) AS count, avg(s.occupancy) AS occupancy,
            avg(s.reg_occupancy) AS reg_occupancy, max(s.local_mem_total_bytes) AS local_bytes,
            max(k.num_regs) AS num_regs, max(s.limiting_resource) AS limit_name
        FROM {reader.table("kernel")} AS k
            JOIN {reader.table("kernel_detail")} AS d USING (session_no, corr_id)
            JOIN {reader.table("kernel_shape")} AS s USING (session_no, shape_id)
        GROUP BY k.session_no, k.kernel_id ORDER BY sum(k.duration_ns) DESC NULLS LAST LIMIT {MAX_KERNELS}
        """  # noqa: S608
    )
    names = reader.texts("kernel", (row["kernel_id"] or 0 for row in rows))
    found = []
    for row in rows:
        name = names.get((row["session_no"], row["kernel_id"] or 0))
        occupancy, spilled = row["occupancy"], row["local_bytes"]
        if occupancy is not None and occupancy < 0.5:
            found.append(
                Insight(
                    severity="HIGH",
                    category="OCCUPANCY",
                    kernel_name=name,
                    title="Low occupancy",
                    message=f"{occupancy:.0%} over {row['count']} launches; limited by {row['limit_name']}",
                    metric={"occupancy": occupancy, "launches": row["count"]},
                )
            )
        if spilled:
            found.append(
                Insight(
                    severity="MEDIUM",
                    category="MEMORY",
                    kernel_name=name,
                    title="Registers are spilled to local memory",
                    message=f"up to {spilled} bytes of local memory per launch",
                    metric={"localMemTotalBytes": spilled},
                )
            )
        registers, share = row["num_regs"], row["reg_occupancy"]
        limited = "REG" in (row["limit_name"] or "").upper()
        if limited and registers is not None and registers > 32 and share is not None and share < 0.6:
            found.append(
                Insight(
                    severity="MEDIUM",
                    category="OCCUPANCY",
                    kernel_name=name,
                    title="Registers limit the occupancy",
                    message=f"{registers} registers a thread allow an occupancy of {share:.0%}",
                    metric={"numRegs": registers, "regOccupancy": share},
                )
            )
    return found


def _stalls(reader: Reader) -> list[Insight]:
    """The greatest stall of a function, where it is above 40 % of its samples."""
    best: dict[str | None, Any] = {}
    for line in profile(reader, kind="pc_sampling", per="function", limit=1000):
        if line.function not in best and line.share is not None:
            best[line.function] = line
    found = []
    for line in best.values():
        if line.share <= 0.4:
            continue
        memory = any(part in line.metric.lower() for part in _MEMORY_STALLS)
        found.append(
            Insight(
                severity="HIGH" if memory else "MEDIUM",
                category="STALL",
                function_name=line.function,
                title=f"{line.metric} is {line.share:.0%} of the samples",
                message="waits for memory" if memory else "one kind of stall outweighs the others",
                metric={"stall": line.metric, "share": line.share, "samples": line.value},
            )
        )
    return found


def _divergence(reader: Reader) -> list[Insight]:
    """Threads that are active per instruction of a warp."""
    sums: dict[str | None, dict[str, int]] = {}
    for line in profile(reader, kind="sass_metric", per="function", limit=1000):
        sums.setdefault(line.function, {})[line.metric] = line.value
    found = []
    for function, values in sums.items():
        warps = next((v for name, v in values.items() if name.endswith("sass_inst_executed")), 0)
        threads = next((v for name, v in values.items() if name.endswith("sass_thread_inst_executed")), 0)
        if not warps or not threads:
            continue
        active = threads / (warps * 32)
        if active < 0.75:
            found.append(
                Insight(
                    severity="HIGH" if active < 0.5 else "MEDIUM",
                    category="DIVERGENCE",
                    function_name=function,
                    title="Threads of a warp diverge",
                    message=f"{active:.0%} of the threads are active per instruction",
                    metric={"activeShare": active, "threadInst": threads, "warpInst": warps},
                )
            )
    return found


def _temperature(reader: Reader) -> list[Insight]:
    rows = reader.rows(
        f"SELECT device_id, avg(temp_c) AS temp_c, count(temp_c) AS count FROM {reader.table('device_metric')}"  # noqa: S608
        " GROUP BY device_id HAVING avg(temp_c) >= 85 ORDER BY device_id"
    )
    return [
        Insight(
            severity="HIGH",
            category="THROTTLING",
            title=f"GPU {row['device_id']} is hot",
            message=f"{row['temp_c']:.0f} °C on average: it may run at lower clocks",
            metric={"meanTempC": row["temp_c"], "samples": row["count"], "deviceId": row["device_id"]},
        )
        for row in rows
    ]
