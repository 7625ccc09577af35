"""What is stored, in the shapes of GPU Flight's open backend (field names in camelCase, times as ISO 8601 and ns).

Where that backend gives everything it has, these answers are bounded, and say in a header when something was left out.
What a log does not tell is null, never 0.
"""

from __future__ import annotations

from typing import Any

from gpuflight.events.query.kernels import KernelFilter, Launch, launches
from gpuflight.events.query.reader import Reader
from gpuflight.events.store import EventStore
from gpuflight.events.store.catalogue import Session
from gpuflight.events.tables import SAMPLE_KINDS
from gpuflight.graph.codec import time_text

MAX_SESSIONS = 500
MAX_KERNELS = 20_000
"""Of all sessions of one answer together."""
MAX_METRICS = 5_000
"""Of one kind in one element."""
MAX_SAMPLES = 10_000


class Bounded(list[Any]):
    """An answer, and whether something was left out."""

    truncated = False


def iso(time_ns: int | None) -> str | None:
    """A time as ISO 8601; None for what is unknown or cannot be written."""
    if time_ns is None:
        return None
    try:
        return time_text(time_ns)
    except (ValueError, OverflowError, OSError):
        return None


def hosts(store: EventStore) -> Bounded:
    """``/events/hosts``: hosts with their sessions and the GPUs of each, the latest first."""
    found, count = store.catalogue.find(limit=MAX_SESSIONS)
    gpus = _devices(store, found)
    by_host: dict[tuple[str | None, str | None], list[dict[str, Any]]] = {}
    for session in found:
        by_host.setdefault((session.hostname, session.ip_addr), []).append(
            {
                "sessionId": session.session_id,
                "appName": session.app,
                "startTime": iso(session.start_ns),
                "endTime": iso(session.end_ns),
                "gpus": gpus.get(session.session_no, []),
            }
        )
    answer = Bounded(
        {"hostname": name, "ipAddr": address, "sessions": sessions} for (name, address), sessions in by_host.items()
    )
    answer.truncated = count > len(found)
    return answer


def init(store: EventStore, from_ns: int, to_ns: int, session_id: str | None = None) -> Bounded:
    """``/events/init``: sessions of a time with their rows."""
    found, count = store.catalogue.find(from_ns=from_ns, to_ns=to_ns, limit=MAX_SESSIONS)
    if session_id is not None:
        found = [session for session in found if session.session_id == session_id]
        count = len(found)
    answer = Bounded()
    answer.truncated = count > len(found)
    left = MAX_KERNELS
    devices = _devices(store, found)
    for session in found:
        reader = Reader(store, [session])
        kernels = launches(reader, limit=min(left, 10_000)) if left else []
        left -= len(kernels)
        answer.truncated |= len(kernels) < _count(reader, "kernel")
        scopes = _scopes(reader, session)
        answer.append(
            {
                "pid": session.pid,
                "app": session.app,
                "sessionId": session.session_id,
                "logPath": session.log_path,
                "time": iso(session.start_ns),
                "tsNs": session.start_ns,
                "shutdownTsNs": session.end_ns,
                "systemRateMs": _interval_ms(reader),
                "hostMetrics": _host_metrics(reader, None, None),
                "cudaStaticDevices": devices.get(session.session_no, []),
                "scopes": scopes,
                "kernels": [_kernel(number, launch, session) for number, launch in enumerate(kernels, 1)],
                "createdAt": iso(session.created_ns),
                "updatedAt": iso(session.received_ns),
            }
        )
    return answer


def system(store: EventStore, session: Session, from_ns: int | None, to_ns: int | None) -> Bounded:
    """``/events/system``: periods of telemetry with what was read in each; the whole session where it names none."""
    reader = Reader(store, [session])
    rows = reader.rows(
        f"SELECT time_ns, event, name, pid, app FROM {reader.table('system_event')} WHERE clock = 0"  # noqa: S608
        " ORDER BY time_ns LIMIT 1000"
    )
    answer = Bounded()
    answer.truncated = len(rows) == 1000
    if not rows:
        rows = [{"time_ns": session.start_ns or session.first_event_ns, "event": "system_start", "name": None}]
    stops = [row["time_ns"] for row in rows if row["event"] == "system_stop"]
    for row in rows:
        begin_ns = row["time_ns"]
        end_ns = begin_ns
        if row["event"] == "system_start":
            end_ns = next((stop for stop in stops if stop >= (begin_ns or 0)), None)
        if (from_ns is not None and (end_ns or 2**63) < from_ns) or (to_ns is not None and (begin_ns or 0) > to_ns):
            continue
        span = (_later(begin_ns, from_ns), _earlier(end_ns, to_ns)) if row["event"] == "system_start" else (0, 0)
        answer.append(
            {
                "sessionId": session.session_id,
                "pid": row.get("pid", session.pid),
                "app": row.get("app", session.app),
                "name": row["name"],
                "eventType": row["event"],
                "tsNs": begin_ns,
                "rangeStart": iso(begin_ns),
                "rangeEnd": iso(end_ns),
                "hostMetrics": _host_metrics(reader, *span),
                "deviceMetrics": _device_metrics(reader, *span),
                "createdAt": iso(session.created_ns),
                "updatedAt": iso(session.received_ns),
            }
        )
    return answer


def profile_samples(store: EventStore, session: Session) -> Bounded:
    """``/events/profile-samples``: samples added up by scope, function, place, kind and metric."""
    reader = Reader(store, [session])
    rows = reader.rows(
        f"""
        SELECT coalesce(scope_name_id, 0) AS scope_name_id, device_id, coalesce(sample_kind, 0) AS sample_kind,
            coalesce(function_id, 0) AS function_id, pc_offset, coalesce(metric_id, 0) AS metric_id, stall_reason,
            coalesce(source_file_id, 0) AS source_file_id, source_line,
            sum(metric_value)::HUGEINT AS value, count(*) AS count
        FROM {reader.table("profile_sample")} GROUP BY ALL
        ORDER BY value DESC, function_id, pc_offset, metric_id, stall_reason LIMIT {MAX_SAMPLES + 1}
        """  # noqa: S608
    )
    no = session.session_no
    scopes = reader.texts("scope", (row["scope_name_id"] for row in rows))
    functions = reader.texts("function", (row["function_id"] for row in rows))
    metrics = reader.texts("metric", (row["metric_id"] for row in rows))
    files = reader.texts("source_file", (row["source_file_id"] for row in rows))
    answer = Bounded(
        {
            "id": number,
            "sessionId": session.session_id,
            "scopeName": scopes.get((no, row["scope_name_id"])),
            "deviceId": row["device_id"],
            "sampleKind": SAMPLE_KINDS.get(row["sample_kind"], str(row["sample_kind"])),
            "functionName": functions.get((no, row["function_id"])),
            "pcOffset": row["pc_offset"],
            "metricName": metrics.get((no, row["metric_id"])),
            "metricValue": int(row["value"]) if row["value"] is not None else None,
            "stallReason": row["stall_reason"],
            "occurrenceCount": row["count"],
            "sourceFile": files.get((no, row["source_file_id"])),
            "sourceLine": row["source_line"] or None,
            "createdAt": iso(session.created_ns),
        }
        for number, row in enumerate(rows[:MAX_SAMPLES], 1)
    )
    answer.truncated = len(rows) > MAX_SAMPLES
    return answer


def kernels_of(store: EventStore, session: Session, only: KernelFilter, limit: int) -> list[dict[str, Any]]:
    """Kernels of one session in their shape."""
    found = launches(Reader(store, [session]), only=only, limit=limit)
    return [_kernel(number, launch, session) for number, launch in enumerate(found, 1)]


def _kernel(number: int, launch: Launch, session: Session) -> dict[str, Any]:
    shape = launch.shape or {}
    end_ns = None
    if launch.start_ns is not None and launch.duration_ns is not None:
        end_ns = launch.start_ns + launch.duration_ns
    return {
        "id": number,
        "time": iso(launch.start_ns),
        "startNs": launch.start_ns,
        "endNs": end_ns,
        "durationNs": launch.duration_ns,
        "apiStartNs": launch.api_start_ns,
        "apiExitNs": launch.api_exit_ns,
        "streamId": launch.stream_id,
        "sessionId": launch.session_id,
        "deviceId": launch.device_id,
        "pid": session.pid,
        "app": session.app,
        "platform": None,
        "name": launch.name,
        "corrId": launch.corr_id,
        "cudaError": None,
        "hasDetails": launch.shape is not None,
        "grid": _triple(shape, "grid"),
        "block": _triple(shape, "block"),
        "dynSharedBytes": launch.dyn_shared_bytes,
        "numRegs": launch.num_regs,
        "staticSharedBytes": shape.get("static_shared_bytes"),
        "localBytes": shape.get("local_bytes"),
        "constBytes": shape.get("const_bytes"),
        "occupancy": shape.get("occupancy"),
        "maxActiveBlocks": shape.get("max_active_blocks"),
        "extraParams": None,
        "stackTrace": launch.stack,
        "userScope": launch.scope,
        "scopeDepth": launch.scope.count("|") if launch.scope is not None else None,
        "createdAt": iso(session.created_ns),
        "updatedAt": iso(session.received_ns),
        "regOccupancy": shape.get("reg_occupancy"),
        "smemOccupancy": shape.get("smem_occupancy"),
        "warpOccupancy": shape.get("warp_occupancy"),
        "blockOccupancy": shape.get("block_occupancy"),
        "limitingResource": shape.get("limiting_resource"),
        "localMemTotalBytes": shape.get("local_mem_total_bytes"),
    }


def _triple(shape: dict[str, Any], name: str) -> str | None:
    values = [shape.get(f"{name}_{axis}") for axis in "xyz"]
    return None if None in values else f"({values[0]},{values[1]},{values[2]})"


def _devices(store: EventStore, sessions: list[Session]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    if not sessions:
        return found
    rows = store.rows(f"SELECT * FROM {store.relation('device', sessions).sql} ORDER BY session_no, device_id")  # noqa: S608
    ids = {session.session_no: session.session_id for session in sessions}
    for row in rows:
        found.setdefault(row["session_no"], []).append(
            {
                "sessionId": ids[row["session_no"]],
                "uuid": row["uuid"],
                "name": row["name"],
                "deviceId": row["device_id"],
                "computeMajor": _text(row["compute_major"]),
                "computeMinor": _text(row["compute_minor"]),
                "l2CacheSizeBytes": row["l2_cache_size_bytes"],
                "sharedMemPerBlockBytes": row["shared_mem_per_block_bytes"],
                "regsPerBlock": row["regs_per_block"],
                "multiProcessorCount": row["multi_processor_count"],
                "warpSize": row["warp_size"],
            }
        )
    return found


def _scopes(reader: Reader, session: Session) -> list[dict[str, Any]]:
    rows = reader.rows(
        f"""
        SELECT b.time_ns, coalesce(b.name_id, 0) AS name_id, b.tag, coalesce(b.scope_id, 0) AS scope_id, b.depth,
            b.scope_instance_id, e.time_ns AS end_ns
        FROM {reader.table("scope")} AS b LEFT JOIN (
            SELECT scope_instance_id, min(time_ns) AS time_ns FROM {reader.table("scope")}
            WHERE event_type IN (1, 3) AND scope_instance_id IS NOT NULL GROUP BY scope_instance_id) AS e
            ON e.scope_instance_id = b.scope_instance_id
        WHERE b.event_type IN (0, 2) ORDER BY b.time_ns LIMIT {MAX_METRICS}
        """  # noqa: S608
    )
    no = session.session_no
    names = reader.texts("scope", (row["name_id"] for row in rows))
    paths = reader.texts("user_scope", (row["scope_id"] for row in rows))
    return [
        {
            "id": row["scope_instance_id"] if row["scope_instance_id"] is not None else number,
            "time": iso(row["time_ns"]),
            "tsNs": row["time_ns"],
            "endNs": row["end_ns"],
            "sessionId": session.session_id,
            "name": names.get((no, row["name_id"])),
            "tag": row["tag"],
            "userScope": paths.get((no, row["scope_id"])),
            "scopeDepth": row["depth"],
            "createdAt": iso(session.created_ns),
            "updatedAt": iso(session.received_ns),
        }
        for number, row in enumerate(rows, 1)
    ]


def _host_metrics(reader: Reader, from_ns: int | None, to_ns: int | None) -> list[dict[str, Any]]:
    rows = _metrics(reader, "host_metric", from_ns, to_ns)
    return [
        {
            "tsNs": row["time_ns"],
            "time": iso(row["time_ns"]),
            "cpuPct": row["cpu_pct"],
            "ramUsedMib": row["ram_used_mib"],
            "ramTotalMib": row["ram_total_mib"],
        }
        for row in rows
    ]


def _device_metrics(reader: Reader, from_ns: int | None, to_ns: int | None) -> list[dict[str, Any]]:
    rows = _metrics(reader, "device_metric", from_ns, to_ns)
    return [
        {
            "tsNs": row["time_ns"],
            "time": iso(row["time_ns"]),
            "deviceId": row["device_id"],
            "gpuUtil": row["gpu_util_pct"],
            "memUtil": row["mem_util_pct"],
            "tempC": row["temp_c"],
            "powerMw": row["power_mw"],
            "usedMib": row["used_mib"],
            "totalMib": row["total_mib"],
            "clockSm": row["clock_sm_mhz"],
        }
        for row in rows
    ]


def _metrics(reader: Reader, table: str, from_ns: int | None, to_ns: int | None) -> list[dict[str, Any]]:
    """Evenly picked where there are more than fit."""
    first, last = from_ns if from_ns is not None else -(2**63), to_ns if to_ns is not None else 2**63 - 1
    return reader.rows(
        f"""
        WITH found AS (
            SELECT *, row_number() OVER (ORDER BY time_ns) AS number, count(*) OVER () AS count
            FROM {reader.table(table)} WHERE clock = 0 AND time_ns BETWEEN ? AND ?)
        SELECT * FROM found WHERE number % (1 + count // {MAX_METRICS}) = 0 ORDER BY time_ns
        """,  # noqa: S608
        (first, last),
    )


def _interval_ms(reader: Reader) -> int | None:
    rows = reader.rows(f"SELECT max(sample_interval_ms) AS value FROM {reader.table('session_start')}")  # noqa: S608
    value: int | None = rows[0]["value"]
    return value


def _count(reader: Reader, table: str) -> int:
    return int(reader.rows(f"SELECT count(*) AS count FROM {reader.table(table)}")[0]["count"])  # noqa: S608


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)


def _later(one: int | None, other: int | None) -> int | None:
    return max(one, other) if one is not None and other is not None else one if other is None else other


def _earlier(one: int | None, other: int | None) -> int | None:
    return min(one, other) if one is not None and other is not None else one if other is None else other
