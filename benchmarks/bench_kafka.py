"""The Kafka subscriber against a bare confluent-kafka produce loop of the same bytes.

    python benchmarks/bench_kafka.py [--mb 30] [--repeats 5] [--broker HOST:PORT]

Rounds of 1,000 nodes and 4,000 edges, and of 10,000 and 40,000, as whole graphs and as differences (of 2 % of the
elements, with values as processes and connections have them), packed beforehand (encoding and compressing is the
round's own cost, and is measured by bench_publish). A third line has differences of rounds in which next to nothing
happened, a few hundred bytes each: without a goal, since there the numbering and labelling of a round, which a bare
loop does without, is most of what is sent. Both sides send the same messages
with the same settings of librdkafka (acks=all, idempotent) to the same topic, alternating, and end when the brokers
have acknowledged every one. The bare loop has its messages ready, headers included, and is told of each by a callback.

*sink* is what delivers in the product, with its settings as they are by default: queue, stream, cutting into messages,
the client; rounds count one by one when they are acknowledged. The rounds wait in memory. Goal: at least 0.7 times the
rate of the bare loop, wall clock, median of the repeats. CPU time is that of the process, with librdkafka's threads.

*from disk* is all of it after an outage: rounds wait in the SQLite spool, are read, sent and removed.

Without --broker an Apache Kafka is started as in the tests.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpuflight.errors import DeliveryError
from gpuflight.graph import Graph, edges, nodes
from gpuflight.graph.diff import diff
from gpuflight.rounds import Environment, Round
from gpuflight.subscribers.base import Parcel
from gpuflight.subscribers.delivery import SubscriberSet
from gpuflight.subscribers.kafka import Kafka, KafkaSettings
from gpuflight.subscribers.kafka_wire import Message
from gpuflight.subscribers.queue import DeliveryQueue
from gpuflight.subscribers.spool import Spool, spool_path
from gpuflight.subscribers.stream import Stream

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.services.kafka import new_broker

GOAL = 0.7
SHAPES = ((1_000, 4_000), (10_000, 40_000))


class InMemory(Spool):
    """Rounds that are read and forgotten at no cost."""

    def __init__(self, parcels: list[Parcel]) -> None:
        super().__init__("memory")
        self._parcels = parcels

    def read_all(self, parcel_ids: Sequence[int]) -> list[Parcel]:
        return [self._parcels[parcel_id] for parcel_id in parcel_ids]


class Backlog:
    """Does for a stream what the worker does, with a queue as the worker makes it, but for the lock."""

    def __init__(self, sink: Kafka, parcels: list[Parcel]) -> None:
        self._sink = sink
        self._parcels = parcels
        settings = sink.settings
        self.queue: DeliveryQueue[int] = DeliveryQueue(
            policy="spool", max_items=settings.max_items, max_bytes=settings.max_bytes
        )
        for number, parcel in enumerate(parcels):
            self.queue.recover(number, len(parcel.data), 0.0)

    def deliver(self) -> None:
        stream = Stream(self._sink, InMemory(self._parcels), self)
        while (first := self.queue.take(0.0)) is not None:
            stream.run(first)
            self.queue.take_back()

    def more(self, max_items: int, max_bytes: int) -> list[int]:
        return self.queue.take_more(max_items, max_bytes)

    def settled(self, arrived: int, error: DeliveryError | None) -> None:
        if error is not None:
            raise error
        self.queue.delivered(arrived)
        self.queue.released.clear()

    def ended(self) -> bool:
        return False

    def call(self, what: str, function: Callable[[], None]) -> DeliveryError | None:
        function()
        return None


def make_rounds(nodes_count: int, edges_count: int, rounds_count: int, changed: float) -> list[Round]:
    """Rounds of a host: processes that use CPU and memory, connections that carry bytes; ``changed`` of them each."""
    draw = random.Random(1)

    def process(pid: int) -> nodes.Process:
        metrics = {"cpu_pct": round(draw.random() * 100, 1), "rss_bytes": draw.randrange(1 << 34) & ~4095}
        return nodes.Process(pid=pid, start=pid * 7, attributes={"name": f"worker-{pid}"}, metrics=metrics)

    def link(at: int) -> edges.SendTo:
        metrics = {"bytes_count": draw.randrange(1 << 36), "bytes_per_s": round(draw.random() * 1e8, 1)}
        source, target = at % nodes_count + 1, (at * 7 + at // nodes_count + 1) % nodes_count + 1
        return edges.SendTo(
            f"Process(pid={source},start={source * 7})", f"Process(pid={target},start={target * 7})", {}, metrics
        )

    members = [process(pid) for pid in range(1, nodes_count + 1)]
    links = [link(at) for at in range(edges_count)]
    rounds, before = [], Graph()
    for number in range(1, rounds_count + 1):
        for at in draw.sample(range(nodes_count), max(1, int(nodes_count * changed))):
            members[at] = process(at + 1)
        for at in draw.sample(range(edges_count), int(edges_count * changed)):
            links[at] = link(at)
        graph = Graph(members, links)
        rounds.append(
            Round(
                number=number, time_ns=time.time_ns(), duration_s=0.1, graph=graph, diff=diff(before, graph),
                coverage=[], env=Environment(hostname="bench"),
            )
        )  # fmt: skip
        before = graph
    return rounds


def bare(producer: Any, topic: str, messages: list[Message]) -> None:
    """A produce loop, until all are acknowledged."""
    failed: list[Any] = []

    def report(error: Any, _message: Any) -> None:
        if error is not None:
            failed.append(error)

    for message in messages:
        while True:
            try:
                producer.produce(topic, message.value, message.key, headers=message.headers, on_delivery=report)
                break
            except BufferError:
                producer.poll(0.05)
        producer.poll(0)
    left = producer.flush(120.0)
    if left or failed:
        raise RuntimeError(f"the bare loop: {left} left, {failed[:1]}")


def measured(function: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and seconds of CPU, that it takes."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - began_s, time.process_time() - began_cpu_s


def from_disk(settings: KafkaSettings, parcels: list[Parcel]) -> float:
    """Rounds/s of a subscriber that finds so many in its spool, until all are sent and removed."""
    assert settings.spool_folder is not None
    spool = Spool(spool_path(settings.spool_folder, "kafka"))
    spool.open()
    spool._open().execute("PRAGMA synchronous = OFF")  # filling it is not what is measured
    for parcel in parcels:
        spool.append(parcel)
    spool.close()
    members = SubscriberSet()
    members.add(Kafka(settings))
    while not members.status()[0].statistics.sent:
        time.sleep(0.001)
    before, began_s = members.status()[0].statistics.sent, time.perf_counter()
    if not members.flush(120.0):
        raise RuntimeError(f"not delivered: {members.status()}")
    took_s = time.perf_counter() - began_s
    members.close()
    spool.open()
    left = spool.inventory()
    spool.close()
    if left:
        raise RuntimeError(f"{len(left)} rounds were delivered and are still there")
    return (len(parcels) - before) / took_s


def main() -> int:
    """Print figures; exit code 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=30.0, help="size of each measurement, at most")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--broker", default=None)
    arguments = parser.parse_args()
    missed = False
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address = arguments.broker
        if address is None:
            broker = new_broker(folder / "kafka")
            stack.callback(broker.stop)
            broker.start()
            address = broker.address
        for nodes_count, edges_count in SHAPES:
            for content, changed in (("graph", 0.02), ("diff", 0.02), ("diff", 0.0002)):
                rounds = make_rounds(nodes_count, edges_count, 4, changed)
                topic = f"bench-{nodes_count}-{content}-{changed:g}"
                goal = GOAL if changed > 0.001 else 0.0
                settings = KafkaSettings(
                    brokers=[address], topic=topic, content=content, policy="spool",
                    spool_folder=str(folder / topic),
                )  # fmt: skip
                sink = Kafka(settings)
                sink.start()
                stack.callback(sink.close)
                packed = [sink.pack(completed, completed.number - 1) for completed in rounds[1:]]
                each_bytes = len(packed[0].data)
                count = max(20, min(30_000, int(arguments.mb * 1e6 / each_bytes)))
                parcels = (packed * (count // len(packed) + 1))[:count]
                messages = [message for parcel in parcels for message in sink._cut(parcel, sink._client.limit_bytes)]
                producer = sink._client._new_producer()
                taken: list[list[tuple[float, float]]] = [[], []]
                for repeat in range(arguments.repeats + 1):
                    for side in (0, 1) if repeat % 2 else (1, 0):
                        one = (
                            measured(Backlog(sink, parcels).deliver)
                            if side
                            else measured(lambda: bare(producer, topic, messages))  # noqa: B023 - called at once
                        )
                        if repeat:  # the first is for warming up
                            taken[side].append(one)
                wall, cpu = (
                    statistics.median(a[which] / b[which] for a, b in zip(*taken, strict=True)) for which in (0, 1)
                )
                missed = missed or wall < goal
                rates = [count / statistics.median(wall_s for wall_s, _ in side) for side in taken]
                print(
                    f"{nodes_count:6} nodes {edges_count:6} edges {content:5} {each_bytes / 1e3:6.1f} kB in"
                    f" {len(messages) / count:.1f} messages: bare {rates[0]:7.0f} rounds/s, sink {rates[1]:7.0f}"
                    f" rounds/s, ratio {wall:.2f} ({f'goal {goal}' if goal else 'no goal'}), of CPU {cpu:.2f};"
                    f" from disk {from_disk(settings, parcels):6.0f} rounds/s",
                    flush=True,
                )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
