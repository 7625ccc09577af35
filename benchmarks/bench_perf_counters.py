"""What the CPU's counters cost: opening them, reading them each round, and every switch of a thread that is counted.

    python benchmarks/bench_perf_counters.py [--processes 8] [--threads 50] [--rounds 15] [--switches 20000]

1. Opening the groups of P processes of T threads, beside the bare system calls. It happens once per process.
2. One look at all of them, beside bare read() calls of the same descriptors. Goal: at most 3 times these.
3. The collector's whole round, as a share of a core at an interval of 5 s. Goal: at most 0.2 %.
4. Two processes that wake each other on one CPU, with and without counters: ns per switch of a thread. It is paid by
   the programs that are counted.

Where the CPU has no counters (most virtual machines) four software events stand in for them, and 4. says only what the
kernel's own part costs: setting the registers of the CPU comes on top.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from gpuflight.collectors import perf_counters
from gpuflight.collectors.perf_counters import PerfCounters, PerfCountersSettings
from gpuflight.collectors.perf_events_choice import CYCLES, INSTRUCTIONS, MISSES, READS, event_sets
from gpuflight.graph import nodes
from gpuflight.sources.bpf.syscalls import perf_event_open
from gpuflight.sources.open import open_world
from gpuflight.sources.perf_events import SOFTWARE, Event, EventSet, PerfEvents, Target

STAND_IN = EventSet(
    "software events",
    tuple(Event(name, SOFTWARE, n) for name, n in ((READS, 2), (MISSES, 5), (INSTRUCTIONS, 3), (CYCLES, 4))),
)
INTERVAL_S = 5.0

THREADS = """
import os, sys, threading, time
device = open(sys.argv[2], "w")
for _ in range(int(sys.argv[1]) - 1):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
while os.getppid() == int(sys.argv[3]):
    end = time.thread_time() + 0.0002
    while time.thread_time() < end:
        pass
    time.sleep(0.02)
"""

PING_PONG = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
there, back = os.pipe(), os.pipe()
other = os.fork()
if not other:
    while os.read(there[0], 1):
        os.write(back[1], b"x")
    os._exit(0)
os.close(there[0])
print(other, flush=True)
for line in sys.stdin:
    began = time.monotonic_ns()
    for _ in range(int(line) // 2):
        os.write(there[1], b"x")
        os.read(back[0], 1)
    print(time.monotonic_ns() - began, flush=True)
"""


def cpu_ms(work: Callable[[], Any]) -> float:
    """CPU time of one call, in ms."""
    gc.collect()
    began = time.process_time_ns()
    work()
    return (time.process_time_ns() - began) / 1e6


def tids(pid: int) -> tuple[int, ...]:
    return tuple(sorted(int(name) for name in os.listdir(f"/proc/{pid}/task")))


def best_set() -> list[EventSet]:
    """What this CPU counts; software events where it counts nothing."""
    world = open_world()
    sets, source = event_sets(world.procfs.cpu_info(), instructions=True), PerfEvents()
    found = source.count(sets, [Target("me", (os.getpid(),))], descriptors_at_most=8, threads_at_most=1)
    source.close()
    world.close()
    return [STAND_IN] if found.unsupported else [each for each in sets if each.name == found.set]


def count(source: PerfEvents, sets: list[EventSet], targets: list[Target]) -> Any:
    return source.count(sets, targets, descriptors_at_most=100_000, threads_at_most=10_000)


def bench_source(sets: list[EventSet], pids: list[int], rounds: int) -> None:
    targets = [Target(f"Process(pid={pid},start=1)", tids(pid)) for pid in pids]
    threads = sum(len(target.tids) for target in targets)
    opening, bare_opening, reading, bare_reading, closing = [], [], [], [], []
    first = PerfEvents()
    count(first, sets, targets[:1])  # the first event of all makes the kernel patch its own code; kept open for that
    for _ in range(max(3, rounds // 3)):
        source = PerfEvents()
        opening.append(cpu_ms(lambda s=source: count(s, sets, targets)))  # type: ignore[misc]
        again = [Target(target.id, ()) for target in targets]
        answer = count(source, sets, again)
        assert sum(len(each.tids) for each in answer.processes.values()) == threads, "not all could be opened"
        leaders = [group[0] for each in source._processes.values() for group in each.groups.values()]
        size = 8 * (3 + len(answer.events))
        for _ in range(rounds):
            reading.append(cpu_ms(lambda s=source, a=again: count(s, sets, a)))  # type: ignore[misc]
            bare_reading.append(cpu_ms(lambda fds=leaders, n=size: [os.read(fd, n) for fd in fds]))  # type: ignore[misc]
        attrs = source._attrs
        closing.append(cpu_ms(source.close))
        opened: list[int] = []

        def bare(attrs: Any = attrs, opened: list[int] = opened) -> None:
            for target in targets:
                for tid in target.tids:
                    leader = -1
                    for attr in attrs:
                        fd = perf_event_open(attr, tid, group_fd=leader)
                        leader = fd if leader == -1 else leader
                        opened.append(fd)

        bare_opening.append(cpu_ms(bare))
        for fd in opened:
            os.close(fd)
    first.close()
    opens, reads = statistics.median(opening), statistics.median(reading)
    bare_opens, bare_reads = statistics.median(bare_opening), statistics.median(bare_reading)
    print(f"{len(pids)} processes, {threads} threads, {sets[0].name}: {len(sets[0].events) * threads} descriptors")
    print(
        f"  open: {opens:.1f} ms in all, {opens / len(pids):.2f} ms per process; bare system calls {bare_opens:.1f} ms"
        f" ({opens / bare_opens:.2f}x); close {statistics.median(closing):.1f} ms"
    )
    print(
        f"  one look: {reads:.2f} ms, {reads / threads * 1e3:.1f} us per thread; bare read() calls {bare_reads:.2f} ms"
        f" ({reads / bare_reads:.2f}x, goal 3)"
    )


def bench_collector(sets: list[EventSet], pids: list[int], device: str, rounds: int) -> None:
    """The collector on these processes, taken for such with a GPU; the process list and descriptors are read before,
    as other collectors read them anyway."""
    perf_counters.event_sets = lambda cpu, instructions: sets  # type: ignore[assignment]
    perf_counters.ACCELERATORS = (device,)
    world = open_world()
    collector = PerfCounters(PerfCountersSettings(watch=True, max_threads=10_000, max_fds=100_000))
    spent, seen = [], 0
    for number in range(1, rounds + 3):
        world.begin_round(number)
        every = [nodes.Process(pid=stat.pid, start=stat.start) for stat in world.procfs.processes().values()]
        world.procfs.fds()

        def work(every: list[Any] = every) -> None:
            nonlocal seen
            collector.observe(world)
            seen = len(collector.expand(every).nodes)

        spent.append(cpu_ms(work))
        time.sleep(0.05)
    collector.close()
    world.close()
    assert seen >= len(pids), f"{seen} of {len(pids)} processes have figures"
    steady = statistics.median(spent[2:])
    print(
        f"  collector: first round {spent[0]:.1f} ms, then {steady:.2f} ms:"
        f" {steady / INTERVAL_S / 10:.3f} % of a core every {INTERVAL_S:g} s (goal 0.2 %)"
    )


def bench_switches(sets: list[EventSet], switches: int, rounds: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-I", "-c", PING_PONG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None and program.stdout is not None

        def run() -> float:
            program.stdin.write(f"{switches}\n")  # type: ignore[union-attr]
            program.stdin.flush()  # type: ignore[union-attr]
            return int(program.stdout.readline()) / switches  # type: ignore[union-attr]

        pair = [program.pid, int(program.stdout.readline())]
        run()
        without, counted = [], []
        for _ in range(rounds):
            without.append(run())
            source = PerfEvents()
            count(source, sets, [Target(f"Process(pid={pid},start=1)", (pid,)) for pid in pair])
            counted.append(run())
            source.close()
        program.stdin.close()
    added = statistics.median(a - b for a, b in zip(counted, without, strict=True))
    print(
        f"  per switch of a counted thread: {statistics.median(without):.0f} ns without, {added:+.0f} ns with:"
        f" {added / 1e7 * 1000:.3f} % of a core at 1000 switches per s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--switches", type=int, default=20_000)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sets = best_set()
    device = f"/dev/shm/gpuflight-bench-{os.getpid()}"
    command = [sys.executable, "-I", "-c", THREADS, str(options.threads), device, str(os.getpid())]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(options.processes)]
    try:
        for process in running:
            assert process.stdout is not None and process.stdout.readline()
        pids = [process.pid for process in running]
        bench_source(sets, pids, options.rounds)
        bench_collector(sets, pids, device, options.rounds)
        bench_switches(sets, options.switches, options.rounds)
    finally:
        for process in running:
            process.kill()
            process.wait()
        os.unlink(device)


if __name__ == "__main__":
    main()
