"""The subscriber that keeps rounds in memory, for programs that embed gpuflight."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from pydantic import Field

from gpuflight.rounds import Round
from gpuflight.subscribers.base import Outside, Subscriber, SubscriberSettings


class MemorySettings(SubscriberSettings):
    """Settings of the memory subscriber."""

    rounds_count: int = Field(default=16, ge=1, description="how many rounds are kept; the oldest go first")


class Memory(Subscriber):
    """Keeps the last rounds in memory."""

    stability = "stable"
    settings_class = MemorySettings

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._lock = threading.Lock()
        self._rounds: deque[Round] = deque(maxlen=self.settings.rounds_count)

    def outside(self) -> Outside:
        return Outside()

    def deliver(self, completed: Round) -> None:
        with self._lock:
            self._rounds.append(completed)

    def close(self) -> None:
        """What was kept stays readable."""

    @property
    def latest(self) -> Round | None:
        """The newest round delivered here."""
        with self._lock:
            return self._rounds[-1] if self._rounds else None

    def rounds(self) -> list[Round]:
        """All rounds kept, oldest first."""
        with self._lock:
            return list(self._rounds)
