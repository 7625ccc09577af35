"""What of the capture came of what was asked for: the session's capture_capabilities line, and its loss markers."""

from __future__ import annotations

from typing import Any

from gpuflight.events.recorder.binding import Why
from gpuflight.events.recorder.capture import Capture
from gpuflight.events.recorder.metrics import Metrics
from gpuflight.events.recorder.options import Options
from gpuflight.events.recorder.ranges import Ranges
from gpuflight.events.recorder.translate import Translator

FEATURES = {
    "kernel": "kernel_events",
    "memcpy": "memcpy_activity",
    "memset": "memset_activity",
    "sync": "sync_activity",
    "memory": "memory_activity",
    "overhead": "cupti_overhead",
    "nvtx": "nvtx_markers",
    "external": "external_correlation",
    "api": "api_activity",
    "graph": "graph_activity",
}
"""Groups → features of the format (memset_activity, cupti_overhead and api_activity are ours)."""

NOT_YET = Why("cuda_not_used", "the program has not loaded the CUDA driver")
NEVER_ASKED = Why("not_asked_for", "nothing was recorded: the window never opened")


def lines(
    options: Options,
    capture: Capture,
    translator: Translator | None,
    ranges: Ranges,
    metrics: Metrics,
    *,
    final: bool,
    more: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """One entry per feature."""
    found = []
    for group, feature in FEATURES.items():
        requested = group in options.kinds
        status, mode, why = _state(group, requested, capture, translator, final=final)
        found.append(entry(feature, requested, status, mode, why))
    if translator is not None and translator.counts["kernel"]:
        told = "the first launch of each configuration, and launches with a stack"
        if translator.shapes_beyond:
            told += f"; {translator.shapes_beyond} configurations more were not written"
        found.append(entry("kernel_details", True, "partial", "first_launch_of_each_shape", Why("sampled", told)))
        found.append(entry("kernel_names", True, "collected", "", None))
    scopes = Why("dropped", f"{ranges.dropped} begins and ends of scopes were dropped") if ranges.dropped else None
    status = "partial" if ranges.dropped else "collected" if ranges.written else "enabled_no_data"
    found.append(entry("scope_attribution", True, status, "gpuflight.scope", scopes))
    if options.metrics_interval_s:
        why = Why("no_gpu_readings", metrics.why) if metrics.why else None
        found.append(entry("telemetry", True, "partial" if why else "collected", "nvml+proc", why))
    if capture.anchor is not None:
        message = (
            f"CUPTI's clock {capture.anchor.offset_ns:+d} ns = UNIX time as at the session's start, continued by the"
            f" monotonic clock; known to {capture.anchor.spread_ns} ns"
        )
        found.append(entry("clock", True, "collected", "anchored", Why("", message)))
    return found + more


def _state(
    group: str, requested: bool, capture: Capture, translator: Translator | None, *, final: bool
) -> tuple[str, str, Why | None]:
    if not requested:
        return "not_requested", "", None
    if not capture.ever_ran:
        return "skipped", "", capture.why or (NEVER_ASKED if capture.binding is not None else NOT_YET)
    if group in capture.refused:
        return "skipped", "", capture.refused[group]
    mode = "cupti_activity"
    losses = losses_of(group, capture, translator, final=final)
    if capture.why is not None and group == "kernel":
        losses.insert(0, f"recording ended early: {capture.why}")
    if losses:
        code = "records_dropped"
        if list(losses) == [text for text in losses if "without sane times" in text]:
            code = "invalid_timestamps_dropped"
        return "partial", mode, Why(code, "; ".join(losses))
    count = translator.counts[group] if translator is not None else 0
    if not count:
        return ("enabled_no_data" if final else "collected"), mode, Why("enabled_but_no_records", "") if final else None
    return "collected", mode, None


def losses_of(group: str, capture: Capture, translator: Translator | None, *, final: bool) -> list[str]:
    """What of a group was lost, in words. ``final``: what has not come by now never will."""
    found = []
    if translator is not None:
        if translator.invalid[group]:
            found.append(f"{translator.invalid[group]} records without sane times")
        if final and group == "kernel" and translator.calls_without_record:
            found.append(f"{translator.calls_without_record} launches and copies of which no record came")
        if group == "nvtx" and (translator.marks.lost_ends or translator.marks.lost_starts):
            found.append(f"{translator.marks.lost_ends + translator.marks.lost_starts} ranges without their other end")
    intake = capture.intake
    if intake is not None:
        if intake.dropped[group]:
            found.append(f"{intake.dropped[group]} records that could not be written as fast as they came")
        if group == "kernel" and intake.dropped["callback"]:
            found.append(f"{intake.dropped['callback']} records in failed callbacks ({intake.failure})")
        if group == "kernel" and intake.unknown:
            told = ", ".join(f"{count} {name}" for name, count in sorted(intake.unknown.items()))
            found.append(f"records of kinds that this version does not know: {told}")
    if group == "kernel" and capture.dropped:
        found.append(f"{capture.dropped} records of any kind dropped by CUPTI for want of buffers")
    return found


def lost_counts(capture: Capture, translator: Translator | None, ranges: Ranges, channel: str = "") -> dict[str, int]:
    """Records that were lost, by reason; of one channel's, or of all."""
    intake = capture.intake
    of_channel = {
        "device": ("kernel", "memcpy", "memset"),
        "scope": ("sync", "memory", "nvtx", "overhead", "graph"),
    }
    groups = of_channel.get(channel, tuple(FEATURES))
    facts: dict[str, int] = {}
    if channel != "scope":  # which kinds CUPTI dropped, and which a failed callback had, nobody can tell
        facts["cupti"] = capture.dropped
        facts["callback"] = intake.dropped["callback"] if intake is not None else 0
    if intake is not None:
        facts["queue"] = sum(intake.dropped[group] for group in groups)
    if translator is not None:
        facts["invalid_timestamps"] = sum(translator.invalid[group] for group in groups)
    if channel != "device":
        facts["scopes"] = ranges.dropped
    return {name: count for name, count in facts.items() if count}


def marker_of(channel: str, capture: Capture, translator: Translator | None, ranges: Ranges) -> str:
    """The reason of a channel's loss marker, empty if nothing was lost that would have gone there."""
    facts = lost_counts(capture, translator, ranges, channel)
    return f"records_dropped:{','.join(f'{name}={count}' for name, count in facts.items())}" if facts else ""


def entry(feature: str, requested: bool, status: str, mode: str, why: Why | None) -> dict[str, Any]:
    """Of one feature."""
    return {
        "feature": feature,
        "requested": requested,
        "status": status,
        "mode": mode,
        "reason_code": why.code if why is not None else "",
        "message": str(why) if why is not None else "",
    }
