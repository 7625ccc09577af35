"""Which units of a GPU work: SMs, tensor cores, memory. "Utilisation" says only that some kernel was there."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, Screen, Threshold, Verdict
from gpuflight.bottlenecks.window import Look
from gpuflight.graph import nodes

_WINDOW_S = 60.0
_GIVEN = "nvml, where the driver has GPM (Hopper on); sessions with hardware counters in their log"


def _mean(look: Look, metric: str) -> float:
    """Of a GPU the mean of the last minute, of a session that of its log. Raises Unknown."""
    if not isinstance(look.element, nodes.GPU):
        return look.metric(metric)
    series = look.history(metric, _WINDOW_S, least=0.95)
    mean = series.mean(look.window.now_s, _WINDOW_S)
    return look.metric(metric) if mean is None else mean


def _window_s(look: Look) -> float:
    return _WINDOW_S if isinstance(look.element, nodes.GPU) else 0.0


class MemoryBandwidthBound(ElementRule):
    """A GPU's memory is at its limit while its tensor cores have little to do."""

    catalogue_id = "G18"
    subject = (nodes.GPU, nodes.Session)
    severity = "info"
    needs = (
        Need(kind=nodes.GPU, metrics=("dram_active_pct", "tensor_active_pct"), given_by=_GIVEN),
        Need(kind=nodes.Session, metrics=("dram_active_pct", "tensor_active_pct"), given_by=_GIVEN),
    )
    screens = (Screen("dram_active_pct", ">", "dram"),)
    thresholds = {
        "dram": Threshold(value=80, clear_at=75, unit="%", source="skill of witty-profiler: bandwidth above 80 %"),
        "tensor": Threshold(value=20, clear_at=25, unit="%", source="what is low", guess=True, falling=True),
    }
    persist_rounds = 1
    whole_session = True
    histories = {nodes.GPU: {"dram_active_pct": _WINDOW_S, "tensor_active_pct": _WINDOW_S}}
    advice = "fuse element-wise kernels, use smaller types (bf16, fp8), larger batches per pass over the weights"
    verify = "dcgmi dmon -e 1005,1004"

    def judge(self, look: Look) -> Verdict:
        dram = _mean(look, "dram_active_pct")
        if dram <= look.limit("dram"):
            return CLEAR
        tensor = _mean(look, "tensor_active_pct")
        if tensor >= look.limit("tensor"):
            return CLEAR
        return look.fired(
            f"the memory of {look.label} is active {dram:.0f} % of the time, its tensor cores {tensor:.0f} %",
            [
                look.saw("dram_active_pct", dram, window_s=_window_s(look)),
                look.saw("tensor_active_pct", tensor, window_s=_window_s(look)),
            ],
        )


class TensorCoresUnused(ElementRule):
    """A GPU works, but never on its tensor cores, which are its fastest units for matrices."""

    catalogue_id = "G19"
    subject = (nodes.GPU, nodes.Session)
    severity = "info"
    needs = (
        Need(kind=nodes.GPU, metrics=("tensor_active_pct", "sm_active_pct"), given_by=_GIVEN),
        Need(kind=nodes.Session, metrics=("tensor_active_pct", "sm_active_pct"), given_by=_GIVEN),
    )
    screens = (Screen("sm_active_pct", ">", "sm"),)
    thresholds = {
        "tensor": Threshold(value=0.1, unit="%", source="PyTorch profiler, tb_plugin: used is 0", falling=True),
        "sm": Threshold(value=30, clear_at=25, unit="%", source="DCGM 1002: the SMs do work", guess=True),
    }
    guard = "the SMs work; GPUs without tensor cores have no such counter"
    persist_rounds = 1
    whole_session = True
    histories = {nodes.GPU: {"tensor_active_pct": _WINDOW_S, "sm_active_pct": _WINDOW_S}}
    advice = "automatic mixed precision, TF32 (torch.set_float32_matmul_precision('high')), sizes that 8 divides"
    verify = "dcgmi dmon -e 1004,1002"

    def judge(self, look: Look) -> Verdict:
        tensor = _mean(look, "tensor_active_pct")
        if tensor >= look.limit("tensor"):
            return CLEAR
        sm = _mean(look, "sm_active_pct")
        if sm <= look.limit("sm"):
            return CLEAR
        return look.fired(
            f"the SMs of {look.label} are active {sm:.0f} % of the time, its tensor cores {tensor:.1f} %",
            [
                look.saw("sm_active_pct", sm, window_s=_window_s(look)),
                look.saw("tensor_active_pct", tensor, window_s=_window_s(look)),
            ],
        )


class UtilisationMisleads(ElementRule):
    """A GPU's utilisation is high, yet most of its SMs do nothing.

    NVML's utilisation is the share of time in which some kernel was there, if only on one SM.
    """

    catalogue_id = "G20"
    subject = nodes.GPU
    needs = (Need(kind=nodes.GPU, metrics=("sm_util_pct", "sm_active_pct"), given_by=_GIVEN),)
    screens = (Screen("sm_active_pct", "<", "sm"),)
    thresholds = {
        "util": Threshold(value=90, clear_at=85, unit="%", source="NVML: utilisation is residency", guess=True),
        "sm": Threshold(value=40, clear_at=45, unit="%", source="DCGM 1002, SM_ACTIVE 0.4", guess=True, falling=True),
    }
    persist_rounds = 1
    histories = {nodes.GPU: {"sm_util_pct": _WINDOW_S, "sm_active_pct": _WINDOW_S}}
    cost_formula = "share of the SMs that do nothing"
    advice = "larger batches and grids, several streams, MPS or MIG to share the GPU; judge it by sm_active_pct"
    verify = "dcgmi dmon -e 1002,203"

    def judge(self, look: Look) -> Verdict:
        util = _mean(look, "sm_util_pct") if look.metric("sm_util_pct") > look.limit("util") else 0.0
        if util <= look.limit("util"):
            return CLEAR
        active = _mean(look, "sm_active_pct")
        if active >= look.limit("sm"):
            return CLEAR
        return look.fired(
            f"{look.label} is told to be {util:.0f} % utilised, but its SMs are active {active:.0f} % of the time",
            [
                look.saw("sm_util_pct", util, window_s=_WINDOW_S),
                look.saw("sm_active_pct", active, window_s=_WINDOW_S),
            ],
            cost_gpu_s=round(1 - active / 100, 3),
            cost=f"{100 - active:.0f} % of the SMs",
        )
