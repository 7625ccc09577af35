"""Misses of the last-level cache and instructions per cycle of the processes that matter, by the CPU's own counters."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.perf_events_choice import CYCLES, INSTRUCTIONS, MISSES, READS, event_sets
from gpuflight.collectors.perf_sums import Growth, Rows, growth, rows_of
from gpuflight.collectors.process_tree import ACCELERATORS
from gpuflight.collectors.rates import FIRST_READING, WENT_BACK
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Metric, nodes
from gpuflight.sources.perf_events import Answer, EventSet, Target

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcFs, ProcStat
    from gpuflight.sources.world import World

_SWITCHED_OFF = "the CPU's counters are left to others unless asked for: they take time at every switch of a thread"
_SWITCH_ON = "set collectors.perf_counters.watch = true (docs/overhead.md has what it costs)"
_NO_LEVEL = "this CPU tells of no process what reached its last-level cache"
_IDLE = "it did not run since the round before"
_CROWDED = "it got no counter: others have them all (a profiler, or the NMI watchdog)"
_NOTHING = "it ran, and no such event was counted"
_ENDING = "it ended while it was looked at"
_SHORT = "there were not enough descriptors to count it"
_RAISE = "raise the limit of open files (ulimit -n, LimitNOFILE=), or collectors.perf_counters.max_fds"
_NO_CACHE = dict.fromkeys(("llc_miss_pct", "llc_misses_per_s"), _NO_LEVEL)


class PerfCountersSettings(BaseModel):
    """Which processes, and how many descriptors for them."""

    model_config = ConfigDict(extra="forbid")

    watch: bool = Field(
        False,
        description="Count. Off unless asked for: the counters are set anew at every switch of a watched thread, which "
        "is dear in a virtual machine, and profilers that want them too get a share (docs/overhead.md).",
    )
    gpu_count: int = Field(16, ge=0, description="Most processes with a GPU that are watched; those with most CPU use.")
    top_count: int = Field(8, ge=0, description="Most other processes that are watched; those with most CPU use.")
    min_pct: float = Field(10.0, ge=0, description="Least CPU use, of one core, of a process without a GPU.")
    instructions: bool = Field(True, description="Count instructions and cycles too; two more descriptors per thread.")
    max_threads: int = Field(32, ge=1, description="Most threads counted of one process; those with most CPU time.")
    max_fds: int = Field(
        1024, ge=4, description="Most descriptors in all (one per thread and event), and at most half of ulimit -n."
    )


class _Seen(Struct, gc=False):
    """What a process's counters stood at."""

    watch: int
    rows: Rows


class PerfCounters(Collector):
    """Last-level cache misses and instructions per cycle of processes with a GPU and of those with most CPU use.

    Counted by the CPU, not sampled, and scaled where the counters were shared (``perf_running_pct`` is how long it had
    them). Off unless ``watch`` is set.
    """

    name = "perf_counters"
    expands = (nodes.Process,)
    precedence = -6  # it names processes only by what they did
    settings_class = PerfCountersSettings
    settings: PerfCountersSettings

    def __init__(self, settings: PerfCountersSettings | None = None) -> None:
        super().__init__(settings)
        self._world: World | None = None
        self._sets: list[EventSet] = []
        self._processes: dict[int, ProcStat] = {}
        self._scanned_s = 0.0
        self._answered: dict[int, ProcStat] | None = None
        self._unsupported = 0
        self._chosen: dict[str, ProcStat] = {}
        self._seen: dict[str, _Seen] = {}
        self._seen_ns = 0
        self._complete: frozenset[str] = frozenset()  # threads that these start are counted without being named
        self._shown: dict[str, nodes.Process] = {}

    def observe(self, world: World) -> None:
        if not self.settings.watch:
            raise SourceUnavailable(_SWITCHED_OFF, _SWITCH_ON)
        procfs = world.procfs
        processes = procfs.processes()
        if processes is self._answered:
            return  # the same round once more
        self._answered, self._shown, self._world = None, {}, world
        if not self._sets:
            self._sets = event_sets(procfs.cpu_info(), instructions=self.settings.instructions)
        before, self._processes = self._processes, processes
        self._chosen = {} if self._unsupported else self._choose(procfs, before)
        targets = [self._target(procfs, stat) for stat in self._chosen.values()]
        answer = world.perf_events.count(
            self._sets,
            targets,
            descriptors_at_most=self.settings.max_fds,
            threads_at_most=self.settings.max_threads,
        )
        self._unsupported = answer.unsupported
        if answer.unsupported:
            raise SourceUnavailable(*why_unsupported(answer.unsupported))
        if targets and len(answer.refused) == len(targets):
            raise SourceUnavailable(*why_refused(world, next(iter(answer.refused.values()))))
        self._complete = frozenset(answer.processes) if answer.inherits else frozenset()
        self._say_limits(world, answer)
        self._show(answer)
        self._answered = processes

    def expand(self, entities: Sequence[nodes.Process]) -> Batch:
        shown = self._shown
        return Batch([shown[entity.id] for entity in entities if entity.id in shown])

    def close(self) -> None:
        if self._world is not None:
            self._world.perf_events.close()
        self._world = None
        self._seen.clear()

    # --- whom to count ---------------------------------------------------------------------------------------------

    def _choose(self, procfs: ProcFs, before: dict[int, ProcStat]) -> dict[str, ProcStat]:
        """Those with a GPU open, then those that used most CPU since the round before, within the limits."""
        holders = procfs.fds().holders(ACCELERATORS)
        used: dict[str, int] = {}
        with_gpu, others = [], []
        for pid, stat in self._processes.items():
            if stat.kernel_thread:
                continue
            last = before.get(pid)
            ticks = stat.cpu_ticks - (last.cpu_ticks if last is not None and last.start == stat.start else 0)
            if pid in holders:
                with_gpu.append(stat)
            elif ticks > 0 or stat.id in self._chosen:
                others.append(stat)
            else:
                continue
            used[stat.id] = ticks
        elapsed_s = procfs.scanned_at_s - self._scanned_s if before else 0.0
        self._scanned_s = procfs.scanned_at_s
        least = self.settings.min_pct / 100 * procfs.ticks_per_second * elapsed_s
        if len(with_gpu) > self.settings.gpu_count:
            self.lose("processes with a GPU beyond gpu_count", len(with_gpu) - self.settings.gpu_count)
        chosen = self._settle(with_gpu, used, 0, self.settings.gpu_count)
        if before:  # what they used since they started says nothing of now
            chosen += self._settle(others, used, least, self.settings.top_count)
        return {stat.id: stat for stat in chosen}

    def _settle(self, stats: list[ProcStat], used: dict[str, int], least: float, limit: int) -> list[ProcStat]:
        """The ``limit`` that used most, but who is watched stays while it is among twice as many or idle and there is
        room: a process that comes and goes gives no figures."""
        stats.sort(key=lambda stat: (-used[stat.id], stat.pid))
        busy = [stat for stat in stats if used[stat.id] >= max(1, least) or not least]
        first = [stat for stat in busy[: 2 * limit] if stat.id in self._chosen]
        new = [stat for stat in busy if stat.id not in self._chosen]
        stays = {stat.id for stat in first}
        rest = [stat for stat in stats if stat.id in self._chosen and stat.id not in stays]
        return [*first, *new, *rest][:limit]

    def _target(self, procfs: ProcFs, stat: ProcStat) -> Target:
        if stat.id in self._complete:
            return Target(stat.id, ())
        try:
            threads = sorted(procfs.threads(stat.pid), key=lambda thread: (-thread.cpu_ticks, thread.pid))
        except OSError:
            return Target(stat.id, ())
        return Target(stat.id, tuple(thread.pid for thread in threads))

    # --- what was counted ------------------------------------------------------------------------------------------

    def _show(self, answer: Answer) -> None:
        before, elapsed_s = self._seen, (answer.read_ns - self._seen_ns) / 1e9
        self._seen, self._seen_ns = {}, answer.read_ns
        for id_, stat in self._chosen.items():
            entity = self._shown[id_] = nodes.Process(pid=stat.pid, start=stat.start, id=id_)
            watched = answer.processes.get(id_)
            if watched is None:
                entity.unknown = dict.fromkeys(_figures(answer), _why_not(answer, id_))
                continue
            try:
                now = rows_of(watched, len(answer.events))
            except ValueError:
                raise SourceUnavailable("the counts have another layout", "record again") from None
            self._seen[id_] = _Seen(watched.watch, now)
            last = before.get(id_)
            grown = None
            if last is not None and last.watch == watched.watch and elapsed_s > 0:
                grown = growth(last.rows, now, answer.events)
            entity.attributes = {"perf_scope": "user" if answer.user_only else "all", "perf_events": answer.set}
            if watched.left_out_count or (grown is not None and (grown.uncounted_ns or grown.back_count)):
                entity.attributes["perf_partial"] = True
            metrics, unknown = _told(grown, answer, elapsed_s)
            entity.metrics = {"perf_threads_count": len(watched.tids), **metrics}
            entity.unknown = unknown or None

    # --- what could not be counted -----------------------------------------------------------------------------------

    def _say_limits(self, world: World, answer: Answer) -> None:
        if answer.events and MISSES not in answer.events:
            self.note(_NO_LEVEL, "only instructions per cycle are given")
        if answer.short:
            self.note("too few descriptors for the counters of all threads", _RAISE)
        partial = sum(watched.left_out_count > 0 for watched in answer.processes.values())
        if partial:
            self.note(
                "of processes with many threads only those with most CPU time are counted (perf_partial)",
                "raise collectors.perf_counters.max_threads and max_fds",
                partial,
            )
        for code in set(answer.refused.values()):
            count = sum(each == code for each in answer.refused.values())
            self.note(*why_refused(world, code), count)


def _figures(answer: Answer) -> list[str]:
    """What this machine tells of a process."""
    names = ["llc_miss_pct", "llc_misses_per_s", "perf_running_pct"]
    return [*names, "instructions_per_cycle"] if CYCLES in answer.events else names


def _told(grown: Growth | None, answer: Answer, elapsed_s: float) -> tuple[dict[str, Metric], dict[str, str]]:
    """(metrics, unknown) of a process whose counters grew by that; None: they were never read before."""
    if grown is None:
        unknown = dict.fromkeys(_figures(answer), FIRST_READING)
        return {}, unknown if MISSES in answer.events else {**unknown, **_NO_CACHE}
    metrics: dict[str, Metric] = {}
    events = grown.events
    # Why there is nothing, where there is nothing.
    why = _NOTHING if grown.running_ns else _CROWDED if grown.enabled_ns else WENT_BACK if grown.back_count else _IDLE
    unknown = {} if MISSES in events else {**_NO_CACHE}
    if grown.enabled_ns:
        metrics["perf_running_pct"] = min(100.0, 100.0 * grown.running_ns / grown.enabled_ns)
    else:
        unknown["perf_running_pct"] = why
    if MISSES in events:
        if why in (_NOTHING, _IDLE):
            metrics["llc_misses_per_s"] = events[MISSES] / elapsed_s
        else:
            unknown["llc_misses_per_s"] = why
        if events[READS]:
            metrics["llc_miss_pct"] = min(100.0, 100.0 * events[MISSES] / events[READS])
        else:
            unknown["llc_miss_pct"] = why
    if CYCLES in events:
        if events[CYCLES]:
            metrics["instructions_per_cycle"] = events[INSTRUCTIONS] / events[CYCLES]
        else:
            unknown["instructions_per_cycle"] = why
    return metrics, unknown


def _why_not(answer: Answer, id_: str) -> str:
    code = answer.refused.get(id_)
    if code is not None:
        return f"it may not be counted: {os.strerror(code)}"
    return _SHORT if answer.short else _ENDING


def why_unsupported(code: int) -> tuple[str, str]:
    """(reason, hint) of a machine that counts none of the events, by what perf_event_open said."""
    name = "EOPNOTSUPP" if code == errno.EOPNOTSUPP else errno.errorcode.get(code, str(code))
    if code == errno.ENOSYS:
        return "the kernel has no perf events (ENOSYS)", "use a kernel with CONFIG_PERF_EVENTS=y, on x86-64 or arm64"
    return (
        f"the CPU's counters are not to be had here: the kernel knows none of their events ({name}), as in a virtual"
        " machine without a PMU",
        "give the machine a virtual PMU (KVM: pmu=on), or count on its host",
    )


def why_refused(world: World, code: int) -> tuple[str, str]:
    """(reason, hint) of processes that may not be counted."""
    if code not in (errno.EACCES, errno.EPERM):
        return f"processes cannot be counted: {os.strerror(code)}", ""
    grant = "grant CAP_PERFMON (Linux 5.8) or run as root"
    try:
        filtered = "\nSeccomp:\t2\n" in world.procfs.text("self/status")  # SECCOMP_MODE_FILTER
        level = world.procfs.text("sys/kernel/perf_event_paranoid").strip()
    except (OSError, ValueError):
        filtered, level = False, "?"
    if filtered and code == errno.EPERM:
        return (
            "no right to count other programs: a seccomp filter may forbid perf_event_open",
            "docker: --cap-add PERFMON; systemd: AmbientCapabilities=CAP_PERFMON, SystemCallFilter=perf_event_open",
        )
    return (
        f"no right to count other programs (kernel.perf_event_paranoid is {level})",
        f"{grant}; programs of the same user need kernel.perf_event_paranoid=2 or less",
    )
