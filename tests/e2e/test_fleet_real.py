"""A fleet of installed servers: agents publish to a real broker, consumers of one group write to a real database, and
whichever of them is asked shows all hosts, also after one was killed."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from tests.e2e.test_server_real import PATIENCE_S, Instance, running, wait_ready
from tests.services.kafka import Broker
from tests.services.mongodb import MongoServer, new_database
from tests.services.watching import watching

HOSTS = ("node-a", "node-b")


class Fleet:
    """The parts of one fleet, by name."""

    def __init__(self, broker: Broker, mongodb: MongoServer, topic: str, folder: Path, stack: ExitStack) -> None:
        self.broker, self.mongodb, self.topic, self.folder, self.stack = broker, mongodb, topic, folder, stack
        self.database = new_database()
        broker.create_topic(topic, 6)

    def start(self, name: str, *arguments: str, **config: Any) -> Instance:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return self.stack.enter_context(running(folder, *arguments, config=config))

    def agent(self, name: str) -> Instance:
        sink = {
            "type": "kafka",
            "brokers": [self.broker.address],
            "topic": self.topic,
            "namespace": name,
            "content": "diff",
            "full_every_rounds": 10,
            "policy": "spool",
            "spool_folder": str(self.folder / name / "spool"),
        }
        # What two agents and two consumers cost beside other tests must not decide when rounds arrive.
        collectors = watching("host", "mounts")
        return self.start(name, interval_s=0.4, subscribers=[sink], collectors=collectors)

    def consumer(self, name: str) -> Instance:
        consume = {
            "brokers": [self.broker.address],
            "topic": self.topic,
            "client": {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500},
            "retry_first_s": 0.1,
            "mongodb": {"uri": self.mongodb.uri, "database": self.database, "timeout_s": 10.0},
        }
        fleet = {"interval_s": 0.3}
        return self.start(name, "--consume", "kafka", interval_s=0.3, consume=consume, collectors={"fleet": fleet})

    def rounds(self, namespace: str) -> list[int]:
        """Numbers of the rounds of a namespace that are in the database, in order."""
        with self.mongodb.client() as client:
            found = client[self.database]["rounds"].find({"namespace": namespace}, {"round": 1})
            return sorted(line["round"] for line in found)

    def head(self, namespace: str) -> int:
        with self.mongodb.client() as client:
            found = client[self.database]["namespaces"].find_one({"_id": namespace}) or {}
            return int(found.get("round", 0))


def until(holds: Callable[[], bool], why: Callable[[], Any] = lambda: None) -> None:
    end_s = time.monotonic() + 3 * PATIENCE_S  # of a group that shares partitions anew, on a machine with other tests
    while not holds():
        assert time.monotonic() < end_s, why()
        time.sleep(0.05)


def shown(url: str) -> set[str]:
    """The hosts in the picture."""
    nodes = httpx.get(f"{url}/api/v1/graph?kind=Host&fields=name").json().get("nodes", [])
    return {node.get("ns", "") for node in nodes}


def troubles(url: str) -> Any:
    """What its collectors say, for whoever reads why a test failed."""
    found = httpx.get(f"{url}/api/v1/rounds/latest").json().get("coverage", [])
    return [line for line in found if line["collector"] in ("fleet", "consume")]


def metric(url: str, name: str, labels: str = "") -> float:
    """The sum of a metric over its samples with these labels."""
    text = httpx.get(f"{url}/metrics").text
    found = re.findall(rf"^gpuflight_{name}(?:\{{([^}}]*)\}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for inside, value in found if labels in inside)


def partitions(url: str) -> int:
    return httpx.get(f"{url}/metrics").text.count("\ngpuflight_consume_lag_messages{")


def test_a_fleet_outlives_the_kill_of_a_consumer(
    kafka_broker: Broker, mongodb: MongoServer, topic: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        fleet = Fleet(kafka_broker, mongodb, topic, tmp_path, stack)
        agents = [fleet.agent(name) for name in HOSTS]
        first, second = fleet.consumer("consumer-1"), fleet.consumer("consumer-2")
        urls = [first.url, second.url]
        for url in urls:
            wait_ready(url)
            until(lambda url=url: partitions(url) == 3)  # they share
            until(
                lambda url=url: shown(url) == set(HOSTS), lambda url=url: (shown(url), troubles(url))
            )  # and each shows all
        until(lambda: all(fleet.head(name) >= 3 for name in HOSTS))

        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        before = {name: fleet.head(name) for name in HOSTS}
        until(lambda: partitions(urls[1]) == 6)
        until(lambda: all(fleet.head(name) > before[name] + 2 for name in HOSTS))

        for agent in agents:
            agent.process.send_signal(signal.SIGTERM)
        for agent in agents:
            assert agent.finish() == 0
        until(lambda: metric(urls[1], "consume_lag_messages") == 0 and metric(urls[1], "consume_queued_rounds") == 0)
        for name in HOSTS:
            numbers = fleet.rounds(name)
            assert numbers == list(range(1, numbers[-1] + 1)), "no round is missing"
            assert fleet.head(name) == numbers[-1]
        assert metric(urls[1], "consume_skipped_total") == 0
        assert metric(urls[1], "consume_rounds_done_total", 'outcome="waiting"') == 0

        told(urls[1], second)


def told(url: str, consumer: Instance) -> None:
    """Everything a server answers, it answers for the fleet too."""
    answer = httpx.get(f"{url}/api/v1/graph")
    assert set(HOSTS) <= {node.get("ns") for node in answer.json()["nodes"]}
    assert httpx.get(f"{url}/api/v1/rounds/latest").status_code == 200
    assert "node-b" in httpx.get(f"{url}/api/v1/graph/export?format=json").raise_for_status().text

    def unchanged() -> bool:
        etag = httpx.get(f"{url}/api/v1/graph").headers["etag"]
        return httpx.get(f"{url}/api/v1/graph", headers={"if-none-match": etag}).status_code == 304

    until(unchanged)  # a round may have come between the two
    with httpx.stream("GET", f"{url}/api/v1/stream") as stream:
        assert next(stream.iter_lines())
    line = httpx.get(f"{url}/api/v1/collectors/consume").json()["coverage"]
    assert line["status"] == "ok"
    counted = {note["reason"]: note["count"] for note in line["notes"] if "count" in note}
    assert counted["messages read"] >= counted["rounds written"] > 10
    # Nothing of this host: it serves the fleet.
    assert not httpx.get(f"{url}/api/v1/collectors/process_tree").json()["enabled"]
    consumer.process.send_signal(signal.SIGTERM)
    assert consumer.finish() == 0
