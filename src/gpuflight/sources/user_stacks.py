"""Addresses of a process's code as names: ``function+0x12 (libtorch.so)``. Asked only about what is shown.

Names come from the symbol tables of the files that the process maps, opened as it sees them. Reading those of one large
library takes some 50 ms, so a round looks into few files, and what was found is kept while the process lives.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.demangle import demangle
from gpuflight.sources.elf_symbols import ElfFile, NotElf
from gpuflight.sources.fs import FileSystem
from gpuflight.sources.procfs import ProcFs
from gpuflight.sources.procfs.stat import decode
from gpuflight.sources.recording import Tape

FILES = 4
"""Most files looked into per call."""


class UserStacks:
    """``resolve`` and ``functions`` name addresses of one process; ``drop`` forgets processes that ended."""

    def __init__(self, fs: FileSystem, procfs: ProcFs, tape: Tape | None = None) -> None:
        self._root: str = getattr(fs, "root", "")
        self._procfs = procfs
        self._tape = tape if tape is not None else Tape()
        self._known: dict[int, dict[int, str]] = {}

    def resolve(self, pid: int, addresses: Sequence[int]) -> list[str]:
        """A name for each address, the address itself where there is none (any more)."""
        known = self._known.setdefault(pid, {})
        missing = sorted({address for address in addresses if address not in known})
        if missing:
            question = f"{pid} " + " ".join(f"{address:x}" for address in missing)
            try:
                raw = self._tape.ask("stacks", question, lambda: msgspec.json.encode(self._look_up(pid, missing)))
                known.update(msgspec.json.decode(raw, type=dict[int, str]))
            except (OSError, SourceUnavailable, msgspec.MsgspecError):
                pass
        return [known.get(address, f"0x{address:x}") for address in addresses]

    def functions(self, pid: int, addresses: Sequence[int]) -> dict[int, str]:
        """Names, as the compiler made them, of the functions that begin at these addresses; absent for any other."""
        question = f"functions {pid} " + " ".join(f"{address:x}" for address in sorted(addresses))
        try:
            raw = self._tape.ask("stacks", question, lambda: msgspec.json.encode(self._beginnings(pid, addresses)))
            return msgspec.json.decode(raw, type=dict[int, str])
        except (OSError, SourceUnavailable, msgspec.MsgspecError):
            return {}

    def drop(self, keep: Iterable[int]) -> None:
        """Forget all processes but these."""
        alive = set(keep)
        self._known = {pid: names for pid, names in self._known.items() if pid in alive}

    def _look_up(self, pid: int, addresses: Sequence[int]) -> dict[int, str]:
        """Raises OSError if the process ended or may not be looked into."""
        found: dict[int, str] = {}
        for path, places in self._by_file(pid, addresses):
            names = self._names(pid, path, list(places))
            file = path.rpartition("/")[2]
            for offset, address in places.items():
                if offset in names:
                    name, delta = names[offset]
                    found[address] = f"{demangle(name)}+0x{delta:x} ({file})"
                else:
                    found[address] = f"{file}+0x{offset:x}"
        return found

    def _beginnings(self, pid: int, addresses: Sequence[int]) -> dict[int, str]:
        """As _look_up."""
        found: dict[int, str] = {}
        for path, places in self._by_file(pid, addresses):
            names = self._names(pid, path, list(places))
            found.update({places[offset]: name for offset, (name, delta) in names.items() if not delta})
        return found

    def _by_file(self, pid: int, addresses: Sequence[int]) -> list[tuple[str, dict[int, int]]]:
        """Files of a process that the addresses lie in, each with offset in the file → address."""
        by_file: dict[str, dict[int, int]] = defaultdict(dict)
        ordered = sorted(addresses)
        for line in self._procfs.maps(pid).split(b"\n"):
            fields = line.split(None, 5)
            if len(fields) != 6 or b"x" not in fields[1] or not fields[5].startswith(b"/"):
                continue
            low, _, high = fields[0].partition(b"-")
            start, end, offset = int(low, 16), int(high, 16), int(fields[2], 16)
            for address in ordered[bisect_left(ordered, start) : bisect_left(ordered, end)]:
                by_file[decode(fields[5])][address - start + offset] = address
        return list(by_file.items())[:FILES]

    def _names(self, pid: int, path: str, offsets: list[int]) -> dict[int, tuple[str, int]]:
        place = f"{self._root}{self._procfs.root}/{pid}/root{path}"
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return {}
        try:
            return ElfFile(lambda offset, size: os.pread(descriptor, size, offset)).functions_at(offsets)
        except (NotElf, OSError):
            return {}
        finally:
            os.close(descriptor)
