"""The memory that a process holds, by who allocated it: the largest groups, as people read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gpuflight.graph.units import human
from gpuflight.sources.cuda_probe.rows import AllocationRow

FRAMES = 6
"""Functions of a stack that are shown, innermost first."""

Resolve = Callable[[int, Sequence[int]], list[str]]
"""(pid, addresses) → their names."""


def largest_groups(
    allocations: Iterable[AllocationRow], stacks: Mapping[int, tuple[int, ...]], most: int, resolve: Resolve
) -> dict[int, list[str]]:
    """By pid: ``2 GiB in 3 pieces by cudaMalloc (device), called by a+0x5 (app) < b+0x9 (app)``, the largest first.

    Only the stacks of what is shown are resolved.
    """
    groups: dict[int, dict[tuple[str, str, tuple[int, ...]], tuple[int, int]]] = {}
    for row in allocations:
        frames = stacks.get(row.stack_id, (row.caller,) if row.caller else ())[: FRAMES + 1]
        of_pid = groups.setdefault(row.pid, {})
        count, size = of_pid.get((row.api, row.kind, frames), (0, 0))
        of_pid[row.api, row.kind, frames] = count + 1, size + row.size_bytes
    found = {}
    for pid, of_pid in groups.items():
        ordered = sorted(of_pid.items(), key=lambda item: (-item[1][1], item[0]))[:most]
        found[pid] = [_text(pid, *group, *sums, resolve) for group, sums in ordered]
    return found


def _text(pid: int, api: str, kind: str, frames: tuple[int, ...], count: int, size: int, resolve: Resolve) -> str:
    pieces = "1 piece" if count == 1 else f"{count} pieces"
    text = f"{human('held_bytes', size)} in {pieces} by {api} ({kind})"
    names = resolve(pid, frames)
    if names and names[0].startswith(f"{api}+"):  # the call itself
        del names[0]
    return f"{text}, called by {' < '.join(names)}" if names else text
