"""HTTP POST: what arrives, what each status means, and that no receiver can hold or mislead us."""

from __future__ import annotations

import gzip
import json
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from pydantic import ValidationError
from tests.fakes.http_receiver import Answer, Receiver

from gpuflight.errors import DeliveryError
from gpuflight.graph import Graph, nodes
from gpuflight.graph.codec import decode_diff, decode_graph
from gpuflight.graph.diff import apply, diff
from gpuflight.rounds import Environment, Round
from gpuflight.subscribers.base import INSTANCE_ID
from gpuflight.subscribers.delivery import SubscriberSet
from gpuflight.subscribers.http_post import HttpPost, HttpPostSettings, retry_after_s, signature
from gpuflight.subscribers.netguard import Rules

LONG_S = 60.0


def make_rounds(count: int) -> list[Round]:
    rounds, before = [], Graph()
    for number in range(1, count + 1):
        graph = Graph([nodes.Process(pid=1, start=1), nodes.Process(pid=1 + number, start=2)])
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


ROUNDS = make_rounds(5)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def sink(receiver: Receiver | str, rules: Rules | None = None, **more: Any) -> HttpPost:
    url = receiver if isinstance(receiver, str) else receiver.url
    subscriber = HttpPost(HttpPostSettings(url=url, **more))
    subscriber.rules = rules
    subscriber.start()
    return subscriber


def error_of(subscriber: HttpPost, completed: Round = ROUNDS[0]) -> DeliveryError:
    try:
        with pytest.raises(DeliveryError) as caught:
            subscriber.deliver(completed)
    finally:
        subscriber.close()
    return caught.value


@pytest.mark.parametrize(
    ("compression", "unpack"),
    [("none", bytes), ("gzip", gzip.decompress), ("zstd", lambda data: zstandard.ZstdDecompressor().decompress(data))],
)
def test_a_whole_round_arrives(receiver: Receiver, compression: Any, unpack: Any) -> None:
    post = sink(receiver, compression=compression, headers={"Authorization": "Bearer x"})
    post.deliver(ROUNDS[0])
    post.deliver(ROUNDS[1])
    post.close()
    first, second = receiver.wait_for(2)
    assert decode_graph(unpack(first.body)) == ROUNDS[0].graph
    assert json.loads(unpack(second.body))["round"] == 2
    assert first.path == "/rounds?of=us"
    assert first.headers["authorization"] == "Bearer x"
    assert first.headers["idempotency-key"] == f"{INSTANCE_ID}-1"
    assert first.headers["gpuflight-round"] == "1"
    assert first.headers.get("content-encoding", "none") == compression
    assert first.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert "gpuflight-base-round" not in first.headers and "gpuflight-signature" not in first.headers


def test_diffs_lead_from_whole_round_to_whole_round(receiver: Receiver) -> None:
    post = sink(receiver, content="diff", compression="none")
    for completed in (ROUNDS[0], ROUNDS[1], ROUNDS[2], ROUNDS[4]):
        post.deliver(completed)
    post.close()
    requests = receiver.wait_for(4)
    assert [request.headers.get("gpuflight-base-round") for request in requests] == [None, "1", "2", None]
    graph = decode_graph(requests[0].body)
    for request in requests[1:3]:
        graph = apply(decode_diff(request.body, graph)[0], graph)
    assert graph == ROUNDS[2].graph
    assert decode_graph(requests[3].body) == ROUNDS[4].graph


def test_after_a_failure_a_whole_round_follows(receiver: Receiver) -> None:
    statuses = iter([204, 400, 204])
    receiver.answer = lambda _: Answer(next(statuses))
    post = sink(receiver, content="diff")
    post.deliver(ROUNDS[0])
    with pytest.raises(DeliveryError):
        post.deliver(ROUNDS[1])
    post.deliver(ROUNDS[2])
    post.close()
    assert "gpuflight-base-round" not in receiver.received[2].headers


def test_signature_covers_key_and_body(receiver: Receiver) -> None:
    post = sink(receiver, secret="s3cret")
    post.deliver(ROUNDS[0])
    post.close()
    (request,) = receiver.wait_for(1)
    assert request.headers["gpuflight-signature"] == signature("s3cret", f"{INSTANCE_ID}-1", request.body)
    openssl = subprocess.run(
        ["openssl", "dgst", "-sha256", "-hmac", "s3cret"],
        input=f"{INSTANCE_ID}-1\n".encode() + request.body,
        capture_output=True,
        check=True,
    )
    assert request.headers["gpuflight-signature"] == "sha256=" + openssl.stdout.decode().split()[-1]


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_success(receiver: Receiver, status: int) -> None:
    receiver.answer = lambda _: Answer(status)
    post = sink(receiver)
    post.deliver(ROUNDS[0])
    post.close()


@pytest.mark.parametrize(
    ("status", "retryable"),
    [(code, False) for code in (300, 301, 302, 303, 304, 307, 308, 400, 401, 403, 404, 405, 409, 410, 413, 415, 422)]
    + [(code, True) for code in (408, 429, 500, 501, 502, 503, 504, 507, 599)],
)
def test_f05_status_matrix(receiver: Receiver, status: int, retryable: bool) -> None:
    """Row F05: 4xx permanent, except 408 and 429; 5xx retryable."""
    receiver.answer = lambda _: Answer(status, {"Location": "http://127.0.0.1:1/", "Retry-After": "7"})
    error = error_of(sink(receiver))
    assert error.retryable == retryable
    assert error.retry_after_s == (7.0 if retryable else None)
    assert error.blames_item == (status == 500)
    assert f"status {status}" in str(error)


def test_the_answer_is_quoted_in_one_short_printable_line(receiver: Receiver) -> None:
    receiver.answer = lambda _: Answer(400, body=b"no\r\n\x1b[2J such \xff thing" + b"x" * 100_000)
    text = str(error_of(sink(receiver)))
    assert "no [2J such" in text
    assert text.isprintable() and len(text) < 400


def test_redirects_are_not_followed(receiver: Receiver) -> None:
    with Receiver() as other:
        receiver.answer = lambda _: Answer(307, {"Location": other.url})
        assert "redirects are not followed" in str(error_of(sink(receiver)))
        assert other.received == []


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("120", 120.0), ("0", 0.0), ("", None), ("soon", None), ("-3", None), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
)
def test_retry_after(value: str, seconds: float | None) -> None:
    assert retry_after_s(value) == seconds


def test_retry_after_as_a_date() -> None:
    from email.utils import formatdate

    found = retry_after_s(formatdate(time.time() + 100, usegmt=True))
    assert found is not None and 90 < found <= 100


@pytest.mark.parametrize("answer", [Answer(hang=True), Answer(drip=True)], ids=["hang", "drip"])
def test_one_deadline_over_the_whole_call(receiver: Receiver, answer: Answer) -> None:
    receiver.answer = lambda _: answer
    began_s = time.monotonic()
    error = error_of(sink(receiver, deliver_deadline_s=0.3))
    assert error.retryable and "no answer within 0.3 s" in str(error)
    assert time.monotonic() - began_s < 10


def test_a_receiver_that_reads_nothing_is_left_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        post = sink(f"http://127.0.0.1:{listener.getsockname()[1]}/", deliver_deadline_s=0.3, compression="none")
        big = ROUNDS[0]
        big = Round(
            number=1,
            time_ns=0,
            duration_s=0.0,
            graph=Graph([nodes.Process(pid=1, start=1, attributes={"cmdline": "x" * (32 << 20)})]),
            diff=big.diff,
            coverage=[],
            env=big.env,
        )
        assert error_of(post, big).retryable


def test_nobody_there_is_retryable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    error = error_of(sink(f"http://127.0.0.1:{port}/"))
    assert error.retryable
    assert f"127.0.0.1:{port}" in str(error)


def test_something_that_is_not_http_is_retryable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            with listener.accept()[0] as connection:
                connection.recv(10)
                connection.sendall(b"220 mail ready\r\n")

        thread = threading.Thread(target=speak)
        thread.start()
        assert error_of(sink(f"http://127.0.0.1:{listener.getsockname()[1]}/")).retryable
        thread.join()


def test_a_connection_that_the_receiver_closed_is_opened_anew(receiver: Receiver) -> None:
    receiver.answer = lambda _: Answer(204, {"Connection": "close"})
    post = sink(receiver)
    for completed in ROUNDS:
        post.deliver(completed)
    post.close()
    assert len(receiver.received) == 5


def test_rules_hold_when_the_connection_is_made(receiver: Receiver) -> None:
    error = error_of(sink(receiver, Rules(url_hosts=("example.org",))))
    assert not error.retryable and "loopback" in str(error)
    assert receiver.received == []


def test_a_name_that_resolves_to_another_address_later_gains_nothing(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the name is resolved once per connection, and the address that was checked is the one called."""
    calls: list[str] = []

    def lookup(host: str, port: int, *args: Any, **more: Any) -> Any:
        if host != "rebind.test":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]
        calls.append(host)
        address = "127.0.0.1" if len(calls) == 1 else "169.254.169.254"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr("gpuflight.subscribers.netguard.socket.getaddrinfo", lookup)
    post = sink(f"http://rebind.test:{receiver.port}/", Rules(url_hosts=("rebind.test",), loopback=True))
    post.deliver(ROUNDS[0])
    assert receiver.received[0].headers["host"] == f"rebind.test:{receiver.port}"
    post.close()
    again = sink(f"http://rebind.test:{receiver.port}/", Rules(url_hosts=("rebind.test",), loopback=True))
    assert "169.254.169.254" in str(error_of(again))


def test_a_name_that_is_never_resolved_ends_at_the_deadline_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def lookup(*args: Any, **more: Any) -> Any:
        over.wait()
        raise OSError("no name server")

    monkeypatch.setattr("gpuflight.subscribers.netguard.socket.getaddrinfo", lookup)
    post = sink("http://never.test/", deliver_deadline_s=0.1)
    for _ in range(3):
        with pytest.raises(DeliveryError, match=r"no answer within 0\.1 s") as caught:
            post.deliver(ROUNDS[0])
        assert caught.value.retryable
    waiting = [thread for thread in threading.enumerate() if thread.name == "gpuflight-resolve"]
    assert len(waiting) == 1
    over.set()
    waiting[0].join(LONG_S)
    monkeypatch.undo()
    post.close()


def test_trial_is_marked(receiver: Receiver) -> None:
    post = sink(receiver)
    post.trial(ROUNDS[0])
    post.close()
    assert receiver.received[0].headers["gpuflight-trial"] == "true"


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "ftp://h/"},
        {"url": "http://"},
        {"url": "http://user:password@h/"},
        {"url": "http://h/ x"},
        {"url": "http://h:99999/"},
        {"url": "http://h/\r\nX: y"},
        {"url": "http://h/", "headers": {"Host": "x"}},
        {"url": "http://h/", "headers": {"A b": "x"}},
        {"url": "http://h/", "headers": {"A": "x\r\nB: y"}},
        {"url": "http://h/", "compression": "br"},
    ],
    ids=str,
)
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        HttpPostSettings(**settings)


def test_secrets_are_not_shown() -> None:
    settings = HttpPostSettings(url="http://h/", headers={"Authorization": "Bearer abc"}, secret="def")
    assert "abc" not in repr(settings) and "def" not in settings.model_dump_json()


def test_tls_needs_a_certificate_that_is_trusted(tmp_path: Path) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(tmp_path / "key"),
         "-out", str(tmp_path / "cert")],
        check=True,
        capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    with Receiver() as receiver:
        receiver._server.socket = context.wrap_socket(receiver._server.socket, server_side=True)
        url = receiver.url.replace("http:", "https:")
        assert "certificate" in str(error_of(sink(url)))
        trusting = sink(url, tls_ca_file=str(tmp_path / "cert"))
        trusting.deliver(ROUNDS[0])
        trusting.close()
        assert len(receiver.received) == 1
    with pytest.raises(DeliveryError, match="absent"):
        sink(url, tls_ca_file=str(tmp_path / "absent"))


def test_nothing_stays_open(receiver: Receiver) -> None:
    import os

    def sockets() -> int:
        return sum(1 for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))

    receiver.answer = lambda _: Answer(204, {"Connection": "close"})
    sink(receiver).close()
    before = threading.active_count()
    for _ in range(20):
        post = sink(receiver)
        post.deliver(ROUNDS[0])
        post.close()
        assert post._client is None
    assert threading.active_count() <= before + 20  # the receiver's own


def test_a_sink_that_hangs_delays_nobody_and_is_retried(receiver: Receiver) -> None:
    """Row F01, over real sockets."""
    receiver.answer = lambda _: Answer(hang=len(receiver.received) == 1)
    members = SubscriberSet()
    members.add(
        HttpPost(HttpPostSettings(url=receiver.url, deliver_deadline_s=0.2, retry_first_s=0.01, retry_max_s=0.01))
    )
    began_s = time.monotonic()
    members.publish(ROUNDS[0])
    assert time.monotonic() - began_s < 0.1
    requests = receiver.wait_for(2)
    assert requests[0].headers["idempotency-key"] == requests[1].headers["idempotency-key"]
    assert members.close(LONG_S)
    (line,) = members.status()
    assert (line.statistics.sent, line.statistics.retries) == (1, 1)
