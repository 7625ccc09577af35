"""One round to several receivers: the controller knows one Publisher, the server has a stream hub and subscribers."""

from __future__ import annotations

import logging
import threading

from gpuflight.core.controller import Publisher
from gpuflight.rounds import Round

log = logging.getLogger(__name__)


class Fanout:
    """Hands each round to every member, in order. One that raises costs the others nothing. Thread-safe."""

    def __init__(self, *members: Publisher) -> None:
        self.failures_count = 0
        self._members = members
        self._lock = threading.Lock()

    def add(self, member: Publisher) -> None:
        """One more receiver, from the next round on."""
        with self._lock:
            self._members = (*self._members, member)

    def publish(self, done: Round, /) -> None:
        """Take over a round; never waits as long as no member does."""
        for member in self._members:
            try:
                member.publish(done)
            except Exception:  # a defect of one receiver must not end the rounds of the others
                self.failures_count += 1
                log.exception("round %d was not taken over by %s", done.number, type(member).__name__)
