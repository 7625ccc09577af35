"""The processes of the host, who started whom, and what each uses."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.process_details import DetailReader
from gpuflight.collectors.process_facts import NO_RIGHT, FactReader, ProcessFacts
from gpuflight.collectors.rates import FIRST_READING
from gpuflight.errors import SourceUnavailable
from gpuflight.graph import Edge, edges, nodes

if TYPE_CHECKING:
    from gpuflight.sources.procfs import FdIndex, ProcFs, ProcStat
    from gpuflight.sources.world import World

ACCELERATORS = ("/dev/nvidia", "/dev/davinci", "/dev/kfd", "/dev/dri/renderD", "/dev/accel")
"""Beginnings of the device files that a process with a GPU or an NPU holds open."""

_id_of = attrgetter("id")
_RATES = ("cpu_pct", "major_faults_per_s", "minor_faults_per_s")
_UNKNOWN_RATES = dict.fromkeys(_RATES, FIRST_READING)


_MANY_DESCRIPTORS = 256
"""From so many on it is worth knowing how many a process may have."""


class ProcessTreeSettings(BaseModel):
    """What the process tree shows."""

    model_config = ConfigDict(extra="forbid")

    seed_all: bool = Field(True, description="Start from every process; without, only from what others start from.")
    kernel_threads: bool = Field(False, description="Show the kernel's own threads too.")
    descriptors: bool = Field(True, description="Count each process's open descriptors.")
    cmdline_max_chars: int = Field(1024, ge=16, description="Longer command lines are cut.")
    detail_min_cpu_pct: float = Field(
        1.0, ge=0, description="CPU use (of one core) from which context switches and I/O of a process are read."
    )
    detail_max_processes: int = Field(64, ge=0, description="Most processes of which these are read in one round.")
    detail_max_threads: int = Field(256, ge=0, description="Most threads of which switches are read in one round.")


class _Shown(Struct, gc=False):
    """What was reported of a process, to be reported again as long as nothing changes."""

    stat: Any  # ProcStat
    facts: ProcessFacts
    entity: nodes.Process
    edge: Edge
    fds: int | None
    still: bool  # all its rates were 0
    kernel_thread: bool
    no_exe: bool  # no right to look into it


class ProcessTree(Collector):
    """Processes: parents and children, owner, command line, CPU, memory, faults, switches, I/O, open descriptors."""

    seeds = True
    expands = (nodes.Process,)
    describes = (nodes.Process,)
    precedence = 10
    settings_class = ProcessTreeSettings
    settings: ProcessTreeSettings

    def __init__(self, settings: ProcessTreeSettings | None = None) -> None:
        super().__init__(settings)
        self._facts = FactReader(self.settings.cmdline_max_chars)
        self._details = DetailReader(self.settings.detail_max_threads)
        self._shown: dict[int, _Shown] = {}
        self._limits: dict[str, int] = {}
        self._now: dict[int, ProcStat] = {}
        self._now_s = 0.0

    def observe(self, world: World) -> None:
        procfs: ProcFs = world.procfs
        self._procfs = procfs
        self._before, self._before_s = self._now, self._now_s
        self._now = procfs.processes()
        self._now_s = procfs.scanned_at_s
        self._elapsed_s = self._now_s - self._before_s if self._before else 0.0
        self._ticks_per_second = procfs.ticks_per_second
        self._page_size = procfs.page_size
        self._facts.begin(procfs)
        self._host = nodes.Host(hostname=procfs.hostname)
        self._index: FdIndex | None = self._descriptors()
        self._counts = self._index.counts if self._index is not None else {}
        self._children: dict[int, list[ProcStat]] | None = None
        self._emitted: set[int] = set()
        self._vanished: set[str] = set()
        self._seeded: set[str] = set()
        self._descend: set[str] = set()
        self._host_emitted = False
        self._no_exe = 0
        for gone in self._shown.keys() - self._now.keys():
            self._limits.pop(self._shown.pop(gone).stat.id, None)
        self._details.begin(procfs, self._now_s, self._worth_details())
        self._due = procfs.refreshed | self._details.chosen
        self._say_limits(procfs)

    def seed(self) -> Batch:
        batch = Batch()
        if self.settings.seed_all:
            self._seed_all(batch)
            self._seeded = set(map(_id_of, batch.nodes))
        return self._finished(batch)

    def expand(self, entities: Sequence[nodes.Process]) -> Batch:
        """Each process with its ancestors; with its children if it, or an ancestor, was asked for (``seeded``)."""
        batch = Batch()
        if self._seeded.issuperset(map(_id_of, entities)):
            return batch
        for entity in entities:
            stat = self._now.get(entity.pid)
            if stat is None or stat.start != entity.start:
                self.lose("vanished processes")
                continue
            self._emit(stat, batch)
            self._emit_ancestors(stat, batch)
            if not self.settings.seed_all and (entity.attributes.get("seeded") or entity.id in self._descend):
                for child in self._children_of(stat.pid):
                    self._descend.add(child.id)
                    self._emit(child, batch)
        return self._finished(batch)

    def _seed_all(self, batch: Batch) -> None:
        """What ``_emit`` does, with the common case, a process that did nothing, written out: it is most of a host."""
        shown_before, counts, due = self._shown, self._counts, self._due
        kernel_threads, emitted = self.settings.kernel_threads, self._emitted
        batch.nodes.append(self._host)
        self._host_emitted = True
        for pid, stat in self._now.items():
            shown = shown_before.get(pid)
            if shown is None or shown.stat is not stat or not shown.still or shown.fds != counts.get(pid) or pid in due:
                if kernel_threads or not stat.kernel_thread:
                    self._emit(stat, batch)
            elif kernel_threads or not shown.kernel_thread:
                self._no_exe += shown.no_exe
                emitted.add(pid)
                batch.nodes.append(shown.entity)
                batch.edges.append(shown.edge)

    # --- one process -----------------------------------------------------------------------------------------------

    def _emit(self, stat: ProcStat, batch: Batch) -> None:
        pid = stat.pid
        if pid in self._emitted:
            return
        shown = self._shown.get(pid)
        fds = self._counts.get(pid)
        if shown is None or shown.stat is not stat or not shown.still or shown.fds != fds or pid in self._due:
            try:
                shown = self._show(stat, shown if shown is not None and shown.stat.start == stat.start else None, fds)
            except (FileNotFoundError, ProcessLookupError):
                self.lose("vanished processes")
                self._vanished.add(stat.id)
                return
            except OSError as error:
                self.lose("unreadable processes")
                self.note(f"a process could not be read: {error.strerror}")
                self._vanished.add(stat.id)
                return
            self._shown[pid] = shown
        self._no_exe += shown.no_exe
        if not self._host_emitted and shown.edge.source == self._host.id:
            self._host_emitted = True
            batch.nodes.append(self._host)
        self._emitted.add(pid)
        batch.nodes.append(shown.entity)
        batch.edges.append(shown.edge)

    def _add_limit(self, stat: ProcStat, metrics: dict[str, int | float], unknown: dict[str, str]) -> None:
        """How many descriptors it may have; a limit is hardly ever changed, so it is read once."""
        limit = self._limits.get(stat.id)
        if limit is None:
            try:
                limit = self._procfs.descriptor_limit(stat.pid)
            except PermissionError:
                unknown["fds_limit_count"] = NO_RIGHT
                return
            except (OSError, ValueError):
                unknown["fds_limit_count"] = "its limits cannot be read"
                return
            self._limits[stat.id] = limit
        if limit >= 0:
            metrics["fds_limit_count"] = limit

    def _show(self, stat: ProcStat, shown: _Shown | None, fds: int | None) -> _Shown:
        facts = self._facts.read(stat, shown.facts if shown is not None else None)
        rates = self._rates(stat)
        still = rates is not None and not any(rates.values())
        if (
            shown is not None
            and still
            and shown.still
            and shown.facts is facts
            and shown.stat is stat
            and shown.fds == fds
            and stat.pid not in self._details.chosen
        ):
            return shown
        metrics: dict[str, int | float] = dict(rates) if rates is not None else {}
        unknown = {**facts.unknown} if rates is not None else {**facts.unknown, **_UNKNOWN_RATES}
        metrics["threads_count"] = stat.threads
        if not stat.kernel_thread:  # has no memory and no descriptors of its own
            metrics["rss_bytes"] = stat.rss_pages * self._page_size
            if fds is not None:
                metrics["fds_count"] = fds
                if fds >= _MANY_DESCRIPTORS:
                    self._add_limit(stat, metrics, unknown)
            elif self.settings.descriptors and stat.state not in "ZX":
                unknown["fds_count"] = self._no_descriptors
            self._details.add(stat, metrics, unknown)
        attributes = {**facts.attributes, "state": stat.state, "ppid": stat.ppid}
        entity = nodes.Process(
            pid=stat.pid, start=stat.start, id=stat.id, attributes=attributes, metrics=metrics, unknown=unknown or None
        )
        edge = self._edge_to(stat, shown)
        still = still and stat.pid not in self._details.chosen
        return _Shown(stat, facts, entity, edge, fds, still, stat.kernel_thread, "exe" in facts.unknown)

    def _rates(self, stat: ProcStat) -> dict[str, float] | None:
        """Over the time since the last round; None in the first. A process born since then began at 0."""
        if self._elapsed_s <= 0:
            return None
        before = self._before.get(stat.pid)
        if before is stat:
            return dict.fromkeys(_RATES, 0.0)
        if before is not None and before.start == stat.start:
            ticks, major, minor = before.cpu_ticks, before.majflt, before.minflt
        else:
            ticks = major = minor = 0
        return {
            "cpu_pct": max(0, stat.cpu_ticks - ticks) * 100.0 / self._ticks_per_second / self._elapsed_s,
            "major_faults_per_s": max(0, stat.majflt - major) / self._elapsed_s,
            "minor_faults_per_s": max(0, stat.minflt - minor) / self._elapsed_s,
        }

    def _edge_to(self, stat: ProcStat, shown: _Shown | None) -> Edge:
        """From the parent; from the host if the parent cannot be seen (ppid 0, another pid namespace).

        Holds as long as the record does: a process whose parent ends gets another ppid.
        """
        parent = self._now.get(stat.ppid)
        if parent is None or not self._shows(parent):
            parent = None
        source = self._host.id if parent is None else parent.id
        if shown is not None and shown.edge.source == source:
            return shown.edge
        return edges.Host(source, stat.id) if parent is None else edges.Own(source, stat.id)

    def _shows(self, parent: ProcStat) -> bool:
        """Whether a parent is part of the picture: the kernel's ones are only where kernel threads are."""
        return self.settings.kernel_threads or not parent.kernel_thread

    def _emit_ancestors(self, stat: ProcStat, batch: Batch) -> None:
        parent = self._now.get(stat.ppid)
        while parent is not None and parent.pid not in self._emitted and self._shows(parent):
            self._emit(parent, batch)
            if parent.pid not in self._emitted:  # it vanished
                return
            parent = self._now.get(parent.ppid)

    def _children_of(self, pid: int) -> list[ProcStat]:
        if self._children is None:
            self._children = {}
            for stat in self._now.values():
                self._children.setdefault(stat.ppid, []).append(stat)
        return self._children.get(pid, [])

    # --- once a round ----------------------------------------------------------------------------------------------

    def _descriptors(self) -> FdIndex | None:
        self._no_descriptors = "no right to look into this process"
        if not self.settings.descriptors:
            return None
        try:
            return self._procfs.fds()
        except SourceUnavailable as error:
            self._no_descriptors = error.reason
            self.note(error.reason, error.hint)
            return None

    def _worth_details(self) -> list[ProcStat]:
        """The processes whose switches and I/O are read: those with a GPU, then those that use most CPU."""
        limit = self.settings.detail_max_processes
        if not limit:
            return []
        accelerated = self._index.holders(ACCELERATORS) if self._index is not None else set()
        least_ticks = self.settings.detail_min_cpu_pct / 100 * self._ticks_per_second * max(self._elapsed_s, 0.0)
        busy = []
        for pid, stat in self._now.items():
            before = self._before.get(pid)
            if (before is stat and pid not in accelerated) or stat.kernel_thread:
                continue
            ticks = stat.cpu_ticks - (before.cpu_ticks if before is not None and before.start == stat.start else 0)
            if pid in accelerated or (self._elapsed_s > 0 and ticks >= max(least_ticks, 1)):
                busy.append((pid not in accelerated, -ticks, stat))
        busy.sort(key=lambda entry: entry[:2])
        if len(busy) > limit:
            self.lose("processes without context switches and I/O", len(busy) - limit)
        return [stat for _, _, stat in busy[:limit]]

    def _say_limits(self, procfs: ProcFs) -> None:
        if procfs.vanished:
            self.lose("vanished processes", procfs.vanished)
        if procfs.unreadable:
            self.lose("unreadable processes", procfs.unreadable)
        if procfs.hides_processes():
            self.note("/proc hides the processes of other users (hidepid)", "run as root or as a member of its gid")

    def _finished(self, batch: Batch) -> Batch:
        if self._vanished:  # its children have another parent by now; the next round shows which
            batch.edges = [edge for edge in batch.edges if edge.source not in self._vanished]
        if self._no_exe:
            self.note(
                "executables, I/O and open files of some processes may not be read",
                "run as root or grant CAP_SYS_PTRACE",
                self._no_exe,
            )
            self._no_exe = 0
        return batch
