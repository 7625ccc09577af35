"""A small library, and a program that calls it as often as it is told: what the probes' tests look at."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
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


# Calls gf_call_0 with 1, 2, 3, … as fast as it can, once somebody writes a line to it; then waits for another.
_RACER = """
#include <stdio.h>
#include <stdlib.h>
long gf_call_0(long, long, long, long, long, long, long, long);
int main(int count, char **words)
{
    long times = atol(words[1]);
    puts("ready"); fflush(stdout);
    getchar();
    for (long number = 1; number <= times; number++) gf_call_0(number, 2, 3, 4, 5, 6, 7, 8);
    puts("done"); fflush(stdout);
    getchar();
    return 0;
}
"""


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

    def racer(self, times: int, library: str | None = None, prefix: Sequence[str] = ()) -> subprocess.Popen[str]:
        """A C program that is linked to the library and makes ``times`` calls when it is sent a line."""
        program = self.folder / "racer"
        if not program.exists():
            (self.folder / "racer.c").write_text(_RACER)
            subprocess.run(["gcc", "-O1", "-o", program, self.folder / "racer.c", self.library], check=True)
        process = subprocess.Popen(
            [*prefix, program, str(times)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
            env={"LD_PRELOAD": library or self.library},
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

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


def go(process: subprocess.Popen[str]) -> None:
    """Send a line to a racer; ``finish`` waits for it."""
    assert process.stdin is not None
    process.stdin.write("\n")


def finish(process: subprocess.Popen[str]) -> None:
    """Wait for the calls of a racer, and let it end."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    process.communicate("\n", timeout=30)
    assert process.returncode == 0
