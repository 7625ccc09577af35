"""What a round that came out of the topic does to its namespace in the store.

The topic promises every round at least once, and each namespace's rounds in order; a consumer that takes over from one
that died sees some of them again. The store knows of each namespace which round it has, takes none that is older, and
the same one again without effect. A difference is applied to its own base only: the graph that was written here before
it, or the one that the store has.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, Protocol

from gpuflight.errors import DeliveryError, InputError
from gpuflight.graph import Graph
from gpuflight.graph.codec import decode_diff, decode_document, graph_of
from gpuflight.graph.diff import apply
from gpuflight.round_documents import Head, StoredRound, stored_difference, stored_document
from gpuflight.subscribers.kafka_wire import RoundMessage
from gpuflight.subscribers.mongo_writer import Written

Outcome = Literal["written", "duplicate", "older", "waiting", "unreadable", "refused"]
"""*written* is in the store now; *duplicate* and *older* need not be written: it, or a newer one, is in the store;
*waiting* is a difference whose base the store does not have: the namespace waits for its next whole graph;
*unreadable* is no round, whatever its headers say; *refused* is what the store will never take."""


class Writer(Protocol):
    """Where the rounds of all hosts go (``subscribers.mongo_writer``), for one thread. All raise DeliveryError."""

    def open(self) -> None:
        """Connect; again: no effect."""

    def write(self, stored: StoredRound) -> Written:
        """Write a round unless it, or a newer one, is there."""

    def head(self, namespace: str) -> Head | None:
        """Which round of a namespace is there; None without any."""

    def load(self, namespace: str) -> StoredRound | None:
        """The round of a namespace that is there, with its graph; None without any. If a writer died at the round after
        it, the graph may have parts of that one already."""

    def forget(self, namespace: str) -> None:
        """Believe nothing of what is there any more: another may have written it."""

    def trial(self) -> None:
        """Show that anything can be written at all."""

    def close(self) -> None:
        """Give back connections."""


class Merger:
    """Takes rounds, one after the other, into the store. Of one thread; no two may have the same namespace.

    The last graph of each namespace is held, for the difference that comes next, up to ``max_elements`` entities and
    edges of all together; one that is not held is read from the store.
    """

    def __init__(
        self, writer: Writer, *, max_elements: int = 1_000_000, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._writer = writer
        self._max_elements = max_elements
        self._wall_ns = wall_ns
        self._held: OrderedDict[str, tuple[int, StoredRound]] = OrderedDict()  # with the term
        self._elements = 0

    def take(self, message: RoundMessage, term: int = 0) -> Outcome:
        """Write a round, if it is to be written. ``term`` numbers the time that the partition has been ours without a
        break: what was known before it may be another's by now. Raises DeliveryError: the store is at fault, not the
        round, and it must be taken again."""
        self._writer.open()
        namespace = message.namespace
        held = self._held.get(namespace)
        if held is not None and held[0] != term:
            self._drop(namespace)
            held = None
        try:
            stored = self._stored(message, None if held is None else held[1])
        except (InputError, ValueError):
            return "unreadable"
        if not isinstance(stored, StoredRound):
            return stored
        try:
            written = self._writer.write(stored)
        except DeliveryError as error:
            self._drop(namespace)  # it may be half written: the store has to be asked
            if error.retryable:
                raise
            self._writer.trial()  # raises as well if it would take nothing at all
            return "refused"
        if written.outcome == "older":
            self._drop(namespace)
            return "older"
        self._hold(stored, term)
        return "written" if written.outcome == "written" else "duplicate"

    def close(self) -> None:
        """Give back connections."""
        self._writer.close()

    def _stored(self, message: RoundMessage, before: StoredRound | None) -> StoredRound | Outcome:
        if message.content == "graph":
            parsed = decode_document(message.data)
            parsed.round = message.number
            return stored_document(message.namespace, message.instance, parsed, graph_of(parsed), message.time_ns)
        if before is None or not _is_base(before, message):
            outcome = self._without_base(message)
            if outcome is not None:
                return outcome
            before = self._writer.load(message.namespace)
            if before is None or not _is_base(before, message):
                return "waiting"
        change, line = decode_diff(message.data, before.graph)
        line.round = message.number
        return stored_difference(before, apply(change, before.graph), change, line, message.time_ns)

    def _without_base(self, message: RoundMessage) -> Outcome | None:
        """What becomes of a difference if its base is not held here; None if the store has the base."""
        head = self._writer.head(message.namespace)
        if head is None:
            return "waiting"
        bare = StoredRound(
            namespace=message.namespace,
            instance=message.instance,
            number=message.number,
            time_ns=message.time_ns,
            graph=Graph(),
        )
        why = head.refuses(bare, self._wall_ns())
        if why:
            return "duplicate" if why == "repeated" else "older"
        # Half of a newer round may be there, from a writer that died. That was this very round, since they come in
        # order: a difference says what a value becomes, so it may be applied where it was applied before.
        return None if (head.instance, head.round) == (message.instance, message.base) else "waiting"

    def _hold(self, stored: StoredRound, term: int) -> None:
        self._release(stored.namespace)
        self._held[stored.namespace] = (term, stored)
        self._elements += _size(stored)
        while self._elements > self._max_elements and len(self._held) > 1:
            self._drop(next(iter(self._held)))

    def _drop(self, namespace: str) -> None:
        self._release(namespace)
        self._writer.forget(namespace)

    def _release(self, namespace: str) -> None:
        held = self._held.pop(namespace, None)
        if held is not None:
            self._elements -= _size(held[1])


def _is_base(before: StoredRound, message: RoundMessage) -> bool:
    return before.instance == message.instance and before.number == message.base


def _size(stored: StoredRound) -> int:
    return len(stored.graph.nodes) + len(stored.graph.edges)
