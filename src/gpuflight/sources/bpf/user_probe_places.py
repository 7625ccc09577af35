"""Where a user's uprobe goes: FILE:SYMBOL to a file as we can open it, and the offset of the function in it."""

from __future__ import annotations

import difflib
import os
import platform

from gpuflight.sources.bpf.elf import Elf, ElfError, Symbol, read_elf
from gpuflight.sources.bpf.user_probe_spec import Place

_MULTIARCH = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}


class NoPlace(Exception):
    """A place that cannot be found: the message says what is missing, ``hint`` what to do."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.hint = hint


def find_place(place: Place, pid: int = 0) -> tuple[str, int]:
    """Path and offset (bytes) for a probe; with ``pid`` the file as that process sees it. Raises NoPlace."""
    path = find_file(place.file, pid)
    if place.offset >= 0:
        return path, place.offset
    try:
        elf = read_elf(path, lambda name: name == place.symbol)
        symbol = _choose(elf, place.symbol)
        if symbol is None:
            raise _no_symbol(read_elf(path), place)
    except OSError as error:
        raise NoPlace(f"{path} cannot be read: {error.strerror}") from error
    except ElfError as error:
        raise NoPlace(f"{path} cannot be probed: {error}") from error
    return path, symbol.offset + place.plus


def _choose(elf: Elf, name: str) -> Symbol | None:
    """The function that new programs are linked to, if there are versions of it."""
    functions = [symbol for symbol in elf.symbols if symbol.kind == "function" and symbol.offset >= 0]
    return next((symbol for symbol in functions if symbol.default), functions[0] if functions else None)


def _no_symbol(elf: Elf, place: Place) -> NoPlace:
    file = os.path.basename(place.file)
    if any(symbol.kind == "ifunc" and symbol.name == place.symbol for symbol in elf.symbols):
        return NoPlace(
            f"{place.symbol} of {file} is chosen when the library is loaded (ifunc), a probe there sees no calls",
            "probe the function it chooses, by its own name or offset",
        )
    names = {symbol.name for symbol in elf.functions()}
    close = difflib.get_close_matches(place.symbol, names, 1) if len(names) < 50_000 else []
    if close:
        return NoPlace(f"{file} has no function {place.symbol}", f"did you mean {close[0]}?")
    hint = "it is stripped: give an offset" if elf.stripped and not names else f"nm -D {place.file} lists them"
    return NoPlace(f"{file} has no function {place.symbol}", hint)


def find_file(file: str, pid: int = 0) -> str:
    """A path that can be opened. A bare name is that of a library that we or ``pid`` have in memory, or that lies where
    libraries of the system lie. Raises NoPlace."""
    root = f"/proc/{pid}/root" if pid else ""
    if pid and not os.path.exists(f"/proc/{pid}"):
        raise NoPlace(f"there is no process {pid}")
    if "/" in file:
        if not os.path.isabs(file):
            raise NoPlace(f"{file} is no absolute path", "write the whole path, or the bare name of a library")
        if not os.path.exists(root + file):
            raise NoPlace(f"there is no file {file}" + (f" where process {pid} lives" if pid else ""))
        return root + file
    for path in (*_mapped(file, pid), *_system(file)):
        if os.path.exists(root + path):
            return root + path
    raise NoPlace(f"no library {file} is found", "write its absolute path")


def _mapped(name: str, pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid or 'self'}/maps", encoding="utf-8", errors="surrogateescape") as file:
            paths = {line.split(None, 5)[5].rstrip("\n") for line in file if line.count("/")}
    except OSError:
        return []
    return sorted(path for path in paths if os.path.basename(path) == name)


def _system(name: str) -> list[str]:
    triplet = _MULTIARCH.get(platform.machine(), "")
    folders = [f"/lib/{triplet}", f"/usr/lib/{triplet}"] if triplet else []
    return [f"{folder}/{name}" for folder in (*folders, "/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib")]
