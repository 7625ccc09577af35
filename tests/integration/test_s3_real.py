"""Rounds in a real S3 server (moto, in a process of its own): what arrives, what happens when it fails or dies, and
that the archive is readable."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import ROOT
from tests.services.s3 import PATIENCE_S, Fault, Front, Passed, S3Server, s3_server, settings, wait_for
from tests.unit.test_subscribers_sinks import make_rounds

from gpuflight.errors import DeliveryError
from gpuflight.graph.codec import decode_graph, encode_graph
from gpuflight.graph.load import load_graph, read_rounds
from gpuflight.subscribers.delivery import SubscriberSet, SubscriberStatus
from gpuflight.subscribers.s3 import S3, S3Settings

ROUNDS = make_rounds(4)
FAST = {"retry_first_s": 0.02, "retry_max_s": 0.1}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def bucket(server: S3Server, request: pytest.FixtureRequest) -> str:
    """A new one for each test."""
    name = f"rounds-{abs(hash(request.node.nodeid)) % 10**12}"
    server.make_bucket(name)
    return name


def subscriber(url: str, bucket: str, **more: Any) -> S3:
    return S3(S3Settings(**settings(url, bucket, **{**FAST, **more})))


def status(members: SubscriberSet) -> SubscriberStatus:
    [line] = members.status()
    counts = line.statistics
    assert counts.received == counts.sent + counts.dropped + counts.queued
    return line


def numbers(keys: list[str]) -> list[int]:
    """The rounds that objects hold."""
    return [int(key.rpartition("-")[2].partition(".")[0]) for key in keys]


def download(server: S3Server, bucket: str, folder: Path) -> list[Path]:
    """All of a bucket, in the order of its keys."""
    files = []
    for key in server.keys(bucket):
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(server.get(bucket, key))
        files.append(path)
    return files


@pytest.mark.parametrize("compression", ["zstd", "gzip", "none"])
def test_what_arrives_is_the_same_graph(compression: str, server: S3Server, bucket: str, tmp_path: Path) -> None:
    members = SubscriberSet()
    members.add(subscriber(server.url, bucket, compression=compression, policy="block"))
    for completed in ROUNDS:
        members.publish(completed)
    assert members.flush(PATIENCE_S) and members.close(PATIENCE_S)
    assert status(members).statistics.sent == len(ROUNDS)
    files = download(server, bucket, tmp_path)
    assert len(files) == len(ROUNDS), "in the order of their keys, which is that of time"
    for path, completed in zip(files, ROUNDS, strict=True):
        loaded = load_graph(path)
        assert loaded.round_number == completed.number and loaded.time_ns // 10**6 == completed.time_ns // 10**6
        assert loaded.graph == decode_graph(encode_graph(completed.graph))


@pytest.mark.parametrize("compression", ["zstd", "gzip", "none"])
def test_objects_one_after_the_other_are_a_stream(
    compression: str, server: S3Server, bucket: str, tmp_path: Path
) -> None:
    """`cat` of the downloaded objects, differences among them, is what every command reads."""
    sink = subscriber(server.url, bucket, compression=compression, content="diff")
    sink.start()
    for completed in ROUNDS:
        sink.deliver(completed)
    sink.close()
    files = download(server, bucket, tmp_path)
    assert [".diff." in path.name for path in files] == [False, True, True, True]
    stream = tmp_path / f"rounds.jsonl{files[0].suffix if compression != 'none' else ''}"
    stream.write_bytes(b"".join(path.read_bytes() for path in files))
    read = list(read_rounds(stream))
    assert [each.round_number for each in read] == [1, 2, 3, 4]
    for each, completed in zip(read, ROUNDS, strict=True):
        assert each.graph == decode_graph(encode_graph(completed.graph))
    with pytest.raises(Exception, match="holds what changed only"):
        load_graph(files[1])


@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_every_command_reads_the_archive(compression: str, server: S3Server, bucket: str, tmp_path: Path) -> None:
    sink = subscriber(server.url, bucket, compression=compression)
    sink.start()
    sink.deliver(ROUNDS[0])
    sink.deliver(ROUNDS[1])
    sink.close()
    first, second = (str(path) for path in download(server, bucket, tmp_path))

    def run(program: str, *words: str) -> str:
        found = Path(sys.executable).with_name(program)
        done = subprocess.run([found, *words], capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "2 nodes" in run("gpuflight", "describe", first)
    assert "Process" in run("gpuflight", "diff", first, second)
    picture = run("gpuflight-vis", first).rpartition(" (")[0]
    assert picture == first.partition(".json")[0] + ".html" and Path(picture).stat().st_size > 1000


def test_a_slow_down_is_waited_for_and_the_object_is_the_same(server: S3Server, bucket: str) -> None:
    """Two refusals, one upload that is damaged on its way: one object, under the key that every try had."""
    faults = [Fault(), Fault(500, "InternalError", "try again"), Fault(damage=True)]

    def fault(request: Passed) -> Fault | None:
        return faults.pop(0) if faults and request.method == "PUT" else None

    with Front(server.port, fault) as front:
        members = SubscriberSet()
        members.add(subscriber(front.url, bucket, policy="block"))
        members.publish(ROUNDS[0])
        assert members.close(PATIENCE_S)
    line = status(members)
    assert (line.statistics.sent, line.statistics.retries) == (1, 3)
    assert len({request.path for request in front.seen}) == 1 and len(front.seen) == 4
    assert len(server.keys(bucket)) == 1


def test_an_answer_that_was_lost_costs_no_second_object(server: S3Server, bucket: str) -> None:
    """Stored, but the answer came too late: the next try replaces the object by itself."""
    sink = subscriber(server.url, bucket)
    sink.start()
    packed = sink.pack(ROUNDS[0], None)
    sink.send(packed)
    sink.send(packed)
    sink.close()
    assert len(server.keys(bucket)) == 1


def test_a_bucket_that_is_missing_is_one_line(server: S3Server) -> None:
    members = SubscriberSet()
    members.add(subscriber(server.url, "no-such-bucket"))
    members.publish(ROUNDS[0])
    assert members.close(PATIENCE_S)
    counts = status(members).statistics
    assert counts.dropped == 1 and counts.retries == 0
    assert "NoSuchBucket" in counts.last_error and "no-such-bucket" in counts.last_error
    assert "\n" not in counts.last_error


@pytest.fixture(scope="module")
def strict() -> Iterator[tuple[S3Server, dict[str, str]]]:
    """A server that checks who comes, by the signature of every request, and the keys of one who may do all in S3;
    moto does so in a mode of its own."""
    from botocore.session import Session

    with s3_server() as running:
        running.make_bucket("rounds")
        keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
        iam = Session().create_client("iam", "us-east-1", endpoint_url=running.url, **keys)
        iam.create_user(UserName="writer")
        found = iam.create_access_key(UserName="writer")["AccessKey"]
        allowed = {"Effect": "Allow", "Action": "s3:PutObject", "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
        iam.put_user_policy(UserName="writer", PolicyName="p", PolicyDocument=policy)
        iam.close()
        running.ask("POST", "/moto-api/reset-auth", b"0")
        yield running, {"access_key": found["AccessKeyId"], "secret_key": found["SecretAccessKey"]}


def deliver(sink: S3, what: str = "deliver") -> None:
    try:
        sink.start()
        getattr(sink, what)(ROUNDS[0])
    finally:
        sink.close()


@pytest.mark.parametrize("more", [{}, {"checksum": "sha256"}, {"prefix": "with space/ä+~"}], ids=str)
def test_what_is_signed_is_what_is_sent(strict: tuple[S3Server, dict[str, str]], more: dict[str, str]) -> None:
    """The server computes every signature anew. Storing needs no other right; a trial does not fail without it."""
    server, keys = strict
    deliver(subscriber(server.url, "rounds", **keys, **more))
    deliver(subscriber(server.url, "rounds", **keys, **more), "trial")


@pytest.mark.parametrize("wrong", ["access_key", "secret_key"])
def test_credentials_that_are_wrong_are_one_line(strict: tuple[S3Server, dict[str, str]], wrong: str) -> None:
    server, keys = strict
    keys = {**keys, wrong: "wrong-" + keys[wrong]}
    with pytest.raises(DeliveryError) as caught:
        deliver(subscriber(server.url, "rounds", **keys))
    text = str(caught.value)
    assert not caught.value.retryable and "status 403: " in text and "\n" not in text
    assert ("InvalidAccessKeyId" if wrong == "access_key" else "SignatureDoesNotMatch") in text
    assert keys["secret_key"] not in text


def test_a_trial_leaves_the_bucket_as_it_was(server: S3Server, bucket: str) -> None:
    sink = subscriber(server.url, bucket)
    sink.start()
    sink.deliver(ROUNDS[0])
    before = server.keys(bucket)
    sink.trial(ROUNDS[1])
    assert server.keys(bucket) == before
    sink.close()


def test_a_spool_delivers_all_when_the_server_was_killed(tmp_path: Path) -> None:
    """``kill -9`` in between: what came before it was there, what came after it is there then, each once, in order."""
    rounds = make_rounds(12)
    with s3_server() as server:
        server.make_bucket("rounds")
        members = SubscriberSet()
        members.add(subscriber(server.url, "rounds", policy="spool", spool_folder=str(tmp_path)))
        for completed in rounds[:4]:
            members.publish(completed)
        wait_for(lambda: status(members).statistics.sent == 4)
        before = server.keys("rounds")
        server.kill()
        for completed in rounds[4:]:
            members.publish(completed)
        wait_for(lambda: status(members).statistics.retries > 1)
        assert "refused" in status(members).statistics.last_error
        server.start()
        wait_for(lambda: status(members).statistics.sent == 12)
        assert members.close(PATIENCE_S)
        after = server.keys("rounds")
    assert status(members).statistics.dropped == 0
    assert numbers(before) == [1, 2, 3, 4] and numbers(after) == list(range(5, 13))


CHILD = """
import sys, time
from tests.services.s3 import settings
from tests.unit.test_subscribers_sinks import make_rounds
from gpuflight.subscribers.delivery import SubscriberSet
from gpuflight.subscribers.s3 import S3, S3Settings
more = dict(policy="spool", spool_folder=sys.argv[2], retry_first_s=0.02, retry_max_s=0.1)
sink, members, rounds = S3(S3Settings(**settings(sys.argv[1], "rounds", **more))), SubscriberSet(), make_rounds(10)
members.add(sink)
for completed in rounds:
    members.publish(completed)
on_disk = sum(len(sink.pack(completed, None).data) for completed in rounds)
while members.status()[0].statistics.queued_bytes < on_disk:
    time.sleep(0.01)
print("stored", flush=True)
time.sleep(600)
"""


def test_f11_what_waits_survives_kill_9_of_ours_and_is_stored_by_the_next(tmp_path: Path) -> None:
    with s3_server() as server:
        server.make_bucket("rounds")
        refusals = [True]
        with Front(server.port, lambda _: Fault() if refusals[0] else None) as front:
            child = subprocess.Popen(
                [sys.executable, "-c", CHILD, front.url, str(tmp_path)],
                cwd=ROOT,
                env={"PYTHONPATH": str(ROOT)},
                stdout=subprocess.PIPE,
            )
            try:
                assert child.stdout is not None and child.stdout.readline().strip() == b"stored"
            finally:
                child.kill()
                child.communicate()
            assert server.keys("rounds") == []
            refusals[0] = False
            members = SubscriberSet()
            members.add(subscriber(front.url, "rounds", policy="spool", spool_folder=str(tmp_path)))
            wait_for(lambda: len(server.keys("rounds")) == 10)
            assert members.close(PATIENCE_S)
        keys = server.keys("rounds")
    assert numbers(keys) == list(range(1, 11))
    assert len({key.split("/")[-1].split("-")[1] for key in keys}) == 1, "under the name of the process that made them"
