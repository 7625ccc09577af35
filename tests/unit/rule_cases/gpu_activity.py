"""Cases of the rules about what programs do on GPUs: gaps, launches, copies, waits, steps."""

from __future__ import annotations

from typing import Any

from tests.rule_scenes import Case, Scene, changing, steady

from gpuflight.graph import edges, nodes

ID = "Session(s)"
_STEP_S = 5.0
_TOTALS: dict[str, float] = {
    "gpu_timeline_ms": 600_000, "gpu_active_ms": 575_000, "kernels_active_ms": 570_000, "gpu_gaps_count": 40_000,
    "gpu_gaps_long_count": 2, "gpu_gaps_long_ms": 1_400, "gpu_gap_max_ms": 800, "gpu_gaps_known_ms": 25_000,
    "host_wait_ms": 9_000, "idle_launches_count": 20_000, "delayed_launches_count": 40, "launch_calls_count": 3_000_000,
    "slow_launch_calls_count": 6_000, "slow_launch_calls_ms": 700, "short_launches_count": 900_000,
    "launches_count": 3_000_000, "graph_kernels_count": 0, "gpu_time_ms": 590_000, "kernels_count": 210,
    "copy_time_ms": 9_000, "memset_time_ms": 300, "allocation_time_ms": 120, "htod_copies_count": 12_000,
    "htod_small_copies_count": 9_000, "pageable_copies_count": 4, "pageable_copies_ms": 210,
    "pageable_copied_bytes": 3e9, "pageable_big_copies_count": 4, "copy_calls_count": 14_000,
    "blocking_copies_count": 30, "blocking_copies_ms": 260, "host_syncs_count": 6_000, "host_sync_wait_ms": 420_000,
    "steps_count": 3_000, "steps_ms": 598_000, "loader_ms": 6_000, "gc_pauses_count": 40, "gc_long_pauses_count": 0,
    "gc_pauses_ms": 12,
}  # fmt: skip
"""Ten minutes of a healthy training: 5,000 launches/s, 5 steps/s, a GPU that is 96 % busy; the host waits for it."""
_STATES: dict[str, float] = {
    "gc_pause_max_ms": 0.6, "steps_judged_count": 3_000, "step_outliers_count": 4, "step_p50_ms": 199,
    "step_max_ms": 310, "first_step_s": 48, "first_work_s": 21, "top_kernel_pct": 22, "stall_samples_count": 90_000,
    "stall_top_pct": 31, "thread_efficiency_pct": 96, "instructions_count": 5e9, "sm_active_pct": 88,
    "dram_active_pct": 55, "tensor_active_pct": 47,
}  # fmt: skip
_FACTS: dict[str, Any] = {
    "name": "train.py", "started": "2023-11-14T22:00:00.000Z", "step_scope": "train_step", "top_kernel": "gemm_bf16",
    "stall_top": "long_scoreboard",
}  # fmt: skip


def session(without: str = "", share: float = 1.0, state: str = "ended: shutdown", **other: Any) -> nodes.Session:
    """A healthy session that is over, but for what is named; ``share`` of all its sums."""
    metrics: dict[str, float] = {name: value * share for name, value in _TOTALS.items()} | _STATES
    attributes = {**_FACTS, "state": state}
    for name, value in other.items():
        if name in _TOTALS:
            metrics[name] = value * share
        elif name in metrics or name.endswith("_pct"):
            metrics[name] = value
        else:
            attributes[name] = value
    unknown = dict.fromkeys(without.split(), "the log does not tell it")
    for name in unknown:
        metrics.pop(name, None)
        attributes.pop(name, None)
    return nodes.Session(session_id="s", attributes=attributes, metrics=metrics, unknown=unknown or None)


def running(count: int = 14, more: tuple[Any, ...] = (), **other: Any) -> Scene:
    """A session that runs at the pace of ``session(**other)``, in rounds of 5 s."""
    per_round = _STEP_S * 1e3 / _TOTALS["gpu_timeline_ms"]
    return changing(lambda n: [session(share=(n + 20) * per_round, state="live", **other), *more], count)


def case(fires: dict[str, Any], unknown: str, **other: Any) -> Case:
    """Of a session: it fires once it is over and while it runs, is clear otherwise, also at first sight and when the
    program does nothing for a while."""
    also = other.pop("also", {})
    stands = [session(state="live", share=0.1, **fires)]
    return Case(
        fires=steady(session(**fires)),
        about=ID,
        clear=steady(session()),
        unknown=steady(session(unknown)),
        also={
            "while it runs": ("fired", running(**fires)),
            "a healthy one that runs": ("clear", running()),
            "does nothing for minutes": ("clear", Scene([stands], repeat=30)),
            "not at first sight": ("unknown", Scene([stands], repeat=1)),
            **also,
        },
        **other,
    )


_IDLE = {"gpu_active_ms": 240_000, "kernels_active_ms": 230_000, "gpu_gaps_known_ms": 360_000}
_WORKER = nodes.Process(
    pid=9, start=1, attributes={"name": "python", "state": "D"}, metrics={"io_read_bytes_per_s": 8e6, "cpu_pct": 3.0}
)
_TRAINER = nodes.Process(pid=8, start=1, attributes={"name": "python", "state": "S"}, metrics={"cpu_pct": 60.0})
_FAMILY = (_TRAINER, _WORKER, edges.Own(_TRAINER.id, _WORKER.id), edges.Own(_TRAINER.id, ID))

CASES = {
    "gpu_idle_gaps": case(
        _IDLE,
        "gpu_timeline_ms",
        also={
            "pauses": ("warn", steady(session(gpu_gaps_long_count=40, gpu_gaps_long_ms=45_000))),
            "too short to say": ("unknown", steady(session(share=0.001, **_IDLE))),
        },
    ),
    "host_bound_idle": case(
        {**_IDLE, "host_wait_ms": 300_000},
        "host_wait_ms",
        also={"idle for other reasons": ("clear", steady(session(**_IDLE)))},
    ),
    "sync_heavy": case(
        {**_IDLE, "host_syncs_count": 30_000},
        "host_sync_wait_ms",
        also={
            "one wait per second launch": (
                "warn",
                steady(session(**_IDLE, host_sync_wait_ms=30_000, host_syncs_count=2e6)),
            )
        },
    ),
    "launch_bound": case(
        {**_IDLE, "launches_count": 72e6, "short_launches_count": 60e6},
        "short_launches_count",
        also={
            "by graphs": (
                "clear",
                steady(session(launches_count=72e6, short_launches_count=60e6, graph_kernels_count=70e6)),
            )
        },
    ),
    "launch_delay": case(
        {"slow_launch_calls_count": 90_000},
        "launch_calls_count",
        also={
            "starts late": ("warn", steady(session(delayed_launches_count=2_000))),
            "few": ("unknown", steady(session(launch_calls_count=40))),
        },
    ),
    "pageable_copies": case(
        {"pageable_copies_ms": 30_000, "pageable_copies_count": 3_000, "pageable_big_copies_count": 3_000},
        "pageable_copies_count",
        also={
            "little time": ("info", steady(session(pageable_copies_count=40, pageable_big_copies_count=40))),
            "none at all": (
                "clear",
                steady(session(pageable_copies_count=0, pageable_copies_ms=0, pageable_big_copies_count=0)),
            ),
            "does nothing for minutes": ("clear", Scene([[session(state="live", share=0.1)]], repeat=30)),
        },
    ),
    "small_copies": case({"htod_copies_count": 1.5e6, "htod_small_copies_count": 1.4e6}, "htod_copies_count"),
    "blocking_copies": case(
        {**_IDLE, "blocking_copies_count": 3_000, "blocking_copies_ms": 90_000},
        "blocking_copies_count",
        also={
            "no steps": (
                "warn",
                steady(session("steps_count", **_IDLE, blocking_copies_count=3_000, blocking_copies_ms=90_000)),
            ),
            "no steps, little": (
                "clear",
                steady(session("steps_count", **_IDLE, blocking_copies_count=3_000, blocking_copies_ms=9_000)),
            ),
            "exactly": (
                "clear",
                steady(
                    session(
                        **_IDLE,
                        blocking_copies_count=3_000,
                        blocking_copies_ms=90_000,
                        steps_with_blocking_copies_pct=2.0,
                    )
                ),
            ),
        },
    ),
    "memory_operations_heavy": case(
        {**_IDLE, "copy_time_ms": 90_000},
        "copy_time_ms",
        also={
            "hidden by kernels": ("clear", steady(session(copy_time_ms=90_000))),
            "no steps": ("unknown", steady(session("steps_count", **_IDLE))),
        },
    ),
    "data_loader_starvation": case(
        {**_IDLE, "loader_ms": 300_000},
        "loader_ms",
        also={
            "the GPU is busy meanwhile": ("clear", steady(session(loader_ms=60_000))),
            "no steps": ("unknown", steady(session("steps_count", **_IDLE))),
            "suspected": ("info", running(more=_FAMILY, without="steps_count", **_IDLE)),
        },
    ),
    "gc_pause": case(
        {"gc_long_pauses_count": 120, "gc_pauses_ms": 9_000},
        "gc_pauses_count",
        also={"short": ("info", steady(session(gc_long_pauses_count=3, gc_pauses_ms=20)))},
    ),
    "step_outliers": Case(
        fires=steady(session(step_outliers_count=45, step_max_ms=4_100)),
        about=ID,
        clear=steady(session()),
        unknown=steady(session("steps_judged_count")),
        also={"few steps": ("unknown", steady(session(steps_judged_count=40, step_outliers_count=12)))},
    ),
    "slow_start": Case(
        fires=steady(session("first_step_s first_work_s", state="live", started="2023-11-14T21:40:00.000Z")),
        about=ID,
        clear=steady(session()),
        unknown=steady(session("first_step_s first_work_s")),
        also={
            "it took long": ("info", steady(session(first_step_s=2_400))),
            "still starting": (
                "clear",
                steady(session("first_step_s first_work_s", state="live", started="2023-11-14T22:10:00.000Z")),
            ),
            "no steps in the log": ("clear", steady(session("first_step_s"))),
        },
    ),
}
