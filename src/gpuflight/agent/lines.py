"""Lines, sent as they are written: the tailer's chunks to a sink, committed once they have arrived."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from gpuflight.agent import markers
from gpuflight.agent.archive import Archive, TooLarge
from gpuflight.agent.gate import Gate
from gpuflight.agent.inside import Inside
from gpuflight.agent.line_sinks import LineSink, Pending, pendings
from gpuflight.agent.progress import Progress, Sent
from gpuflight.agent.settings import AgentSettings
from gpuflight.agent.totals import Totals
from gpuflight.errors import DeliveryError
from gpuflight.events.files.names import parse_name
from gpuflight.events.files.sidecars import owner
from gpuflight.events.ledger import REASONS, Ledger, Place
from gpuflight.events.tail import Disk, SessionProgress, Tailer, TailSettings
from gpuflight.events.tail.disk import Entry

log = logging.getLogger(__name__)

_NOT_LOST = frozenset(("acked_window", "cut_line"))
"""Shipped before; and what a writer's end has cut, of which nobody has the rest."""
_PAUSE_S = 0.1
"""Between two tries of what is left, where nothing moves."""
_ASKED_PER_S = 100
"""Sessions that are looked at, so that waiting for many costs no more than for few."""
_QUIET_S = 30.0
"""Without a lock, a session that was not written for so long is over."""


class SessionLedger(Ledger):
    """A ledger that tells which session has lost what."""

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        super().__init__()
        self._tell = tell

    def add(
        self, reason: str, place: Place | None = None, *, count: int = 1, size_bytes: int = 0, subject: str = ""
    ) -> None:
        super().add(reason, place, count=count, size_bytes=size_bytes, subject=subject)
        if place is None or reason in _NOT_LOST or REASONS[reason][0] != "lost":
            return
        folder = place.file
        if parse_name("", os.path.basename(folder)) is not None:
            folder = os.path.dirname(folder).removesuffix("/.tmp")
        number = "" if place.window < 0 else f".{place.window}"
        self._tell(folder, f"{place.channel}{number}: {REASONS[reason][1]}")


class WantedFiles(Disk):
    """The file system without what is not to be sent: sessions that another agent has closed, and, with ``flat``,
    all session folders."""

    def __init__(self, is_wanted: Callable[[str, bool], bool], inside: Inside, *, flat: bool) -> None:
        self._is_wanted = is_wanted
        self._inside = inside
        self._flat = flat

    def entries(self, folder: str) -> list[Entry]:
        found = [entry for entry in super().entries(folder) if not self._leads_out(folder, entry)]
        if self._flat:
            if folder.endswith("/.tmp"):
                return []
            return [entry for entry in found if entry.is_folder or _is_flat(entry.name)]
        closed = {entry.name for entry in found} & {markers.UPLOADED, markers.FAILED}
        return found if not closed or self._is_wanted(folder, markers.UPLOADED not in closed) else []

    def _leads_out(self, folder: str, entry: Entry) -> bool:
        path = f"{folder}/{entry.name}"
        return os.path.islink(path) and not self._inside.holds(path)


class LineShipper:
    """``turn`` sends what there is, within a few deadlines."""

    def __init__(
        self,
        settings: AgentSettings,
        progress: Progress,
        sink: LineSink,
        archive: Archive | None,
        gate: Gate,
        totals: Totals,
        *,
        flat: bool = False,
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._sink = sink
        self._archive = archive
        self._gate = gate
        self._totals = totals
        self._flat = flat
        self._closed: dict[str, bool] = {}
        self._over_since_s: dict[str, float] = {}
        self._pending: list[Pending] = []
        self._moved = False
        self._sessions: list[SessionProgress] = []
        self._looked_s = float("-inf")
        self._hidden: set[str] = set()
        self._inside = Inside(source.folder for source in settings.sources)
        channels = tuple(dict.fromkeys(channel for source in settings.sources for channel in source.logTypes))
        checkpoint = os.path.join(settings.stateFolder, "flat.tail" if flat else "lines.tail")
        cursors = settings.cursorFile if settings.cursorFile and os.path.exists(settings.cursorFile) else None
        self._tailer = Tailer(
            [source.folder for source in settings.sources],
            checkpoint,
            TailSettings(
                channels=channels,
                begin="end" if settings.ignorePreexisting else "beginning",
                hole_wait_s=settings.settleSeconds,
                settle_s=settings.settleSeconds,
                poll_bytes=4 << 20,
                max_uncommitted_bytes=16 << 20,
                max_uncommitted_bytes_per_channel=4 << 20,
            ),
            cursors=cursors,
            ledger=SessionLedger(progress.lost),
            disk=WantedFiles(self._is_wanted, self._inside, flat=flat),
        )

    def _is_wanted(self, folder: str, failed: bool) -> bool:
        """Whether a session with a marker was closed by us, and may go on."""
        if self._is_ours(folder):
            return True
        if folder not in self._hidden:
            self._hidden.add(folder)
            self._totals.closed_before(folder, failed)
        return False

    def _is_ours(self, folder: str) -> bool:
        return bool(self._progress.session(folder)[0])

    def wait(self, timeout_s: float) -> None:
        """Until there may be more to do."""
        pause_s = self._gate.closed_for_s()
        if pause_s > 0:
            time.sleep(min(pause_s, timeout_s))
        elif not self._pending:
            self._tailer.wait(timeout_s)
        elif not self._moved:
            time.sleep(min(_PAUSE_S, timeout_s))

    def turn(self) -> None:
        """Send what is new, close what is over."""
        new = list(pendings(self._tailer.poll()))
        self._pending += new
        for one in new:
            self._goes_on(one.chunk.folder)
        if self._pending and self._gate.closed_for_s() == 0:
            delivered_at = self._totals.delivered_at
            self._sink.deliver(self._pending)
            self._moved = self._totals.delivered_at != delivered_at
            for one in self._pending:
                if one.done:
                    if one.rejected:
                        place = f"{one.chunk.source.rpartition('/')[2]} {one.chunk.start}"
                        self._progress.lost(one.chunk.folder, f"{place}: {one.rejected} lines rejected")
                    self._tailer.commit(one.chunk)
            self._pending = [one for one in self._pending if not one.done]
        now_s = time.monotonic()
        pause_s = max(min(1.0, self._settings.pollIntervalSeconds), len(self._sessions) / _ASKED_PER_S)
        if now_s - self._looked_s >= pause_s:
            self._looked_s = now_s
            self._sessions = self._tailer.sessions()
            for session in self._sessions:
                if not session.base and self._gate.closed_for_s() == 0:
                    self._close_if_over(session)

    @property
    def drained(self) -> bool:
        """Whether everything that lies there was sent and every session is closed."""
        if self._pending or self._looked_s < 0:
            return False
        return all(
            session.caught_up
            and (
                self._closed.get(session.path, False) if not session.base else session.quiet_s >= self._quiet_s(session)
            )
            for session in self._sessions
        )

    def _quiet_s(self, session: SessionProgress) -> float:
        """Flat files have no lock: nobody writes any more if nothing has changed for a while."""
        return min(_QUIET_S, self._settings.orphanWaitSeconds)

    @property
    def seen(self) -> int:
        return len(self._sessions) + len(self._hidden)

    @property
    def left(self) -> int:
        """Chunks that are not delivered, sessions that are not read to their end or not said to be complete."""
        return len(self._pending) + sum(
            not session.caught_up
            or (not session.base and not self._closed.get(session.path) and session.writer == "gone")
            for session in self._sessions
        )

    @property
    def backlog(self) -> int:
        """What could be sent now if the receiver took it."""
        return self.left

    def close(self) -> None:
        """What was committed is remembered."""
        try:
            self._tailer.close()
        finally:
            self._sink.close()

    # --- sessions ---

    def _goes_on(self, folder: str) -> None:
        closed_now = self._closed.pop(folder, False)
        state = self._progress.session(folder)[0]
        if not state:
            return
        if closed_now:
            self._totals.goes_on(state == "failed")
        log.info("%s: goes on", folder)
        self._progress.reopen_session(folder)
        try:
            markers.reopen(folder)
        except OSError as error:
            log.warning("%s: %s", folder, error.strerror)

    def _close_if_over(self, session: SessionProgress) -> None:
        path = session.path
        if self._closed.get(path):
            return
        if not session.caught_up:
            self._over_since_s.pop(path, None)
            return
        state = self._progress.session(path)[0]
        if state:  # closed before a restart
            self._closed[path] = True
            self._totals.closed_before(path, state == "failed")
            return
        writer = "alive" if session.writer == "alive" else owner(path)  # one that lived a moment ago is not asked again
        wait_s = self._settings.settleSeconds if writer == "gone" else self._quiet_s(session)
        if writer == "alive" or session.quiet_s < wait_s:
            self._over_since_s.pop(path, None)
            return
        # Longer than the tailer waits for holes to be filled and for cut files to grow: what is lost is noted by then.
        now_s = time.monotonic()
        if now_s - self._over_since_s.setdefault(path, now_s) < self._settings.settleSeconds * 1.5:
            return
        if not self._archived(session):
            return
        reason = self._why_not_whole(path)
        if not reason:
            said = self._sink.complete(session.session_id)
            if said is None:
                return
            reason = said
        self._progress.close_session(path, "failed" if reason else "uploaded", reason)
        try:
            markers.close(path, reason)
        except OSError as error:
            log.warning("%s: how it ended cannot be written there: %s", path, error.strerror)
        self._closed[path] = True
        self._over_since_s.pop(path, None)
        self._totals.session(path, reason)

    def _why_not_whole(self, path: str) -> str:
        reasons = [
            sent.note for sent in self._progress.windows(path).values() if sent.note and not _filled(path, sent.note)
        ]
        more = f"; and {len(reasons) - 10} more" if len(reasons) > 10 else ""
        return "; ".join(reasons[:10]) + more

    def _archived(self, session: SessionProgress) -> bool:
        """Whether all finished windows of a session are archived."""
        if self._archive is None:
            return True
        known = self._progress.windows(session.path)
        try:
            names = sorted(os.listdir(session.path))
        except OSError:
            return True
        for name in names:
            window = parse_name(session.path, name)
            if window is None or window.part or window.base or (name in known and known[name].archived):
                continue
            try:
                self._archive.put(session.session_id, window.channel, window.path)
            except FileNotFoundError:
                continue
            except TooLarge as error:
                log.error("%s", error)
                self._progress.note(session.path, name, Sent("lost", note=str(error), archived=True))
                continue
            except (DeliveryError, OSError) as error:
                self._gate.close(f"not archived: {error}")
                return False
            self._progress.note(session.path, name, Sent("sent", archived=True))
            if self._settings.archiver is not None and self._settings.archiver.deleteAfterUpload:
                try:
                    if window.number is not None and self._inside.holds(session.path):
                        markers.acknowledge(session.path, window.channel, window.number, "-")
                        markers.remove(window.path)
                except OSError as error:
                    log.warning("%s: %s", window.path, error.strerror)
        return True


def _filled(path: str, note: str) -> bool:
    """Whether a hole that was noted is none any more: its window has come late, and was read."""
    name, _, text = note.partition(": ")
    return text == REASONS["missing_window"][1] and any(
        os.path.exists(f"{path}/{name}.log{suffix}") for suffix in ("", ".gz")
    )


def _is_flat(name: str) -> bool:
    window = parse_name("", name)
    return window is not None and bool(window.base)
