"""The recorder of this process: begun once, and ended once, whatever way the process ends."""

from __future__ import annotations

import atexit
import os
from typing import Any

import msgspec

from gpuflight.errors import ConfigError
from gpuflight.events.recorder import lifecycle
from gpuflight.events.recorder.binding import Binding, Unavailable, Why, load
from gpuflight.events.recorder.options import ENVIRONMENT, Options, decoded, encoded
from gpuflight.events.recorder.recorder import Recorder

FORKED = Why(
    "forked_after_cuda",
    "this process was forked from one that uses CUDA, and cannot use it itself",
    "start processes with multiprocessing's spawn or forkserver",
)


class _Resident:
    """What the life of the process does to its recorder (``lifecycle.Occupant``)."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    def before_fork(self) -> None:
        if self.recorder is not None:
            self.recorder.before_fork()

    def after_fork(self) -> None:
        if self.recorder is not None:
            self.recorder.after_fork()

    def in_child(self) -> tuple[str, bool]:
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return "", False
        return encoded(recorder.options), recorder.forget_in_child()

    def shutdown(self) -> bool:
        recorder = self.recorder
        if recorder is None:
            return True
        closed = recorder.close()
        if closed and self.recorder is recorder:
            self.recorder = None
        return closed

    def closing_here(self) -> bool:
        return self.recorder is not None and self.recorder.closing_here


_resident = _Resident()


def init(app: str = "", **options: Any) -> Recorder:
    """Record this process from now on; where it is recorded already, the recorder that there is.

    ``app`` names the program in the session. Options are those of ``recorder.options.Options``, over what
    ``gpuflight run`` has set. Raises ConfigError for options that make no sense; whatever else is wrong costs the
    recording, not the program: ``Recorder.problem`` and the session's capabilities say what.
    """
    with lifecycle.lock:
        lifecycle.wake()
        if _resident.recorder is not None:
            return _resident.recorder
        inherited = os.environ.get(ENVIRONMENT)
        base = decoded(inherited) if inherited else Options()
        try:
            wanted = msgspec.convert({**msgspec.to_builtins(base), **options}, Options, strict=False)
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(f"gpuflight.init: {error}") from error
        if app:
            wanted = msgspec.structs.replace(wanted, app=app)
        return _begin(msgspec.structs.replace(wanted, always=True).checked())


def shutdown() -> None:
    """End the recording: everything is in the session's folder when this returns. Harmless if there is none."""
    lifecycle.shutdown()


def current() -> Recorder | None:
    """The recorder of this process; begins the one that was waiting for something to record. None if there is none."""
    if _resident.recorder is None and lifecycle.sleeper is not None:
        lifecycle.wake()
    return _resident.recorder


def running() -> Recorder | None:
    """The recorder of this process if there is one; begins none."""
    return _resident.recorder


def begin(options: str, *, forked: bool = False) -> None:
    """Begin with options from the environment. ``forked``: in a child that cannot use CUDA. Raises ConfigError."""
    with lifecycle.lock:
        if _resident.recorder is None:
            _begin(decoded(options), _refuse if forked else load)


def _begin(options: Options, make: Any = load) -> Recorder:
    lifecycle.hook()
    if lifecycle.occupant is None:
        lifecycle.occupant = _resident
        atexit.register(shutdown)
    recorder = Recorder(options, make, signals=lambda: lifecycle.signals_in, on_signal=lifecycle.on_wakeup)
    _resident.recorder = recorder
    recorder.start()
    return recorder


def _refuse() -> Binding:
    raise Unavailable(FORKED)
