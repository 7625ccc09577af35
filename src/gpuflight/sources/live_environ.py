"""Variables of a process's environment as they are now, with what it set itself; /proc shows those it was started with.

The C library keeps a pointer to them in ``environ``. Its place follows from the symbol tables of the program (into
which the linker may have copied it) or of the C library, and from where these are mapped. Nothing but the variables
that are asked for leaves this module: environments hold secrets.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection

import msgspec

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.elf_symbols import ElfFile, NotElf
from gpuflight.sources.fs import FileSystem
from gpuflight.sources.procfs import ProcFs
from gpuflight.sources.procfs.stat import decode
from gpuflight.sources.recording import Tape

_VARIABLES = 8192  # of one process, at most
_VALUE_BYTES = 4096
_FILES = 400
_NAMES = ("environ", "__environ")


class LiveEnviron:
    """``read`` asks the memory of a process, which needs the right to trace it."""

    def __init__(self, fs: FileSystem, procfs: ProcFs, tape: Tape | None = None) -> None:
        self._root: str = getattr(fs, "root", "")
        self._procfs = procfs
        self._tape = tape if tape is not None else Tape()

    def read(self, pid: int, names: Collection[str]) -> dict[str, str] | None:
        """Those of ``names`` that are set; None if it cannot be told (no right, no C library, it ended)."""
        question = f"{pid} {' '.join(sorted(names))}"
        try:
            raw = self._tape.ask("environ", question, lambda: msgspec.json.encode(self._read(pid, names)))
            found: dict[str, str] | None = msgspec.json.decode(raw, type=dict[str, str] | None)
        except (OSError, SourceUnavailable, msgspec.MsgspecError):
            return None
        return found

    def _read(self, pid: int, names: Collection[str]) -> dict[str, str] | None:
        """Raises OSError."""
        if self._root:
            return None  # a tree of files has no memory
        place = self._place(pid)
        if place is None:
            return None
        memory = os.open(f"{self._procfs.root}/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _variables(memory, place, names)
        finally:
            os.close(memory)

    def _place(self, pid: int) -> int | None:
        """Where ``environ`` is in the memory of a process."""
        first: dict[str, int] = {}  # file → where its beginning is mapped
        executable = self._procfs.exe(pid)
        for line in self._procfs.maps(pid).split(b"\n"):
            fields = line.split(None, 5)
            if len(fields) == 6 and fields[5].startswith(b"/") and int(fields[2], 16) == 0:
                first.setdefault(decode(fields[5]), int(fields[0].partition(b"-")[0], 16))
        ordered = sorted(first, key=lambda path: (path != executable, "libc" not in path))
        for path in ordered[:_FILES]:
            try:
                descriptor = os.open(
                    f"{self._procfs.root}/{pid}/root{path}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
                )
            except OSError:
                continue
            try:
                file = ElfFile(lambda offset, size, fd=descriptor: os.pread(fd, size, offset))  # type: ignore[misc]
                found = file.addresses(_NAMES)
                if found:
                    return first[path] - file.first_address + next(iter(found.values()))
            except (NotElf, OSError):
                continue
            finally:
                os.close(descriptor)
        return None


def _variables(memory: int, place: int, names: Collection[str]) -> dict[str, str] | None:
    (array,) = struct.unpack("<Q", os.pread(memory, 8, place))
    if not array:
        return {}
    found: dict[str, str] = {}
    wanted = tuple(name.encode() + b"=" for name in names)
    for number in range(_VARIABLES):
        raw = os.pread(memory, 8, array + 8 * number)
        if len(raw) < 8:
            return None
        (text_at,) = struct.unpack("<Q", raw)
        if not text_at:
            return found
        if _text(memory, text_at, 64).startswith(wanted):
            name, _, value = decode(_text(memory, text_at, _VALUE_BYTES)).partition("=")
            found.setdefault(name, value)
    return None


def _text(memory: int, at: int, size: int) -> bytes:
    """A string, as far as its memory is readable."""
    try:
        return os.pread(memory, size, at).partition(b"\0")[0]
    except OSError:
        return os.pread(memory, max(1, min(size, 4096 - at % 4096)), at).partition(b"\0")[0]
