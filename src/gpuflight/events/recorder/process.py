"""The recorder of this process: begun once, ended once, whatever way the process ends.

* ``atexit`` ends it; so does SIGTERM, if the program does not handle it itself.
* A forked child gets its own: at once if it uses scopes, else when it loads CUDA. A child of a process that uses CUDA
  cannot use CUDA, so nothing of CUPTI is touched there.
* Children of ``multiprocessing`` skip ``atexit``; they are ended by its own finalizers.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import select
import signal
import sys
import threading
from types import FrameType
from typing import Any

import msgspec

from gpuflight.errors import ConfigError
from gpuflight.events.recorder.binding import Binding, Unavailable, Why, cuda_is_loaded, load
from gpuflight.events.recorder.options import ENVIRONMENT, Options, decoded, encoded
from gpuflight.events.recorder.recorder import Recorder

log = logging.getLogger("gpuflight.recorder")

FORKED = Why(
    "forked_after_cuda",
    "this process was forked from one that uses CUDA, and cannot use it itself",
    "start processes with multiprocessing's spawn or forkserver",
)
_LOOK_S = 0.05

_lock = threading.RLock()
_current: Recorder | None = None
_asleep: _Sleeper | None = None
_options: Options | None = None
_hooked = False
_signals_in: int = -1
_signal_to_die_of = 0


def init(app: str = "", **options: Any) -> Recorder:
    """Record this process from now on; again: the recorder that there is. Options: ``recorder.options.Options``.

    Raises ConfigError for options that make no sense; whatever else is wrong costs the recording, not the program.
    """
    global _options
    with _lock:
        if _current is not None:
            return _current
        inherited = os.environ.get(ENVIRONMENT)
        base = decoded(inherited) if inherited else Options()
        try:
            wanted = msgspec.convert({**msgspec.to_builtins(base), **options}, Options, strict=False)
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(f"gpuflight.init: {error}") from error
        if app:
            wanted = msgspec.structs.replace(wanted, app=app)
        _options = msgspec.structs.replace(wanted, always=True).checked()
        return _begin(_options)


def shutdown() -> None:
    """End the recording: everything is in the session's folder when this returns. Harmless if there is none."""
    global _current, _asleep
    with _lock:
        sleeper, _asleep = _asleep, None
        recorder = _current
    if sleeper is not None:
        sleeper.end()
    if recorder is not None:
        recorder.close()  # who comes second waits for the first
    with _lock:
        if _current is recorder:
            _current = None
    if _signal_to_die_of and not (recorder is not None and recorder.closing_here):
        die_of(_signal_to_die_of)


def current() -> Recorder | None:
    """The recorder of this process, None if it has none (yet)."""
    if _current is None and _asleep is not None:
        return _wake_up()
    return _current


def running() -> Recorder | None:
    """The recorder of this process if there is one; starts none."""
    return _current


def bootstrap() -> None:
    """In a program that was started by ``gpuflight run``: do as the environment says. Never raises."""
    global _options
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return
    try:
        options = decoded(text)
        os.environ[ENVIRONMENT] = encoded(msgspec.structs.replace(options, always=False))
        with _lock:
            _options = options
            if options.always:
                _begin(options)
            else:
                _sleep(options)
    except Exception as error:  # noqa: BLE001 - the program runs as if we were not there
        log.warning("gpuflight records nothing: %s", error)


class _Sleeper:
    """Waits for the process to load CUDA, and starts the recorder then. Gone while the process forks: an interpreter
    warns about forks of processes with threads."""

    why_not: Why | None = None

    def __init__(self, options: Options) -> None:
        self.options = options
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.resume()

    def resume(self) -> None:
        self._end.clear()
        self._thread = threading.Thread(target=self._run, name="gpuflight-wait", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        watched = [_signals_in] if _signals_in >= 0 else []
        while not self._end.is_set():
            if select.select(watched, [], [], _LOOK_S)[0]:
                for number in os.read(_signals_in, 64):
                    _on_wakeup(number)
            if not self._end.is_set() and cuda_is_loaded():
                _wake_up()
                return


def _sleep(options: Options) -> None:
    global _asleep
    _hook()
    _asleep = _Sleeper(options)


def _wake_up() -> Recorder | None:
    global _asleep
    with _lock:
        sleeper, _asleep = _asleep, None
        if sleeper is None:
            return _current
        sleeper._end.set()
        return _begin(sleeper.options, sleeper.why_not)


def _begin(options: Options, why_not: Why | None = None) -> Recorder:
    global _current
    _hook()
    make = load if why_not is None else _refusing(why_not)
    recorder = Recorder(options, make, signals=_signals_in, on_signal=_on_wakeup)
    _current = recorder
    recorder.start()
    return recorder


def _refusing(why: Why) -> Any:
    def refuse() -> Binding:
        raise Unavailable(why)

    return refuse


def _hook() -> None:
    """Once per process, and for its children."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    atexit.register(shutdown)
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
    _handle_sigterm()


# forks


def _before_fork() -> None:
    _lock.acquire()
    if _asleep is not None:
        _asleep.end()
    if _current is not None:
        _current.before_fork()


def _after_fork() -> None:
    if _current is not None:
        _current.after_fork()
    if _asleep is not None:
        _asleep.resume()
    _lock.release()


def _in_child() -> None:
    """The parent's recorder is not ours; begin our own when there is something to record."""
    global _current, _asleep, _lock
    _lock = threading.RLock()
    recorder, _current = _current, None
    options = _options
    asleep, _asleep = _asleep, None
    try:
        used = recorder.forget_in_child() if recorder is not None else False
        _signals_of_child()
        if options is None or (recorder is None and asleep is None):
            return
        options = msgspec.structs.replace(options, always=False)
        _asleep = _Forked(options) if used or cuda_is_loaded() else _Sleeper(options)
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(_asleep, _finalize_with_multiprocessing)
    except Exception as error:  # noqa: BLE001 - the child runs as if we were not there
        log.warning("gpuflight records nothing in this child: %s", error)


class _Forked(_Sleeper):
    """Of a child that cannot use CUDA: only scopes wake it."""

    why_not = FORKED

    def resume(self) -> None:
        self._end.clear()


def _finalize_with_multiprocessing(_: Any) -> None:
    from multiprocessing import util

    util.Finalize(None, shutdown, exitpriority=-100)


# signals


def _handle_sigterm() -> None:
    """End the recording before SIGTERM ends the process, if the program leaves SIGTERM alone.

    Python runs handlers in the main thread, between two of its steps; a program that is stuck in a CUDA call would not
    die of SIGTERM any more. So the number of the signal also goes to our own thread, which ends the process then.
    """
    global _signals_in
    try:
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, _on_sigterm)
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(reading)
            os.close(writing)
        else:
            _signals_in = reading
    except (ValueError, OSError):  # not in the main thread
        return


def _signals_of_child() -> None:
    """A pipe of its own: what the parent is sent is not for the child."""
    global _signals_in
    if _signals_in < 0:
        return
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        inherited = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    except ValueError:
        os.close(reading)
        os.close(writing)
        inherited, reading = -1, -1
    os.close(_signals_in)
    if inherited >= 0:
        os.close(inherited)
    _signals_in = reading


def _on_sigterm(number: int, _: FrameType | None) -> None:
    global _signal_to_die_of
    recorder = _current
    if recorder is not None and recorder.closing_here:
        _signal_to_die_of = number  # what is being closed is closed first
        return
    shutdown()
    die_of(number)


def _on_wakeup(number: int) -> None:
    """In our thread, at once."""
    if number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        shutdown()
        die_of(number)


def die_of(number: int) -> None:
    """End as the signal would have ended us; from any thread."""
    ctypes.CDLL(None).signal(number, None)
    os.kill(os.getpid(), number)
