"""Reading all processes: ours against psutil and against the bare system calls.

    python benchmarks/bench_proc.py [--processes 1000] [--rounds 9]

Starts sleeping processes, then takes turns: the floor (open, read, close of every /proc/PID/stat, nothing parsed), our
scan, our whole process tree (every attribute and metric, as entities and edges), and psutil reading the same
attributes. CPU time, median over the rounds of the ratios within a round. Goals: the scan within 2.5 times the floor,
the tree at least 8 times as fast as psutil.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil

from gpuflight.collectors.process_tree import ProcessTree, ProcessTreeSettings
from gpuflight.sources.clock import SystemClock
from gpuflight.sources.fs import HostFs
from gpuflight.sources.procfs import ProcFs

PSUTIL_ATTRIBUTES = [
    *("pid", "ppid", "name", "status", "create_time", "exe", "cmdline", "uids", "username", "cpu_affinity"),
    *("cpu_times", "memory_info", "num_threads", "num_fds"),
]
WARM_UP_ROUNDS = 2


def cpu_ms(function: Callable[[], Any]) -> float:
    """CPU time of one call, ms."""
    start = time.process_time()
    function()
    return (time.process_time() - start) * 1e3


def floor() -> None:
    """What nobody can go below without keeping descriptors open."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                descriptor = os.open(f"/proc/{name}/stat", os.O_RDONLY)
            except OSError:
                continue
            os.read(descriptor, 4096)
            os.close(descriptor)


def with_psutil() -> None:
    """One round of psutil, which keeps its Process objects between rounds as we keep our facts."""
    for _ in psutil.process_iter(PSUTIL_ATTRIBUTES, ad_value=None):
        pass


def measure(rounds: int) -> dict[str, Any]:
    """Medians (ms) and the ratios, over ``rounds`` rounds after a warm-up."""
    procfs = ProcFs(HostFs(), SystemClock())
    world: Any = SimpleNamespace(procfs=procfs)
    tree = ProcessTree(ProcessTreeSettings(kernel_threads=True))
    sizes: list[int] = []
    times: dict[str, list[float]] = {"floor": [], "first_tree": [], "scan": [], "tree": [], "psutil": []}

    def scan() -> None:
        procfs.processes()

    def build() -> None:
        tree.observe(world)
        sizes.append(len(tree.seed().nodes))

    for number in range(1, rounds + WARM_UP_ROUNDS + 1):
        floor_ms = cpu_ms(floor)
        procfs.begin_round(number)
        scan_ms = cpu_ms(scan)
        tree_ms = scan_ms + cpu_ms(build)
        psutil_ms = cpu_ms(with_psutil)
        if number == 1:
            times["first_tree"].append(tree_ms)
        if number > WARM_UP_ROUNDS:
            for name, value in (("floor", floor_ms), ("scan", scan_ms), ("tree", tree_ms), ("psutil", psutil_ms)):
                times[name].append(value)
    ratios = {
        "scan_to_floor": _median_ratio(times["scan"], times["floor"]),
        "psutil_to_tree": _median_ratio(times["psutil"], times["tree"]),
        "psutil_to_scan": _median_ratio(times["psutil"], times["scan"]),
    }
    return {
        "processes": sizes[-1],
        "ms": {name: statistics.median(values) for name, values in times.items()},
        "ratios": ratios,
    }


def _median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=1000, help="sleeping processes to start (default 1000)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (default 9)")
    parser.add_argument("--json", action="store_true", help="write JSON")
    arguments = parser.parse_args()
    sleepers = [subprocess.Popen(["sleep", "3600"]) for _ in range(arguments.processes)]
    try:
        result = measure(arguments.rounds)
    finally:
        for sleeper in sleepers:
            sleeper.kill()
        for sleeper in sleepers:
            sleeper.wait()
    ratios = result["ratios"]
    result["goals_met"] = ratios["scan_to_floor"] <= 2.5 and ratios["psutil_to_tree"] >= 8
    if arguments.json:
        print(json.dumps(result))
    else:
        print(f"{result['processes']} processes, CPU ms per round (median of {arguments.rounds}):")
        for name, value in result["ms"].items():
            print(f"  {name:12} {value:8.2f}")
        print(f"scan   / floor {ratios['scan_to_floor']:6.2f}   (goal <= 2.5)")
        print(f"psutil / tree  {ratios['psutil_to_tree']:6.2f}   (goal >= 8)")
        print(f"psutil / scan  {ratios['psutil_to_scan']:6.2f}")
    return 0 if result["goals_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
