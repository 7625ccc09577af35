"""Scopes of the program (``with gpuflight.scope("step")``): begin and end are noted at once and written later.

What runs in the user's thread takes no lock and waits for nothing.
"""

from __future__ import annotations

import itertools
from collections import deque
from contextvars import ContextVar
from typing import NamedTuple

from gpuflight.events.format.writer import SessionWriter
from gpuflight.events.recorder.capture import Capture
from gpuflight.events.recorder.clock import Clock

MOST_WAITING = 500_000
MOST_NAMES = 50_000
OTHER = "(scopes of other names)"
_depth: ContextVar[int] = ContextVar("gpuflight_scope_depth", default=0)


class Open(NamedTuple):
    """A scope that was entered."""

    instance: int
    name: str
    depth: int
    began_ns: int
    pushed: bool


class Ranges:
    """``dropped``: begins and ends that did not fit between two writes."""

    def __init__(self, clock: Clock, capture: Capture) -> None:
        self.dropped = 0
        self.written = 0
        self._clock = clock
        self._capture = capture
        self._numbers = itertools.count(1)
        self._waiting: deque[tuple[int, int, str, int, int, int]] = deque()
        self._names: set[str] = set()

    def enter(self, name: str) -> Open:
        depth = _depth.get()
        _depth.set(depth + 1)
        instance = next(self._numbers)
        now = self._clock.now_ns()
        self._note((now, instance, name, 0, depth, now))
        return Open(instance, name, depth, now, self._capture.push(instance))

    def leave(self, opened: Open) -> None:
        _depth.set(opened.depth)
        if opened.pushed:
            self._capture.pop()
        self._note((self._clock.now_ns(), opened.instance, opened.name, 1, opened.depth, opened.began_ns))

    def passed(self, name: str, began_ns: int, ended_ns: int) -> None:
        """A scope that is over already; launches inside do not carry it."""
        depth, instance = _depth.get(), next(self._numbers)
        self._note((began_ns, instance, name, 0, depth, began_ns))
        self._note((ended_ns, instance, name, 1, depth, began_ns))

    def write(self, writer: SessionWriter) -> None:
        """Everything that was noted so far."""
        waiting, rows = self._waiting, []
        for _ in range(len(waiting)):
            time_ns, instance, name, event, depth, began = waiting.popleft()
            if name not in self._names:  # a name with a number in it has no end of values
                name = name if len(self._names) < MOST_NAMES else OTHER
                self._names.add(name)
            rows.append((time_ns, instance, writer.text("scope", name), event, depth, 0, 0, began))
        if rows:
            names = ("dt_ns", "scope_instance_id", "name_id", "event_type", "depth", "repeat", "warmup")
            columns = dict(zip((*names, "original_start_ns"), map(list, zip(*rows, strict=True)), strict=True))
            writer.rows("scope_event_batch", columns)
            self.written += len(rows)

    def _note(self, event: tuple[int, int, str, int, int, int]) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self.dropped += 1
        else:
            self._waiting.append(event)
