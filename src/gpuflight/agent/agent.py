"""The agent: looks, sends, and ends when it is told to or when all is done."""

from __future__ import annotations

import logging
import os
import threading
import time

from gpuflight.agent.archive import Archive
from gpuflight.agent.dead_letters import DeadLetters
from gpuflight.agent.gate import Gate
from gpuflight.agent.line_sinks import HttpLines, KafkaLines, LineSink
from gpuflight.agent.lines import LineShipper
from gpuflight.agent.progress import Progress
from gpuflight.agent.settings import AgentSettings
from gpuflight.agent.totals import Totals
from gpuflight.agent.windows import WindowShipper
from gpuflight.errors import ConfigError
from gpuflight.events.tail.cursors import read_cursors

log = logging.getLogger(__name__)

DELIVERED, NOT_ALL, ENDED_EARLY = 0, 1, 3
"""Exit codes: everything that was there has arrived; some of it has not and will not; ended before all was sent."""

_CLEAN_CHECKS = 2
_CHECK_S = 1.0
_LINE_WAIT_S = 0.5
_FORGET_S = 3600.0


class Agent:
    """``run`` until ``stop`` is set, or, where the settings say so, until everything is delivered. Raises InputError,
    ConfigError, MissingExtra, DeliveryError where it cannot begin."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.totals = Totals()
        self._gate = Gate()
        self._progress = Progress(settings.stateFolder)
        self._archive: Archive | None = None
        self._windows: WindowShipper | None = None
        self._lines: LineShipper | None = None
        try:
            if self._progress.damaged_path:
                log.error("%s was damaged and is kept as %s", self._progress.path, self._progress.damaged_path)
            gone = self._progress.forget_gone()
            if gone:
                log.info("%d sessions are gone and forgotten", gone)
            self._import_cursors()
            self._dead = DeadLetters(os.path.join(settings.stateFolder, "dead-letters"))
            if settings.archiver is not None:
                self._archive = Archive(settings.archiver)
            if settings.publisher.sends_windows:
                self._windows = WindowShipper(
                    settings, self._progress, self._dead, self._archive, self._gate, self.totals
                )
            else:
                self._lines = self._line_shipper(flat=False)
        except BaseException:
            self.close()
            raise

    def _import_cursors(self) -> None:
        path = self.settings.cursorFile
        if path is None or not os.path.exists(path) or not os.path.getsize(path):
            return
        count = self._progress.import_cursors(read_cursors(path))
        if count:
            log.info("%s: %d positions of gpufl-agent taken over", path, count)

    def _line_shipper(self, *, flat: bool) -> LineShipper:
        settings = self.settings
        sink: LineSink
        if settings.publisher.type == "kafka":
            sink = KafkaLines(settings, self._dead, self._gate, self.totals)
        else:
            sink = HttpLines(settings, self._dead, self._gate, self.totals)
        return LineShipper(settings, self._progress, sink, self._archive, self._gate, self.totals, flat=flat)

    def run(self, stop: threading.Event) -> int:
        """The exit code."""
        publisher = self.settings.publisher
        where = publisher.hostUrl if publisher.type == "http" else publisher.bootstrapServers
        log.info("sending what is in %s to %s", ", ".join(s.folder for s in self.settings.sources), where)
        clean = 0
        checked_s = time.monotonic()
        moved_at, moved_s = -1, time.monotonic()
        looked_s = float("-inf")
        forgot_s = time.monotonic()
        while not stop.is_set():
            now_s = time.monotonic()
            if now_s - forgot_s >= _FORGET_S:
                forgot_s = now_s
                self._progress.forget_gone()
            if self._windows is not None and now_s - looked_s >= self._interval_s():
                looked_s = now_s
                self._windows.turn()
                if self._windows.scanner.flat and self._lines is None:
                    self._lines = self._line_shipper(flat=True)
            if self._lines is not None:
                self._send_lines(self._lines)
            if self.settings.drains and now_s - checked_s >= min(_CHECK_S, self._interval_s()):
                checked_s = now_s
                clean = clean + 1 if self._drained() else 0
                if clean >= _CLEAN_CHECKS:
                    return self._code()
                if self.totals.delivered_at != moved_at or not self._backlog():
                    moved_at, moved_s = self.totals.delivered_at, now_s
                elif 0 < self.settings.giveUpAfterSeconds <= now_s - moved_s:
                    log.error("given up: nothing was delivered for %g s", now_s - moved_s)
                    break
            if self._lines is not None and self._windows is None:
                self._lines.wait(_LINE_WAIT_S if self.settings.drains else 1.0)
            else:
                stop.wait(min(self._interval_s(), _LINE_WAIT_S))
        return self._code()

    def _send_lines(self, lines: LineShipper) -> None:
        try:
            lines.turn()
        except OSError as error:  # a full disk: nothing is committed that could not be noted
            self._gate.close(f"{error.filename or self._progress.path}: {error.strerror or error}")

    def close(self) -> None:
        """End sending; what is not sent is sent by the next one."""
        for part in (self._windows, self._lines, self._archive, self._progress):
            if part is None:
                continue
            try:
                part.close()
            except OSError as error:
                log.error("%s: %s", error.filename or type(part).__name__, error.strerror or error)

    def _interval_s(self) -> float:
        return self.settings.pollIntervalSeconds

    def _parts(self) -> list[WindowShipper | LineShipper]:
        return [part for part in (self._windows, self._lines) if part is not None]

    def _drained(self) -> bool:
        seen = sum(part.seen for part in self._parts())
        return (seen > 0 or self.settings.exitIfEmpty) and all(part.drained for part in self._parts())

    def _backlog(self) -> int:
        return sum(part.backlog for part in self._parts())

    def _code(self) -> int:
        left = sum(part.left for part in self._parts())
        counts = self.totals.counts
        log.info(
            "%d windows, %d lines, %d bytes sent; sessions: %d uploaded, %d failed",
            counts.windows, counts.lines, counts.size_bytes, counts.uploaded, counts.failed,
        )  # fmt: skip
        if left:
            log.warning("%d windows or sessions are left for the next start", left)
            return ENDED_EARLY
        return NOT_ALL if counts.failed or counts.lost or self._dead.count else DELIVERED


def make_agent(settings: AgentSettings) -> Agent:
    """An agent that has begun. Raises ConfigError also where two sources lie within one another."""
    folders = [os.path.abspath(source.folder) for source in settings.sources]
    for folder in folders:
        others = [other for other in folders if other is not folder]
        if any(folder == other or folder.startswith(other.rstrip("/") + "/") for other in others):
            raise ConfigError(f"{folder} lies in another folder that is sent; name the outer one only")
    return Agent(settings)
