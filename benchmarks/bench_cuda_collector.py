"""What finding CUDA in memory, and making a picture of what the probe read, cost per round. No GPU and no rights
needed.

    python benchmarks/bench_cuda_collector.py [--processes 1000] [--programs 100] [--kernels 50] [--rounds 8]

First ``processes`` processes that all run (each with 60 mapped files, none of them CUDA's): the first round, which
reads every memory map, and the rounds after it, beside the floor, which is reading the process list itself. Goal: at
most a few ms more. Then readings of ``programs`` programs with ``kernels`` kernels each, all of which are launched in
every round: time from the rows to entities and edges, beside the floor, which is making as many entities and edges of
nothing. CPU time of this process; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from gpuflight.collectors.cuda_entities import Bounds, Left, Shown, add_process
from gpuflight.collectors.cuda_kernels import Kernels
from gpuflight.collectors.cuda_places import Place
from gpuflight.collectors.cuda_rows import Counters, by_process
from gpuflight.graph import edges, nodes
from gpuflight.sources.cuda_libraries import CudaLibraries
from gpuflight.sources.cuda_probe.rows import CudaRows, DeviceRow, LaunchRow, NameRow, ProcessRow, StreamRow
from gpuflight.sources.open import open_world

SECOND = 1_000_000_000
STREAMS = 4


def make_tree(root: Path, processes: int) -> None:
    """A /proc whose processes map 60 files each."""
    library = root / "usr/lib"
    library.mkdir(parents=True)
    plain = [f"{number:x}" for number in range(60)]
    for name in plain:
        (library / name).write_bytes(b"no library\n")
    for pid in range(1000, 1000 + processes):
        folder = root / f"proc/{pid}"
        folder.mkdir(parents=True)
        (folder / "root").symlink_to(root)
        lines = [
            f"7f{number:02x}00-7f{number:02x}10 {rights} 00000000 103:01 {100 + number} /usr/lib/{name}\n"
            for number, name in enumerate(plain)
            for rights in ("r--p", "r-xp", "r--p", "rw-p")
        ]
        (folder / "maps").write_text("".join(lines))
    write_stats(root, processes, 0)


def write_stats(root: Path, processes: int, turn: int) -> None:
    """Every process has used some CPU; those whose number ends with 7 have another size too."""
    for pid in range(1000, 1000 + processes):
        size = 10_000_000 + (turn * 4096 if pid % 10 == 7 else 0)
        fields = ["S", "1", "1", "1", "0", "-1", "0", *"0000", str(turn), *["0"] * 7, "5", str(size), *["0"] * 40]
        (root / f"proc/{pid}/stat").write_text(f"{pid} (python3) {' '.join(fields)}\n")


def discovery(processes: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_tree(root, processes)
        world = open_world(folder)
        libraries = CudaLibraries(world.fs, world.procfs, world.tape)
        floor, ours = [], []
        for turn in range(rounds + 1):
            write_stats(root, processes, turn)
            world.begin_round(turn + 1)
            begun = time.process_time()
            world.procfs.processes()
            between = time.process_time()
            libraries.scan()
            floor.append(between - begun)
            ours.append(time.process_time() - between)
        print(f"looking for CUDA in {processes} processes that run")
        print(f"  process list (floor)      {statistics.median(floor[1:]) * 1e3:8.2f} ms a round")
        print(f"  memory maps, first round  {ours[0] * 1e3:8.2f} ms")
        print(f"  memory maps, later rounds {statistics.median(ours[1:]) * 1e3:8.2f} ms a round")
        print(f"  ratio to the floor        {statistics.median(ours[1:]) / statistics.median(floor[1:]):8.2f}")


def reading(turn: int, programs: int, kernels: int) -> CudaRows:
    """One in which every kernel was launched 100 times more than in the one before."""
    found = CudaRows((turn + 1) * SECOND)
    for pid in range(1000, 1000 + programs):
        found.processes.append(
            ProcessRow(pid, 1, 0, True, False, 1, 100 * kernels * turn, 0, 0, 0, 0, 0, 0, 0)
        )  # fmt: skip
        found.devices.append(DeviceRow(pid, 0, False, turn * SECOND // 2, 0, turn, turn * SECOND, 0))
        for stream in range(STREAMS):
            found.streams.append(StreamRow(pid, 0, 4096 + stream, turn * SECOND // 2, 0, turn, 1, True, False))
        for kernel in range(kernels):
            place = (pid, 0, False, 4096 + kernel % STREAMS, 1_000_000 + 16 * kernel, "runtime")
            count = 100 * turn
            shape = (count * 4096, count * 16, 4096, 256, 64, (16, 1, 1), (256, 1, 1))
            found.launches.append(LaunchRow(*place, count, *shape, 1, turn * SECOND))  # type: ignore[arg-type]
            if turn == 1:
                name = f"_ZN2at6native{len(str(kernel)) + 6}kernel{kernel}EPfi"
                found.names.append(NameRow(pid, 1_000_000 + 16 * kernel, name, False))
    return found


def picture(programs: int, kernels: int, rounds: int) -> None:
    counters, known = Counters(), Kernels()
    gpu = nodes.GPU(uuid="GPU-1")
    ours, floor, elements = [], [], 0
    for turn in range(1, rounds + 2):
        rows = reading(turn, programs, kernels)
        begun = time.process_time()
        counters.begin(rows.time_ns)
        known.names.learn(rows.names, rows.aliases)
        made = []
        for pid, of_pid in by_process(rows).items():
            shown = Shown(pid, 5, f"Process(pid={pid},start=5)", of_pid, {0: Place(gpu)}, {gpu.id: 16_896})
            made.append(add_process(shown, counters, known, Bounds(100, 32), Left()))
        between = time.process_time()
        elements = sum(len(one.kernels) + len(one.kernel_edges) + len(one.nodes) + len(one.edges) + 1 for one in made)
        begun_floor = time.process_time()
        plain: list[Any] = []
        for one in made:
            for kernel in one.kernels:
                plain.append(
                    nodes.Kernel(process="Process(pid=1,start=5)", name=kernel.label, metrics={"launches_count": 1})
                )
            plain += [edges.Launch(edge.source, edge.target, {}, {"launches_per_s": 1}) for edge in one.kernel_edges]
        ours.append(between - begun)
        floor.append(time.process_time() - begun_floor)
    mine, least = statistics.median(ours[1:]), statistics.median(floor[1:])
    print(f"picture of {programs} programs with {kernels} kernels each: {elements} entities and edges, all of them new")
    print(f"  as many of nothing (floor) {least * 1e3:8.2f} ms a round")
    print(f"  ours                       {mine * 1e3:8.2f} ms a round")
    print(f"  ratio to the floor         {mine / least:8.2f}")
    print(f"  of a core, a round each 5 s {mine / 5 * 100:7.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1000)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--kernels", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    print(f"{os.cpu_count()} CPUs")
    discovery(given.processes, given.rounds)
    picture(given.programs, given.kernels, given.rounds)


if __name__ == "__main__":
    main()
