"""What happens to a process while it is recorded, or may come to be: it loads CUDA, forks, gets SIGTERM.

Light on purpose: all children of a recorded program import this and, unless they use CUDA or scopes, nothing more of
gpuflight.

* A forked child gets a recorder of its own when it uses scopes or loads CUDA. A child of a process that has CUDA loaded
  cannot use CUDA, so CUPTI is not touched there.
* SIGTERM ends the recording first, if the program leaves SIGTERM alone; the process then dies of it as ever.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Protocol

    class Occupant(Protocol):
        """The recorder of this process, as far as it has to be told."""

        def before_fork(self) -> None: ...
        def after_fork(self) -> None: ...

        def in_child(self) -> tuple[str, bool]:
            """Let go of everything; answers options for a recorder of the child, and whether CUDA is out of reach."""

        def shutdown(self) -> bool:
            """End it; False if somebody else is about to, who cannot be waited for."""

        def closing_here(self) -> bool:
            """Whether ``shutdown`` is under way in this very thread."""


LATER = '"always":false'
"""In the options of processes that are recorded only when they use CUDA or scopes."""
_LOOK_S = 0.1
_IMPORTS_S = 2.0

lock = threading.RLock()
imports = threading.RLock()
"""Held by whoever imports parts of the recorder, or what it needs, while another thread may fork: a child forked in the
middle of an import waits for ever when it wants the same module, for a thread that it does not have. Taken after
``lock`` by those who need both."""
occupant: Occupant | None = None
sleeper: Sleeper | None = None
signals_in = -1
"""Numbers of signals come out of this descriptor, for whichever of our threads there is; -1: not in use."""
_signals_out = -1
_hooked = False
_holds_imports = False
_dying_of = 0


class Sleeper:
    """Waits for CUDA. ``options``: JSON, of what will be recorded then. ``forked``: of a child that cannot use CUDA;
    only scopes wake it. The thread is gone while the process forks: interpreters warn about forks with threads."""

    def __init__(self, options: str, *, forked: bool = False) -> None:
        self.options = options
        self.forked = forked
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self.resume()

    def resume(self) -> None:
        """Begin to look, also again after a fork."""
        self._end.clear()
        if not self.forked:
            self._thread = threading.Thread(target=self._run, name="gpuflight-wait", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Look no more."""
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._end.is_set():
            watched = [signals_in] if signals_in >= 0 else []
            if select.select(watched, [], [], _LOOK_S)[0]:
                for number in os.read(signals_in, 64):
                    on_wakeup(number)
            if not self._end.is_set() and cuda_is_loaded():
                wake()
                return


def cuda_is_loaded() -> bool:
    """Whether this process has loaded the CUDA driver; loads nothing."""
    return bool(_dlopen(b"libcuda.so.1", os.RTLD_NOLOAD | os.RTLD_LAZY))


def _find_dlopen() -> Callable[[bytes, int], int | None]:
    """dlopen(3) itself: a fiftieth of the cost of a ctypes.CDLL, and without the interpreter's lock."""
    found = ctypes.CDLL(None).dlopen
    found.restype, found.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    return found


_dlopen = _find_dlopen()


def doze(options: str) -> None:
    """Wait for CUDA."""
    global sleeper
    hook()
    sleeper = Sleeper(options)


def wake() -> None:
    """Begin the recorder that waits, if one does."""
    global sleeper
    with lock:
        awoken, sleeper = sleeper, None
        if awoken is not None:
            awoken._end.set()
            with imports:
                from gpuflight.events.recorder import process

            process.begin(awoken.options, forked=awoken.forked)


def shutdown() -> bool:
    """End whatever there is; who comes second waits for the first, if that is possible: else the answer is False."""
    global sleeper
    with lock:
        ended, sleeper = sleeper, None
    if ended is not None:
        ended.end()
    closed = occupant is None or occupant.shutdown()
    if closed and _dying_of:
        die_of(_dying_of)
    return closed


def hook() -> None:
    """Watch forks and SIGTERM; holds for the children too. SIGTERM only if this is the main thread."""
    global _hooked
    if not _hooked:
        _hooked = True
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
        _handle_sigterm()


def _before_fork() -> None:
    global _holds_imports
    lock.acquire()
    if sleeper is not None:
        sleeper.end()
    _holds_imports = imports.acquire(timeout=_IMPORTS_S)  # not for ever: who forks may be in an import himself
    if occupant is not None:
        occupant.before_fork()


def _after_fork() -> None:
    if occupant is not None:
        occupant.after_fork()
    if sleeper is not None:
        sleeper.resume()
    if _holds_imports:
        imports.release()
    lock.release()


def _in_child() -> None:
    global lock, imports, sleeper
    lock, imports = threading.RLock(), threading.RLock()
    before, sleeper = sleeper, None
    options, forked = before.options if before is not None else "", False
    try:
        _signals_of_child()
        if occupant is not None:
            told, forked = occupant.in_child()
            options = told or options
        if not options:
            return
        if LATER not in options:
            options = f"{options[:-1]}{',' if len(options) > 2 else ''}{LATER}}}"
        sleeper = Sleeper(options, forked=forked or cuda_is_loaded())
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            util.register_after_fork(sleeper, _finalize_with_multiprocessing)
    except Exception as error:  # noqa: BLE001 - the child runs as if we were not there
        sys.stderr.write(f"gpuflight: nothing is recorded in process {os.getpid()}: {error}\n")


def _finalize_with_multiprocessing(_: object) -> None:
    """Its children end without ``atexit``."""
    from multiprocessing import util

    util.Finalize(None, shutdown, exitpriority=-100)


def _handle_sigterm() -> None:
    """Python runs handlers in the main thread, between two of its steps; a program that is stuck in a CUDA call would
    not die of SIGTERM any more. So the signal's number also goes to our own thread, which ends the process then."""
    try:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _on_sigterm)
            _open_signals()
    except (ValueError, OSError):  # not in the main thread
        return


def _open_signals() -> None:
    """Have numbers of signals come out of ``signals_in``, unless the program has its own use for that."""
    global signals_in, _signals_out
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before == -1:
            signals_in, _signals_out = reading, writing
            return
        signal.set_wakeup_fd(before)
    except ValueError:  # not in the main thread
        pass
    os.close(reading)
    os.close(writing)


def _signals_of_child() -> None:
    """A pipe of its own: what the parent is sent is not for the child."""
    global signals_in, _signals_out
    if signals_in < 0:
        return
    ends, signals_in, _signals_out = (signals_in, _signals_out), -1, -1
    try:
        now = signal.set_wakeup_fd(-1)
        if now not in (-1, ends[1]):
            signal.set_wakeup_fd(now)  # somebody else's by now
    except ValueError:  # forked by a thread: numbers go nowhere, handlers still run
        return
    for end in ends:
        os.close(end)
    _open_signals()


def _on_sigterm(number: int, _: FrameType | None) -> None:
    global _dying_of
    if occupant is not None and occupant.closing_here():
        _dying_of = number  # what is being closed is closed first
    else:
        shutdown()
        die_of(number)


def on_wakeup(number: int) -> None:
    """A signal came; in our thread, at once."""
    ours = number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _on_sigterm
    if ours and shutdown():  # else the main thread is at it, and its own handler comes next
        die_of(number)


def die_of(number: int) -> None:
    """End as the signal would have ended us; from any thread."""
    ctypes.CDLL(None).signal(number, None)
    os.kill(os.getpid(), number)
