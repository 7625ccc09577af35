"""GPU session logs as a source: where they lie, and how what was read of them enters a recording.

The logs are followed by gpuflight.events, which sources do not know. A recording holds what came of a round's reading,
sums without single events: logs hold source code and call stacks, and are large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.recording import Tape

T = TypeVar("T")


class SessionLogs:
    """``root``: before every path, as in the rest of a tree of fixtures."""

    def __init__(self, tape: Tape | None = None, root: str = "") -> None:
        self._tape = tape
        self.root = root.rstrip("/")

    @property
    def replaying(self) -> bool:
        """Whether no file may be read, and answers come from a recording."""
        return self._tape is not None and self._tape.mode == "replay"

    def taped(self, live: Callable[[], T], kind: type[T], key: str = "reading") -> T:
        """What ``live`` gives, or what was recorded of it under ``key``. Raises SourceUnavailable as ``live`` does, and
        for what a recording does not hold, or holds damaged."""
        if self._tape is None or self._tape.mode == "live":
            return live()
        raw = self._tape.ask("session_logs", key, lambda: msgspec.msgpack.encode(live()))
        try:
            return msgspec.msgpack.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SourceUnavailable(
                f"the recorded reading of session logs makes no sense: {error}", "record again"
            ) from None
