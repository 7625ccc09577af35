"""Events from a real broker: a topic per channel into the event store, each message once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.services.kafka import Broker
from tests.unit import gpufl_files

from gpuflight.errors import InputError
from gpuflight.server.events.service import EventService
from gpuflight.server.events.settings import EventsSettings

PATIENCE_S = 90.0
"""Only a broken program takes so long."""


@contextmanager
def reading(folder: Path, broker: Broker, topic: str, group: str = "g", **more: Any) -> Iterator[EventService]:
    kafka = {"brokers": [broker.address], "topic": topic, "group": group, **more}
    service = EventService(EventsSettings(kafka=kafka), str(folder / "events"))  # type: ignore[arg-type]
    service.start()
    try:
        yield service
    finally:
        assert service.stop(60)


def until(service: EventService, what: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not what():
        states = [(reader.figures.topic, reader.figures.error) for reader in service.topics.readers]  # type: ignore[union-attr]
        assert time.monotonic() < end_s, states
        service._stopping.wait(0.05)


def count(service: EventService, table: str, session: str = "s") -> int:
    found = service.store.session(session)
    if found is None:
        return 0
    return int(service.store.rows(f"SELECT count(*) AS n FROM {service.store.relation(table, [found]).sql}")[0]["n"])


def produce(broker: Broker, topic: str, lines: list[bytes], key: bytes = b"s") -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": broker.address})
    for line in lines:
        producer.produce(topic, line.rstrip(b"\n"), key)
    assert producer.flush(60.0) == 0


def fill(number: int, session: str = "s") -> bytes:
    return gpufl_files.line(
        "memset_event", session, name="memset", device_id="0", stream_id="7",
        start_ns=gpufl_files.START_NS + number, end_ns=gpufl_files.START_NS + number + 1, corr_id=number, bytes=8,
    )  # fmt: skip


@pytest.fixture
def topics(kafka_broker: Broker, topic: str) -> str:
    for channel in ("device", "scope", "system", "sass"):
        kafka_broker.create_topic(f"{topic}-{channel}", partitions=2)
    kafka_broker.create_topic(topic)
    return topic


def test_what_agents_publish_is_stored_once_whoever_reads_it_again(
    kafka_broker: Broker, topics: str, tmp_path: Path
) -> None:
    device = [gpufl_files.start(), gpufl_files.kernels([[0, 1, 7, 10, 1], [1, 1, 7, 10, 2]]), *map(fill, range(100))]
    produce(kafka_broker, f"{topics}-device", device)
    produce(kafka_broker, f"{topics}-device", [fill(n, "other") for n in range(50)], b"other")
    encoded = [json.dumps(line.decode().strip()).encode() for line in (gpufl_files.shutdown(), gpufl_files.start("t"))]
    produce(kafka_broker, f"{topics}-system", [*encoded, b'"broken', b"{bad"])
    with reading(tmp_path, kafka_broker, topics) as service:
        until(service, lambda: count(service, "memset") == 100 and count(service, "memset", "other") == 50)
        until(service, lambda: service.store.session("t") is not None and service.figures.losses["not_json"] == 1)
        assert count(service, "kernel") == 2
        found = service.store.session("s")
        assert found is not None and found.end_ns is not None
        system = next(r.figures for r in service.topics.readers if r.figures.topic.endswith("system"))  # type: ignore[union-attr]
        assert system.unreadable == 1
    # A group that has committed nothing, as after a kill between storing and committing.
    with reading(tmp_path, kafka_broker, topics, group="another") as service:
        produce(kafka_broker, f"{topics}-device", [fill(100)])
        until(service, lambda: count(service, "memset") == 101)
        until(service, lambda: sum(r.figures.repeated for r in service.topics.readers) >= 152)  # type: ignore[union-attr]
        assert count(service, "kernel") == 2 and count(service, "memset", "other") == 50
    # The first group goes on where it was, and meets only what is new to it.
    with reading(tmp_path, kafka_broker, topics) as service:
        produce(kafka_broker, f"{topics}-device", [fill(101)])
        until(service, lambda: count(service, "memset") == 102)
        device_figures = next(r.figures for r in service.topics.readers if r.figures.topic.endswith("device"))  # type: ignore[union-attr]
        assert device_figures.messages <= 4


def test_the_topic_of_the_originals_agent(kafka_broker: Broker, topics: str, tmp_path: Path) -> None:
    line = gpufl_files.kernels([[0, 1, 7, 10, 1]], session="plain").decode().strip()
    produce(kafka_broker, topics, [json.dumps(line).encode()], b"device")
    with reading(tmp_path, kafka_broker, topics, plain=True) as service:
        until(service, lambda: count(service, "kernel", "plain") == 1)


def test_what_the_store_refuses_is_read_again(
    kafka_broker: Broker, topics: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    produce(kafka_broker, f"{topics}-device", [gpufl_files.start(), *map(fill, range(20))])
    with reading(tmp_path, kafka_broker, topics, group="full") as service:
        write, refused = service.store.write_parts, []

        def full(parts: Any) -> Any:
            if len(refused) < 2 and any(part.batches for part in parts):
                refused.append(1)
                raise InputError("disk full")
            return write(parts)

        monkeypatch.setattr(service.store, "write_parts", full)
        until(service, lambda: count(service, "memset") == 20)
        assert len(refused) <= 2
