"""Kernels of a process from its launches: one sum per name, whatever functions and streams it was launched by."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from gpuflight.collectors.cuda_rows import Counters
from gpuflight.collectors.session_names import shown_name
from gpuflight.sources.cuda_probe.rows import AliasRow, LaunchRow, NameRow
from gpuflight.sources.demangle import demangle

GRAPH = "CUDA graph"
"""In place of a name: launches of whole graphs, whose kernels the probe does not see."""


class FunctionNames:
    """Names of functions and handles as the probe tells them, each once; forgotten with their process."""

    def __init__(self) -> None:
        self._names: dict[int, dict[int, str]] = {}
        self._aliases: dict[int, dict[int, int]] = {}

    def learn(self, names: Iterable[NameRow], aliases: Iterable[AliasRow]) -> None:
        """What is new since the last reading."""
        for name in names:
            clean = shown_name(demangle(name.name)) + ("…" if name.truncated else "")
            self._names.setdefault(name.pid, {})[name.function] = clean
        for alias in aliases:
            self._aliases.setdefault(alias.pid, {})[alias.function] = alias.of

    def of(self, launch: LaunchRow) -> str | None:
        """The name of what was launched; None if it never came."""
        if launch.kind == "graph":
            return GRAPH
        names = self._names.get(launch.pid, {})
        name = names.get(launch.function)
        if name is None:
            name = names.get(self._aliases.get(launch.pid, {}).get(launch.function, -1))
        return name

    def drop(self, keep: Iterable[int]) -> None:
        """Forget all processes but these."""
        alive = set(keep)
        self._names = {pid: names for pid, names in self._names.items() if pid in alive}
        self._aliases = {pid: aliases for pid, aliases in self._aliases.items() if pid in alive}


class Lane(Struct, gc=False):
    """Launches of one kernel on one stream; ``new`` those since the last reading, None in the first one."""

    launches: int = 0
    new: int | None = 0


class KernelLaunches(Struct):
    """All launches of one name by one process. ``named`` is False where only its address is known. Shapes are those of
    the launches that were counted; ``grid`` and ``block`` those of the last one."""

    name: str
    named: bool
    launches: int = 0
    new: int | None = 0
    threads: int = 0
    threads_max: int = 0
    block_threads_max: int = 0
    shared_bytes_max: int = 0
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    last_ns: int = 0
    lanes: dict[int, Lane] = field(default_factory=dict)


def kernels_of(
    pid: int, launches: Iterable[LaunchRow], names: FunctionNames, counters: Counters
) -> list[KernelLaunches]:
    """The kernels of a process, those launched most first."""
    found: dict[str, KernelLaunches] = {}
    for row in launches:
        name = names.of(row)
        key = name or f"kernel at 0x{row.function:x} (its name was not seen)"
        kernel = found.get(key)
        if kernel is None:
            kernel = found[key] = KernelLaunches(key, name is not None)
        place = ("launches", pid, row.device, row.device_assumed, row.stream, row.function, row.kind)
        new = counters.increase(place, row.launches)
        kernel.launches += row.launches
        kernel.threads += row.threads
        kernel.new = None if new is None or kernel.new is None else kernel.new + new
        kernel.threads_max = max(kernel.threads_max, row.threads_max)
        kernel.block_threads_max = max(kernel.block_threads_max, row.block_threads_max)
        kernel.shared_bytes_max = max(kernel.shared_bytes_max, row.shared_bytes_max)
        if row.last_ns >= kernel.last_ns:
            kernel.grid, kernel.block, kernel.last_ns = row.grid, row.block, row.last_ns
        lane = kernel.lanes.get(row.stream)
        if lane is None:
            lane = kernel.lanes[row.stream] = Lane()
        lane.launches += row.launches
        lane.new = None if new is None or lane.new is None else lane.new + new
    return sorted(found.values(), key=lambda kernel: (-kernel.launches, kernel.name))
