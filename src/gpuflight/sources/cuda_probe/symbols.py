"""Which of our functions a file exports, and where they begin in it."""

from __future__ import annotations

import os

from msgspec import Struct

from gpuflight.sources.bpf.elf import Elf, Symbol, read_elf
from gpuflight.sources.cuda_probe.functions import SYMBOLS, Layer

_ALL = {symbol for layer in SYMBOLS.values() for symbol in layer}
_MACHINE_X86_64, _MACHINE_ARM64 = 62, 183
# What a compiler puts before a jump that ends a function: endbr64, push %rbp, mov %rsp,%rbp, pop %rbp.
_X86_PROLOGUES = (b"\xf3\x0f\x1e\xfa", b"\x55\x48\x89\xe5\x5d", b"\x55\x48\x8b\xec\x5d")


class Place(Struct, frozen=True):
    """One symbol to be hooked: ``offset`` in the file (bytes)."""

    symbol: str
    offset: int


class Found(Struct, frozen=True):
    """``ifuncs``: functions chosen when the library is loaded, which cannot be hooked. ``tails``: functions that only
    jump to another one that is hooked: hooking both would count a call twice. ``static``: only in the table for
    debuggers."""

    places: list[Place]
    ifuncs: list[str]
    tails: list[str]
    static: bool


def find_places(path: str, layer: Layer) -> Found:
    """The functions of one layer in a file. Raises elf.ElfError, and OSError if it cannot be read."""
    elf = read_elf(path, _ALL.__contains__)
    return choose(elf, layer, _heads(path, elf))


def choose(elf: Elf, layer: Layer, heads: dict[int, bytes]) -> Found:
    """``heads``: the first bytes of functions by their offset."""
    wanted = SYMBOLS[layer]
    ours = [symbol for symbol in elf.symbols if symbol.name in wanted]
    functions = [symbol for symbol in ours if symbol.kind == "function" and symbol.offset >= 0]
    places: dict[int, str] = {}
    for symbol in functions:
        places.setdefault(symbol.offset, symbol.name)
    tails = {
        offset for offset in places if _jump(elf.machine, offset, heads.get(offset, b"")) in places.keys() - {offset}
    }
    return Found(
        [Place(name, offset) for offset, name in sorted(places.items()) if offset not in tails],
        sorted({symbol.name for symbol in ours if symbol.kind == "ifunc"}),
        sorted(places[offset] for offset in tails),
        bool(functions) and all(symbol.table == "symtab" for symbol in functions),
    )


def _heads(path: str, elf: Elf) -> dict[int, bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        return {symbol.offset: os.pread(fd, 16, symbol.offset) for symbol in elf.symbols if _may_be_tail(symbol)}
    finally:
        os.close(fd)


def _may_be_tail(symbol: Symbol) -> bool:
    return symbol.kind == "function" and 0 < symbol.size <= 32 and symbol.offset >= 0


def _jump(machine: int, offset: int, head: bytes) -> int | None:
    """Where a function goes that only jumps; offsets as addresses, as both lie in the segment of the code."""
    if machine == _MACHINE_ARM64 and len(head) >= 4:
        word = int.from_bytes(head[:4], "little")
        if word >> 26 == 0b000101:  # b
            return offset + 4 * ((word & 0x3FFFFFF) - (word >> 25 & 1) * (1 << 26))
    if machine == _MACHINE_X86_64:
        at = 0
        for prologue in _X86_PROLOGUES:
            if head[at : at + len(prologue)] == prologue:
                at += len(prologue)
        if head[at : at + 1] == b"\xe9" and len(head) >= at + 5:  # jmp rel32
            return offset + at + 5 + int.from_bytes(head[at + 1 : at + 5], "little", signed=True)
    return None
