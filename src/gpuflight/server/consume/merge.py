"""What a round that came out of the topic does to its namespace in the store.

The topic promises every round at least once, and each namespace's rounds in order; a consumer that takes over from one
that died sees some of them again. So each round is compared with the newest that the store has of its namespace, its
*head*: the store is never taken back to an older round, and a difference is applied to its own base only.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, Protocol

from msgspec import Struct

from gpuflight.errors import DeliveryError, InputError
from gpuflight.subscribers.kafka_wire import RoundMessage

Outcome = Literal["written", "duplicate", "older", "waiting", "unreadable", "refused"]
"""*written* is in the store now; *duplicate* and *older* need not be written: it, or a newer one, is in the store;
*waiting* is a difference whose base the store does not have: the namespace waits for its next whole graph;
*unreadable* is no round, whatever its headers say; *refused* is what the store will never take."""

HEADS_MAX = 10_000
"""Namespaces of which the head is remembered, so that the store is not asked before each write."""


class Head(Struct, frozen=True):
    """The newest round of a namespace."""

    instance: str
    number: int
    time_ns: int


class Store(Protocol):
    """Where the rounds of all hosts are; safe to use by several threads."""

    def head(self, namespace: str) -> Head | None:
        """The newest round of a namespace; None without any. Raises DeliveryError."""

    def write(self, message: RoundMessage) -> None:
        """Write a whole graph, or a difference whose base is the head, and then its head. Written twice it must be as
        written once. Raises DeliveryError; InputError for bytes that are no round."""

    def close(self) -> None:
        """Give back connections; the last call."""


def judge(head: Head | None, message: RoundMessage) -> Outcome:
    """What ``message`` is to a namespace with ``head``; ``written`` if it is to be written.

    Runs of one agent are told apart by their instance, and ordered by the time of their rounds, since each begins to
    number anew.
    """
    whole = message.content == "graph"
    if head is None:
        return "written" if whole else "waiting"
    if head.instance != message.instance:
        if message.time_ns <= head.time_ns:
            return "older"
        return "written" if whole else "waiting"
    if message.number <= head.number:
        return "duplicate" if message.number == head.number else "older"
    return "written" if whole or message.base == head.number else "waiting"


class Merger:
    """Takes rounds, one after the other, into the store. Of one thread; several may share a store as long as no two
    have the same namespace."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._heads: OrderedDict[str, tuple[int, Head | None]] = OrderedDict()

    def take(self, message: RoundMessage, term: int = 0) -> Outcome:
        """Write a round, if it is to be written. ``term`` numbers the time that the partition has been ours without a
        break: what another may have written since is looked up. Raises DeliveryError that is retryable; the same
        round must then be taken again."""
        namespace = message.namespace
        known = self._heads.get(namespace)
        head = known[1] if known is not None and known[0] == term else self._store.head(namespace)
        outcome = judge(head, message)
        if outcome == "written":
            self._heads.pop(namespace, None)  # until the write is known to be whole
            try:
                self._store.write(message)
            except InputError:
                outcome = "unreadable"
            except DeliveryError as error:
                if error.retryable:
                    raise
                outcome = "refused"
            else:
                head = Head(message.instance, message.number, message.time_ns)
        self._heads[namespace] = (term, head)
        self._heads.move_to_end(namespace)
        while len(self._heads) > HEADS_MAX:
            self._heads.popitem(last=False)
        return outcome
