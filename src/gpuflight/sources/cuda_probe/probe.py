"""CudaProbe: hooks files, and reads what the kernel side added up.

probe = CudaProbe(world.probes, tape=world.tape)      # SourceUnavailable(reason, hint) where it cannot work
attachment = probe.attach("/proc/7/root/usr/lib/libcudart.so.12", "runtime")
rows = probe.read()                                   # once a round
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import msgspec

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.base import Link, ProbeObject, ProgramCost
from gpuflight.sources.bpf.elf import ElfError
from gpuflight.sources.bpf.probes import Probes
from gpuflight.sources.cuda_probe import layouts
from gpuflight.sources.cuda_probe.attachment import Attachment
from gpuflight.sources.cuda_probe.cookies import FILE_NUMBERS
from gpuflight.sources.cuda_probe.functions import Layer
from gpuflight.sources.cuda_probe.reader import SOURCE, Reader
from gpuflight.sources.cuda_probe.rows import CudaRows
from gpuflight.sources.cuda_probe.symbols import Found, find_places
from gpuflight.sources.recording import Tape

LIFE_PROGRAMS = ("cuda_fork", "cuda_exec", "cuda_exit")

PROGRAMS = (
    "cuda_launch",
    "cuda_launch_return",
    "cuda_call",
    "cuda_return",
    "nccl_call",
    "nccl_return",
    "cuda_environment",
)
_DRIVER, _DETACHED = 0, 1  # enum setting

LOSSES = {**dict(layouts.LOSSES), "life": "forks, execs, exits, changes of the environment: the ring buffer was full"}
"""What each name in ``CudaRows.losses`` means."""


class CudaProbe:
    """The CUDA probe of one host: one object in the kernel for any number of files. Not for several threads at a time.

    ``without``: programs that could not be attached and why; without those of ``LIFE_PROGRAMS`` the caller has to find
    ends of processes itself and say so by ``forget``.
    """

    def __init__(
        self,
        probes: Probes,
        *,
        tape: Tape | None = None,
        map_entries: Mapping[str, int] | None = None,
        launch_codes: bool = False,
    ) -> None:
        """``map_entries``: other sizes of the maps of ``c/cuda_maps.h``. ``launch_codes``: count errors of launches by
        their return value too, at the cost of a second trap per launch. Raises SourceUnavailable(reason, hint)."""
        self._tape = tape if tape is not None else Tape()
        self._launch_codes = launch_codes
        self._object = _open(probes, map_entries)
        self.backend = self._object.backend
        self.why_classic = self._object.why_classic
        self.without: dict[str, str] = {}
        self.attachments: dict[int, Attachment] = {}
        self._links: list[Link] = []
        self._reader = Reader(self._object, self._tape)
        for program in LIFE_PROGRAMS:
            try:
                self._links.append(self._object.attach(program))
            except KeyError:
                self.without[program] = f"{self.backend} has no such hook"
            except SourceUnavailable as error:
                self.without[program] = str(error)

    def attach(self, path: str, layer: Layer, pid: int = 0) -> Attachment:
        """Hook the functions of one layer in a file, as far as it has them (see ``Attachment``).

        ``path``: as gpuflight opens it. ``pid``: only in this process. Raises SourceUnavailable if the file has none of
        them or is none that can be read, or 1,024 files are hooked.
        """
        found = self._find(path, layer)
        if not found.places:
            reason = f"{path} has none of the functions of the CUDA {layer} layer that can be hooked"
            raise SourceUnavailable(reason + (f" (ifuncs: {', '.join(found.ifuncs)})" if found.ifuncs else ""))
        number = next((free for free in range(FILE_NUMBERS) if free not in self.attachments), None)
        if number is None:
            raise SourceUnavailable(f"{FILE_NUMBERS} files are hooked already, the most there can be")
        made = Attachment(self._object, path, layer, number, found, pid, launch_codes=self._launch_codes)
        self.attachments[number] = made
        self._mark_launches()
        return made

    def detach(self, attachment: Attachment) -> None:
        """Close it, and let its number go to another file: its hits begin at 0 again."""
        attachment.close()
        self._set(_DETACHED, time.monotonic_ns())
        if self.attachments.get(attachment.number) is attachment:
            del self.attachments[attachment.number]
            self._reader.clear_hits(attachment.number)
        self._mark_launches()

    def _mark_launches(self) -> None:
        """Launches of the runtime leave a mark for those of the driver only while both are hooked."""
        driver = any(attachment.layer == "driver" for attachment in self.attachments.values())
        self._set(_DRIVER, driver)

    def _set(self, setting: int, value: int) -> None:
        self._object.update("settings", layouts.PID.pack(setting), layouts.COUNT.pack(value))

    def _find(self, path: str, layer: Layer) -> Found:
        def live() -> bytes:
            try:
                return msgspec.msgpack.encode(find_places(path, layer))
            except ElfError as error:
                raise SourceUnavailable(f"{path}: {error}") from error
            except OSError as error:
                raise SourceUnavailable(f"{path} cannot be read: {error.strerror}") from error

        try:
            return msgspec.msgpack.decode(self._tape.ask(SOURCE, f"functions {layer} {path}", live), type=Found)
        except msgspec.DecodeError as error:
            raise SourceUnavailable(f"the recorded functions of {path} make no sense: {error}") from None

    def read(self, *, allocations: bool = False) -> CudaRows:
        """One reading. ``allocations``: those of all processes; else only those of processes that ended: their leaks.

        What ended (processes, destroyed streams) is in the reading for the last time. Raises OSError as the kernel
        answers, SourceUnavailable in a replay that has no such reading.
        """
        rows = self._reader.read(allocations=allocations)
        rows.hits = {number: self._reader.hits(number) for number in self.attachments}
        return rows

    def forget(self, pids: Iterable[int]) -> None:
        """These processes ended, though no hook told: the next reading is the last with their rows."""
        self._reader.over.update(pids)

    def costs(self) -> list[ProgramCost]:
        """What each program cost so far."""
        return self._object.costs()

    def close(self) -> None:
        """Unhook everything and give back the memory of the kernel side. May be called twice."""
        for attachment in self.attachments.values():
            attachment.close()
        self.attachments.clear()
        for link in self._links:
            link.close()
        self._links.clear()
        self._object.close()


def _open(probes: Probes, map_entries: Mapping[str, int] | None) -> ProbeObject:
    """Without the hooks of processes' lives where the kernel has no type information (BTF)."""
    try:
        return probes.open("cuda", map_entries=map_entries)
    except SourceUnavailable as error:
        try:
            return probes.open("cuda", programs=PROGRAMS, map_entries=map_entries)
        except SourceUnavailable:
            raise error from None
