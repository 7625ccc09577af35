"""Names of functions by where they lie in a file: for programs that registered theirs before the probe was there."""

from __future__ import annotations

from collections.abc import Collection

from gpuflight.sources.bpf.elf import read_elf

_STUB = "__device_stub__"


def names_at(path: str, offsets: Collection[int]) -> dict[int, str]:
    """Mangled names of the functions that begin at these offsets (bytes) of an ELF file, as far as it has symbols.

    A kernel is launched by the address of a host function that nvcc gave the kernel's own name, so its symbol names the
    kernel. Reads every symbol (1 s for 500,000), so ask once for many. Raises elf.ElfError, OSError.
    """
    wanted = set(offsets)
    found: dict[int, str] = {}
    for symbol in read_elf(path).symbols:
        if symbol.kind == "function" and symbol.offset in wanted and not symbol.name.startswith(_STUB):
            found.setdefault(symbol.offset, symbol.name)
    return found
