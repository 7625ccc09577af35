"""GPUs that run slower than they could: heat, power, clocks somebody set."""

from __future__ import annotations

from gpuflight.bottlenecks.base import CLEAR, ElementRule, Need, Threshold, Verdict
from gpuflight.bottlenecks.window import Look, told
from gpuflight.graph import nodes

_HW_THERMAL, _SW_THERMAL = "hw_thermal_slowdown", "sw_thermal_slowdown"
_POWER_BRAKE = "hw_power_brake_slowdown"


class ThermalSlowdown(ElementRule):
    """A GPU lowers its clocks because it, or its memory, is too hot."""

    catalogue_id = "H06"
    subject = nodes.GPU
    needs = (
        Need(
            kind=nodes.GPU,
            metrics=("throttled_thermal_pct", "temperature_celsius", "temperature_slowdown_celsius"),
            attributes=("clock_event_reasons",),
            given_by="nvml",
        ),
    )
    thresholds = {
        "slowed_warn": Threshold(value=5, clear_at=2, unit="% of the time", source="gpud: bits in > 5 % of the polls"),
        "slowed_crit": Threshold(
            value=25, clear_at=15, unit="% of the time", source="beside gpud's 0.6 HW events a minute", guess=True
        ),
        "margin_warn": Threshold(
            value=5, clear_at=8, unit="°C below slowdown", source="example of NVIDIA's T.Limit margins", falling=True
        ),
    }
    explains = ("straggler_rank", "throttled_but_busy", "clocks_capped", "step_outliers", "fail_slow")
    cost_formula = "share of the time that the clocks are lowered"
    advice = "look at airflow, fans and inlet temperature; compare with the neighbours in the rack"
    verify = "nvidia-smi -q -d TEMPERATURE,PERFORMANCE"

    def judge(self, look: Look) -> Verdict:
        reasons = look.attribute("clock_event_reasons")
        hardware, software = _HW_THERMAL in reasons, _SW_THERMAL in reasons
        slowed = look.element.metrics.get("throttled_thermal_pct")
        celsius = look.metric("temperature_celsius")
        seen = [look.saw("temperature_celsius"), look.saw("clock_event_reasons", ", ".join(reasons) or "none")]
        if hardware or software or (slowed is not None and slowed > look.limit("slowed_warn")):
            share = ""
            if slowed is not None:
                seen.insert(0, look.saw("throttled_thermal_pct"))
                share = f", clocks lowered {slowed:.0f} % of the time"
            return look.fired(
                f"{look.label} is slowed by heat at {celsius:.0f} °C{share}",
                seen,
                severity="critical" if hardware or (slowed or 0) > look.limit("slowed_crit") else "warn",
                cost_gpu_s=slowed / 100 if slowed is not None else None,
                cost=f"at most {slowed:.0f} % of this GPU" if slowed is not None else "",
            )
        limit = look.element.metrics.get("temperature_slowdown_celsius")
        if limit is not None and limit - celsius < look.limit("margin_warn"):
            return look.fired(
                f"{look.label} has {celsius:.0f} °C, {limit - celsius:.0f} °C below where it slows down",
                [*seen, look.saw("temperature_slowdown_celsius")],
                severity="warn",
            )
        return CLEAR


class PowerCapped(ElementRule):
    """A GPU lowers its clocks because of power: the power brake of the machine, or its own power limit.

    At full load the own limit is often meant to be reached, so it is told, not warned of.
    """

    catalogue_id = "H07"
    subject = nodes.GPU
    severity = "info"
    needs = (
        Need(
            kind=nodes.GPU,
            metrics=("throttled_power_pct", "power_watts", "power_limit_watts", "sm_util_pct"),
            attributes=("clock_event_reasons",),
            given_by="nvml",
        ),
    )
    thresholds = {
        "capped": Threshold(value=50, clear_at=40, unit="% of the time", source="DCGM, power watch", guess=True)
    }
    guard = "the GPU works, for its own limit; the power brake is always told"
    persist_s = 10.0
    explains = ("straggler_rank", "throttled_but_busy")
    cost_formula = "unknown: how much a limit costs depends on the kernels"
    advice = "compare the power limit with its neighbours (nvidia-smi -q -d POWER); for the brake look at the PSUs"
    verify = "nvidia-smi --query-gpu=index,power.draw,enforced.power.limit,clocks_event_reasons.active --format=csv"

    def judge(self, look: Look) -> Verdict:
        reasons = look.attribute("clock_event_reasons")
        power = [look.saw(name) for name in ("power_watts", "power_limit_watts") if look.has(name)]
        if _POWER_BRAKE in reasons:
            watts = f" at {look.metric('power_watts'):.0f} W" if look.has("power_watts") else ""
            return look.fired(
                f"the machine's power brake slows {look.label}{watts}",
                [look.saw("clock_event_reasons", ", ".join(reasons)), *power],
                severity="critical",
            )
        if look.metric("sm_util_pct") <= 0:
            return CLEAR
        capped = look.metric("throttled_power_pct")
        if capped <= look.limit("capped"):
            return CLEAR
        drawn, limit = look.metric("power_watts"), look.metric("power_limit_watts")
        return look.fired(
            f"{look.label} is at its power limit {capped:.0f} % of the time ({drawn:.0f} of {limit:.0f} W)",
            [look.saw("throttled_power_pct"), *power],
            severity="info",
        )


class ClocksCapped(ElementRule):
    """Somebody set a GPU's clocks below what it can do."""

    catalogue_id = "H08"
    subject = nodes.GPU
    needs = (Need(kind=nodes.GPU, metrics=("graphics_clock_application_hz", "graphics_clock_max_hz"), given_by="nvml"),)
    thresholds = {
        "below_warn": Threshold(value=30e6, unit="Hz below", source="gcm: drift of 30 MHz"),
        "below_crit": Threshold(value=75e6, unit="Hz below", source="gcm: drift of 75 MHz"),
        "expected": Threshold(value=0, unit="Hz", source="0: the GPU's maximum; set it where a cap is meant"),
    }
    explains = ("straggler_rank",)
    advice = "nvidia-smi --reset-applications-clocks, or set thresholds.expected if it is meant"
    verify = "nvidia-smi -q -d CLOCK"

    def judge(self, look: Look) -> Verdict:
        set_hz = look.metric("graphics_clock_application_hz")
        wanted_hz = look.limit("expected") or look.metric("graphics_clock_max_hz")
        below_hz = wanted_hz - set_hz
        if below_hz <= look.limit("below_warn"):
            return CLEAR
        much = below_hz > look.limit("below_crit")
        return look.fired(
            f"the clocks of {look.label} are set to {told('clock_hz', set_hz)}, {told('clock_hz', below_hz)} below"
            f" {told('clock_hz', wanted_hz)}",
            [look.saw("graphics_clock_application_hz"), look.saw("graphics_clock_max_hz")],
            severity="warn" if much else "info",
            cost=f"up to {100 * below_hz / wanted_hz:.0f} % of this GPU where kernels are bound by the clock",
        )


class ThrottledButBusy(ElementRule):
    """A GPU looks busy but its clock is less than half of what it could be, so it does much less than it seems."""

    catalogue_id = "H09"
    subject = nodes.GPU
    needs = (Need(kind=nodes.GPU, metrics=("sm_util_pct", "sm_clock_hz", "sm_clock_max_hz"), given_by="nvml"),)
    thresholds = {
        "util": Threshold(value=95, clear_at=90, unit="%", source="screenllm on CRAN: 800 MHz under load", guess=True),
        "clock": Threshold(value=50, clear_at=55, unit="% of the maximum", source="as above", guess=True, falling=True),
    }
    persist_s = 30.0
    explains = ("straggler_rank", "utilisation_misleads")
    cost_formula = "1 - clock / maximum"
    advice = "see why: nvidia-smi -q -d PERFORMANCE names the reason (power, heat, a limit)"
    verify = "nvidia-smi --query-gpu=index,utilization.gpu,clocks.sm,clocks.max.sm --format=csv -l 5"

    def judge(self, look: Look) -> Verdict:
        util, clock, most = look.metric("sm_util_pct"), look.metric("sm_clock_hz"), look.metric("sm_clock_max_hz")
        share = 100 * clock / most if most else 100.0
        if util < look.limit("util") or share >= look.limit("clock"):
            return CLEAR
        return look.fired(
            f"{look.label} is {util:.0f} % busy at {told('clock_hz', clock)}, {share:.0f} % of its"
            f" {told('clock_hz', most)}",
            [look.saw("sm_util_pct"), look.saw("sm_clock_hz"), look.saw("sm_clock_max_hz")],
            cost_gpu_s=1 - share / 100,
            cost=f"up to {100 - share:.0f} % of this GPU",
        )
