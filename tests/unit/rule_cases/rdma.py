"""Cases of the rules about RDMA, and about programs that wait for CPUs."""

from __future__ import annotations

from typing import Any

from tests.rule_scenes import Case, Scene, changing, steady
from tests.unit.rule_cases.gpu import ID, gpu
from tests.unit.rule_cases.host import GIB, process, uses, with_gpu

from gpuflight.graph import edges, nodes

PORT = "RdmaPort(mlx5_0/1)"
_QUIET: dict[str, Any] = {
    "link_downed_count": 2, "excessive_buffer_overrun_errors_count": 0, "symbol_error_per_s": 0.0,
    "local_ack_timeout_err_per_s": 0.0, "tx_bytes_per_s": 20e9, "rx_bytes_per_s": 20e9, "np_cnp_sent_per_s": 10.0,
}  # fmt: skip


def port(without: str = "", **other: float) -> nodes.RdmaPort:
    """A healthy port, but for what is named."""
    metrics = {**_QUIET, **other}
    unknown = {name: "no such counter" for name in without.split() if metrics.pop(name, None) is not None}
    return nodes.RdmaPort(
        device="mlx5_0", port=1, attributes={"state": "ACTIVE"}, metrics=metrics, unknown=unknown or None
    )


def _downs(each: int) -> Scene:
    return changing(lambda n: [port(link_downed_count=2 + each * n)], 5)


_ALL = "link_downed_count excessive_buffer_overrun_errors_count"
_RATES = "symbol_error_per_s local_ack_timeout_err_per_s"
_DIRECT = nodes.Host(hostname="h", attributes={"gpudirect": "nvidia_peermem"})
_WITHOUT = nodes.Host(hostname="h", attributes={"gpudirect": "no module"})
_MUTE = nodes.Host(hostname="h")


def _marks(n: int) -> list[Any]:
    late = n > 64
    return [port(np_cnp_sent_per_s=5000.0 + n if late else 100.0, tx_bytes_per_s=9e9 + n if late else 20e9)]


def _thread(without: str = "", **other: float) -> list[Any]:
    metrics = {"cpu_pct": 80.0, "run_delay_pct": 0.5, **other}
    unknown = {name: "no schedstat" for name in without.split() if metrics.pop(name, None) is not None}
    one = process()
    thread = nodes.Thread(tid=78, start=2, attributes={"name": "launcher"}, metrics=metrics, unknown=unknown or None)
    return [gpu(), one, uses(one), thread, edges.Own(one.id, thread.id)]


def _numa(on_0: float, on_1: float, **other: Any) -> list[Any]:
    one = process()
    zero, two = nodes.Numa(index=0), nodes.Numa(index=1)
    found: list[Any] = [gpu(), one, uses(one), zero, two]
    if not other:
        found.append(edges.Affinity(ID, zero.id))
    for node, size in ((zero, on_0), (two, on_1)):
        found.append(edges.NumaAccess(one.id, node.id, {}, {"resident_bytes": size * GIB}))
    return found


def _hot(sm_util_pct: float = 20, without: str = "", **other: Any) -> Scene:
    one = process(without, cpu_pct=100.0, **other)
    return steady(gpu(sm_util_pct=sm_util_pct), one, uses(one), seconds=25)


def _waits(pct: float) -> Scene:
    one = process()
    waiting = nodes.Process(pid=77, start=1, attributes=one.attributes, metrics={**one.metrics, "gil_wait_pct": pct})
    return steady(gpu(), waiting, uses(waiting), seconds=25)


def _counted(pct: float, per_s: float = 30e6) -> nodes.Process:
    """A process with what perf_counters tells of it."""
    one = process()
    told = {"llc_miss_pct": pct, "llc_misses_per_s": per_s, "instructions_per_cycle": 0.7, "perf_running_pct": 100.0}
    return nodes.Process(pid=77, start=1, attributes=one.attributes, metrics={**one.metrics, **told})


def _uncounted(count: int, without: str = "") -> list[nodes.Process]:
    return [process(without, pid=100 + number) for number in range(count)]


CASES = {
    "rdma_fatal": Case(fires=_downs(1), about=PORT, severity="critical", clear=_downs(0), unknown=steady(port(_ALL))),
    "rdma_degraded": Case(
        fires=steady(port(symbol_error_per_s=60.0), seconds=15),
        about=PORT,
        clear=steady(port(), seconds=15),
        unknown=steady(port(_RATES), seconds=15),
    ),
    "rdma_congestion": Case(
        fires=changing(_marks, 70),
        about=PORT,
        clear=steady(port(), seconds=310),
        unknown=steady(port("np_cnp_sent_per_s"), seconds=310),
        also={"marks alone": ("clear", steady(port(np_cnp_sent_per_s=9000.0), seconds=310))},
    ),
    "rdma_flapping": Case(fires=_downs(1), about=PORT, clear=_downs(0), unknown=steady(port("link_downed_count"))),
    "gpudirect_unused": Case(
        fires=steady(_WITHOUT, gpu(), port(), seconds=35),
        about=ID,
        clear=steady(_DIRECT, gpu(), port(), seconds=35),
        unknown=steady(_MUTE, gpu(), port(), seconds=35),
    ),
    "run_queue_delay": Case(
        fires=steady(*_thread(run_delay_pct=30.0), seconds=10),
        about="Thread(tid=78,start=2)",
        clear=steady(*_thread(), seconds=10),
        unknown=steady(*_thread("run_delay_pct"), seconds=10),
    ),
    "gil_bound": Case(
        fires=_hot(),
        about="Process(pid=77,start=1)",
        clear=_hot(95),
        unknown=with_gpu(process("cpu_pct"), seconds=25),
        also={"measured": ("warn", _waits(12.0)), "a C++ program": ("clear", _hot(name="vllm"))},
    ),
    "remote_numa": Case(
        fires=steady(*_numa(2, 18), seconds=15),
        about="Process(pid=77,start=1)",
        severity="critical",
        clear=steady(*_numa(18, 1), seconds=15),
        unknown=steady(*_numa(2, 18, nowhere=True), seconds=15),
        also={"some": ("warn", steady(*_numa(12, 8), seconds=15))},
    ),
    "cache_misses": Case(
        fires=steady(_counted(44.0), seconds=15),
        about="Process(pid=77,start=1)",
        clear=steady(_counted(4.0), seconds=15),
        unknown=steady(process(), seconds=15),
        also={
            "hardly any misses": ("clear", steady(_counted(44.0, 20_000.0), seconds=15)),
            "others are not counted": ("clear", steady(_counted(4.0), *_uncounted(20), seconds=15)),
            "many could not be counted": ("unknown", steady(_counted(4.0), *_uncounted(3, "llc_miss_pct"), seconds=15)),
        },
    ),
}
