"""What probes of users cost, and what bcc does.

    python benchmarks/bench_user_probes.py

A probe that counts calls and bytes per process, from the same C: compiled by bcc here, or by clang elsewhere (.bpf.o).
CPU time per call of a C loop, beside the program that does nothing, which is what the trap costs (the floor). Memory:
of a process that observes with such a probe, over one without, beside one that imports bcc itself, as its users do. And
the collector's work of a round with 4,000 rows, beside the same rows through bcc's own table (a call per key).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf import ProbeObject, Uprobe
from gpuflight.sources.bpf.bcc_backend import BccBackend
from gpuflight.sources.bpf.bcc_compiler import SOURCES, Compiler
from gpuflight.sources.bpf.elf import read_elf
from gpuflight.sources.bpf.libbpf import LibbpfBackend
from gpuflight.sources.bpf.maps import possible_cpus

CALLS = 100_000
TIMES = 3
LIBRARY = '__attribute__((noinline)) long work(long size) { __asm__ volatile(""); return size + 1; }'
LOOP = """
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
long work(long size);
int main(int argc, char **argv)
{
    long n = atol(argv[1]), sum = 0;
    struct timespec a, b;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
    for (long i = 0; i < n; i++)
        sum += work(i & 1023);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
    printf("%.1f\\n", ((b.tv_sec - a.tv_sec) * 1e9 + b.tv_nsec - a.tv_nsec) / n);
    return sum == 42;
}
"""
PROBE = """
#include "gf.h"
struct sums { __u64 calls; __u64 bytes; };
GF_PERCPU_HASH(work, __u32, struct sums, 8192);
GF_UPROBE(on_work)
{
    __u32 pid = bpf_get_current_pid_tgid() >> 32;
    struct sums *sums = gf_lookup(work, &pid);
    if (!sums) {
        struct sums none = {};
        gf_insert(work, &pid, &none);
        sums = gf_lookup(work, &pid);
        if (!sums)
            return 0;
    }
    sums->calls++;
    sums->bytes += GF_ARG1(ctx);
    return 0;
}
"""
TOML = """
description = "work"
[[attach]]
program = "on_work"
uprobe = "LIBRARY:work"
[[maps]]
name = "work"
entity = "Process"
key = ["u32 pid"]
value = ["u64 calls", "u64 bytes"]
[maps.metrics]
work_per_s = { rate = "calls" }
work_bytes_per_s = { rate = "bytes" }
"""
OBSERVER = """
import sys
from gpuflight.sources.open import open_world
from gpuflight.collectors.user_probes import UserProbeCollector, UserProbesSettings

def rss_mb():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024

world = open_world()
world.begin_round(1)
world.procfs.processes()
if sys.argv[1] != "-":
    collector = UserProbeCollector(UserProbesSettings(folder=sys.argv[1]))
    collector.observe(world)
    assert not collector.notes, collector.notes
print(rss_mb())
"""
WITH_BCC = """
import importlib.util, sys
folder, text, headers = sys.argv[1:]
import os
os.environ["BCC_KERNEL_SOURCE"] = headers
spec = importlib.util.spec_from_file_location("bcc", folder + "/bcc/__init__.py", submodule_search_locations=[folder + "/bcc"])
bcc = importlib.util.module_from_spec(spec)
sys.modules["bcc"] = bcc
spec.loader.exec_module(bcc)
bpf = bcc.BPF(text="BPF_HASH(work, u32, u64, 8192); int on_work(struct pt_regs *ctx) { u32 pid = 1; work.increment(pid); return 0; }")
with open("/proc/self/status") as file:
    print(next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024)
table = bpf["work"]
import time
for number in range(4000):
    table[table.Key(number)] = table.Leaf(number)
began = time.perf_counter()
assert sum(value.value for value in table.values()) == 3999 * 2000
print((time.perf_counter() - began) * 1e3)
"""  # noqa: E501


def main() -> None:
    """Print ratios."""
    reason = why_not()
    if reason:
        print(f"not here: {reason}")
        return
    with tempfile.TemporaryDirectory(prefix="gpuflight-bench-") as name:
        folder = Path(name)
        library, loop = build(folder)
        compiling()
        per_call(folder, library, loop)
        memory(folder, library)
        rounds()


def why_not() -> str:
    """Why nothing can be measured here; empty if it can."""
    try:
        LibbpfBackend().available()
        BccBackend().available()
    except SourceUnavailable as error:
        return str(error)
    return "" if shutil.which("gcc") and shutil.which("clang") else "needs gcc and clang"


def build(folder: Path) -> tuple[str, str]:
    """A library of one function and a program that calls it."""
    (folder / "work.c").write_text(LIBRARY)
    (folder / "loop.c").write_text(LOOP)
    library, loop = str(folder / "libwork.so"), str(folder / "loop")
    subprocess.run(["gcc", "-O0", "-shared", "-fPIC", "-o", library, folder / "work.c"], check=True)
    subprocess.run(["gcc", "-O2", "-o", loop, folder / "loop.c", library, f"-Wl,-rpath,{folder}"], check=True)
    return library, loop


def compiling() -> None:
    """A child that compiles and goes, beside what it leaves."""
    taken, peak = [], 0
    for _ in range(3):
        began = time.perf_counter()
        peak = Compiler().compile(PROBE, "work.c").peak_memory_bytes
        taken.append(time.perf_counter() - began)
    print(f"compile: {statistics.median(taken) * 1e3:.0f} ms, in a child of {peak / 2**20:.0f} MB that is gone then")


def per_call(folder: Path, library: str, loop: str) -> None:
    """ns per call of the C loop."""
    (folder / "probe.c").write_text(PROBE)
    arch = "arm64" if os.uname().machine == "aarch64" else "x86"
    clang = ["clang", "-O2", "-g", "-target", "bpf", f"-D__TARGET_ARCH_{arch}", "-I", str(SOURCES)]
    subprocess.run([*clang, "-c", "probe.c", "-o", "probe.bpf.o"], cwd=folder, check=True)
    content = (folder / "probe.bpf.o").read_bytes()
    makers = {
        "none": None,
        "nothing": lambda: (LibbpfBackend().load("engine", programs=["on_nothing"]), "on_nothing"),
        "bcc": lambda: (BccBackend().load_source("work", PROBE, "work.c"), "on_work"),
        "clang": lambda: (LibbpfBackend().load_content("work", content), "on_work"),
    }
    offset = next(symbol.offset for symbol in read_elf(library).functions() if symbol.name == "work")
    found: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(TIMES):  # in turn, so that what else the machine does falls on all
        for name, make in makers.items():
            probe: ProbeObject | None = None
            if make is not None:
                probe, program = make()
                assert not probe.attach_uprobes(program, [Uprobe(library, offset)]).failed
            done = subprocess.run([loop, str(CALLS)], capture_output=True, text=True, check=True)
            found[name].append(float(done.stdout))
            if probe is not None:
                probe.close()
    ns = {name: min(values) for name, values in found.items()}
    print(f"a call: {ns['none']:.1f} ns; with the program that does nothing {ns['nothing']:.0f} ns (floor)")
    for name, words in (("bcc", "counted, compiled by bcc"), ("clang", "counted, compiled by clang")):
        print(f"  {words}: {ns[name]:.0f} ns, {ns[name] / ns['nothing']:.2f}x the floor")


def memory(folder: Path, library: str) -> None:
    """Resident memory of whole processes."""
    probes = folder / "probes"
    probes.mkdir(mode=0o755)
    for name, text in (("work.c", PROBE), ("work.toml", TOML.replace("LIBRARY", library))):
        (probes / name).write_text(text)
        (probes / name).chmod(0o644)

    def resident_mb(*arguments: str) -> float:
        done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        return float(done.stdout.split()[0])

    without, with_probe = resident_mb("-c", OBSERVER, "-"), resident_mb("-c", OBSERVER, str(probes))
    bcc = resident_mb(*bcc_script())
    print(f"memory: {with_probe - without:.1f} MB over the sources; a program that imports bcc {bcc:.0f} MB")


def bcc_script() -> list[str]:
    """A user of bcc as its documentation shows it."""
    folder = next(known for known in Compiler()._folders if os.path.exists(f"{known}/bcc"))
    return ["-c", WITH_BCC, folder, "", str(SOURCES.parent / "bcc_include")]


def rounds() -> None:
    """Reading and decoding 4,000 rows."""
    from gpuflight.collectors.user_probe_rows import Rows, metrics_of
    from gpuflight.sources.bpf.user_probe_spec import parse_spec

    spec = parse_spec(TOML, "work.toml").maps[0]
    probe = BccBackend().load_source("work", PROBE, "work.c")
    shape = probe.shapes()["work"]
    for number in range(4000):
        probe.update("work", number.to_bytes(4, "little"), number.to_bytes(8, "little") * 2 * possible_cpus())
    rows = Rows(spec, shape)
    taken = []
    for turn in range(7):
        began = time.process_time()
        for row in rows.read(probe.read("work"), float(turn)):
            metrics_of(spec, [row], rows.elapsed_s)
        taken.append(time.process_time() - began)
    probe.close()
    ours = statistics.median(taken) * 1e3
    with contextlib.suppress(IndexError):
        done = subprocess.run([sys.executable, *bcc_script()], capture_output=True, text=True, check=True)
        theirs = float(done.stdout.split()[1])
        print(f"4,000 rows to metrics: {ours:.1f} ms of CPU; only read, through bcc's table {theirs:.1f} ms")


if __name__ == "__main__":
    main()
