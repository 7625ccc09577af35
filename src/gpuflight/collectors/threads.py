"""The threads of processes that have several, and what each uses of the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.rates import FIRST_READING
from gpuflight.graph import Edge, edges, nodes

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcFs, ProcStat
    from gpuflight.sources.world import World

_NO_CPU = {"cpu_pct": 0.0, "run_delay_pct": 0.0}
_UNKNOWN = {"cpu_pct": FIRST_READING}


class ThreadsSettings(BaseModel):
    """Which threads are shown."""

    model_config = ConfigDict(extra="forbid")

    max_per_process: int = Field(64, ge=1, description="Most threads shown of one process; those with most CPU time.")
    max_threads: int = Field(20_000, ge=1, description="Most threads shown in one round.")
    kernel_threads: bool = Field(False, description="Look at the kernel's own threads too.")


class _Group(Struct, gc=False):
    """What was reported of one process's threads."""

    start: int
    threads: Any  # the very list of ProcFs
    shown: dict[int, Any]  # tid → _Shown
    hidden: int
    still: bool


class _Shown(Struct, gc=False):
    """What was reported of one thread."""

    stat: Any  # ProcStat
    entity: nodes.Thread
    edge: Edge
    delay_ns: int | None
    still: bool


class Threads(Collector):
    """Threads of each process: name, state, processor, CPU use, time spent waiting for a CPU."""

    expands = (nodes.Process,)
    settings_class = ThreadsSettings
    settings: ThreadsSettings

    def __init__(self, settings: ThreadsSettings | None = None) -> None:
        super().__init__(settings)
        self._groups: dict[int, _Group] = {}
        self._now_s = 0.0
        self._known: dict[int, _Group] = {}

    def observe(self, world: World) -> None:
        procfs: ProcFs = world.procfs
        self._procfs = procfs
        self._processes = procfs.processes()
        self._elapsed_s = procfs.scanned_at_s - self._now_s if self._now_s else 0.0
        self._now_s = procfs.scanned_at_s
        self._ticks_per_second = procfs.ticks_per_second
        self._known, self._groups = self._groups, {}
        self._count = 0

    def expand(self, entities: Sequence[nodes.Process]) -> Batch:
        batch = Batch()
        for entity in entities:
            stat = self._processes.get(entity.pid)
            if (
                stat is None
                or stat.start != entity.start
                or stat.threads < 2
                or stat.pid in self._groups
                or (stat.kernel_thread and not self.settings.kernel_threads)
            ):
                continue
            try:
                threads = self._procfs.threads(stat.pid)
            except (FileNotFoundError, ProcessLookupError):
                self.lose("vanished processes")
                continue
            except OSError as error:
                self.note(f"threads of a process cannot be listed: {error.strerror}", "run as root")
                continue
            group = self._group(stat, threads)
            self._groups[stat.pid] = group
            if group.hidden:
                self.lose("threads beyond max_per_process", group.hidden)
            shown = list(group.shown.values())
            room = self.settings.max_threads - self._count
            if len(shown) > room:
                self.lose("threads beyond max_threads", len(shown) - room)
                shown = shown[:room]
            self._count += len(shown)
            batch.nodes.extend(thread.entity for thread in shown)
            batch.edges.extend(thread.edge for thread in shown)
            if shown:
                batch.nodes.append(nodes.Process(pid=stat.pid, start=stat.start, id=stat.id))
        return batch

    def _group(self, process: ProcStat, threads: list[ProcStat]) -> _Group:
        known = self._known.get(process.pid)
        if known is not None and known.start != process.start:
            known = None
        if known is not None and known.threads is threads and known.still:
            return known
        limit = self.settings.max_per_process
        chosen = threads
        if len(threads) > limit:
            # Most CPU time since its start, not this round: otherwise the set would change every round.
            chosen = sorted(threads, key=lambda thread: (-thread.cpu_ticks, thread.pid))[:limit]
        before = known.shown if known is not None else {}
        shown = {
            thread.pid: self._show(process, thread, before.get(thread.pid), known is not None) for thread in chosen
        }
        still = all(thread.still for thread in shown.values())
        return _Group(process.start, threads, shown, len(threads) - len(chosen), still)

    def _show(self, process: ProcStat, thread: ProcStat, last: _Shown | None, process_known: bool) -> _Shown:
        if last is not None and last.stat.start != thread.start:  # the tid was given to another thread
            last = None
        if last is not None and last.stat is thread and last.still:
            return last
        metrics: dict[str, int | float] = {}
        unknown: dict[str, str] | None = None
        delay_ns = last.delay_ns if last is not None else None
        moving = last is None or last.stat is not thread
        ticks = last.stat.cpu_ticks if last is not None else 0
        if self._elapsed_s <= 0 or (last is None and not process_known):
            unknown = _UNKNOWN
        elif not moving:
            metrics = _NO_CPU if delay_ns is not None else {"cpu_pct": 0.0}
        else:
            metrics["cpu_pct"] = max(0, thread.cpu_ticks - ticks) * 100.0 / self._ticks_per_second / self._elapsed_s
        if moving:
            delay_ns = self._delay_ns(process.pid, thread.pid)
            before_ns = last.delay_ns if last is not None else (0 if process_known else None)
            if metrics and delay_ns is not None and before_ns is not None:
                metrics["run_delay_pct"] = max(0, delay_ns - before_ns) / 1e7 / self._elapsed_s
        entity = nodes.Thread(
            tid=thread.pid,
            start=thread.start,
            attributes={"name": thread.comm, "state": thread.state, "processor": thread.processor},
            metrics=metrics,
            unknown=unknown,
        )
        edge = last.edge if last is not None else edges.Own(process.id, entity.id)
        return _Shown(thread, entity, edge, delay_ns, not moving and unknown is None)

    def _delay_ns(self, pid: int, tid: int) -> int | None:
        """None where the kernel does not account for it (CONFIG_SCHED_INFO)."""
        try:
            return self._procfs.run_delay_ns(pid, tid)
        except (OSError, IndexError, ValueError):
            return None
