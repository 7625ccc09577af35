"""Kernels of a process from its launches: one sum per name, whatever functions and streams it was launched by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct, field

from gpuflight.collectors.cuda_rows import Counters
from gpuflight.collectors.session_names import shown_name
from gpuflight.graph import Edge, Entity
from gpuflight.sources.cuda_probe.rows import AliasRow, LaunchRow, NameRow
from gpuflight.sources.demangle import demangle

GRAPH = "CUDA graph"
"""In place of a name: launches of whole graphs, whose kernels the probe does not see."""

Symbols = Callable[[int, Sequence[int]], dict[int, str]]
"""(pid, addresses) → the functions that begin there, mangled."""

_STUB = "__device_stub__"  # nvcc puts it before the name of a stub that is static


class FunctionNames:
    """Names of functions and handles as the probe tells them, each once; forgotten with their process.

    Functions that a program registered before it was watched are looked for in its symbol tables: the host's stub of a
    kernel is called like the kernel.
    """

    def __init__(self) -> None:
        self._names: dict[int, dict[int, str]] = {}
        self._aliases: dict[int, dict[int, int]] = {}
        self._looked_for: dict[int, set[int]] = {}

    def learn(self, names: Iterable[NameRow], aliases: Iterable[AliasRow]) -> None:
        """What is new since the last reading."""
        for name in names:
            clean = _clean(name.name) + ("…" if name.truncated else "")
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

    def known(self, pid: int) -> dict[int, str]:
        """Names of host functions of a process."""
        return self._names.get(pid, {})

    def look_for(self, pid: int, launches: Iterable[LaunchRow], symbols: Symbols) -> None:
        """Find names of functions that were not told, each once."""
        looked_for = self._looked_for.setdefault(pid, set())
        missing = {row.function for row in launches if row.kind == "runtime" and self.of(row) is None} - looked_for
        if missing:
            looked_for |= missing
            for function, name in symbols(pid, sorted(missing)).items():
                self._names.setdefault(pid, {})[function] = _clean(name)

    def drop(self, keep: Iterable[int]) -> None:
        """Forget all processes but these."""
        alive = set(keep)
        self._looked_for = {pid: looked_for for pid, looked_for in self._looked_for.items() if pid in alive}
        self._names = {pid: names for pid, names in self._names.items() if pid in alive}
        self._aliases = {pid: aliases for pid, aliases in self._aliases.items() if pid in alive}


def _clean(name: str) -> str:
    return shown_name(demangle(name.removeprefix(_STUB)))


class Lane(Struct, gc=False):
    """Launches of one kernel on one stream; ``new`` those since the last reading, None in the first one."""

    launches: int = 0
    new: int | None = 0


class KernelLaunches(Struct):
    """All launches of one name by one process. ``named`` is False where only its address is known. ``captured`` ones
    went into a graph, not to a GPU: they are in no other sum but that of threads. ``grid`` and ``block`` are the last
    one's.
    """

    name: str
    named: bool
    launches: int = 0
    captured: int = 0
    new: int | None = 0
    threads: int = 0
    counted: int = 0
    """Launches that ``threads`` is the sum of."""
    threads_max: int = 0
    block_threads_max: int = 0
    shared_bytes_max: int = 0
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    last_ns: int = 0
    lanes: dict[int, Lane] = field(default_factory=dict)


Place = tuple[int, int, int, str]
"""What identifies a row of launches of a process: function, stream, device, kind."""


class Picture(Struct):
    """A kernel as it was shown, and what that followed from."""

    state: object
    kernel: Entity
    edges: list[Edge]


class Kernels:
    """Launches by kernel, process by process, with those on streams that are gone."""

    def __init__(self) -> None:
        self.pictures: dict[int, dict[str, Picture]] = {}
        """Kernels of each process as they were shown in the last round, by name."""
        self.names = FunctionNames()
        self._last: dict[int, dict[Place, tuple[str, int]]] = {}  # name and launches in the last reading
        self._gone: dict[int, dict[str, int]] = {}  # launches on streams that were destroyed

    def of(self, pid: int, rows: Iterable[LaunchRow], counters: Counters) -> list[KernelLaunches]:
        """The kernels of a process, those launched most first."""
        found: dict[str, KernelLaunches] = {}
        last, now = self._last.get(pid, {}), dict[Place, tuple[str, int]]()
        known, first_reading = self.names.known(pid), counters.seconds is None
        for row in rows:
            at = (row.function, row.stream, row.device, row.kind)
            name = known.get(row.function) if row.kind == "runtime" else None
            if name is None:
                name = self.names.of(row)
            key = name or f"kernel at 0x{row.function:x} (its name was not seen)"
            launches = row.launches - row.captured
            before = last.get(at)
            new: int | None = launches
            if before is not None:
                if launches >= before[1]:
                    new = launches - before[1]
                else:  # another stream with the handle of one that is gone
                    self._leave(pid, *before)
            if first_reading:
                new = None
            now[at] = key, launches
            kernel = found.get(key)
            if kernel is None:
                found[key] = _first(key, name is not None, row, launches, new)
            else:
                _add(kernel, row, launches, new)
        self._last[pid] = now
        for at in last.keys() - now.keys():
            self._leave(pid, *last[at])
        for name, launches in self._gone.get(pid, {}).items():
            if name in found:
                found[name].launches += launches
        return sorted(found.values(), key=lambda kernel: (-kernel.launches, kernel.name))

    def _leave(self, pid: int, name: str, launches: int) -> None:
        gone = self._gone.setdefault(pid, {})
        gone[name] = gone.get(name, 0) + launches

    def restart(self, pids: Iterable[int]) -> None:
        """These processes executed another program: their launches begin at 0."""
        for pid in pids:
            for kept in (self._last, self._gone, self.pictures):
                kept.pop(pid, None)

    def drop(self, keep: Iterable[int]) -> None:
        """Forget all processes but these."""
        alive = set(keep)
        self.names.drop(alive)
        self._last = {pid: last for pid, last in self._last.items() if pid in alive}
        self._gone = {pid: gone for pid, gone in self._gone.items() if pid in alive}
        self.pictures = {pid: pictures for pid, pictures in self.pictures.items() if pid in alive}


def _first(name: str, named: bool, row: LaunchRow, launches: int, new: int | None) -> KernelLaunches:
    return KernelLaunches(
        name,
        named,
        launches,
        row.captured,
        new,
        row.threads,
        row.launches,
        row.threads_max,
        row.block_threads_max,
        row.shared_bytes_max,
        row.grid,
        row.block,
        row.last_ns,
        {row.stream: Lane(launches, new)},
    )


def _add(kernel: KernelLaunches, row: LaunchRow, launches: int, new: int | None) -> None:
    kernel.launches += launches
    kernel.captured += row.captured
    kernel.threads += row.threads
    kernel.counted += row.launches
    kernel.new = None if new is None or kernel.new is None else kernel.new + new
    kernel.threads_max = max(kernel.threads_max, row.threads_max)
    kernel.block_threads_max = max(kernel.block_threads_max, row.block_threads_max)
    kernel.shared_bytes_max = max(kernel.shared_bytes_max, row.shared_bytes_max)
    if row.last_ns >= kernel.last_ns:
        kernel.grid, kernel.block, kernel.last_ns = row.grid, row.block, row.last_ns
    lane = kernel.lanes.get(row.stream)
    if lane is None:
        kernel.lanes[row.stream] = Lane(launches, new)
        return
    lane.launches += launches
    lane.new = None if new is None or lane.new is None else lane.new + new
