"""What our own programs cost: the kernel counts it per program while somebody holds BPF_ENABLE_STATS open."""

from __future__ import annotations

import os
import threading

from gpuflight.sources.bpf import syscalls
from gpuflight.sources.bpf.base import ProgramCost

_FIELDS = {"run_cnt": "run_count", "run_time_ns": "run_time_ns", "recursion_misses": "missed_count"}


class Statistics:
    """Keeps the kernel counting, from the first ``start`` to the last ``stop``, in one descriptor for all objects."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._fd = -1
        self.why_not = ""
        self.wanted = True
        """Set it before the first ``start``. Counting makes every program of the host slower, not only ours."""

    def start(self) -> None:
        """One more object wants to know its cost. Without the right, ``why_not`` says so and nothing is counted."""
        with self._lock:
            self._users += 1
            if self._fd >= 0:
                return
            if not self.wanted:
                self.why_not = "switched off by the setting probes.own_cost"
                return
            try:
                self._fd, self.why_not = syscalls.enable_stats(), ""
            except OSError as error:
                self.why_not = f"the kernel does not count what probes cost: {error.strerror}"

    def stop(self) -> None:
        """One object less."""
        with self._lock:
            self._users -= 1
            if not self._users and self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    @property
    def counting(self) -> bool:
        """Whether run times are counted, by us or because an administrator switched it on for all."""
        if self._fd >= 0:
            return True
        try:
            with open("/proc/sys/kernel/bpf_stats_enabled", encoding="utf-8") as file:
                return file.read().strip() == "1"
        except OSError:
            return False


STATISTICS = Statistics()
"""Of this process."""


def program_cost(program: str, fd: int, counting: bool) -> ProgramCost:
    """The cost of one program, from its descriptor's fdinfo. Raises OSError."""
    cost = ProgramCost(program)
    if not counting:
        return cost
    with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name in _FIELDS:
                setattr(cost, _FIELDS[name], int(value))
    return cost


STATISTICS = Statistics()
"""The one of this process."""
