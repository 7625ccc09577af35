"""Cases of the rules about kernels, samples of them, and the units of a GPU that they keep busy."""

from __future__ import annotations

from typing import Any

from tests.rule_scenes import Case, Scene, steady
from tests.unit.rule_cases.gpu import gpu
from tests.unit.rule_cases.gpu_activity import session

from gpuflight.graph import edges, nodes

_OWNER = session()
_METRICS: dict[str, float] = {
    "session_share_pct": 34.0, "occupancy_pct": 75.0, "occupancy_samples_count": 512, "registers_count": 40,
    "reg_occupancy_pct": 75.0, "thread_local_bytes": 0, "waves_count": 12.4, "gpu_time_ms": 200_000.0,
}  # fmt: skip
ID = f"Kernel({_OWNER.id},softmax)"


def kernel(without: str = "", name: str = "softmax", **other: Any) -> list[Any]:
    """A healthy kernel that takes a third of the time, its session and the edge between."""
    metrics = {**_METRICS, **{key: value for key, value in other.items() if key in _METRICS}}
    unknown = dict.fromkeys(without.split(), "the log has no launch details of it")
    entity = nodes.Kernel(
        process=_OWNER.id,
        name=name,
        attributes={"occupancy_limiter": other.get("limiter", "registers")},
        metrics={key: value for key, value in metrics.items() if key not in unknown},
        unknown=unknown or None,
    )
    return [entity, _OWNER, edges.Launch(_OWNER.id, entity.id)]


def _case(fires: dict[str, Any], unknown: str, **also: tuple[str, Scene]) -> Case:
    return Case(
        fires=steady(*kernel(**fires)),
        about=ID,
        clear=steady(*kernel()),
        unknown=steady(*kernel(unknown)),
        also={"takes no time": ("clear", steady(*kernel(session_share_pct=0.4, **fires))), **also},
    )


def _units(**other: float) -> nodes.GPU:
    """A GPU whose units are counted; ``sm_active_pct``, ``tensor_active_pct``, ``dram_active_pct`` besides."""
    metrics = {"sm_active_pct": 85.0, "tensor_active_pct": 40.0, "dram_active_pct": 55.0, **other}
    base = gpu()
    return nodes.GPU(uuid="GPU-3", attributes=base.attributes, metrics={**base.metrics, **metrics})


_GPU = "GPU(uuid=GPU-3)"
_HOST = nodes.Host(hostname="h", metrics={"cpus_count": 64})


def _workers(count: int, busy_pct: float | None = 98.0, util_pct: float = 35.0) -> Scene:
    """A trainer with processes that load its data."""
    trainer = nodes.Process(
        pid=50, start=1, attributes={"name": "python", "cpus_allowed": "0-15"}, metrics={"cpu_pct": 40.0}
    )
    busy = {} if busy_pct is None else {"cpu_pct": busy_pct}
    workers = [
        nodes.Process(pid=60 + n, start=1, attributes={"name": "pt_data_worker"}, metrics=busy) for n in range(count)
    ]
    device = gpu(sm_util_pct=util_pct)
    family = [edges.Own(trainer.id, worker.id) for worker in workers]
    return steady(_HOST, trainer, *workers, device, *family, edges.Access(trainer.id, _GPU), seconds=120)


CASES = {
    "low_occupancy": _case(
        {"occupancy_pct": 25.0},
        "occupancy_pct",
        matrix=("info", steady(*kernel(name="ampere_bf16_s16816gemm", occupancy_pct=25.0))),
    ),
    "register_pressure": _case({"registers_count": 168, "reg_occupancy_pct": 25.0}, "registers_count"),
    "local_memory_spill": _case({"thread_local_bytes": 96}, "thread_local_bytes"),
    "tail_effect": _case(
        {"waves_count": 1.1},
        "waves_count",
        nearly_full=("clear", steady(*kernel(waves_count=1.9))),
        one_wave=("clear", steady(*kernel(waves_count=1.0))),
        small=("info", steady(*kernel(waves_count=0.2))),
    ),
    "few_kernels_dominate": Case(
        fires=steady(session(top_kernel_pct=83)),
        about="Session(s)",
        severity="info",
        clear=steady(session()),
        unknown=steady(session("top_kernel_pct")),
        also={"a program of one kernel": ("clear", steady(session(top_kernel_pct=100, kernels_count=1)))},
    ),
    "dominant_stall": Case(
        fires=steady(session(stall_top_pct=62)),
        about="Session(s)",
        severity="warn",
        clear=steady(session()),
        unknown=steady(session("stall_samples_count")),
        also={
            "few samples": ("unknown", steady(session(stall_top_pct=62, stall_samples_count=300))),
            "no matter of memory": ("info", steady(session(stall_top_pct=62, stall_top="barrier"))),
            "a reason of a later version": ("info", steady(session(stall_top_pct=62, stall_top="gmma"))),
        },
    ),
    "thread_inefficiency": Case(
        fires=steady(session(thread_efficiency_pct=61)),
        about="Session(s)",
        severity="warn",
        clear=steady(session()),
        unknown=steady(session("thread_efficiency_pct")),
        also={
            "less than half": ("critical", steady(session(thread_efficiency_pct=31))),
            "few instructions": ("unknown", steady(session(thread_efficiency_pct=31, instructions_count=96))),
        },
    ),
    "memory_bandwidth_bound": Case(
        fires=steady(_units(dram_active_pct=91.0, tensor_active_pct=4.0), seconds=70),
        about=_GPU,
        clear=steady(_units(), seconds=70),
        unknown=steady(gpu(), seconds=70),
        also={
            "a session": ("info", steady(session(dram_active_pct=91, tensor_active_pct=4))),
            "not yet": ("unknown", steady(_units(dram_active_pct=91.0, tensor_active_pct=4.0), seconds=20)),
        },
    ),
    "tensor_cores_unused": Case(
        fires=steady(_units(tensor_active_pct=0.0), seconds=70),
        about=_GPU,
        clear=steady(_units(), seconds=70),
        unknown=steady(gpu(), seconds=70),
        also={
            "idle": ("clear", steady(_units(tensor_active_pct=0.0, sm_active_pct=1.0), seconds=70)),
            "a session": ("info", steady(session(tensor_active_pct=0.0))),
            "a session without counters": ("unknown", steady(session("tensor_active_pct"))),
        },
    ),
    "loader_workers": Case(
        fires=_workers(4),
        about="Process(pid=50,start=1)",
        severity="warn",
        clear=_workers(4, busy_pct=30.0),
        unknown=_workers(4, busy_pct=None),
        also={
            "too many": ("info", _workers(40)),
            "the GPU is busy": ("clear", _workers(4, util_pct=93.0)),
            "none": ("clear", _workers(0)),
            "enough": ("clear", _workers(14)),
        },
    ),
    "utilisation_misleads": Case(
        fires=steady(_units(sm_util_pct=99, sm_active_pct=12.0), seconds=70),
        about=_GPU,
        clear=steady(_units(), seconds=70),
        unknown=steady(gpu(sm_util_pct=99), seconds=70),
        also={"idle": ("clear", steady(_units(sm_util_pct=0, sm_active_pct=0.0), seconds=70))},
    ),
}
