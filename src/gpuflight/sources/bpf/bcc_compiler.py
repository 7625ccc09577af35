"""C to BPF instructions by bcc, in a process that lives for one compilation.

bcc means LLVM: about 125 MB of memory in whichever process imports it, and an abort on some mistakes. Neither belongs
into a program that watches a machine for weeks, so a child process compiles, hands over instructions and map
descriptions, and is gone (0.3 to 0.5 s). It loads nothing into the kernel: making maps, loading and attaching is done
here, by the calls the libbpf backend uses too. Headers of the kernel are not needed (``bcc_include``).
"""

from __future__ import annotations

import base64
import json
import os
import platform
import re
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from gpuflight.errors import GpuflightError, SourceUnavailable

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "c"
FOLDERS = ("/usr/lib/python3/dist-packages", "/usr/local/lib/python3/dist-packages")
"""Where Debian and Ubuntu put packages of the system; Red Hat's and Arch's folders are named after a version."""

_TIMEOUT_S = 120.0
_TARGETS = {"x86_64": "x86", "aarch64": "arm64"}
_KEPT = 8  # compilations
_DEATHS = "it aborts on an array given to ringbuf_output, for one: give the address of a struct"
_DIAGNOSTIC = re.compile(r"^([^:\n]+):(\d+):(\d+): (fatal error|error|warning): (.*)$", re.MULTILINE)
_MAP, _AT = "gf_map__", "gf_at__"
_INSTRUCTION = struct.Struct("<BBhi")
LOAD_64_BITS = 0x18
"""Code of the instruction whose constant fills two places; only this one holds maps (linux/bpf_common.h)."""


class Problem(Struct, frozen=True):
    """One complaint of the compiler. ``line`` and ``column`` from 1; 0 where it names no place."""

    file: str
    line: int
    column: int
    text: str
    warning: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.text}" if self.line else f"{self.file}: {self.text}"


class CompileFailed(GpuflightError):
    """The C of a probe does not compile; ``problems`` are the compiler's complaints, the first one is the message."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(str(problems[0]))
        self.problems = list(problems)


class CompilerDied(SourceUnavailable):
    """bcc ended without an answer, killed by what it was given: one source, not the machine, is to blame."""


class MapShape(Struct, frozen=True):
    """A map as the source declares it. ``reference`` is what instructions have in place of its descriptor."""

    name: str
    reference: int
    kind: int
    key_bytes: int
    value_bytes: int
    entries: int
    flags: int = 0


class Compiled(Struct):
    """What one source became: instructions of 8 bytes per program, maps, and where programs say they belong."""

    maps: dict[str, MapShape]
    programs: dict[str, bytes]
    sections: dict[str, str] = field(default_factory=dict)  # program → "uprobe", "raw_tp/NAME", "tracepoint/GROUP/NAME"
    warnings: list[Problem] = field(default_factory=list)
    peak_memory_bytes: int = 0  # of the child


class Compiler:
    """bcc as it is installed on this machine. ``folders``: where its Python package is looked for."""

    def __init__(self, folders: Sequence[str] | None = None, timeout_s: float = _TIMEOUT_S) -> None:
        self._folders = list(folders) if folders is not None else _system_folders()
        self._timeout_s = timeout_s
        self._kept: dict[tuple[str, ...], Compiled] = {}
        self._version: str | None = None

    def version(self) -> str:
        """Version of bcc. Raises SourceUnavailable(reason, hint) if it cannot be used here; asks once."""
        if self._version is None:
            self._version = self._ask(None, [])[0]["version"]
        return self._version

    def compile(
        self,
        source: str,
        file: str,
        *,
        include: Sequence[str] = (),
        values: Mapping[str, int] | None = None,
        cookie_in_program: bool = False,
    ) -> Compiled:
        """Compile the C text of ``file`` (its name, for complaints).

        ``include``: folders of headers beside ours. ``values``: of its ``GF_CONSTANT``\\ s. ``cookie_in_program``: for
        kernels without a helper for cookies (before 5.15). Raises CompileFailed, SourceUnavailable.
        """
        flags = [
            "-DGF_BCC",
            "-Werror=implicit-function-declaration",
            f"-D__TARGET_ARCH_{_target()}",
            f"-DGF_KERNEL_VERSION={kernel_version()}",
            *(f"-DGF_VALUE_{name}=_,{value}" for name, value in sorted((values or {}).items())),
            *(["-DGF_COOKIE_IN_PROGRAM"] if cookie_in_program else []),
            *(f"-I{folder}" for folder in (*include, SOURCES)),
        ]
        key = (file, source, *flags)
        known = self._kept.get(key)
        if known is None:
            known = self._compile(source, file, flags)
            if len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = known
        return known

    def _compile(self, source: str, file: str, flags: list[str]) -> Compiled:
        named = json.dumps(file, ensure_ascii=False)
        answer, said = self._ask(f"#line 1 {named}\n{source}", flags)
        problems = _problems(said, file)
        if "functions" not in answer:
            errors = [problem for problem in problems if not problem.warning]
            raise CompileFailed(errors or [Problem(file, 0, 0, _last_line(said) or "bcc gives no reason")])
        self._version = answer["version"]
        compiled = _read(answer, file)
        compiled.warnings = [problem for problem in problems if problem.warning]
        return compiled

    def _ask(self, source: str | None, flags: list[str]) -> tuple[dict[str, Any], str]:
        """The child's answer, and what the compiler said."""
        request = {
            "folders": self._folders,
            "source": source,
            "flags": flags,
            "kernel_source": str(HERE / "bcc_include"),
        }
        python = sys.executable or "/usr/bin/python3"
        try:
            done = subprocess.run(
                [python, "-I", "-S", "-B", str(HERE / "bcc_child.py")],
                input=json.dumps(request).encode(),
                capture_output=True,
                timeout=self._timeout_s,
                env={"PATH": os.defpath, "LC_ALL": "C"},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SourceUnavailable(f"bcc did not end within {self._timeout_s:g} s") from None
        except OSError as error:
            raise SourceUnavailable(f"a process that compiles cannot be started: {error.strerror}") from error
        said = done.stderr.decode("utf-8", "replace")
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
            raise CompilerDied(f"bcc ended with {how}: {_last_line(said) or 'it gave no reason'}", _DEATHS) from None
        if "unavailable" in answer:
            reason, hint = answer["unavailable"]
            raise SourceUnavailable(reason, hint)
        return answer, said


def kernel_version() -> int:
    """Version of the running kernel as the kernel numbers it: one byte each for the last two parts at most."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", platform.release())
    if found is None:
        return 0
    major, minor, patch = (int(part or 0) for part in found.groups())
    return (major << 16) + (minor << 8) + min(patch, 255)


def _target() -> str:
    try:
        return _TARGETS[platform.machine()]
    except KeyError:
        raise SourceUnavailable(f"probes are not known to work on {platform.machine()}") from None


def _system_folders() -> list[str]:
    found = [*FOLDERS]
    for base in ("/usr/lib", "/usr/lib64"):
        found += sorted((str(path) for path in Path(base).glob("python3.*/site-packages")), reverse=True)
    return found


def _problems(said: str, file: str) -> list[Problem]:
    return [
        Problem(
            file if name in ("/virtual/main.c", "<built-in>") else name,
            int(line),
            int(column),
            text,
            kind == "warning",
        )
        for name, line, column, kind, text in _DIAGNOSTIC.findall(said)
    ]


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def _read(answer: dict[str, Any], file: str) -> Compiled:
    functions = {name: base64.b64decode(code) for name, code in answer["functions"].items()}
    maps = {table["name"]: MapShape(**table) for table in answer["tables"]}
    for name, code in functions.items():
        if name.startswith(_MAP):
            shape = _told(name.removeprefix(_MAP), code)
            maps[shape.name] = shape
    programs = {name: code for name, code in functions.items() if not name.startswith((_MAP, _AT))}
    if not programs:
        raise CompileFailed([Problem(file, 0, 0, "it holds no program; write one as GF_UPROBE(name) { … return 0; }")])
    sections = {}
    for name in functions:
        if name.startswith(_AT):
            rest = name.removeprefix(_AT)
            program = max((p for p in programs if rest.startswith(p + "__")), key=len)
            kind, _, event = rest[len(program) + 2 :].partition("__")
            sections[program] = "/".join([kind, *event.split("__", 1 if kind == "tracepoint" else 0)]).rstrip("/")
    return Compiled(maps, programs, sections, peak_memory_bytes=answer["peak_memory_bytes"])


def _told(name: str, code: bytes) -> MapShape:
    """What the function ``gf_map__NAME`` says by its constants (c/gf_bcc.h)."""
    said = {}
    for offset in range(0, len(code), 8):
        operation, registers, _, value = _INSTRUCTION.unpack_from(code, offset)
        if operation == LOAD_64_BITS:
            said[registers >> 4] = value
    return MapShape(name, said[8], said[9], said[10], said[11], said[12])
