"""Kernels that leave a good part of the GPU unused: by their registers, their memory, the size of their grid."""

from __future__ import annotations

import re

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, Screen, Threshold, Verdict
from gpuflight.bottlenecks.recorded import Recorded, need
from gpuflight.bottlenecks.window import Look
from gpuflight.graph import edges, nodes

_MATRIX = re.compile(r"gemm|cutlass|xmma|cublas|flash|attention|conv|nvjet|wgmma", re.IGNORECASE)
"""Kernels on tensor cores hold their data in registers: a low occupancy is how they are made."""
_LEAST_MS = 10.0
"""A kernel that ran for less in all holds nobody back."""
_GIVEN = "sessions, cupti: logs with launch details"


def _name(look: Look) -> str:
    """The kernel's name, short enough for a line."""
    name = look.element.name
    return f"kernel {name}" if len(name) <= 60 else f"kernel {name[:59]}…"


def _share(look: Look) -> float:
    """Share of the time of all kernels of its sessions (%); 0 of one that hardly ran."""
    share = look.metric("session_share_pct")
    return share if look.metric("gpu_time_ms") >= _LEAST_MS else 0.0


class LowOccupancy(ElementRule):
    """A kernel that takes much of the GPU's time keeps few warps on each SM.

    With few warps there is nothing to run while some wait for memory. Matrix kernels on tensor cores are made so, and
    are only told.
    """

    catalogue_id = "G11"
    subject = nodes.Kernel
    needs = (
        Need(
            kind=nodes.Kernel,
            metrics=("occupancy_pct", "session_share_pct", "gpu_time_ms"),
            attributes=("occupancy_limiter",),
            given_by=_GIVEN,
        ),
    )
    screens = (Screen("session_share_pct", ">=", "share"),)
    thresholds = {
        "occupancy": Threshold(
            value=50, clear_at=55, unit="%", source="GPUFlight backend: below 0.5 is HIGH", falling=True
        ),
        "share": Threshold(value=10, clear_at=8, unit="% of the kernels' time", source="top kernels only", guess=True),
    }
    guard = "it takes a tenth of the kernels' time or more, and at least 10 ms"
    whole_session = True
    explains = ("dominant_stall",)
    advice = "other block sizes, fewer registers or less shared memory per thread (see what limits it)"
    verify = "ncu --section Occupancy -k <kernel> <program>"

    def judge(self, look: Look) -> Verdict:
        share, occupancy = _share(look), look.metric("occupancy_pct")
        if share < look.limit("share") or occupancy >= look.limit("occupancy"):
            return CLEAR
        limiter = str(look.element.attributes.get("occupancy_limiter") or "")
        matrix = _MATRIX.search(look.element.name) is not None
        by = f", limited by {limiter}" if limiter else ""
        return look.fired(
            f"{_name(look)} has an occupancy of {occupancy:.0f} %{by}, and takes {share:.0f} % of the kernels' time"
            + (" (a matrix kernel: it may be meant so)" if matrix else ""),
            [
                look.saw("occupancy_pct", samples_count=int(look.element.metrics.get("occupancy_samples_count", 1))),
                look.saw("session_share_pct"),
            ],
            severity="info" if matrix else "warn",
        )


class RegisterPressure(ElementRule):
    """A kernel uses so many registers per thread that few warps fit on an SM."""

    catalogue_id = "G12"
    subject = nodes.Kernel
    severity = "info"
    needs = (
        Need(
            kind=nodes.Kernel,
            metrics=("registers_count", "reg_occupancy_pct", "session_share_pct"),
            given_by=_GIVEN,
        ),
    )
    screens = (Screen("session_share_pct", ">=", "share"),)
    thresholds = {
        "registers": Threshold(value=32, unit="per thread", source="GPUFlight backend"),
        "occupancy": Threshold(
            value=60, clear_at=65, unit="% that registers allow", source="GPUFlight backend: 0.6", falling=True
        ),
        "share": Threshold(value=10, clear_at=8, unit="% of the kernels' time", source="top kernels only", guess=True),
    }
    guard = "it takes a tenth of the kernels' time or more, and at least 10 ms"
    whole_session = True
    explains = ("low_occupancy", "local_memory_spill")
    advice = "__launch_bounds__, -maxrregcount, smaller tiles or less unrolling; look that it does not spill then"
    verify = "cuobjdump -res-usage <binary>; ncu --section LaunchStats -k <kernel> <program>"

    def judge(self, look: Look) -> Verdict:
        share, registers = _share(look), look.metric("registers_count")
        if share < look.limit("share") or registers <= look.limit("registers"):
            return CLEAR
        allowed = look.metric("reg_occupancy_pct")
        if allowed >= look.limit("occupancy"):
            return CLEAR
        return look.fired(
            f"{_name(look)} uses {registers:.0f} registers per thread, so its occupancy is {allowed:.0f} % at most; it"
            f" takes {share:.0f} % of the kernels' time",
            [look.saw("registers_count"), look.saw("reg_occupancy_pct"), look.saw("session_share_pct")],
        )


class LocalMemorySpill(ElementRule):
    """A kernel keeps data of its threads in local memory, which is the GPU's DRAM: registers spill."""

    catalogue_id = "G13"
    subject = nodes.Kernel
    severity = "info"
    needs = (Need(kind=nodes.Kernel, metrics=("thread_local_bytes", "session_share_pct"), given_by=_GIVEN),)
    screens = (Screen("thread_local_bytes", ">", "local"),)
    thresholds = {
        "local": Threshold(value=0, unit="bytes per thread", source="GPUFlight backend: any"),
        "share": Threshold(value=1, unit="% of the kernels' time", source="less is nobody's concern", guess=True),
    }
    guard = "it takes more than 1 % of the kernels' time, and at least 10 ms"
    whole_session = True
    explains = ("dominant_stall",)
    advice = (
        "fewer live values (smaller tiles, less unrolling), more registers per thread, arrays with constant indexes"
    )
    verify = "nvcc -Xptxas -v  # names spill stores and loads; ncu --section MemoryWorkloadAnalysis"

    def judge(self, look: Look) -> Verdict:
        local, share = look.metric("thread_local_bytes"), _share(look)
        if local <= look.limit("local") or share <= look.limit("share"):
            return CLEAR
        return look.fired(
            f"{_name(look)} keeps {local:.0f} bytes per thread in local memory, and takes {share:.0f} % of the kernels'"
            " time",
            [look.saw("thread_local_bytes"), look.saw("session_share_pct")],
        )


class TailEffect(ElementRule):
    """A kernel's grid fills the GPU less than twice, and the last time hardly: most SMs wait for the last blocks.

    A wave is what all SMs run at once. 1.1 waves take as long as 2.
    """

    catalogue_id = "G16"
    subject = nodes.Kernel
    severity = "info"
    needs = (
        Need(
            kind=nodes.Kernel,
            metrics=("waves_count", "session_share_pct"),
            given_by=f"{_GIVEN} and the number of SMs of the GPU",
        ),
    )
    screens = (Screen("waves_count", "<", "waves"),)
    thresholds = {
        "waves": Threshold(value=2, unit="waves", source="arithmetic of waves, NVIDIA", guess=True, falling=True),
        "last": Threshold(value=0.5, unit="of the last wave", source="as above", guess=True, falling=True),
        "share": Threshold(value=1, unit="% of the kernels' time", source="as above", guess=True),
    }
    guard = "it takes more than 1 % of the kernels' time, and at least 10 ms"
    whole_session = True
    cost_formula = "unknown: the share of the SMs that wait, times the kernel's time, if nothing else runs meanwhile"
    advice = "another grid (a multiple of the SMs), smaller blocks, stream-K or split-K, several kernels at a time"
    verify = "ncu --section LaunchStats -k <kernel> <program>  # Waves Per SM"

    def judge(self, look: Look) -> Verdict:
        waves, share = look.metric("waves_count"), _share(look)
        last = waves % 1
        if waves >= look.limit("waves") or not 0 < last < look.limit("last") or share <= look.limit("share"):
            return CLEAR
        unused = 100 * (1 - waves / (int(waves) + 1))
        return look.fired(
            f"the grid of {_name(look)} is {waves:.2f} waves: {unused:.0f} % of the SMs' time is unused; it takes"
            f" {share:.0f} % of the kernels' time",
            [look.saw("waves_count"), look.saw("session_share_pct")],
        )


class FewKernelsDominate(ElementRule):
    """One kernel takes most of the GPU's time: no defect, but the place to look at."""

    catalogue_id = "G17"
    subject = nodes.Session
    severity = "info"
    needs = need("top_kernel_pct", "kernels_count", "gpu_time_ms", attributes=("top_kernel",))
    thresholds = {"top": Threshold(value=60, clear_at=55, unit="% of the kernels' time", source="ours", guess=True)}
    guard = "at least 3 kernels and 1 s of them"
    whole_session = True
    relations = (edges.Own, edges.Access, edges.Transfer)
    advice = "optimise that one: every percent of it counts"
    verify = "gpuflight report <folder>"

    def judge(self, look: Look) -> Verdict:
        top, kernels, time_ms = (look.metric(name) for name in ("top_kernel_pct", "kernels_count", "gpu_time_ms"))
        if top <= look.limit("top") or kernels < 3 or time_ms < 1000:
            return CLEAR
        name = str(look.element.attributes.get("top_kernel") or "a kernel whose name was lost")
        seen = (
            Recorded(look) if look.has("gpu_timeline_ms") and look.element.attributes.get("state") != "live" else None
        )
        return look.fired(
            f"{top:.0f} % of the {time_ms / 1e3:.1f} s of kernels of {look.label} are one of {kernels:.0f}:"
            f" {name[:80]}",
            [look.saw("top_kernel_pct"), look.saw("kernels_count"), look.saw("gpu_time_ms")],
            entities=seen.around() if seen is not None else [look.id],
        )
