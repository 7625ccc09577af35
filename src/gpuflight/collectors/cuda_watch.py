"""What the CUDA probe is attached to: every file with CUDA in it that some process uses, and for how long launches are
left alone.

A file is hooked when its first process is found and stays so for a while after its last one ended, so that the next one
is seen from its first call. Not long in a container: what is hooked keeps its file system mounted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from gpuflight.collectors.cuda_budget import Budget
from gpuflight.errors import SourceUnavailable
from gpuflight.sources.cuda_libraries import CudaLibrary, CudaProcess, CudaScan, Key

if TYPE_CHECKING:
    from gpuflight.collectors.base import Collector
    from gpuflight.sources.cuda_probe.attachment import Attachment
    from gpuflight.sources.cuda_probe.functions import Layer
    from gpuflight.sources.cuda_probe.probe import CudaProbe
    from gpuflight.sources.procfs import ProcFs
    from gpuflight.sources.world import World

RETRY_ROUNDS = 12
"""Rounds after which what was refused is tried again."""

KEEP_ROUNDS, KEEP_ROUNDS_ELSEWHERE = 60, 2
"""How long a file without a process stays hooked: one of our own mount namespace, and any other."""

INNER_PER_S = 5_000.0
"""Launches of the runtime per s that reach the driver, from which it is worthwhile to leave the driver's alone."""

_ORDER: tuple[Layer, ...] = ("libc", "runtime", "nccl", "driver")


class Hooked(Struct):
    """One layer of one file. ``since_s``: uptime of the machine when it was hooked; ``pid``: by way of which process.
    ``paused``: whether its launches were left alone since the last reading."""

    library: CudaLibrary
    layer: Layer
    pid: int
    attachment: Attachment | None = None
    since_s: float = 0.0
    refused: SourceUnavailable | None = None
    unused_rounds: int = 0
    rounds: int = 0
    elsewhere: bool = False
    paused: bool = False


class Launched(Struct, gc=False):
    """New launches of one process since the last reading. ``inner``: of the runtime, seen at the driver too;
    ``direct``: made at the driver by the program itself."""

    total: int = 0
    inner: int = 0
    direct: int = 0


class CudaWatch:
    """The probe and its attachments. ``driver``: ``auto`` leaves the driver's launches alone while they are all the
    runtime's, but for one round in ``RETRY_ROUNDS``; ``always`` never does; ``never`` hooks no driver beside a runtime.
    """

    def __init__(self, budget: Budget, driver: str, nccl: bool) -> None:
        self.budget = budget
        self.hooked: dict[tuple[str, Layer], Hooked] = {}
        """By identity of the file: to hook one twice, by two names, would count everything twice."""
        self.probe: CudaProbe | None = None
        self._driver = driver
        self._nccl = nccl
        self._refused: tuple[SourceUnavailable, int] | None = None  # with the round of the try
        self._world: World | None = None
        self._identities: dict[Key, str] = {}
        self._costs: dict[str, tuple[int, int]] = {}
        self._losses: dict[str, int] = {}

    def open(self, world: World, round_number: int) -> CudaProbe:
        """The probe, loaded once. Raises SourceUnavailable, with the last reason until it is tried again."""
        if self.probe is not None and self._world is world:
            return self.probe
        if self._refused is not None and self._world is world:
            error, tried = self._refused
            if round_number - tried < RETRY_ROUNDS:
                raise SourceUnavailable(error.reason, error.hint)
        self.close()
        self._world = world
        from gpuflight.sources.cuda_probe.probe import CudaProbe  # most hosts never need it

        try:
            self.probe = CudaProbe(world.probes, tape=world.tape)
        except SourceUnavailable as error:
            self._refused = error, round_number
            raise
        return self.probe

    def close(self) -> None:
        """Detach everything. May be called twice."""
        if self.probe is not None:
            self.probe.close()
        self.probe = None
        self._refused = self._world = None
        self.hooked.clear()
        self._costs.clear()
        self._losses.clear()

    def follow(self, scan: CudaScan, uptime_s: float, procfs: ProcFs) -> None:
        """Hook what is new, and unhook what nobody uses any more."""
        self._identities = {key: library.identity for key, library in scan.libraries.items()}
        users: dict[str, list[int]] = {}
        alone: set[str] = set()  # driver libraries that some process uses without a runtime
        for process in scan.processes.values():
            for identity in self._files(process):
                users.setdefault(identity, []).append(process.pid)
                if process.hidden:
                    alone.add(identity)
        for place, hooked in list(self.hooked.items()):
            hooked.rounds += 1
            hooked.unused_rounds = 0 if place[0] in users else hooked.unused_rounds + 1
            left = hooked.elsewhere and place[0] in users and hooked.pid not in users[place[0]]
            # One that others use by way of another container: not to keep the file system of the first one mounted.
            if left or hooked.unused_rounds > (KEEP_ROUNDS_ELSEWHERE if hooked.elsewhere else KEEP_ROUNDS):
                self._unhook(place)
        for library in scan.libraries.values():
            for layer in sorted(library.layers, key=_ORDER.index):
                if (layer == "nccl" and not self._nccl) or (
                    layer == "driver" and self._driver == "never" and library.identity not in alone
                ):
                    continue
                pid = next(pid for pid in users[library.identity] if library.key in scan.processes[pid].libraries)
                self._hook(library, layer, pid, uptime_s, procfs)

    def _files(self, process: CudaProcess) -> list[str]:
        """Identities of the files that a process uses."""
        return [self._identities[key] for key in process.libraries if key in self._identities]

    def _hook(self, library: CudaLibrary, layer: Layer, pid: int, uptime_s: float, procfs: ProcFs) -> None:
        assert self.probe is not None  # noqa: S101 - open() comes first
        hooked = self.hooked.get((library.identity, layer))
        if hooked is None:
            hooked = Hooked(library, layer, pid, elsewhere=_is_elsewhere(pid, procfs))
            self.hooked[library.identity, layer] = hooked
        elif hooked.attachment is not None or hooked.rounds % RETRY_ROUNDS:
            return
        try:
            hooked.attachment = self.probe.attach(library.by_way_of(pid), layer)
            hooked.since_s, hooked.refused = uptime_s, None
        except SourceUnavailable as error:
            hooked.refused = error
        except OSError as error:
            hooked.refused = SourceUnavailable(f"{library.path} cannot be hooked: {error.strerror}")

    def _unhook(self, place: tuple[str, Layer]) -> None:
        hooked = self.hooked.pop(place)
        if hooked.attachment is not None and self.probe is not None:
            try:
                self.probe.detach(hooked.attachment)
            except (OSError, SourceUnavailable):
                hooked.attachment.close()

    # --- what it says of a process ---------------------------------------------------------------------------------

    def of(self, process: CudaProcess) -> list[Hooked]:
        """Everything hooked that a process uses, the driver last."""
        files = self._files(process)
        found = [hooked for (file, _), hooked in self.hooked.items() if file in files and hooked.attachment]
        return sorted(found, key=lambda hooked: _ORDER.index(hooked.layer))

    def is_late(self, process: CudaProcess, started_s: float) -> bool:
        """Whether a program ran (since ``started_s`` of the machine's uptime) before all of its files were hooked where
        it chooses its device."""
        return any(hooked.since_s > started_s for hooked in self.of(process) if hooked.layer != "nccl")

    def share(self, process: CudaProcess) -> float:
        """Share of the time in which the launches of a process are watched."""
        return min((self.budget.share(file) for file in self._files(process)), default=1.0)

    def is_over(self, hooked: Hooked) -> bool:
        """Whether a process launches more through this file than the budget."""
        return self.budget.share(hooked.library.identity) < 1

    def was_paused(self, process: CudaProcess) -> bool:
        """Whether its launches were left alone since the last reading."""
        return any(hooked.paused for hooked in self.of(process) if self.is_over(hooked))

    # --- leaving launches alone ------------------------------------------------------------------------------------

    def balance(self, scan: CudaScan, launched: Mapping[int, Launched], seconds: float | None) -> None:
        """After a reading: decide whose launches are left alone until the next one."""
        self.budget.next_round()
        for file, most in self._busiest(scan, launched).items():
            if seconds and not any(hooked.paused for hooked in self._launching(file)):
                self.budget.saw(file, most, seconds)
        left_alone = self.budget.left_alone()
        for hooked in self.hooked.values():
            if hooked.attachment is None or hooked.layer not in ("runtime", "driver"):
                continue
            pause = hooked.library.identity in left_alone
            if hooked.layer == "driver" and not pause:
                pause = self._is_only_inner(hooked, scan, launched, seconds)
            if pause:
                hooked.attachment.pause_launches()
            else:
                hooked.attachment.resume_launches()
            hooked.paused = pause
        self.budget.drop(set(self._identities.values()))

    def _launching(self, file: str) -> list[Hooked]:
        return [hooked for layer in ("runtime", "driver") if (hooked := self.hooked.get((file, layer))) is not None]

    def _busiest(self, scan: CudaScan, launched: Mapping[int, Launched]) -> dict[str, int]:
        """The most launches of one process, by the file that it made them through."""
        found: dict[str, int] = {}
        for pid, new in launched.items():
            process = scan.processes.get(pid)
            for key in process.libraries if process is not None else ():
                file, layers = self._identities[key], scan.libraries[key].layers
                if "runtime" in layers:
                    count = new.total - new.direct
                elif "driver" in layers:
                    count = new.direct + new.inner
                else:
                    continue
                found[file] = max(found.get(file, 0), count)
        return found

    def _is_only_inner(
        self, hooked: Hooked, scan: CudaScan, launched: Mapping[int, Launched], seconds: float | None
    ) -> bool:
        """Whether launches at the driver are all the runtime's, many, and not to be looked at this time."""
        file = hooked.library.identity
        if self._driver != "auto" or any(
            process.hidden and file in self._files(process) for process in scan.processes.values()
        ):
            return False
        if hooked.paused:
            return bool(hooked.rounds % RETRY_ROUNDS)
        users = [
            new
            for pid, new in launched.items()
            if (process := scan.processes.get(pid)) is not None and file in self._files(process)
        ]
        inner = sum(new.inner for new in users)
        return bool(seconds) and not any(new.direct for new in users) and inner / (seconds or 1) > INNER_PER_S

    # --- coverage --------------------------------------------------------------------------------------------------

    def report(self, collector: Collector, losses: Mapping[str, int]) -> None:
        """Count what was lost since the last reading, and what the programs cost."""
        assert self.probe is not None  # noqa: S101 - open() comes first
        from gpuflight.sources.cuda_probe.probe import LOSSES

        for name, count in losses.items():
            new = count - self._losses.get(name, 0)
            if new > 0:
                collector.lose(LOSSES.get(name, name), new)
        self._losses = dict(losses)
        for cost in self.probe.costs():
            if cost.run_count is None or cost.run_time_ns is None:
                continue
            before = self._costs.get(cost.program, (0, 0))
            self._costs[cost.program] = cost.run_count, cost.run_time_ns
            if cost.run_count > before[0]:
                collector.spend(cost.program, cost.run_count - before[0], (cost.run_time_ns - before[1]) / 1e6)

    def refusals(self) -> Iterable[tuple[str, str, int]]:
        """(reason, hint, count) of what could not be hooked."""
        for hooked in self.hooked.values():
            if hooked.refused is not None:
                yield hooked.refused.reason, hooked.refused.hint, 1
            elif hooked.attachment is not None and hooked.attachment.failed:
                symbol, why = hooked.attachment.failed[0]
                count = len(hooked.attachment.failed)
                yield f"functions of {hooked.library.path} could not be hooked: {symbol}: {why}", "", count


def _is_elsewhere(pid: int, procfs: ProcFs) -> bool:
    try:
        return procfs.namespace(pid, "mnt") != procfs.own_namespace("mnt")
    except (OSError, ValueError):
        return True
