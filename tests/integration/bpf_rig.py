"""A small library, and a program that calls it as often as it is told: what the probes' tests look at."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf import Uprobe, features
from gpuflight.sources.bpf.elf import read_elf
from gpuflight.sources.bpf.libbpf import LibbpfBackend

FUNCTIONS = 40
_LIBRARY = "".join(
    f"""
long gf_call_{number}(long a, long b, long c, long d, long e, long f, long g, long h)
{{ volatile long seen = a + b + c + d + e + f + g + h; return seen + {number}; }}"""
    for number in range(FUNCTIONS)
)
_CALLER = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
for word in sys.argv[2:]:
    number, _, rest = word.partition(":")
    times, _, first = rest.partition(":")
    function = getattr(library, f"gf_call_{number}")
    function.argtypes = [ctypes.c_long] * 8
    function.restype = ctypes.c_long
    for _ in range(int(times)):
        function(int(first or 1), 2, 3, 4, 5, 6, 7, 8)
"""


def why_not() -> str:
    """Why this machine cannot run probes; empty if it can."""
    try:
        LibbpfBackend().available()
        features.require_btf()
    except SourceUnavailable as error:
        return str(error)
    return "needs a C compiler" if shutil.which("gcc") is None else ""


needs_probes = pytest.mark.skipif(bool(why_not()), reason=why_not() or "probes work here")


class Rig:
    """``library``: the path of a copy of its own, since probes belong to a file; ``pid`` of the last run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        source = folder / "calls.c"
        source.write_text(_LIBRARY)
        self.library = str(folder / "libcalls.so")
        subprocess.run(["gcc", "-O0", "-shared", "-fPIC", "-o", self.library, source], check=True)
        symbols = read_elf(self.library, lambda name: name.startswith("gf_call_")).functions()
        self.offsets = dict(sorted((int(symbol.name.removeprefix("gf_call_")), symbol.offset) for symbol in symbols))
        self.pid = 0

    def uprobes(self, *, ret: bool = False, cookie: int = 100) -> list[Uprobe]:
        """All functions; number N has the cookie ``cookie`` + N."""
        return [
            Uprobe(self.library, offset, cookie + number, ret, f"gf_call_{number}")
            for number, offset in self.offsets.items()
        ]

    def call(self, *calls: str) -> None:
        """``NUMBER:TIMES[:FIRST_ARGUMENT]`` in a process of its own."""
        process = subprocess.Popen([sys.executable, "-c", _CALLER, self.library, *calls])
        self.pid = process.pid
        assert process.wait(60) == 0


def counts(rows: list[tuple[bytes, bytes]], pid: int) -> dict[int, int]:
    """Of a map of calls: cookie → calls of one process, the CPUs summed."""
    found = {}
    for key, value in rows:
        tgid, cookie = struct.unpack("=II", key)
        if tgid == pid:
            found[cookie] = sum(struct.unpack(f"={len(value) // 8}Q", value))
    return found
