"""The compiled probes that ship with gpuflight, and what is in them before they are loaded."""

from __future__ import annotations

import os
from importlib.resources import files

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.bpf.elf import ElfError, read_elf

MACHINES = {"x86_64": "x86_64", "aarch64": "arm64"}
"""Machine (uname -m) → the part of the object's file name."""

ENGINE = "engine"
"""The object of the engine's own checks."""


def require_machine(machine: str) -> None:
    """Raises SourceUnavailable for machines that no probe was compiled for."""
    if machine not in MACHINES:
        raise SourceUnavailable(f"there are no probes for {machine}", "they exist for x86_64 and aarch64")


def file_name(name: str, machine: str) -> str:
    """``cuda.x86_64.bpf.o``. Raises SourceUnavailable for machines we have no objects for."""
    require_machine(machine)
    return f"{name}.{MACHINES[machine]}.bpf.o"


def read_object(name: str, machine: str, folder: str | None = None) -> bytes:
    """An object's bytes, from this package or another folder. Raises SourceUnavailable."""
    wanted = file_name(name, machine)
    try:
        if folder is not None:
            with open(os.path.join(folder, wanted), "rb") as file:
                return file.read()
        return (files("gpuflight.sources.bpf") / "objects" / wanted).read_bytes()
    except OSError as error:
        raise SourceUnavailable(
            f"the probe {wanted} is missing from this installation: {error.strerror}",
            "reinstall gpuflight, or `make probes` in its repository",
        ) from error


def constants_of(content: bytes) -> dict[str, tuple[int, int]]:
    """Offset and size (bytes) in ``.rodata`` of every GF_CONSTANT. Raises SourceUnavailable if it is no ELF file."""
    try:
        elf = read_elf(content)
        return {symbol.name: (symbol.value, symbol.size) for symbol in elf.symbols_of_section(".rodata")}
    except ElfError as error:
        raise SourceUnavailable(f"damaged probe: {error}") from error
