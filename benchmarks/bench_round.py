"""A whole round of every collector against a psutil round that reads the same, and what it costs when nothing happens.

    python benchmarks/bench_round.py [--processes 1000] [--connections 2500] [--rounds 7] [--flat 1000]

1. Beside idle processes and loopback TCP connections: CPU time of one steady round (collect, expand, merge, diff)
   against psutil reading the same facts of processes, threads, sockets and their owners, disks, interfaces, memory.
   psutil reads no round-trip times, pipes, shared memory, cgroups and NUMA placement, so it is let off those.
   Goal: at most a quarter.
2. On the machine as it is: share of one core at an interval of 5 s. Goal: at most 1 %.
3. Memory over ``--flat`` rounds: resident size after a tenth of them and at the end. Goal: flat.
4. Start-up: ``gpuflight --help``. Goal: at most 150 ms.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from gpuflight.bottlenecks.build import make_engine
from gpuflight.cli.plugin_settings import collector_names, make_collectors, make_rules
from gpuflight.core.controller import Controller
from gpuflight.settings import Settings
from gpuflight.sources.open import open_world

PSUTIL_ATTRIBUTES = [
    *("pid", "ppid", "name", "status", "create_time", "exe", "cmdline", "uids", "username", "cpu_affinity"),
    *("cpu_times", "memory_info", "num_threads", "num_fds"),
]


IDLE_PROCESSES = """
for _ in range(count):
    if os.fork() == 0:
        signal.pause()
"""

CONNECTIONS = """
ends = []
listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
for _ in range(count):
    ends.append(socket.create_connection(listener.getsockname()))
    ends.append(listener.accept()[0])
for end in ends:  # closed by a reset: nothing stays in TIME_WAIT for the next run to look at
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
"""


@contextmanager
def beside(what: str, count: int) -> Iterator[None]:
    """Runs one of the scripts above in a process group of its own, to the end of the block."""
    script = (
        f"import os, signal, socket, struct, sys\ncount = {count}\n{what}\nprint('ready', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline(), "could not be started; is the limit of open files (ulimit -n) too low?"
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def controller(history_bytes: int | None = None, *, everything: bool = True) -> Iterator[Controller]:
    """A controller as ``gpuflight run`` makes it; without ``everything`` only what psutil tells something of: no rules,
    and no probes in the kernel."""
    settings = Settings()
    if not everything:
        settings.collectors = {
            name: {"enabled": False} for name in collector_names() if name.startswith(("kernel_", "cuda_"))
        }
    if history_bytes is not None:
        settings.history.max_bytes = history_bytes
    judge = make_engine(make_rules(settings)) if everything else None
    made = Controller(open_world(), settings=settings, collectors=make_collectors(settings), judge=judge)
    try:
        yield made
    finally:
        made.close()


def psutil_round() -> int:
    """The same facts by psutil; returns how many things it saw."""
    seen = 0
    for process in psutil.process_iter(PSUTIL_ATTRIBUTES, ad_value=None):
        seen += 1
        if (process.info["num_threads"] or 0) > 1:
            try:
                seen += len(process.threads())
            except psutil.Error:
                continue
    seen += len(psutil.net_connections("all"))
    psutil.disk_io_counters(perdisk=True)
    psutil.net_io_counters(pernic=True)
    psutil.net_if_stats()
    psutil.net_if_addrs()
    psutil.virtual_memory()
    psutil.cpu_times(percpu=True)
    for partition in psutil.disk_partitions():
        psutil.disk_usage(partition.mountpoint)
    return seen


def cpu_ms(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return (time.process_time() - started) * 1e3


def bench_against_psutil(processes: int, pairs: int, rounds: int) -> None:
    with beside(IDLE_PROCESSES, processes), beside(CONNECTIONS, pairs), controller(everything=False) as core:
        first = cpu_ms(core.run_round)
        for _ in range(2):
            core.run_round()
            psutil_round()
        ours, peers = [], []
        for _ in range(rounds):
            gc.collect()
            ours.append(cpu_ms(core.run_round))
            gc.collect()
            peers.append(cpu_ms(psutil_round))
        done = core.run_round()
        ratio = statistics.median(a / b for a, b in zip(ours, peers, strict=True))
        print(f"round: {len(done.graph.nodes)} nodes, {len(done.graph.edges)} edges")
        print(
            f"  ours {statistics.median(ours):.1f} ms (first {first:.1f} ms), "
            f"psutil {statistics.median(peers):.1f} ms: {ratio:.2f}x psutil (goal 0.25)"
        )
        print("  " + ", ".join(f"{line.collector} {line.cpu_ms:.1f}" for line in sorted(
            done.coverage, key=lambda line: -line.cpu_ms) if line.cpu_ms >= 0.3))  # fmt: skip
        core.close()
        with controller() as whole:
            first = cpu_ms(whole.run_round)
            for _ in range(2):
                whole.run_round()
            spent = []
            for _ in range(rounds):
                gc.collect()
                spent.append(cpu_ms(whole.run_round))
            print(f"  with rules and kernel probes {statistics.median(spent):.1f} ms (first {first:.1f} ms)")


def bench_steady(rounds: int) -> None:
    with controller() as core:
        for _ in range(3):
            core.run_round()
        spent = [cpu_ms(core.run_round) for _ in range(rounds)]
        count = sum(1 for entity in core.run_round().graph if entity.kind == "Process")
    share = statistics.median(spent) / 5000 * 100
    print(
        f"steady: {statistics.median(spent):.1f} ms per round with {count} processes: {share:.2f} % of a core (goal 1)"
    )


def bench_memory(rounds: int) -> None:
    process = psutil.Process()
    # A history that is full from early on: what grows after that is a leak.
    with controller(history_bytes=2 << 20) as core:
        for _ in range(max(1, rounds // 10)):
            core.run_round()
        gc.collect()
        early = process.memory_info().rss
        for _ in range(rounds - rounds // 10):
            core.run_round()
        gc.collect()
        late = process.memory_info().rss
        history = core.history.used_bytes
    print(
        f"memory: {early / 2**20:.1f} MiB after {rounds // 10} rounds, {late / 2**20:.1f} MiB after {rounds}, "
        f"of which history {history / 2**20:.1f} MiB (its cap here)"
    )


def bench_start(repeats: int = 9) -> None:
    spent, floor = [], []
    for _ in range(repeats):
        for times, command in (
            (spent, [sys.executable, "-m", "gpuflight.cli", "--help"]),
            (floor, [sys.executable, "-c", "import argparse"]),
        ):
            started = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            times.append((time.perf_counter() - started) * 1e3)
    print(
        f"start: gpuflight --help {statistics.median(spent):.0f} ms (goal 150), "
        f"the interpreter with argparse {statistics.median(floor):.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1000)
    parser.add_argument("--connections", type=int, default=2500)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--flat", type=int, default=1000)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    bench_start()
    bench_steady(options.rounds)
    bench_against_psutil(options.processes, options.connections, options.rounds)
    if options.flat:
        bench_memory(options.flat)


if __name__ == "__main__":
    main()
