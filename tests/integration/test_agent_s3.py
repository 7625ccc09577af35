"""Copies of windows in S3: under keys that no other window has, found whole by their checksum, or not counted."""

from __future__ import annotations

import base64
import gzip
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.http_receiver import Answer, Received, Receiver
from tests.services.kafka import Broker
from tests.services.s3 import ACCESS, SECRET, Fault, Front, S3Server, s3_server
from tests.unit.agent_rig import CLEAN, CLEAN_ID, QUICK, Store, copy, quick_retries, run, ship

from gpuflight.agent.agent import make_agent
from gpuflight.agent.options import make_settings

pytest.importorskip("boto3")
__all__ = ["quick_retries"]
pytestmark = pytest.mark.usefixtures("quick_retries")

BUCKET = "gpu-flight-logs"
HOST = os.uname().nodename


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as made:
        yield made


@pytest.fixture
def bucket(server: S3Server, request: pytest.FixtureRequest) -> str:
    name = f"b{abs(hash(request.node.name)) % 10**12}"
    server.make_bucket(name)
    return name


def flags(url: str, bucket: str, **more: str) -> dict[str, str]:
    found = {"endpoint": url, "bucket": bucket, "region": "us-east-1", "access_key": ACCESS, "secret_key": SECRET}
    return {f"archiver_{name}": value for name, value in {**found, **more}.items()}


def test_every_window_is_kept_under_its_own_key(tmp_path: Path, server: S3Server, bucket: str) -> None:
    """gpufl-agent's keys are file names only, so that each session overwrites the one before."""
    logs = copy(CLEAN, tmp_path / "logs")
    copy(CLEAN / CLEAN_ID, logs / "another")
    with Receiver(Store()) as receiver:
        assert ship(logs, receiver, tmp_path / "state", **flags(server.url, bucket)) == 0
    keys = server.keys(bucket)
    assert len(keys) == 38
    for session in (CLEAN_ID, "another"):
        for path in (logs / session).glob("*.log.gz"):
            key = f"raw-events/{HOST}/{session}/{path.name.partition('.')[0]}/{path.name}"
            assert server.get(bucket, key) == path.read_bytes()
    assert len(list(logs.rglob("*.log.gz"))) == 38, "nothing is deleted"


def test_what_is_archived_is_deleted_if_asked(tmp_path: Path, server: S3Server, bucket: str) -> None:
    logs = copy(CLEAN, tmp_path / "logs")
    store = Store(acknowledges=False)
    with Receiver(store) as receiver:
        assert ship(logs, receiver, tmp_path / "state", **flags(server.url, bucket, delete="true", prefix="x/")) == 0
        assert ship(logs, receiver, tmp_path / "state", **flags(server.url, bucket, delete="true", prefix="x/")) == 0
    assert len(server.keys(bucket)) == 19
    assert not list(logs.rglob("*.log.gz"))
    assert len(list((logs / CLEAN_ID).glob(".gpufl-window-ack.*"))) == 19, "the holes are explained"
    assert set(store.windows.values()) == {1}


def test_an_upload_that_arrives_damaged_is_made_again(tmp_path: Path, server: S3Server, bucket: str) -> None:
    logs = copy(CLEAN, tmp_path / "logs")
    faults = [Fault(damage=True), Fault(), Fault(status=500, code="InternalError")]
    store = Store()
    with Front(server.port, lambda _: faults.pop(0) if faults else None) as front, Receiver(store) as receiver:
        assert ship(logs, receiver, tmp_path / "state", **flags(front.url, bucket)) == 0
        assert not faults
    for path in (logs / CLEAN_ID).glob("*.log.gz"):
        key = f"raw-events/{HOST}/{CLEAN_ID}/{path.name.partition('.')[0]}/{path.name}"
        assert server.get(bucket, key) == path.read_bytes()
    assert set(store.windows.values()) == {1}, "a window is not sent again since its archive was slow"


def test_the_checksum_that_is_asked_for_goes_along(tmp_path: Path, server: S3Server, bucket: str) -> None:
    logs = copy(CLEAN, tmp_path / "logs")
    with Front(server.port, lambda _: None) as front, Receiver(Store()) as receiver:
        assert ship(logs, receiver, tmp_path / "state", **flags(front.url, bucket, checksum="sha256")) == 0
        for seen in front.seen:
            digest = base64.b64encode(hashlib.sha256(seen.body).digest()).decode()
            assert seen.headers["x-amz-checksum-sha256"] == digest
    assert len(server.keys(bucket)) == 19


def test_a_session_is_not_uploaded_before_it_is_archived(tmp_path: Path, server: S3Server, bucket: str) -> None:
    logs, state = copy(CLEAN, tmp_path / "logs"), tmp_path / "state"
    faults = [Fault()] * 1000
    store = Store()
    with Front(server.port, lambda _: faults.pop(0) if faults else None) as front, Receiver(store) as receiver:
        assert ship(logs, receiver, state, give_up_after="0.5", **flags(front.url, bucket)) == 3
        assert not (logs / CLEAN_ID / ".uploaded").exists()
        assert store.completed == []
        faults.clear()
        assert ship(logs, receiver, state, **flags(front.url, bucket)) == 0
    assert len(server.keys(bucket)) == 19
    assert set(store.windows.values()) == {1}
    assert store.completed == [CLEAN_ID]


def test_wrong_keys_are_told_without_being_shown(
    tmp_path: Path, server: S3Server, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    logs = copy(CLEAN, tmp_path / "logs")
    secret = "hush-hush-hush"
    faults = [Fault(status=403, code="AccessDenied", message=f"not {secret}")] * 1000
    with Front(server.port, lambda _: faults.pop(0) if faults else None) as front, Receiver(Store()) as receiver:
        wrong = flags(front.url, bucket, secret_key=secret)
        assert ship(logs, receiver, tmp_path / "state", give_up_after="0.5", **wrong) == 3
    assert not (logs / CLEAN_ID / ".uploaded").exists()
    assert not (logs / CLEAN_ID / ".failed").exists()
    assert "not archived" in caplog.text and "AccessDenied" in caplog.text
    assert secret not in caplog.text


def test_a_window_too_large_to_be_kept(
    tmp_path: Path, server: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpuflight.agent import archive

    monkeypatch.setattr(archive, "MAX_BYTES", 1300)
    logs = copy(CLEAN, tmp_path / "logs")
    store = Store()
    with Receiver(store) as receiver:
        assert ship(logs, receiver, tmp_path / "state", **flags(server.url, bucket)) == 1
    assert "too large to be archived" in (logs / CLEAN_ID / ".failed").read_text()
    assert len(server.keys(bucket)) == 18
    assert len(store.windows) == 19


def test_windows_of_a_killed_session_are_kept_as_they_lie_there(tmp_path: Path, server: S3Server, bucket: str) -> None:
    logs = copy("v1.3.0rc1-killed", tmp_path / "logs")
    with Receiver(Store()) as receiver:
        assert ship(logs, receiver, tmp_path / "state", **flags(server.url, bucket)) == 0
    keys = server.keys(bucket)
    (session,) = logs.iterdir()
    raw = [path for path in (session / ".tmp").iterdir() if path.stat().st_size]
    assert len(raw) >= 20
    for path in raw:
        key = f"raw-events/{HOST}/{session.name}/{path.name.partition('.')[0]}/{path.name}"
        assert key in keys
        assert server.get(bucket, key) == path.read_bytes()


def test_beside_kafka(tmp_path: Path, server: S3Server, bucket: str, kafka_broker: Broker, topic: str) -> None:
    logs = copy(CLEAN, tmp_path / "logs")
    given = {"folder": str(logs), "brokers": kafka_broker.address, "topic-prefix": topic, **QUICK}
    given |= {"state-folder": str(tmp_path / "state"), "exit-when-drained": "true"}
    given |= {name.replace("_", "-"): value for name, value in flags(server.url, bucket, delete="true").items()}
    agent = make_agent(make_settings(given, {}))
    try:
        assert run(agent) == 0
    finally:
        agent.close()
    keys = server.keys(bucket)
    assert len(keys) == 19
    for key in keys:
        name = key.rpartition("/")[2]
        assert server.get(bucket, key) == (CLEAN / CLEAN_ID / name).read_bytes()
    assert not list(logs.rglob("*.log.gz"))
    assert (logs / CLEAN_ID / ".uploaded").exists()


def test_lines_by_http_are_archived_as_windows(tmp_path: Path, server: S3Server, bucket: str) -> None:
    logs = copy(CLEAN, tmp_path / "logs")
    received: list[bytes] = []

    def answer(request: Received) -> Answer:
        received.append(gzip.decompress(request.body) if request.body else b"")
        return Answer(200)

    with Receiver(answer) as receiver:
        assert ship(logs, receiver, tmp_path / "state", live="true", **flags(server.url, bucket)) == 0
    assert len(server.keys(bucket)) == 19
    assert b"".join(received).count(b"\n") == sum(
        gzip.decompress(path.read_bytes()).count(b"\n") for path in (CLEAN / CLEAN_ID).glob("*.log.gz")
    )
