"""bcc as a compiler: what it gives, and one clear reason for every way in which it can be missing or fail."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path

import pytest

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf import bcc_compiler, bcc_load
from gpuflight.sources.bpf.bcc_compiler import (
    HERE,
    SOURCES,
    CompileFailed,
    Compiler,
    CompilerDied,
    Problem,
    kernel_version,
)

COMPILER = Compiler()


def why_no_bcc() -> str:
    try:
        COMPILER.version()
    except SourceUnavailable as error:
        return str(error)
    return ""


needs_bcc = pytest.mark.skipif(bool(why_no_bcc()), reason=why_no_bcc() or "bcc works here")

SOURCE = """
#include "gf.h"
struct key { __u32 pid; __u8 kind; };
GF_CONSTANT(__u64, limit, 5);
GF_HASH(plain, struct key, __u64, 10);
GF_LRU_HASH(lru, __u64, __u8, 20);
GF_PERCPU_HASH(percpu, __u32, struct key, 30);
GF_PERCPU_LRU_HASH(both, __u32, __u64, 40);
GF_ARRAY(array, __u16, 50);
GF_PERCPU_ARRAY(percpu_array, __u64, 60);
GF_RINGBUF(ring, 8192);
GF_STACKS(stacks, 70);
GF_UPROBE(entry) { __u64 k = limit; return gf_lookup(lru, &k) != 0; }
GF_URETPROBE(entry__return) { return 0; }
GF_RAW_TP(on_exit, sched_process__exit) { return 0; }
GF_TRACEPOINT(on_fork, sched, sched__process_fork) { return 0; }
"""


@needs_bcc
def test_maps_programs_and_sections_of_a_source() -> None:
    compiled = COMPILER.compile(SOURCE, "all.c")
    shapes = {
        name: (known.kind, known.key_bytes, known.value_bytes, known.entries) for name, known in compiled.maps.items()
    }
    assert shapes == {
        "plain": (1, 8, 8, 10), "lru": (9, 8, 1, 20), "percpu": (5, 4, 8, 30), "both": (10, 4, 8, 40),
        "array": (2, 4, 2, 50), "percpu_array": (6, 4, 8, 60), "ring": (27, 0, 0, 8192), "ring_lost": (6, 4, 8, 1),
        "stacks": (7, 4, 512, 70), "gf_losses": (6, 4, 8, 32),
    }  # fmt: skip
    assert len({known.reference for known in compiled.maps.values()}) == len(compiled.maps)
    assert set(compiled.programs) == {"entry", "entry__return", "on_exit", "on_fork"}
    assert compiled.sections == {
        "entry": "uprobe",
        "entry__return": "uretprobe",
        "on_exit": "raw_tp/sched_process__exit",
        "on_fork": "tracepoint/sched/sched__process_fork",
    }
    assert compiled.warnings == []
    assert 30 << 20 < compiled.peak_memory_bytes < 2000 << 20


@needs_bcc
def test_constants_are_compiled_in() -> None:
    def stored(compiled: bcc_compiler.Compiled) -> set[int]:
        code = compiled.programs["entry"]
        return {struct.unpack_from("<i", code, at + 4)[0] for at in range(0, len(code), 8)}

    assert 5 in stored(COMPILER.compile(SOURCE, "all.c"))
    changed = stored(COMPILER.compile(SOURCE, "all.c", values={"limit": 1234}))
    assert 1234 in changed
    assert 5 not in changed


@needs_bcc
def test_the_same_source_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler()
    first = compiler.compile(SOURCE, "all.c")
    monkeypatch.setattr(compiler, "_ask", lambda *given: pytest.fail("asked again"))
    assert compiler.compile(SOURCE, "all.c") is first


@needs_bcc
@pytest.mark.parametrize(
    ("source", "line", "column", "text"),
    [
        ('#include "gf.h"\nGF_UPROBE(a)\n{\n\treturn x;\n}', 4, 9, "use of undeclared identifier 'x'"),
        ("#include <no_such.h>", 1, 10, "'no_such.h' file not found"),
        ('#include "gf.h"\nint x;', 0, 0, "it holds no program; write one as GF_UPROBE(name) { … return 0; }"),
    ],
)
def test_a_mistake_in_the_c_has_its_place(source: str, line: int, column: int, text: str) -> None:
    with pytest.raises(CompileFailed) as caught:
        COMPILER.compile(source, 'a "b".c')
    assert caught.value.problems[0] == Problem('a "b".c', line, column, text)
    assert "\n" not in str(caught.value)


@needs_bcc
def test_a_mistake_in_a_header_names_the_header(tmp_path: Path) -> None:
    (tmp_path / "mine.h").write_text("\n\nint y = z;\n")
    with pytest.raises(CompileFailed) as caught:
        COMPILER.compile('#include "mine.h"\nint a(void *ctx) { return 0; }', "a.c", include=[str(tmp_path)])
    assert caught.value.problems[0].file == str(tmp_path / "mine.h")
    assert caught.value.problems[0].line == 3


@needs_bcc
def test_warnings_are_kept() -> None:
    source = '#include "gf.h"\nGF_UPROBE(a)\n{\n\tint *p = 5;\n\treturn p != 0;\n}'
    (warning,) = COMPILER.compile(source, "a.c").warnings
    assert (warning.file, warning.line) == ("a.c", 4)


@needs_bcc
@pytest.mark.parametrize("name", ["engine", "cuda"])
def test_the_probes_that_serve_both_backends_compile(name: str) -> None:
    compiled = COMPILER.compile((SOURCES / f"{name}.bpf.c").read_text(), f"{name}.bpf.c")
    assert compiled.warnings == []
    assert compiled.programs


@needs_bcc
def test_nothing_of_bcc_stays_in_this_process() -> None:
    COMPILER.compile(SOURCE, "all.c")
    assert "bcc" not in sys.modules
    with open("/proc/self/maps", encoding="utf-8") as file:
        assert "libbcc" not in file.read()


# --- where it is missing ---------------------------------------------------------------------------------------------


def fake_bcc(folder: Path, code: str) -> Compiler:
    package = folder / "bcc"
    package.mkdir()
    (package / "libbcc.py").write_text(code)
    return Compiler([str(folder)], timeout_s=20.0)


LIBRARY = """
import ctypes, os, sys, time
class lib:
    class bpf_module_create_c_from_string:
        argtypes = [None] * 6
        def __new__(cls, *given):
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import ctypes\nctypes.CDLL('libbcc-is-gone.so.0')", r"libbcc.so.0 cannot be loaded: libbcc-is-gone.so.0"),
        ("import imp", r"does not import in Python \d\.\d+: (ModuleNotFound|Deprecation)"),
        ("raise SystemExit(3)", r"does not import in Python \d\.\d+: SystemExit"),
        ("x = (", r"does not import in Python \d\.\d+: SyntaxError"),
        ("import yaml", r"does not import .*yaml"),
        (LIBRARY.replace("* 6", "* 5") + "            pass", "called in another way than the known ones"),
        (LIBRARY + "            pass\nlib = None", r"does not import"),
    ],
)
def test_a_bcc_that_is_not_usable_is_one_reason_and_a_hint(tmp_path: Path, code: str, reason: str) -> None:
    if code == "import imp" and sys.version_info < (3, 12):
        code = "import no_such_module"
    with pytest.raises(SourceUnavailable, match=reason) as caught:
        fake_bcc(tmp_path, code).version()
    assert caught.value.hint == "apt install python3-bpfcc, or dnf install python3-bcc"
    assert "\n" not in caught.value.reason


def test_no_bcc_at_all(tmp_path: Path) -> None:
    with pytest.raises(SourceUnavailable, match="the Python package bcc of the system is not installed"):
        Compiler([str(tmp_path)]).version()


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("os.abort()", r"bcc ended with signal 6: it gave no reason"),
        ("os.write(2, b'LLVM ERROR: oh\\n'); os.kill(os.getpid(), 11)", "signal 11: LLVM ERROR: oh"),
        ("os._exit(7)", r"bcc ended with exit code 7"),
    ],
)  # fmt: skip
def test_a_compiler_that_dies_takes_nobody_along(tmp_path: Path, act: str, reason: str) -> None:
    compiler = fake_bcc(tmp_path, f"{LIBRARY}            {act}")
    assert compiler.version() == ""
    with pytest.raises(CompilerDied, match=reason):
        compiler.compile("int x;", "x.c")


@needs_bcc
def test_an_array_given_to_ringbuf_output_aborts_bcc_and_not_us() -> None:
    source = """
#include <uapi/linux/ptrace.h>
BPF_RINGBUF_OUTPUT(events, 8);
int on_call(struct pt_regs *ctx) {
    u64 data[2] = {1, 2};
    events.ringbuf_output(data, sizeof(data), 0);
    return 0;
}
"""
    try:
        COMPILER.compile(source, "array.c")  # a later bcc may have learnt it
    except CompilerDied as error:
        assert "address of a struct" in error.hint


def test_a_compiler_that_hangs_is_ended(tmp_path: Path) -> None:
    compiler = fake_bcc(tmp_path, f"{LIBRARY}            time.sleep(60)")
    compiler._timeout_s = 0.5
    with pytest.raises(SourceUnavailable, match=r"bcc did not end within 0\.5 s"):
        compiler.compile("int x;", "x.c")


def test_what_bcc_prints_is_no_answer(tmp_path: Path) -> None:
    """It gives no module and prints to standard output: neither is taken for the answer."""
    compiler = fake_bcc(tmp_path, f"{LIBRARY}            os.write(1, b'{{}} oh')")
    with pytest.raises(CompileFailed, match=r"x\.c: \{\} oh"):
        compiler.compile("int x;", "x.c")


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(SourceUnavailable, match="a process that compiles cannot be started: No such file"):
        Compiler().version()


def test_a_machine_that_probes_are_not_known_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(SourceUnavailable, match="not known to work on riscv64"):
        Compiler().compile("int x;", "x.c")


@pytest.mark.parametrize(
    ("release", "number"),
    [("6.18.44-fc-v669", 0x06122C), ("5.4.0-1", 0x050400), ("4.19.325", 0x0413FF), ("6.6", 0x060600), ("x", 0)],
)
def test_version_of_the_kernel(monkeypatch: pytest.MonkeyPatch, release: str, number: int) -> None:
    monkeypatch.setattr("platform.release", lambda: release)
    assert kernel_version() == number


def test_headers_and_sources_ship() -> None:
    names = {str(path.relative_to(HERE)) for path in (HERE / "bcc_include").rglob("*.h")}
    assert "bcc_include/include/linux/kconfig.h" in names
    assert os.access(HERE / "bcc_child.py", os.R_OK)


# --- linking ---------------------------------------------------------------------------------------------------------


def wide(source: int, value: int) -> bytes:
    return struct.pack("<BBhi", 0x18, source << 4 | 1, 0, value) + bytes(8)


def test_references_of_maps_become_descriptors_and_cookies_numbers() -> None:
    plain = struct.pack("<BBhi", 0xB7, 1, 0, 0x4746_0000)
    code = wide(1, 0x4746_0000) + plain + wide(7, 0) + wide(0, 0x4746_0000)
    linked = bcc_load.link(code, {0x4746_0000: 9}, cookie=(1 << 63) + 2)
    cookie = struct.pack("<BBhiBBhi", 0x18, 0x01, 0, 2, 0, 0, 0, -(1 << 31))
    assert linked == wide(1, 9) + plain + cookie + wide(0, 0x4746_0000)
    assert bcc_load.link(code, {0x4746_0000: 9})[24:40] == wide(0, 0)


def test_the_last_words_of_the_verifier_are_the_reason() -> None:
    log = "0: R1=ctx() R10=fp0\n; return *(int *)a;\n0: (61) r0 = *(u32 *)(r1 +8)\nR1 invalid mem access 'scalar'\n"
    counted = log + "processed 2 insns (limit 1000000) max_states_per_insn 0\n"
    for text in (log, counted):
        assert bcc_load.Rejected(13, text).reason == "R1 invalid mem access 'scalar'"
    assert bcc_load.Rejected(13, "").reason == "Permission denied"
