"""How much a process may be watched: one that launches too often is watched in some rounds only.

A launch that is watched costs the program about half a microsecond, whatever is done with it: the trap is the cost,
not the program behind it. So taking a sample inside the program would save nothing; only detaching does. Above
``budget_per_s`` launches a process is watched for a round, and then left alone for so many rounds that the launches
watched on average are no more than the budget.
"""

from __future__ import annotations

import math

from msgspec import Struct

MOST_ROUNDS_OFF = 20
"""A process is looked at again after so many rounds, however much it launches."""


class _Watched(Struct):
    rate_per_s: float = 0.0
    rounds_off: int = 0  # of each turn; 0: watched all the time
    rounds_left: int = 0  # of this turn


class Budget:
    """One per collector; keys are whatever identifies a process."""

    def __init__(self, launches_per_s: float) -> None:
        self.launches_per_s = launches_per_s
        self._over: dict[object, _Watched] = {}

    def saw(self, key: object, launches: int, seconds: float) -> None:
        """A process that was watched for a round made so many launches in it."""
        rate = launches / seconds if seconds > 0 else 0.0
        if rate <= self.launches_per_s:
            self._over.pop(key, None)
            return
        rounds_off = min(MOST_ROUNDS_OFF, math.ceil(rate / self.launches_per_s) - 1)
        self._over[key] = _Watched(rate, max(1, rounds_off), max(1, rounds_off))

    def next_round(self) -> None:
        """The processes that are left alone are so for a round less."""
        for watched in self._over.values():
            watched.rounds_left -= 1

    def left_alone(self) -> set[object]:
        """The processes that are not to be watched in the coming round."""
        return {key for key, watched in self._over.items() if watched.rounds_left > 0}

    def share(self, key: object) -> float:
        """Share of the time in which a process is watched: 1 within the budget."""
        watched = self._over.get(key)
        return 1.0 if watched is None else 1 / (1 + watched.rounds_off)

    def drop(self, keep: set[object]) -> None:
        """Forget all processes but these."""
        self._over = {key: watched for key, watched in self._over.items() if key in keep}
