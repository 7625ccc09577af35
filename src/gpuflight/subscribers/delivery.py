"""Delivery, once for all subscribers: the set of them, each with its own queue and thread (``worker``).

Publishing never waits for a subscriber, but for those with the policy ``block``, for which it waits last and not for
ever. A subscriber that hangs keeps its own thread and nothing else; when it is removed, or the set closed, it is left
behind after the deadline.
"""

from __future__ import annotations

import threading
import time

from gpuflight.errors import ConfigError, InputError
from gpuflight.rounds import Round
from gpuflight.subscribers.base import Subscriber
from gpuflight.subscribers.worker import State, SubscriberStatus, Worker

__all__ = ["CLOSE_DEADLINE_S", "State", "SubscriberSet", "SubscriberStatus", "Worker"]

CLOSE_DEADLINE_S = 5.0


class SubscriberSet:
    """All subscribers of one core. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[str, Worker] = {}
        self._closed = False

    def add(self, subscriber: Subscriber) -> None:
        """Start delivering to a subscriber. Returns at once; ``status`` tells whether it could start. Raises
        ConfigError if its label is taken."""
        with self._lock:
            if self._closed:
                raise ConfigError("no subscriber can be added: the set is closed")
            if subscriber.label in self._workers:
                raise ConfigError(f"there is already a subscriber named {subscriber.label}; names must be unique")
            self._workers[subscriber.label] = Worker(subscriber)

    def remove(self, name: str, timeout_s: float = CLOSE_DEADLINE_S, *, discard_spool: bool = False) -> bool:
        """Deliver what waits for a subscriber, then close it; True if that was done in time. What is left in a spool
        stays for the next of that name unless ``discard_spool``. Raises InputError if there is none of that name."""
        with self._lock:
            worker = self._find(name)
            del self._workers[name]
        deadline_s = time.monotonic() + timeout_s
        worker.ask_to_close(deadline_s)
        done = worker.wait_closed(deadline_s)
        if discard_spool:
            worker.discard_spool()
        return done

    def pause(self, name: str) -> None:
        """Deliver nothing to a subscriber until ``resume``. Raises InputError if there is none of that name."""
        with self._lock:
            worker = self._find(name)
        worker.pause()

    def resume(self, name: str) -> None:
        """Deliver again. Raises InputError if there is none of that name."""
        with self._lock:
            worker = self._find(name)
        worker.resume()

    def member(self, name: str) -> Subscriber:
        """The subscriber of a name. Raises InputError if there is none."""
        with self._lock:
            return self._find(name).subscriber

    def publish(self, completed: Round) -> None:
        """Offer a round to every subscriber. Waits for none, but those with the policy ``block``, all at the same time
        and after the others have it."""
        started_s = time.monotonic()
        members = self._members()
        for worker in members:
            if not worker.blocks:
                worker.offer(completed)
        for worker in members:
            if worker.blocks:
                worker.offer(completed, started_s)

    def flush(self, timeout_s: float = CLOSE_DEADLINE_S) -> bool:
        """Deliver all that waits, now; True if within ``timeout_s`` every subscriber has it or gave it up (``status``
        tells which)."""
        deadline_s = time.monotonic() + timeout_s
        workers = self._members()
        for worker in workers:
            worker.ask_to_flush(deadline_s)
        done = [worker.wait_flushed(deadline_s) for worker in workers]  # every one, not only up to the first late one
        return all(done)

    def close(self, timeout_s: float = CLOSE_DEADLINE_S) -> bool:
        """Flush and close every subscriber; True if all were done within ``timeout_s``. May be called twice. ``status``
        still answers; a round published later is counted as dropped."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            workers = list(self._workers.values())
        for worker in workers:
            worker.ask_to_close(deadline_s)
        done = [worker.wait_closed(deadline_s) for worker in workers]  # every one, not only up to the first late one
        return all(done)

    def status(self) -> list[SubscriberStatus]:
        """How each subscriber does, in the order they were added."""
        return [worker.status() for worker in self._members()]

    def names(self) -> list[str]:
        """Names of the subscribers, in the order they were added."""
        return [worker.subscriber.label for worker in self._members()]

    def __len__(self) -> int:
        return len(self._members())

    @property
    def expected_update_interval_s(self) -> float | None:
        """The shortest interval that any member asked for, s; 0 if one takes every round, None without members."""
        return min((worker.subscriber.expected_update_interval_s for worker in self._members()), default=None)

    def _find(self, name: str) -> Worker:
        try:
            return self._workers[name]
        except KeyError:
            raise InputError(
                f"there is no subscriber {name!r}; there are: {', '.join(self._workers) or 'none'}"
            ) from None

    def _members(self) -> list[Worker]:
        with self._lock:
            return list(self._workers.values())
