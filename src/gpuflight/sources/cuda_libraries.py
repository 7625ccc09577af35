"""Which processes have a CUDA runtime, a CUDA driver or NCCL in their memory, and in which file.

A library counts by the symbols that it offers, not by its name: PyTorch bundles its runtime, wrappers of Java and Go
embed one, and most CUDA programs are linked to it statically. A file is known by (device, inode), looked into once
however many processes map it, and opened as a process sees it (``/proc/PID/root/…``), so that containers are no
matter.

A ``maps`` file costs 0.1 ms and more, so it is read when a process is new or executes another program, and again when
the size of its address space changed, each time that this was in vain after a pause twice as long, up to
``LONGEST_PAUSE`` rounds. Whoever loads CUDA later than at its start is seen within so many rounds, or at once by
``look_at``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec import Struct

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.cuda_probe.functions import Layer
from gpuflight.sources.elf_symbols import ElfFile, NotElf
from gpuflight.sources.fs import FileSystem
from gpuflight.sources.procfs import ProcFs, ProcStat
from gpuflight.sources.procfs.stat import decode
from gpuflight.sources.recording import Tape

LONGEST_PAUSE = 16
"""Rounds after which a process whose address space keeps changing is looked at again, at the latest."""

MAPS_BYTES = 4 << 20
"""Most text of ``maps`` files read per round (about 40 ms), the first round excepted."""

FILES = 256
"""Most files looked into per round (about 40 ms)."""

RETRY_ROUNDS = 8
"""Rounds after which a file or a memory map that could not be read is tried again."""

MARKS: dict[str, Layer] = {
    "cudaLaunchKernel": "runtime",
    "cuLaunchKernel": "driver",
    "ncclAllReduce": "nccl",
    "setenv": "libc",
}
"""The symbols by which a library is known. The C library is of interest where there is another one with it."""

_EXECUTABLE = re.compile(rb"^\S+ r[w-]x[ps] \S+ ([0-9a-f]+):([0-9a-f]+) (\d+) +(/[^\n]*)$", re.MULTILINE)
_DELETED = " (deleted)"
_LIKELY = ("cuda", "nccl", "torch", "tensorflow", "jax", "cupy")

Key = tuple[int, int]
"""(device, inode), as in ``maps``."""


class CudaLibrary(Struct, frozen=True):
    """A file with CUDA in it. ``path``: as its processes see it; ``open_path``: as it was opened here, by way of one of
    them (see ``by_way_of``); ``static``: the symbols are a program's own, found in ``.symtab``."""

    key: Key
    path: str
    open_path: str
    layers: tuple[Layer, ...]
    static: bool = False
    identity: str = ""
    """What is the same for the kernel, which hooks the file beneath an overlay: containers of one image share it."""

    def by_way_of(self, pid: int) -> str:
        """The path under which it can be opened while ``pid``, which maps it, is alive."""
        root, _, rest = self.open_path.partition("/root/")
        return f"{root.rpartition('/')[0]}/{pid}/root/{rest}" if rest else self.open_path


class CudaProcess(Struct, frozen=True):
    """A process with CUDA in its memory. ``hidden``: it has a driver library, but no runtime with symbols: it may use
    the driver directly, or through a runtime linked statically and stripped."""

    pid: int
    start: int
    libraries: tuple[Key, ...]
    hidden: bool = False


class CudaScan(Struct):
    """One round. ``readable``, ``unreadable``: processes whose maps may, and may not, be read; ``pending``: processes
    and files that wait for another round; ``replaced``: files that were replaced on disk while a process uses the old
    one, and cannot be opened.
    """

    processes: dict[int, CudaProcess] = msgspec.field(default_factory=dict)
    libraries: dict[Key, CudaLibrary] = msgspec.field(default_factory=dict)
    readable: int = 0
    unreadable: int = 0
    pending: int = 0
    replaced: int = 0


class _Look(Struct, array_like=True):
    """What was seen in a file: symbols of MARKS, the path that it was opened under, CudaLibrary.identity."""

    names: list[str]
    open_path: str
    identity: str = ""


class _Mapped(NamedTuple):
    key: Key
    path: str


def _is_likely(mapped: _Mapped) -> bool:
    return any(word in mapped.path.lower() for word in _LIKELY)


class _Kept:
    """What is known about one process from round to round."""

    __slots__ = (
        "checked", "due", "found", "hidden", "image", "likely", "mapped", "pause", "start", "stat", "unreadable",
        "virtual_bytes",
    )  # fmt: skip

    def __init__(self, stat: ProcStat) -> None:
        self.start = stat.start
        self.image = stat.image
        self.stat: ProcStat | None = None  # the record at the last look
        self.virtual_bytes = -1  # at the last reading of its maps
        self.mapped: tuple[_Mapped, ...] = ()
        self.likely = False  # a name among its files is that of something with CUDA
        self.checked = False  # all of its files were looked into
        self.found: tuple[CudaLibrary, ...] = ()
        self.hidden = False
        self.unreadable = False
        self.due = 0  # round from which it may be read again
        self.pause = 0


class CudaLibraries:
    """``scan`` once per round; ``fs`` says where the files lie, ``tape`` what was found in them."""

    def __init__(self, fs: FileSystem, procfs: ProcFs, tape: Tape | None = None) -> None:
        self._root: str = getattr(fs, "root", "")
        self._procfs = procfs
        self._tape = tape if tape is not None else Tape()
        self._kept: dict[int, _Kept] = {}
        self._files: dict[Key, CudaLibrary | None] = {}
        self._static: dict[Key, CudaLibrary | None] = {}
        self._replaced: set[Key] = set()
        self._failed: dict[Key, int] = {}  # round in which a file could not be looked into
        self._round = 0
        self._wanted: set[int] = set()
        self._left = 0

    def look_at(self, pids: Iterable[int]) -> None:
        """Have the maps of these read in the next ``scan``, whatever was found before: they executed another program,
        or use a GPU."""
        self._wanted.update(pids)

    def scan(self) -> CudaScan:
        """The processes with CUDA, now. Raises SourceUnavailable as the process list does."""
        processes = self._procfs.processes()
        self._round += 1
        self._left = FILES
        self._try_again()
        scan = CudaScan()
        budget = MAPS_BYTES if self._round > 1 else 16 * MAPS_BYTES
        kept: dict[int, _Kept] = {}
        due: list[ProcStat] = []
        before, wanted = self._kept, self._wanted
        for pid, stat in processes.items():
            entry = before.get(pid)
            if entry is not None and entry.stat is stat and not wanted:  # it did nothing since
                kept[pid] = entry
                continue
            if stat.kernel_thread or stat.state in "ZX":
                continue
            if entry is None or entry.start != stat.start or entry.image != stat.image:
                entry = _Kept(stat)
            kept[pid] = entry
            if pid in wanted or (entry.virtual_bytes != stat.virtual_bytes and self._round >= entry.due):
                due.append(stat)
            else:
                entry.stat = stat if entry.virtual_bytes == stat.virtual_bytes else None
        self._kept, self._wanted = kept, set()
        due.sort(key=lambda stat: kept[stat.pid].virtual_bytes >= 0)  # new ones first
        for stat in due:
            if budget <= 0:
                scan.pending += 1
                continue
            budget -= self._read_maps(kept[stat.pid], stat)
        self._answer(scan)
        if not self._round % 64:
            self._forget()
        return scan

    # --- inside ----------------------------------------------------------------------------------------------------

    def _read_maps(self, entry: _Kept, stat: ProcStat) -> int:
        """Read one process's maps; the bytes that it took."""
        try:
            raw = self._procfs.maps(stat.pid)
        except PermissionError:
            entry.unreadable, raw = True, b""
        except OSError:  # it ended
            raw = b""
        else:
            entry.unreadable = False
        mapped = tuple(
            _Mapped((os.makedev(int(major, 16), int(minor, 16)), int(inode)), decode(path))
            for major, minor, inode, path in dict.fromkeys(_EXECUTABLE.findall(raw))
        )
        if mapped != entry.mapped:
            entry.mapped, entry.checked, entry.pause = mapped, False, 1
            entry.likely = any(_is_likely(one) for one in mapped)
        else:
            entry.pause = min(max(1, 2 * entry.pause), LONGEST_PAUSE)
        entry.due = self._round + entry.pause
        entry.stat, entry.virtual_bytes = stat, stat.virtual_bytes
        if not mapped:  # a live process has code: it could not be read
            entry.stat, entry.virtual_bytes, entry.due = None, -1, self._round + RETRY_ROUNDS
        return len(raw)

    def _answer(self, scan: CudaScan) -> None:
        unchecked = [(pid, entry) for pid, entry in self._kept.items() if entry.mapped and not entry.checked]
        for pid, entry in sorted(unchecked, key=lambda one: not one[1].likely):
            self._check(pid, entry)
            scan.pending += not entry.checked
        for pid, entry in self._kept.items():
            scan.unreadable += entry.unreadable
            scan.readable += not entry.unreadable
            if entry.found:
                for library in entry.found:
                    scan.libraries.setdefault(library.key, library)
                keys = tuple(library.key for library in entry.found)
                scan.processes[pid] = CudaProcess(pid, entry.start, keys, entry.hidden)
        scan.replaced = len(self._replaced)

    def _check(self, pid: int, entry: _Kept) -> None:
        """Look into the files of a process, as far as this round's bound allows."""
        files = self._files
        entry.checked = True
        for mapped in sorted(entry.mapped, key=lambda one: not _is_likely(one)):
            if mapped.key in files:
                continue
            if self._left <= 0:
                entry.checked = False
                break
            files[mapped.key] = self._look_into(pid, mapped, static=False)
        found = {mapped.key: library for mapped in entry.mapped if (library := files.get(mapped.key)) is not None}
        layers = {layer for library in found.values() for layer in library.layers}
        if "driver" in layers and "runtime" not in layers:
            static = self._static_runtime(pid, entry)
            if static is not None:
                found[static.key] = static
                layers.add("runtime")
        entry.found = tuple(found.values()) if layers - {"libc"} else ()
        entry.hidden = "driver" in layers and "runtime" not in layers

    def _static_runtime(self, pid: int, entry: _Kept) -> CudaLibrary | None:
        """The program itself, if a runtime is linked into it and was not stripped."""
        try:
            executable = self._procfs.exe(pid).removesuffix(_DELETED)
        except OSError:
            return None
        for mapped in entry.mapped:
            if mapped.path.removesuffix(_DELETED) == executable:
                if mapped.key not in self._static:
                    self._static[mapped.key] = self._look_into(pid, mapped, static=True)
                return self._static[mapped.key]
        return None

    def _try_again(self) -> None:
        """Forget failures that are long enough ago."""
        due = [key for key, failed in self._failed.items() if self._round - failed >= RETRY_ROUNDS]
        for key in due:
            del self._failed[key]
            self._files.pop(key, None)
            self._static.pop(key, None)
        if due:
            for entry in self._kept.values():
                entry.checked = False

    def _look_into(self, pid: int, mapped: _Mapped, *, static: bool) -> CudaLibrary | None:
        self._left -= 1
        question = f"{'static ' if static else ''}{mapped.key[0]}:{mapped.key[1]} {mapped.path}"
        try:
            raw = self._tape.ask("elf", question, lambda: msgspec.json.encode(self._marks(pid, mapped, static)))
            look = msgspec.json.decode(raw, type=_Look)
        except FileNotFoundError:
            self._replaced.add(mapped.key)
            return None
        except (OSError, SourceUnavailable, msgspec.MsgspecError):
            self._failed[mapped.key] = self._round
            return None
        layers = tuple(dict.fromkeys(MARKS[name] for name in look.names if name in MARKS))
        if not layers:
            return None
        path = mapped.path.removesuffix(_DELETED)
        identity = look.identity or f"{mapped.key[0]}:{mapped.key[1]}"
        return CudaLibrary(mapped.key, path, look.open_path, layers, static, identity)

    def _marks(self, pid: int, mapped: _Mapped, static: bool) -> _Look:
        """What is in a file. Raises OSError; FileNotFoundError if it is not there any more."""
        descriptor, path = self._open(pid, mapped)
        try:
            file = ElfFile(lambda offset, size: os.pread(descriptor, size, offset))
            names = (
                file.holds(name for name, layer in MARKS.items() if layer in ("runtime", "nccl"))
                if static
                else file.exports(MARKS)
            )
            identity = self._identity(pid, os.fstat(descriptor)) if names else ""
        except NotElf:
            names, identity = set(), ""
        finally:
            os.close(descriptor)
        return _Look(sorted(names), path, identity)

    def _identity(self, pid: int, status: os.stat_result) -> str:
        """Device and inode; on an overlay, where each container has a device of its own and the kernel hooks the file
        beneath, inode, size and time of the last change: what containers of one image see of one file."""
        device = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
        try:
            mounts = self._procfs.mountinfo(pid).decode("utf-8", "replace").split("\n")
        except OSError:
            mounts = []
        found = [line for line in mounts if f" {device} " in line]
        kinds = {line.partition(" - ")[2].split(" ")[0] for line in found}
        # Where its layers lie on several file systems, files of an overlay have devices that no mount has.
        if "overlay" in kinds or (not kinds and not os.major(status.st_dev)):
            return f"overlay {status.st_ino} {status.st_size} {status.st_mtime_ns}"
        return f"{device} {status.st_ino}"

    def _open(self, pid: int, mapped: _Mapped) -> tuple[int, str]:
        """The very file that the process has mapped, though its name may be another file's by now."""
        path = f"{self._procfs.root}/{pid}/root{mapped.path.removesuffix(_DELETED)}"
        try:
            descriptor = os.open(self._root + path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        except FileNotFoundError:
            descriptor = -1
        if descriptor >= 0:
            status = os.fstat(descriptor)
            # On overlay file systems maps tells of the file beneath: another device, so that nothing can be compared.
            if status.st_ino == mapped.key[1] or status.st_dev != mapped.key[0]:
                return descriptor, path
            os.close(descriptor)
        for line in self._procfs.maps(pid).split(b"\n"):
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[4] == b"%d" % mapped.key[1] and decode(fields[5]) == mapped.path:
                path = f"{self._procfs.root}/{pid}/map_files/{decode(fields[0])}"
                return os.open(self._root + path, os.O_RDONLY | os.O_CLOEXEC), path
        raise FileNotFoundError(mapped.path)

    def _forget(self) -> None:
        """Files that nobody maps any more: their numbers may be given to others."""
        used = {mapped.key for entry in self._kept.values() for mapped in entry.mapped}
        self._files = {key: library for key, library in self._files.items() if key in used}
        self._static = {key: library for key, library in self._static.items() if key in used}
        self._replaced &= used
        self._failed = {key: failed for key, failed in self._failed.items() if key in used}
