"""What gpuflight itself costs the machine it watches."""

from __future__ import annotations

import psutil

from gpuflight.rounds import OwnCost


class OwnCostMeter:
    """Measures this process, threads of subscribers and libraries included."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call only sets the start
        self._first = True

    def read(self) -> OwnCost:
        """The cost since the last call; ``cpu_pct`` is None at the first, which has no interval."""
        with self._process.oneshot():
            cpu_pct = self._process.cpu_percent()
            cost = OwnCost(
                cpu_pct=None if self._first else round(cpu_pct, 2),
                rss_bytes=self._process.memory_info().rss,
                threads_count=self._process.num_threads(),
            )
        cost.fds_count = self._process.num_fds()
        self._first = False
        return cost
