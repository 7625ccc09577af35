"""Symbols of ELF files against pyelftools on real libraries, and on damaged ones."""

from __future__ import annotations

import glob
import random
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerSymSection

from gpuflight.sources.bpf.elf import ElfError, read_elf
from gpuflight.sources.bpf.objects import constants_of, read_object

SITE = sysconfig.get_paths()["purelib"]
CUDART = sorted(glob.glob(f"{SITE}/nvidia/**/libcudart.so.1[0-9]", recursive=True))
LIBRARIES = [*CUDART, *glob.glob("/lib/*-linux-gnu/libc.so.6"), *glob.glob("/lib/*-linux-gnu/libstdc++.so.6")][:4]

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")


def expected(path: str) -> set[tuple[str, int, int, str, str]]:
    """(name, value, size, type, version) of every defined symbol of .dynsym, as pyelftools tells it."""
    with open(path, "rb") as file:
        elf = ELFFile(file)
        versions: dict[int, str] = {}
        marks = None
        for section in elf.iter_sections():
            if isinstance(section, GNUVerDefSection):
                for definition, names in section.iter_versions():
                    if not definition["vd_flags"] & 1:
                        versions[definition["vd_ndx"]] = next(names).name
            elif isinstance(section, GNUVerSymSection):
                marks = section
        found = set()
        for number, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            kind = symbol["st_info"]["type"]
            if symbol["st_shndx"] in ("SHN_UNDEF", "SHN_ABS") or kind not in ("STT_FUNC", "STT_OBJECT", "STT_LOOS"):
                continue
            version = ""
            if marks is not None:
                mark = marks.get_symbol(number)["ndx"]
                version = versions.get(mark & 0x7FFF, "") if isinstance(mark, int) else ""
            found.add((symbol.name, symbol["st_value"], symbol["st_size"], kind, version))
        return found


@pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.rsplit("/", 1)[-1])
def test_symbols_are_those_that_pyelftools_finds(path: str) -> None:
    kinds = {"function": "STT_FUNC", "object": "STT_OBJECT", "ifunc": "STT_LOOS"}
    elf = read_elf(path)
    ours = {
        (symbol.name, symbol.value, symbol.size, kinds[symbol.kind], symbol.version)
        for symbol in elf.symbols
        if symbol.table == "dynsym"
    }
    assert ours == expected(path)
    with open(path, "rb") as file:
        reference = ELFFile(file)
        loads = [segment for segment in reference.iter_segments() if segment["p_type"] == "PT_LOAD"]
        for symbol in elf.functions():
            holder = next(s for s in loads if s["p_vaddr"] <= symbol.value < s["p_vaddr"] + s["p_filesz"])
            assert symbol.offset == symbol.value - holder["p_vaddr"] + holder["p_offset"]


@pytest.mark.skipif(not CUDART, reason="no CUDA runtime from PyPI for this machine")
def test_a_cuda_runtime_offers_its_functions_with_their_version() -> None:
    elf = read_elf(CUDART[0], lambda name: name.startswith("cudaLaunchKernel"))
    assert {symbol.name for symbol in elf.functions()} >= {"cudaLaunchKernel", "cudaLaunchKernelExC"}
    assert {symbol.version for symbol in elf.functions()} == {CUDART[0].rsplit("/", 1)[-1]}


def test_a_function_that_is_chosen_when_the_library_is_loaded_is_told_apart() -> None:
    libc = next(iter(glob.glob("/lib/*-linux-gnu/libc.so.6")), None)
    if libc is None:
        pytest.skip("no glibc")
    elf = read_elf(libc, lambda name: name in ("memmove", "getpid"))
    kinds = {symbol.name: symbol.kind for symbol in elf.symbols}
    assert kinds == {"memmove": "ifunc", "getpid": "function"}
    assert [symbol.name for symbol in elf.functions()] == ["getpid"]


@needs_compiler
def test_old_versions_of_a_function_are_functions_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text(
        'int old(void) { return 1; }\nint new(void) { return 2; }\n__asm__(".symver old,call@V1");\n'
        '__asm__(".symver new,call@@V2");\n'
    )
    (tmp_path / "a.map").write_text("V1 { global: call; local: *; };\nV2 { global: call; } V1;\n")
    library = tmp_path / "liba.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "a.c", f"-Wl,--version-script={tmp_path / 'a.map'}"],
        check=True,
    )
    found = [symbol for symbol in read_elf(str(library)).functions() if symbol.name == "call"]
    assert sorted((symbol.version, symbol.default) for symbol in found) == [("V1", False), ("V2", True)]


@needs_compiler
@pytest.mark.parametrize("style", ["gnu", "sysv"])
def test_without_section_headers_the_dynamic_linkers_tables_are_read(tmp_path: Path, style: str) -> None:
    (tmp_path / "a.c").write_text("".join(f"int gf_{number}(void) {{ return {number}; }}\n" for number in range(50)))
    library = tmp_path / "liba.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "a.c", f"-Wl,--hash-style={style}", "-Wl,-soname,liba"],
        check=True,
    )
    whole = {(symbol.name, symbol.offset) for symbol in read_elf(str(library)).functions() if symbol.name[:3] == "gf_"}
    data = bytearray(library.read_bytes())
    struct.pack_into("<Q", data, 40, 0)  # e_shoff
    struct.pack_into("<HHH", data, 58, 0, 0, 0)  # e_shentsize, e_shnum, e_shstrndx
    bare = read_elf(bytes(data))
    assert {(symbol.name, symbol.offset) for symbol in bare.functions() if symbol.name[:3] == "gf_"} == whole
    assert len(whole) == 50
    assert bare.stripped


@needs_compiler
def test_static_and_stripped_programs_are_called_so(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int gf_inner(void) { return 1; }\nint main(void) { return gf_inner(); }\n")
    program = str(tmp_path / "a")
    subprocess.run(["gcc", "-static", "-o", program, tmp_path / "a.c"], check=True)
    elf = read_elf(program)
    assert not elf.stripped
    assert any(symbol.name == "gf_inner" and symbol.offset > 0 for symbol in elf.functions())
    subprocess.run(["strip", program], check=True)
    bare = read_elf(program)
    assert bare.stripped
    assert not list(bare.functions())


def test_settings_of_a_probe_are_found_in_its_object() -> None:
    for machine in ("x86_64", "aarch64"):
        places = constants_of(read_object("engine", machine))
        assert places["only_tgid"][1] == 4
        assert places["ring_above"][1] == 8


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no ELF file"),
        (b"#!/bin/sh\n" + b"x" * 100, "no ELF file"),
        (b"\x7fELF\x01\x01" + b"\0" * 100, "not of 64 bits"),
        (b"\x7fELF\x02\x02" + b"\0" * 100, "not of 64 bits"),
    ],
)
def test_what_is_no_elf_file_is_said_to_be_none(content: bytes, reason: str) -> None:
    with pytest.raises(ElfError, match=reason):
        read_elf(content)


def test_damaged_files_are_refused_or_read_but_never_anything_else(tmp_path: Path) -> None:
    whole = read_object("engine", "x86_64")
    library = Path(LIBRARIES[0]).read_bytes() if LIBRARIES else whole
    bare = bytearray(library)
    struct.pack_into("<Q", bare, 40, 0)  # no section headers: the dynamic linker's tables
    struct.pack_into("<HHH", bare, 58, 0, 0, 0)
    chance = random.Random(5)
    outcomes = set()
    for content in (whole, library, bytes(bare)):
        for _ in range(40):
            data = bytearray(content[: chance.randrange(len(content))])
            outcomes.add(attempt(bytes(data)))
            data = bytearray(content)
            for _ in range(chance.randrange(1, 20)):
                data[chance.randrange(min(len(data), 2000))] = chance.randrange(256)
            outcomes.add(attempt(bytes(data)))
            (tmp_path / "damaged").write_bytes(data)
            outcomes.add(attempt(str(tmp_path / "damaged")))
    assert outcomes == {"read", "refused"}


def attempt(content: bytes | str) -> str:
    try:
        read_elf(content)
    except ElfError:
        return "refused"
    return "read"


def test_a_file_that_would_block_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((ElfError, OSError)):
        read_elf(str(tmp_path / "pipe"))
