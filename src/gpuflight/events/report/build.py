"""Asks the store for all that a report says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from gpuflight.errors import InputError
from gpuflight.events.ledger import REASONS
from gpuflight.events.query.allocations import held, memory_series, memory_use
from gpuflight.events.query.copies import copies, fills
from gpuflight.events.query.kernels import duration_histogram, top_kernels
from gpuflight.events.query.profile import profile
from gpuflight.events.query.reader import MAX_ROWS, Reader, Store
from gpuflight.events.query.scopes import scope_tree
from gpuflight.events.query.series import telemetry
from gpuflight.events.query.sessions import describe, state
from gpuflight.events.query.waits import waits
from gpuflight.events.report import kernels as kernel_sections
from gpuflight.events.report import telemetry as telemetry_sections
from gpuflight.events.report.hints import profile_hints, wait_hints
from gpuflight.events.report.model import Capability, Device, Head, Loss, Report
from gpuflight.events.report.unseen import unseen
from gpuflight.events.store.catalogue import Session

_CHARTED = ("gpu_util_pct", "mem_util_pct", "power_mw", "temp_c", "used_mib", "clock_sm_mhz", "cpu_pct", "ram_used_mib")
_POINTS = 200
MAX_TOP = 1000


class Losses(Store, Protocol):
    """A store that also knows what was lost."""

    def losses(self, session: Session) -> list[dict[str, Any]]:
        """The session's ledger."""
        ...


def build_report(
    store: Losses, session: Session, *, now_ns: int, top: int = 20, source: str = "", state_now: str = ""
) -> Report:
    """The report of one session. ``top``: most kernels, waits, scopes … that are listed; 1 to 1000.

    ``source``: where it is from, for the reader; ``state_now``: if it is known better than the store can (a folder's
    lock). Raises InputError out of bounds.
    """
    if not 1 <= top <= MAX_TOP:
        raise InputError(f"top is {top}; it must be from 1 to {MAX_TOP}")
    reader = Reader(store, [session])
    line = describe(store, [session], now_ns)[0]
    first_ns, last_ns = _span(reader, session)
    span_ns = last_ns - first_ns if first_ns is not None and last_ns is not None and last_ns > first_ns else None
    capabilities = _capabilities(reader)
    devices = _devices(reader)
    synthetic = any(
        c.feature == "kernel_events" and c.status == "fallback" and c.mode == "launch_callbacks_synthetic"
        for c in capabilities
    )
    page = top_kernels(reader, quantiles=True, limit=top)
    tree = scope_tree(reader)
    stalls = profile(reader, kind="pc_sampling", limit=MAX_ROWS)
    sass = profile(reader, kind="sass_metric", limit=MAX_ROWS)
    found_waits = _with_span(waits(reader, limit=top), span_ns)
    report = Report(
        head=Head(
            session_id=session.session_id,
            source=source,
            app=session.app,
            hostname=session.hostname,
            pid=session.pid,
            session_kind=session.session_kind,
            profiling_engine=session.profiling_engine,
            run_id=session.run_id,
            segment_index=session.segment_index,
            state=state_now or state(session, now_ns),
            first_ns=first_ns,
            last_ns=last_ns,
            span_ns=span_ns,
            records=line.records,
        ),
        devices=devices,
        capabilities=capabilities,
        kernels=kernel_sections.summary(reader, span_ns, synthetic=synthetic),
        top_kernels=page.lines,
        top_kernels_count=page.lines_count,
        kernel_details=kernel_sections.details(
            reader, [line.kernel_id for line in page.lines if line.kernel_id is not None], devices
        ),
        durations=duration_histogram(reader, per_octave=1),
        copies=copies(reader),
        fills=fills(reader, limit=top),
        waits=found_waits,
        memory=memory_use(reader),
        held=held(reader, limit=top),
        memory_series=memory_series(reader, points=_POINTS),
        metrics=telemetry_sections.metrics(reader),
        energy=telemetry_sections.energy(reader),
        series=[
            series
            for series in telemetry(reader, "device_metric", points=_POINTS)
            + telemetry(reader, "host_metric", points=_POINTS)
            if series.metric in _CHARTED
        ],
        scopes=tree.nodes[:top],
        scopes_count=len(tree.nodes),
        counters=telemetry_sections.counters(reader, top),
        pm_sampling=telemetry_sections.pm_sampling(reader)[: max(top, 50)],
        stalls=stalls[:top],
        sass=sass[:top],
        hints=profile_hints(stalls, sass) + wait_hints(found_waits, _kernels_between(reader)),
        losses=[_loss(row) for row in store.losses(session)],
        unseen=[],
    )
    report.losses.sort(key=lambda loss: (loss.effect != "lost", -loss.count, loss.reason, loss.about))
    report.unseen = unseen(
        reader, report, complete_scopes=tree.complete, unmatched_ends_count=tree.unmatched_ends_count
    )
    return report


def _span(reader: Reader, session: Session) -> tuple[int | None, int | None]:
    """First and last moment of the session: what its begin and end say, and what ran before or after them."""
    row = reader.rows(
        f"SELECT max(start_ns + coalesce(duration_ns, 0)) AS last_ns FROM {reader.table('kernel')} WHERE clock = 0"  # noqa: S608
    )[0]
    firsts = [t for t in (session.start_ns, session.first_event_ns) if t is not None]
    lasts = [t for t in (session.end_ns, session.last_event_ns, row["last_ns"]) if t is not None]
    return min(firsts, default=None), max(lasts, default=None)


def _with_span(lines: Sequence[Any], span_ns: int | None) -> list[Any]:
    for line in lines:
        line.share = line.total_ns / span_ns if span_ns else None
    return list(lines)


def _capabilities(reader: Reader) -> list[Capability]:
    columns = ", ".join(Capability.__struct_fields__)
    rows = reader.rows(f"SELECT {columns} FROM {reader.table('capability')} ORDER BY feature")  # noqa: S608
    return [
        Capability(**{**row, "requested": None if row["requested"] is None else bool(row["requested"])}) for row in rows
    ]


def _devices(reader: Reader) -> list[Device]:
    names = [field for field in Device.__struct_fields__ if field != "compute_capability"]
    rows = reader.rows(
        f"SELECT {', '.join(names)}, compute_major, compute_minor FROM {reader.table('device')} ORDER BY device_id"  # noqa: S608
    )
    found = []
    for row in rows:
        major, minor = row.pop("compute_major"), row.pop("compute_minor")
        capability = None if major is None else f"{major}.{0 if minor is None else minor}"
        found.append(Device(**row, compute_capability=capability))
    return found


def _kernels_between(reader: Reader) -> dict[str, tuple[int, float]]:
    """By place of waits: how many, and the median number of kernels that start between one and the next."""
    rows = reader.rows(
        f"""
        WITH event AS (
            SELECT session_no, start_ns, 0 AS place, 1 AS kernel FROM {reader.table("kernel")} WHERE clock = 0
            UNION ALL
            SELECT session_no, start_ns, coalesce(nullif(function_id, 0), nullif(stack_id, 0), 0), 0
            FROM {reader.table("sync")} WHERE clock = 0),
        counted AS (
            SELECT session_no, start_ns, place, kernel, sum(kernel) OVER (
                PARTITION BY session_no ORDER BY start_ns, kernel ROWS UNBOUNDED PRECEDING) AS before
            FROM event),
        gap AS (
            SELECT place, before - lag(before) OVER (PARTITION BY session_no, place ORDER BY start_ns) AS kernels
            FROM counted WHERE kernel = 0 AND place <> 0)
        SELECT place, count(*) AS count, median(kernels)::DOUBLE AS median FROM gap GROUP BY place HAVING count(*) >= 3
        ORDER BY median DESC, place LIMIT 20
        """  # noqa: S608
    )
    ids = [row["place"] for row in rows]
    texts = {number: text for found in ("stack", "function") for (_, number), text in reader.texts(found, ids).items()}
    return {texts[row["place"]]: (row["count"], row["median"]) for row in rows if row["place"] in texts}


def _loss(row: dict[str, Any]) -> Loss:
    effect, text = REASONS.get(row["reason"], ("lost", row["reason"]))
    return Loss(
        reason=row["reason"],
        about=row["about"],
        effect=effect,
        text=text,
        count=row["count"],
        size_bytes=row["size_bytes"],
        place=row["place"] or "",
    )
