"""Lines to a real Kafka: a topic per channel, the session as key, the raw line as value; killed on both sides."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.conftest import DATA, ROOT
from tests.services.kafka import Broker
from tests.unit.agent_rig import CLEAN, CLEAN_ID, QUICK, copy, lines_of, run

from gpuflight.agent.agent import Agent, make_agent
from gpuflight.agent.options import make_settings
from gpuflight.events.format.writer import SessionWriter

pytest.importorskip("confluent_kafka")

CHANNELS = ("device", "scope", "system", "sass")


@pytest.fixture
def prefix() -> str:
    return f"trace-{uuid.uuid4().hex[:10]}"


def agent_for(logs: Path, broker: Broker, state: Path, prefix: str, **flags: str) -> Agent:
    given = {"folder": str(logs), "type": "kafka", "brokers": broker.address, "topic-prefix": prefix, **QUICK}
    given |= {"state-folder": str(state), "exit-when-drained": "true"}
    given |= {name.replace("_", "-"): value for name, value in flags.items()}
    return make_agent(make_settings(given, {}))


def ship(logs: Path, broker: Broker, state: Path, prefix: str, **flags: str) -> int:
    agent = agent_for(logs, broker, state, prefix, **flags)
    try:
        return run(agent)
    finally:
        agent.close()


def sent(broker: Broker, prefix: str, channel: str) -> list[tuple[str, bytes]]:
    return [(message.key().decode(), message.value()) for message in broker.messages(f"{prefix}-{channel}")]


def wait_for(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end_s, "it does not happen"
        time.sleep(0.01)


def test_every_line_is_a_message(tmp_path: Path, kafka_broker: Broker, prefix: str) -> None:
    logs = copy(CLEAN, tmp_path / "logs")
    assert ship(logs, kafka_broker, tmp_path / "state", prefix) == 0
    everything: list[bytes] = []
    for channel in CHANNELS:
        found = sent(kafka_broker, prefix, channel)
        assert {key for key, _ in found} == {CLEAN_ID}
        everything += [value for _, value in found]
        if channel == "device":
            assert json.loads(found[0][1])["type"] == "job_start"
            assert json.loads(found[-1][1])["type"] == "shutdown"
    assert sorted(everything) == lines_of(logs), "the bytes as they lie there"
    assert (logs / CLEAN_ID / ".uploaded").exists()
    assert ship(logs, kafka_broker, tmp_path / "state", prefix) == 0
    assert len(sent(kafka_broker, prefix, "system")) == sum(
        1 for path in (logs / CLEAN_ID).glob("system.*.log.gz") for _ in lines_of_one(path)
    ), "nothing twice"


def lines_of_one(path: Path) -> list[bytes]:
    import gzip

    return [line for line in gzip.decompress(path.read_bytes()).split(b"\n") if line]


def test_sessions_of_flat_files_are_told_by_their_lines(tmp_path: Path, kafka_broker: Broker, prefix: str) -> None:
    logs = copy("v1.0.2-flat-killed", tmp_path / "logs")
    assert ship(logs, kafka_broker, tmp_path / "state", prefix, log_types="device,system") == 0
    for channel in ("device", "system"):
        for key, value in sent(kafka_broker, prefix, channel):
            assert json.loads(value)["session_id"] == key


def test_lines_that_are_no_json_go_as_they_are(tmp_path: Path, kafka_broker: Broker, prefix: str) -> None:
    logs = copy(DATA / "gpufl" / "faults" / "bad-lines", tmp_path / "logs")
    assert ship(logs, kafka_broker, tmp_path / "state", prefix) == 0
    found = [value for channel in CHANNELS for _, value in _maybe(kafka_broker, prefix, channel)]
    assert sorted(found) == lines_of(logs)


def _maybe(broker: Broker, prefix: str, channel: str) -> list[tuple[str, bytes]]:
    try:
        return sent(broker, prefix, channel)
    except KeyError:
        return []


def test_a_line_that_is_too_large_is_a_dead_letter(tmp_path: Path, kafka_broker: Broker, prefix: str) -> None:
    logs, state = tmp_path / "logs", tmp_path / "state"
    logs.mkdir()
    with SessionWriter(str(logs), "big") as writer:
        writer.event("job_start", {"ts_ns": 1_790_000_000_000_000_000, "app": "a"})
        writer.event("ptx_disassembly", {"function_name": "f", "ptx": "x" * 50_000})
        writer.event("shutdown", {"ts_ns": 1_790_000_001_000_000_000, "app": "a"})
    assert ship(logs, kafka_broker, state, prefix, max_message_bytes="20000") == 1
    found = [value for channel in CHANNELS for _, value in _maybe(kafka_broker, prefix, channel)]
    assert sorted(found) == [line for line in lines_of(logs) if len(line) < 20_000]
    assert "rejected" in (logs / "big" / ".failed").read_text()
    (letter,) = (state / "dead-letters" / "big").glob("*.lines")
    entry = json.loads(letter.read_text())
    assert len(entry["line"]) > 50_000
    assert "larger than a message may be" in entry["reason"]


def test_a_broker_that_is_not_there_yet(tmp_path: Path, make_broker: Callable[[], Broker], prefix: str) -> None:
    broker = make_broker()
    broker.kill()
    logs = copy(CLEAN, tmp_path / "logs")
    codes: list[int] = []
    agent = agent_for(logs, broker, tmp_path / "state", prefix, deadline="5")
    try:
        thread = threading.Thread(target=lambda: codes.append(agent.run(threading.Event())))
        thread.start()
        wait_for(lambda: agent._gate.reason)
        broker.start()
        thread.join(120)
    finally:
        agent.close()
    assert codes == [0]
    found = [value for channel in CHANNELS for _, value in sent(broker, prefix, channel)]
    assert sorted(set(found)) == sorted(set(lines_of(logs)))


def test_agent_and_broker_killed_while_a_session_is_written(
    tmp_path: Path, make_broker: Callable[[], Broker], prefix: str
) -> None:
    """Every line arrives at least once, with both killed in the middle."""
    broker = make_broker()
    if not broker.keeps_data:
        pytest.skip("this broker keeps everything in memory")
    logs, state = tmp_path / "logs", tmp_path / "state"
    logs.mkdir()
    command = [
        sys.executable, "-m", "gpuflight.cli", "agent", f"--folder={logs}", "--type=kafka",
        f"--brokers={broker.address}",
        f"--topic-prefix={prefix}", f"--state-folder={state}", "--exit-when-done", "--settle=0.2", "--deadline=10",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def arrived() -> int:
        try:
            return len(broker.messages(f"{prefix}-device"))
        except (KeyError, TimeoutError):
            return 0

    def write() -> None:
        with SessionWriter(str(logs), "live", rotate_bytes=20_000) as writer:
            writer.event("job_start", {"ts_ns": 1_790_000_000_000_000_000, "app": "a"})
            for number in range(600):
                columns = {"dt_ns": [1_790_000_000_000_000_000 + number], "corr_id": [number]}
                writer.rows("kernel_event_batch", columns)
                writer.flush(sync=False)
                if number in (200, 400):
                    reached.release()
                    go_on.acquire(timeout=120)
            writer.event("shutdown", {"ts_ns": 1_790_000_001_000_000_000, "app": "a"})

    reached, go_on = threading.Semaphore(0), threading.Semaphore(0)
    writer = threading.Thread(target=write)
    writer.start()
    agent = start()
    try:
        assert reached.acquire(timeout=120)
        wait_for(arrived)
        agent.kill()
        agent.communicate()
        agent = start()
        go_on.release()
        assert reached.acquire(timeout=120)
        broker.kill()
        go_on.release()
        broker.start()
        writer.join(120)
        said = agent.communicate(timeout=180)[1].decode()
    finally:
        go_on.release(2)
        agent.kill()
        agent.wait()
    assert agent.returncode == 0, said
    found = [value for channel in CHANNELS for _, value in sent(broker, prefix, channel)]
    assert sorted(set(found)) == sorted(set(lines_of(logs)))
    assert (logs / "live" / ".uploaded").exists()
