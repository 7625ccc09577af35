"""The share of a core that a recorder may cost, kept by what can be left out: compressing finished windows.

Writing 100,000 kernels a second costs 1.5 to 2 % of a core, gzip of them 1 % more. A window that is left plain is as
readable (``.log`` instead of ``.log.gz``), three times as large, and costs nothing more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_CREDIT_NS = 100_000_000
"""Spent ahead, so that short sessions are compressed: gzip of about 30 MB. Saved again within ``_CREDIT_S``."""
_CREDIT_S = 60.0
_NS_PER_BYTE = 3.0
"""Of gzip before any was measured: igzip, level 1, on rows of numbers."""


class CpuBudget:
    """CPU of the threads that called ``watch``, against a share of one core since the first of them did.

    ``share`` 0: no limit. ``plain``: windows that were left plain; ``windows``: all that were asked about.
    """

    def __init__(self, share: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self.plain = 0
        self.windows = 0
        self._share = share
        self._now_s = now_s
        self._since_s: float | None = None
        self._clocks: dict[int, int] = {}
        self._seen_ns: dict[int, int] = {}
        self._base_ns = 0  # CPU of threads that left, less what those that are watched had used before
        self._ns_per_byte = _NS_PER_BYTE
        self._under_way: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Count the calling thread from now on; again: nothing."""
        thread = threading.get_native_id()
        with self._lock:
            if thread not in self._clocks:
                self._clocks[thread] = time.pthread_getcpuclockid(threading.get_ident())
                self._seen_ns[thread] = now_ns = time.thread_time_ns()
                self._base_ns -= now_ns
            if self._since_s is None:
                self._since_s = self._now_s()

    def left(self) -> None:
        """The calling thread is about to end; what it cost stays counted."""
        with self._lock:
            thread = threading.get_native_id()
            if self._clocks.pop(thread, None) is not None:
                del self._seen_ns[thread]
                self._base_ns += time.thread_time_ns()

    @property
    def spent_ns(self) -> int:
        """CPU until now."""
        with self._lock:
            for thread, clock in self._clocks.items():
                try:
                    self._seen_ns[thread] = time.clock_gettime_ns(clock)
                except OSError:  # it ended without a word: what was seen last
                    continue
            return self._base_ns + sum(self._seen_ns.values())

    def allows(self, size_bytes: int, needed: bool) -> bool:
        """Whether a window of that size may be compressed now, by the calling thread. ``needed``: it must be."""
        self.watch()
        now_ns = time.thread_time_ns()
        if self._under_way is not None:  # what the last one cost tells what the next one will
            begun_ns, size = self._under_way
            self._ns_per_byte = (now_ns - begun_ns) / size
            self._under_way = None
        self.windows += 1
        elapsed_s = self._now_s() - (self._since_s or 0.0)
        allowed_ns = self._share * elapsed_s * 1e9 + _CREDIT_NS * max(0.0, 1 - elapsed_s / _CREDIT_S)
        if self._share and not needed and self.spent_ns + size_bytes * self._ns_per_byte > allowed_ns:
            self.plain += 1
            return False
        self._under_way = now_ns, max(size_bytes, 1)
        return True
