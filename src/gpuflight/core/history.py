"""The history ring: past rounds within a number of bytes.

Kept as one old graph and the differences since, because a graph's dictionaries alone cost 100 bytes per element and
round, while a difference costs only what changed. A past round is put together again when it is asked for.
"""

from __future__ import annotations

import threading
from collections import deque

from msgspec import Struct
from msgspec.structs import replace

from gpuflight.graph import Graph
from gpuflight.graph.diff import Diff, apply, apply_all
from gpuflight.rounds import Round

_ELEMENT_BYTES = 640
"""Mean size of an element with its key (benchmarks/bench_graph.py: 380 B) and of its Change."""

_ROUND_BYTES = 16_384
"""Mean size of a round's coverage, environment and bookkeeping (measured over 1,000 rounds: 15 kB)."""


class HistoryEntry(Struct):
    """One past round without its graph."""

    round: Round
    bytes: int


class History:
    """The last rounds, oldest first, within ``max_bytes``; the newest is always kept. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.dropped_count = 0
        self._base: Graph | None = None  # the graph of the oldest entry
        self._entries: deque[HistoryEntry] = deque()
        self._lock = threading.Lock()

    def append(self, done: Round) -> None:
        """Add the newest round; drop the oldest ones that no longer fit."""
        # Only the newest entry needs a whole graph, and that one is shared with everybody else.
        stored = replace(done, graph=Graph()) if self._entries else replace(done, graph=Graph(), diff=Diff())
        size = _ROUND_BYTES + sum(stored.diff.counts().values()) * _ELEMENT_BYTES
        with self._lock:
            if self._base is None:
                self._base = done.graph
            self._entries.append(HistoryEntry(stored, size))
            self.used_bytes += size
            while self.used_bytes > self.max_bytes and len(self._entries) > 1:
                oldest = self._entries.popleft()
                self.used_bytes -= oldest.bytes
                self.dropped_count += 1
                self._base = apply(self._entries[0].round.diff, self._base)

    def numbers(self) -> list[int]:
        """Numbers of the rounds kept, oldest first."""
        with self._lock:
            return [entry.round.number for entry in self._entries]

    def rounds(self, first: int, last: int) -> list[Round]:
        """The rounds kept of ``first`` to ``last``, oldest first, *without* their graphs, which ``get`` puts together.

        The oldest round kept has no difference either: what was before it is gone.
        """
        with self._lock:
            return [
                replace(entry.round, diff=Diff()) if not index else entry.round
                for index, entry in enumerate(self._entries)
                if first <= entry.round.number <= last
            ]

    def get(self, number: int) -> Round | None:
        """A past round with its graph; None if it is not (or no longer) here."""
        with self._lock:
            base = self._base
            entries = [entry.round for entry in self._entries if entry.round.number <= number]
        if base is None or not entries or entries[-1].number != number:
            return None
        # Outside the lock: this takes long, and nobody else has to wait for it.
        return replace(entries[-1], graph=apply_all((entry.diff for entry in entries[1:]), base))

    def at(self, time_ns: int) -> Round | None:
        """The last round that had begun at a time (ns since the epoch); None if the time is before the oldest kept."""
        with self._lock:
            number = None
            for entry in self._entries:
                if entry.round.time_ns <= time_ns:
                    number = entry.round.number
        return self.get(number) if number is not None else None

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._base = None
            self._entries.clear()
            self.used_bytes = 0
