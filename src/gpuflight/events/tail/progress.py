"""How far a session was read."""

from __future__ import annotations

from typing import Literal

import msgspec

from gpuflight.events.tail.stream import Stream


class SessionProgress(msgspec.Struct):
    """``caught_up``: everything that lies there was handed out and committed. ``writer``: by the session's lock.
    ``quiet_s``: since when no plain file of it has changed. ``unread_bytes``: of its files, compressed ones as they lie
    there, that were not handed out yet."""

    path: str
    session_id: str
    base: str
    caught_up: bool = True
    uncommitted_bytes: int = 0
    unread_bytes: int = 0
    windows: int = 0
    quiet_s: float = float("inf")
    writer: Literal["alive", "gone", "unknown"] = "unknown"

    def take(self, stream: Stream, now_s: float) -> None:
        """Add one of its channels."""
        self.caught_up = self.caught_up and stream.caught_up
        self.uncommitted_bytes += stream.uncommitted_bytes
        self.windows += len(stream.windows)
        for window in stream.windows:
            if window.dirty and window.files:
                raw = window.raw
                self.unread_bytes += (
                    window.files[0].stamp.size_bytes if raw is None else max(raw.stamp.size_bytes - window.read, 0)
                )
            if window.files:
                self.quiet_s = min(self.quiet_s, now_s - window.changed_s)
