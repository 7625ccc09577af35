"""What the programs in the kernel cost those that they watch.

    python benchmarks/bench_kernel_probes.py [--rounds 7]

Two C programs do as little as they can but what is watched. One pair of processes on one CPU passes a byte back and
forth through pipes: each byte is a system call and a switch. Another echoes 64 bytes over loopback TCP: each message is
a send and a receive. They run with nothing attached (the floor), with empty programs on the same events (what being
called costs), with ours, in turns; the fastest of each is printed as ns added per event, and as ratio to the empty
program. The kernel counts the programs' time meanwhile, as it does in the product. Then: reading all threads by the
iterator beside reading the same from /proc, and the list of 1000 processes with and without the iterator's marks. Needs
root (or CAP_BPF and CAP_PERFMON) and a C compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.libbpf import LibbpfBackend
from gpuflight.sources.open import open_world

PIPES = r"""
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
int main(int argc, char **argv) {
    long n = atol(argv[1]);
    int a[2], b[2];
    char c = 0;
    cpu_set_t one;
    struct timespec t0, t1;
    CPU_ZERO(&one); CPU_SET(0, &one); sched_setaffinity(0, sizeof(one), &one);
    if (pipe(a) || pipe(b)) return 1;
    if (!fork()) {
        close(a[1]); close(b[0]);
        while (read(a[0], &c, 1) == 1 && write(b[1], &c, 1) == 1) {}
        _exit(0);
    }
    close(a[0]); close(b[1]);
    clock_gettime(CLOCK_MONOTONIC, &t0);
    for (long i = 0; i < n; i++) { if (write(a[1], &c, 1) != 1 || read(b[0], &c, 1) != 1) return 1; }
    clock_gettime(CLOCK_MONOTONIC, &t1);
    printf("%f\n", ((t1.tv_sec - t0.tv_sec) * 1e9 + (t1.tv_nsec - t0.tv_nsec)) / (2 * n));
}
"""
ECHO = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
int main(int argc, char **argv) {
    long n = atol(argv[1]);
    char buffer[64] = {0};
    int one = 1, l = socket(AF_INET, SOCK_STREAM, 0), c;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof(at);
    cpu_set_t cpu;
    struct timespec t0, t1;
    CPU_ZERO(&cpu); CPU_SET(0, &cpu); sched_setaffinity(0, sizeof(cpu), &cpu);
    if (bind(l, (void *)&at, size) || listen(l, 1) || getsockname(l, (void *)&at, &size)) return 1;
    if (!fork()) {
        c = accept(l, 0, 0); close(l);
        setsockopt(c, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
        while (recv(c, buffer, 64, MSG_WAITALL) == 64) if (send(c, buffer, 64, 0) != 64) break;
        _exit(0);
    }
    c = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(c, (void *)&at, size)) return 1;
    setsockopt(c, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    clock_gettime(CLOCK_MONOTONIC, &t0);
    for (long i = 0; i < n; i++) if (send(c, buffer, 64, 0) != 64 || recv(c, buffer, 64, MSG_WAITALL) != 64) return 1;
    clock_gettime(CLOCK_MONOTONIC, &t1);
    printf("%f\n", ((t1.tv_sec - t0.tv_sec) * 1e9 + (t1.tv_nsec - t0.tv_nsec)) / (4 * n));
}
"""
MANY = r"""
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int argc, char **argv) {
    for (int i = 0; i < atoi(argv[1]); i++) if (!fork()) { pause(); _exit(0); }
    printf("ready\n"); fflush(stdout); getchar();
    signal(SIGTERM, SIG_IGN); kill(0, SIGTERM);
    return 0;
}
"""
SETUPS: dict[str, list[tuple[str, str, Sequence[str], bool]]] = {
    "pipes": [
        ("sched_switch, empty program", "sched", ["on_switch_empty"], True),
        ("kernel_sched latency (switch and wakeup)", "sched", ["on_switch", "on_wakeup", "on_wakeup_new"], False),
        ("sys_exit, empty program", "ipc", ["on_return_empty"], True),
        ("kernel_ipc system_calls", "ipc", ["on_return"], False),
        ("kernel_net accept_latency", "net", ["on_accept"], False),
    ],
    "echo": [
        ("socket events, empty programs", "net", ["on_send_empty", "on_receive_empty"], True),
        ("kernel_net", "net", ["on_send", "on_receive", "on_state"], False),
    ],
}
TURNS = {"pipes": 60_000, "echo": 25_000}
EVENTS = {"pipes": "system call", "echo": "send or receive"}


def compiled(folder: str, name: str, source: str) -> str:
    path = os.path.join(folder, name)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        sys.exit("a C compiler is needed (Debian: apt install gcc)")
    subprocess.run([compiler, "-O2", "-x", "c", "-", "-o", path], input=source, text=True, check=True)
    return path


def run(program: str, turns: int) -> float:
    """ns per event."""
    return float(subprocess.run([program, str(turns)], check=True, capture_output=True, text=True).stdout)


def measure(backend: LibbpfBackend, program: str, which: str, rounds: int) -> dict[str, float]:
    """Least ns per event of each setup, taken in turns so that a slow moment of the machine meets all of them."""
    taken: dict[str, list[float]] = {}
    own: dict[str, float] = {}
    for _ in range(rounds):
        taken.setdefault("nothing attached", []).append(run(program, TURNS[which]))
        for label, name, programs, _empty in SETUPS[which]:
            loaded = backend.load(name, programs=programs)
            try:
                for one in programs:
                    loaded.attach(one)
                taken.setdefault(label, []).append(run(program, TURNS[which]))
                costs = [cost for cost in loaded.costs() if cost.run_count]
                own[label] = sum(cost.run_time_ns or 0 for cost in costs) / max(
                    1, sum(cost.run_count or 0 for cost in costs)
                )
            finally:
                loaded.close()
    floor = min(taken["nothing attached"])
    print(f"{which}: {floor:.0f} ns per {EVENTS[which]} with nothing attached")
    added: dict[str, float] = {}
    empty = 0.0
    for label, _, _, is_empty in SETUPS[which]:
        added[label] = min(taken[label]) - floor
        if is_empty:
            empty = max(added[label], 1.0)
        ratio = "" if is_empty else f", {added[label] / empty:.1f}x the empty one"
        share = 100 * added[label] / floor
        print(
            f"  {label}: +{added[label]:.0f} ns ({share:.1f} %){ratio}; the kernel counts {own[label]:.0f} ns per run"
        )
    return added


def iterate(backend: LibbpfBackend, threads: int = 2000) -> None:
    """All threads of the machine, and ``threads`` more, by the iterator and by /proc."""
    sleeper = (
        "import threading, sys\nthreading.stack_size(65536)\nwait = threading.Event()\n"
        f"for _ in range({threads}): threading.Thread(target=wait.wait, daemon=True).start()\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", sleeper], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    loaded = backend.load("tasks", programs=["each_thread"])
    try:
        assert child.stdout is not None
        child.stdout.readline()
        link = loaded.attach("each_thread")
        taken: dict[str, list[float]] = {"iterator": [], "/proc (schedstat and status of each)": []}
        for _ in range(5):
            began = time.perf_counter()
            rows = len(loaded.run_iter(link)) // 72
            taken["iterator"].append(time.perf_counter() - began)
            began = time.perf_counter()
            count = 0
            for pid in filter(str.isdecimal, os.listdir("/proc")):
                try:
                    for tid in os.listdir(f"/proc/{pid}/task"):
                        for name in ("schedstat", "status"):
                            descriptor = os.open(f"/proc/{pid}/task/{tid}/{name}", os.O_RDONLY)
                            os.read(descriptor, 4096)
                            os.close(descriptor)
                        count += 1
                except OSError:
                    continue
            taken["/proc (schedstat and status of each)"].append(time.perf_counter() - began)
        medians = {label: statistics.median(times) for label, times in taken.items()}
        print(f"threads: {rows} by the iterator, {count} in /proc with those of the kernel")
        for label, seconds in medians.items():
            print(f"  {label}: {seconds * 1e3:.2f} ms")
        print(f"  ratio: {1 / taken_ratio(medians):.0f}x")
    finally:
        loaded.close()
        child.kill()
        child.communicate()


def taken_ratio(medians: dict[str, float]) -> float:
    """Of the first of two to the second."""
    first, second = medians.values()
    return first / second


def list_processes(program: str, processes: int = 1000, rounds: int = 15) -> None:
    """ProcFs.processes() of a host where most sleep: every record read, and those that the marks say moved."""
    child = subprocess.Popen(
        [program, str(processes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    worlds = {"every record read": open_world(probes="off"), "with the iterator's marks": open_world()}
    taken: dict[str, list[float]] = {}
    try:
        for number in range(1, rounds + 1):
            for label, world in worlds.items():
                world.begin_round(number)
                began = time.perf_counter()
                count = len(world.procfs.processes())
                if number > 3:  # the second round loads the iterator, the third has two readings of it
                    taken.setdefault(label, []).append(time.perf_counter() - began)
        medians = {label: statistics.median(times) for label, times in taken.items()}
        print(f"process list: {count} processes")
        for label, seconds in medians.items():
            print(f"  {label}: {seconds * 1e3:.2f} ms")
        print(f"  ratio: {taken_ratio(medians):.1f}x")
    finally:
        child.stdin.close()
        child.wait()
        for world in worlds.values():
            world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7, help="repetitions of each measurement")
    arguments = parser.parse_args()
    backend = LibbpfBackend()
    try:
        backend.available()
    except SourceUnavailable as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory() as folder:
        for which, source in (("pipes", PIPES), ("echo", ECHO)):
            measure(backend, compiled(folder, which, source), which, arguments.rounds)
        list_processes(compiled(folder, "many", MANY))
    iterate(backend)


if __name__ == "__main__":
    main()
