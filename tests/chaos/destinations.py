"""Where the rounds of the chaos go: real services, each with the settings of its sink and what has arrived there."""

from __future__ import annotations

import os
import re
import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tests.chaos.victims import ReceiverVictim
from tests.services import s3
from tests.services.kafka import new_broker
from tests.services.mongodb import MongoServer

SPOOLED = {"policy": "spool", "retry_first_s": 0.05, "retry_max_s": 0.3, "deliver_deadline_s": 1.0}
TOPIC, BUCKET = "chaos.rounds", "chaos"


class Arrival(NamedTuple):
    """A round: the run of the server that it is of (the first 12 digits), its number, and the round that it starts
    from, None for a whole one."""

    instance: str
    number: int
    base: int | None = None


class Destination(ABC):
    """``start``, ``kill``, ``freeze``; the name of the sink; whether it tells in which order rounds came."""

    name: str
    content: Literal["graph", "diff"] = "graph"
    tells_order = True
    keeps_data = True
    """Whether what it acknowledged outlives ``kill``; one that does not is only frozen."""
    wholes_between = False
    """Differences: whether whole rounds come in between, for readers that come later."""

    @abstractmethod
    def sink(self) -> dict[str, Any]:
        """Settings of its sink, but for those that all have."""

    @abstractmethod
    def start(self) -> None:
        """Run, and wait until it answers."""

    @abstractmethod
    def kill(self) -> None:
        """``kill -9``."""

    def end(self) -> None:
        """Of the test: give back everything."""
        self.kill()

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """Of the process that answers."""

    def freeze(self, seconds: float) -> None:
        """Neither answer nor end, for a while: connections are still made for it, by the kernel."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    @abstractmethod
    def arrived(self) -> list[Arrival]:
        """All that came, repeats included."""


class Post(Destination):
    """A receiver of HTTP POST that also refuses some rounds for a while."""

    def __init__(self, folder: Path, seed: int, content: Literal["graph", "diff"]) -> None:
        self.name, self.content = f"post-{content}", content
        self._victim = ReceiverVictim(folder, seed)

    def sink(self) -> dict[str, Any]:
        return {"type": "http_post", "url": f"http://127.0.0.1:{self._victim.port}/", "content": self.content}

    def start(self) -> None:
        self._victim.start()

    def kill(self) -> None:
        self._victim.kill()

    @property
    def pid(self) -> int | None:
        process = self._victim.process
        return process.pid if process is not None else None

    def arrived(self) -> list[Arrival]:
        return [
            Arrival(key.rpartition("-")[0][:12], int(key.rpartition("-")[2]), int(base) if base else None)
            for key, base in self._victim.received()
        ]


class Bucket(Destination):
    """moto's S3, whose memory is all it has."""

    name, tells_order, keeps_data = "bucket", False, False

    def __init__(self) -> None:
        self._server: s3.S3Server | None = None

    def sink(self) -> dict[str, Any]:
        assert self._server is not None, "its port is known once it runs"
        return s3.settings(self._server.url, BUCKET)

    def start(self) -> None:
        self._server = s3.S3Server()
        self._server.make_bucket(BUCKET)

    def kill(self) -> None:
        if self._server is not None:
            self._server.kill()

    @property
    def pid(self) -> int | None:
        process = self._server.process if self._server is not None else None
        return process.pid if process is not None else None

    def arrived(self) -> list[Arrival]:
        assert self._server is not None
        found = [re.search(r"-([0-9a-f]{12})-(\d+)\.json", key) for key in self._server.keys(BUCKET)]
        return [Arrival(match[1], int(match[2])) for match in found if match]


class Topic(Destination):
    """A Kafka broker; one partition, since the key of all rounds is the same."""

    name, content, wholes_between = "topic", "diff", True

    def __init__(self, folder: Path) -> None:
        self._broker = new_broker(folder)
        self.keeps_data = self._broker.keeps_data
        self._made = False

    def sink(self) -> dict[str, Any]:
        return {"type": "kafka", "brokers": [self._broker.address], "topic": TOPIC, "content": self.content}

    def start(self) -> None:
        self._broker.start()
        if not self._made:
            self._broker.create_topic(TOPIC)
            self._made = True

    @property
    def address(self) -> str:
        """Where the broker listens."""
        return self._broker.address

    def kill(self) -> None:
        self._broker.kill()

    def end(self) -> None:
        self._broker.kill()
        self._broker.release()

    @property
    def pid(self) -> int | None:
        return self._broker.pid

    def arrived(self) -> list[Arrival]:
        from confluent_kafka import Consumer, TopicPartition

        from gpuflight.subscribers.kafka_wire import Assembler

        reader = Consumer(
            {
                "bootstrap.servers": self._broker.address,
                "group.id": "chaos",
                "enable.auto.commit": False,
                "session.timeout.ms": 6000,
            }
        )
        try:
            place = TopicPartition(TOPIC, 0, 0)
            _, end = reader.get_watermark_offsets(place, timeout=30.0)
            reader.assign([place])
            assembler, found, position = Assembler(), [], 0
            while position < end:
                message = reader.poll(30.0)
                assert message is not None, f"only {position} of {end} messages can be read"
                assert message.error() is None, message.error()
                position = message.offset() + 1
                done = assembler.add(message.key(), message.headers(), message.value(), offset=message.offset())
                if done is not None:
                    found.append(Arrival(done.instance[:12], done.number, done.base))
            lost = assembler.counts
            assert not lost.foreign and not lost.malformed and not lost.corrupt, lost
            return found
        finally:
            reader.close()


class Store(Destination):
    """A MongoDB: what it says about the rounds it has, in no order; always whole ones."""

    name, tells_order = "store", False

    def __init__(self, folder: Path) -> None:
        self._server = MongoServer(folder)

    def sink(self) -> dict[str, Any]:
        return {"type": "mongodb", "uri": self._server.uri, "deliver_deadline_s": 3.0}

    def start(self) -> None:
        self._server.start()

    def kill(self) -> None:
        self._server.kill()

    def end(self) -> None:
        self._server.kill()
        self._server.release()

    @property
    def pid(self) -> int | None:
        return self._server.pid

    @property
    def uri(self) -> str:
        """Where the database listens."""
        return self._server.uri

    def arrived(self) -> list[Arrival]:
        return self.rounds_in("gpuflight")

    def rounds_in(self, database: str) -> list[Arrival]:
        """All rounds of a database."""
        with self._server.client() as client:
            rounds = client[database]["rounds"].find({}, {"instance": 1, "round": 1})
            return [Arrival(one["instance"][:12], one["round"]) for one in rounds]
