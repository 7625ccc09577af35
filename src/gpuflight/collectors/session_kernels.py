"""How the launches of a kernel are configured, and what that makes of the GPU: registers, local memory, waves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuflight.collectors.session_metrics import Values
    from gpuflight.events.activity.summary import KernelSum, LaunchShape, Summary

_NO_DETAILS = "the log has no launch details of it"


def most_launched(kernels: Iterable[KernelSum]) -> LaunchShape | None:
    """The configuration of most launches; of several sessions that of the one with most."""
    told = [kernel for kernel in kernels if kernel.shape is not None]
    return max(told, key=lambda kernel: kernel.details).shape if told else None


def add_launch_shape(values: Values, parts: Sequence[tuple[Summary, KernelSum]], shape: LaunchShape | None) -> None:
    """Metrics of a kernel from how most of its launches are configured.

    ``session_share_pct``: of the time of all kernels of its sessions. ``waves_count``: blocks of the grid over what all
    SMs run at once (blocks per SM times SMs): 1.1 means that the GPU runs once full and once at a tenth.
    """
    all_ns = sum(summary.kernel_ns for summary, _ in parts)
    if all_ns:
        values.add("session_share_pct", round(100 * sum(kernel.total_ns for _, kernel in parts) / all_ns, 3))
    registers = max((kernel.registers for _, kernel in parts if kernel.registers), default=None)
    values.add("registers_count", registers, "the log does not tell its registers")
    if shape is None:
        for name in ("reg_occupancy_pct", "thread_local_bytes", "waves_count"):
            values.add(name, None, _NO_DETAILS)
        return
    occupancy = None if shape.reg_occupancy is None else round(100 * shape.reg_occupancy, 2)
    values.add("reg_occupancy_pct", occupancy, "the log does not tell what registers allow")
    values.add("thread_local_bytes", shape.local_bytes, "the log does not tell its local memory")
    counts = {device.sm_count for summary, _ in parts for device in summary.devices} - {None}
    sms = counts.pop() if len(counts) == 1 else None
    if shape.grid is None or not shape.blocks_per_sm:
        values.add("waves_count", None, "the log does not tell its grid, or how many blocks an SM runs at once")
    elif not sms:
        values.add("waves_count", None, "the log does not tell how many SMs its GPU has")
    else:
        values.add("waves_count", round(shape.grid / (shape.blocks_per_sm * sms), 4))
