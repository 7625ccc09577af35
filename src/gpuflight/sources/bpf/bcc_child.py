"""The program that compiles C for the bcc backend, run as a process of its own by ``bcc_compiler``.

It is read from a file by ``python -I -S -B``, imports nothing of ours, and imports Debian's ``bcc`` from its own folder
only, so that no other package of the system comes into reach. libbcc brings the whole of LLVM into memory (about
125 MB) and aborts on some mistakes; both end with this process. It needs no rights: it loads nothing into the kernel.

Standard input: one JSON object {"folders", "source" (null: say the version only), "flags", "kernel_source"}. Standard
output: one JSON object with {"version"} and {"functions": {name: base64}, "tables": [...]}, or {"unavailable":
[reason, hint]}. What clang has to say goes to standard error.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import json
import os
import resource
import sys
import types
from typing import Any

HINT = "apt install python3-bpfcc, or dnf install python3-bcc"


def unavailable(reason: str) -> dict[str, Any]:
    return {"unavailable": [reason, HINT]}


def load(folders: list[str]) -> tuple[Any, dict[str, Any]]:
    """bcc's module ``libbcc`` and its version; or an answer that says why not."""
    folder = next((folder for folder in folders if os.path.isfile(os.path.join(folder, "bcc", "libbcc.py"))), None)
    if folder is None:
        return None, unavailable("the Python package bcc of the system is not installed")
    package = types.ModuleType("bcc")  # a bare package: its __init__ loads far more than the compiler
    package.__path__ = [os.path.join(folder, "bcc")]
    sys.modules["bcc"] = package
    try:
        module = importlib.import_module("bcc.libbcc")
        library = module.lib
        if len(library.bpf_module_create_c_from_string.argtypes) != 6:
            return None, unavailable("this version of bcc is called in another way than the known ones")
    except OSError as error:
        return None, unavailable(f"libbcc.so.0 cannot be loaded: {error}")
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a foreign package does
        python = ".".join(map(str, sys.version_info[:2]))
        return None, unavailable(f"bcc in {folder} does not import in Python {python}: {error!r}")
    try:
        version = importlib.import_module("bcc.version").__version__
    except (ImportError, AttributeError):
        version = ""
    return library, {"version": version}


def declare(library: Any) -> None:
    """The functions that bcc's own declarations leave out."""
    module, index = ctypes.c_void_p, ctypes.c_size_t
    result: Any
    arguments: list[Any]
    for name, result, arguments in (
        ("bpf_num_tables", ctypes.c_size_t, [module]),
        ("bpf_table_name", ctypes.c_char_p, [module, index]),
        ("bpf_table_fd_id", ctypes.c_int, [module, index]),
        ("bpf_table_type_id", ctypes.c_int, [module, index]),
        ("bpf_table_flags_id", ctypes.c_int, [module, index]),
        ("bpf_table_key_size_id", ctypes.c_size_t, [module, index]),
        ("bpf_table_leaf_size_id", ctypes.c_size_t, [module, index]),
        ("bpf_table_max_entries_id", ctypes.c_size_t, [module, index]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def compile_source(library: Any, source: str, flags: list[str]) -> dict[str, Any]:
    """Instructions of every function, and maps that were declared by bcc's own macros."""
    given = [flag.encode() for flag in flags]
    array = (ctypes.c_char_p * len(given))(*given)
    module = library.bpf_module_create_c_from_string(source.encode(), 0, array, len(given), True, None)
    if not module:
        return {}
    declare(library)
    functions = {}
    for index in range(library.bpf_num_functions(module)):
        name = library.bpf_function_name(module, index)
        code = ctypes.string_at(library.bpf_function_start(module, name), library.bpf_function_size(module, name))
        functions[name.decode()] = base64.b64encode(code).decode()
    tables = [
        {
            "name": library.bpf_table_name(module, index).decode(),
            "reference": library.bpf_table_fd_id(module, index),
            "kind": library.bpf_table_type_id(module, index),
            "key_bytes": library.bpf_table_key_size_id(module, index),
            "value_bytes": library.bpf_table_leaf_size_id(module, index),
            "entries": library.bpf_table_max_entries_id(module, index),
            "flags": library.bpf_table_flags_id(module, index),
        }
        for index in range(library.bpf_num_tables(module))
    ]
    return {"functions": functions, "tables": tables}


def _peak_memory_bytes() -> int:
    """Of this program. ``getrusage`` counts what the program was that started this one."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as status:
        return next((int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")), 0)


def main() -> None:
    """One question, one answer."""
    answer_to = os.dup(1)
    os.dup2(2, 1)  # whatever bcc prints
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    request = json.load(sys.stdin)
    os.environ["BCC_KERNEL_SOURCE"] = request["kernel_source"]
    library, answer = load(request["folders"])
    if library is not None and request["source"] is not None:
        answer.update(compile_source(library, request["source"], request["flags"]))
    answer["peak_memory_bytes"] = _peak_memory_bytes()
    with os.fdopen(answer_to, "w") as stream:
        json.dump(answer, stream)
    # Not through the destructors of LLVM: what was asked for is delivered.
    os._exit(0)


if __name__ == "__main__":
    main()
