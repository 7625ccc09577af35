"""The S3 subscriber: its settings and keys, what it makes of answers, and where it never goes."""

from __future__ import annotations

import logging
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.services.certificates import make_certificates
from tests.services.s3 import ACCESS, SECRET, Fault, Front, Passed, settings
from tests.unit.test_subscribers_sinks import make_rounds

from gpuflight.errors import DeliveryError
from gpuflight.subscribers.base import Parcel
from gpuflight.subscribers.netguard import Rules, check
from gpuflight.subscribers.s3 import S3, S3Settings, bucket_url

ROUNDS = make_rounds(3)
OK = Fault(200, headers={"ETag": '"1"'}, body=b"")


@pytest.fixture(autouse=True)
def no_credentials_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def one(**more: Any) -> S3Settings:
    return S3Settings(**{"bucket": "rounds", **more})


def delivered(url: str, rules: Rules | None = None, **more: Any) -> None:
    """A start and a delivery."""
    subscriber = S3(S3Settings(**settings(url, "rounds", **more)))
    subscriber.rules = rules
    try:
        subscriber.start()
        subscriber.deliver(ROUNDS[0])
    finally:
        subscriber.close()


def failure(url: str, **more: Any) -> DeliveryError:
    with pytest.raises(DeliveryError) as caught:
        delivered(url, **more)
    text = str(caught.value)
    assert "\n" not in text
    assert not any(secret in text for secret in (SECRET, "token-of-the-tests"))
    return caught.value


def front(*faults: Fault) -> Front:
    """Gives these answers, then the last one for ever; nobody is behind it."""
    left = list(faults)
    return Front(0, lambda _: left.pop(0) if len(left) > 1 else left[0])


# --- settings, keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"bucket": "a/b"},
        {"bucket": "evil.example/"},
        {"bucket": "x"},
        {"prefix": "a//b"},
        {"prefix": "../b"},
        {"prefix": "a\nb"},
        {"prefix": "ä" * 300},
        {"namespace": "a/b"},
        {"namespace": "ä" * 200},
        {"namespace": ".."},
        {"endpoint_url": "ftp://host"},
        {"endpoint_url": "http://user:password@host"},
        {"endpoint_url": "http://host/?x=1"},
        {"region": "eu-central-1.evil.example/"},
        {"access_key": "only"},
        {"session_token": "only"},
        {"kms_key_id": "k"},
        {"addressing": "virtual", "bucket": "With_Marks"},
        {"addressing": "virtual", "endpoint_url": "http://127.0.0.1:9000"},
        {"storage_class": "cold\r\nX: y"},
        {"compression": "br"},
    ],
    ids=str,
)
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        one(**wrong)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ({}, "https://rounds.s3.us-east-1.amazonaws.com"),
        ({"region": "eu-central-1"}, "https://rounds.s3.eu-central-1.amazonaws.com"),
        ({"region": "cn-north-1"}, "https://rounds.s3.cn-north-1.amazonaws.com.cn"),
        ({"bucket": "a.b"}, "https://s3.us-east-1.amazonaws.com"),
        ({"addressing": "path"}, "https://s3.us-east-1.amazonaws.com"),
        ({"endpoint_url": "http://minio:9000"}, "http://minio:9000"),
        ({"endpoint_url": "http://minio:9000", "addressing": "virtual"}, "http://rounds.minio:9000"),
    ],
)
def test_what_is_called_is_known_beforehand(given: dict[str, Any], url: str) -> None:
    """So that it can be checked: the host that the bucket has, not only the server's."""
    assert bucket_url(one(**given)) == url
    assert S3(one(**given)).outside().urls == (url,)


def test_the_region_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    assert "eu-west-3" in bucket_url(one())
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert "eu-west-1" in bucket_url(one())
    monkeypatch.setenv("AWS_REGION", "evil.example/")
    assert "us-east-1" in bucket_url(one())


def key(data: bytes = b"{}", base: int | None = None, **more: Any) -> str:
    packed = Parcel(number=42, time_ns=1_795_996_799_999_999_999, key="0123456789abcdef-42", data=data, base=base)
    return S3(one(**more)).key(packed)


def test_keys() -> None:
    assert key(namespace="n") == "gpuflight/n/2026/11/29/235959-0123456789ab-0000000042.json", "in UTC"
    assert key(b"\x28\xb5\x2f\xfd", namespace="n").endswith(".json.zst"), "told by the bytes, not by the settings"
    assert key(b"\x1f\x8b", 41, namespace="n").endswith(".diff.json.gz")
    assert key(prefix="/a/b/", namespace="n").startswith("a/b/n/2026/")
    assert key(prefix="", namespace="n").startswith("n/2026/")
    assert key(namespace=None).split("/")[1] == os.uname().nodename
    assert key() == key(), "the same for every try"


def test_a_difference_follows_a_whole_round_and_names_it() -> None:
    subscriber = S3(one(content="diff"))
    first, second = subscriber.pack(ROUNDS[0], None), subscriber.pack(ROUNDS[1], 1)
    after_a_gap = subscriber.pack(ROUNDS[2], 1)
    assert (first.base, second.base, after_a_gap.base) == (None, 1, None)
    often = S3(one(content="diff", full_every_rounds=2))
    assert [often.pack(completed, completed.number - 1).base for completed in ROUNDS] == [0, None, 2]


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "retryable"),
    [
        (503, "SlowDown", True),
        (503, "ServiceUnavailable", True),
        (500, "InternalError", True),
        (502, "BadGateway", True),
        (507, "XMinioStorageFull", True),
        (501, "NotImplemented", False),
        (408, "RequestTimeout", True),
        (400, "RequestTimeout", True),
        (429, "TooManyRequests", True),
        (403, "RequestTimeTooSkewed", True),
        (403, "QuotaExceeded", True),
        (409, "OperationAborted", True),
        (400, "BadDigest", True),
        (403, "AccessDenied", False),
        (403, "InvalidAccessKeyId", False),
        (403, "SignatureDoesNotMatch", False),
        (404, "NoSuchBucket", False),
        (400, "EntityTooLarge", False),
        (400, "ExpiredToken", False),
        (413, "", False),
    ],
)
def test_f05_status_matrix_of_s3(status: int, code: str, retryable: bool) -> None:
    with front(Fault(status, code, "what <b>it</b> says")) as server:
        error = failure(server.url)
    assert error.retryable is retryable
    assert error.blames_item is (status == 500)
    assert str(error).startswith(f"{server.url}: bucket rounds: status {status}: {code}")
    assert len(server.seen) == 1, "retries are the engine's"


def test_f08_slow_down_says_for_how_long() -> None:
    with front(Fault(headers={"Retry-After": "7"})) as server:
        assert failure(server.url).retry_after_s == 7.0


def test_clocks_that_differ_are_named() -> None:
    with front(Fault(403, "RequestTimeTooSkewed", "too far")) as server:
        assert "set the clock of this host" in str(failure(server.url))


@pytest.mark.parametrize(
    "answer",
    [
        Fault(200, body=b"<html>log in here</html>"),
        Fault(502, body=b"<html>bad gateway"),
        Fault(500, body=b"\xff\xfe not XML"),
    ],
    ids=["portal", "gateway", "noise"],
)
def test_who_is_no_s3_server_is_tried_again(answer: Fault) -> None:
    """A portal that says 200 to everything must not swallow rounds."""
    with front(answer) as server:
        assert failure(server.url).retryable


def test_secrets_are_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    echo = Fault(403, "SignatureDoesNotMatch", f"{SECRET} token-of-the-tests {ACCESS}\u202e\n")
    with front(echo) as server:
        text = str(failure(server.url, session_token="token-of-the-tests"))
    assert "*** *** ***" in text and "\u202e" not in text
    assert not any(secret in caplog.text for secret in (SECRET, "token-of-the-tests"))
    shown = repr(S3Settings(**settings("http://h", "rounds", session_token="token-of-the-tests")))
    assert SECRET not in shown and "token-of-the-tests" not in shown


def test_what_is_sent() -> None:
    """No coding that older servers do not know; the checksum that all know; nothing of the machine."""
    with front(OK) as server:
        more = {"storage_class": "STANDARD_IA", "server_side_encryption": "aws:kms", "kms_key_id": "k"}
        delivered(server.url, content="diff", **more)
        delivered(server.url, checksum="sha256")
    sent, other = server.seen
    assert sent.method == "PUT" and sent.path.startswith("/rounds/gpuflight/node-1/2023/11/14/")
    assert sent.headers["content-md5"] and not any(name.startswith("x-amz-checksum") for name in sent.headers)
    assert "x-amz-trailer" not in sent.headers and "expect" not in sent.headers
    assert sent.headers["x-amz-storage-class"] == "STANDARD_IA"
    assert sent.headers["x-amz-server-side-encryption-aws-kms-key-id"] == "k"
    assert sent.headers["x-amz-meta-gpuflight-round"] == "1"
    assert "chunked" not in sent.headers.get("transfer-encoding", "")
    assert other.headers["x-amz-checksum-sha256"] and "content-md5" not in other.headers


def test_a_damaged_object_is_noticed_by_the_servers_answer() -> None:
    with front(Fault(200, headers={"ETag": '"1"', "x-amz-checksum-sha256": "AAAA"}, body=b"")) as server:
        error = failure(server.url, checksum="sha256")
    assert error.retryable and "damaged" in str(error)


# --- where it never goes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_are_not_followed(status: int) -> None:
    with front(OK) as elsewhere:
        redirect = Fault(status, "PermanentRedirect", "elsewhere", headers={"Location": elsewhere.url + "/rounds"})
        with front(redirect) as server:
            error = failure(server.url)
        assert not error.retryable and not elsewhere.seen


def test_a_bucket_of_another_region_is_named() -> None:
    """botocore would go there by itself."""
    there = {"x-amz-bucket-region": "eu-west-9"}
    with front(Fault(301, "PermanentRedirect", "use the right endpoint", headers=there)) as server:
        error = failure(server.url)
    assert "the bucket is in the region eu-west-9" in str(error) and not error.retryable
    assert {request.path.split("/")[1].partition("?")[0] for request in server.seen} == {"rounds"}


@pytest.mark.parametrize("address", ["169.254.169.254", "fe80::1", "100.100.100.200"])
def test_f22_link_local_and_metadata_addresses_are_never_called(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the name resolves to at the time, also for what the operator configured."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    error = failure("http://storage.example:9000")
    assert "never called" in str(error) and not error.retryable


def test_f22_over_rest_it_goes_only_where_it_may() -> None:
    with front(OK) as server:
        with pytest.raises(DeliveryError, match="loopback may not be called"):
            delivered(server.url, Rules(url_hosts=("*",)))
        assert not server.seen
        delivered(server.url, Rules(url_hosts=("127.0.0.1",)))
        assert server.seen
    virtual = S3(one(endpoint_url="http://minio:9000", addressing="virtual"))
    check(virtual.outside(), Rules(url_hosts=("*.minio",)))
    with pytest.raises(Exception, match=r"rounds\.minio:9000 is not among"):
        check(virtual.outside(), Rules(url_hosts=("minio",)))


def test_over_rest_the_credentials_of_this_host_are_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOFTHISHOST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of this host")
    ours = {"access_key": None, "secret_key": None}
    with front(OK) as server:
        with pytest.raises(DeliveryError, match="not lent"):
            delivered(server.url, Rules(url_hosts=("127.0.0.1",)), **ours)
        assert not server.seen
        delivered(server.url, **ours)
    assert "AKIAOFTHISHOST" in server.seen[0].headers["authorization"]


def test_nobody_is_asked_for_credentials_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata service of a cloud is asked only where the configuration says so."""
    with front(Fault(404)) as metadata:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
        monkeypatch.setenv("AWS_METADATA_SERVICE_TIMEOUT", "1")
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", metadata.url)
        none = {"access_key": None, "secret_key": None}
        error = failure(metadata.url, **none)
        assert "no credentials" in str(error) and not error.retryable
        assert not metadata.seen
        with pytest.raises(DeliveryError):
            delivered(metadata.url, instance_credentials=True, **none)
        assert metadata.seen


def test_the_environment_does_not_lead_it_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with front(OK) as elsewhere, front(OK) as server:
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, elsewhere.url)
        monkeypatch.setenv("AWS_USE_DUALSTACK_ENDPOINT", "true")
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "5")
        delivered(server.url)
        assert len(server.seen) == 1 and not elsewhere.seen


def test_the_bucket_in_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with front(OK) as server:
        port = int(server.url.rpartition(":")[2])
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        delivered(f"http://storage.example:{port}", addressing="virtual")
    assert server.seen[0].headers["host"] == f"rounds.storage.example:{port}"
    assert server.seen[0].path.startswith("/gpuflight/node-1/")


def test_tls_by_the_certificates_that_are_named(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "broker.pem")
    with Front(0, lambda _: OK, context) as server:
        delivered(server.url, tls_ca_file=str(tmp_path / "ca.pem"))
        assert len(server.seen) == 1 and server.url.startswith("https://")
        error = failure(server.url)
        assert error.retryable and "certificate" in str(error).lower()
        (tmp_path / "none.pem").write_text("nothing")
        assert not failure(server.url, tls_ca_file=str(tmp_path / "none.pem")).retryable
        assert len(server.seen) == 1


def test_f12_a_server_that_never_answers_is_left_at_the_deadline() -> None:
    with front(Fault(hang=True)) as server:
        error = failure(server.url, deliver_deadline_s=0.2)
    assert error.retryable and "no answer within 0.2 s" in str(error)


def test_nobody_there_is_retryable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert failure(f"http://127.0.0.1:{port}").retryable


def test_without_boto3_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] in ("botocore", "boto3")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "botocore", None)
    error = failure("http://127.0.0.1:9")
    assert str(error) == "s3 needs the package boto3: pip install 'gpuflight[s3]'" and not error.retryable


def test_the_trial_deletes_what_it_made_and_nothing_else() -> None:
    def answer(request: Passed) -> Fault:
        return Fault(200, headers={"ETag": '"1"', "x-amz-version-id": "v7"}, body=b"")

    subscriber_settings = S3Settings(**settings("http://x", "rounds"))
    with Front(0, answer) as server:
        subscriber = S3(subscriber_settings.model_copy(update={"endpoint_url": server.url}))
        subscriber.start()
        subscriber.trial(ROUNDS[0])
        subscriber.trial(ROUNDS[0])
        subscriber.close()
    put, delete, again, _ = server.seen
    assert [request.method for request in server.seen] == ["PUT", "DELETE", "PUT", "DELETE"]
    assert "/node-1/trial-" in put.path and put.path != again.path
    assert delete.path == put.path.partition("?")[0] + "?versionId=v7"


def test_a_trial_without_the_right_to_delete_is_good(caplog: pytest.LogCaptureFixture) -> None:
    with front(OK, Fault(403, "AccessDenied", "no")) as server:
        subscriber = S3(S3Settings(**settings(server.url, "rounds")))
        subscriber.start()
        subscriber.trial(ROUNDS[0])
        subscriber.close()
    assert "is left behind" in caplog.text and "AccessDenied" in caplog.text
