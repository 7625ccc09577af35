"""The consumer between a real broker and a real database: what is written, what is committed, what trouble costs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.topic import cut_round, message, round_of
from tests.services.kafka import Broker
from tests.services.mongodb import MongoServer, new_database

from gpuflight.graph import Graph, edges, nodes
from gpuflight.round_codec import encode_round, encode_round_diff
from gpuflight.server.consume.figures import Figures
from gpuflight.server.consume.loop import Loop
from gpuflight.server.consume.make import make_loop
from gpuflight.server.consume.settings import ConsumeSettings
from gpuflight.server.consume.store import FleetWriter
from gpuflight.subscribers.kafka_wire import Message

PATIENCE_S = 60.0


class DurableServer(MongoServer):
    """One that has on disk what it says is in its journal, as mongod does."""

    def argv(self) -> list[str]:
        found = super().argv()
        return found if found[0] == "mongod" else [*found, "--sync-on-commit"]


class Rig:
    """A topic, a database, and the consumers of a test."""

    def __init__(self, broker: Broker, mongodb: MongoServer, topic: str, partitions: int = 4) -> None:
        from confluent_kafka import Producer

        self.broker, self.mongodb, self.topic = broker, mongodb, topic
        self.database = new_database()
        self.group = f"fleet-{uuid.uuid4().hex}"
        self.loops: list[Loop] = []
        broker.create_topic(topic, partitions, max_message_bytes=2_000_000)
        self.producer = Producer(
            {"bootstrap.servers": broker.address, "message.max.bytes": 2_000_000, "enable.idempotence": True}
        )

    def settings(self, **changes: Any) -> ConsumeSettings:
        values: dict[str, Any] = {
            "brokers": [self.broker.address],
            "topic": self.topic,
            "group": self.group,
            "mongodb": {"uri": self.mongodb.uri, "database": self.database, "timeout_s": 2.0},
            "client": {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500, "reconnect.backoff.max.ms": 500},
            "retry_first_s": 0.1,
            "retry_max_s": 0.5,
        }
        return ConsumeSettings(**{**values, **changes})

    def consume(self, **changes: Any) -> Loop:
        loop = make_loop(self.settings(**changes))
        self.loops.append(loop)
        loop.start()
        return loop

    def send(self, *parts: Message, partition: int | None = None) -> None:
        for part in parts:
            where = {} if partition is None else {"partition": partition}
            self.producer.produce(self.topic, value=part.value, key=part.key, headers=list(part.headers), **where)
        assert self.producer.flush(PATIENCE_S) == 0

    def when(self, loop: Loop, holds: Callable[[Figures], bool]) -> Figures:
        end_s = time.monotonic() + PATIENCE_S
        while not holds(loop.figures()):
            assert time.monotonic() < end_s, loop.figures()
            time.sleep(0.02)
        return loop.figures()

    def stored(self, namespace: str) -> tuple[str, int, Graph] | None:
        writer = FleetWriter(self.settings().mongodb.options(), self.database)
        writer.open()
        try:
            found = writer.load(namespace)
        finally:
            writer.close()
        return None if found is None else (found.instance, found.number, found.graph)

    def close(self) -> None:
        for loop in self.loops:
            loop.stop(20.0)
        with self.mongodb.client() as client:
            client.drop_database(self.database)


@pytest.fixture
def rig(kafka_broker: Broker, mongodb: MongoServer, topic: str) -> Iterator[Rig]:
    made = Rig(kafka_broker, mongodb, topic)
    yield made
    made.close()


def graphs(count: int) -> list[Graph]:
    """A machine in which something changes each round."""
    found = []
    for number in range(count):
        some = [nodes.Process(pid=pid, start=1, metrics={"cpu_pct": float(pid == number)}) for pid in range(1, 9)]
        some.append(nodes.Process(pid=100 + number, start=2, attributes={"name": f"job.{number}", "$x": 1}))
        found.append(Graph(some, [edges.Own(some[0].id, some[-1].id)]))
    return found


def flow(namespace: str, pictures: list[Graph], max_message_bytes: int = 1500) -> list[Message]:
    """A whole round, then differences, in several parts each."""
    sent: list[Message] = []
    for number, graph in enumerate(pictures, start=1):
        base = None if number == 1 else number - 1
        done = round_of(number, graph, None if base is None else pictures[number - 2], time_ns=number)
        data = encode_round(done) if base is None else encode_round_diff(done)
        sent += cut_round(data, namespace, done, "run", base, max_message_bytes)
    return sent


def test_graphs_and_differences_arrive_and_are_committed(rig: Rig) -> None:
    pictures = graphs(3)
    names = [f"host-{index}" for index in range(4)]
    for name in names:
        rig.send(*flow(name, pictures))
    loop = rig.consume()
    found = rig.when(loop, lambda figures: figures.outcomes["written"] == 12 and figures.lag == 0)
    assert len(found.partitions) == 4 and found.connected and not any(found.skipped.values())
    for name in names:
        assert rig.stored(name) == ("run", 3, pictures[-1])
    assert loop.stop(20.0)
    # Another of the group goes on where this one ended, and knows the base of the next difference.
    again = rig.consume()
    pictures += graphs(5)[3:]
    rig.send(*flow(names[0], pictures)[len(flow(names[0], pictures[:3])) :])
    found = rig.when(again, lambda figures: figures.outcomes["written"] == 2 and figures.lag == 0)
    assert found.rounds == 2, "what was committed is not read again"
    assert rig.stored(names[0]) == ("run", 5, pictures[-1])


def test_poison_in_the_topic_is_passed_over(rig: Rig) -> None:
    good = message("a", 1)
    poison = [
        Message(b"a", [], b"\x00\xff"),
        Message(b"a", [("gpuflight", b"2")], b"{}"),
        Message(b"a", good[0].headers, b"{}"),
        Message(b"", [("gpuflight", b"1")], b""),
        Message(b"a", good[0].headers, b"x" * 1_500_000),
        *message("b/c", 1),
    ]
    rig.send(*poison, *good, partition=2)
    loop = rig.consume(max_message_bytes=1_000_000)
    found = rig.when(loop, lambda figures: figures.outcomes["written"] == 1 and figures.lag == 0)
    assert found.skipped == {
        "foreign": 2, "malformed": 1, "corrupt": 1, "oversized": 1, "namespace": 1, "unfinished": 0,
    }  # fmt: skip


def test_members_of_a_group_share_the_partitions_and_lose_nothing_as_they_come_and_go(rig: Rig) -> None:
    names = [f"host-{index}" for index in range(5)]
    pictures = graphs(6)
    flows = {name: flow(name, pictures) for name in names}
    first = rig.consume()
    rig.when(first, lambda figures: len(figures.partitions) == 4)
    third = len(flows[names[0]]) // 3
    for name in names:
        rig.send(*flows[name][:third])
    second = rig.consume()
    rig.when(second, lambda figures: len(figures.partitions) == 2)
    rig.when(first, lambda figures: len(figures.partitions) == 2)
    for name in names:
        rig.send(*flows[name][third : 2 * third])
    assert first.stop(20.0)
    for name in names:
        rig.send(*flows[name][2 * third :])
    rig.when(second, lambda figures: len(figures.partitions) == 4 and figures.lag == 0)
    for name in names:
        assert rig.stored(name) == ("run", 6, pictures[-1]), name
    with rig.mongodb.client() as client:
        assert client[rig.database]["rounds"].count_documents({}) == 5 * 6, "every round, not only the newest"


def test_a_database_that_dies_costs_nothing_but_time(kafka_broker: Broker, tmp_path: Path, topic: str) -> None:
    server = DurableServer(tmp_path / "mongodb")
    server.start()
    rig = Rig(kafka_broker, server, topic, partitions=1)
    try:
        pictures = graphs(12)
        sent = flow("a", pictures)
        loop = rig.consume(max_queue_rounds=3)
        rig.send(*sent[: len(sent) // 2])
        rig.when(loop, lambda figures: figures.outcomes["written"] > 2)
        server.kill()
        rig.send(*sent[len(sent) // 2 :])
        found = rig.when(loop, lambda figures: figures.paused and bool(figures.store_error) and bool(figures.lag))
        assert found.connected and found.queued_rounds <= 4
        server.start()
        rig.when(loop, lambda figures: sum(figures.outcomes.values()) == 12 and figures.lag == 0)
        assert rig.stored("a") == ("run", 12, pictures[-1]), loop.figures()
        found = rig.when(loop, lambda figures: not figures.store_error and not figures.paused)
        assert found.outcomes["written"] + found.outcomes["duplicate"] == 12
    finally:
        rig.close()
        server.kill()
        server.release()


def test_a_topic_that_is_not_there_yet_is_waited_for(kafka_broker: Broker, mongodb: MongoServer, topic: str) -> None:
    rig = Rig(kafka_broker, mongodb, topic, partitions=1)
    try:
        rig.topic = f"{topic}-later"
        loop = rig.consume(client={"session.timeout.ms": 6000, "topic.metadata.refresh.interval.ms": 500})
        found = rig.when(loop, lambda figures: bool(figures.client_error))
        assert not found.connected and rig.topic in found.client_error
        kafka_broker.create_topic(rig.topic, 1)
        rig.send(*message("a", 1))
        rig.when(loop, lambda figures: figures.outcomes["written"] == 1 and figures.connected)
    finally:
        rig.close()


def test_a_broker_that_dies_is_waited_for(make_broker: Callable[[], Broker], mongodb: MongoServer, topic: str) -> None:
    broker = make_broker()
    if not broker.keeps_data:
        pytest.skip("this broker forgets everything when it is killed")
    rig = Rig(broker, mongodb, topic, partitions=2)
    try:
        pictures = graphs(6)
        sent = flow("a", pictures)
        loop = rig.consume()
        rig.send(*sent[: len(sent) // 2])
        rig.when(loop, lambda figures: figures.outcomes["written"] > 1)
        broker.kill()
        found = rig.when(loop, lambda figures: not figures.connected)
        assert broker.address in found.client_error
        broker.start()
        rig.send(*sent[len(sent) // 2 :])
        rig.when(loop, lambda figures: figures.connected and figures.lag == 0 and figures.outcomes["written"] == 6)
        assert rig.stored("a") == ("run", 6, pictures[-1])
    finally:
        rig.close()
