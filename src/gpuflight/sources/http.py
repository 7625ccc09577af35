"""HTTP to other instances: one GET with a deadline for the whole of it, a validator, compression, and a size limit.

httpx does the work and is imported at the first request only; it belongs to the extra ``server``. Its transport is used
without the client around it, which would double the cost of a 304: no redirects are followed, and proxies and
credentials of the environment are not used, so a token goes to the host it is for and nowhere else.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import zstandard
from msgspec import Struct, field
from msgspec.structs import replace

from gpuflight.errors import SourceUnavailable
from gpuflight.sources.recording import Tape

if TYPE_CHECKING:
    import httpx

_KEPT_HEADERS = ("content-encoding", "content-type", "date", "etag", "retry-after", "server")
_CONNECTIONS_AT_MOST = 256
_CHUNK = 1 << 20


class Request(Struct, frozen=True):
    """What to ask for. ``token`` is sent as Bearer; ``etag`` of what the asker has already; ``ca_file`` replaces the
    system's certificate authorities."""

    url: str
    token: str = ""
    etag: str = ""
    timeout_s: float = 5.0
    max_bytes: int = 256 << 20
    ca_file: str = ""


class Answer(Struct):
    """What came back. ``body`` is decompressed. ``sent_ns`` and ``received_ns`` are this host's wall clock around the
    exchange up to the answer's headers. With ``error`` set there is no answer, and the text says why."""

    url: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    sent_ns: int = 0
    received_ns: int = 0
    wire_bytes: int = 0
    error: str = ""


class Http:
    """The client. ``get`` may be called by many threads at once.

    It is not taped itself, since it runs beside the rounds; ``taped`` is how what it brought enters a recording.
    """

    def __init__(self, tape: Tape | None = None) -> None:
        self._tape = tape
        self._clients: dict[str, httpx.HTTPTransport] = {}
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

        Raises SourceUnavailable if httpx is not installed.
        """
        client = self._client(request.ca_file)
        import httpx

        headers = {"Accept": "application/json", "Accept-Encoding": "zstd, gzip", "User-Agent": "gpuflight"}
        if request.token:
            headers["Authorization"] = f"Bearer {request.token}"
        if request.etag:
            headers["If-None-Match"] = request.etag
        answer = Answer(request.url, sent_ns=time.time_ns())
        deadline_s = time.monotonic() + request.timeout_s
        try:
            timeouts = dict.fromkeys(("connect", "read", "write", "pool"), request.timeout_s)
            asked = httpx.Request("GET", request.url, headers=headers, extensions={"timeout": timeouts})
            response = client.handle_request(asked)
            try:
                answer.received_ns = time.time_ns()
                answer.status = response.status_code
                answer.headers = {name: response.headers[name] for name in _KEPT_HEADERS if name in response.headers}
                assert isinstance(response.stream, httpx.SyncByteStream)  # noqa: S101 - of a transport that is not async
                raw = _read(response.stream, request.max_bytes, deadline_s)
            finally:
                response.close()
            answer.wire_bytes = len(raw)
            answer.body = decompress(raw, answer.headers.get("content-encoding", ""), request.max_bytes)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            answer.error = _words(error, request.timeout_s)
        except (OSError, ValueError, RuntimeError, zlib.error, zstandard.ZstdError) as error:
            answer.error = str(error) or type(error).__name__
        return answer

    def close(self) -> None:
        """Close all connections. May be called twice."""
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()

    def _client(self, ca_file: str) -> httpx.HTTPTransport:
        with self._lock:
            client = self._clients.get(ca_file)
            if client is None:
                try:
                    import httpx
                except ImportError:
                    raise SourceUnavailable(
                        "httpx is not installed", "other instances are pulled with it: pip install 'gpuflight[server]'"
                    ) from None
                verify: Any = True
                if ca_file:
                    import ssl

                    try:
                        verify = ssl.create_default_context(cafile=ca_file)
                    except OSError as error:
                        raise SourceUnavailable(f"the CA file {ca_file} cannot be used: {error.strerror}") from None
                limits = httpx.Limits(
                    max_connections=_CONNECTIONS_AT_MOST,
                    max_keepalive_connections=_CONNECTIONS_AT_MOST,
                    keepalive_expiry=120.0,
                )
                client = httpx.HTTPTransport(verify=verify, limits=limits, trust_env=False)
                self._clients[ca_file] = client
            return client


def decompress(data: bytes, encoding: str, max_bytes: int) -> bytes:
    """The body behind a Content-Encoding (gzip, zstd or none). Raises ValueError if it is of another kind, damaged or
    larger than ``max_bytes``: a small body that swells is refused before it fills the memory."""
    encoding = encoding.strip().lower()
    if not encoding or encoding == "identity":
        return data
    if encoding == "gzip":
        engine = zlib.decompressobj(wbits=31)
        body = engine.decompress(data, max_bytes + 1)
        complete = engine.eof
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
        raise ValueError(f"the answer is larger than {max_bytes} bytes")
    if not complete:
        raise ValueError("the answer was cut off")
    return body


def _read(chunks: Iterable[bytes], max_bytes: int, deadline_s: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    for part in chunks:
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            raise ValueError(f"the answer is larger than {max_bytes} bytes")
        if time.monotonic() > deadline_s:  # the client's own timeout begins anew with every byte
            raise ValueError("the answer took too long")
    return b"".join(parts)


def _words(error: Exception, timeout_s: float) -> str:
    text = str(error).strip().splitlines()
    name = type(error).__name__
    if name.endswith("Timeout"):
        return f"no answer within {timeout_s:g} s"
    return text[0] if text else name
