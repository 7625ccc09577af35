"""Readings of the host and its GPUs that come inside other events: ``host``, ``devices``, ``*_static_devices``."""

from __future__ import annotations

from typing import Any

from gpuflight.events.format.cells import Value, cell
from gpuflight.events.tables import TABLES

FIELDS = frozenset({"host", "devices", "gpu_static_devices", "cuda_static_devices", "rocm_static_devices"})

_DEVICE = {
    "id": "device_id",
    "name": "name",
    "uuid": "uuid",
    "vendor": "vendor",
    "architecture": "architecture",
    "pci_bus": "pci_bus",
    "total_mib": "total_mib",
    "compute_major": "compute_major",
    "compute_minor": "compute_minor",
    "l2_cache_size": "l2_cache_size_bytes",
    "l2_cache_size_bytes": "l2_cache_size_bytes",
    "shared_mem_per_block": "shared_mem_per_block_bytes",
    "shared_mem_per_block_bytes": "shared_mem_per_block_bytes",
    "regs_per_block": "regs_per_block",
    "multi_processor_count": "multi_processor_count",
    "warp_size": "warp_size",
}
_READING = {
    "id": "device_id",
    "used_mib": "used_mib",
    "free_mib": "free_mib",
    "total_mib": "total_mib",
    "util_gpu": "gpu_util_pct",
    "util_gpu_pct": "gpu_util_pct",
    "util_mem": "mem_util_pct",
    "util_mem_pct": "mem_util_pct",
    "temp_c": "temp_c",
    "power_mw": "power_mw",
    "clk_gfx": "clock_gfx_mhz",
    "clk_gfx_mhz": "clock_gfx_mhz",
    "clk_sm": "clock_sm_mhz",
    "clk_sm_mhz": "clock_sm_mhz",
    "clk_mem": "clock_mem_mhz",
    "clk_mem_mhz": "clock_mem_mhz",
    "throttle_pwr": "throttle_power",
    "throttle_therm": "throttle_thermal",
    "pcie_rx_bw": "pcie_rx_bytes_per_s",
    "pcie_rx_bw_bps": "pcie_rx_bytes_per_s",
    "pcie_tx_bw": "pcie_tx_bytes_per_s",
    "pcie_tx_bw_bps": "pcie_tx_bytes_per_s",
}
_HOST = {"cpu_pct": "cpu_pct", "ram_used_mib": "ram_used_mib", "ram_total_mib": "ram_total_mib"}

Row = dict[str, Value]


def _row(table: str, names: dict[str, str], fields: Any, unknown: list[str], where: str) -> Row:
    row: Row = {}
    if not isinstance(fields, dict):
        return row
    for wire, value in fields.items():
        column = names.get(wire)
        if column is None:
            if wire not in _DEVICE and wire not in _READING:
                unknown.append(f"{where}.{wire}")
            continue
        read = cell(value, TABLES[table].column(column).kind)
        if read is not None and read != "":
            row[column] = read
    return row


def telemetry_of(fields: dict[str, Any], time_ns: int | None) -> tuple[dict[str, list[Row]], list[str]]:
    """Rows by table (device, device_metric, host_metric), and the fields that are unknown.

    A host of 0 MiB was not looked at by the writer: no row. Readings need a time; without one there are none.
    """
    unknown: list[str] = []
    rows: dict[str, list[Row]] = {"device": [], "device_metric": [], "host_metric": []}
    devices: dict[Value, Row] = {}
    for where in ("devices", "gpu_static_devices", "cuda_static_devices", "rocm_static_devices"):
        entries = fields.get(where)
        for entry in entries if isinstance(entries, list) else ():
            device = _row("device", _DEVICE, entry, unknown, where)
            if "device_id" not in device:
                continue
            devices.setdefault(device["device_id"], {}).update(device)
            if where == "devices" and time_ns is not None:
                reading = _row("device_metric", _READING, entry, [], where)
                if len(reading) > 1:
                    rows["device_metric"].append({"time_ns": time_ns, **reading})
    rows["device"] = list(devices.values())
    host = _row("host_metric", _HOST, fields.get("host"), unknown, "host")
    if host.get("ram_total_mib") and time_ns is not None:
        rows["host_metric"].append({"time_ns": time_ns, **host})
    return rows, unknown
