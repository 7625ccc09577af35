"""HTTP to other instances: one GET with a deadline for the whole of it, a validator, compression, and a size limit.

No redirects are followed, and proxies and credentials of the environment are not used, so a token goes to the host it
is for and nowhere else.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import zstandard
from msgspec import Struct, field
from msgspec.structs import replace

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.recording import Tape

if TYPE_CHECKING:
    import ssl

    from gpuflight.sources.http_connection import Connection, Origin, Response

_IDLE_CONNECTIONS_AT_MOST = 512
_IDLE_S = 120.0
_CHUNK = 1 << 20


class Request(Struct, frozen=True):
    """What to ask for. ``query`` follows the URL, which has none. ``token`` is sent as Bearer; ``etag`` of what the
    asker has already; ``ca_file`` replaces the system's certificate authorities."""

    url: str
    query: str = ""
    token: str = ""
    etag: str = ""
    timeout_s: float = 5.0
    max_bytes: int = 256 << 20
    ca_file: str = ""


class Answer(Struct):
    """What came back. ``body`` is decompressed. ``sent_ns`` and ``received_ns`` are this host's wall clock around the
    exchange up to the answer's headers. With ``error`` set there is no answer, and the text says why; ``cut``: since it
    was larger, or took longer, than it may."""

    url: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    sent_ns: int = 0
    received_ns: int = 0
    wire_bytes: int = 0
    error: str = ""
    cut: bool = False


class Http:
    """The client. ``get`` may be called by many threads at once.

    It is not taped itself, since it runs beside the rounds; ``taped`` is how what it brought enters a recording.
    """

    def __init__(self, tape: Tape | None = None) -> None:
        self._tape = tape
        self._idle: dict[tuple[Origin, str], list[Connection]] = {}
        self._idle_count = 0
        self._contexts: dict[str, ssl.SSLContext] = {}
        self._lock = threading.Lock()

    @property
    def replaying(self) -> bool:
        """Whether nothing may be asked, and answers come from a recording."""
        return self._tape is not None and self._tape.mode == "replay"

    @property
    def recording(self) -> bool:
        """Whether what is used of an answer must go through ``taped``."""
        return self._tape is not None and self._tape.mode == "record"

    def taped(self, key: str, live: Callable[[], Answer]) -> Answer:
        """The answer that stood for ``key`` this round: what ``live`` gives, or what was recorded of it.

        Raises SourceUnavailable for what a recording does not hold, or holds damaged.
        """
        if self._tape is None:
            return live()
        now: list[Answer] = []

        def head() -> bytes:
            now.append(live())
            return msgspec.msgpack.encode(replace(now[0], body=b""))

        # Apart, since a tape keeps what is other than the last time: the body changes seldom, the rest always.
        raw = self._tape.ask("http", key, head)
        try:
            answer = msgspec.msgpack.decode(raw, type=Answer)
            answer.body = self._tape.ask("http", key + " body", lambda: now[0].body)
            return answer
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SourceUnavailable(f"the recorded answer of {key} cannot be read: {error}") from None

    def get(self, request: Request) -> Answer:
        """Ask; never raises for what the network or the other side does, ``error`` says it.

        Raises SourceUnavailable if httptools is not installed, or the CA file cannot be used.
        """
        http = library()
        answer = Answer(request.url, sent_ns=time.time_ns())
        deadline_s = time.monotonic() + request.timeout_s
        try:
            origin, target = http.split(request.url)
            if request.query:
                target = b"%b?%b" % (target, request.query.encode("ascii"))
            got = self._exchange(origin, target, request, deadline_s, answer)
            headers = got.headers
            answer.status, answer.received_ns, answer.headers = got.status, got.received_ns, headers
            raw = got.body[0] if len(got.body) == 1 else b"".join(got.body)
            answer.wire_bytes = len(raw)
            answer.body = decompress(raw, headers.get("content-encoding", ""), request.max_bytes)
        except http.TooMuch as error:
            answer.error, answer.cut = str(error), True
        except http.Closed:
            answer.error = "it closed the connection"
        except TimeoutError:
            answer.error = f"no answer within {request.timeout_s:g} s"
        except OSError as error:
            answer.error = error.strerror or str(error) or type(error).__name__
        except (ValueError, zlib.error, zstandard.ZstdError) as error:
            answer.error = str(error) or type(error).__name__
            answer.cut = isinstance(error, Swelling)
        return answer

    def _exchange(self, origin: Origin, target: bytes, request: Request, deadline_s: float, answer: Answer) -> Response:
        """On a connection that is open already, else on a new one."""
        http = library()
        headers = _head(request.token)
        if request.etag:
            headers += b"If-None-Match: %b\r\n" % _line(request.etag)
        place = (origin, request.ca_file)
        connection = self._take(place)
        while True:
            again = connection is not None
            if connection is None:
                context = self._context(request.ca_file) if origin.tls else None
                connection = http.Connection(origin, context, deadline_s)
            try:
                got = connection.get(target, headers, request.max_bytes, deadline_s)
            except http.Closed:
                connection.close()
                if not again:
                    raise
                connection = None  # it was closed while it was idle, as any server may; a GET can be repeated
                continue
            except BaseException:
                connection.close()
                raise
            answer.sent_ns = connection.sent_ns
            if got.keep_alive:
                self._keep(place, connection)
            else:
                connection.close()
            return got

    def close(self) -> None:
        """Close all connections that are idle. May be called twice."""
        with self._lock:
            idle, self._idle, self._idle_count = self._idle, {}, 0
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def _take(self, place: tuple[Origin, str]) -> Connection | None:
        with self._lock:
            connections = self._idle.get(place)
            if not connections:
                return None
            connection = connections.pop()
            self._idle_count -= 1
            if not connections:
                del self._idle[place]
        if time.monotonic() - connection.idle_since_s > _IDLE_S:
            connection.close()
            return None
        return connection

    def _keep(self, place: tuple[Origin, str], connection: Connection) -> None:
        connection.idle_since_s = time.monotonic()
        with self._lock:
            if self._idle_count < _IDLE_CONNECTIONS_AT_MOST:
                self._idle.setdefault(place, []).append(connection)
                self._idle_count += 1
                return
        connection.close()

    def _context(self, ca_file: str) -> ssl.SSLContext:
        with self._lock:
            context = self._contexts.get(ca_file)
            if context is None:
                import ssl

                try:
                    context = ssl.create_default_context(cafile=ca_file or None)
                except OSError as error:  # also what is no certificate
                    reason = error.strerror or str(error)
                    raise SourceUnavailable(f"the CA file {ca_file} cannot be used: {reason}") from None
                self._contexts[ca_file] = context
            return context


class Swelling(ValueError):
    """A body that is larger than it may be once it is decompressed."""


@lru_cache(maxsize=1)
def library() -> Any:
    """The module that connects. Raises SourceUnavailable without httptools."""
    try:
        from gpuflight.sources import http_connection
    except ImportError:
        raise SourceUnavailable(
            "httptools is not installed", "other instances are pulled with it: pip install 'gpuflight[server]'"
        ) from None
    return http_connection


@lru_cache(maxsize=512)
def _head(token: str) -> bytes:
    lines = b"Accept: application/json\r\nAccept-Encoding: zstd, gzip\r\nUser-Agent: gpuflight\r\n"
    return lines + b"Authorization: Bearer %b\r\n" % _line(token) if token else lines


def _line(value: str) -> bytes:
    if "\r" in value or "\n" in value:
        raise ValueError("the value of a header must be one line")
    return value.encode("latin-1", "replace")


def decompress(data: bytes, encoding: str, max_bytes: int) -> bytes:
    """The body behind a Content-Encoding (gzip, zstd or none). Raises ValueError if it is of another kind, damaged or
    larger than ``max_bytes`` (Swelling): a small body that swells is refused before it fills the memory."""
    encoding = encoding.strip().lower()
    if not encoding or encoding == "identity":
        return data
    if encoding == "gzip":
        engine = zlib.decompressobj(wbits=31)
        body = engine.decompress(data, max_bytes + 1)
        complete = engine.eof
    elif encoding == "zstd" and 0 <= zstandard.frame_content_size(data) <= max_bytes:
        return zstandard.ZstdDecompressor().decompress(data)  # which says its size, and is held to it
    elif encoding == "zstd":
        parts: list[bytes] = []
        left = max_bytes + 1
        complete = True
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(data) as reader:
            while left > 0 and (part := reader.read(min(left, _CHUNK))):
                parts.append(part)
                left -= len(part)
        body = b"".join(parts)
    else:
        raise ValueError(f"an unknown compression: {encoding}")
    if len(body) > max_bytes:
        raise Swelling(f"the answer is larger than {max_bytes} bytes")
    if not complete:
        raise ValueError("the answer was cut off")
    return body
