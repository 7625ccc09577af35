"""The backend without an API: rounds are made and delivered to subscribers, nobody can ask. Needs no extra."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from gpuflight.server.base import ServerBackend
from gpuflight.server.state import ServerState


class Offline(ServerBackend):
    """Makes and delivers rounds without an API."""

    stability = "stable"

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self._stopped = threading.Event()

    def serve(self, state: ServerState, ready: Callable[[str], None] = lambda where: None) -> None:
        ready("")
        # In slices: a signal handler that calls stop runs in this thread, between two of them.
        while not self._stopped.wait(1.0):
            pass
        state.stopping = True

    def stop(self, deadline_s: float) -> None:
        self._stopped.set()
