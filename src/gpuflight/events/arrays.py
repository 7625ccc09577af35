"""Numpy, asked for when the first record is read: shipping logs needs no numpy, reading their records does."""

from __future__ import annotations

from types import ModuleType

from gpuflight.errors import MissingExtra


def numpy() -> ModuleType:
    """The numpy module; raises MissingExtra, one line, where it is not installed."""
    try:
        import numpy
    except ImportError:
        raise MissingExtra("numpy", "events", "reading GPU event records") from None
    return numpy
