"""Compiles the fake CUDA libraries and the programs that use them, once per folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
FLAGS = ("-O1", "-w", "-fPIC", "-fno-omit-frame-pointer", "-fno-optimize-sibling-calls")
SHARED = ("-shared", "-Wl,-Bsymbolic-functions")
THREADS = ("-ldl", "-lpthread")


def why_not() -> str:
    """Why nothing can be compiled here; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "CUDA's fakes are for Linux"
    return "" if shutil.which("gcc") else "no gcc to compile the fake CUDA libraries"


class Fakes:
    """The libraries and programs in one folder. Each test has a copy: probes are per file, and tests run together."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def compile(cls, folder: Path) -> Fakes:
        """All of them."""
        made = cls(folder)
        runtime = ("-L.", "-l:libcudart.so.12", "-Wl,-rpath,$ORIGIN")
        _gcc(folder, *SHARED, *_map("cudart"), "-Wl,-soname,libcudart.so.12", "fake_cudart.c", out="libcudart.so.12")
        _gcc(folder, *SHARED, *_map("cuda"), "-Wl,-soname,libcuda.so.1", "fake_cuda.c", out="libcuda.so.1")
        _gcc(folder, *SHARED, "-Wl,-soname,libnccl.so.2", "fake_nccl.c", *runtime, out="libnccl.so.2")
        _gcc(folder, "program.c", *runtime, out="plain")
        _gcc(folder, "-DUSE_DLOPEN", "program.c", out="dlopen")
        _gcc(folder, "program.c", "fake_cudart.c", out="static")
        shutil.copy(folder / "static", folder / "stripped")
        subprocess.run(["strip", str(folder / "stripped")], check=True)
        return made

    def copy(self, folder: Path) -> Fakes:
        """The same in another folder: other inodes."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return Fakes(folder)

    @property
    def runtime(self) -> Path:
        return self.folder / "libcudart.so.12"

    @property
    def driver(self) -> Path:
        return self.folder / "libcuda.so.1"

    @property
    def nccl(self) -> Path:
        return self.folder / "libnccl.so.2"

    @property
    def log(self) -> Path:
        return self.folder / "calls.log"

    def start(
        self,
        script: str | Sequence[str],
        program: str = "plain",
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> subprocess.Popen[str]:
        """Run a script (see ``program.c``); its calls are in ``log``."""
        lines = script.splitlines() if isinstance(script, str) else script
        number = len(list(self.folder.glob("script*")))
        path = self.folder / f"script{number}"
        path.write_text("".join(f"{line.strip()}\n" for line in lines))
        variables = {
            **os.environ,
            "FAKE_CUDA_LOG": str(self.log),
            "FAKE_CUDART": str(self.runtime),
            "FAKE_NCCL": str(self.nccl),
            "FAKE_KERNEL_US": "100",
            **(environment or {}),
        }
        variables.pop("CUDA_VISIBLE_DEVICES", None)
        return subprocess.Popen(
            [*prefix, str(self.folder / program), str(path)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, script: str | Sequence[str], program: str = "plain", environment: Mapping[str, str] | None = None
    ) -> int:
        """The same to its end: its pid."""
        process = self.start(script, program, environment)
        out, _ = process.communicate("\n" * 10, timeout=60)
        assert process.returncode == 0, f"{program} ended with {process.returncode}: {out}"
        return process.pid


def _map(name: str) -> tuple[str, ...]:
    return (f"-Wl,--version-script={HERE / f'{name}.map'}",)


def _gcc(folder: Path, *arguments: str, out: str) -> None:
    sources = [str(HERE / argument) if argument.endswith(".c") else argument for argument in arguments]
    command = ["gcc", *FLAGS, *sources, "-o", out, *THREADS]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
