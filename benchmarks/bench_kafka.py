"""The Kafka subscriber against a bare confluent-kafka produce loop of the same bytes.

    python benchmarks/bench_kafka.py [--mb 60] [--repeats 5] [--broker HOST:PORT]

Rounds of 1,000 nodes and 4,000 edges, and of 10,000 and 40,000, as whole graphs and as differences, packed beforehand
(encoding and compressing is the round's own cost, and is measured by bench_publish). Both sides send the same messages
with the same settings of librdkafka (acks=all, idempotent) to the same topic, alternating; the bare loop waits once, at
the end. The sink takes them from a spool as after an outage, several under way at a time, and each counts only when the
brokers have acknowledged it. Goal for whole graphs: at least 0.7 times the rate of the bare loop (median of the
repeats); differences of some hundred bytes cost little more than their headers on both sides. Without --broker an
Apache Kafka is started as in the tests.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpuflight.subscribers.base import Parcel
from gpuflight.subscribers.kafka import Kafka, KafkaSettings
from gpuflight.subscribers.kafka_wire import Message

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.bench_publish import make_rounds
from tests.services.kafka import new_broker

GOAL = 0.7
SHAPES = ((1_000, 4_000), (10_000, 40_000))


def bare(producer: Any, topic: str, messages: list[Message]) -> float:
    """Seconds that a produce loop takes, until all are acknowledged."""
    failed: list[Any] = []

    def report(error: Any, _message: Any) -> None:
        if error is not None:
            failed.append(error)

    began_s = time.perf_counter()
    for message in messages:
        while True:
            try:
                producer.produce(topic, message.value, message.key, headers=message.headers, on_delivery=report)
                break
            except BufferError:
                producer.poll(0.05)
        producer.poll(0)
    left = producer.flush(120.0)
    took_s = time.perf_counter() - began_s
    if left or failed:
        raise RuntimeError(f"the bare loop: {left} left, {failed[:1]}")
    return took_s


def by_sink(sink: Kafka, parcels: list[Parcel]) -> float:
    """Seconds that the subscriber takes for the same."""
    began_s = time.perf_counter()
    done = 0
    while done < len(parcels):
        done += sink.send_batch(parcels[done : done + sink.batch_items])
    return time.perf_counter() - began_s


def main() -> int:
    """Print figures; exit code 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=60.0, help="size of each measurement")
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
            rounds = make_rounds(nodes_count, edges_count, 4)
            for content in ("graph", "diff"):
                topic = f"bench-{nodes_count}-{content}"
                sink = Kafka(KafkaSettings(brokers=[address], topic=topic, content=content))
                sink.start()
                stack.callback(sink.close)
                packed = [sink.pack(completed, completed.number - 1) for completed in rounds[1:]]
                each_bytes = len(packed[0].data)
                count = max(20, min(5000, int(arguments.mb * 1e6 / each_bytes)))
                parcels = (packed * (count // len(packed) + 1))[:count]
                messages = [
                    message for parcel in parcels for message in sink._cut(parcel, sink._client.limit_bytes, False)
                ]
                producer = sink._client._new_producer()
                taken: tuple[list[float], list[float]] = ([], [])
                for repeat in range(arguments.repeats + 1):
                    for side in (0, 1) if repeat % 2 else (1, 0):
                        took_s = by_sink(sink, parcels) if side else bare(producer, topic, messages)
                        if repeat:  # the first is for warming up
                            taken[side].append(took_s)
                bare_s, sink_s = (statistics.median(side) for side in taken)
                ratio = statistics.median(one / other for one, other in zip(*taken, strict=True))
                missed = missed or (content == "graph" and ratio < GOAL)
                print(
                    f"{nodes_count:6} nodes {edges_count:6} edges {content:5} {each_bytes / 1e3:8.1f} kB in"
                    f" {len(messages) / count:4.1f} messages: sink {count / sink_s:7.0f} rounds/s, bare"
                    f" {count / bare_s:7.0f} rounds/s, ratio {ratio:.2f} (goal {GOAL})"
                )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
