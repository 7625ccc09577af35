"""Whether the kernel's clock is kept in step with others: adjtimex(2), asked without changing anything."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from gpuflight.errors import SourceUnavailable

if TYPE_CHECKING:
    from gpuflight.sources.recording import Tape

_STA_UNSYNC = 0x0040
_STA_NANO = 0x2000
_TIME_ERROR = 5


class _Timeval(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("usec", ctypes.c_long))


class _Timex(ctypes.Structure):
    """``struct timex`` of include/uapi/linux/timex.h (64 bit)."""

    _fields_ = (
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("constant", ctypes.c_long),
        ("precision", ctypes.c_long), ("tolerance", ctypes.c_long), ("time", _Timeval), ("tick", ctypes.c_long),
        ("rest", ctypes.c_byte * 128),
    )  # fmt: skip


class ClockSync(Struct):
    """``offset_s`` is what the kernel still has to correct; ``max_error_s`` an upper bound of the error (it grows while
    nobody corrects the clock); ``synchronised`` what the kernel thinks of it."""

    synchronised: bool
    offset_s: float
    max_error_s: float


def clock_sync(tape: Tape | None = None) -> ClockSync:
    """The state of the clock now. Raises SourceUnavailable where the kernel does not tell it."""
    if tape is None or tape.mode == "live":
        return _ask()
    return msgspec.json.decode(tape.ask("clock", "adjtimex", lambda: msgspec.json.encode(_ask())), type=ClockSync)


def _ask() -> ClockSync:
    found = _Timex()
    try:
        call = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        raise SourceUnavailable("this C library has no adjtimex") from None
    state = call(ctypes.byref(found))
    if state < 0:
        number = ctypes.get_errno()
        raise SourceUnavailable(f"adjtimex: {os.strerror(number)}")
    unit = 1e-9 if found.status & _STA_NANO else 1e-6
    return ClockSync(
        synchronised=not found.status & _STA_UNSYNC and state != _TIME_ERROR,
        offset_s=found.offset * unit,
        max_error_s=found.maxerror * 1e-6,
    )
