"""Rounds as an agent sends them, and a store in memory: for the consumer's tests."""

from __future__ import annotations

import random
import threading
import time
from typing import Literal

from gpuflight.errors import DeliveryError
from gpuflight.graph import Graph, nodes
from gpuflight.graph.diff import Diff, diff
from gpuflight.round_codec import encode_round, encode_round_diff
from gpuflight.round_documents import Head, StoredRound
from gpuflight.rounds import Environment, Round
from gpuflight.subscribers.kafka_wire import Message, cut, envelope
from gpuflight.subscribers.mongo_writer import Written

Failure = Literal["before", "half", "after"]


class StoreDown(DeliveryError):
    """The store did not answer."""


def round_of(number: int, graph: Graph, before: Graph | None = None, time_ns: int = 0) -> Round:
    """A round with this graph."""
    return Round(
        number=number,
        time_ns=time_ns or number,
        duration_s=0.1,
        graph=graph,
        diff=Diff() if before is None else diff(before, graph),
        coverage=[],
        env=Environment(hostname="box"),
    )


def message(
    namespace: str, number: int, *, parts: int = 1, instance: str = "i", base: int | None = None, time_ns: int = 0
) -> list[Message]:
    """A round, in so many parts: one process that says the round's number."""

    def graph(of: int) -> Graph:
        return Graph([nodes.Process(pid=1, start=1, attributes={"round": of, "padding": "x" * 600 * (parts - 1)})])

    whole = graph(number)
    done = round_of(number, whole, None if base is None else graph(base), time_ns)
    data = encode_round(done) if base is None else encode_round_diff(done)
    most = 100_000
    while len(made := cut_round(data, namespace, done, instance, base, most)) != parts:
        most -= 20
    return made


def cut_round(
    data: bytes, namespace: str, done: Round, instance: str, base: int | None, max_message_bytes: int
) -> list[Message]:
    """The messages of a round's bytes."""
    around = envelope(namespace, instance, "graph" if base is None else "diff", "none", max_message_bytes)
    return cut(data, around, done.number, done.time_ns, base)


class MemoryStore:
    """What ``subscribers.mongo_writer`` keeps in a database, for any number of writers. ``truth``: the graphs that
    rounds really have; one that is written otherwise is an error."""

    def __init__(self, truth: dict[tuple[str, str, int], Graph] | None = None) -> None:
        self.truth = truth or {}
        self.heads: dict[str, Head] = {}
        self.graphs: dict[str, Graph] = {}
        self.order: list[tuple[str, str, int]] = []
        self.refuse = False
        self.up = threading.Event()
        self.up.set()
        self.open_count = 0
        self.failures: list[Failure] = []
        self.dice = random.Random(1)

    def written(self, namespace: str) -> list[tuple[str, int]]:
        """Instance and number of each round of a namespace that was written, in order."""
        return [(instance, number) for name, instance, number in self.order if name == namespace]

    def writer(self) -> MemoryWriter:
        """One more writer."""
        return MemoryWriter(self)


class MemoryWriter:
    """One writer of a MemoryStore."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.opened = False

    def open(self) -> None:
        """As a writer."""
        self._answer()
        if not self.opened:
            self.opened = True
            self.store.open_count += 1

    def head(self, namespace: str) -> Head | None:
        """As a writer."""
        self._answer()
        return self.store.heads.get(namespace)

    def load(self, namespace: str) -> StoredRound | None:
        """As a writer."""
        head = self.head(namespace)
        if head is None:
            return None
        return StoredRound(
            namespace=namespace,
            instance=head.instance,
            number=head.round,
            time_ns=head.time_ns,
            graph=self.store.graphs[namespace],
        )

    def forget(self, namespace: str) -> None:
        """As a writer."""

    def trial(self) -> None:
        """As a writer."""
        self._answer()

    def write(self, stored: StoredRound) -> Written:
        """As a writer."""
        self._answer()
        store, namespace = self.store, stored.namespace
        if store.refuse:
            raise DeliveryError("too large", retryable=False)
        failure = store.failures.pop() if store.failures else None
        if failure == "before":
            raise StoreDown("down", retryable=True)
        head = store.heads.get(namespace) or Head(namespace=namespace)
        why = head.refuses(stored, time.time_ns())
        if why:
            return Written("repeated" if why == "repeated" else "older")
        name = (namespace, stored.instance, stored.number)
        assert name not in store.order, "written twice"
        if store.truth:
            assert stored.graph == store.truth[name], "a graph that the round does not have"
        seq = head.seq + 1
        if failure == "half" and head.complete_seq:
            store.graphs[namespace] = self._half(store.graphs[namespace], stored.graph)
            store.heads[namespace] = _changed(head, seq=seq)
            raise StoreDown("the connection broke", retryable=True)
        store.graphs[namespace] = stored.graph
        past = [*head.past, head.instance] if head.instance not in ("", stored.instance) else head.past
        store.heads[namespace] = Head(
            namespace=namespace,
            seq=seq,
            complete_seq=seq,
            instance=stored.instance,
            round=stored.number,
            time_ns=stored.time_ns,
            past=past,
        )
        store.order.append(name)
        if failure == "after":
            raise StoreDown("the answer was lost", retryable=True)
        return Written("written")

    def close(self) -> None:
        """As a writer."""
        if self.opened:
            self.store.open_count -= 1
        self.opened = False

    def _half(self, old: Graph, new: Graph) -> Graph:
        merged = dict(old.nodes)
        for id_ in {**old.nodes, **new.nodes}:
            if self.store.dice.random() < 0.5:
                if id_ in new.nodes:
                    merged[id_] = new.nodes[id_]
                else:
                    merged.pop(id_, None)
        return Graph(merged.values())

    def _answer(self) -> None:
        if not self.store.up.is_set():
            raise StoreDown("down", retryable=True)


def _changed(head: Head, seq: int) -> Head:
    from msgspec.structs import replace

    return replace(head, seq=seq)
