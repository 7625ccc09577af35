"""What the CUDA probe does not see, or sees in part: one reason and one hint each, with how often it was met."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpuflight.collectors.cuda_watch import CudaWatch
from gpuflight.sources.cuda_libraries import CudaScan

if TYPE_CHECKING:
    from gpuflight.sources.cuda_probe.rows import CudaRows

Limit = tuple[str, str, int]
"""(reason, hint, count); a count of 0 is no limit."""

IDLE_ROUNDS = 2
"""Rounds that a library may be hooked without a call before it is told."""


def limits(
    scan: CudaScan, watch: CudaWatch, reading: CudaRows, heard: set[int], on_gpu: set[int], budget_per_s: float
) -> Iterator[Limit]:
    """Everything that limits this round. ``heard``: processes with rows; ``on_gpu``: those that NVML sees on a GPU."""
    yield from _memory(scan, on_gpu)
    yield from _layers(scan)
    yield (
        f"processes launch more than {budget_per_s:,.0f} kernels per s: launches are watched in some rounds only and"
        " estimated in between; spans of work are not told",
        "raise collectors.cuda_probes.budget_launches_per_s",
        sum(watch.share(process) < 1 for process in scan.processes.values()),
    )
    yield (
        "launches at the driver are looked at in one round of 12, since all of them were the runtime's own",
        "set collectors.cuda_probes.driver to always, if programs launch past their runtime (Triton, JAX)",
        sum(
            hooked.layer == "driver" and hooked.paused and not watch.is_over(hooked) for hooked in watch.hooked.values()
        ),
    )
    yield from watch.refusals()
    yield from _never_called(scan, watch, reading, heard, on_gpu)
    probe = watch.probe
    if probe is not None:
        if probe.why_classic:
            yield f"functions are hooked one by one: {probe.why_classic}", "", 1
        for program, why in probe.without.items():
            yield f"the hook {program} is missing: {why}", "ends of processes are found in /proc instead", 1


def _memory(scan: CudaScan, on_gpu: set[int]) -> Iterator[Limit]:
    """Of looking into the memory of processes."""
    yield (
        "the memory of some processes may not be looked into, so that their CUDA is not seen",
        "run as root or grant CAP_SYS_PTRACE",
        scan.unreadable,
    )
    yield "processes and files wait for a later round to be looked into", "", scan.pending
    yield (
        "CUDA libraries were replaced on disk while programs use the old ones, which cannot be opened",
        "restart these programs, or run gpuflight with CAP_SYS_ADMIN",
        scan.replaced,
    )
    yield (
        "processes that NVML sees on a GPU have no CUDA library with symbols in their memory",
        "they may use Vulkan, OpenCL or a copy of CUDA without symbols",
        len(on_gpu - set(scan.processes)),
    )


def _layers(scan: CudaScan) -> Iterator[Limit]:
    """Of how programs are linked to CUDA."""
    libraries = scan.libraries
    static = hidden = several = 0
    for process in scan.processes.values():
        own = [libraries[key] for key in process.libraries]
        static += any(library.static for library in own)
        hidden += process.hidden
        several += sum("runtime" in library.layers for library in own) > 1
    yield (
        "programs have a CUDA runtime linked into them: its functions are found by the symbols for debuggers",
        "",
        static,
    )
    yield (
        "programs use the CUDA driver without a runtime that has symbols (none, or one that was stripped): they are"
        " watched at the driver",
        "link to libcudart.so, or do not strip, to see their runtime calls",
        hidden,
    )
    yield (
        "programs have several CUDA runtimes in their memory: calls from one to another would count twice",
        "see cuda_libraries of the processes",
        several,
    )


def _never_called(
    scan: CudaScan, watch: CudaWatch, reading: CudaRows, heard: set[int], on_gpu: set[int]
) -> Iterator[Limit]:
    """Libraries that were hooked and never called by processes that do use a GPU."""
    for hooked in watch.hooked.values():
        if hooked.attachment is None or hooked.rounds < IDLE_ROUNDS or hooked.layer in ("libc", "nccl"):
            continue
        if hooked.paused or reading.hits.get(hooked.attachment.number, 0):
            continue
        users = [pid for pid, process in scan.processes.items() if hooked in watch.of(process)]
        yield (
            f"{hooked.library.path} was hooked and never called, though its processes use a GPU",
            "they may wait, or call another copy of it",
            sum(pid in on_gpu and pid not in heard for pid in users),
        )
