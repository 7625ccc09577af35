"""The Kafka subscriber against a real broker: what arrives, in which order, and what each trouble is told as."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.services.kafka import STRANGER, WRITER, Broker, KafkaBroker

from gpuflight.errors import DeliveryError
from gpuflight.graph import Graph, nodes
from gpuflight.graph.codec import decode_diff, decode_graph
from gpuflight.graph.diff import apply, diff
from gpuflight.rounds import Environment, Round
from gpuflight.subscribers.base import INSTANCE_ID
from gpuflight.subscribers.delivery import SubscriberSet
from gpuflight.subscribers.kafka import Kafka, KafkaSettings
from gpuflight.subscribers.kafka_wire import Assembler, RoundMessage
from gpuflight.subscribers.netguard import Rules

LONG_S = 60.0


def make_rounds(count: int, width: int = 3) -> list[Round]:
    rounds, before = [], Graph()
    for number in range(1, count + 1):
        graph = Graph(
            [nodes.Process(pid=1 + number, start=2)]
            + [nodes.Process(pid=10_000 + n, start=1, attributes={"name": os.urandom(50).hex()}) for n in range(width)]
        )
        rounds.append(
            Round(
                number=number,
                time_ns=time.time_ns(),
                duration_s=0.1,
                graph=graph,
                diff=diff(before, graph),
                coverage=[],
                env=Environment(hostname="h"),
            )
        )
        before = graph
    return rounds


@pytest.fixture
def make_sink(kafka_broker: Broker, topic: str) -> Iterator[Callable[..., Kafka]]:
    """A sink that has been started, on the shared broker unless said otherwise."""
    made: list[Kafka] = []

    def make(start: bool = True, rules: Rules | None = None, **values: Any) -> Kafka:
        settings: dict[str, Any] = {
            "brokers": [kafka_broker.address],
            "topic": topic,
            "namespace": "node1",
            "deliver_deadline_s": 20.0,
        }
        sink = Kafka(KafkaSettings(**{**settings, **values}))
        sink.rules = rules
        made.append(sink)
        if start:
            sink.start()
        return sink

    yield make
    for sink in made:
        sink.close()


def assembled(messages: list[Any]) -> tuple[list[RoundMessage], Assembler]:
    assembler = Assembler()
    found = [assembler.add(m.key(), m.headers(), m.value()) for m in messages]
    return [one for one in found if one is not None], assembler


def needs_kafka(broker: Broker) -> KafkaBroker:
    if not isinstance(broker, KafkaBroker):
        pytest.skip("needs Apache Kafka (java, mvn); this is tansu")
    return broker


# --- what arrives ---


@pytest.mark.parametrize("encoding", ["none", "gzip", "zstd"])
@pytest.mark.parametrize("message_compression", ["none", "lz4"])
def test_rounds_arrive_whole_and_in_order(
    kafka_broker: Broker, topic: str, make_sink: Callable[..., Kafka], encoding: str, message_compression: str
) -> None:
    rounds = make_rounds(20)
    sink = make_sink(compression=encoding, message_compression=message_compression)
    for completed in rounds:
        sink.deliver(completed)
    found, _ = assembled(kafka_broker.messages(topic))
    assert [(one.namespace, one.instance, one.number) for one in found] == [
        ("node1", INSTANCE_ID, n) for n in range(1, 21)
    ]
    assert [one.time_ns for one in found] == [one.time_ns for one in rounds]
    assert all(decode_graph(one.data) == completed.graph for one, completed in zip(found, rounds, strict=True))


def test_differences_with_whole_rounds_first_after_a_gap_and_now_and_then(
    kafka_broker: Broker, topic: str, make_sink: Callable[..., Kafka]
) -> None:
    rounds = make_rounds(12)
    sink = make_sink(content="diff", full_every_rounds=5)
    for completed in rounds[:6] + rounds[7:]:
        sink.deliver(completed)
    found, _ = assembled(kafka_broker.messages(topic))
    assert [(one.number, one.base) for one in found] == [
        (1, None), (2, 1), (3, 2), (4, 3), (5, None), (6, 5), (8, None), (9, 8), (10, None), (11, 10), (12, 11),
    ]  # fmt: skip
    graph = Graph()
    for one in found:
        graph = decode_graph(one.data) if one.base is None else apply(decode_diff(one.data, graph)[0], graph)
        assert graph == rounds[one.number - 1].graph


def test_a_large_round_comes_in_parts_below_what_the_topic_takes(
    kafka_broker: Broker, topic: str, make_sink: Callable[..., Kafka]
) -> None:
    """The broker is asked (Apache Kafka tells)."""
    broker = needs_kafka(kafka_broker)
    broker.create_topic(topic, max_message_bytes=20_000)
    rounds = make_rounds(3, width=2000)
    sink = make_sink()
    for completed in rounds:
        sink.deliver(completed)
    messages = broker.messages(topic)
    found, assembler = assembled(messages)
    assert [decode_graph(one.data) == completed.graph for one, completed in zip(found, rounds, strict=True)] == [
        True
    ] * 3
    assert assembler.counts.messages > 3 * 5 and assembler.counts.duplicates == 0
    assert max(len(m.value()) for m in messages) < 20_000


def test_a_topic_that_takes_less_than_before(kafka_broker: Broker, topic: str, make_sink: Callable[..., Kafka]) -> None:
    """F13: the broker refuses, is asked again, and the same delivery succeeds with smaller parts."""
    broker = needs_kafka(kafka_broker)
    broker.create_topic(topic)
    rounds = make_rounds(2, width=4000)
    sink = make_sink()
    sink.deliver(rounds[0])
    broker.run_tool(
        "kafka.admin.ConfigCommand", "--bootstrap-server", broker.address, "--alter", "--entity-type", "topics",
        "--entity-name", topic, "--add-config", "max.message.bytes=30000",
    )  # fmt: skip
    sink.deliver(rounds[1])
    found, assembler = assembled(broker.messages(topic))
    assert [one.number for one in found] == [1, 2]
    assert decode_graph(found[1].data) == rounds[1].graph
    assert assembler.counts.messages > 5


def test_f13_too_large_a_message_is_told_with_what_to_do(
    kafka_broker: Broker, topic: str, make_sink: Callable[..., Kafka]
) -> None:
    broker = needs_kafka(kafka_broker)
    broker.create_topic(topic, max_message_bytes=10_000)
    sink = make_sink(max_message_bytes=500_000)
    with pytest.raises(
        DeliveryError, match=f"lower max_message_bytes, or raise max.message.bytes of the topic {topic}"
    ) as at:
        sink.deliver(make_rounds(1, width=1000)[0])
    assert not at.value.retryable
    sink.deliver(make_rounds(1)[0])
    found, _ = assembled(broker.messages(topic))
    assert [one.number for one in found] == [1]


def test_a_trial_is_passed_over_by_readers(kafka_broker: Broker, topic: str, make_sink: Callable[..., Kafka]) -> None:
    sink = make_sink()
    sink.trial(make_rounds(1)[0])
    sink.deliver(make_rounds(1)[0])
    found, assembler = assembled(kafka_broker.messages(topic))
    assert (len(found), assembler.counts.trials) == (1, 1)


def test_the_key_is_the_host_name_unless_said_otherwise(
    kafka_broker: Broker, topic: str, make_sink: Callable[..., Kafka]
) -> None:
    make_sink(namespace=None).deliver(make_rounds(1)[0])
    (message,) = kafka_broker.messages(topic)
    assert message.key().decode() == os.uname().nodename


def test_several_rounds_under_way(kafka_broker: Broker, topic: str, make_sink: Callable[..., Kafka]) -> None:
    broker = needs_kafka(kafka_broker)
    rounds = make_rounds(50)
    sink = make_sink()
    packed = [sink.pack(completed, None) for completed in rounds]
    for first in range(0, 50, 10):
        assert sink.begin(packed[first : first + 10]) == 10
    arrived = 0
    while arrived < 50:
        arrived += sink.settle(5.0)
    found, assembler = assembled(broker.messages(topic))
    assert [one.number for one in found] == list(range(1, 51))
    assert assembler.counts.repeats == 0


def test_a_topic_that_takes_less_than_before_while_rounds_are_under_way(
    kafka_broker: Broker, topic: str, make_sink: Callable[..., Kafka]
) -> None:
    """One in the middle is refused: it comes in smaller parts, and none of those after it comes before it."""
    broker = needs_kafka(kafka_broker)
    broker.create_topic(topic)
    small, large = make_rounds(41), make_rounds(41, width=4000)
    sink = make_sink()
    sink.deliver(small[0])
    broker.run_tool(
        "kafka.admin.ConfigCommand", "--bootstrap-server", broker.address, "--alter", "--entity-type", "topics",
        "--entity-name", topic, "--add-config", "max.message.bytes=30000",
    )  # fmt: skip
    packed = [sink.pack(completed, None) for completed in (*small[1:20], large[20], *small[21:])]
    begun = arrived = 0
    while arrived < 40:
        begun += sink.begin(packed[begun:]) if begun < 40 else 0
        arrived += sink.settle(5.0)
    found, assembler = assembled(broker.messages(topic))
    assert [one.number for one in found] == list(range(1, 42))
    assert assembler.counts.lost == 0


# --- who may ---


def test_tls_and_login(kafka_broker: Broker, topic: str, make_sink: Callable[..., Kafka]) -> None:
    broker = needs_kafka(kafka_broker)
    tls = {"brokers": [broker.tls_address], "security_protocol": "ssl", "tls_ca_file": str(broker.ca_path)}
    make_sink(**tls).deliver(make_rounds(1)[0])
    login = {
        "brokers": [broker.login_address],
        "security_protocol": "sasl_plaintext",
        "sasl_mechanism": "PLAIN",
        "sasl_username": WRITER[0],
        "sasl_password": WRITER[1],
    }
    make_sink(**login).deliver(make_rounds(2)[1])
    found, _ = assembled(broker.messages(topic))
    assert [one.number for one in found] == [1, 2]


BAD = {
    "a certificate that nobody vouches for": ({"tls": True}, "certificate", True),
    "TLS with a broker that speaks none": ({"plain": True, "security_protocol": "ssl"}, "SSL", True),
    "no TLS with a broker that wants it": (
        {"tls": True, "security_protocol": "plaintext"},
        "another security_protocol",
        True,
    ),
    "a wrong password": ({"login": ("writer", "wr0ng-secret")}, "Authentication failed", True),
    "a user without rights": ({"login": STRANGER}, "no right to write to the topic", True),
    "a setting that librdkafka does not know": ({"client": {"no.such": "1"}}, "no.such", False),
    "a value that it does not take": ({"client": {"socket.timeout.ms": "soon"}}, "socket.timeout.ms", False),
    "a file that is not there": ({"tls": True, "tls_ca_file": "/nowhere/ca.pem"}, "/nowhere/ca.pem", False),
}


@pytest.mark.parametrize("trouble", BAD)
def test_bad_settings_are_one_clear_line(
    kafka_broker: Broker, make_sink: Callable[..., Kafka], trouble: str, capfd: pytest.CaptureFixture[str]
) -> None:
    broker = needs_kafka(kafka_broker)
    values, expected, retryable = BAD[trouble]
    values = {"deliver_deadline_s": 5.0, **values}
    if values.pop("tls", False):
        values = {"brokers": [broker.tls_address], "security_protocol": "ssl", **values}
    values.pop("plain", None)
    if login := values.pop("login", None):
        values |= {
            "brokers": [broker.login_address],
            "security_protocol": "sasl_plaintext",
            "sasl_mechanism": "PLAIN",
            "sasl_username": login[0],
            "sasl_password": login[1],
        }
    sink = make_sink(start=False, **values)
    with pytest.raises(DeliveryError, match=expected) as raised:
        sink.start()
        sink.deliver(make_rounds(1)[0])
    text = str(raised.value)
    assert raised.value.retryable is retryable
    assert "\n" not in text and "wr0ng" not in text and STRANGER[1] not in text and len(text) < 400
    written = capfd.readouterr()
    assert (written.out, written.err) == ("", "")


def test_a_topic_that_nobody_makes_is_told(make_broker: Callable[[], Broker], make_sink: Callable[..., Kafka]) -> None:
    broker = needs_kafka(make_broker())
    broker.kill()
    properties = broker.folder / "server.properties"
    properties.write_text(
        properties.read_text().replace("auto.create.topics.enable=true", "auto.create.topics.enable=false")
    )
    broker.start()
    sink = make_sink(brokers=[broker.address], topic="not-made", deliver_deadline_s=6.0)
    with pytest.raises(DeliveryError, match="there is no topic not-made") as raised:
        sink.deliver(make_rounds(1)[0])
    assert raised.value.retryable
    broker.create_topic("not-made")
    sink.deliver(make_rounds(1)[0])


def test_brokers_that_the_cluster_names_have_to_be_allowed_too(
    kafka_broker: Broker, make_sink: Callable[..., Kafka]
) -> None:
    """By name and address: the broker says that it is 127.0.0.1, which is not what was allowed."""
    sink = make_sink(
        start=False, rules=Rules(url_hosts=("localhost",)), brokers=[f"localhost:{kafka_broker.ports['main']}"]
    )
    with pytest.raises(DeliveryError, match=r"127\.0\.0\.1.*may not be called") as raised:
        sink.start()
    assert not raised.value.retryable
    make_sink(rules=Rules(url_hosts=("127.0.0.1",)))


# --- nobody there ---


def test_nobody_listens(make_sink: Callable[..., Kafka]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        sink = make_sink(start=False, brokers=[f"127.0.0.1:{taken.getsockname()[1]}"], deliver_deadline_s=2.0)
        started_s = time.monotonic()
        with pytest.raises(DeliveryError, match="Connection refused") as raised:
            sink.start()
    assert raised.value.retryable and time.monotonic() - started_s < 20


def test_f12_a_broker_that_never_answers(kafka_broker: Broker, make_sink: Callable[..., Kafka]) -> None:
    """It takes connections and says nothing: at the start, and after it has worked."""
    with Relay(int(kafka_broker.ports["main"])) as relay:
        relay.mute.set()
        sink = make_sink(start=False, brokers=[f"127.0.0.1:{relay.port}"], deliver_deadline_s=2.0)
        started_s = time.monotonic()
        with pytest.raises(DeliveryError) as raised:
            sink.start()
        assert raised.value.retryable and time.monotonic() - started_s < 20


def test_f12_a_broker_that_stops_answering(make_broker: Callable[[], Broker], make_sink: Callable[..., Kafka]) -> None:
    broker = make_broker()
    sink = make_sink(brokers=[broker.address], topic="stops", deliver_deadline_s=3.0)
    sink.deliver(make_rounds(1)[0])
    pid = broker.pid
    assert pid is not None
    os.kill(pid, 19)  # SIGSTOP
    started_s = time.monotonic()
    try:
        with pytest.raises(DeliveryError) as raised:
            sink.deliver(make_rounds(2)[1])
        assert raised.value.retryable
        assert time.monotonic() - started_s < 20
        started_s = time.monotonic()
        sink.close()
        assert time.monotonic() - started_s < 20
    finally:
        os.kill(pid, 18)  # SIGCONT


class Relay:
    """Passes bytes on to a port until it is mute."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.mute = threading.Event()
        self._open: list[socket.socket] = [self._listener]

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(client)


# --- kill -9 ---


def test_f08_throttled_messages_are_waited_for(
    kafka_broker: Broker, topic: str, make_sink: Callable[..., Kafka]
) -> None:
    """A quota of the broker delays; nothing is dropped."""
    broker = needs_kafka(kafka_broker)
    client_id = f"slow-{topic}"
    broker.run_tool(
        "kafka.admin.ConfigCommand", "--bootstrap-server", broker.address, "--alter", "--entity-type", "clients",
        "--entity-name", client_id, "--add-config", "producer_byte_rate=10000",
    )  # fmt: skip
    sinks = SubscriberSet()
    sink = make_sink(start=False, client={"client.id": client_id}, policy="block", deliver_deadline_s=30.0)
    sinks.add(sink)
    started_s = time.monotonic()
    for completed in make_rounds(12, width=200):
        sinks.publish(completed)
    assert sinks.flush(LONG_S)
    took_s = time.monotonic() - started_s
    (status,) = sinks.status()
    assert (status.statistics.sent, status.statistics.dropped) == (12, 0)
    assert took_s > 1.0, "the quota has not slowed it down, so that this shows nothing"
    sinks.close()
    found, _ = assembled(broker.messages(topic))
    assert [one.number for one in found] == list(range(1, 13))


def test_a_broker_that_is_down_at_the_start_is_waited_for(
    make_broker: Callable[[], Broker], make_sink: Callable[..., Kafka], tmp_path: Path
) -> None:
    broker = needs_kafka(make_broker())
    broker.kill()
    sink = make_sink(
        start=False, brokers=[broker.address], topic="waits", policy="spool", spool_folder=str(tmp_path),
        deliver_deadline_s=3.0, retry_first_s=0.2, retry_max_s=0.5,
    )  # fmt: skip
    sinks = SubscriberSet()
    sinks.add(sink)
    for completed in make_rounds(5):
        sinks.publish(completed)
    _until(lambda: sinks.status()[0].state == "recoverable_error")
    assert "Connection refused" in sinks.status()[0].statistics.last_error
    broker.start()
    assert sinks.flush(LONG_S)
    assert sinks.status()[0].statistics.sent == 5
    assert sinks.close(LONG_S)
    found, _ = assembled(broker.messages("waits"))
    assert [one.number for one in found] == [1, 2, 3, 4, 5]


def test_kill_9_of_the_broker_loses_nothing_that_the_spool_took(
    make_broker: Callable[[], Broker], make_sink: Callable[..., Kafka], tmp_path: Path
) -> None:
    """Rounds are published all the while; the broker is killed twice, and comes back."""
    broker = make_broker()
    if not broker.keeps_data:
        pytest.skip("needs Apache Kafka (java, mvn): tansu keeps all in memory")
    broker.create_topic("kept", max_message_bytes=20_000)
    sink = make_sink(
        start=False, brokers=[broker.address], topic="kept", policy="spool", spool_folder=str(tmp_path), content="diff",
        deliver_deadline_s=4.0, retry_first_s=0.1, retry_max_s=0.5, full_every_rounds=7,
    )  # fmt: skip
    sinks = SubscriberSet()
    sinks.add(sink)
    rounds = make_rounds(60, width=400)
    threads_before: int | None = None
    for index, completed in enumerate(rounds):
        sinks.publish(completed)
        if index in (15, 35):
            _until(lambda: sinks.status()[0].statistics.sent > 0)
            threads_before = threads_before or len(os.listdir("/proc/self/task"))
            broker.kill()
        elif index in (25, 50):
            broker.start()
        else:
            time.sleep(0.03)
    assert sinks.flush(LONG_S)
    (status,) = sinks.status()
    assert (status.statistics.received, status.statistics.sent, status.statistics.dropped) == (60, 60, 0)
    assert threads_before is not None and len(os.listdir("/proc/self/task")) <= threads_before + 3
    assert sinks.close(LONG_S)
    assembler, graph = Assembler(), Graph()
    numbers = []
    for message in broker.messages("kept"):
        one = assembler.add(message.key(), message.headers(), message.value())
        if one is None:
            continue
        numbers.append(one.number)
        graph = decode_graph(one.data) if one.base is None else apply(decode_diff(one.data, graph)[0], graph)
        assert graph == rounds[one.number - 1].graph
    assert numbers == list(range(1, 61))
    assert assembler.counts.lost == 0 and msgspec.structs.asdict(assembler.counts)["corrupt"] == 0


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
