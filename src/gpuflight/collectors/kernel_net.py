"""Socket traffic as the kernel sees it happen: who moved what through which socket, and connections however short."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from gpuflight.collectors.base import Batch, Collector
from gpuflight.collectors.kernel_histograms import LAYOUT, Histogram
from gpuflight.collectors.kernel_net_edges import Drawing
from gpuflight.collectors.kernel_net_ends import Ends
from gpuflight.collectors.kernel_net_flows import Amount, Flows
from gpuflight.collectors.kernel_net_rows import CALLS_BYTES, COOKIE_BYTES, KEY_BYTES, SOCKET_BYTES
from gpuflight.collectors.kernel_programs import KernelPrograms, Starts, alive_processes, per_s
from gpuflight.graph import nodes

if TYPE_CHECKING:
    from gpuflight.sources.world import World

_PROGRAMS = ("on_send", "on_receive", "on_state")
_CONNECTIONS_ONLY = ("on_state",)
"""Before Linux 6.3 there are no events of sends and receives."""

_LOSSES = {
    0: "uses of sockets that found no room",
    1: "sockets that found no room",
    2: "waits for connections that found no room",
}
_WAIT_KEY = struct.Struct("=II")
_WAIT = struct.Struct("=Q" + LAYOUT)
_WAITS = {0: "connect", 1: "accept"}


class KernelNetSettings(BaseModel):
    """What is watched of sockets, and how much of it is shown."""

    model_config = ConfigDict(extra="forbid")

    seed_all: bool = Field(True, description="Show every active socket, not only those of processes in the picture.")
    threads: bool = Field(True, description="Tell apart the threads of a process that use a socket.")
    accept_latency: bool = Field(
        False,
        description="Measure how long connections wait for accept(2). The kernel has no event for it, so a program "
        "looks at every system call of the machine as it returns (docs/kernel-probes.md has the cost).",
    )
    ended_limit: int = Field(256, ge=0, description="Most connections shown that ended since the last round.")
    max_sockets: int = Field(
        16_384, ge=64, le=1_048_576, description="Room in the kernel for sockets (150 bytes each)."
    )
    max_uses: int = Field(
        32_768, ge=64, le=1_048_576, description="Room in the kernel for uses of a socket by a thread (100 bytes each)."
    )


class KernelNet(Collector):
    """Bytes and calls of each process and thread on each socket, connect waits, and short-lived connections (eBPF).

    Internet and unix sockets. What other collectors show of the same sockets is enriched: ``Belong`` from an endpoint
    to its process and ``Access`` from a thread to it carry what that process or thread moved; ``ConnectTo`` carries
    calls, and bytes where the snapshot has none. A connection that ended since the last round is shown once more,
    ``ended``, with its totals, even if it was opened after that round.
    """

    name = "kernel_net"
    seeds = True
    expands = (nodes.Process,)
    precedence = -5
    settings_class = KernelNetSettings
    settings: KernelNetSettings

    def __init__(self, settings: KernelNetSettings | None = None) -> None:
        super().__init__(settings)
        self._programs = KernelPrograms("net", _LOSSES)
        self._flows: Flows | None = None
        self._waits: dict[bytes, tuple[int, Histogram]] = {}
        self._drawing = Drawing()

    def observe(self, world: World) -> None:
        self._drawing = Drawing()
        accept = ["on_accept"] if self.settings.accept_latency else []
        self._programs.open(
            world,
            [*_PROGRAMS, *accept],
            instead=[*_CONNECTIONS_ONLY, *accept],
            map_entries={"sockets": self.settings.max_sockets, "traffic": self.settings.max_uses},
        )
        if self._programs.without is not None:
            reason = f"{self._programs.without.reason}; connections are seen, bytes and calls of processes are not"
            self.note(
                reason, self._programs.without.hint or "Linux 6.3 and newer have the events of sends and receives"
            )
        starts = Starts(world.procfs.ticks_per_second)
        if self._flows is None:
            self._flows = Flows(starts)
        elapsed_s = self._programs.elapsed_s(world.clock.monotonic_s())
        self._programs.report(self)
        traffic = self._programs.read("traffic", KEY_BYTES, CALLS_BYTES)
        self._flows.update(self._programs.read("sockets", COOKIE_BYTES, SOCKET_BYTES), traffic)
        waits = self._read_waits(starts)
        self._forget(alive_processes(world))
        ends = Ends(world, self._flows, self)
        self._drawing = Drawing(ends, elapsed_s, self)
        self._drawing.draw(self._flows.by_cookie.values(), self.settings.ended_limit, threads=self.settings.threads)
        self._add_processes(elapsed_s, waits)

    def seed(self) -> Batch:
        return self._drawing.everything() if self.settings.seed_all else Batch()

    def expand(self, entities: Sequence[nodes.Process]) -> Batch:
        return Batch() if self.settings.seed_all else self._drawing.of([entity.id for entity in entities])

    def close(self) -> None:
        self._programs.close()
        self._flows = None
        self._waits.clear()

    def _read_waits(self, starts: Starts) -> dict[str, dict[str, Histogram]]:
        """By process id and what was waited for, since the last round."""
        found: dict[str, dict[str, Histogram]] = {}
        last, self._waits = self._waits, {}
        for key, raw in self._programs.read("waits", _WAIT_KEY.size, _WAIT.size):
            pid, kind = _WAIT_KEY.unpack(key)
            start_ns, *fields = _WAIT.unpack(raw)
            now = Histogram.of(tuple(fields))
            self._waits[key] = start_ns, now
            before_ns, before = last.get(key, (0, None))
            since = now.since(before if before_ns == start_ns else None)
            if since.count and pid and kind in _WAITS:
                found.setdefault(starts.process_id(pid, start_ns), {})[_WAITS[kind]] = since
        return found

    def _add_processes(self, elapsed_s: float | None, waits: dict[str, dict[str, Histogram]]) -> None:
        """What each process moved in all, and how long it waited for connections."""
        assert self._flows is not None  # noqa: S101 - observe set it
        totals: dict[str, Amount] = {}
        for used in self._flows.by_cookie.values():
            for process, amount in used.amounts().items():
                totals.setdefault(process, Amount()).add(amount)
        for process in totals.keys() | waits.keys():
            if not process:
                continue
            grown: dict[str, float] = {}
            total = totals.get(process)
            if total is not None:
                grown = {f"socket_{name}": value for name, value in total.grown().items()}
                grown["socket_failures_per_s"] = total.failures
            found = waits.get(process, {})
            grown.update((f"{name}s_per_s", histogram.count) for name, histogram in found.items())
            metrics, unknown = per_s(grown, elapsed_s)
            attributes: dict[str, Any] = {}
            for name, histogram in found.items():
                histogram.add_to(metrics, attributes, name)
            self._drawing.add_process(process, attributes, metrics, unknown)

    def _forget(self, alive: set[str]) -> None:
        """Delete the rows that were told for the last time in the round before."""
        assert self._flows is not None  # noqa: S101 - observe set it
        sockets, users = self._flows.finished(alive)
        self._programs.forget("sockets", sockets)
        self._programs.forget("traffic", users)
