"""Numpy, asked for when the first record is read: shipping logs needs no numpy, reading their records does."""

from __future__ import annotations

from functools import cache
from types import ModuleType

from gpuflight.errors import MissingExtra


def numpy() -> ModuleType:
    """The numpy module; raises MissingExtra, one line, where it is not installed."""
    try:
        import numpy
    except ImportError:
        raise MissingExtra("numpy", "events", "reading GPU event records") from None
    return numpy


_KEPT_BYTES = 24 << 20


@cache
def keep_freed_memory() -> None:
    """Blocks of megabytes are used again instead of going back to the kernel, which hands them out page by page: an
    eighth of the time of reading a session.

    glibc gives back what is free beyond twice the largest block that was freed so far (to a limit of 64 MiB), so one
    that is never touched is freed. Elsewhere nothing changes.
    """
    bytes(_KEPT_BYTES)
