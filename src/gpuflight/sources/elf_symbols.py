"""Single symbols of ELF files: whether one is there, and which function an address lies in, without reading all of
them.

A machine maps hundreds of libraries, some of a gigabyte; reading their symbol tables to find the three that matter
would take seconds. The dynamic symbols of a file can be looked up as the loader does it (DT_GNU_HASH, DT_HASH). Symbols
of programs that were linked statically are only in ``.symtab``, if that was not stripped. (All symbols of a library
with their versions: ``bpf.elf``.)
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable

Read = Callable[[int, int], bytes]
"""(offset, size) → bytes of the file, fewer at its end."""

STATIC_BYTES = 64 << 20
"""Largest ``.symtab`` with its names that is searched."""

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_GNU_HASH = 4, 5, 6, 0x6FFFFEF5
_SHT_SYMTAB, _SHT_DYNSYM = 2, 11
_STT_FUNC = 2
_LONGEST_NAME = 4096
_SYMBOL = 24  # bytes of an Elf64_Sym
_LONGEST_CHAIN = 4096
_MOST_HEADERS = 4096


class NotElf(ValueError):
    """It is no 64-bit little-endian ELF file, or its tables make no sense."""


class ElfFile:
    """One file. Raises NotElf, and OSError as ``read`` does."""

    def __init__(self, read: Read) -> None:
        self._read_file = read
        header = self._read(0, 64)
        if len(header) < 64 or header[:6] != b"\x7fELF\x02\x01":  # both x86-64 and arm64 Linux are little-endian
            raise NotElf("no 64-bit little-endian ELF file")
        self._sections_at, self._sections = (
            struct.unpack_from("<Q", header, 40)[0],
            struct.unpack_from("<H", header, 60)[0],
        )
        at, size, count = struct.unpack_from("<Q", header, 32)[0], *struct.unpack_from("<HH", header, 54)
        if size != 56 or count > _MOST_HEADERS:
            raise NotElf("strange program headers")
        raw = self._exactly(at, size * count)
        self._loads: list[tuple[int, int, int]] = []  # (address, size in the file, offset)
        self._dynamic_at = self._dynamic_size = 0
        for kind, _flags, offset, address, _physical, in_file, _in_memory, _align in struct.iter_unpack(
            "<IIQQQQQQ", raw
        ):
            if kind == _PT_LOAD:
                self._loads.append((address, in_file, offset))
            elif kind == _PT_DYNAMIC:
                self._dynamic_at, self._dynamic_size = offset, in_file

    def exports(self, names: Iterable[str]) -> set[str]:
        """Those of ``names`` that it offers to other files."""
        return set(self.addresses(names))

    def addresses(self, names: Iterable[str]) -> dict[str, int]:
        """Addresses of those of ``names`` that it offers to other files, as the file counts them."""
        if not self._dynamic_at:
            return {}
        raw = self._exactly(self._dynamic_at, min(self._dynamic_size, 1 << 16) // 16 * 16)
        tags = dict(reversed([(tag, value) for tag, value in struct.iter_unpack("<QQ", raw)]))
        if _DT_SYMTAB not in tags or _DT_STRTAB not in tags:
            return {}
        symbols, texts = self._offset(tags[_DT_SYMTAB]), self._offset(tags[_DT_STRTAB])
        if _DT_GNU_HASH in tags:
            look_up = self._gnu_hash(self._offset(tags[_DT_GNU_HASH]), symbols, texts)
        elif _DT_HASH in tags:
            look_up = self._sysv_hash(self._offset(tags[_DT_HASH]), symbols, texts)
        else:
            return {}
        return {name: value for name in names if (value := look_up(name.encode())) is not None}

    @property
    def first_address(self) -> int:
        """Address that the beginning of the file is loaded at, as the file counts: 0 but for programs at a fixed
        place."""
        return min((address - offset for address, _, offset in self._loads), default=0)

    def holds(self, names: Iterable[str]) -> set[str]:
        """Those of ``names`` that its full symbol table defines; empty if it was stripped."""
        found = self._static_table()
        if found is None:
            return set()
        symbols, texts = found
        wanted = {name: _places(texts, name.encode() + b"\0") for name in names}
        places = {place: name for name, all_places in wanted.items() for place in all_places}
        held: set[str] = set()
        if places:
            for at, _info, _other, section, _value, _size in struct.iter_unpack("<IBBHQQ", symbols):
                if section and at in places:
                    held.add(places[at])
        return held

    def functions_at(self, offsets: Iterable[int]) -> dict[int, tuple[str, int]]:
        """The function that each place of the file lies in, as (name, bytes from its beginning); absent without one."""
        best: dict[int, tuple[int, int, int]] = {}  # place → (beginning, name, table)
        places = sorted((address, offset) for offset in offsets if (address := self._address(offset)) is not None)
        tables = self._tables(_SHT_SYMTAB, _SHT_DYNSYM)
        for number, (symbols, _) in enumerate(tables):
            for name, info, _other, section, value, size in struct.iter_unpack("<IBBHQQ", symbols):
                if info & 15 != _STT_FUNC or not section or not name:
                    continue
                at = bisect_left(places, (value, 0))
                while at < len(places) and places[at][0] < value + max(size, 1):
                    offset = places[at][1]
                    if offset not in best or best[offset][0] < value:
                        best[offset] = (value, name, number)
                    at += 1
        found = {}
        for address, offset in places:
            if offset in best:
                value, name, number = best[offset]
                texts = tables[number][1]
                raw = texts[name : max(texts.find(b"\0", name), name)][:_LONGEST_NAME]
                found[offset] = raw.decode("utf-8", "replace"), address - value
        return found

    # --- inside ----------------------------------------------------------------------------------------------------

    def _read(self, offset: int, size: int) -> bytes:
        if size > STATIC_BYTES or offset >= 1 << 62:
            raise NotElf("a table beyond every bound")
        return self._read_file(offset, size)

    def _exactly(self, offset: int, size: int) -> bytes:
        raw = self._read(offset, size)
        if len(raw) != size:
            raise NotElf("cut short")
        return raw

    def _offset(self, address: int) -> int:
        for start, size, offset in self._loads:
            if start <= address < start + size:
                return address - start + offset
        raise NotElf("an address outside the file")

    def _value(self, index: int, name: bytes, symbols: int, texts: int) -> int | None:
        """The address of a symbol that has this name and is defined here."""
        raw = self._exactly(symbols + _SYMBOL * index, _SYMBOL)
        text, _info, _other, section, value, _size = struct.unpack("<IBBHQQ", raw)
        return value if section and self._read(texts + text, len(name) + 1) == name + b"\0" else None

    def _gnu_hash(self, at: int, symbols: int, texts: int) -> Callable[[bytes], int | None]:
        buckets, first, blooms, shift = struct.unpack("<IIII", self._exactly(at, 16))
        if not buckets or not blooms:
            raise NotElf("an empty hash table")
        buckets_at = at + 16 + 8 * blooms
        chains_at = buckets_at + 4 * buckets

        def look_up(name: bytes) -> int | None:
            value = 5381
            for letter in name:
                value = (value * 33 + letter) & 0xFFFFFFFF
            (bloom,) = struct.unpack("<Q", self._exactly(at + 16 + 8 * (value // 64 % blooms), 8))
            if not bloom >> (value % 64) & bloom >> ((value >> shift) % 64) & 1:
                return None
            (index,) = struct.unpack("<I", self._exactly(buckets_at + 4 * (value % buckets), 4))
            if index < first:
                return None
            for _ in range(_LONGEST_CHAIN):
                (known,) = struct.unpack("<I", self._exactly(chains_at + 4 * (index - first), 4))
                if known | 1 == value | 1 and (address := self._value(index, name, symbols, texts)) is not None:
                    return address
                if known & 1:
                    return None
                index += 1
            raise NotElf("a hash chain without an end")

        return look_up

    def _sysv_hash(self, at: int, symbols: int, texts: int) -> Callable[[bytes], int | None]:
        buckets, chains = struct.unpack("<II", self._exactly(at, 8))
        if not buckets:
            raise NotElf("an empty hash table")

        def look_up(name: bytes) -> int | None:
            value = 0
            for letter in name:
                value = (value << 4) + letter
                high = value & 0xF0000000
                value = (value ^ high >> 24) & ~high & 0xFFFFFFFF
            (index,) = struct.unpack("<I", self._exactly(at + 8 + 4 * (value % buckets), 4))
            for _ in range(min(chains, _LONGEST_CHAIN)):
                if not index:
                    return None
                if (address := self._value(index, name, symbols, texts)) is not None:
                    return address
                (index,) = struct.unpack("<I", self._exactly(at + 8 + 4 * (buckets + index), 4))
            return None

        return look_up

    def _address(self, offset: int) -> int | None:
        for start, size, begin in self._loads:
            if begin <= offset < begin + size:
                return offset - begin + start
        return None

    def _static_table(self) -> tuple[bytes, bytes] | None:
        return next(iter(self._tables(_SHT_SYMTAB)), None)

    def _tables(self, *kinds: int) -> list[tuple[bytes, bytes]]:
        """Symbols and names of the sections of these kinds that are not too large."""
        if not self._sections_at or not self._sections:
            return []
        raw = self._read(self._sections_at, 64 * self._sections)
        headers = list(struct.iter_unpack("<IIQQQQIIQQ", raw[: len(raw) // 64 * 64]))
        found = []
        for header in headers:
            kind, at, size, texts = header[1], header[4], header[5], header[6]
            if kind not in kinds or texts >= len(headers):
                continue
            texts_at, texts_size = headers[texts][4], headers[texts][5]
            if size + texts_size <= STATIC_BYTES:
                symbols = self._exactly(at, size // _SYMBOL * _SYMBOL)
                found.append((symbols, self._exactly(texts_at, texts_size)))
        return found


def _places(texts: bytes, name: bytes) -> list[int]:
    """Where a name begins: linkers let one name be the end of another."""
    found = []
    at = texts.find(name)
    while at >= 0:
        found.append(at)
        at = texts.find(name, at + 1)
    return found
