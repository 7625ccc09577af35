"""What the collectors of kernel probes have in common: opening, losses, own cost, processes as programs name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from gpuflight.collectors.base import Collector
from gpuflight.collectors.rates import FIRST_READING
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Metric, nodes

if TYPE_CHECKING:
    from gpuflight.sources.bpf.base import Link, ProbeObject
    from gpuflight.sources.world import World

RETRY_ROUNDS = 12
"""Rounds after which what the kernel refused is tried again."""

UNKNOWN = 2**64 - 1
"""GF_UNKNOWN of kernel.h: what the running kernel keeps no account of."""

NO_ACCOUNT = "this kernel keeps no account of it"

_FIRST_PID_NAMESPACE = 4026531836  # PROC_PID_INIT_INO of include/linux/proc_ns.h
_NS_PER_S = 1_000_000_000


class Refused(Struct):
    """Why an object could not be opened, and how many rounds ago."""

    reason: str
    hint: str
    rounds: int = 0


class KernelPrograms:
    """One object of programs: opened at the first round that wants it, kept open until ``close``.

    ``losses``: what the programs' own counters (``gf_loss``) mean, as plural nouns.
    """

    def __init__(self, name: str, losses: Mapping[int, str]) -> None:
        self.name = name
        self.links: dict[str, Link] = {}
        self._losses = losses
        self._object: ProbeObject | None = None
        self._world: World | None = None
        self._refused: Refused | None = None
        self.without: Refused | None = None
        """Why less than all of the programs run here; None if all do."""
        self._lost: dict[str, int] = {}
        self._costs: dict[str, tuple[int, int, int]] = {}
        self._read_at_s: float | None = None

    def open(
        self,
        world: World,
        programs: Sequence[str],
        *,
        instead: Sequence[str] = (),
        map_entries: Mapping[str, int] | None = None,
        constants: Mapping[str, int] | None = None,
    ) -> ProbeObject:
        """The object with ``programs`` attached; the same one again in later rounds.

        Where the kernel refuses these, those of ``instead``, and ``without`` says why. Raises SourceUnavailable with
        the reason of the last try, which is repeated every ``RETRY_ROUNDS`` rounds.
        """
        if self._object is not None and self._world is world:
            return self._object
        if self._refused is not None and self._world is world:
            self._refused.rounds += 1
            if self._refused.rounds % RETRY_ROUNDS:
                raise SourceUnavailable(self._refused.reason, self._refused.hint)
        self.close()
        self._world = world
        try:
            self._object = self._open(world, programs, map_entries or {}, constants or {})
        except SourceUnavailable as error:
            refused = Refused(error.reason, error.hint)
            try:
                self._object = self._open(world, instead, map_entries or {}, constants or {}) if instead else None
            except SourceUnavailable:
                self._object = None  # what the better choice lacks is what the user should get
            if self._object is None:
                self._refused = refused
                raise
            self.without = refused
        return self._object

    def _open(
        self,
        world: World,
        programs: Sequence[str],
        map_entries: Mapping[str, int],
        constants: Mapping[str, int],
    ) -> ProbeObject:
        made = world.probes.open(
            self.name,
            programs=programs,
            map_entries=map_entries,
            constants={"pid_namespace": pid_namespace(world), **constants},
        )
        try:
            for program in programs:
                self.links[program] = made.attach(program)
        except SourceUnavailable:
            made.close()
            self.links.clear()
            raise
        return made

    def read(self, map_name: str, key_size: int, value_size: int) -> list[tuple[bytes, bytes]]:
        """Every row of a map. Raises SourceUnavailable if they are not laid out as this version's (in a recording)."""
        assert self._object is not None  # noqa: S101 - opened
        rows = self._object.read(map_name)
        if any(len(key) != key_size or len(value) != value_size for key, value in rows):
            raise SourceUnavailable(f"the rows of {self.name}.{map_name} have another layout", "record again")
        return rows

    def elapsed_s(self, now_s: float) -> float | None:
        """Time since this was asked in the round before, s; None in the first round that reads the maps."""
        before_s, self._read_at_s = self._read_at_s, now_s
        return now_s - before_s if before_s is not None and now_s > before_s else None

    def report(self, collector: Collector, ring: str = "") -> None:
        """Count on the collector's coverage line what was lost since the last round, and say what the programs cost."""
        if self._object is None:
            return
        now = {
            self._losses.get(which, f"losses of kind {which}"): count for which, count in self._object.losses().items()
        }
        if ring:
            now["records that found no room"] = self._object.lost(ring)
        for cost in self._object.costs():
            if cost.run_count is None or cost.run_time_ns is None:
                continue
            missed = cost.missed_count or 0
            before = self._costs.get(cost.program, (0, 0, 0))
            self._costs[cost.program] = cost.run_count, cost.run_time_ns, missed
            collector.spend(cost.program, cost.run_count - before[0], (cost.run_time_ns - before[1]) / 1e6)
            if missed:
                now[f"events that found {cost.program} busy"] = missed
        for what, count in now.items():
            if count > self._lost.get(what, 0):
                collector.lose(what, count - self._lost.get(what, 0))
        self._lost = now

    def forget(self, map_name: str, keys: Sequence[bytes]) -> None:
        """Delete rows that were told for the last time."""
        assert self._object is not None  # noqa: S101 - rows were read from it
        for key in keys:
            self._object.delete(map_name, key)

    def close(self) -> None:
        """Detach and unload. May be called twice."""
        if self._object is not None:
            self._object.close()
        self._object = None
        self._world = None
        self._refused = self.without = None
        self._read_at_s = None
        self.links.clear()
        self._lost.clear()
        self._costs.clear()


def per_s(grown: Mapping[str, float], elapsed_s: float | None) -> tuple[dict[str, Metric], dict[str, str] | None]:
    """(metrics, unknown): rates of what grew within ``elapsed_s``; of a first reading, where that is None, only why."""
    if elapsed_s is None:
        return {}, dict.fromkeys(grown, FIRST_READING)
    return {name: value / elapsed_s for name, value in grown.items()}, None


def pid_namespace(world: World) -> int:
    """For the constant ``pid_namespace`` of kernel.h: the inode of ours, 0 if it is the first one or cannot be told."""
    try:
        inode = world.procfs.own_namespace("pid")
    except (OSError, ValueError):
        return 0
    return 0 if inode == _FIRST_PID_NAMESPACE else inode


def alive_processes(world: World) -> set[str]:
    """Ids of the processes that /proc shows this round. Raises SourceUnavailable."""
    return {stat.id for stat in world.procfs.processes().values()}


class Starts:
    """Turns what the kernel keeps (ns since boot) into what identifies a process: clock ticks, as /proc tells them."""

    def __init__(self, ticks_per_second: int) -> None:
        self._ns_per_tick = _NS_PER_S // ticks_per_second

    def ticks(self, start_ns: int) -> int:
        """Field 22 of /proc/PID/stat (nsec_to_clock_t of kernel/time/time.c)."""
        return start_ns // self._ns_per_tick

    def process_id(self, pid: int, start_ns: int) -> str:
        """The id of the process's entity."""
        return f"Process(pid={pid},start={start_ns // self._ns_per_tick})"

    def thread_id(self, tid: int, start_ns: int) -> str:
        """The id of the thread's entity."""
        return f"Thread(tid={tid},start={start_ns // self._ns_per_tick})"


def process_entity(
    process: str,
    attributes: dict[str, Any] | None = None,
    metrics: dict[str, Metric] | None = None,
    unknown: dict[str, str] | None = None,
) -> nodes.Process:
    """The entity of an id that ``Starts.process_id`` made."""
    pid, _, start = process[len("Process(pid=") : -1].partition(",start=")
    return nodes.Process(
        pid=int(pid),
        start=int(start),
        id=process,
        attributes=attributes or {},
        metrics=metrics or {},
        unknown=unknown,
    )


def thread_entity(
    thread: str, metrics: dict[str, Metric] | None = None, unknown: dict[str, str] | None = None
) -> nodes.Thread:
    """The entity of an id that ``Starts.thread_id`` made."""
    tid, _, start = thread[len("Thread(tid=") : -1].partition(",start=")
    return nodes.Thread(tid=int(tid), start=int(start), id=thread, metrics=metrics or {}, unknown=unknown)
