"""GPU and MIG entities from what NVML read: rates of counters, memory nobody owns up to, the state of links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpuflight.collectors.rates import Rates
from gpuflight.graph import nodes
from gpuflight.sources.nvml import Gpu, Mig, NvmlSnapshot

Number = int | float

# counter → (metric of its rate, factor); counters not named here are reported as they are.
_RATES: dict[str, tuple[str, float]] = {
    "energy_joules": ("power_mean_watts", 1.0),
    "throttled_power_ns": ("throttled_power_pct", 1e-7),
    "throttled_thermal_ns": ("throttled_thermal_pct", 1e-7),
    "pcie_replays_count": ("pcie_replays_per_s", 1.0),
    "pcie_tx_bytes": ("pcie_tx_bytes_per_s", 1.0),
    "pcie_rx_bytes": ("pcie_rx_bytes_per_s", 1.0),
    "nvlink_tx_bytes": ("nvlink_tx_bytes_per_s", 1.0),
    "nvlink_rx_bytes": ("nvlink_rx_bytes_per_s", 1.0),
    "nvlink_errors_count": ("nvlink_errors_per_s", 1.0),
}
_TOTALS_TOO = ("_count", "energy_joules")
"""Counters whose total is worth reading beside the rate."""

LIVE_METRICS = (
    "sm_util_pct", "memory_util_pct", "memory_used_bytes", "memory_free_bytes", "memory_unattributed_bytes",
    "sm_clock_hz", "memory_clock_hz", "power_watts", "temperature_celsius", "pcie_gen", "pcie_width",
    "nvlink_active_count",
)  # fmt: skip
"""What is unknown of a GPU that does not answer."""


def gpu_entity(gpu: Gpu, snapshot: NvmlSnapshot, rates: Rates) -> nodes.GPU:
    """The entity of one GPU. ``rates`` is open for this round, unless the snapshot is stale."""
    attributes: dict[str, Any] = dict(gpu.facts)
    metrics: dict[str, Number] = dict(gpu.metrics)
    unknown = dict(gpu.unknown)
    attributes["state"] = gpu.state
    for name, value in (("driver", snapshot.driver_version), ("nvml_version", snapshot.nvml_version),
                        ("cuda_driver", snapshot.cuda_version)):  # fmt: skip
        if value:
            attributes[name] = value
    _name_numa_node(attributes, unknown)
    if gpu.state != "ok":
        attributes["state_reason"] = gpu.reason
        unknown.update(dict.fromkeys(LIVE_METRICS, gpu.reason))
        return nodes.GPU(uuid=gpu.uuid, attributes=attributes, metrics=metrics, unknown=unknown)
    counters = dict(gpu.counters)
    _add_links(gpu, attributes, metrics, counters, unknown)
    _add_rates(gpu.uuid, counters, metrics, unknown, rates, snapshot.stale_reason)
    _add_unattributed(gpu, metrics, unknown)
    if snapshot.stale_reason:
        attributes["stale_reason"] = snapshot.stale_reason
        metrics["age_s"] = snapshot.age_s
    return nodes.GPU(uuid=gpu.uuid, attributes=attributes, metrics=metrics, unknown=unknown or None)


def silent_gpu_entity(known: nodes.GPU, state: str, reason: str) -> nodes.GPU:
    """A GPU seen before, now that NVML says nothing of it: what it is, and why nothing else is known."""
    keep = {name: value for name, value in known.attributes.items() if name not in ("stale_reason", "events")}
    steady = {name: value for name, value in known.metrics.items() if name.endswith("_max") or "_max_" in name}
    return nodes.GPU(
        uuid=known.uuid,
        attributes={**keep, "state": state, "state_reason": reason},
        metrics=steady,
        unknown=dict.fromkeys(LIVE_METRICS, reason),
    )


def mig_entity(mig: Mig) -> nodes.MigInstance:
    """The entity of one MIG device."""
    attributes = dict(mig.facts)
    if mig.gpu_instance is not None:
        attributes["gpu_instance"] = mig.gpu_instance
        attributes["compute_instance"] = mig.compute_instance
    return nodes.MigInstance(
        uuid=mig.uuid, attributes=attributes, metrics=dict(mig.metrics), unknown=dict(mig.unknown) or None
    )


def numa_nodes_of(entity: nodes.GPU) -> Iterable[int]:
    """The host NUMA nodes that the driver says a GPU is local to."""
    node = entity.attributes.get("numa_node")
    return (node,) if isinstance(node, int) else entity.attributes.get("numa_nodes", ())


def _name_numa_node(attributes: dict[str, Any], unknown: dict[str, str]) -> None:
    """``numa_nodes`` in list format becomes ``numa_node`` if there is one, else a list of numbers."""
    text = attributes.pop("numa_nodes", None)
    if text is None:
        if "numa_nodes" in unknown:
            unknown["numa_node"] = unknown.pop("numa_nodes")
        return
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    if len(found) == 1:
        attributes["numa_node"] = found[0]
    else:
        attributes["numa_nodes"] = found


def _add_links(
    gpu: Gpu, attributes: dict[str, Any], metrics: dict[str, Number], counters: dict[str, Number],
    unknown: dict[str, str],
) -> None:  # fmt: skip
    if not gpu.links:
        why = unknown.pop("nvlinks", "NVML lists no NVLink")
        unknown["nvlink_count"] = unknown["nvlink_active_count"] = why
        return
    metrics["nvlink_count"] = len(gpu.links)
    silent = sum(link.active is None for link in gpu.links)
    if silent:
        unknown["nvlink_active_count"] = f"NVML did not give the state of {silent} links"
    else:
        metrics["nvlink_active_count"] = sum(link.active is True for link in gpu.links)
        down = [link.number for link in gpu.links if not link.active]
        if down and len(down) < len(gpu.links):  # with all of them down the GPU just is not bridged
            attributes["nvlinks_down"] = down
    versions = {link.version for link in gpu.links if link.version}
    if versions:
        attributes["nvlink_version"] = max(versions)
    errors = [link.errors_count for link in gpu.links if link.errors_count is not None]
    if errors:
        counters["nvlink_errors_count"] = sum(errors)
    else:
        unknown["nvlink_errors_count"] = "NVML gives no error counters for these links"


def _add_rates(
    uuid: str, counters: Mapping[str, Number], metrics: dict[str, Number], unknown: dict[str, str], rates: Rates,
    stale_reason: str,
) -> None:  # fmt: skip
    for name, value in counters.items():
        metric, factor = _RATES.get(name, ("", 1.0))
        if not metric or name.endswith(_TOTALS_TOO):
            metrics[name] = value
        if not metric:
            continue
        rate = None if stale_reason else rates.per_s((uuid, name), value)
        if rate is None:
            unknown[metric] = stale_reason or rates.why
        else:
            # A clock read a little apart from NVML's may make 100.3 % of a full second.
            metrics[metric] = min(rate * factor, 100.0) if metric.endswith("_pct") else rate * factor
    for name, (metric, _) in _RATES.items():
        if name in unknown and name not in counters and metric not in metrics:
            why = unknown.pop(name) if not name.endswith(_TOTALS_TOO) else unknown[name]
            unknown.setdefault(metric, why)


def _add_unattributed(gpu: Gpu, metrics: dict[str, Number], unknown: dict[str, str]) -> None:
    """Memory in use that no process in NVML's list accounts for: other containers' processes on some drivers, contexts
    of dead processes, the driver itself."""
    name = "memory_unattributed_bytes"
    if gpu.processes_reason:
        unknown["processes_count"] = unknown[name] = gpu.processes_reason
        return
    metrics["processes_count"] = len(gpu.processes)
    silent = sum(process.memory_used_bytes is None for process in gpu.processes)
    used = metrics.get("memory_used_bytes")
    if used is None:
        unknown[name] = unknown.get("memory_used_bytes", "the memory in use is not known")
    elif gpu.facts.get("memory_used_includes_reserved"):
        unknown[name] = "this driver counts what it reserves for itself as used"
    elif silent:
        unknown[name] = f"NVML does not give the memory of {silent} processes"
    elif gpu.processes_garbled_count:
        unknown[name] = f"{gpu.processes_garbled_count} entries of NVML's process list make no sense"
    else:
        metrics[name] = max(0, used - sum(process.memory_used_bytes or 0 for process in gpu.processes))
