"""What a process uses of a GPU, by the formulas of Datadog's GPU probe (specs/cuda-probes.md §1).

Launches and waits say when a process had work on a GPU, and how much of it a launch can keep busy at best; so these are
upper bounds of what was really used. Several processes of one GPU can exceed what it has: then all are scaled down.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from msgspec import Struct


class StreamWork(Struct, gc=False):
    """One stream over a window: ``span_ns`` of it had work, in launches of ``threads_mean`` threads."""

    span_ns: int
    threads_mean: float


def cores_used(streams: Iterable[StreamWork], cores: int, window_ns: int) -> float:
    """Σ(span × min(mean threads, cores)) / window: CUDA cores that were at work on average. A thread runs on a core."""
    return sum(work.span_ns * min(work.threads_mean, cores) for work in streams) / window_ns


def active_pct(union_ns: int, window_ns: int) -> float:
    """Share of a window in which some stream had work (``union_ns``), %."""
    return min(100.0, 100.0 * union_ns / window_ns)


class Use(Struct, kw_only=True):
    """What one process in one container uses of one GPU; None is unknown. ``scaled_by``: what its cores and memory were
    multiplied with, since those of all processes of the GPU exceeded it; 1 for not at all."""

    process: str
    gpu: str
    container: str = ""
    cores: float | None = None
    active_pct: float | None = None
    held_bytes: float | None = None
    peak_bytes: float | None = None
    cores_scaled_by: float = 1.0
    memory_scaled_by: float = 1.0


class Capacity(Struct, gc=False):
    """What a GPU (or a MIG device) has; None is unknown."""

    cores: int | None = None
    memory_bytes: int | None = None


def fit(uses: Iterable[Use], capacities: Mapping[str, Capacity]) -> None:
    """Scale down, in place, the uses of every GPU whose sum is more than it has: all by the same factor."""
    by_gpu: dict[str, list[Use]] = defaultdict(list)
    for use in uses:
        by_gpu[use.gpu].append(use)
    for gpu, members in by_gpu.items():
        capacity = capacities.get(gpu, Capacity())
        cores = sum(use.cores for use in members if use.cores is not None)
        if capacity.cores is not None and cores > capacity.cores:
            for use in members:
                if use.cores is not None:
                    use.cores_scaled_by = capacity.cores / cores
                    use.cores *= use.cores_scaled_by
        held = sum(use.held_bytes for use in members if use.held_bytes is not None)
        if capacity.memory_bytes is not None and held > capacity.memory_bytes:
            for use in members:
                if use.held_bytes is not None:
                    use.memory_scaled_by = capacity.memory_bytes / held
                    use.held_bytes *= use.memory_scaled_by
