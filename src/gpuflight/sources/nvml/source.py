"""The Nvml source: one snapshot a round, whatever the driver does."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import msgspec
from msgspec.structs import replace

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.clock import Clock, SystemClock
from gpuflight.sources.nvml.library import Broken, Doing
from gpuflight.sources.nvml.model import Gpu, NvmlSnapshot
from gpuflight.sources.nvml.session import Session
from gpuflight.sources.nvml.watchdog import StillBusy, Watchdog

if TYPE_CHECKING:
    from gpuflight.sources.recording import Tape

RETRY_FIRST_S = 5.0
RETRY_LONGEST_S = 300.0
LOST_FIRST_S = 30.0
"""A GPU that is lost does not come back by itself; initialising again only finds out whether somebody reset it."""

HANG_HINT = "look for Xid messages in dmesg and for nvidia-smi hanging too: the GPU may need a reset, the host a reboot"
SLOW_HINT = "without persistence mode (nvidia-smi -pm 1) the driver initialises every GPU anew, which takes its time"


class Backoff:
    """When to try again after a failure: ``first_s`` later, then twice as long each time, up to RETRY_LONGEST_S."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._delay_s = 0.0
        self._at_s = 0.0

    def failed(self, now_s: float) -> None:
        """Note a failure."""
        self._delay_s = min(max(self._delay_s * 2, self._first_s), RETRY_LONGEST_S)
        self._at_s = now_s + self._delay_s

    def succeeded(self) -> None:
        """The next failure begins anew."""
        self._delay_s = self._at_s = 0.0

    def wait_s(self, now_s: float) -> float:
        """Time left until the next try; 0 if it is due."""
        return max(0.0, self._at_s - now_s)


class Nvml:
    """NVML, read once a round in a thread of its own.

    ``library``: path of the library, for tests; the usual one otherwise. ``deadline_s``: how long a round waits for
    NVML; ``first_deadline_s`` while it is being initialised. When it does not answer, or stops working, the last
    snapshot stands, with its age and the reason, for ``expires_s``; then, as when it never worked, ``snapshot`` raises
    SourceUnavailable. It is initialised again with growing pauses. Nothing is loaded before the first snapshot.
    """

    def __init__(
        self,
        library: str | None = None,
        tape: Tape | None = None,
        clock: Clock | None = None,
        *,
        deadline_s: float = 2.0,
        first_deadline_s: float = 4.0,
        expires_s: float = 60.0,
    ) -> None:
        self._path = library
        self._tape = tape
        self._clock = clock or SystemClock()
        self._deadline_s = deadline_s
        self._first_deadline_s = first_deadline_s
        self._expires_s = expires_s
        self._watchdog = Watchdog("gpuflight-nvml")
        self._doing = Doing()
        self._session: Session | None = None
        self._known: dict[str, Gpu] = {}
        self._failure: SourceUnavailable | None = None
        self._retry = Backoff(RETRY_FIRST_S)
        self._lost_retry = Backoff(LOST_FIRST_S)
        self._last: NvmlSnapshot | None = None
        self._busy_since_s: float | None = None
        self._answer: NvmlSnapshot | SourceUnavailable | None = None

    def begin_round(self, number: int) -> None:
        """The next ``snapshot`` is a new one."""
        self._answer = None

    def snapshot(self) -> NvmlSnapshot:
        """This round's snapshot; do not change it. Raises SourceUnavailable(reason, hint)."""
        if self._answer is None:
            try:
                if self._tape is None or self._tape.mode == "live":
                    self._answer = self._take()
                else:
                    raw = self._tape.ask("nvml", "snapshot", lambda: msgspec.json.encode(self._take()))
                    self._answer = msgspec.json.decode(raw, type=NvmlSnapshot)
            except SourceUnavailable as error:
                self._answer = error
        if isinstance(self._answer, SourceUnavailable):
            raise SourceUnavailable(self._answer.reason, self._answer.hint)
        return self._answer

    def close(self) -> None:
        """Shut NVML down, unless it hangs. May be called twice."""
        session, self._session = self._session, None
        if session is not None and not self._watchdog.busy:
            try:
                self._watchdog.run(session.close, self._deadline_s)
            except (StillBusy, Broken):
                pass
        self._watchdog.close()

    def _take(self) -> NvmlSnapshot:
        """A snapshot from this machine, within the deadline."""
        now_s = self._clock.monotonic_s()
        wall_ns = self._clock.wall_ns()
        deadline_s = self._deadline_s if self._session is not None else self._first_deadline_s
        try:
            snapshot = self._watchdog.run(lambda: self._work(now_s, wall_ns), deadline_s)
        except StillBusy:
            if self._busy_since_s is None:
                self._busy_since_s = now_s - deadline_s  # counted on from the round in which it was waited for
            return self._stale(self._hanging(now_s), now_s)
        except SourceUnavailable as failure:
            self._busy_since_s = None
            return self._stale(failure, now_s)
        self._busy_since_s = None
        self._last = snapshot
        return self._last

    def _work(self, now_s: float, wall_ns: int) -> NvmlSnapshot:
        """Runs in the watchdog's thread, which alone touches the session."""
        if self._session is None:
            wait_s = self._retry.wait_s(now_s)
            if wait_s and self._failure is not None:
                raise SourceUnavailable(
                    f"{self._failure.reason}; next try in {wait_s:.0f} s", self._failure.hint
                ) from self._failure
        try:
            session = self._session
            if session is not None and session.has_lost and self._lost_retry.wait_s(now_s) == 0:
                self._close_session()
                session = None
            if session is None:
                session = self._session = Session(self._path, self._known, self._doing)
            snapshot = session.read(now_s, wall_ns)
        except Broken as broken:
            self._close_session()
            self._failed(SourceUnavailable(f"NVML stopped working: {broken}", "see dmesg for messages of NVRM"), now_s)
        except SourceUnavailable as failure:
            self._failed(failure, now_s)
        self._retry.succeeded()
        if not session.has_lost:
            self._lost_retry.succeeded()
        elif self._lost_retry.wait_s(now_s) == 0:
            self._lost_retry.failed(now_s)
        return snapshot

    def _failed(self, failure: SourceUnavailable, now_s: float) -> NoReturn:
        self._failure = failure
        self._retry.failed(now_s)
        raise failure

    def _close_session(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _hanging(self, now_s: float) -> SourceUnavailable:
        since_s = now_s - (self._busy_since_s or now_s)
        doing = self._doing.text or "NVML"
        hint = SLOW_HINT if doing == "nvmlInit" else HANG_HINT
        return SourceUnavailable(f"{doing} has not returned for {since_s:.1f} s", hint)

    def _stale(self, failure: SourceUnavailable, now_s: float) -> NvmlSnapshot:
        last = self._last
        if last is None:
            raise failure
        age_s = now_s - last.monotonic_s
        if age_s > self._expires_s:
            raise SourceUnavailable(f"{failure.reason}; the last values are {age_s:.0f} s old", failure.hint)
        # Events are told once.
        return replace(last, age_s=age_s, stale_reason=str(failure), events=[])
