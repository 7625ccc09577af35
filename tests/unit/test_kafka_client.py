"""What the Kafka client does with the reports of librdkafka, those included that a real broker seldom gives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.librdkafka import FakeError, FakeProducer

from gpuflight.errors import DeliveryError
from gpuflight.subscribers.base import Parcel
from gpuflight.subscribers.kafka import Kafka, KafkaSettings
from gpuflight.subscribers.kafka_client import KafkaClient, MessageTooLarge
from gpuflight.subscribers.kafka_settings import KafkaConnection
from gpuflight.subscribers.kafka_wire import Message
from gpuflight.subscribers.netguard import ANYTHING

pytest.importorskip("confluent_kafka")


class Client(KafkaClient):
    """With producers of a fake, made as often as one is needed."""

    def __init__(self, fate: Callable[[bytes], Any], room: int = 1000) -> None:
        super().__init__(KafkaConnection(brokers=["a"]), ANYTHING, deadline_s=1.0)
        self.made: list[FakeProducer] = []
        self._fate, self._room = fate, room

    def _new_producer(self) -> Any:
        self.made.append(FakeProducer(self._fate, self._room))
        return self.made[-1]


def rounds_of(*sizes: int) -> list[list[Message]]:
    """Rounds of so many messages; a value says where it belongs."""
    return [
        [Message(b"k", [], b"%d.%d" % (index, part)) for part in range(size)] for index, size in enumerate(sizes, 1)
    ]


def test_all_arrive() -> None:
    client = Client(lambda _: None)
    assert client.deliver(rounds_of(1, 3, 2), 5.0) == 3
    assert client.deliver(rounds_of(1), 5.0) == 1
    assert len(client.made) == 1 and not client.made[0].purged
    assert client.made[0].accepted == [b"1.0", b"2.0", b"2.1", b"2.2", b"3.0", b"3.1", b"1.0"]


def test_f15_reports_come_only_while_delivering_and_in_the_thread_that_delivers() -> None:
    before = threading.active_count()
    client = Client(lambda _: None)
    client.deliver(rounds_of(2), 5.0)
    polls = client.made[0].polls
    time.sleep(0.05)
    assert client.made[0].polls == polls > 0
    assert client.made[0].callers == {threading.get_ident()}
    assert threading.active_count() == before
    client.close()
    assert threading.active_count() == before


def test_f12_no_report_ever_comes() -> None:
    client = Client(lambda _: "never")
    began_s = time.monotonic()
    with pytest.raises(DeliveryError, match=r"no acknowledgement within 0\.2 s") as raised:
        client.deliver(rounds_of(1, 1), 0.2)
    assert raised.value.retryable and 0.2 <= time.monotonic() - began_s < 30
    assert client.made[0].purged
    with pytest.raises(DeliveryError):
        client.deliver(rounds_of(1), 0.1)
    assert len(client.made) == 2, "one that does not answer is not used again"


def test_what_arrived_before_the_trouble_counts() -> None:
    client = Client(lambda value: "never" if value == b"3.1" else None)
    assert client.deliver(rounds_of(1, 2, 2, 1), 0.2) == 2
    assert client.made[0].purged, "what is after it must not arrive before it does"


def test_f13_a_message_that_is_too_large_comes_up() -> None:
    client = Client(lambda value: FakeError("MSG_SIZE_TOO_LARGE") if value.startswith(b"2") else None)
    assert client.deliver(rounds_of(1, 1), 5.0) == 1
    with pytest.raises(MessageTooLarge, match="max_message_bytes"):
        client.deliver(rounds_of(1, 1)[1:], 5.0)


def test_f08_a_throttled_message_is_to_be_tried_again() -> None:
    answers = [FakeError("THROTTLING_QUOTA_EXCEEDED"), FakeError("REQUEST_TIMED_OUT"), None]
    client = Client(lambda _: answers.pop(0))
    for _ in range(2):
        with pytest.raises(DeliveryError) as raised:
            client.deliver(rounds_of(1), 5.0)
        assert raised.value.retryable
    assert client.deliver(rounds_of(1), 5.0) == 1


def test_the_first_error_is_told_not_its_consequences() -> None:
    client = Client(lambda value: FakeError("INVALID_RECORD") if value == b"1.0" else FakeError("_PURGE_QUEUE"))
    with pytest.raises(DeliveryError, match="what happened") as raised:
        client.deliver(rounds_of(3), 5.0)
    assert not raised.value.retryable


def test_a_full_queue_is_waited_for() -> None:
    client = Client(lambda _: None, room=2)
    assert client.deliver(rounds_of(5, 5), 5.0) == 2
    assert len(client.made[0].accepted) == 10


def test_a_full_queue_that_never_empties() -> None:
    client = Client(lambda _: "never", room=2)
    with pytest.raises(DeliveryError, match="no acknowledgement") as raised:
        client.deliver(rounds_of(5), 0.2)
    assert raised.value.retryable


@pytest.mark.parametrize("error", [FakeError("_FATAL", fatal=True), FakeError("UNKNOWN_TOPIC_OR_PART")])
def test_a_producer_that_is_of_no_use_any_longer_is_replaced(error: FakeError) -> None:
    answers: list[Any] = [error, None]
    client = Client(lambda _: answers.pop(0))
    with pytest.raises(DeliveryError) as raised:
        client.deliver(rounds_of(1), 5.0)
    assert raised.value.retryable
    assert client.deliver(rounds_of(1), 5.0) == 1
    assert len(client.made) == 2


def test_a_fatal_error_told_in_passing() -> None:
    client = Client(lambda _: FakeError("_PURGE_QUEUE"))
    answer = client._reasons.note
    client._reasons.clear = lambda: answer(FakeError("_FATAL", "fenced", fatal=True))  # type: ignore[method-assign]
    with pytest.raises(DeliveryError):
        client.deliver(rounds_of(1), 5.0)
    assert client._producer is None


def test_a_fatal_error_raised_in_passing_costs_no_round() -> None:
    """So does confluent-kafka: once, from ``poll``; the messages are reported all the same."""
    from confluent_kafka import KafkaException

    client = Client(lambda value: FakeError("MSG_SIZE_TOO_LARGE") if value == b"2.0" else FakeError("_PURGE_QUEUE"))
    arrives = client._fate
    client._fate = lambda value: None if value == b"1.0" else arrives(value)
    assert client.begin(rounds_of(1, 1, 1), 5.0) == 3
    poll, raised = client.made[0].poll, []

    def poll_once(timeout: float) -> int:
        if not raised:
            raised.append(timeout)
            raise KafkaException(FakeError("_GAPLESS_GUARANTEE", "no way", fatal=True))
        return poll(timeout)

    client.made[0].poll = poll_once  # type: ignore[method-assign]
    assert client.settle(5.0) == 1
    with pytest.raises(MessageTooLarge):
        client.settle(5.0)
    client.recall()
    assert client._producer is None
    client._fate = lambda _: None
    assert client.deliver(rounds_of(1, 1), 5.0) == 2, "the next producer has nothing to do with it"


def test_smaller_parts_are_tried_where_nobody_tells_what_fits() -> None:
    """No right to ask the broker: the limit is halved until it takes them."""
    client = Client(lambda value: FakeError("MSG_SIZE_TOO_LARGE") if len(value) > 100_000 else None)
    client._learn = lambda _: None  # type: ignore[method-assign]
    sink = Kafka(KafkaSettings(brokers=["a"]))
    sink._client = client
    packed = Parcel(number=1, time_ns=1, key="run-1", data=bytes(900_000))
    sink.send(packed)
    assert 50_000 < client.limit_bytes < 101_000
    assert sum(len(value) for value in client.made[-1].accepted) == 900_000
    fixed = Client(lambda _: FakeError("MSG_SIZE_TOO_LARGE"))
    fixed._fixed = True
    sink._client = fixed
    with pytest.raises(MessageTooLarge):
        sink.send(packed)
    never = Client(lambda _: FakeError("MSG_SIZE_TOO_LARGE"))
    never._learn = client._learn  # type: ignore[method-assign]
    sink._client = never
    with pytest.raises(MessageTooLarge):
        sink.send(packed)


def test_a_round_that_cannot_be_cut_is_told_when_it_is_its_turn() -> None:
    sink = Kafka(KafkaSettings(brokers=["a"], max_message_bytes=2000))
    sink._client = client = Client(lambda _: None)
    client.limit_bytes = 1000
    small = Parcel(number=1, time_ns=1, key="run-1", data=b"{}")
    huge = Parcel(number=2, time_ns=2, key="run-2", data=bytes(50_000_000))
    assert sink.begin([small, huge, small]) == 1
    with pytest.raises(DeliveryError, match="would be") as raised:
        sink.begin([huge, small])
    assert not raised.value.retryable
    assert sink.settle(5.0) == 1, "what was begun before is under way still"
    assert client.under_way == 0


# --- several under way ---


def begin(client: Client, *sizes: int, timeout_s: float = 5.0) -> int:
    return client.begin(rounds_of(*sizes), timeout_s)


def test_the_next_are_begun_while_those_before_are_under_way() -> None:
    slow: set[bytes] = {b"1.0"}
    client = Client(lambda value: "never" if value in slow else None)
    assert begin(client, 1, 2) == 2
    assert client.settle(0.0) == 0 and client.under_way == 2
    assert client.begin([[Message(b"k", [], b"3.0")]], 5.0) == 1
    assert client.settle(0.05) == 0, "the oldest is awaited, though others have arrived"
    slow.clear()
    assert client.settle(5.0) == 3
    assert client.settle(5.0) == 0, "at once, with nothing under way"
    client.recall()
    assert len(client.made) == 1 and not client.made[0].purged


def test_an_error_is_that_of_its_round_and_not_of_one_before_it() -> None:
    """Else a round that is on its way would be given up for another's fault."""
    slow = {b"1.0"}
    client = Client(
        lambda value: "never" if value in slow else FakeError("INVALID_RECORD") if value == b"2.0" else None
    )
    assert begin(client, 1, 1, 1) == 3
    assert client.settle(0.05) == 0
    assert begin(client, 1) == 1, "it may be asked for; it is not sent before the trouble is told"
    assert client.made[0].accepted == [b"1.0", b"2.0", b"3.0"]
    slow.clear()
    assert client.settle(5.0) == 1
    with pytest.raises(DeliveryError, match="what happened") as raised:
        client.settle(5.0)
    assert not raised.value.retryable and raised.value.blames_item
    client.recall()
    assert client.under_way == 0
    assert begin(client, 1) == 1 and client.settle(5.0) == 1


def test_what_is_recalled_does_not_arrive_later() -> None:
    client = Client(lambda _: "never")
    begin(client, 2, 1)
    client.recall()
    assert client.made[0].purged
    client.recall()  # with nothing under way
    client._fate = lambda _: None
    assert begin(client, 1) == 1 and client.settle(5.0) == 1
    assert len(client.made) == 2


def test_each_round_has_a_deadline_of_its_own() -> None:
    client = Client(lambda value: "never" if value == b"2.0" else None)
    begin(client, 1, 1, timeout_s=0.2)
    assert client.settle(5.0) == 1
    with pytest.raises(DeliveryError, match=r"no acknowledgement within 0\.2 s") as raised:
        client.settle(60.0)
    assert raised.value.retryable


def test_smaller_parts_go_in_the_order_of_the_rounds() -> None:
    """The topic takes less than it did, while several rounds are under way and more come."""
    reached: list[bytes] = []

    def fate(value: bytes) -> Any:
        if len(value) > 3000:
            return FakeError("MSG_SIZE_TOO_LARGE")
        reached.append(value)
        return None

    client = Client(fate)
    client.limit_bytes = 10_000
    client._learn = lambda _: None  # type: ignore[method-assign]
    sink = Kafka(KafkaSettings(brokers=["a"]))
    sink._client = client
    sizes = {1: 500, 2: 9000, 3: 100, 4: 8000, 5: 7}
    parcels = [Parcel(number=n, time_ns=n, key=f"run-{n}", data=b"%d" % n * size) for n, size in sizes.items()]
    assert sink.begin(parcels[:3]) == 3
    settled, begun = 0, 3
    while settled < 5:
        settled += sink.settle(1.0)
        if begun < 5 and client.limit_bytes < 10_000:
            begun += sink.begin(parcels[3:])
    assert not sink._under_way and client.under_way == 0
    assert begun == 5 and client.limit_bytes < 5000
    last = {value[:1]: index for index, value in enumerate(reached)}
    assert sorted(last, key=lambda number: last[number]) == [b"1", b"2", b"3", b"4", b"5"]
    for number, size in sizes.items():
        assert sum(len(value) for value in reached if value[:1] == b"%d" % number) >= size


def test_the_brokers_are_looked_at_again_while_rounds_are_under_way() -> None:
    client = Client(lambda _: None)
    assert begin(client, 1) == 1

    def recheck() -> None:
        client._flight.useless = True
        raise DeliveryError("may not be called", retryable=False)

    client._recheck = recheck  # type: ignore[method-assign]
    with pytest.raises(DeliveryError, match="may not"):
        begin(client, 1)
    assert client.settle(5.0) == 1
    client.recall()
    assert client._producer is None, "not used again"


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    bad=st.integers(0, 5),
    part=st.integers(0, 3),
    room=st.integers(1, 30),
)
def test_exactly_the_rounds_before_the_first_failure_count(sizes: list[int], bad: int, part: int, room: int) -> None:
    fails = b"%d.%d" % (bad, part)
    client = Client(lambda value: FakeError("NOT_ENOUGH_REPLICAS") if value == fails else None, room)
    fails_at = next((i for i, size in enumerate(sizes, 1) if i == bad and part < size), None)
    if fails_at == 1:
        with pytest.raises(DeliveryError):
            client.deliver(rounds_of(*sizes), 5.0)
    else:
        assert client.deliver(rounds_of(*sizes), 5.0) == (len(sizes) if fails_at is None else fails_at - 1)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    chunk=st.integers(1, 4),
    bad=st.integers(0, 14),
    part=st.integers(0, 3),
    room=st.integers(1, 30),
    slow=st.booleans(),
)
def test_under_way_or_not_exactly_the_rounds_before_a_failure_count(
    sizes: list[int], chunk: int, bad: int, part: int, room: int, slow: bool
) -> None:
    fails = b"%d.%d" % (bad, part)
    client = Client(lambda value: FakeError("NOT_ENOUGH_REPLICAS") if value == fails else None, room)
    fails_at = next((i for i, size in enumerate(sizes, 1) if i == bad and part < size), None)
    waiting, arrived = rounds_of(*sizes), 0
    try:
        while waiting or client.under_way:
            del waiting[: client.begin(waiting[:chunk], 5.0) if waiting else 0]
            if slow or not waiting:
                arrived += client.settle(5.0)
    except DeliveryError:
        assert arrived == (fails_at or 0) - 1
    else:
        assert fails_at is None and arrived == len(sizes)
