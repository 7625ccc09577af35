"""Metrics of one session about communication between GPUs, as sums since its beginning; see ``session_work``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpuflight.collectors.session_metrics import Values
    from gpuflight.events.activity.summary import Summary

_SYNTHETIC = "kernel times are those of launches, not of the GPU"
_NO_TIMES = "the log has no times of kernels so far"
_SEVERAL = "its kernels ran on several GPUs, and overlap means something on one only"
_GAPS = "records were lost, or earlier lines forgotten, so its collectives cannot be numbered"
_TIMES = ("communication_ms", "communication_active_ms", "communication_overlapped_ms")


def add_communication(values: Values, now: Summary) -> None:
    """What ``now.communication`` says, and why the rest is unknown. Without a kernel of NCCL all times are 0: that is
    known as soon as the log tells of kernels and all of their names."""
    told = now.communication
    if told is None or now.launches is None:
        for name in ("communication_kernels_count", *_TIMES):
            values.add(name, None, _NO_TIMES)
        return
    if not told.kernels and now.unnamed_count:
        why = f"the names of {now.unnamed_count} kernels were lost; they may be NCCL's"
        for name in ("communication_kernels_count", *_TIMES):
            values.add(name, None, why)
        return
    values.add("communication_kernels_count", told.kernels)
    values.add("sync_batch_norms_count", told.sync_norms)
    if told.kernels:
        values.add("communication_unclassified_pct", round(100 * told.unclassified / told.kernels, 2))
        values.add("communication_own_streams_count", _own_streams(now))
    if now.synthetic or (told.kernels and not told.timed):
        for name in _TIMES:
            values.add(name, None, _SYNTHETIC if now.synthetic else _NO_TIMES)
        return
    values.add("communication_ms", round(told.total_ns / 1e6, 6))
    values.add("communication_active_ms", round(told.active_ns / 1e6, 6))
    several = len({stream.device_id for stream in now.streams if stream.device_id is not None and stream.kernel_ns}) > 1
    overlapped = None if several else round(told.overlapped_ns / 1e6, 6)
    values.add("communication_overlapped_ms", overlapped, _SEVERAL)


def _own_streams(now: Summary) -> int:
    """Streams on which nothing but communication ran, as far as kernels are told one by one."""
    from gpuflight.sources.nccl_kernels import classify

    ours: set[int] = set()
    others: set[int] = set()
    for kernel in now.kernels:
        streams = {stream for stream, _, _ in kernel.lanes}
        if kernel.name and classify(kernel.name) is not None:
            ours |= streams
        else:
            others |= streams
    return len(ours - others)


def communication_attributes(now: Summary, values: Values) -> dict[str, Any]:
    """``collective_marks``: ``number:operation:start:end`` (UNIX ns of its host) of some of the last collectives;
    ``communication_unclassified``: names of NCCL kernels that fit no known scheme."""
    told = now.communication
    found: dict[str, Any] = {}
    if told is None:
        return found
    if told.unclassified_names:
        found["communication_unclassified"] = told.unclassified_names
    if told.marks and (now.partial or now.losses or now.synthetic):
        values.unknown["collective_marks"] = _SYNTHETIC if now.synthetic else _GAPS
    elif told.marks:
        found["collective_marks"] = [
            f"{mark.number}:{mark.operation}:{mark.start_ns}:{mark.end_ns}" for mark in told.marks
        ]
    return found
