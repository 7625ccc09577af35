"""Threads as the scheduler sees them: on a CPU, waiting for one, asleep; switches and page faults of each."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.kernel_histograms import LAYOUT, SLOTS, Histogram
from gpuflight.collectors.kernel_programs import NO_ACCOUNT, UNKNOWN, KernelPrograms, Starts, alive_processes, per_s
from gpuflight.collectors.rates import FIRST_READING
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Edge, Entity, Metric, edges, nodes

if TYPE_CHECKING:
    from gpuflight.sources.world import World

_ROW = struct.Struct("=8Q2I")
_WAITS = struct.Struct("=Q" + LAYOUT + LAYOUT)
_PROGRAMS = ("on_wakeup", "on_wakeup_new", "on_switch")
_LOSSES = {0: "processes whose waits found no room", 1: "threads whose waits found no room"}
_HISTOGRAM_FIELDS = 3 + SLOTS


class KernelSchedSettings(BaseModel):
    """Which threads are shown, and whether each wait is measured."""

    model_config = ConfigDict(extra="forbid")

    seed_all: bool = Field(True, description="Show every process, not only those already in the picture.")
    threads: bool = Field(True, description="Show the threads of processes that have several.")
    max_threads: int = Field(2000, ge=1, description="Most threads shown; those that ran or waited most.")
    kernel_threads: bool = Field(False, description="Look at the kernel's own threads too.")
    latency: bool = Field(
        False,
        description="Measure every wait for a CPU and every sleep, as histograms per process. Programs run at every "
        "switch and wakeup of the machine (docs/kernel-probes.md has the cost).",
    )
    max_processes: int = Field(8192, ge=64, le=262_144, description="Room in the kernel for histograms (600 B each).")


class _Thread(Struct, gc=False):
    """One thread's counters, and what they grew by since the round before (None at first sight)."""

    raw: bytes
    process: str
    id: str
    pid: int
    tid: int
    start: int
    values: tuple[int, ...]
    grown: tuple[int, ...] | None = None


class KernelSched(Collector):
    """Run-queue delay, time off the CPU, context switches and page faults of each process and thread (eBPF iterator).

    An iterator reads once a round what the scheduler keeps about every thread anyway, so it costs the threads nothing
    while they run. Sums over all threads of a process stand at the process; a thread that ended since the last round is
    missing from them. With ``latency`` also how long each single wait and sleep took.
    """

    name = "kernel_sched"
    seeds = True
    expands = (nodes.Process,)
    precedence = -5
    settings_class = KernelSchedSettings
    settings: KernelSchedSettings

    def __init__(self, settings: KernelSchedSettings | None = None) -> None:
        super().__init__(settings)
        self._tasks = KernelPrograms("tasks", {})
        self._sched = KernelPrograms("sched", _LOSSES)
        self._threads: dict[int, _Thread] = {}
        self._waits: dict[bytes, tuple[int, Histogram, Histogram]] = {}
        self._shown: dict[str, tuple[list[Entity], list[Edge]]] = {}
        self._delays = True

    def observe(self, world: World) -> None:
        self._shown = {}
        kernel_threads = int(self.settings.kernel_threads)
        tasks = self._tasks.open(world, ["each_thread"], constants={"kernel_threads": kernel_threads})
        starts = Starts(world.procfs.ticks_per_second)
        elapsed_s = self._tasks.elapsed_s(world.clock.monotonic_s())
        raw = tasks.run_iter(self._tasks.links["each_thread"])
        if len(raw) % _ROW.size:
            raise SourceUnavailable("the rows of threads have another layout", "record again")
        self._tasks.report(self)
        self._take(raw, starts)
        waits = self._observe_waits(world, starts)
        self._show(elapsed_s, waits, alive_processes(world))

    def seed(self) -> Batch:
        batch = Batch()
        if self.settings.seed_all:
            for found, drawn in self._shown.values():
                batch.nodes += found
                batch.edges += drawn
        return batch

    def expand(self, entities: Sequence[nodes.Process]) -> Batch:
        batch = Batch()
        if not self.settings.seed_all:
            for entity in entities:
                found, drawn = self._shown.get(entity.id, ((), ()))
                batch.nodes += found
                batch.edges += drawn
        return batch

    def close(self) -> None:
        self._tasks.close()
        self._sched.close()
        self._threads.clear()
        self._waits.clear()

    # --- counters ------------------------------------------------------------------------------------------------

    def _take(self, raw: bytes, starts: Starts) -> None:
        """Compare one reading with the one before."""
        before, self._threads = self._threads, {}
        size = _ROW.size
        for at in range(0, len(raw) - size + 1, size):
            row = raw[at : at + size]
            tid = int.from_bytes(row[-4:], "little")
            known = before.get(tid)
            if known is not None and known.raw == row:
                if known.grown is None or any(known.grown):
                    known.grown = _NOTHING
                self._threads[tid] = known
                continue
            fields = _ROW.unpack(row)
            start = starts.ticks(fields[1])
            values = fields[2:8]
            if values[1] == UNKNOWN:
                self._delays = False
                values = (values[0], 0, *values[2:])
            if known is not None and known.start == start:
                known.grown = tuple(max(0, now - then) for now, then in zip(values, known.values, strict=True))
                known.raw, known.values = row, values
                self._threads[tid] = known
                continue
            pid = fields[8]
            if not pid or not tid:
                continue
            process = starts.process_id(pid, fields[0])
            thread = starts.thread_id(tid, fields[1])
            # One that was not there in the round before was born since: all it did, it did since.
            grown = values if before else None
            self._threads[tid] = _Thread(row, process, thread, pid, tid, start, values, grown)

    def _show(self, elapsed_s: float | None, waits: dict[str, tuple[Histogram, Histogram]], alive: set[str]) -> None:
        processes: dict[str, list[_Thread]] = {}
        for thread in self._threads.values():
            if thread.process in alive:  # else it ended between the two looks, or /proc hides it
                processes.setdefault(thread.process, []).append(thread)
        chosen = self._choose(processes) if self.settings.threads else set()
        for process, threads in processes.items():
            sums = [sum(column) for column in zip(*(thread.grown or _NOTHING for thread in threads), strict=True)]
            attributes: dict[str, Any] = {}
            metrics, unknown = _rates(sums, elapsed_s, one=len(threads) == 1, delays=self._delays)
            if process in waits:
                queue, asleep = waits[process]
                queue.add_to(metrics, attributes, "run_queue_wait")
                asleep.add_to(metrics, attributes, "sleep")
            first = threads[0]
            found: list[Entity] = [
                nodes.Process(
                    pid=first.pid,
                    start=int(process[process.rindex("=") + 1 : -1]),
                    id=process,
                    attributes=attributes,
                    metrics=metrics,
                    unknown=unknown,
                )
            ]
            drawn: list[Edge] = []
            for thread in threads:
                if thread.tid in chosen:
                    found.append(self._thread(thread, elapsed_s))
                    drawn.append(edges.Own(process, thread.id))
            self._shown[process] = found, drawn

    def _choose(self, processes: dict[str, list[_Thread]]) -> set[int]:
        """The threads that are shown: of processes with several, those that ran, or wanted to, most."""
        several = [thread for threads in processes.values() if len(threads) > 1 for thread in threads]
        limit = self.settings.max_threads
        if len(several) > limit:
            self.lose("threads beyond max_threads", len(several) - limit)
            several.sort(key=lambda thread: -sum((thread.grown or _NOTHING)[:2]))
            del several[limit:]
        return {thread.tid for thread in several}

    def _thread(self, thread: _Thread, elapsed_s: float | None) -> nodes.Thread:
        grown = thread.grown or _NOTHING
        metrics, unknown = _rates(grown, elapsed_s, one=True, delays=self._delays)
        if elapsed_s is not None:
            metrics["cpu_pct"] = grown[0] / elapsed_s / 1e7
        return nodes.Thread(tid=thread.tid, start=thread.start, id=thread.id, metrics=metrics, unknown=unknown)

    # --- single waits --------------------------------------------------------------------------------------------

    def _observe_waits(self, world: World, starts: Starts) -> dict[str, tuple[Histogram, Histogram]]:
        """What ``latency`` measured since the last round, by process id: waits for a CPU, sleeps."""
        if not self.settings.latency:
            return {}
        try:
            self._sched.open(world, _PROGRAMS, map_entries={"waits": self.settings.max_processes})
        except SourceUnavailable as error:
            self.note(f"{error.reason}; single waits are not measured", error.hint)
            return {}
        found = self._read_waits(starts)
        self._sched.report(self)
        return found

    def _read_waits(self, starts: Starts) -> dict[str, tuple[Histogram, Histogram]]:
        found: dict[str, tuple[Histogram, Histogram]] = {}
        last, self._waits = self._waits, {}
        alive = {thread.process for thread in self._threads.values()}
        gone = []
        for key, raw in self._sched.read("waits", 4, _WAITS.size):
            start_ns, *fields = _WAITS.unpack(raw)
            process = starts.process_id(int.from_bytes(key, "little"), start_ns)
            queue = Histogram.of(tuple(fields[:_HISTOGRAM_FIELDS]))
            asleep = Histogram.of(tuple(fields[_HISTOGRAM_FIELDS:]))
            before = last.get(key)
            if before is not None and before[0] == start_ns:
                found[process] = queue.since(before[1]), asleep.since(before[2])
            else:
                found[process] = queue, asleep
            if process in alive or self.settings.kernel_threads:
                self._waits[key] = start_ns, queue, asleep
            else:
                gone.append(key)
        self._sched.forget("waits", gone)
        return found


_NOTHING = (0, 0, 0, 0, 0, 0)
"""Of: ns on a CPU, ns waiting for one, switches voluntary and involuntary, faults minor and major."""


def _rates(
    grown: Sequence[int], elapsed_s: float | None, *, one: bool, delays: bool
) -> tuple[dict[str, Metric], dict[str, str] | None]:
    """(metrics, unknown) of ``one`` thread, or of several together; ``delays``: the kernel counts run-queue delay."""
    metrics, unknown = per_s(
        {
            "run_delay_pct": grown[1] / 1e7,  # ns per s, in percent
            "context_switches_voluntary_per_s": grown[2],
            "context_switches_involuntary_per_s": grown[3],
            "minor_faults_per_s": grown[4],
            "major_faults_per_s": grown[5],
        },
        elapsed_s,
    )
    if elapsed_s is not None and one:
        # Neither on a CPU nor waiting for one. The scheduler counts in ticks, so it can come out a little off.
        metrics["off_cpu_pct"] = min(100.0, max(0.0, 100.0 - (grown[0] + grown[1]) / elapsed_s / 1e7))
    elif one and unknown is not None:
        unknown["off_cpu_pct"] = FIRST_READING
    if not delays:
        for name in ("run_delay_pct", "off_cpu_pct"):
            metrics.pop(name, None)
        unknown = {**(unknown or {}), **dict.fromkeys(("run_delay_pct", "off_cpu_pct"), NO_ACCOUNT)}
    return metrics, unknown
