"""Python's garbage collections as scopes named ``gc``: while one runs, nothing is launched."""

from __future__ import annotations

import gc
from typing import Any

from gpuflight.events.recorder.clock import Clock
from gpuflight.events.recorder.ranges import Ranges

NAME = "gc"
LEAST_NS = 100_000
"""Shorter ones are not written, there may be thousands a second; but the first one always is, so that a log without
long ones says that they were looked for."""


class Garbage:
    """Tells ``ranges`` of collections between ``start`` and ``stop``; both may be called twice."""

    def __init__(self, ranges: Ranges, clock: Clock) -> None:
        self._ranges = ranges
        self._clock = clock
        self._began_ns = 0
        self._told = False

    def start(self) -> None:
        """Collections are told from now on."""
        if self._called not in gc.callbacks:
            gc.callbacks.append(self._called)

    def stop(self) -> None:
        """And no more."""
        if self._called in gc.callbacks:
            gc.callbacks.remove(self._called)
        self._began_ns = 0

    def _called(self, phase: str, _info: dict[str, Any]) -> None:
        """By the interpreter, in the thread that collects; only one does at a time."""
        if phase == "start":
            self._began_ns = self._clock.now_ns()
        elif self._began_ns:
            began_ns, ended_ns = self._began_ns, self._clock.now_ns()
            self._began_ns = 0
            if ended_ns - began_ns >= LEAST_NS or not self._told:
                self._told = True
                self._ranges.passed(NAME, began_ns, ended_ns)
