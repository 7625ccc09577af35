"""What was done in all, for the last line and the exit code."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from gpuflight.agent.send import Result

log = logging.getLogger(__name__)


class Counts(Struct):
    """``size_bytes``: as sent. ``failed``: sessions of which not all has arrived, nor will. ``lost``: what else."""

    windows: int = 0
    lines: int = 0
    size_bytes: int = 0
    uploaded: int = 0
    failed: int = 0
    lost: int = 0


class Totals:
    """Thread-safe."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.delivered_at = 0
        """Grows with everything that arrives: by it is seen whether anything does."""
        self._lock = threading.Lock()

    def add(self, result: Result) -> None:
        """A window is done."""
        self.sent(windows=1, lines=result.lines, size_bytes=result.size_bytes)

    def sent(self, *, windows: int = 0, lines: int = 0, size_bytes: int = 0) -> None:
        with self._lock:
            self.counts.windows += windows
            self.counts.lines += lines
            self.counts.size_bytes += size_bytes
            self.delivered_at += 1

    def session(self, path: str, reason: str) -> None:
        """A session is over: all has arrived, or, with a reason, not."""
        with self._lock:
            self.delivered_at += 1
            if reason:
                self.counts.failed += 1
            else:
                self.counts.uploaded += 1
        if reason:
            log.error("%s: not all of it has arrived: %s", path, reason)
        else:
            log.info("%s: all of it has arrived", path)

    def goes_on(self, failed: bool) -> None:
        """A session that was over is not."""
        with self._lock:
            if failed:
                self.counts.failed -= 1
            else:
                self.counts.uploaded -= 1

    def closed_before(self, path: str, failed: bool) -> None:
        """A session was closed before, by us or another agent."""
        if failed:
            with self._lock:
                self.counts.failed += 1
            log.warning("%s: was closed as failed before; remove the file .failed there to have it sent again", path)

    def lost(self, text: str) -> None:
        """Something was given up that belongs to no session, or to one that is gone."""
        with self._lock:
            self.counts.lost += 1
        log.error("%s", text)
