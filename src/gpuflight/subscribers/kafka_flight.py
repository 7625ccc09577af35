"""Rounds that are on their way to Kafka, and what librdkafka reports of their messages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from gpuflight.subscribers.kafka_errors import UNKNOWN_TOPIC
from gpuflight.subscribers.kafka_wire import Message

ANY_PARTITION = -1
"""Where the key says (RD_KAFKA_PARTITION_UA)."""
NOW = 0


class Sent(Struct, gc=False):
    """A round whose messages are on their way: how many have no report yet (negative: not all of them were handed over,
    so that it cannot arrive), until when they have to have, and the first error of one. The first is the cause; those
    after it may be consequences."""

    flight: Flight
    left: int
    deadline_s: float
    error: Any = None

    def report(self, error: Any, _message: Any) -> None:
        """Takes the delivery report of a message."""
        self.left -= 1
        if error is not None:
            self.fail(error)

    def fail(self, error: Any) -> None:
        """One of the messages has not arrived and will not."""
        self.error = self.error or error
        self.flight.failed = True
        self.flight.useless = self.flight.useless or error.fatal() or error.name() in UNKNOWN_TOPIC


class Flight:
    """Rounds that are on their way, oldest first, by one producer.

    *failed*: one of them will not arrive, so that none after it may be begun. *useless*: the producer is, either since
    its sequence of messages has a hole, or since it would remember for minutes that a topic is not there.
    """

    def __init__(self) -> None:
        self.rounds: deque[Sent] = deque()
        self.timeout_s = 0.0
        self.failed = False
        self.useless = False

    @property
    def unreported(self) -> bool:
        """Whether messages are under way."""
        return any(sent.left > 0 for sent in self.rounds)

    def take_arrived(self) -> int:
        """How many of the oldest rounds have arrived whole; they are forgotten."""
        rounds = self.rounds
        before = len(rounds)
        while rounds and not rounds[0].left and rounds[0].error is None:
            rounds.popleft()
        return before - len(rounds)


def producing(producer: Any, topic: str, poll: Callable[[float], None]) -> Callable[[Sequence[Message], Sent], bool]:
    """Hands the messages of a round to librdkafka; answers whether all of them were taken. ``poll`` takes up reports
    while its queue is full."""
    from confluent_kafka import KafkaException

    produce = producer.produce

    def run(messages: Sequence[Message], sent: Sent) -> bool:
        report = sent.report
        for message in messages:
            while True:
                try:
                    # By position: names cost a tenth of the call. on_delivery is there twice, under either name of it.
                    produce(topic, message.value, message.key, ANY_PARTITION, report, report, NOW, message.headers)
                    break
                except BufferError:  # those ahead have to go first
                    if sent.flight.failed or time.monotonic() >= sent.deadline_s:
                        sent.flight.failed = True
                        return False
                    poll(0.05)
                except KafkaException as error:
                    sent.fail(error.args[0])
                    return False
        return True

    return run
