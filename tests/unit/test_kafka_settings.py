"""Settings of Kafka: what is taken, what reaches librdkafka, what may be set from afar, and how errors read."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError
from tests.fakes.librdkafka import FakeError

from gpuflight.settings.dump import MASK, dump
from gpuflight.subscribers.kafka import Kafka, KafkaSettings
from gpuflight.subscribers.kafka_errors import Reasons, delivery_error
from gpuflight.subscribers.kafka_settings import librdkafka_config, secrets_of
from gpuflight.subscribers.netguard import Refused, Rules, check

LOGIN: dict[str, Any] = {
    "security_protocol": "sasl_ssl",
    "sasl_mechanism": "SCRAM-SHA-512",
    "sasl_username": "me",
    "sasl_password": "sas1-pass",
    "tls_ca_file": "/etc/ca.pem",
    "tls_certificate_file": "/etc/own.pem",
    "tls_key_file": "/etc/own.key",
    "tls_key_password": "key-pass",
}


def settings(**values: Any) -> KafkaSettings:
    return KafkaSettings(**{"brokers": ["kafka.example:9093"], **values})


def test_what_reaches_librdkafka() -> None:
    more = {"linger.ms": 20, "enable.ssl.certificate.verification": False, "client.id": "mine"}
    found = settings(brokers=["a", "B.example.:1", "[::1]:9", "fd00::7"], **LOGIN, client=more)
    assert librdkafka_config(found) == {
        "bootstrap.servers": "a:9092,b.example:1,[::1]:9,[fd00::7]:9092",
        "client.id": "mine",
        "security.protocol": "sasl_ssl",
        "ssl.ca.location": "/etc/ca.pem",
        "ssl.certificate.location": "/etc/own.pem",
        "ssl.key.location": "/etc/own.key",
        "ssl.key.password": "key-pass",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "me",
        "sasl.password": "sas1-pass",
        "linger.ms": 20,
        "enable.ssl.certificate.verification": "false",
    }


def test_secrets_are_shown_masked_and_still_reach_librdkafka() -> None:
    client = {"ssl.keystore.password": "st0re", "ssl.key.pem": "-----BEGIN", "sasl.oauthbearer.client.secret": "0auth"}
    found = settings(**LOGIN, client={**client, "linger.ms": 5})
    shown = dump(found)
    assert shown["client"] == {**dict.fromkeys(client, MASK), "linger.ms": 5}
    assert shown["sasl_password"] == shown["tls_key_password"] == MASK
    for secret in ("st0re", "-----BEGIN", "0auth", "sas1-pass", "key-pass"):
        assert secret not in f"{shown} {found!r} {found}"
    assert {**librdkafka_config(found), **client} == librdkafka_config(found)
    assert set(secrets_of(found)) == {"st0re", "-----BEGIN", "0auth", "sas1-pass", "key-pass"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"brokers": []}, "at least 1"),
        ({"brokers": ["http://a"]}, "is not host or host:port"),
        ({"brokers": ["a:b"]}, "is not host or host:port"),
        ({"brokers": ["a:99999"]}, "is not host or host:port"),
        ({"brokers": ["me:secret@a"]}, "is not host or host:port"),
        ({"brokers": ["a/x"]}, "is not host or host:port"),
        ({"brokers": ["a,b"]}, "is not host or host:port"),
        ({"brokers": [""]}, "is not host or host:port"),
        ({"topic": "a b"}, "name of a topic"),
        ({"topic": ".."}, "name of a topic"),
        ({"security_protocol": "sasl_ssl"}, "needs sasl_mechanism"),
        ({"sasl_username": "me", "sasl_password": "x"}, "need security_protocol"),
        ({"tls_ca_file": "/x"}, "need security_protocol ssl"),
        ({**LOGIN, "tls_key_file": None}, "go together"),
        ({**LOGIN, "sasl_password": None}, "go together"),
        ({**LOGIN, "sasl_username": None, "sasl_password": None}, "needs sasl_username and sasl_password"),
        ({"client": {"bootstrap.servers": "b"}}, "is set by brokers"),
        ({"client": {"acks": "0"}}, "is set by gpuflight"),
        ({"client": {"oauth_cb": "x"}}, "is set by gpuflight"),
        ({"max_message_bytes": 100}, "greater than or equal to 2000"),
    ],
)
def test_settings_that_cannot_be(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected) as raised:
        settings(**values)
    assert "sas1-pass" not in str(raised.value.errors(include_input=False, include_context=False))


@pytest.mark.parametrize(
    "client",
    [
        {"plugin.library.paths": "/tmp/x.so"},
        {"sasl.kerberos.kinit.cmd": "reboot"},
        {"sasl.kerberos.principal": "$(reboot)"},
        {"ssl.engine.location": "/tmp/x.so"},
        {"ssl.keystore.location": "/etc/shadow"},
        {"sasl.oauthbearer.token.endpoint.url": "http://169.254.169.254/"},
        {"debug": "all"},
        {"linger.ms.x": "1"},
    ],
)
def test_f22_from_afar_only_harmless_settings_of_librdkafka(client: dict[str, Any]) -> None:
    """Some name files, some programs to run, some other hosts."""
    with pytest.raises(Refused, match="may be set in the configuration only"):
        Kafka(settings(client=client)).outside()
    Kafka(settings(client={"linger.ms": 1, "client.rack": "r1", "socket.keepalive.enable": True})).outside()


def test_f22_from_afar_nobody_logs_in_as_this_host() -> None:
    with pytest.raises(Refused, match="GSSAPI"):
        Kafka(settings(security_protocol="sasl_plaintext", sasl_mechanism="GSSAPI")).outside()


def test_f22_brokers_and_files_are_checked() -> None:
    sink = Kafka(settings(brokers=["kafka.example", "other.example:1"], **LOGIN, spool_folder="/spool"))
    outside = sink.outside()
    assert outside.urls == ("kafka://kafka.example:9092", "kafka://other.example:1")
    assert set(outside.paths) == {"/etc/ca.pem", "/etc/own.pem", "/etc/own.key", "/spool/spool"}
    everywhere = ("/etc", "/spool")
    check(outside, Rules(url_hosts=("*.example",), folders=everywhere))
    with pytest.raises(Refused, match=r"other\.example:1 is not among"):
        check(outside, Rules(url_hosts=("kafka.example",), folders=everywhere))
    with pytest.raises(Refused, match="not in a folder"):
        check(outside, Rules(url_hosts=("*.example",), folders=("/spool",)))
    with pytest.raises(Refused, match="metadata address"):
        check(Kafka(settings(brokers=["169.254.169.254"])).outside(), Rules(url_hosts=("*",)))


@pytest.mark.parametrize(
    ("name", "retryable", "expected"),
    [
        ("MSG_SIZE_TOO_LARGE", False, "lower max_message_bytes, or raise max.message.bytes of the topic t"),
        ("RECORD_LIST_TOO_LARGE", False, "lower max_message_bytes"),
        ("UNKNOWN_TOPIC_OR_PART", True, "there is no topic t"),
        ("_UNKNOWN_TOPIC", True, "there is no topic t"),
        ("TOPIC_AUTHORIZATION_FAILED", True, "no right to write to the topic t"),
        ("CLUSTER_AUTHORIZATION_FAILED", True, "no right to write to the topic t"),
        ("THROTTLING_QUOTA_EXCEEDED", True, "what happened"),
        ("NOT_ENOUGH_REPLICAS", True, "what happened"),
        ("NOT_LEADER_FOR_PARTITION", True, "what happened"),
        ("_MSG_TIMED_OUT", True, "no acknowledgement in time"),
        ("_PURGE_QUEUE", True, "no acknowledgement in time"),
        ("INVALID_RECORD", False, "what happened"),
        ("POLICY_VIOLATION", False, "what happened"),
        ("UNSUPPORTED_VERSION", False, "what happened"),
        ("a code of the future", True, "what happened"),
    ],
)
def test_f08_f13_which_errors_are_tried_again(name: str, retryable: bool, expected: str) -> None:
    problem = delivery_error(FakeError(name), "kafka.example:9092", "t", Reasons(), limit_bytes=1000)
    assert problem.retryable is retryable
    assert str(problem).startswith("kafka kafka.example:9092: ") and expected in str(problem)


def test_a_timeout_says_what_librdkafka_told_in_passing() -> None:
    reasons = Reasons(["s3cret", "s3cret-and-more"])
    reasons.note(
        FakeError(
            "_TRANSPORT",
            "a:1/bootstrap: Connect to ipv4#10.0.0.1:1 failed: Connection refused (after 3ms in state CONNECT)",
        )
    )
    reasons.note(FakeError("_ALL_BROKERS_DOWN", "1/1 brokers are down"))
    text = str(delivery_error(FakeError("_MSG_TIMED_OUT"), "a:1", "t", reasons))
    assert text == "kafka a:1: a:1: Connect to ipv4#10.0.0.1:1 failed: Connection refused"
    reasons.note(
        FakeError(
            "_AUTHENTICATION",
            "sasl_ssl://a:1/7: bad\npassword s3cret-and-more"
            " (after 9ms in state AUTH_REQ, 4 identical error(s) suppressed)",
        )
    )
    reasons.note(FakeError("_TRANSPORT", "a:1/bootstrap: Connect failed"))
    assert reasons.text == "a:1: bad password ***"
    reasons.clear()
    assert str(delivery_error(FakeError("_TIMED_OUT"), "a:1", "t", reasons)) == "kafka a:1: what happened"


def test_a_broker_that_hangs_up_is_told_by_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    reasons = Reasons()
    with caplog.at_level(logging.INFO):
        line = "[thrd:a:1/bootstrap]: a:1/bootstrap: Disconnected: receive 0 after POLLIN"
        line += " (after 26ms in state APIVERSION_QUERY)"
        reasons.log(20, "%s [%s] %s", "FAIL", "rdkafka#producer-1", line)
        reasons.note(FakeError("_ALL_BROKERS_DOWN", "1/1 brokers are down"))
    assert reasons.text == "a:1: Disconnected: receive 0 after POLLIN; it may want another security_protocol"
    assert not caplog.records


def test_a_fatal_error_is_kept_until_it_is_cleared() -> None:
    reasons = Reasons()
    reasons.note(FakeError("_FATAL", fatal=True))
    reasons.note(FakeError("_TRANSPORT"))
    assert reasons.fatal
    reasons.clear()
    assert not reasons.fatal


def test_without_the_package_it_says_what_to_install() -> None:
    script = """
import sys
sys.modules["confluent_kafka"] = None
from gpuflight.errors import DeliveryError
from gpuflight.subscribers.kafka import Kafka, KafkaSettings
try:
    Kafka(KafkaSettings(brokers=["127.0.0.1:1"])).start()
except DeliveryError as error:
    print(error, error.retryable)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "kafka needs the package confluent-kafka: pip install 'gpuflight[kafka]' False\n"


def test_nothing_is_imported_before_it_is_started() -> None:
    script = "import sys, gpuflight.cli, gpuflight.subscribers.kafka; print('confluent_kafka' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
