"""Cases of the rules about GPUs as devices: links, clocks, state, memory, use."""

from __future__ import annotations

from typing import Any

from tests.rule_scenes import Case, Scene, changing, steady

from gpuflight.graph import edges, nodes

GIB = 2**30
_HEALTHY: dict[str, Any] = {
    "sm_util_pct": 92, "memory_util_pct": 40, "memory_total_bytes": 80 * GIB, "memory_used_bytes": 50 * GIB,
    "memory_unattributed_bytes": 500 * 2**20, "memory_unmatched_bytes": 0, "processes_count": 1,
    "sm_clock_hz": 1.9e9, "sm_clock_max_hz": 1.98e9, "graphics_clock_application_hz": 1.98e9,
    "graphics_clock_max_hz": 1.98e9, "power_watts": 610, "power_limit_watts": 700, "temperature_celsius": 62,
    "temperature_slowdown_celsius": 87, "throttled_thermal_pct": 0.0, "throttled_power_pct": 12.0,
    "pcie_gen": 5, "pcie_gen_max": 5, "pcie_width": 16, "pcie_width_max": 16, "pcie_replays_count": 3,
    "nvlink_count": 18, "nvlink_active_count": 18, "nvlink_errors_count": 7, "nvlink_errors_per_s": 0.0,
    "xid_events_count": 0, "ecc_uncorrected_volatile_count": 1, "ecc_corrected_volatile_count": 40,
    "row_remap_failed": 0, "row_remap_pending": 0,
}  # fmt: skip
_FACTS: dict[str, Any] = {
    "index": 3, "state": "ok", "persistence": "enabled", "clock_event_reasons": [], "fabric_state": "completed",
    "fabric_status": "ok",
}  # fmt: skip
ID = "GPU(uuid=GPU-3)"
IDLE = {"sm_util_pct": 0, "pcie_gen": 1, "power_watts": 70, "sm_clock_hz": 345e6, "clock_event_reasons": ["gpu_idle"]}


def gpu(without: str = "", why: str = "this driver does not give it", **other: Any) -> nodes.GPU:
    """A healthy, working GPU, but for what is named; ``without`` are names of what is unknown."""
    metrics, attributes = dict(_HEALTHY), dict(_FACTS)
    for name, value in other.items():
        (metrics if name in metrics or name.endswith("_count") else attributes)[name] = value
    unknown = {}
    for name in without.split():
        metrics.pop(name, None)
        attributes.pop(name, None)
        unknown[name] = why
    return nodes.GPU(uuid="GPU-3", attributes=attributes, metrics=metrics, unknown=unknown or None)


def rising(metric: str, step: int, count: int = 16, **other: Any) -> Scene:
    """A counter that rises by ``step`` a round from its second reading on."""
    return changing(lambda n: [gpu(**{metric: 1000 + max(0, n - 1) * step}, **other)], count)


_USER = nodes.Process(pid=77, start=1, attributes={"name": "python"}, metrics={"cpu_pct": 90.0})
_HOLDS = edges.Access(_USER.id, ID)
_MIGS = [nodes.MigInstance(uuid=f"MIG-{n}", metrics={"sm_util_pct": 95.0 if n == 0 else 2.0}) for n in (0, 1)]
_EVEN = [nodes.MigInstance(uuid=f"MIG-{n}", metrics={"sm_util_pct": 60.0 + n}) for n in (0, 1)]
_BLIND = [nodes.MigInstance(uuid=f"MIG-{n}", unknown={"sm_util_pct": "NVML does not give it on MIG"}) for n in (0, 1)]
_OWN = [edges.Belong(each.id, ID) for each in _MIGS]


def _torch(reserved: float, allocated: float, retries: int) -> nodes.Session:
    metrics = {
        "allocator_reserved_bytes": reserved, "allocator_allocated_bytes": allocated, "allocator_retries_count": retries
    }  # fmt: skip
    return nodes.Session(session_id="s", metrics=metrics)


_XID = {"last_xid": 79, "last_xid_time": "2023-11-14T22:13:25.000Z", "xid_events_count": 1}
"""A moment after the scenes begin (their wall clock starts at 1,700,000,000 s)."""

CASES = {
    "pcie_degraded": Case(
        fires=steady(gpu(pcie_gen=3, pcie_width=8), seconds=70),
        about=ID,
        clear=steady(gpu(**IDLE), seconds=90),
        unknown=steady(gpu("pcie_gen_max"), seconds=70),
    ),
    "pcie_replays": Case(
        fires=rising("pcie_replays_count", 20),
        about=ID,
        clear=rising("pcie_replays_count", 0),
        unknown=steady(gpu("pcie_replays_count")),
        also={"few": ("clear", rising("pcie_replays_count", 1))},
    ),
    "nvlink_errors": Case(
        fires=steady(gpu(nvlink_active_count=16, nvlinks_down=[4, 9])),
        about=ID,
        severity="critical",
        clear=steady(gpu()),
        unknown=steady(gpu("nvlink_active_count")),
        also={
            "errors": ("warn", rising("nvlink_errors_count", 2)),
            "not bridged": ("clear", steady(gpu("nvlink_errors_count", nvlink_active_count=0))),
            "no NVLink": ("clear", steady(gpu("nvlink_count nvlink_active_count", "NVML lists no NVLink"))),
        },
    ),
    "xid": Case(
        fires=changing(lambda n: [gpu(**_XID) if n else gpu()], 4),
        about=ID,
        severity="critical",
        clear=steady(gpu()),
        unknown=steady(gpu("xid_events_count", "events are not supported")),
        also={
            "is history after 5 minutes": ("clear", changing(lambda n: [gpu(**_XID) if n else gpu()], 66)),
            "from just before we looked": ("critical", steady(gpu(**_XID))),
            "from long before we looked": (
                "clear",
                steady(gpu(**{**_XID, "last_xid_time": "2023-11-14T21:00:00.000Z"})),
            ),
        },
    ),
    "memory_errors": Case(
        fires=steady(gpu(row_remap_failed=1)),
        about=ID,
        severity="critical",
        clear=steady(gpu()),
        unknown=steady(gpu("ecc_uncorrected_volatile_count row_remap_failed", "this GPU has no ECC")),
        also={
            "uncorrected": ("critical", rising("ecc_uncorrected_volatile_count", 1)),
            "corrected": ("warn", rising("ecc_corrected_volatile_count", 2)),
            "pages": ("critical", steady(gpu(pages_retired_single_bit_count=60, pages_retired_double_bit_count=9))),
        },
    ),
    "thermal_slowdown": Case(
        fires=steady(
            gpu(clock_event_reasons=["hw_thermal_slowdown"], temperature_celsius=88, throttled_thermal_pct=30.0)
        ),
        about=ID,
        severity="critical",
        clear=steady(gpu()),
        unknown=steady(gpu("clock_event_reasons")),
        also={"margin": ("warn", steady(gpu(temperature_celsius=84)))},
    ),
    "power_capped": Case(
        fires=steady(gpu(clock_event_reasons=["hw_power_brake_slowdown"]), seconds=15),
        about=ID,
        severity="critical",
        clear=steady(gpu(), seconds=15),
        unknown=steady(gpu("throttled_power_pct"), seconds=15),
        also={"own limit": ("info", steady(gpu(throttled_power_pct=80.0, power_watts=699), seconds=15))},
    ),
    "clocks_capped": Case(
        fires=steady(gpu(graphics_clock_application_hz=1.2e9)),
        about=ID,
        clear=steady(gpu()),
        unknown=steady(gpu("graphics_clock_application_hz")),
    ),
    "throttled_but_busy": Case(
        fires=steady(gpu(sm_util_pct=99, sm_clock_hz=800e6), seconds=35),
        about=ID,
        clear=steady(gpu(**IDLE), seconds=35),
        unknown=steady(gpu("sm_clock_hz"), seconds=35),
    ),
    "gpu_not_ready": Case(
        fires=steady(gpu(fabric_state="in_progress", fabric_status="NVML error 3")),
        about=ID,
        severity="critical",
        clear=steady(gpu()),
        unknown=steady(gpu("persistence")),
        also={"persistence": ("info", steady(gpu(persistence="disabled")))},
    ),
    "gpu_lost": Case(
        fires=steady(gpu(state="lost", state_reason="GPU is lost")),
        about=ID,
        severity="critical",
        clear=steady(gpu()),
        unknown=steady(gpu(state="unreachable", state_reason="NVML does not answer")),
        also={"off the bus": ("critical", steady(gpu(on_pci_bus=False)))},
    ),
    "gpu_memory_near_full": Case(
        fires=steady(gpu(memory_used_bytes=78 * GIB), _USER, _HOLDS, seconds=70),
        about=_USER.id,
        severity="info",
        clear=steady(gpu(), seconds=70),
        unknown=steady(gpu("memory_used_bytes"), seconds=70),
        also={"grows": ("warn", changing(lambda n: [gpu(memory_used_bytes=(70 + n // 3) * GIB)], 27))},
    ),
    "memory_fragmentation": Case(
        fires=changing(lambda n: [_torch(40e9, 25e9, n)], 4),
        about="Session(s)",
        clear=steady(_torch(40e9, 25e9, 7)),
        unknown=steady(nodes.Session(session_id="s", unknown={"allocator_reserved_bytes": "the log has none"})),
    ),
    "zombie_memory": Case(
        fires=steady(gpu(memory_unmatched_bytes=3 * GIB), seconds=15),
        about=ID,
        clear=steady(gpu(), seconds=15),
        unknown=steady(gpu(foreign_pidns=True), seconds=15),
        also={"no process": ("warn", steady(gpu(processes_count=0, memory_unattributed_bytes=2 * GIB), seconds=15))},
    ),
    "mig_imbalance": Case(
        fires=steady(gpu(), *_MIGS, *_OWN, seconds=310),
        about="MigInstance(uuid=MIG-1)",
        clear=steady(gpu(), *_EVEN, *_OWN, seconds=310),
        unknown=steady(gpu(), *_BLIND, *_OWN, seconds=310),
    ),
    "idle_reserved_gpu": Case(
        fires=steady(gpu(**IDLE), _USER, _HOLDS, seconds=1860, step_s=30.0),
        about=_USER.id,
        clear=steady(gpu(), _USER, _HOLDS, seconds=1860, step_s=30.0),
        unknown=steady(gpu(**IDLE), _USER, _HOLDS, seconds=600, step_s=30.0),
        also={"nobody holds it": ("clear", steady(gpu(processes_count=0, **IDLE), seconds=1860, step_s=30.0))},
    ),
}
