"""Processes that ended since the last round, also those that no look at /proc ever met, and programs started."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import Struct
from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.kernel_programs import NO_ACCOUNT, UNKNOWN, KernelPrograms, Starts, per_s
from gpuflight.collectors.process_facts import redacted_cmdline
from gpuflight.graph import Edge, Entity, Metric, edges, nodes

if TYPE_CHECKING:
    from gpuflight.sources.procfs import ProcFs, ProcStat
    from gpuflight.sources.world import World

_PROGRAMS = ("on_exec", "on_exit")
_HEAD = struct.Struct("=4I3Q16s2I")
_USED = struct.Struct("=5Q")
_EXEC_KIND, _EXIT_KIND = 1, 2
_KNOWN_AT_MOST = 65_536
_RING_BYTES = 1 << 20


class KernelProcessSettings(BaseModel):
    """How many ended processes are shown."""

    model_config = ConfigDict(extra="forbid")

    ended_limit: int = Field(256, ge=0, description="Most ended processes shown in one round; those that ran longest.")
    ring_bytes: int = Field(
        _RING_BYTES, ge=4096, le=1 << 28, description="Room in the kernel for what happens in one round (a power of 2)."
    )
    cmdline_max_chars: int = Field(1024, ge=16, description="Longer command lines are cut.")


class _Head(NamedTuple):
    """What both kinds of record begin with. ``word``: bytes of the arguments; the status, as wait(2) tells it."""

    kind: int
    pid: int
    parent_pid: int
    uid: int
    start_ns: int
    parent_start_ns: int
    time_ns: int
    comm: bytes
    word: int
    pad: int


class _Used(NamedTuple):
    """What a process used until it ended, all its threads together."""

    run_ns: int
    minor_faults: int
    major_faults: int
    read_bytes: int
    written_bytes: int


class _Program(Struct, gc=False):
    """What a process executes, since its last exec. ``cut``: there were more arguments than the kernel kept for us."""

    argv: list[str]
    cut: bool


class _Ended(Struct, gc=False):
    """A process that ended."""

    id: str
    start: int
    parent: str
    head: _Head
    used: _Used
    program: _Program | None

    @property
    def lifetime_ms(self) -> float:
        return (self.head.time_ns - self.head.start_ns) / 1e6


class KernelProcess(Collector):
    """Ended processes with exit code or signal, lifetime and what they used, however short they lived (eBPF).

    Each is shown in the one round after its end (``ended``), under its parent where that still lives, so that what is
    too short for any look at /proc is in the picture too. How many programs were started and processes ended stands at
    the host.
    """

    name = "kernel_process"
    seeds = True
    precedence = -4  # before those that name processes only by what they did: who ended is asked nothing more
    settings_class = KernelProcessSettings
    settings: KernelProcessSettings

    def __init__(self, settings: KernelProcessSettings | None = None) -> None:
        super().__init__(settings)
        self._probe = KernelPrograms("process", {})
        self._known: dict[str, _Program] = {}
        self._batch = Batch()
        self._processes: dict[int, ProcStat] | None = None

    def observe(self, world: World) -> None:
        ring_bytes = 1 << (self.settings.ring_bytes - 1).bit_length()
        probe = self._probe.open(world, _PROGRAMS, map_entries={"events": ring_bytes})
        processes = world.procfs.processes()  # before the events: who ends meanwhile is told now and not again
        if processes is self._processes:
            return  # the same round once more: what happened is told only once
        self._processes = processes
        self._batch = Batch()
        elapsed_s = self._probe.elapsed_s(world.clock.monotonic_s())
        starts = Starts(world.procfs.ticks_per_second)
        started, ended = self._take(probe.drain("events"), starts)
        self._probe.report(self, ring="events")
        alive = {stat.id for stat in processes.values()}
        if len(self._known) > _KNOWN_AT_MOST // 2:
            self._known = {id_: program for id_, program in self._known.items() if id_ in alive}
        host = nodes.Host(hostname=world.procfs.hostname)
        if world.procfs.hostname:
            rates = per_s({"program_starts_per_s": started, "process_ends_per_s": len(ended)}, elapsed_s)
            self._batch.nodes.append(nodes.Host(hostname=host.hostname, metrics=rates[0], unknown=rates[1]))
        self._show(self._choose(ended), alive, host, world.procfs)

    def seed(self) -> Batch:
        return self._batch

    def close(self) -> None:
        self._probe.close()
        self._known.clear()
        self._processes = None

    def _take(self, records: list[bytes], starts: Starts) -> tuple[int, list[_Ended]]:
        """How many programs were started, and which processes ended, in the order of events."""
        started = 0
        ended: dict[str, _Ended] = {}
        for record in records:
            try:
                head = _Head(*_HEAD.unpack_from(record))
                process = starts.process_id(head.pid, head.start_ns)
                if head.kind == _EXEC_KIND:
                    started += 1
                    arguments = record[_HEAD.size :]
                    if len(self._known) < _KNOWN_AT_MOST:
                        self._known[process] = _Program(_argv(arguments), head.word > len(arguments))
                    else:
                        self.lose("command lines of programs beyond those that are kept")
                elif head.kind == _EXIT_KIND:
                    used = _Used(*_USED.unpack_from(record, _HEAD.size))
                    parent = starts.process_id(head.parent_pid, head.parent_start_ns) if head.parent_pid else ""
                    program = self._known.pop(process, None)
                    if process in ended:  # its last two threads went together: the later one knows all
                        program = program or ended[process].program
                    ended[process] = _Ended(process, starts.ticks(head.start_ns), parent, head, used, program)
            except struct.error:
                self.lose("records of the kernel that make no sense")
        return started, list(ended.values())

    def _choose(self, ended: list[_Ended]) -> list[_Ended]:
        limit = self.settings.ended_limit
        if len(ended) <= limit:
            return ended
        self.lose("ended processes beyond ended_limit", len(ended) - limit)
        return sorted(ended, key=lambda one: -one.lifetime_ms)[:limit]

    def _show(self, ended: list[_Ended], alive: set[str], host: nodes.Host, procfs: ProcFs) -> None:
        shown = {one.id for one in ended}
        for one in ended:
            self._batch.nodes.append(self._entity(one, procfs))
            parent: Edge
            if one.parent in alive or one.parent in shown:
                parent = edges.Own(one.parent, one.id)
                if one.parent not in shown:
                    start = int(one.parent[one.parent.rindex("=") + 1 : -1])
                    self._batch.nodes.append(nodes.Process(pid=one.head.parent_pid, start=start, id=one.parent))
            else:
                self._batch.nodes.append(host)
                parent = edges.Host(host.id, one.id)
            self._batch.edges.append(parent)

    def _entity(self, one: _Ended, procfs: ProcFs) -> Entity:
        head, used = one.head, one.used
        name = head.comm.partition(b"\0")[0].decode("utf-8", "backslashreplace")
        attributes: dict[str, Any] = {"name": name, "ended": True, "uid": head.uid, "ppid": head.parent_pid}
        user = procfs.user(head.uid)
        if user is not None:
            attributes["user"] = user
        unknown: dict[str, str] = {}
        if one.program is None:
            unknown["cmdline"] = "it started no program since the probes were attached"
        elif one.program.argv:
            attributes["cmdline"] = redacted_cmdline(one.program.argv, self.settings.cmdline_max_chars)
            if one.program.cut:
                attributes["cmdline_cut"] = True
        signal = head.word & 0x7F
        if signal:
            attributes["exit_signal"] = signal
            if head.word & 0x80:
                attributes["core_dumped"] = True
        else:
            attributes["exit_code"] = head.word >> 8 & 0xFF
        metrics: dict[str, Metric] = {
            "lifetime_ms": one.lifetime_ms,
            "minor_faults_count": used.minor_faults,
            "major_faults_count": used.major_faults,
        }
        for name, value in (("io_read_bytes", used.read_bytes), ("io_write_bytes", used.written_bytes)):
            if value == UNKNOWN:
                unknown[name] = NO_ACCOUNT
            else:
                metrics[name] = value
        if used.run_ns:
            metrics["cpu_ms"] = used.run_ns / 1e6
        else:
            unknown["cpu_ms"] = "shorter than a tick of the scheduler, which had not counted it yet"
        return nodes.Process(
            pid=head.pid,
            start=one.start,
            id=one.id,
            attributes=attributes,
            metrics=metrics,
            unknown=unknown or None,
        )


def _argv(raw: bytes) -> list[str]:
    return [part.decode("utf-8", "backslashreplace") for part in raw.rstrip(b"\0").split(b"\0")] if raw else []
