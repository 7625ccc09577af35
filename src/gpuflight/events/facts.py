"""Facts about one whole session that need its records side by side: what sums kept while it ran cannot tell.

What the host did in the longest gaps, how much of the copying kernels hide, which steps hold copies that block, how
long launches onto an empty stream take. The records come out of the store as arrays; all is sorting and searching in
them, so a million kernels take about a second.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gpuflight.events.activity.steps import Steps, kind_of
from gpuflight.events.activity.timeline import DELAY_NS, LONG_GAP_NS
from gpuflight.events.arrays import numpy
from gpuflight.events.query.reader import Reader
from gpuflight.events.tables import SYNC_TYPES

_MOST_SCOPES = 1_000_000
_MOST_GAPS = 3
_BLOCKED_NS = 20_000
"""As in ``activity.work``: a copy's call below this says nothing."""
_EPOCH_FROM_NS = 946_684_800_000_000_000
_HOST_PART = 0.3
"""What filled less of a gap is not named as what the host did in it."""


class Gap(msgspec.Struct):
    """A time in which nothing ran on the session's GPUs. ``host``: what the host did in most of it, empty if the log
    does not tell; ``called``: whether the work that ended it had been launched before the gap began (None: unknown)."""

    start_ns: int
    duration_ns: int
    host: str = ""
    called: bool | None = None


class Facts(msgspec.Struct):
    """Metrics and attributes of the Session entity (units in the names); ``gaps``: the longest, longest first."""

    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    attributes: dict[str, str] = msgspec.field(default_factory=dict)
    gaps: list[Gap] = msgspec.field(default_factory=list)


class Runs(msgspec.Struct):
    """Runs of scopes and ranges that have a name, in order of their begins."""

    starts: Any
    ends: Any
    names: list[str]


def session_facts(reader: Reader) -> Facts:
    """Facts of the one session that the reader is about."""
    facts = Facts()
    kernels = _intervals(reader, "kernel", "stream_id, device_id, api_start_ns")
    copies = _intervals(reader, "memcpy", "stream_id, device_id, api_start_ns, api_exit_ns")
    fills = _intervals(reader, "memset", "stream_id, device_id, api_start_ns, api_exit_ns")
    runs = _runs(reader)
    steps = _steps(runs)
    _hidden_copies(facts, kernels, copies)
    _onto_empty_streams(facts, kernels, [copies, fills])
    active = union([kernels, copies, fills])
    _in_steps(facts, active, steps, [copies, fills])
    _gaps(facts, reader, active, runs, [kernels, copies, fills])
    return facts


# --- intervals -------------------------------------------------------------------------------------------------------


def _intervals(reader: Reader, table: str, more: str) -> dict[str, Any]:
    """Starts and ends of a table's rows that have sane times, by start, with further columns (0: unknown)."""
    names = [name.strip() for name in more.split(",")]
    listed = ", ".join(f"coalesce({name}, {-1 if name.endswith('_id') else 0}) AS {name}" for name in names)
    return reader.store.columns(
        f"SELECT start_ns AS s, start_ns + duration_ns AS e, {listed} FROM {reader.table(table)}"  # noqa: S608
        " WHERE clock = 0 AND start_ns > 0 AND duration_ns >= 0 ORDER BY start_ns"
    )


def union(tables: list[dict[str, Any]]) -> tuple[Any, Any]:
    """(starts, ends) of the times in which at least one interval lasted."""
    np = numpy()
    starts = np.concatenate([np.asarray(table["s"], np.int64) for table in tables])
    ends = np.concatenate([np.asarray(table["e"], np.int64) for table in tables])
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    if not len(starts):
        return starts, ends
    reach = np.maximum.accumulate(ends)
    begins = np.flatnonzero(np.concatenate([[True], starts[1:] > reach[:-1]]))
    return starts[begins], reach[np.append(begins[1:], len(reach)) - 1]


def covered(merged: tuple[Any, Any], starts: Any, ends: Any) -> Any:
    """How much of each interval lies within a union, ns."""
    np = numpy()
    begins, stops = merged
    if not len(begins):
        return np.zeros(len(starts), np.int64)
    before = np.concatenate([[0], np.cumsum(stops - begins)])

    def until(times: Any) -> Any:
        at = np.searchsorted(begins, times, side="right")  # so many began at or before it
        last = np.maximum(at - 1, 0)
        inside = np.minimum(times, stops[last]) - begins[last]
        return np.where(at > 0, before[last] + inside, 0)

    return until(ends) - until(starts)


# --- what the host did -----------------------------------------------------------------------------------------------


def _runs(reader: Reader) -> Runs:
    """Scopes (begin and end by instance) and NVTX ranges."""
    np = numpy()
    found: list[tuple[int, int, str]] = []
    rows = reader.store.columns(
        f"""
        WITH part AS (SELECT scope_instance_id AS i, name_id, time_ns, event_type IN (0, 2) AS begins
            FROM {reader.table("scope")} WHERE clock = 0 AND event_type IS NOT NULL AND scope_instance_id IS NOT NULL)
        SELECT min(time_ns) FILTER (begins) AS s, max(time_ns) FILTER (NOT begins) AS e,
            any_value(name_id) FILTER (begins) AS n FROM part GROUP BY i
            HAVING s IS NOT NULL AND e >= s LIMIT {_MOST_SCOPES}
        """  # noqa: S608
    )
    texts = {identifier: text for (_, identifier), text in reader.texts("scope", np.unique(rows["n"]).tolist()).items()}
    found += [
        (start, end, texts[name])
        for start, end, name in zip(rows["s"].tolist(), rows["e"].tolist(), rows["n"].tolist(), strict=True)
        if name in texts
    ]
    rows = reader.store.columns(
        f"SELECT start_ns AS s, start_ns + duration_ns AS e, coalesce(name_id, 0) AS n FROM {reader.table('nvtx')}"  # noqa: S608
        f" WHERE clock = 0 AND duration_ns >= 0 LIMIT {_MOST_SCOPES}"
    )
    marks = reader.texts("marker", np.unique(rows["n"]).tolist())
    texts = {identifier: text for (_, identifier), text in marks.items()}
    found += [
        (start, end, texts[name])
        for start, end, name in zip(rows["s"].tolist(), rows["e"].tolist(), rows["n"].tolist(), strict=True)
        if name in texts
    ]
    found.sort()
    starts = np.array([start for start, _, _ in found], np.int64)
    ends = np.array([end for _, end, _ in found], np.int64)
    return Runs(starts, ends, [name for _, _, name in found])


def _steps(runs: Runs) -> tuple[Any, Any]:
    """(starts, ends) of the steps of the series that took the most time."""
    np = numpy()
    kinds = {name: kind_of(name) for name in set(runs.names)}
    if not any(kind == "step" for kind, _ in kinds.values()):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    steps = Steps()
    for start, end, name in zip(runs.starts.tolist(), runs.ends.tolist(), runs.names, strict=True):
        if kinds[name][0] == "step":
            steps.take(name, start, end - start)
    best = steps.result()
    series = "" if best is None else best.name
    chosen = np.array([kinds[name] == ("step", series) for name in runs.names], bool)
    return runs.starts[chosen], runs.ends[chosen]


def _in_gap(start_ns: int, end_ns: int, runs: Runs, waits: dict[str, Any]) -> str:
    """What the host did in most of a gap: the innermost scope that fills enough of it, and a wait for the GPU."""
    np = numpy()
    told = []
    if len(runs.starts):
        until = int(np.searchsorted(runs.starts, end_ns))
        inside = np.minimum(runs.ends[:until], end_ns) - np.maximum(runs.starts[:until], start_ns)
        enough = np.flatnonzero(inside >= _HOST_PART * (end_ns - start_ns))
        if len(enough):  # of nested ones the shortest is the innermost
            lasted = (runs.ends[:until] - runs.starts[:until])[enough]
            told.append(f"in {runs.names[int(enough[np.argmin(lasted)])]}")
    if len(waits["s"]):
        inside = np.minimum(waits["e"], end_ns) - np.maximum(waits["s"], start_ns)
        at = int(np.argmax(inside))
        if inside[at] >= _HOST_PART * (end_ns - start_ns):
            told.append(f"waiting ({SYNC_TYPES.get(int(waits['sync_type'][at]), 'other')})")
    return ", ".join(told)


# --- facts -----------------------------------------------------------------------------------------------------------


def _hidden_copies(facts: Facts, kernels: dict[str, Any], copies: dict[str, Any]) -> None:
    """Share of the copies' time in which a kernel ran as well."""
    total_ns = int((copies["e"] - copies["s"]).sum())
    if total_ns and len(kernels["s"]):
        hidden_ns = int(covered(union([kernels]), copies["s"], copies["e"]).sum())
        facts.metrics["copies_overlapped_pct"] = round(100 * hidden_ns / total_ns, 2)


def _onto_empty_streams(facts: Facts, kernels: dict[str, Any], others: list[dict[str, Any]]) -> None:
    """Launches onto a stream on which nothing was left to do: how long until the kernel began."""
    np = numpy()
    calls = np.asarray(kernels["api_start_ns"], np.int64)
    known = (calls >= _EPOCH_FROM_NS) & (calls <= kernels["s"])
    if not known.any():
        return
    rest = sum(len(other["s"]) for other in others)
    calls, known = np.append(calls, np.zeros(rest, np.int64)), np.append(known, np.zeros(rest, bool))
    starts, ends, stream, device = (
        np.concatenate([np.asarray(table[name], np.int64) for table in (kernels, *others)])
        for name in ("s", "e", "stream_id", "device_id")
    )
    if (device < 0).any():  # rows in batches name no GPU
        device = np.zeros(len(device), np.int64)
    order = np.lexsort((starts, stream, device))
    starts, ends, calls, known = starts[order], ends[order], calls[order], known[order]
    stream, device = stream[order], device[order]
    same = (stream[1:] == stream[:-1]) & (device[1:] == device[:-1])
    before = np.concatenate([[0], np.where(same, ends[:-1], 0)])
    delays = (starts - calls)[known & (before <= calls)]
    if len(delays):
        facts.metrics["idle_launches_count"] = len(delays)
        facts.metrics["delayed_launches_count"] = int(np.count_nonzero(delays > DELAY_NS))
        facts.metrics["launch_delay_p50_us"] = round(float(np.percentile(delays, 50)) / 1e3, 3)
        facts.metrics["launch_delay_p99_us"] = round(float(np.percentile(delays, 99)) / 1e3, 3)


def _in_steps(facts: Facts, active: tuple[Any, Any], steps: tuple[Any, Any], moved: list[dict[str, Any]]) -> None:
    """How idle the GPUs are within steps, and which steps hold copies or fills that block."""
    np = numpy()
    starts, ends = steps
    total_ns = int((ends - starts).sum())
    if not len(starts) or not total_ns:
        return
    if len(active[0]):
        facts.metrics["steps_idle_pct"] = round(100 * (1 - int(covered(active, starts, ends).sum()) / total_ns), 2)
    begun = []
    told = False
    for table in moved:
        call, back = np.asarray(table["api_start_ns"], np.int64), np.asarray(table["api_exit_ns"], np.int64)
        known = (call >= _EPOCH_FROM_NS) & (back >= call)
        told = told or bool(known.any())
        begun.append(call[known & (back - call >= _BLOCKED_NS) & (back >= table["e"])])
    if told:
        order = np.argsort(starts, kind="stable")
        times = np.sort(np.concatenate(begun))
        held = np.searchsorted(times, ends[order]) > np.searchsorted(times, starts[order])
        facts.metrics["steps_with_blocking_copies_pct"] = round(100 * int(np.count_nonzero(held)) / len(starts), 2)


def _gaps(facts: Facts, reader: Reader, active: tuple[Any, Any], runs: Runs, work: list[dict[str, Any]]) -> None:
    """The longest gaps, and what the host did in them."""
    np = numpy()
    starts, ends = active
    if len(starts) < 2:
        return
    lasted = starts[1:] - ends[:-1]
    waits = reader.store.columns(
        f"SELECT start_ns AS s, start_ns + duration_ns AS e, coalesce(sync_type, 0) AS sync_type"  # noqa: S608
        f" FROM {reader.table('sync')} WHERE clock = 0 AND start_ns > 0 AND duration_ns > 0 AND sync_type <> 2"
    )
    for at in np.argsort(-lasted, kind="stable")[:_MOST_GAPS].tolist():
        begin_ns, end_ns = int(ends[at]), int(starts[at + 1])
        gap = Gap(begin_ns, end_ns - begin_ns, _in_gap(begin_ns, end_ns, runs, waits))
        for table in work:
            first = int(np.searchsorted(table["s"], end_ns))
            if first < len(table["s"]) and int(table["s"][first]) == end_ns:
                call = int(table["api_start_ns"][first])
                if call >= _EPOCH_FROM_NS:
                    gap.called = call < begin_ns
        facts.gaps.append(gap)
    longest = facts.gaps[0]
    if longest.duration_ns > LONG_GAP_NS:
        after_s = (longest.start_ns - int(starts[0])) / 1e9
        text = f"{longest.duration_ns / 1e6:,.0f} ms, {after_s:.1f} s after the first work"
        if longest.host:
            text += f", the host {longest.host}"
        facts.attributes["longest_gap"] = text
