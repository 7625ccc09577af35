"""What the probe engine costs before any probe does its work.

    python benchmarks/bench_probe_engine.py

On a copy of a real CUDA runtime (nvidia-cuda-runtime of PyPI): symbols read, beside pyelftools; all functions attached
by one link and detached (goals: 50 and 100 ms), beside one perf event each, which is what kernels before 6.6 need.
Memory of a process that does all that, with every other probe of ours loaded too, over one that only has the sources of
a host open (goal: 15 MB), beside bcc.
Reading 100 processes x 50 kernels of a per-CPU map (goal: 1 % of a core once a second), beside a call per key. Draining
a ring buffer, beside libbpf's own consumer with a Python callback.
"""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import statistics
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable

from elftools.elf.elffile import ELFFile

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf import Uprobe, build, features
from gpuflight.sources.bpf.elf import read_elf
from gpuflight.sources.bpf.libbpf import LibbpfBackend
from gpuflight.sources.bpf.library import load_library
from gpuflight.sources.bpf.maps import possible_cpus

CLASSIC = 16
"""Symbols that are attached one by one: all of them would take a minute to detach."""

MEMORY = """
import sys
from gpuflight.sources.open import open_world

def rss_kib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))

world = open_world(probes=sys.argv[1] if sys.argv[1] != "none" else "off")
world.begin_round(1)
world.procfs.processes()
if sys.argv[1] != "none":
    from gpuflight.sources.bpf import Uprobe
    from gpuflight.sources.bpf.elf import read_elf
    from gpuflight.errors import SourceUnavailable
    for name in sys.argv[4:]:
        try:
            world.probes.open(name)
        except SourceUnavailable:
            pass
    probe = world.probes.open("engine", programs=["on_entry"])
    functions = read_elf(sys.argv[2]).functions()
    places = [Uprobe(sys.argv[2], symbol.offset, number) for number, symbol in enumerate(functions)]
    assert not probe.attach_uprobes("on_entry", places).failed
    for number in range(2000):
        probe.update("calls_percpu", number.to_bytes(8, "little"), bytes(8 * int(sys.argv[3])))
    assert len(probe.read("calls_percpu")) == 2000
print(rss_kib())
"""

CALLS = """
import ctypes, sys
call = ctypes.CDLL(sys.argv[1]).gf_call
call.argtypes, call.restype = [ctypes.c_long], None
for _ in range(int(sys.argv[2])):
    call(1)
"""


def median_ms(work: Callable[[], object], times: int = 7) -> float:
    """Wall time (ms)."""
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e3


def with_pyelftools(path: str) -> int:
    """The same symbols as ``read_elf`` gives."""
    with open(path, "rb") as file:
        elf = ELFFile(file)
        loads = [segment for segment in elf.iter_segments() if segment["p_type"] == "PT_LOAD"]
        found = {}
        for symbol in elf.get_section_by_name(".dynsym").iter_symbols():
            if symbol["st_info"]["type"] == "STT_FUNC" and symbol["st_value"]:
                value = symbol["st_value"]
                holder = next(s for s in loads if s["p_vaddr"] <= value < s["p_vaddr"] + s["p_memsz"])
                found[value - holder["p_vaddr"] + holder["p_offset"]] = symbol.name
        return len(found)


def symbols(library: str) -> list[Uprobe]:
    """Every function of the library."""
    ours, theirs = median_ms(lambda: list(read_elf(library).functions())), median_ms(lambda: with_pyelftools(library))
    found = [Uprobe(library, symbol.offset, at) for at, symbol in enumerate(read_elf(library).functions())]
    print(f"symbols of libcudart: {len(found)} in {ours:.2f} ms, pyelftools {theirs:.1f} ms: {theirs / ours:.0f}x")
    return found


def attaching(places: list[Uprobe]) -> None:
    """Wall time of attaching and detaching."""
    started = time.perf_counter()
    loaded = LibbpfBackend().load("engine", programs=["on_entry"])
    print(f"load: {(time.perf_counter() - started) * 1e3:.1f} ms (goal 25)")
    attached, detached = [], []
    for _ in range(7):
        started = time.perf_counter()
        link = loaded.attach_uprobes("on_entry", places)
        attached.append(time.perf_counter() - started)
        assert len(link.attached) == len(places)
        started = time.perf_counter()
        link.close()
        detached.append(time.perf_counter() - started)
    up, down = statistics.median(attached) * 1e3, statistics.median(detached) * 1e3
    loaded.close()
    loaded = LibbpfBackend(multi=False).load("engine", programs=["on_entry"])
    started = time.perf_counter()
    link = loaded.attach_uprobes("on_entry", places[:CLASSIC])
    up_classic = (time.perf_counter() - started) * 1e3 / CLASSIC * len(places)
    assert len(link.attached) == CLASSIC
    started = time.perf_counter()
    link.close()
    for thread in threading.enumerate():
        if thread.name == "gpuflight-detach":
            thread.join()
    down_classic = (time.perf_counter() - started) * 1e3 / CLASSIC * len(places)
    loaded.close()
    print(f"attach all: {up:.1f} ms (goal 50; worst {max(attached) * 1e3:.1f}); one by one {up_classic:.0f} ms")
    print(f"detach all: {down:.1f} ms (goal 100; worst {max(detached) * 1e3:.1f}); one by one {down_classic:.0f} ms")


def memory(library: str) -> None:
    """Resident memory over a host's sources."""

    def resident_mb(backend: str) -> float:
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, backend, library, str(possible_cpus()), *names],
            capture_output=True,
            text=True,
        )
        return int(done.stdout) / 1024 if done.returncode == 0 else float("nan")

    names = [name for name in build.names() if name != "engine"]
    floor = resident_mb("none")
    ours, other = resident_mb("libbpf") - floor, resident_mb("bcc") - floor
    print(
        f"memory of all probes over the core's {floor:.1f} MB: {ours:.1f} MB (goal 15);"
        f" bcc {other:.1f} MB for those that it compiles, and its compiler's"
    )


def reading() -> None:
    """100 processes x 50 kernels once a second."""
    loaded = LibbpfBackend().load("engine", programs=["on_entry"], map_entries={"calls_percpu": 8192})
    value = struct.pack("=Q", 7) * possible_cpus()
    for process in range(100):
        for kernel in range(50):
            loaded.update("calls_percpu", struct.pack("=II", process, kernel), value)
    assert len(loaded.read("calls_percpu")) == 5000
    ours = median_ms(lambda: loaded.read("calls_percpu"))
    opened = loaded._maps["calls_percpu"]  # type: ignore[attr-defined]
    opened._batches = False
    theirs = median_ms(lambda: loaded.read("calls_percpu"), 3)
    loaded.close()
    print(
        f"read 5000 entries: {ours:.2f} ms = {ours / 10:.2f} % of a core once a second (goal 1);"
        f" key by key {theirs:.1f} ms: {theirs / ours:.0f}x"
    )


def draining(folder: str) -> None:
    """Records of 80 bytes from a ring buffer of 8 MiB."""
    source, library = os.path.join(folder, "call.c"), os.path.join(folder, "libcall.so")
    with open(source, "w", encoding="ascii") as file:
        file.write("void gf_call(long a) { volatile long seen = a; (void)seen; }\n")
    subprocess.run(["gcc", "-O0", "-shared", "-fPIC", "-o", library, source], check=True)
    place = next(symbol for symbol in read_elf(library).functions() if symbol.name == "gf_call")
    loaded = LibbpfBackend().load(
        "engine", programs=["on_entry"], map_entries={"ring": 8 << 20}, constants={"ring_above": 1}
    )
    loaded.attach_uprobes("on_entry", [Uprobe(library, place.offset, 1)])
    count = 50_000

    def fill() -> None:
        subprocess.run([sys.executable, "-c", CALLS, library, str(count)], check=True)

    fill()
    loaded.drain("ring")  # memory that is used for the first time costs more than the work
    fill()
    started = time.perf_counter()
    drained = loaded.drain("ring")
    ours = time.perf_counter() - started
    assert len(drained) == count
    del drained

    functions = ctypes.CDLL(load_library()._library._name, use_errno=True)
    callback_type = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    kept: list[bytes] = []

    def hear(_: int, data: int, size: int) -> int:
        kept.append(ctypes.string_at(data, size))
        return 0

    callback = callback_type(hear)
    functions.ring_buffer__new.restype = ctypes.c_void_p
    functions.ring_buffer__new.argtypes = [ctypes.c_int, callback_type, ctypes.c_void_p, ctypes.c_void_p]
    functions.ring_buffer__consume.argtypes = functions.ring_buffer__free.argtypes = [ctypes.c_void_p]
    ring = functions.ring_buffer__new(loaded._maps["ring"].fd, callback, None, None)  # type: ignore[attr-defined]
    fill()
    started = time.perf_counter()
    functions.ring_buffer__consume(ring)
    theirs = time.perf_counter() - started
    functions.ring_buffer__free(ring)
    assert len(kept) == count
    loaded.close()
    print(
        f"drain a ring buffer: {ours / count * 1e9:.0f} ns a record, with a callback {theirs / count * 1e9:.0f} ns:"
        f" {theirs / ours:.1f}x"
    )


def main() -> int:
    """Everything, on this machine."""
    found = glob.glob(f"{sysconfig.get_paths()['purelib']}/nvidia/**/libcudart.so.1[0-9]", recursive=True)
    try:
        LibbpfBackend().available()
        features.require_uprobe_multi()
    except SourceUnavailable as error:
        print(f"not here: {error}")
        return 0
    if not found or shutil.which("gcc") is None:
        print("not here: needs nvidia-cuda-runtime and gcc")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        library = shutil.copy(sorted(found)[0], folder)
        places = symbols(library)
        attaching(places)
        memory(library)
        reading()
        draining(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
