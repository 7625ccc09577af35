"""A Kafka producer that awaits: messages are delivered when the brokers said so, and every call has a deadline.

librdkafka connects, retries and batches in threads of its own; what it reports is taken up only by the thread that
delivers, between its own calls, so that there is no callback at any other time and no poll thread to end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from gpuflight.errors import DeliveryError, MissingExtra
from gpuflight.subscribers.kafka_errors import TOO_LARGE, Reasons, delivery_error
from gpuflight.subscribers.kafka_flight import Flight, Sent, producing
from gpuflight.subscribers.kafka_settings import (
    KafkaConnection,
    address_of,
    broker_target,
    files_of,
    librdkafka_config,
    secrets_of,
)
from gpuflight.subscribers.kafka_wire import Message
from gpuflight.subscribers.netguard import Refused, Rules, Target, check_url, resolve

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

REQUEST_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
RECHECK_S = 60.0
"""Where only some hosts may be called, the brokers that the cluster names are looked at so often."""
MESSAGE_BYTES_MAX = 1_000_000
"""Messages are not larger than this unless the settings say so, however much the broker would take."""
MESSAGE_BYTES_MIN = 2000
POLL_ROUNDS = 100
"""Reports are taken up at least so often while rounds are begun."""


class KafkaClient:
    """A producer for one topic. Used by one thread at a time. ``fixed_limit_bytes`` None asks the broker."""

    def __init__(
        self,
        connection: KafkaConnection,
        rules: Rules,
        *,
        deadline_s: float,
        compression: str = "none",
        fixed_limit_bytes: int | None = None,
    ) -> None:
        self.where = ", ".join(address_of(broker_target(broker)) for broker in connection.brokers)
        self.limit_bytes = fixed_limit_bytes or MESSAGE_BYTES_MAX
        """What a message may take."""
        self._connection = connection
        self._rules = rules
        self._deadline_s = deadline_s
        self._compression = compression
        self._fixed = fixed_limit_bytes is not None
        self._reasons = Reasons(secrets_of(connection))
        self._producer: Any = None
        self._flight = Flight()
        self._checked_s = 0.0

    def open(self) -> None:
        """Find the cluster and ask it what it takes. Raises DeliveryError."""
        try:
            import confluent_kafka.admin  # noqa: F401 - told here once, before anything else
        except ImportError as error:
            missing = MissingExtra("confluent-kafka", "kafka", "kafka")
            raise DeliveryError(str(missing), retryable=False) from error
        for path in files_of(self._connection):
            try:
                with open(path, "rb"):
                    pass
            except OSError as error:  # librdkafka would not say which
                raise DeliveryError(f"kafka: {path}: {error.strerror}", retryable=False) from error
        timeout_s = min(REQUEST_TIMEOUT_S, self._deadline_s)
        targets = [broker_target(broker) for broker in self._connection.brokers]
        self._check(targets, timeout_s)
        self._learn(timeout_s)
        self._producer = self._new_producer()

    def deliver(self, rounds: Iterable[Sequence[Message]], timeout_s: float) -> int:
        """Send the messages of one or more rounds, in order, and wait until the brokers have acknowledged them. Returns
        how many of the first rounds have arrived, at least one; raises DeliveryError if the first has not. Then no
        message is under way any more, and none can overtake a later try. Not while others are under way."""
        deadline_s = time.monotonic() + timeout_s
        arrived = 0
        try:
            left = self.begin(rounds, timeout_s)
            while left:
                more = self.settle(deadline_s - time.monotonic())
                arrived, left = arrived + more, left - more
        except DeliveryError:
            if not arrived:
                raise
        finally:
            self.recall()
        return arrived

    def begin(self, rounds: Iterable[Sequence[Message]], timeout_s: float) -> int:
        """Send the messages of one or more rounds, in order, the first while the next are being made, and do not wait.
        Returns how many of the first rounds are under way now, at least one; what becomes of them is told by
        ``settle``, within ``timeout_s`` from now. Raises DeliveryError if the first is not."""
        self._recheck()
        flight = self._flight
        if self._producer is None:
            self._producer = self._new_producer()
        if not flight.rounds:
            self._reasons.clear()
        flight.timeout_s = timeout_s
        deadline_s = time.monotonic() + timeout_s
        produce = producing(self._producer, self._connection.topic, self._poll)
        begun = flight.rounds
        count = 0
        for messages in rounds:
            sent = Sent(flight, len(messages), deadline_s)
            begun.append(sent)
            count += 1
            if flight.failed or not produce(messages, sent):
                sent.left = -1
                break
            if not count % POLL_ROUNDS:
                self._poll(0)
        return count

    @property
    def under_way(self) -> int:
        """Rounds begun and not settled."""
        return len(self._flight.rounds)

    def settle(self, wait_s: float) -> int:
        """Wait until the oldest round under way has arrived, for at most ``wait_s``. Returns how many of the oldest
        have arrived since it was asked last. Raises DeliveryError if the oldest has not and will not; then ``recall``.
        """
        flight = self._flight
        until_s = time.monotonic() + wait_s
        if flight.rounds:
            self._poll(0)
        while flight.rounds:
            arrived = flight.take_arrived()
            if arrived:
                return arrived
            oldest, now_s = flight.rounds[0], time.monotonic()
            if oldest.error is not None:
                raise self._problem(oldest.error)
            if now_s >= oldest.deadline_s:
                text = self._reasons.text or f"no acknowledgement within {flight.timeout_s:g} s"
                raise DeliveryError(f"kafka {self.where}: {text}", retryable=True)
            if now_s >= until_s:
                return 0
            self._poll(min(until_s - now_s, oldest.deadline_s - now_s, 1.0))
        return 0

    def recall(self) -> None:
        """Take back what is under way, if anything is, so that it does not overtake a later try."""
        flight = self._flight
        if self._producer is not None and (flight.unreported or flight.useless or self._reasons.fatal):
            # A producer whose sequence of messages has a hole, or that does not answer, is of no use any longer.
            self._purge(flight)
            self._discard()
        flight.rounds.clear()
        self._flight = Flight()

    def shrink(self) -> bool:
        """After a message was too large: learn what the broker takes, or guess; whether that is less than before."""
        if self._fixed:
            return False
        before = self.limit_bytes
        try:
            self._learn(min(REQUEST_TIMEOUT_S, self._deadline_s))
        except DeliveryError:
            pass  # it is tried again, and told, by the next delivery
        if self.limit_bytes >= before:
            self.limit_bytes = before // 2
        if self.limit_bytes < MESSAGE_BYTES_MIN:
            self.limit_bytes = before
            return False
        self._discard()
        return True

    def close(self) -> None:
        """Give back everything, within ``CLOSE_TIMEOUT_S``."""
        self._flight.rounds.clear()
        self._flight = Flight()
        self._discard()

    # --- messages ---

    def _purge(self, flight: Flight) -> None:
        """Take back what is still under way."""
        self._producer.purge()
        deadline_s = time.monotonic() + 2.0
        while flight.unreported and time.monotonic() < deadline_s:
            self._poll(0.05)

    def _poll(self, wait_s: float) -> None:
        """Take up what is reported. An error that ends the producer is raised by it, once; what becomes of each message
        is reported still."""
        from confluent_kafka import KafkaException

        try:
            self._producer.poll(wait_s)
        except KafkaException as error:
            self._flight.failed = self._flight.useless = True
            self._reasons.note(error.args[0])

    # --- the cluster ---

    def _learn(self, timeout_s: float) -> None:
        """Ask the cluster who its brokers are, and for the size of messages."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        held: list[Any] = []
        try:
            held.append(self._made(lambda: AdminClient(self._config())))
            metadata = self._metadata(held, timeout_s)
            self._check(_brokers_of(metadata), timeout_s)
            if not self._fixed:
                asked = self._asked_limit(held, [str(broker) for broker in metadata.brokers], timeout_s)
                self.limit_bytes = min(asked or MESSAGE_BYTES_MAX, MESSAGE_BYTES_MAX)
        except KafkaException as error:
            raise self._problem(error.args[0]) from None
        finally:
            _dispose(held)
        if self.limit_bytes < MESSAGE_BYTES_MIN:
            text = f"the topic {self._connection.topic} takes messages of at most {self.limit_bytes} bytes: too small"
            raise DeliveryError(f"kafka {self.where}: {text}", retryable=False)

    # What may have to be disposed of is handed on in a list, so that the frames of an error keep no reference to it.

    def _metadata(self, held: list[Any], timeout_s: float) -> Any:
        from confluent_kafka import KafkaException

        self._reasons.clear()
        try:
            metadata = held[0].list_topics(self._connection.topic, timeout=timeout_s)
        except KafkaException as error:
            held[0].poll(0)  # what librdkafka has to say about it
            raise self._problem(error.args[0]) from None
        known = metadata.topics.get(self._connection.topic)
        if known is not None and known.error is not None and known.error.name() == "TOPIC_AUTHORIZATION_FAILED":
            raise self._problem(known.error)
        return metadata

    def _asked_limit(self, held: list[Any], broker_ids: list[str], timeout_s: float) -> int | None:
        """What the topic takes, else what a broker does; None if neither tells."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]

        asked = [(ConfigResource(ResourceType.TOPIC, self._connection.topic), "max.message.bytes")]
        asked += [(ConfigResource(ResourceType.BROKER, broker), "message.max.bytes") for broker in broker_ids[:1]]
        for resource, name in asked:
            try:
                for answer in held[0].describe_configs([resource], request_timeout=timeout_s).values():
                    return int(answer.result(timeout_s)[name].value)
            except (KafkaException, KeyError, TypeError, ValueError, TimeoutError) as error:
                log.debug("%s of %s is not told: %s", name, resource, error)  # a right that is rarely given
        return None

    def _recheck(self) -> None:
        """Look again at the brokers that the cluster names, where not all may be called."""
        if self._rules.url_hosts is None or self._producer is None or time.monotonic() < self._checked_s + RECHECK_S:
            return
        metadata = self._metadata([self._producer], REQUEST_TIMEOUT_S)
        try:
            self._check(_brokers_of(metadata), REQUEST_TIMEOUT_S)
        except DeliveryError:
            self._flight.useless = True  # what is under way was begun before
            raise

    def _check(self, targets: list[Target], timeout_s: float) -> None:
        """Raises DeliveryError unless each may be called, at every address that its name has now."""

        def run() -> None:
            for target in targets:
                check_url(f"kafka://{address_of(target)}", self._rules)
                resolve(target, self._rules)

        try:
            within(run, timeout_s)
        except Refused as error:
            raise DeliveryError(f"kafka {self.where}: {error}", retryable=False) from error
        except TimeoutError as error:
            raise DeliveryError(f"kafka {self.where}: names are not resolved in time", retryable=True) from error
        except OSError as error:
            text = ", ".join(target.host for target in targets)
            raise DeliveryError(f"kafka {text}: {error.strerror or error}", retryable=True) from error
        self._checked_s = time.monotonic()

    # --- the producer ---

    def _config(self) -> dict[str, Any]:
        return {
            **librdkafka_config(self._connection),
            "log_level": 7 if "debug" in self._connection.client else 6,
            "logger": self._reasons,
            "error_cb": self._reasons.note,
        }

    def _new_producer(self) -> Any:
        from confluent_kafka import Producer

        # librdkafka is not to give up before we do: it does so message by message, and one could arrive without the one
        # before it.
        timeout_ms = int(self._deadline_s * 1000)
        config = {
            "partitioner": "murmur2_random",  # as the Java clients choose
            "linger.ms": 1,  # else each of many small rounds is a request of its own
            **self._config(),
            "acks": "all",
            "enable.idempotence": True,
            # None after one that is refused, however long it takes us to hear of it; the producer then ends.
            "enable.gapless.guarantee": True,
            "compression.type": self._compression,
            # Also the limit of a batch, which is what a broker compares with its own.
            "message.max.bytes": self.limit_bytes,
            "message.timeout.ms": 2 * timeout_ms + 10_000,
            # How long a topic may be unknown, such as one that is just being made.
            "topic.metadata.propagation.max.ms": min(10_000, timeout_ms // 2),
        }
        return self._made(lambda: Producer(config))

    def _made(self, make: Callable[[], Answer]) -> Answer:
        from confluent_kafka import KafkaException

        try:
            return make()
        except KafkaException as error:
            # Nothing was called yet: what it does not take are the settings, or the files that they name.
            text = self._reasons.clean(error.args[0].str())
            raise DeliveryError(f"kafka: {text}", retryable=False) from None

    def _discard(self) -> None:
        if self._producer is not None:
            held, self._producer = [self._producer], None
            held[0].purge()
            _dispose(held)

    def _problem(self, error: Any) -> DeliveryError:
        problem = delivery_error(error, self.where, self._connection.topic, self._reasons, limit_bytes=self.limit_bytes)
        return MessageTooLarge(str(problem), retryable=False) if error.name() in TOO_LARGE else problem


class MessageTooLarge(DeliveryError):
    """A message is larger than the broker takes."""


def within(function: Callable[[], None], timeout_s: float) -> None:
    """Call something that knows no deadline, in a thread of its own. Raises what it raises, and TimeoutError; then the
    thread is left behind."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            problems.append(error)

    thread = threading.Thread(target=run, name="gpuflight-kafka-call", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise TimeoutError("the deadline has passed")
    if problems:
        raise problems[0]


def _brokers_of(metadata: Any) -> list[Target]:
    """The brokers that a cluster names."""
    return [Target("kafka", broker.host.lower(), broker.port, "/") for broker in metadata.brokers.values()]


def _dispose(held: list[Any]) -> None:
    """End a client, which waits for its threads: for a while only. ``held`` has the last reference to it."""
    if not held:
        return
    try:
        within(held.clear, CLOSE_TIMEOUT_S)
    except TimeoutError:
        log.warning("a Kafka client does not end and is left behind")
