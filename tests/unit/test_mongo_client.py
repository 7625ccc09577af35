"""Connection strings, and what each error of the driver means; nothing secret in any text."""

from __future__ import annotations

import ssl
from typing import Any

import bson.errors
import pymongo.errors
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pymongo import MongoClient
from pymongo.uri_parser import parse_uri

from gpuflight.errors import DeliveryError, MissingExtra
from gpuflight.graph import Graph
from gpuflight.round_documents import StoredRound
from gpuflight.settings.problems import problems
from gpuflight.sources import mongo_client
from gpuflight.sources.mongo_client import MongoOptions, connect, driver_errors, split_uri, trouble
from gpuflight.subscribers.mongo_writer import MongoWriter
from gpuflight.subscribers.mongodb import MongoDB, MongoDBSettings

PASSWORD = "p%40ss%2Fword"
URI = f"mongodb://someone:{PASSWORD}@db-1:27018,db-2/admin?replicaSet=r&authSource=admin"
ADDRESS = split_uri(URI)


# --- where it leads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "hosts", "srv"),
    [
        (URI, (("db-1", 27018), ("db-2", 27017)), False),
        ("mongodb://DB.example", (("db.example", 27017),), False),
        ("mongodb://[::1]:5,[fe80::2]/x?tls=true", (("::1", 5), ("fe80::2", 27017)), False),
        ("mongodb+srv://u:p@cluster.example/?w=1", (("cluster.example", 27017),), True),
        ("mongodb://u:a@b@127.0.0.1:1", (("127.0.0.1", 1),), False),
    ],
)
def test_hosts_of_a_connection_string(uri: str, hosts: tuple[tuple[str, int], ...], srv: bool) -> None:
    address = split_uri(uri)
    assert (address.hosts, address.srv) == (hosts, srv)


@pytest.mark.parametrize(
    "uri",
    [
        "", "http://x", "mongodb://", "mongodb://u:p@/", "mongodb://u:pa:ss@h:x", "mongodb://h:0", "mongodb://h:70000",
        "mongodb://[::1", "mongodb://[::1]x", "mongodb://a b", "mongodb://%2Ftmp%2Fs.sock", "mongodb+srv://a,b",
    ],
)  # fmt: skip
def test_what_is_no_connection_string_is_not_repeated(uri: str) -> None:
    with pytest.raises(ValueError) as caught:
        split_uri(uri)
    assert not uri or uri not in str(caught.value)
    with pytest.raises(ValidationError) as wrong:
        MongoDBSettings(uri=uri)  # type: ignore[arg-type]
    for _, line in problems(wrong.value, MongoDBSettings):
        assert line.startswith("uri: ") and (not uri or uri not in line)


@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_any_text_is_taken_apart_or_refused(rest: str) -> None:
    try:
        address = split_uri(f"mongodb://{rest}")
    except ValueError:
        return
    assert address.hosts and all(host and 0 < port < 65_536 for host, port in address.hosts)


@pytest.mark.parametrize(
    "uri", [URI.replace("replicaSet=r&", ""), "mongodb://h", "mongodb://u:p@h:1", "mongodb://h?w=1"]
)
def test_the_driver_goes_where_we_say_it_does(uri: str) -> None:
    """What is checked is what is connected to."""
    connection = connect(MongoOptions(uri=uri), "x")
    assert sorted(connection.client._seeds) == sorted(split_uri(uri).hosts)
    connection.close()
    pinned = connect(MongoOptions(uri=uri.replace("db-1:27018,db-2", "db-1:27018"), address="::1"), "x")
    assert [host for host, _ in pinned.client._seeds] == ["::1"]
    assert pinned.client.options.direct_connection
    assert isinstance(pinned.client, MongoClient)
    pinned.close()


PIECES = st.sampled_from(
    (*"@:/?&,=%[].", "%2C", "%40", "%2F", "%3A", "a", "B", "::1", "27", "0", "u:p@", "tls=true", "\u00e9")
)


@given(st.lists(PIECES, max_size=12).map("".join))
def test_we_never_see_another_host_than_the_driver_does(rest: str) -> None:
    uri = f"mongodb://{rest}"
    try:
        theirs = parse_uri(uri, validate=False, warn=False)["nodelist"]
    except (pymongo.errors.PyMongoError, ValueError):
        return
    try:
        ours = split_uri(uri).hosts
    except ValueError:
        return
    assert list(ours) == [(host, port) for host, port in theirs]


# --- what went wrong -------------------------------------------------------------------------------------------------


def failure(code: int, text: str = "no") -> pymongo.errors.OperationFailure:
    return pymongo.errors.OperationFailure(text, code, {"ok": 0, "errmsg": text, "code": code})


def labelled(error: pymongo.errors.PyMongoError, label: str) -> pymongo.errors.PyMongoError:
    error._add_error_label(label)
    return error


def bulk(*problems_: dict[str, Any], concerns: tuple[dict[str, Any], ...] = ()) -> pymongo.errors.BulkWriteError:
    return pymongo.errors.BulkWriteError({"writeErrors": list(problems_), "writeConcernErrors": list(concerns)})


CASES: list[tuple[BaseException, bool]] = [
    # three exceptions for a document that is too large, by how much it is
    (pymongo.errors.DocumentTooLarge("BSON document too large"), False),
    (pymongo.errors.InvalidDocument("cannot encode"), False),
    (pymongo.errors.WriteError("too large", 10334, {"errmsg": "too large", "code": 10334}), False),
    (bson.errors.InvalidDocument("cannot encode"), False),
    (bson.errors.InvalidBSON("what came back is none"), False),
    (OverflowError("MongoDB can only handle up to 8-byte ints"), False),
    (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), False),
    (TypeError("not a document"), False),
    (pymongo.errors.AutoReconnect("connection closed"), True),
    (pymongo.errors.NotPrimaryError("not primary"), True),
    (pymongo.errors.NetworkTimeout("timed out"), True),
    (pymongo.errors.ServerSelectionTimeoutError("db-1: refused (configured timeouts: x), Timeout: 5s"), True),
    (pymongo.errors.WaitQueueTimeoutError("pool is used up"), True),
    (pymongo.errors.ExecutionTimeout("time limit", 50, {"errmsg": "time limit", "code": 50}), True),
    (pymongo.errors.WTimeoutError("waiting for replication", 64, {"errmsg": "waiting", "code": 64}), True),
    (pymongo.errors.WriteConcernError("shutting down", 91, {"errmsg": "shutting down", "code": 91}), True),
    (pymongo.errors.CursorNotFound("gone", 43, {"errmsg": "gone", "code": 43}), False),
    (failure(18, "Authentication failed."), False),
    (failure(13, "not authorized on gpuflight"), False),
    (failure(11600), True),
    (failure(14031, "out of disk space"), True),
    (failure(85, "an index of that name has other options"), False),
    (labelled(failure(99999), "RetryableWriteError"), True),
    (pymongo.errors.ConfigurationError("unknown option"), False),
    (pymongo.errors.InvalidURI("bad"), False),
    (pymongo.errors.InvalidOperation("cannot use a client after close"), False),
    (bulk({"index": 0, "code": 11600, "errmsg": "interrupted"}), True),
    (bulk({"index": 0, "code": 11600, "errmsg": "a"}, {"index": 1, "code": 2, "errmsg": "b"}), False),
    (bulk(concerns=({"code": 64, "errmsg": "waiting for replication"},)), True),
    (bulk(), True),
    (ConnectionRefusedError(111, "refused"), True),
    (ssl.SSLError("certificate verify failed"), True),
]


@pytest.mark.parametrize(
    ("error", "retryable"), CASES, ids=[type(error).__name__ + str(i) for i, (error, _) in enumerate(CASES)]
)
def test_f17_every_error_of_the_driver_is_one_delivery_error(
    error: BaseException, retryable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(error, driver_errors())
    writer = MongoWriter(MongoOptions(uri=URI), "db")

    def fails() -> Any:
        raise error

    monkeypatch.setattr(writer, "_database", fails)
    with pytest.raises(DeliveryError) as caught:
        writer.write(StoredRound(namespace="n", instance="i", number=1, time_ns=1, graph=Graph()))
    assert caught.value.retryable is retryable
    text = str(caught.value)
    assert text.startswith("mongodb://db-1:27018,db-2:27017: ") and "\n" not in text and len(text) < 600


def test_no_exception_of_the_driver_is_left_out() -> None:
    """A new one is a subclass of what is caught, or this fails."""
    for module in (pymongo.errors, bson.errors):
        for thing in vars(module).values():
            if isinstance(thing, type) and issubclass(thing, Exception):
                assert issubclass(thing, driver_errors()), thing


@pytest.mark.parametrize("kind", [pymongo.errors.ConfigurationError, pymongo.errors.AutoReconnect, ValueError, OSError])
@pytest.mark.parametrize("hidden", [PASSWORD, "p@ss/word", "someone", URI])
def test_a_secret_in_an_error_is_not_passed_on(kind: type[Exception], hidden: str) -> None:
    text = trouble(kind(f"cannot use {hidden}\nat all"), ADDRESS).text
    assert PASSWORD not in text and "p@ss/word" not in text and "someone" not in text and "\n" not in text


def test_a_bulk_error_does_not_repeat_what_was_written() -> None:
    error = bulk(
        {"index": 0, "code": 2, "errmsg": "bad value", "op": {"u": {"cmdline": "--token secret"}}}, {"code": 2}
    )
    assert trouble(error, ADDRESS).text == "mongodb://db-1:27018,db-2:27017: bad value (code 2) (and 1 more)"


def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pymongo", None)
    with pytest.raises(MissingExtra, match=r"pip install 'gpuflight\[mongodb\]'"):
        mongo_client.connect(MongoOptions(uri="mongodb://h"), "mongodb")
    with pytest.raises(DeliveryError, match=r"gpuflight\[mongodb\]") as caught:
        MongoDB(MongoDBSettings(uri="mongodb://h")).start()  # type: ignore[arg-type]
    assert not caught.value.retryable


# --- set up from afar ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "urls"),
    [
        ("mongodb://u:p@db-1", ("http://db-1:27017",)),
        ("mongodb://[::1]:5/?tls=true&authSource=admin", ("http://[::1]:5",)),
        ("mongodb://a,b", None),
        ("mongodb+srv://cluster.example", None),
        ("mongodb://h/?tlsCAFile=/etc/shadow", None),
        ("mongodb://h/?authMechanism=MONGODB-AWS", None),
        ("mongodb://h/?authMechanism=MONGODB-OIDC&authMechanismProperties=ENVIRONMENT:azure", None),
        ("mongodb://h/?proxyHost=10.0.0.1", None),
        ("mongodb://h/?replicaSet=r", None),
    ],
)
def test_what_it_touches(uri: str, urls: tuple[str, ...] | None) -> None:
    found = MongoDB(MongoDBSettings(uri=uri, tls_ca_file="/ca.pem", spool_folder="/s")).outside()  # type: ignore[arg-type]
    assert (None if found is None else found.urls) == urls
    assert found is None or found.paths == ("/ca.pem", "/s/spool")


def test_the_connection_string_is_never_shown() -> None:
    settings = MongoDBSettings(uri=URI)  # type: ignore[arg-type]
    shown = f"{settings!r} {settings.model_dump_json()} {MongoDB(settings).settings}"
    assert PASSWORD not in shown and "someone" not in shown
    with pytest.raises(ValidationError) as caught:
        MongoDBSettings(uri=URI, databas="x")  # type: ignore[arg-type, call-arg]
    assert all(PASSWORD not in line for _, line in problems(caught.value, MongoDBSettings))
