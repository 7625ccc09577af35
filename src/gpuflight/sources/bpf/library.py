"""libbpf by ctypes: only what loads an object and attaches programs; everything else are calls of the kernel itself."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gpuflight.errors import SourceUnavailable

SONAME = "libbpf.so.1"
INSTALL_HINT = "install libbpf: apt install libbpf1, dnf install libbpf, zypper install libbpf1"

_POINTER, _INT, _TEXT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "libbpf_version_string": (_TEXT, ()),
    "bpf_object__open_mem": (_POINTER, (_POINTER, _SIZE, _POINTER)),
    "bpf_object__load": (_INT, (_POINTER,)),
    "bpf_object__close": (None, (_POINTER,)),
    "bpf_object__next_program": (_POINTER, (_POINTER, _POINTER)),
    "bpf_object__next_map": (_POINTER, (_POINTER, _POINTER)),
    "bpf_program__name": (_TEXT, (_POINTER,)),
    "bpf_program__section_name": (_TEXT, (_POINTER,)),
    "bpf_program__fd": (_INT, (_POINTER,)),
    "bpf_program__set_autoload": (_INT, (_POINTER, ctypes.c_bool)),
    "bpf_program__set_expected_attach_type": (_INT, (_POINTER, _INT)),
    "bpf_program__attach": (_POINTER, (_POINTER,)),
    "bpf_map__name": (_TEXT, (_POINTER,)),
    "bpf_map__fd": (_INT, (_POINTER,)),
    "bpf_map__set_max_entries": (_INT, (_POINTER, ctypes.c_uint32)),
    "bpf_map__initial_value": (_POINTER, (_POINTER, ctypes.POINTER(_SIZE))),
    "bpf_link__fd": (_INT, (_POINTER,)),
    "bpf_link__destroy": (_INT, (_POINTER,)),
}
_PRINT = ctypes.CFUNCTYPE(_INT, _INT, _TEXT, _POINTER)
_WARNING = 0
_MAX_LINES = 400
_MOST_BYTES = 1 << 20


class LibBpf:
    """The loaded library; its functions are attributes."""

    def __init__(self, name: str = SONAME) -> None:
        """Raises SourceUnavailable."""
        try:
            self._library = ctypes.CDLL(name, use_errno=True)
            for function, (result, arguments) in _FUNCTIONS.items():
                bound = getattr(self._library, function)
                bound.restype, bound.argtypes = result, arguments
                setattr(self, function, bound)
            install = self._library.libbpf_set_print
        except OSError as error:
            raise SourceUnavailable(f"{name} cannot be loaded: {error}", INSTALL_HINT) from error
        except AttributeError as error:  # older than 1.0
            raise SourceUnavailable(f"{name} is too old: {error}", INSTALL_HINT) from error
        self.version: str = self.libbpf_version_string().decode().lstrip("v")
        self._said = threading.local()
        libc = ctypes.CDLL(None)
        self._format = libc.vsnprintf
        self._format.argtypes = (_POINTER, _SIZE, _TEXT, _POINTER)
        self._print = _PRINT(self._hear)  # the library keeps only a pointer to it
        install(self._print)
        self._trim = getattr(libc, "malloc_trim", None)  # glibc has it
        if self._trim is not None:
            self._trim.argtypes = (_SIZE,)

    def give_back_memory(self) -> None:
        """Loading takes 10 MB and more for a moment (types of the kernel, relocations), which glibc would keep."""
        if self._trim is not None:
            self._trim(0)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def _hear(self, level: int, text: bytes, arguments: int) -> int:
        """What the library would print: warnings are kept for whoever listens in this thread, nothing reaches stderr.

        On x86-64 and arm64 a va_list is passed as an address, so it can be handed on as one.
        """
        lines: list[str] | None = getattr(self._said, "lines", None)
        if level == _WARNING and lines is not None and len(lines) < _MAX_LINES:
            line = ctypes.create_string_buffer(_MOST_BYTES)  # the verifier's log comes as one, its reason at the end
            self._format(line, len(line), text, arguments)
            lines += line.value.decode("utf-8", "replace").splitlines()
        return 0

    @contextmanager
    def listening(self) -> Iterator[list[str]]:
        """What the library warns of in this thread meanwhile."""
        lines: list[str] = []
        self._said.lines = lines
        try:
            yield lines
        finally:
            self._said.lines = None


@functools.cache
def load_library(name: str = SONAME) -> LibBpf:
    """The library, once per process. Raises SourceUnavailable."""
    return LibBpf(name)
