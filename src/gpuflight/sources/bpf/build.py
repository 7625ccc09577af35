"""``make probes``: compile ``c/*.bpf.c`` to the objects that ship. The same sources and clang give the same bytes.

Beside each pair of objects lies ``NAME.build.json``: the clang, and digests of the sources and of the objects, by which
a test (and anybody) sees whether they belong together.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

FOLDER = os.path.dirname(os.path.abspath(__file__))
SOURCES = os.path.join(FOLDER, "c")
OBJECTS = os.path.join(FOLDER, "objects")
TARGETS = {"x86_64": "x86", "arm64": "arm64"}
"""Part of the object's file name → the name that kernel headers give the machine."""

FLAGS = ("-g", "-O2", "-Wall", "-Werror", "-target", "bpf", "-mcpu=v3", "-fno-ident", "-fdebug-compilation-dir=.")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def names() -> list[str]:
    """Every probe in ``c/``."""
    return sorted(name.removesuffix(".bpf.c") for name in os.listdir(SOURCES) if name.endswith(".bpf.c"))


def sources_of(name: str) -> list[str]:
    """The files one probe is made of, headers included, sorted."""
    found: set[str] = set()
    waiting = [f"{name}.bpf.c"]
    while waiting:
        file_name = waiting.pop()
        if file_name in found:
            continue
        found.add(file_name)
        with open(os.path.join(SOURCES, file_name), encoding="utf-8") as file:
            waiting += [
                header for header in _INCLUDE.findall(file.read()) if os.path.exists(os.path.join(SOURCES, header))
            ]
    return sorted(found)


def digest_of_sources(name: str) -> str:
    """SHA-256 of a probe's sources and of the flags it is compiled with."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for file_name in sources_of(name):
        with open(os.path.join(SOURCES, file_name), "rb") as file:
            digest.update(file_name.encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()


def compile_probe(name: str, part: str, clang: str = "clang", strip: str = "llvm-strip") -> bytes:
    """One object, without debug information but with its BTF. Raises subprocess.CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        target = os.path.join(folder, "probe.o")
        # From within the folder: names of files reach the line information of BTF.
        command = [clang, *FLAGS, f"-D__TARGET_ARCH_{TARGETS[part]}", "-c", f"{name}.bpf.c", "-o", target]
        subprocess.run(command, check=True, cwd=SOURCES)
        subprocess.run([strip, "--strip-debug", target], check=True)
        with open(target, "rb") as file:
            return file.read()


def version_of(clang: str) -> str:
    """``14.0.6``."""
    said = subprocess.run([clang, "--version"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"version (\d+(?:\.\d+)*)", said)
    return match[1] if match else said.split("\n", 1)[0]


def main() -> int:
    """Compile what changed, or everything with ``--all``."""
    parser = argparse.ArgumentParser(description="Compile the probes (needs clang and llvm-strip).")
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--all", action="store_true", help="those whose sources did not change as well")
    arguments = parser.parse_args()
    clang, strip = os.environ.get("CLANG", "clang"), os.environ.get("LLVM_STRIP", "llvm-strip")
    for tool in (clang, strip):
        if shutil.which(tool) is None:
            print(f"{tool} is not installed (Debian: apt install clang llvm)", file=sys.stderr)
            return 2
    os.makedirs(OBJECTS, exist_ok=True)
    for name in arguments.names or names():
        record_path = os.path.join(OBJECTS, f"{name}.build.json")
        digest = digest_of_sources(name)
        if not arguments.all and _recorded(record_path) == digest:
            continue
        objects = {}
        for part in TARGETS:
            content = compile_probe(name, part, clang, strip)
            file_name = f"{name}.{part}.bpf.o"
            objects[file_name] = hashlib.sha256(content).hexdigest()
            _write(os.path.join(OBJECTS, file_name), content)
        record = {"clang": version_of(clang), "sources_sha256": digest, "sources": sources_of(name), "objects": objects}
        _write(record_path, json.dumps(record, indent=1).encode() + b"\n")
        print(f"{name}: {', '.join(objects)}")
    return 0


def _recorded(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return str(json.load(file)["sources_sha256"])
    except (OSError, ValueError, KeyError):
        return ""


def _write(path: str, content: bytes) -> None:
    """Whole or not at all: somebody may be loading it."""
    with open(f"{path}.new", "wb") as file:
        file.write(content)
    os.replace(f"{path}.new", path)


if __name__ == "__main__":
    sys.exit(main())
