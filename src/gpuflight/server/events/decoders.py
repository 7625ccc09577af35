"""What is known of sessions under way: a decoder for each, which knows what it told, kept over requests.

A decoder believes that what it told is stored. Where that turns out not to be so, it is forgotten, and so is whatever
was decoded with it and still waits: its sender sends it again, and the next decoder tells everything anew. Nothing is
lost by forgetting one: names and configurations are upserts, and the store knows the batches it has.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

from gpuflight.server.events.blocks import LineLedger

_SESSIONS_OF_ONE = 1000
"""Sessions that one decoder may have met; files of old generations hold several."""


class UnderWay:
    """A decoder and what belongs to it. ``lock``: held while a block is decoded and queued, so that blocks of one
    session are written in the order in which they were decoded. ``waiting``: sources that are queued, with their end
    and what becomes of them."""

    def __init__(self, session_id: str) -> None:
        from gpuflight.events.format.decoder import Decoder

        self.session_id = session_id
        self.lock = threading.Lock()
        self.ledger = LineLedger()
        self.decoder = Decoder(session_id, self.ledger)
        self.forgotten = False
        self.waiting: dict[str, tuple[int, Future[Any]]] = {}
        self.used_s = 0.0
        self.host_told = False


class Decoders:
    """Decoders by session, the ones used last, at most ``limit``. Thread-safe."""

    def __init__(self, limit: int, idle_s: float) -> None:
        self._limit = limit
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, UnderWay] = OrderedDict()

    def get(self, session_id: str, start_ns: int | None) -> UnderWay:
        """The decoder of a session. A new one is told when the session began: it tells the clocks apart by that."""
        with self._lock:
            found = self._kept.get(session_id)
            if found is None:
                found = self._kept[session_id] = UnderWay(session_id)
                if start_ns is not None:
                    found.decoder.session(session_id).start_ns = start_ns
            found.used_s = time.monotonic()
            self._kept.move_to_end(session_id)
            for other in list(self._kept):
                if len(self._kept) <= self._limit:
                    break
                if not self._kept[other].waiting and other != session_id:
                    del self._kept[other]
            return found

    def known(self, session_id: str) -> bool:
        """Whether there is one."""
        return session_id in self._kept

    def forget(self, one: UnderWay) -> None:
        """What it told is not stored: it and what waits are void."""
        one.forgotten = True
        with self._lock:
            if self._kept.get(one.session_id) is one:
                del self._kept[one.session_id]

    def forget_session(self, session_id: str) -> None:
        """Forget every decoder that met a session, since its records are gone."""
        with self._lock:
            met = [one for one in self._kept.values() if session_id == one.session_id or _met(one, session_id)]
        for one in met:
            self.forget(one)

    def forget_all(self) -> None:
        """Forget every decoder."""
        with self._lock:
            all_of_them = list(self._kept.values())
        for one in all_of_them:
            self.forget(one)

    def let_go_of_idle(self) -> None:
        """Forget those that nothing came for, and those that met too many sessions."""
        before_s = time.monotonic() - self._idle_s
        with self._lock:
            for session_id, one in list(self._kept.items()):
                full = len(one.decoder.sessions) > _SESSIONS_OF_ONE
                if not one.waiting and (one.used_s < before_s or full):
                    del self._kept[session_id]

    def __len__(self) -> int:
        return len(self._kept)


def _met(one: UnderWay, session_id: str) -> bool:
    return session_id in one.decoder.sessions
