"""Connections to MongoDB: where a URI leads, a client with deadlines, and what an error of the driver means.

pymongo is imported at the first connection only; it belongs to the extra ``mongodb``. No text made here holds a
password or any other part of a URI than its hosts.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_plus

from msgspec import Struct

from gpuflight.errors import MissingExtra, SourceUnavailable

if TYPE_CHECKING:
    from pymongo import MongoClient

DEFAULT_PORT = 27017
SELECTION_S = 10.0
"""Longest time to find a server that answers, within the deadline of the call."""

_POOL_AT_MOST = 4
_CLOSE_S = 2.0
# Errors that pass by themselves or with someone's help: a server that stops, steps down, is busy, out of disk.
_RETRYABLE_CODES = frozenset(
    (
        6, 7, 24, 46, 50, 63, 64, 79, 89, 91, 100, 112, 133, 134, 150, 189, 202, 234, 251, 262, 267, 317, 334, 358, 384,
        402, 9001, 10058, 10107, 11600, 11602, 13388, 13435, 13436, 14031, 16340, 17413,
    )
)  # fmt: skip
_REFUSED_CODES = {8000: "refused", 11: "no such user", 13: "not allowed", 18: "user or password refused"}


class MongoAddress(Struct, frozen=True):
    """Where a URI leads. ``hosts`` are (name, port), names in lower case; ``srv``: one name that DNS makes several of.
    ``options`` are those of the query, names in lower case."""

    hosts: tuple[tuple[str, int], ...]
    srv: bool
    options: dict[str, str]
    secrets: tuple[str, ...]

    @property
    def where(self) -> str:
        """For people: the hosts."""
        found = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"mongodb{'+srv' if self.srv else ''}://{found}"


class MongoOptions(Struct, frozen=True, kw_only=True):
    """How to connect. ``address``: connect to this address in place of the URI's only host, and to nobody else."""

    uri: str
    timeout_s: float = 30.0
    tls_ca_file: str = ""
    tls_certificate_key_file: str = ""
    address: str = ""


class Trouble(Struct, frozen=True):
    """What an error means: one line for people, and whether the same may succeed later."""

    text: str
    retryable: bool


def split_uri(uri: str) -> MongoAddress:
    """A connection string, taken apart. Raises ValueError, without the string."""
    scheme, mark, rest = uri.partition("://")
    if not mark or scheme not in ("mongodb", "mongodb+srv"):
        raise ValueError("a connection string begins with mongodb:// or mongodb+srv://")
    body, _, query = rest.partition("?")
    authority, _, _ = body.partition("/")
    user, at, places = authority.rpartition("@")
    secrets = []
    if at:
        for part in user.split(":", 1):
            secrets += [part, unquote_plus(part)]
    options = {}
    for item in query.replace(";", "&").split("&"):
        name, mark, value = item.partition("=")
        if mark:
            options[name.lower()] = unquote_plus(value)
            if name.lower() in ("authmechanismproperties", "tlscertificatekeyfilepassword"):
                secrets += [value, unquote_plus(value)]
    if any(ord(char) <= 32 or ord(char) == 127 for char in places) or not places:
        raise ValueError("a connection string without a host, or with white space in it")
    hosts = tuple(_host(place) for place in places.split(","))
    if scheme == "mongodb+srv" and len(hosts) != 1:
        raise ValueError("mongodb+srv:// takes one name")
    return MongoAddress(hosts, scheme == "mongodb+srv", options, tuple({secret for secret in secrets if secret}))


def journaled(uri: str) -> str:
    """The connection string, asking that a write counts when it is in the journal, unless it says otherwise itself:
    what was acknowledged must not vanish with a database that is killed. Raises ValueError as ``split_uri``."""
    options = split_uri(uri).options
    if "journal" in options or options.get("w") == "0":
        return uri
    body, mark, query = uri.partition("?")
    if "/" not in body.partition("://")[2]:
        body += "/"
    return f"{body}?{query + '&' if mark and query else ''}journal=true"


def _host(place: str) -> tuple[str, int]:
    if place.startswith("["):
        host, bracket, rest = place[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise ValueError("an address of IPv6 stands in brackets: [::1]:27017")
        port = rest[1:]
    else:
        host, _, port = place.partition(":")
    host = unquote_plus(host)
    if not host or "/" in host:
        raise ValueError("a connection string with a host that is none (sockets of files are not supported)")
    if not port:
        return host.lower(), DEFAULT_PORT
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65_536):
        raise ValueError("a connection string with a port that is none; is a character of the password not escaped?")
    return host.lower(), int(port)


class Connection:
    """A client of the driver, and the threads that it started."""

    def __init__(self, client: MongoClient[dict[str, Any]]) -> None:
        self.client = client
        self._before = set(threading.enumerate())
        self._threads: list[threading.Thread] = []

    def connected(self) -> None:
        """To be called after the first answer: the driver's threads are there now."""
        self._threads = [
            thread
            for thread in threading.enumerate()
            if thread not in self._before and thread.name.startswith("pymongo_")
        ]

    def close(self) -> None:
        """Give back everything. The driver's threads end a little later than it says so: they are waited for."""
        self.client.close()
        deadline_s = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))


def connect(options: MongoOptions, what: str) -> Connection:
    """A connection; it is made when it is first used. ``what`` needs it. Raises MissingExtra, and what ``trouble``
    tells of."""
    try:
        import pymongo
    except ImportError as error:
        raise MissingExtra(error.name or "pymongo", "mongodb", what) from error
    selection_ms = int(1000 * min(options.timeout_s, SELECTION_S))
    more: dict[str, Any] = {
        "appname": "gpuflight",
        "connect": False,
        "connectTimeoutMS": selection_ms,
        "serverSelectionTimeoutMS": selection_ms,
        "timeoutMS": max(1, int(1000 * options.timeout_s)),
        "maxPoolSize": _POOL_AT_MOST,
        "datetime_conversion": "DATETIME_AUTO",  # a date beyond Python's is no error
    }
    if options.tls_ca_file or options.tls_certificate_key_file:
        more["tls"] = True
    if options.tls_ca_file:
        more["tlsCAFile"] = options.tls_ca_file
    if options.tls_certificate_key_file:
        more["tlsCertificateKeyFile"] = options.tls_certificate_key_file
    uri = options.uri
    if options.address:
        # What a server says of other members of its set is not followed.
        more["directConnection"] = True
        address = split_uri(uri)
        literal = f"[{options.address}]" if ":" in options.address else options.address
        uri = _with_host(uri, f"{literal}:{address.hosts[0][1]}")
    return Connection(pymongo.MongoClient(uri, **more))


def _with_host(uri: str, host: str) -> str:
    scheme, _, rest = uri.partition("://")
    cut = min(position for position in (rest.find("/"), rest.find("?"), len(rest)) if position >= 0)
    user, at, _ = rest[:cut].rpartition("@")
    return f"{scheme}://{user}{at}{host}{rest[cut:]}"


def driver_errors() -> tuple[type[BaseException], ...]:
    """Everything that a call of the driver may raise."""
    import bson.errors
    import pymongo.errors

    return (pymongo.errors.PyMongoError, bson.errors.BSONError, OSError, ValueError, TypeError, ArithmeticError)


def trouble(error: BaseException, address: MongoAddress) -> Trouble:
    """What an error of ``driver_errors`` means."""
    import pymongo.errors as errors

    if isinstance(error, errors.BulkWriteError):
        return _of_bulk(error, address)
    retryable = isinstance(error, errors.ConnectionFailure | OSError | errors.WaitQueueTimeoutError)
    if isinstance(error, errors.PyMongoError):
        retryable = retryable or error.timeout or error.has_error_label("RetryableWriteError")
        retryable = retryable or error.has_error_label("TransientTransactionError")
    text = str(error) or type(error).__name__
    if isinstance(error, errors.ServerSelectionTimeoutError):
        text = f"no server answers: {text.partition(' (configured timeouts')[0].partition(', Timeout: ')[0]}"
    elif isinstance(error, errors.OperationFailure):
        retryable = retryable or error.code in _RETRYABLE_CODES
        text = _of_code(error.code, (error.details or {}).get("errmsg") or text)
    elif isinstance(error, errors.ConfigurationError):
        retryable = False
    elif error.__class__.__name__ == "ExecutionTimeout" or getattr(error, "timeout", False):
        text = f"no answer in time: {text}"
    return Trouble(_line(text, address), retryable)


def _of_bulk(error: Any, address: MongoAddress) -> Trouble:
    details = error.details or {}
    problems = [*details.get("writeErrors", ()), *details.get("writeConcernErrors", ())]
    retryable = bool(problems) and all(
        problem.get("code") in _RETRYABLE_CODES or problem in details.get("writeConcernErrors", ())
        for problem in problems
    )
    if not problems:
        return Trouble(_line("the server refused a batch without a reason", address), True)
    text = _of_code(problems[0].get("code"), str(problems[0].get("errmsg", "")))
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Trouble(_line(text, address) + more, retryable)


def _of_code(code: int | None, text: str) -> str:
    known = _REFUSED_CODES.get(code or 0)
    return f"{known}: {text}" if known else f"{text} (code {code})" if code else text


def _line(text: str, address: MongoAddress) -> str:
    for secret in sorted(address.secrets, key=len, reverse=True):
        if len(secret) > 2:  # a short one stands in words by chance, and tells nothing there
            text = text.replace(secret, "***")
    words = " ".join("".join(char if char.isprintable() else " " for char in text[:2000]).split())
    return f"{address.where}: {words[:400]}"


def source_unavailable(error: BaseException, address: MongoAddress) -> SourceUnavailable:
    """An error of the driver, as a source tells it."""
    return SourceUnavailable(trouble(error, address).text)
