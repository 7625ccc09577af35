"""The threads that ask the peers, each at its own jittered time, beside the rounds."""

from __future__ import annotations

import heapq
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

log = logging.getLogger(__name__)

THREADS_AT_MOST = 32
_SPREAD_S = 0.02


class Polled(Protocol):
    """What the pool needs of a peer."""

    failures_count: int
    retry_after_s: float


class Pool:
    """Calls ``poll(index)`` for each peer again and again. A thread is made only when something is due and all others
    are waiting for an answer, so that hosts that do not answer hold up nobody before there are ``THREADS_AT_MOST``."""

    def __init__(
        self, peers: Sequence[Polled], poll: Callable[[int], None], intervals_s: Sequence[float], backoff_max_s: float
    ) -> None:
        self._peers = peers
        self._poll = poll
        self._intervals_s = intervals_s
        self._backoff_max_s = backoff_max_s
        self._condition = threading.Condition()
        self._due: list[tuple[float, int]] = []
        self._threads: list[threading.Thread] = []
        self._idle_count = 0
        self._stopping = False
        self._random = random.Random()  # noqa: S311 - spreads load, keeps no secret

    @property
    def threads_count(self) -> int:
        """Threads made so far."""
        return len(self._threads)

    def start(self) -> None:
        """Begin; the first requests go out over a short while, in order. Again: no effect."""
        with self._condition:
            if self._threads or self._stopping:
                return
            now_s = time.monotonic()
            self._due = [(now_s + index * _SPREAD_S, index) for index in range(len(self._peers))]
            heapq.heapify(self._due)
            self._add_thread()

    def stop(self, timeout_s: float) -> None:
        """End; a thread that waits for an answer is left behind after ``timeout_s`` in all."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def next_wait_s(self, interval_s: float, failures_count: int, retry_after_s: float = 0.0) -> float:
        """How long until a peer is asked again. Answering ones at their interval, ± 10 %; others after twice as long
        each time, at most ``backoff_max_s`` (never less often), less up to half of it at random, so that many do not
        come back at once; never before the peer said (Retry-After)."""
        if not failures_count:
            return interval_s * self._random.uniform(0.9, 1.1)
        ceiling = max(interval_s, self._backoff_max_s)
        wait_s = min(ceiling, interval_s * 2.0 ** min(failures_count - 1, 30))
        return max(retry_after_s, wait_s * self._random.uniform(0.5, 1.0))

    def _add_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"gpuflight-remote-{len(self._threads)}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        while (index := self._take()) is not None:
            try:
                self._poll(index)
            except Exception:  # a defect of ours must not end the thread: the peer is asked again
                log.exception("peer %d", index)
                self._peers[index].failures_count += 1
            peer = self._peers[index]
            wait_s = self.next_wait_s(self._intervals_s[index], peer.failures_count, peer.retry_after_s)
            with self._condition:
                heapq.heappush(self._due, (time.monotonic() + wait_s, index))
                self._condition.notify()

    def _take(self) -> int | None:
        """Wait for the next peer that is due; None at the end."""
        with self._condition:
            while not self._stopping:
                left_s = self._due[0][0] - time.monotonic() if self._due else None
                if left_s is not None and left_s <= 0:
                    index = heapq.heappop(self._due)[1]
                    if self._due and not self._idle_count and len(self._threads) < THREADS_AT_MOST:
                        self._add_thread()  # to watch the clock while this one waits for its answer
                    else:
                        self._condition.notify()
                    return index
                self._idle_count += 1
                try:
                    self._condition.wait(left_s)
                finally:
                    self._idle_count -= 1
            return None
