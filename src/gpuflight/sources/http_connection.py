"""One connection that GET requests go over, one after the other, each with one deadline for all of it.

httptools, the parser that uvicorn uses, reads the answers: a fifth of the CPU time of httpx, which counts where a
hundred peers are asked all the time (benchmarks/bench_remote.py). It comes with the extra ``server`` and is imported
with this module, which ``sources.http`` does at the first request. No redirects, no proxies, no cookies.
"""

from __future__ import annotations

import socket
import ssl
import time
from functools import lru_cache
from urllib.parse import urlsplit

import httptools
from msgspec import Struct

_RECEIVE_BYTES = 1 << 18
_HEAD_BYTES_AT_MOST = 1 << 16
_KEPT_HEADERS = {
    name.encode(): name
    for name in ("content-encoding", "content-length", "date", "etag", "gpuflight-time-ns", "retry-after",
                 "transfer-encoding")
}  # fmt: skip
_NO_DELAY = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
_BODILESS = (204, 304)


class Closed(Exception):
    """The other side had closed the connection before it answered anything: it may be tried on another one."""


class TooMuch(ValueError):
    """The answer is larger, or takes longer, than it may."""


class Origin(Struct, frozen=True):
    """Where a connection leads."""

    tls: bool
    host: str
    port: int

    @property
    def authority(self) -> bytes:
        """As it stands in a Host header."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        plain = self.port == (443 if self.tls else 80)
        return (name if plain else f"{name}:{self.port}").encode("idna" if not name.isascii() else "ascii")


@lru_cache(maxsize=4096)
def split(url: str) -> tuple[Origin, bytes]:
    """Origin and target (path and query) of a URL. Raises ValueError for what is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"not an http URL: {url}")
    tls = parts.scheme == "https"
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if any(ord(character) <= 32 or ord(character) > 126 for character in target):
        raise ValueError(f"a URL must be ASCII, the rest %-escaped: {url}")
    return Origin(tls, parts.hostname, parts.port or (443 if tls else 80)), target.encode()


class Response:
    """An answer as it is read: httptools calls the ``on_`` methods."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body: list[bytes] = []
        self.size = 0
        self.received_ns = 0
        self.complete = False
        self.keep_alive = False
        self.parser = httptools.HttpResponseParser(self)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; of several of one name the first counts."""
        known = _KEPT_HEADERS.get(name) or _KEPT_HEADERS.get(name.lower())
        if known is not None:
            self.headers.setdefault(known, value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        """The head is here."""
        self.received_ns = time.time_ns()
        self.status = self.parser.get_status_code()
        self.keep_alive = self.parser.should_keep_alive()

    def on_body(self, part: bytes) -> None:
        """A part of the body, without the framing."""
        self.body.append(part)
        self.size += len(part)

    def on_message_complete(self) -> None:
        """All of it is here. An interim answer (1xx) is followed by the real one."""
        if self.status >= 200:
            self.complete = True
        else:
            self.headers.clear()
            self.received_ns = 0


class Connection:
    """Used by one thread at a time. ``sent_ns``: our wall clock just before the last request went out."""

    def __init__(self, origin: Origin, context: ssl.SSLContext | None, deadline_s: float) -> None:
        """Connect. Raises OSError (also ssl.SSLError), TimeoutError at the deadline."""
        self.origin = origin
        self.sent_ns = 0
        self.idle_since_s = 0.0
        raw = _connected(origin, deadline_s)
        try:
            raw.setsockopt(*_NO_DELAY)
            if context is not None:
                raw.settimeout(_left_s(deadline_s))
                raw = context.wrap_socket(raw, server_hostname=origin.host)
        except BaseException:
            raw.close()
            raise
        self._socket = raw

    def get(self, target: bytes, headers: bytes, max_bytes: int, deadline_s: float) -> Response:
        """Ask for ``target`` with ``headers`` (whole lines). Raises Closed, TooMuch, OSError, TimeoutError, ValueError;
        after any of them the connection is to be closed."""
        head = b"GET %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (target, self.origin.authority, headers)
        answer = Response()
        feed, receive, settimeout = answer.parser.feed_data, self._socket.recv, self._socket.settimeout
        taken = 0
        try:
            settimeout(_left_s(deadline_s))
            self.sent_ns = time.time_ns()
            self._socket.sendall(head)
            while not answer.complete:
                part = receive(_RECEIVE_BYTES)
                if not part:
                    break
                taken += len(part)
                feed(part)
                if answer.size > max_bytes:
                    raise TooMuch(f"the answer is larger than {max_bytes} bytes")
                if not answer.received_ns and taken > _HEAD_BYTES_AT_MOST:
                    raise TooMuch(f"the head of the answer is larger than {_HEAD_BYTES_AT_MOST} bytes")
                if not answer.complete:
                    settimeout(_left_s(deadline_s))
        except TimeoutError:
            if taken:
                raise TooMuch("the answer took too long") from None
            raise
        except (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError):
            if not taken:
                raise Closed from None
            raise
        except httptools.HttpParserError as error:
            if not answer.complete:  # else it is something after the answer that nobody asked for
                raise ValueError(f"not HTTP: {str(error) or type(error).__name__}") from None
            answer.keep_alive = False
        if not answer.complete:
            self._ended(answer, taken)
        return answer

    def _ended(self, answer: Response, taken: int) -> None:
        """The connection ended before the parser said that the answer did: right only where its end is the end."""
        if not taken:
            raise Closed
        framed = "content-length" in answer.headers or "transfer-encoding" in answer.headers
        if not answer.received_ns or (framed and answer.status not in _BODILESS):
            raise ValueError("the answer was cut off")
        answer.keep_alive = False

    def close(self) -> None:
        """Close it. May be called twice, and by another thread to wake the one that waits."""
        self._socket.close()


def _connected(origin: Origin, deadline_s: float) -> socket.socket:
    """A TCP connection to the first address that answers; the deadline is for all of them together."""
    failure: OSError = OSError(f"{origin.host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM):
        made = socket.socket(family, kind, protocol)
        try:
            made.settimeout(_left_s(deadline_s))
            made.connect(address)
            return made
        except OSError as error:
            made.close()
            failure = error
    raise failure


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


__all__ = ["Closed", "Connection", "Origin", "Response", "TooMuch", "split"]
