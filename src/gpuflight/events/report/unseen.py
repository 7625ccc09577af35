"""What a report could not see, and why: an empty section is never left to look like an answer."""

from __future__ import annotations

from gpuflight.events.query.reader import Reader
from gpuflight.events.report.model import Report, Unseen

_SECTION_OF = {
    "kernel": "kernel_events",
    "memcpy": "memcpy_activity",
    "sync": "sync_activity",
    "allocation": "memory_activity",
    "pm_sample": "pm_sampling",
    "perf_metric": "range_counters",
    "kernel_perf_metric": "kernel_replay_counters",
}
"""Tables of records, and the feature of the capture that fills them."""

_WORDS = {
    "kernel": "kernels",
    "memcpy": "copies",
    "memset": "fills of memory",
    "sync": "waits",
    "allocation": "allocations",
    "scope": "scopes",
    "pm_sample": "sampled hardware counters",
    "perf_metric": "counters of scopes",
    "kernel_perf_metric": "counters of kernels",
    "profile_sample": "PC samples and SASS metrics",
    "device_metric": "telemetry of devices",
    "host_metric": "telemetry of the host",
}


def unseen(reader: Reader, report: Report, *, complete_scopes: bool, unmatched_ends_count: int) -> list[Unseen]:
    """In the order of the report's sections."""
    found = [*_ending(report), *_empty(report), *_kernels(reader, report)]
    if unmatched_ends_count:
        found.append(
            Unseen(what=f"{unmatched_ends_count} scopes", reason="they end, but their begin is not in the log")
        )
    if not complete_scopes:
        found.append(Unseen(what="some scopes", reason="there are more begins and ends than are looked at"))
    still_open = sum(node.open_count for node in report.scopes)
    if still_open:
        reason = "their end is not in the log; their time is counted up to its last scope event"
        found.append(Unseen(what=f"the end of {still_open} scopes", reason=reason))
    for line in report.memory:
        if line.unmatched_frees_count:
            what = f"the taking of {line.unmatched_frees_count} pieces of {line.kind} memory"
            found.append(Unseen(what=what, reason="they are given back, but the log does not show them taken"))
        if line.unseen_frees_count:
            what = f"the giving back of {line.unseen_frees_count} pieces of {line.kind} memory"
            found.append(Unseen(what=what, reason="their address is taken anew; counted as given back at that moment"))
    if report.kernels.count and any(detail.waves_per_sm is None and detail.shape for detail in report.kernel_details):
        reason = "the session does not tell the multiprocessors of its devices, or devices differ"
        if not any(d.multi_processor_count is None for d in report.devices) and report.devices:
            reason = "max_active_blocks or the grid is not told, or devices differ"
        found.append(Unseen(what="waves per multiprocessor of some kernels", reason=reason))
    return found


def _ending(report: Report) -> list[Unseen]:
    head = report.head
    if head.state == "live":
        return [Unseen(what="what is still to come", reason="the session is still being written; this is as of now")]
    if head.state == "silent":
        reason = "no end was written and nobody writes any more: the program was killed, or its last window is lost"
        return [Unseen(what="the end of the session", reason=reason)]
    if head.state == "died":
        reason = "the program died; its launcher wrote the end, and what the program still held in memory is gone"
        return [Unseen(what="the last moments", reason=reason)]
    return []


def _empty(report: Report) -> list[Unseen]:
    """Sections without a record, with what the capture says of them."""
    told = {capability.feature: capability for capability in report.capabilities}
    found = []
    for table, words in _WORDS.items():
        if report.head.records.get(table):
            continue
        capability = told.get(_SECTION_OF.get(table, ""))
        if capability is None:
            reason = "the log has none, and does not say whether they were captured"
        else:
            why = capability.message or capability.reason_code or capability.mode or ""
            reason = f"the capture says {capability.status}" + (f": {why}" if why else "")
        found.append(Unseen(what=words, reason=reason))
    return found


def _kernels(reader: Reader, report: Report) -> list[Unseen]:
    kernels = report.kernels
    if not kernels.count:
        return []
    found = []
    if kernels.synthetic:
        reason = "kernels were not timed on the GPU: each starts with its call and lasts until the next one"
        found.append(Unseen(what="true durations and busy time", reason=reason))
    row = reader.rows(
        f"""
        SELECT count(*) FILTER (clock <> 0 OR start_ns IS NULL) AS unplaced,
            count(*) FILTER (device_id IS NULL) AS no_device,
            count(*) FILTER (coalesce(kernel_id, 0) = 0 OR n.id IS NULL) AS no_name
        FROM {reader.table("kernel")} AS k
            LEFT JOIN (SELECT session_no, id FROM {reader.table("name")} WHERE dictionary = 'kernel') AS n
                ON n.session_no = k.session_no AND n.id = k.kernel_id
        """  # noqa: S608
    )[0]
    if kernels.count > kernels.timed_count:
        count = kernels.count - kernels.timed_count
        found.append(Unseen(what=f"the duration of {count} kernels", reason="their rows do not have it"))
    if row["unplaced"]:
        reason = "their time is no wall-clock time; they count, but are not on the timeline nor in busy time"
        found.append(Unseen(what=f"when {row['unplaced']} kernels ran", reason=reason))
    if row["no_name"]:
        found.append(Unseen(what=f"the name of {row['no_name']} kernels", reason="its dictionary entry never came"))
    if row["no_device"] and len(report.devices) != 1:
        reason = "columnar kernel rows of the format carry no device; busy time is that of all devices together"
        found.append(Unseen(what=f"on which device {row['no_device']} kernels ran", reason=reason))
    if not report.head.records.get("kernel_detail"):
        found.append(Unseen(what="grids, blocks and occupancy", reason="the session has no launch details"))
    return found
