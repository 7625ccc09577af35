"""What every process does with CUDA, as probes on its runtime, driver and NCCL libraries see it, without its help."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.cuda_allocations import largest_groups
from gpuflight.collectors.cuda_budget import Budget
from gpuflight.collectors.cuda_coverage import limits
from gpuflight.collectors.cuda_entities import Bounds, Left, Shown, add_process, add_uses, container_sums
from gpuflight.collectors.cuda_kernels import Kernels
from gpuflight.collectors.cuda_nccl import NcclNames
from gpuflight.collectors.cuda_places import CudaPlaces
from gpuflight.collectors.cuda_rows import Counters, Rows, by_process
from gpuflight.collectors.cuda_statistics import Use, fit
from gpuflight.collectors.cuda_watch import CudaWatch, Launched
from gpuflight.collectors.gpu_processes import INITIAL_PID_NAMESPACE
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Edge, Entity, nodes
from gpuflight.sources.cuda_libraries import CudaLibraries, CudaProcess, CudaScan
from gpuflight.sources.user_stacks import UserStacks

if TYPE_CHECKING:
    from gpuflight.sources.cuda_probe.rows import CudaRows
    from gpuflight.sources.procfs import ProcStat
    from gpuflight.sources.world import World

ALLOCATIONS_ROUNDS = 6
"""Rounds between two looks at single allocations: reading all of them costs more than all sums."""

LOOK_ROUNDS = 4
"""Rounds between two looks for CUDA in the memory of processes that NVML sees on a GPU."""

UNUSED_ROUNDS = 12
"""Rounds without a process with CUDA after which everything is detached."""

NO_CALL = "it made no call that is hooked since the probe was attached"
NO_CUDA = "no process has a CUDA library in its memory"


class CudaProbesSettings(BaseModel):
    """What is watched of CUDA programs, and how much of it is shown."""

    model_config = ConfigDict(extra="forbid")

    budget_launches_per_s: float = Field(
        default=200_000,
        gt=0,
        description="launches per s of one process from which they are watched in some rounds only: each costs the"
        " program about half a microsecond while it is watched",
    )
    driver: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="launches at the driver library, which Triton and JAX use directly: `auto` leaves them alone while"
        " all are the runtime's own, but for one round in 12; `never` watches only programs without a runtime there",
    )
    nccl: bool = Field(default=True, description="watch NCCL too")
    kernels_per_process: int = Field(default=100, ge=0, description="kernels shown of a process, the most launched")
    streams_per_process: int = Field(default=32, ge=0, description="streams shown of a process, the busiest")
    allocations_per_process: int = Field(
        default=5, ge=0, description="groups of memory that are shown of a process with who allocated them; 0: none"
    )


class CudaProbes(Collector):
    """CUDA activity of any running program by eBPF: kernels, streams, waits, copies, memory, errors, NCCL"""

    seeds = True
    precedence = -5
    settings_class = CudaProbesSettings
    settings: CudaProbesSettings
    deadline_s: ClassVar[float] = 10.0

    def __init__(self, settings: CudaProbesSettings | None = None) -> None:
        super().__init__(settings)
        self._world: World | None = None
        self._batch = Batch()
        self._watch = CudaWatch(
            Budget(self.settings.budget_launches_per_s), self.settings.driver, self.settings.nccl
        )  # fmt: skip
        self._forget()

    def _forget(self) -> None:
        self._libraries: CudaLibraries | None = None
        self._places: CudaPlaces | None = None
        self._stacks: UserStacks | None = None
        self._counters = Counters()
        self._kernels = Kernels()
        self._seen: dict[int, tuple[int, str, str]] = {}  # pid → start, id, container of processes with rows
        self._processes: dict[int, CudaProcess] = {}  # as last found
        self._executed: dict[int, float] = {}  # uptime when a process executed another program
        self._texts: dict[int, list[str]] = {}
        self._before: dict[int, tuple[list[Entity], list[Edge], float | None]] = {}
        self._unseen: dict[int, float] = {}  # launches of a process, by estimate, while they were left alone
        self._nccl = NcclNames()
        self._rounds = 0
        self._unused_rounds = 0

    def observe(self, world: World) -> None:
        self._batch = Batch()
        if self._world is not world:
            self.close()
            self._world = world
        if self._libraries is None or self._places is None or self._stacks is None:
            self._libraries = CudaLibraries(world.fs, world.procfs, world.tape)
            self._places = CudaPlaces(world)
            self._stacks = UserStacks(world.fs, world.procfs, world.tape)
        self._rounds += 1
        scan = self._libraries.scan()
        if not self._is_needed(scan):
            raise _nothing(scan)
        self._require_pids(world)
        probe = self._watch.open(world, self._rounds)
        uptime_s = _uptime_s(world)
        self._watch.follow(scan, uptime_s, world.procfs)
        wanted = self.settings.allocations_per_process > 0 and self._rounds % ALLOCATIONS_ROUNDS == 1
        try:
            reading = probe.read(allocations=wanted)
        except OSError as error:
            raise SourceUnavailable(f"the probe's maps cannot be read: {error.strerror}") from None
        executed = [event for event in reading.life if event.event == "exec"]
        for event in executed:
            self._executed[event.pid] = uptime_s - (reading.time_ns - event.time_ns) / 1e9
        self._libraries.look_at(event.pid for event in executed)
        self._take(reading, scan, world, allocations=wanted)
        self._kernels.restart(event.pid for event in executed)
        self._watch.report(self, reading.losses)

    def seed(self) -> Batch:
        return self._batch

    def close(self) -> None:
        self._watch.close()
        self._world = None
        self._forget()

    # --- whether there is anything to watch --------------------------------------------------------------------------

    def _is_needed(self, scan: CudaScan) -> bool:
        """Nothing is loaded, and nothing stays so for long, where no process has CUDA in its memory."""
        if scan.processes:
            self._unused_rounds = 0
            return True
        self._unused_rounds += 1
        if self._watch.probe is not None and self._unused_rounds >= UNUSED_ROUNDS:
            self._watch.close()
            self._counters, self._kernels = Counters(), Kernels()
        return self._watch.probe is not None

    def _require_pids(self, world: World) -> None:
        try:
            ours = world.procfs.own_namespace("pid")
        except (OSError, ValueError):
            return
        if ours != INITIAL_PID_NAMESPACE:
            raise SourceUnavailable(
                "the kernel counts processes as the host does, which this container does not see",
                "run gpuflight in the host's pid namespace (docker --pid=host, hostPID: true)",
            )

    # --- one reading
    # ---------------------------------------------------------------------------------------------------

    def _take(self, reading: CudaRows, scan: CudaScan, world: World, *, allocations: bool) -> None:
        assert self._places is not None and self._stacks is not None and self._libraries is not None  # noqa: S101
        self._counters.begin(reading.time_ns)
        self._places.begin(world)
        if not self._rounds % LOOK_ROUNDS:
            self._libraries.look_at(self._places.users() - set(scan.processes))
        found = by_process(reading)
        used = [(pid, time_ns) for pid, rows in found.items() if (time_ns := rows.used_ns()) is not None]
        self._places.visibility.hear(reading.environment, reading.life, used)
        self._kernels.names.learn(reading.names, reading.aliases)
        self._nccl.hear(reading.names)
        if allocations or reading.allocations:
            most = self.settings.allocations_per_process
            texts = largest_groups(reading.allocations, reading.stacks, most, self._stacks.resolve)
            self._texts = texts if allocations else {**self._texts, **texts}
        exits = {event.pid: event.exit_code for event in reading.life if event.event == "exit"}
        uses, launched = self._show(found, exits, scan, world)
        self._watch.balance(scan, launched, self._counters.seconds)
        self._add_uses(uses)
        self._say(reading, scan, found)
        self._end(exits, found, world)

    def _show(
        self, found: dict[int, Rows], exits: dict[int, int], scan: CudaScan, world: World
    ) -> tuple[list[Use], dict[int, Launched]]:
        live = world.procfs.processes()
        self._processes = {**{pid: one for pid, one in self._processes.items() if pid in exits}, **scan.processes}
        uses: list[Use] = []
        launched: dict[int, Launched] = {}
        left = Left()
        unseen = 0
        for pid in sorted(found.keys() | scan.processes.keys()):
            stat = live.get(pid)
            known = self._seen.get(pid)
            if stat is not None and (known is None or known[0] != stat.start):
                known = self._seen[pid] = (stat.start, stat.id, _container(world, pid))
            if known is None:
                unseen += 1
                continue
            if stat is None and pid not in exits:
                continue  # it ended meanwhile: how, the next reading tells
            rows = found.get(pid)
            if rows is None:
                self._batch.nodes.append(self._silent(pid, known, scan))
                continue
            launched[pid] = self._launched(pid, rows)
            shown = self._shown(pid, known, stat, rows, exits.get(pid), scan, world)
            uses += self._add(shown, left)
        if unseen:
            self.lose("processes that began and ended between two rounds", unseen)
        for what, count, setting in (
            ("kernels", left.kernels, "kernels_per_process"),
            ("streams", left.streams, "streams_per_process"),
        ):
            if count:
                self.note(
                    f"{what} of CUDA programs are told in sum only", f"raise collectors.cuda_probes.{setting}", count
                )
        if left.unnamed:
            self.note(
                "launches of kernels without a name: registered before the probe was there, and no symbol tells",
                "programs that start while gpuflight runs have names",
                left.unnamed,
            )
        return uses, launched

    def _launched(self, pid: int, rows: Rows) -> Launched:
        process = rows.process
        if process is None:
            return Launched()
        direct = sum(row.launches for row in rows.launches if row.kind == "driver")
        return Launched(
            self._counters.increase(("total", pid), process.launches) or 0,
            self._counters.increase(("inner", pid), process.launches_inner) or 0,
            self._counters.increase(("direct", pid), direct) or 0,
        )

    def _shown(
        self,
        pid: int,
        known: tuple[int, str, str],
        stat: ProcStat | None,
        rows: Rows,
        exit_code: int | None,
        scan: CudaScan,
        world: World,
    ) -> Shown:
        assert self._places is not None  # noqa: S101
        start, process_id, container = known
        shown = Shown(pid, start, process_id, rows, container=container, exit_code=exit_code)
        process = self._processes.get(pid)
        if process is not None:
            hooked = self._watch.of(process)
            shown.layers = tuple(dict.fromkeys(one.layer for one in hooked if one.layer != "libc"))
            shown.libraries = tuple(dict.fromkeys(one.library.path for one in hooked if one.layer != "libc"))
            started_s = self._executed.get(pid, start / world.procfs.ticks_per_second)
            shown.late = self._watch.is_late(process, started_s)
            shown.share = self._watch.share(process)
            shown.watched = not self._watch.was_paused(process)
        shown.allocations = self._texts.get(pid, [])
        numbers = rows.numbers()
        assumed = {row.device for row in rows.devices if row.device_assumed}
        for number in numbers:
            shown.places[number] = self._places.place(
                stat,
                process_id,
                number,
                assumed=number in assumed,
                late=shown.late,
                driver_only=rows.process is not None and not rows.process.runtime_calls,
                numbers=numbers,
            )
        shown.cores = {gpu: capacity.cores for gpu, capacity in self._places.capacities.items()}
        return shown

    def _add(self, shown: Shown, left: Left) -> list[Use]:
        """Add a process. While its launches are left alone, what they were when they were last watched stands."""
        assert self._stacks is not None  # noqa: S101
        if shown.exit_code is None:
            self._kernels.names.look_for(shown.pid, shown.rows.launches, self._stacks.functions)
        bounds = Bounds(self.settings.kernels_per_process, self.settings.streams_per_process)
        added = add_process(shown, self._counters, self._kernels, bounds, left)
        kept = self._before.get(shown.pid)
        if not shown.watched and kept is not None:
            added.kernels, added.kernel_edges, per_s = kept
            added.process.metrics.pop("cuda_launches_per_s", None)
            if per_s is not None:
                added.process.metrics["cuda_launches_per_s"] = per_s
                unseen = per_s * (self._counters.seconds or 0.0)
                self._unseen[shown.pid] = self._unseen.get(shown.pid, 0.0) + unseen
        else:
            self._before[shown.pid] = (
                added.kernels,
                added.kernel_edges,
                added.process.metrics.get("cuda_launches_per_s"),
            )
        if shown.pid in self._unseen and "cuda_launches_count" in added.process.metrics:
            counted = added.process.metrics["cuda_launches_count"]
            added.process.metrics["cuda_launches_estimated_count"] = counted + round(self._unseen[shown.pid])
        self._batch.nodes += [added.process, *added.nodes, *added.kernels]
        self._batch.edges += [*added.edges, *added.kernel_edges]
        return added.uses

    def _silent(self, pid: int, known: tuple[int, str, str], scan: CudaScan) -> Entity:
        """A process with CUDA in its memory that called nothing yet, as far as was seen."""
        libraries = [scan.libraries[key] for key in scan.processes[pid].libraries]
        cuda = [library for library in libraries if library.layers != ("libc",)]
        return nodes.Process(
            pid=pid,
            start=known[0],
            id=known[1],
            attributes={
                "cuda_layers": list(dict.fromkeys(layer for one in cuda for layer in one.layers if layer != "libc")),
                "cuda_libraries": [library.path for library in cuda],
            },
            unknown={"cuda_launches_count": NO_CALL},
        )

    def _add_uses(self, uses: list[Use]) -> None:
        assert self._places is not None  # noqa: S101
        fit(uses, self._places.capacities)
        memory = {gpu: capacity.memory_bytes for gpu, capacity in self._places.capacities.items()}
        add_uses(self._batch, uses, memory, self._places.measured())
        self._batch.nodes += container_sums(uses)

    def _say(self, reading: CudaRows, scan: CudaScan, found: dict[int, Rows]) -> None:
        assert self._places is not None  # noqa: S101
        for reason, hint, count in limits(
            scan, self._watch, reading, set(found), self._places.users(), self.settings.budget_launches_per_s
        ):
            if count:
                self.note(reason, hint, count)
        reason, hint, count = self._nccl.limit()
        if count:
            self.note(reason, hint, count)

    def _end(self, exits: dict[int, int], found: dict[int, Rows], world: World) -> None:
        """Forget what ended."""
        assert self._places is not None and self._stacks is not None and self._watch.probe is not None  # noqa: S101
        live = world.procfs.processes()
        gone = [pid for pid in found if pid not in live and pid not in exits]
        if self._watch.probe.without:
            self._watch.probe.forget(gone)
        keep = {pid for pid in {*found, *self._seen} if pid in live and pid not in exits}
        self._seen = {pid: known for pid, known in self._seen.items() if pid in keep}
        self._executed = {pid: executed for pid, executed in self._executed.items() if pid in keep}
        self._texts = {pid: texts for pid, texts in self._texts.items() if pid in keep}
        self._before = {pid: before for pid, before in self._before.items() if pid in keep}
        self._unseen = {pid: unseen for pid, unseen in self._unseen.items() if pid in keep}
        self._kernels.drop(keep)
        self._stacks.drop(keep)
        self._places.visibility.drop(keep)
        self._places.drop({known[1] for known in self._seen.values()})


def _nothing(scan: CudaScan) -> SourceUnavailable:
    if scan.unreadable > scan.readable:
        return SourceUnavailable(
            f"{NO_CUDA}; that of {scan.unreadable} processes may not be looked into",
            "run as root or grant CAP_SYS_PTRACE",
        )
    if scan.pending:
        return SourceUnavailable(
            f"{NO_CUDA} as far as it was looked into; {scan.pending} processes wait for the next rounds",
            "capture more than one round",
        )
    return SourceUnavailable(NO_CUDA, "a program that loads CUDA is watched from then on")


def _uptime_s(world: World) -> float:
    """Uptime of the machine, which the start times of processes count by. Where it is not told every process counts as
    older than what is hooked now."""
    try:
        return float(world.procfs.text("uptime").split()[0])
    except (OSError, ValueError, IndexError):
        return math.inf


def _container(world: World, pid: int) -> str:
    try:
        return world.cgroups.of(pid).container_id
    except (OSError, ValueError, SourceUnavailable):
        return ""
