"""The objects that ship: made from the sources beside them, the same bytes again, for both machines, in the wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from gpuflight.sources.bpf import build
from gpuflight.sources.bpf.elf import read_elf

NAMES = build.names()

needs_clang = pytest.mark.skipif(
    not (shutil.which("clang") and shutil.which("llvm-strip")), reason="needs clang and llvm"
)


def record_of(name: str) -> dict[str, object]:
    with open(os.path.join(build.OBJECTS, f"{name}.build.json"), encoding="utf-8") as file:
        loaded: dict[str, object] = json.load(file)
    return loaded


def shipped(name: str, part: str) -> bytes:
    with open(os.path.join(build.OBJECTS, f"{name}.{part}.bpf.o"), "rb") as file:
        return file.read()


def outline(content: bytes) -> dict[str, set[str]]:
    """Programs, maps and settings of an object, by section."""
    elf = read_elf(content)
    found: dict[str, set[str]] = {}
    for symbol in elf.symbols:
        found.setdefault(elf.sections[symbol.section], set()).add(symbol.name)
    return found


def test_there_are_probes() -> None:
    assert "engine" in NAMES
    kept = {name.partition(".")[0] for name in os.listdir(build.OBJECTS)}
    assert kept == set(NAMES)  # nothing of a probe that is gone


def test_each_of_them_is_in_the_documentation(repository: Path) -> None:
    text = (repository / "docs" / "probes.md").read_text("utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_objects_belong_to_their_sources(name: str) -> None:
    record = record_of(name)
    assert record["sources_sha256"] == build.digest_of_sources(name), "sources changed since: make probes"
    assert record["objects"] == {
        f"{name}.{part}.bpf.o": hashlib.sha256(shipped(name, part)).hexdigest() for part in build.TARGETS
    }


@needs_clang
@pytest.mark.parametrize("name", NAMES)
def test_the_same_sources_give_the_same_object(name: str) -> None:
    ours, theirs = build.version_of("clang"), str(record_of(name)["clang"])
    for part in build.TARGETS:
        again, before = build.compile_probe(name, part), shipped(name, part)
        if ours.partition(".")[0] == theirs.partition(".")[0]:
            assert again == before, f"not reproducible, or sources changed since: make probes ({part})"
        else:  # another clang chooses other instructions
            assert outline(again) == outline(before)


@pytest.mark.parametrize("part", list(build.TARGETS))
@pytest.mark.parametrize("name", NAMES)
def test_objects_carry_types_and_no_debug_information(name: str, part: str) -> None:
    elf = ELFFile(io.BytesIO(shipped(name, part)))
    sections = {section.name for section in elf.iter_sections()}
    assert elf["e_machine"] == "EM_BPF"
    assert elf.little_endian
    assert {".BTF", ".BTF.ext", "license"} <= sections
    assert not {section for section in sections if section.startswith(".debug")}
    assert elf.get_section_by_name("license").data() == b"GPL\0"
    assert os.fsencode(build.FOLDER) not in shipped(name, part)  # nor where it was made


# Byte offsets in the registers that a program is handed: x86-64 struct pt_regs, arm64 struct user_pt_regs.
REGISTERS = {
    "x86_64": {
        "GF_ARG1": 112, "GF_ARG2": 104, "GF_ARG3": 96, "GF_ARG4": 88, "GF_ARG5": 72, "GF_ARG6": 64,
        "GF_RET": 80, "GF_IP": 128, "GF_SP": 152,
    },
    "arm64": {
        "GF_ARG1": 0, "GF_ARG2": 8, "GF_ARG3": 16, "GF_ARG4": 24, "GF_ARG5": 32, "GF_ARG6": 40, "GF_ARG7": 48,
        "GF_ARG8": 56, "GF_RET": 0, "GF_IP": 256, "GF_SP": 248,
    },
}  # fmt: skip


@needs_clang
@pytest.mark.parametrize("part", list(build.TARGETS))
def test_arguments_are_read_where_the_calling_convention_has_them(tmp_path: Path, part: str) -> None:
    """The only check of arm64 that is possible without one: the instructions."""
    registers = REGISTERS[part]
    programs = "".join(
        f'SEC("uprobe") int program_{macro}(struct pt_regs *ctx) {{ return (int){macro}(ctx); }}\n'
        for macro in registers
    )
    (tmp_path / "arguments.bpf.c").write_text(f'#include "gf.h"\n{programs}')
    target = tmp_path / "arguments.o"
    flags = [flag for flag in build.FLAGS if flag != "-Werror"]
    subprocess.run(
        [
            "clang",
            *flags,
            f"-D__TARGET_ARCH_{build.TARGETS[part]}",
            "-I",
            build.SOURCES,
            "-c",
            "arguments.bpf.c",
            "-o",
            target,
        ],
        check=True,
        cwd=tmp_path,
    )
    with open(target, "rb") as file:
        elf = ELFFile(file)
        code = elf.get_section_by_name("uprobe").data()
        symbols = {symbol.name: symbol for symbol in elf.get_section_by_name(".symtab").iter_symbols()}
    for macro, offset in registers.items():
        start = symbols[f"program_{macro}"]["st_value"]
        opcode, operands = code[start], code[start + 1]
        assert opcode in (0x79, 0x61), macro  # load of 8 or of 4 bytes
        assert operands >> 4 == 1, macro  # from register 1, where programs get their context
        assert int.from_bytes(code[start + 2 : start + 4], "little", signed=True) == offset, macro


@needs_clang
def test_make_probes_compiles_what_changed_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, objects = tmp_path / "c", tmp_path / "objects"
    shutil.copytree(build.SOURCES, sources)
    for file in sources.glob("*.bpf.c"):
        if file.name != "engine.bpf.c":
            file.unlink()
    monkeypatch.setattr(build, "SOURCES", str(sources))
    monkeypatch.setattr(build, "OBJECTS", str(objects))
    monkeypatch.setattr(sys, "argv", ["build"])
    assert build.main() == 0
    first = {path.name: path.stat().st_mtime_ns for path in objects.iterdir()}
    assert set(first) == {"engine.x86_64.bpf.o", "engine.arm64.bpf.o", "engine.build.json"}
    if build.version_of("clang") == record_of("engine")["clang"]:  # wherever it is made
        assert (objects / "engine.x86_64.bpf.o").read_bytes() == shipped("engine", "x86_64")
    assert build.main() == 0
    assert {path.name: path.stat().st_mtime_ns for path in objects.iterdir()} == first
    with open(sources / "gf_args.h", "a", encoding="utf-8") as header:
        header.write("/* changed */\n")
    assert build.main() == 0
    assert all(path.stat().st_mtime_ns != first[path.name] for path in objects.iterdir())


def test_without_clang_make_probes_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLANG", "no-such-clang")
    monkeypatch.setattr(sys, "argv", ["build"])
    assert build.main() == 2
    assert "apt install clang" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="needs setuptools")
def test_objects_and_sources_are_in_what_is_installed(tmp_path: Path, repository: Path) -> None:
    """As ``pip install`` and the wheel do it: setuptools' build_py on a copy, with no network and no isolation."""
    import setuptools

    copy, target = tmp_path / "copy", tmp_path / "built"
    shutil.copytree(
        repository / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"), symlinks=True
    )
    project = (repository / "pyproject.toml").read_text("utf-8")
    if int(setuptools.__version__.partition(".")[0]) < 77:  # which takes a licence in another form
        project = re.sub(r"^license(-files)? = .*\n", "", project, flags=re.MULTILINE)
    (copy / "pyproject.toml").write_text(project)
    (copy / "README.md").write_text("")
    (copy / "LICENSE").write_text("")
    command = [
        sys.executable,
        "-c",
        "import setuptools; setuptools.setup()",
        "-q",
        "build_py",
        "--build-lib",
        str(target),
    ]
    subprocess.run(command, check=True, cwd=copy, capture_output=True)
    here = Path(build.FOLDER)
    there = target / "gpuflight" / "sources" / "bpf"
    for folder in ("c", "objects"):
        assert {path.name for path in (there / folder).iterdir()} == {path.name for path in (here / folder).iterdir()}
    for name in NAMES:
        for part in build.TARGETS:
            assert (there / "objects" / f"{name}.{part}.bpf.o").read_bytes() == shipped(name, part)
    headers = {path.relative_to(here) for path in (here / "bcc_include").rglob("*.h")}
    assert headers
    assert all((there / header).exists() for header in headers), "bcc compiles without headers of the kernel"
