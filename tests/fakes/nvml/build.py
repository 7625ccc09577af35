"""Compiles the fake NVML and hands a test its own copy of a machine's description.

    fake = fake_nvml("h100x8", gpu3={"lost": "yes"})
    subprocess.run(["gpuflight", "run"], env={**os.environ, **fake.environment})     # out of process
    Nvml(library=fake.library)                                                       # in process, see ``activated``
    fake.set("gpu 3", lost="no")                                                     # while it runs

The library is compiled once per set of exported symbols and kept in the temporary folder of the user.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
MACHINES = HERE / "machines"
SOURCES = ("machine.h", "abi.h", "machine.c", "nvml.c")
SONAME = "libnvidia-ml.so.1"
VARIABLE = "FAKE_NVML_MACHINE"  # not GPUFLIGHT_…: those are settings, and an unknown one is refused


class NoCompiler(RuntimeError):
    """There is no C compiler here; tests skip on it."""


class FakeNvml:
    """A compiled library and the description it answers from, which may be changed at any time."""

    def __init__(self, library: Path, description: Path) -> None:
        self.library = str(library)
        self.directory = str(library.parent)
        self.description = description

    @property
    def environment(self) -> dict[str, str]:
        """Variables under which an unmodified program finds this NVML and no other."""
        return {"LD_LIBRARY_PATH": self.directory, VARIABLE: str(self.description)}

    def set(self, section: str, values: Mapping[str, str] | None = None, /, **more: str) -> None:
        """Change keys of ``[section]``, e.g. ``set("gpu 3", {"link.2.state": "0"}, lost="yes")``."""
        lines = [f"{key} = {value}" for key, value in {**(values or {}), **more}.items()]
        self._replace(self.description.read_text() + f"\n[{section}]\n" + "\n".join(lines) + "\n")

    def _replace(self, text: str) -> None:
        # By rename: the library must never read half a description.
        part = self.description.with_suffix(".part")
        part.write_text(text)
        part.replace(self.description)

    @contextmanager
    def activated(self) -> Iterator[FakeNvml]:
        """Make this process's fake libraries answer from this description."""
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = str(self.description)
        try:
            yield self
        finally:
            if before is None:
                os.environ.pop(VARIABLE, None)
            else:
                os.environ[VARIABLE] = before


def fake_nvml(machine: str, directory: Path | None = None, **sections: Mapping[str, str]) -> FakeNvml:
    """The fake NVML as ``machine`` (a name of machines/, or a path), changed by ``sections`` (``gpu3={…}``).

    The description goes into ``directory``, by default a fresh temporary one. Raises NoCompiler.
    """
    source = Path(machine) if os.sep in machine else MACHINES / f"{machine}.conf"
    text = _expanded(source)
    for section, values in sections.items():
        name = re.sub(r"(?<=[a-z])(?=\d)", " ", section).replace("_", " ")
        text += f"\n[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())
    folder = directory or Path(tempfile.mkdtemp(prefix="gpuflight-fake-nvml-"))
    description = folder / source.name
    description.write_text(text)
    without = re.findall(r"^without\s*=\s*(.*)$", text, re.MULTILINE)
    return FakeNvml(_library(tuple(sorted({symbol for line in without for symbol in line.split()}))), description)


def _expanded(source: Path) -> str:
    """The description with what it includes put in place, so that it can be moved."""
    return re.sub(
        r"^include\s*=\s*(.*)$",
        lambda match: _expanded(source.parent / match[1].strip()),
        source.read_text(),
        flags=re.MULTILINE,
    )


def _library(without: tuple[str, ...]) -> Path:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoCompiler("the fake NVML needs a C compiler (apt install gcc)")
    recipe = hashlib.sha256("\0".join([compiler, *without]).encode())
    for name in SOURCES:
        recipe.update((HERE / name).read_bytes())
    folder = Path(tempfile.gettempdir()) / f"gpuflight-fake-nvml-{os.getuid()}" / recipe.hexdigest()[:16]
    library = folder / SONAME
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        # What a driver does not export must be absent, or the bindings would not meet FUNCTION_NOT_FOUND.
        script = Path(work, "symbols")
        hidden = " ".join(f"{symbol};" for symbol in without)
        script.write_text(f"{{ global: nvml*; local: {hidden} *; }};")
        built = Path(work, SONAME)
        subprocess.run(
            [compiler, "-std=c11", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", f"-Wl,-soname,{SONAME}",
             f"-Wl,--version-script={script}", "-o", str(built), *(str(HERE / n) for n in SOURCES if n[-1] == "c"),
             "-lpthread"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        built.replace(library)  # another test process may have built it meanwhile
    return library
