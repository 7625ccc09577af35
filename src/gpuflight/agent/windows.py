"""Finished windows of sessions, sent as the files they are: gpufl-agent's way over HTTP."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from gpuflight.agent import markers
from gpuflight.agent.archive import Archive
from gpuflight.agent.dead_letters import DeadLetters
from gpuflight.agent.gate import Gate
from gpuflight.agent.inside import Inside
from gpuflight.agent.plan import Plan, make_plan
from gpuflight.agent.progress import Progress
from gpuflight.agent.receiver import Receiver, Verdict
from gpuflight.agent.scan import Scanner
from gpuflight.agent.send import REFUSALS, Result, WindowSender
from gpuflight.agent.session import COMPLETE, Job, Session
from gpuflight.agent.settings import AgentSettings
from gpuflight.agent.totals import Totals
from gpuflight.errors import GpuflightError
from gpuflight.events.files.folder import SessionFolder

log = logging.getLogger(__name__)

_WINDOWS_IN_TURN = 16
"""Windows of one channel that are sent before others have their turn."""
_JOIN_S = 5.0
_ASKED_PER_S = 100
"""Locks that are looked at, of sessions whose writer was alive."""


class WindowShipper:
    """``turn`` looks and plans; threads of its own send. Few at a time, however many sessions there are."""

    def __init__(
        self,
        settings: AgentSettings,
        progress: Progress,
        dead: DeadLetters,
        archive: Archive | None,
        gate: Gate,
        totals: Totals,
    ) -> None:
        self._settings = settings
        self._channels = {os.path.abspath(s.folder): tuple(s.logTypes) for s in settings.sources}
        self._progress = progress
        self._dead = dead
        self._archive = archive
        self._gate = gate
        self._totals = totals
        self._sender = WindowSender(settings, progress, dead, archive)
        self._inside = Inside(source.folder for source in settings.sources)
        self.scanner = Scanner([source.folder for source in settings.sources])
        self.sessions: dict[str, Session] = {}
        self._complaints: dict[str, str] = {}
        self._guard = threading.RLock()
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._first = True
        self._started_wall_s = time.time()
        receivers = [Receiver(settings.publisher) for _ in range(settings.senders)]
        self._threads = [
            threading.Thread(target=self._work, args=(receiver,), name=f"gpuflight-agent-{number}", daemon=True)
            for number, receiver in enumerate(receivers)
        ]
        for thread in self._threads:
            thread.start()

    def turn(self) -> None:
        """Look what is new, and have it sent."""
        now_s = time.monotonic()
        for folder in self.scanner.scan():
            self._safely(folder.path, partial(self._found, folder, now_s))
        self._first = False
        with self._guard:
            for path in self.scanner.gone & self.sessions.keys():
                session = self.sessions.pop(path)
                if session.state == "open" and (session.left or session.busy):
                    self._totals.lost(f"{path}: deleted before all of it was sent")
            open_ones = [session for session in self.sessions.values() if session.state == "open"]
        for session in open_ones:
            self._safely(session.path, partial(self._go_on, session, now_s))

    def _safely(self, path: str, do: Callable[[], None]) -> None:
        """What goes wrong with one session is no matter of the others. It is looked at again."""
        try:
            do()
        except OSError as error:
            self._complain(path, f"{error.filename or path}: {error.strerror or error}")
        except Exception as error:  # noqa: BLE001 - the edge of a session
            self._complain(path, f"{path}: unexpected {type(error).__name__}", trace=True)
        else:
            self._complaints.pop(path, None)
            return
        self.scanner.forget(path)

    def _complain(self, path: str, text: str, *, trace: bool = False) -> None:
        if self._complaints.get(path) != text:
            self._complaints[path] = text
            log.error("%s", text, exc_info=trace)

    @property
    def drained(self) -> bool:
        """Whether every session is closed."""
        with self._guard:
            return not self._complaints and not any(session.state == "open" for session in self.sessions.values())

    @property
    def seen(self) -> int:
        """Sessions found so far."""
        return len(self.sessions)

    @property
    def left(self) -> int:
        """Windows that are known and not delivered, and sessions that are not said to be complete."""
        with self._guard:
            open_ones = [session for session in self.sessions.values() if session.state == "open"]
            return len(self._complaints) + sum(session.left + (session.over_since_s >= 0) for session in open_ones)

    @property
    def backlog(self) -> int:
        """What could be sent now if the receiver took it."""
        with self._guard:
            open_ones = [session for session in self.sessions.values() if session.state == "open"]
            return len(self._complaints) + sum(session.left + (COMPLETE in session.jobs) for session in open_ones)

    def close(self) -> None:
        """Send no more. What is under way is waited for, for a while."""
        self._stop.set()
        for _ in self._threads:
            self._queue.put(None)
        deadline_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    # --- planning ---

    def _plan(self, folder: SessionFolder, session: Session | None, *, over: bool) -> Plan:
        cursors = session.cursors if session is not None else {}
        known = self._progress.windows(folder.path)
        channels = self._channels_of(folder.path)
        return make_plan(folder, known, cursors, channels, over=over, archives=self._archive is not None)

    def _channels_of(self, path: str) -> tuple[str, ...]:
        roots = [root for root in self._channels if path == root or path.startswith(root.rstrip("/") + "/")]
        return self._channels[max(roots, key=len)]

    def _found(self, folder: SessionFolder, now_s: float) -> None:
        with self._guard:
            session = self.sessions.get(folder.path)
            new = False
            if session is None:
                session = Session(folder, Plan())
                session.cursors = self._progress.cursors(folder.session_id, folder.path)
                beside = folder.companions
                state, reason = self._progress.session(folder.path)
                closed = beside.uploaded or beside.failed
                theirs = closed and not state and not self._progress.windows(folder.path)
                unwanted = self._settings.ignorePreexisting and self._first and self._is_old(folder)
                if theirs or unwanted:
                    session.state = "others"
                    self._totals.closed_before(folder.path, beside.failed and not beside.uploaded)
                elif closed and state:
                    session.state, session.reason = "closed", reason
                elif state == "failed":  # somebody has removed the marker: try again
                    self._progress.forget_dead(folder.path)
                    self._progress.reopen_session(folder.path)
                self.sessions[folder.path] = session
                new = True
            if session.state == "others":
                return
            session.take(folder, self._plan(folder, session, over=session.final), now_s)
            if session.state != "closed":
                return
            if not session.left and new:
                self._totals.closed_before(session.path, bool(session.reason))
            elif session.left:
                if not new:
                    self._totals.goes_on(bool(session.reason))
                log.info("%s: goes on: %d more windows", session.path, session.left)
                session.state, session.final, session.over_since_s = "open", False, -1.0
                self._progress.reopen_session(session.path)
                try:
                    markers.reopen(session.path)
                except OSError as error:
                    log.warning("%s: %s", session.path, error.strerror)

    def _is_old(self, folder: SessionFolder) -> bool:
        try:
            return os.stat(folder.path).st_mtime < self._started_wall_s
        except OSError:
            return False

    def _go_on(self, session: Session, now_s: float) -> None:
        live = self._is_live(session, now_s)
        with self._guard:
            if session.state != "open":  # closed meanwhile
                return
            if live:
                if session.final:
                    session.final, session.stale = False, True
                session.over_since_s = -1.0
            elif session.over_since_s < 0:
                session.over_since_s = now_s
            settings = self._settings
            wait_s = settings.orphanWaitSeconds if session.plan.has_temporary else settings.settleSeconds
            settled = session.over_since_s >= 0 and now_s - session.over_since_s >= wait_s
            if session.stale or (settled and not session.final):
                folder = self.scanner.look(session.path)
                if folder is None:
                    return
                # Planned as final only from a look that was taken after its writer was seen to be gone.
                session.final = settled
                session.orphaned = session.orphaned or (settled and session.plan.has_temporary)
                session.take(folder, self._plan(folder, session, over=settled), now_s)
            wait_s = 0.0 if session.final else settings.settleSeconds
            for job in session.jobs.values():
                ready = job.channel and job.items and not job.busy and now_s >= job.due_s
                if ready and not session.held_back(job, now_s, wait_s):
                    self._enqueue(job)
            if session.final and not session.left and not session.busy and not session.stale:
                self._finish(session, now_s)

    def _is_live(self, session: Session, now_s: float) -> bool:
        """Whether its writer lives. Of many sessions each is asked more rarely, so that waiting costs the same."""
        if now_s >= session.ask_s or session.over_since_s >= 0:
            session.live = session.folder.live()
            session.ask_s = now_s + len(self.sessions) / _ASKED_PER_S
        return session.live

    def _enqueue(self, job: Job) -> None:
        job.busy = True
        self._queue.put(job)

    def _finish(self, session: Session, now_s: float) -> None:
        # All is sent, or given up. The plan says what of that has arrived, by the notes on disk.
        session.plan = self._plan(session.folder, session, over=True)
        if any(session.plan.items.values()):
            session.take(session.folder, session.plan, now_s)
            return
        reason = session.why_not_whole()
        if reason:
            self._close_session(session, reason)
            return
        job = session.jobs.get(COMPLETE)
        if job is None:
            job = session.jobs[COMPLETE] = Job(session, COMPLETE)
        if not job.busy and now_s >= job.due_s:
            self._enqueue(job)

    def _close_session(self, session: Session, reason: str) -> None:
        path = session.path
        self._progress.close_session(path, "failed" if reason else "uploaded", reason)
        try:
            markers.close(path, reason)
        except OSError as error:
            log.warning("%s: how it ended cannot be written there: %s", path, error.strerror)
        session.state, session.reason = "closed", reason
        self._totals.session(path, reason)
        if session.orphaned and self._settings.pruneFailed and not reason and self._inside.holds(path):
            try:
                count = session.prune()
                log.info("%s: %d files of an orphaned session deleted, all of it was delivered", path, count)
            except OSError as error:
                log.warning("%s: %s", error.filename or path, error.strerror)

    # --- sending ---

    def _work(self, receiver: Receiver) -> None:
        try:
            while (job := self._queue.get()) is not None and not self._stop.is_set():
                try:
                    self._send_some(receiver, job)
                except Exception:  # a defect costs a pause, not the thread
                    log.exception("%s: unexpected", job.session.path)
                    self._again(job, Result("retry", "unexpected error"))
        finally:
            receiver.close()

    def _send_some(self, receiver: Receiver, job: Job) -> None:
        for _ in range(_WINDOWS_IN_TURN):
            while (pause_s := self._gate.closed_for_s()) > 0:
                if self._stop.wait(min(pause_s, 1.0)):
                    return
            if self._stop.is_set():
                return
            result = self._step(receiver, job)
            if result.state != "done":
                if result.state == "wait":
                    self._gate.close(result.text, result.retry_after_s)
                self._again(job, result)
                return
            self._gate.open()
            if job.channel != COMPLETE:
                self._totals.add(result)
            with self._guard:
                job.refusals, job.due_s = 0, 0.0
                job.backoff.reset()
                if job.channel:
                    job.items.popleft()
                if not job.items or job.channel == COMPLETE:
                    break
        with self._guard:
            job.busy = False
            more = bool(job.items) and job.session.state == "open"
            if more and not job.session.held_back(job, time.monotonic(), self._settings.settleSeconds):
                self._enqueue(job)

    def _step(self, receiver: Receiver, job: Job) -> Result:
        """One window, or that the session is complete."""
        try:
            if job.channel == COMPLETE:
                return self._complete(receiver, job)
            return self._sender.send(receiver, job.items[0], job.refusals)
        except GpuflightError as error:  # a token file that cannot be read
            return Result("wait", str(error))
        except FileNotFoundError as error:
            with self._guard:
                job.session.stale = True
            return Result("retry", f"{error.filename or job.session.path}: gone")
        except OSError as error:
            return Result("retry", f"{error.filename or job.session.path}: {error.strerror or error}")

    def _complete(self, receiver: Receiver, job: Job) -> Result:
        outcome = receiver.complete(job.session.folder.session_id)
        unknown = outcome.status in (404, 405, 501)
        if outcome.verdict is Verdict.DELIVERED or unknown or outcome.status == 409:
            # Every window has arrived. An older backend knows no such request, and 409 says that it is closed.
            if unknown:
                log.info("%s: the receiver takes no session-complete", job.session.path)
            with self._guard:
                self._close_session(job.session, "")
            return Result("done")
        if outcome.verdict is Verdict.WAIT:
            return Result("wait", outcome.text, outcome.retry_after_s)
        refused = outcome.verdict in (Verdict.REFUSED, Verdict.TOO_LARGE)
        if refused and job.refusals + 1 >= REFUSALS:
            with self._guard:
                self._close_session(job.session, f"session-complete refused: {outcome.text}")
            return Result("done", outcome.text)
        return Result("retry", outcome.text, outcome.retry_after_s, refused=refused)

    def _again(self, job: Job, result: Result) -> None:
        with self._guard:
            job.refusals += result.refused
            job.due_s = time.monotonic() + job.backoff.pause_s(result.retry_after_s)
            job.busy = False
            if job.session.stale:
                job.due_s = 0.0
        if result.state == "retry" and result.text != job.told:  # what holds for all is told by the gate
            job.told = result.text
            log.warning("%s: trying again: %s", job.session.path, result.text)
