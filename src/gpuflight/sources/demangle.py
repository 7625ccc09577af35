"""C++ names as people write them, by the C++ runtime's own function (Itanium C++ ABI, ``__cxa_demangle``)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

LONGEST = 4096


@lru_cache(maxsize=16_384)
def demangle(name: str) -> str:
    """``_Z3addPfi`` → ``add(float*, int)``; the name itself if it is no C++ name, or no C++ runtime is installed."""
    if not name.startswith("_Z") or len(name) > LONGEST or not name.isascii():
        return name
    function = _runtime()
    return name if function is None else function(name.encode()) or name


@lru_cache(maxsize=1)
def _runtime() -> Callable[[bytes], str] | None:
    try:
        convert = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
        free = ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return None
    convert.restype = ctypes.c_void_p
    convert.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    free.argtypes = [ctypes.c_void_p]
    free.restype = None

    def call(name: bytes) -> str:
        status = ctypes.c_int()
        address = convert(name, None, None, ctypes.byref(status))
        if not address:
            return ""
        try:
            return ctypes.string_at(address).decode("utf-8", "replace")
        finally:
            free(address)

    return call
