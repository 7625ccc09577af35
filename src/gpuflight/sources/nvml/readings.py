"""The readings of one GPU, as a table: what each is called, which NVML calls may give it, and in what unit.

Several functions in one row are generations of the same one: the first that the driver has is used. Conversions are to
the units in the names (NVML counts MHz, mW, mJ, KB/s). ``fact`` rows become attributes, ``metric`` rows numbers of this
moment, ``counter`` rows numbers that only grow. ``static`` rows cannot change while the driver is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Into = Literal["fact", "metric", "counter"]


class Reading(NamedTuple):
    """One row: results by name, the calls that may give them (function, arguments), the conversion to a tuple."""

    into: Into
    names: tuple[str, ...]
    calls: tuple[tuple[str, tuple[Any, ...]], ...]
    convert: Callable[[Any], tuple[Any, ...]]


def _one(value: Any) -> tuple[Any, ...]:
    return (value,)


def _scaled(factor: float) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: (value * factor,)


def _named(names: dict[int, str]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: (names.get(value, f"unknown ({value})"),)


def _row(into: Into, names: str, function: str, *arguments: Any, convert: Callable[[Any], tuple[Any, ...]] = _one,
         older: str = "") -> Reading:  # fmt: skip
    calls = ((function, arguments), (older, arguments)) if older else ((function, arguments),)
    return Reading(into, tuple(names.split()), calls, convert)


_MODE = {0: "disabled", 1: "enabled"}
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}
_ARCHITECTURES = {2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada", 9: "Hopper",
                  10: "Blackwell", 13: "Rubin"}  # fmt: skip

CLOCK_EVENT_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons by the names of nvml.h (nvmlClocksEventReason*)."""


def _clock_event_reasons(mask: int) -> tuple[list[str]]:
    names = [name for bit, name in CLOCK_EVENT_REASONS.items() if mask & bit]
    rest = mask & ~sum(CLOCK_EVENT_REASONS)
    return ([*names, f"unknown (0x{rest:x})"] if rest else names,)


def _modes(value: Any) -> tuple[str, str]:
    current, pending = value
    return _MODE.get(current, str(current)), _MODE.get(pending, str(pending))


_MHZ = _scaled(1_000_000)

STATIC: tuple[Reading, ...] = (
    _row("fact", "name", "nvmlDeviceGetName"),
    _row("fact", "serial", "nvmlDeviceGetSerial"),
    _row("fact", "vbios", "nvmlDeviceGetVbiosVersion"),
    _row("fact", "part_number", "nvmlDeviceGetBoardPartNumber"),
    _row("fact", "minor", "nvmlDeviceGetMinorNumber"),
    _row("fact", "architecture", "nvmlDeviceGetArchitecture", convert=_named(_ARCHITECTURES)),
    _row("fact", "compute_capability", "nvmlDeviceGetCudaComputeCapability", convert=lambda v: (f"{v[0]}.{v[1]}",)),
    _row("metric", "cores_count", "nvmlDeviceGetNumGpuCores"),
    _row("metric", "graphics_clock_max_hz", "nvmlDeviceGetMaxClockInfo", 0, convert=_MHZ),
    _row("metric", "sm_clock_max_hz", "nvmlDeviceGetMaxClockInfo", 1, convert=_MHZ),
    _row("metric", "memory_clock_max_hz", "nvmlDeviceGetMaxClockInfo", 2, convert=_MHZ),
    _row("metric", "temperature_shutdown_celsius", "nvmlDeviceGetTemperatureThreshold", 0),
    _row("metric", "temperature_slowdown_celsius", "nvmlDeviceGetTemperatureThreshold", 1),
    _row("metric", "temperature_memory_max_celsius", "nvmlDeviceGetTemperatureThreshold", 2),
    _row("metric", "temperature_gpu_max_celsius", "nvmlDeviceGetTemperatureThreshold", 3),
    _row("metric", "power_limit_default_watts", "nvmlDeviceGetPowerManagementDefaultLimit", convert=_scaled(1e-3)),
    _row("metric", "pcie_gen_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
    _row("metric", "pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth"),
)

DYNAMIC: tuple[Reading, ...] = (
    _row("metric", "sm_util_pct memory_util_pct", "nvmlDeviceGetUtilizationRates",
         convert=lambda u: (u.gpu, u.memory)),
    _row("metric", "encoder_util_pct", "nvmlDeviceGetEncoderUtilization", convert=lambda v: (v[0],)),
    _row("metric", "decoder_util_pct", "nvmlDeviceGetDecoderUtilization", convert=lambda v: (v[0],)),
    _row("metric", "bar1_total_bytes bar1_used_bytes", "nvmlDeviceGetBAR1MemoryInfo",
         convert=lambda m: (m.bar1Total, m.bar1Used)),
    _row("metric", "graphics_clock_hz", "nvmlDeviceGetClockInfo", 0, convert=_MHZ),
    _row("metric", "sm_clock_hz", "nvmlDeviceGetClockInfo", 1, convert=_MHZ),
    _row("metric", "memory_clock_hz", "nvmlDeviceGetClockInfo", 2, convert=_MHZ),
    _row("metric", "graphics_clock_application_hz", "nvmlDeviceGetApplicationsClock", 0, convert=_MHZ),
    _row("fact", "clock_event_reasons", "nvmlDeviceGetCurrentClocksEventReasons", convert=_clock_event_reasons,
         older="nvmlDeviceGetCurrentClocksThrottleReasons"),
    _row("fact", "performance_state", "nvmlDeviceGetPerformanceState", convert=lambda v: (f"P{v}",)),
    _row("fact", "persistence", "nvmlDeviceGetPersistenceMode", convert=_named(_MODE)),
    _row("fact", "compute_mode", "nvmlDeviceGetComputeMode", convert=_named(_COMPUTE_MODES)),
    _row("metric", "power_watts", "nvmlDeviceGetPowerUsage", convert=_scaled(1e-3)),
    _row("metric", "power_limit_watts", "nvmlDeviceGetEnforcedPowerLimit", convert=_scaled(1e-3),
         older="nvmlDeviceGetPowerManagementLimit"),
    _row("counter", "energy_joules", "nvmlDeviceGetTotalEnergyConsumption", convert=_scaled(1e-3)),
    _row("metric", "temperature_celsius", "nvmlDeviceGetTemperature", 0, older="nvmlDeviceGetTemperatureV"),
    _row("metric", "fan_pct", "nvmlDeviceGetFanSpeed"),
    _row("counter", "throttled_power_ns", "nvmlDeviceGetViolationStatus", 0, convert=lambda v: (v.violationTime,)),
    _row("counter", "throttled_thermal_ns", "nvmlDeviceGetViolationStatus", 1, convert=lambda v: (v.violationTime,)),
    _row("metric", "pcie_gen", "nvmlDeviceGetCurrPcieLinkGeneration"),
    _row("metric", "pcie_width", "nvmlDeviceGetCurrPcieLinkWidth"),
    _row("counter", "pcie_replays_count", "nvmlDeviceGetPcieReplayCounter"),
    _row("fact", "ecc_mode ecc_mode_pending", "nvmlDeviceGetEccMode", convert=_modes),
    _row("counter", "ecc_corrected_volatile_count", "nvmlDeviceGetTotalEccErrors", 0, 0),
    _row("counter", "ecc_uncorrected_volatile_count", "nvmlDeviceGetTotalEccErrors", 1, 0),
    _row("counter", "ecc_corrected_aggregate_count", "nvmlDeviceGetTotalEccErrors", 0, 1),
    _row("counter", "ecc_uncorrected_aggregate_count", "nvmlDeviceGetTotalEccErrors", 1, 1),
    _row("metric", "rows_remapped_corrected_count rows_remapped_uncorrected_count row_remap_pending row_remap_failed",
         "nvmlDeviceGetRemappedRows", convert=tuple),
    _row("metric", "pages_retired_single_bit_count", "nvmlDeviceGetRetiredPages", 0, convert=lambda p: (len(p),)),
    _row("metric", "pages_retired_double_bit_count", "nvmlDeviceGetRetiredPages", 1, convert=lambda p: (len(p),)),
    _row("metric", "page_retirement_pending", "nvmlDeviceGetRetiredPagesPendingStatus"),
    _row("fact", "mig_mode mig_mode_pending", "nvmlDeviceGetMigMode", convert=_modes),
)  # fmt: skip

THROUGHPUT: tuple[Reading, ...] = (
    _row("metric", "pcie_tx_bytes_per_s", "nvmlDeviceGetPcieThroughput", 0, convert=_scaled(1000)),
    _row("metric", "pcie_rx_bytes_per_s", "nvmlDeviceGetPcieThroughput", 1, convert=_scaled(1000)),
)
"""Where the byte counters of FIELDS are missing. Each of these calls watches the bus for 20 ms (nvml.h)."""

FIELDS: dict[int, tuple[Into, str, float]] = {
    82: ("metric", "temperature_memory_celsius", 1),
    138: ("counter", "nvlink_tx_bytes", 1024),
    139: ("counter", "nvlink_rx_bytes", 1024),
    197: ("counter", "pcie_tx_bytes", 1),
    198: ("counter", "pcie_rx_bytes", 1),
}
"""NVML_FI_DEV_* ids read in one call: (into, name, factor). 138 and 139 are KiB over all links of the GPU."""

ALL_LINKS = 0xFFFF_FFFF
"""scopeId that sums a field over the NVLinks of a GPU."""

FIELD_SCOPES = {138: ALL_LINKS, 139: ALL_LINKS}
FABRIC_STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
