"""Symbols of ELF files, as far as probes need them: which function begins at which offset of the file.

Only the headers and tables are read, never the whole file. Layout: System V gABI, chapters 4 and 5; symbol versions:
LSB, chapter 10.7. Files may come from a container: nothing in them is trusted.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Literal

from msgspec import Struct

SymbolKind = Literal["function", "ifunc", "object", "other"]

_MAX_TABLE_BYTES = 512 << 20
_SYMTAB, _STRTAB, _DYNSYM, _VERDEF, _VERSYM = 2, 3, 11, 0x6FFFFFFD, 0x6FFFFFFF
_LOAD, _DYNAMIC = 1, 2
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_GNU_HASH = 4, 5, 6, 10, 0x6FFFFEF5
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_KINDS: dict[int, SymbolKind] = {1: "object", 2: "function", 10: "ifunc"}
_UNDEFINED, _RESERVED = 0, 0xFF00


class ElfError(Exception):
    """Not an ELF file of 64 bits, little-endian, or a damaged one."""


class Symbol(Struct, frozen=True, gc=False):
    """A symbol that is defined in the file.

    ``offset``: where it begins in the file (bytes), what a probe needs; -1 for a symbol that is in no segment.
    ``kind``: an *ifunc* chooses the real function when the library is loaded, so a probe there sees no calls.
    ``version``: of the symbol (``libcudart.so.12``), empty without; ``default``: whether new programs are linked to it.
    """

    name: str
    value: int
    size: int
    offset: int
    kind: SymbolKind
    table: Literal["dynsym", "symtab"]
    version: str = ""
    default: bool = True
    section: int = 0


class Elf(Struct):
    """One file: ``machine`` as in its header (e_machine); ``stripped`` without a table for debuggers."""

    machine: int
    stripped: bool
    symbols: list[Symbol]
    sections: list[str]

    def functions(self) -> Iterator[Symbol]:
        """Functions that can be probed, one per offset; names of .dynsym go first."""
        seen: set[int] = set()
        for symbol in self.symbols:
            if symbol.kind == "function" and symbol.offset >= 0 and symbol.offset not in seen:
                seen.add(symbol.offset)
                yield symbol

    def symbols_of_section(self, name: str) -> Iterator[Symbol]:
        """Data that is defined in a section of an object file."""
        for symbol in self.symbols:
            if (
                symbol.kind == "object"
                and symbol.section < len(self.sections)
                and self.sections[symbol.section] == name
            ):
                yield symbol


def read_elf(source: str | bytes, wanted: Callable[[str], bool] | None = None) -> Elf:
    """Read a file, by its path or its content. ``wanted``: only symbols with such names.

    Raises ElfError, and OSError if it cannot be read.
    """
    if isinstance(source, bytes):
        return _Reader(lambda at, size: source[at : at + size]).read(wanted)
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # whatever it is, opening it must not wait
    try:
        return _Reader(lambda at, size: os.pread(fd, size, at)).read(wanted)
    finally:
        os.close(fd)


class _Section(Struct, gc=False):
    name: int
    kind: int
    address: int
    offset: int
    size: int
    link: int


class _Reader:
    def __init__(self, at: Callable[[int, int], bytes]) -> None:
        self._at = at
        self._loads: list[tuple[int, int, int]] = []  # address, size in the file, offset
        self._sections: list[_Section] = []

    def read(self, wanted: Callable[[str], bool] | None) -> Elf:
        try:
            return self._read(wanted)
        except (struct.error, UnicodeError, IndexError, OverflowError, MemoryError) as error:
            raise ElfError(f"damaged ELF file: {error}") from error

    def _bytes(self, offset: int, size: int) -> bytes:
        if size > _MAX_TABLE_BYTES or not 0 <= offset < 1 << 62:
            raise ElfError(f"a table of {size} bytes at {offset}")
        data = self._at(offset, size)
        if len(data) != size:
            raise ElfError("it ends before its tables do")
        return data

    def _read(self, wanted: Callable[[str], bool] | None) -> Elf:
        head = self._at(0, _HEADER.size)
        if len(head) < _HEADER.size or head[:4] != b"\x7fELF":
            raise ElfError("no ELF file")
        if head[4:6] != b"\x02\x01":
            raise ElfError("not of 64 bits and little-endian")
        _, kind, machine, _, _, segments_at, sections_at, _, _, each, segments, each_s, sections, names = (
            _HEADER.unpack(head)
        )
        dynamic: tuple[int, int] | None = None
        if segments and each == _SEGMENT.size:
            for p_type, _, offset, address, _, in_file, _, _ in _SEGMENT.iter_unpack(
                self._bytes(segments_at, each * segments)
            ):
                if p_type == _LOAD:
                    self._loads.append((address, in_file, offset))
                elif p_type == _DYNAMIC:
                    dynamic = offset, in_file
        self._loads.sort()
        if sections and each_s == _SECTION.size:
            table = self._bytes(sections_at, each_s * sections)
            self._sections = [
                _Section(name, s_kind, address, offset, size, link)
                for name, s_kind, _, address, offset, size, link, _, _, _ in _SECTION.iter_unpack(table)
            ]
        section_names = self._names(names)
        relocatable = kind == 1
        entries = self._dynamic(dynamic)
        symbols = list(self._symbols(_DYNSYM, "dynsym", relocatable, wanted))
        if not self._sections and entries:
            symbols = list(self._hashed(entries, wanted))
        symbols += self._symbols(_SYMTAB, "symtab", relocatable, wanted)
        return Elf(
            machine=machine,
            stripped=not any(section.kind == _SYMTAB for section in self._sections),
            symbols=symbols,
            sections=section_names,
        )

    def _names(self, index: int) -> list[str]:
        if not self._sections or index >= len(self._sections):
            return []
        table = self._bytes(self._sections[index].offset, self._sections[index].size)
        return [_text(table, section.name) for section in self._sections]

    def _offset_of(self, address: int) -> int:
        place = bisect_right(self._loads, (address, 1 << 63, 0)) - 1
        if place >= 0:
            start, size, offset = self._loads[place]
            if address - start < size:
                return address - start + offset
        return -1

    def _symbols(
        self, kind: int, table: Literal["dynsym", "symtab"], relocatable: bool, wanted: Callable[[str], bool] | None
    ) -> Iterator[Symbol]:
        for index, section in enumerate(self._sections):
            if section.kind != kind or section.link >= len(self._sections):
                continue
            names_at = self._sections[section.link]
            names = self._bytes(names_at.offset, names_at.size)
            versions = self._versions(index) if kind == _DYNSYM else None
            raw = self._bytes(section.offset, section.size // _SYMBOL.size * _SYMBOL.size)
            yield from self._decode(raw, names, table, versions, relocatable, wanted)

    def _decode(
        self,
        raw: bytes,
        names: bytes,
        table: Literal["dynsym", "symtab"],
        versions: tuple[tuple[int, ...], dict[int, str]] | None,
        relocatable: bool,
        wanted: Callable[[str], bool] | None,
    ) -> Iterator[Symbol]:
        for number, (name_at, info, _, section, value, size) in enumerate(_SYMBOL.iter_unpack(raw)):
            if section == _UNDEFINED or section >= _RESERVED or not name_at:
                continue
            kind = _KINDS.get(info & 15, "other")
            if kind == "other":
                continue
            name = _text(names, name_at)
            if wanted is not None and not wanted(name):
                continue
            version, default = "", True
            if versions is not None and number < len(versions[0]):
                mark = versions[0][number]
                version, default = versions[1].get(mark & 0x7FFF, ""), not mark & 0x8000
            offset = -1 if relocatable else self._offset_of(value)
            yield Symbol(name, value, size, offset, kind, table, version, default, section)

    def _versions(self, dynsym: int) -> tuple[tuple[int, ...], dict[int, str]] | None:
        """The version index of each symbol, and the names of the versions this file defines."""
        marks: tuple[int, ...] = ()
        named: dict[int, str] = {}
        for section in self._sections:
            if section.kind == _VERSYM and section.link == dynsym:
                count = section.size // 2
                marks = struct.unpack(f"<{count}H", self._bytes(section.offset, count * 2))
            elif section.kind == _VERDEF and section.link < len(self._sections):
                names_at = self._sections[section.link]
                names = self._bytes(names_at.offset, names_at.size)
                table, at = self._bytes(section.offset, section.size), 0
                for _ in range(len(table) // 20):
                    _, flags, index, _, _, first, following = struct.unpack_from("<HHHHIII", table, at)
                    if not flags & 1:  # 1: the version that is the file itself
                        named[index] = _text(names, struct.unpack_from("<I", table, at + first)[0])
                    if not following:
                        break
                    at += following
        return (marks, named) if marks else None

    def _dynamic(self, place: tuple[int, int] | None) -> dict[int, list[int]]:
        entries: dict[int, list[int]] = {}
        if place is not None:
            offset, size = place
            for tag, value in struct.iter_unpack("<QQ", self._bytes(offset, size // 16 * 16)):
                if not tag:
                    break
                entries.setdefault(tag, []).append(value)
        return entries

    def _dynamic_names(self, entries: dict[int, list[int]]) -> bytes:
        if _DT_STRTAB not in entries or _DT_STRSZ not in entries:
            return b""
        offset = self._offset_of(entries[_DT_STRTAB][0])
        return self._bytes(offset, entries[_DT_STRSZ][0]) if offset >= 0 else b""

    def _hashed(self, entries: dict[int, list[int]], wanted: Callable[[str], bool] | None) -> Iterator[Symbol]:
        """Symbols of a file without section headers: the dynamic linker finds them without, and so do we."""
        names = self._dynamic_names(entries)
        if not names or _DT_SYMTAB not in entries:
            return
        count = self._count_by_hash(entries)
        raw = self._bytes(self._offset_of(entries[_DT_SYMTAB][0]), count * _SYMBOL.size)
        yield from self._decode(raw, names, "dynsym", None, False, wanted)

    def _count_by_hash(self, entries: dict[int, list[int]]) -> int:
        if _DT_HASH in entries:
            _, chains = struct.unpack("<II", self._bytes(self._offset_of(entries[_DT_HASH][0]), 8))
            return int(chains)
        if _DT_GNU_HASH not in entries:
            return 0
        at = self._offset_of(entries[_DT_GNU_HASH][0])
        buckets_count, first, bloom_words, _ = struct.unpack("<IIII", self._bytes(at, 16))
        at += 16 + 8 * bloom_words
        buckets = struct.unpack(f"<{buckets_count}I", self._bytes(at, 4 * buckets_count))
        last = max(buckets, default=0)
        if last < first:
            return int(first)
        at += 4 * buckets_count
        while not struct.unpack("<I", self._bytes(at + 4 * (last - first), 4))[0] & 1:  # set at the end of a chain
            last += 1
        return int(last) + 1


def _text(table: bytes, at: int) -> str:
    end = table.find(b"\0", at)
    if end < 0:
        raise ElfError("a name that has no end")
    return table[at:end].decode("utf-8", "surrogateescape")
